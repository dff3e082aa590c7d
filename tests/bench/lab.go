package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/procfs"

	"github.com/pgratelimit/pgratelimit/client"
)

// A lab has the servers, each started when it is first needed.
type lab struct {
	window       time.Duration
	snapshotHeld time.Duration // in the cells snapshot*
	pg           *postgres
	redis        map[bool]*redisServer // by whether each command is flushed
}

func (l *lab) postgres(ctx context.Context) *postgres {
	if l.pg == nil {
		l.pg = startPostgres(ctx)
	}
	return l.pg
}

func (l *lab) redisServer(ctx context.Context, flushed bool) *redisServer {
	if l.redis == nil {
		l.redis = map[bool]*redisServer{}
	}
	if l.redis[flushed] == nil {
		l.redis[flushed] = startRedis(ctx, flushed)
	}
	return l.redis[flushed]
}

func (l *lab) close() (err error) {
	for _, server := range l.redis {
		err = errors.Join(err, server.close())
	}
	if l.pg != nil {
		err = errors.Join(err, l.pg.Close())
	}
	l.pg, l.redis = nil, nil
	return err
}

// A stage is the place of an experiment in the lab, which the experiment leaves as it was.
type stage struct {
	*lab
	closers []func() error
}

func (s *stage) atEnd(closer func() error) { s.closers = append(s.closers, closer) }

func (s *stage) close() (err error) {
	for _, closer := range slices.Backward(s.closers) {
		err = errors.Join(err, closer())
	}
	return err
}

// database makes one with the package installed, and runs statements in it.
func (s *stage) database(ctx context.Context, name string, statements ...string) *postgres {
	pg := s.postgres(ctx)
	s.atEnd(func() error {
		return pg.exec(context.WithoutCancel(ctx), "", "drop database if exists "+name+" with (force)")
	})
	pg.database(ctx, name, statements...)
	return pg
}

// pool opens connections whose commits wait for the flush, or do not.
func (s *stage) pool(ctx context.Context, url string, flush bool, connections int32, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	pool := openPool(ctx, url, flush, connections, change...)
	s.atEnd(func() error { pool.Close(); return nil })
	return pool
}

func (s *stage) combiner(pool *pgxpool.Pool, opts ...client.Option) *client.Combiner {
	combiner := client.NewCombiner(pool, opts...)
	s.atEnd(func() error { combiner.Close(); return nil })
	return combiner
}

// An experiment is cells that are measured in turn, once in each round. Cells that are to be compared belong to one experiment, so
// that whatever else the machine does happens to all of them.
type experiment struct {
	cells []string
	open  func(ctx context.Context, s *stage, cells []string) measure // prepares for some of its cells
}

type measure func(ctx context.Context, cell string) (sample, error)

func (m measure) of(ctx context.Context, cell string) (s sample, err error) {
	defer caught(&err)
	return m(ctx, cell)
}

// must and check end what the benchmark does with the error that keeps it from going on, up to the function that has deferred caught.
func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func output(cmd *exec.Cmd) string {
	out, err := cmd.CombinedOutput()
	if err != nil {
		panic(failure{fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out)})
	}
	return string(out)
}

type failure struct{ error }

func caught(err *error) {
	switch f := recover().(type) {
	case nil:
	case failure:
		*err = f.error
	default:
		panic(f)
	}
}

type sample map[string]float64

// The metrics of a cell under load.
const (
	rate      = "rate"       // decisions per second
	p99       = "p99"        // microseconds
	cpuServer = "cpu_server" // microseconds per decision
	cpuClient = "cpu_client"
)

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
	defer caught(&err)
	note("preparing %s and so on", e.cells[0])
	measure := e.open(ctx, s, e.cells)
	for i, round := range rounds {
		for _, cell := range e.cells {
			if round[cell], err = measure.of(ctx, cell); err != nil {
				return fmt.Errorf("%s: %w", cell, err)
			}
			note("round %d of %d  %-34s %s", i+1, len(rounds), cell, round[cell])
		}
		slices.Reverse(e.cells) // what drifts within a round favours nobody
	}
	return nil
}

func (s sample) String() string {
	var figures []string
	for _, name := range slices.Sorted(maps.Keys(s)) {
		figures = append(figures, name+" "+figure(s[name]))
	}
	return strings.Join(figures, "  ")
}

func (l *lab) describe() map[string]string {
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	cores, _ := os.ReadFile("/proc/cpuinfo")
	_, processor, _ := strings.Cut(string(cores), "model name\t: ")
	processor, _, _ = strings.Cut(processor, "\n")
	machine := map[string]string{
		"machine": fmt.Sprintf("%d cores of %s, %.0f GB", runtime.NumCPU(), processor, float64(memory())/1024),
		"kernel":  "Linux " + strings.TrimSpace(string(kernel)),
		"Go":      runtime.Version(),
	}
	for _, server := range l.redis {
		machine["Redis"] = server.version + ", unix socket, go-redis' default of connections, no snapshots"
	}
	if l.pg != nil {
		machine["PostgreSQL"] = fmt.Sprintf("%s, unix socket, %d connections, %d where commits are flushed", l.pg.Version, connections, connectionsFlushed)
	}
	return machine
}

// cpuOwn returns the microseconds of CPU time that this process has used.
func cpuOwn() float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1000
}

// memory returns the machine's memory in megabytes.
func memory() int {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return 0
	}
	info, err := proc.Meminfo()
	if err != nil || info.MemTotalBytes == nil {
		return 0
	}
	return int(*info.MemTotalBytes >> 20)
}
