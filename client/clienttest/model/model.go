// Package model is what the functions of pgratelimit should answer, worked out in big integers from
// the rules of the design and not from the SQL, so that tests can compare the two field by field.
//
// [Policy] and [Bucket] are the arithmetic of one bucket: pure functions over values. A [State] adds
// its idempotency keys. [Slots] are the leases of one key. [Model] puts policies, overrides, states and
// slots together and takes the same calls as a database does, one at a time, each at an instant given by
// the caller. A request is a list of charges, and one of a single bucket a list of one.
//
// The model finds how long to wait by searching for the first instant at which there is enough, not
// by a formula: that is what the promise of retry_after means. A [Calendar] finds its turns by
// searching, too.
package model

import (
	"cmp"
	"maps"
	"math/big"
	"time"
)

// A Model is a database with the package installed.
type Model struct {
	policies  map[string]Policy
	overrides map[BucketID]Override
	states    map[BucketID]State
	slots     map[BucketID]Slots
	usage     map[BucketID][]Usage // of closed periods, in order
}

// New returns a model without policies.
func New() *Model {
	return &Model{map[string]Policy{}, map[BucketID]Override{}, map[BucketID]State{}, map[BucketID]Slots{}, map[BucketID][]Usage{}}
}

// Of is a model of one key: of its policy, with the numbers that apply, and of what calls have left.
func Of(id BucketID, p Policy, s State, slots Slots) *Model {
	return &Model{map[string]Policy{id.Policy: p}, nil, map[BucketID]State{id: s}, map[BucketID]Slots{id: slots}, map[BucketID][]Usage{}}
}

// Left is what calls have left of a key.
func (m *Model) Left(id BucketID) (State, Slots) { return m.states[id], m.slots[id] }

// Clone returns the model as it is now, for a transaction to come back to.
func (m *Model) Clone() *Model {
	return &Model{maps.Clone(m.policies), maps.Clone(m.overrides), maps.Clone(m.states), maps.Clone(m.slots), maps.Clone(m.usage)}
}

// A BucketID names a bucket.
type BucketID struct{ Policy, Key string }

// An Error is the SQLSTATE of a refused call, which changes nothing.
type Error string

// The refusals of the functions.
const (
	UnknownPolicy       Error = "RL001"
	IdempotencyMismatch Error = "RL002"
	NoGrant             Error = "RL003"
	Settled             Error = "RL004"
	InvalidArgument     Error = "22023"
)

func (e Error) Error() string { return string(e) }

// Numbers are what a policy and an override have in common. What is nil is taken from the policy as it is.
type Numbers struct {
	Capacity, Refill *int64
	Every            *Micros
	Zone             *string    // of a quota
	Anchor           *time.Time // of a quota
	Lease            *Micros    // of slots
}

// areInRange reports whether the numbers are right for some policy.
func (n Numbers) areInRange() bool {
	const most = 9_000_000_000_000
	capacity, refill := valueOr(n.Capacity, 0), valueOr(n.Refill, 0)
	return 0 <= capacity && capacity <= most && 0 <= refill && refill <= most && valueOr(n.Every, 1) >= 1
}

// in returns the policy with these numbers in place of its own.
func (n Numbers) in(p Policy) Policy {
	p.Capacity = valueOr(n.Capacity, p.Capacity)
	p.Refill = valueOr(n.Refill, p.Refill)
	p.Every = valueOr(n.Every, p.Every)
	p.Zone = valueOr(n.Zone, p.Zone)
	p.Anchor = valueOr(n.Anchor, p.Anchor)
	p.Lease = valueOr(n.Lease, p.Lease)
	return p
}

// on returns these numbers, and the others where these are nil.
func (n Numbers) on(others Numbers) Numbers {
	return Numbers{
		cmp.Or(n.Capacity, others.Capacity), cmp.Or(n.Refill, others.Refill), cmp.Or(n.Every, others.Every),
		cmp.Or(n.Zone, others.Zone), cmp.Or(n.Anchor, others.Anchor), cmp.Or(n.Lease, others.Lease),
	}
}

// suit reports whether a policy of this kind has such numbers.
func (n Numbers) suit(p Policy) bool {
	switch {
	case p.IsSlots():
		return n.Refill == nil && n.Every == nil && n.Zone == nil && n.Anchor == nil
	case p.IsQuota():
		return n.Refill == nil && n.Every == nil && n.Lease == nil
	}
	return n.Zone == nil && n.Anchor == nil && n.Lease == nil
}

