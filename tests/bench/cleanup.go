package main

import (
	"context"
	"fmt"
	"time"

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
