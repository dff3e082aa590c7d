package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// 500 connections acquire from one bucket all the time. Each token is granted once, each decision tells how many
// tokens are left, and every connection is served.
func TestTorture_Contention(t *testing.T) {
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

// Twelve sessions call everything there is on buckets that they share. No call fails, but for a policy that was just dropped. The
// buckets of two policies are never reset: each holds what it began with, less what was granted, plus what was given back.
func TestTorture_ContentionOfAllCalls(t *testing.T) {
	run := kit.Torture(t, 1000)
	const sessions, keys, capacity = 12, 4, 1_500_000
	db := kit.NewCrowdDB(t, sessions)
	db.DefinePolicy("durable", capacity, 1, kit.ADay)
	db.DefinePolicy("ephemeral", capacity, 1, kit.ADay, kit.Ephemeral)
	db.DefinePolicy("loose", 20, 5, 10*kit.Ms)
	exact := []string{"durable", "ephemeral"}
	var begun kit.WholeRequest
	for i := range keys {
		for _, policy := range exact {
			begun.Charges = append(begun.Charges, model.Charge{BucketID: model.BucketID{Policy: policy, Key: fmt.Sprint(i)}, Cost: 1})
		}
	}
	_, err := begun.AcquireAll(db.Pool) // rows, or a bucket with an override would be full by that
	require.NoError(t, err)

	var mu sync.Mutex
	taken := map[model.BucketID]int64{}
	var calls, granted, unknown, drops atomic.Int64
	enter := func(r kit.WholeRequest, w *kit.Whole) {
		if w == nil || !w.Allowed {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		granted.Add(1)
		for _, c := range r.Charges {
			taken[c.BucketID] += c.Cost
		}
	}
	random := func(most int) (r kit.WholeRequest) {
		policies := []string{"durable", "ephemeral", "loose", "loose", "loose"}[:2+3*rand.IntN(2)]
		for range 1 + rand.IntN(most) {
			r.Charges = append(r.Charges, model.Charge{
				BucketID: model.BucketID{Policy: policies[rand.IntN(len(policies))], Key: fmt.Sprint(rand.IntN(keys))}, Cost: 1 + rand.Int64N(3),
			})
		}
		return r
	}
	requests := func(number, most int) (all []kit.WholeRequest) {
		for range 1 + rand.IntN(number) {
			all = append(all, random(most))
		}
		return all
	}
	answered := func(all []kit.WholeRequest, answers []kit.WholeAnswer, err error) error {
		for i, a := range answers {
			if a.Whole == nil {
				unknown.Add(1)
			}
			enter(all[i], a.Whole)
		}
		return err
	}
	execute := func(s *kit.Session, sql string, args ...any) error {
		return kit.ErrorOf(s.Exec(context.Background(), sql, args...))
	}
	crowdOf := make([]*kit.Session, sessions)
	for i := range crowdOf {
		crowdOf[i] = db.Session()
	}
	var dropping sync.Mutex
	call := func(s *kit.Session) error {
		b := random(1).Charges[0].BucketID
		n := rand.IntN(100)
		if drops.Load() == 0 && 2*calls.Load() > run.Steps {
			n = 99 // too seldom to be left to chance
		}
		switch {
		case n < 15:
			r := random(1)
			d, err := r.Single().Acquire(s)
			if err == nil {
				w := kit.WholeOf(d)
				enter(r, &w)
			}
			return err
		case n < 35:
			all := requests(6, 1)
			answers, err := kit.AcquireManyWholes(s, all)
			return answered(all, answers, err)
		case n < 55:
			r := random(5)
			w, err := r.AcquireAll(s)
			if err == nil {
				enter(r, &w)
			}
			return err
		case n < 75:
			all := requests(4, 4)
			answers, err := kit.AcquireAllMany(s, all)
			return answered(all, answers, err)
		case n < 82: // what this session took: the bucket is never full
			r := random(1)
			d, err := r.Single().Acquire(s)
			if err != nil || !d.Allowed {
				return err
			}
			return kit.ErrorOf(kit.Refund(s, r.Charges[0].Policy, r.Charges[0].Key, r.Charges[0].Cost))
		case n < 88:
			return execute(s, "select ratelimit_reset('loose', $1)", b.Key)
		case n < 92: // never below what it holds, nor full by it
			return execute(s, "select ratelimit_override($1, $2, capacity => $3)", b.Policy, b.Key, capacity+rand.Int64N(capacity))
		case n < 95:
			return execute(s, "select ratelimit_remove_override($1, $2)", b.Policy, b.Key)
		case n < 97:
			return execute(s, "select ratelimit_cleanup()")
		case n < 99 || !dropping.TryLock():
			return execute(s, "select ratelimit_define_policy($1, refill => 1)", exact[rand.IntN(2)])
		}
		defer dropping.Unlock()
		drops.Add(1)
		err := execute(s, "select ratelimit_drop_policy('loose')")
		return errors.Join(err, execute(s, "select ratelimit_define_policy('loose', 20, 5, '10 ms')"))
	}
	kit.Crowd(t, sessions, func(i int) error {
		for run.GoesOn() {
			if err := call(crowdOf[i]); kit.SQLState(err) == string(model.UnknownPolicy) {
				unknown.Add(1)
			} else if err != nil {
				return err
			}
			calls.Add(1)
			run.Progress("%d calls, %d grants", calls.Load(), granted.Load())
		}
		return nil
	})

	for _, c := range begun.Charges {
		db.Execute("select ratelimit_remove_override($1, $2)", c.Policy, c.Key)
		require.Equal(t, capacity-1-taken[c.BucketID], db.Left(c.Policy, c.Key), "%v", c.BucketID)
	}
	require.NotZero(t, drops.Load())
	run.Figures("calls", calls.Load(), "granted requests", granted.Load(), "policies dropped", drops.Load(),
		"requests that met no policy", unknown.Load())
}
