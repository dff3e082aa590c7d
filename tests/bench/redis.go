package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// redisServer is a Redis of this process on a unix socket.
type redisServer struct {
	*redis.Client
	*child
	version string
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
	socket := filepath.Join(dir, "socket")
	command := []string{program, "--port", "0", "--unixsocket", socket, "--dir", dir, "--save", "", "--daemonize", "no", "--appendonly", "no"}
	if flushed {
		command = append(command, "--appendonly", "yes", "--appendfsync", "always")
	}
	// go-redis' default of ten connections for each core does as well as 64, and better than 256.
	r := &redisServer{Client: redis.NewClient(&redis.Options{Network: "unix", Addr: socket})}
	ready := func(ctx context.Context) error {
		info, err := r.Info(ctx, "server").Result()
		r.version = field(info, "redis_version")
		return err
	}
	r.child, err = startChild(ctx, dir, ready, nil, command...)
	return r, err
}

func field(info, name string) string {
	_, rest, _ := strings.Cut(info, name+":")
	value, _, _ := strings.Cut(rest, "\r\n")
	return value
}

func (r *redisServer) close() error { return errors.Join(r.Client.Close(), r.child.close()) }
