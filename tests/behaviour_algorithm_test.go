package tests

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

func TestBucket_ComesWithTheFirstGrant(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.definePolicy("p", 10, 1, second, durability)
		require.Equal(t, allowed(10, 0, 10), db.peekAt(t0, "p", "k", 10))
		require.Equal(t, allowed(10, 0, 10), db.acquireAt(t0, "p", "k", 0))
		require.Equal(t, never(10, 0, 10), db.acquireAt(t0, "p", "k", 11))
		require.Equal(t, allowed(10, 0, 10), db.refundAt(t0, "p", "k", 5))
		require.Nil(t, db.bucket("p", "k"))
		require.Equal(t, allowed(7, 3*second, 10), db.acquireAt(t0, "p", "k", 3))
		require.Equal(t, &bucket{7_000_000, t0}, db.bucket("p", "k"))
	})
}

func TestStepped_WorkedExample(t *testing.T) {
	onEach(t, func(t *testing.T, db subject) {
		db.definePolicy("stepped", 20, 5, 10*second, stepped)
		db.definePolicy("continuous", 20, 5, 10*second)
		for _, p := range []string{"stepped", "continuous"} {
			require.EqualValues(t, 15, db.acquireAt(t0, p, "k", 5).Remaining)
			require.EqualValues(t, 20, db.peekAt(t0.Add(10*second), p, "k", 1).Remaining)
			require.EqualValues(t, 2, db.acquireAt(t0.Add(15*second), p, "k", 18).Remaining)
		}
		require.Equal(t, allowed(7, 30*second, 20), db.peekAt(t0.Add(20*second), "stepped", "k", 1))
		require.Equal(t, allowed(4, 31*second, 20), db.peekAt(t0.Add(20*second), "continuous", "k", 1), "4.5 tokens")
	})
}

// Whatever happens in between, five tokens come at every tenth second after the first take, and no sooner.
func TestStepped_AnchorStays(t *testing.T) {
	db := parallelDB(t).policy("p", 1000, 5, 10*second, stepped)
	db.acquireAt(t0, "p", "k", 900)
	between := map[string]func(at time.Time){
		"a take":         func(at time.Time) { require.True(t, db.acquireAt(at, "p", "k", 7).Allowed) },
		"a refund":       func(at time.Time) { db.refundAt(at, "p", "k", 3) },
		"a refund of 0":  func(at time.Time) { db.refundAt(at, "p", "k", 0) },
		"a peek":         func(at time.Time) { db.peekAt(at, "p", "k", 1) },
		"a denial":       func(at time.Time) { require.False(t, db.acquireAt(at, "p", "k", 999).Allowed) },
		"take and give":  func(at time.Time) { db.acquireAt(at, "p", "k", 1); db.refundAt(at.Add(second), "p", "k", 1) },
		"a redefinition": func(time.Time) { db.definePolicy("p", 1000, 5, 10*second) },
	}
	interval := t0
	for name, do := range between {
		for _, later := range []time.Duration{0, 1 * us, 4 * second, 9*second - us} {
			do(interval.Add(later))
			interval = interval.Add(10 * second)
			before := db.peekAt(interval.Add(-us), "p", "k", 1)
			after := db.peekAt(interval, "p", "k", 1)
			require.Equal(t, before.Remaining+5, after.Remaining, "%s, %v after an interval began", name, later)
			elapsed := db.bucket("p", "k").RefilledAt.Sub(t0)
			require.Zero(t, elapsed%(10*second), "%s, %v after an interval began", name, later)
		}
	}
}

