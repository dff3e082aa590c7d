package tests

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Shards are eight databases on two servers: the first four on one, the others on the other.
type shards struct {
	t       testing.TB
	servers []*pgtest.Server
	dbs     []*testDB
}

const databasesOfServer = 4

func newShards(t testing.TB, settings ...string) *shards {
	s := &shards{t: t}
	for range 2 {
		server := pgtest.Private(t, settings...)
		s.servers = append(s.servers, server)
		onServer(t, server, "", "create database installed template template0")
		conn, err := pgx.Connect(t.Context(), server.URL("installed"))
		require.NoError(t, err)
		require.NoError(t, errors.Join(migrations.Up(t.Context(), conn), conn.Close(t.Context())))
	}
	of := len(s.servers) * databasesOfServer
	for n := range of {
		onServer(t, s.serverOf(n), "", "create database "+shardName(n)+" template installed")
		db := openDB(t, s.serverOf(n), shardName(n))
		db.exec("select ratelimit_define_shard($1, $2)", n, of)
		s.dbs = append(s.dbs, db)
	}
	return s
}

func shardName(n int) string { return fmt.Sprint("shard_", n) }

func (s *shards) serverOf(n int) *pgtest.Server { return s.servers[n/databasesOfServer] }

func (s *shards) of() int { return len(s.dbs) }

// each does something to all databases.
func (s *shards) each(do func(db *testDB)) {
	for _, db := range s.dbs {
		do(db)
	}
}

// key is a name with something after it, so that it belongs to a shard.
func (s *shards) key(n int, name string) string {
	for i := 0; ; i++ {
		if key := fmt.Sprint(name, " ", i); client.ShardOf(key, s.of()) == n {
			return key
		}
	}
}

// limiter is one on pools of its own, which are those given, where they are.
func (s *shards) limiter(pools map[int]*pgxpool.Pool, opts ...client.Option) *client.Sharded {
	all := make([]*pgxpool.Pool, s.of())
	for n, db := range s.dbs {
		all[n] = pools[n]
		if all[n] != nil {
			continue
		}
		pool, err := pgxpool.New(context.Background(), db.URL)
		require.NoError(s.t, err)
		s.t.Cleanup(pool.Close)
		all[n] = pool
	}
	limiter, err := client.NewSharded(s.t.Context(), all, opts...)
	require.NoError(s.t, err)
	s.t.Cleanup(limiter.Close)
	return limiter
}

// reopen connects anew to the databases of servers that were started again.
func (s *shards) reopen() {
	for n, db := range s.dbs {
		db.Pool.Close()
		s.dbs[n] = openDB(s.t, s.serverOf(n), shardName(n))
	}
}

// isOf reports whether an error is one of these shards.
func isOf(err error, shards ...int) bool {
	var e *client.ShardError
	return errors.As(err, &e) && slices.Contains(shards, e.Shard)
}

// of is what a ledger has on the buckets of one shard.
func (l *ledger) of(shard, of int) *ledger {
	elsewhere := func(e entry) bool { return client.ShardOf(e.Key, of) != shard }
	return &ledger{
		policy: l.policy, capacity: l.capacity,
		grants:     slices.DeleteFunc(slices.Clone(l.grants), elsewhere),
		unanswered: slices.DeleteFunc(slices.Clone(l.unanswered), elsewhere),
	}
}
