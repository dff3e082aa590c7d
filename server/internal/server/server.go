// Package server is pgratelimit serve: it listens, answers calls, and stops without losing an answer.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/pgratelimit/pgratelimit/client"
	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/auth"
	"github.com/pgratelimit/pgratelimit/server/internal/config"
	"github.com/pgratelimit/pgratelimit/server/internal/envoy"
	"github.com/pgratelimit/pgratelimit/server/internal/grpcapi"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
	"github.com/pgratelimit/pgratelimit/server/internal/page"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

const (
	maxHeaderBytes   = 16 << 10
	streamWindow     = 64 << 10 // bytes of a stream that are received before they are read
	connectionWindow = 1 << 20
	arrival          = 5 * time.Second // of a connection's first bytes, and of a request's header
	lastMetrics      = 5 * time.Second // to send them to a collector when the server stops
	idle             = 5 * time.Minute // after which a connection without calls is closed
)

// A Server answers calls.
type Server struct {
	config    config.Config
	log       *slog.Logger
	databases *databases
	service   *service.Service
	envoy     *envoy.Service // nil for none
	metrics   *metrics.Metrics
	monitor   *monitor
	page      *page.Page // nil for none

	grpc                       *grpc.Server
	http                       *http.Server
	grpcListener, httpListener net.Listener // nil for none

	endLimiters func() // nil before there are some
	endMonitor  func()
	stopping    context.Context // ends when Stop begins
	beginStop   func()
	running     sync.WaitGroup
	failed      chan error // gets the error of a listener
}

// Start returns a Server that answers calls, or an error if the database does not answer or lacks what the configuration needs.
func Start(ctx context.Context, c config.Config, log *slog.Logger) (_ *Server, err error) {
	s := &Server{config: c, log: log, failed: make(chan error, 2)}
	s.stopping, s.beginStop = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.databases, err = openDatabases(ctx, c, log); err != nil {
		return nil, err
	}
	otlp, err := metrics.OTLP(ctx)
	if err != nil {
		return nil, err
	}
	if s.metrics, err = metrics.New(otlp...); err != nil {
		return nil, err
	}
	limiters, shardOf, end, err := s.databases.limiters(ctx, c, s.limiterOptions())
	if err != nil {
		return nil, err
	}
	s.endLimiters = end
	limits := s.limits()
	limits.ShardOf = shardOf
	calls := newCallLog(log, time.Now)
	s.service = service.New(limiters, limits, func(call service.Call) {
		s.metrics.Observe(call)
		calls.observe(call)
	})
	state := metrics.State{
		CallsUnderWay:    s.service.UnderWay,
		ConnectionsInUse: func() int64 { return s.databases.connections((*pgxpool.Stat).AcquiredConns) },
		ConnectionsTotal: func() int64 { return s.databases.connections((*pgxpool.Stat).TotalConns) },
	}
	if err := s.metrics.Watch(state); err != nil {
		return nil, err
	}
	services := []string{pb.RateLimiter_ServiceDesc.ServiceName}
	if c.EnvoyRules != "" {
		rules, err := s.readRules(ctx)
		if err != nil {
			return nil, err
		}
		s.envoy = envoy.New(s.service, rules)
		services = append(services, envoy.Name)
	}
	s.monitor = newMonitor(s.databases.check, log, services...)
	if c.StatusPage {
		s.page = page.New(s.databases.pools, page.State{
			State: state, Counts: s.metrics.Counts, Prefetches: len(c.Prefetches) > 0, Health: s.monitor.health, IsDown: s.databases.isDown,
		}, log, time.Now)
	}
	if err := s.listen(); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Server) limiterOptions() []client.Option {
	options := []client.Option{client.CallsInFlight(s.config.DatabaseCalls), client.Observe(s.metrics.Hooks())}
	if s.config.NoFlush {
		options = append(options, client.NoFlush())
	}
	if s.config.DenialCache {
		options = append(options, client.DenialCache())
	}
	for _, prefetch := range s.config.Prefetches {
		options = append(options, prefetch)
	}
	return options
}

// limits leaves some connections of each pool to shared calls.
func (s *Server) limits() service.Limits {
	connections := int(s.databases.pools[0].Config().MaxConns)
	return service.Limits{
		Calls:          s.config.MaxCalls,
		OwnConnections: max(1, min(connections/2, connections-s.config.SharedConnections())),
		Time:           s.config.CallTimeout,
		ReadTime:       s.readTime(),
	}
}

// readTime is the longest time until an answer is read.
func (s *Server) readTime() time.Duration { return 2 * (arrival + s.config.CallTimeout) }

