package client_test

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Rows come before the transaction commits.
func TestCombiner_ACommitThatFailsIsAnError(t *testing.T) {
	db := pgtest.Parallel(t)
	db.Exec(t, "select ratelimit_define_policy('gate', 10, 1, '1 day'), ratelimit_define_policy('api', 10, 1, '1 day')")
	limiter := newCombiner(t, db.Pool, client.CallsInFlight(1))
	db.Exec(t, `
		create function refuse() returns trigger language plpgsql as $$
		begin
		  raise exception 'refused' using errcode = '23514';
		end $$;
		create constraint trigger refuse after insert or update on ratelimit.buckets deferrable initially deferred
		  for each row when (new.key = 'bad') execute function public.refuse()`)
	for _, got := range combine(t, db, limiter, []request{{"api", "good", nil}, {"api", "bad", nil}})() {
		kit.RequireState(t, "23514", got.err)
		require.Zero(t, got.Decision)
	}
	require.EqualValues(t, 10, kit.NoError(limiter.Peek(t.Context(), "api", "good"))(t).Remaining)
}

// A call for several buckets and a transaction wait for each other, the transaction first: whoever
// has waited for deadlock_timeout looks for a deadlock, once, and is its victim.
func TestCombiner_RepeatsTheVictimOfADeadlock(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.New(t)
	db.Exec(t, `
		select ratelimit_define_policy('gate', 10, 1, '1 day'),
		       ratelimit_define_policy('api', 10, 1, '1 day'),
		       ratelimit_acquire('api', 'a'), ratelimit_acquire('api', 'b'), ratelimit_acquire('api', 'c')`)
	var tries tryCounter
	limiter := newCombiner(t, connect(t, db, nil, tries.count), client.CallsInFlight(1))
	door, tx := begin(t, db.Pool), begin(t, db.Pool)
	kit.NoError(client.New(door).Acquire(ctx, "api", "b"))(t)
	kit.NoError(tx.Exec(ctx, "set local deadlock_timeout = '1h'"))(t)
	kit.NoError(client.New(tx).Acquire(ctx, "api", "c"))(t)

	answers := combine(t, db, limiter, []request{{"api", "c", nil}, {"api", "b", nil}, {"api", "a", nil}})
	batch := waiter(t, db, "ratelimit_acquire_packed(", 0) // holds a, waits for b
	done := make(chan error)
	go func() {
		_, err := client.New(tx).Acquire(ctx, "api", "a")
		done <- err
	}()
	waiter(t, db, "ratelimit_acquire(", batch)
	require.NoError(t, door.Commit(ctx))
	require.NoError(t, <-done)
	require.NoError(t, tx.Commit(ctx))
	for _, got := range answers() {
		require.NoError(t, got.err)
		require.EqualValues(t, 7, got.Remaining)
	}
	// The server says how many deadlocks there were: a batch that is sent again may meet another.
	repeats := tries.n.Load() - 2 // without the call for the gate and the batch's first
	require.Positive(t, repeats)
	require.Eventually(t, func() bool {
		deadlocks := kit.One[int64](t, db.Pool, "select deadlocks from pg_stat_database where datname = current_database()")
		return deadlocks == repeats
	}, kit.Patience, 10*time.Millisecond, "as many deadlocks as repeats, %d", repeats)
}

// newCombiner returns a combiner that is closed after the test, and after the transactions that the test begins later.
func newCombiner(t *testing.T, pool client.Pool, opts ...client.Option) *client.Combiner {
	limiter := client.NewCombiner(pool, opts...)
	t.Cleanup(limiter.Close)
	return limiter
}

// A request asks for tokens of one bucket.
type request struct {
	policy, key string
	opts        []client.CallOption
}

var once = []client.CallOption{client.IdempotencyKey("once")}

// combine lets requests wait in order behind a call that waits for a lock, and then go. The policy of
// that call is gate.
func combine(t *testing.T, db *pgtest.DB, limiter *client.Combiner, requests []request) (answers func() []answer) {
	got := make([]answer, len(requests))
	wait := combineCalls(t, db, limiter, len(requests), func(i int) {
		r := requests[i]
		got[i].Decision, got[i].err = limiter.Acquire(t.Context(), r.policy, r.key, r.opts...)
	})
	return func() []answer {
		wait()
		return got
	}
}

// combineCalls is combine for any requests.
func combineCalls(t *testing.T, db *pgtest.DB, limiter *client.Combiner, requests int, ask func(int)) (wait func()) {
	t.Helper()
	ctx := t.Context()
	db.Exec(t, "select ratelimit_reset('gate', 'k'), ratelimit_acquire('gate', 'k')")
	gate := begin(t, db.Pool)
	kit.NoError(client.New(gate).Acquire(ctx, "gate", "k"))(t)

	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := limiter.Acquire(ctx, "gate", "k"); err != nil {
			t.Error(err)
		}
	})
	waiter(t, db, "ratelimit_acquire(", 0)
	waiting := 0
	for i := range requests {
		done := make(chan struct{})
		wg.Go(func() {
			defer close(done)
			ask(i)
		})
		for limiter.Waiting() == waiting {
			select {
			case <-done: // text that cannot be sent does not wait
				waiting--
			case <-time.After(100 * time.Microsecond):
			}
		}
		waiting++
	}
	require.NoError(t, gate.Commit(ctx))
	return wg.Wait
}

// waiter returns the process of a session, another than not, that waits for a lock in such a statement.
func waiter(t *testing.T, db *pgtest.DB, statement string, not int32) int32 {
	const find = `
		select coalesce(min(pid), 0)
		  from pg_stat_activity
		 where datname = current_database() and wait_event_type = 'Lock' and query like '%' || $1 || '%' and pid <> $2`
	db.Await(t, time.Minute, "select ("+find+") <> 0", statement, not)
	return kit.One[int32](t, db.Pool, find, statement, not)
}
