package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// program is pgratelimit serve, built from this tree and run as a process of its own.
type program struct {
	grpc, http string // its addresses
	pid        int

	cmd   *exec.Cmd
	alive io.WriteCloser
	log   bytes.Buffer
}

// startProgram takes settings as NAME=value. RATELIMIT_BENCH_PROGRAM names a program that is built already, such as one of
// another version.
func startProgram(ctx context.Context, settings ...string) (_ *program, err error) {
	dir, err := os.MkdirTemp("", "ratelimit-serve-")
	if err != nil {
		return nil, err
	}
	path := os.Getenv("RATELIMIT_BENCH_PROGRAM")
	if path == "" {
		path = filepath.Join(dir, "pgratelimit")
		build := exec.CommandContext(ctx, "go", "build", "-o", path, "github.com/pgratelimit/pgratelimit/server/cmd/pgratelimit")
		if text, err := build.CombinedOutput(); err != nil {
			return nil, errors.Join(fmt.Errorf("go build: %w\n%s", err, text), os.RemoveAll(dir))
		}
	}
	p := &program{}
	for _, address := range []*string{&p.grpc, &p.http} {
		if *address, err = freeAddress(ctx); err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	// As in startRedis the shell ends the program, when this process ends.
	p.cmd = exec.Command("/bin/sh", "-c", `"$1" serve & read -r _; kill $!; wait; rm -rf "$0"`, dir, path)
	p.cmd.Env = append(os.Environ(), append(settings, "GRPC_ADDR="+p.grpc, "HTTP_ADDR="+p.http)...)
	p.cmd.Stderr = &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us
	if p.alive, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	p.pid = p.cmd.Process.Pid // whose child it is
	if err := p.await(ctx); err != nil {
		return nil, errors.Join(err, p.close(), errors.New(p.log.String()))
	}
	return p, nil
}

func freeAddress(ctx context.Context) (string, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}

// await returns when the program answers.
func (p *program) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.http+"/livez", nil)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(request)
		if err == nil {
			return response.Body.Close()
		}
		if pause(ctx, 20*time.Millisecond) != nil {
			return fmt.Errorf("pgratelimit serve: %w", err)
		}
	}
}

func (p *program) close() error { return errors.Join(p.alive.Close(), p.cmd.Wait()) }