// isWithinBounds reports whether the numbers of a policy may be together.
func (p Policy) isWithinBounds() bool {
	switch {
	case p.Capacity < 0:
		return false
	case p.IsSlots():
		return isLease(p.Lease) && p.Capacity <= maxSlots
	case p.IsQuota():
		return p.Calendar.isValid()
	}
	return p.Refill >= 0 && p.Every >= 1 && p.fillsInTime()
}

// fillsInTime reports whether an empty bucket fills within 10,000 years, or is not meant to.
func (p Policy) fillsInTime() bool {
	fill := new(big.Int).Mul(big.NewInt(p.Capacity), big.NewInt(int64(p.Every)))
	longest := new(big.Int).Mul(big.NewInt(p.Refill), big.NewInt(3_652_500*int64(day)))
	return p.Refill == 0 || fill.Cmp(longest) <= 0
}

// A Definition is the arguments of ratelimit_define_policy. What is nil keeps its value. A new policy needs
// the three numbers, or a capacity and a period or a lease, and is continuous, durable, no shadow and remembers for 24 hours
// unless it says otherwise. A new quota's turns are counted in UTC, from the first day of 2001. Slots remember nothing.
type Definition struct {
	Numbers
	Period           *Period
	History          *Period // zero ends it
	Stepped, Durable *bool
	Remember         *Micros
	Shadow           *bool
}

// Define creates or changes a policy. Buckets stay as they are: a change shows when they are next
// looked at.
func (m *Model) Define(name string, def Definition) error {
	p, changing := m.policies[name]
	isQuota, isSlots := def.Period != nil || p.IsQuota(), def.Lease != nil || p.IsSlots()
	switch {
	case isSlots && (isQuota || def.Stepped != nil || def.Remember != nil || def.Lease != nil && !isLease(*def.Lease)):
		return InvalidArgument
	case !changing:
		p = Policy{Durable: valueOr(def.Durable, true), Remember: day}
		if isQuota {
			p.Calendar = Calendar{Zone: "UTC", Anchor: time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC)}
		}
		if isSlots {
			p.Remember, p.Lease = 0, *def.Lease
		}
		if def.Capacity == nil || def.Refill == nil && !isQuota && !isSlots {
			return InvalidArgument
		}
	case valueOr(def.Durable, p.Durable) != p.Durable, isQuota != p.IsQuota(), isSlots != p.IsSlots():
		return InvalidArgument
	}
	if isQuota {
		if p.Period = valueOr(def.Period, p.Period); p.Period == (Period{}) || def.Stepped != nil {
			return InvalidArgument
		}
	}
	if h := def.History; h != nil && (!isQuota || !p.Durable || *h != Period{} && !h.isValid()) {
		return InvalidArgument
	}
	suits := def.suit(p)
	p = def.in(p)
	if !suits || !def.areInRange() || !p.isWithinBounds() || isSlots && p.Capacity == 0 { // which only an override has
		return InvalidArgument
	}
	p.Stepped = valueOr(def.Stepped, p.Stepped)
	if p.Remember = valueOr(def.Remember, p.Remember); p.Remember < 1 && !isSlots {
		return InvalidArgument
	}
	p.History = valueOr(def.History, p.History)
	p.counts = p.counts || p.keepsUsage()
	p.Shadow = valueOr(def.Shadow, p.Shadow)
	m.policies[name] = p
	return nil
}

// Policy returns a policy by its name.
func (m *Model) Policy(name string) (p Policy, ok bool) {
	p, ok = m.policies[name]
	return p, ok
}

// Drop removes a policy with its overrides, buckets, idempotency keys and holders.
func (m *Model) Drop(name string) error {
	if _, ok := m.policies[name]; !ok {
		return UnknownPolicy
	}
	delete(m.policies, name)
	maps.DeleteFunc(m.overrides, func(id BucketID, _ Override) bool { return id.Policy == name })
	maps.DeleteFunc(m.states, func(id BucketID, _ State) bool { return id.Policy == name })
	maps.DeleteFunc(m.slots, func(id BucketID, _ Slots) bool { return id.Policy == name })
	maps.DeleteFunc(m.usage, func(id BucketID, _ []Usage) bool { return id.Policy == name })
	return nil
}

// rules are the policy of a bucket, with the numbers of its override. Slots have no buckets.
func (m *Model) rules(now time.Time, id BucketID) (Policy, error) {
	p, err := m.numbers(now, id)
	if p.IsSlots() {
		err = InvalidArgument
	}
	return p, err
}

// lending is rules for slots.
func (m *Model) lending(now time.Time, id BucketID) (Policy, error) {
	p, err := m.numbers(now, id)
	if err == nil && !p.IsSlots() {
		err = InvalidArgument
	}
	return p, err
}

