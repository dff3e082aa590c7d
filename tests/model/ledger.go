package model

import (
	"fmt"
	"maps"
	"time"
)

// A Ledger is what the calls on one bucket have left: its level and its idempotency keys. The zero
// value is of a bucket that nobody has taken from. A Ledger never changes: calls return the next.
type Ledger struct {
	bucket *Bucket          // nil is full
	grants map[string]grant // by idempotency key
}

// A grant is what an idempotency key remembers.
type grant struct {
	cost     int64
	answer   Decision
	expires  time.Time
	doubtful bool // perhaps removed by clean-up
}

// Acquire takes cost tokens if the bucket has them. The empty idempotency key is none.
func (l Ledger) Acquire(p Policy, now time.Time, cost int64, idempotencyKey string) (Ledger, Decision, error) {
	remembered := cost > 0 && idempotencyKey != ""
	first, ok := l.grants[idempotencyKey]
	if ok && remembered && now.Before(first.expires) {
		if first.cost != cost {
			return l, Decision{}, IdempotencyMismatch
		}
		first.answer.Replayed = true
		return l, first.answer, nil
	}

	bucket, answer := p.Acquire(l.at(p, now), now, cost)
	if !answer.Allowed || cost == 0 {
		return l, answer, nil
	}
	next := Ledger{&bucket, l.grants}
	if remembered {
		next.grants = maps.Clone(l.grants)
		if next.grants == nil {
			next.grants = map[string]grant{}
		}
		next.grants[idempotencyKey] = grant{cost: cost, answer: answer, expires: p.Remember.After(now)}
	}
	return next, answer, nil
}

// Peek answers whether an acquire would be allowed.
func (l Ledger) Peek(p Policy, now time.Time, cost int64) Decision {
	return p.Peek(l.at(p, now), now, cost)
}

// Remaining is that of a Peek.
func (l Ledger) Remaining(p Policy, now time.Time) int64 {
	return p.Refilled(l.at(p, now), now).remaining()
}

// Refund gives tokens back, never above the capacity.
func (l Ledger) Refund(p Policy, now time.Time, amount int64) (Ledger, Decision) {
	bucket, answer := p.Refund(l.at(p, now), now, amount)
	if l.bucket == nil {
		return l, answer
	}
	return Ledger{&bucket, l.grants}, answer
}

// Reset makes the bucket full; idempotency keys stay.
func (l Ledger) Reset() Ledger { return Ledger{nil, l.grants} }

// IsFull reports whether the bucket is, so that clean-up may remove it.
func (l Ledger) IsFull(p Policy, now time.Time) bool {
	return p.resetAfter(l.at(p, now), now) == 0
}

// Touch is a repeat that finds out late: tokens were taken and given back, and what stays is that the
// bucket was refilled by its clock.
func (l Ledger) Touch(p Policy, now time.Time) Ledger {
	bucket := p.Refilled(l.at(p, now), now)
	return Ledger{&bucket, l.grants}
}

// CleanUps returns what clean-up may leave: it removes full buckets and idempotency keys past their
// time, but for those that others hold just then. Whether a key is gone matters only to a clock that
// goes back: see Doubts.
func (l Ledger) CleanUps(p Policy, now time.Time) []Ledger {
	grants := maps.Clone(l.grants)
	for key, g := range grants {
		g.doubtful = g.doubtful || !now.Before(g.expires)
		grants[key] = g
	}
	left := []Ledger{{l.bucket, grants}}
	if l.bucket != nil && l.IsFull(p, now) {
		left = append(left, Ledger{nil, grants})
	}
	return left
}

// Doubts returns the ledgers there are if clean-up may have removed an idempotency key: one with it, and
// one without. Where that makes no difference now, they are one.
func (l Ledger) Doubts(idempotencyKey string, now time.Time) []Ledger {
	g := l.grants[idempotencyKey]
	if !g.doubtful || !now.Before(g.expires) {
		return []Ledger{l}
	}
	with, without := maps.Clone(l.grants), maps.Clone(l.grants)
	g.doubtful = false
	with[idempotencyKey] = g
	delete(without, idempotencyKey)
	return []Ledger{{l.bucket, with}, {l.bucket, without}}
}

// Equal reports whether no call could tell the two apart.
func (l Ledger) Equal(other Ledger) bool {
	same := l.bucket == other.bucket || l.bucket != nil && other.bucket != nil &&
		l.bucket.Level.Cmp(other.bucket.Level) == 0 && l.bucket.RefilledAt.Equal(other.bucket.RefilledAt)
	return same && maps.Equal(l.grants, other.grants)
}

// String is for people to read.
func (l Ledger) String() string {
	text := "full"
	if l.bucket != nil {
		text = fmt.Sprintf("%v microtokens at %s", l.bucket.Level, l.bucket.RefilledAt.Format(time.RFC3339Nano))
	}
	for key, g := range l.grants {
		text += fmt.Sprintf(", %q granted with cost %d until %s", key, g.cost, g.expires.Format(time.RFC3339Nano))
	}
	return text
}

// Hash is the same for equal ledgers.
func (l Ledger) Hash() uint64 {
	hash := uint64(len(l.grants))
	if l.bucket != nil {
		hash = hash*31 + uint64(l.bucket.RefilledAt.UnixMicro())
		hash = hash*31 + l.bucket.Level.Uint64()
	}
	return hash
}

func (l Ledger) forgetExpired(now time.Time) Ledger {
	grants := maps.Clone(l.grants)
	maps.DeleteFunc(grants, func(_ string, g grant) bool { return !now.Before(g.expires) })
	return Ledger{l.bucket, grants}
}

func (l Ledger) at(p Policy, now time.Time) Bucket {
	if l.bucket == nil {
		return p.Full(now)
	}
	return *l.bucket
}
