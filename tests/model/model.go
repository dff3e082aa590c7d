// Package model is what the functions of pgratelimit should answer, worked out in big integers from
// the rules of the design and not from the SQL, so that tests can compare the two field by field.
//
// [Policy] and [Bucket] are the arithmetic of one bucket: pure functions over values. [Model] puts
// policies, buckets and idempotency keys together and takes the same calls as a database does, one
// at a time, each at an instant given by the caller.
//
// The model finds how long to wait by searching for the first instant at which there is enough, not
// by a formula: that is what the promise of retry_after means.
package model

import (
	"maps"
	"slices"
	"time"
)

// A Model is a database with the package installed.
type Model struct {
	policies map[string]Policy
	buckets  map[BucketID]Bucket // a bucket that is not here is full
	grants   map[grantID]grant
}

// New returns a model without policies.
func New() *Model {
	return &Model{map[string]Policy{}, map[BucketID]Bucket{}, map[grantID]grant{}}
}

// A BucketID names a bucket.
type BucketID struct{ Policy, Key string }

type grantID struct {
	bucket         BucketID
	idempotencyKey string
}

// A grant is what an idempotency key remembers.
type grant struct {
	cost    int64
	answer  Decision
	expires time.Time
}

// An Error is the SQLSTATE of a refused call, which changes nothing.
type Error string

// The refusals of every function.
const (
	UnknownPolicy       Error = "RL001"
	IdempotencyMismatch Error = "RL002"
	InvalidArgument     Error = "22023"
)

func (e Error) Error() string { return string(e) }

// A Definition is the arguments of ratelimit_define_policy. What is nil keeps its value, or is at
// first: continuous, durable, remembered for 24 hours.
type Definition struct {
	Capacity, Refill int64
	Every            Micros
	Stepped, Durable *bool
	Remember         *Micros
}

// Define creates or changes a policy. Buckets stay as they are: a change shows when they are next
// looked at.
func (m *Model) Define(name string, def Definition) error {
	p, changing := m.policies[name]
	if !changing {
		p = Policy{Durable: valueOr(def.Durable, true), Remember: 24 * 60 * 60 * 1_000_000}
	}
	if valueOr(def.Durable, p.Durable) != p.Durable {
		return InvalidArgument
	}
	p.Capacity, p.Refill, p.Every = def.Capacity, def.Refill, def.Every
	p.Stepped = valueOr(def.Stepped, p.Stepped)
	p.Remember = valueOr(def.Remember, p.Remember)
	m.policies[name] = p
	return nil
}

// Drop removes a policy with its buckets and idempotency keys.
func (m *Model) Drop(name string) error {
	if _, ok := m.policies[name]; !ok {
		return UnknownPolicy
	}
	delete(m.policies, name)
	maps.DeleteFunc(m.buckets, func(id BucketID, _ Bucket) bool { return id.Policy == name })
	maps.DeleteFunc(m.grants, func(id grantID, _ grant) bool { return id.bucket.Policy == name })
	return nil
}

// Acquire takes cost tokens if the bucket has them. The empty idempotency key is none.
func (m *Model) Acquire(now time.Time, id BucketID, cost int64, idempotencyKey string) (Decision, error) {
	p, ok := m.policies[id.Policy]
	if !ok {
		return Decision{}, UnknownPolicy
	}
	remembered := cost > 0 && idempotencyKey != ""
	first, ok := m.grants[grantID{id, idempotencyKey}]
	if ok && remembered && now.Before(first.expires) {
		if first.cost != cost {
			return Decision{}, IdempotencyMismatch
		}
		first.answer.Replayed = true
		return first.answer, nil
	}

	bucket, answer := p.Acquire(m.bucket(now, id), now, cost)
	if answer.Allowed && cost > 0 {
		m.buckets[id] = bucket
		if remembered {
			m.grants[grantID{id, idempotencyKey}] = grant{cost, answer, p.Remember.After(now)}
		}
	}
	return answer, nil
}

// Peek answers whether an acquire would be allowed, and takes nothing.
func (m *Model) Peek(now time.Time, id BucketID, cost int64) (Decision, error) {
	p, ok := m.policies[id.Policy]
	if !ok {
		return Decision{}, UnknownPolicy
	}
	return p.Peek(m.bucket(now, id), now, cost), nil
}

// Refund gives tokens back, never above the capacity.
func (m *Model) Refund(now time.Time, id BucketID, amount int64) (Decision, error) {
	p, ok := m.policies[id.Policy]
	if !ok {
		return Decision{}, UnknownPolicy
	}
	bucket, answer := p.Refund(m.bucket(now, id), now, amount)
	if _, taken := m.buckets[id]; taken {
		m.buckets[id] = bucket
	}
	return answer, nil
}

// Reset makes a bucket full; its idempotency keys stay.
func (m *Model) Reset(id BucketID) error {
	if _, ok := m.policies[id.Policy]; !ok {
		return UnknownPolicy
	}
	delete(m.buckets, id)
	return nil
}

// CleanUp removes the idempotency keys past their time. Which of the full buckets go, and when, is
// left to the implementation: see Remove.
func (m *Model) CleanUp(now time.Time) {
	maps.DeleteFunc(m.grants, func(_ grantID, g grant) bool { return !now.Before(g.expires) })
}

// Remove removes a bucket that clean-up removed, and reports whether it was full, as it must be.
func (m *Model) Remove(now time.Time, id BucketID) (full bool) {
	b := m.bucket(now, id)
	delete(m.buckets, id)
	return m.policies[id.Policy].resetAfter(b, now) == 0
}

// Buckets returns the buckets that were taken from and not removed since.
func (m *Model) Buckets() []BucketID { return slices.Collect(maps.Keys(m.buckets)) }

// Grants returns how many idempotency keys there are.
func (m *Model) Grants() int { return len(m.grants) }

func (m *Model) bucket(now time.Time, id BucketID) Bucket {
	if b, ok := m.buckets[id]; ok {
		return b
	}
	return m.policies[id.Policy].Full(now)
}

func valueOr[T any](p *T, other T) T {
	if p == nil {
		return other
	}
	return *p
}
