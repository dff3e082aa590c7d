package service

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// Acquire takes Cost tokens, or 1, from one bucket if it holds enough.
func (s *Service) Acquire(ctx context.Context, r Request) (client.Decision, error) {
	return s.callBucket(ctx, Acquire, r, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Acquire(ctx, r.Policy, r.Key, r.options()...)
	})
}

// AcquireAll takes tokens from several buckets if each holds enough: 1 of each, unless its Cost is given.
func (s *Service) AcquireAll(ctx context.Context, r JointRequest) (d client.JointDecision, err error) {
	call, begin := Call{Operation: AcquireAll}, time.Now()
	charges := make([]client.Charge, len(r.Charges))
	shares := Request{IdempotencyKey: r.IdempotencyKey}.canShare()
	for i, c := range r.Charges {
		charges[i] = c.charge()
		shares = shares && c.canShare()
	}
	if len(charges) == 0 {
		call.Err = missing("charges")
	} else {
		shard := s.shardOf(charges[0].Key) // a request about several shards is refused
		call.Err = s.limitCall(ctx, shard, shares, func(ctx context.Context) (err error) {
			d, err = s.databases.AcquireAll(ctx, charges, named(r.IdempotencyKey)...)
			return err
		})
	}
	if call.Err == nil {
		call.Policy = charges[d.Binding].Policy
	}
	return d, s.observeCall(call, begin, d.Decision)
}

// Charge takes Cost tokens whatever the bucket holds.
func (s *Service) Charge(ctx context.Context, r Request) (client.Decision, error) {
	return s.callBucket(ctx, Charge, r, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Charge(ctx, r.Policy, r.Key, *r.Cost, named(r.IdempotencyKey)...)
	})
}

// AcquireUpTo takes as many tokens as the bucket holds, between AtLeast, or 1, and Cost.
func (s *Service) AcquireUpTo(ctx context.Context, r Request) (d client.PartialDecision, err error) {
	_, err = s.callBucket(ctx, AcquireUpTo, r, func(ctx context.Context, on Limiter, r Request) (_ client.Decision, err error) {
		opts := named(r.IdempotencyKey)
		if r.AtLeast != nil {
			opts = append(opts, client.AtLeast(*r.AtLeast))
		}
		d, err = on.AcquireUpTo(ctx, r.Policy, r.Key, *r.Cost, opts...)
		return d.Decision, err
	})
	return d, err
}

// Reserve takes Cost tokens, or 1, if the bucket will have them within Time.
func (s *Service) Reserve(ctx context.Context, r Request) (d client.Reservation, err error) {
	_, err = s.callBucket(ctx, Reserve, r, func(ctx context.Context, on Limiter, r Request) (_ client.Decision, err error) {
		d, err = on.Reserve(ctx, r.Policy, r.Key, r.Time.Duration, r.options()...)
		return client.Decision{Allowed: d.Allowed, Replayed: d.Replayed, Shadowed: d.Shadowed}, err
	})
	return d, err
}

// Settle replaces the cost of the grant that was made under IdempotencyKey by Cost.
func (s *Service) Settle(ctx context.Context, r Request) (client.Decision, error) {
	return s.callBucket(ctx, Settle, r, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Settle(ctx, r.Policy, r.Key, *r.IdempotencyKey, *r.Cost)
	})
}

// Peek returns the decision that Acquire would, and takes nothing.
func (s *Service) Peek(ctx context.Context, r Request) (client.Decision, error) {
	return s.callBucket(ctx, Peek, r, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Peek(ctx, r.Policy, r.Key, r.options()...)
	})
}

// Refund gives Cost tokens back.
func (s *Service) Refund(ctx context.Context, r Request) (client.Decision, error) {
	return s.callBucket(ctx, Refund, r, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Refund(ctx, r.Policy, r.Key, *r.Cost)
	})
}

// Pause stops the bucket for Time.
func (s *Service) Pause(ctx context.Context, r Request) (client.Decision, error) {
	return s.callBucket(ctx, Pause, r, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Pause(ctx, r.Policy, r.Key, r.Time.Duration)
	})
}

// Hold lends Cost slots, or 1, to Holder if they are free. The server does not renew the lease: it cannot know whether the holder
// still works.
func (s *Service) Hold(ctx context.Context, r Request) (d client.HoldDecision, err error) {
	_, err = s.callBucket(ctx, Hold, r, func(ctx context.Context, on Limiter, r Request) (_ client.Decision, err error) {
		d, err = on.HoldAs(ctx, r.Policy, r.Key, r.Holder, r.options()...)
		return client.Decision{Allowed: d.Allowed, Replayed: d.Renewed, Shadowed: d.Shadowed}, err
	})
	return d, err
}

// Renew begins the lease of Holder anew, and returns how long it lasts: 0 if it does not hold.
func (s *Service) Renew(ctx context.Context, r Request) (heldFor time.Duration, err error) {
	_, err = s.callBucket(ctx, Renew, r, func(ctx context.Context, on Limiter, r Request) (_ client.Decision, err error) {
		heldFor, err = on.Renew(ctx, r.Policy, r.Key, r.Holder)
		return client.Decision{Allowed: heldFor > 0}, err
	})
	return heldFor, err
}

// Release frees the slots of Holder, and reports whether it held until now.
func (s *Service) Release(ctx context.Context, r Request) (held bool, err error) {
	_, err = s.callBucket(ctx, Release, r, func(ctx context.Context, on Limiter, r Request) (_ client.Decision, err error) {
		held, err = on.Release(ctx, r.Policy, r.Key, r.Holder)
		return client.Decision{Allowed: held}, err
	})
	return held, err
}
