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

// charge, settle, reserve, upTo and acquireStep are calls on the bucket k of policy p.
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

// waits is d as the answer to a reservation that waits so long.
func waits(wait time.Duration, d kit.Decision) kit.Decision {
	d.RetryAfter = kit.Micros(wait)
	return d
}

// A spendStep is a call at a time after T0, and its answer or the SQLSTATE of its error.
type spendStep struct {
	at    time.Duration
	call  kit.Spending
	want  kit.Decision
	taken int64 // by acquire_up_to
	err   model.Error
}

func runSpending(t *testing.T, db kit.Subject, steps []spendStep) {
	for i, step := range steps {
		db.SetClock(kit.T0.Add(step.at))
		var got kit.Spent
		var err error
		if step.call.Function == "acquire" {
			var keys []string
			if step.call.IdempotencyKey != "" {
				keys = []string{step.call.IdempotencyKey}
			}
			got.Decision, err = db.TryAcquire("p", "k", step.call.Cost, keys...)
		} else {
			got, err = db.Spend(step.call)
		}
		require.Equal(t, string(step.err), kit.SQLState(err), "step %d: %v", i+1, err)
		if err == nil {
			require.Equal(t, kit.Spent{Decision: step.want, Taken: step.taken}, got, "step %d: %v", i+1, step.call)
		}
	}
}

func acquireStep(cost int64, idempotencyKey ...string) kit.Spending {
	return spendingOf("acquire", cost, idempotencyKey)
}

