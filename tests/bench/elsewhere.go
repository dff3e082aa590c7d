package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/client"
)

// elsewhere is callers in processes of their own. Each process reads a line of JSON for each run, and answers with one.
type elsewhere []*process

type process struct {
	cmd     *exec.Cmd
	orders  io.WriteCloser
	answers *bufio.Scanner
	log     strings.Builder
}

// A task is one run: so many callers ask for keys, by the name of the keyspace, and those answered after the warm-up are counted.
type task struct {
	Callers int
	Keys    string
	Warm    float64 // seconds
	Window  float64 // seconds
}

type tale struct {
	Count float64 // of answers
	Error string
}

// openElsewhere measures cells place/limiter/keys/callers. The limiters of npm and of Python each run in one process, those of place
// processes in four, as programs behind a load balancer do.
func openElsewhere(ctx context.Context, s *stage, cells []string) measure {
	place, _, _ := strings.Cut(cells[0], "/")
	setUp := definePolicies()
	if place == "processes" {
		setUp = definePrefetchedPolicies()
	}
	pg := s.database(ctx, place, setUp...)
	socket := pg.socket(place)
	ways := map[string]elsewhere{}
	for _, cell := range cells {
		part := loadCell.FindStringSubmatch(cell)
		if ways[part[1]] != nil {
			continue
		}
		limiter := filepath.Base(part[1])
		processes, command := s.command(ctx, place, limiter)
		way := must(start(ctx, processes, append(command, limiter, socket, place, strconv.Itoa(connections/processes))...))
		s.atEnd(way.close)
		if limiter == "rate-limiter-flexible" { // every key has a row, as the buckets have
			check(pg.exec(ctx, place, fmt.Sprintf("insert into flexible select 'flexible:%s' || i, 1, (extract(epoch from now()) + 86400) * 1000"+
				" from generate_series(1, %d) as i", userPrefix, manyKeys), "vacuum analyze"))
		}
		ways[part[1]] = way
		must(way.run(ctx, 64, part[2], s.window)) // a moment that does not count
	}
	return func(ctx context.Context, cell string) (sample, error) {
		part := loadCell.FindStringSubmatch(cell)
		callers, _ := strconv.Atoi(part[3])
		return ways[part[1]].run(ctx, callers, part[2], s.window)
	}
}

// command returns how many processes a limiter has, and what is before its name, the folder of the socket, the database and connections.
func (s *stage) command(ctx context.Context, place, limiter string) (processes int, command []string) {
	switch place {
	case "processes":
		executable := must(os.Executable())
		address := "-"
		if limiter == "redis" {
			address = s.redisServer(ctx, false).Options().Addr
		}
		return 4, []string{executable, "-helper", address}
	case "npm":
		root := repository(ctx)
		output(exec.CommandContext(ctx, "make", "-C", root, "tests/bench/node/node_modules"))
		return 1, []string{"node", filepath.Join(root, "tests/bench/node/opponents.mjs")}
	default:
		const run = `export PYTHONPATH=client/python; cd "$0"
			for python in python3 /usr/bin/python3; do $python -c 'import asyncpg' && exec $python tests/bench/python/limiters.py "$@"; done; exit 1`
		return 1, []string{"sh", "-c", run, repository(ctx)}
	}
}

