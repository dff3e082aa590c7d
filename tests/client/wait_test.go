package client_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

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
