package client_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestRunCleanup_CallsAndPauses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &fakePool{fakeDB{answers: []any{pgx.ErrNoRows}}}
		ctx, cancel := context.WithCancel(t.Context())
		go client.New(db, client.Schema("app")).RunCleanup(ctx, time.Minute, client.OnError(func(err error) { t.Error(err) }))

		synctest.Wait()
		call := query{`call "app".ratelimit_cleanup_all($1::text::interval)`, []any{"60000000 microseconds"}}
		require.Equal(t, []query{call}, db.sent())
		time.Sleep(time.Minute - 1)
		synctest.Wait()
		require.Len(t, db.sent(), 1)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.Equal(t, []query{call, call}, db.sent())

		cancel()
		synctest.Wait()
		time.Sleep(time.Hour)
		require.Len(t, db.sent(), 2, "it ends with its context; synctest fails when the goroutine does not")
	})
}

func TestRunCleanup_ReportsErrorsAndGoesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("connection refused")
		db := &fakeDB{answers: []any{broken, pgx.ErrNoRows}}
		ctx, cancel := context.WithCancel(t.Context())
		reported := make(chan error, 10)
		go client.New(db).RunCleanup(ctx, time.Minute, client.OnError(func(err error) { reported <- err }))

		synctest.Wait()
		require.Len(t, db.sent(), 1)
		require.Len(t, reported, 1)
		err := <-reported
		require.ErrorIs(t, err, broken)
		require.EqualError(t, err, "pgratelimit: clean up: connection refused")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Len(t, db.sent(), 2)
		require.Empty(t, reported)
		cancel()
		synctest.Wait()
	})
}

func TestRunCleanup_EndOfContextIsNoError(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	db := &fakeDB{answers: []any{context.Canceled}}
	limiter := client.New(cancelling{db, cancel})
	limiter.RunCleanup(ctx, time.Minute, client.OnError(func(err error) { t.Error(err) }))
	require.Len(t, db.sent(), 1)
}

// It replaces the program's logger, so it is not parallel.
func TestRunCleanup_LogsErrorsUnlessTold(t *testing.T) {
	var log strings.Builder
	previous := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(previous)

	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		go client.New(&fakeDB{answers: []any{errors.New("connection refused")}}).RunCleanup(ctx, time.Minute)
		synctest.Wait()
		cancel()
	})
	require.Contains(t, log.String(), `level=WARN msg="rate limit clean-up failed" error="pgratelimit: clean up: connection refused"`)
}

func TestRunCleanup_WantsAnInterval(t *testing.T) {
	t.Parallel()
	const every = "client: RunCleanup: every must be positive"
	require.PanicsWithValue(t, every, func() { client.New(&fakeDB{}).RunCleanup(t.Context(), 0) })
	require.PanicsWithValue(t, every, func() { newShards(t, 2).open(t).RunCleanup(t.Context(), 0) })
}

// A batch that only puts rows off is not the last: behind 21,000 busy buckets there are 1,000 full ones, and
// idempotency keys of a policy that is gone. RunCleanup pauses when nothing is due.
func TestRunCleanup_GoesOnUntilNothingIsDue(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('p', 10, 1, '1 hour')")
	db.Exec(t, `
		insert into ratelimit.buckets (policy_id, key, level, refilled_at, due_at)
		select id, 'busy' || n, 0, now(), now() - interval '2 days' from ratelimit.policies, generate_series(1, 21000) as n
		union all
		select id, 'full' || n, 0, now() - interval '2 days', now() - interval '1 day' from ratelimit.policies, generate_series(1, 1000) as n`)
	db.Exec(t, `
		insert into ratelimit.idempotency_keys (policy_id, key, idempotency_key, cost, remaining, capacity, reset_after, expires_at)
		select 0, 'k', n::text, 1, 1, 1, '0', now() + interval '1 day' from generate_series(1, 1000) as n`)

	running, stop := context.WithCancel(t.Context())
	var cleaning sync.WaitGroup
	cleaning.Go(func() {
		client.New(db.Pool).RunCleanup(running, time.Hour, client.OnError(func(err error) { t.Error(err) }))
	})
	db.Await(t, time.Minute, `
		select (select count(*) from ratelimit.buckets) = 21000 and (select count(*) from ratelimit.idempotency_keys) = 0`)
	stop()
	cleaning.Wait()
}

func TestCleanup_RemovesWhatIsDueAndNothingElse(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx := t.Context()
	limiter := client.New(db.Pool)
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{
		Name: "fast", Capacity: 1, Refill: 1, Every: time.Microsecond, Remember: time.Microsecond,
	}))
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "slow", Capacity: 1, Refill: 1, Every: time.Hour}))
	for _, key := range []string{"a", "b", "c", "d"} {
		for _, policy := range []string{"fast", "slow"} {
			d, err := limiter.Acquire(ctx, policy, key, client.IdempotencyKey("once"))
			require.NoError(t, err)
			require.True(t, d.Allowed)
		}
	}

	db.Exec(t, "update ratelimit.buckets set refilled_at = refilled_at - interval '30 minutes', due_at = due_at - interval '30 minutes'")
	db.Exec(t, "update ratelimit.idempotency_keys set expires_at = expires_at - interval '30 minutes'") // clean-up leaves for 5 what is due

	cleaned, err := limiter.Cleanup(ctx, client.MaxRows(1))
	require.NoError(t, err)
	require.Equal(t, client.Cleaned{Buckets: 1, IdempotencyKeys: 1}, cleaned)

	_, err = limiter.Cleanup(ctx, client.MaxRows(0))
	require.ErrorIs(t, err, client.ErrInvalidArgument)

	running, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		limiter.RunCleanup(running, time.Hour, client.OnError(func(err error) { t.Error(err) }))
	}()
	db.Await(t, time.Minute, `
		select (select count(*) from ratelimit.buckets) = 4 and (select count(*) from ratelimit.idempotency_keys) = 4`)
	stop()
	<-ended
	for _, key := range []string{"a", "b", "c", "d"} {
		d, err := limiter.Acquire(ctx, "slow", key, client.IdempotencyKey("once"))
		require.NoError(t, err)
		require.True(t, d.Replayed)
	}
}

// cancelling ends a context when it is called.
type cancelling struct {
	client.Querier
	cancel func()
}

func (c cancelling) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	c.cancel()
	return c.Querier.QueryRow(ctx, sql, args...)
}
