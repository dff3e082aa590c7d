package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
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

// A tale is what a process tells about a run.
type tale struct {
	Count     float64
	Latencies []float64 // in microseconds: a thousand at most, from the shortest to the longest in even steps
	CPU       float64   // microseconds of the window
	Error     string
}

const taleLatencies = 1000

// start starts so many processes of a command, whose first line says that they are ready.
func start(ctx context.Context, count int, env []string, command ...string) (e elsewhere, err error) {
	for range count {
		p := &process{cmd: exec.Command(command[0], command[1:]...)} // ends when its standard input does
		p.cmd.Env = append(os.Environ(), env...)
		p.cmd.Stderr = &p.log
		p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us
		if p.orders, err = p.cmd.StdinPipe(); err != nil {
			return nil, errors.Join(err, e.close())
		}
		answers, err := p.cmd.StdoutPipe()
		if err != nil {
			return nil, errors.Join(err, e.close())
		}
		p.answers = bufio.NewScanner(answers)
		p.answers.Buffer(nil, 1<<20)
		if err := p.cmd.Start(); err != nil {
			return nil, errors.Join(err, e.close())
		}
		e = append(e, p)
	}
	for _, p := range e {
		if !p.answers.Scan() {
			return nil, errors.Join(e.close(), fmt.Errorf("%s does not begin:\n%s", command, p.log.String()))
		}
	}
	return e, ctx.Err()
}

// run shares callers among the processes, as many as there are callers at most. The server is the process whose CPU time is counted.
func (e elsewhere) run(ctx context.Context, callers int, keys string, window time.Duration, server int) (sample, error) {
	processes := e[:min(len(e), callers)]
	tales := make([]tale, len(processes))
	warm := time.Duration(warmUp * float64(window))
	var running errgroup.Group
	for i, p := range processes {
		share := callers / len(processes)
		if i < callers%len(processes) {
			share++
		}
		running.Go(func() (err error) {
			tales[i], err = p.run(task{share, keys, warm.Seconds(), window.Seconds()})
			return err
		})
	}
	var used time.Duration
	_ = pause(ctx, warm)
	used -= cpuOf(server)
	_ = pause(ctx, window)
	used += cpuOf(server)
	if err := errors.Join(running.Wait(), context.Cause(ctx)); err != nil {
		return nil, err
	}
	return merge(tales, window, used), nil
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

// merge makes one sample of what several processes tell. Each of a process's latencies stands for as many of its answers as the others.
func merge(tales []tale, window, server time.Duration) sample {
	type step struct{ latency, weight float64 }
	var (
		steps      []step
		count, cpu float64
	)
	for _, t := range tales {
		count, cpu = count+t.Count, cpu+t.CPU
		for _, l := range t.Latencies {
			steps = append(steps, step{l, t.Count / float64(len(t.Latencies))})
		}
	}
	slices.SortFunc(steps, func(a, b step) int { return int(math.Copysign(1, a.latency-b.latency)) })
	s := sample{
		rate:      count / window.Seconds(),
		p99:       0,
		cpuServer: float64(server.Microseconds()) / max(1, count),
		cpuClient: cpu / max(1, count),
	}
	left := 0.99 * count
	for _, step := range steps {
		s[p99] = step.latency
		if left -= step.weight; left <= 0 {
			break
		}
	}
	return s
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
		l := load{callers: o.Callers, keys: keys[o.Keys], acquire: acquire}
		warm := time.Duration(o.Warm * float64(time.Second))
		s, latencies, err := l.latencies(ctx, warm, func(ctx context.Context) error { return pause(ctx, window) })
		t := tale{}
		if err != nil {
			t.Error = err.Error()
		} else {
			t.Count = float64(len(latencies))
			t.CPU = s[cpuClient] * t.Count
			told := min(len(latencies), taleLatencies)
			for i := range told {
				t.Latencies = append(t.Latencies, quantile(latencies, (float64(i)+0.5)/float64(told)))
			}
		}
		if err := json.NewEncoder(os.Stdout).Encode(t); err != nil {
			return err
		}
	}
	return nil
}
