package page

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

var t0 = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

const (
	allowed = iota
	denied
)

func count(h *History, result client.Result, n int) {
	for range n {
		h.Count(result)
	}
}

func TestHistory_IsRates(t *testing.T) {
	t.Parallel()
	h := NewHistory(t0)
	require.Empty(t, h.of(allowed))
	count(h, client.ResultAllowed, 50)
	count(h, client.ResultDenied, 5)
	h.Sample(t0.Add(5 * time.Second))
	h.Sample(t0.Add(10 * time.Second))
	count(h, client.ResultAllowed, 30)
	h.Sample(t0.Add(20 * time.Second)) // late
	require.Equal(t, []float64{10, 0, 3}, h.of(allowed))
	require.Equal(t, []float64{1, 0, 0}, h.of(denied))
	count(h, client.ResultFailOpen, 5) // has no plot, and is not a server's
	h.Sample(t0.Add(25 * time.Second))
	for i := range results {
		require.Zero(t, h.of(i)[3])
	}
}

// When the clock steps back, nothing is divided by what is left of the time.
func TestHistory_TheClockStepsBack(t *testing.T) {
	t.Parallel()
	h := NewHistory(t0)
	count(h, client.ResultAllowed, 10)
	h.Sample(t0.Add(-time.Hour))
	require.Empty(t, h.of(allowed))
	h.Sample(t0.Add(5*time.Second - time.Hour))
	require.Equal(t, []float64{2}, h.of(allowed))
}

// Two samples at one instant are one: nothing is divided by no time, and nothing that was counted is lost.
func TestHistory_NoTimeIsNoSample(t *testing.T) {
	t.Parallel()
	h := NewHistory(t0)
	h.Sample(t0.Add(5 * time.Second))
	count(h, client.ResultAllowed, 10)
	h.Sample(t0.Add(5 * time.Second))
	require.Equal(t, []float64{0}, h.of(allowed))
	h.Sample(t0.Add(10 * time.Second))
	require.Equal(t, []float64{0, 2}, h.of(allowed))
}

// It keeps the last ten minutes, however long it runs.
func TestHistory_IsBounded(t *testing.T) {
	t.Parallel()
	h := NewHistory(t0)
	for n := 1; n <= 10_000; n++ {
		count(h, client.ResultAllowed, n%7)
		h.Sample(t0.Add(time.Duration(n) * time.Second))
	}
	rates := h.of(allowed)
	require.Len(t, rates, samples)
	for i, rate := range rates {
		require.EqualValues(t, (10_000-samples+1+i)%7, rate)
	}
	require.Equal(t, 10*time.Minute, samples*sampleEvery)
}

func TestHistory_CountsWhatHappensAtOnce(t *testing.T) {
	t.Parallel()
	h := NewHistory(t0)
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() { count(h, client.ResultAllowed, 1000) })
	}
	callers.Go(func() {
		for n := range 100 {
			h.Sample(t0.Add(time.Duration(n+1) * time.Second))
		}
	})
	callers.Wait()
	h.Sample(t0.Add(101 * time.Second))
	var sum float64
	for _, rate := range h.of(allowed) {
		sum += rate
	}
	require.EqualValues(t, 8000, sum)
}

func TestPage_SamplesByItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := New(NewHistory(time.Now()), nil, State{}, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go p.Run(ctx)
		synctest.Wait()
		count(p.history, client.ResultAllowed, 50)
		time.Sleep(2 * sampleEvery)
		synctest.Wait()
		require.Equal(t, []float64{10, 0}, p.history.of(allowed))
	})
}
