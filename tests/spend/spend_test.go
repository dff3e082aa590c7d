// Package spend tests charges, settlements, reservations, partial grants and refunds, and the guards that raise an error in place of a denial.
package spend

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// charge, settle, reserve and upTo are calls on the bucket k of policy p.
func charge(cost int64, idempotencyKey ...string) kit.Spending {
	return spendingOf("charge", cost, idempotencyKey)
}

func settle(idempotencyKey string, cost int64) kit.Spending {
	return spendingOf("settle", cost, []string{idempotencyKey})
}

func reserve(maxWait time.Duration, cost int64, idempotencyKey ...string) kit.Spending {
	s := spendingOf("reserve", cost, idempotencyKey)
	s.MaxWait = kit.Micros(maxWait)
	return s
}

func upTo(atMost, atLeast int64, idempotencyKey ...string) kit.Spending {
	s := spendingOf("acquire_up_to", atMost, idempotencyKey)
	s.AtLeast = atLeast
	return s
}

func spendingOf(function string, cost int64, idempotencyKey []string) kit.Spending {
	s := kit.Spending{Function: function, BucketID: model.BucketID{Policy: "p", Key: "k"}, Cost: cost}
	if len(idempotencyKey) > 0 {
		s.IdempotencyKey = idempotencyKey[0]
	}
	return s
}

// A charge or a settlement waits for a transaction that removes the bucket and changes its numbers.
func TestSpend_ABucketCreatedAfterAWaitIsFullByTheNewNumbers(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.SetClock(kit.T0)
		for _, change := range []string{"ratelimit_define_policy('p', 30)", "ratelimit_override('p', 'k', 30)"} {
			for _, s := range []kit.Spending{charge(3), settle("i", 4)} {
				db.Policy("p", 10, 1, kit.Second, durability).Take("p", "k", 1, "i")
				holder := db.Begin().Execute("select ratelimit_reset('p', 'k'), " + change)
				call := db.Session().StartSpending(s).BlockedBy(holder)
				holder.Execute("commit")
				require.Equal(t, kit.Allowed(27, 3*kit.Second, 30), call.Answer(), "%s after %s", s, change)
				db.DropPolicy("p")
			}
		}
	})
}

// Another session stores the idempotency key after the bucket was read, and leaves the bucket as it was. The call finds the key
// only when it stores its own grant.
func TestSpend_AnIdempotencyKeyStoredAfterTheReadIsReplayed(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		for _, late := range []kit.Spending{reserve(time.Hour, 3, "i"), upTo(3, 1, "i"), charge(3, "i")} {
			db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability).Take("p", "k", map[bool]int64{true: 10, false: 8}[late.Function == "reserve"])
			before := *db.Bucket("p", "k")
			holder := db.Begin()
			first := late
			if late.Function == "acquire_up_to" {
				first = upTo(2, 1, "i")
			}
			want := kit.NoError(first.By(holder))(t)
			holder.Execute("select ratelimit_refund('p', 'k', $1)", 3) // back to the level before
			if late.Function == "acquire_up_to" {
				holder.Execute("select ratelimit_charge('p', 'k', 1)")
			}
			var got kit.Spent
			caller := db.Session().Start(func(q kit.Querier) (kit.Decision, error) {
				var err error
				got, err = late.By(q)
				return got.Decision, err
			})
			caller.BlockedBy(holder)
			holder.Execute("commit")
			want.Replayed = true
			caller.Answer()
			require.Equal(t, want, got, late)
			require.Equal(t, before, *db.Bucket("p", "k"), late)
			db.DropPolicy("p")
		}
	})
}

func TestSpend_DenialsAndReplaysWriteNothing(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability)
		for _, s := range []kit.Spending{charge(10), charge(1, "c"), reserve(time.Hour, 2, "r"), settle("c", 3)} {
			db.MustSpend(s)
		}
		before := db.Rows()
		for _, s := range []kit.Spending{
			reserve(kit.Second, 5), reserve(0, 1, "x"), reserve(0, 2, "r"), reserve(time.Hour, 11), reserve(0, 0), upTo(5, 1), upTo(5, 1, "x"),
			upTo(2, 2, "r"), charge(0), charge(1, "c"), settle("c", 3),
		} {
			tx := db.Begin()
			require.NoError(t, kit.ErrorOf(s.By(tx)), s)
			require.Equal(t, kit.Traces{}, tx.Traces(), s)
			tx.Execute("commit")
		}
		require.Equal(t, before, db.Rows())
	})
}

