// Package acquire tests what a decision is: arithmetic and published vectors, retry_after as a promise, quotas, idempotency, several
// limits and batches, transactions, odd texts and bad input.
package acquire

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/pgratelimit/pgratelimit/tests/vectors"
	"github.com/stretchr/testify/require"
)

func TestBucket_ComesWithTheFirstGrant(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.DefinePolicy("p", 10, 1, kit.Second, durability)
		require.Equal(t, kit.Allowed(10, 0, 10), db.PeekAt(kit.T0, "p", "k", 10))
		require.Equal(t, kit.Allowed(10, 0, 10), db.AcquireAt(kit.T0, "p", "k", 0))
		require.Equal(t, kit.Never(10, 0, 10), db.AcquireAt(kit.T0, "p", "k", 11))
		require.Equal(t, kit.Allowed(10, 0, 10), db.RefundAt(kit.T0, "p", "k", 5))
		require.Nil(t, db.Bucket("p", "k"))
		require.Equal(t, kit.Allowed(7, 3*kit.Second, 10), db.AcquireAt(kit.T0, "p", "k", 3))
		require.Equal(t, &kit.Bucket{Level: 7_000_000, RefilledAt: kit.T0}, db.Bucket("p", "k"))
	})
}

func TestStepped_WorkedExample(t *testing.T) {
	onEach(t, func(t *testing.T, db kit.Subject) {
		db.DefinePolicy("stepped", 20, 5, 10*kit.Second, kit.Stepped)
		db.DefinePolicy("continuous", 20, 5, 10*kit.Second)
		for _, p := range []string{"stepped", "continuous"} {
			require.EqualValues(t, 15, db.AcquireAt(kit.T0, p, "k", 5).Remaining)
			require.EqualValues(t, 20, db.PeekAt(kit.T0.Add(10*kit.Second), p, "k", 1).Remaining)
			require.EqualValues(t, 2, db.AcquireAt(kit.T0.Add(15*kit.Second), p, "k", 18).Remaining)
		}
		require.Equal(t, kit.Allowed(7, 30*kit.Second, 20), db.PeekAt(kit.T0.Add(20*kit.Second), "stepped", "k", 1))
		require.Equal(t, kit.Allowed(4, 31*kit.Second, 20), db.PeekAt(kit.T0.Add(20*kit.Second), "continuous", "k", 1), "4.5 tokens")
	})
}

// Whatever happens in between, five tokens come at every tenth second after the first take, and no sooner.
func TestStepped_AnchorStays(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 1000, 5, 10*kit.Second, kit.Stepped)
	db.AcquireAt(kit.T0, "p", "k", 900)
	between := map[string]func(at time.Time){
		"a take":         func(at time.Time) { require.True(t, db.AcquireAt(at, "p", "k", 7).Allowed) },
		"a refund":       func(at time.Time) { db.RefundAt(at, "p", "k", 3) },
		"a refund of 0":  func(at time.Time) { db.RefundAt(at, "p", "k", 0) },
		"a peek":         func(at time.Time) { db.PeekAt(at, "p", "k", 1) },
		"a denial":       func(at time.Time) { require.False(t, db.AcquireAt(at, "p", "k", 999).Allowed) },
		"take and give":  func(at time.Time) { db.AcquireAt(at, "p", "k", 1); db.RefundAt(at.Add(kit.Second), "p", "k", 1) },
		"a redefinition": func(time.Time) { db.DefinePolicy("p", 1000, 5, 10*kit.Second) },
	}
	interval := kit.T0
	for name, do := range between {
		for _, later := range []time.Duration{0, 1 * kit.Us, 4 * kit.Second, 9*kit.Second - kit.Us} {
			do(interval.Add(later))
			interval = interval.Add(10 * kit.Second)
			before := db.PeekAt(interval.Add(-kit.Us), "p", "k", 1)
			require.Equal(t, before.Remaining+5, db.PeekAt(interval, "p", "k", 1).Remaining, "%s, %v after an interval began", name, later)
			require.Zero(t, db.Bucket("p", "k").RefilledAt.Sub(kit.T0)%(10*kit.Second), "%s, %v after an interval began", name, later)
		}
	}
}

func TestStepped_WithoutItsRowStartsANewAnchor(t *testing.T) {
	kit.OnDBs(t, map[string]func(db *kit.TestDB){
		"reset": func(db *kit.TestDB) { db.Reset("p", "k") },
		"clean-up": func(db *kit.TestDB) {
			db.CleanUpAtOnce()
			require.Equal(db.T, kit.Deleted{}, db.CleanupAt(kit.T0.Add(10*kit.Second-kit.Us)))
			require.Equal(db.T, kit.Deleted{Buckets: 1}, db.CleanupAt(kit.T0.Add(13*kit.Second)))
		},
	}, func(t *testing.T, db *kit.TestDB, remove func(db *kit.TestDB)) {
		db.DefinePolicy("p", 20, 5, 10*kit.Second, kit.Stepped)
		db.AcquireAt(kit.T0, "p", "k", 5)
		db.SetClock(kit.T0.Add(13 * kit.Second)) // full since 10 s
		remove(db)
		require.Nil(t, db.Bucket("p", "k"))
		require.Equal(t, kit.Allowed(0, 40*kit.Second, 20), db.AcquireAt(kit.T0.Add(14*kit.Second), "p", "k", 20))
		require.EqualValues(t, 0, db.PeekAt(kit.T0.Add(24*kit.Second-kit.Us), "p", "k", 1).Remaining)
		require.EqualValues(t, 5, db.PeekAt(kit.T0.Add(24*kit.Second), "p", "k", 1).Remaining)
	})
}

