package model

import (
	"fmt"
	"maps"
	"math/big"
	"time"
)

// A State is what the calls on one bucket have left: its level and its idempotency keys. The zero
// value is of a bucket that nobody has taken from. A State never changes: calls return the next.
type State struct {
	bucket *Bucket          // nil is full
	grants map[string]grant // by idempotency key
}

// A grant is what an idempotency key remembers.
type grant struct {
	charge   int64
	at       time.Time // of a quota: when it was granted
	cut      int64     // what the floor kept of the charge, in microtokens
	answer   Decision
	expires  time.Time
	ready    time.Time // when a reserved grant begins to hold
	isSpent  bool      // settled
	spent    int64     // the real cost, once it is
	doubtful bool      // perhaps removed by clean-up
}

// left is how long a reserved grant has still to wait.
func (g grant) left(now time.Time) Micros {
	if !now.Before(g.ready) {
		return 0
	}
	return Micros(g.ready.UnixMicro() - now.UnixMicro())
}

// replay is the grant answered again. A reserved one is a denial until its wait is over.
func (g grant) replay(p Policy, now time.Time) Decision {
	answer := g.answer
	answer.Replayed = true
	if left := g.left(now); left > 0 && p.Shadow {
		answer.Shadowed = true
	} else if left > 0 {
		answer.Allowed, answer.RetryAfter = false, left
	}
	return answer
}

// check refuses a request that is no repeat, by the range of costs that it would be one of, or comes too late for it.
func (g grant) check(least, most int64) error {
	switch {
	case g.charge < least || g.charge > most:
		return IdempotencyMismatch
	case g.isSpent:
		return Settled
	}
	return nil
}

// live is the grant that the idempotency key remembers.
func (s State) live(now time.Time, idempotencyKey string) (g grant, ok bool) {
	g, ok = s.grants[idempotencyKey]
	return g, ok && now.Before(g.expires)
}

// remembering is the state with a grant under an idempotency key; the empty one is none.
func (s State) remembering(p Policy, now time.Time, idempotencyKey string, g grant) State {
	if idempotencyKey == "" {
		return s
	}
	if p.IsQuota() {
		g.at = now
	}
	g.expires = p.Remember.After(now)
	if !g.ready.IsZero() {
		g.expires = p.Remember.After(g.ready)
	}
	grants := maps.Clone(s.grants)
	if grants == nil {
		grants = map[string]grant{}
	}
	grants[idempotencyKey] = g
	return State{s.bucket, grants}
}

// Ask answers a charge as Acquire does, and takes nothing: a grant shows the bucket as it is before.
func (s State) Ask(p Policy, now time.Time, charge int64, idempotencyKey string) (Decision, error) {
	if first, ok := s.live(now, idempotencyKey); ok && charge > 0 {
		return first.replay(p, now), first.check(charge, charge)
	}
	answer := s.Peek(p, now, charge)
	if p.Shadow && !answer.Allowed {
		answer.Allowed, answer.RetryAfter, answer.Shadowed = true, 0, true
	}
	return answer, nil
}

// Acquire takes the charge if the bucket covers it. The empty idempotency key is none.
func (s State) Acquire(p Policy, now time.Time, charge int64, idempotencyKey string) (State, Decision, error) {
	answer, err := s.Ask(p, now, charge, idempotencyKey)
	if err != nil || !answer.Allowed || answer.Replayed || answer.Shadowed || charge == 0 {
		return s, answer, err
	}
	bucket, answer := p.Take(s.at(p, now), now, charge)
	return State{&bucket, s.grants}.remembering(p, now, idempotencyKey, grant{charge: charge, answer: answer}), answer, nil
}

// Peek answers whether an acquire would be allowed, were the policy no shadow.
func (s State) Peek(p Policy, now time.Time, cost int64) Decision {
	return p.Peek(s.at(p, now), now, cost)
}

// Remaining is that of a Peek.
func (s State) Remaining(p Policy, now time.Time) int64 {
	return p.remaining(s.at(p, now), now)
}

// Refund gives tokens back, never above the capacity.
func (m *Model) Refund(now time.Time, id BucketID, amount int64) (Decision, error) {
	return m.move(now, id, func(s State, p Policy) (State, Decision, error) {
		bucket, answer := p.refund(s.at(p, now), now, amount)
		if s.bucket == nil {
			return s, answer, nil
		}
		return State{&bucket, s.grants}, answer, nil
	})
}

// refund answers, and returns the bucket with the tokens given back.
func (p Policy) refund(b Bucket, now time.Time, amount int64) (Bucket, Decision) {
	most := p.Capacity
	if p.IsQuota() { // of which more may be used than its capacity is by now
		most = 9_000_000_000_000
	}
	given := p.Refilled(b, now)
	given.Level = least(p.most(b, now), new(big.Int).Add(given.Level, microtokens(min(amount, most))))
	return given, p.answer(given, now, 0)
}

