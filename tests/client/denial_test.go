package client_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// A rollback to a savepoint would give back tokens unseen.
func TestDenialCache_IsNotForTransactions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx := t.Context()
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	for name, handle := range handles {
		t.Run(name, func(t *testing.T) {
			var sent tryCounter
			limiter := client.New(handle.open(t, connect(t, db, nil, sent.count)), client.DenialCache())
			for range 3 {
				noError(limiter.Acquire(ctx, "api", name, client.Cost(10)))(t)
			}
			require.EqualValues(t, map[bool]int{true: 2, false: 3}[handle.retries], sent.n.Load(), "one that retries is no transaction")
		})
	}
}

func TestDenialCache_OfACombiner(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx := t.Context()
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	var sent tryCounter
	limiter := client.NewCombiner(connect(t, db, nil, sent.count), client.DenialCache())
	defer limiter.Close()
	for n := range 5 {
		require.Equal(t, n == 0, noError(limiter.Acquire(ctx, "api", "k", client.Cost(6)))(t).Allowed)
	}
	require.EqualValues(t, 2, sent.n.Load())

	require.True(t, noError(limiter.Acquire(ctx, "api", "k", client.Cost(4)))(t).Allowed)
	noError(limiter.Refund(ctx, "api", "k", 10))(t)
	require.True(t, noError(limiter.Acquire(ctx, "api", "k", client.Cost(6)))(t).Allowed)
}
