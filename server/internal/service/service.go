// Package service answers the calls of all protocols. The path of a call:
//
//  1. Package jsonapi, grpcapi or envoy reads a message, makes a [Request] of it, and calls the method of its [Operation].
//  2. The method, such as [Service.Acquire], says how the client is asked. callBucket does the rest for calls about one bucket;
//     AcquireAll, AcquireMany and, in gate.go, Envoy's Admit take the same steps for several.
//  3. shard.call (shard.go) refuses the call if the shard of its key has too many, and gives it a deadline. A call that cannot share
//     a connection with others waits for one of those that are set apart.
//  4. The [Limiter] of the shard is a Prefetcher, which sends the request together with those of other callers.
//  5. observeCall passes the [Call] to metrics and log. The caller gets the answer, or an [Error] (errors.go).
//
// A long answer takes memory until it is read. ReserveAnswer (unread.go) bounds that.
package service

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Service answers calls. Its methods return a decision, or an *[Error].
type Service struct {
	shards  []*shard
	limits  Limits
	observe func(Call)

	memory sync.Mutex
	used   int64 // of it, by long answers
}

// New returns a Service on the limiters of all shards, in the order of their numbers. It passes each call to observe after the answer.
func New(limiters []Limiter, limits Limits, observe func(Call)) *Service {
	return &Service{shards: newShards(limiters, limits), limits: limits, observe: observe}
}

// callBucket answers a call about one bucket. ask makes the call of the client on the limiter of the bucket; counted is what metrics and
// log see of the answer.
func callBucket[A any](
	ctx context.Context, s *Service, o Operation, r Request, counted func(A) client.Decision, ask func(context.Context, Limiter, Request) (A, error),
) (answer A, err error) {
	begin := time.Now()
	r.Policy = cmp.Or(r.Policy, DefaultPolicy)
	call := Call{Operation: o, Policy: r.Policy, Err: r.check(o)}
	if call.Err == nil {
		shares := o == Acquire && r.canShare()
		call.Err = s.shardOf(r.Key).call(ctx, shares, func(ctx context.Context) (err error) {
			answer, err = ask(ctx, s.shardOf(r.Key), r)
			return err
		})
	}
	return answer, s.observeCall(call, begin, counted(answer))
}

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

// A JointRequest is about several buckets. Its charges have no idempotency keys of their own.
type JointRequest struct {
	Charges        []Request
	IdempotencyKey *string
}

// A Time is one that a caller gives.
type Time struct {
	time.Duration
	Text string // of one that is invalid or beyond MaxTime, in place of the Duration: as the caller wrote it
}

// MaxTime is beyond the 365 days that the database accepts, in seconds.
const MaxTime = 1e9

// check returns the error of an argument that the client cannot send, or would name otherwise: null, too long a time, or a fraction
// of a microsecond.
func (r Request) check(o Operation) *Error {
	switch {
	case o == Settle && r.IdempotencyKey == nil:
		return missing("idempotency_key")
	case (o == Charge || o == Settle) && r.Cost == nil:
		return missing("cost")
	case o == AcquireUpTo && r.Cost == nil:
		return missing("at_most")
	case o == Refund && r.Cost == nil:
		return missing("amount")
	case o == Pause:
		return r.Time.check("pause_for")
	case o == Reserve && r.Time != nil && r.Time.Duration%time.Microsecond != 0:
		return Invalid("invalid max_wait", fmt.Sprintf("max_wait is %v.", r.Time.Duration), "Wait for whole microseconds, up to 365 days.")
	case o == Reserve:
		return r.Time.check("max_wait")
	}
	return nil
}

func (t *Time) check(argument string) *Error {
	switch {
	case t == nil:
		return missing(argument)
	case t.Text != "":
		return Invalid("invalid "+argument, fmt.Sprintf("%s is %s.", argument, t.Text), "Give at most 365 days.")
	}
	return nil
}

// options are Cost and IdempotencyKey, where they are given.
func (r Request) options() []client.CallOption {
	opts := named(r.IdempotencyKey)
	if r.Cost != nil {
		opts = append(opts, client.Cost(*r.Cost))
	}
	return opts
}

// named is the option of an idempotency key, if there is one.
func named(idempotencyKey *string) []client.CallOption {
	opts := make([]client.CallOption, 0, 2)
	if idempotencyKey != nil {
		opts = append(opts, client.IdempotencyKey(*idempotencyKey))
	}
	return opts
}

