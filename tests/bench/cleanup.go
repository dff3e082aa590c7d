package main

import (
	"context"
	"fmt"
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

// snapshot measures combined acquires of 64 callers on one key, before and after another session has
// held a snapshot for a while: no dead version of the row can be removed meanwhile.
type snapshot struct {
	stage
	load load
}

const (
	snapshotDatabase = "snapshot"
	snapshotHeld     = time.Minute
)

func (*snapshot) cells() []string { return []string{"snapshot"} }

func (s *snapshot) open(ctx context.Context, _ []string) (err error) {
	pg, err := s.database(ctx, snapshotDatabase, definePolicies()...)
	if err != nil {
		return err
	}
	pool, err := s.pool(ctx, pg.URL(snapshotDatabase), false, connections)
	if err != nil {
		return err
	}
	s.load = load{callers: 64, keys: keyspaces()["hot"], acquire: pgratelimit(s.combiner(pool)), servers: []int{pg.pid}}
	return nil
}

func (s *snapshot) run(ctx context.Context, _ string) (sample, error) {
	pg := s.pg
	if err := pg.exec(ctx, snapshotDatabase, "vacuum ratelimit.buckets"); err != nil {
		return nil, err
	}
	before, err := s.load.run(ctx, 2*s.window)
	if err != nil {
		return nil, err
	}

	holder, err := pgx.Connect(ctx, pg.URL(snapshotDatabase))
	if err != nil {
		return nil, err
	}
	defer holder.Close(ctx)
	if _, err := holder.Exec(ctx, "begin isolation level repeatable read; select 1 from ratelimit.policies"); err != nil {
		return nil, err
	}
	after, err := s.load.during(ctx, snapshotHeld, func(ctx context.Context) error { return pause(ctx, 2*s.window) })
	if err != nil {
		return nil, err
	}
	return sample{"before": before[rate], "after": after[rate]}, nil
}

func (s *snapshot) cost() time.Duration { return snapshotHeld + 5*s.window }
