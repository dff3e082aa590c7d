package spend

import (
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestSettle_OfAChargeCutAtTheFloorRefundsOnlyTheTokensTaken(t *testing.T) {
	kit.OnEachDurability(t, func(t *testing.T, db kit.Subject, durability kit.PolicyOption) {
		db.DefinePolicy("p", 10, 0, kit.Second, durability)
		left := func(remaining int64) kit.Decision {
			return kit.Decision{Allowed: true, Remaining: remaining, ResetAfter: model.Never, Capacity: 10}
		}
		runSpending(t, db, []spendStep{
			{0, charge(105, "first"), left(-95), 0, ""},
			{0, charge(kit.MaxTokens, "cut"), left(-kit.MaxTokens), 0, ""}, // by 95
			{0, charge(3, "none"), left(-kit.MaxTokens), 0, ""},
			{0, charge(kit.MaxTokens, "cut"), kit.Replayed(left(-kit.MaxTokens)), 0, ""},
			{0, charge(kit.MaxTokens-95, "cut"), kit.Decision{}, 0, model.IdempotencyMismatch},
			{0, settle("none", 0), left(-kit.MaxTokens), 0, ""},
			{0, settle("cut", 2), left(-97), 0, ""},
			{0, settle("cut", 2), kit.Replayed(left(-97)), 0, ""},
			{0, settle("first", 0), left(8), 0, ""},
		})
	})
}

func TestSettle_DoesNotWaitForAnUncommittedGrant(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		holder := db.Policy("p", 10, 1, time.Hour, durability).Begin()
		holder.Acquire("p", "k", 4, "i")
		_, err := settle("i", 2).By(db.Pool)
		require.Equal(t, string(model.NoGrant), kit.SQLState(err))
		require.NoError(t, kit.ErrorOf(settle("i", 2).By(holder)), "its own transaction sees it")
		holder.Execute("commit")
		got := db.MustSpend(settle("i", 2))
		require.True(t, got.Replayed)
		require.EqualValues(t, 8, got.Remaining)
	})
}

// Without a row to lock, another call would see the grant unsettled beside a level that the settlement did not see.
func TestSettle_CreatesTheRowOfABucket(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability)
		for _, key := range []string{"back", "more"} {
			db.Acquire("p", "k", 4, key)
		}
		db.Reset("p", "k")
		require.Equal(t, kit.Allowed(10, 0, 10), db.MustSpend(settle("back", 1)).Decision)
		require.Equal(t, &kit.Bucket{Level: 10_000_000, RefilledAt: kit.T0}, db.Bucket("p", "k"))
		require.Equal(t, kit.Allowed(7, 3*kit.Second, 10), db.MustSpend(settle("more", 7)).Decision)
		require.Equal(t, kit.Replayed(kit.Allowed(7, 3*kit.Second, 10)), db.MustSpend(settle("back", 1)).Decision)
	})
}

func TestSettle_OfConcurrentSettlementsOneCounts(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 100, 1, time.Hour, durability).Take("p", "k", 50, "i")
		holder := db.Begin().Execute("select ratelimit_charge('p', 'k', 1)") // so that all settlements wait for the bucket
		var callers []*kit.Pending
		for n := range 10 {
			callers = append(callers, db.Session().StartSpending(settle("i", int64(10+n%2))))
			callers[0].BlockedBy(holder)
		}
		holder.Execute("commit")
		mismatches, first := 0, 0
		for _, caller := range callers {
			if d, err := caller.Result(); err != nil {
				require.Equal(t, string(model.IdempotencyMismatch), kit.SQLState(err))
				mismatches++
			} else if !d.Replayed {
				first++
			}
		}
		require.Equal(t, 1, first)
		require.Equal(t, 5, mismatches)
		require.Contains(t, []int64{100 - 1 - 10, 100 - 1 - 11}, db.Left("p", "k"))
	})
}

func TestSettle_AfterAWaitSettlesThePresentGrant(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		for _, anew := range []bool{true, false} {
			db.At(kit.T0).Policy("p", 100, 0, kit.Second, durability, kit.Remember(kit.Second)).Take("p", "k", 10, "i")
			holder := db.Begin().Take("p", "k", 1)
			call := db.Session().StartSpending(settle("i", 5)).BlockedBy(holder)
			db.SetClock(kit.T0.Add(kit.Second))
			if anew {
				require.False(t, holder.Acquire("p", "k", 20, "i").Replayed)
			}
			holder.Execute("commit")
			d, err := call.Result()
			if anew {
				require.NoError(t, err)
				require.EqualValues(t, 100-10-1-5, d.Remaining)
			} else {
				require.Equal(t, string(model.NoGrant), kit.SQLState(err), "%+v", d)
			}
			db.DropPolicy("p")
		}
	})
}

func TestSettle_OfAShadowPolicyFindsAGrantThatItsBucketContains(t *testing.T) {
	t.Parallel()
	for function, kind := range map[string]string{"ratelimit_settle": "true", "ratelimit.settle_ephemeral": "false"} {
		db := kit.NewDB(t)
		gate := db.GateBefore(`if not v_policy\.shadow then perform no_grant\([^;]*;[^;]* end if; select n\.level, n\.reset_us`, function)
		db.Execute("select ratelimit_define_policy('p', 10, 1, '1 day', shadow => true, durable => " + kind + ")")
		call := gate.Session().StartSpending(settle("i", 1)).BlockedBy(gate.Keeper)
		db.Acquire("p", "k", 4, "i")
		gate.Open()
		d := call.Answer()
		require.False(t, d.Shadowed)
		require.EqualValues(t, 9, d.Remaining)
	}
}
