package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// newJobs is a database with slots of jobs.
func newJobs(t *testing.T, capacity int64, lease time.Duration) *pgtest.DB {
	db := pgtest.New(t)
	require.NoError(t, client.New(db.Pool).DefinePolicy(t.Context(), client.Policy{Name: "jobs", Capacity: capacity, Lease: lease}))
	return db
}

func holders(t *testing.T, db *pgtest.DB) []client.Holder {
	return kit.NoError(client.New(db.Pool).Holders(t.Context()))(t)
}

// After a failover in which all answers were lost, a call that was committed leaves no slot held, and no token charged, for a caller who
// was told that it failed. The lease is a minute, and no token is refilled.
func TestHold_AndWaitUndoWhatWasCommittedAndNotAnswered(t *testing.T) {
	t.Parallel()
	const lease = time.Minute
	db := &kit.TestDB{DB: newJobs(t, 1, lease), T: t}
	direct := client.New(db.Pool)
	require.NoError(t, direct.DefinePolicy(t.Context(), client.Policy{Name: "budget", Capacity: 1, Refill: client.Zero, Every: time.Second}))
	remaining := func() int64 { return kit.NoError(direct.Peek(t.Context(), "budget", "k"))(t).Remaining }
	for name, test := range map[string]struct {
		call func(*client.Limiter) error
		free func() bool
	}{
		"Hold": {func(l *client.Limiter) error { return third(l.Hold(t.Context(), "jobs", "k")) }, func() bool { return len(holders(t, db.DB)) == 0 }},
		"Wait": {func(l *client.Limiter) error { return kit.ErrorOf(l.Wait(t.Context(), "budget", "k")) }, func() bool { return remaining() == 1 }},
	} {
		proxy := kit.NewProxy(t, db)
		pool := proxy.Pool(t, db, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec }) // one message a call
		kit.NoError(pool.Exec(t.Context(), "select 1"))(t)
		proxy.Plan(func(reply bool) kit.Fault {
			if !reply {
				return kit.Pass
			}
			for test.free() { // until the call is committed, and only its answer is lost
				time.Sleep(time.Millisecond)
			}
			return kit.Reset
		})
		require.Error(t, test.call(client.New(pool)), name)
		require.False(t, test.free(), name)
		proxy.Heal()
		require.Eventually(t, test.free, lease/2, 10*time.Millisecond, name)
		pool.Close()
	}
}

// A server that is not told to stop in time may carry out a call when the slots or tokens were found free twice.
func TestHold_AndWaitUndoWhatTheServerDidNotStop(t *testing.T) {
	t.Parallel()
	hold := func(ctx context.Context, l *client.Limiter) error { return third(l.Hold(ctx, "jobs", "k")) }
	wait := func(ctx context.Context, l *client.Limiter) error { return kit.ErrorOf(l.Wait(ctx, "budget", "k")) }
	for name, test := range map[string]struct {
		call   func(context.Context, *client.Limiter) error
		block  string
		undo   string
		simple bool
	}{
		"Hold":                     {call: hold, block: "ratelimit_hold('jobs', 'k', 'other')", undo: "release"},
		"Hold, by simple protocol": {call: hold, block: "ratelimit_hold('jobs', 'k', 'other')", undo: "release", simple: true},
		"Wait":                     {call: wait, block: "ratelimit_acquire('budget', 'k')", undo: "settle"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newJobs(t, 1, time.Hour)
			direct := client.New(db.Pool)
			require.NoError(t, direct.DefinePolicy(t.Context(), client.Policy{Name: "budget", Capacity: 1, Refill: client.Zero, Every: time.Second}))
			sessions := func(n int, are string) func() bool {
				return func() bool {
					return n == kit.One[int](t, db.Pool, "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and "+are)
				}
			}
			undone, failed := make(chan struct{}, 100), make(chan error, 1)
			limiter := client.New(connect(t, db, nil, func(c *pgx.ConnConfig) {
				dial := c.DialFunc
				c.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
					conn, err := dial(ctx, network, address)
					return cancelLoser{conn}, err
				}
				if test.simple {
					c.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
				}
			}), client.Observe(client.Hooks{Answered: func(_ context.Context, a client.Answer) {
				if a.Operation == test.undo {
					undone <- struct{}{}
				}
			}}))

			blocker := kit.NoError(db.Pool.Begin(t.Context()))(t)
			defer func() { _ = blocker.Rollback(context.Background()) }()
			kit.NoError(blocker.Exec(t.Context(), "select "+test.block))(t)
			ctx, cancel := context.WithCancel(t.Context())
			go func() { failed <- test.call(ctx, limiter) }()
			require.Eventually(t, sessions(1, "wait_event_type = 'Lock'"), time.Minute, time.Millisecond)
			cancel()
			require.ErrorIs(t, <-failed, context.Canceled)
			for range 3 {
				select {
				case <-undone:
				case <-time.After(time.Minute):
					require.Fail(t, "it is not undone any more")
				}
			}
			require.NoError(t, blocker.Rollback(t.Context()))
			require.Eventually(t, sessions(0, "state = 'active'"), time.Minute, time.Millisecond)
			require.Eventually(t, func() bool {
				return len(holders(t, db)) == 0 && kit.NoError(direct.Peek(t.Context(), "budget", "k"))(t).Remaining == 1
			}, time.Minute, time.Millisecond)
		})
	}
}

// A cancelLoser loses requests to cancel on their way.
type cancelLoser struct{ net.Conn }

func (c cancelLoser) Write(b []byte) (int, error) {
	if len(b) > 8 && binary.BigEndian.Uint32(b[4:]) == 80877102 {
		return len(b), c.Close()
	}
	return c.Conn.Write(b)
}

func third[A, B any](_ A, _ B, err error) error { return err }

// Many holders that come and go, whose contexts end at any moment: no goroutine, connection or slot is left, and there are never more
// than the capacity at work.
func TestHold_LeaksNothing(t *testing.T) {
	pgtest.OncePerServer(t)
	const capacity, keys, callers, calls, lease = 3, 4, 20, 500, time.Minute // which ends for nobody who is only slow
	db := newJobs(t, capacity, lease)
	before := goleak.IgnoreCurrent()
	pool := smallPool(t, db)
	limiter := client.New(pool)
	var atWork [keys]atomic.Int64
	var granted, cancelled atomic.Int64
	kit.Crowd(t, callers, func(caller int) error {
		for i := range calls {
			n := (caller + i) % keys
			ctx, cancel := impatient(caller, i)
			h, d, err := limiter.Hold(ctx, "jobs", fmt.Sprint(n))
			switch {
			case err != nil && ctx.Err() == nil:
				cancel()
				return err
			case err != nil:
				cancelled.Add(1)
			case d.Allowed:
				granted.Add(1)
				if at := atWork[n].Add(1); at > capacity {
					err = fmt.Errorf("%d at work", at)
				}
				if i%2 == 0 {
					cancel()
				}
				atWork[n].Add(-1)
				if err = errors.Join(err, h.Release(ctx)); err != nil {
					cancel()
					return err
				}
			}
			cancel()
		}
		return nil
	})
	require.Greater(t, granted.Load(), int64(1000))
	require.Greater(t, cancelled.Load(), int64(100))
	require.Eventually(t, func() bool { return len(holders(t, db)) == 0 }, 20*time.Second, 10*time.Millisecond, "the cancelled calls, too")
	require.Eventually(t, func() bool { return pool.Stat().AcquiredConns() == 0 }, 20*time.Second, time.Millisecond)
	pool.Close()
	kit.RequireNoLeak(t, before) // what cancelled calls left in the background ends within 11 seconds
}
