package metrics_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

func newMetrics(t *testing.T) *metrics.Metrics {
	m := kit.NoError(metrics.New())(t)
	t.Cleanup(func() { require.NoError(t, m.Close(t.Context())) })
	return m
}

// scrape reads what Prometheus would.
func scrape(m *metrics.Metrics) string {
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return w.Body.String()
}

func series(m *metrics.Metrics, name string) (lines []string) {
	for line := range strings.Lines(scrape(m)) {
		if strings.HasPrefix(line, name+"{") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// What a caller names is a policy if a decision has proven it. All other names share one series.
func TestMetrics_UnknownPoliciesShareOneSeries(t *testing.T) {
	t.Parallel()
	m := newMetrics(t)
	for i, kind := range []*service.Kind{service.UnknownPolicy, service.Unavailable, service.InvalidArgument, service.Overloaded} {
		m.Observe(service.Call{Operation: service.Acquire, Policy: fmt.Sprint("policy ", i), Result: client.ResultError, Err: &service.Error{Kind: kind}})
	}
	require.Equal(t, []string{`ratelimit_requests_total{policy="_other",result="error"} 4`}, series(m, "ratelimit_requests_total"))
}

// Also beyond 2000 series, where the SDK would stop by itself.
func TestMetrics_EachResultOfAPolicyIsCounted(t *testing.T) {
	t.Parallel()
	m := newMetrics(t)
	results := []client.Result{client.ResultAllowed, client.ResultDenied, client.ResultReplayed, client.ResultShadowed, client.ResultError}
	for i := range 1000 {
		for _, result := range results {
			m.Observe(service.Call{Operation: service.Acquire, Policy: fmt.Sprint("policy ", i), Result: result})
		}
	}
	require.Len(t, series(m, "ratelimit_requests_total"), 5000)
}

// These tests set the environment, and so run before the others.

// It is off unless it is asked for. The variable for metrics comes before that of all signals.
func TestOTLP_Variables(t *testing.T) {
	const endpoint = "http://127.0.0.1:1"
	for name, test := range map[string]struct {
		settings map[string]string
		mistake  string // empty for none
		isOn     bool
	}{
		"nothing":                          {},
		"an endpoint, and no exporter":     {settings: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_METRICS_EXPORTER": "none"}},
		"an endpoint, and off in any case": {settings: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_SDK_DISABLED": "TRUE"}},
		"another exporter":                 {map[string]string{"OTEL_METRICS_EXPORTER": "console"}, `OTEL_METRICS_EXPORTER: "console"`, false},
		"another protocol": {map[string]string{"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
			`OTEL_EXPORTER_OTLP_PROTOCOL: "http/json"`, false},
		"an endpoint that is no URL":       {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, `OTEL_EXPORTER_OTLP_ENDPOINT: "collector:4318"`, false},
		"the protocol of metrics is wrong": {map[string]string{"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, `"http/json" is neither`, false},
		"that of the rest is wrong":        {map[string]string{"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "", true},
		"the endpoint of metrics is wrong": {map[string]string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "collector:4318", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT: "collector:4318"`, false},
	} {
		t.Run(name, func(t *testing.T) {
			for variable, value := range test.settings {
				t.Setenv(variable, value)
			}
			options, err := metrics.OTLP(t.Context())
			if test.mistake != "" {
				require.ErrorContains(t, err, test.mistake)
				return
			}
			require.NoError(t, err)
			require.Equal(t, test.isOn, options != nil)
		})
	}
}
