package model_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

var (
	jobs = model.BucketID{Policy: "jobs", Key: "k"}
	spot = model.BucketID{Policy: "spot", Key: "k"} // of a shadow
)

const minute = 60 * second

func lending(capacity int64, lease model.Micros) model.Definition {
	return model.Definition{Numbers: model.Numbers{Capacity: &capacity, Lease: &lease}}
}

// A jobModel lends 3 slots of jobs for 5 minutes, and 1 of a shadow for 1 minute.
type jobModel struct {
	*model.Model
	require.TestingT
	now time.Time
}

func newJobs(t require.TestingT) *jobModel {
	m := &jobModel{model.New(), t, t0}
	require.NoError(t, m.Define("jobs", lending(3, 5*minute)))
	shadow := lending(1, minute)
	shadow.Shadow = new(true)
	require.NoError(t, m.Define("spot", shadow))
	return m
}

func (m *jobModel) hold(id model.BucketID, holder string, cost int64) model.HoldDecision {
	d, err := m.Hold(m.now, id, holder, cost)
	require.NoError(m, err)
	return d
}

// renew returns model.Never for null.
func (m *jobModel) renew(id model.BucketID, holder string) model.Micros {
	heldFor, holds, err := m.Renew(m.now, id, holder)
	require.NoError(m, err)
	if !holds {
		require.Zero(m, heldFor)
		return model.Never
	}
	return heldFor
}

func (m *jobModel) release(id model.BucketID, holder string) bool {
	held, err := m.Release(m.now, id, holder)
	require.NoError(m, err)
	return held
}

func (m *jobModel) peek(id model.BucketID, cost int64) model.Decision {
	d, err := m.Peek(m.now, id, cost)
	require.NoError(m, err)
	return d
}

func (m *jobModel) after(d model.Micros) { m.now = d.After(m.now) }

// holders are those of all keys, with the time they still have.
func (m *jobModel) holders() string {
	text := ""
	for _, h := range m.Holders(m.now, nil, nil) {
		text += fmt.Sprintf("%s/%s %s %d %v\n", h.Policy, h.Key, h.Holder, h.Cost, h.HeldFor)
	}
	return text
}

func lent(remaining int64, heldFor model.Micros, capacity int64) model.HoldDecision {
	return model.HoldDecision{Allowed: true, Remaining: remaining, HeldFor: heldFor, Capacity: capacity}
}

func busy(remaining int64, retryAfter model.Micros, capacity int64) model.HoldDecision {
	return model.HoldDecision{Remaining: remaining, RetryAfter: retryAfter, Capacity: capacity}
}

func renewed(d model.HoldDecision) model.HoldDecision {
	d.Renewed = true
	return d
}

func TestSlots(t *testing.T) {
	t.Parallel()
	m := newJobs(t)
	require.Equal(t, allowed(3, 0, 3), m.peek(jobs, 1))
	require.Equal(t, lent(2, 5*minute, 3), m.hold(jobs, "a", 1))
	m.after(minute)
	require.Equal(t, lent(0, 5*minute, 3), m.hold(jobs, "b", 2))
	require.Equal(t, busy(0, 4*minute, 3), m.hold(jobs, "c", 1))
	require.Equal(t, busy(0, 5*minute, 3), m.hold(jobs, "c", 3))
	require.Equal(t, busy(0, model.Never, 3), m.hold(jobs, "c", 4))
	require.Equal(t, denied(0, 4*minute, 5*minute, 3), m.peek(jobs, 1))
	require.Equal(t, allowed(0, 5*minute, 3), m.peek(jobs, 0))
	require.Equal(t, "jobs/k a 1 4m0s\njobs/k b 2 5m0s\n", m.holders())

	m.after(minute)
	require.Equal(t, 5*minute, m.renew(jobs, "a"))
	require.Equal(t, renewed(lent(0, 5*minute, 3)), m.hold(jobs, "a", 1), "the same request again")
	_, err := m.Hold(m.now, jobs, "a", 2)
	require.Equal(t, model.IdempotencyMismatch, err)
	require.Equal(t, model.Never, m.renew(jobs, "c"), "it acquires nothing")
	require.Equal(t, busy(0, 4*minute, 3), m.hold(jobs, "c", 1), "since the lease of a is longer")
	require.True(t, m.release(jobs, "a"))
	require.False(t, m.release(jobs, "a"))
	require.Equal(t, model.Never, m.renew(jobs, "a"), "after its release")
	require.Equal(t, lent(0, 5*minute, 3), m.hold(jobs, "c", 1))

	m.after(4*minute - 1)
	require.Equal(t, "jobs/k b 2 1µs\njobs/k c 1 1m0.000001s\n", m.holders())
	m.after(1)
	require.Equal(t, model.Never, m.renew(jobs, "b"), "at its end it is over")
	require.False(t, m.release(jobs, "b"))
	require.Equal(t, lent(1, 5*minute, 3), m.hold(jobs, "a", 1))
	require.Equal(t, lent(1, 5*minute, 3), m.hold(model.BucketID{Policy: "jobs", Key: "other"}, "a", 2), "keys have slots of their own")
	require.NoError(t, m.Reset(jobs))
	require.Equal(t, "jobs/other a 2 5m0s\n", m.holders())
	require.NoError(t, m.ResetAll("jobs"))
	require.Empty(t, m.holders())
	m.hold(jobs, "a", 1)
	require.NoError(t, m.Drop("jobs"))
	require.NoError(t, m.Define("jobs", lending(3, 5*minute)))
	require.Equal(t, allowed(3, 0, 3), m.peek(jobs, 1))
}

