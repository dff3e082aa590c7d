package tests

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// Short forms of spendings on the bucket k of policy p.
func charge(cost int64, idempotencyKey ...string) spending {
	return spendingOf("charge", cost, idempotencyKey)
}

func settle(idempotencyKey string, cost int64) spending {
	return spendingOf("settle", cost, []string{idempotencyKey})
}

func reserve(maxWait time.Duration, cost int64, idempotencyKey ...string) spending {
	s := spendingOf("reserve", cost, idempotencyKey)
	s.maxWait = micros(maxWait)
	return s
}

func upTo(atMost, atLeast int64, idempotencyKey ...string) spending {
	s := spendingOf("acquire_up_to", atMost, idempotencyKey)
	s.atLeast = atLeast
	return s
}

func spendingOf(function string, cost int64, idempotencyKey []string) spending {
	s := spending{function: function, BucketID: model.BucketID{Policy: "p", Key: "k"}, cost: cost}
	if len(idempotencyKey) > 0 {
		s.idempotencyKey = idempotencyKey[0]
	}
	return s
}

// mustSpend sends a spending that must not fail.
func (db *testDB) mustSpend(s spending) spent {
	db.t.Helper()
	got, err := s.by(db.Pool)
	require.NoError(db.t, err, s)
	return got
}

// asModel sends spendings to a database and to the model, which must answer alike.
func (db *testDB) asModel(m *model.Model, now *time.Time) func(s spending) spent {
	return func(s spending) spent {
		db.t.Helper()
		want, err := s.of(m, *now)
		require.NoError(db.t, err, s)
		got := db.mustSpend(s)
		require.Equal(db.t, want, got, s)
		return got
	}
}

// waits is d as the answer of a reservation.
func waits(wait time.Duration, d decision) decision {
	d.RetryAfter = micros(wait)
	return d
}

// A spendStep is one call at an instant, and its answer or the SQLSTATE of its error.
type spendStep struct {
	at    time.Duration
	call  spending // or an acquire
	want  decision
	taken int64
	err   model.Error
}

func runSpending(t *testing.T, db subject, steps []spendStep) {
	t.Helper()
	for i, step := range steps {
		db.setClock(t0.Add(step.at))
		var got spent
		var err error
		if step.call.function == "acquire" {
			var keys []string
			if step.call.idempotencyKey != "" {
				keys = []string{step.call.idempotencyKey}
			}
			got.decision, err = db.tryAcquire("p", "k", step.call.cost, keys...)
		} else {
			got, err = db.spend(step.call)
		}
		require.Equal(t, string(step.err), sqlState(err), "step %d: %v", i+1, err)
		if err == nil {
			require.Equal(t, spent{step.want, step.taken}, got, "step %d: %v", i+1, step.call)
		}
	}
}

func acquireStep(cost int64, idempotencyKey ...string) spending {
	return spendingOf("acquire", cost, idempotencyKey)
}

