package client_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestRetry_Policy(t *testing.T) {
	t.Parallel()
	conflict, deadlock, other := pgError("40001"), pgError("40P01"), pgError("57014")
	broken := errors.New("connection reset")
	for name, test := range map[string]struct {
		answers []any
		tries   int
		err     error
	}{
		"a grant":               {[]any{granted(9)}, 1, nil},
		"a conflict":            {[]any{conflict, granted(9)}, 2, nil},
		"a deadlock":            {[]any{deadlock, granted(9)}, 2, nil},
		"both":                  {[]any{deadlock, conflict, granted(9)}, 3, nil},
		"three are enough":      {[]any{conflict, conflict, deadlock, granted(9)}, 3, deadlock},
		"another error":         {[]any{other, granted(9)}, 1, other},
		"another error, later":  {[]any{conflict, other, granted(9)}, 2, other},
		"an unknown outcome":    {[]any{broken, granted(9)}, 1, broken},
		"a denial is an answer": {[]any{row{false, int64(0), int64(1), int64(1), int64(10), false, false}, granted(9)}, 1, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := &fakePool{fakeDB{answers: test.answers}}
				start := time.Now()
				_, err := client.New(db).Acquire(t.Context(), "p", "k")
				require.Len(t, db.sent(), test.tries)
				for _, again := range db.sent()[1:] {
					require.Equal(t, db.sent()[0], again)
				}
				require.ErrorIs(t, err, test.err)
				require.LessOrEqual(t, time.Since(start), 150*time.Millisecond)
			})
		})
	}
}

func TestRetry_NeverOnWhatMayBeATransaction(t *testing.T) {
	t.Parallel()
	for _, opts := range [][]client.AcquireOption{nil, once} {
		db := &fakeDB{answers: []any{pgError("40001"), granted(9)}}
		_, err := client.New(db).Acquire(t.Context(), "p", "k", opts...)
		requireCode(t, "40001", err)
		require.Len(t, db.sent(), 1)
	}
}

// After the loss of a connection nobody knows: only a request that can be sent twice is, and only where
// there are other connections.
func TestRetry_AnUnknownOutcome(t *testing.T) {
	t.Parallel()
	broken, fatal, panicked := errors.New("connection reset"), pgError("57P01"), pgError("XX000")
	fatal.SeverityUnlocalized, panicked.SeverityUnlocalized = "FATAL", "PANIC"
	for _, lost := range []error{broken, fatal, panicked} {
		synctest.Test(t, func(t *testing.T) {
			for _, opts := range [][]client.AcquireOption{nil, once} {
				db := &fakePool{fakeDB{answers: []any{lost, granted(9)}}}
				_, err := client.New(db).Acquire(t.Context(), "p", "k", opts...)
				require.Len(t, db.sent(), 1+len(opts))
				if opts == nil {
					require.ErrorIs(t, err, lost)
				} else {
					require.NoError(t, err)
				}
			}
			db := &fakeDB{answers: []any{lost, granted(9)}}
			_, err := client.New(db).Acquire(t.Context(), "p", "k", once...)
			require.ErrorIs(t, err, lost)
			require.Len(t, db.sent(), 1, "it may be a connection")

			pool := &fakePool{fakeDB{answers: []any{lost, granted(9)}}}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			_, err = client.New(pool).Acquire(ctx, "p", "k", once...)
			require.EqualError(t, err, "pgratelimit: acquire: "+lost.Error())
			require.Len(t, pool.sent(), 1)

			pool = &fakePool{fakeDB{answers: []any{lost, granted(9)}}}
			_, err = client.New(pool).Refund(t.Context(), "p", "k", 1)
			require.ErrorIs(t, err, lost)
			require.Len(t, pool.sent(), 1)
		})
	}
}

func TestRetry_BackoffIsRandomAndBounded(t *testing.T) {
	t.Parallel()
	for n, limit := range map[int]time.Duration{
		1: 50 * time.Millisecond,
		2: 100 * time.Millisecond,
		4: 400 * time.Millisecond,
		5: 500 * time.Millisecond,
		9: 500 * time.Millisecond,
	} {
		var low, high bool
		for range 200 {
			pause := client.Backoff(n)
			require.GreaterOrEqual(t, pause, time.Duration(0))
			require.Less(t, pause, limit)
			low = low || pause < limit/4
			high = high || pause > limit*3/4
		}
		require.True(t, low && high, "200 pauses after try %d fill the range up to %v", n, limit)
	}
}