func TestContinuous_TenTakesInOneSecond(t *testing.T) {
	kit.OnEachDurability(t, func(t *testing.T, db kit.Subject, durability kit.PolicyOption) {
		db.DefinePolicy("p", 10, 1, kit.Second, durability)
		for i := range 10 {
			require.True(t, db.AcquireAt(kit.T0.Add(time.Duration(i)*100*kit.Ms), "p", "k", 1).Allowed)
		}
		require.Equal(t, kit.Denied(0, 1*kit.Us, 9*kit.Second+1*kit.Us, 10), db.AcquireAt(kit.T0.Add(kit.Second-kit.Us), "p", "k", 1))
		require.Equal(t, kit.Allowed(0, 10*kit.Second, 10), db.AcquireAt(kit.T0.Add(kit.Second), "p", "k", 1))
	})
}

// Continuous refill is as fine as a microsecond, and what a grant rounds away is less than a microtoken.
func TestContinuous_NothingIsMintedAndLittleLost(t *testing.T) {
	db := kit.ParallelDB(t)
	const takes, spacing = 200, 5 * kit.Us
	db.DefinePolicy("p", 1000, 3, 7*kit.Second)
	db.AcquireAt(kit.T0, "p", "k", 500)
	for i := range takes {
		db.AcquireAt(kit.T0.Add(time.Duration(i+1)*spacing), "p", "k", 1)
	}
	credited := db.Bucket("p", "k").Level - (500-takes)*1_000_000
	exact := float64(takes*spacing/kit.Us) * 3 / 7
	require.LessOrEqual(t, float64(credited), exact)
	require.Greater(t, float64(credited), exact-takes)
}

func TestNever_IsDecidedFirst(t *testing.T) {
	onEach(t, func(t *testing.T, db kit.Subject) {
		db.DefinePolicy("p", 5, 1, kit.Second)
		require.Equal(t, kit.Never(5, 0, 5), db.AcquireAt(kit.T0, "p", "new", 6))
		require.Equal(t, kit.Never(5, 0, 5), db.AcquireAt(kit.T0, "p", "new", math.MaxInt64))
		db.AcquireAt(kit.T0, "p", "empty", 5)
		require.Equal(t, kit.Never(0, 5*kit.Second, 5), db.AcquireAt(kit.T0, "p", "empty", 6))
		require.Equal(t, kit.Never(0, 5*kit.Second, 5), db.PeekAt(kit.T0, "p", "empty", 6))
		db.PutBucket("p", "debt", kit.Bucket{Level: -2_000_000, RefilledAt: kit.T0})
		require.Equal(t, kit.Never(-2, 7*kit.Second, 5), db.AcquireAt(kit.T0, "p", "debt", 6))
		db.PutBucket("p", "ahead", kit.Bucket{Level: 4_000_000, RefilledAt: kit.T0.Add(time.Hour)})
		require.Equal(t, kit.Never(4, time.Hour+kit.Second, 5), db.AcquireAt(kit.T0, "p", "ahead", 6))
	})
}

func TestCostZero_IsAllowedAndWritesNothing(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.DefinePolicy("p", 5, 1, kit.Second, durability)
		db.SetClock(kit.T0)
		db.PutBucket("p", "debt", kit.Bucket{Level: -1_500_000, RefilledAt: kit.T0})
		require.Equal(t, kit.Allowed(-2, 6500*kit.Ms, 5), db.Acquire("p", "debt", 0))
		require.Equal(t, kit.Allowed(-2, 6500*kit.Ms, 5), db.PeekAt(kit.T0, "p", "debt", 0))
		db.SetClock(kit.T0.Add(kit.Second))
		require.Equal(t, kit.Allowed(-1, 5500*kit.Ms, 5), db.Acquire("p", "debt", 0))
		require.Equal(t, &kit.Bucket{Level: -1_500_000, RefilledAt: kit.T0}, db.Bucket("p", "debt"))
	})
}

