package client_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Close while callers ask gives back all that they did not get, and leaves nothing running.
func TestLeaser_ClosesUnderLoadAndLeavesNoGoroutines(t *testing.T) {
	db := pgtest.New(t)
	const capacity = 1_000_000
	db.Exec(t, "select ratelimit_define_policy('api', 1000000, 1, '1 day')")
	require.NoError(t, db.Pool.Ping(t.Context()))
	before := goleak.IgnoreCurrent()
	for n := range 3 {
		leaser := client.NewLeaser(db.Pool, client.Lease{Policy: "api"})
		key := fmt.Sprint(n)
		var granted, leased atomic.Int64
		isHot := make(chan struct{})
		var callers sync.WaitGroup
		for range 16 {
			callers.Go(func() {
				for {
					d, err := leaser.Acquire(t.Context(), "api", key)
					if err != nil {
						if !errors.Is(err, client.ErrClosed) {
							t.Error(err)
						}
						return
					}
					granted.Add(1)
					if d.Estimated && leased.Add(1) == 1000 {
						close(isHot)
					}
				}
			})
		}
		<-isHot
		leaser.Close()
		callers.Wait()
		leaser.Close() // again
		d, err := client.New(db.Pool).Peek(t.Context(), "api", key)
		require.NoError(t, err)
		require.Equal(t, granted.Load(), capacity-d.Remaining)
	}
	db.Pool.Reset() // its connections are no goroutines of a Leaser
	goleak.VerifyNone(t, before)
}

// A grant from a lease allocates nothing.
func TestLeaser_AllocatesNothing(t *testing.T) {
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10000000, 10000, '1 day')")
	leaser := client.NewLeaser(db.Pool, client.Lease{Policy: "api"})
	defer leaser.Close()
	ctx := t.Context()
	var failed error
	isLeased := true // every request of a run
	acquire := func() {
		d, err := leaser.Acquire(ctx, "api", "hot")
		failed = errors.Join(failed, err)
		isLeased = isLeased && d.Estimated
	}
	for begin := time.Now(); ; isLeased = true { // a lease that has run out, beside a slow refill, says nothing
		allocated := testing.AllocsPerRun(100, acquire)
		require.NoError(t, failed)
		if isLeased {
			require.Less(t, allocated, 1.0, "but for a refill")
			return
		}
		require.Less(t, time.Since(begin), 20*time.Second)
	}
}
