// Package service answers the calls of all protocols. The path of a call:
//
//  1. Package jsonapi or grpcapi makes an [Operation] and a [Request] (request.go) of a message, for [Service.Do]. Package envoy
//     calls Admit (gate.go).
//  2. shard.call (shard.go) refuses the call if the shard of its key has too many, and gives it a deadline.
//  3. ask makes the call of the client. The [Limiter] is a Prefetcher, which sends the request together with those of other callers.
//     A call that cannot share a connection waits for one of OwnConnections permits, and then for a connection of the pool.
//  4. observeCall passes the [Call] to metrics and log. The caller gets the [Answer], or an [Error] (errors.go).
//
// A long answer takes memory until it is read: unread.go bounds that.
package service

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Service answers calls.
type Service struct {
	shards  []*shard
	limits  Limits
	observe func(Call)

	unreadMu    sync.Mutex
	unreadBytes int64 // of the memory for long answers
}

// New returns a Service on the limiters of all shards, in the order of their numbers. It passes each call to observe after the answer.
func New(limiters []Limiter, limits Limits, observe func(Call)) *Service {
	s := &Service{limits: limits, observe: observe}
	var own *semaphore.Weighted
	for n, limiter := range limiters {
		if n == 0 || limits.ShardOf == nil { // shards of Citus share the connections to a node
			own = semaphore.NewWeighted(int64(limits.OwnConnections))
		}
		s.shards = append(s.shards, &shard{Limiter: limiter, limits: limits, number: n, of: len(limiters), ownConnections: own})
	}
	return s
}

// Do answers a call, with an *[Error] if it has no decision.
func (s *Service) Do(ctx context.Context, o Operation, r Request) (a Answer, err error) {
	begin := time.Now()
	call := Call{Operation: o, Err: r.check(o)}
	if len(r.List) > 0 {
		r.Key = r.List[0].Key
	}
	switch {
	case call.Err != nil:
	case o == AcquireMany:
		return Answer{Answers: s.acquireMany(ctx, r.List)}, nil
	default:
		shard := s.shardOf(r.Key)
		call.Err = shard.call(ctx, func(ctx context.Context) (err error) {
			a, err = shard.ask(ctx, o, r)
			return err
		})
	}
	switch {
	case !o.hasList():
		call.Policy = r.policy()
	case call.Err == nil:
		call.Policy = r.List[a.Binding].policy()
	}
	return a, s.observeCall(call, begin, a.Decision)
}

// An Answer is a decision: of several charges the whole, with the decision of each.
type Answer struct {
	client.JointDecision // RetryAfter is the wait of a Reserve; a Hold that renewed is Replayed

	Taken   int64           // by AcquireUpTo
	HeldFor time.Duration   // of Hold and Renew
	Answers []client.Answer // of AcquireMany, to each request in their order; an Err is an *Error
}

