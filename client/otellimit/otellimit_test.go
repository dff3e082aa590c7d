package otellimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/client/otellimit"
)

func newMetrics(t *testing.T) (*otellimit.Metrics, *sdk.ManualReader) {
	reader := sdk.NewManualReader()
	m, err := otellimit.New(sdk.NewMeterProvider(sdk.WithReader(reader)))
	require.NoError(t, err)
	return m, reader
}

// collect returns the instruments by name.
func collect(t *testing.T, reader *sdk.ManualReader) map[string]metricdata.Metrics {
	var all metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &all))
	byName := map[string]metricdata.Metrics{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			byName[m.Name] = m
		}
	}
	return byName
}

// requests are the counts by "policy result".
func requests(t *testing.T, reader *sdk.ManualReader) map[string]int64 {
	counts := map[string]int64{}
	m, ok := collect(t, reader)["ratelimit.requests"]
	if !ok {
		return counts
	}
	for _, point := range m.Data.(metricdata.Sum[int64]).DataPoints {
		require.Equal(t, 2, point.Attributes.Len(), "policy and result, and nothing else")
		counts[value(point.Attributes, "policy")+" "+value(point.Attributes, "result")] = point.Value
	}
	return counts
}

func value(of attribute.Set, name attribute.Key) string {
	v, _ := of.Value(name)
	return v.AsString()
}

// histogram is that of a duration, by result.
func histogram(t *testing.T, reader *sdk.ManualReader, name string) map[string]metricdata.HistogramDataPoint[float64] {
	m := collect(t, reader)[name]
	require.Equal(t, "s", m.Unit)
	points := map[string]metricdata.HistogramDataPoint[float64]{}
	for _, point := range m.Data.(metricdata.Histogram[float64]).DataPoints {
		require.Equal(t, 1, point.Attributes.Len())
		points[value(point.Attributes, "result")] = point
	}
	return points
}

func newFake(t *testing.T, hooks client.Hooks) *clienttest.Fake {
	now := time.Now()
	fake := clienttest.New(func() time.Time { return now }, client.Observe(hooks))
	for _, p := range []client.Policy{
		{Name: "api", Capacity: 10, Refill: 1, Every: time.Second},
		{Name: "trial", Capacity: 1, Refill: 1, Every: time.Second, Shadow: client.Yes},
	} {
		require.NoError(t, fake.DefinePolicy(t.Context(), p))
	}
	return fake
}

// The client's own tests say which answers a hook gets.
func TestHooks_CountEveryResult(t *testing.T) {
	t.Parallel()
	m, reader := newMetrics(t)
	allowed := client.Decision{Allowed: true}
	for _, a := range []client.Answer{
		{Operation: "acquire", Policy: "api", Decision: allowed}, {Operation: "charge", Policy: "api", Decision: allowed},
		{Operation: "acquire", Policy: "api", Decision: client.Decision{Allowed: true, Replayed: true}},
		{Operation: "acquire", Policy: "api"},
		{Operation: "acquire", Policy: "api", Err: io.ErrUnexpectedEOF},
		{Operation: "acquire", Policy: "trial", Decision: client.Decision{Allowed: true, Shadowed: true}},
		{Operation: "acquire", Policy: "nobody", Err: client.ErrUnknownPolicy},
		{Operation: "acquire all", Err: client.ErrUnknownPolicy},                                                       // nobody knows the charge that failed
		{Operation: "peek", Policy: "api", Decision: allowed}, {Operation: "refund", Policy: "api", Decision: allowed}, // these ask for no tokens
	} {
		m.Hooks().Answered(t.Context(), a)
	}
	require.Equal(t, map[string]int64{
		"api allowed": 2, "api replayed": 1, "api denied": 1, "api error": 1, "trial shadowed": 1, "_other error": 2,
	}, requests(t, reader))
	durations := histogram(t, reader, "ratelimit.acquire.duration")
	require.Len(t, durations, 5)
	require.EqualValues(t, 2, durations["allowed"].Count)
	require.Equal(t, .0001, durations["allowed"].Bounds[0])
}