func TestSpend_Steps(t *testing.T) {
	t.Parallel()
	for name, steps := range map[string][]spendStep{
		"a charge takes what is not there, and refill pays the debt first": {
			{0, charge(15), allowed(-5, 15*second, 10), 0, ""},
			{0, acquireStep(1), denied(-5, 6*second, 15*second, 10), 0, ""},
			{1500 * ms, charge(0), allowed(-4, 13500*ms, 10), 0, ""},
			{6 * second, acquireStep(1), allowed(0, 10*second, 10), 0, ""},
		},
		"a charge under a key is charged once": {
			{0, charge(15, "i"), allowed(-5, 15*second, 10), 0, ""},
			{second, charge(15, "i"), replayed(allowed(-5, 15*second, 10)), 0, ""},
			{second, charge(14, "i"), decision{}, 0, model.IdempotencyMismatch},
			{second, acquireStep(15, "i"), replayed(allowed(-5, 15*second, 10)), 0, ""},
			{second, charge(1), allowed(-5, 15*second, 10), 0, ""},
		},
		"what is charged is 0 to 9000000000000": {
			{0, charge(-1), decision{}, 0, model.InvalidArgument},
			{0, charge(maxTokens + 1), decision{}, 0, model.InvalidArgument},
			{0, settle("i", maxTokens+1), decision{}, 0, model.InvalidArgument},
			{0, settle("i", -1), decision{}, 0, model.InvalidArgument},
			{0, charge(0, "i"), allowed(10, 0, 10), 0, ""},
			{0, settle("i", 0), decision{}, 0, model.NoGrant},
		},
		"a settlement gives back what the estimate was above the cost": {
			{0, acquireStep(8, "i"), allowed(2, 8*second, 10), 0, ""},
			{second, settle("i", 3), allowed(8, 2*second, 10), 0, ""},
			{2 * second, settle("i", 3), replayed(allowed(9, second, 10)), 0, ""},
			{2 * second, settle("i", 4), decision{}, 0, model.IdempotencyMismatch},
			{2 * second, acquireStep(3, "i"), decision{}, 0, model.IdempotencyMismatch},
		},
		"a settlement takes what the estimate was below the cost, also in debt": {
			{0, acquireStep(8, "i"), allowed(2, 8*second, 10), 0, ""},
			{0, charge(5), allowed(-3, 13*second, 10), 0, ""},
			{0, settle("i", 20), allowed(-15, 25*second, 10), 0, ""},
			{0, settle("i", 20), replayed(allowed(-15, 25*second, 10)), 0, ""},
		},
		"a settlement gives back up to full": {
			{0, acquireStep(8, "i"), allowed(2, 8*second, 10), 0, ""},
			{5 * second, settle("i", 0), allowed(10, 0, 10), 0, ""},
			{5 * second, acquireStep(10), allowed(0, 10*second, 10), 0, ""},
		},
		"a settlement needs a live grant": {
			{0, settle("i", 1), decision{}, 0, model.NoGrant},
			{0, acquireStep(2, "i"), allowed(8, 2*second, 10), 0, ""},
			{24*time.Hour - us, settle("i", 2), allowed(10, 0, 10), 0, ""},
			{24 * time.Hour, settle("i", 2), decision{}, 0, model.NoGrant},
			{24 * time.Hour, acquireStep(2, "i"), allowed(8, 2*second, 10), 0, ""},
			{24 * time.Hour, settle("i", 5), allowed(5, 5*second, 10), 0, ""},
		},
		"a request repeated under its key after settle is over": {
			{0, reserve(time.Hour, 12, "w"), waits(-us, denied(10, 0, 0, 10)), 0, ""},
			{0, reserve(time.Hour, 8, "i"), waits(0, allowed(2, 8*second, 10)), 0, ""},
			{0, reserve(time.Hour, 4, "w"), waits(2*second, allowed(-2, 12*second, 10)), 0, ""},
			{0, settle("i", 8), allowed(-2, 12*second, 10), 0, ""},
			{0, settle("w", 0), allowed(2, 8*second, 10), 0, ""},
			{0, acquireStep(8, "i"), decision{}, 0, model.Settled},
			{0, acquireStep(4, "w"), decision{}, 0, model.Settled},
			{0, reserve(time.Hour, 4, "w"), decision{}, 0, model.Settled},
			{0, upTo(9, 1, "i"), decision{}, 0, model.Settled},
			{0, upTo(7, 1, "i"), decision{}, 0, model.IdempotencyMismatch},
			{0, settle("i", 8), replayed(allowed(2, 8*second, 10)), 0, ""},
			{24*time.Hour - us, acquireStep(8, "i"), decision{}, 0, model.Settled},
			{24 * time.Hour, acquireStep(8, "i"), allowed(2, 8*second, 10), 0, ""},
		},
		"a charge repeated after settle is replayed": {
			{0, charge(15, "i"), allowed(-5, 15*second, 10), 0, ""},
			{0, settle("i", 5), allowed(5, 5*second, 10), 0, ""},
			{0, charge(15, "i"), replayed(allowed(-5, 15*second, 10)), 0, ""},
			{0, charge(5, "i"), decision{}, 0, model.IdempotencyMismatch},
			{0, acquireStep(15, "i"), decision{}, 0, model.Settled},
			{0, charge(0), allowed(5, 5*second, 10), 0, ""},
		},
		"a reservation is served in order": {
			{0, reserve(0, 10), waits(0, allowed(0, 10*second, 10)), 0, ""},
			{0, reserve(second, 2), waits(2*second, denied(0, 0, 10*second, 10)), 0, ""},
			{0, reserve(2*second, 2), waits(2*second, allowed(-2, 12*second, 10)), 0, ""},
			{0, reserve(time.Hour, 3), waits(5*second, allowed(-5, 15*second, 10)), 0, ""},
			{second, reserve(time.Hour, 1), waits(5*second, allowed(-5, 15*second, 10)), 0, ""},
			{2 * second, acquireStep(1), denied(-4, 5*second, 14*second, 10), 0, ""},
			{3 * second, reserve(time.Hour, 11), waits(-us, denied(-3, 0, 13*second, 10)), 0, ""},
			{3 * second, reserve(0, 0), waits(0, allowed(-3, 13*second, 10)), 0, ""},
		},
		"a reservation under a key is a denial to acquire until its wait is over": {
			{0, acquireStep(10), allowed(0, 10*second, 10), 0, ""},
			{0, reserve(time.Hour, 4, "i"), waits(4*second, allowed(-4, 14*second, 10)), 0, ""},
			{second, reserve(0, 4, "i"), replayed(waits(3*second, allowed(-4, 14*second, 10))), 0, ""},
			{second, acquireStep(4, "i"), replayed(denied(-4, 3*second, 14*second, 10)), 0, ""},
			{second, upTo(9, 1, "i"), replayed(denied(-4, 3*second, 14*second, 10)), 0, ""},
			{second, acquireStep(5, "i"), decision{}, 0, model.IdempotencyMismatch},
			{4*second - us, acquireStep(4, "i"), replayed(denied(-4, us, 14*second, 10)), 0, ""},
			{4 * second, acquireStep(4, "i"), replayed(allowed(-4, 14*second, 10)), 0, ""},
			{4 * second, reserve(0, 4, "i"), replayed(waits(0, allowed(-4, 14*second, 10))), 0, ""},
			{24*time.Hour + 4*second - us, acquireStep(4, "i"), replayed(allowed(-4, 14*second, 10)), 0, ""},
			{24*time.Hour + 4*second, acquireStep(4, "i"), allowed(6, 4*second, 10), 0, ""},
		},
		"what is given back does not move others forward": {
			{0, reserve(0, 10), waits(0, allowed(0, 10*second, 10)), 0, ""},
			{0, reserve(time.Hour, 5, "first"), waits(5*second, allowed(-5, 15*second, 10)), 0, ""},
			{0, reserve(time.Hour, 5, "next"), waits(10*second, allowed(-10, 20*second, 10)), 0, ""},
			{second, settle("first", 0), allowed(-4, 14*second, 10), 0, ""},
			{second, reserve(time.Hour, 5, "next"), replayed(waits(9*second, allowed(-10, 20*second, 10))), 0, ""},
			{second, reserve(time.Hour, 1), waits(5*second, allowed(-5, 15*second, 10)), 0, ""},
		},
		"the wait is 0 to 365 days": {
			{0, reserve(-us, 1), decision{}, 0, model.InvalidArgument},
			{0, reserve(365*24*time.Hour+us, 1), decision{}, 0, model.InvalidArgument},
			{0, reserve(365*24*time.Hour, 1), waits(0, allowed(9, second, 10)), 0, ""},
		},
		"up to takes what there is": {
			{0, upTo(7, 1, "i"), allowed(3, 7*second, 10), 7, ""},
			{0, upTo(7, 4), denied(3, second, 7*second, 10), 0, ""},
			{500 * ms, upTo(7, 3), allowed(0, 9500*ms, 10), 3, ""},
			{500 * ms, upTo(7, 1), denied(0, 500*ms, 9500*ms, 10), 0, ""},
			{second, upTo(7, 1, "i"), replayed(allowed(3, 7*second, 10)), 7, ""},
			{second, upTo(6, 1, "i"), decision{}, 0, model.IdempotencyMismatch},
			{second, upTo(9, 8, "i"), decision{}, 0, model.IdempotencyMismatch},
			{second, acquireStep(7, "i"), replayed(allowed(3, 7*second, 10)), 0, ""},
			{second, settle("i", 1), allowed(7, 3*second, 10), 0, ""},
		},
		"up to more than there can be": {
			{0, upTo(maxTokens*1000, 11), never(10, 0, 10), 0, ""},
			{0, upTo(maxTokens*1000, 10), allowed(0, 10*second, 10), 10, ""},
			{0, upTo(0, 0), decision{}, 0, model.InvalidArgument},
			{0, upTo(5, 0), decision{}, 0, model.InvalidArgument},
			{0, upTo(5, 6), decision{}, 0, model.InvalidArgument},
		},
	} {
		t.Run(name, func(t *testing.T) {
			onEachDurability(t, func(t *testing.T, db subject, durability policyOption) {
				db.setClock(t0)
				db.definePolicy("p", 10, 1, second, durability)
				runSpending(t, db, steps)
			})
		})
	}
}

