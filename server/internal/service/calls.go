package service

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// DefaultPolicy is that of a request which names none.
const DefaultPolicy = "default"

// A Request is about one bucket. Which of its fields have to be given depends on the call.
type Request struct {
	Policy         string // DefaultPolicy if empty
	Key            string
	Cost           *int64
	IdempotencyKey *string
}

func (r Request) policy() string {
	if r.Policy == "" {
		return DefaultPolicy
	}
	return r.Policy
}

// A JointRequest is about several buckets. Its charges have no idempotency keys of their own.
type JointRequest struct {
	Charges        []Request
	IdempotencyKey *string
}

// Acquire takes tokens from one bucket if it holds enough: 1, unless Cost is given.
func (s *Service) Acquire(ctx context.Context, r Request) (d client.Decision, err error) {
	policy := r.policy()
	opts := make([]client.AcquireOption, 0, 2)
	if r.Cost != nil {
		opts = append(opts, client.Cost(*r.Cost))
	}
	if r.IdempotencyKey != nil {
		opts = append(opts, client.IdempotencyKey(*r.IdempotencyKey))
	}
	err = s.do(ctx, Acquire, r.Key, r.canShare(), func(ctx context.Context) (string, client.Decision, error) {
		d, err = s.limiter.Acquire(ctx, policy, r.Key, opts...)
		return policy, d, err
	})
	return d, err
}

// AcquireAll takes tokens from several buckets if each holds enough: 1 of each, unless its Cost is given.
func (s *Service) AcquireAll(ctx context.Context, r JointRequest) (d client.JointDecision, err error) {
	charges := make([]client.Charge, len(r.Charges))
	shares := Request{IdempotencyKey: r.IdempotencyKey}.canShare()
	var key string // of a request that is answered, all charges are of its shard
	for i, c := range r.Charges {
		key = c.Key
		charges[i] = client.Charge{Policy: c.policy(), Key: c.Key}
		if c.Cost != nil {
			charges[i].Cost = client.Cost(*c.Cost)
		}
		shares = shares && c.canShare()
	}
	var opts []client.AcquireAllOption
	if r.IdempotencyKey != nil {
		opts = append(opts, client.IdempotencyKey(*r.IdempotencyKey))
	}
	err = s.do(ctx, AcquireAll, key, shares, func(ctx context.Context) (string, client.Decision, error) {
		if len(charges) == 0 {
			return "", client.Decision{}, missing("charges")
		}
		if d, err = s.limiter.AcquireAll(ctx, charges, opts...); err != nil {
			return "", client.Decision{}, err
		}
		return charges[d.Binding].Policy, d.Decision, nil
	})
	return d, err
}

// Charge takes Cost tokens whatever the bucket holds.
func (s *Service) Charge(ctx context.Context, r Request) (d client.Decision, err error) {
	policy := r.policy()
	err = s.do(ctx, Charge, r.Key, false, func(ctx context.Context) (string, client.Decision, error) {
		if r.Cost == nil {
			return policy, d, missing("cost")
		}
		var opts []client.ChargeOption
		if r.IdempotencyKey != nil {
			opts = append(opts, client.IdempotencyKey(*r.IdempotencyKey))
		}
		d, err = s.limiter.Charge(ctx, policy, r.Key, *r.Cost, opts...)
		return policy, d, err
	})
	return d, err
}

// Settle replaces the cost of the grant that was made under IdempotencyKey by Cost.
func (s *Service) Settle(ctx context.Context, r Request) (d client.Decision, err error) {
	policy := r.policy()
	err = s.do(ctx, Settle, r.Key, false, func(ctx context.Context) (string, client.Decision, error) {
		switch {
		case r.IdempotencyKey == nil:
			return policy, d, missing("idempotency_key")
		case r.Cost == nil:
			return policy, d, missing("cost")
		}
		d, err = s.limiter.Settle(ctx, policy, r.Key, *r.IdempotencyKey, *r.Cost)
		return policy, d, err
	})
	return d, err
}

// Peek says what Acquire would answer, and takes nothing.
func (s *Service) Peek(ctx context.Context, r Request) (d client.Decision, err error) {
	policy := r.policy()
	var opts []client.PeekOption
	if r.Cost != nil {
		opts = append(opts, client.Cost(*r.Cost))
	}
	err = s.do(ctx, Peek, r.Key, false, func(ctx context.Context) (string, client.Decision, error) {
		d, err = s.limiter.Peek(ctx, policy, r.Key, opts...)
		return policy, d, err
	})
	return d, err
}

// Refund gives Cost tokens back.
func (s *Service) Refund(ctx context.Context, r Request) (d client.Decision, err error) {
	policy := r.policy()
	err = s.do(ctx, Refund, r.Key, false, func(ctx context.Context) (string, client.Decision, error) {
		if r.Cost == nil {
			return policy, d, missing("amount")
		}
		d, err = s.limiter.Refund(ctx, policy, r.Key, *r.Cost)
		return policy, d, err
	})
	return d, err
}

// maxShared is the longest text that the Combiner lets into a call that others share.
const maxShared = 512

// canShare reports whether others may share the call. One whose text is too long is made on a connection of its own, and
// the database says what is wrong.
func (r Request) canShare() bool {
	return len(r.Policy) <= maxShared && len(r.Key) <= maxShared && (r.IdempotencyKey == nil || len(*r.IdempotencyKey) <= maxShared)
}

// A Call is one that was answered.
type Call struct {
	Operation Operation
	// Policy that was asked for, which may not be there; of several that of the charge which decided, and empty if there is none.
	Policy   string
	Result   client.Result
	Leased   bool   // granted from tokens that were taken before
	Err      *Error // nil if there was a decision
	Duration time.Duration

	// Unmatched says what was asked by a request of Envoy's that no rule is about, as the log has it. It is nil for others.
	Unmatched func() (domain, keys string)
}

// NoRule is the Result of a request of Envoy's that no rule is about: it passes, and nothing limits it.
const NoRule client.Result = "no_rule"

// An Operation is what was asked for.
type Operation string

// The operations.
const (
	Acquire    Operation = "acquire"
	AcquireAll Operation = "acquire_all"
	Charge     Operation = "charge"
	Settle     Operation = "settle"
	Peek       Operation = "peek"
	Refund     Operation = "refund"
	Gate       Operation = "gate" // Envoy's ShouldRateLimit
)

// Takes reports whether it asks for tokens.
func (o Operation) Takes() bool { return o == Acquire || o == AcquireAll || o == Charge || o == Gate }

// resultOf is what came of a call, in one word.
func resultOf(d client.Decision, err *Error) client.Result {
	answer := client.Answer{Decision: d}
	if err != nil { // else it would be an error that is a nil pointer
		answer.Err = err
	}
	return answer.Result()
}