func TestSlots_ListHoldersOfAPolicyOrAKey(t *testing.T) {
	t.Parallel()
	m := newJobs(t)
	m.hold(spot, "a", 1)
	m.hold(jobs, "a", 1)
	m.hold(model.BucketID{Policy: "jobs", Key: "l"}, "a", 1)
	require.Equal(t, []model.Holder{{BucketID: jobs, Holder: "a", Cost: 1, HeldFor: 5 * minute}}, m.Holders(m.now, new("jobs"), new("k")))
	require.Len(t, m.Holders(m.now, new("jobs"), nil), 2)
	require.Len(t, m.Holders(m.now, nil, new("k")), 2)
}

// What is held stays held, and whoever holds may go on; the next must wait for the lower capacity.
func TestSlots_LoweredCapacityAndLease(t *testing.T) {
	t.Parallel()
	m := newJobs(t)
	m.hold(jobs, "a", 1)
	m.after(minute)
	m.hold(jobs, "b", 1)
	m.after(minute)
	m.hold(jobs, "c", 1)
	require.NoError(t, m.Define("jobs", model.Definition{Numbers: model.Numbers{Capacity: new(int64(1)), Lease: new(minute)}}))
	require.Equal(t, busy(-2, 5*minute, 1), m.hold(jobs, "d", 1), "until all three are over")
	require.Equal(t, renewed(lent(-2, minute, 1)), m.hold(jobs, "c", 1))
	require.Equal(t, busy(-2, 4*minute, 1), m.hold(jobs, "d", 1))
	require.Equal(t, minute, m.renew(jobs, "b"))
	require.True(t, m.release(jobs, "a"))
	require.Equal(t, denied(-1, minute, minute, 1), m.peek(jobs, 1))
}

func TestSlots_RetryWhenAnOverrideEnds(t *testing.T) {
	t.Parallel()
	m := newJobs(t)
	override := func(capacity int64, in model.Micros) {
		require.NoError(t, m.Override(m.now, jobs, model.Numbers{Capacity: &capacity}, in.After(m.now)))
	}
	m.hold(jobs, "a", 2)
	override(0, minute)
	require.Equal(t, busy(-2, minute, 0), m.hold(jobs, "b", 1), "a block says when it ends")
	require.Equal(t, busy(-2, 5*minute, 0), m.hold(jobs, "b", 3))
	override(10, minute)
	require.Equal(t, busy(8, model.Never, 10), m.hold(jobs, "b", 11))
	require.Equal(t, busy(8, model.Never, 10), m.hold(jobs, "b", 9), "the larger capacity ends before a does")
	override(4, 10*minute)
	require.Equal(t, busy(2, 5*minute, 4), m.hold(jobs, "b", 4), "and here after it: it fits for a while")
	require.NoError(t, m.Override(m.now, jobs, model.Numbers{Capacity: new(int64(0))}, time.Time{}))
	require.Equal(t, busy(-2, model.Never, 0), m.hold(jobs, "b", 1))
	require.Equal(t, 5*minute, m.renew(jobs, "a"), "a block ends nothing")
	require.NoError(t, m.Override(m.now, jobs, model.Numbers{Lease: new(minute)}, minute.After(m.now)))
	require.Equal(t, minute, m.renew(jobs, "a"))
	m.after(minute - 1)
	require.Equal(t, minute, m.renew(jobs, "a"))
	m.after(1)
	require.Equal(t, 5*minute, m.renew(jobs, "a"), "the policy's")
}