func TestRetry_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		db := &fakePool{fakeDB{answers: []any{pgError("40001")}}}
		cancel()
		start := time.Now()
		_, err := client.New(db).Acquire(ctx, "p", "k")
		require.Len(t, db.sent(), 1)
		require.Zero(t, time.Since(start))
		require.ErrorIs(t, err, context.Canceled)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr, "the reason for a retry is not lost")
	})
}

// What a Limiter may be on, and whether it may call again. Each is on a session of its own.
var handles = map[string]struct {
	open    func(t *testing.T, pool *pgxpool.Pool) client.Querier
	retries bool
}{
	"pool": {func(_ *testing.T, pool *pgxpool.Pool) client.Querier {
		return pool
	}, true},
	"embedded pool": {func(_ *testing.T, pool *pgxpool.Pool) client.Querier {
		return struct{ *pgxpool.Pool }{pool}
	}, true},
	"connection of a pool": {func(t *testing.T, pool *pgxpool.Pool) client.Querier {
		return acquired(t, pool)
	}, true},
	"connection": {func(t *testing.T, pool *pgxpool.Pool) client.Querier {
		return acquired(t, pool).Conn()
	}, true},
	"connection in a transaction": {func(t *testing.T, pool *pgxpool.Pool) client.Querier {
		conn := acquired(t, pool).Conn()
		_, err := conn.Exec(t.Context(), "begin")
		require.NoError(t, err)
		return conn
	}, false},
	"connection of a pool in a transaction": {func(t *testing.T, pool *pgxpool.Pool) client.Querier {
		conn := acquired(t, pool)
		_, err := conn.Exec(t.Context(), "begin")
		require.NoError(t, err)
		return conn
	}, false},
	"transaction of a pool": {func(t *testing.T, pool *pgxpool.Pool) client.Querier {
		return begin(t, pool)
	}, false},
	"transaction of a connection": {func(t *testing.T, pool *pgxpool.Pool) client.Querier {
		return begin(t, acquired(t, pool).Conn())
	}, false},
	"savepoint": {func(t *testing.T, pool *pgxpool.Pool) client.Querier {
		return begin(t, begin(t, pool))
	}, false},
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
	t.Parallel()
	ctx := t.Context()
	for name, of := range map[string]func(pool *pgxpool.Pool) interface{ WithTx(pgx.Tx) *client.Limiter }{
		"Limiter": func(pool *pgxpool.Pool) interface{ WithTx(pgx.Tx) *client.Limiter } {
			return client.New(pool, client.DenialCache(), client.Schema("app"))
		},
		"Combiner": func(pool *pgxpool.Pool) interface{ WithTx(pgx.Tx) *client.Limiter } {
			return client.NewCombiner(pool, client.DenialCache(), client.Schema("app"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			db.Exec(t, "create schema app")
			installer := acquired(t, connect(t, db, map[string]string{"search_path": "app"}))
			require.NoError(t, migrations.Up(ctx, installer.Conn()))
			db.Exec(t, "select app.ratelimit_define_policy('api', 10, 1, '1 hour')")

			var tries tryCounter
			pool := connect(t, db, map[string]string{"default_transaction_isolation": "repeatable read"}, tries.count)
			tx := begin(t, pool)
			limiter := of(pool).WithTx(lookalike{tx})
			for range 2 {
				d, err := limiter.Acquire(ctx, "api", "denied", client.Cost(11))
				require.NoError(t, err)
				require.False(t, d.Allowed)
				_, err = limiter.Acquire(ctx, "api", "k", client.Cost(5))
				require.NoError(t, err)
			}
			denied, err := limiter.Acquire(ctx, "api", "k")
			require.NoError(t, err)
			require.False(t, denied.Allowed)
			_, err = limiter.Acquire(ctx, "api", "k")
			require.NoError(t, err)
			require.EqualValues(t, 6, tries.n.Load(), "no denial is remembered")
			require.NoError(t, tx.Rollback(ctx))
			d, err := client.New(pool, client.Schema("app")).Peek(ctx, "api", "k")
			require.NoError(t, err)
			require.EqualValues(t, 10, d.Remaining, "a rollback has taken nothing")

			tx = begin(t, pool)
			_, err = of(pool).WithTx(tx).Peek(ctx, "api", "k") // a snapshot
			require.NoError(t, err)
			_, err = client.New(pool, client.Schema("app")).Acquire(ctx, "api", "k")
			require.NoError(t, err)
			tries.n.Store(0)
			_, err = of(pool).WithTx(lookalike{tx}).Acquire(ctx, "api", "k")
			requireCode(t, "40001", err)
			require.EqualValues(t, 1, tries.n.Load(), "no retry")
		})
	}
}

func TestRetry_RealSerializationFailure(t *testing.T) {
	t.Parallel()
	for name, handle := range handles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour'), ratelimit_acquire('api', 'k')")
			holder := begin(t, db.Pool)
			_, err := client.New(holder).Acquire(t.Context(), "api", "k")
			require.NoError(t, err)

			var tries tryCounter
			pool := connect(t, db, map[string]string{"default_transaction_isolation": "repeatable read"}, tries.count)
			limiter := client.New(handle.open(t, pool))
			acquire := make(chan answer, 1)
			go func() { acquire <- acquireOne(limiter, "k") }()
			db.Await(t, time.Minute, waiting, 1)
			require.NoError(t, holder.Commit(t.Context()))

			got := <-acquire
			if handle.retries {
				require.NoError(t, got.err)
				require.EqualValues(t, 7, got.Remaining)
				require.EqualValues(t, 2, tries.n.Load())
			} else {
				requireCode(t, "40001", got.err)
				require.EqualValues(t, 1, tries.n.Load())
			}
		})
	}
}

