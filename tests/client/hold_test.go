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

// The work may last longer than the lease, and whoever waits gets the slot when it is released.
func TestHold_OutlastsItsLease(t *testing.T) {
	t.Parallel()
	const lease = time.Second
	db := newJobs(t, 1, lease)
	limiter := client.New(db.Pool)
	h, _, err := limiter.Hold(t.Context(), "jobs", "k")
	require.NoError(t, err)
	var released atomic.Bool
	time.AfterFunc(3*lease, func() {
		released.Store(true)
		if err := h.Context().Err(); err != nil {
			t.Errorf("the lease was lost: %v", err)
		}
		if err := h.Release(context.Background()); err != nil {
			t.Error(err)
		}
	})
	next, d, err := limiter.HoldWait(t.Context(), "jobs", "k")
	require.NoError(t, err)
	require.True(t, released.Load())
	require.True(t, d.Allowed)
	require.Equal(t, []string{next.Holder()}, []string{holders(t, db)[0].Holder})
	require.NoError(t, next.Release(t.Context()))
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
	t.Parallel()
	const lease = 4 * time.Second
	db := newJobs(t, 2, lease)
	pool := connect(t, db, map[string]string{"statement_timeout": "200ms"})
	var renewals, failures atomic.Int64
	limiter := client.New(pool, client.Observe(client.Hooks{Answered: func(_ context.Context, a client.Answer) {
		if a.Operation == "renew" {
			renewals.Add(1)
			if a.Err != nil {
				failures.Add(1)
			}
		}
	}}))
	h, _, err := limiter.Hold(t.Context(), "jobs", "k")
	require.NoError(t, err)
	tx := stall(t, db)

	_, _, err = limiter.Hold(t.Context(), "jobs", "k")
	kit.RequireState(t, "57014", err)
	_, _, err = client.New(connect(t, db, map[string]string{"lock_timeout": "100ms"})).Hold(t.Context(), "jobs", "k")
	require.ErrorIs(t, err, client.ErrLocked)
	_, _, err = limiter.Hold(t.Context(), "jobs", "other")
	require.NoError(t, err, "another key waits for nothing")
	require.Eventually(t, func() bool { return failures.Load() > 0 }, lease, time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
	renewed := renewals.Load() - failures.Load()
	require.Eventually(t, func() bool { return renewals.Load()-failures.Load() > renewed }, lease, time.Millisecond)
	require.NoError(t, h.Context().Err())
	require.Len(t, holders(t, db), 2)

	tx = stall(t, db)
	kit.RequireState(t, "57014", h.Release(t.Context()))
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, h.Release(t.Context()), "once more")
	require.Len(t, holders(t, db), 1)
}

// Many holders that come and go, whose contexts end at any moment: no goroutine, connection or slot is left, and there are never more
// than the capacity at work.
func TestHold_LeaksNothing(t *testing.T) {
	pgtest.OncePerServer(t)
	const capacity, keys, callers, calls = 3, 4, 20, 500
	db := newJobs(t, capacity, 2*time.Second)
	config := kit.NoError(pgxpool.ParseConfig(db.URL))(t)
	config.MaxConns = 8
	before := goleak.IgnoreCurrent()
	pool := kit.NoError(pgxpool.NewWithConfig(t.Context(), config))(t)
	limiter := client.New(pool)
	var atWork [keys]atomic.Int64
	var granted, cancelled atomic.Int64
	kit.Crowd(t, callers, func(caller int) error {
		for i := range calls {
			n := (caller + i) % keys
			timeout := time.Minute
			if i%3 == 0 {
				timeout = time.Duration((caller*31+i*17)%3000) * time.Microsecond
			}
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
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
	// A call that was cancelled may hold until its release in the background, or until its lease ends.
	require.Eventually(t, func() bool { return len(holders(t, db)) == 0 }, 20*time.Second, 10*time.Millisecond)
	require.Eventually(t, func() bool { return pool.Stat().AcquiredConns() == 0 }, 20*time.Second, time.Millisecond)
	pool.Close()
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
			if err := says.Encode(line); err != nil || line.Ended {
				return err
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
func TestHold_AFrozenProcess(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	const lease = time.Second
	db := newJobs(t, 1, lease)
	for range 3 {
		p := startHolder(t, db, lease)
		require.NoError(t, p.Process.Signal(syscall.SIGSTOP))
		next, _, err := client.New(db.Pool).HoldWait(t.Context(), "jobs", "k")
		require.NoError(t, err)
		time.Sleep(lease / 2) // the client's count begins earlier, and its clock is another's
		continued := time.Now()
		require.NoError(t, p.Process.Signal(syscall.SIGCONT))
		// A process that was stopped between its two looks has one of them from before.
		first := p.drain(t, func(l holderLine) bool { return l.Ended || l.At.After(continued) })
		require.True(t, first.Ended, "it went on")
		require.Equal(t, client.ErrLeaseLost.Error(), first.Cause)
		require.NoError(t, p.Wait())
		require.NoError(t, next.Context().Err())
		require.NoError(t, next.Release(t.Context()))
	}
}