// Grants in advance are counted among the others, and by themselves.
func TestPrefetched_IsCountedByPolicy(t *testing.T) {
	t.Parallel()
	m, reader := newMetrics(t)
	d := client.Decision{Allowed: true, Estimated: true}
	m.Hooks().Answered(t.Context(), client.Answer{Operation: "acquire", Policy: "api", Decision: d})
	m.Hooks().Answered(t.Context(), client.Answer{Operation: "acquire", Policy: "api", Decision: client.Decision{Allowed: true}})
	m.HTTP(httptest.NewRequest(http.MethodGet, "/", nil), httplimit.Event{
		Outcome: httplimit.Allowed, Charges: []client.Charge{{Policy: "api"}}, Decision: client.JointDecision{Decision: d, Decisions: []client.Decision{d}},
	})
	require.Equal(t, map[string]int64{"api allowed": 3}, requests(t, reader))
	points := collect(t, reader)["ratelimit.prefetched"].Data.(metricdata.Sum[int64]).DataPoints
	require.Len(t, points, 1)
	require.EqualValues(t, 2, points[0].Value)
	require.Equal(t, attribute.NewSet(attribute.String("policy", "api")), points[0].Attributes)
}

func TestHooks_RecordWaits(t *testing.T) {
	t.Parallel()
	m, reader := newMetrics(t)
	hooks := m.Hooks()
	hooks.Waited(t.Context(), "line", 0, nil)
	hooks.Waited(t.Context(), "line", time.Second, nil)
	hooks.Waited(t.Context(), "line", time.Second/4, context.Canceled)
	waits := histogram(t, reader, "ratelimit.wait.duration")
	require.EqualValues(t, 2, waits["allowed"].Count)
	require.Equal(t, 1.0, waits["allowed"].Sum)
	require.Equal(t, 0.25, waits["error"].Sum)
}

// The middleware counts a request once, by what became of it.
func TestHTTP_CountsWhatBecameOfARequest(t *testing.T) {
	t.Parallel()
	m, reader := newMetrics(t)
	hooks := m.Hooks()
	hooks.Answered = nil
	fake := newFake(t, hooks)
	ask := func(failure httplimit.Failure, charges ...client.Charge) int {
		limit := httplimit.New(fake, func(*http.Request) []client.Charge { return charges }, failure, httplimit.Observe(m.HTTP))
		w := httptest.NewRecorder()
		handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
		limit(handler).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
		return w.Code
	}
	closed, open := httplimit.Closed(time.Minute), httplimit.Open(time.Minute)
	one := client.Charge{Policy: "api", Key: "a secret key"}
	require.Equal(t, http.StatusNoContent, ask(open, one, client.Charge{Policy: "trial", Key: "k"}))
	require.Equal(t, http.StatusTooManyRequests, ask(open, client.Charge{Policy: "api", Key: "k", Cost: client.Cost(11)}))
	require.Equal(t, http.StatusInternalServerError, ask(open, client.Charge{Policy: "nobody", Key: "k"}))
	require.Equal(t, http.StatusNoContent, ask(closed))
	fake.FailAll(errors.New("no database"))
	require.Equal(t, http.StatusNoContent, ask(open, one))
	require.Equal(t, http.StatusServiceUnavailable, ask(closed, one))
	require.Equal(t, map[string]int64{"api allowed": 1, "api denied": 1, "api fail_open": 1, "api error": 1, "_other error": 1}, requests(t, reader))
}

// Neither keys nor names that callers make up have series of their own, and of policies that exist a bound has.
func TestMetrics_HaveABoundedNumberOfSeries(t *testing.T) {
	t.Parallel()
	m, reader := newMetrics(t)
	fake := newFake(t, m.Hooks())
	var askers sync.WaitGroup
	for asker := range 10 {
		askers.Go(func() {
			for n := range 10_000 {
				_, _ = fake.Acquire(t.Context(), "api", fmt.Sprint("user ", asker, n))
			}
			for n := range 100 {
				_, _ = fake.Acquire(t.Context(), fmt.Sprint("made up ", asker, n), "k")
			}
		})
	}
	askers.Wait()
	require.Equal(t, map[string]int64{"api allowed": 100_000, "_other error": 1000}, requests(t, reader))

	for n := range 3000 {
		m.Count(t.Context(), fmt.Sprint("policy ", n), true, client.ResultAllowed, 0)
	}
	counts := requests(t, reader)
	require.Len(t, counts, 2+999+1, "api is the first of a thousand")
	require.EqualValues(t, 2001, counts["_other allowed"])
	m.Count(t.Context(), "policy 0", false, client.ResultError, 0)
	require.EqualValues(t, 1, requests(t, reader)["policy 0 error"], "one that was dropped is known")
}