// numbers are the policy of a key, with the numbers of its override.
func (m *Model) numbers(now time.Time, id BucketID) (Policy, error) {
	p, ok := m.policies[id.Policy]
	if !ok {
		return Policy{}, UnknownPolicy
	}
	return p.With(m.overrides[id], now), nil
}

// Peek answers whether an acquire, or of slots a hold, would be allowed, were the policy no shadow, and takes nothing.
func (m *Model) Peek(now time.Time, id BucketID, cost int64) (Decision, error) {
	p, err := m.numbers(now, id)
	if err != nil {
		return Decision{}, err
	}
	if p.IsSlots() {
		return m.slots[id].Peek(p, now, cost), nil
	}
	return m.states[id].Peek(p, now, cost), nil
}

// Level is what a bucket holds now, in microtokens, and the policy with the numbers that apply to it.
func (m *Model) Level(now time.Time, id BucketID) (*big.Int, Policy) {
	p, err := m.rules(now, id)
	if err != nil {
		return new(big.Int), p
	}
	return p.holds(m.states[id].at(p, now), now), p
}

// Reset makes a bucket full; its idempotency keys stay. Slots are all free.
func (m *Model) Reset(now time.Time, id BucketID) error {
	p, err := m.numbers(now, id)
	if err != nil {
		return err
	}
	m.close(now, id, p)
	m.states[id] = m.states[id].Reset()
	delete(m.slots, id)
	return nil
}

// ResetAll makes all buckets of a policy full.
func (m *Model) ResetAll(now time.Time, policy string) error {
	if _, ok := m.policies[policy]; !ok {
		return UnknownPolicy
	}
	for id := range m.states {
		if id.Policy == policy {
			_ = m.Reset(now, id)
		}
	}
	maps.DeleteFunc(m.slots, func(id BucketID, _ Slots) bool { return id.Policy == policy })
	return nil
}

// CleanUpMargin is how long clean-up leaves what is due: it judges rows as of that long ago.
const CleanUpMargin = 5 * time.Minute

// CleanUp removes the idempotency keys, the leases and the overrides past their time. Which of the full buckets go, and
// when, is left to the implementation: see Remove.
func (m *Model) CleanUp(now time.Time) {
	judged := now.Add(-CleanUpMargin)
	for id, s := range m.states {
		m.states[id] = s.forgetExpired(judged)
	}
	for id, s := range m.slots {
		m.slots[id] = s.Without(judged)
	}
	for id, o := range m.overrides {
		m.overrides[id] = o.At(judged)
	}
	maps.DeleteFunc(m.overrides, func(_ BucketID, o Override) bool { return !o.Live(judged) })
}

// Remove removes a bucket that clean-up removed, and reports whether it was full, as it must be: by the
// policy's numbers, by those that its override leaves for ever, and by those that apply. That of a quota with a history need be full by
// those that apply only, and its period is closed.
func (m *Model) Remove(now time.Time, id BucketID) (full bool) {
	judged := now.Add(-CleanUpMargin)
	p, err := m.rules(judged, id)
	full = err == nil && m.states[id].IsFull(p, judged) && (p.counts || m.states[id].IsFull(m.policies[id.Policy], judged) &&
		(p.then == nil || m.states[id].IsFull(*p.then, judged)))
	m.keep(id, p)
	m.states[id] = m.states[id].Reset()
	return full
}

// Put writes what a bucket holds, as if calls had brought it there: of a quota, whole tokens, and at most its capacity.
func (m *Model) Put(id BucketID, b Bucket) {
	if p, err := m.rules(b.RefilledAt, id); err == nil && p.IsQuota() {
		level := new(big.Int).Div(b.Level, million)
		b.Level = least(p.full(), level.Mul(level.Sub(level, big.NewInt(p.Capacity)), million))
	}
	m.states[id] = State{&b, m.states[id].grants}
}

// Policies returns the policies by name.
func (m *Model) Policies() map[string]Policy { return maps.Clone(m.policies) }