func TestSpend_Steps(t *testing.T) {
	t.Parallel()
	for name, steps := range map[string][]spendStep{
		"a charge makes debt, and refill pays the debt first": {
			{0, charge(15), kit.Allowed(-5, 15*kit.Second, 10), 0, ""},
			{0, acquireStep(1), kit.Denied(-5, 6*kit.Second, 15*kit.Second, 10), 0, ""},
			{1500 * kit.Ms, charge(0), kit.Allowed(-4, 13500*kit.Ms, 10), 0, ""},
			{6 * kit.Second, acquireStep(1), kit.Allowed(0, 10*kit.Second, 10), 0, ""},
		},
		"a charge under an idempotency key is charged once": {
			{0, charge(15, "i"), kit.Allowed(-5, 15*kit.Second, 10), 0, ""},
			{kit.Second, charge(15, "i"), kit.Replayed(kit.Allowed(-5, 15*kit.Second, 10)), 0, ""},
			{kit.Second, charge(14, "i"), kit.Decision{}, 0, model.IdempotencyMismatch},
			{kit.Second, acquireStep(15, "i"), kit.Replayed(kit.Allowed(-5, 15*kit.Second, 10)), 0, ""},
			{kit.Second, charge(1), kit.Allowed(-5, 15*kit.Second, 10), 0, ""},
		},
		"a cost is 0 to 9000000000000": {
			{0, charge(-1), kit.Decision{}, 0, model.InvalidArgument},
			{0, charge(kit.MaxTokens + 1), kit.Decision{}, 0, model.InvalidArgument},
			{0, settle("i", kit.MaxTokens+1), kit.Decision{}, 0, model.InvalidArgument},
			{0, settle("i", -1), kit.Decision{}, 0, model.InvalidArgument},
			{0, charge(0, "i"), kit.Allowed(10, 0, 10), 0, ""},
			{0, settle("i", 0), kit.Decision{}, 0, model.NoGrant},
		},
		"a settlement refunds the excess of the estimate": {
			{0, acquireStep(8, "i"), kit.Allowed(2, 8*kit.Second, 10), 0, ""},
			{kit.Second, settle("i", 3), kit.Allowed(8, 2*kit.Second, 10), 0, ""},
			{2 * kit.Second, settle("i", 3), kit.Replayed(kit.Allowed(9, kit.Second, 10)), 0, ""},
			{2 * kit.Second, settle("i", 4), kit.Decision{}, 0, model.IdempotencyMismatch},
			{2 * kit.Second, acquireStep(3, "i"), kit.Decision{}, 0, model.IdempotencyMismatch},
		},
		"a settlement takes the shortfall of the estimate, also in debt": {
			{0, acquireStep(8, "i"), kit.Allowed(2, 8*kit.Second, 10), 0, ""},
			{0, charge(5), kit.Allowed(-3, 13*kit.Second, 10), 0, ""},
			{0, settle("i", 20), kit.Allowed(-15, 25*kit.Second, 10), 0, ""},
			{0, settle("i", 20), kit.Replayed(kit.Allowed(-15, 25*kit.Second, 10)), 0, ""},
		},
		"a settlement refunds up to the capacity": {
			{0, acquireStep(8, "i"), kit.Allowed(2, 8*kit.Second, 10), 0, ""},
			{5 * kit.Second, settle("i", 0), kit.Allowed(10, 0, 10), 0, ""},
			{5 * kit.Second, acquireStep(10), kit.Allowed(0, 10*kit.Second, 10), 0, ""},
		},
		"a settlement needs a live grant": {
			{0, settle("i", 1), kit.Decision{}, 0, model.NoGrant},
			{0, acquireStep(2, "i"), kit.Allowed(8, 2*kit.Second, 10), 0, ""},
			{24*time.Hour - kit.Us, settle("i", 2), kit.Allowed(10, 0, 10), 0, ""},
			{24 * time.Hour, settle("i", 2), kit.Decision{}, 0, model.NoGrant},
			{24 * time.Hour, acquireStep(2, "i"), kit.Allowed(8, 2*kit.Second, 10), 0, ""},
			{24 * time.Hour, settle("i", 5), kit.Allowed(5, 5*kit.Second, 10), 0, ""},
		},
		"an acquire or a reservation repeated after settle fails": {
			{0, reserve(time.Hour, 12, "w"), waits(-kit.Us, kit.Denied(10, 0, 0, 10)), 0, ""},
			{0, reserve(time.Hour, 8, "i"), waits(0, kit.Allowed(2, 8*kit.Second, 10)), 0, ""},
			{0, reserve(time.Hour, 4, "w"), waits(2*kit.Second, kit.Allowed(-2, 12*kit.Second, 10)), 0, ""},
			{0, settle("i", 8), kit.Allowed(-2, 12*kit.Second, 10), 0, ""},
			{0, settle("w", 0), kit.Allowed(2, 8*kit.Second, 10), 0, ""},
			{0, acquireStep(8, "i"), kit.Decision{}, 0, model.Settled},
			{0, acquireStep(4, "w"), kit.Decision{}, 0, model.Settled},
			{0, reserve(time.Hour, 4, "w"), kit.Decision{}, 0, model.Settled},
			{0, upTo(9, 1, "i"), kit.Decision{}, 0, model.Settled},
			{0, upTo(7, 1, "i"), kit.Decision{}, 0, model.IdempotencyMismatch},
			{0, settle("i", 8), kit.Replayed(kit.Allowed(2, 8*kit.Second, 10)), 0, ""},
			{24*time.Hour - kit.Us, acquireStep(8, "i"), kit.Decision{}, 0, model.Settled},
			{24 * time.Hour, acquireStep(8, "i"), kit.Allowed(2, 8*kit.Second, 10), 0, ""},
		},
		"a charge repeated after settle is replayed": {
			{0, charge(15, "i"), kit.Allowed(-5, 15*kit.Second, 10), 0, ""},
			{0, settle("i", 5), kit.Allowed(5, 5*kit.Second, 10), 0, ""},
			{0, charge(15, "i"), kit.Replayed(kit.Allowed(-5, 15*kit.Second, 10)), 0, ""},
			{0, charge(5, "i"), kit.Decision{}, 0, model.IdempotencyMismatch},
			{0, acquireStep(15, "i"), kit.Decision{}, 0, model.Settled},
			{0, charge(0), kit.Allowed(5, 5*kit.Second, 10), 0, ""},
		},
		"a reservation is served in order": {
			{0, reserve(0, 10), waits(0, kit.Allowed(0, 10*kit.Second, 10)), 0, ""},
			{0, reserve(kit.Second, 2), waits(2*kit.Second, kit.Denied(0, 0, 10*kit.Second, 10)), 0, ""},
			{0, reserve(2*kit.Second, 2), waits(2*kit.Second, kit.Allowed(-2, 12*kit.Second, 10)), 0, ""},
			{0, reserve(time.Hour, 3), waits(5*kit.Second, kit.Allowed(-5, 15*kit.Second, 10)), 0, ""},
			{kit.Second, reserve(time.Hour, 1), waits(5*kit.Second, kit.Allowed(-5, 15*kit.Second, 10)), 0, ""},
			{2 * kit.Second, acquireStep(1), kit.Denied(-4, 5*kit.Second, 14*kit.Second, 10), 0, ""},
			{3 * kit.Second, reserve(time.Hour, 11), waits(-kit.Us, kit.Denied(-3, 0, 13*kit.Second, 10)), 0, ""},
			{3 * kit.Second, reserve(0, 0), waits(0, kit.Allowed(-3, 13*kit.Second, 10)), 0, ""},
		},
		"an acquire under the key of a reservation is denied until its wait is over": {
			{0, acquireStep(10), kit.Allowed(0, 10*kit.Second, 10), 0, ""},
			{0, reserve(time.Hour, 4, "i"), waits(4*kit.Second, kit.Allowed(-4, 14*kit.Second, 10)), 0, ""},
			{kit.Second, reserve(0, 4, "i"), kit.Replayed(waits(3*kit.Second, kit.Allowed(-4, 14*kit.Second, 10))), 0, ""},
			{kit.Second, acquireStep(4, "i"), kit.Replayed(kit.Denied(-4, 3*kit.Second, 14*kit.Second, 10)), 0, ""},
			{kit.Second, upTo(9, 1, "i"), kit.Replayed(kit.Denied(-4, 3*kit.Second, 14*kit.Second, 10)), 0, ""},
			{kit.Second, acquireStep(5, "i"), kit.Decision{}, 0, model.IdempotencyMismatch},
			{4*kit.Second - kit.Us, acquireStep(4, "i"), kit.Replayed(kit.Denied(-4, kit.Us, 14*kit.Second, 10)), 0, ""},
			{4 * kit.Second, acquireStep(4, "i"), kit.Replayed(kit.Allowed(-4, 14*kit.Second, 10)), 0, ""},
			{4 * kit.Second, reserve(0, 4, "i"), kit.Replayed(waits(0, kit.Allowed(-4, 14*kit.Second, 10))), 0, ""},
			{24*time.Hour + 4*kit.Second - kit.Us, acquireStep(4, "i"), kit.Replayed(kit.Allowed(-4, 14*kit.Second, 10)), 0, ""},
			{24*time.Hour + 4*kit.Second, acquireStep(4, "i"), kit.Allowed(6, 4*kit.Second, 10), 0, ""},
		},
		"a refund does not shorten the waits of earlier reservations": {
			{0, reserve(0, 10), waits(0, kit.Allowed(0, 10*kit.Second, 10)), 0, ""},
			{0, reserve(time.Hour, 5, "first"), waits(5*kit.Second, kit.Allowed(-5, 15*kit.Second, 10)), 0, ""},
			{0, reserve(time.Hour, 5, "next"), waits(10*kit.Second, kit.Allowed(-10, 20*kit.Second, 10)), 0, ""},
			{kit.Second, settle("first", 0), kit.Allowed(-4, 14*kit.Second, 10), 0, ""},
			{kit.Second, reserve(time.Hour, 5, "next"), kit.Replayed(waits(9*kit.Second, kit.Allowed(-10, 20*kit.Second, 10))), 0, ""},
			{kit.Second, reserve(time.Hour, 1), waits(5*kit.Second, kit.Allowed(-5, 15*kit.Second, 10)), 0, ""},
		},
		"the wait is 0 to 365 days": {
			{0, reserve(-kit.Us, 1), kit.Decision{}, 0, model.InvalidArgument},
			{0, reserve(365*24*time.Hour+kit.Us, 1), kit.Decision{}, 0, model.InvalidArgument},
			{0, reserve(365*24*time.Hour, 1), waits(0, kit.Allowed(9, kit.Second, 10)), 0, ""},
		},
		"acquire_up_to takes the tokens that the bucket has": {
			{0, upTo(7, 1, "i"), kit.Allowed(3, 7*kit.Second, 10), 7, ""},
			{0, upTo(7, 4), kit.Denied(3, kit.Second, 7*kit.Second, 10), 0, ""},
			{500 * kit.Ms, upTo(7, 3), kit.Allowed(0, 9500*kit.Ms, 10), 3, ""},
			{500 * kit.Ms, upTo(7, 1), kit.Denied(0, 500*kit.Ms, 9500*kit.Ms, 10), 0, ""},
			{kit.Second, upTo(7, 1, "i"), kit.Replayed(kit.Allowed(3, 7*kit.Second, 10)), 7, ""},
			{kit.Second, upTo(6, 1, "i"), kit.Decision{}, 0, model.IdempotencyMismatch},
			{kit.Second, upTo(9, 8, "i"), kit.Decision{}, 0, model.IdempotencyMismatch},
			{kit.Second, acquireStep(7, "i"), kit.Replayed(kit.Allowed(3, 7*kit.Second, 10)), 0, ""},
			{kit.Second, settle("i", 1), kit.Allowed(7, 3*kit.Second, 10), 0, ""},
		},
		"acquire_up_to of more than the capacity takes a full bucket": {
			{0, upTo(kit.MaxTokens*1000, 11), kit.Never(10, 0, 10), 0, ""},
			{0, upTo(kit.MaxTokens*1000, 10), kit.Allowed(0, 10*kit.Second, 10), 10, ""},
			{0, upTo(0, 0), kit.Decision{}, 0, model.InvalidArgument},
			{0, upTo(5, 0), kit.Decision{}, 0, model.InvalidArgument},
			{0, upTo(5, 6), kit.Decision{}, 0, model.InvalidArgument},
		},
	} {
		t.Run(name, func(t *testing.T) {
			kit.OnEachDurability(t, func(t *testing.T, db kit.Subject, durability kit.PolicyOption) {
				db.SetClock(kit.T0)
				db.DefinePolicy("p", 10, 1, kit.Second, durability)
				runSpending(t, db, steps)
			})
		})
	}
}

