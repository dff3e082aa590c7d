package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// An experiment is a set of cells that are measured in turn, once in each round. Cells that are to be
// compared belong to one experiment, so that whatever else the machine does happens to all of them.
type experiment interface {
	// cells names what it can measure.
	cells() []string
	// open prepares for some of its cells.
	open(ctx context.Context, cells []string) error
	run(ctx context.Context, cell string) (sample, error)
	// cost is about how long a run takes.
	cost() time.Duration
	close(ctx context.Context) error
}

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

// measureAll runs some of the cells.
func measureAll(ctx context.Context, count int, experiments []experiment, chosen []string) ([]round, error) {
	progress := progress{start: time.Now()}
	cells := make([][]string, len(experiments))
	for i, e := range experiments {
		cells[i] = slices.DeleteFunc(e.cells(), func(cell string) bool { return !slices.Contains(chosen, cell) })
		progress.left += time.Duration(count*len(cells[i])) * e.cost()
	}
	rounds := make([]round, count)
	for i := range rounds {
		rounds[i] = round{}
	}
	for i, e := range experiments {
		if len(cells[i]) == 0 {
			continue
		}
		if err := measureOne(ctx, e, cells[i], rounds, &progress); err != nil {
			return nil, err
		}
	}
	return rounds, nil
}

func measureOne(ctx context.Context, e experiment, cells []string, rounds []round, progress *progress) error {
	progress.note("preparing " + cells[0] + " and so on")
	err := e.open(ctx, cells)
	defer func() { _ = e.close(context.WithoutCancel(ctx)) }() // the server goes, too
	if err != nil {
		return err
	}
	for i, round := range rounds {
		for _, cell := range cells {
			if err := ctx.Err(); err != nil {
				return err
			}
			sample, err := e.run(ctx, cell)
			if err != nil {
				return fmt.Errorf("%s: %w", cell, err)
			}
			round[cell] = sample
			progress.left -= e.cost()
			progress.note(fmt.Sprintf("round %d of %d  %-34s %s", i+1, len(rounds), cell, sample))
		}
		slices.Reverse(cells) // what drifts within a round favours nobody
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

// progress tells on standard error what was done, and how much is left but for preparations.
type progress struct {
	start time.Time
	left  time.Duration
}

func (p *progress) note(what string) {
	fmt.Fprintf(os.Stderr, "%6s, %6s left  %s\n", time.Since(p.start).Round(time.Second), p.left.Round(time.Second), what)
}