func (r Request) charge() client.Charge {
	c := client.Charge{Policy: cmp.Or(r.Policy, DefaultPolicy), Key: r.Key}
	if r.Cost != nil {
		c.Cost = client.Cost(*r.Cost)
	}
	return c
}

// maxShared is the longest text, in bytes, that the Combiner puts into a shared call.
const maxShared = 512

// canShare reports whether the request may travel in a call with others. A request with a text that is too long gets a connection
// of its own, and the error of the database.
func (r Request) canShare() bool {
	return len(r.Policy) <= maxShared && len(r.Key) <= maxShared && (r.IdempotencyKey == nil || len(*r.IdempotencyKey) <= maxShared)
}

func itself(d client.Decision) client.Decision { return d }

// Acquire takes Cost tokens, or 1, from one bucket if it holds enough.
func (s *Service) Acquire(ctx context.Context, r Request) (client.Decision, error) {
	return callBucket(ctx, s, Acquire, r, itself, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Acquire(ctx, r.Policy, r.Key, r.options()...)
	})
}

// Charge takes Cost tokens whatever the bucket holds.
func (s *Service) Charge(ctx context.Context, r Request) (client.Decision, error) {
	return callBucket(ctx, s, Charge, r, itself, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Charge(ctx, r.Policy, r.Key, *r.Cost, named(r.IdempotencyKey)...)
	})
}

// Settle replaces the cost of the grant that was made under IdempotencyKey by Cost.
func (s *Service) Settle(ctx context.Context, r Request) (client.Decision, error) {
	return callBucket(ctx, s, Settle, r, itself, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Settle(ctx, r.Policy, r.Key, *r.IdempotencyKey, *r.Cost)
	})
}

// SettleAll replaces the costs of the grants that were made under IdempotencyKey, of all buckets or of none. The buckets are of one shard.
func (s *Service) SettleAll(ctx context.Context, r JointRequest) (d client.JointSettlement, err error) {
	call, begin := Call{Operation: SettleAll}, time.Now()
	settlements := make([]client.Charge, len(r.Charges))
	for i, c := range r.Charges {
		settlements[i] = c.charge()
		switch {
		case c.Cost == nil:
			call.Err = missing("cost")
		case s.shardOf(c.Key) != s.shardOf(r.Charges[0].Key):
			call.Err = Invalid("the settlements belong to several shards", fmt.Sprintf("Settlement %d is of another shard than settlement 0.", i),
				"Settle those of each shard by themselves.")
		}
	}
	switch {
	case len(settlements) == 0:
		call.Err = missing("settlements")
	case r.IdempotencyKey == nil:
		call.Err = missing("idempotency_key")
	}
	if call.Err == nil {
		key := settlements[0].Key
		call.Err = s.shardOf(key).call(ctx, false, func(ctx context.Context) (err error) {
			d, err = s.shardOf(key).SettleAll(ctx, settlements, *r.IdempotencyKey)
			return err
		})
	}
	if call.Err == nil {
		call.Policy = settlements[0].Policy
	}
	return d, s.observeCall(call, begin, client.Decision{Allowed: true, Replayed: d.Replayed})
}

// Peek returns the decision that Acquire would, and takes nothing.
func (s *Service) Peek(ctx context.Context, r Request) (client.Decision, error) {
	return callBucket(ctx, s, Peek, r, itself, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Peek(ctx, r.Policy, r.Key, r.options()...)
	})
}

// Refund gives Cost tokens back.
func (s *Service) Refund(ctx context.Context, r Request) (client.Decision, error) {
	return callBucket(ctx, s, Refund, r, itself, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Refund(ctx, r.Policy, r.Key, *r.Cost)
	})
}

// Pause stops the bucket for Time.
func (s *Service) Pause(ctx context.Context, r Request) (client.Decision, error) {
	return callBucket(ctx, s, Pause, r, itself, func(ctx context.Context, on Limiter, r Request) (client.Decision, error) {
		return on.Pause(ctx, r.Policy, r.Key, r.Time.Duration)
	})
}

// AcquireUpTo takes as many tokens as the bucket holds, between AtLeast, or 1, and Cost.
func (s *Service) AcquireUpTo(ctx context.Context, r Request) (client.PartialDecision, error) {
	return callBucket(ctx, s, AcquireUpTo, r, taken, func(ctx context.Context, on Limiter, r Request) (client.PartialDecision, error) {
		opts := named(r.IdempotencyKey)
		if r.AtLeast != nil {
			opts = append(opts, client.AtLeast(*r.AtLeast))
		}
		return on.AcquireUpTo(ctx, r.Policy, r.Key, *r.Cost, opts...)
	})
}

