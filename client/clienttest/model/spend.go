package model

import (
	"math/big"
	"time"
)

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
	next := State{&bucket, map[string]grant{}}
	for key, g := range s.grants {
		if key == idempotencyKey {
			g.isSpent, g.spent = true, cost
		}
		next.grants[key] = g
	}
	return next, as, nil
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
	m.states[id] = next
	return d, nil
}
