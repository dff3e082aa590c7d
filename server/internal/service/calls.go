package service

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// DefaultPolicy is the policy of a request without one.
const DefaultPolicy = "default"

// A Request is about one bucket. The call decides which fields are obligatory.
type Request struct {
	Policy         string // DefaultPolicy if empty
	Key            string
	Cost           *int64
	IdempotencyKey *string
	Holder         string // of slots
	AtLeast        *int64 // of AcquireUpTo, which takes at most Cost
	Time           *Time  // the longest wait of Reserve; the length of a Pause
}

// A Time is one that a caller gives. One that the database accepts nowhere has a Text, as the caller wrote it.
type Time struct {
	time.Duration
	Text string
}

// MaxTime bounds the times that have no Text, in seconds.
const MaxTime = 1e9

// checkTime returns the error of a Time that is not sent to the database.
func (r Request) checkTime(argument string) error {
	switch {
	case r.Time == nil:
		return missing(argument)
	case r.Time.Text != "":
		return Invalid("invalid "+argument, fmt.Sprintf("%s is %s.", argument, r.Time.Text), "Give at most 365 days.")
	}
	return nil
}

// A JointRequest is about several buckets. Its charges have no idempotency keys of their own.
type JointRequest struct {
	Charges        []Request
	IdempotencyKey *string
}

// one answers a call about one bucket.
func (s *Service) one(ctx context.Context, o Operation, r Request, shares bool, ask func(ctx context.Context, policy string) (client.Decision, error)) (d client.Decision, err error) {
	policy := cmp.Or(r.Policy, DefaultPolicy)
	err = s.do(ctx, o, r.Key, shares, func(ctx context.Context) (string, client.Decision, error) {
		d, err = ask(ctx, policy)
		return policy, d, err
	})
	return d, err
}

// Acquire takes Cost tokens, or 1, from one bucket if it holds enough.
func (s *Service) Acquire(ctx context.Context, r Request) (client.Decision, error) {
	return s.one(ctx, Acquire, r, r.canShare(), func(ctx context.Context, policy string) (client.Decision, error) {
		return s.databases.On(r.Key).Acquire(ctx, policy, r.Key, r.options()...)
	})
}

// options are Cost and IdempotencyKey, where they are given.
func (r Request) options() []client.CallOption {
	opts := make([]client.CallOption, 0, 2)
	if r.Cost != nil {
		opts = append(opts, client.Cost(*r.Cost))
	}
	if r.IdempotencyKey != nil {
		opts = append(opts, client.IdempotencyKey(*r.IdempotencyKey))
	}
	return opts
}

// AcquireAll takes tokens from several buckets if each holds enough: 1 of each, unless its Cost is given.
func (s *Service) AcquireAll(ctx context.Context, r JointRequest) (d client.JointDecision, err error) {
	charges := make([]client.Charge, len(r.Charges))
	shares := Request{IdempotencyKey: r.IdempotencyKey}.canShare()
	var key string // of a request that is answered, all charges are of its shard
	for i, c := range r.Charges {
		key = c.Key
		charges[i] = client.Charge{Policy: cmp.Or(c.Policy, DefaultPolicy), Key: c.Key}
		if c.Cost != nil {
			charges[i].Cost = client.Cost(*c.Cost)
		}
		shares = shares && c.canShare()
	}
	opts := Request{IdempotencyKey: r.IdempotencyKey}.options()
	err = s.do(ctx, AcquireAll, key, shares, func(ctx context.Context) (string, client.Decision, error) {
		if len(charges) == 0 {
			return "", client.Decision{}, missing("charges")
		}
		if d, err = s.databases.AcquireAll(ctx, charges, opts...); err != nil {
			return "", client.Decision{}, err
		}
		return charges[d.Binding].Policy, d.Decision, nil
	})
	return d, err
}

