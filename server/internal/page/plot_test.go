package page

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
)

var t0 = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

const allowed, denied, shadowed, failed = 0, 1, 3, 4

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

// No rate is divided by zero or less, and no count is lost.
func TestHistory_NoTimeIsNoSample(t *testing.T) {
	t.Parallel()
	for _, late := range []time.Duration{0, -time.Hour} {
		h := &history{begun: t0}
		h.sample(t0.Add(late), tally{allowed: 10})
		require.Empty(t, h.of(allowed))
		h.sample(t0.Add(late+5*time.Second), tally{allowed: 10})
		require.Equal(t, []float64{2}, h.of(allowed))
	}
}

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

func TestWords(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 9_000_000_000_000: "9,000,000,000,000", -1: "−1", -150_000: "−150,000", -1 << 63: "−9,223,372,036,854,775,808"} {
		require.Equal(t, want, number(n))
	}
	for rate, want := range map[float64]string{0: "0", 0.2: "0.2", 3: "3", 9.96: "10", 0.02: "0", 10.4: "10", 12345.6: "12,346"} {
		require.Equal(t, want, perSecond(rate))
	}
	for d, want := range map[time.Duration]string{
		time.Microsecond: "< 1ms", 430 * time.Millisecond: "430ms", 1580 * time.Millisecond: "1s500ms", 12900 * time.Millisecond: "12s",
		200 * time.Second: "3m20s", time.Hour: "1h", time.Hour + time.Second: "1h", 36*time.Hour + time.Minute: "1d12h", 1<<63 - 1: "106751d23h",
	} {
		require.Equal(t, want, span(d), d)
	}
	require.Equal(t, "1d1us", interval(24*time.Hour+time.Microsecond))
}

func TestName(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"user:42":                 "user:42",
		"gräfin@例え":               "gräfin@例え",
		"a\nb":                    `"a\nb"`,
		"\u0020a":                 `" a"`,
		"evil\u202etxt.exe":       `"evil\u202etxt.exe"`,
		"\x1b[31mred":             `"\x1b[31mred"`,
		"zero\u200bwidth":         `"zero\u200bwidth"`,
		strings.Repeat("k", 120):  strings.Repeat("k", 120),
		strings.Repeat("é", 200):  strings.Repeat("é", 120) + "…",
		strings.Repeat("\n", 512): `"` + strings.Repeat(`\n`, 59) + `\…`,
	} {
		require.Equal(t, want, name(text))
	}
}

func TestUntil(t *testing.T) {
	t.Parallel()
	require.Equal(t, "never", until(nil))
	for d, want := range map[time.Duration]string{0: "now", time.Microsecond: "< 1ms", 90 * time.Second: "1m30s"} {
		s := jsonapi.Seconds(d)
		require.Equal(t, want, until(&s))
	}
}

func TestPlot(t *testing.T) {
	t.Parallel()
	p := plotOf(denied, nil)
	require.Equal(t, plot{Result: "denied", Title: "Denied", Now: "0", Peak: "0", Top: "1"}, p)

	rates := make([]float64, samples)
	rates[0], rates[samples-1] = 30, 40
	p = plotOf(allowed, rates)
	require.Equal(t, "40", p.Now)
	require.Equal(t, "50", p.Top)
	require.True(t, strings.HasPrefix(p.Line, "M0.0 25.6 L2.0 64.0 L4.0 64.0"), p.Line)
	require.True(t, strings.HasSuffix(p.Line, " L238.0 64.0 L240.0 12.8"), p.Line)
	require.Equal(t, p.Line+" V64 H0.0 Z", p.Area)
	require.Equal(t, "M238.0 0.0 L240.0 64.0", plotOf(allowed, []float64{1, 0}).Line, "the newest is at the right edge")

	for rate, want := range map[float64]float64{0: 1, 0.3: 1, 1: 1, 1.1: 2, 2: 2, 4: 5, 7: 10, 10: 10, 11: 20, 99_999: 100_000} {
		require.Equal(t, want, roundUp(rate), rate)
	}
}