// ask makes the call of the client.
func (s *shard) ask(ctx context.Context, o Operation, r Request) (a Answer, err error) {
	charges, requests := make([]client.Charge, 0, len(r.List)), make([]client.Request, 0, len(r.List))
	for i, c := range r.List {
		switch {
		case o == AcquireMany:
			requests = append(requests, client.Request{Policy: c.policy(), Key: c.Key, Cost: c.cost(), IdempotencyKey: c.IdempotencyKey})
		case s.limits.ShardOf != nil && c.Key != r.Key:
			return a, Invalid("several keys in one request", fmt.Sprintf("Charge %d has another key than charge 0, and the database is a Citus cluster.", i),
				"Use one key under several policies, or ask for each key alone.")
		case s.limits.ShardOf != nil, client.ShardOf(c.Key, s.of) == s.number: // one transaction, and so of one database
			charges = append(charges, client.Charge{Policy: c.policy(), Key: c.Key, Cost: c.cost()})
		case o == SettleAll:
			return a, Invalid("the settlements belong to several shards", fmt.Sprintf("Settlement %d is of another shard than settlement 0.", i),
				"Settle those of each shard by themselves.")
		default:
			return a, fmt.Errorf("acquire all: %w: charge 0 to shard %d and charge %d to shard %d of %d, and a request is one transaction in "+
				"one database. Give limits that are asked for together the same key, under different policies; or ask for each alone, and "+
				"refund when a later one is denied", client.ErrSeveralShards, s.number, i, client.ShardOf(c.Key, s.of), s.of)
		}
	}
	if r.canShare(o) {
		err = ctx.Err()
	} else if err = s.ownConnections.Acquire(ctx, 1); err == nil {
		defer s.ownConnections.Release(1)
	}
	if err != nil {
		return a, err
	}
	policy, opts := r.policy(), make([]client.CallOption, 0, 2)
	if r.IdempotencyKey != nil {
		opts = append(opts, client.IdempotencyKey(*r.IdempotencyKey))
	}
	switch o {
	case Acquire:
		a.Decision, err = s.Acquire(ctx, policy, r.Key, append(opts, r.cost())...)
	case AcquireAll:
		a.JointDecision, err = s.AcquireAll(ctx, charges, opts...)
	case AcquireMany:
		a.Answers = s.AcquireMany(ctx, requests)
	case AcquireUpTo:
		if r.AtLeast != nil {
			opts = append(opts, client.AtLeast(*r.AtLeast))
		}
		var d client.PartialDecision
		d, err = s.AcquireUpTo(ctx, policy, r.Key, *r.Cost, opts...)
		a.Decision, a.Taken = d.Decision, d.Taken
	case Reserve:
		var d client.Reservation
		d, err = s.Reserve(ctx, policy, r.Key, r.Time.Duration, append(opts, r.cost())...)
		a.Decision, a.RetryAfter = d.Decision, d.Wait
	case Charge:
		a.Decision, err = s.Charge(ctx, policy, r.Key, *r.Cost, opts...)
	case Settle:
		a.Decision, err = s.Settle(ctx, policy, r.Key, *r.IdempotencyKey, *r.Cost)
	case SettleAll:
		var d client.JointSettlement
		d, err = s.SettleAll(ctx, charges, *r.IdempotencyKey)
		a.Allowed, a.Replayed, a.Decisions = true, d.Replayed, d.Decisions
	case Peek:
		a.Decision, err = s.Peek(ctx, policy, r.Key, append(opts, r.cost())...)
	case Refund:
		a.Decision, err = s.Refund(ctx, policy, r.Key, *r.Cost)
	case Pause:
		a.Decision, err = s.Pause(ctx, policy, r.Key, r.Time.Duration)
	case Hold: // the server does not renew the lease: it cannot know whether the holder still works
		var d client.HoldDecision
		d, err = s.HoldAs(ctx, policy, r.Key, r.Holder, append(opts, r.cost())...)
		a.Allowed, a.Replayed, a.Shadowed, a.HeldFor = d.Allowed, d.Renewed, d.Shadowed, d.HeldFor
		a.Remaining, a.RetryAfter, a.Capacity = d.Remaining, d.RetryAfter, d.Capacity
	case Renew:
		a.HeldFor, err = s.Renew(ctx, policy, r.Key, r.Holder)
		a.Allowed = a.HeldFor > 0
	case Release:
		a.Allowed, err = s.Release(ctx, policy, r.Key, r.Holder)
	}
	return a, err
}

// acquireMany answers each request as Acquire does, in their order. The requests of a shard are one call within its limits.
func (s *Service) acquireMany(ctx context.Context, requests []Request) []client.Answer {
	begin, answers := time.Now(), make([]client.Answer, len(requests))
	of := make(map[*shard][]int) // the numbers of the requests
	for i, r := range requests {
		shard := s.shardOf(r.Key)
		of[shard] = append(of[shard], i)
	}
	var calls sync.WaitGroup
	for shard, numbers := range of {
		calls.Go(func() {
			part := Request{List: make([]Request, len(numbers))}
			for i, n := range numbers {
				part.List[i] = requests[n]
			}
			give := func(i int, d client.Decision, err *Error) {
				call := Call{Operation: AcquireMany, Policy: part.List[i].policy(), Err: err}
				answers[numbers[i]] = client.Answer{Decision: d, Err: s.observeCall(call, begin, d)}
			}
			err := shard.call(ctx, func(ctx context.Context) error {
				a, err := shard.ask(ctx, AcquireMany, part)
				for i, answer := range a.Answers {
					give(i, answer.Decision, shard.errorOf(ctx, answer.Err).inRequest(numbers[i]))
				}
				return err
			})
			for i := range numbers {
				if err != nil {
					give(i, client.Decision{}, err)
				}
			}
		})
	}
	calls.Wait()
	return answers
}

// A Call is what metrics and log learn of a call that has been answered.
type Call struct {
	Operation Operation
	// Policy may be unknown. Of several charges it is the policy of the one that decided. It is empty without a charge, of Envoy's
	// refunds, and after an error about several.
	Policy     string
	Result     client.Result
	Prefetched bool   // granted from tokens that were taken before
	Err        *Error // nil if there was a decision
	Duration   time.Duration

	// Domain and Keys are those of a request of Envoy's that no rule matches.
	Domain, Keys string

	From string // the address of the caller, if the call was refused before it was read. Then it has no Result.
}

// NoRule is the Result of a request of Envoy's that no rule matches: it is allowed, without a limit.
const NoRule client.Result = "no_rule"

// Refuse observes a call that is refused with a status of HTTP before it is read. Its path is that of JSON, or the method of gRPC.
func (s *Service) Refuse(status int, path, address string) {
	kind := cmp.Or(map[int]*Kind{401: Unauthenticated, 403: Forbidden, 422: InvalidArgument}[status], Unreadable)
	from, _, _ := net.SplitHostPort(address)
	s.observe(Call{Operation: operationOf(path), Err: newError(kind), From: from})
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