func TestStepped_WithoutItsRowStartsANewAnchor(t *testing.T) {
	onDBs(t, map[string]func(db *testDB){
		"reset": func(db *testDB) { db.reset("p", "k") },
		"clean-up": func(db *testDB) {
			db.cleanUpAtOnce()
			require.Equal(db.t, deleted{}, db.cleanupAt(t0.Add(10*second-us)))
			require.Equal(db.t, deleted{buckets: 1}, db.cleanupAt(t0.Add(13*second)))
		},
	}, func(t *testing.T, db *testDB, remove func(db *testDB)) {
		db.definePolicy("p", 20, 5, 10*second, stepped)
		db.acquireAt(t0, "p", "k", 5)
		db.setClock(t0.Add(13 * second)) // full since 10 s
		remove(db)
		require.Nil(t, db.bucket("p", "k"))
		require.Equal(t, allowed(0, 40*second, 20), db.acquireAt(t0.Add(14*second), "p", "k", 20))
		require.EqualValues(t, 0, db.peekAt(t0.Add(24*second-us), "p", "k", 1).Remaining)
		require.EqualValues(t, 5, db.peekAt(t0.Add(24*second), "p", "k", 1).Remaining)
	})
}

func TestContinuous_TenTakesInOneSecond(t *testing.T) {
	onEachDurability(t, func(t *testing.T, db subject, durability policyOption) {
		db.definePolicy("p", 10, 1, second, durability)
		for i := range 10 {
			require.True(t, db.acquireAt(t0.Add(time.Duration(i)*100*ms), "p", "k", 1).Allowed)
		}
		require.Equal(t, denied(0, 1*us, 9*second+1*us, 10), db.acquireAt(t0.Add(second-us), "p", "k", 1))
		require.Equal(t, allowed(0, 10*second, 10), db.acquireAt(t0.Add(second), "p", "k", 1))
	})
}

// Continuous refill is as fine as a microsecond, and what a grant rounds away is less than a microtoken.
func TestContinuous_NothingIsMintedAndLittleLost(t *testing.T) {
	db := parallelDB(t)
	const takes, spacing = 200, 5 * us
	db.definePolicy("p", 1000, 3, 7*second)
	db.acquireAt(t0, "p", "k", 500)
	for i := range takes {
		db.acquireAt(t0.Add(time.Duration(i+1)*spacing), "p", "k", 1)
	}
	credited := db.bucket("p", "k").Level - (500-takes)*1_000_000
	exact := float64(takes*spacing/us) * 3 / 7
	require.LessOrEqual(t, float64(credited), exact)
	require.Greater(t, float64(credited), exact-takes)
}

func TestNever_IsDecidedFirst(t *testing.T) {
	onEach(t, func(t *testing.T, db subject) {
		db.definePolicy("p", 5, 1, second)
		require.Equal(t, never(5, 0, 5), db.acquireAt(t0, "p", "new", 6))
		require.Equal(t, never(5, 0, 5), db.acquireAt(t0, "p", "new", math.MaxInt64))
		db.acquireAt(t0, "p", "empty", 5)
		require.Equal(t, never(0, 5*second, 5), db.acquireAt(t0, "p", "empty", 6))
		require.Equal(t, never(0, 5*second, 5), db.peekAt(t0, "p", "empty", 6))
		db.putBucket("p", "debt", bucket{-2_000_000, t0})
		require.Equal(t, never(-2, 7*second, 5), db.acquireAt(t0, "p", "debt", 6))
		db.putBucket("p", "ahead", bucket{4_000_000, t0.Add(time.Hour)})
		require.Equal(t, never(4, time.Hour+second, 5), db.acquireAt(t0, "p", "ahead", 6))
	})
}

func TestCostZero_IsAllowedAndWritesNothing(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.definePolicy("p", 5, 1, second, durability)
		db.setClock(t0)
		db.putBucket("p", "debt", bucket{-1_500_000, t0})
		require.Equal(t, allowed(-2, 6500*ms, 5), db.acquire("p", "debt", 0))
		require.Equal(t, allowed(-2, 6500*ms, 5), db.peekAt(t0, "p", "debt", 0))
		db.setClock(t0.Add(second))
		require.Equal(t, allowed(-1, 5500*ms, 5), db.acquire("p", "debt", 0))
		require.Equal(t, &bucket{-1_500_000, t0}, db.bucket("p", "debt"))
	})
}

