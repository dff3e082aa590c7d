package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel"

	"github.com/pgratelimit/pgratelimit/server/internal/config"
	"github.com/pgratelimit/pgratelimit/server/internal/server"
)

// gcPercent replaces the default of GOGC. The heap has a few megabytes: collecting it at 100 % takes a fifth of the CPU time of a request.
const gcPercent = 400

// gcMemory replaces the default of GOMEMLIMIT, in bytes: above it the heap is collected more often.
const gcMemory = 192 << 20

func (p *program) serve() *cobra.Command {
	c := &cobra.Command{
		Use:   "serve",
		Short: "Answer calls over gRPC and JSON",
		Long:  "Answer calls over gRPC and JSON, until SIGTERM or SIGINT. SIGHUP reads Envoy's rules again.\n\n" + settings(),
	}
	load := p.configured(c, true)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := load()
		if err != nil {
			return err
		}
		var handler slog.Handler = slog.NewTextHandler(c.ErrOrStderr(), nil)
		if p.json {
			handler = slog.NewJSONHandler(c.ErrOrStderr(), nil)
		}
		if os.Getenv("GOGC") == "" {
			debug.SetGCPercent(gcPercent)
		}
		if os.Getenv("GOMEMLIMIT") == "" {
			debug.SetMemoryLimit(gcMemory)
		}
		hangUps := make(chan os.Signal, 1) // one more says no more
		signal.Notify(hangUps, syscall.SIGHUP)
		defer signal.Stop(hangUps)
		log := slog.New(handler)
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("metrics were not sent", "error", err) }))
		s, err := server.Start(c.Context(), cfg, log)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(c.Context())
		var reloading sync.WaitGroup
		defer reloading.Wait()
		defer cancel()
		reloading.Go(func() { reload(ctx, s, hangUps) })
		return s.Run(ctx)
	}
	return c
}

// configured adds the flag --config, and returns a function that reads all settings. A command without a database gets a made-up URL.
func (p *program) configured(c *cobra.Command, usesDatabase bool) func() (config.Config, error) {
	path := c.Flags().String("config", "", "file of settings, one NAME=value a line; those of the environment come first")
	return func() (config.Config, error) {
		cfg, err := config.Load(*path, func(name string) (string, bool) {
			switch {
			case name == "DATABASE_URL" && !usesDatabase:
				return "postgres://unused", true
			case name == "SHARD_URLS" && !usesDatabase:
				return "", true
			case name == "DATABASE_URL" && p.databaseURL != "":
				return p.databaseURL, true
			case name == "SHARD_URLS" && p.databaseURL != "":
				return "", true
			}
			return os.LookupEnv(name)
		})
		if err = errors.Join(config.Misspelled(os.Environ()), err); err != nil {
			return cfg, usageError{err}
		}
		return cfg, nil
	}
}

func reload(ctx context.Context, s *server.Server, signals <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-signals:
			_ = s.Reload(ctx) // it has logged its error
		}
	}
}

func settings() string {
	return "Settings, of the environment or of the file that --config names:\n" + columns(func(table io.Writer) {
		for _, s := range config.Settings() {
			help := s.Help
			if s.Default != "" {
				help += " (default " + s.Default + ")"
			}
			fmt.Fprintf(table, "  %s\t%s\n", s.Name, help)
		}
	})
}

// healthTimeout is the longest wait for the server, which reports its last check at once.
const healthTimeout = 3 * time.Second

func (p *program) health() *cobra.Command {
	c := &cobra.Command{
		Use:   "health",
		Short: "Ask the server on this machine whether it can take tokens",
		Long:  "Ask the server on this machine, by the settings that it has, whether it can take tokens. In a container this is the health check.",
	}
	load := p.configured(c, false)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := load()
		if err != nil {
			return err
		}
		if cfg.HTTPAddr == "" {
			return usageError{errors.New("HTTP_ADDR is off: there is nobody to ask")}
		}
		if err := askHealth(c.Context(), cfg); err != nil {
			return err
		}
		return p.print(c, struct{}{}, "healthy")
	}
	return c
}

func askHealth(ctx context.Context, cfg config.Config) error {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true}
	scheme := "http"
	if cfg.TLS != nil {
		scheme = "https"
		transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} //nolint:gosec // this machine, by a name that no certificate has
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+reachable(cfg.HTTPAddr)+"/healthz", nil)
	if err != nil {
		return err
	}
	if len(cfg.MonitoringTokens) > 0 {
		request.Header.Set("Authorization", "Bearer "+cfg.MonitoringTokens[0])
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return fmt.Errorf("no server answers at HTTP_ADDR %s: %w", cfg.HTTPAddr, err)
	}
	defer response.Body.Close()
	var problem struct{ Title string }
	switch err := json.NewDecoder(response.Body).Decode(&problem); {
	case response.StatusCode == http.StatusOK:
		return nil
	case err != nil: // pgratelimit has a JSON object for each error
		return fmt.Errorf("another program answers at HTTP_ADDR %s: %s", cfg.HTTPAddr, response.Status)
	}
	return fmt.Errorf("not healthy: %s %s", response.Status, problem.Title)
}

// reachable converts an address to listen on into one to connect to.
func reachable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "localhost"
	}
	return net.JoinHostPort(host, port)
}
