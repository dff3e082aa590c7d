// Package service answers the calls of all protocols. A call takes five steps, each in the file of its name:
//
//  1. request: package jsonapi, grpcapi or envoy reads a message, and makes a [Request] of it.
//  2. calls: the method of the call, such as [Service.Acquire], names the method of the client that answers it. Calls about lists of
//     requests are in many, and those of Envoy in gate.
//  3. limits: limitCall refuses the call if the shard of its key has too many, and gives it a deadline and its share of connections.
//  4. databases: On returns the limiter of the shard. Its Combiner sends the request to the database, together with those of other
//     callers.
//  5. observe: the call is counted and logged. Its caller gets the decision, or one of the errors.
//
// A long answer takes memory until it is read: unread bounds that.
package service

import (
	"cmp"
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Service answers calls. Its methods return a decision, or an *[Error].
type Service struct {
	databases Databases
	limits    Limits
	observe   func(Call)
	shards    []shard
	room      room
}

// New returns a Service. It passes each call to observe after the answer.
func New(databases Databases, limits Limits, observe func(Call)) *Service {
	return &Service{databases: databases, limits: limits, observe: observe, shards: newShards(limits)}
}

// callBucket answers a call about one bucket. ask makes the call of the client, on the limiter of the bucket.
func (s *Service) callBucket(
	ctx context.Context, o Operation, r Request, ask func(ctx context.Context, on Limiter, r Request) (client.Decision, error),
) (d client.Decision, err error) {
	begin := time.Now()
	r.Policy = cmp.Or(r.Policy, DefaultPolicy)
	call := Call{Operation: o, Policy: r.Policy, Err: r.check(o)}
	if call.Err == nil {
		shares := o == Acquire && r.canShare()
		call.Err = s.limitCall(ctx, s.shardOf(r.Key), shares, func(ctx context.Context) (err error) {
			d, err = ask(ctx, s.databases.On(r.Key), r)
			return err
		})
	}
	return d, s.observeCall(call, begin, d)
}
