// Package metrics counts calls with OpenTelemetry, for Prometheus and for a collector.
package metrics

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/otellimit"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// Metrics are the counts of one server.
type Metrics struct {
	provider *sdk.MeterProvider
	registry *prometheus.Registry

	requests *otellimit.Metrics // those for tokens
	calls    metric.Int64Counter

	outcomes sync.Map // of outcome to []metric.AddOption, because attributes are costly to make
}

type outcome struct{ operation, code string }

// State has functions that are called for each scrape.
type State struct {
	CallsUnderWay                      func() int64
	ConnectionsInUse, ConnectionsTotal func() int64
}

// New returns Metrics. Prometheus reads them; options add other readers, such as [OTLP].
func New(options ...sdk.Option) (*Metrics, error) {
	m := &Metrics{registry: prometheus.NewRegistry()}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	reader, err := exporter.New(exporter.WithRegisterer(m.registry), exporter.WithoutScopeInfo(), exporter.WithoutTargetInfo())
	if err != nil {
		return nil, err
	}
	// otellimit bounds the policies. Operations and codes are few.
	m.provider = sdk.NewMeterProvider(append(options, sdk.WithReader(reader), sdk.WithCardinalityLimit(0))...)
	if m.requests, err = otellimit.New(m.provider); err != nil {
		return nil, err
	}
	m.calls, err = m.meter().Int64Counter("ratelimit.server.calls", metric.WithUnit("{call}"),
		metric.WithDescription("Calls of every kind, by operation and code: OK, or the reason of the error."))
	if err != nil {
		return nil, err
	}
	return m, nil
}

func (m *Metrics) meter() metric.Meter {
	return m.provider.Meter("github.com/pgratelimit/pgratelimit/server")
}

// Watch adds the gauges of state.
func (m *Metrics) Watch(state State) error {
	for name, gauge := range map[string]struct {
		description string
		value       func() int64
	}{
		"ratelimit.server.calls_under_way":    {"Calls that are not answered yet.", state.CallsUnderWay},
		"ratelimit.server.connections_in_use": {"Connections to the database that a call uses.", state.ConnectionsInUse},
		"ratelimit.server.connections":        {"Connections to the database.", state.ConnectionsTotal},
	} {
		_, err := m.meter().Int64ObservableGauge(name, metric.WithDescription(gauge.description),
			metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
				o.Observe(gauge.value())
				return nil
			}))
		if err != nil {
			return err
		}
	}
	return nil
}

// Hooks returns hooks for the Combiner. Its requests are counted as calls of the server.
func (m *Metrics) Hooks() client.Hooks {
	hooks := m.requests.Hooks()
	hooks.Answered = nil
	return hooks
}

// Observe counts a call.
func (m *Metrics) Observe(call service.Call) {
	ctx := context.Background()
	code := "OK"
	if call.Err != nil {
		code = call.Err.Kind.Reason
	}
	m.calls.Add(ctx, 1, m.of(outcome{operation: string(call.Operation), code: code})...)
	if takes(call.Operation) && call.Result != "" {
		exists := call.Err == nil && call.Result != service.NoRule
		m.requests.Count(ctx, call.Policy, exists, call.Result, call.Duration) // only a decision proves that there is such a policy
	}
	if call.Prefetched {
		m.requests.CountPrefetched(ctx, call.Policy)
	}
}

// takes reports whether a call asks for tokens or slots.
func takes(o service.Operation) bool {
	switch o {
	case service.Settle, service.SettleAll, service.Peek, service.Refund, service.Pause, service.Renew, service.Release:
		return false
	}
	return true
}

func (m *Metrics) of(o outcome) []metric.AddOption {
	options, isKnown := m.outcomes.Load(o)
	if !isKnown {
		set := attribute.NewSet(attribute.String("operation", o.operation), attribute.String("code", o.code))
		options, _ = m.outcomes.LoadOrStore(o, []metric.AddOption{metric.WithAttributeSet(set)})
	}
	return options.([]metric.AddOption)
}

// Counts has the requests for tokens so far.
type Counts struct {
	Requests   map[string]map[client.Result]int64 // by policy
	Prefetched int64                              // those of them that were granted in advance
}

// Counts reads the counters.
func (m *Metrics) Counts() Counts {
	c := Counts{Requests: make(map[string]map[client.Result]int64)}
	families, _ := m.registry.Gather() // what can be read, as for Prometheus
	for _, family := range families {
		for _, series := range family.GetMetric() {
			n, label := int64(series.GetCounter().GetValue()), make(map[string]string)
			for _, l := range series.GetLabel() {
				label[l.GetName()] = l.GetValue()
			}
			switch policy := label["policy"]; family.GetName() {
			case "ratelimit_requests_total":
				if c.Requests[policy] == nil {
					c.Requests[policy] = make(map[client.Result]int64)
				}
				c.Requests[policy][client.Result(label["result"])] += n
			case "ratelimit_prefetched_total":
				c.Prefetched += n
			}
		}
	}
	return c
}

// Handler serves the counts to Prometheus.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// Close stops counting, and sends the last counts by OTLP, until ctx ends.
func (m *Metrics) Close(ctx context.Context) error { return m.provider.Shutdown(ctx) }

// OTLP returns the options that send metrics to a collector, by the standard environment variables. It returns none unless a
// variable names an endpoint, or OTEL_METRICS_EXPORTER is otlp. The SDK reads the variables for headers, interval and certificates.
func OTLP(ctx context.Context) ([]sdk.Option, error) {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return nil, nil
	}
	var hasEndpoint bool
	for _, name := range []string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"} {
		endpoint := os.Getenv(name)
		if endpoint == "" {
			continue
		}
		hasEndpoint = true
		// The SDK would ignore a wrong URL and use localhost.
		if u, err := url.Parse(endpoint); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return nil, fmt.Errorf("%s: %q is no URL such as http://collector:4318", name, endpoint)
		}
	}
	switch exporters := os.Getenv("OTEL_METRICS_EXPORTER"); {
	case exporters == "none", exporters == "" && !hasEndpoint:
		return nil, nil
	case exporters != "" && exporters != "otlp":
		return nil, fmt.Errorf("OTEL_METRICS_EXPORTER: %q is neither otlp nor none", exporters)
	}
	var exporter sdk.Exporter
	var err error
	switch protocol := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"), os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"), "http/protobuf"); protocol {
	case "http/protobuf":
		exporter, err = otlpmetrichttp.New(ctx)
	case "grpc":
		exporter, err = otlpmetricgrpc.New(ctx)
	default:
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL: %q is neither http/protobuf nor grpc", protocol)
	}
	if err != nil {
		return nil, fmt.Errorf("OTLP: %w", err)
	}
	who, err := resource.New(ctx,
		resource.WithTelemetrySDK(),
		resource.WithAttributes(attribute.String("service.name", "pgratelimit"), attribute.String("service.instance.id", rand.Text())),
		resource.WithFromEnv(), // so that it has the last word
	)
	if err != nil {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	return []sdk.Option{sdk.WithResource(who), sdk.WithReader(sdk.NewPeriodicReader(exporter))}, nil
}
