package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// snapshot measures combined acquires of 64 callers on one key, before and after another session has
// held a snapshot for a while: no dead version of the row can be removed meanwhile.
type snapshot struct {
	lab    *lab
	hold   time.Duration
	pool   *pgxpool.Pool
	load   load
	closer func()
}

const snapshotDatabase = "snapshot"

func (*snapshot) cells() []string { return []string{"snapshot"} }

func (s *snapshot) open(ctx context.Context, _ []string) (err error) {
	pg, err := s.lab.postgres(ctx)
	if err != nil {
		return err
	}
	if err := pg.database(ctx, snapshotDatabase, definePolicies()...); err != nil {
		return err
	}
	if s.pool, err = pg.pool(ctx, snapshotDatabase, false, connections); err != nil {
		return err
	}
	s.load = load{callers: 64, keys: keyspaces()["hot"], servers: []int{pg.pid}}
	combiner := newCombiner(s.pool, s.lab.calls)
	s.load.acquire, s.closer = pgratelimit(combiner, "durable"), combiner.Close
	return nil
}

func (s *snapshot) run(ctx context.Context, _ string) (sample, error) {
	pg := s.lab.pg
	if err := pg.exec(ctx, snapshotDatabase, "vacuum ratelimit.buckets"); err != nil {
		return nil, err
	}
	before, err := s.load.run(ctx, 2*s.lab.window)
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
	after, err := s.load.during(ctx, s.hold, func(ctx context.Context) error { return pause(ctx, 2*s.lab.window) })
	if err != nil {
		return nil, err
	}
	return sample{"before": before[rate], "after": after[rate]}, nil
}

func (s *snapshot) cost() time.Duration { return s.hold + 5*s.lab.window }

func (s *snapshot) close(ctx context.Context) error {
	if s.closer != nil {
		s.closer()
	}
	if s.pool != nil {
		s.pool.Close()
	}
	return s.lab.dropDatabases(ctx, snapshotDatabase)
}