func TestRemaining_IsRoundedDownAndWaitsUp(t *testing.T) {
	onEach(t, func(t *testing.T, db kit.Subject) {
		db.DefinePolicy("p", 3, 3, kit.Second) // a token each 333,333.3 µs
		for _, test := range []struct {
			level     int64 // microtokens
			remaining int64
			retry     time.Duration // for 1 token
			reset     time.Duration
		}{
			{3_000_000, 3, 0, 0},
			{2_999_999, 2, 0, 1 * kit.Us},
			{2_999_997, 2, 0, 1 * kit.Us},
			{2_999_996, 2, 0, 2 * kit.Us},
			{1_000_000, 1, 0, 666_667 * kit.Us},
			{999_999, 0, 1 * kit.Us, 666_667 * kit.Us},
			{1, 0, 333_333 * kit.Us, 1_000_000 * kit.Us},
			{0, 0, 333_334 * kit.Us, 1_000_000 * kit.Us},
			{-1, -1, 333_334 * kit.Us, 1_000_001 * kit.Us},
			{-999_999, -1, 666_667 * kit.Us, 1_333_333 * kit.Us},
			{-1_000_000, -1, 666_667 * kit.Us, 1_333_334 * kit.Us},
			{-1_000_001, -2, 666_667 * kit.Us, 1_333_334 * kit.Us},
			{-1_000_002, -2, 666_668 * kit.Us, 1_333_334 * kit.Us},
		} {
			db.PutBucket("p", "k", kit.Bucket{Level: test.level, RefilledAt: kit.T0})
			want := kit.Allowed(test.remaining, test.reset, 3)
			if test.retry > 0 {
				want = kit.Denied(test.remaining, test.retry, test.reset, 3)
			}
			require.Equal(t, want, db.PeekAt(kit.T0, "p", "k", 1), "level %d", test.level)
		}
	})
}

func TestRetryAfter_CountsTheLeadOfTheStoredInstant(t *testing.T) {
	onEach(t, func(t *testing.T, db kit.Subject) {
		for p, refill := range map[string]kit.PolicyOption{"continuous": kit.Continuous, "stepped": kit.Stepped} {
			db.DefinePolicy(p, 10, 2, kit.Second, refill)
			const lead = 3 * time.Hour
			db.AcquireAt(kit.T0.Add(lead), p, "k", 10)
			answer := db.AcquireAt(kit.T0, p, "k", 2)
			require.Equal(t, kit.Denied(0, lead+kit.Second, lead+5*kit.Second, 10), answer)
			require.False(t, db.AcquireAt(kit.T0.Add(lead+kit.Second-kit.Us), p, "k", 2).Allowed)
			require.True(t, db.AcquireAt(kit.T0.Add(lead+kit.Second), p, "k", 2).Allowed)
		}
	})
}

// A bucket called while the clock is an hour behind ends like one called at the last instant before.
func TestClock_BackAnHourMintsAndDestroysNothing(t *testing.T) {
	kit.OnDBs(t, map[string]kit.PolicyOption{"continuous": kit.Continuous, "stepped": kit.Stepped}, func(t *testing.T, db *kit.TestDB, refill kit.PolicyOption) {
		db.DefinePolicy("p", 100, 1, kit.Second, refill)
		calls := func(key string, at time.Time) {
			db.AcquireAt(at, "p", key, 10)
			db.RefundAt(at.Add(2*kit.Second), "p", key, 3)
			db.PeekAt(at.Add(time.Minute), "p", key, 1)
			db.AcquireAt(at.Add(time.Minute), "p", key, 1000)
			db.AcquireAt(at.Add(59*time.Minute), "p", key, 5)
		}
		last := kit.T0.Add(time.Hour)
		for _, key := range []string{"stepped back", "steady"} {
			db.AcquireAt(kit.T0, "p", key, 50)
			db.AcquireAt(last, "p", key, 50)
		}
		calls("stepped back", kit.T0)
		db.SetClock(last)
		require.Equal(t, kit.Allowed(38, 62*kit.Second, 100), db.PeekAt(last, "p", "stepped back", 1))
		db.AcquireAt(last, "p", "steady", 10)
		db.RefundAt(last, "p", "steady", 3)
		db.AcquireAt(last, "p", "steady", 5)
		require.Equal(t, db.Bucket("p", "steady"), db.Bucket("p", "stepped back"))
		require.Equal(t, kit.Allowed(39, 61*kit.Second, 100), db.PeekAt(last.Add(kit.Second), "p", "stepped back", 1))
	})
}

func TestClock_AJumpForwardGivesNothingTwice(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, kit.Second)
	for _, key := range []string{"touched", "reset", "untouched"} {
		db.AcquireAt(kit.T0, "p", key, 10)
	}
	jump := kit.T0.Add(24 * time.Hour)
	db.AcquireAt(jump, "p", "touched", 10)
	db.AcquireAt(jump, "p", "reset", 10)
	soon := kit.T0.Add(5 * kit.Second)
	require.Equal(t, kit.Allowed(5, 5*kit.Second, 10), db.PeekAt(soon, "p", "untouched", 1))
	require.Equal(t, kit.Denied(0, 24*time.Hour-4*kit.Second, 24*time.Hour+5*kit.Second, 10), db.PeekAt(soon, "p", "touched", 1))
	require.EqualValues(t, 0, db.PeekAt(jump, "p", "touched", 1).Remaining, "nothing until the clock is past it")
	require.EqualValues(t, 1, db.PeekAt(jump.Add(kit.Second), "p", "touched", 1).Remaining)
	db.SetClock(soon)
	db.Reset("p", "reset")
	require.Equal(t, kit.Allowed(0, 10*kit.Second, 10), db.Acquire("p", "reset", 10))
	require.Equal(t, kit.Allowed(0, 0, 10).Remaining, db.PeekAt(soon, "p", "reset", 0).Remaining)
	require.Equal(t, &kit.Bucket{Level: 0, RefilledAt: soon}, db.Bucket("p", "reset"))
}

