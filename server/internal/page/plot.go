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

var titles = map[client.Result]string{
	client.ResultAllowed:  "Allowed",
	client.ResultDenied:   "Denied",
	client.ResultReplayed: "Replayed",
	client.ResultShadowed: "Shadowed",
	client.ResultError:    "Errors",
}

// plotOf draws rates from left to right. The newest rate is at the right edge.
func plotOf(result client.Result, rates []float64) plot {
	p := plot{Result: result, Title: titles[result], Now: "0"}
	var peak float64
	for _, rate := range rates {
		peak = max(peak, rate)
	}
	if len(rates) > 0 {
		p.Now = perSecond(rates[len(rates)-1])
	}
	top := roundUp(peak)
	p.Peak, p.Top = perSecond(peak), perSecond(top)
	if len(rates) < 2 {
		return p
	}
	const step = float64(plotWidth) / (samples - 1)
	left := plotWidth - step*float64(len(rates)-1)
	points := make([]string, len(rates))
	for i, rate := range rates {
		points[i] = coordinate(left+step*float64(i)) + " " + coordinate(plotHeight*(1-rate/top))
	}
	p.Line = "M" + strings.Join(points, " L")
	p.Area = p.Line + " V" + strconv.Itoa(plotHeight) + " H" + coordinate(left) + " Z"
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

func coordinate(x float64) string {
	return strings.TrimSuffix(strconv.FormatFloat(x, 'f', 1, 64), ".0")
}

const (
	// sampleEvery is the time between two points of a plot.
	sampleEvery = 5 * time.Second

	// samples is the number of points: ten minutes.
	samples = 120

	// minute is the number of samples in a minute.
	minute = int(time.Minute / sampleEvery)
)

// results have a plot each, in this order.
var results = [...]client.Result{
	client.ResultAllowed, client.ResultDenied, client.ResultReplayed, client.ResultShadowed, client.ResultError,
}

// A tally counts requests by result.
type tally [len(results)]int64

// A history has the requests a second by result, over the last ten minutes.
type history struct {
	mu    sync.Mutex
	begun time.Time // of the sample that is being counted
	seen  tally
	rates [samples][len(results)]float64 // a ring
	taken int                            // so many samples, ever
}

// sample adds a sample that ends now.
func (h *history) sample(now time.Time, counts tally) {
	h.mu.Lock()
	defer h.mu.Unlock()
	elapsed := now.Sub(h.begun)
	if elapsed <= 0 { // the clock was set back
		h.begun = now
		return
	}
	rates := &h.rates[h.taken%samples]
	for i := range results {
		rates[i] = float64(counts[i]-h.seen[i]) / elapsed.Seconds()
	}
	h.seen, h.begun = counts, now
	h.taken++
}

// of returns the rates of a result, the oldest first.
func (h *history) of(result int) []float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	var rates []float64
	for n := max(0, h.taken-samples); n < h.taken; n++ {
		rates = append(rates, h.rates[n%samples][result])
	}
	return rates
}

// errorShare returns the part of the last minute's requests that ended in an error.
func (h *history) errorShare() float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	var failed, all float64
	for n := max(0, h.taken-minute); n < h.taken; n++ {
		for i, rate := range h.rates[n%samples] {
			all += rate
			if results[i] == client.ResultError {
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

var units = []struct {
	length time.Duration
	name   string
}{
	{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "min"}, {time.Second, "s"}, {time.Millisecond, "ms"}, {time.Microsecond, "µs"},
}

// interval writes a time exactly.
func interval(d time.Duration) string { return inUnits(d, len(units)) }

// span writes a time rounded, to be read at a glance.
func span(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return "< 1 ms"
	case d < time.Second:
		return inUnits(d, 1)
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Minute:
		return inUnits(d, 1)
	}
	return inUnits(d, 2)
}

// inUnits writes a time in at most so many units, the largest first.
func inUnits(d time.Duration, atMost int) string {
	var parts []string
	for _, u := range units {
		if n := d / u.length; n > 0 {
			parts = append(parts, number(int64(n))+" "+u.name)
			d %= u.length
		}
		if len(parts) > 0 {
			atMost--
		}
		if atMost == 0 {
			break
		}
	}
	return strings.Join(parts, " ")
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