func TestRemaining_IsRoundedDownAndWaitsUp(t *testing.T) {
	onEach(t, func(t *testing.T, db subject) {
		db.definePolicy("p", 3, 3, second) // a token each 333,333.3 µs
		for _, test := range []struct {
			level     int64 // microtokens
			remaining int64
			retry     time.Duration // for 1 token
			reset     time.Duration
		}{
			{3_000_000, 3, 0, 0},
			{2_999_999, 2, 0, 1 * us},
			{2_999_997, 2, 0, 1 * us},
			{2_999_996, 2, 0, 2 * us},
			{1_000_000, 1, 0, 666_667 * us},
			{999_999, 0, 1 * us, 666_667 * us},
			{1, 0, 333_333 * us, 1_000_000 * us},
			{0, 0, 333_334 * us, 1_000_000 * us},
			{-1, -1, 333_334 * us, 1_000_001 * us},
			{-999_999, -1, 666_667 * us, 1_333_333 * us},
			{-1_000_000, -1, 666_667 * us, 1_333_334 * us},
			{-1_000_001, -2, 666_667 * us, 1_333_334 * us},
			{-1_000_002, -2, 666_668 * us, 1_333_334 * us},
		} {
			db.putBucket("p", "k", bucket{test.level, t0})
			want := allowed(test.remaining, test.reset, 3)
			if test.retry > 0 {
				want = denied(test.remaining, test.retry, test.reset, 3)
			}
			require.Equal(t, want, db.peekAt(t0, "p", "k", 1), "level %d", test.level)
		}
	})
}

func TestRetryAfter_CountsTheLeadOfTheStoredInstant(t *testing.T) {
	onEach(t, func(t *testing.T, db subject) {
		for p, refill := range map[string]policyOption{"continuous": continuous, "stepped": stepped} {
			db.definePolicy(p, 10, 2, second, refill)
			const lead = 3 * time.Hour
			db.acquireAt(t0.Add(lead), p, "k", 10)
			answer := db.acquireAt(t0, p, "k", 2)
			require.Equal(t, denied(0, lead+second, lead+5*second, 10), answer)
			require.False(t, db.acquireAt(t0.Add(lead+second-us), p, "k", 2).Allowed)
			require.True(t, db.acquireAt(t0.Add(lead+second), p, "k", 2).Allowed)
		}
	})
}

// A bucket called while the clock is an hour behind ends like one called at the last instant before.
func TestClock_BackAnHourMintsAndDestroysNothing(t *testing.T) {
	onDBs(t, map[string]policyOption{"continuous": continuous, "stepped": stepped}, func(t *testing.T, db *testDB, refill policyOption) {
		db.definePolicy("p", 100, 1, second, refill)
		calls := func(key string, at time.Time) {
			db.acquireAt(at, "p", key, 10)
			db.refundAt(at.Add(2*second), "p", key, 3)
			db.peekAt(at.Add(time.Minute), "p", key, 1)
			db.acquireAt(at.Add(time.Minute), "p", key, 1000)
			db.acquireAt(at.Add(59*time.Minute), "p", key, 5)
		}
		last := t0.Add(time.Hour)
		for _, key := range []string{"stepped back", "steady"} {
			db.acquireAt(t0, "p", key, 50)
			db.acquireAt(last, "p", key, 50)
		}
		calls("stepped back", t0)
		db.setClock(last)
		require.Equal(t, allowed(38, 62*second, 100), db.peekAt(last, "p", "stepped back", 1))
		db.acquireAt(last, "p", "steady", 10)
		db.refundAt(last, "p", "steady", 3)
		db.acquireAt(last, "p", "steady", 5)
		require.Equal(t, db.bucket("p", "steady"), db.bucket("p", "stepped back"))
		require.Equal(t, allowed(39, 61*second, 100), db.peekAt(last.Add(second), "p", "stepped back", 1))
	})
}

