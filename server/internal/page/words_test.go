package page

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
)

func TestWords(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 9_000_000_000_000: "9,000,000,000,000", -1: "−1", -150_000: "−150,000", -1 << 63: "−9,223,372,036,854,775,808"} {
		require.Equal(t, want, number(n))
	}
	for rate, want := range map[float64]string{0: "0", 0.2: "0.2", 3: "3", 9.96: "10", 0.02: "0", 10.4: "10", 12345.6: "12,346"} {
		require.Equal(t, want, perSecond(rate))
	}
	for d, want := range map[time.Duration]string{
		time.Microsecond: "< 1 ms", 430 * time.Millisecond: "430 ms", 1500 * time.Millisecond: "1.5 s", 12900 * time.Millisecond: "12 s",
		200 * time.Second: "3 min 20 s", time.Hour: "1 h", time.Hour + time.Second: "1 h", 36*time.Hour + time.Minute: "1 d 12 h",
		1<<63 - 1: "106,751 d 23 h",
	} {
		require.Equal(t, want, span(d), d)
	}
	for d, want := range map[time.Duration]string{
		time.Second: "1 s", 24 * time.Hour: "1 d", 90 * time.Minute: "1 h 30 min", 1500 * time.Microsecond: "1 ms 500 µs",
		24*time.Hour + time.Microsecond: "1 d 1 µs",
	} {
		require.Equal(t, want, interval(d), d)
	}
}

// What a name has that changes the text around it is shown as what it is.
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

// A time that never comes is not one that is over.
func TestUntil(t *testing.T) {
	t.Parallel()
	require.Equal(t, "never", until(nil))
	for d, want := range map[time.Duration]string{0: "now", time.Microsecond: "< 1 ms", 90 * time.Second: "1 min 30 s"} {
		s := jsonapi.Seconds(d)
		require.Equal(t, want, until(&s))
	}
}

func TestPlot(t *testing.T) {
	t.Parallel()
	p := plotOf(client.ResultDenied, nil)
	require.Equal(t, plot{Result: "denied", Title: "Denied", Now: "0", Peak: "0", Top: "1"}, p)

	rates := make([]float64, samples)
	rates[0], rates[samples-1] = 30, 40
	p = plotOf(client.ResultAllowed, rates)
	require.Equal(t, "40", p.Now)
	require.Equal(t, "50", p.Top)
	require.True(t, strings.HasPrefix(p.Line, "M0 25.6 L2 64 L4 64"), p.Line)
	require.True(t, strings.HasSuffix(p.Line, " L238 64 L240 12.8"), p.Line)
	require.Equal(t, p.Line+" V64 H0 Z", p.Area)
	require.Equal(t, "M238 0 L240 64", plotOf(client.ResultAllowed, []float64{1, 0}).Line, "the newest is at the right edge")

	for rate, want := range map[float64]float64{0: 1, 0.3: 1, 1: 1, 1.1: 2, 2: 2, 4: 5, 7: 10, 10: 10, 11: 20, 99_999: 100_000} {
		require.Equal(t, want, roundUp(rate), rate)
	}
}