// Or the tokens that the bucket never had would fill it.
func TestSpend_AChargeCutAtTheFloorIsSettledAgainstWhatItTook(t *testing.T) {
	onEachDurability(t, func(t *testing.T, db subject, durability policyOption) {
		db.definePolicy("p", 10, 0, second, durability)
		left := func(remaining int64) decision {
			return decision{Allowed: true, Remaining: remaining, ResetAfter: model.Never, Capacity: 10}
		}
		runSpending(t, db, []spendStep{
			{0, charge(105, "first"), left(-95), 0, ""},
			{0, charge(maxTokens, "cut"), left(-maxTokens), 0, ""}, // by 95
			{0, charge(3, "none"), left(-maxTokens), 0, ""},
			{0, charge(maxTokens, "cut"), replayed(left(-maxTokens)), 0, ""},
			{0, charge(maxTokens-95, "cut"), decision{}, 0, model.IdempotencyMismatch},
			{0, settle("none", 0), left(-maxTokens), 0, ""},
			{0, settle("cut", 2), left(-97), 0, ""},
			{0, settle("cut", 2), replayed(left(-97)), 0, ""},
			{0, settle("first", 0), left(8), 0, ""},
		})
	})
}

func TestPolicy_OfCapacity0GrantsNothing(t *testing.T) {
	onEachDurability(t, func(t *testing.T, db subject, durability policyOption) {
		db.definePolicy("p", 0, 1, second, durability)
		runSpending(t, db, []spendStep{
			{0, acquireStep(1), never(0, 0, 0), 0, ""},
			{0, acquireStep(0), allowed(0, 0, 0), 0, ""},
			{0, upTo(5, 1, "i"), never(0, 0, 0), 0, ""},
			{0, reserve(time.Hour, 1), waits(-us, denied(0, 0, 0, 0)), 0, ""},
			{0, charge(2, "i"), allowed(-2, 2*second, 0), 0, ""},
			{second, acquireStep(1), never(-1, second, 0), 0, ""},
			{second, settle("i", 0), allowed(0, 0, 0), 0, ""},
			{time.Hour, acquireStep(1), never(0, 0, 0), 0, ""},
		})
		require.Equal(t, never(0, 0, 0), db.peekAt(t0, "p", "k", 1))
		require.Equal(t, allowed(0, 0, 0), db.refundAt(t0, "p", "k", 1))
		if db, ok := db.(*testDB); ok {
			answers, err := acquirePacked(db.Pool, []wholeRequest{all("p", "k")}, false)
			require.NoError(t, err)
			require.Equal(t, never(0, 0, 0), answers[0].Whole.Decision)
		}
	})
}

