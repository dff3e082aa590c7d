package client_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

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
