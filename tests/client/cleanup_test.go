package client_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestRunCleanup_WantsAnInterval(t *testing.T) {
	t.Parallel()
	const every = "client: RunCleanup: every must be positive"
	require.PanicsWithValue(t, every, func() { client.New(nil).RunCleanup(t.Context(), 0) })
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
			require.True(t, noError(limiter.Acquire(ctx, policy, key, client.IdempotencyKey("once")))(t).Allowed)
		}
	}

	db.Exec(t, "update ratelimit.buckets set refilled_at = refilled_at - interval '30 minutes', due_at = due_at - interval '30 minutes'")
	db.Exec(t, "update ratelimit.idempotency_keys set expires_at = expires_at - interval '30 minutes'") // clean-up leaves for 5 what is due

	require.Equal(t, client.Cleaned{Buckets: 1, IdempotencyKeys: 1}, noError(limiter.Cleanup(ctx, client.MaxRows(1)))(t))

	require.ErrorIs(t, errOf(limiter.Cleanup(ctx, client.MaxRows(0))), client.ErrInvalidArgument)

	require.Equal(t, client.Cleaned{Buckets: 3, IdempotencyKeys: 3}, noError(limiter.Cleanup(ctx))(t))
	for _, key := range []string{"a", "b", "c", "d"} {
		require.True(t, noError(limiter.Acquire(ctx, "slow", key, client.IdempotencyKey("once")))(t).Replayed)
	}
}