// Only debt may be as deep as this. The policies are the slowest and the fastest there are.
func TestSpend_DebtEndsAtAFloor(t *testing.T) {
	type testCase struct {
		capacity, refill int64
		every            string
		stepped          bool
		floor            int64
	}
	onDBs(t, map[string]testCase{
		"the slowest":          {10, 1, "365250 days", false, -10},
		"the slowest, stepped": {10, 1, "365250 days", true, -10},
		"slow and large":       {9_000_000_000, 900_000_000, "365250 days", true, -9_000_000_000},
		"the fastest":          {maxTokens, maxTokens, "1 microsecond", false, -maxTokens},
		"the fastest, stepped": {1, maxTokens, "1 microsecond", true, -maxTokens},
		"without refill":       {1, 0, "1 microsecond", false, -maxTokens},
	}, func(t *testing.T, db *testDB, p testCase) {
		db.setClock(t0)
		m := model.New()
		db.exec("select ratelimit_define_policy('p', $1, $2, $3::interval, stepped => $4)", p.capacity, p.refill, p.every, p.stepped)
		every := model.Micros(1)
		if p.every != "1 microsecond" {
			every = 365_250 * day
		}
		require.NoError(t, m.Define("p", model.Definition{
			Numbers: model.Numbers{Capacity: &p.capacity, Refill: &p.refill, Every: &every}, Stepped: &p.stepped,
		}))
		now := t0
		ask := db.asModel(m, &now)
		ask(charge(1, "early"))
		ask(charge(maxTokens))
		require.Equal(t, p.floor, ask(charge(maxTokens)).Remaining)
		require.Equal(t, p.floor, ask(charge(maxTokens, "late")).Remaining, "no deeper")
		require.Equal(t, p.floor, ask(settle("early", maxTokens)).Remaining, "and a settlement does not refuse")
		require.True(t, ask(charge(maxTokens)).Allowed)
		require.False(t, ask(reserve(365*24*time.Hour, 1)).Allowed, "a reservation is refused")
		require.False(t, ask(upTo(1, 1)).Allowed)
		for _, cost := range []int64{0, 1, p.capacity, maxTokens} {
			want := db.must(m.Peek(now, model.BucketID{Policy: "p", Key: "k"}, cost))
			require.Equal(t, want, db.must(peek(db.Pool, "p", "k", cost)))
			require.Equal(t, want, db.acquire("p", "k", cost))
		}
		db.cleanup()
		ask(settle("late", 0))
		ask(charge(maxTokens))
		now = t0.AddDate(1, 0, 0)
		db.cleanupAt(now)
		ask(charge(0))
		require.NoError(t, m.Reset(model.BucketID{Policy: "p", Key: "k"}))
		db.reset("p", "k")
		require.Equal(t, p.capacity, ask(charge(0)).Remaining, "a reset forgives")
	})
}

// A debt that was allowed once stays when the policy gets slower, and is not made deeper. Its times saturate.
func TestSpend_AnOldDebtMayBeBelowTheFloor(t *testing.T) {
	db := parallelDB(t, t0)
	m := model.New()
	id := model.BucketID{Policy: "p", Key: "k"}
	define := func(capacity, refill int64, every model.Micros) {
		require.NoError(t, m.Define("p", model.Definition{Numbers: model.Numbers{Capacity: &capacity, Refill: &refill, Every: &every}}))
		db.exec("select ratelimit_define_policy('p', $1, $2, $3)", capacity, refill, intervalOfDays(every))
	}
	ask := db.asModel(m, new(t0))
	define(10, maxTokens, 1)
	ask(charge(5, "i"))
	ask(charge(5))
	require.EqualValues(t, -maxTokens, ask(charge(maxTokens)).Remaining)
	define(10, 1, 365_250*day)
	require.EqualValues(t, -maxTokens, ask(charge(1)).Remaining, "neither cut nor deeper")
	require.Equal(t, model.Longest, ask(charge(0)).ResetAfter)
	require.EqualValues(t, -maxTokens, ask(settle("i", 9)).Remaining)
	want := db.must(m.Peek(t0, id, 1))
	require.Equal(t, model.Longest, want.RetryAfter)
	require.Equal(t, want, db.must(peek(db.Pool, "p", "k", 1)))
	require.Equal(t, want, db.acquire("p", "k", 1))
	require.Equal(t, want.RetryAfter, ask(reserve(365*24*time.Hour, 1)).RetryAfter)
	require.Equal(t, want, sendBatch(t, db.Pool, acquireAllMany, all("p", "k"))[0].Whole.Decisions[0])
	db.setClock(t0.Add(time.Hour))
	db.cleanup()
	require.EqualValues(t, 1, db.number("select count(*) from ratelimit.buckets"))
	define(10, 1, micros(second))
	require.EqualValues(t, -maxTokens+3600, db.must(peek(db.Pool, "p", "k", 1)).Remaining)
}

