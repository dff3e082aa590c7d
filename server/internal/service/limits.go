package service

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

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

// A shard counts its calls under way.
type shard struct {
	number, of     int
	calls          atomic.Int64
	ownConnections chan struct{} // has an element for each that is in use
}

func newShards(limits Limits) []shard {
	shards := make([]shard, max(1, limits.Shards))
	for i := range shards {
		shards[i].number, shards[i].of = i, len(shards)
		shards[i].ownConnections = make(chan struct{}, limits.OwnConnections)
	}
	return shards
}

func (s *Service) shardOf(key string) *shard { return &s.shards[client.ShardOf(key, len(s.shards))] }

// UnderWay returns the number of calls under way.
func (s *Service) UnderWay() (n int64) {
	for i := range s.shards {
		n += s.shards[i].calls.Load()
	}
	return n
}

// limitCall makes a call within the limits of a shard. A call that shares travels with others, on the connections of the Combiner.
// Any other call waits for a connection.
func (s *Service) limitCall(ctx context.Context, shard *shard, shares bool, call func(context.Context) error) *Error {
	defer shard.calls.Add(-1)
	if shard.calls.Add(1) > int64(s.limits.Calls) {
		return newError(Overloaded)
	}
	ctx, cancel := context.WithTimeout(ctx, s.limits.Time)
	defer cancel()
	if !shares {
		release, err := shard.takeConnection(ctx)
		if err != nil {
			return classify(ctx, err)
		}
		defer release()
	}
	if ctx.Err() != nil {
		return classify(ctx, ctx.Err())
	}
	return shard.errorOf(ctx, call(ctx))
}

// takeConnection waits for a connection that is not shared, until release.
func (s *shard) takeConnection(ctx context.Context) (release func(), err error) {
	select {
	case s.ownConnections <- struct{}{}:
		return func() { <-s.ownConnections }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
