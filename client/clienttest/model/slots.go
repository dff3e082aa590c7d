package model

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"time"
)

// Bounds of a policy that lends slots.
const (
	maxSlots             = 10_000
	shortestLease Micros = 1_000
	longestLease         = 365_250 * day
)

// IsSlots reports whether the policy lends its capacity, by leases, in place of a refill.
func (p Policy) IsSlots() bool { return p.Lease != 0 }

func isLease(m Micros) bool { return shortestLease <= m && m <= longestLease }

// capacityAt is the capacity at an instant that is not before those numbers apply.
func (p Policy) capacityAt(at time.Time) int64 {
	if p.then != nil && !at.Before(p.ends) {
		return p.then.Capacity
	}
	return p.Capacity
}

// A Lease is what one holder has.
type Lease struct {
	Cost int64
	Ends time.Time
}

// live reports whether the lease counts. At its end it does not.
func (l Lease) live(at time.Time) bool { return at.Before(l.Ends) }

// Slots are the leases of one key, by holder. The zero value is of a key that nobody holds. Slots never change: calls return
// the next. Leases that have ended stay until a grant or clean-up removes them, which only a clock that goes back can tell.
type Slots struct{ leases map[string]Lease }

// A HoldDecision is the answer to a hold, field by field what ratelimit_hold returns.
type HoldDecision struct {
	Allowed             bool
	Remaining           int64 // below zero after the capacity was lowered
	RetryAfter, HeldFor Micros
	Capacity            int64
	Renewed, Shadowed   bool
}

// held is the cost of the live leases.
func (s Slots) held(at time.Time) (sum int64) {
	for _, l := range s.leases {
		if l.live(at) {
			sum += l.Cost
		}
	}
	return sum
}

// retryAfter looks at each instant from which on there is more, or another capacity, for the first at which the cost fits. An
// instant between two of them has what the earlier one has.
func (s Slots) retryAfter(p Policy, now time.Time, cost int64) Micros {
	instants := []time.Time{now}
	if p.then != nil {
		instants = append(instants, p.ends)
	}
	for _, l := range s.leases {
		if l.live(now) {
			instants = append(instants, l.Ends)
		}
	}
	slices.SortFunc(instants, time.Time.Compare)
	for _, at := range instants {
		if cost <= p.capacityAt(at)-s.held(at) {
			return until(now, at)
		}
	}
	return Never
}

// until is the time from one instant to another.
func until(from, to time.Time) Micros {
	return min(Longest, Micros(to.UnixMicro()-from.UnixMicro()))
}

// Peek answers what Hold would, by another holder, were the policy no shadow. A cost of 0 is allowed.
func (s Slots) Peek(p Policy, now time.Time, cost int64) Decision {
	d := Decision{Remaining: p.Capacity - s.held(now), Capacity: p.Capacity}
	if cost > 0 {
		d.RetryAfter = s.retryAfter(p, now, cost)
	}
	d.Allowed = d.RetryAfter == 0
	for _, l := range s.leases {
		if l.live(now) {
			d.ResetAfter = max(d.ResetAfter, until(now, l.Ends))
		}
	}
	return d
}

// Hold lends slots to a holder if they are free. From a holder that holds already it is the same request again, and its lease
// begins anew.
func (s Slots) Hold(p Policy, now time.Time, holder string, cost int64) (Slots, HoldDecision, error) {
	l, ok := s.leases[holder]
	renewed := ok && l.live(now)
	if renewed && l.Cost != cost {
		return s, HoldDecision{}, IdempotencyMismatch
	}
	d := HoldDecision{Capacity: p.Capacity, HeldFor: p.Lease, Renewed: renewed}
	if !renewed {
		d.RetryAfter = s.retryAfter(p, now, cost)
	}
	next := s
	switch {
	case d.RetryAfter == 0:
		next.leases = with(s.Without(now).leases, holder, Lease{cost, p.Lease.After(now)})
	case p.Shadow:
		d.RetryAfter, d.Shadowed = 0, true
	default:
		d.HeldFor = 0
	}
	d.Allowed = d.RetryAfter == 0
	d.Remaining = p.Capacity - next.held(now)
	return next, d, nil
}

