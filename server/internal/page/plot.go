package page

import (
	"math"
	"strconv"
	"strings"

	"github.com/pgratelimit/pgratelimit/client"
)

// The size of a plot, in units of its own, which page.html has, too.
const (
	plotWidth  = 240
	plotHeight = 64
)

// A plot is the rates of one result.
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

// plotOf draws rates from left to right, so that the newest is at the right edge.
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
	var line strings.Builder
	for i, rate := range rates {
		line.WriteString(" L")
		if i == 0 {
			line.Reset()
			line.WriteString("M")
		}
		line.WriteString(coordinate(left + step*float64(i)))
		line.WriteByte(' ')
		line.WriteString(coordinate(plotHeight * (1 - rate/top)))
	}
	p.Line = line.String()
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