func TestSpend_ErrorsHaveFactsAndARemedy(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, kit.Second)
	db.Execute("select ratelimit_acquire('p', 'k', 2, 'i')")
	db.Execute("select ratelimit_settle('p', 'k', 'i', 3)")
	db.Execute("select ratelimit_acquire('p', 'other', 2, 'i')")
	const settled = "RL004: the grant under this idempotency key was settled: 'i' was granted with cost 2 and settled with cost 3.: The operation is over, or was cancelled: do not repeat it. A new one needs a new key."
	for call, want := range map[string]string{
		"ratelimit_charge('p', 'k', null)":                 "22023: invalid cost: cost is null.: Pass a whole number of tokens, 0 or more; ratelimit_refund gives tokens back.",
		"ratelimit_charge('p', 'k', 9000000000001)":        "22023: invalid cost: cost is 9000000000001.: Pass 0 to 9000000000000 tokens.",
		"ratelimit_charge('p', 'k', 1, '')":                "22023: invalid idempotency_key: idempotency_key is empty.: Pass a text of 1 to 512 bytes.",
		"ratelimit_charge('q', 'k', 1)":                    "RL001: unknown policy: No policy is named 'q'.: Names are case-sensitive, and ratelimit_policies() lists them. Define a new one first: select ratelimit_define_policy('q', capacity => 10, refill => 10, every => '1 second').",
		"ratelimit_define_policy('p', every => '1 month')": "22023: invalid every: every is 1 mon.: Pass an interval of 1 microsecond to 365250 days (1000 years), in days or smaller units. What is full again each calendar month is a quota: period => '1 month'.",
		"ratelimit_drop_policy('q''s')":                    "RL001: unknown policy: No policy is named 'q''s'.: Pass the name of a policy that select * from ratelimit_policies() lists.",
		"ratelimit_settle('p', 'k', null, 1)":              "22023: invalid idempotency_key: idempotency_key is null.: Pass a text of 1 to 512 bytes.",
		"ratelimit_settle('p', 'k', 'i', 4)":               "RL002: idempotency key used before with another cost: 'i' was settled with cost 3 and is settled again with cost 4.: The first settlement stands: charge or refund the difference.",
		"ratelimit_settle('p', 'k', 'j', 4)":               "RL003: no live grant under this idempotency key: Policy 'p' does not remember 'j' for this bucket. Nothing was charged.: Pass the policy, the key and the idempotency key of the acquire. One that was denied or rolled back leaves nothing to settle. A job may take longer than the policy remembers: ratelimit_define_policy(policy, remember => '7 days').",
		"ratelimit_reserve('p', 'k', '1 month')":           "22023: invalid max_wait: max_wait is 1 mon.: Pass an interval of 0 to 365 days, in days or smaller units.",
		"ratelimit_acquire_up_to('p', 'k', null)":          "22023: invalid at_most: at_most is null.: Pass a whole number of tokens, 1 or more.",
		"ratelimit_acquire_up_to('p', 'k', 5, 6)":          "22023: invalid at_least: at_least is 6.: Pass a whole number of tokens, from 1 to at_most.",
		"ratelimit_acquire_up_to('p', 'k', 5, 3, 'i')":     "RL002: idempotency key used before with another cost: 'i' was granted with cost 2 and is requested again for 3 to 5.: Repeat a request with its first cost, and give a new request a new key.",
		"ratelimit_reserve('p', 'k', '1 second', 3, 'i')":  "RL002: idempotency key used before with another cost: 'i' was granted with cost 2 and is requested again with cost 3.: Repeat a request with its first cost, and give a new request a new key.",
		"ratelimit_acquire('p', 'k', 2, 'i')":              settled,
		"ratelimit_reserve('p', 'k', '1 second', 2, 'i')":  settled,
		"ratelimit_acquire_up_to('p', 'k', 5, 1, 'i')":     settled,
		"ratelimit_override('p', 'k', expires_at => 'tomorrow')": "22023: invalid expires_at: expires_at is given alone.: " +
			"It moves the end of what ends, and nothing of the override of the key ends. Pass the numbers that are to end.",
		"ratelimit_settle_all('{p,p,p}', '{k,new,l}', 'i', '{3,1,1}')": "RL003: no live grant under this idempotency key: " +
			"'i' is not remembered for these elements of the request: 2, 3. Nothing was settled.: Leave these elements out: what was acquired at cost 0, denied or " +
			"rolled back has no grant. A job may take longer than the policy remembers: ratelimit_define_policy(policy, remember => '7 days').",
		"ratelimit_settle_all('{p}', '{k}', 'i', '{4}')": "RL002: idempotency key used before with another cost: " +
			"'i' was settled with cost 3 and is settled again with cost 4.: The first settlement stands: charge or refund the difference.",
		"ratelimit_settle_all('{p,p}', '{k,k}', 'i', '{9000000000000,1}')": "22023: invalid cost: Element 1 of the request: cost is 9000000000001 in sum.: " +
			"Pass 0 to 9000000000000 tokens for a bucket.",
		"ratelimit_acquire_all(array['p', 'p'], array['new', 'k'], array[1, 2], 'i')":   strings.Replace(settled, "'i'", "Element 2 of the request: 'i'", 1),
		"ratelimit_acquire_all(array['p', 'q'], array['k', 'k'], array[2, 1], 'i')":     "RL001: unknown policy: Element 2 of the request: No policy is named 'q'.: Names are case-sensitive, and ratelimit_policies() lists them. Define a new one first: select ratelimit_define_policy('q', capacity => 10, refill => 10, every => '1 second').",
		"ratelimit_acquire_all(array['p', 'p'], array['k', 'other'], array[2, 1], 'i')": "RL002: idempotency key used before with another cost: Element 2 of the request: 'i' was granted with cost 2 and is requested again with cost 1.: Repeat a request with its first cost, and give a new request a new key.",
	} {
		_, err := db.Pool.Exec(context.Background(), "select "+call)
		e := kit.PgError(err)
		require.NotNil(t, e, "%s: %v", call, err)
		require.Equal(t, want, fmt.Sprintf("%s: %s: %s: %s", e.Code, e.Message, e.Detail, e.Hint), call)
	}
}

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestReserve_TokensRefundedWhileItWaitsForTheLockCount(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability).Take("p", "k", 10)
		holder := db.Begin().Execute("select ratelimit_refund('p', 'k', 7)")
		caller := db.Session().StartSpending(reserve(time.Hour, 4, "i")).BlockedBy(holder)
		holder.Execute("commit")
		require.Equal(t, kit.Allowed(3, 7*kit.Second, 10), caller.Answer())
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

