package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/client"
)

// cleanup measures plain acquires of 64 callers without and with a clean-up beside them that has a
// million rows to remove.
type cleanup struct {
	stage
	load load
}

const (
	cleanupDatabase = "cleanup"
	dueRows         = 1_000_000
)

func (*cleanup) cells() []string { return []string{"cleanup"} }

func (c *cleanup) open(ctx context.Context, _ []string) (err error) {
	setUp := append(definePolicies(), "select ratelimit_define_policy('idle', 10, 10, '1 second')", "vacuum analyze")
	pg, err := c.database(ctx, cleanupDatabase, setUp...)
	if err != nil {
		return err
	}
	pool, err := c.pool(ctx, pg.URL(cleanupDatabase), false, connections)
	if err != nil {
		return err
	}
	c.load = load{callers: 64, keys: keyspaces()["uniform"], acquire: pgratelimit(client.New(pool)), servers: []int{pg.pid}}
	return nil
}

func (c *cleanup) run(ctx context.Context, _ string) (sample, error) {
	pg := c.pg
	err := pg.exec(ctx, cleanupDatabase, fill{policy: "idle", count: dueRows, ago: "2 hours"}.sql())
	if err != nil {
		return nil, err
	}
	without, err := c.load.run(ctx, 2*c.window)
	if err != nil {
		return nil, err
	}
	with, err := c.load.during(ctx, 0, func(ctx context.Context) error {
		return pg.exec(ctx, cleanupDatabase, "call ratelimit_cleanup_all('2 minutes')")
	})
	if err != nil {
		return nil, err
	}
	left, err := queryRow[int](ctx, pg, cleanupDatabase, "select count(*) from ratelimit.buckets where due_at < now()")
	if err != nil {
		return nil, err
	}
	if left == dueRows {
		return nil, fmt.Errorf("clean-up removed nothing")
	}
	return sample{"without": without[rate], "with": with[rate]},
		pg.exec(ctx, cleanupDatabase, "delete from ratelimit.buckets where due_at < now()", "vacuum ratelimit.buckets")
}

func (c *cleanup) cost() time.Duration { return 40 * time.Second }

// snapshot measures what a session that holds a snapshot costs: no dead version of a row can be removed meanwhile. Cell snapshot is combined
// acquires of 64 callers on one key, before, and after it was held for a while. The others are cycles of slots, for as long without it and
// beside it: by 64 callers in Go, or by pgbench.
type snapshot struct {
	stage
	combined, held acquirer
	keys           map[string]*keyspace
}

const snapshotDatabase = "snapshot"

func (*snapshot) cells() []string {
	return []string{"snapshot", "snapshot/held", "snapshot/held-hot", "snapshot/pgbench", "snapshot/pgbench-hot"}
}

func (s *snapshot) open(ctx context.Context, _ []string) (err error) {
	pg, err := s.database(ctx, snapshotDatabase, slices.Concat(definePolicies(), defineSlots(), []string{"vacuum analyze"})...)
	if err != nil {
		return err
	}
	pool, err := s.pool(ctx, pg.URL(snapshotDatabase), false, connections)
	if err != nil {
		return err
	}
	s.combined, s.held, s.keys = pgratelimit(s.combiner(pool)), held(client.New(pool)), keyspaces()
	return nil
}

func (s *snapshot) run(ctx context.Context, cell string) (sample, error) {
	hot := load{callers: 64, keys: s.keys["hot"], acquire: s.combined}
	cycles := load{callers: 64, keys: s.keys["uniform"], acquire: s.held}
	if strings.HasSuffix(cell, "-hot") {
		cycles.keys = s.keys["hot"]
	}
	whole := func() (sample, error) {
		return cycles.during(ctx, s.window, func(ctx context.Context) error { return pause(ctx, s.snapshotHeld) })
	}
	if script, ok := strings.CutPrefix(cell, "snapshot/pgbench"); ok {
		whole = func() (sample, error) {
			return s.pg.pgbench(ctx, snapshotDatabase, bareScripts["bare/held"+script], s.snapshotHeld/2)
		}
	}
	without, beside := whole, whole
	if cell == "snapshot" {
		without = func() (sample, error) { return hot.run(ctx, 2*s.window) }
		beside = func() (sample, error) {
			return hot.during(ctx, s.snapshotHeld, func(ctx context.Context) error { return pause(ctx, 2*s.window) })
		}
	}

	vacuum := "vacuum ratelimit.buckets, ratelimit.slots, ratelimit.leases"
	if err := s.pg.exec(ctx, snapshotDatabase, vacuum); err != nil {
		return nil, err
	}
	before, err := without()
	if err != nil {
		return nil, err
	}
	if err := s.pg.exec(ctx, snapshotDatabase, vacuum); err != nil {
		return nil, err
	}
	holder, err := pgx.Connect(ctx, s.pg.URL(snapshotDatabase))
	if err != nil {
		return nil, err
	}
	defer holder.Close(ctx)
	if _, err := holder.Exec(ctx, "begin isolation level repeatable read; select 1 from ratelimit.policies"); err != nil {
		return nil, err
	}
	after, err := beside()
	return sample{"before": before[rate], "after": after[rate]}, err
}

func (s *snapshot) cost() time.Duration { return 2*s.snapshotHeld + 5*s.window }
