package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
)

// A lab has the servers, each started when it is first needed.
type lab struct {
	window       time.Duration
	snapshotHeld time.Duration // by experiment snapshot
	pg           *postgres
	redis        map[bool]*redisServer // by whether each command is flushed
}

func (l *lab) postgres(ctx context.Context) (_ *postgres, err error) {
	if l.pg == nil {
		l.pg, err = startPostgres(ctx)
	}
	return l.pg, err
}

func (l *lab) redisServer(ctx context.Context, flushed bool) (*redisServer, error) {
	if l.redis == nil {
		l.redis = map[bool]*redisServer{}
	}
	if l.redis[flushed] == nil {
		server, err := startRedis(ctx, flushed)
		if err != nil {
			return nil, err
		}
		l.redis[flushed] = server
	}
	return l.redis[flushed], nil
}

func (l *lab) close() (err error) {
	for _, server := range l.redis {
		err = errors.Join(err, server.close())
	}
	if l.pg != nil {
		err = errors.Join(err, l.pg.Close())
	}
	l.pg, l.redis = nil, nil
	return err
}

// A stage is what all experiments have: a place in the lab, which they leave as it was.
type stage struct {
	*lab
	closers   []func()
	databases []string
}

func (s *stage) close(ctx context.Context) (err error) {
	for _, close := range slices.Backward(s.closers) {
		close()
	}
	for _, name := range s.databases {
		err = errors.Join(err, s.pg.drop(ctx, name))
	}
	s.closers, s.databases = nil, nil
	return err
}

// cost is that of a load.
func (s *stage) cost() time.Duration { return time.Duration((1 + warmUp) * float64(s.window)) }

// database makes one with the package installed, and runs statements in it.
func (s *stage) database(ctx context.Context, name string, statements ...string) (*postgres, error) {
	pg, err := s.postgres(ctx)
	if err != nil {
		return nil, err
	}
	s.databases = append(s.databases, name)
	return pg, pg.database(ctx, name, statements...)
}

// pool opens connections whose commits wait for the flush, or do not.
func (s *stage) pool(ctx context.Context, url string, flush bool, connections int32, change ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	pool, err := openPool(ctx, url, flush, connections, change...)
	if err == nil {
		s.closers = append(s.closers, pool.Close)
	}
	return pool, err
}

func (s *stage) combiner(pool *pgxpool.Pool, opts ...client.Option) *client.Combiner {
	combiner := client.NewCombiner(pool, opts...)
	s.closers = append(s.closers, combiner.Close)
	return combiner
}