// Buckets returns the buckets that were taken from and not removed since.
func (m *Model) Buckets() (ids []BucketID) {
	for id, s := range m.states {
		if s.bucket != nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// Size counts the buckets that were asked for or taken from.
func (m *Model) Size() int { return len(m.states) }

// TakeOver has what calls on another model have left of a bucket, if no call on this one has left anything.
func (m *Model) TakeOver(other *Model, id BucketID) {
	if s, ok := other.states[id]; ok && m.states[id].HasNoRow() {
		m.states[id] = s
	}
}

// Grants returns how many idempotency keys there are.
func (m *Model) Grants() (n int) {
	for _, s := range m.states {
		n += len(s.grants)
	}
	return n
}

// with is a copy of a map with one more entry.
func with[V any](of map[string]V, key string, value V) map[string]V {
	all := map[string]V{}
	maps.Copy(all, of)
	all[key] = value
	return all
}

func valueOr[T any](p *T, other T) T {
	if p == nil {
		return other
	}
	return *p
}

// An Override is a patch of the numbers of one bucket: what stays, and on top of it what ends at Expires. The zero time is that of no end,
// and a refill goes with its interval.
type Override struct {
	Stays, Ends Numbers
	Expires     time.Time
}

// At is the override without what has ended.
func (o Override) At(now time.Time) Override {
	if !now.Before(o.Expires) {
		o.Ends, o.Expires = Numbers{}, time.Time{}
	}
	return o
}

// Parts are what a list has of an override: those of its parts that have not ended.
func (o Override) Parts(now time.Time) (parts []Override) {
	o = o.At(now)
	for _, part := range []Override{{Stays: o.Stays}, {Ends: o.Ends, Expires: o.Expires}} {
		if part != (Override{}) {
			parts = append(parts, part)
		}
	}
	return parts
}

// Live reports whether the override has numbers that have not ended.
func (o Override) Live(now time.Time) bool { return len(o.Parts(now)) > 0 }

// With returns the policy with the numbers of an override, and what comes after those that end.
func (p Policy) With(o Override, now time.Time) Policy {
	p = o.Stays.in(p)
	if o = o.At(now); o.Expires.IsZero() {
		return p
	}
	numbers := o.Ends.in(p)
	numbers.ends, numbers.then = o.Expires, &p
	return numbers
}

// Override sets numbers of one bucket: what ends, if the time is not zero, and else what stays, of which nothing ends any more. The end alone
// is another end for what ends. The policy has the numbers of the part that was set, also where they are out of bounds.
func (m *Model) Override(now time.Time, id BucketID, n Numbers, expires time.Time) (applies Policy, err error) {
	ends, sets := !expires.IsZero(), n != Numbers{}
	refills := Policy{Capacity: valueOr(n.Capacity, 0), Refill: valueOr(n.Refill, 0), Every: valueOr(n.Every, 1)}
	wrong := !n.areInRange() || !refills.fillsInTime() // for any policy
	if wrong || !sets && !ends || ends && (n.Zone != nil || n.Anchor != nil) {
		return applies, InvalidArgument
	}
	p, ok := m.policies[id.Policy]
	if !ok {
		return applies, UnknownPolicy
	}
	if !n.suit(p) || ends && !now.Before(expires) {
		return applies, InvalidArgument
	}
	o := m.overrides[id].At(now)
	if n.Refill != nil || n.Every != nil {
		before := o.Stays.in(p)
		if ends {
			before = p.With(o, now)
		}
		n = n.on(Numbers{Refill: &before.Refill, Every: &before.Every})
	}
	if ends {
		o.Ends, o.Expires = n.on(o.Ends), expires
	} else {
		o.Stays = n.on(o.Stays)
		without(&o.Ends.Capacity, n.Capacity)
		without(&o.Ends.Refill, n.Refill)
		without(&o.Ends.Every, n.Every)
		without(&o.Ends.Lease, n.Lease)
	}
	if o.Ends == (Numbers{}) {
		if ends {
			return applies, InvalidArgument
		}
		o.Expires = time.Time{}
	}
	applies = o.Stays.in(p)
	if ends {
		applies = p.With(o, now)
	}
	if sets && !applies.isWithinBounds() {
		return applies, InvalidArgument
	}
	if before, _ := m.numbers(now, id); applies.Calendar != before.Calendar {
		m.close(now, id, before)
	}
	m.overrides[id] = o
	return applies, nil
}

func without[T any](number **T, other *T) {
	if other != nil {
		*number = nil
	}
}

// RemoveOverride leaves a bucket to its policy's numbers, and reports whether it had others.
func (m *Model) RemoveOverride(now time.Time, id BucketID) (had bool, err error) {
	before, err := m.numbers(now, id)
	if err != nil {
		return false, err
	}
	if m.policies[id.Policy].Calendar != before.Calendar {
		m.close(now, id, before)
	}
	o, ok := m.overrides[id]
	delete(m.overrides, id)
	return ok && o.Live(now), nil
}

// Overrides returns all that are kept, also those that have ended and wait for clean-up.
func (m *Model) Overrides() map[BucketID]Override { return maps.Clone(m.overrides) }
