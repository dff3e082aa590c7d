package client_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
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

// heldLease is the lease of jobs in [asLong]. A renewal is due when a third of it is over.
const heldLease = time.Minute

// asLong runs a test in a bubble, where time stands still until all goroutines sleep: no machine is too slow there to renew in
// time. pass sleeps, and moves the server's clock by as much.
func asLong(t *testing.T, capacity int64, test func(t *testing.T, db *pgtest.DB, pass func(time.Duration))) {
	t.Parallel()
	outside := newJobs(t, capacity, heldLease)
	synctest.Test(t, func(t *testing.T) {
		db := &kit.TestDB{DB: &pgtest.DB{Pool: connect(t, outside, nil), URL: outside.URL}, T: t}
		now := kit.T0
		db.SetClock(now)
		test(t, db.DB, func(d time.Duration) {
			time.Sleep(d)
			now = now.Add(d)
			db.SetClock(now)
		})
	})
}

// The work may last longer than the lease, and whoever waits gets the slot when it is released.
func TestHold_OutlastsItsLease(t *testing.T) {
	asLong(t, 1, func(t *testing.T, db *pgtest.DB, pass func(time.Duration)) {
		limiter := client.New(db.Pool)
		h, _, err := limiter.Hold(t.Context(), "jobs", "k")
		require.NoError(t, err)
		next, failed := make(chan *client.Hold, 1), make(chan error, 1)
		go func() {
			h, _, err := limiter.HoldWait(t.Context(), "jobs", "k")
			next <- h
			failed <- err
		}()
		for range 12 {
			pass(heldLease / 4)
			require.NoError(t, h.Context().Err())
			require.Equal(t, h.Holder(), holders(t, db)[0].Holder)
			require.Empty(t, next)
		}
		require.NoError(t, h.Release(t.Context()))
		waited := <-next
		require.NoError(t, <-failed)
		require.Equal(t, waited.Holder(), holders(t, db)[0].Holder)
		require.NoError(t, waited.Release(t.Context()))
	})
}

// stall returns a transaction that keeps the lock of a key of jobs.
func stall(t *testing.T, db *pgtest.DB) pgx.Tx {
	tx := begin(t, db.Pool)
	kit.NoError(tx.Exec(t.Context(), "select ratelimit_hold('jobs', 'k', 'stalled')"))(t)
	return tx
}

// A transaction that keeps the lock of the key holds up a hold, a renewal and a release. Each fails by statement_timeout,
// or by lock_timeout, and nothing is taken; the renewal is tried again.
func TestHold_StatementAndLockTimeout(t *testing.T) {
	asLong(t, 2, func(t *testing.T, db *pgtest.DB, pass func(time.Duration)) {
		pool := connect(t, db, map[string]string{"statement_timeout": "200ms"})
		renewals := make(chan error, 100)
		renewal := func() error {
			select {
			case err := <-renewals:
				return err
			case <-time.After(heldLease):
				return errors.New("none")
			}
		}
		limiter := client.New(pool, client.Observe(client.Hooks{Answered: func(_ context.Context, a client.Answer) {
			if a.Operation == "renew" {
				renewals <- a.Err
			}
		}}))
		h, _, err := limiter.Hold(t.Context(), "jobs", "k")
		require.NoError(t, err)
		tx := stall(t, db)

		_, _, err = limiter.Hold(t.Context(), "jobs", "k")
		kit.RequireState(t, "57014", err)
		_, _, err = client.New(connect(t, db, map[string]string{"lock_timeout": "100ms"})).Hold(t.Context(), "jobs", "k")
		require.ErrorIs(t, err, client.ErrLocked)
		_, _, err = client.New(pool).Hold(t.Context(), "jobs", "other")
		require.NoError(t, err, "another key waits for nothing")
		pass(heldLease / 3)
		kit.RequireState(t, "57014", renewal())
		require.NoError(t, tx.Rollback(t.Context()))
		pass(time.Second)
		require.NoError(t, renewal())
		require.NoError(t, h.Context().Err())
		require.Len(t, holders(t, db), 2)

		tx = stall(t, db)
		kit.RequireState(t, "57014", h.Release(t.Context()))
		require.NoError(t, tx.Rollback(t.Context()))
		require.NoError(t, h.Release(t.Context()), "once more")
		require.Len(t, holders(t, db), 1)
	})
}