// A debt deeper than the bucket is large is paid before the bucket fills, also for batches.
func TestSpend_BatchesSeeDebtPaid(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.at(t0).policy("p", 10, 1, second, durability)
		db.mustSpend(charge(25))
		for _, step := range []struct {
			at   time.Duration
			want decision
		}{
			{15 * second, denied(0, 2*second, 10*second, 10)},
			{16 * second, denied(1, second, 9*second, 10)},
			{time.Hour, allowed(8, 2*second, 10)},
		} {
			db.setClock(t0.Add(step.at))
			require.Equal(t, step.want, *sendBatch(t, db.Pool, acquireMany, requestOf("p", "k", 2))[0].Decision, step.at)
		}
	})
}

func TestSpend_Shadow(t *testing.T) {
	db := parallelDB(t, t0)
	db.exec("select ratelimit_define_policy('p', 10, 1, '1 second', shadow => true)")
	shadowed := func(d decision) decision {
		d.Shadowed = true
		return d
	}
	runSpending(t, db, []spendStep{
		{0, reserve(0, 8, "r"), allowed(2, 8*second, 10), 0, ""},
		{0, upTo(5, 3), shadowed(allowed(2, 8*second, 10)), 5, ""},
		{0, upTo(5, 1, "u"), allowed(0, 10*second, 10), 5, ""},
		{0, settle("u", 2), allowed(0, 10*second, 10), 0, ""}, // the 2 that enforcing would have taken
		{0, reserve(second, 4, "none"), shadowed(allowed(0, 10*second, 10)), 0, ""},
		{0, reserve(time.Hour, 4, "w"), shadowed(allowed(-4, 14*second, 10)), 0, ""},
		{second, reserve(time.Hour, 4, "w"), shadowed(replayed(allowed(-4, 14*second, 10))), 0, ""},
		{second, acquireStep(4, "w"), shadowed(replayed(allowed(-4, 14*second, 10))), 0, ""},
		{4 * second, acquireStep(4, "w"), replayed(allowed(-4, 14*second, 10)), 0, ""},
		{4 * second, settle("none", 9), shadowed(allowed(0, 10*second, 10)), 0, ""},
		{4 * second, settle("w", 0), allowed(4, 6*second, 10), 0, ""},
		{4 * second, charge(9), allowed(-5, 15*second, 10), 0, ""},
	})
}

// A grant that is not committed yet is none, and nothing waits for it.
func TestSettle_WaitsForNoGrant(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		holder := db.policy("p", 10, 1, time.Hour, durability).begin()
		holder.acquire("p", "k", 4, "i")
		_, err := settle("i", 2).by(db.Pool)
		require.Equal(t, string(model.NoGrant), sqlState(err))
		_, err = settle("i", 2).by(holder)
		require.NoError(t, err, "its own transaction sees it")
		holder.exec("commit")
		got := db.mustSpend(settle("i", 2))
		require.True(t, got.Replayed)
		require.EqualValues(t, 8, got.Remaining)
	})
}

// A bucket without a row is full: a settlement that only gives back writes the grant alone, and one that takes makes the row.
func TestSettle_OfABucketWithoutARow(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.at(t0).policy("p", 10, 1, second, durability)
		for _, key := range []string{"back", "more"} {
			db.acquire("p", "k", 4, key)
		}
		db.reset("p", "k")
		require.Equal(t, allowed(10, 0, 10), db.mustSpend(settle("back", 1)).decision)
		require.Nil(t, db.bucket("p", "k"))
		require.Equal(t, allowed(7, 3*second, 10), db.mustSpend(settle("more", 7)).decision)
		require.Equal(t, replayed(allowed(7, 3*second, 10)), db.mustSpend(settle("back", 1)).decision)
	})
}