func taken(d client.PartialDecision) client.Decision { return d.Decision }

// Reserve takes Cost tokens, or 1, if the bucket will have them within Time.
func (s *Service) Reserve(ctx context.Context, r Request) (client.Reservation, error) {
	return callBucket(ctx, s, Reserve, r, reserved, func(ctx context.Context, on Limiter, r Request) (client.Reservation, error) {
		return on.Reserve(ctx, r.Policy, r.Key, r.Time.Duration, r.options()...)
	})
}

func reserved(d client.Reservation) client.Decision {
	return client.Decision{Allowed: d.Allowed, Replayed: d.Replayed, Shadowed: d.Shadowed}
}

// Hold lends Cost slots, or 1, to Holder if they are free. The server does not renew the lease: it cannot know whether the holder
// still works.
func (s *Service) Hold(ctx context.Context, r Request) (client.HoldDecision, error) {
	return callBucket(ctx, s, Hold, r, held, func(ctx context.Context, on Limiter, r Request) (client.HoldDecision, error) {
		return on.HoldAs(ctx, r.Policy, r.Key, r.Holder, r.options()...)
	})
}

func held(d client.HoldDecision) client.Decision {
	return client.Decision{Allowed: d.Allowed, Replayed: d.Renewed, Shadowed: d.Shadowed}
}

// Renew begins the lease of Holder anew, and returns how long it lasts: 0 if it does not hold.
func (s *Service) Renew(ctx context.Context, r Request) (time.Duration, error) {
	return callBucket(ctx, s, Renew, r, renewed, func(ctx context.Context, on Limiter, r Request) (time.Duration, error) {
		return on.Renew(ctx, r.Policy, r.Key, r.Holder)
	})
}

func renewed(heldFor time.Duration) client.Decision { return client.Decision{Allowed: heldFor > 0} }

// Release frees the slots of Holder, and reports whether it held until now.
func (s *Service) Release(ctx context.Context, r Request) (bool, error) {
	return callBucket(ctx, s, Release, r, released, func(ctx context.Context, on Limiter, r Request) (bool, error) {
		return on.Release(ctx, r.Policy, r.Key, r.Holder)
	})
}

func released(held bool) client.Decision { return client.Decision{Allowed: held} }

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
		call.Err = s.shardOf(charges[0].Key).call(ctx, shares, func(ctx context.Context) (err error) {
			d, err = s.acquireAll(ctx, charges, named(r.IdempotencyKey)...)
			return err
		})
	}
	if call.Err == nil {
		call.Policy = charges[d.Binding].Policy
	}
	return d, s.observeCall(call, begin, d.Decision)
}

// acquireAll refuses charges of several shards: no transaction spans two databases.
func (s *Service) acquireAll(ctx context.Context, charges []client.Charge, opts ...client.CallOption) (client.JointDecision, error) {
	shard := s.shardOf(charges[0].Key)
	for i, c := range charges {
		if other := s.shardOf(c.Key); other != shard {
			return client.JointDecision{}, fmt.Errorf("acquire all: %w: charge 0 to shard %d and charge %d to shard %d of %d, and a request is one "+
				"transaction in one database. Give limits that are asked for together the same key, under different policies; "+
				"or ask for each alone, and refund when a later one is denied", client.ErrSeveralShards, shard.number, i, other.number, shard.of)
		}
	}
	return shard.AcquireAll(ctx, charges, opts...)
}

// MaxRequests of one call: as many as a request of AcquireAll has charges. They make four calls to the database.
const MaxRequests = 1000

// An Answer is to one of several requests.
type Answer struct {
	Decision client.Decision
	Err      *Error // nil for a decision
}

// AcquireMany answers each request as Acquire does, in their order. The requests of a shard are one call within its limits.
func (s *Service) AcquireMany(ctx context.Context, requests []Request) ([]Answer, error) {
	if n := len(requests); n == 0 || n > MaxRequests {
		err := Invalid("invalid requests", fmt.Sprintf("requests has %d elements.", n), fmt.Sprintf("Send 1 to %d requests in a call.", MaxRequests))
		return nil, s.observeCall(Call{Operation: AcquireMany, Err: err}, time.Now(), client.Decision{})
	}
	answers := make([]Answer, len(requests))
	of := make(map[*shard][]int) // the numbers of the requests
	for i, r := range requests {
		shard := s.shardOf(r.Key)
		of[shard] = append(of[shard], i)
	}
	var calls sync.WaitGroup
	for shard, numbers := range of {
		calls.Go(func() { s.callShard(ctx, shard, requests, numbers, answers) })
	}
	calls.Wait()
	return answers, nil
}