// Otherwise the settlement would refund tokens that the charge never took.
func TestSpend_APolicyOfCapacity0GrantsNoTokens(t *testing.T) {
	kit.OnEachDurability(t, func(t *testing.T, db kit.Subject, durability kit.PolicyOption) {
		db.DefinePolicy("p", 0, 1, kit.Second, durability)
		runSpending(t, db, []spendStep{
			{0, acquireStep(1), kit.Never(0, 0, 0), 0, ""},
			{0, acquireStep(0), kit.Allowed(0, 0, 0), 0, ""},
			{0, upTo(5, 1, "i"), kit.Never(0, 0, 0), 0, ""},
			{0, reserve(time.Hour, 1), waits(-kit.Us, kit.Denied(0, 0, 0, 0)), 0, ""},
			{0, charge(2, "i"), kit.Allowed(-2, 2*kit.Second, 0), 0, ""},
			{kit.Second, acquireStep(1), kit.Never(-1, kit.Second, 0), 0, ""},
			{kit.Second, settle("i", 0), kit.Allowed(0, 0, 0), 0, ""},
			{time.Hour, acquireStep(1), kit.Never(0, 0, 0), 0, ""},
		})
		require.Equal(t, kit.Never(0, 0, 0), db.PeekAt(kit.T0, "p", "k", 1))
		require.Equal(t, kit.Allowed(0, 0, 0), db.RefundAt(kit.T0, "p", "k", 1))
		if db, ok := db.(*kit.TestDB); ok {
			answers := kit.NoError(kit.AcquirePacked(db.Pool, []kit.WholeRequest{kit.All("p", "k")}, false))(t)
			require.Equal(t, kit.Never(0, 0, 0), answers[0].Whole.Decision)
		}
	})
}

