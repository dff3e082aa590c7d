package main

import (
	"context"
	"errors"
	"time"
)

// A lab has the servers, each started when it is first needed.
type lab struct {
	window time.Duration
	calls  int // in flight, of the combining client; 0 is its default

	pg    *postgres
	redis map[bool]*redisServer // by whether each command is flushed

	notes map[string]string // for the report: what else was measured

	stolen, total float64 // CPU time when the run began: see steal
}

func (l *lab) note(name, what string) {
	if l.notes == nil {
		l.notes = map[string]string{}
	}
	l.notes[name] = what
}

func (l *lab) postgres(ctx context.Context) (*postgres, error) {
	if l.pg == nil {
		pg, err := startPostgres(ctx)
		if err != nil {
			return nil, err
		}
		l.pg = pg
	}
	return l.pg, nil
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
	return err
}

func (l *lab) dropDatabases(ctx context.Context, names ...string) (err error) {
	if l.pg == nil {
		return nil
	}
	for _, name := range names {
		err = errors.Join(err, l.pg.drop(ctx, name))
	}
	return err
}
