package model_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

const minute = 60 * second

func lending(capacity int64, lease model.Micros) model.Definition {
	return model.Definition{Numbers: model.Numbers{Capacity: &capacity, Lease: &lease}}
}

// What slots do, tests/torture compares with SQL, field by field. Random definitions seldom come to these bounds.
func TestSlots_Refusals(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	jobs := model.BucketID{Policy: "jobs", Key: "k"}
	require.NoError(t, m.Define("jobs", lending(3, 5*minute)))
	daily := model.Period{Days: 1}
	require.NoError(t, m.Define("quota", model.Definition{Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1))}}))
	one := new(int64(1))
	for name, def := range map[string]model.Definition{
		"no capacity":     {Numbers: model.Numbers{Lease: new(minute)}},
		"capacity 0":      lending(0, minute),
		"capacity 10,001": lending(10_001, minute),
		"lease 0":         lending(1, 0),
		"lease 0.999 ms":  lending(1, 999),
		"1000 years":      lending(1, 365_250*24*60*minute+1),
		"refill":          {Numbers: model.Numbers{Capacity: one, Lease: new(minute), Refill: one}},
		"every":           {Numbers: model.Numbers{Capacity: one, Lease: new(minute), Every: new(second)}},
		"zone":            {Numbers: model.Numbers{Capacity: one, Lease: new(minute), Zone: new("UTC")}},
		"anchor":          {Numbers: model.Numbers{Capacity: one, Lease: new(minute), Anchor: &t0}},
		"period":          {Numbers: model.Numbers{Capacity: one, Lease: new(minute)}, Period: &daily},
		"stepped":         {Numbers: model.Numbers{Capacity: one, Lease: new(minute)}, Stepped: new(false)},
		"remember":        {Numbers: model.Numbers{Capacity: one, Lease: new(minute)}, Remember: new(second)},
	} {
		require.Equal(t, model.InvalidArgument, m.Define("new", def), name)
	}
	for name, def := range map[string]model.Definition{
		"user":  {Numbers: model.Numbers{Lease: new(minute)}},
		"quota": {Numbers: model.Numbers{Lease: new(minute)}},
		"jobs":  {Numbers: model.Numbers{Refill: one}},
	} {
		require.Equal(t, model.InvalidArgument, m.Define(name, def), name)
	}
	require.Equal(t, model.InvalidArgument, m.Define("jobs", model.Definition{Period: &daily}))
	require.Equal(t, model.InvalidArgument, m.Define("jobs", model.Definition{Durable: new(false)}))
	require.NoError(t, m.Define("jobs", model.Definition{Durable: new(true), Shadow: new(false)}))
	require.NoError(t, m.Define("most", lending(10_000, 365_250*24*60*minute)))
	require.NoError(t, m.Define("least", lending(1, 1000)))

	for name, n := range map[string]model.Numbers{
		"refill": {Refill: one}, "every": {Every: new(second)}, "zone": {Zone: new("UTC")}, "anchor": {Anchor: &t0},
		"lease": {Lease: new(model.Micros(999))}, "capacity": {Capacity: new(int64(10_001))}, "negative": {Capacity: new(int64(-1))},
	} {
		require.Equal(t, model.InvalidArgument, m.Override(t0, jobs, n, time.Time{}), name)
	}
	require.Equal(t, model.InvalidArgument, m.Override(t0, user, model.Numbers{Lease: new(minute)}, time.Time{}))
	require.Equal(t, model.UnknownPolicy, m.Override(t0, model.BucketID{Policy: "none"}, model.Numbers{Lease: new(minute)}, time.Time{}))

	for _, cost := range []int64{0, -1, math.MinInt64} {
		_, err := m.Hold(t0, jobs, "a", cost)
		require.Equal(t, model.InvalidArgument, err)
	}
	for id, want := range map[model.BucketID]error{user: model.InvalidArgument, {Policy: "none"}: model.UnknownPolicy} {
		_, hold := m.Hold(t0, id, "a", 1)
		_, _, renew := m.Renew(t0, id, "a")
		_, release := m.Release(t0, id, "a")
		require.Equal(t, []error{want, want, want}, []error{hold, renew, release})
	}
	_, acquire := m.Acquire(t0, jobs, 1, "")
	_, all := m.AcquireAll(t0, []model.Charge{charge(user, 1), charge(jobs, 0)}, "")
	_, before := m.AcquireAll(t0, []model.Charge{charge(model.BucketID{Policy: "none"}, 1), charge(jobs, 1)}, "")
	_, refund := m.Refund(t0, jobs, 1)
	_, charged := m.Charge(t0, jobs, 1, "")
	_, settle := m.Settle(t0, jobs, "i", 1)
	_, reserve := m.Reserve(t0, jobs, 0, 1, "")
	_, _, upTo := m.AcquireUpTo(t0, jobs, 1, 1, "")
	for _, err := range []error{acquire, all, before, refund, charged, settle, reserve, upTo} {
		require.Equal(t, model.InvalidArgument, err)
	}
	d, err := m.Peek(t0, user, 0)
	require.NoError(t, err)
	require.EqualValues(t, 10, d.Remaining, "nothing was taken")
}
