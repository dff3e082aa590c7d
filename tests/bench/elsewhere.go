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
	Count float64 // of answers
	Error string
}

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
		l := load{callers: o.Callers, keys: keys[o.Keys], acquire: acquire}
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