func TestSlots_Shadow(t *testing.T) {
	t.Parallel()
	m := newJobs(t)
	require.Equal(t, lent(0, minute, 1), m.hold(spot, "a", 1))
	over := lent(0, minute, 1)
	over.Shadowed = true
	require.Equal(t, over, m.hold(spot, "b", 1))
	require.Equal(t, over, m.hold(spot, "b", 9), "it was not recorded")
	require.Equal(t, denied(0, minute, minute, 1), m.peek(spot, 1))
	require.Equal(t, minute, m.renew(spot, "b"), "it ends no job")
	require.False(t, m.release(spot, "b"))
	require.Equal(t, "spot/k a 1 1m0s\n", m.holders())
	m.after(minute)
	require.Equal(t, minute, m.renew(spot, "a"))
	require.Empty(t, m.holders())
}

// A clock that steps forward ends leases early, one that steps back lengthens them by the step, and nothing that was counted as
// free comes back.
func TestSlots_ClockSteps(t *testing.T) {
	t.Parallel()
	m := newJobs(t)
	m.hold(jobs, "a", 2)
	m.after(-minute)
	require.Equal(t, busy(1, 6*minute, 3), m.hold(jobs, "b", 2))
	require.Equal(t, "jobs/k a 2 5m0s\n", m.holders(), "and says no more than a lease")
	m.after(6 * minute)
	require.Equal(t, lent(2, 5*minute, 3), m.hold(jobs, "b", 1), "which removes the lease of a")
	m.after(-2 * minute)
	require.Equal(t, lent(0, 5*minute, 3), m.hold(jobs, "c", 2))
	require.Equal(t, model.Never, m.renew(jobs, "a"))

	m.after(7 * minute)
	require.Empty(t, m.holders())
	require.Len(t, m.Leases(jobs), 2)
	m.after(model.Micros(model.CleanUpMargin.Microseconds()))
	m.CleanUp(m.now)
	require.Empty(t, m.Leases(jobs))
}

func TestSlots_Refusals(t *testing.T) {
	t.Parallel()
	m := newJobs(t)
	require.NoError(t, m.Define("user", definition(10, 1)))
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
		"spot":  {Period: &daily},
	} {
		require.Equal(t, model.InvalidArgument, m.Define(name, def), name)
	}
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

// Whatever was held, renewed, released and lowered before: a cost fits at retry_after and not a microsecond earlier, and never
// before where there is no such instant; and no grant brings what is held above the capacity.
func TestSlots_RetryAfterIsAPromise(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	saw := map[string]int{}
	for range 300 {
		m := newJobs(t)
		for range 60 {
			m.after(model.Micros(r.Int64N(int64(2 * minute))))
			holder, cost := fmt.Sprint(r.IntN(8)), 1+r.Int64N(4)
			switch r.IntN(12) {
			case 0:
				m.renew(jobs, holder)
			case 1:
				m.release(jobs, holder)
			case 2:
				n := model.Numbers{Capacity: new(1 + r.Int64N(6)), Lease: new(1000 + model.Micros(r.Int64N(int64(5*minute))))}
				require.NoError(t, m.Define("jobs", model.Definition{Numbers: n}))
			case 3:
				var expires time.Time
				if r.IntN(4) > 0 {
					expires = (1 + model.Micros(r.Int64N(int64(5*minute)))).After(m.now)
				}
				require.NoError(t, m.Override(m.now, jobs, model.Numbers{Capacity: new(r.Int64N(6))}, expires))
			case 4:
				m.after(-model.Micros(r.Int64N(int64(minute))))
			case 5:
				m.CleanUp(m.now)
			default:
				d, err := m.Hold(m.now, jobs, holder, cost)
				if err != nil {
					require.Equal(t, model.IdempotencyMismatch, err, seed)
					continue
				}
				require.Equal(t, m.peek(jobs, 1).Remaining, d.Remaining, seed)
				switch {
				case d.Renewed:
					saw["renewed"]++
				case d.Allowed:
					require.GreaterOrEqual(t, d.Remaining, int64(0), seed)
					saw["lent"]++
				case d.RetryAfter == model.Never:
					saw["never"]++
					for _, later := range []model.Micros{1, minute, 5 * minute, 24 * 60 * minute} {
						d, err := m.Peek(later.After(m.now), jobs, cost)
						require.NoError(t, err)
						require.False(t, d.Allowed, seed)
					}
				default:
					saw["denied"]++
					for _, at := range []model.Micros{0, 1, d.RetryAfter / 2, d.RetryAfter - 1, d.RetryAfter} {
						then, err := m.Clone().Hold(at.After(m.now), jobs, holder, cost)
						require.NoError(t, err)
						require.Equal(t, at == d.RetryAfter, then.Allowed, seed)
						require.True(t, then.Allowed || then.RetryAfter == d.RetryAfter-at, seed)
					}
				}
			}
		}
	}
	for _, what := range []string{"lent", "renewed", "denied", "never"} {
		require.Greater(t, saw[what], 100, "%s: %v", what, saw)
	}
}
