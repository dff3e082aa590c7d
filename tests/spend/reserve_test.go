package spend

import (
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestReserve_TokensRefundedWhileItWaitsForTheLockCount(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability).Take("p", "k", 10)
		holder := db.Begin().Execute("select ratelimit_refund('p', 'k', 7)")
		caller := db.Session().StartSpending(reserve(time.Hour, 4, "i")).BlockedBy(holder)
		holder.Execute("commit")
		require.Equal(t, waits(0, kit.Allowed(3, 7*kit.Second, 10)), caller.Answer())
		require.Equal(t, kit.Replayed(kit.Allowed(3, 7*kit.Second, 10)), db.Acquire("p", "k", 4, "i"))
	})
}

func TestReserve_TheWaitForTheLockCounts(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability).Take("p", "k", 10)
		for _, c := range []struct {
			key               string
			cost              int64
			later, wait, left time.Duration
		}{{"i", 5, 2 * kit.Second, 3 * kit.Second, 3*kit.Second - kit.Ms}, {"j", 1, time.Hour, 0, 0}} {
			holder := db.Begin().Execute("select ratelimit_charge('p', 'k', 0)").Execute("select from ratelimit.buckets where key = 'k' for update")
			holder.Execute("select from ratelimit.ephemeral_buckets where key = 'k' for update")
			caller := db.Session().StartSpending(reserve(time.Hour, c.cost, c.key)).BlockedBy(holder)
			db.SetClock(kit.T0.Add(c.later))
			holder.Execute("commit")
			got := caller.Answer()
			require.True(t, got.Allowed)
			require.Equal(t, kit.Micros(c.wait), got.RetryAfter)
			db.SetClock(kit.T0.Add(c.later + kit.Ms))
			require.Equal(t, kit.Micros(c.left), db.MustSpend(reserve(0, c.cost, c.key)).RetryAfter)
		}
	})
}

func TestReserve_TheWaitIsAPromise(t *testing.T) {
	type testCase struct {
		capacity, refill int64
		every            string
		stepped          bool
		costs            []int64
	}
	kit.OnDBs(t, map[string]testCase{
		"less than a microtoken in a microsecond":  {10, 1, "7 seconds", false, []int64{1, 10, 3}},
		"a microtoken takes hours":                 {10, 1, "100000 days", false, []int64{1}},
		"a third of a microtoken in a microsecond": {10, 1, "3 seconds", false, []int64{10, 10, 10}},
		"a line": {1, 50, "1 second", false, []int64{1, 1, 1, 1}},
		"steps":  {10, 3, "7 seconds", true, []int64{1, 10, 3}},
		"days":   {10, 3, "1 day", true, []int64{10, 10}},
	}, func(t *testing.T, db *kit.TestDB, p testCase) {
		now := kit.T0
		db.SetClock(now)
		db.Execute("select ratelimit_define_policy('p', $1, $2, $3::interval, stepped => $4)", p.capacity, p.refill, p.every, p.stepped)
		ask := db.MustSpend
		ask(charge(p.capacity))
		for n, cost := range p.costs {
			for _, lead := range []time.Duration{1234567 * kit.Us, 0, -89 * kit.Ms}[n%3:] { // in the last, the clock goes back
				now = now.Add(lead)
				db.SetClock(now)
				denied := ask(reserve(0, cost))
				wait := time.Duration(denied.RetryAfter) * kit.Us
				if denied.RetryAfter > kit.MaxWaitOfReserve || wait == 0 {
					continue
				}
				require.False(t, denied.Allowed)
				require.Equal(t, denied, ask(reserve(wait-kit.Us, cost)))
				granted := ask(reserve(wait, cost))
				require.True(t, granted.Allowed)
				require.Equal(t, denied.RetryAfter, granted.RetryAfter)
				require.Negative(t, db.PeekAt(now.Add(wait-kit.Us), "p", "k", 0).Remaining)
				require.GreaterOrEqual(t, db.PeekAt(now.Add(wait), "p", "k", 0).Remaining, int64(0))
				db.SetClock(now)
			}
		}
	})
}

func TestReserve_IsDeniedBelowTheFloor(t *testing.T) {
	db := kit.ParallelDB(t)
	m := model.New()
	capacity, refill, every := int64(kit.MaxTokens), int64(1_000_000), kit.Micros(kit.Second)
	require.NoError(t, m.Define("p", model.Definition{Numbers: model.Numbers{Capacity: &capacity, Refill: &refill, Every: &every}}))
	db.At(kit.T0).Policy("p", capacity, refill, kit.Second)
	now := kit.T0
	ask := db.AsModel(m, &now)
	const year = 365 * 24 * time.Hour
	ask(charge(kit.MaxTokens))
	require.True(t, ask(reserve(year, kit.MaxTokens, "i")).Allowed)
	require.False(t, ask(reserve(year, 1)).Allowed)
	ask(settle("i", 1_000_000))
	require.False(t, ask(reserve(year, kit.MaxTokens)).Allowed)
	now = now.Add(kit.Second - kit.Us)
	db.SetClock(now)
	require.False(t, ask(reserve(year, kit.MaxTokens)).Allowed)
	now = now.Add(kit.Us)
	db.SetClock(now)
	require.EqualValues(t, -kit.MaxTokens, ask(reserve(year, kit.MaxTokens)).Remaining, "the refill since then counts")
}

// The tokens come by the numbers of the policy once the override has ended, from when the bucket was last written.
func TestReserve_TheWaitOutlastsAnOverride(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 100, 1, kit.Second, durability).Take("p", "k", 100)
		db.Execute("select ratelimit_override('p', 'k', refill => 10, expires_at => $1)", kit.T0.Add(2*kit.Second))
		within := kit.Denied(0, 1500*kit.Ms, 10*kit.Second, 100)
		within.ResetAfter = kit.Micros(100 * kit.Second)
		require.Equal(t, within, db.MustSpend(reserve(kit.Second, 15)).Decision)
		past := within
		past.RetryAfter = kit.Micros(20 * kit.Second)
		require.Equal(t, past, db.MustSpend(reserve(5*kit.Second, 20)).Decision, "by the override 2 s")
		require.Equal(t, waits(20*kit.Second, kit.Allowed(-20, 120*kit.Second, 100)), db.MustSpend(reserve(20*kit.Second, 20, "i")).Decision)
		require.EqualValues(t, -1, db.PeekAt(kit.T0.Add(20*kit.Second-kit.Us), "p", "k", 0).Remaining)
		require.EqualValues(t, 0, db.PeekAt(kit.T0.Add(20*kit.Second), "p", "k", 0).Remaining)
		require.True(t, db.AcquireAt(kit.T0.Add(20*kit.Second), "p", "k", 20, "i").Replayed)
	})
}
