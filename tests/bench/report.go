package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"time"

	"golang.org/x/text/language"
	"golang.org/x/text/message"
)

// A report is what a run found out, and where. Figures are medians of the rounds, rounded to five digits.
type report struct {
	When    time.Time
	Runs    int // each with servers of its own
	Rounds  int // of each run
	Window  string
	Machine map[string]string
	Ratios  map[string]span   // by name
	Cells   map[string]sample // by name
}

// A span is a median of the rounds, the least and the most.
type span struct{ Median, From, To float64 }

func newReport(l *lab, o options, rounds []round, chosen []ratio) *report {
	r := &report{
		When: time.Now().UTC().Truncate(time.Second), Runs: o.runs, Rounds: o.rounds, Window: o.window.String(),
		Machine: l.describe(), Ratios: map[string]span{},
	}
	for _, c := range chosen {
		r.Ratios[c.name] = spanOf(rounds, func(r round) float64 { return r.value(c.over) / r.value(c.under) })
	}
	r.Cells = medians(rounds)
	return r
}

func medians(rounds []round) round {
	of := round{}
	for cell, metrics := range rounds[0] {
		of[cell] = sample{}
		for name := range metrics {
			of[cell][name] = spanOf(rounds, func(r round) float64 { return r[cell][name] }).Median
		}
	}
	return of
}

func spanOf(rounds []round, of func(round) float64) span {
	var values []float64
	for _, r := range rounds {
		values = append(values, of(r))
	}
	slices.Sort(values)
	n := len(values)
	return span{short((values[(n-1)/2] + values[n/2]) / 2), short(values[0]), short(values[n-1])}
}

// short keeps five digits, and all of a large number that are before its point.
func short(value float64) float64 {
	if math.Abs(value) >= 10_000 {
		return math.Round(value)
	}
	return roundTo(value, 5)
}

func (r *report) publish(o options) error {
	if err := r.write(o.results, o.name); err != nil {
		return err
	}
	for _, cell := range slices.Sorted(maps.Keys(r.Cells)) {
		fmt.Println(cell, r.Cells[cell])
	}
	for _, name := range slices.Sorted(maps.Keys(r.Ratios)) {
		s := r.Ratios[name]
		fmt.Println(name, figure(s.Median), "from", figure(s.From), "to", figure(s.To))
	}
	return nil
}

// inLine matches where JSON goes on with the same cell or ratio: each has one line in the file.
var inLine = regexp.MustCompile(`\n {6,}|\n {4}(})`)

func (r *report) write(dir, name string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	encoded, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	encoded = inLine.ReplaceAll(encoded, []byte(" $1"))
	return os.WriteFile(filepath.Join(dir, name+".json"), append(encoded, '\n'), 0o644)
}

// find returns the figure of a ratio, or of a metric as cell/name, if it was measured.
func (r *report) find(name string) (value float64, ok bool) {
	cell, metric := splitMetric(name)
	if value, ok = r.Cells[cell][metric]; ok {
		return value, ok
	}
	if s, ok := r.Ratios[cell]; ok {
		value, ok = map[string]float64{"from": s.From, "to": s.To}[metric]
		return value, ok
	}
	s, ok := r.Ratios[name]
	return s.Median, ok
}

// figure rounds to three digits that count, and keeps whole numbers whole.
func figure(value float64) string {
	if value == 0 || value >= 100 || value <= -100 {
		return strconv.FormatFloat(value, 'f', 0, 64)
	}
	return strconv.FormatFloat(roundTo(value, 3), 'f', -1, 64)
}

func roundTo(value float64, digits int) float64 {
	rounded, _ := strconv.ParseFloat(strconv.FormatFloat(value, 'e', digits-1, 64), 64)
	return rounded
}

func thousands(value float64) string {
	return message.NewPrinter(language.English).Sprintf("%.0f", value)
}