// Two acquires in one transaction are made by two readings of the clock, and none is when the
// transaction began: what it stores gives the next caller nothing for the time before.
func TestClock_IsReadInsideTheCall(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, time.Hour)
	ctx := context.Background()
	tx := kit.NoError(db.Pool.Begin(ctx))(t)
	defer tx.Rollback(ctx)
	began := kit.One[time.Time](t, tx, "select now()")
	require.EqualValues(t, 7, db.Acquire("p", "k", 3).Remaining) // another session, later
	others := db.Bucket("p", "k").RefilledAt
	require.Greater(t, others, began)
	refilledAt := func() time.Time { return kit.One[time.Time](t, tx, "select refilled_at from ratelimit.buckets").UTC() }
	db.Must(kit.Acquire(tx, "p", "k", 1))
	first := refilledAt()
	db.Must(kit.Acquire(tx, "p", "k", 1))
	second := refilledAt()
	require.Less(t, others, first)
	require.Less(t, first, second)
	require.NoError(t, tx.Commit(ctx))
	require.EqualValues(t, 5, db.Must(kit.Peek(db.Pool, "p", "k", 1)).Remaining)
}

func TestRefund_NeverFillsAboveTheCapacity(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.DefinePolicy("p", 10, 1, kit.Second, durability)
		db.AcquireAt(kit.T0, "p", "k", 8)
		require.Equal(t, kit.Allowed(5, 5*kit.Second, 10), db.RefundAt(kit.T0, "p", "k", 3))
		require.Equal(t, kit.Allowed(5, 4500*kit.Ms, 10), db.RefundAt(kit.T0.Add(500*kit.Ms), "p", "k", 0), "5.5 tokens")
		require.Equal(t, kit.Allowed(10, 0, 10), db.RefundAt(kit.T0.Add(500*kit.Ms), "p", "k", 5), "not 10.5")
		require.Equal(t, &kit.Bucket{Level: 10_000_000, RefilledAt: kit.T0.Add(500 * kit.Ms)}, db.Bucket("p", "k"))
		db.PutBucket("p", "debt", kit.Bucket{Level: -25_500_000, RefilledAt: kit.T0})
		require.Equal(t, kit.Allowed(-23, 32500*kit.Ms, 10), db.RefundAt(kit.T0, "p", "debt", 3), "-22.5 tokens")
		require.Equal(t, kit.Allowed(-13, 22500*kit.Ms, 10), db.RefundAt(kit.T0, "p", "debt", math.MaxInt64), "as much as the capacity")
		require.Equal(t, kit.Allowed(10, 0, 10), db.RefundAt(kit.T0.Add(12500*kit.Ms), "p", "debt", 10))
	})
}

func TestPolicyChange_AppliesToTheNextCall(t *testing.T) {
	onEach(t, func(t *testing.T, common kit.Subject) {
		drained := func(db kit.Subject) { // at 0 s, and one of the ten taken that came by 10 s
			db.DefinePolicy("p", 100, 1, kit.Second)
			db.AcquireAt(kit.T0, "p", "k", 100)
			db.AcquireAt(kit.T0.Add(10*kit.Second), "p", "k", 1)
		}
		to := func(capacity, refill int64, every time.Duration, opts ...kit.PolicyOption) func(db kit.Subject) {
			return func(db kit.Subject) { db.DefinePolicy("p", capacity, refill, every, opts...) }
		}
		eightLeft := func(db kit.Subject) {
			db.DefinePolicy("p", 10, 1, time.Minute)
			db.AcquireAt(kit.T0, "p", "k", 2)
		}
		steppedEight := func(db kit.Subject) {
			db.DefinePolicy("p", 100, 10, 10*kit.Second, kit.Stepped)
			db.AcquireAt(kit.T0, "p", "k", 100)
			db.AcquireAt(kit.T0.Add(14*kit.Second), "p", "k", 2) // its instant is the anchor, 10 s
		}
		for name, test := range map[string]struct {
			before func(db kit.Subject)
			change func(db kit.Subject)
			at     time.Duration
			want   kit.Decision
		}{
			"a smaller capacity clamps":           {eightLeft, to(5, 1, time.Minute), 0, kit.Allowed(5, 0, 5)},
			"a smaller capacity above the level":  {eightLeft, to(9, 1, time.Minute), 0, kit.Allowed(8, time.Minute, 9)},
			"a larger capacity does not fill":     {eightLeft, to(20, 1, time.Minute), 0, kit.Allowed(8, 12*time.Minute, 20)},
			"a larger capacity lets refill go on": {eightLeft, to(20, 1, time.Minute), 5 * time.Minute, kit.Allowed(13, 7*time.Minute, 20)},
			"a clamped level stays down once a call has written it": {eightLeft,
				func(db kit.Subject) {
					db.DefinePolicy("p", 5, 1, time.Minute)
					db.AcquireAt(kit.T0, "p", "k", 1)
					db.DefinePolicy("p", 10, 1, time.Minute)
				}, 0, kit.Allowed(4, 6*time.Minute, 10)},
			"more refill counts since the last write":                {drained, to(100, 3, kit.Second), 20 * kit.Second, kit.Allowed(9+30, 20333334*kit.Us, 100)},
			"less refill counts since the last write":                {drained, to(100, 1, 2*kit.Second), 20 * kit.Second, kit.Allowed(9+5, 172*kit.Second, 100)},
			"a shorter every":                                        {drained, to(100, 1, 500*kit.Ms), 20 * kit.Second, kit.Allowed(9+20, 35500*kit.Ms, 100)},
			"continuous becomes stepped: anchored at the last write": {drained, to(100, 10, 4*kit.Second, kit.Stepped), 20 * kit.Second, kit.Allowed(9+20, 30*kit.Second, 100)},
			"stepped becomes continuous: counted from the anchor":    {steppedEight, to(100, 10, 10*kit.Second, kit.Continuous), 15 * kit.Second, kit.Allowed(8+5, 87*kit.Second, 100)},
			"another every, stepped: counted from the anchor":        {steppedEight, to(100, 10, 3*kit.Second), 18 * kit.Second, kit.Allowed(8+20, 22*kit.Second, 100)},
			"nothing changes":                                        {steppedEight, to(100, 10, 10*kit.Second), 19 * kit.Second, kit.Allowed(8, 91*kit.Second, 100)},
		} {
			t.Run(name, func(t *testing.T) {
				db := common.Of(t)
				defer db.DropPolicy("p")
				test.before(db)
				test.change(db)
				require.Equal(t, test.want, db.PeekAt(kit.T0.Add(test.at), "p", "k", 1))
				require.Equal(t, test.want.Remaining-1, db.AcquireAt(kit.T0.Add(test.at), "p", "k", 1).Remaining)
			})
		}
	})
}

