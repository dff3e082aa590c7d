package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// versions compares the oldest PostgreSQL with the newest. Its cells are named versions/major/client, and have 64 callers over many
// keys.
type versions struct {
	lab     *lab
	keys    *keyspace
	servers map[string]*postgres
	acquire map[string]acquirer // by cell
	closers []func()
}

const (
	versionsDatabase = "versions"
	versionsCallers  = 64
)

var (
	versionsMajors = []string{"15", "18"}
	versionsWays   = []string{"combined", "plain"}
)

func versionsName(major, way string) string { return "versions/" + major + "/" + way }

func (*versions) cells() (cells []string) {
	for _, way := range versionsWays {
		for _, major := range versionsMajors {
			cells = append(cells, versionsName(major, way))
		}
	}
	return cells
}

// versionOf returns where the binaries of a major version are: those that make has got from npm, or a package's.
func versionOf(major string) string {
	for _, bin := range []string{filepath.Join("/usr/lib/postgresql", major, "bin"), filepath.Join("build", "postgresql-"+major, "bin")} {
		if _, err := os.Stat(filepath.Join(bin, "postgres")); err == nil {
			return bin
		}
	}
	return ""
}

func (v *versions) open(ctx context.Context, cells []string) error {
	v.keys, v.servers, v.acquire = keyspaces()["uniform"], map[string]*postgres{}, map[string]acquirer{}
	for _, major := range versionsMajors {
		if !slices.ContainsFunc(cells, func(cell string) bool { return strings.HasPrefix(cell, "versions/"+major+"/") }) {
			continue
		}
		bin := versionOf(major)
		if bin == "" {
			return fmt.Errorf("no PostgreSQL %s on this machine: make build/postgresql-%s gets it", major, major)
		}
		pg, err := startPostgresOf(ctx, bin)
		if err != nil {
			return err
		}
		v.servers[major] = pg
		if err := pg.database(ctx, versionsDatabase, append(definePolicies(), "vacuum analyze")...); err != nil {
			return err
		}
		pool, err := pg.pool(ctx, versionsDatabase, false, connections)
		if err != nil {
			return err
		}
		combiner := newCombiner(pool, v.lab.calls)
		v.closers = append(v.closers, pool.Close, combiner.Close)
		v.acquire[versionsName(major, "combined")] = pgratelimit(combiner, "durable")
		v.acquire[versionsName(major, "plain")] = pgratelimit(client.New(pool), "durable")
		v.lab.note("PostgreSQL "+major, pg.Version)
	}
	for _, cell := range cells { // a moment that does not count, for each to be warm
		if _, err := v.run(ctx, cell); err != nil {
			return err
		}
	}
	return nil
}

func (v *versions) run(ctx context.Context, cell string) (sample, error) {
	l := load{callers: versionsCallers, keys: v.keys, acquire: v.acquire[cell], servers: []int{v.servers[strings.Split(cell, "/")[1]].pid}}
	return l.run(ctx, v.lab.window)
}

func (v *versions) cost() time.Duration { return time.Duration((1 + warmUp) * float64(v.lab.window)) }

func (v *versions) close(context.Context) (err error) {
	for _, close := range slices.Backward(v.closers) {
		close()
	}
	for _, pg := range v.servers {
		err = errors.Join(err, pg.Close())
	}
	return err
}
