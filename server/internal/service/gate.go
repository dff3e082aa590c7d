package service

import (
	"context"
	"math"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Toll is what a request that wants to pass a gate asks of one bucket.
type Toll struct {
	Policy, Key string

	// Tokens are 0 or more. Of 0 the bucket is only looked at: the request is refused while it holds no whole token, and
	// nothing is taken from it.
	Tokens int64

	// Overdraws takes the tokens whatever the bucket holds. It refuses no request but one of 0 tokens.
	Overdraws bool

	// Watches refuses nothing: so does the policy, which only a look at the bucket does not tell.
	Watches bool
}

// A Passage is the answer of a gate. Decisions has one for each toll. Of a refused request nothing was taken, and each
// decision is about its own bucket.
type Passage struct {
	Allowed   bool
	Decisions []client.Decision
}

// mostOverdrawn is what the database charges at once.
const mostOverdrawn = 9_000_000_000_000

// Pass takes all tolls or none. A request that is closed for other reasons is refused, with the decisions of the buckets as
// they are.
//
// Where a toll only looks, its bucket is read before tokens are taken elsewhere. Tolls that overdraw are taken last, since they
// cannot be refused: an error then leaves others taken, and never a request allowed that has not paid.
func (s *Service) Pass(ctx context.Context, tolls []Toll, closed bool) (p Passage, err error) {
	err = s.do(ctx, Gate, keyOf(tolls), true, func(ctx context.Context) (policy string, whole client.Decision, err error) {
		p, policy, err = s.pass(ctx, tolls, closed)
		if err == nil && !p.Allowed {
			return policy, client.Decision{}, nil
		}
		whole.Allowed = true
		for _, d := range p.Decisions {
			whole.Shadowed = whole.Shadowed || d.Shadowed
			whole.Estimated = whole.Estimated || d.Estimated
		}
		return policy, whole, err
	})
	if err != nil {
		return Passage{}, err
	}
	return p, nil
}

// Unmatched tells of a request that no rule of the gate is about.
func (s *Service) Unmatched(asked func() (domain, keys string)) {
	s.observe(Call{Operation: Gate, Result: NoRule, Unmatched: asked})
}

// pass also returns the policy that decided.
func (s *Service) pass(ctx context.Context, tolls []Toll, closed bool) (p Passage, policy string, err error) {
	var takes, looks, overdraws bool
	for _, t := range tolls {
		takes = takes || t.Tokens > 0 && !t.Overdraws
		looks = looks || t.Tokens == 0
		overdraws = overdraws || t.Tokens > 0 && t.Overdraws
	}
	if len(tolls) > 0 {
		policy = tolls[0].Policy
	}
	if looks || closed && len(tolls) > 0 {
		seen, err := s.limiter.AcquireAll(ctx, chargesOf(tolls, func(Toll) int64 { return 0 }))
		if err != nil {
			return p, policy, err
		}
		p.Decisions = seen.Decisions
		for i, t := range tolls {
			if t.Tokens == 0 && !t.Watches && seen.Decisions[i].Remaining < 1 {
				closed, policy = true, t.Policy
			}
		}
	}
	if closed {
		return p, policy, s.explain(ctx, tolls, p.Decisions)
	}
	p.Allowed = true
	if takes {
		var binding int
		if p, binding, err = s.take(ctx, tolls); err != nil {
			return p, policy, err
		}
		policy = tolls[binding].Policy
	}
	if overdraws && p.Allowed {
		p.Decisions, err = s.overdraw(ctx, tolls, p.Decisions)
	}
	return p, policy, err
}

// take takes the tokens of all tolls that can be refused. Others are asked for their state.
func (s *Service) take(ctx context.Context, tolls []Toll) (p Passage, binding int, err error) {
	if len(tolls) == 1 {
		d, err := s.limiter.Acquire(ctx, tolls[0].Policy, tolls[0].Key, client.Cost(tolls[0].Tokens))
		return Passage{Allowed: d.Allowed, Decisions: []client.Decision{d}}, 0, err
	}
	d, err := s.limiter.AcquireAll(ctx, chargesOf(tolls, func(t Toll) int64 {
		if t.Overdraws {
			return 0
		}
		return t.Tokens
	}))
	return Passage{Allowed: d.Allowed, Decisions: d.Decisions}, d.Binding, err
}

// overdraw takes the tokens of those that cannot be refused. The decisions of the others stay.
func (s *Service) overdraw(ctx context.Context, tolls []Toll, decisions []client.Decision) ([]client.Decision, error) {
	release, err := s.of(keyOf(tolls)).own(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	if decisions == nil {
		decisions = make([]client.Decision, len(tolls))
	}
	for i, t := range tolls {
		if t.Overdraws && t.Tokens > 0 {
			if decisions[i], err = s.limiter.Charge(ctx, t.Policy, t.Key, min(t.Tokens, mostOverdrawn)); err != nil {
				return nil, err
			}
		}
	}
	return decisions, nil
}

// explain makes decisions that were seen those of the tolls: a bucket that does not hold what its tolls need refuses, and
// says until when.
func (s *Service) explain(ctx context.Context, tolls []Toll, seen []client.Decision) error {
	if len(tolls) == 0 {
		return nil
	}
	release, err := s.of(keyOf(tolls)).own(ctx)
	if err != nil {
		return err
	}
	defer release()
	type bucket struct{ policy, key string }
	asked := make(map[bucket]int64, len(tolls))
	for _, t := range tolls {
		if b := (bucket{t.Policy, t.Key}); !t.Overdraws {
			asked[b] += min(t.Tokens, math.MaxInt64-asked[b])
		}
	}
	for i, t := range tolls {
		need := max(1, asked[bucket{t.Policy, t.Key}])
		if t.Watches || t.Overdraws && t.Tokens > 0 || seen[i].Remaining >= need {
			continue
		}
		d, err := s.limiter.Peek(ctx, t.Policy, t.Key, client.Cost(need))
		if err != nil {
			return err
		}
		d.Allowed = false // as it was seen: meanwhile it may have refilled
		seen[i] = d
	}
	return nil
}

// GiveBack gives the tokens of the tolls back, one bucket after the other. An error leaves those before it given.
func (s *Service) GiveBack(ctx context.Context, tolls []Toll) (decisions []client.Decision, err error) {
	err = s.do(ctx, Refund, keyOf(tolls), false, func(ctx context.Context) (policy string, d client.Decision, err error) {
		decisions = make([]client.Decision, len(tolls))
		for i, t := range tolls {
			if decisions[i], err = s.limiter.Refund(ctx, t.Policy, t.Key, t.Tokens); err != nil {
				return t.Policy, d, err
			}
			policy, d = t.Policy, decisions[i]
		}
		return policy, d, nil
	})
	return decisions, err
}

// keyOf is a key of tolls that are taken together: all are of its shard.
func keyOf(tolls []Toll) string {
	if len(tolls) == 0 {
		return ""
	}
	return tolls[0].Key
}

func chargesOf(tolls []Toll, cost func(Toll) int64) []client.Charge {
	charges := make([]client.Charge, len(tolls))
	for i, t := range tolls {
		charges[i] = client.Charge{Policy: t.Policy, Key: t.Key, Cost: client.Cost(cost(t))}
	}
	return charges
}
