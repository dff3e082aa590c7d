package page

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

// The size of a plot, in the units of page.html.
const (
	plotWidth  = 240
	plotHeight = 64
)

// A plot shows the rates of one result.
type plot struct {
	Result    client.Result
	Title     string
	Now, Peak string
	Top       string // what the upper edge stands for
	Line      string // as SVG has it
	Area      string // below the line; both are empty without a rate
}

// plotOf draws rates from left to right. The newest rate is at the right edge.
func plotOf(result int, rates []float64) plot {
	var peak, now float64
	for _, now = range rates {
		peak = max(peak, now)
	}
	top := roundUp(peak)
	p := plot{Result: results[result].Result, Title: results[result].title, Now: perSecond(now), Peak: perSecond(peak), Top: perSecond(top)}
	if len(rates) < 2 {
		return p
	}
	const step = float64(plotWidth) / (samples - 1)
	left := plotWidth - step*float64(len(rates)-1)
	points := make([]string, len(rates))
	for i, rate := range rates {
		points[i] = fmt.Sprintf("%.1f %.1f", left+step*float64(i), plotHeight*(1-rate/top))
	}
	p.Line = "M" + strings.Join(points, " L")
	p.Area = fmt.Sprintf("%s V%d H%.1f Z", p.Line, plotHeight, left)
	return p
}

// roundUp returns the next 1, 2 or 5 with zeros, and at least 1.
func roundUp(rate float64) float64 {
	if rate <= 1 {
		return 1
	}
	unit := math.Pow(10, math.Floor(math.Log10(rate)))
	for _, n := range []float64{1, 2, 5} {
		if rate <= n*unit {
			return n * unit
		}
	}
	return 10 * unit
}

const (
	sampleEvery = 5 * time.Second                // the time between two points of a plot
	samples     = 120                            // the number of points: ten minutes
	minute      = int(time.Minute / sampleEvery) // the number of samples in a minute
)

// results have a plot each, in this order.
var results = [...]struct {
	client.Result
	title string
}{
	{client.ResultAllowed, "Allowed"}, {client.ResultDenied, "Denied"}, {client.ResultReplayed, "Replayed"}, {client.ResultShadowed, "Shadowed"},
	{client.ResultError, "Errors"},
}

// A tally counts requests by result.
type tally [len(results)]int64

// A history has the requests a second by result, over the last ten minutes.
type history struct {
	mu    sync.Mutex
	begun time.Time // of the sample that is being counted
	seen  tally
	rates [][len(results)]float64 // the oldest first
}

func (h *history) sample(now time.Time, counts tally) {
	h.mu.Lock()
	defer h.mu.Unlock()
	elapsed := now.Sub(h.begun)
	if elapsed <= 0 { // the clock was set back
		h.begun = now
		return
	}
	var rates [len(results)]float64
	for i := range results {
		rates[i] = float64(counts[i]-h.seen[i]) / elapsed.Seconds()
	}
	h.rates = append(h.rates, rates)
	h.rates = h.rates[max(0, len(h.rates)-samples):]
	h.seen, h.begun = counts, now
}

// of returns the rates of a result, the oldest first.
func (h *history) of(result int) []float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	rates := make([]float64, len(h.rates))
	for n := range rates {
		rates[n] = h.rates[n][result]
	}
	return rates
}

// errorShare returns the part of the last minute's requests that ended in an error.
func (h *history) errorShare() float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	var failed, all float64
	for _, rates := range h.rates[max(0, len(h.rates)-minute):] {
		for i, rate := range rates {
			all += rate
			if results[i].Result == client.ResultError {
				failed += rate
			}
		}
	}
	if all == 0 {
		return 0
	}
	return failed / all
}

// maxName is the longest name that is shown whole, in characters.
const maxName = 120

// name shortens a name, and quotes a name that is not printable.
func name(text string) string {
	shown := []rune(inspect.Printable(text))
	if len(shown) > maxName {
		return string(shown[:maxName]) + "…"
	}
	return string(shown)
}

// whole returns a name that name shortens, and nothing for other names.
func whole(text string) string {
	if text = inspect.Printable(text); utf8.RuneCountInString(text) > maxName {
		return text
	}
	return ""
}

// number groups digits by three.
func number(n int64) string {
	digits := strconv.FormatInt(n, 10)
	sign := ""
	if n < 0 {
		sign, digits = "−", digits[1:]
	}
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return sign + digits
}

// perSecond writes a rate, with a decimal below 10.
func perSecond(rate float64) string {
	if rate = math.Round(rate*10) / 10; rate < 10 && rate != math.Trunc(rate) {
		return strconv.FormatFloat(rate, 'f', 1, 64)
	}
	return number(int64(math.Round(rate)))
}

// interval writes a time exactly, as a policy file does.
func interval(d time.Duration) string { return policyfile.Span(d.Microseconds()).String() }

// span writes a time rounded down, to be read at a glance.
func span(d time.Duration) string {
	unit := time.Hour
	switch {
	case d < time.Millisecond:
		return "< 1ms"
	case d < time.Second:
		unit = time.Millisecond
	case d < 10*time.Second:
		unit = 100 * time.Millisecond
	case d < time.Hour:
		unit = time.Second
	case d < 24*time.Hour:
		unit = time.Minute
	}
	return interval(d.Truncate(unit))
}

// until writes a time of the database, of which nil is never.
func until(s *jsonapi.Seconds) string {
	switch {
	case s == nil:
		return "never"
	case *s == 0:
		return "now"
	}
	return span(time.Duration(*s))
}
