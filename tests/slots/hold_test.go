// Package slots tests limits on what is in flight: who holds, until when, and what a holder may count on.
package slots

import (
	"context"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

const lease = time.Minute

func at(d time.Duration) time.Time { return kit.T0.Add(d) }

// never is the answer to a hold that no wait helps.
func never(remaining, capacity int64) kit.HoldDecision {
	return kit.HoldDecision{Remaining: remaining, RetryAfter: model.Never, Capacity: capacity}
}

func TestHold_LendsUpToTheCapacity(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 5, lease, kind)
		require.Equal(t, kit.Held(3, lease, 5), db.HoldAt(at(0), "a", 2))
		require.Equal(t, kit.Held(0, lease, 5), db.HoldAt(at(kit.Second), "b", 3))
		require.Equal(t, kit.NotHeld(0, lease-2*kit.Second, 5), db.HoldAt(at(2*kit.Second), "c", 2))
		require.Equal(t, kit.NotHeld(0, lease-kit.Second, 5), db.Hold("c", 3), "the first end frees 2 only")
		require.Equal(t, never(0, 5), db.Hold("c", 6))
		require.Equal(t, kit.Renewed(kit.Held(0, lease, 5)), db.Hold("a", 2))
		require.Equal(t, []string{"b:3", "a:2"}, db.Holders("p"))
		require.True(t, db.Release("b"))
		require.False(t, db.Release("b"))
		require.Equal(t, kit.Held(2, lease, 5), db.Hold("c", 1))
		require.Equal(t, kit.Held(4, lease, 5), kit.NoError(kit.Hold(db.Pool, "p", "another", "a", 1))(t))
	})
}

// A lease counts up to the microsecond before its end, whether or not anybody has looked or cleaned up.
func TestHold_ALeaseThatHasEndedCountsForNobody(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 1, lease, kind)
		require.True(t, db.Hold("a", 1).Allowed)
		require.Equal(t, kit.NotHeld(0, kit.Us, 1), db.HoldAt(at(lease-kit.Us), "b", 1))
		require.Equal(t, kit.Micros(lease), db.Renew("a"), "a microsecond before its end")
		db.SetClock(at(2*lease - kit.Us))
		require.Equal(t, model.Never, db.Renew("a"))
		require.False(t, db.Release("a"))
		require.Empty(t, db.Holders("p"))
		require.Equal(t, kit.Allowed(1, 0, 1), db.Must(kit.Peek(db.Pool, "p", "k", 1)))
		require.Equal(t, kit.Held(0, lease, 1), db.Hold("a", 1), "it is no renewal")
		require.Equal(t, kit.Held(0, lease, 1), db.HoldAt(at(4*lease), "b", 1))
		require.EqualValues(t, 1, db.Number("select count(*) from (table ratelimit.leases union all table ratelimit.ephemeral_leases) as l"), "a grant removes those that have ended")
	})
}

func TestRenew_NeverAcquires(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 2, lease, kind)
		require.Equal(t, model.Never, db.Renew("a"), "without a row of the key")
		db.Hold("b", 1)
		before := db.LeaseRows()
		require.Equal(t, model.Never, db.Renew("a"))
		require.False(t, db.Release("a"))
		require.Equal(t, before, db.LeaseRows(), "nothing is written")
		require.True(t, db.Release("b"))
		require.Equal(t, model.Never, db.Renew("b"), "after its release")
		require.Equal(t, kit.Allowed(2, 0, 2), db.Must(kit.Peek(db.Pool, "p", "k", 1)))
	})
}

func TestHold_ARepeatRenewsWhateverWasLowered(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 5, lease, kind)
		db.Hold("a", 3)
		db.Hold("b", 2)
		db.Execute("select ratelimit_define_policy('p', 1, lease => '10 seconds')")
		require.Equal(t, kit.Renewed(kit.Held(-4, 10*kit.Second, 1)), db.HoldAt(at(kit.Second), "a", 3))
		require.Equal(t, kit.Micros(10*kit.Second), db.Renew("b"))
		require.Equal(t, never(-4, 1), db.Hold("c", 2))
		require.Equal(t, kit.NotHeld(-4, 10*kit.Second, 1), db.Hold("c", 1))
		_ = db.Refused("RL002", "select ratelimit_hold('p', 'k', 'a', 2)")
	})
}

