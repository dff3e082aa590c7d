package kit

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Shards are eight databases on two servers: the first four on one, the others on the other.
type Shards struct {
	T       testing.TB
	Servers []*pgtest.Server
	Dbs     []*TestDB
}

const DatabasesOfServer = 4

func NewShards(t testing.TB, settings ...string) *Shards {
	s := &Shards{T: t}
	for range 2 {
		server := pgtest.Private(t, settings...)
		s.Servers = append(s.Servers, server)
		OnServer(t, server, "", "create database installed template template0")
		conn := NoError(pgx.Connect(t.Context(), server.URL("installed")))(t)
		require.NoError(t, errors.Join(migrations.Up(t.Context(), conn), conn.Close(t.Context())))
	}
	of := len(s.Servers) * DatabasesOfServer
	for n := range of {
		OnServer(t, s.ServerOf(n), "", "create database "+ShardName(n)+" template installed")
		db := OpenDB(t, s.ServerOf(n), ShardName(n))
		db.Execute("select ratelimit_define_shard($1, $2)", n, of)
		s.Dbs = append(s.Dbs, db)
	}
	return s
}

func ShardName(n int) string { return fmt.Sprint("shard_", n) }

func (s *Shards) ServerOf(n int) *pgtest.Server { return s.Servers[n/DatabasesOfServer] }

func (s *Shards) Of() int { return len(s.Dbs) }

// Key is a name with something after it, so that it belongs to a shard.
func (s *Shards) Key(n int, name string) string { return KeyOf(n, s.Of(), name+" ") }

// KeyOf is the first key of a shard that begins so.
func KeyOf(shard, of int, begin string) string {
	for i := 0; ; i++ {
		if key := fmt.Sprint(begin, i); client.ShardOf(key, of) == shard {
			return key
		}
	}
}

// Limiter is one on pools of its own, which are those given, where they are.
func (s *Shards) Limiter(pools map[int]*pgxpool.Pool, opts ...client.Option) *client.Sharded {
	all := make([]*pgxpool.Pool, s.Of())
	for n, db := range s.Dbs {
		if all[n] = pools[n]; all[n] == nil {
			all[n] = Pool(s.T, db.URL)
		}
	}
	limiter := NoError(client.NewSharded(s.T.Context(), all, opts...))(s.T)
	s.T.Cleanup(limiter.Close)
	return limiter
}

// Of is what a ledger has on the buckets of one shard.
func (l *Ledger) Of(shard, of int) *Ledger {
	elsewhere := func(e Entry) bool { return client.ShardOf(e.Key, of) != shard }
	return &Ledger{
		Policy: l.Policy, Capacity: l.Capacity, Grants: slices.DeleteFunc(slices.Clone(l.Grants), elsewhere),
		Unanswered: slices.DeleteFunc(slices.Clone(l.Unanswered), elsewhere),
	}
}
