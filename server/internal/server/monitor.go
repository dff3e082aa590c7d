package server

import (
	"bytes"
	"context"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// checkEvery is the interval of health checks. Requests for the health get the result of the last check.
const checkEvery = time.Second

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

// mostLines is how many different lines a log writes in an interval. Callers choose the names in some.
const mostLines = 100

// A seldom log writes a line once in each interval, and tells when there are too many.
type seldom struct {
	log   *slog.Logger
	level slog.Level
	every time.Duration

	mu      sync.Mutex
	begun   time.Time
	written map[string]bool // in this interval
}

// write writes a message with facts, which are names and values in turns.
func (s *seldom) write(now time.Time, message string, facts ...any) {
	line := fmt.Sprintf("%q", facts)
	s.mu.Lock()
	if since := now.Sub(s.begun); since < 0 || since >= s.every {
		s.begun, s.written = now, map[string]bool{}
	}
	isNew, isLast := !s.written[line] && len(s.written) < mostLines, false
	if isNew {
		s.written[line] = true
		isLast = len(s.written) == mostLines
	}
	s.mu.Unlock()
	if !isNew {
		return
	}
	if isLast {
		message += "; no more are logged before " + s.begun.Add(s.every).UTC().Format(time.TimeOnly)
	}
	s.log.Log(context.Background(), s.level, message, facts...)
}

// A callLog logs what callers learn little of: errors of the server and its database, requests that match no rule, unknown
// policies, and wrong tokens. Each line is logged once in its interval. The metrics count all.
type callLog struct {
	now                                 func() time.Time
	faults, unmatched, unknown, refused seldom
}

func newCallLog(log *slog.Logger, now func() time.Time) *callLog {
	return &callLog{
		now:       now,
		faults:    seldom{log: log, level: slog.LevelError, every: time.Second},
		unmatched: seldom{log: log, level: slog.LevelWarn, every: time.Minute},
		unknown:   seldom{log: log, level: slog.LevelWarn, every: time.Minute},
		refused:   seldom{log: log, level: slog.LevelWarn, every: time.Minute},
	}
}

func (l *callLog) observe(call service.Call) {
	switch err := call.Err; {
	case call.Result == service.NoRule:
		l.unmatched.write(l.now(), "no rule is about a request, which has passed", "domain", clip(call.Domain), "keys", clip(call.Keys))
	case err == nil:
	case err.Kind == service.Unauthenticated:
		l.refused.write(l.now(), "a call is refused: it has no token that the server knows", "operation", call.Operation, "from", call.From)
	case err.Kind == service.UnknownPolicy:
		l.unknown.write(l.now(), "a request is for a policy that is not there", "detail", clip(err.Detail))
	case err.Kind.Status >= http.StatusInternalServerError:
		cause := ""
		if err.Unwrap() != nil {
			cause = err.Unwrap().Error()
		}
		facts := []any{"operation", call.Operation, "reason", err.Kind.Reason, "sqlstate", err.SQLState, "error", cause}
		if remedy := err.Remedy(); remedy != "" {
			facts = append(facts, "remedy", remedy)
		}
		l.faults.write(l.now(), "call failed", facts...)
	}
}

// clip shortens a text of a caller, which could fill the log.
func clip(text string) string {
	const most = 200
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// A connectionLog receives the log of package http. Connection errors are logged at Debug, panics at Error.
type connectionLog struct{ log *slog.Logger }

func newConnectionLog(to *slog.Logger) *log.Logger { return log.New(connectionLog{to}, "", 0) }

func (c connectionLog) Write(p []byte) (int, error) {
	tell := c.log.Debug
	if bytes.HasPrefix(p, []byte("http: panic serving ")) {
		tell = c.log.Error
	}
	tell(string(bytes.TrimSpace(p)))
	return len(p), nil
}
