package model_test

import (
	"math"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

var t0 = time.Date(2024, 3, 30, 12, 0, 0, 0, time.UTC)

const second model.Micros = 1_000_000

var (
	user = model.BucketID{Policy: "user", Key: "k"}
	org  = model.BucketID{Policy: "org", Key: "k"}
)

// definition is of a policy that refills so many tokens each second.
func definition(capacity, refill int64) model.Definition {
	every := second
	return model.Definition{Numbers: model.Numbers{Capacity: &capacity, Refill: &refill, Every: &every}}
}

// newModel has a user with 10 tokens, and an organisation with 20 that refills twice as fast.
func newModel(t require.TestingT) *model.Model {
	m := model.New()
	require.NoError(t, m.Define("user", definition(10, 1)))
	require.NoError(t, m.Define("org", definition(20, 2)))
	return m
}

func charge(id model.BucketID, cost int64) model.Charge {
	return model.Charge{BucketID: id, Cost: cost}
}

func allowed(remaining int64, resetAfter model.Micros, capacity int64) model.Decision {
	return model.Decision{Allowed: true, Remaining: remaining, ResetAfter: resetAfter, Capacity: capacity}
}

func denied(remaining int64, retryAfter, resetAfter model.Micros, capacity int64) model.Decision {
	return model.Decision{Remaining: remaining, RetryAfter: retryAfter, ResetAfter: resetAfter, Capacity: capacity}
}

// What a request takes and answers, tests/torture compares with SQL, field by field. Random requests do not come to these bounds.
func TestAcquireAll_Bounds(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	whole, err := m.AcquireAll(t0, []model.Charge{charge(user, math.MaxInt64), charge(user, math.MaxInt64)}, "")
	require.NoError(t, err)
	never := denied(10, model.Never, 0, 10)
	require.Equal(t, model.Whole{Decision: never, Binding: 1, Decisions: []model.Decision{never, never}}, whole, "a sum beyond what a number can hold")
	_, err = m.AcquireAll(t0, nil, "i")
	require.Equal(t, model.InvalidArgument, err)
}

func TestRefillOfZero(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	require.NoError(t, m.Define("user", definition(10, 0)))
	acquire := func(at time.Time, cost int64, idempotencyKey string) model.Decision {
		d, err := m.Acquire(at, user, cost, idempotencyKey)
		require.NoError(t, err)
		return d
	}
	much := t0.AddDate(5000, 0, 0)
	require.Equal(t, allowed(10, 0, 10), acquire(t0, 0, ""))
	require.Equal(t, allowed(4, model.Never, 10), acquire(t0, 6, "i"))
	require.Equal(t, denied(4, model.Never, model.Never, 10), acquire(much, 5, ""))
	require.Equal(t, allowed(0, model.Never, 10), acquire(much, 4, ""))
	again := allowed(4, model.Never, 10)
	again.Replayed = true
	require.Equal(t, again, acquire(t0, 6, "i"))
	require.False(t, m.Clone().Remove(much, user))
	d, err := m.Refund(much, user, 10)
	require.NoError(t, err)
	require.Equal(t, allowed(10, 0, 10), d)
	require.True(t, m.Remove(much, user))

	require.ErrorIs(t, m.Define("new", model.Definition{Numbers: model.Numbers{Capacity: new(int64)}}), model.InvalidArgument)
}

func TestOverride(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	numbers := func(capacity, refill int64) model.Numbers { return model.Numbers{Capacity: &capacity, Refill: &refill} }
	peek := func(at time.Time, id model.BucketID, cost int64) model.Decision {
		d, err := m.Peek(at, id, cost)
		require.NoError(t, err)
		return d
	}
	soon := (60 * second).After(t0)

	require.NoError(t, m.Override(t0, user, numbers(100, 5), soon))
	require.Equal(t, allowed(100, 0, 100), peek(t0, user, 100), "a bucket nobody touched is full at the new size")
	_, err := m.Acquire(t0, user, 95, "")
	require.NoError(t, err)
	require.Equal(t, denied(5, second, 19*second, 100), peek(t0, user, 10))
	require.Equal(t, allowed(10, 0, 10), peek(soon, user, 10), "less when it expires, and what is above the capacity is cut")

	require.NoError(t, m.Override(t0, user, numbers(0, 5), time.Time{}))
	require.Equal(t, denied(0, model.Never, 0, 0), peek(t0, user, 1))
	require.Equal(t, allowed(0, 0, 0), peek(t0, user, 0))

	require.NoError(t, m.Override(t0, org, model.Numbers{}, soon))
	require.NoError(t, m.Define("org", definition(5, 1)))
	require.EqualValues(t, 20, peek(t0, org, 1).Capacity, "a copy of the policy's numbers as they were")
	had, err := m.RemoveOverride(soon, org)
	require.NoError(t, err)
	require.False(t, had, "it has expired")
	had, err = m.RemoveOverride(t0, user)
	require.NoError(t, err)
	require.True(t, had)
	require.EqualValues(t, 10, peek(t0, user, 1).Capacity)

	ages := model.Micros(9_000_000_000_000_000)
	require.ErrorIs(t, m.Override(t0, user, numbers(1, 1), t0), model.InvalidArgument)
	require.ErrorIs(t, m.Override(t0, user, model.Numbers{Every: &ages, Capacity: numbers(50, 0).Capacity}, soon), model.InvalidArgument)
	require.NoError(t, m.Override(t0, user, model.Numbers{Every: &ages, Refill: numbers(0, 0).Refill}, soon))
	require.ErrorIs(t, m.Override(t0, model.BucketID{Policy: "none"}, model.Numbers{}, soon), model.UnknownPolicy)
	require.NoError(t, m.Drop("user"))
	require.Empty(t, m.Overrides())
}

// A bucket that is full by the policy's numbers alone, or by its override's alone, must stay. An override
// counts for as long as it had not expired when clean-up judges.
func TestCleanUp_LooksAtOverrides(t *testing.T) {
	t.Parallel()
	expires := t0.Add(time.Hour)
	for _, c := range []struct {
		level, capacity int64
		at              time.Time
		full            bool
	}{
		{10, 10, t0, true},
		{10, 20, t0, false},
		{5, 5, t0, false},
		{20, 20, t0, true},
		{10, 20, expires.Add(model.CleanUpMargin).Add(-time.Microsecond), false},
		{10, 20, expires.Add(model.CleanUpMargin), true},
	} {
		m := newModel(t)
		require.NoError(t, m.Define("user", definition(10, 0)))
		require.NoError(t, m.Override(t0, user, model.Numbers{Capacity: &c.capacity}, expires))
		m.Put(user, model.Bucket{Level: big.NewInt(c.level * 1_000_000), RefilledAt: t0})
		m.CleanUp(c.at)
		require.Equal(t, c.full, m.Remove(c.at, user), c)
	}
}
