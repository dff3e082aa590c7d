package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

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