func (s *Server) listen() error {
	c := s.config
	for _, l := range []struct {
		name, address string
		to            *net.Listener
	}{{"GRPC_ADDR", c.GRPCAddr, &s.grpcListener}, {"HTTP_ADDR", c.HTTPAddr, &s.httpListener}} {
		if l.address != "" {
			listener, err := net.Listen("tcp", l.address)
			if err != nil {
				return fmt.Errorf("%s: %w", l.name, err)
			}
			*l.to = listener
		}
	}
	watching, endMonitor := context.WithCancel(context.Background())
	s.endMonitor = endMonitor
	s.running.Go(func() { s.monitor.run(watching) })
	if s.page != nil {
		s.running.Go(func() { s.page.Run(watching) })
	}
	if s.grpcListener != nil {
		s.grpc = s.newGRPC()
		s.serve("gRPC", s.grpcListener, func() error { return s.grpc.Serve(grpcapi.Listen(s.grpcListener, s.service)) })
	}
	if s.httpListener != nil {
		s.http = s.newHTTP()
		s.serve("HTTP", s.httpListener, func() error {
			if c.TLS != nil {
				return s.http.ServeTLS(s.httpListener, "", "") // the certificate is in TLSConfig
			}
			return s.http.Serve(s.httpListener)
		})
	}
	return nil
}

func (s *Server) serve(protocol string, listener net.Listener, serve func() error) {
	address, isTLS, isGuarded := listener.Addr().(*net.TCPAddr), s.config.TLS != nil, len(s.config.Tokens) > 0
	s.log.Info("listening", "protocol", protocol, "address", address.String(), "tls", isTLS, "tokens", isGuarded)
	if !address.IP.IsLoopback() {
		if !isGuarded {
			s.log.Warn("whoever reaches this address can spend tokens: set TOKENS", "protocol", protocol)
		} else if !isTLS {
			s.log.Warn("bearer tokens travel in the clear: set TLS_CERT_FILE", "protocol", protocol)
		}
	}
	s.running.Go(func() {
		if err := serve(); err != nil && !errors.Is(err, http.ErrServerClosed) {
			s.failed <- fmt.Errorf("%s: %w", protocol, err)
		}
	})
}

func (s *Server) newGRPC() *grpc.Server {
	c := s.config
	tokens := grpcapi.Tokens{Calls: auth.New(c.Tokens...), Health: auth.New(c.MonitoringTokens...)}
	options := []grpc.ServerOption{
		tokens.Option(s.service),
		grpc.MaxRecvMsgSize(c.MaxMessageBytes),
		grpc.MaxConcurrentStreams(uint32(c.MaxStreams)),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.StaticStreamWindowSize(streamWindow),
		grpc.StaticConnWindowSize(connectionWindow),
		grpc.ConnectionTimeout(arrival),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: idle, Time: time.Minute}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
	if c.TLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(c.TLS.Clone())))
	}
	server := grpc.NewServer(append(options, grpcapi.BoundUnread(s.service)...)...)
	grpcapi.Register(server, s.service, s.stopping.Done())
	if s.envoy != nil {
		envoy.Register(server, s.envoy)
	}
	healthpb.RegisterHealthServer(server, s.monitor.grpc)
	reflection.Register(server)
	return server
}

func (s *Server) newHTTP() *http.Server {
	c := s.config
	calls := http.NewServeMux()
	jsonapi.Register(calls, s.service, int64(c.MaxMessageBytes))
	if s.envoy != nil {
		calls.Handle("/json", envoy.Handler(s.envoy, int64(c.MaxMessageBytes)))
	} else {
		calls.HandleFunc("/json", func(w http.ResponseWriter, _ *http.Request) {
			jsonapi.Problem{Title: "there is nothing here", Status: http.StatusNotFound, Detail: "The server has no rules for Envoy: set ENVOY_RULES."}.Write(w)
		})
	}
	local := func(next http.Handler) http.Handler { return next } // health tells strangers nothing, and the page sees to itself
	if len(c.Tokens) == 0 && s.httpListener.Addr().(*net.TCPAddr).IP.IsLoopback() {
		local = jsonapi.UnderNoName
	}
	all := http.NewServeMux()
	all.Handle("/", local(jsonapi.Guard(auth.New(c.Tokens...), jsonapi.Timeout(calls))))
	monitoring := auth.New(c.MonitoringTokens...)
	if s.page != nil {
		all.Handle("GET /{$}", page.Guard(auth.New(c.Tokens...), s.page))
	}
	all.HandleFunc("GET /livez", livez)
	all.Handle("GET /healthz", jsonapi.Guard(monitoring, http.HandlerFunc(s.monitor.healthz)))
	all.Handle("GET /metrics", local(jsonapi.Guard(monitoring, s.metrics.Handler())))

	sameOrigin := http.NewCrossOriginProtection() // a page in the browser of somebody who may call must not
	sameOrigin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		jsonapi.Problem{Title: "a browser sent this for another site", Status: http.StatusForbidden}.Refuse(w, r)
	}))
	server := &http.Server{
		Handler:           endAfterChunks(sameOrigin.Handler(all)),
		ReadHeaderTimeout: arrival,
		ReadTimeout:       arrival + c.CallTimeout,
		WriteTimeout:      s.readTime(),
		IdleTimeout:       idle,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          newConnectionLog(s.log),
		BaseContext:       func(net.Listener) context.Context { return jsonapi.Observed(s.service) },
	}
	if c.TLS != nil {
		server.TLSConfig = c.TLS.Clone()
	}
	return server
}