func TestSpend_Rules(t *testing.T) {
	t.Parallel()
	const (
		bucket = "select ratelimit_define_policy('p', 10, 1, '1 hour', durable => (durable))"
		quota  = "select ratelimit_define_policy('p', 10, period => '1 day', anchor => '2024-03-30 12:00', durable => (durable))" // which turns at T0
	)
	kit.RunSteps(t, map[string][]kit.Step{
		"what an override's refill has paid of a debt stays paid if it ends in a pause": {
			{0, bucket, ""},
			{0, "select refill, every from ratelimit_override('p', 'k', refill => 3600, expires_at => ratelimit.clock() + '60 s')", "3600,01:00:00"},
			{0, "select remaining from ratelimit_charge('p', 'k', 20)", "-10"},
			{30 * kit.Second, "select remaining, retry_after from ratelimit_pause('p', 'k', '2 min')", "0,01:02:00"},
			{3750 * kit.Second, "select allowed from ratelimit_acquire('p', 'k')", "t"},
		},
		"an override that ends with a pause refills no more once the pause has begun": {
			{0, bucket, ""},
			{0, "select refill, every from ratelimit_override('p', 'k', refill => 3600, expires_at => ratelimit.clock() + '60 s')", "3600,01:00:00"},
			{0, "select remaining from ratelimit_charge('p', 'k', 110)", "-100"},
			{10 * kit.Second, "select remaining from ratelimit_pause('p', 'k', '50 s')", "-90"},
		},
		"a pause at capacity 0 outlives clean-up": {
			{0, bucket, ""},
			{0, "select remaining from ratelimit_pause('p', 'k', '1 hour')", "0"},
			{0, "select ratelimit_define_policy('p', 0)", ""},
			{kit.Second, "select ratelimit_cleanup()", "0,0"},
			{kit.Second, "select ratelimit_define_policy('p', 10)", ""},
			{2 * kit.Second, "select allowed, retry_after from ratelimit_acquire('p', 'k')", "f,01:59:58"},
		},
		"a refund of a quota is of the period that runs": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 8)", "2"},
			{kit.ADay, "select remaining from ratelimit_refund('p', 'k', 2)", "10"},
		},
		"a quota that was given back is cleaned up before its turn": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 8)", "2"},
			{kit.Second, "select remaining from ratelimit_refund('p', 'k', 8)", "10"},
			{kit.Second, "select ratelimit_cleanup()", "1,0"},
		},
		"what is used of a quota stays used where the clock goes back and comes again": {
			{0, quota, ""},
			{kit.ADay, "select remaining from ratelimit_acquire('p', 'k', 8)", "2"},
			{0, "select remaining from ratelimit_acquire('p', 'k', 1)", "1"},
			{kit.ADay, "select remaining from ratelimit_peek('p', 'k')", "1"},
		},
		"a refund of a quota gives back all that was used, after a downgrade too": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 8)", "2"},
			{0, "select ratelimit_define_policy('p', 3)", ""},
			{0, "select remaining from ratelimit_refund('p', 'k', 6)", "1"},
			{0, "select remaining from ratelimit_refund('p', 'k', 6)", "3"},
		},
		"a grant at the turn of a quota is of the period that begins": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 8, 'i')", "2"},
			{kit.Second, "select remaining from ratelimit_settle('p', 'k', 'i', 3)", "7"},
		},
		"a settlement uses at most 9000000000000 tokens of a quota": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 5, 'i')", "5"},
			{0, "select remaining from ratelimit_charge('p', 'k', 9000000000000)", "-8999999999990"},
			{0, "select remaining from ratelimit_settle('p', 'k', 'i', 9000000000000)", "-8999999999990"},
		},
	})
}
