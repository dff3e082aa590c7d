package page

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
)

var t0 = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

const (
	allowed = iota
	denied
	_
	shadowed
	failed
)

func TestHistory_IsRates(t *testing.T) {
	t.Parallel()
	h := &history{begun: t0}
	require.Empty(t, h.of(allowed))
	h.sample(t0.Add(5*time.Second), tally{allowed: 50, denied: 5})
	h.sample(t0.Add(10*time.Second), tally{allowed: 50, denied: 5})
	h.sample(t0.Add(20*time.Second), tally{allowed: 80, denied: 5}) // late
	require.Equal(t, []float64{10, 0, 3}, h.of(allowed))
	require.Equal(t, []float64{1, 0, 0}, h.of(denied))
}

// When the clock steps back, nothing is divided by what is left of the time.
func TestHistory_TheClockStepsBack(t *testing.T) {
	t.Parallel()
	h := &history{begun: t0}
	h.sample(t0.Add(-time.Hour), tally{allowed: 10})
	require.Empty(t, h.of(allowed))
	h.sample(t0.Add(5*time.Second-time.Hour), tally{allowed: 10})
	require.Equal(t, []float64{2}, h.of(allowed))
}

// Two samples at one instant are one: nothing is divided by no time, and nothing that was counted is lost.
func TestHistory_NoTimeIsNoSample(t *testing.T) {
	t.Parallel()
	h := &history{begun: t0}
	h.sample(t0.Add(5*time.Second), tally{})
	h.sample(t0.Add(5*time.Second), tally{allowed: 10})
	require.Equal(t, []float64{0}, h.of(allowed))
	h.sample(t0.Add(10*time.Second), tally{allowed: 10})
	require.Equal(t, []float64{0, 2}, h.of(allowed))
}

// Errors are those of the last minute, and of no request they are none.
func TestHistory_ErrorShareIsOfTheLastMinute(t *testing.T) {
	t.Parallel()
	h := &history{begun: t0}
	require.Zero(t, h.errorShare())
	counts, now := tally{}, t0
	minute := func(add tally) float64 {
		for range 12 {
			for i := range counts {
				counts[i] += add[i]
			}
			now = now.Add(5 * time.Second)
			h.sample(now, counts)
		}
		return h.errorShare()
	}
	require.InDelta(t, 0.25, minute(tally{allowed: 25, denied: 50, failed: 25}), 1e-9)
	require.Zero(t, minute(tally{allowed: 1}))
	require.Zero(t, minute(tally{}))
}

// It keeps the last ten minutes, however long it runs.
func TestHistory_IsBounded(t *testing.T) {
	t.Parallel()
	h, counts := &history{begun: t0}, tally{}
	for n := 1; n <= 10_000; n++ {
		counts[allowed] += int64(n % 7)
		h.sample(t0.Add(time.Duration(n)*time.Second), counts)
	}
	rates := h.of(allowed)
	require.Len(t, rates, samples)
	for i, rate := range rates {
		require.EqualValues(t, (10_000-samples+1+i)%7, rate)
	}
	require.Equal(t, 10*time.Minute, samples*sampleEvery)
}

func TestPage_SamplesByItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		requests := map[string]map[client.Result]int64{
			"api": {client.ResultAllowed: 20, client.ResultDenied: 5}, "other": {client.ResultAllowed: 30}, "_other": {"no_rule": 7},
		}
		p := New(nil, State{Counts: func() metrics.Counts { return metrics.Counts{Requests: requests} }}, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go p.Run(ctx)
		time.Sleep(2 * sampleEvery)
		synctest.Wait()
		require.Equal(t, []float64{10, 0}, p.history.of(allowed))
		require.Equal(t, []float64{1, 0}, p.history.of(denied))
	})
}
