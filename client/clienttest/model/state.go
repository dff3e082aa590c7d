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
func (g grant) left(now time.Time) Micros { return max(0, until(now, g.ready)) }

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
	return State{s.bucket, with(s.grants, idempotencyKey, g)}
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
// an earlier one: empty, or in what debt is left. If numbers of an override end by then, what stays applies at the end.
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
	without := maps.Clone(s.grants)
	delete(without, idempotencyKey)
	g.doubtful = false
	return []State{{s.bucket, with(s.grants, idempotencyKey, g)}, {s.bucket, without}}
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

// floor is the level that nothing brings a bucket below: a debt of 9 * 10^12 tokens, or of what the bucket refills in
// 10,000 years, if that is less. Of a quota it is what can be used.
func (p Policy) floor() *big.Int {
	debt := microtokens(9_000_000_000_000)
	if p.Refill > 0 {
		ages := big.NewInt(3_652_500 * day)
		refilled := ages.Mul(ages, microtokens(p.Refill))
		debt = least(debt, refilled.Div(refilled, big.NewInt(int64(p.Every))))
	}
	return new(big.Int).Neg(debt)
}

// Move answers a change in microtokens that nothing refuses, and returns the bucket after it: at most full, and no deeper in
// debt than the floor, unless it was deeper before.
func (p Policy) Move(b Bucket, now time.Time, change *big.Int) (Bucket, Decision) {
	moved := p.Refilled(b, now)
	deepest := least(moved.Level, p.floor())
	moved.Level = new(big.Int).Add(moved.Level, change)
	if change.Sign() > 0 {
		moved.Level = least(p.most(b, now), moved.Level)
	}
	if moved.Level.Cmp(deepest) < 0 {
		moved.Level = deepest
	}
	return moved, p.answer(moved, now, 0)
}

// Charge takes the cost whatever the bucket holds. The empty idempotency key is none.
func (s State) Charge(p Policy, now time.Time, cost int64, idempotencyKey string) (State, Decision, error) {
	if cost == 0 {
		return s, p.answer(s.at(p, now), now, 0), nil
	}
	if first, ok := s.live(now, idempotencyKey); ok {
		if first.charge != cost {
			return s, Decision{}, IdempotencyMismatch
		}
		first.answer.Replayed = true
		return s, first.answer, nil
	}
	held := p.Refilled(s.at(p, now), now).Level
	bucket, answer := p.Move(s.at(p, now), now, microtokens(-cost))
	g := grant{charge: cost, answer: answer}
	g.cut = new(big.Int).Add(microtokens(cost), new(big.Int).Sub(bucket.Level, held)).Int64()
	return State{&bucket, s.grants}.remembering(p, now, idempotencyKey, g), answer, nil
}

// Settle replaces what a grant took by what it cost, once.
func (s State) Settle(p Policy, now time.Time, idempotencyKey string, cost int64) (State, Decision, error) {
	first, ok := s.live(now, idempotencyKey)
	as := p.answer(s.at(p, now), now, 0)
	switch {
	case !ok && p.Shadow:
		as.Shadowed = true
		return s, as, nil
	case !ok:
		return s, Decision{}, NoGrant
	case first.isSpent && first.spent != cost:
		return s, Decision{}, IdempotencyMismatch
	case first.isSpent:
		as.Replayed = true
		return s, as, nil
	}
	change := microtokens(first.charge - cost)
	change.Sub(change, big.NewInt(first.cut))
	if p.IsQuota() && !p.Next(first.at).After(now) { // that period is closed
		change = least(change, new(big.Int))
	}
	bucket, as := p.Move(s.at(p, now), now, change)
	first.isSpent, first.spent = true, cost
	return State{&bucket, with(s.grants, idempotencyKey, first)}, as, nil
}

