package pgtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/client"
)

// What a file says about a server that outlives the process that started it.
type kept struct {
	Container string `json:",omitempty"`
	Bin, Dir  string `json:",omitempty"`
}

// Keep lets the server outlive this process, and writes to a file what [Remove] needs to remove it. A server that was running
// before stays in any case. A container is kept only when testcontainers' reaper is off: TESTCONTAINERS_RYUK_DISABLED=true.
func (s *Server) Keep(file string) error {
	var k kept
	var g *guard
	switch h := s.host.(type) {
	case *container:
		k.Container, g = h.GetContainerID(), h.guard
	case *cluster:
		k.Bin, k.Dir, g = h.bin, h.dir, h.guard
	default:
		return nil
	}
	data, err := json.Marshal(k)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return err
	}
	if g == nil {
		return nil
	}
	return g.dismiss()
}

// Remove stops and removes the server that was kept, if there is one.
func Remove(ctx context.Context, file string) error {
	data, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var k kept
	if err := json.Unmarshal(data, &k); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if k.Container != "" {
		err = removeContainer(ctx, k.Container)
	}
	if k.Dir != "" {
		err = removeCluster(ctx, k.Bin, k.Dir)
	}
	if err != nil {
		return err
	}
	return os.Remove(file)
}

func removeContainer(ctx context.Context, id string) error {
	engine, err := findEngine(ctx)
	if err != nil {
		return err
	}
	_, err = engine.ContainerRemove(ctx, id, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
	if cerrdefs.IsNotFound(err) {
		return nil // somebody else was faster
	}
	return err
}

func removeCluster(ctx context.Context, bin, dir string) error {
	owner, err := unprivileged()
	if err != nil {
		return err
	}
	c := &cluster{bin: bin, dir: dir, owner: owner}
	if _, err := os.Stat(filepath.Join(c.data(), "postmaster.pid")); err == nil {
		if err := c.Stop(ctx, true); err != nil {
			return err
		}
	}
	return os.RemoveAll(dir)
}

// A guard is a shell that waits for the end of its standard input, which comes when this process
// closes it or dies, however that happens, and then runs a script. A line of input dismisses it.
type guard struct {
	cmd   *exec.Cmd
	alive io.WriteCloser
}

// startGuard starts a guard as another user, or as oneself when owner is nil.
func startGuard(owner *syscall.Credential, script string, args ...string) (*guard, error) {
	cmd := exec.Command("/bin/sh", append([]string{"-c", "if read -r dismissed; then exit; fi\n" + script, "guard"}, args...)...)
	cmd.Dir = "/" // where every user may be
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: owner,
		Setpgid:    true, // Ctrl-C is for the tests
	}
	alive, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	return &guard{cmd: cmd, alive: alive}, cmd.Start()
}

// release lets it run its script, and waits for that.
func (g *guard) release() error { return errors.Join(g.alive.Close(), g.cmd.Wait()) }

// dismiss ends it without.
func (g *guard) dismiss() error {
	_, err := io.WriteString(g.alive, "\n")
	return errors.Join(err, g.release())
}
