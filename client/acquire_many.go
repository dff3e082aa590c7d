package client

import (
	"context"
	"time"
)

// A Request is one of the requests of [Combiner.AcquireMany].
type Request struct {
	Policy, Key string

	// Cost is the tokens that are asked for, such as Cost(5). Left out it is 1.
	Cost CostOption

	// IdempotencyKey names the request, as [IdempotencyKey] does. Nil is none.
	IdempotencyKey *string
}

func (r Request) request() request {
	q := request{policy: r.Policy, key: r.Key, cost: r.Cost.Tokens()}
	if r.IdempotencyKey != nil {
		q.idempotencyKey = *r.IdempotencyKey
	}
	return q
}

// AcquireMany is [Combiner.Acquire] for a caller that has many requests at once, such as a server. Each request is granted, denied
// or refused by itself, as if its caller had asked alone. The answers are in the order of the requests. The requests join the queue
// in one step, without a goroutine for each. AcquireMany returns when all are answered: a request that waits for a locked bucket
// holds up this caller, and no other. A [DenialCache] neither answers nor remembers.
//
// When ctx ends, the requests without an answer have its error.
func (c *Combiner) AcquireMany(ctx context.Context, requests []Request) []Answer {
	begin := time.Now()
	answers := make([]Answer, len(requests))
	c.decideMany(ctx, requests, answers, begin)
	took := time.Since(begin)
	for i := range answers {
		a := &answers[i]
		a.Operation, a.Policy, a.Duration = verbAcquire, requests[i].Policy, took
		if c.hooks.Answered != nil {
			c.hooks.Answered(ctx, *a)
		}
	}
	return answers
}

// decideMany sets the decisions and errors of the answers.
func (c *Combiner) decideMany(ctx context.Context, requests []Request, answers []Answer, begin time.Time) {
	waiters := make([]*waiter, len(requests))
	var alone []int // requests that cannot share a call

	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		for i := range answers {
			answers[i].Err = failed(verbAcquire, ErrClosed)
		}
		return
	}
	c.running.Add(1)
	defer c.running.Done()
	for i := range requests {
		r := requests[i].request()
		if !isSendable(r) {
			alone = append(alone, i)
			continue
		}
		waiters[i], answers[i].Err = c.enqueue(ctx, r, begin)
	}
	c.mu.Unlock()

	for _, i := range alone {
		d, err := c.askAlone(ctx, requests[i].request())
		answers[i].Decision, answers[i].Err = d.Decision, err
	}
	for i, w := range waiters {
		if w != nil {
			d, err := c.await(ctx, w)
			answers[i].Decision, answers[i].Err = d.Decision, err
		}
	}
}

// AcquireMany is [Combiner.AcquireMany]. Stocks grant as for [Prefetcher.Acquire].
func (l *Prefetcher) AcquireMany(ctx context.Context, requests []Request) []Answer {
	if len(l.policies) == 0 {
		return l.combiner.AcquireMany(ctx, requests)
	}
	begin := time.Now()
	answers := make([]Answer, len(requests))
	found := make([]candidate, len(requests))
	var rest []int
	for i := range requests {
		r := requests[i].request()
		found[i] = l.find(r)
		if d, ok := l.grantFrom(ctx, found[i], r); ok {
			answers[i] = Answer{Operation: verbAcquire, Policy: r.policy, Decision: d, Duration: time.Since(begin)}
		} else {
			rest = append(rest, i)
		}
	}
	answerSome(answers, requests, rest, func(rest []Request) []Answer { return l.combiner.AcquireMany(ctx, rest) })
	for _, i := range rest {
		if answers[i].Err == nil {
			l.learn(found[i], requests[i].request(), answers[i].Decision)
		}
	}
	return answers
}

// answerSome asks for the requests of some numbers, and puts their answers in their places.
func answerSome(answers []Answer, requests []Request, numbers []int, ask func([]Request) []Answer) {
	some := make([]Request, len(numbers))
	for i, n := range numbers {
		some[i] = requests[n]
	}
	for i, a := range ask(some) {
		answers[numbers[i]] = a
	}
}
