package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// An experiment is cells that are measured in turn, once in each round. Cells that are to be compared belong to one experiment, so
// that whatever else the machine does happens to all of them.
type experiment struct {
	cells []string
	open  func(ctx context.Context, s *stage, cells []string) (measure, error) // prepares for some of its cells
}

type measure func(ctx context.Context, cell string) (sample, error)

// A sample is what one run of a cell gave, by metric.
type sample map[string]float64

// The metrics of a cell under load.
const (
	rate      = "rate"       // decisions per second
	p99       = "p99"        // microseconds
	cpuServer = "cpu_server" // microseconds per decision
	cpuClient = "cpu_client"
)

// A round has the samples of one round by cell.
type round map[string]sample

func (r round) value(metric string) float64 {
	cell, name := splitMetric(metric)
	return r[cell][name]
}

// measureAll runs some of the cells, and tells on standard error what they gave.
func measureAll(ctx context.Context, l *lab, count int, chosen []string) ([]round, error) {
	begin, rounds := time.Now(), make([]round, count)
	for i := range rounds {
		rounds[i] = round{}
	}
	for _, e := range experiments {
		e.cells = slices.DeleteFunc(slices.Clone(e.cells), func(cell string) bool { return !slices.Contains(chosen, cell) })
		if len(e.cells) == 0 {
			continue
		}
		err := e.measure(ctx, l, rounds, func(format string, arguments ...any) {
			fmt.Fprintf(os.Stderr, "%6s  %s\n", time.Since(begin).Round(time.Second), fmt.Sprintf(format, arguments...))
		})
		if err != nil {
			return nil, err
		}
	}
	return rounds, nil
}

func (e experiment) measure(ctx context.Context, l *lab, rounds []round, note func(string, ...any)) (err error) {
	s := &stage{lab: l}
	defer func() { err = errors.Join(err, s.close()) }()
	note("preparing %s and so on", e.cells[0])
	measure, err := e.open(ctx, s, e.cells)
	if err != nil {
		return err
	}
	for i, round := range rounds {
		for _, cell := range e.cells {
			if round[cell], err = measure(ctx, cell); err != nil {
				return fmt.Errorf("%s: %w", cell, err)
			}
			note("round %d of %d  %-34s %s", i+1, len(rounds), cell, round[cell])
		}
		slices.Reverse(e.cells) // what drifts within a round favours nobody
	}
	return nil
}

// String has all metrics.
func (s sample) String() string {
	var figures []string
	for _, name := range slices.Sorted(maps.Keys(s)) {
		figures = append(figures, name+" "+figure(s[name]))
	}
	return strings.Join(figures, "  ")
}
