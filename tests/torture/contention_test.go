package torture

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// 500 connections acquire from one bucket all the time. Each token is granted once, each decision tells how many
// tokens are left, and every connection is served.
func TestTorture_ContentionGrantsEachTokenOnce(t *testing.T) {
	run := kit.Torture(t, 0) // each connection has some calls in any case
	const connections, atLeast, capacity, few = 500, 2, 5_000_000, 750
	db, _ := kit.NewPrivateDB(t, "max_connections=520")
	db.DefinePolicy("plenty", capacity, 1, 12*time.Hour)
	db.DefinePolicy("scarce", few, 1, kit.ADay)
	sessions := make([]*kit.Session, connections)
	for i := range sessions {
		sessions[i] = db.Session()
	}

	// A connection that waits longer is not served at all.
	ctx, cancel := context.WithTimeout(t.Context(), run.Budget+6*kit.Patience)
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
			for grants[i] < atLeast || run.GoesOn() && all.Load() < capacity-connections {
				asked := time.Now()
				d, err := by.Acquire(ctx, "plenty", "k")
				waits[i] = max(waits[i], time.Since(asked))
				if err != nil || !d.Allowed || !left[d.Remaining].CompareAndSwap(false, true) {
					t.Errorf("%+v, %v", d, err)
					return
				}
				grants[i]++
				all.Add(1)
				run.Progress("%d grants", all.Load())
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

	require.EqualValues(t, capacity-all.Load(), db.Left("plenty", "k"))
	require.EqualValues(t, few, scarce.Load(), "of %d requests", atLeast*connections)
	run.Figures("connections", connections, "granted on one key", all.Load())
	run.Figure("granted per second", int64(float64(all.Load())/lasted.Seconds()), "/s")
	run.Figures("fewest of a connection", slices.Min(grants), "most of a connection", slices.Max(grants),
		"longest wait", slices.Max(waits).Round(time.Millisecond))
}
