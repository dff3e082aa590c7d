package main

import (
	"context"
	"fmt"
	"time"
)

// buckets compares few buckets with many, each number in a database of its own.
type buckets struct{ stage }

var bucketCounts = map[string]int{
	"buckets/10k": 10_000,
	"buckets/1m":  1_000_000,
	"buckets/10m": 10_000_000,
}

func (*buckets) cells() []string { return []string{"buckets/10k", "buckets/1m", "buckets/10m"} }

func databaseOf(cell string) string { return fmt.Sprintf("buckets_%d", bucketCounts[cell]) }

func (b *buckets) open(ctx context.Context, cells []string) error {
	for _, cell := range cells {
		_, err := b.database(ctx, databaseOf(cell),
			definePolicy("full", true),
			"set work_mem = '256MB'",
			fill{policy: "full", count: bucketCounts[cell], tokens: capacity / 2}.sql(),
			"vacuum analyze ratelimit.buckets")
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *buckets) run(ctx context.Context, cell string) (sample, error) {
	script := fmt.Sprintf(`\set k random(1, %d)`, bucketCounts[cell]) + "\n" + acquireSQL("full", manyKeysSQL)
	s, err := b.pg.pgbench(ctx, databaseOf(cell), script, b.window)
	if err != nil {
		return nil, err
	}
	return s, b.pg.space(ctx, databaseOf(cell), "ratelimit.buckets", "183 + 3 * octet_length(k.key)", s)
}

func (b *buckets) cost() time.Duration { return pgbenchCost(b.window) }
