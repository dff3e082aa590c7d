package client_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// What a Limiter may be on, and whether it may call again. Each is on a session of its own.
var handles = map[string]struct {
	open    func(t *testing.T, pool *pgxpool.Pool) client.Querier
	retries bool
}{
	"pool":                 {func(_ *testing.T, pool *pgxpool.Pool) client.Querier { return pool }, true},
	"embedded pool":        {func(_ *testing.T, pool *pgxpool.Pool) client.Querier { return struct{ *pgxpool.Pool }{pool} }, true},
	"connection of a pool": {func(t *testing.T, pool *pgxpool.Pool) client.Querier { return acquired(t, pool) }, true},
	"connection":           {func(t *testing.T, pool *pgxpool.Pool) client.Querier { return acquired(t, pool).Conn() }, true},
	"connection in a transaction": {func(t *testing.T, pool *pgxpool.Pool) client.Querier {
		return begin(t, acquired(t, pool).Conn()).Conn()
	}, false},
	"connection of a pool in a transaction": {func(t *testing.T, pool *pgxpool.Pool) client.Querier {
		conn := acquired(t, pool)
		kit.NoError(conn.Exec(t.Context(), "begin"))(t)
		return conn
	}, false},
	"transaction of a pool":       {func(t *testing.T, pool *pgxpool.Pool) client.Querier { return begin(t, pool) }, false},
	"transaction of a connection": {func(t *testing.T, pool *pgxpool.Pool) client.Querier { return begin(t, acquired(t, pool).Conn()) }, false},
	"savepoint":                   {func(t *testing.T, pool *pgxpool.Pool) client.Querier { return begin(t, begin(t, pool)) }, false},
}

// lookalike is a transaction that has what tells a pool from one.
type lookalike struct{ pgx.Tx }

func (lookalike) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) {
	return nil, errors.ErrUnsupported
}

func (lookalike) Close() {}

// A Limiter on a transaction makes each call once and remembers nothing, whatever the transaction's type
// has: it is told, and does not guess.
func TestWithTx_IsToldAndDoesNotGuess(t *testing.T) {
	ctx := t.Context()
	cached, app := client.DenialCache(), client.Schema("app")
	kit.InParallel(t, map[string]func(*pgxpool.Pool, pgx.Tx) *client.Limiter{
		"Limiter": func(pool *pgxpool.Pool, tx pgx.Tx) *client.Limiter { return client.New(pool, cached, app).WithTx(tx) },
		"Combiner": func(pool *pgxpool.Pool, tx pgx.Tx) *client.Limiter {
			return client.NewCombiner(pool, cached, app).WithTx(tx)
		},
	}, func(t *testing.T, of func(*pgxpool.Pool, pgx.Tx) *client.Limiter) {
		db := pgtest.Empty(t)
		db.Exec(t, "create schema app")
		require.NoError(t, migrations.Up(ctx, acquired(t, connect(t, db, map[string]string{"search_path": "app"})).Conn()))
		db.Exec(t, "select app.ratelimit_define_policy('api', 10, 1, '1 hour')")

		var tries tryCounter
		pool := connect(t, db, map[string]string{"default_transaction_isolation": "repeatable read"}, tries.count)
		tx := begin(t, pool)
		limiter := of(pool, lookalike{tx})
		for range 2 {
			require.False(t, kit.NoError(limiter.Acquire(ctx, "api", "denied", client.Cost(11)))(t).Allowed)
			kit.NoError(limiter.Acquire(ctx, "api", "k", client.Cost(5)))(t)
		}
		require.False(t, kit.NoError(limiter.Acquire(ctx, "api", "k"))(t).Allowed)
		kit.NoError(limiter.Acquire(ctx, "api", "k"))(t)
		require.EqualValues(t, 6, tries.n.Load(), "no denial is remembered")
		require.NoError(t, tx.Rollback(ctx))
		require.EqualValues(t, 10, kit.NoError(client.New(pool, app).Peek(ctx, "api", "k"))(t).Remaining, "a rollback has taken nothing")

		tx = begin(t, pool)
		_, err := of(pool, tx).Peek(ctx, "api", "k") // a snapshot
		require.NoError(t, err)
		kit.NoError(client.New(pool, app).Acquire(ctx, "api", "k"))(t)
		tries.n.Store(0)
		_, err = of(pool, lookalike{tx}).Acquire(ctx, "api", "k")
		kit.RequireState(t, "40001", err)
		require.EqualValues(t, 1, tries.n.Load(), "no retry")
	})
}

func TestRetry_ASerializationFailureOutsideATransaction(t *testing.T) {
	t.Parallel()
	for name, handle := range handles {
		t.Run(name, func(t *testing.T) {
			db := pgtest.Parallel(t)
			db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour'), ratelimit_acquire('api', 'k')")
			holder := begin(t, db.Pool)
			kit.NoError(client.New(holder).Acquire(t.Context(), "api", "k"))(t)

			var tries tryCounter
			pool := connect(t, db, map[string]string{"default_transaction_isolation": "repeatable read"}, tries.count)
			limiter := client.New(handle.open(t, pool))
			acquire := make(chan answer, 1)
			go func() {
				d, err := limiter.Acquire(context.Background(), "api", "k")
				acquire <- answer{d, err}
			}()
			db.Await(t, time.Minute, "select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')")
			require.NoError(t, holder.Commit(t.Context()))

			got := <-acquire
			if handle.retries {
				require.NoError(t, got.err)
				require.EqualValues(t, 7, got.Remaining)
				require.EqualValues(t, 2, tries.n.Load())
			} else {
				kit.RequireState(t, "40001", got.err)
				require.EqualValues(t, 1, tries.n.Load())
			}
		})
	}
}

type answer struct {
	client.Decision
	err error
}

// tryCounter counts the acquires that a session sends.
type tryCounter struct{ n atomic.Int64 }

func (c *tryCounter) count(config *pgx.ConnConfig) { config.Tracer = c }

func (c *tryCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, "ratelimit_acquire") {
		c.n.Add(1)
	}
	return ctx
}

func (*tryCounter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func acquired(t *testing.T, pool *pgxpool.Pool) *pgxpool.Conn {
	conn := kit.NoError(pool.Acquire(t.Context()))(t)
	t.Cleanup(conn.Release)
	return conn
}

func begin(t *testing.T, db interface {
	Begin(context.Context) (pgx.Tx, error)
}) pgx.Tx {
	tx := kit.NoError(db.Begin(t.Context()))(t)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}
