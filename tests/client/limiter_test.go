package client_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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
				kit.NoError(limiter.Acquire(ctx, "api", name, client.Cost(10)))(t)
			}
			require.EqualValues(t, map[bool]int{true: 2, false: 3}[handle.retries], sent.n.Load(), "one that retries is no transaction")
		})
	}
}

func TestDenialCache_ACombinerRepeatsDenials(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx := t.Context()
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	var sent tryCounter
	limiter := client.NewCombiner(connect(t, db, nil, sent.count), client.DenialCache())
	defer limiter.Close()
	for n := range 5 {
		require.Equal(t, n == 0, kit.NoError(limiter.Acquire(ctx, "api", "k", client.Cost(6)))(t).Allowed)
	}
	require.EqualValues(t, 2, sent.n.Load())

	require.True(t, kit.NoError(limiter.Acquire(ctx, "api", "k", client.Cost(4)))(t).Allowed)
	kit.NoError(limiter.Refund(ctx, "api", "k", 10))(t)
	require.True(t, kit.NoError(limiter.Acquire(ctx, "api", "k", client.Cost(6)))(t).Allowed)
}

const longest = math.MaxInt64 / 1000 * time.Microsecond

func TestWait_IsNotForTransactions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	tx := begin(t, db.Pool)
	limiter := client.New(db.Pool)
	for name, in := range map[string]*client.Limiter{"Tx": client.New(tx), "WithTx": limiter.WithTx(tx), "Conn": client.New(tx.Conn())} {
		_, err := in.Wait(t.Context(), "line", "k")
		require.ErrorIs(t, err, client.ErrInvalidArgument, name)
		require.True(t, strings.HasSuffix(err.Error(), "outside a transaction"), err)
	}
}

func TestRunCleanup_WantsAnInterval(t *testing.T) {
	t.Parallel()
	require.PanicsWithValue(t, "client: RunCleanup: every must be positive", func() { client.New(nil).RunCleanup(t.Context(), 0) })
}

func TestPolicies_LongIntervalsAreCut(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('slow', 1, 1, '365250 days', remember => '365250 days')")
	policies := kit.NoError(client.New(db.Pool).Policies(t.Context()))(t)
	require.Equal(t, longest, policies[0].Every)
	require.Equal(t, longest, policies[0].Remember)
}

// smallPool returns a pool of 8 connections, so that callers also leave while they wait for one.
func smallPool(t *testing.T, db *pgtest.DB) *pgxpool.Pool {
	return kit.Pool(t, db.URL, func(config *pgxpool.Config) { config.MaxConns = 8 })
}

// impatient returns a context for a call. Every third ends within 3 ms: before the call has a connection, on its way, or later.
func impatient(caller, call int) (context.Context, context.CancelFunc) {
	timeout := time.Minute
	if call%3 == 0 {
		timeout = time.Duration((caller*31+call*17)%3000) * time.Microsecond
	}
	return context.WithTimeout(context.Background(), timeout)
}

// The buckets have lost the tokens of the callers that were granted, and none of those that left.
func TestWait_ACancelledCallKeepsNoTokens(t *testing.T) {
	pgtest.OncePerServer(t)
	const capacity, keys, callers, calls = 1_000_000, 4, 20, 500
	db := pgtest.New(t)
	limiter := client.New(smallPool(t, db))
	require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: "calls", Capacity: capacity, Refill: 1, Every: 24 * time.Hour}))
	var granted, cancelled atomic.Int64
	kit.Crowd(t, callers, func(caller int) error {
		for i := range calls {
			ctx, cancel := impatient(caller, i)
			_, err := limiter.Wait(ctx, "calls", fmt.Sprint((caller+i)%keys))
			left := ctx.Err() != nil
			cancel()
			switch {
			case err == nil:
				granted.Add(1)
			case left:
				cancelled.Add(1)
			default:
				return err
			}
		}
		return nil
	})
	require.Greater(t, cancelled.Load(), int64(100))
	require.EventuallyWithT(t, func(t *assert.CollectT) { // what is given back late comes a second later
		var taken int64
		for key := range keys {
			d, err := limiter.Peek(context.Background(), "calls", fmt.Sprint(key))
			assert.NoError(t, err)
			taken += capacity - d.Remaining
		}
		assert.Equal(t, granted.Load(), taken)
	}, 20*time.Second, 10*time.Millisecond)
}
