package pgtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

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
