// Package otellimit counts with OpenTelemetry what limiters of pgratelimit do.
//
//	metrics, err := otellimit.New(otel.GetMeterProvider())
//	limiter := client.NewCombiner(pool, client.Observe(metrics.Hooks()))
//
// The instruments:
//
//   - ratelimit.requests counts requests for tokens, by policy and result: allowed, denied, replayed, shadowed, error or
//     fail_open
//   - ratelimit.prefetched counts those that were granted from the stock of a [client.Prefetcher], by policy
//   - ratelimit.acquire.duration is how long their callers waited for the answer, in seconds, by result
//   - ratelimit.wait.duration is how long [client.Limiter.Wait] has slept, in seconds, by result: allowed, or error if its ctx
//     ended first
//   - ratelimit.combiner.batch_size is how many requests shared a call of a [client.Combiner]
//
// A key is never an attribute. A policy that does not exist is _other, and so are those beyond the first 1,000: so there are
// never more than 6,006 series of requests. The SDK has a limit of its own, 2,000 of each instrument unless a program
// chooses another.
//
// # Middleware
//
// fail_open is a request that had no answer and was let pass, which only the middleware knows. So where there is middleware,
// it counts the requests, and the limiter does not count them again:
//
//	hooks := metrics.Hooks()
//	hooks.Answered = nil
//	limiter := client.NewCombiner(pool, client.Observe(hooks))
//	limit := httplimit.New(limiter, charges, httplimit.Open(timeout), httplimit.Observe(metrics.HTTP))
package otellimit

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

const (
	// maxPolicies have series of their own.
	maxPolicies = 1000

	// otherPolicies are those that do not exist, and those beyond maxPolicies.
	otherPolicies = "_other"
)

// Metrics are instruments. Their methods are safe for concurrent use.
type Metrics struct {
	requests   metric.Int64Counter
	prefetched metric.Int64Counter
	duration   metric.Float64Histogram
	waits      metric.Float64Histogram
	batchSize  metric.Int64Histogram

	mu       sync.RWMutex
	policies map[string]struct{}    // that exist, and otherPolicies
	series   map[attributes]*series // because attributes are costly to make
}

type attributes struct {
	policy string
	result client.Result
}

// A series is what is recorded of a request.
type series struct {
	add    []metric.AddOption    // policy and result
	policy []metric.AddOption    // the policy alone
	record []metric.RecordOption // the result alone
}

// New returns Metrics that record to a provider, under the name of this package.
func New(provider metric.MeterProvider) (*Metrics, error) {
	m := &Metrics{policies: map[string]struct{}{otherPolicies: {}}, series: make(map[attributes]*series)}
	meter := provider.Meter("github.com/pgratelimit/pgratelimit/client/otellimit")
	var errs [5]error
	m.requests, errs[0] = meter.Int64Counter("ratelimit.requests", metric.WithUnit("{request}"),
		metric.WithDescription("Requests for tokens, by policy and result."))
	m.prefetched, errs[1] = meter.Int64Counter("ratelimit.prefetched", metric.WithUnit("{request}"),
		metric.WithDescription("Requests that were granted from the stock, by policy."))
	m.duration, errs[2] = meter.Float64Histogram("ratelimit.acquire.duration", metric.WithUnit("s"),
		metric.WithDescription("Time until a request for tokens was answered, by result."),
		metric.WithExplicitBucketBoundaries(.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5))
	m.waits, errs[3] = meter.Float64Histogram("ratelimit.wait.duration", metric.WithUnit("s"),
		metric.WithDescription("Time that callers of Wait have slept, by result: allowed, or error if their context ended first."),
		metric.WithExplicitBucketBoundaries(0, .001, .01, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600))
	m.batchSize, errs[4] = meter.Int64Histogram("ratelimit.combiner.batch_size", metric.WithUnit("{request}"),
		metric.WithDescription("Requests that shared a call to the database."),
		metric.WithExplicitBucketBoundaries(1, 2, 4, 8, 16, 32, 64, 128, 256))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	return m, nil
}

// Hooks are for [client.Observe]. They may be those of several limiters.
func (m *Metrics) Hooks() client.Hooks {
	return client.Hooks{
		Answered: func(ctx context.Context, a client.Answer) {
			if a.Takes() {
				m.Count(ctx, a.Policy, a.Err == nil, a.Result(), a.Duration)
			}
			if a.Decision.Estimated {
				m.CountPrefetched(ctx, a.Policy)
			}
		},
		Waited: func(ctx context.Context, _ string, slept time.Duration, err error) {
			result := client.ResultAllowed
			if err != nil {
				result = client.ResultError
			}
			m.waits.Record(ctx, slept.Seconds(), option(attribute.String("result", string(result))))
		},
		Combined: func(requests int) { m.batchSize.Record(context.Background(), int64(requests)) },
	}
}

// HTTP is for [httplimit.Observe]. See the package for the hooks of the limiter.
func (m *Metrics) HTTP(r *http.Request, e httplimit.Event) {
	var policy string
	if len(e.Charges) == 1 {
		policy = e.Charges[0].Policy
	}
	result := client.ResultError
	switch e.Outcome {
	case httplimit.Allowed, httplimit.Denied:
		policy = e.Charges[e.Decision.Binding].Policy
		result = client.Answer{Decision: e.Decision.Decision}.Result()
	case httplimit.FailedOpen:
		result = client.ResultFailOpen
	}
	m.Count(r.Context(), policy, e.Outcome == httplimit.Allowed || e.Outcome == httplimit.Denied, result, e.Duration)
	if e.Decision.Estimated {
		m.CountPrefetched(r.Context(), policy)
	}
}

// Count records a request for tokens that no hook has seen. exists is true if it is known that there is such a policy, as
// after a decision.
func (m *Metrics) Count(ctx context.Context, policy string, exists bool, result client.Result, duration time.Duration) {
	s := m.of(policy, exists, result)
	m.requests.Add(ctx, 1, s.add...)
	m.duration.Record(ctx, duration.Seconds(), s.record...)
}

// CountPrefetched records that a request which was counted was granted from the stock of a [client.Prefetcher].
func (m *Metrics) CountPrefetched(ctx context.Context, policy string) {
	m.prefetched.Add(ctx, 1, m.of(policy, true, client.ResultAllowed).policy...)
}

// of returns the series of a policy and a result.
func (m *Metrics) of(policy string, exists bool, result client.Result) *series {
	m.mu.RLock()
	policy = m.name(policy, exists)
	s := m.series[attributes{policy, result}]
	m.mu.RUnlock()
	if s != nil {
		return s
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	policy = strings.Clone(m.name(policy, exists)) // it may be a part of something large
	m.policies[policy] = struct{}{}
	s = &series{
		add:    []metric.AddOption{option(attribute.String("policy", policy), attribute.String("result", string(result)))},
		policy: []metric.AddOption{option(attribute.String("policy", policy))},
		record: []metric.RecordOption{option(attribute.String("result", string(result)))},
	}
	m.series[attributes{policy, result}] = s
	return s
}

// name is what a policy is called in the metrics: its own name if it was seen to exist, while there is room.
func (m *Metrics) name(policy string, exists bool) string {
	if _, known := m.policies[policy]; known || exists && len(m.policies) <= maxPolicies {
		return policy
	}
	return otherPolicies
}

func option(of ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(of...))
}
