package server

import (
	"context"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
)

// checkEvery is the interval of health checks. Requests for the health get the result of the last check.
const checkEvery = time.Second

// A monitor checks whether the databases can be used.
type monitor struct {
	check func(context.Context) error
	log   *slog.Logger
	grpc  *health.Server
	names []string              // of its services
	fault atomic.Pointer[error] // nil without one

	stopping atomic.Bool
}

func newMonitor(check func(context.Context) error, log *slog.Logger, names ...string) *monitor {
	m := &monitor{check: check, log: log, grpc: health.NewServer(), names: append(names, "")}
	m.set(nil)
	return m
}

func (m *monitor) run(ctx context.Context) {
	ticker := time.NewTicker(checkEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		checking, cancel := context.WithTimeout(ctx, checkEvery)
		err := m.check(checking)
		cancel()
		if ctx.Err() == nil {
			m.found(err)
		}
	}
}

func (m *monitor) found(err error) {
	before := m.fault.Load()
	switch {
	case err != nil && before == nil:
		m.log.Warn("not healthy", "error", err)
	case err == nil && before != nil:
		m.log.Info("healthy again")
	}
	m.set(err)
}

func (m *monitor) set(err error) {
	status, fault := healthpb.HealthCheckResponse_SERVING, (*error)(nil)
	if err != nil {
		status, fault = healthpb.HealthCheckResponse_NOT_SERVING, &err
	}
	m.fault.Store(fault)
	for _, name := range m.names {
		m.grpc.SetServingStatus(name, status)
	}
}

// stop reports from now on that the server is stopping.
func (m *monitor) stop() {
	m.stopping.Store(true)
	m.grpc.Shutdown()
}

// health returns what is wrong, in a few words, or nothing. The log has the details.
func (m *monitor) health() string {
	switch {
	case m.stopping.Load():
		return "the server is stopping"
	case m.fault.Load() != nil:
		return "the database cannot be used"
	}
	return ""
}

// healthz responds with 200, or with 503 and what is wrong.
func (m *monitor) healthz(w http.ResponseWriter, _ *http.Request) {
	if wrong := m.health(); wrong != "" {
		jsonapi.Problem{Title: wrong, Status: http.StatusServiceUnavailable}.Write(w)
		return
	}
	livez(w, nil)
}

// livez responds as long as the process runs.
func livez(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write([]byte("ok\n")) // an error here means that the client has hung up
}