// The policies are the slowest and the fastest that can be defined.
func TestSpend_DebtEndsAtAFloor(t *testing.T) {
	type testCase struct {
		capacity, refill int64
		every            string
		stepped          bool
		floor            int64
	}
	kit.OnDBs(t, map[string]testCase{
		"the slowest":          {10, 1, "365250 days", false, -10},
		"the slowest, stepped": {10, 1, "365250 days", true, -10},
		"slow and large":       {9_000_000_000, 900_000_000, "365250 days", true, -9_000_000_000},
		"the fastest":          {kit.MaxTokens, kit.MaxTokens, "1 microsecond", false, -kit.MaxTokens},
		"the fastest, stepped": {1, kit.MaxTokens, "1 microsecond", true, -kit.MaxTokens},
		"without refill":       {1, 0, "1 microsecond", false, -kit.MaxTokens},
	}, func(t *testing.T, db *kit.TestDB, p testCase) {
		db.SetClock(kit.T0)
		m := model.New()
		db.Execute("select ratelimit_define_policy('p', $1, $2, $3::interval, stepped => $4)", p.capacity, p.refill, p.every, p.stepped)
		every := model.Micros(1)
		if p.every != "1 microsecond" {
			every = 365_250 * kit.Day
		}
		require.NoError(t, m.Define("p", model.Definition{
			Numbers: model.Numbers{Capacity: &p.capacity, Refill: &p.refill, Every: &every}, Stepped: &p.stepped,
		}))
		now := kit.T0
		ask := db.AsModel(m, &now)
		ask(charge(1, "early"))
		ask(charge(kit.MaxTokens))
		require.Equal(t, p.floor, ask(charge(kit.MaxTokens)).Remaining)
		require.Equal(t, p.floor, ask(charge(kit.MaxTokens, "late")).Remaining, "no deeper")
		require.Equal(t, p.floor, ask(settle("early", kit.MaxTokens)).Remaining, "a settlement is never denied")
		require.True(t, ask(charge(kit.MaxTokens)).Allowed)
		require.False(t, ask(reserve(365*24*time.Hour, 1)).Allowed, "a reservation is denied")
		require.False(t, ask(upTo(1, 1)).Allowed)
		for _, cost := range []int64{0, 1, p.capacity, kit.MaxTokens} {
			want := db.Must(m.Peek(now, model.BucketID{Policy: "p", Key: "k"}, cost))
			require.Equal(t, want, db.Must(kit.Peek(db.Pool, "p", "k", cost)))
			require.Equal(t, want, db.Acquire("p", "k", cost))
		}
		db.Cleanup()
		ask(settle("late", 0))
		ask(charge(kit.MaxTokens))
		now = kit.T0.AddDate(1, 0, 0)
		db.CleanupAt(now)
		ask(charge(0))
		require.NoError(t, m.Reset(model.BucketID{Policy: "p", Key: "k"}))
		db.Reset("p", "k")
		require.Equal(t, p.capacity, ask(charge(0)).Remaining, "a reset forgives")
	})
}