func TestSettle_CountsOnce(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.at(t0).policy("p", 100, 1, time.Hour, durability).take("p", "k", 50, "i")
		holder := db.begin().run("select ratelimit_charge('p', 'k', 1)") // they all wait for the bucket
		var callers []*pending
		for n := range 10 {
			callers = append(callers, db.session().startSpending(settle("i", int64(10+n%2))))
			callers[0].awaitBlockedBy(holder)
		}
		holder.exec("commit")
		mismatches, first := 0, 0
		for _, caller := range callers {
			if d, err := caller.result(); err != nil {
				require.Equal(t, string(model.IdempotencyMismatch), sqlState(err))
				mismatches++
			} else if !d.Replayed {
				first++
			}
		}
		require.Equal(t, 1, first)
		require.Equal(t, 5, mismatches)
		require.Contains(t, []int64{100 - 1 - 10, 100 - 1 - 11}, db.left("p", "k"))
	})
}

// A grant expires while its settlement waits for the bucket. If its key is granted anew meanwhile, that grant is settled.
func TestSettle_SettlesTheGrantThatItsKeyHasAfterAWait(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		for _, anew := range []bool{true, false} {
			db.at(t0).policy("p", 100, 0, second, durability, remember(second)).take("p", "k", 10, "i")
			holder := db.begin().take("p", "k", 1)
			call := db.session().startSpending(settle("i", 5)).blockedBy(holder)
			db.setClock(t0.Add(second))
			if anew {
				require.False(t, holder.acquire("p", "k", 20, "i").Replayed)
			}
			holder.exec("commit")
			d, err := call.result()
			if anew {
				require.NoError(t, err)
				require.EqualValues(t, 100-10-1-5, d.Remaining)
			} else {
				require.Equal(t, string(model.NoGrant), sqlState(err), "%+v", d)
			}
			db.dropPolicy("p")
		}
	})
}

// A shadow policy answers a settlement without a grant by its bucket. If the grant commits before the bucket is read, it is settled.
func TestSettle_OfAShadowPolicyFindsTheGrantThatItsBucketShows(t *testing.T) {
	t.Parallel()
	for function, kind := range map[string]string{"ratelimit_settle": "true", "ratelimit.settle_ephemeral": "false"} {
		db := newDB(t)
		gate := db.gateBefore(`if not v_policy\.shadow then perform no_grant\([^;]*;[^;]* end if; select n\.level, n\.reset_us`, function)
		db.exec("select ratelimit_define_policy('p', 10, 1, '1 day', shadow => true, durable => " + kind + ")")
		call := gate.session().startSpending(settle("i", 1)).blockedBy(gate.keeper)
		db.acquire("p", "k", 4, "i")
		gate.open()
		d := call.answer()
		require.False(t, d.Shadowed)
		require.EqualValues(t, 9, d.Remaining)
	}
}

// The transaction that a charge or a settlement waits for removes the bucket and changes its numbers: the new row is full by these.
func TestSpend_ABucketCreatedAfterAWaitHasTheNumbersAfterTheWait(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.setClock(t0)
		for _, change := range []string{"ratelimit_define_policy('p', 30)", "ratelimit_override('p', 'k', 30)"} {
			for _, s := range []spending{charge(3), settle("i", 4)} {
				db.policy("p", 10, 1, second, durability).take("p", "k", 1, "i")
				holder := db.begin().run("select ratelimit_reset('p', 'k'), " + change)
				call := db.session().startSpending(s).blockedBy(holder)
				holder.exec("commit")
				require.Equal(t, allowed(27, 3*second, 30), call.answer(), "%s after %s", s, change)
				db.dropPolicy("p")
			}
		}
	})
}

// A key that is stored after the bucket was read, by a session that left the bucket as it was, is found when the grant is stored.
func TestReserve_AKeyThatTurnsUpLateIsReplayed(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		for _, late := range []spending{reserve(time.Hour, 3, "i"), upTo(3, 1, "i"), charge(3, "i")} {
			db.at(t0).policy("p", 10, 1, second, durability).take("p", "k", map[bool]int64{true: 10, false: 8}[late.function == "reserve"])
			before := *db.bucket("p", "k")
			holder := db.begin()
			first := late
			if late.function == "acquire_up_to" {
				first = upTo(2, 1, "i")
			}
			want, err := first.by(holder)
			require.NoError(t, err)
			holder.exec("select ratelimit_refund('p', 'k', $1)", 3) // to the level that it had
			if late.function == "acquire_up_to" {
				holder.exec("select ratelimit_charge('p', 'k', 1)")
			}
			var got spent
			caller := db.session().start(func(q querier) (decision, error) {
				var err error
				got, err = late.by(q)
				return got.decision, err
			})
			caller.awaitBlockedBy(holder)
			holder.exec("commit")
			want.Replayed = true
			caller.answer()
			require.Equal(t, want, got, late)
			require.Equal(t, before, *db.bucket("p", "k"), late)
			db.dropPolicy("p")
		}
	})
}

