package client

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// maxCharges of one request.
const maxCharges = 1000

// A Charge is the part of a request that one bucket is charged: see [Limiter.AcquireAll].
type Charge struct {
	Policy, Key string

	// Cost is the tokens that the bucket is charged, such as Cost(5). Left out it is 1. [Cost](0) looks
	// at the bucket, and takes nothing.
	Cost CostOption
}

// A JointDecision is the answer to a request of several charges. The embedded Decision is of the whole:
// Allowed reports whether all charges were taken, RetryAfter is the time until all would be. Remaining, ResetAfter
// and Capacity belong to the binding charge. Replayed means that the charges were granted earlier and nothing
// was taken this time, Shadowed that a charge was allowed because its policy only watches.
type JointDecision struct {
	Decision

	// Binding is the index of the charge that decides: of a denial, the charge with the longest wait; of a grant,
	// the charge that its bucket covers the fewest times more.
	Binding int

	// Decisions has for each charge the decision of its bucket, about all tokens that the request charges to that
	// bucket: Allowed and RetryAfter as if it were asked alone, Remaining and ResetAfter as they are
	// after the whole request.
	Decisions []Decision
}

// AcquireAll takes the tokens of all charges if each bucket holds enough, and otherwise takes nothing. The
// option is [IdempotencyKey]. A request has 1 to 1,000 charges. A bucket that is named twice is charged
// the sum.
//
// An idempotency key belongs to buckets, here too. A bucket that remembers it with the same charge answers
// as it did, and is not charged again. With another charge it is [ErrIdempotencyMismatch], and nothing is
// taken anywhere.
//
// A grant writes and locks the same rows as several acquires. It takes the buckets in one order, for any
// order of the charges, so that calls that are transactions of their own do not deadlock. A denial writes
// nothing, and locks nothing. A [DenialCache] neither answers nor remembers.
//
// Errors: as [Limiter.Acquire].
func (l *Limiter) AcquireAll(ctx context.Context, charges []Charge, opts ...CallOption) (JointDecision, error) {
	r := newJointRequest(charges, opts)
	begin := l.hooks.begin()
	d, err := l.askAll(ctx, r)
	l.hooks.answeredAll(ctx, r.charges, begin, d, err)
	return d, err
}

// AcquireAll is [Limiter.AcquireAll], and shares calls as [Combiner.Acquire] does, with other callers of
// AcquireAll. Requests that name the same buckets in the same order are never in two calls at a time. Requests
// that have only some buckets in common may be in two: the second call then waits in the server for the buckets that
// the first has locked. So a call that waits for one of its buckets holds up, here, requests that name all of them.
//
// Errors: as Limiter.AcquireAll, [ErrOverloaded] and [ErrClosed].
func (c *Combiner) AcquireAll(ctx context.Context, charges []Charge, opts ...CallOption) (JointDecision, error) {
	r := newJointRequest(charges, opts)
	r.key = nameOfAll(r.charges)
	begin := c.hooks.begin()
	d, err := c.combine(ctx, r)
	c.hooks.answeredAll(ctx, r.charges, begin, d, err)
	return d, err
}

func newJointRequest(charges []Charge, opts []CallOption) request {
	var s settings
	s.read("AcquireAll", opts, "IdempotencyKey")
	// The caller may change its slice when it has left, and the request is still to be sent.
	return request{charges: append(make([]Charge, 0, len(charges)), charges...), idempotencyKey: s.idempotencyKey, err: s.err}
}

// nameOfAll returns a name that only the same buckets in the same order have.
func nameOfAll(charges []Charge) string {
	var name []byte
	for _, c := range charges {
		for _, text := range [...]string{c.Policy, c.Key} {
			name = strconv.AppendInt(name, int64(len(text)), 10)
			name = append(append(name, ' '), text...)
		}
	}
	return string(name)
}

// The columns of a joint decision.
var jointColumns = decisionColumns + ", binding, " + numbersOfDecisions

// numbersOfDecisions selects an array of decisions as one of numbers.
var numbersOfDecisions = "array(select " + numbersOf("d.") + " from pg_catalog.unnest(decisions) with ordinality as d order by d.ordinality)"

// decisionsOf reads what numbersOfDecisions selects about so many charges.
func decisionsOf(verb string, numbers []pgtype.Int8, charges int) ([]Decision, error) {
	if len(numbers) != fieldsOfDecision*charges {
		return nil, failed(verb, fmt.Errorf("%d numbers about %d charges", len(numbers), charges))
	}
	decisions := make([]Decision, charges)
	for i := range decisions {
		decisions[i] = decisionOf(numbers[fieldsOfDecision*i:])
	}
	return decisions, nil
}

// askAll sends one request of several charges.
func (l *limiter) askAll(ctx context.Context, r request) (JointDecision, error) {
	var p packed
	p.add(r)
	var binding int64
	var numbers array[pgtype.Int8]
	whole, err := l.decide(ctx, call{
		verb:       r.verb(),
		columns:    jointColumns,
		function:   "ratelimit_acquire_all($1::text[], $2::text[], $3::bigint[], $4::text)",
		args:       []any{p.policies, p.keys, p.costs, r.idempotencyKey},
		tokens:     true,
		repeatable: r.keyed(),
		err:        r.err,
	}, &binding, &numbers)
	if err != nil {
		return JointDecision{}, err
	}
	decisions, err := decisionsOf(r.verb(), numbers, len(r.charges))
	if err != nil || binding < 1 || int(binding) > len(r.charges) {
		return JointDecision{}, failed(r.verb(), fmt.Errorf("%d numbers about %d charges, of which %d is the binding one",
			len(numbers), len(r.charges), binding))
	}
	return JointDecision{Decision: whole, Binding: int(binding) - 1, Decisions: decisions}, nil
}

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
// holds up this caller, and no other.
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
	var changes []uint64
	if c.denialCache != nil {
		changes = make([]uint64, len(requests))
	}
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
		if changes != nil && !r.keyed() {
			var known bool
			if answers[i].Decision, known, changes[i] = c.denialCache.find(r, begin); known {
				continue
			}
		}
		if !mayShare(r) {
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
			if r := requests[i].request(); changes != nil && !r.keyed() {
				c.denialCache.learn(r, d.Decision, err, begin, changes[i])
			}
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
	var rest []int
	var asked []Request
	for i, r := range requests {
		if d, ok := l.grant(ctx, r.request()); ok {
			answers[i] = Answer{Operation: verbAcquire, Policy: r.Policy, Decision: d, Duration: time.Since(begin)}
		} else {
			rest, asked = append(rest, i), append(asked, r)
		}
	}
	for i, a := range l.combiner.AcquireMany(ctx, asked) {
		if answers[rest[i]] = a; a.Err == nil {
			l.learn(asked[i].request(), a.Decision)
		}
	}
	return answers
}
