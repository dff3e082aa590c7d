package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
)

// program is pgratelimit serve, built from this tree and run as a process of its own.
type program struct {
	*child
	grpc, http string // its addresses
}

// startProgram takes settings as NAME=value.
func startProgram(ctx context.Context, settings ...string) (*program, error) {
	dir, err := os.MkdirTemp("", "ratelimit-serve-")
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "pgratelimit")
	build := exec.CommandContext(ctx, "go", "build", "-o", path, "github.com/pgratelimit/pgratelimit/server/cmd/pgratelimit")
	if text, err := build.CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("go build: %w\n%s", err, text), os.RemoveAll(dir))
	}
	p := &program{}
	for _, address := range []*string{&p.grpc, &p.http} {
		if *address, err = freeAddress(ctx); err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	ready := func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.http+"/livez", nil)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		return response.Body.Close()
	}
	p.child, err = startChild(ctx, dir, ready, append(settings, "GRPC_ADDR="+p.grpc, "HTTP_ADDR="+p.http), path, "serve")
	return p, err
}

func freeAddress(ctx context.Context) (string, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}
