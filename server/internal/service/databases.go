package service

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// Databases have the limiters of all keys: [Shards], or the [Single] database.
type Databases interface {
	// AcquireAll refuses charges of several databases.
	AcquireAll(ctx context.Context, charges []client.Charge, opts ...client.CallOption) (client.JointDecision, error)

	// On returns the limiter of a key.
	On(key string) Limiter
}

// A Limiter is a *[client.Prefetcher].
type Limiter interface {
	client.Acquirer
	AcquireMany(ctx context.Context, requests []client.Request) []client.Answer
	AcquireUpTo(ctx context.Context, policy, key string, atMost int64, opts ...client.CallOption) (client.PartialDecision, error)
	Reserve(ctx context.Context, policy, key string, maxWait time.Duration, opts ...client.CallOption) (client.Reservation, error)
	Charge(ctx context.Context, policy, key string, cost int64, opts ...client.CallOption) (client.Decision, error)
	Settle(ctx context.Context, policy, key, idempotencyKey string, cost int64) (client.Decision, error)
	Peek(ctx context.Context, policy, key string, opts ...client.CallOption) (client.Decision, error)
	Refund(ctx context.Context, policy, key string, amount int64) (client.Decision, error)
	Pause(ctx context.Context, policy, key string, pauseFor time.Duration) (client.Decision, error)
	HoldAs(ctx context.Context, policy, key, holder string, opts ...client.CallOption) (client.HoldDecision, error)
	Renew(ctx context.Context, policy, key, holder string) (heldFor time.Duration, err error)
	Release(ctx context.Context, policy, key, holder string) (held bool, err error)
}

// A Single is the limiter of one database.
type Single struct{ Limiter }

// On returns the limiter, whatever the key.
func (s Single) On(string) Limiter { return s.Limiter }

// Shards are several databases.
type Shards struct{ *client.Sharded }

// On returns the limiter of the shard that has a key.
func (s Shards) On(key string) Limiter { return s.Sharded.On(key) }
