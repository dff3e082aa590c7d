package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// A child is a server that ends with this process, in a directory of its own.
type child struct {
	pid   int // of a shell, whose child the server is
	cmd   *exec.Cmd
	alive io.WriteCloser
	log   bytes.Buffer
}

// startChild starts a command in a directory, which goes with it, and returns when ready succeeds.
func startChild(ctx context.Context, dir string, ready func(context.Context) error, env []string, command ...string) (_ *child, err error) {
	c := &child{}
	// The shell ends the command when its standard input ends, and that does when this process does.
	c.cmd = exec.Command("/bin/sh", append([]string{"-c", `"$@" & read -r _; kill $!; wait; rm -rf "$0"`, dir}, command...)...)
	c.cmd.Dir = dir
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stdout, c.cmd.Stderr = &c.log, &c.log
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us
	if c.alive, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	c.pid = c.cmd.Process.Pid
	waiting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		err := ready(waiting)
		if err == nil {
			return c, nil
		}
		if pause(waiting, 20*time.Millisecond) != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", filepath.Base(command[0]), err), c.close(), errors.New(c.log.String()))
		}
	}
}

func (c *child) close() error { return errors.Join(c.alive.Close(), c.cmd.Wait()) }

type redisServer struct {
	*redis.Client
	*child
	version string
}

// startRedis starts a server that keeps nothing on disk, or flushes every command there before it answers.
func startRedis(ctx context.Context, flushed bool) *redisServer {
	program := must(pgtest.Program(ctx, "redis-server"))
	dir := must(os.MkdirTemp("/tmp", "ratelimit-redis-"))
	socket := filepath.Join(dir, "socket")
	command := []string{program, "--port", "0", "--unixsocket", socket, "--dir", dir, "--save", "", "--daemonize", "no", "--appendonly", "no"}
	if flushed {
		command = append(command, "--appendonly", "yes", "--appendfsync", "always")
	}
	// go-redis' default of ten connections for each core does as well as 64, and better than 256.
	r := &redisServer{Client: redis.NewClient(&redis.Options{Network: "unix", Addr: socket})}
	ready := func(ctx context.Context) error {
		info, err := r.InfoMap(ctx, "server").Result()
		r.version = info["Server"]["redis_version"]
		return err
	}
	r.child = must(startChild(ctx, dir, ready, nil, command...))
	return r
}

func (r *redisServer) close() error { return errors.Join(r.Client.Close(), r.child.close()) }

// program is pgratelimit serve, built from this tree and run as a process of its own.
type program struct {
	*child
	grpc, http string // its addresses
}

// startProgram takes settings as NAME=value.
func startProgram(ctx context.Context, settings ...string) *program {
	root := repository(ctx)
	output(exec.CommandContext(ctx, "make", "-C", root, "build"))
	dir := must(os.MkdirTemp("", "ratelimit-serve-"))
	p := &program{}
	for _, address := range []*string{&p.grpc, &p.http} {
		*address = freeAddress(ctx)
	}
	ready := func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", p.http)
		if err != nil {
			return err
		}
		return conn.Close()
	}
	p.child = must(startChild(ctx, dir, ready, append(settings, "GRPC_ADDR="+p.grpc, "HTTP_ADDR="+p.http), filepath.Join(root, "build/pgratelimit"), "serve"))
	return p
}

func freeAddress(ctx context.Context) string {
	listener := must(new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0"))
	check(listener.Close())
	return listener.Addr().String()
}
