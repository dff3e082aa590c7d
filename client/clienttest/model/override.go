package model

import (
	"maps"
	"time"
)

// An Override is numbers of one bucket, in place of its policy's until Expires; the zero time is never.
type Override struct {
	Capacity, Refill int64
	Every            Micros
	Zone             string    // of a quota
	Anchor           time.Time // of a quota
	Lease            Micros    // of slots
	Expires          time.Time
}

// Live reports whether the override has not expired.
func (o Override) Live(now time.Time) bool {
	return o.Expires.IsZero() || now.Before(o.Expires)
}

// With returns the policy with the numbers of an override, which is live, and what comes after them.
func (p Policy) With(o Override) Policy {
	numbers := p
	numbers.Capacity, numbers.Refill, numbers.Every = o.Capacity, o.Refill, o.Every
	numbers.Zone, numbers.Anchor, numbers.Lease = o.Zone, o.Anchor, o.Lease
	if !o.Expires.IsZero() {
		numbers.ends, numbers.then = o.Expires, &p
	}
	return numbers
}

// Override gives a bucket numbers of its own, in place of those that an earlier override gave it. A zone and an anchor that are
// not given stay those of the earlier override while it lasts.
func (m *Model) Override(now time.Time, id BucketID, n Numbers, expires time.Time) error {
	if !(Override{Expires: expires}).Live(now) {
		return InvalidArgument
	}
	if n.Capacity != nil && n.Refill != nil && n.Every != nil && n.Lease == nil { // wrong for any policy
		if _, err := n.over(Policy{}); err != nil {
			return err
		}
	}
	if n.Zone != nil && !IsZone(*n.Zone) || n.Anchor != nil && !isAnchor(*n.Anchor) {
		return InvalidArgument
	}
	p, ok := m.policies[id.Policy]
	if !ok {
		return UnknownPolicy
	}
	if o, ok := m.overrides[id]; ok && o.Live(now) {
		p.Zone, p.Anchor = o.Zone, o.Anchor
	}
	p, err := n.over(p)
	if err != nil {
		return err
	}
	m.overrides[id] = Override{p.Capacity, p.Refill, p.Every, p.Zone, p.Anchor, p.Lease, expires}
	return nil
}

// RemoveOverride leaves a bucket to its policy's numbers, and reports whether it had others.
func (m *Model) RemoveOverride(now time.Time, id BucketID) (had bool, err error) {
	if _, ok := m.policies[id.Policy]; !ok {
		return false, UnknownPolicy
	}
	o, ok := m.overrides[id]
	delete(m.overrides, id)
	return ok && o.Live(now), nil
}

// Overrides returns all that are kept, also those that have expired and wait for clean-up.
func (m *Model) Overrides() map[BucketID]Override { return maps.Clone(m.overrides) }