// After a failover in which all answers were lost, a call that was committed leaves no slot held, and no token charged, for a caller who
// was told that it failed. The lease is a minute, and no token is refilled.
func TestHold_AndWaitUndoWhatWasCommittedAndNotAnswered(t *testing.T) {
	t.Parallel()
	db := &kit.TestDB{DB: newJobs(t, 1, heldLease), T: t}
	direct := client.New(db.Pool)
	require.NoError(t, direct.DefinePolicy(t.Context(), client.Policy{Name: "budget", Capacity: 1, Refill: client.Zero, Every: time.Second}))
	remaining := func() int64 {
		return kit.NoError(direct.Peek(t.Context(), "budget", "k"))(t).Remaining
	}
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
		require.Eventually(t, test.free, heldLease/2, 10*time.Millisecond, name)
		pool.Close()
	}
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
	requireNoLeak(t, before)
}

// requireNoLeak waits for what cancelled calls of any test have left in the background, which ends within 11 seconds.
func requireNoLeak(t *testing.T, before goleak.Option) {
	for began := time.Now(); goleak.Find(before) != nil && time.Since(began) < 20*time.Second; {
		time.Sleep(time.Millisecond) // they end by and by
	}
	goleak.VerifyNone(t, before)
}

const asHolder = "RATELIMIT_TEST_HOLDER"

// A holderProcess is another process with a slot of jobs, which it uses all the time.
type holderProcess struct {
	*exec.Cmd
	lines chan holderLine
}

// A holderLine is what it says: the time at which it had looked at its context, and whether that had ended.
type holderLine struct {
	At    time.Time
	Ended bool
	Cause string
}

// beHolder reports whether this process is one, and is done.
func beHolder() bool {
	url := os.Getenv(asHolder)
	if url == "" {
		return false
	}
	err := func() error {
		pool, err := pgxpool.New(context.Background(), url)
		if err != nil {
			return err
		}
		h, d, err := client.New(pool).Hold(context.Background(), "jobs", "k")
		if err != nil || !d.Allowed {
			return fmt.Errorf("%+v: %w", d, err)
		}
		says := json.NewEncoder(os.Stdout)
		for {
			line := holderLine{At: time.Now()}
			if h.Context().Err() != nil {
				line.Ended, line.Cause = true, fmt.Sprint(context.Cause(h.Context()))
			}
			if err := says.Encode(line); err != nil {
				return err
			}
			if line.Ended {
				select {} // until it is killed
			}
		}
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return true
}

// startHolder returns when the process has held for longer than its lease.
func startHolder(t *testing.T, db *pgtest.DB, lease time.Duration) *holderProcess {
	p := &holderProcess{Cmd: exec.Command(os.Args[0]), lines: make(chan holderLine, 1)}
	p.Env = append(os.Environ(), asHolder+"="+db.URL)
	p.Stderr = os.Stderr
	out := kit.NoError(p.StdoutPipe())(t)
	require.NoError(t, p.Start())
	t.Cleanup(func() { _ = p.Process.Kill() })
	go func() {
		defer close(p.lines)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			var line holderLine
			if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
				t.Error(err)
			}
			p.lines <- line
		}
		_, _ = io.Copy(io.Discard, out)
	}()
	_, ok := <-p.lines
	require.True(t, ok)
	renewed := time.Now().Add(2 * lease)
	p.drain(t, func(l holderLine) bool { return l.Ended || l.At.After(renewed) })
	return p
}

// drain reads what the process says, until a line that is wanted.
func (p *holderProcess) drain(t *testing.T, until func(holderLine) bool) holderLine {
	for line := range p.lines {
		if until(line) {
			return line
		}
	}
	require.Fail(t, "it has ended")
	return holderLine{}
}

// A process that did not run for longer than its lease finds its context ended before it does anything else, and by then its
// slot was another's.
func TestHold_AFrozenProcessFindsItsLeaseLost(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	const lease = time.Second
	db := newJobs(t, 1, lease)
	for trials, frozen := 1, 0; frozen < 3; trials++ {
		require.LessOrEqual(t, trials, 20, "it loses what it should renew")
		p := startHolder(t, db, lease)
		require.NoError(t, p.Process.Signal(syscall.SIGSTOP))
		next, _, err := client.New(db.Pool).HoldWait(t.Context(), "jobs", "k")
		require.NoError(t, err)
		continued := time.Now()
		require.NoError(t, p.Process.Signal(syscall.SIGCONT))
		// A process that was stopped between its two looks has one of them from before.
		first := p.drain(t, func(l holderLine) bool { return l.Ended || l.At.After(continued) })
		require.True(t, first.Ended, "it went on")
		require.Equal(t, client.ErrLeaseLost.Error(), first.Cause)
		require.NoError(t, p.Process.Kill())
		_ = p.Wait() // killed
		require.NoError(t, next.Release(t.Context()))
		if first.At.After(continued) { // else it may have been too slow to renew before it was stopped
			frozen++
		}
	}
}