func TestPolicyChange_NullKeepsWhatIsThere(t *testing.T) {
	t.Parallel()
	type policy struct {
		Capacity, Refill int64
		Every            string
		Stepped, Durable bool
		Remember         string
	}
	db := kit.NewDB(t)
	defined := func() policy {
		rows := kit.NoError(db.Pool.Query(context.Background(),
			"select capacity, refill, every::text, stepped, durable, remember::text from ratelimit_policies()"))(t)
		return kit.NoError(pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[policy]))(t)
	}
	db.DefinePolicy("p", 10, 1, kit.Second)
	require.Equal(t, policy{10, 1, "00:00:01", false, true, "24:00:00"}, defined(), "defaults")
	db.DefinePolicy("p", 11, 2, kit.Second, kit.Stepped, kit.Remember(time.Hour))
	require.Equal(t, policy{11, 2, "00:00:01", true, true, "01:00:00"}, defined())
	db.DefinePolicy("p", 12, 3, time.Minute)
	require.Equal(t, policy{12, 3, "00:01:00", true, true, "01:00:00"}, defined())
	db.DefinePolicy("p", 12, 3, time.Minute, kit.Continuous, kit.Durable)
	require.Equal(t, policy{12, 3, "00:01:00", false, true, "01:00:00"}, defined())
	db.Execute("select ratelimit_define_policy('p', capacity => 500)")
	require.Equal(t, policy{500, 3, "00:01:00", false, true, "01:00:00"}, defined())
	db.Execute("select ratelimit_define_policy('p', refill => 4)")
	db.Execute("select ratelimit_define_policy('p', every => '2 minutes')")
	db.Execute("select ratelimit_define_policy('p', remember => '2 hours')")
	require.Equal(t, policy{500, 4, "00:02:00", false, true, "02:00:00"}, defined())
	db.Execute("select ratelimit_define_policy('p')")
	require.Equal(t, policy{500, 4, "00:02:00", false, true, "02:00:00"}, defined())
	db.DropPolicy("p")
	db.Policy("p", 10, 1, kit.Second, kit.Ephemeral).Policy("p", 10, 1, kit.Second)
	require.Equal(t, policy{10, 1, "00:00:01", false, false, "24:00:00"}, defined())
}

// Each of two changes is fine beside the policy that it found, and together they would not be.
func TestPolicyChange_TwoAtATimeAreCheckedTogether(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 1000, 1000, time.Hour)
	first, second := db.Begin(), db.Session()
	first.Execute("select ratelimit_define_policy('p', capacity => 10000000000)")
	call := second.Start(func(kit.Querier) (kit.Decision, error) {
		_, err := second.Exec(context.Background(), "select ratelimit_define_policy('p', refill => 1)")
		return kit.Decision{}, err
	})
	call.BlockedBy(first)
	first.Execute("commit")
	_, err := call.Result()
	require.Equal(t, "22023", kit.SQLState(err), "%v", err)
}