// Charge takes Cost tokens whatever the bucket holds.
func (s *Service) Charge(ctx context.Context, r Request) (client.Decision, error) {
	return s.one(ctx, Charge, r, false, func(ctx context.Context, policy string) (client.Decision, error) {
		if r.Cost == nil {
			return client.Decision{}, missing("cost")
		}
		return s.databases.On(r.Key).Charge(ctx, policy, r.Key, *r.Cost, Request{IdempotencyKey: r.IdempotencyKey}.options()...)
	})
}

// AcquireUpTo takes as many tokens as the bucket holds, between AtLeast, or 1, and Cost.
func (s *Service) AcquireUpTo(ctx context.Context, r Request) (d client.PartialDecision, err error) {
	_, err = s.one(ctx, AcquireUpTo, r, false, func(ctx context.Context, policy string) (_ client.Decision, err error) {
		if r.Cost == nil {
			return client.Decision{}, missing("at_most")
		}
		opts := Request{IdempotencyKey: r.IdempotencyKey}.options()
		if r.AtLeast != nil {
			opts = append(opts, client.AtLeast(*r.AtLeast))
		}
		d, err = s.databases.On(r.Key).AcquireUpTo(ctx, policy, r.Key, *r.Cost, opts...)
		return d.Decision, err
	})
	return d, err
}

// Reserve takes Cost tokens, or 1, if the bucket will have them within Time.
func (s *Service) Reserve(ctx context.Context, r Request) (d client.Reservation, err error) {
	_, err = s.one(ctx, Reserve, r, false, func(ctx context.Context, policy string) (_ client.Decision, err error) {
		if err := r.checkTime("max_wait"); err != nil {
			return client.Decision{}, err
		}
		if r.Time.Duration%time.Microsecond != 0 {
			return client.Decision{}, Invalid("invalid max_wait", fmt.Sprintf("max_wait is %v.", r.Time.Duration), "Wait for whole microseconds, up to 365 days.")
		}
		d, err = s.databases.On(r.Key).Reserve(ctx, policy, r.Key, r.Time.Duration, r.options()...)
		return client.Decision{Allowed: d.Allowed, Replayed: d.Replayed, Shadowed: d.Shadowed}, err
	})
	return d, err
}

// Settle replaces the cost of the grant that was made under IdempotencyKey by Cost.
func (s *Service) Settle(ctx context.Context, r Request) (client.Decision, error) {
	return s.one(ctx, Settle, r, false, func(ctx context.Context, policy string) (client.Decision, error) {
		switch {
		case r.IdempotencyKey == nil:
			return client.Decision{}, missing("idempotency_key")
		case r.Cost == nil:
			return client.Decision{}, missing("cost")
		}
		return s.databases.On(r.Key).Settle(ctx, policy, r.Key, *r.IdempotencyKey, *r.Cost)
	})
}

// Peek returns the decision that Acquire would, and takes nothing.
func (s *Service) Peek(ctx context.Context, r Request) (client.Decision, error) {
	return s.one(ctx, Peek, r, false, func(ctx context.Context, policy string) (client.Decision, error) {
		return s.databases.On(r.Key).Peek(ctx, policy, r.Key, Request{Cost: r.Cost}.options()...)
	})
}

// Refund gives Cost tokens back.
func (s *Service) Refund(ctx context.Context, r Request) (client.Decision, error) {
	return s.one(ctx, Refund, r, false, func(ctx context.Context, policy string) (client.Decision, error) {
		if r.Cost == nil {
			return client.Decision{}, missing("amount")
		}
		return s.databases.On(r.Key).Refund(ctx, policy, r.Key, *r.Cost)
	})
}

// Pause stops the bucket for Time.
func (s *Service) Pause(ctx context.Context, r Request) (client.Decision, error) {
	return s.one(ctx, Pause, r, false, func(ctx context.Context, policy string) (client.Decision, error) {
		if err := r.checkTime("pause_for"); err != nil {
			return client.Decision{}, err
		}
		return s.databases.On(r.Key).Pause(ctx, policy, r.Key, r.Time.Duration)
	})
}

