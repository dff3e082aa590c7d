// Package service answers calls, whatever protocol they came by. All of them share one limiter, which is how callers that
// have no combining client get combined speed.
package service

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Limiter decides: *[client.Leaser] or *[client.Sharded].
type Limiter interface {
	client.Acquirer
	Charge(ctx context.Context, policy, key string, cost int64, opts ...client.ChargeOption) (client.Decision, error)
	Settle(ctx context.Context, policy, key, idempotencyKey string, cost int64) (client.Decision, error)
	Peek(ctx context.Context, policy, key string, opts ...client.PeekOption) (client.Decision, error)
	Refund(ctx context.Context, policy, key string, amount int64) (client.Decision, error)
}

// Limits bound what callers can ask of a Service, of each of its shards. So one that does not answer takes no place from
// calls of the others.
type Limits struct {
	// Shards are how many the limiter has; 0 is as 1.
	Shards int

	// Calls may be under way at a time. One more is refused at once, so that nobody waits in a line without end.
	Calls int

	// OwnConnections are used at a time by calls that cannot share one. So there are always some left for those that can.
	OwnConnections int

	// Time is how long a call may take, unless its caller gives it less.
	Time time.Duration
}

// A Service answers calls. Its methods return a decision, or an *[Error].
type Service struct {
	limiter Limiter
	limits  Limits
	observe func(Call)
	shards  []shard
}

// A shard counts what is under way there.
type shard struct {
	calls          atomic.Int64
	ownConnections chan struct{} // has an element for each that is in use
}

// New returns a Service. Each call is shown to observe when it has been answered.
func New(limiter Limiter, limits Limits, observe func(Call)) *Service {
	s := &Service{limiter: limiter, limits: limits, observe: observe, shards: make([]shard, max(1, limits.Shards))}
	for i := range s.shards {
		s.shards[i].ownConnections = make(chan struct{}, limits.OwnConnections)
	}
	return s
}

// of is the shard of a key.
func (s *Service) of(key string) *shard { return &s.shards[client.ShardOf(key, len(s.shards))] }

// UnderWay counts the calls that are.
func (s *Service) UnderWay() (n int64) {
	for i := range s.shards {
		n += s.shards[i].calls.Load()
	}
	return n
}

// do answers one call about a key. ask returns the policy that decided, which is empty if several policies may have.
func (s *Service) do(ctx context.Context, operation Operation, key string, shares bool, ask func(context.Context) (policy string, d client.Decision, err error)) error {
	call := Call{Operation: operation}
	begin := time.Now()
	var d client.Decision
	shard := s.of(key)
	if shard.calls.Add(1) > int64(s.limits.Calls) {
		call.Err = newError(Overloaded)
	} else {
		ctx, cancel := context.WithTimeout(ctx, s.limits.Time)
		call.Policy, d, call.Err = s.ask(ctx, shard, shares, ask)
		cancel()
	}
	shard.calls.Add(-1)
	call.Duration = time.Since(begin)
	call.Result = resultOf(d, call.Err)
	call.Leased = d.Estimated
	s.observe(call)
	if call.Err != nil { // else it would be an error that is a nil pointer
		return call.Err
	}
	return nil
}

func (s *Service) ask(ctx context.Context, shard *shard, shares bool, ask func(context.Context) (string, client.Decision, error)) (string, client.Decision, *Error) {
	if !shares {
		release, err := shard.own(ctx)
		if err != nil {
			return "", client.Decision{}, classify(ctx, err)
		}
		defer release()
	}
	if ctx.Err() != nil {
		return "", client.Decision{}, classify(ctx, ctx.Err())
	}
	policy, d, err := ask(ctx)
	if err == nil {
		return policy, d, nil
	}
	var known *Error
	if !errors.As(err, &known) {
		known = classify(ctx, err)
	}
	return policy, client.Decision{}, known
}

// own waits for a connection that need not be shared, until release.
func (s *shard) own(ctx context.Context) (release func(), err error) {
	select {
	case s.ownConnections <- struct{}{}:
		return func() { <-s.ownConnections }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
