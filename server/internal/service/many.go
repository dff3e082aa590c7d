package service

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

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

// callShard answers the requests of a shard.
func (s *Service) callShard(ctx context.Context, shard *shard, requests []Request, numbers []int, answers []Answer) {
	begin := time.Now()
	asked := make([]client.Request, len(numbers))
	shares := true
	for i, n := range numbers {
		charge := requests[n].charge()
		asked[i] = client.Request{Policy: charge.Policy, Key: charge.Key, Cost: charge.Cost, IdempotencyKey: requests[n].IdempotencyKey}
		shares = shares && requests[n].canShare()
	}
	err := s.limitCall(ctx, shard, shares, func(ctx context.Context) error {
		for i, a := range s.databases.On(asked[0].Key).AcquireMany(ctx, asked) {
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