// Hold lends Cost slots, or 1, to Holder if they are free. The server does not renew the lease: it cannot know whether the holder
// still works.
func (s *Service) Hold(ctx context.Context, r Request) (d client.HoldDecision, err error) {
	_, err = s.one(ctx, Hold, r, false, func(ctx context.Context, policy string) (_ client.Decision, err error) {
		d, err = s.databases.On(r.Key).HoldAs(ctx, policy, r.Key, r.Holder, Request{Cost: r.Cost}.options()...)
		return client.Decision{Allowed: d.Allowed, Replayed: d.Renewed, Shadowed: d.Shadowed}, err
	})
	return d, err
}

// Renew begins the lease of Holder anew, and returns how long it lasts: 0 if it does not hold.
func (s *Service) Renew(ctx context.Context, r Request) (heldFor time.Duration, err error) {
	_, err = s.one(ctx, Renew, r, false, func(ctx context.Context, policy string) (_ client.Decision, err error) {
		heldFor, err = s.databases.On(r.Key).Renew(ctx, policy, r.Key, r.Holder)
		return client.Decision{Allowed: heldFor > 0}, err
	})
	return heldFor, err
}

// Release frees the slots of Holder, and reports whether it held until now.
func (s *Service) Release(ctx context.Context, r Request) (held bool, err error) {
	_, err = s.one(ctx, Release, r, false, func(ctx context.Context, policy string) (_ client.Decision, err error) {
		held, err = s.databases.On(r.Key).Release(ctx, policy, r.Key, r.Holder)
		return client.Decision{Allowed: held}, err
	})
	return held, err
}

// maxShared is the longest text, in bytes, that the Combiner puts into a shared call.
const maxShared = 512

// canShare reports whether the request may travel in a call with others. A request with a text that is too long gets a connection
// of its own, and the error of the database.
func (r Request) canShare() bool {
	return len(r.Policy) <= maxShared && len(r.Key) <= maxShared && (r.IdempotencyKey == nil || len(*r.IdempotencyKey) <= maxShared)
}

// A Call has been answered.
type Call struct {
	Operation Operation
	// Policy may be unknown. Of several charges it is the policy of the one that decided. It is empty without a charge.
	Policy   string
	Result   client.Result
	Leased   bool   // granted from tokens that were taken before
	Err      *Error // nil if there was a decision
	Duration time.Duration

	// Domain and Keys are those of a request of Envoy's that no rule matches.
	Domain, Keys string
}

// NoRule is the Result of a request of Envoy's that no rule matches: it is allowed, without a limit.
const NoRule client.Result = "no_rule"

// An Operation is the kind of a call.
type Operation string

// The operations.
const (
	Acquire         Operation = "acquire"
	AcquireAll      Operation = "acquire_all"
	AcquireMany     Operation = "acquire_many" // each of its requests is a Call
	AcquireUpTo     Operation = "acquire_up_to"
	AcquireUpToMany Operation = "acquire_up_to_many" // each of its requests is a Call
	Reserve         Operation = "reserve"
	Charge          Operation = "charge"
	Settle          Operation = "settle"
	Peek            Operation = "peek"
	PeekMany        Operation = "peek_many" // each of its requests is a Call
	Refund          Operation = "refund"
	Pause           Operation = "pause"
	Hold            Operation = "hold"
	Renew           Operation = "renew"
	Release         Operation = "release"
	Gate            Operation = "gate" // Envoy's ShouldRateLimit
)

// Takes reports whether the call asks for tokens or slots.
func (o Operation) Takes() bool {
	switch o {
	case Settle, Peek, PeekMany, Refund, Pause, Renew, Release:
		return false
	}
	return true
}

func resultOf(d client.Decision, err *Error) client.Result {
	answer := client.Answer{Decision: d}
	if err != nil { // else it would be an error that is a nil pointer
		answer.Err = err
	}
	return answer.Result()
}