// Step by step through the ends of leases and of an override, the wait is to the first instant at which the cost fits.
func TestHold_RetryAfterWhereAnOverrideEnds(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 2, lease, kind)
		override := func(capacity int, ends time.Duration) {
			db.Execute("select ratelimit_override('p', 'k', $1, expires_at => $2)", capacity, at(ends))
		}
		override(0, 10*kit.Second)
		require.Equal(t, kit.NotHeld(0, 10*kit.Second, 0), db.Hold("a", 2), "a block says when it ends")
		require.Equal(t, never(0, 0), db.Hold("a", 3))
		override(4, 10*kit.Second)
		require.Equal(t, kit.Held(1, lease, 4), db.Hold("a", 3))
		require.Equal(t, kit.NotHeld(1, lease, 4), db.Hold("b", 2), "not before, for the override ends")
		require.Equal(t, kit.Held(0, lease, 4), db.HoldAt(at(5*kit.Second), "c", 1))
		require.Equal(t, kit.NotHeld(0, lease-5*kit.Second, 4), db.Hold("b", 1), "when a ends: c and b are 2")
		require.Equal(t, kit.NotHeld(-2, lease-10*kit.Second, 2), db.HoldAt(at(10*kit.Second), "b", 1))
		require.Equal(t, kit.Denied(-2, lease-10*kit.Second, lease-5*kit.Second, 2), db.Must(kit.Peek(db.Pool, "p", "k", 1)))
		require.Equal(t, kit.Allowed(-2, lease-5*kit.Second, 2), db.Must(kit.Peek(db.Pool, "p", "k", 0)))
	})
}

func TestHold_ADenialWritesAndLocksNothing(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 2, lease, kind)
		db.HoldAt(at(-2*lease), "ended", 1)
		db.HoldAt(at(0), "a", 2)
		before := db.LeaseRows()
		s := db.Begin()
		require.False(t, s.Hold("b", 1).Allowed)
		require.False(t, s.Hold("b", 3).Allowed)
		require.False(t, kit.NoError(kit.Hold(s, "p", "unknown", "b", 3))(t).Allowed)
		require.Equal(t, kit.Traces{}, s.Traces())
		require.Equal(t, before, db.LeaseRows())
		for _, table := range kit.SlotTables {
			db.Execute("select from ratelimit." + table + " for update nowait")
		}
		s.Execute("commit")

		s.Execute("begin read only")
		require.False(t, s.Hold("b", 1).Allowed)
		for _, call := range []string{"hold('p', 'k', 'a', 2)", "renew('p', 'k', 'a')", "release('p', 'k', 'a')", "hold('p', 'new', 'a')"} {
			s.Execute("savepoint s")
			_, err := s.Exec(context.Background(), "select ratelimit_"+call)
			require.Equal(t, "25006", kit.SQLState(err), call)
			s.Execute("rollback to s")
		}
		require.Equal(t, model.Never, kit.NoError(kit.Renew(s, "p", "k", "x"))(t))
	})
}

// A step forward ends leases early, a step back lengthens them by the step, and revives none that a grant has counted as ended.
func TestHold_AClockThatStepsFreesNothingTwice(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 1, lease, kind)
		db.Hold("a", 1)
		require.True(t, db.HoldAt(at(time.Hour), "b", 1).Allowed)
		db.SetClock(at(kit.Second))
		require.Equal(t, model.Never, db.Renew("a"), "b was granted its slot")
		require.Equal(t, kit.NotHeld(0, time.Hour+lease-kit.Second, 1), db.Hold("a", 1))
		require.Equal(t, []string{"00:01:00"}, kit.Column(t, db.DB, "select held_for::text from ratelimit_holders()"), "never more than the lease")
		require.True(t, db.Release("b"))
		require.True(t, db.Hold("a", 1).Allowed)
	})
}

