package service

import (
	"context"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A GateCharge is what a request at the gate asks of one bucket.
type GateCharge struct {
	Policy, Key string

	// Cost is 0 or more. A cost of 0 takes nothing, and is denied while the bucket holds no whole token.
	Cost int64

	// Overdraw takes the cost whatever the bucket holds. Only a cost of 0 is then denied.
	Overdraw bool

	// Shadow tells that the policy is in shadow: it denies nothing. The answer to a cost of 0 does not show that.
	Shadow bool

	// Quota is for a policy in shadow: if all charges with Quota are beyond their limits, the request is denied.
	Quota bool
}

// mostOverdrawn is the largest cost that the database charges at once.
const mostOverdrawn = 9_000_000_000_000

// Admit takes the cost of all charges or of none. Blocked denies the request, with the decisions of the buckets as they are. Of
// the whole, only Allowed and Binding count; a denial's decisions are each about its own bucket.
//
// Buckets of cost 0 are read before tokens are taken elsewhere. Charges that overdraw come last, since they cannot be denied: an
// error then leaves tokens taken, but never allows a request that has not paid.
func (s *Service) Admit(ctx context.Context, charges []GateCharge, blocked bool) (d client.JointDecision, err error) {
	call, begin := Call{Operation: Gate}, time.Now()
	call.Err = s.shardOf(keyOf(charges)).call(ctx, true, func(ctx context.Context) (err error) {
		d, err = s.admit(ctx, charges, blocked)
		return err
	})
	if call.Err != nil {
		return client.JointDecision{}, s.observeCall(call, begin, client.Decision{})
	}
	whole := client.Decision{Allowed: d.Allowed}
	for i, decision := range d.Decisions {
		if d.Allowed && decision.Shadowed && !whole.Shadowed {
			whole.Shadowed, d.Binding = true, i // metrics name the policy in shadow
		}
		whole.Estimated = whole.Estimated || decision.Estimated
	}
	if len(charges) > 0 {
		call.Policy = charges[d.Binding].Policy
	}
	return d, s.observeCall(call, begin, whole)
}

// Unmatched observes a request that no rule of the gate matches.
func (s *Service) Unmatched(domain, keys string) {
	s.observe(Call{Operation: Gate, Result: NoRule, Domain: domain, Keys: keys})
}

func (s *Service) admit(ctx context.Context, charges []GateCharge, blocked bool) (d client.JointDecision, err error) {
	var takes, reads, overdraws bool
	for _, c := range charges {
		takes = takes || c.Cost > 0 && !c.Overdraw
		reads = reads || c.Cost == 0
		overdraws = overdraws || c.Cost > 0 && c.Overdraw
	}
	if reads || blocked && len(charges) > 0 {
		seen, err := s.acquireAll(ctx, withCost(charges, func(GateCharge) int64 { return 0 }))
		if err != nil {
			return d, err
		}
		d.Decisions = seen.Decisions
		for i, c := range charges {
			if c.Cost == 0 && !c.Shadow && seen.Decisions[i].Remaining < 1 {
				blocked, d.Binding = true, i
			}
		}
	}
	if blocked {
		return d, s.explain(ctx, charges, d.Decisions)
	}
	d.Allowed = true
	if takes {
		if d, err = s.take(ctx, charges); err != nil {
			return d, err
		}
	}
	if d.Allowed {
		if over := overQuota(charges, d.Decisions); over >= 0 {
			d.Allowed, d.Binding = false, over
			if err = s.giveBack(ctx, charges, d.Decisions); err == nil {
				err = s.explain(ctx, charges, d.Decisions)
			}
			return d, err
		}
	}
	if overdraws && d.Allowed {
		d.Decisions, err = s.overdraw(ctx, charges, d.Decisions)
	}
	return d, err
}

// overQuota returns the last charge with Quota if all such charges are beyond their limits, else -1.
func overQuota(charges []GateCharge, decisions []client.Decision) int {
	over := -1
	for i, c := range charges {
		switch {
		case !c.Quota:
		case c.Overdraw && c.Cost > 0, !decisions[i].Shadowed && (c.Cost > 0 || decisions[i].Remaining > 0):
			return -1
		default:
			over = i
		}
	}
	return over
}

// giveBack returns what a request has taken that its quotas deny. They themselves have taken nothing.
func (s *Service) giveBack(ctx context.Context, charges []GateCharge, decisions []client.Decision) error {
	own := s.shardOf(keyOf(charges)).ownConnections
	err := own.Acquire(ctx, 1)
	if err != nil {
		return err
	}
	defer own.Release(1)
	for i, c := range charges {
		if c.Cost > 0 && !c.Overdraw && !c.Quota && !decisions[i].Shadowed {
			if decisions[i], err = s.shardOf(c.Key).Refund(ctx, c.Policy, c.Key, c.Cost); err != nil {
				return err
			}
		}
	}
	return nil
}

// take takes the cost of all charges that can be denied, and reads the buckets of the rest.
func (s *Service) take(ctx context.Context, charges []GateCharge) (client.JointDecision, error) {
	if len(charges) == 1 {
		d, err := s.shardOf(charges[0].Key).Acquire(ctx, charges[0].Policy, charges[0].Key, client.Cost(charges[0].Cost))
		return client.JointDecision{Decision: d, Decisions: []client.Decision{d}}, err
	}
	return s.acquireAll(ctx, withCost(charges, func(c GateCharge) int64 {
		if c.Overdraw {
			return 0
		}
		return c.Cost
	}))
}

// overdraw takes the cost of the charges that cannot be denied, and keeps the decisions of the rest.
func (s *Service) overdraw(ctx context.Context, charges []GateCharge, decisions []client.Decision) ([]client.Decision, error) {
	own := s.shardOf(keyOf(charges)).ownConnections
	err := own.Acquire(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer own.Release(1)
	if decisions == nil {
		decisions = make([]client.Decision, len(charges))
	}
	for i, c := range charges {
		if c.Overdraw && c.Cost > 0 {
			if decisions[i], err = s.shardOf(c.Key).Charge(ctx, c.Policy, c.Key, min(c.Cost, mostOverdrawn)); err != nil {
				return nil, err
			}
		}
	}
	return decisions, nil
}

// explain replaces the decision of each bucket that holds less than its charges cost together by a denial with retry_after.
func (s *Service) explain(ctx context.Context, charges []GateCharge, seen []client.Decision) error {
	if len(charges) == 0 {
		return nil
	}
	own := s.shardOf(keyOf(charges)).ownConnections
	err := own.Acquire(ctx, 1)
	if err != nil {
		return err
	}
	defer own.Release(1)
	type bucket struct{ policy, key string }
	costs := make(map[bucket]int64, len(charges))
	for _, c := range charges {
		if b := (bucket{c.Policy, c.Key}); !c.Overdraw {
			costs[b] += min(c.Cost, math.MaxInt64-costs[b])
		}
	}
	for i, c := range charges {
		cost := max(1, costs[bucket{c.Policy, c.Key}])
		if c.Shadow && !c.Quota || c.Overdraw && c.Cost > 0 || seen[i].Remaining >= cost {
			continue
		}
		d, err := s.shardOf(c.Key).Peek(ctx, c.Policy, c.Key, client.Cost(cost))
		if err != nil {
			return err
		}
		d.Allowed = false // the bucket may have refilled since it was read
		seen[i] = d
	}
	return nil
}

// RefundAll gives the cost of the charges back, one bucket after the other. An error leaves the refunds before it in place.
func (s *Service) RefundAll(ctx context.Context, charges []GateCharge) (decisions []client.Decision, err error) {
	call, begin := Call{Operation: Refund}, time.Now()
	var d client.Decision
	call.Err = s.shardOf(keyOf(charges)).call(ctx, false, func(ctx context.Context) (err error) {
		for _, c := range charges {
			call.Policy = c.Policy
			if d, err = s.shardOf(c.Key).Refund(ctx, c.Policy, c.Key, c.Cost); err != nil {
				return err
			}
			decisions = append(decisions, d)
		}
		return nil
	})
	return decisions, s.observeCall(call, begin, d)
}

// keyOf returns the key whose shard limits the call. acquireAll refuses keys of several shards; refunds and overdraws alone do not.
func keyOf(charges []GateCharge) string {
	if len(charges) == 0 {
		return ""
	}
	return charges[0].Key
}

func withCost(charges []GateCharge, cost func(GateCharge) int64) []client.Charge {
	list := make([]client.Charge, len(charges))
	for i, c := range charges {
		list[i] = client.Charge{Policy: c.Policy, Key: c.Key, Cost: client.Cost(cost(c))}
	}
	return list
}