// A reservation that has looked at an empty bucket waits for a session that gives tokens back, and then has no more to wait.
func TestReserve_WhatIsThereByNowIsNotWaitedFor(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.at(t0).policy("p", 10, 1, second, durability).take("p", "k", 10)
		holder := db.begin().run("select ratelimit_refund('p', 'k', 7)")
		caller := db.session().startSpending(reserve(time.Hour, 4, "i")).blockedBy(holder)
		holder.exec("commit")
		require.Equal(t, waits(0, allowed(3, 7*second, 10)), caller.answer())
		require.Equal(t, replayed(allowed(3, 7*second, 10)), db.acquire("p", "k", 4, "i"))
	})
}

// A reservation that had to wait for the bucket is told what is left to wait by then, and not what it was before. Its grant
// holds at the same instant.
func TestReserve_TheWaitForTheBucketCounts(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.at(t0).policy("p", 10, 1, second, durability).take("p", "k", 10)
		for _, c := range []struct {
			key               string
			cost              int64
			later, wait, left time.Duration
		}{{"i", 5, 2 * second, 3 * second, 3*second - ms}, {"j", 1, time.Hour, 0, 0}} {
			holder := db.begin().run("select ratelimit_charge('p', 'k', 0)").run("select from ratelimit.buckets where key = 'k' for update")
			holder.exec("select from ratelimit.ephemeral_buckets where key = 'k' for update")
			caller := db.session().startSpending(reserve(time.Hour, c.cost, c.key)).blockedBy(holder)
			db.setClock(t0.Add(c.later))
			holder.exec("commit")
			got := caller.answer()
			require.True(t, got.Allowed)
			require.Equal(t, micros(c.wait), got.RetryAfter)
			db.setClock(t0.Add(c.later + ms))
			require.Equal(t, micros(c.left), db.mustSpend(reserve(0, c.cost, c.key)).RetryAfter)
		}
	})
}

// The promise of a wait, on both sides: then the reservation's debt is paid, and one microsecond earlier it is not. A
// max_wait of one microsecond less is refused, and tells the same wait.
func TestReserve_TheWaitIsAPromise(t *testing.T) {
	type testCase struct {
		capacity, refill int64
		every            string
		stepped          bool
		costs            []int64
	}
	onDBs(t, map[string]testCase{
		"less than a microtoken in a microsecond":  {10, 1, "7 seconds", false, []int64{1, 10, 3}},
		"a microtoken takes hours":                 {10, 1, "100000 days", false, []int64{1}},
		"a third of a microtoken in a microsecond": {10, 1, "3 seconds", false, []int64{10, 10, 10}},
		"a line": {1, 50, "1 second", false, []int64{1, 1, 1, 1}},
		"steps":  {10, 3, "7 seconds", true, []int64{1, 10, 3}},
		"days":   {10, 3, "1 day", true, []int64{10, 10}},
	}, func(t *testing.T, db *testDB, p testCase) {
		now := t0
		db.setClock(now)
		db.exec("select ratelimit_define_policy('p', $1, $2, $3::interval, stepped => $4)", p.capacity, p.refill, p.every, p.stepped)
		ask := db.mustSpend
		ask(charge(p.capacity))
		for n, cost := range p.costs {
			for _, lead := range []time.Duration{1234567 * us, 0, -89 * ms}[n%3:] { // the last is a clock that has gone back
				now = now.Add(lead)
				db.setClock(now)
				refused := ask(reserve(0, cost))
				wait := time.Duration(refused.RetryAfter) * us
				if refused.RetryAfter > maxWaitOfReserve || wait == 0 {
					continue
				}
				require.False(t, refused.Allowed)
				require.Equal(t, refused, ask(reserve(wait-us, cost)))
				granted := ask(reserve(wait, cost))
				require.True(t, granted.Allowed)
				require.Equal(t, refused.RetryAfter, granted.RetryAfter)
				require.Negative(t, db.peekAt(now.Add(wait-us), "p", "k", 0).Remaining)
				require.GreaterOrEqual(t, db.peekAt(now.Add(wait), "p", "k", 0).Remaining, int64(0))
				db.setClock(now)
			}
		}
	})
}

// A reservation goes down to the floor, to the microtoken, though the bucket would be out of debt within max_wait.
func TestReserve_GoesDownToTheFloor(t *testing.T) {
	db := parallelDB(t)
	m := model.New()
	capacity, refill, every := int64(maxTokens), int64(1_000_000), micros(second)
	require.NoError(t, m.Define("p", model.Definition{Numbers: model.Numbers{Capacity: &capacity, Refill: &refill, Every: &every}}))
	db.at(t0).policy("p", capacity, refill, second)
	now := t0
	ask := db.asModel(m, &now)
	const year = 365 * 24 * time.Hour
	ask(charge(maxTokens))
	require.True(t, ask(reserve(year, maxTokens, "i")).Allowed)
	require.False(t, ask(reserve(year, 1)).Allowed)
	ask(settle("i", 1_000_000))
	require.False(t, ask(reserve(year, maxTokens)).Allowed)
	now = now.Add(second - us)
	db.setClock(now)
	require.False(t, ask(reserve(year, maxTokens)).Allowed)
	now = now.Add(us)
	db.setClock(now)
	require.EqualValues(t, -maxTokens, ask(reserve(year, maxTokens)).Remaining, "what was refilled since counts")
}