// Reserve takes the cost if the bucket has it within longest. RetryAfter of the answer is the wait: until the bucket without
// the cost is out of debt. The empty idempotency key is none.
func (s State) Reserve(p Policy, now time.Time, longest Micros, cost int64, idempotencyKey string) (State, Decision, error) {
	if first, ok := s.live(now, idempotencyKey); ok && cost > 0 {
		if err := first.check(cost, cost); err != nil {
			return s, Decision{}, err
		}
		answer := first.replay(p, now)
		answer.Allowed = true
		return s, answer, nil
	}
	answer := s.Peek(p, now, cost)
	taken, after := p.Take(s.at(p, now), now, cost)
	if answer.RetryAfter != 0 && cost <= p.Capacity && !p.IsQuota() { // by the bucket as it is; Take rounds its refill down
		answer.RetryAfter = p.pastEnd(taken, now, waitFor(now, cost, new(big.Int)))
	}
	wait, next := answer.RetryAfter, s
	answer.Allowed = cost == 0 || wait == 0 || !p.IsQuota() && // which has nothing to take before its turn
		cost <= p.Capacity && wait != Never && wait <= longest && taken.Level.Cmp(p.floor()) >= 0
	if answer.Allowed && cost > 0 {
		g := grant{charge: cost, answer: after}
		if wait > 0 {
			g.ready = wait.After(now)
		}
		next = State{&taken, s.grants}.remembering(p, now, idempotencyKey, g)
		answer = after
		answer.RetryAfter = wait
	}
	if p.Shadow {
		answer.Allowed, answer.RetryAfter, answer.Shadowed = true, 0, wait != 0
	}
	return next, answer, nil
}

// AcquireUpTo takes as many tokens as there are, atMost, if there are atLeast. A shadow answers that all were taken. The
// empty idempotency key is none.
func (s State) AcquireUpTo(
	p Policy, now time.Time, atMost, atLeast int64, idempotencyKey string,
) (next State, answer Decision, taken int64, err error) {
	if first, ok := s.live(now, idempotencyKey); ok {
		if err := first.check(atLeast, atMost); err != nil {
			return s, Decision{}, 0, err
		}
		next, answer, taken = s, first.replay(p, now), first.charge
	} else if answer = s.Peek(p, now, atLeast); answer.Allowed {
		taken = min(atMost, answer.Remaining)
		var bucket Bucket
		bucket, answer = p.Take(s.at(p, now), now, taken)
		next = State{&bucket, s.grants}.remembering(p, now, idempotencyKey, grant{charge: taken, answer: answer})
	} else {
		next = s
		if p.Shadow {
			answer.Allowed, answer.RetryAfter, answer.Shadowed = true, 0, true
		}
	}
	switch {
	case !answer.Allowed:
		taken = 0
	case p.Shadow:
		taken = atMost
	}
	return next, answer, taken, nil
}

// Remembered is the cost of the grant that a live idempotency key remembers, and the one that settled it.
func (m *Model) Remembered(now time.Time, id BucketID, idempotencyKey string) (cost, settled int64) {
	g, _ := m.states[id].live(now, idempotencyKey)
	return g.charge, g.spent
}

// Charge takes the cost whatever the bucket holds. The empty idempotency key is none.
func (m *Model) Charge(now time.Time, id BucketID, cost int64, idempotencyKey string) (Decision, error) {
	return m.move(now, id, func(s State, p Policy) (State, Decision, error) { return s.Charge(p, now, cost, idempotencyKey) })
}

// Settle replaces what a grant was charged by what it cost, once.
func (m *Model) Settle(now time.Time, id BucketID, idempotencyKey string, cost int64) (Decision, error) {
	return m.move(now, id, func(s State, p Policy) (State, Decision, error) { return s.Settle(p, now, idempotencyKey, cost) })
}

// Reserve takes the cost if the bucket has it within longest. RetryAfter of the answer is the wait. The empty idempotency
// key is none.
func (m *Model) Reserve(now time.Time, id BucketID, longest Micros, cost int64, idempotencyKey string) (Decision, error) {
	return m.move(now, id, func(s State, p Policy) (State, Decision, error) {
		return s.Reserve(p, now, longest, cost, idempotencyKey)
	})
}

// AcquireUpTo takes as many tokens as there are, atMost, if there are atLeast. The empty idempotency key is none.
func (m *Model) AcquireUpTo(now time.Time, id BucketID, atMost, atLeast int64, idempotencyKey string) (d Decision, taken int64, err error) {
	d, err = m.move(now, id, func(s State, p Policy) (next State, d Decision, err error) {
		next, d, taken, err = s.AcquireUpTo(p, now, atMost, atLeast, idempotencyKey)
		return next, d, err
	})
	return d, taken, err
}

// move is a call about one bucket.
func (m *Model) move(now time.Time, id BucketID, call func(State, Policy) (State, Decision, error)) (Decision, error) {
	p, err := m.rules(now, id)
	if err != nil {
		return Decision{}, err
	}
	next, d, err := call(m.states[id], p)
	if err != nil {
		return Decision{}, err
	}
	m.put(now, id, p, next)
	return d, nil
}