// To look a name up reads every file of the time zones. So only a zone that is named is checked, and not that of the policy.
func TestPolicyChange_ChecksOnlyATimeZoneThatItNames(t *testing.T) {
	db := kit.ParallelDB(t)
	db.Execute("select ratelimit_define_policy('p', 10, period => '1 day', time_zone => 'Europe/Berlin')")
	db.Execute("update ratelimit.policies set time_zone = 'Europe/Atlantis'")
	db.Execute("select ratelimit_override('p', 'k', capacity => 20), ratelimit_define_policy('p', 15)")
	_ = db.Refused("22023", "select ratelimit_override('p', 'k', time_zone => 'Europe/Atlantis')")
	db.Execute("select ratelimit_override('p', 'k', capacity => 20, time_zone => 'UTC')")
	require.EqualValues(t, 19, db.Acquire("p", "k", 1).Remaining)
}

func TestPolicyChange_OverridesFollowStepped(t *testing.T) {
	type testCase struct{ first, then []string }
	kit.OnDBs(t, map[string]testCase{
		"an override, while the policy is changed": {
			[]string{"begin", "select ratelimit_define_policy('p', capacity => 20, stepped => true)"},
			[]string{"select ratelimit_override('p', 'k', refill => 5)"},
		},
		"a change, while there is a first override": {
			[]string{"begin", "select ratelimit_override('p', 'k', capacity => 20, refill => 5)"},
			[]string{"select ratelimit_define_policy('p', stepped => true)"},
		},
		"a change, while policy and override are created": {
			[]string{"select ratelimit_drop_policy('p')", "begin", "select ratelimit_define_policy('p', 20, 1, '1 second')", "select ratelimit_override('p', 'k', refill => 5)"},
			[]string{"select ratelimit_define_policy('p', 20, 1, '1 second', stepped => true)"},
		},
	}, func(t *testing.T, db *kit.TestDB, is testCase) {
		db.DefinePolicy("p", 10, 1, kit.Second)
		first, then := db.Session(), db.Session()
		for _, sql := range is.first {
			first.Execute(sql)
		}
		call := then.Start(func(kit.Querier) (d kit.Decision, err error) {
			for _, sql := range is.then {
				_, err = then.Exec(context.Background(), sql)
			}
			return d, err
		})
		call.BlockedBy(first)
		first.Execute("commit")
		require.NoError(t, kit.ErrorOf(call.Result()))
		require.Equal(t, []string{"true, 20, 5"}, kit.Column(t, db.DB, "select stepped::text || ', ' || capacity || ', ' || refill from ratelimit.overrides"))
	})
}

// An answer counts hours, not days: added to an instant it is exact in any time zone, here across the night in which summer time begins.
func TestAnswers_HaveNoDays(t *testing.T) {
	db := kit.ParallelDB(t)
	db.SetTimeZone("Europe/Berlin")
	db.DefinePolicy("p", 10, 1, 24*time.Hour)
	db.AcquireAt(kit.T0, "p", "k", 10)
	var retry, reset string
	var then time.Time
	require.NoError(t, db.Pool.QueryRow(context.Background(), `
		select retry_after::text, reset_after::text, timestamptz '2024-03-30 12:00:00+00' + retry_after
		  from ratelimit_acquire('p', 'k')`).Scan(&retry, &reset, &then))
	require.Equal(t, "24:00:00", retry)
	require.Equal(t, "240:00:00", reset)
	require.Equal(t, kit.T0.Add(24*time.Hour), then.UTC())
	require.Equal(t, "216:00:00", kit.One[string](t, db.Pool, "select reset_after::text from ratelimit_refund('p', 'k', 1)"))
}

// A day is 24 hours wherever a policy says it, also in the night that has only 23.
func TestPolicy_DayIs24HoursInAnyTimeZone(t *testing.T) {
	db := kit.ParallelDB(t)
	db.SetTimeZone("Europe/Berlin")
	day := kit.T0.Add(24 * time.Hour)
	for _, refill := range []string{"false", "true"} {
		policy := "stepped " + refill
		db.Execute("select ratelimit_define_policy($1, 10, 10, '1 day', stepped => "+refill+", remember => '1 day')", policy)
		first := db.AcquireAt(kit.T0, policy, "k", 10, "X")
		require.Equal(t, kit.Allowed(0, 24*time.Hour, 10), first)
		require.False(t, db.PeekAt(day.Add(-kit.Us), policy, "k", 10).Allowed)
		require.True(t, db.PeekAt(day, policy, "k", 10).Allowed)
		require.Equal(t, kit.Replayed(first), db.AcquireAt(day.Add(-kit.Us), policy, "k", 10, "X"), "remembered for 24 hours")
		require.Equal(t, first, db.AcquireAt(day, policy, "k", 10, "X"), "and no longer")
	}
}

