package service

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/pgratelimit/pgratelimit/client"
)

// Limits bound the calls to each shard. Each shard has its own count, so one that does not answer blocks no calls of the others.
type Limits struct {
	// Calls is the largest number of calls under way. More calls are refused at once.
	Calls int

	// OwnConnections is the largest number of calls at a time that use a connection of the pool for themselves.
	OwnConnections int

	// Time is the longest time of a call.
	Time time.Duration

	// ReadTime is the longest time until a long answer is read. Then its connection is closed.
	ReadTime time.Duration

	// ShardOf returns the number of the shard of Citus that has a key. It is nil for shards that are databases.
	ShardOf func(key string) int
}

// A shard has the limiter of its keys, and counts its calls under way.
type shard struct {
	Limiter
	limits         Limits
	number, of     int
	calls          atomic.Int64
	ownConnections *semaphore.Weighted
}

func (s *Service) shardOf(key string) *shard {
	if s.limits.ShardOf != nil {
		return s.shards[s.limits.ShardOf(key)]
	}
	return s.shards[client.ShardOf(key, len(s.shards))]
}

// UnderWay returns the number of calls under way.
func (s *Service) UnderWay() (n int64) {
	for _, shard := range s.shards {
		n += shard.calls.Load()
	}
	return n
}

func (s *shard) call(ctx context.Context, call func(context.Context) error) *Error {
	defer s.calls.Add(-1)
	if s.calls.Add(1) > int64(s.limits.Calls) {
		return newError(Overloaded)
	}
	ctx, cancel := context.WithTimeout(ctx, s.limits.Time)
	defer cancel()
	return s.errorOf(ctx, call(ctx))
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
