// Package service answers the calls of all protocols. They share one limiter, which combines their requests.
package service

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// Databases have the limiters of all keys: [Shards], or the [Single] database.
type Databases interface {
	// AcquireAll refuses charges of several databases.
	AcquireAll(ctx context.Context, charges []client.Charge, opts ...client.CallOption) (client.JointDecision, error)
	On(key string) Limiter
}

// A Single is the limiter of one database.
type Single struct{ Limiter }

// On returns the limiter, whatever the key.
func (s Single) On(string) Limiter { return s.Limiter }

// Shards are several databases.
type Shards struct{ *client.Sharded }

// On returns the limiter of the shard that has a key.
func (s Shards) On(key string) Limiter { return s.Sharded.On(key) }

// A Limiter is a *[client.Leaser].
type Limiter interface {
	client.Acquirer
	AcquireMany(ctx context.Context, requests []client.Request) []client.Answer
	AcquireUpTo(ctx context.Context, policy, key string, atMost int64, opts ...client.CallOption) (client.PartialDecision, error)
	AcquireUpToMany(ctx context.Context, charges []client.Charge) []client.PartialAnswer
	Reserve(ctx context.Context, policy, key string, maxWait time.Duration, opts ...client.CallOption) (client.Reservation, error)
	Charge(ctx context.Context, policy, key string, cost int64, opts ...client.CallOption) (client.Decision, error)
	Settle(ctx context.Context, policy, key, idempotencyKey string, cost int64) (client.Decision, error)
	Peek(ctx context.Context, policy, key string, opts ...client.CallOption) (client.Decision, error)
	PeekMany(ctx context.Context, charges []client.Charge) []client.Answer
	Refund(ctx context.Context, policy, key string, amount int64) (client.Decision, error)
	Pause(ctx context.Context, policy, key string, pauseFor time.Duration) (client.Decision, error)
	HoldAs(ctx context.Context, policy, key, holder string, opts ...client.CallOption) (client.HoldDecision, error)
	Renew(ctx context.Context, policy, key, holder string) (heldFor time.Duration, err error)
	Release(ctx context.Context, policy, key, holder string) (held bool, err error)
}

// Limits bound the calls to each shard. A shard that does not answer so blocks no calls of the other shards.
type Limits struct {
	// Shards is the number of shards. 0 means 1.
	Shards int

	// Calls is the largest number of calls under way. More calls are refused at once.
	Calls int

	// OwnConnections is the largest number of connections in use by calls that cannot share one.
	OwnConnections int

	// Time is the longest time of a call.
	Time time.Duration

	// ReadTime is the longest time until a long answer is read. Then its connection is closed.
	ReadTime time.Duration
}

// A Service answers calls. Its methods return a decision, or an *[Error].
type Service struct {
	databases Databases
	limits    Limits
	observe   func(Call)
	shards    []shard
	room      room
}

// A shard counts its calls under way.
type shard struct {
	number         int
	calls          atomic.Int64
	ownConnections chan struct{} // has an element for each that is in use
}

// New returns a Service. It passes each call to observe after the answer.
func New(databases Databases, limits Limits, observe func(Call)) *Service {
	s := &Service{databases: databases, limits: limits, observe: observe, shards: make([]shard, max(1, limits.Shards))}
	for i := range s.shards {
		s.shards[i].number = i
		s.shards[i].ownConnections = make(chan struct{}, limits.OwnConnections)
	}
	return s
}

// of returns the shard of a key.
func (s *Service) of(key string) *shard { return &s.shards[client.ShardOf(key, len(s.shards))] }

// UnderWay returns the number of calls under way.
func (s *Service) UnderWay() (n int64) {
	for i := range s.shards {
		n += s.shards[i].calls.Load()
	}
	return n
}

// do answers one call about a key. ask returns the policy that decided, or nothing if several policies may have.
func (s *Service) do(ctx context.Context, operation Operation, key string, shares bool, ask func(context.Context) (policy string, d client.Decision, err error)) error {
	call := Call{Operation: operation}
	begin := time.Now()
	var d client.Decision
	call.Err = s.within(ctx, s.of(key), shares, func(ctx context.Context) (err error) {
		call.Policy, d, err = ask(ctx)
		return err
	})
	s.finish(call, begin, d)
	if call.Err != nil { // else it would be an error that is a nil pointer
		return call.Err
	}
	return nil
}

// finish observes a call.
func (s *Service) finish(call Call, begin time.Time, d client.Decision) {
	if call.Err != nil {
		d = client.Decision{}
	}
	call.Duration = time.Since(begin)
	call.Result = resultOf(d, call.Err)
	call.Leased = d.Estimated
	s.observe(call)
}

// within makes a call within the limits of a shard.
func (s *Service) within(ctx context.Context, shard *shard, shares bool, call func(context.Context) error) *Error {
	defer shard.calls.Add(-1)
	if shard.calls.Add(1) > int64(s.limits.Calls) {
		return newError(Overloaded)
	}
	ctx, cancel := context.WithTimeout(ctx, s.limits.Time)
	defer cancel()
	if !shares {
		release, err := shard.own(ctx)
		if err != nil {
			return classify(ctx, err)
		}
		defer release()
	}
	if ctx.Err() != nil {
		return classify(ctx, ctx.Err())
	}
	return errorOf(ctx, s.in(shard, call(ctx)))
}

// in adds the number of the shard to an error of its limiter.
func (s *Service) in(shard *shard, err error) error {
	var known *client.ShardError
	if err == nil || len(s.shards) == 1 || errors.As(err, &known) {
		return err
	}
	return &client.ShardError{Shard: shard.number, Of: len(s.shards), Err: err}
}

// own waits for a connection that is not shared, until release.
func (s *shard) own(ctx context.Context) (release func(), err error) {
	select {
	case s.ownConnections <- struct{}{}:
		return func() { <-s.ownConnections }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