// A slower policy has a higher floor. An older debt below it stays, gets no deeper, and its times saturate.
func TestSpend_ADebtBelowANewFloorStays(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0)
	m := model.New()
	id := model.BucketID{Policy: "p", Key: "k"}
	define := func(capacity, refill int64, every model.Micros) {
		require.NoError(t, m.Define("p", model.Definition{Numbers: model.Numbers{Capacity: &capacity, Refill: &refill, Every: &every}}))
		db.Execute("select ratelimit_define_policy('p', $1, $2, $3)", capacity, refill, kit.IntervalOfDays(every))
	}
	ask := db.AsModel(m, new(kit.T0))
	define(10, kit.MaxTokens, 1)
	ask(charge(5, "i"))
	ask(charge(5))
	require.EqualValues(t, -kit.MaxTokens, ask(charge(kit.MaxTokens)).Remaining)
	define(10, 1, 365_250*kit.Day)
	require.EqualValues(t, -kit.MaxTokens, ask(charge(1)).Remaining, "the debt is neither cut nor deeper")
	require.Equal(t, model.Longest, ask(charge(0)).ResetAfter)
	require.EqualValues(t, -kit.MaxTokens, ask(settle("i", 9)).Remaining)
	want := db.Must(m.Peek(kit.T0, id, 1))
	require.Equal(t, model.Longest, want.RetryAfter)
	require.Equal(t, want, db.Must(kit.Peek(db.Pool, "p", "k", 1)))
	require.Equal(t, want, db.Acquire("p", "k", 1))
	require.Equal(t, want.RetryAfter, ask(reserve(365*24*time.Hour, 1)).RetryAfter)
	require.Equal(t, want, kit.SendBatch(t, db.Pool, kit.AcquireManyWithSizes, kit.All("p", "k"))[0].Whole.Decisions[0])
	db.SetClock(kit.T0.Add(time.Hour))
	db.Cleanup()
	require.EqualValues(t, 1, db.Number("select count(*) from ratelimit.buckets"))
	define(10, 1, kit.Micros(kit.Second))
	require.EqualValues(t, -kit.MaxTokens+3600, db.Must(kit.Peek(db.Pool, "p", "k", 1)).Remaining)
}