func TestPolicy_ExtremeNumbersAreExact(t *testing.T) {
	t.Parallel()
	common := kit.NewDB(t)
	const (
		most      = 9_000_000_000_000
		years1000 = model.Micros(365_250 * 24 * 60 * 60 * 1_000_000)
	)
	for _, test := range []struct {
		capacity, refill int64
		every            string
		oneToken         model.Micros // to come, in a continuous bucket
		full, steps      model.Micros // to come, in a continuous and in a stepped bucket
	}{
		{most, most, "1 microsecond", 1, 1, 1},
		{most, 1, "1 microsecond", 1, most, most},
		{1, most, "1 microsecond", 1, 1, 1},
		{1, 1, "1 microsecond", 1, 1, 1},
		{most, most, "365250 days", 3507, years1000, years1000},
		{most, most / 10, "365250 days", 35064, 10 * years1000, 10 * years1000},
		{most, 900_000_000_001, "365250 days", 35064, 315575999999649361, 10 * years1000},
		{10, 1, "365250 days", years1000, 10 * years1000, 10 * years1000},
		{1, most, "365250 days", 3507, 3507, years1000},
		{most, most - 1, "365250 days", 3507, 31557600000003507, 2 * years1000},
	} {
		for _, isStepped := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d, %d every %s, stepped %v", test.capacity, test.refill, test.every, isStepped), func(t *testing.T) {
				db := common.In(t)
				defer db.DropPolicy("p")
				db.Execute(fmt.Sprintf("select ratelimit_define_policy('p', %d, %d, '%s', %v)", test.capacity, test.refill, test.every, isStepped))
				retry, reset := test.oneToken, test.full
				if isStepped {
					retry, reset = years1000, test.steps
					if test.every == "1 microsecond" {
						retry = 1
					}
				}
				at := func(m model.Micros) time.Time { return m.After(kit.T0) }
				require.Equal(t, kit.Decision{Allowed: true, ResetAfter: reset, Capacity: test.capacity}, db.AcquireAt(kit.T0, "p", "k", test.capacity))
				require.Equal(t, retry, db.Acquire("p", "k", 1).RetryAfter)
				require.Equal(t, reset, db.Acquire("p", "k", test.capacity).RetryAfter)
				require.False(t, db.PeekAt(at(retry-1), "p", "k", 1).Allowed)
				require.True(t, db.PeekAt(at(retry), "p", "k", 1).Allowed)
				require.False(t, db.PeekAt(at(reset-1), "p", "k", test.capacity).Allowed)
				require.True(t, db.PeekAt(at(reset), "p", "k", test.capacity).Allowed)
				later := at(20 * years1000)
				require.Equal(t, kit.Decision{Allowed: true, Remaining: test.capacity, Capacity: test.capacity},
					db.PeekAt(later, "p", "k", 1), "twice the longest time is no overflow")
				require.Equal(t, kit.Decision{Allowed: true, ResetAfter: reset, Capacity: test.capacity}, db.AcquireAt(later, "p", "k", test.capacity))
				db.PutBucket("p", "debt", kit.Bucket{Level: -test.capacity * 1_000_000, RefilledAt: kit.T0})
				debt := db.PeekAt(kit.T0, "p", "debt", 1)
				require.Equal(t, -test.capacity, debt.Remaining)
				require.False(t, db.PeekAt(at(debt.RetryAfter-1), "p", "debt", 1).Allowed)
				require.True(t, db.AcquireAt(at(debt.RetryAfter), "p", "debt", 1).Allowed)
			})
		}
	}
}

func TestVectors(t *testing.T) {
	kit.OnEachDurability(t, func(t *testing.T, db kit.Subject, durability kit.PolicyOption) {
		for _, v := range vectors.Buckets {
			t.Run(v.Name, func(t *testing.T) { kit.ReplayVector(t, db.Of(t), v, durability) })
		}
	})
}

// A bucket that every call drains grants tokens at its rate, whatever the time between the calls, unless it fills up between them.
func TestVectors_29_64_DeliveredRate(t *testing.T) {
	kit.OnEachDurability(t, func(t *testing.T, db kit.Subject, durability kit.PolicyOption) {
		for policy, v := range map[string]struct {
			capacity, rate int64
			lasts          time.Duration
			spacings       []time.Duration
		}{
			"29 golang/time":           {100, 100, 5 * kit.Second, []time.Duration{2 * kit.Ms}},
			"64 envoy 16407, svix 115": {10, 2, 300 * kit.Second, []time.Duration{333 * kit.Ms, 700 * kit.Ms, 777_777 * kit.Us, 1100 * kit.Ms, 4400 * kit.Ms}},
		} {
			db.DefinePolicy(policy, v.capacity, v.rate, kit.Second, durability)
			for _, spacing := range v.spacings {
				key := spacing.String()
				db.AcquireAt(kit.T0, policy, key, v.capacity)
				delivered, last := int64(0), time.Duration(0)
				for at := spacing; at <= v.lasts; at += spacing {
					for db.AcquireAt(kit.T0.Add(at), policy, key, 1).Allowed {
						delivered++
					}
					last = at
				}
				require.Equal(t, v.rate*int64(last)/int64(kit.Second), delivered, "%s: whole tokens in %v, each %v", policy, last, spacing)
			}
		}
	})
}

