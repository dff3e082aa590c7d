package tests

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// 500 connections acquire from one bucket all the time. Each token is granted once, each decision tells how many
// tokens are left, and every connection is served.
func TestTorture_Contention(t *testing.T) {
	run := torture(t, 6*time.Second)
	const connections, atLeast, capacity, few = 500, 2, 5_000_000, 750
	db, _ := newPrivateDB(t, "max_connections=520")
	db.definePolicy("plenty", capacity, 1, 12*time.Hour)
	db.definePolicy("scarce", few, 1, aDay)
	sessions := make([]*session, connections)
	for i := range sessions {
		sessions[i] = db.session()
	}

	// A connection that waits longer is not served at all.
	ctx, cancel := context.WithTimeout(t.Context(), run.budget+2*time.Minute)
	defer cancel()
	var (
		callers sync.WaitGroup
		left    = make([]atomic.Bool, capacity) // by a grant
		grants  = make([]int, connections)
		waits   = make([]time.Duration, connections)
		scarce  atomic.Int64
		all     atomic.Int64
		start   = time.Now()
	)
	for i, s := range sessions {
		callers.Go(func() {
			by := client.New(s)
			for grants[i] < atLeast || run.goesOn() && all.Load() < capacity-connections {
				asked := time.Now()
				d, err := by.Acquire(ctx, "plenty", "k")
				waits[i] = max(waits[i], time.Since(asked))
				if err != nil || !d.Allowed || !left[d.Remaining].CompareAndSwap(false, true) {
					t.Errorf("%+v, %v", d, err)
					return
				}
				grants[i]++
				all.Add(1)
				run.progress("%d grants", all.Load())
			}
			for range atLeast {
				d, err := by.Acquire(ctx, "scarce", "k")
				if err != nil {
					t.Error(err)
				}
				if d.Allowed {
					scarce.Add(1)
				}
			}
		})
	}
	callers.Wait()
	lasted := time.Since(start)

	require.EqualValues(t, capacity-all.Load(), db.left("plenty", "k"))
	require.EqualValues(t, few, scarce.Load(), "of %d requests", atLeast*connections)
	run.figure("connections", connections, "")
	run.figure("granted on one key", all.Load(), "")
	run.figure("granted per second", int64(float64(all.Load())/lasted.Seconds()), "/s")
	run.figure("fewest of a connection", slices.Min(grants), "")
	run.figure("most of a connection", slices.Max(grants), "")
	run.figure("longest wait", slices.Max(waits).Round(time.Millisecond), "")
}
