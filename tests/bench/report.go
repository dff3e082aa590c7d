package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A report is what a run found out, and where.
type report struct {
	When     time.Time
	Note     string `json:",omitempty"` // what a reader of the page is to know
	Took     string
	Rounds   int
	Window   string
	Machine  map[string]string
	Settings map[string]string
	Measures []result
}

// A result is a measure with its values: one of each round, and their median.
type result struct {
	Name   string    `json:"name"`
	Value  float64   `json:"value"`
	Unit   string    `json:"unit"`
	Min    float64   `json:"min"`
	Max    float64   `json:"max"`
	Rounds []float64 `json:"rounds"`
	Floor  *float64  `json:"floor,omitempty"`
	Aim    *float64  `json:"aim,omitempty"`
	Met    string    `json:"met,omitempty"`

	most bool
}

func newReport(ctx context.Context, l *lab, o options, measures []measure, rounds []round, took time.Duration) (*report, error) {
	r := &report{
		When:   time.Now().UTC().Truncate(time.Second),
		Took:   took.Round(time.Second).String(),
		Rounds: o.rounds,
		Window: o.window.String(),
	}
	var err error
	if r.Machine, r.Settings, err = l.describe(ctx); err != nil {
		return nil, err
	}
	for _, m := range measures {
		r.Measures = append(r.Measures, newResult(m, m.values(rounds)))
	}
	return r, nil
}

func newResult(m measure, values []float64) result {
	r := result{
		Name:   m.name,
		Value:  median(values),
		Unit:   m.unit,
		Min:    slices.Min(values),
		Max:    slices.Max(values),
		Rounds: values,
	}
	if g := m.goal; g != nil {
		r.Floor, r.Aim, r.most = &g.floor, &g.aim, g.most
		switch {
		case g.met(r.Value, g.aim):
			r.Met = "aim"
		case g.met(r.Value, g.floor):
			r.Met = "floor"
		default:
			r.Met = "no"
		}
	}
	return r
}

// publish writes the files and prints one line for each measure.
func (r *report) publish(o options) error {
	for _, dir := range []string{o.build, o.results} {
		if dir == "" {
			continue
		}
		if err := r.write(dir, o.name); err != nil {
			return err
		}
	}
	for _, result := range slices.Backward(r.Measures) { // what matters most comes last
		fmt.Println(result)
	}
	return nil
}

// inMeasure matches where a line of JSON goes on with the same measure: each has one line in the file.
var inMeasure = regexp.MustCompile(`\n {6,}|\n {4}(})`)

func (r *report) write(dir, name string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	encoded, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	encoded = inMeasure.ReplaceAll(encoded, []byte(" $1"))
	return errors.Join(
		os.WriteFile(filepath.Join(dir, name+".json"), append(encoded, '\n'), 0o644),
		os.WriteFile(filepath.Join(dir, name+".md"), []byte(r.markdown()), 0o644),
		r.plots(dir, strings.TrimPrefix(name, "bench")))
}

// find returns the result of a name, nil when it was not measured.
func (r *report) find(name string) *result {
	for i := range r.Measures {
		if r.Measures[i].Name == name {
			return &r.Measures[i]
		}
	}
	return nil
}

// String is the line of a measure: name, value, unit, and what was asked of it.
func (r result) String() string {
	line := fmt.Sprintf("%s %s %s", r.Name, figure(r.Value), r.Unit)
	if r.Floor != nil {
		line += fmt.Sprintf("  (floor %s, aim %s: %s)", r.bound(*r.Floor), r.bound(*r.Aim), r.verdict())
	}
	return line
}

func (r result) bound(value float64) string {
	return map[bool]string{false: "≥ ", true: "≤ "}[r.most] + figure(value)
}

func (r result) verdict() string {
	return map[string]string{"aim": "aim met", "floor": "floor met", "no": "NOT MET"}[r.Met]
}

// figure rounds to three digits that count, and keeps whole numbers whole.
func figure(value float64) string {
	if value == 0 || value >= 100 || value <= -100 {
		return strconv.FormatFloat(value, 'f', 0, 64)
	}
	return strconv.FormatFloat(roundTo(value, 3), 'f', -1, 64)
}

func roundTo(value float64, digits int) float64 {
	text := strconv.FormatFloat(value, 'e', digits-1, 64)
	rounded, err := strconv.ParseFloat(text, 64)
	return cmp.Or(map[bool]float64{true: rounded}[err == nil], value)
}
