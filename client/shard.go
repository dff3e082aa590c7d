package client

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// maxShards is the most that ratelimit_define_shard accepts.
const maxShards = 1 << 16

// verbCheck names the question which shard a database is.
const verbCheck = "check the shard"

// ShardOf returns the number, from 0, of the shard that has a key, if there are so many shards, a power of two. It is the low bits
// of the first 8 bytes, big endian, of the SHA-256 of the key. It is the same in every language, and never changes:
// testdata/shards.json has examples. The policy does not count, so all limits of a user are in one shard.
func ShardOf(key string, shards int) int {
	hash := sha256.Sum256([]byte(key))
	return int(binary.BigEndian.Uint64(hash[:8]) & uint64(shards-1))
}

// A ShardError is an error of one shard of a [Sharded]. Its other shards may be well.
type ShardError struct {
	Shard, Of int   // the shard's number, from 0, and the number of shards
	Err       error // the error of its [Combiner]
}

func (e *ShardError) Error() string {
	return fmt.Sprintf("pgratelimit: shard %d of %d: %s", e.Shard, e.Of, strings.TrimPrefix(e.Err.Error(), "pgratelimit: "))
}

func (e *ShardError) Unwrap() error { return e.Err }

// CheckShard returns a function that finds out whether a connection leads to the shard of this number. As AfterConnect of
// a pgxpool.Config it refuses all other connections: after a database was moved, a name or a pooler may
// still, or already, lead elsewhere. [NewSharded] asks once; this function asks for each connection. The option is [Schema].
//
// Errors: [ErrWrongShard], in a [*ShardError].
func CheckShard(shard, of int, opts ...Option) func(context.Context, *pgx.Conn) error {
	config := newConfig("CheckShard", aLimiter, opts)
	return func(ctx context.Context, conn *pgx.Conn) error {
		l := newLimiter(conn, config)
		if err := l.checkShard(ctx, shard, of); err != nil {
			return &ShardError{shard, of, err}
		}
		return nil
	}
}

// CheckAlone is CheckShard for a program of one database: it refuses connections to a database that is one of several shards. The
// option [Alone] asks once.
//
// Errors: [ErrWrongShard].
func CheckAlone(opts ...Option) func(context.Context, *pgx.Conn) error {
	config := newConfig("CheckAlone", aLimiter, opts)
	return func(ctx context.Context, conn *pgx.Conn) error {
		l := newLimiter(conn, config)
		return l.checkShard(ctx, 0, alone)
	}
}

// alone is the number of shards of a database that is not one of several.
const alone = 0

// A place is the shard that a limiter's database must be. It is checked before the first call.
type place struct {
	shard, of int
	isChecked atomic.Bool
}

// at is the option of a limiter that must be in a place. Limiters with the same options are each checked.
func at(shard, of int) Option {
	return option{set: func(c *config) { c.place = &place{shard: shard, of: of} }}
}

// checkPlace returns an error if the database is in another place than the limiter's.
func (l *limiter) checkPlace(ctx context.Context) error {
	if l.place == nil || l.place.isChecked.Load() {
		return nil
	}
	err := l.checkShard(ctx, l.place.shard, l.place.of)
	if err == nil {
		l.place.isChecked.Store(true)
	}
	return err
}

// checkShard returns an error unless the database is the shard of this number, or alone.
func (l *limiter) checkShard(ctx context.Context, shard, of int) error {
	where, isShard, isOf, err := l.whichShard(ctx)
	if err != nil {
		return err
	}
	switch {
	case of == alone && isOf > 1:
		err = fmt.Errorf("%w: %s is shard %d of %d: buckets of most keys are elsewhere, and would be full here. List all %d databases, in "+
			"SHARD_URLS for pgratelimit and for NewSharded in Go", ErrWrongShard, where, isShard, isOf, isOf)
	case of == alone:
	case isOf == 0:
		err = fmt.Errorf("%w: %s is no shard. If it is new and meant to be this one, run there: select ratelimit_define_shard(%d, %d);",
			ErrWrongShard, where, shard, of)
	case isOf != of:
		err = fmt.Errorf("%w: %s is shard %d of %d. List all %d databases, in the order of their numbers",
			ErrWrongShard, where, isShard, isOf, isOf)
	case isShard != shard:
		err = fmt.Errorf("%w: %s is shard %d of %d. List the databases in the order of their numbers, each once",
			ErrWrongShard, where, isShard, isOf)
	}
	return failed(verbCheck, err)
}

// whichShard returns a name of the database, its shard number, and the number of shards: 0 if it is no shard.
func (l *limiter) whichShard(ctx context.Context) (where string, shard, of int, err error) {
	var database string
	var host pgtype.Text
	var port, isShard, isOf pgtype.Int8
	asks := *l
	asks.place = nil
	err = asks.query(ctx, call{
		verb: verbCheck,
		columns: "pg_catalog.current_database()::text, pg_catalog.host(pg_catalog.inet_server_addr()), pg_catalog.inet_server_port()::bigint, " +
			"pg_catalog.max(shard)::bigint, pg_catalog.max(of)::bigint", // one row, also without a shard
		function: "ratelimit_shard()",
		once:     true,
	}, &database, &host, &port, &isShard, &isOf)
	where = fmt.Sprintf("database %q", database)
	if host.Valid { // it is no Unix socket
		where += fmt.Sprintf(" of the server at %s:%d", host.String, port.Int64)
	}
	return where, int(isShard.Int64), int(isOf.Int64), err
}

// isSilence reports whether a database that failed to answer may be well later, under any name: it cannot be
// reached, is starting or stopping, or has no place for another connection.
func isSilence(err error) bool {
	if errors.Is(err, ErrWrongShard) {
		return false
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return true
	}
	switch pgErr.Code[:min(2, len(pgErr.Code))] {
	case "08", "53", "57", "58": // connection, resources, operator intervention, system
		return true
	}
	return false
}
