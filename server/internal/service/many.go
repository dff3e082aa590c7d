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
	Taken    *int64 // beside a decision of AcquireUpToMany
	Err      *Error // nil for a decision
}

// AcquireMany answers each request as Acquire does, in their order. The requests of a shard are one call within its limits.
func (s *Service) AcquireMany(ctx context.Context, requests []Request) ([]Answer, error) {
	return s.callShards(ctx, AcquireMany, requests, func(ctx context.Context, requests []client.Request) ([]client.Answer, []int64) {
		return s.databases.On(requests[0].Key).AcquireMany(ctx, requests), nil
	})
}

// AcquireUpToMany answers each request as AcquireUpTo with the Cost as at_most, in their order. The requests of a shard are one call.
func (s *Service) AcquireUpToMany(ctx context.Context, requests []Request) ([]Answer, error) {
	return s.callShards(ctx, AcquireUpToMany, requests, func(ctx context.Context, requests []client.Request) ([]client.Answer, []int64) {
		answers, taken := make([]client.Answer, len(requests)), make([]int64, len(requests))
		for i, a := range s.databases.On(requests[0].Key).AcquireUpToMany(ctx, chargesOf(requests)) {
			answers[i], taken[i] = a.Answer, a.Taken
		}
		return answers, taken
	})
}

// PeekMany answers each request as Peek does, in their order. The requests of a shard are one call.
func (s *Service) PeekMany(ctx context.Context, requests []Request) ([]Answer, error) {
	return s.callShards(ctx, PeekMany, requests, func(ctx context.Context, requests []client.Request) ([]client.Answer, []int64) {
		return s.databases.On(requests[0].Key).PeekMany(ctx, chargesOf(requests)), nil
	})
}

func chargesOf(requests []client.Request) []client.Charge {
	charges := make([]client.Charge, len(requests))
	for i, r := range requests {
		charges[i] = client.Charge{Policy: r.Policy, Key: r.Key, Cost: r.Cost}
	}
	return charges
}

// askMany returns the answers, and what each request took if the answers tell that.
type askMany = func(context.Context, []client.Request) (answers []client.Answer, taken []int64)

// callShards makes one call to each shard, about its requests.
func (s *Service) callShards(ctx context.Context, o Operation, requests []Request, ask askMany) ([]Answer, error) {
	if err := s.checkCount(o, requests); err != nil {
		return nil, err
	}
	answers := make([]Answer, len(requests))
	of := make(map[*shard][]int) // the numbers of the requests
	for i, r := range requests {
		shard := s.shardOf(r.Key)
		of[shard] = append(of[shard], i)
	}
	var calls sync.WaitGroup
	for shard, numbers := range of {
		calls.Go(func() { s.callShard(ctx, o, shard, requests, numbers, answers, ask) })
	}
	calls.Wait()
	return answers, nil
}

// callShard answers the requests of a shard.
func (s *Service) callShard(ctx context.Context, o Operation, shard *shard, requests []Request, numbers []int, answers []Answer, ask askMany) {
	begin := time.Now()
	asked := make([]client.Request, len(numbers))
	shares := o == AcquireMany
	for i, n := range numbers {
		charge := requests[n].charge()
		asked[i] = client.Request{Policy: charge.Policy, Key: charge.Key, Cost: charge.Cost, IdempotencyKey: requests[n].IdempotencyKey}
		if o == AcquireUpToMany && requests[n].Cost == nil {
			asked[i].Cost = client.Cost(0) // an at_most that is missing is refused
		}
		shares = shares && requests[n].canShare()
	}
	err := s.limitCall(ctx, shard, shares, func(ctx context.Context) error {
		list, taken := ask(ctx, asked)
		for i, a := range list {
			answers[numbers[i]] = Answer{Decision: a.Decision, Err: shard.errorOf(ctx, a.Err).inRequest(numbers[i])}
			if taken != nil {
				answers[numbers[i]].Taken = &taken[i]
			}
		}
		return nil
	})
	for i, n := range numbers {
		if err != nil {
			answers[n].Err = err
		}
		_ = s.observeCall(Call{Operation: o, Policy: asked[i].Policy, Err: answers[n].Err}, begin, answers[n].Decision)
	}
}

func (s *Service) checkCount(o Operation, requests []Request) error {
	n := len(requests)
	if 0 < n && n <= MaxRequests {
		return nil
	}
	err := Invalid("invalid requests", fmt.Sprintf("requests has %d elements.", n), fmt.Sprintf("Send 1 to %d requests in a call.", MaxRequests))
	return s.observeCall(Call{Operation: o, Err: err}, time.Now(), client.Decision{})
}