// Renew begins the lease of a holder that holds anew, and returns how long it holds; to one that does not it lends nothing. A
// shadow ends no job.
func (s Slots) Renew(p Policy, now time.Time, holder string) (next Slots, heldFor Micros, holds bool) {
	l, ok := s.leases[holder]
	switch {
	case ok && l.live(now):
		return Slots{with(s.leases, holder, Lease{l.Cost, p.Lease.After(now)})}, p.Lease, true
	case p.Shadow:
		return s, p.Lease, true
	}
	return s, 0, false
}

// Release ends the lease of a holder, and reports whether it held until now.
func (s Slots) Release(now time.Time, holder string) (next Slots, held bool) {
	if l, ok := s.leases[holder]; !ok || !l.live(now) {
		return s, false
	}
	leases := maps.Clone(s.leases)
	delete(leases, holder)
	return Slots{leases}, true
}

// Without is the slots without the leases that have ended.
func (s Slots) Without(ended time.Time) Slots {
	leases := maps.Clone(s.leases)
	maps.DeleteFunc(leases, func(_ string, l Lease) bool { return !l.live(ended) })
	return Slots{leases}
}

// Equal reports whether no call could tell the two apart.
func (s Slots) Equal(other Slots) bool { return maps.Equal(s.leases, other.leases) }

// Hash is the same for slots that are equal.
func (s Slots) Hash() (sum uint64) {
	for holder, l := range s.leases {
		h := fnv.New64a()
		fmt.Fprint(h, holder, " ", l.Cost, l.Ends.UnixMicro())
		sum += h.Sum64()
	}
	return sum
}

// Leases are all leases of a key, also those that have ended and wait for a grant or clean-up.
func (m *Model) Leases(id BucketID) map[string]Lease { return maps.Clone(m.slots[id].leases) }

// Held are the keys that have leases, also such that have ended.
func (m *Model) Held() (ids []BucketID) {
	for id, s := range m.slots {
		if len(s.leases) > 0 {
			ids = append(ids, id)
		}
	}
	return ids
}

// Hold lends slots to a holder.
func (m *Model) Hold(now time.Time, id BucketID, holder string, cost int64) (d HoldDecision, err error) {
	if cost < 1 {
		return d, InvalidArgument
	}
	p, err := m.lending(now, id)
	if err != nil {
		return d, err
	}
	next, d, err := m.slots[id].Hold(p, now, holder, cost)
	m.slots[id] = next
	return d, err
}

// Renew begins a lease anew. HeldFor is null in SQL unless the holder holds.
func (m *Model) Renew(now time.Time, id BucketID, holder string) (heldFor Micros, holds bool, err error) {
	p, err := m.lending(now, id)
	if err == nil {
		m.slots[id], heldFor, holds = m.slots[id].Renew(p, now, holder)
	}
	return heldFor, holds, err
}

// Release ends a lease, and reports whether the holder held until now.
func (m *Model) Release(now time.Time, id BucketID, holder string) (held bool, err error) {
	if _, err = m.lending(now, id); err == nil {
		m.slots[id], held = m.slots[id].Release(now, holder)
	}
	return held, err
}

// A Holder is a row of ratelimit_holders.
type Holder struct {
	BucketID
	Holder  string
	Cost    int64
	HeldFor Micros // at most the lease, also after a clock that went back
}

// Holders lists the live leases of a key by end, without its name.
func (s Slots) Holders(p Policy, now time.Time) (holders []Holder) {
	live := s.Without(now).leases
	for _, name := range slices.SortedFunc(maps.Keys(live), func(a, b string) int { return cmp.Or(live[a].Ends.Compare(live[b].Ends), cmp.Compare(a, b)) }) {
		holders = append(holders, Holder{Holder: name, Cost: live[name].Cost, HeldFor: min(p.Lease, until(now, live[name].Ends))})
	}
	return holders
}

// Holders lists the live leases by policy, key and end. A policy or a key that is nil is any.
func (m *Model) Holders(now time.Time, policy, key *string) []Holder {
	var holders []Holder
	for id, s := range m.slots {
		p, err := m.lending(now, id)
		if err != nil || policy != nil && *policy != id.Policy || key != nil && *key != id.Key {
			continue
		}
		for _, h := range s.Holders(p, now) {
			h.BucketID = id
			holders = append(holders, h)
		}
	}
	slices.SortStableFunc(holders, func(a, b Holder) int { return cmp.Or(cmp.Compare(a.Policy, b.Policy), cmp.Compare(a.Key, b.Key)) })
	return holders
}
