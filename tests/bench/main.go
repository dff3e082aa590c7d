// Command bench measures pgratelimit beside redis_rate and others, and against the bare statements underneath. It starts a throw-away
// PostgreSQL and Redis on unix sockets and measures in rounds in which all take turns.
//
//	go run ./tests/bench                       everything, about forty minutes
//	go run ./tests/bench -only 'combined_*'    some cells and ratios, of measures.go
//
// make bench publishes: it measures everything and writes the figures of docs/performance.md. What the module lacks
// is got when it is needed: rate-limiter-flexible from npm, valgrind, Redis and python3-asyncpg by apt-get, Envoy's service by go.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

type options struct {
	only    string
	runs    int
	rounds  int
	window  time.Duration
	held    time.Duration
	results string
	name    string
	page    string
	record  string
	reason  string
	helper  string
}

func main() {
	var o options
	flag.StringVar(&o.only, "only", "", "measure only these cells and ratios: names or patterns, separated by commas")
	flag.IntVar(&o.runs, "runs", 1, "runs, each with servers of its own: above 1, figures are medians of theirs")
	flag.IntVar(&o.rounds, "rounds", 3, "rounds")
	flag.DurationVar(&o.window, "window", time.Second, "how long each cell runs in a round")
	flag.DurationVar(&o.held, "snapshot", time.Minute, "how long a snapshot is held in the cells snapshot*")
	flag.StringVar(&o.results, "results", "build", "directory of the figures")
	flag.StringVar(&o.name, "name", "bench", "what the files are called: bench and, for another processor, bench-…")
	flag.StringVar(&o.page, "page", "", "write the figures of this page anew, from all that -results has, and exit")
	flag.StringVar(&o.record, "record", "", "count the instructions of calls, write them into this file, and exit")
	flag.StringVar(&o.reason, "reason", "", "why some of them rose")
	flag.StringVar(&o.helper, "helper", "", "be a process of place processes, which asks this Redis or PostgreSQL")
	flag.Parse()

	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// No run is to go on for ever, whatever hangs.
const limitOfRun = 90 * time.Minute

func run(o options) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeoutCause(ctx, limitOfRun, fmt.Errorf("not done within %v", limitOfRun))
	defer cancel()
	defer caught(&err)

	if o.helper != "" {
		return help(ctx, o.helper, flag.Args())
	}
	if o.record != "" {
		return renewRecord(ctx, o.record, o.reason)
	}
	if o.page != "" {
		return rewritePage(o.page, o.results)
	}
	lab := &lab{window: o.window, snapshotHeld: o.held}
	defer func() { err = errors.Join(err, lab.close()) }()
	cells, chosen, err := choose(o.only)
	if err != nil {
		return err
	}
	var rounds, runs []round
	for range max(1, o.runs) {
		if err := lab.close(); err != nil { // so that each run has servers of its own
			return err
		}
		if rounds, err = measureAll(ctx, lab, o.rounds, cells); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
		runs = append(runs, medians(rounds))
	}
	if o.runs > 1 {
		rounds = runs
	}
	return newReport(lab, o, rounds, chosen).publish(o)
}