func TestSpend_RefusalsAndReplaysWriteNothing(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.at(t0).policy("p", 10, 1, second, durability)
		for _, s := range []spending{charge(10), charge(1, "c"), reserve(time.Hour, 2, "r"), settle("c", 3)} {
			db.mustSpend(s)
		}
		before := db.rows()
		for _, s := range []spending{
			reserve(second, 5), reserve(0, 1, "x"), reserve(0, 2, "r"), reserve(time.Hour, 11), reserve(0, 0), upTo(5, 1), upTo(5, 1, "x"),
			upTo(2, 2, "r"), charge(0), charge(1, "c"), settle("c", 3),
		} {
			tx := db.begin()
			_, err := s.by(tx)
			require.NoError(t, err, s)
			require.Equal(t, traces{}, tx.traces(), s)
			tx.exec("commit")
		}
		require.Equal(t, before, db.rows())
	})
}

func TestSpend_Errors(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, second)
	db.exec("select ratelimit_acquire('p', 'k', 2, 'i')")
	db.exec("select ratelimit_settle('p', 'k', 'i', 3)")
	db.exec("select ratelimit_acquire('p', 'other', 2, 'i')")
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
		e := pgError(err)
		require.NotNil(t, e, "%s: %v", call, err)
		require.Equal(t, want, fmt.Sprintf("%s: %s: %s: %s", e.Code, e.Message, e.Detail, e.Hint), call)
	}
}

func TestSpend_ABatchRefusesWhatWasSettled(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.policy("p", 10, 1, time.Hour, durability).take("p", "k", 2, "i")
		db.mustSpend(settle("i", 1))
		ask := func(key, idempotencyKey string) wholeRequest {
			return wholeRequest{[]model.Charge{chargeOf("p", key, 2)}, idempotencyKey}
		}
		for function, send := range map[string]func([]wholeRequest) ([]wholeAnswer, error){
			"many":        func(r []wholeRequest) ([]wholeAnswer, error) { return acquireManyWholes(db.Pool, r) },
			"all many":    func(r []wholeRequest) ([]wholeAnswer, error) { return acquireAllMany(db.Pool, r) },
			"packed":      func(r []wholeRequest) ([]wholeAnswer, error) { return acquirePacked(db.Pool, r, false) },
			"packed, all": func(r []wholeRequest) ([]wholeAnswer, error) { return acquirePacked(db.Pool, r, true) },
		} {
			answers, err := send([]wholeRequest{ask(function, "i"), ask("k", "i"), ask("k", function)})
			require.NoError(t, err, function)
			require.True(t, answers[0].Whole.Allowed, function)
			require.Equal(t, "RL004: the grant under this idempotency key was settled: 'i' was granted with cost 2 and settled with cost 1.: "+
				"The operation is over, or was cancelled: do not repeat it. A new one needs a new key.", answers[1].Error, function)
			require.True(t, answers[2].Whole.Allowed, function)
		}
		require.EqualValues(t, 1, db.left("p", "k"))
	})
}

// Of shadow buckets, the deepest in debt covers the fewest repeats. One that is enforced binds before them, however many it covers.
func TestSpend_BindingOfShadowsAndOfBucketsInDebt(t *testing.T) {
	db := parallelDB(t, t0)
	db.exec("select ratelimit_define_policy('spy', 10, 1, '1 second', shadow => true), ratelimit_define_policy('p', 10, 1, '1 second')")
	db.exec("select ratelimit_define_policy(name, 9000000000000, 9000000000000, '1 second', shadow => name = 'vast spy') from unnest('{vast, vast spy}'::text[]) as name")
	db.exec("select ratelimit_charge('spy', 'in debt', 13), ratelimit_charge('spy', 'poor', 10), ratelimit_charge('spy', 'rich', 1), ratelimit_charge('p', 'k', 1)")
	db.exec("select ratelimit_charge('vast', 'k', 1), ratelimit_charge('vast spy', 'k', 9000000000000), ratelimit_charge('vast spy', 'k', 9000000000000)")
	for _, charges := range [][]model.Charge{ // of each, the last one binds
		{chargeOf("spy", "poor", 7), chargeOf("spy", "in debt", 7)},
		{chargeOf("spy", "poor", 7), chargeOf("spy", "in debt", 7), chargeOf("p", "k", 1)},
		{chargeOf("spy", "rich", 7), chargeOf("vast", "k", 1)},
		{chargeOf("vast spy", "k", 1), chargeOf("vast", "k", 1)},
	} {
		r := wholeRequest{charges: charges}
		w, err := r.acquireAll(db.Pool)
		require.NoError(t, err)
		require.Equal(t, len(charges), w.Binding, "%+v", w)
		require.Equal(t, len(charges), sendBatch(t, db.Pool, acquireAllMany, r)[0].Whole.Binding)
	}
}