func TestClock_ForwardJump(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, second)
	for _, key := range []string{"touched", "reset", "untouched"} {
		db.acquireAt(t0, "p", key, 10)
	}
	jump := t0.Add(24 * time.Hour)
	db.acquireAt(jump, "p", "touched", 10)
	db.acquireAt(jump, "p", "reset", 10)
	soon := t0.Add(5 * second)
	require.Equal(t, allowed(5, 5*second, 10), db.peekAt(soon, "p", "untouched", 1))
	require.Equal(t, denied(0, 24*time.Hour-4*second, 24*time.Hour+5*second, 10), db.peekAt(soon, "p", "touched", 1))
	require.EqualValues(t, 0, db.peekAt(jump, "p", "touched", 1).Remaining, "nothing until the clock is past it")
	require.EqualValues(t, 1, db.peekAt(jump.Add(second), "p", "touched", 1).Remaining)
	db.setClock(soon)
	db.reset("p", "reset")
	require.Equal(t, allowed(0, 10*second, 10), db.acquire("p", "reset", 10))
	require.Equal(t, allowed(0, 0, 10).Remaining, db.peekAt(soon, "p", "reset", 0).Remaining)
	require.Equal(t, &bucket{0, soon}, db.bucket("p", "reset"))
}

// Two acquires in one transaction are made by two readings of the clock, and none is when the
// transaction began: what it stores gives the next caller nothing for the time before.
func TestClock_IsReadInsideTheCall(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, time.Hour)
	ctx := context.Background()
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(ctx)
	var began time.Time
	require.NoError(t, tx.QueryRow(ctx, "select now()").Scan(&began))
	require.EqualValues(t, 7, db.acquire("p", "k", 3).Remaining) // another session, later
	others := db.bucket("p", "k").RefilledAt
	require.Greater(t, others, began)
	refilledAt := func() (at time.Time) {
		require.NoError(t, tx.QueryRow(ctx, "select refilled_at from ratelimit.buckets").Scan(&at))
		return at.UTC()
	}
	db.must(acquire(tx, "p", "k", 1))
	first := refilledAt()
	db.must(acquire(tx, "p", "k", 1))
	second := refilledAt()
	require.Less(t, others, first)
	require.Less(t, first, second)
	require.NoError(t, tx.Commit(ctx))
	require.EqualValues(t, 5, db.must(peek(db.Pool, "p", "k", 1)).Remaining)
}

// A transaction that began long before counts nobody's time twice: the clock is set to before the other's acquire, as now() would have it.
func TestClock_LateCallRaisesNobodysTokens(t *testing.T) {
	db := parallelDB(t)
	for p, refill := range map[string]policyOption{"continuous": continuous, "stepped": stepped} {
		db.definePolicy(p, 5, 5, second, refill)
		now := t0.Add(10 * second)
		for range 4 {
			db.acquireAt(now, p, "k", 1)
		}
		require.EqualValues(t, 0, db.acquireAt(t0, p, "k", 1).Remaining)
		require.False(t, db.acquireAt(t0, p, "k", 1).Allowed)
		require.EqualValues(t, 0, db.refundAt(t0, p, "k", 0).Remaining)
		require.EqualValues(t, 0, db.peekAt(now, p, "k", 1).Remaining)
		require.Equal(t, &bucket{0, now}, db.bucket(p, "k"))
	}
}

func TestRefund(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.definePolicy("p", 10, 1, second, durability)
		db.acquireAt(t0, "p", "k", 8)
		require.Equal(t, allowed(5, 5*second, 10), db.refundAt(t0, "p", "k", 3))
		require.Equal(t, allowed(5, 4500*ms, 10), db.refundAt(t0.Add(500*ms), "p", "k", 0), "5.5 tokens")
		require.Equal(t, allowed(10, 0, 10), db.refundAt(t0.Add(500*ms), "p", "k", 5), "not 10.5")
		require.Equal(t, &bucket{10_000_000, t0.Add(500 * ms)}, db.bucket("p", "k"))
		db.putBucket("p", "debt", bucket{-25_500_000, t0})
		require.Equal(t, allowed(-23, 32500*ms, 10), db.refundAt(t0, "p", "debt", 3), "-22.5 tokens")
		require.Equal(t, allowed(-13, 22500*ms, 10), db.refundAt(t0, "p", "debt", math.MaxInt64), "as much as the capacity")
		require.Equal(t, allowed(10, 0, 10), db.refundAt(t0.Add(12500*ms), "p", "debt", 10))
	})
}