// endAfterChunks closes the connection after a request in chunks. Such a request may also have had a Content-Length, which net/http
// removes: a proxy that used it would read the next request elsewhere.
func endAfterChunks(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(r.TransferEncoding) > 0 {
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

// GRPCAddr returns the address of gRPC, or nil.
func (s *Server) GRPCAddr() net.Addr { return addr(s.grpcListener) }

// HTTPAddr returns the address of HTTP, or nil.
func (s *Server) HTTPAddr() net.Addr { return addr(s.httpListener) }

func addr(l net.Listener) net.Addr {
	if l == nil {
		return nil
	}
	return l.Addr()
}

// Run serves until ctx ends, and then stops.
func (s *Server) Run(ctx context.Context) error {
	var err error
	select {
	case <-ctx.Done():
	case err = <-s.failed:
	}
	return errors.Join(err, s.Stop())
}

// Stop refuses new calls, waits for calls under way, and closes everything. Calls that take longer than STOP_TIMEOUT get no answer,
// and Stop returns an error.
func (s *Server) Stop() error {
	s.log.Info("stopping", "calls_under_way", s.service.UnderWay())
	s.beginStop()
	s.endMonitor()
	s.monitor.stop()
	ctx, cancel := context.WithTimeout(context.Background(), s.config.StopTimeout)
	defer cancel()
	var lost atomic.Int64
	end := context.AfterFunc(ctx, func() {
		lost.Store(s.service.UnderWay()) // and not the connections of clients that keep theirs
		if s.grpc != nil {
			s.grpc.Stop()
		}
		if s.http != nil {
			s.http.Close()
		}
	})
	var stopping sync.WaitGroup
	if s.grpc != nil {
		stopping.Go(s.grpc.GracefulStop)
	}
	if s.http != nil {
		stopping.Go(func() { _ = s.http.Shutdown(ctx) }) // its error is that of ctx
	}
	stopping.Wait()
	end()
	s.close()
	s.log.Info("stopped")
	if n := lost.Load(); n > 0 {
		return fmt.Errorf("%d calls were not answered within STOP_TIMEOUT", n)
	}
	return nil
}

// close closes everything that was started, users before what they use.
func (s *Server) close() {
	for _, l := range []net.Listener{s.grpcListener, s.httpListener} {
		if l != nil {
			l.Close()
		}
	}
	s.running.Wait()
	if s.endLimiters != nil {
		s.endLimiters()
	}
	if s.metrics != nil {
		ctx, cancel := context.WithTimeout(context.Background(), lastMetrics)
		if err := s.metrics.Close(ctx); err != nil {
			s.log.Warn("the last metrics were not sent", "error", err)
		}
		cancel()
	}
	if s.databases != nil {
		s.databases.close()
	}
}

// readRules reads Envoy's rules and defines their policies.
func (s *Server) readRules(ctx context.Context) (*envoy.Rules, error) {
	rules, err := envoy.Read(s.config.EnvoyRules)
	if err == nil {
		err = s.databases.onEach(ctx, func(pool *pgxpool.Pool) error { return rules.Settle(ctx, pool) })
	}
	if err != nil {
		return nil, fmt.Errorf("ENVOY_RULES: %w", err)
	}
	s.log.Info("rules read", "path", s.config.EnvoyRules, "domains", rules.Domains(), "rules", rules.Count())
	return rules, nil
}

// Reload reads Envoy's rules again. After an error the server keeps its rules.
func (s *Server) Reload(ctx context.Context) error {
	if s.envoy == nil {
		s.log.Info("nothing to read again: ENVOY_RULES is not set")
		return nil
	}
	rules, err := s.readRules(ctx)
	if err != nil {
		s.log.Error("the rules stay as they are", "error", err)
		return err
	}
	s.envoy.Use(rules)
	return nil
}
