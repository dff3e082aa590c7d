package service

import (
	"cmp"
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
	if err := s.checkCount(requests); err != nil {
		return nil, err
	}
	answers := make([]Answer, len(requests))
	of := make([][]int, len(s.shards))
	for i, r := range requests {
		n := 0
		if len(of) > 1 {
			n = client.ShardOf(r.Key, len(of))
		}
		of[n] = append(of[n], i)
	}
	var asking sync.WaitGroup
	for n, numbers := range of[1:] {
		if len(numbers) > 0 {
			asking.Go(func() { s.some(ctx, &s.shards[1+n], requests, numbers, answers) })
		}
	}
	if len(of[0]) > 0 {
		s.some(ctx, &s.shards[0], requests, of[0], answers)
	}
	asking.Wait()
	return answers, nil
}

// some answers the requests of a shard.
func (s *Service) some(ctx context.Context, shard *shard, requests []Request, numbers []int, answers []Answer) {
	begin := time.Now()
	some := make([]client.Request, len(numbers))
	shares := true
	for i, n := range numbers {
		r := requests[n]
		some[i] = client.Request{Policy: cmp.Or(r.Policy, DefaultPolicy), Key: r.Key, IdempotencyKey: r.IdempotencyKey}
		if r.Cost != nil {
			some[i].Cost = client.Cost(*r.Cost)
		}
		shares = shares && r.canShare()
	}
	err := s.within(ctx, shard, shares, func(ctx context.Context) error {
		for i, a := range s.limiter.AcquireMany(ctx, some) {
			answers[numbers[i]] = Answer{Decision: a.Decision, Err: errorOf(ctx, a.Err).of(numbers[i])}
		}
		return nil
	})
	for i, n := range numbers {
		if err != nil {
			answers[n].Err = err
		}
		s.finish(Call{Operation: AcquireMany, Policy: some[i].Policy, Err: answers[n].Err}, begin, answers[n].Decision)
	}
}

func (s *Service) checkCount(requests []Request) error {
	n := len(requests)
	if 0 < n && n <= MaxRequests {
		return nil
	}
	err := Invalid("invalid requests", fmt.Sprintf("requests has %d elements.", n), fmt.Sprintf("Send 1 to %d requests in a call.", MaxRequests))
	s.finish(Call{Operation: AcquireMany, Err: err}, time.Now(), client.Decision{})
	return err
}