// The debt is deeper than the capacity.
func TestSpend_InBatchesRefillPaysDebtFirst(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability)
		db.MustSpend(charge(25))
		for _, step := range []struct {
			at   time.Duration
			want kit.Decision
		}{
			{15 * kit.Second, kit.Denied(0, 2*kit.Second, 10*kit.Second, 10)},
			{16 * kit.Second, kit.Denied(1, kit.Second, 9*kit.Second, 10)},
			{time.Hour, kit.Allowed(8, 2*kit.Second, 10)},
		} {
			db.SetClock(kit.T0.Add(step.at))
			require.Equal(t, step.want, *kit.SendBatch(t, db.Pool, kit.AcquireMany, kit.RequestOf("p", "k", 2))[0].Decision, step.at)
		}
	})
}

func TestSpend_AShadowPolicyAllowsEachRequest(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0)
	db.Execute("select ratelimit_define_policy('p', 10, 1, '1 second', shadow => true)")
	shadowed := func(d kit.Decision) kit.Decision {
		d.Shadowed = true
		return d
	}
	runSpending(t, db, []spendStep{
		{0, reserve(0, 8, "r"), kit.Allowed(2, 8*kit.Second, 10), 0, ""},
		{0, upTo(5, 3), shadowed(kit.Allowed(2, 8*kit.Second, 10)), 5, ""},
		{0, upTo(5, 1, "u"), kit.Allowed(0, 10*kit.Second, 10), 5, ""},
		{0, settle("u", 2), kit.Allowed(0, 10*kit.Second, 10), 0, ""}, // an enforced policy would have taken 2
		{0, reserve(kit.Second, 4, "none"), shadowed(kit.Allowed(0, 10*kit.Second, 10)), 0, ""},
		{0, reserve(time.Hour, 4, "w"), shadowed(kit.Allowed(-4, 14*kit.Second, 10)), 0, ""},
		{kit.Second, reserve(time.Hour, 4, "w"), shadowed(kit.Replayed(kit.Allowed(-4, 14*kit.Second, 10))), 0, ""},
		{kit.Second, acquireStep(4, "w"), shadowed(kit.Replayed(kit.Allowed(-4, 14*kit.Second, 10))), 0, ""},
		{4 * kit.Second, acquireStep(4, "w"), kit.Replayed(kit.Allowed(-4, 14*kit.Second, 10)), 0, ""},
		{4 * kit.Second, settle("none", 9), shadowed(kit.Allowed(0, 10*kit.Second, 10)), 0, ""},
		{4 * kit.Second, settle("w", 0), kit.Allowed(4, 6*kit.Second, 10), 0, ""},
		{4 * kit.Second, charge(9), kit.Allowed(-5, 15*kit.Second, 10), 0, ""},
	})
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
		"ratelimit_charge('p', 'k', null)":                                              "22023: invalid cost: cost is null.: Pass a whole number of tokens, 0 or more; ratelimit_refund gives tokens back.",
		"ratelimit_charge('p', 'k', 9000000000001)":                                     "22023: invalid cost: cost is 9000000000001.: Pass 0 to 9000000000000 tokens.",
		"ratelimit_charge('p', 'k', 1, '')":                                             "22023: invalid idempotency_key: idempotency_key is empty.: Pass a text of 1 to 512 bytes.",
		"ratelimit_charge('q', 'k', 1)":                                                 "RL001: unknown policy: No policy is named 'q'.: Names are case-sensitive, and ratelimit_policies() lists them. Define a new one first: select ratelimit_define_policy('q', capacity => 10, refill => 10, every => '1 second').",
		"ratelimit_drop_policy('q''s')":                                                 "RL001: unknown policy: No policy is named 'q''s'.: Pass the name of a policy that select * from ratelimit_policies() lists.",
		"ratelimit_settle('p', 'k', null, 1)":                                           "22023: invalid idempotency_key: idempotency_key is null.: Pass a text of 1 to 512 bytes.",
		"ratelimit_settle('p', null, 'i', 1)":                                           "22023: invalid key: key is null.: Pass a text of 1 to 512 bytes.",
		"ratelimit_settle('p', 'k', 'i', 4)":                                            "RL002: idempotency key used before with another cost: 'i' was settled with cost 3 and is settled again with cost 4.: The first settlement stands: charge or refund the difference.",
		"ratelimit_settle('p', 'k', 'j', 4)":                                            "RL003: no live grant under this idempotency key: Policy 'p' does not remember 'j' for this bucket. Nothing was charged.: An acquire that was denied or rolled back leaves nothing to settle. A job may take longer than the policy remembers: ratelimit_define_policy(policy, remember => '7 days').",
		"ratelimit_reserve('p', 'k', null)":                                             "22023: invalid max_wait: max_wait is null.: Pass an interval of 0 to 365 days, in days or smaller units.",
		"ratelimit_reserve('p', 'k', '1 month')":                                        "22023: invalid max_wait: max_wait is 1 mon.: Pass an interval of 0 to 365 days, in days or smaller units.",
		"ratelimit_reserve('p', 'k', '1 second', -1)":                                   "22023: invalid cost: cost is -1.: Pass a whole number of tokens, 0 or more; ratelimit_refund gives tokens back.",
		"ratelimit_acquire_up_to('p', 'k', null)":                                       "22023: invalid at_most: at_most is null.: Pass a whole number of tokens, 1 or more.",
		"ratelimit_acquire_up_to('p', 'k', 5, 6)":                                       "22023: invalid at_least: at_least is 6.: Pass a whole number of tokens, from 1 to at_most.",
		"ratelimit_acquire_up_to('p', 'k', 5, null)":                                    "22023: invalid at_least: at_least is null.: Pass a whole number of tokens, from 1 to at_most.",
		"ratelimit_acquire_up_to('p', 'k', 5, 3, 'i')":                                  "RL002: idempotency key used before with another cost: 'i' was granted with cost 2 and is requested again for 3 to 5.: Repeat a request with its first cost, and give a new request a new key.",
		"ratelimit_reserve('p', 'k', '1 second', 3, 'i')":                               "RL002: idempotency key used before with another cost: 'i' was granted with cost 2 and is requested again with cost 3.: Repeat a request with its first cost, and give a new request a new key.",
		"ratelimit_reserve('p', 'k', '-1 microsecond', 3)":                              "22023: invalid max_wait: max_wait is -00:00:00.000001.: Pass an interval of 0 to 365 days, in days or smaller units.",
		"ratelimit_acquire_up_to('p', 'k', 0, 0)":                                       "22023: invalid at_most: at_most is 0.: Pass a whole number of tokens, 1 or more.",
		"ratelimit_acquire_up_to(null, 'k', 5)":                                         "22023: invalid policy: policy is null.: Pass a text of 1 to 512 bytes.",
		"ratelimit_acquire('p', 'k', 2, 'i')":                                           settled,
		"ratelimit_enforce('p', 'k', 2, 'i')":                                           settled,
		"ratelimit_reserve('p', 'k', '1 second', 2, 'i')":                               settled,
		"ratelimit_acquire_up_to('p', 'k', 5, 1, 'i')":                                  settled,
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

