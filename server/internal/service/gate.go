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
func (s *Service) Admit(ctx context.Context, charges []GateCharge, blocked bool) (client.JointDecision, error) {
	call, begin, g := Call{Operation: Gate}, time.Now(), s.newGate(charges)
	call.Err = g.shard.call(ctx, func(ctx context.Context) error { return g.admit(ctx, blocked) })
	if call.Err != nil {
		return client.JointDecision{}, s.observeCall(call, begin, client.Decision{})
	}
	whole := client.Decision{Allowed: g.Allowed}
	for i, d := range g.Decisions {
		if g.Allowed && d.Shadowed && !whole.Shadowed {
			whole.Shadowed, g.Binding = true, i // metrics name the policy in shadow
		}
		whole.Estimated = whole.Estimated || d.Estimated
	}
	if len(charges) > 0 {
		call.Policy = charges[g.Binding].Policy
	}
	return g.JointDecision, s.observeCall(call, begin, whole)
}

// RefundAll gives the cost of the charges back, one bucket after the other. An error leaves the refunds before it in place.
func (s *Service) RefundAll(ctx context.Context, charges []GateCharge) ([]client.Decision, error) {
	call, begin, g := Call{Operation: Refund}, time.Now(), s.newGate(charges)
	call.Err = g.shard.call(ctx, func(ctx context.Context) error {
		return g.each(ctx, Refund, func(_ int, c GateCharge) int64 { return c.Cost })
	})
	return g.Decisions, s.observeCall(call, begin, client.Decision{Allowed: true})
}

// Unmatched observes a request that no rule of the gate matches.
func (s *Service) Unmatched(domain, keys string) {
	s.observe(Call{Operation: Gate, Result: NoRule, Domain: domain, Keys: keys})
}

type gate struct {
	*Service
	charges []GateCharge
	shard   *shard // of the first charge. ask refuses charges of others; refunds and overdraws alone may have several

	client.JointDecision // so far
}

func (s *Service) newGate(charges []GateCharge) *gate {
	g := &gate{Service: s, charges: charges, shard: s.shards[0]}
	if len(charges) > 0 {
		g.shard = s.shardOf(charges[0].Key)
	}
	g.Decisions = make([]client.Decision, len(charges))
	return g
}

func (g *gate) admit(ctx context.Context, blocked bool) error {
	reads := slices.ContainsFunc(g.charges, func(c GateCharge) bool { return c.Cost == 0 })
	if reads || blocked && len(g.charges) > 0 {
		if err := g.ask(ctx, false); err != nil {
			return err
		}
		g.Binding = 0
		for i, c := range g.charges {
			if c.Cost == 0 && !c.Shadow && g.Decisions[i].Remaining < 1 {
				blocked, g.Binding = true, i
			}
		}
	}
	g.Allowed = !blocked
	if g.Allowed && slices.ContainsFunc(g.charges, GateCharge.takes) {
		if err := g.ask(ctx, true); err != nil || !g.Allowed {
			return err
		}
	}
	if over := g.overQuota(); g.Allowed && over >= 0 {
		g.Allowed, g.Binding = false, over
		err := g.each(ctx, Refund, func(i int, c GateCharge) int64 {
			if !c.takes() || c.Quota || g.Decisions[i].Shadowed { // has taken nothing
				return none
			}
			return c.Cost
		})
		if err != nil {
			return err
		}
	}
	if !g.Allowed {
		return g.explain(ctx)
	}
	return g.each(ctx, Charge, func(_ int, c GateCharge) int64 {
		if !c.overdraws() {
			return none
		}
		return min(c.Cost, mostOverdrawn)
	})
}

// mostOverdrawn is the largest cost that the database charges at once.
const mostOverdrawn = 9_000_000_000_000

// ask asks for all charges at once, and takes the cost of those that can be denied, or only reads the buckets.
func (g *gate) ask(ctx context.Context, takes bool) error {
	r := Request{List: make([]Request, len(g.charges))}
	for i, c := range g.charges {
		r.List[i] = Request{Policy: c.Policy, Key: c.Key, Cost: new(int64)}
		if takes && c.takes() {
			*r.List[i].Cost = c.Cost
		}
	}
	o, isAlone := AcquireAll, takes && len(r.List) == 1
	if isAlone {
		o, r = Acquire, r.List[0]
	}
	a, err := g.shard.ask(ctx, o, r)
	if isAlone {
		a.Decisions = []client.Decision{a.Decision}
	}
	g.JointDecision = a.JointDecision
	return err
}

// overQuota returns the last charge with Quota if all such charges are beyond their limits, else -1.
func (g *gate) overQuota() int {
	over := -1
	for i, c := range g.charges {
		switch d := g.Decisions[i]; {
		case !c.Quota:
		case c.overdraws(), !d.Shadowed && (c.Cost > 0 || d.Remaining > 0):
			return -1
		default:
			over = i
		}
	}
	return over
}

// explain replaces the decision of each bucket that holds less than its charges cost together by a denial with retry_after.
func (g *gate) explain(ctx context.Context) error {
	costs := make(map[[2]string]int64, len(g.charges)) // of buckets
	for _, c := range g.charges {
		if b := [2]string{c.Policy, c.Key}; !c.Overdraw {
			costs[b] += min(c.Cost, math.MaxInt64-costs[b])
		}
	}
	return g.each(ctx, Peek, func(i int, c GateCharge) int64 {
		cost := max(1, costs[[2]string{c.Policy, c.Key}])
		if c.Shadow && !c.Quota || c.overdraws() || g.Decisions[i].Remaining >= cost {
			return none
		}
		return cost
	})
}

// none is the cost of a charge that each leaves out.
const none = -1

// each asks about one charge after the other, at the cost of this step, and replaces their decisions.
func (g *gate) each(ctx context.Context, o Operation, costOf func(int, GateCharge) int64) error {
	for i, c := range g.charges {
		cost := costOf(i, c)
		if cost == none {
			continue
		}
		a, err := g.shardOf(c.Key).ask(ctx, o, Request{Policy: c.Policy, Key: c.Key, Cost: &cost})
		if err != nil {
			return err
		}
		a.Allowed = a.Allowed && o != Peek // the bucket may have refilled since it was read
		g.Decisions[i] = a.Decision
	}
	return nil
}