// Pause stops a bucket until so much time is over: 1 millisecond to 365 days.
func (m *Model) Pause(now time.Time, id BucketID, pauseFor Micros) (Decision, error) {
	if pauseFor < 1000 || pauseFor > 365*day {
		return Decision{}, InvalidArgument
	}
	return m.move(now, id, func(s State, p Policy) (State, Decision, error) {
		if p.Refill == 0 {
			return s, Decision{}, InvalidArgument
		}
		bucket, answer := p.pause(s.at(p, now), now, pauseFor)
		return State{&bucket, s.grants}, answer, nil
	})
}

// pause answers what a peek then does, and returns the bucket as it will be at the end of the pause, which is never before that of
// an earlier one: empty, or in what debt is left. If the numbers of an override end by then, the policy's own apply at the end.
func (p Policy) pause(b Bucket, now time.Time, pauseFor Micros) (Bucket, Decision) {
	end := pauseFor.After(now)
	if b.paused.After(end) {
		end = b.paused
	}
	after := p.Refilled(b, end)
	if p.then != nil && !p.ends.After(end) {
		after = p.then.Refilled(p.Refilled(b, now), end)
	}
	after.RefilledAt = b.RefilledAt
	if end.After(b.RefilledAt) {
		after.RefilledAt = end
	}
	after.Level, after.paused = least(after.Level, new(big.Int)), end
	return after, p.Peek(after, now, 1)
}

// Reset makes the bucket full; idempotency keys stay.
func (s State) Reset() State { return State{nil, s.grants} }

// HasNoRow reports whether nobody has taken from the bucket since it began, or since a reset or clean-up.
func (s State) HasNoRow() bool { return s.bucket == nil }

// IsFull reports whether the bucket is, so that clean-up may remove it.
func (s State) IsFull(p Policy, now time.Time) bool {
	return p.resetAfter(s.at(p, now), now) == 0
}

// Touch is a repeat that finds out late: tokens were taken and given back, and what stays is that the
// bucket was refilled by its clock.
func (s State) Touch(p Policy, now time.Time) State {
	bucket := p.Refilled(s.at(p, now), now)
	return State{&bucket, s.grants}
}

// CleanUps returns what clean-up may leave: it removes buckets that are full by the policy's numbers and by
// their own, and idempotency keys past their time, but for those that others hold just then. Whether a key is
// gone matters only to a clock that goes back: see Doubts.
func (s State) CleanUps(p, own Policy, now time.Time) []State {
	grants := maps.Clone(s.grants)
	for key, g := range grants {
		g.doubtful = g.doubtful || !now.Before(g.expires)
		grants[key] = g
	}
	left := []State{{s.bucket, grants}}
	if s.bucket != nil && s.IsFull(p, now) && s.IsFull(own, now) {
		left = append(left, State{nil, grants})
	}
	return left
}

// Doubts returns the states there are if clean-up may have removed an idempotency key: one with it, and
// one without. Where that makes no difference now, they are one.
func (s State) Doubts(idempotencyKey string, now time.Time) []State {
	g := s.grants[idempotencyKey]
	if !g.doubtful || !now.Before(g.expires) {
		return []State{s}
	}
	with, without := maps.Clone(s.grants), maps.Clone(s.grants)
	g.doubtful = false
	with[idempotencyKey] = g
	delete(without, idempotencyKey)
	return []State{{s.bucket, with}, {s.bucket, without}}
}

// Equal reports whether no call could tell the two apart.
func (s State) Equal(other State) bool {
	same := s.bucket == other.bucket || s.bucket != nil && other.bucket != nil &&
		s.bucket.Level.Cmp(other.bucket.Level) == 0 && s.bucket.RefilledAt.Equal(other.bucket.RefilledAt) && s.bucket.paused.Equal(other.bucket.paused)
	return same && maps.Equal(s.grants, other.grants)
}

// String is for people to read.
func (s State) String() string {
	text := "full"
	if s.bucket != nil {
		text = fmt.Sprintf("%v microtokens at %s", s.bucket.Level, s.bucket.RefilledAt.Format(time.RFC3339Nano))
	}
	for key, g := range s.grants {
		text += fmt.Sprintf(", %q granted with cost %d until %s", key, g.charge, g.expires.Format(time.RFC3339Nano))
		if !g.ready.IsZero() {
			text += " from " + g.ready.Format(time.RFC3339Nano)
		}
		if g.isSpent {
			text += fmt.Sprintf(" and settled with %d", g.spent)
		}
	}
	return text
}

// Hash is the same for equal states.
func (s State) Hash() uint64 {
	hash := uint64(len(s.grants))
	if s.bucket != nil {
		hash = hash*31 + uint64(s.bucket.RefilledAt.UnixMicro())
		hash = hash*31 + s.bucket.Level.Uint64()
	}
	return hash
}

func (s State) forgetExpired(now time.Time) State {
	grants := maps.Clone(s.grants)
	maps.DeleteFunc(grants, func(_ string, g grant) bool { return !now.Before(g.expires) })
	return State{s.bucket, grants}
}

func (s State) at(p Policy, now time.Time) Bucket {
	if s.bucket == nil {
		return p.Full(now)
	}
	return *s.bucket
}
