package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/server/internal/config"
)

// healthTimeout is for a server that does not answer; what it answers it knows already.
const healthTimeout = 3 * time.Second

func (p *program) health() *cobra.Command {
	c := &cobra.Command{
		Use:   "health",
		Short: "Ask the server on this machine whether it can take tokens",
		Long:  "Ask the server on this machine, by the settings that it has, whether it can take tokens. In a container this is the health check.",
		Args:  exactly(0),
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

// askHealth returns nil if the server answers that it is healthy.
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
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		var problem struct{ Title string }
		_ = json.NewDecoder(response.Body).Decode(&problem) // the status has said it
		return fmt.Errorf("not healthy: %s %s", response.Status, problem.Title)
	}
	return nil
}

// reachable is an address that listens, as one to connect to.
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
