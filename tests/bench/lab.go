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
	snapshotHeld time.Duration // in the cells snapshot*
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

// A stage is the place of an experiment in the lab, which the experiment leaves as it was.
type stage struct {
	*lab
	closers []func() error
}

func (s *stage) atEnd(closer func() error) { s.closers = append(s.closers, closer) }

func (s *stage) close() (err error) {
	for _, closer := range slices.Backward(s.closers) {
		err = errors.Join(err, closer())
	}
	return err
}

// database makes one with the package installed, and runs statements in it.
func (s *stage) database(ctx context.Context, name string, statements ...string) (*postgres, error) {
	pg, err := s.postgres(ctx)
	if err != nil {
		return nil, err
	}
	s.atEnd(func() error {
		return pg.exec(context.WithoutCancel(ctx), "", "drop database if exists "+name+" with (force)")
	})
	return pg, pg.database(ctx, name, statements...)
}

// pool opens connections whose commits wait for the flush, or do not.
func (s *stage) pool(ctx context.Context, url string, flush bool, connections int32, change ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	pool, err := openPool(ctx, url, flush, connections, change...)
	if err == nil {
		s.atEnd(func() error { pool.Close(); return nil })
	}
	return pool, err
}

func (s *stage) combiner(pool *pgxpool.Pool, opts ...client.Option) *client.Combiner {
	combiner := client.NewCombiner(pool, opts...)
	s.atEnd(func() error { combiner.Close(); return nil })
	return combiner
}