func (s *Service) callShard(ctx context.Context, shard *shard, requests []Request, numbers []int, answers []Answer) {
	begin := time.Now()
	asked := make([]client.Request, len(numbers))
	shares := true
	for i, n := range numbers {
		charge := requests[n].charge()
		asked[i] = client.Request{Policy: charge.Policy, Key: charge.Key, Cost: charge.Cost, IdempotencyKey: requests[n].IdempotencyKey}
		shares = shares && requests[n].canShare()
	}
	err := shard.call(ctx, shares, func(ctx context.Context) error {
		for i, a := range shard.AcquireMany(ctx, asked) {
			answers[numbers[i]] = Answer{Decision: a.Decision, Err: shard.errorOf(ctx, a.Err).inRequest(numbers[i])}
		}
		return nil
	})
	for i, n := range numbers {
		if err != nil {
			answers[n].Err = err
		}
		_ = s.observeCall(Call{Operation: AcquireMany, Policy: asked[i].Policy, Err: answers[n].Err}, begin, answers[n].Decision)
	}
}

// A Limiter is a *[client.Prefetcher].
type Limiter interface {
	client.Acquirer
	AcquireMany(ctx context.Context, requests []client.Request) []client.Answer
	AcquireUpTo(ctx context.Context, policy, key string, atMost int64, opts ...client.CallOption) (client.PartialDecision, error)
	Reserve(ctx context.Context, policy, key string, maxWait time.Duration, opts ...client.CallOption) (client.Reservation, error)
	Charge(ctx context.Context, policy, key string, cost int64, opts ...client.CallOption) (client.Decision, error)
	Settle(ctx context.Context, policy, key, idempotencyKey string, cost int64) (client.Decision, error)
	SettleAll(ctx context.Context, settlements []client.Charge, idempotencyKey string) (client.JointSettlement, error)
	Peek(ctx context.Context, policy, key string, opts ...client.CallOption) (client.Decision, error)
	Refund(ctx context.Context, policy, key string, amount int64) (client.Decision, error)
	Pause(ctx context.Context, policy, key string, pauseFor time.Duration) (client.Decision, error)
	HoldAs(ctx context.Context, policy, key, holder string, opts ...client.CallOption) (client.HoldDecision, error)
	Renew(ctx context.Context, policy, key, holder string) (heldFor time.Duration, err error)
	Release(ctx context.Context, policy, key, holder string) (held bool, err error)
}

// A Call has been answered.
type Call struct {
	Operation Operation
	// Policy may be unknown. Of several charges it is the policy of the one that decided, of refunds of the last one tried. It is empty
	// without a charge, and after an error about several.
	Policy     string
	Result     client.Result
	Prefetched bool   // granted from tokens that were taken before
	Err        *Error // nil if there was a decision
	Duration   time.Duration

	// Domain and Keys are those of a request of Envoy's that no rule matches.
	Domain, Keys string
}

// NoRule is the Result of a request of Envoy's that no rule matches: it is allowed, without a limit.
const NoRule client.Result = "no_rule"

// An Operation is the kind of a call.
type Operation string

// The operations.
const (
	Acquire     Operation = "acquire"
	AcquireAll  Operation = "acquire_all"
	AcquireMany Operation = "acquire_many" // each of its requests is a Call
	AcquireUpTo Operation = "acquire_up_to"
	Reserve     Operation = "reserve"
	Charge      Operation = "charge"
	Settle      Operation = "settle"
	SettleAll   Operation = "settle_all"
	Peek        Operation = "peek"
	Refund      Operation = "refund"
	Pause       Operation = "pause"
	Hold        Operation = "hold"
	Renew       Operation = "renew"
	Release     Operation = "release"
	Gate        Operation = "gate" // Envoy's ShouldRateLimit; one with negative hits is a Refund
)

// Takes reports whether the call asks for tokens or slots.
func (o Operation) Takes() bool {
	switch o {
	case Settle, SettleAll, Peek, Refund, Pause, Renew, Release:
		return false
	}
	return true
}

// observeCall observes a call that has an answer, and returns its error.
func (s *Service) observeCall(call Call, begin time.Time, d client.Decision) error {
	call.Duration = time.Since(begin)
	call.Prefetched = d.Estimated
	answer := client.Answer{Decision: d}
	if call.Err != nil { // else it would be an error that is a nil pointer
		answer.Err = call.Err
	}
	call.Result = answer.Result()
	s.observe(call)
	return answer.Err
}
