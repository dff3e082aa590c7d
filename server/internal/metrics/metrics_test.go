package metrics_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

func newMetrics(t *testing.T) *metrics.Metrics {
	t.Helper()
	zero := func() int64 { return 0 }
	m, err := metrics.New(metrics.State{CallsUnderWay: zero, ConnectionsInUse: zero, ConnectionsTotal: zero})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close(t.Context())) })
	return m
}

// series are the lines of a metric.
func series(t *testing.T, m *metrics.Metrics, name string) (lines []string) {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	require.Equal(t, 200, w.Code)
	for line := range strings.Lines(w.Body.String()) {
		if strings.HasPrefix(line, name+"{") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// Names that callers make up have no series of their own, and neither has more than a bound of those that exist.
func TestMetrics_HaveABoundedNumberOfSeries(t *testing.T) {
	t.Parallel()
	m := newMetrics(t)
	unknown := &service.Error{Kind: service.UnknownPolicy}
	for i := range 1000 {
		m.Observe(service.Call{Operation: service.Acquire, Policy: fmt.Sprint("made up ", i), Result: service.Failed, Err: unknown})
	}
	require.Equal(t, []string{`ratelimit_requests_total{policy="_other",result="error"} 1000`}, series(t, m, "ratelimit_requests_total"))

	for i := range 3000 {
		m.Observe(service.Call{Operation: service.Acquire, Policy: fmt.Sprint("policy ", i), Result: service.Allowed})
	}
	lines := series(t, m, "ratelimit_requests_total")
	require.Len(t, lines, 1002)
	require.Contains(t, lines, `ratelimit_requests_total{policy="_other",result="allowed"} 2000`)
	require.Contains(t, lines, `ratelimit_requests_total{policy="policy 0",result="allowed"} 1`)
	m.Observe(service.Call{Operation: service.Acquire, Policy: "policy 0", Result: service.Failed, Err: unknown})
	require.Contains(t, series(t, m, "ratelimit_requests_total"), `ratelimit_requests_total{policy="policy 0",result="error"} 1`, "one that was dropped is known")
	require.Len(t, series(t, m, "ratelimit_acquire_duration_seconds_count"), 2)
}

// A policy may have any name that PostgreSQL can hold.
func TestMetrics_OddNames(t *testing.T) {
	t.Parallel()
	m := newMetrics(t)
	m.Observe(service.Call{Operation: service.Charge, Policy: "a \"b\"\n\\ é", Result: service.Denied})
	require.Equal(t, []string{`ratelimit_requests_total{policy="a \"b\"\n\\ é",result="denied"} 1`}, series(t, m, "ratelimit_requests_total"))
}

func TestMetrics_WhatIsNoRequestForTokens(t *testing.T) {
	t.Parallel()
	m := newMetrics(t)
	for _, operation := range []service.Operation{service.Peek, service.Settle, service.Refund} {
		m.Observe(service.Call{Operation: operation, Policy: "api", Result: service.Allowed, Duration: time.Millisecond})
	}
	require.Empty(t, series(t, m, "ratelimit_requests_total"))
	require.Len(t, series(t, m, "ratelimit_server_calls_total"), 3)
}