func TestPolicyChange_AppliesToTheNextCall(t *testing.T) {
	onEach(t, func(t *testing.T, common subject) {
		drained := func(db subject) { // at 0 s, and one of the ten taken that came by 10 s
			db.definePolicy("p", 100, 1, second)
			db.acquireAt(t0, "p", "k", 100)
			db.acquireAt(t0.Add(10*second), "p", "k", 1)
		}
		to := func(capacity, refill int64, every time.Duration, opts ...policyOption) func(db subject) {
			return func(db subject) { db.definePolicy("p", capacity, refill, every, opts...) }
		}
		eightLeft := func(db subject) {
			db.definePolicy("p", 10, 1, time.Minute)
			db.acquireAt(t0, "p", "k", 2)
		}
		steppedEight := func(db subject) {
			db.definePolicy("p", 100, 10, 10*second, stepped)
			db.acquireAt(t0, "p", "k", 100)
			db.acquireAt(t0.Add(14*second), "p", "k", 2) // its instant is the anchor, 10 s
		}
		for name, test := range map[string]struct {
			before func(db subject)
			change func(db subject)
			at     time.Duration
			want   decision
		}{
			"a smaller capacity clamps":           {eightLeft, to(5, 1, time.Minute), 0, allowed(5, 0, 5)},
			"a smaller capacity above the level":  {eightLeft, to(9, 1, time.Minute), 0, allowed(8, time.Minute, 9)},
			"a larger capacity does not fill":     {eightLeft, to(20, 1, time.Minute), 0, allowed(8, 12*time.Minute, 20)},
			"a larger capacity lets refill go on": {eightLeft, to(20, 1, time.Minute), 5 * time.Minute, allowed(13, 7*time.Minute, 20)},
			"a clamped level stays down once a call has written it": {eightLeft,
				func(db subject) {
					db.definePolicy("p", 5, 1, time.Minute)
					db.acquireAt(t0, "p", "k", 1)
					db.definePolicy("p", 10, 1, time.Minute)
				}, 0, allowed(4, 6*time.Minute, 10)},
			"more refill counts since the last write":                {drained, to(100, 3, second), 20 * second, allowed(9+30, 20333334*us, 100)},
			"less refill counts since the last write":                {drained, to(100, 1, 2*second), 20 * second, allowed(9+5, 172*second, 100)},
			"a shorter every":                                        {drained, to(100, 1, 500*ms), 20 * second, allowed(9+20, 35500*ms, 100)},
			"continuous becomes stepped: anchored at the last write": {drained, to(100, 10, 4*second, stepped), 20 * second, allowed(9+20, 30*second, 100)},
			"stepped becomes continuous: counted from the anchor":    {steppedEight, to(100, 10, 10*second, continuous), 15 * second, allowed(8+5, 87*second, 100)},
			"another every, stepped: counted from the anchor":        {steppedEight, to(100, 10, 3*second), 18 * second, allowed(8+20, 22*second, 100)},
			"nothing changes":                                        {steppedEight, to(100, 10, 10*second), 19 * second, allowed(8, 91*second, 100)},
		} {
			t.Run(name, func(t *testing.T) {
				db := common.of(t)
				defer db.dropPolicy("p")
				test.before(db)
				test.change(db)
				require.Equal(t, test.want, db.peekAt(t0.Add(test.at), "p", "k", 1))
				require.Equal(t, test.want.Remaining-1, db.acquireAt(t0.Add(test.at), "p", "k", 1).Remaining)
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
	db := newDB(t)
	defined := func() policy {
		t.Helper()
		rows, err := db.Pool.Query(context.Background(),
			"select capacity, refill, every::text, stepped, durable, remember::text from ratelimit_policies()")
		require.NoError(t, err)
		p, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[policy])
		require.NoError(t, err)
		return p
	}
	db.definePolicy("p", 10, 1, second)
	require.Equal(t, policy{10, 1, "00:00:01", false, true, "24:00:00"}, defined(), "defaults")
	db.definePolicy("p", 11, 2, second, stepped, remember(time.Hour))
	require.Equal(t, policy{11, 2, "00:00:01", true, true, "01:00:00"}, defined())
	db.definePolicy("p", 12, 3, time.Minute)
	require.Equal(t, policy{12, 3, "00:01:00", true, true, "01:00:00"}, defined())
	db.definePolicy("p", 12, 3, time.Minute, continuous, durable)
	require.Equal(t, policy{12, 3, "00:01:00", false, true, "01:00:00"}, defined())
	db.exec("select ratelimit_define_policy('p', capacity => 500)")
	require.Equal(t, policy{500, 3, "00:01:00", false, true, "01:00:00"}, defined())
	db.exec("select ratelimit_define_policy('p', refill => 4)")
	db.exec("select ratelimit_define_policy('p', every => '2 minutes')")
	db.exec("select ratelimit_define_policy('p', remember => '2 hours')")
	require.Equal(t, policy{500, 4, "00:02:00", false, true, "02:00:00"}, defined())
	db.exec("select ratelimit_define_policy('p')")
	require.Equal(t, policy{500, 4, "00:02:00", false, true, "02:00:00"}, defined())
	db.dropPolicy("p")
	db.policy("p", 10, 1, second, ephemeral).policy("p", 10, 1, second)
	require.Equal(t, policy{10, 1, "00:00:01", false, false, "24:00:00"}, defined())
}

// Each of two changes is fine beside the policy that it found, and together they would not be.
func TestPolicyChange_TwoAtATimeAreCheckedTogether(t *testing.T) {
	db := parallelDB(t).policy("p", 1000, 1000, time.Hour)
	first, second := db.begin(), db.session()
	first.exec("select ratelimit_define_policy('p', capacity => 10000000000)")
	call := second.start(func(querier) (decision, error) {
		_, err := second.Exec(context.Background(), "select ratelimit_define_policy('p', refill => 1)")
		return decision{}, err
	})
	call.awaitBlockedBy(first)
	first.exec("commit")
	_, err := call.result()
	require.Equal(t, "22023", sqlState(err), "%v", err)
}

func TestPolicyChange_OverridesFollowStepped(t *testing.T) {
	type testCase struct{ first, then []string }
	onDBs(t, map[string]testCase{
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
	}, func(t *testing.T, db *testDB, is testCase) {
		db.definePolicy("p", 10, 1, second)
		first, then := db.session(), db.session()
		for _, sql := range is.first {
			first.exec(sql)
		}
		call := then.start(func(querier) (d decision, err error) {
			for _, sql := range is.then {
				_, err = then.Exec(context.Background(), sql)
			}
			return d, err
		})
		call.awaitBlockedBy(first)
		first.exec("commit")
		_, err := call.result()
		require.NoError(t, err)
		require.Equal(t, []string{"true, 20, 5"}, column(t, db.DB, "select stepped::text || ', ' || capacity || ', ' || refill from ratelimit.overrides"))
	})
}

// An answer counts hours, not days: added to an instant it is exact in any time zone, here across the night in which summer time begins.
func TestAnswers_HaveNoDays(t *testing.T) {
	db := parallelDB(t)
	db.setTimeZone("Europe/Berlin")
	db.definePolicy("p", 10, 1, 24*time.Hour)
	db.acquireAt(t0, "p", "k", 10)
	var retry, reset string
	var then time.Time
	require.NoError(t, db.Pool.QueryRow(context.Background(), `
		select retry_after::text, reset_after::text, timestamptz '2024-03-30 12:00:00+00' + retry_after
		  from ratelimit_acquire('p', 'k')`).Scan(&retry, &reset, &then))
	require.Equal(t, "24:00:00", retry)
	require.Equal(t, "240:00:00", reset)
	require.Equal(t, t0.Add(24*time.Hour), then.UTC())
	require.NoError(t, db.Pool.QueryRow(context.Background(), "select reset_after::text from ratelimit_refund('p', 'k', 1)").Scan(&reset))
	require.Equal(t, "216:00:00", reset)
}

// A day is 24 hours wherever a policy says it, also in the night that has only 23.
func TestPolicy_DayIs24HoursInAnyTimeZone(t *testing.T) {
	db := parallelDB(t)
	db.setTimeZone("Europe/Berlin")
	day := t0.Add(24 * time.Hour)
	for _, refill := range []string{"false", "true"} {
		policy := "stepped " + refill
		db.exec("select ratelimit_define_policy($1, 10, 10, '1 day', stepped => "+refill+", remember => '1 day')", policy)
		first := db.acquireAt(t0, policy, "k", 10, "X")
		require.Equal(t, allowed(0, 24*time.Hour, 10), first)
		require.False(t, db.peekAt(day.Add(-us), policy, "k", 10).Allowed)
		require.True(t, db.peekAt(day, policy, "k", 10).Allowed)
		require.Equal(t, replayed(first), db.acquireAt(day.Add(-us), policy, "k", 10, "X"), "remembered for 24 hours")
		require.Equal(t, first, db.acquireAt(day, policy, "k", 10, "X"), "and no longer")
	}
}

func TestExtremePolicies(t *testing.T) {
	t.Parallel()
	common := newDB(t)
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
				db := common.in(t)
				defer db.dropPolicy("p")
				db.exec(fmt.Sprintf("select ratelimit_define_policy('p', %d, %d, '%s', %v)", test.capacity, test.refill, test.every, isStepped))
				retry, reset := test.oneToken, test.full
				if isStepped {
					retry, reset = years1000, test.steps
					if test.every == "1 microsecond" {
						retry = 1
					}
				}
				at := func(m model.Micros) time.Time { return m.After(t0) }
				require.Equal(t, decision{Allowed: true, ResetAfter: reset, Capacity: test.capacity}, db.acquireAt(t0, "p", "k", test.capacity))
				require.Equal(t, retry, db.acquire("p", "k", 1).RetryAfter)
				require.Equal(t, reset, db.acquire("p", "k", test.capacity).RetryAfter)
				require.False(t, db.peekAt(at(retry-1), "p", "k", 1).Allowed)
				require.True(t, db.peekAt(at(retry), "p", "k", 1).Allowed)
				require.False(t, db.peekAt(at(reset-1), "p", "k", test.capacity).Allowed)
				require.True(t, db.peekAt(at(reset), "p", "k", test.capacity).Allowed)
				later := at(20 * years1000)
				require.Equal(t, decision{Allowed: true, Remaining: test.capacity, Capacity: test.capacity},
					db.peekAt(later, "p", "k", 1), "twice the longest time is no overflow")
				require.Equal(t, decision{Allowed: true, ResetAfter: reset, Capacity: test.capacity}, db.acquireAt(later, "p", "k", test.capacity))
				db.putBucket("p", "debt", bucket{-test.capacity * 1_000_000, t0})
				debt := db.peekAt(t0, "p", "debt", 1)
				require.Equal(t, -test.capacity, debt.Remaining)
				require.False(t, db.peekAt(at(debt.RetryAfter-1), "p", "debt", 1).Allowed)
				require.True(t, db.acquireAt(at(debt.RetryAfter), "p", "debt", 1).Allowed)
			})
		}
	}
}