// Nothing overflows: such costs are above any capacity, and waits saturate at 100,000 years.
func TestHold_OfAnySize(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 1, lease, kind)
		db.Hold("a", 1)
		require.Equal(t, kit.HoldDecision{RetryAfter: model.Never, Capacity: 1}, db.Hold("b", math.MaxInt64))
		require.Equal(t, model.Never, db.Must(kit.Peek(db.Pool, "p", "k", math.MaxInt64)).RetryAfter)
		db.Execute("select ratelimit_override('p', 'k', 0, expires_at => '290000-01-01')")
		require.Equal(t, kit.HoldDecision{Remaining: -1, RetryAfter: model.Longest}, db.Hold("b", 1))
		require.Equal(t, model.Longest, db.Must(kit.Peek(db.Pool, "p", "k", 1)).RetryAfter)
		require.EqualValues(t, 1, db.Number("select count(*) from ratelimit_status('p')"))
	})
}

func TestHold_ARollbackUndoesAllThree(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 3, lease, kind)
		db.Hold("a", 1)
		db.Hold("b", 1)
		db.SetClock(at(kit.Second))
		state := func() []string {
			return kit.Column(t, db.DB, "select l::text from (table ratelimit.leases union all table ratelimit.ephemeral_leases) as l order by 1")
		}
		before := state()
		s := db.Begin()
		s.Hold("c", 1)
		require.True(t, kit.NoError(kit.Release(s, "p", "k", "a"))(t))
		require.Equal(t, kit.Micros(lease), kit.NoError(kit.Renew(s, "p", "k", "b"))(t))
		s.Execute("rollback")
		require.Equal(t, before, state())

		s.Execute("begin; savepoint s")
		s.Hold("c", 1)
		require.True(t, kit.NoError(kit.Release(s, "p", "k", "a"))(t))
		s.Execute("rollback to s")
		require.Equal(t, kit.Held(0, lease, 3), s.Hold("d", 1), "many calls in one transaction")
		s.Execute("commit")
		require.Equal(t, []string{"a:1", "b:1", "d:1"}, db.Holders("p"))
	})
}

func TestShadow_WatchesAndEndsNoJob(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 1, lease, kind)
		db.Execute("select ratelimit_define_policy('p', shadow => true)")
		require.Equal(t, kit.Held(0, lease, 1), db.Hold("a", 1))
		want := kit.Held(0, lease, 1)
		want.Shadowed = true
		require.Equal(t, want, db.Hold("b", 1))
		require.Equal(t, want, db.Hold("b", 2))
		require.Equal(t, kit.Micros(lease), db.Renew("b"), "an unknown holder goes on")
		require.False(t, db.Release("b"))
		require.Equal(t, []string{"a:1"}, db.Holders("p"), "it is not recorded")
		require.Equal(t, kit.Denied(0, lease, lease, 1), db.Must(kit.Peek(db.Pool, "p", "k", 1)), "peek enforces")
		_ = db.Refused("RL002", "select ratelimit_hold('p', 'k', 'a', 2)")
	})
}

// A day of 23 hours is no shorter lease.
func TestHold_ADayHas24Hours(t *testing.T) {
	db := kit.ParallelDB(t)
	db.SetTimeZone("Europe/Berlin")
	db.At(kit.T0).Execute("select ratelimit_define_policy('p', 1, lease => '1 day')")
	require.Equal(t, kit.Held(0, 24*time.Hour, 1), db.Hold("a", 1))
	require.Equal(t, kit.NotHeld(0, kit.Us, 1), db.HoldAt(at(24*time.Hour-kit.Us), "b", 1))
	require.Equal(t, kit.Micros(24*time.Hour), db.Renew("a"))
	db.Execute("select ratelimit_define_policy('p', lease => '365250 days')")
	require.Equal(t, model.Micros(365_250*kit.Day), db.Renew("a"))
	require.Equal(t, model.Micros(365_250*kit.Day), db.Hold("b", 1).RetryAfter)
	require.Equal(t, []string{"8766000:00:00"}, kit.Column(t, db.DB, "select held_for::text from ratelimit_holders()"))
	db.Execute("select ratelimit_define_policy('p', lease => '1 millisecond')")
	require.Equal(t, kit.Micros(kit.Ms), db.Renew("a"))
}

