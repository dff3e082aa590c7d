package main

import (
	"context"
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

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// redisServer is a Redis of this process on a unix socket.
type redisServer struct {
	*redis.Client
	version string
	pid     int

	cmd   *exec.Cmd
	alive io.WriteCloser
}

// startRedis starts a server that keeps nothing on disk, or flushes every command there before it
// answers.
func startRedis(ctx context.Context, flushed bool) (*redisServer, error) {
	program, err := pgtest.Program(ctx, "redis-server")
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("/tmp", "ratelimit-redis-")
	if err != nil {
		return nil, err
	}
	r := &redisServer{}
	socket := filepath.Join(dir, "socket")
	arguments := []string{"--port", "0", "--unixsocket", socket, "--dir", dir, "--save", "", "--daemonize", "no",
		"--logfile", filepath.Join(dir, "log"), "--appendonly", "no"}
	if flushed {
		arguments = append(arguments, "--appendonly", "yes", "--appendfsync", "always")
	}
	// The shell ends the server when its standard input ends, and that does when this process does.
	r.cmd = exec.Command("/bin/sh", append([]string{"-c", `"$@" & read -r _; kill $!; wait; rm -rf "$0"`, dir, program},
		arguments...)...)
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us
	if r.alive, err = r.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := r.cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	// go-redis' default of ten connections for each core does as well as 64, and better than 256.
	r.Client = redis.NewClient(&redis.Options{Network: "unix", Addr: socket})
	if err := r.locate(ctx); err != nil {
		log, _ := os.ReadFile(filepath.Join(dir, "log"))
		return nil, errors.Join(fmt.Errorf("redis-server: %w\n%s", err, log), r.close())
	}
	return r, nil
}

// locate waits until the server answers and notes which process it is.
func (r *redisServer) locate(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		info, err := r.Info(ctx, "server").Result()
		if err == nil {
			r.version = field(info, "redis_version")
			r.pid, err = strconv.Atoi(field(info, "process_id"))
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func field(info, name string) string {
	_, rest, _ := strings.Cut(info, name+":")
	value, _, _ := strings.Cut(rest, "\r\n")
	return value
}

func (r *redisServer) close() error {
	err := errors.Join(r.Close(), r.alive.Close())
	return errors.Join(err, r.cmd.Wait())
}
