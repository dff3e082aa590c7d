// Package metrics counts calls with OpenTelemetry, and shows the counts to Prometheus.
package metrics

import (
	"context"
	"net/http"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"

	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// maxPolicies have counts of their own. A key never does: there are as many as callers like.
const maxPolicies = 1000

// otherPolicies are those that do not exist, and those beyond maxPolicies.
const otherPolicies = "_other"

// Metrics are the counts of one server.
type Metrics struct {
	provider *sdk.MeterProvider
	registry *prometheus.Registry

	requests metric.Int64Counter
	duration metric.Float64Histogram
	calls    metric.Int64Counter

	mu         sync.RWMutex
	policies   map[string]struct{}
	attributes map[attributes]metric.MeasurementOption // which are costly to make
}

// attributes are what a count is kept for; those that it is not kept for are empty.
type attributes struct{ policy, result, operation, code string }

// State is what is measured when somebody looks.
type State struct {
	CallsUnderWay                      func() int64
	ConnectionsInUse, ConnectionsTotal func() int64
}

// New returns Metrics.
func New(state State) (*Metrics, error) {
	m := &Metrics{
		registry:   prometheus.NewRegistry(),
		policies:   make(map[string]struct{}),
		attributes: make(map[attributes]metric.MeasurementOption),
	}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	reader, err := exporter.New(exporter.WithRegisterer(m.registry), exporter.WithoutScopeInfo(), exporter.WithoutTargetInfo())
	if err != nil {
		return nil, err
	}
	m.provider = sdk.NewMeterProvider(sdk.WithReader(reader), sdk.WithCardinalityLimit(0)) // the limits are here
	return m, m.instruments(m.provider.Meter("github.com/pgratelimit/pgratelimit/server"), state)
}

func (m *Metrics) instruments(meter metric.Meter, state State) (err error) {
	try := func(e error) {
		if err == nil {
			err = e
		}
	}
	var e error
	m.requests, e = meter.Int64Counter("ratelimit.requests", metric.WithUnit("{request}"),
		metric.WithDescription("Requests for tokens, by policy and result."))
	try(e)
	m.duration, e = meter.Float64Histogram("ratelimit.acquire.duration", metric.WithUnit("s"),
		metric.WithDescription("Time until a request for tokens was answered, by result."),
		metric.WithExplicitBucketBoundaries(.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5))
	try(e)
	m.calls, e = meter.Int64Counter("ratelimit.server.calls", metric.WithUnit("{call}"),
		metric.WithDescription("Calls of every kind, by operation and code: OK, or the reason of the error."))
	try(e)
	for name, gauge := range map[string]struct {
		description string
		value       func() int64
	}{
		"ratelimit.server.calls_under_way":    {"Calls that are not answered yet.", state.CallsUnderWay},
		"ratelimit.server.connections_in_use": {"Connections to the database that a call uses.", state.ConnectionsInUse},
		"ratelimit.server.connections":        {"Connections to the database.", state.ConnectionsTotal},
	} {
		_, e = meter.Int64ObservableGauge(name, metric.WithDescription(gauge.description),
			metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
				o.Observe(gauge.value())
				return nil
			}))
		try(e)
	}
	return err
}

// Observe counts a call.
func (m *Metrics) Observe(call service.Call) {
	ctx := context.Background()
	code := "OK"
	if call.Err != nil {
		code = call.Err.Kind.Reason()
	}
	m.calls.Add(ctx, 1, m.with(attributes{operation: string(call.Operation), code: code}))
	if call.Operation.Takes() {
		result := string(call.Result)
		m.requests.Add(ctx, 1, m.with(attributes{policy: m.policy(call), result: result}))
		m.duration.Record(ctx, call.Duration.Seconds(), m.with(attributes{result: result}))
	}
}

// policy is the attribute of a call. Only a decision proves that a policy exists.
func (m *Metrics) policy(call service.Call) string {
	m.mu.RLock()
	_, known := m.policies[call.Policy]
	count := len(m.policies)
	m.mu.RUnlock()
	if known {
		return call.Policy
	}
	if call.Err != nil || count >= maxPolicies {
		return otherPolicies
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.policies) >= maxPolicies {
		return otherPolicies
	}
	m.policies[call.Policy] = struct{}{}
	return call.Policy
}

func (m *Metrics) with(a attributes) metric.MeasurementOption {
	m.mu.RLock()
	option := m.attributes[a]
	m.mu.RUnlock()
	if option != nil {
		return option
	}
	var set []attribute.KeyValue
	for name, value := range map[string]string{"policy": a.policy, "result": a.result, "operation": a.operation, "code": a.code} {
		if value != "" {
			set = append(set, attribute.String(name, value))
		}
	}
	option = metric.WithAttributeSet(attribute.NewSet(set...))
	m.mu.Lock()
	defer m.mu.Unlock()
	m.attributes[a] = option
	return option
}

// Handler shows the counts to Prometheus.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// Close stops counting.
func (m *Metrics) Close(ctx context.Context) error { return m.provider.Shutdown(ctx) }