func TestSpend_ABatchFailsOnlyTheSettledRequest(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.Policy("p", 10, 1, time.Hour, durability).Take("p", "k", 2, "i")
		db.MustSpend(settle("i", 1))
		ask := func(key, idempotencyKey string) kit.WholeRequest {
			return kit.WholeRequest{Charges: []model.Charge{kit.ChargeOf("p", key, 2)}, IdempotencyKey: idempotencyKey}
		}
		for function, send := range map[string]func([]kit.WholeRequest) ([]kit.WholeAnswer, error){
			"many":        func(r []kit.WholeRequest) ([]kit.WholeAnswer, error) { return kit.AcquireManyWholes(db.Pool, r) },
			"all many":    func(r []kit.WholeRequest) ([]kit.WholeAnswer, error) { return kit.AcquireManyWithSizes(db.Pool, r) },
			"packed":      func(r []kit.WholeRequest) ([]kit.WholeAnswer, error) { return kit.AcquirePacked(db.Pool, r, false) },
			"packed, all": func(r []kit.WholeRequest) ([]kit.WholeAnswer, error) { return kit.AcquirePacked(db.Pool, r, true) },
		} {
			answers, err := send([]kit.WholeRequest{ask(function, "i"), ask("k", "i"), ask("k", function)})
			require.NoError(t, err, function)
			require.True(t, answers[0].Whole.Allowed, function)
			require.Equal(t, "RL004: the grant under this idempotency key was settled: 'i' was granted with cost 2 and settled with cost 1.: "+
				"The operation is over, or was cancelled: do not repeat it. A new one needs a new key.", answers[1].Error, function)
			require.True(t, answers[2].Whole.Allowed, function)
		}
		require.EqualValues(t, 1, db.Left("p", "k"))
	})
}