func TestSlots_BadInput(t *testing.T) {
	db := kit.ParallelDB(t).Lend("p", 5, lease).Policy("tokens", 5, 1, time.Second)
	db.Execute("select ratelimit_define_policy('month', 5, period => '1 month')")
	long := strings.Repeat("x", 513)
	db.Hold("a", 2)
	for _, c := range []struct{ code, sql, message, detail, hint string }{
		{"22023", "hold(null, 'k', 'h')", "invalid policy", "policy is null.", "1 to 512"},
		{"22023", "hold('p', '', 'h')", "invalid key", "key is empty.", "1 to 512"},
		{"22023", "hold('p', 'k', null)", "invalid holder", "holder is null.", "1 to 512"},
		{"22023", "hold('p', 'k', '')", "invalid holder", "holder is empty.", "1 to 512"},
		{"22023", "hold('p', 'k', '" + long + "')", "invalid holder", "holder is 513 bytes long.", "1 to 512"},
		{"22023", "hold('p', 'k', 'h', 0)", "invalid cost", "cost is 0.", "1 or more"},
		{"22023", "hold('p', 'k', 'h', -1)", "invalid cost", "cost is -1.", "ratelimit_release"},
		{"22023", "hold('p', 'k', 'h', null)", "invalid cost", "cost is null.", "1 or more"},
		{"22023", "renew('p', 'k', null)", "invalid holder", "holder is null.", "1 to 512"},
		{"22023", "release('p', null, 'h')", "invalid key", "key is null.", "1 to 512"},
		{"RL001", "hold('none', 'k', 'h')", "unknown policy", "'none'", "Define"},
		{"RL001", "renew('none', 'k', 'h')", "unknown policy", "'none'", "Define"},
		{"RL001", "release('none', 'k', 'h')", "unknown policy", "'none'", "Define"},
		{"RL001", "holders('none')", "unknown policy", "'none'", "Define"},
		{"22023", "holders(max_rows => 0)", "invalid max_rows", "max_rows is 0.", "1 or more"},
		{"RL002", "hold('p', 'k', 'a', 1)", "the holder holds with another cost", "'a' holds 2 slots and is asked to hold 1.", "first cost"},
		{"22023", "hold('tokens', 'k', 'h')", "invalid policy", "'tokens' has tokens", "ratelimit_acquire"},
		{"22023", "renew('month', 'k', 'h')", "invalid policy", "'month' has tokens", "lease"},
		{"22023", "release('tokens', 'k', 'h')", "invalid policy", "'tokens' has tokens", "lease"},
		{"22023", "acquire('p', 'k')", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "acquire('p', 'k', 0)", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "acquire('p', 'k', 1, 'i')", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "acquire_all('{tokens,p}', '{k,k}')", "invalid policy", "Element 2 of the request: Policy 'p' lends slots", "ratelimit_hold"},
		{"22023", "acquire_up_to('p', 'k', 1)", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "reserve('p', 'k', '0')", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "enforce('p', 'k')", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "charge('p', 'k', 1)", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "charge('p', 'k', 0)", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "settle('p', 'k', 'i', 1)", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "refund('p', 'k', 1)", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "define_policy('new', lease => '1 s')", "invalid capacity", "capacity is null.", "capacity and lease"},
		{"22023", "define_policy('new', 0, lease => '1 s')", "invalid capacity", "capacity is 0.", "1 to 10000"},
		{"22023", "define_policy('new', 10001, lease => '1 s')", "invalid capacity", "capacity is 10001.", "1 to 10000"},
		{"22023", "define_policy('new', 1, lease => '999 us')", "invalid lease", "lease is 00:00:00.000999.", "1 millisecond"},
		{"22023", "define_policy('new', 1, lease => '365251 days')", "invalid lease", "365251 days", "365250 days"},
		{"22023", "define_policy('new', 1, lease => '1 month')", "invalid lease", "lease is 1 mon.", "in days or smaller"},
		{"22023", "define_policy('new', 1, lease => '-1 s')", "invalid lease", "-00:00:01", "1 millisecond"},
		{"22023", "define_policy('new', 1, refill => 1, lease => '1 s')", "invalid refill", "refill is 1.", "ratelimit_release"},
		{"22023", "define_policy('new', 1, every => '1 s', lease => '1 s')", "invalid every", "every is", "ratelimit_release"},
		{"22023", "define_policy('new', 1, stepped => false, lease => '1 s')", "invalid stepped", "stepped is false.", "ratelimit_release"},
		{"22023", "define_policy('new', 1, remember => '1 s', lease => '1 s')", "invalid remember", "remember is", "holder"},
		{"22023", "define_policy('new', 1, period => '1 day', lease => '1 s')", "invalid period", "period is 1 day.", "without a lease"},
		{"22023", "define_policy('new', 1, time_zone => 'UTC', lease => '1 s')", "invalid time_zone", "time_zone is UTC.", "without a lease"},
		{"22023", "define_policy('new', 1, anchor => '2020-01-01', lease => '1 s')", "invalid anchor", "anchor is", "without a lease"},
		{"22023", "define_policy('p', refill => 1)", "invalid refill", "refill is 1.", "drop the policy"},
		{"22023", "define_policy('p', period => '1 day')", "invalid period", "period is 1 day.", "drop the policy"},
		{"22023", "define_policy('p', durable => false)", "invalid durable", "durable => t", "Drop the policy"},
		{"22023", "define_policy('tokens', lease => '1 s')", "invalid lease", "lease is 00:00:01.", "Drop it"},
		{"22023", "define_policy('month', lease => '1 s')", "invalid lease", "lease is 00:00:01.", "Drop it"},
		{"22023", "override('p', 'k', refill => 1)", "invalid refill", "refill is 1.", "Leave it out"},
		{"22023", "override('p', 'k', every => '1 s')", "invalid every", "every is", "Leave it out"},
		{"22023", "override('p', 'k', time_zone => 'UTC')", "invalid time_zone", "time_zone is", "Leave it out"},
		{"22023", "override('p', 'k', anchor => '2020-01-01')", "invalid anchor", "anchor is", "Leave it out"},
		{"22023", "override('p', 'k', 10001)", "invalid capacity", "capacity is 10001.", "0 to 10000"},
		{"22023", "override('p', 'k', lease => '0')", "invalid lease", "lease is 00:00:00.", "1 millisecond"},
		{"22023", "override('tokens', 'k', lease => '1 s')", "invalid lease", "lease is 00:00:01.", "Leave it out"},
		{"22023", "override('month', 'k', lease => '1 s')", "invalid lease", "lease is 00:00:01.", "Leave it out"},
	} {
		err := db.Refused(c.code, "select ratelimit_"+c.sql)
		require.Equal(t, c.message, err.Message, c.sql)
		require.Contains(t, err.Detail, c.detail, c.sql)
		require.Contains(t, err.Hint, c.hint, c.sql)
	}
	require.Equal(t, []string{"1  allowed", "2 22023 ", "3 RL001 ", "4 22023 "}, kit.Column(t, db.DB, `
		select concat_ws(' ', request, coalesce(error_code, ''), case when allowed then 'allowed' else '' end)
		  from ratelimit_acquire_many('{tokens,p,none,p}', '{k,k,k,k}', '{1,1,1,0}') order by request`), "in batches it is that request's error")
	require.Equal(t, []string{"a:2"}, db.Holders("p"))
	require.Empty(t, db.Rows()[1:], "a bucket of tokens alone")
}
