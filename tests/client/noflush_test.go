package client_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestNoFlush_IsForItsCallsAlone(t *testing.T) {
	t.Parallel()
	quiet, _ := kit.NewPrivateDB(t, "autovacuum=off", "checkpoint_timeout=1h", "cron.launch_active_jobs=off",
		"wal_writer_delay=10s", "wal_writer_flush_after=1GB") // nobody else writes, and the server itself rarely flushes
	db := quiet.DB
	ctx := t.Context()
	pool := kit.Pool(t, db.URL+"&pool_max_conns=1") // all in one session, where a setting that stays would be found

	plain := client.New(pool)
	unflushed := client.New(pool, client.NoFlush())
	combiner := client.NewCombiner(pool, client.NoFlush(), client.CallsInFlight(1))
	defer combiner.Close()

	require.NoError(t, plain.DefinePolicy(ctx, client.Policy{Name: "gate", Capacity: 1000, Refill: 1, Every: time.Hour}))
	n := 0
	define := func(limiter *client.Limiter) func() error {
		return func() error {
			n++
			return limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 1000, Refill: 1, Every: time.Duration(n) * time.Hour})
		}
	}
	acquire := func(limiter client.Acquirer, opts ...client.CallOption) func() error {
		return func() error {
			n++
			return kit.ErrorOf(limiter.Acquire(ctx, "api", fmt.Sprint("key:", n/2), opts...))
		}
	}
	for _, step := range []struct {
		name    string
		flushes bool
		call    func() error
	}{
		{"define policy of a limiter that does not flush", true, define(unflushed)},
		{"acquire", true, acquire(plain)},
		{"acquire, unflushed", false, acquire(unflushed)},
		{"acquire with an idempotency key, unflushed", false, acquire(unflushed, once...)},
		{"acquire again", true, acquire(plain)},
		{"acquire all, unflushed", false, func() error {
			return kit.ErrorOf(unflushed.AcquireAll(ctx, []client.Charge{{Policy: "api", Key: "k"}, {Policy: "api", Key: "l"}}))
		}},
		{"acquire, combiner with nothing to combine", false, acquire(combiner)},
		{"acquire, combined", false, func() error {
			for _, got := range combine(t, db, combiner, []request{{"api", "k", nil}, {"api", "l", nil}, {"api", "k", nil}})() {
				require.NoError(t, got.err)
			}
			return nil
		}},
		{"refund, unflushed", false, func() error { return kit.ErrorOf(unflushed.Refund(ctx, "api", "k", 1)) }},
		{"refund", true, func() error { return kit.ErrorOf(plain.Refund(ctx, "api", "k", 1)) }},
		{"reset, unflushed", false, func() error { return unflushed.Reset(ctx, "api", "k") }},
	} {
		// The server flushes now and then by itself: what looks like a flush is tried again.
		for try := 1; ; try++ {
			before, _ := positions(t, db)
			require.NoError(t, step.call(), step.name)
			written, flushed := positions(t, db)
			require.Greater(t, written, before, step.name)
			if step.flushes {
				require.Greater(t, flushed, before, "%s is flushed", step.name)
				break
			}
			if flushed < written {
				break
			}
			require.Less(t, try, 3, "%s is not flushed", step.name)
		}
	}
	require.Equal(t, "on", kit.One[string](t, pool, "show synchronous_commit"))
}

// The caller's commit is the caller's.
func TestNoFlush_IsRefusedInATransaction(t *testing.T) {
	db := pgtest.Parallel(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	ctx := t.Context()
	for name, handle := range handles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			querier := handle.open(t, connect(t, db, nil))
			limiter := client.New(querier, client.NoFlush())
			_, acquire := limiter.Acquire(ctx, "api", name)
			_, acquireAll := limiter.AcquireAll(ctx, []client.Charge{{Policy: "api", Key: name}})
			_, refund := limiter.Refund(ctx, "api", name, 1)
			reset := limiter.Reset(ctx, "api", name)
			for verb, err := range map[string]error{"acquire": acquire, "acquire all": acquireAll, "refund": refund, "reset": reset} {
				if handle.retries { // each call is a transaction of its own
					require.NoError(t, err)
					continue
				}
				require.ErrorIs(t, err, client.ErrInvalidArgument)
				require.EqualError(t, err, "pgratelimit: "+verb+": invalid argument: NoFlush is for calls outside a transaction")
			}
			// The rest works, and so does the transaction.
			require.EqualValues(t, 10, kit.NoError(limiter.Peek(ctx, "api", name))(t).Remaining)
			require.Equal(t, "on", kit.One[string](t, querier, "show synchronous_commit"))
		})
	}
}

// The commit decides, and nothing has to be known about the type of a transaction. Hooks are those of the pool.
func TestWithTx_LeavesTheFlushToTheCommit(t *testing.T) {
	db := pgtest.Parallel(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	ctx := t.Context()
	tx := begin(t, db.Pool)
	var seen []string
	hooks := client.Hooks{Answered: func(_ context.Context, a client.Answer) { seen = append(seen, a.Operation+" "+string(a.Result())) }}
	limiter := client.New(db.Pool, client.NoFlush(), client.Observe(hooks)).WithTx(tx)
	kit.NoError(limiter.Acquire(ctx, "api", "k"))(t)
	kit.NoError(limiter.Refund(ctx, "api", "k", 1))(t)
	require.NoError(t, limiter.Reset(ctx, "api", "k"))
	require.Equal(t, "on", kit.One[string](t, tx, "show synchronous_commit"))
	require.Equal(t, []string{"acquire allowed", "refund allowed"}, seen)
}

// positions tells up to where the log is written, and up to where it is flushed to disk.
func positions(t *testing.T, db *pgtest.DB) (written, flushed int64) {
	require.NoError(t, db.Pool.QueryRow(context.Background(), `
		select (pg_current_wal_insert_lsn() - '0/0')::bigint, (pg_current_wal_flush_lsn() - '0/0')::bigint`,
	).Scan(&written, &flushed))
	return written, flushed
}