// Of several shadow buckets, the bucket in the deepest debt binds: it covers the fewest repeats.
func TestSpend_AnEnforcedBucketBindsBeforeShadowBuckets(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0)
	db.Execute("select ratelimit_define_policy('spy', 10, 1, '1 second', shadow => true), ratelimit_define_policy('p', 10, 1, '1 second')")
	db.Execute("select ratelimit_define_policy(name, 9000000000000, 9000000000000, '1 second', shadow => name = 'vast spy') from unnest('{vast, vast spy}'::text[]) as name")
	db.Execute("select ratelimit_charge('spy', 'in debt', 13), ratelimit_charge('spy', 'poor', 10), ratelimit_charge('spy', 'rich', 1), ratelimit_charge('p', 'k', 1)")
	db.Execute("select ratelimit_charge('vast', 'k', 1), ratelimit_charge('vast spy', 'k', 9000000000000), ratelimit_charge('vast spy', 'k', 9000000000000)")
	for _, charges := range [][]model.Charge{ // of each, the last one binds
		{kit.ChargeOf("spy", "poor", 7), kit.ChargeOf("spy", "in debt", 7)},
		{kit.ChargeOf("spy", "poor", 7), kit.ChargeOf("spy", "in debt", 7), kit.ChargeOf("p", "k", 1)},
		{kit.ChargeOf("spy", "rich", 7), kit.ChargeOf("vast", "k", 1)},
		{kit.ChargeOf("vast spy", "k", 1), kit.ChargeOf("vast", "k", 1)},
	} {
		r := kit.WholeRequest{Charges: charges}
		w := kit.NoError(r.AcquireAll(db.Pool))(t)
		require.Equal(t, len(charges), w.Binding, "%+v", w)
		require.Equal(t, len(charges), kit.SendBatch(t, db.Pool, kit.AcquireManyWithSizes, r)[0].Whole.Binding)
	}
}

func TestMain(m *testing.M) { pgtest.Main(m) }
