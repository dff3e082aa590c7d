package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
)

// cleanup measures plain acquires of 64 callers without and with a clean-up beside them that has a
// million rows to remove.
type cleanup struct {
	lab  *lab
	pool *pgxpool.Pool
	load load
}

const (
	cleanupDatabase = "cleanup"
	dueRows         = 1_000_000
)

func (*cleanup) cells() []string { return []string{"cleanup"} }

func (c *cleanup) open(ctx context.Context, _ []string) (err error) {
	pg, err := c.lab.postgres(ctx)
	if err != nil {
		return err
	}
	setUp := append(definePolicies(), "select ratelimit_define_policy('idle', 10, 10, '1 second')", "vacuum analyze")
	if err := pg.database(ctx, cleanupDatabase, setUp...); err != nil {
		return err
	}
	if c.pool, err = pg.pool(ctx, cleanupDatabase, false, connections); err != nil {
		return err
	}
	c.load = load{callers: 64, keys: keyspaces()["uniform"], acquire: pgratelimit(client.New(c.pool), "durable"), servers: []int{pg.pid}}
	return nil
}

func (c *cleanup) run(ctx context.Context, _ string) (sample, error) {
	pg := c.lab.pg
	err := pg.exec(ctx, cleanupDatabase, fill{policy: "idle", count: dueRows, ago: "2 hours"}.sql())
	if err != nil {
		return nil, err
	}
	without, err := c.load.run(ctx, 2*c.lab.window)
	if err != nil {
		return nil, err
	}
	const due = "select count(*)::float8 from ratelimit.buckets where due_at < now()"
	var elapsed time.Duration
	with, err := c.load.during(ctx, 0, func(ctx context.Context) error {
		begin := time.Now()
		defer func() { elapsed = time.Since(begin) }()
		return pg.exec(ctx, cleanupDatabase, "call ratelimit_cleanup_all('2 minutes')")
	})
	if err != nil {
		return nil, err
	}
	left, err := queryRow[float64](ctx, pg, cleanupDatabase, due)
	if err != nil {
		return nil, err
	}
	if left == dueRows {
		return nil, fmt.Errorf("clean-up removed nothing")
	}
	return sample{"without": without[rate], "with": with[rate], "removed": (dueRows - left) / elapsed.Seconds()},
		pg.exec(ctx, cleanupDatabase, "delete from ratelimit.buckets where due_at < now()", "vacuum ratelimit.buckets")
}

func (c *cleanup) cost() time.Duration { return 40 * time.Second }

func (c *cleanup) close(ctx context.Context) error {
	if c.pool != nil {
		c.pool.Close()
	}
	return c.lab.dropDatabases(ctx, cleanupDatabase)
}