func TestRetry_RealDeadlock(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"pool", "connection", "transaction of a pool"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			handle := handles[name]
			db := pgtest.New(t)
			db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
			// Two acquires take two locks in opposite order, and meet at a gate between the two.
			db.Exec(t, `
				create function cross_locks() returns trigger language plpgsql as $$
				declare
				  v_first integer := case new.key when 'a' then 1 else 2 end;
				begin
				  perform pg_advisory_xact_lock(v_first);
				  perform pg_advisory_xact_lock_shared(0);
				  perform pg_advisory_xact_lock(3 - v_first);
				  return new;
				end $$;
				create trigger cross_locks before insert on ratelimit.buckets
				  for each row execute function public.cross_locks()`)
			gate := begin(t, db.Pool)
			_, err := gate.Exec(t.Context(), "select pg_advisory_xact_lock(0)")
			require.NoError(t, err)

			var tries tryCounter
			pool := connect(t, db, nil, tries.count)
			acquires := make(chan answer, 2)
			for _, key := range []string{"a", "b"} {
				limiter := client.New(handle.open(t, pool))
				go func() { acquires <- acquireOne(limiter, key) }()
			}
			db.Await(t, time.Minute, waiting, 2)
			require.NoError(t, gate.Rollback(t.Context()))

			one, other := <-acquires, <-acquires
			if handle.retries {
				require.NoError(t, one.err)
				require.NoError(t, other.err)
				require.EqualValues(t, 3, tries.n.Load())
			} else {
				require.NotEqual(t, one.err == nil, other.err == nil, "one of a deadlock is the victim")
				requireCode(t, "40P01", errors.Join(one.err, other.err))
				require.EqualValues(t, 2, tries.n.Load())
			}
		})
	}
}

// True when this many sessions of the database wait for a lock.
const waiting = `
	select count(*) = $1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`

type answer struct {
	client.Decision
	err error
}

func acquireOne(limiter *client.Limiter, key string) answer {
	d, err := limiter.Acquire(context.Background(), "api", key)
	return answer{d, err}
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
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	return conn
}

func begin(t *testing.T, db interface {
	Begin(context.Context) (pgx.Tx, error)
}) pgx.Tx {
	t.Helper()
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func requireCode(t *testing.T, code string, err error) {
	t.Helper()
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, code, pgErr.Code)
}
