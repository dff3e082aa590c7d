package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
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
