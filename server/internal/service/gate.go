package service

import (
	"context"
	"math"
	"slices"
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

func (c GateCharge) takes() bool     { return c.Cost > 0 && !c.Overdraw }
func (c GateCharge) overdraws() bool { return c.Cost > 0 && c.Overdraw }

// Admit takes the cost of all charges or of none. Blocked denies the request, with the decisions of the buckets as they are. Of
// the whole, only Allowed and Binding count; a denial's decisions are each about its own bucket.
//
// Buckets of cost 0 are read before tokens are taken elsewhere. Charges that overdraw come last, since they cannot be denied: an
// error then leaves tokens taken, but never allows a request that has not paid.
func (s *Service) Admit(ctx context.Context, charges []GateCharge, blocked bool) (d client.JointDecision, err error) {
	call, begin := Call{Operation: Gate}, time.Now()
	g := gate{s, s.shardOf(keyOf(charges)), charges}
	call.Err = g.shard.call(ctx, true, func(ctx context.Context) (err error) {
		d, err = g.admit(ctx, blocked)
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

// RefundAll gives the cost of the charges back, one bucket after the other. An error leaves the refunds before it in place.
func (s *Service) RefundAll(ctx context.Context, charges []GateCharge) ([]client.Decision, error) {
	call, begin, decisions := Call{Operation: Refund}, time.Now(), make([]client.Decision, len(charges))
	g := gate{s, s.shardOf(keyOf(charges)), charges}
	call.Err = g.shard.call(ctx, true, func(ctx context.Context) error {
		return g.each(ctx, decisions, func(_ int, c GateCharge) (Operation, int64) { return Refund, c.Cost })
	})
	return decisions, s.observeCall(call, begin, client.Decision{Allowed: true})
}

// Unmatched observes a request that no rule of the gate matches.
func (s *Service) Unmatched(domain, keys string) {
	s.observe(Call{Operation: Gate, Result: NoRule, Domain: domain, Keys: keys})
}

// keyOf returns the key whose shard limits the call. Charges that are asked together must be of this shard; others need not.
func keyOf(charges []GateCharge) string {
	if len(charges) == 0 {
		return ""
	}
	return charges[0].Key
}

// A gate decides one request.
type gate struct {
	*Service
	shard   *shard
	charges []GateCharge
}

func (g gate) admit(ctx context.Context, blocked bool) (d client.JointDecision, err error) {
	d.Decisions = make([]client.Decision, len(g.charges))
	if len(g.charges) == 0 {
		d.Allowed = !blocked
		return d, nil
	}
	if blocked || slices.ContainsFunc(g.charges, func(c GateCharge) bool { return c.Cost == 0 }) {
		seen, err := g.ask(ctx, false)
		if err != nil {
			return d, err
		}
		d.Decisions = seen.Decisions
		for i, c := range g.charges {
			if c.Cost == 0 && !c.Shadow && d.Decisions[i].Remaining < 1 {
				blocked, d.Binding = true, i
			}
		}
	}
	if blocked {
		return d, g.explain(ctx, d.Decisions)
	}
	d.Allowed = true
	if slices.ContainsFunc(g.charges, GateCharge.takes) {
		if d, err = g.ask(ctx, true); err != nil || !d.Allowed {
			return d, err
		}
	}
	if over := overQuota(g.charges, d.Decisions); over >= 0 {
		d.Allowed, d.Binding = false, over
		err = g.each(ctx, d.Decisions, func(i int, c GateCharge) (Operation, int64) {
			if !c.takes() || c.Quota || d.Decisions[i].Shadowed { // has taken nothing
				return "", 0
			}
			return Refund, c.Cost
		})
		if err == nil {
			err = g.explain(ctx, d.Decisions)
		}
	} else if slices.ContainsFunc(g.charges, GateCharge.overdraws) {
		err = g.each(ctx, d.Decisions, func(_ int, c GateCharge) (Operation, int64) {
			if !c.overdraws() {
				return "", 0
			}
			return Charge, min(c.Cost, mostOverdrawn)
		})
	}
	return d, err
}

// mostOverdrawn is the largest cost that the database charges at once.
const mostOverdrawn = 9_000_000_000_000

// ask asks for all charges at once, and takes the cost of those that can be denied, or only reads the buckets.
func (g gate) ask(ctx context.Context, takes bool) (client.JointDecision, error) {
	r := Request{List: make([]Request, len(g.charges))}
	for i, c := range g.charges {
		r.List[i] = Request{Policy: c.Policy, Key: c.Key, Cost: new(int64)}
		if takes && c.takes() {
			*r.List[i].Cost = c.Cost
		}
	}
	if takes && len(g.charges) == 1 {
		a, err := g.shard.ask(ctx, Acquire, r.List[0])
		a.Decisions = []client.Decision{a.Decision}
		return a.JointDecision, err
	}
	a, err := g.shard.ask(ctx, AcquireAll, r)
	return a.JointDecision, err
}

// overQuota returns the last charge with Quota if all such charges are beyond their limits, else -1.
func overQuota(charges []GateCharge, decisions []client.Decision) int {
	over := -1
	for i, c := range charges {
		switch {
		case !c.Quota:
		case c.overdraws(), !decisions[i].Shadowed && (c.Cost > 0 || decisions[i].Remaining > 0):
			return -1
		default:
			over = i
		}
	}
	return over
}

// explain replaces the decision of each bucket that holds less than its charges cost together by a denial with retry_after.
func (g gate) explain(ctx context.Context, seen []client.Decision) error {
	costs := make(map[[2]string]int64, len(g.charges)) // of buckets
	for _, c := range g.charges {
		if b := [2]string{c.Policy, c.Key}; !c.Overdraw {
			costs[b] += min(c.Cost, math.MaxInt64-costs[b])
		}
	}
	return g.each(ctx, seen, func(i int, c GateCharge) (Operation, int64) {
		cost := max(1, costs[[2]string{c.Policy, c.Key}])
		if c.Shadow && !c.Quota || c.overdraws() || seen[i].Remaining >= cost {
			return "", 0
		}
		return Peek, cost
	})
}

// each asks about the charges for which step has an operation, on a connection of its own, and replaces their decisions.
func (g gate) each(ctx context.Context, decisions []client.Decision, step func(int, GateCharge) (Operation, int64)) error {
	if err := g.shard.ownConnections.Acquire(ctx, 1); err != nil {
		return err
	}
	defer g.shard.ownConnections.Release(1)
	for i, c := range g.charges {
		if o, cost := step(i, c); o != "" {
			a, err := g.shardOf(c.Key).ask(ctx, o, Request{Policy: c.Policy, Key: c.Key, Cost: &cost})
			if err != nil {
				return err
			}
			a.Allowed = a.Allowed && o != Peek // the bucket may have refilled since it was read
			decisions[i] = a.Decision
		}
	}
	return nil
}