func repository(ctx context.Context) string {
	list := must(exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", "github.com/pgratelimit/pgratelimit/tests/bench").Output())
	return filepath.Join(strings.TrimSpace(string(list)), "../..")
}

func help(ctx context.Context, redisAddress string, arguments []string) error {
	limiter, socket, database := arguments[0], arguments[1], arguments[2]
	if limiter == "redis" {
		rdb := redis.NewClient(&redis.Options{Network: "unix", Addr: redisAddress})
		defer rdb.Close()
		return obey(ctx, redisRate(rdb))
	}
	count := must(strconv.Atoi(arguments[3]))
	pool := openPool(ctx, "host="+socket+" user=postgres dbname="+database, false, int32(count))
	defer pool.Close()
	switch limiter {
	case "plain":
		return obey(ctx, pgratelimit(client.New(pool)))
	case "combined":
		combiner := client.NewCombiner(pool)
		defer combiner.Close()
		return obey(ctx, pgratelimit(combiner))
	case "prefetcher":
		prefetcher := client.NewPrefetcher(pool, client.Prefetch{Policy: "durable"})
		defer prefetcher.Close()
		return obey(ctx, pgratelimit(prefetcher))
	default:
		return fmt.Errorf("no limiter %q", limiter)
	}
}

// start starts so many processes of a command, whose first line says that they are ready.
func start(ctx context.Context, count int, command ...string) (e elsewhere, err error) {
	for range count {
		p := &process{cmd: exec.Command(command[0], command[1:]...)} // ends when its standard input does
		p.cmd.Stderr = &p.log
		p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us
		var answers io.Reader
		p.orders, err = p.cmd.StdinPipe()
		if err == nil {
			answers, err = p.cmd.StdoutPipe()
		}
		if err == nil {
			err = p.cmd.Start()
		}
		if err != nil {
			return nil, errors.Join(err, e.close())
		}
		p.answers = bufio.NewScanner(answers)
		p.answers.Buffer(nil, 1<<20)
		e = append(e, p)
	}
	for _, p := range e {
		if !p.answers.Scan() {
			return nil, errors.Join(e.close(), fmt.Errorf("%s does not begin:\n%s", command, p.log.String()))
		}
	}
	return e, ctx.Err()
}

// run shares callers among the processes, as many as there are callers at most.
func (e elsewhere) run(ctx context.Context, callers int, keys string, window time.Duration) (sample, error) {
	processes := e[:min(len(e), callers)]
	tales := make([]tale, len(processes))
	var running errgroup.Group
	for i, p := range processes {
		share := callers / len(processes)
		if i < callers%len(processes) {
			share++
		}
		running.Go(func() (err error) {
			tales[i], err = p.run(task{share, keys, warmUp * window.Seconds(), window.Seconds()})
			return err
		})
	}
	if err := errors.Join(running.Wait(), context.Cause(ctx)); err != nil {
		return nil, err
	}
	var count float64
	for _, t := range tales {
		count += t.Count
	}
	return sample{rate: count / window.Seconds()}, nil
}

func (p *process) run(o task) (t tale, err error) {
	if err := json.NewEncoder(p.orders).Encode(o); err != nil {
		return t, fmt.Errorf("%s: %w\n%s", p.cmd, err, p.log.String())
	}
	if !p.answers.Scan() {
		return t, fmt.Errorf("%s has ended\n%s", p.cmd, p.log.String())
	}
	if err := json.Unmarshal(p.answers.Bytes(), &t); err != nil {
		return t, fmt.Errorf("%s: %w in %q", p.cmd, err, p.answers.Text())
	}
	if t.Error != "" {
		return t, errors.New(t.Error)
	}
	return t, nil
}

func (e elsewhere) close() (err error) {
	for _, p := range e {
		err = errors.Join(err, p.orders.Close())
	}
	for _, p := range e {
		err = errors.Join(err, p.cmd.Wait())
	}
	return err
}

// obey is the other end: it does what it is ordered until its standard input ends.
func obey(ctx context.Context, acquire acquirer) error {
	keys := keyspaces()
	fmt.Println("ready")
	for orders := bufio.NewScanner(os.Stdin); orders.Scan(); {
		var o task
		if err := json.Unmarshal(orders.Bytes(), &o); err != nil {
			return err
		}
		window := time.Duration(o.Window * float64(time.Second))
		l := load{o.Callers, keys[o.Keys], opponent{acquire: acquire}}
		warm := time.Duration(o.Warm * float64(time.Second))
		s, err := l.during(ctx, warm, func(ctx context.Context) error { return pause(ctx, window) })
		t := tale{Count: s[rate] * window.Seconds()}
		if err != nil {
			t.Error = err.Error()
		}
		if err := json.NewEncoder(os.Stdout).Encode(t); err != nil {
			return err
		}
	}
	return nil
}