// Until its override ends a blocked key waits for that, and then for the numbers of the policy, which count from when the bucket was
// last written. A bucket without a row is full by then.
func TestOverride_EveryWaitOutlastsIt(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability).Take("p", "k", 10).Take("p", "free", 1)
		db.Execute("select ratelimit_override('p', key, 0, expires_at => $1) from unnest('{k,new}'::text[]) as u (key)", kit.T0.Add(5*kit.Second))
		db.Execute("select ratelimit_override('p', key, 20, expires_at => $1) from unnest('{more,twin}'::text[]) as u (key)", kit.T0.Add(5*kit.Second))
		db.Execute("select ratelimit_override('p', 'far', 0, expires_at => '294276-12-31')")
		for sql, want := range map[string]string{
			"select retry_after from ratelimit_acquire('p', 'k', 3)":                                                 "00:00:05",
			"select retry_after from ratelimit_acquire('p', 'k', 7, 'i')":                                            "00:00:07",
			"select retry_after from ratelimit_acquire('p', 'k', 11)":                                                "never",
			"select retry_after from ratelimit_acquire('p', 'new', 10)":                                              "00:00:05",
			"select retry_after from ratelimit_peek('p', 'k', 7)":                                                    "00:00:07",
			"select retry_after from ratelimit_acquire_up_to('p', 'k', 9, 7)":                                        "00:00:07",
			"select wait from ratelimit_reserve('p', 'k', '1 hour', 7)":                                              "00:00:07",
			"select wait from ratelimit_reserve('p', 'new', '1 hour', 7)":                                            "00:00:05",
			"select retry_after from ratelimit_status('p', key => 'k')":                                              "00:00:05",
			"select retry_after from ratelimit_acquire_many('{p,p}', '{new,k}', '{1,7}') where request = 2":          "00:00:07",
			"select retry_after from ratelimit_acquire_many('{p,p}', '{new,k}', '{1,7}', '{i,j}') where request = 2": "00:00:07",
			"select retry_after from ratelimit_acquire_many('{p,p}', '{new,k}', '{1,7}') where request = 1":          "00:00:05",
			"select retry_after from ratelimit_acquire_all('{p,p}', '{new,k}', '{1,7}')":                             "00:00:07",
			"select retry_after from ratelimit_acquire_all('{p,p}', '{free,new}', '{9,10}')":                         "00:00:05",
			// What fits until its override ends may not do so when the others begin to.
			"select retry_after from ratelimit_acquire_all('{p,p}', '{more,k}', '{15,7}')":   "never",
			"select retry_after from ratelimit_acquire_all('{p,p}', '{more,new}', '{10,7}')": "00:00:05",
			// The first answer to a request of the same call stays.
			"select array[retry_after_us[2], retry_after_us[3]] from ratelimit_acquire_packed('{p,p,p}', '{twin,twin,k}', '{15,15,8}', '{1,2}', '{i,i}')": "{0,8000000}",
			"select retry_after from ratelimit_acquire('p', 'far', 1)":                                                                                    "876600000:00:00",
			"select (retry_after_us[1] || ' us')::interval from ratelimit_acquire_packed('{p}', '{k}', '{7}')":                                            "00:00:07",
			"select (retry_after_us[2] || ' us')::interval from ratelimit_acquire_packed('{p,p}', '{free,k}', '{1,7}', '{2}')":                            "00:00:07",
		} {
			require.Equal(t, []string{want}, kit.Column(t, db.DB, "select coalesce(("+sql+")::text, 'never')"), sql)
		}
		db.At(kit.T0.Add(7 * kit.Second))
		require.Equal(t, kit.Allowed(0, 10*kit.Second, 10), db.Acquire("p", "k", 7))
	})
}

// A grant is full again by the numbers of the policy if its override ends before that.
func TestOverride_ResetAfterOutlastsIt(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability).Take("p", "k", 1)
		db.Execute("select ratelimit_override('p', 'k', 20, 10, expires_at => $1)", kit.T0.Add(kit.Second))
		// Of 20 there are 9, and of 10 there would be 4 or fewer when the override ends.
		for sql, want := range map[string]string{
			"select reset_after from ratelimit_acquire('p', 'k', 5)":                                      "00:00:06",
			"select reset_after from ratelimit_acquire('p', 'k', 5, 'i')":                                 "00:00:06",
			"select reset_after from ratelimit_acquire_up_to('p', 'k', 5)":                                "00:00:06",
			"select reset_after from ratelimit_reserve('p', 'k', '0', 5)":                                 "00:00:06",
			"select reset_after from ratelimit_charge('p', 'k', 5)":                                       "00:00:06",
			"select reset_after from ratelimit_refund('p', 'k', 0)":                                       "00:00:01",
			"select reset_after from ratelimit_charge('p', 'k', 0)":                                       "00:00:01",
			"select reset_after from ratelimit_peek('p', 'k')":                                            "00:00:01",
			"select reset_after from ratelimit_acquire_many('{p,p}', '{k,b}', '{5,1}') where request = 1": "00:00:06",
			"select (decisions[1]).reset_after from ratelimit_acquire_all('{p,p}', '{k,b}', '{5,1}')":     "00:00:06",
		} {
			session := db.Begin()
			require.Equal(t, []string{want}, kit.ColumnOf(t, session, "select ("+sql+")::text"), sql)
			session.Execute("rollback")
		}
	})
}

func TestMain(m *testing.M) { pgtest.Main(m) }
