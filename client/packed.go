package client

import (
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5/pgtype"
)

// A packed is one call of ratelimit_acquire_packed, for the requests of a batch: its arguments, and the arrays
// that answer it. The next call reuses its memory.
//
// An element is one bucket's part of a request: all of a plain request, one charge of a joint one. Numbers
// of elements and of requests count from 1.
type packed struct {
	policies, keys  []string // of each element
	costs           []int64
	sizes           []int64  // the elements of each request; empty when each has one
	idempotencyKeys []string // of each request; empty when they have none

	elements               array[int64] // elements with a decision: the i-th decision is about element elements[i]
	remaining, capacity    array[int64]
	retryAfter, resetAfter array[pgtype.Int8] // in microseconds
	replayed, shadowed     array[bool]        // empty when all are false

	refused                         array[int64] // requests that have an error
	codes, messages, details, hints array[pgtype.Text]

	// Of joint requests only.
	requests                                            array[int64] // joint ones that have a decision
	requestsAllowed, requestsReplayed, requestsShadowed array[bool]
	bindings                                            array[int32]

	columns []any // where the arrays are read to, the arrays of joint requests last
}

const (
	packedColumns = "elements, remaining, retry_after_us, reset_after_us, capacity, replayed, shadowed, " +
		"refused, error_codes, error_messages, error_details, error_hints"
	packedJointColumns = packedColumns + ", requests, requests_allowed, requests_replayed, requests_shadowed, bindings"

	plainColumns = 12 // of packed.columns
)

func newPacked() *packed {
	p := new(packed)
	p.columns = []any{
		&p.elements, &p.remaining, &p.retryAfter, &p.resetAfter, &p.capacity, &p.replayed, &p.shadowed,
		&p.refused, &p.codes, &p.messages, &p.details, &p.hints,
		&p.requests, &p.requestsAllowed, &p.requestsReplayed, &p.requestsShadowed, &p.bindings,
	}
	return p
}

// call is for the requests of all waiters. Its columns are read to dest.
func (p *packed) call(waiters []*waiter) (c call, dest []any) {
	p.policies, p.keys, p.costs, p.sizes, p.idempotencyKeys = p.policies[:0], p.keys[:0], p.costs[:0], p.sizes[:0], p.idempotencyKeys[:0]
	for _, w := range waiters {
		p.add(w.request)
	}
	c = call{
		verb:       waiters[0].verb(),
		columns:    packedColumns,
		function:   "ratelimit_acquire_packed($1::text[], $2::text[], $3::bigint[], $4::bigint[]::integer[], $5::text[])",
		args:       []any{p.policies, p.keys, p.costs, nil, nil},
		tokens:     true,
		repeatable: waiters[0].keyed(),
	}
	dest = p.columns[:plainColumns]
	if len(p.sizes) > 0 {
		c.args[3] = p.sizes
		c.columns, dest = packedJointColumns, p.columns
	}
	if len(p.idempotencyKeys) > 0 {
		c.args[4] = p.idempotencyKeys
	}
	return c, dest
}

func (p *packed) add(r request) {
	if r.keyed() {
		p.idempotencyKeys = append(p.idempotencyKeys, r.idempotencyKey.(string))
	}
	charges := []Charge{{r.policy, r.key, Cost(r.cost)}}
	if r.isJoint() {
		charges = r.charges
		p.sizes = append(p.sizes, int64(len(charges)))
	}
	for _, c := range charges {
		p.policies = append(p.policies, c.Policy)
		p.keys = append(p.keys, c.Key)
		p.costs = append(p.costs, c.Cost.Tokens())
	}
}

var (
	errUnanswered = failed(verbAcquire, errors.New("no answer"))
	errMisshapen  = errors.New("an answer whose arrays do not fit together")
)

// answer gives each waiter its answer.
func (p *packed) answer(waiters []*waiter) error {
	n, requests := len(p.elements), p.elements
	if len(p.sizes) > 0 {
		requests = p.requests
	}
	errs := len(p.refused)
	if len(requests)+errs != len(waiters) {
		return fmt.Errorf("%d answers to %d requests", len(requests)+errs, len(waiters))
	}
	if len(p.remaining) != n || len(p.retryAfter) != n || len(p.resetAfter) != n || len(p.capacity) != n ||
		!p.replayed.isEmptyOr(n) || !p.shadowed.isEmptyOr(n) ||
		len(p.codes) != errs || len(p.messages) != errs || len(p.details) != errs || len(p.hints) != errs ||
		!areNumbers(p.elements, len(p.policies)) || !areNumbers(p.refused, len(waiters)) {
		return errMisshapen
	}

	for _, w := range waiters {
		w.answer, w.err = JointDecision{}, errUnanswered
	}
	if len(p.sizes) == 0 {
		for i, number := range p.elements {
			w := waiters[number-1]
			w.answer.Decision, w.err = p.decision(i), nil
		}
	} else if !p.answerJoint(waiters) {
		return errMisshapen
	}
	for i, number := range p.refused {
		w := waiters[number-1]
		w.err = refused(w.verb(), p.codes[i].String, p.messages[i].String, p.details[i].String, p.hints[i].String)
	}
	return nil
}

// answerJoint reports whether the decisions fit the waiters' charges.
func (p *packed) answerJoint(waiters []*waiter) bool {
	n := len(p.requests)
	if len(p.requestsAllowed) != n || len(p.bindings) != n ||
		!p.requestsReplayed.isEmptyOr(n) || !p.requestsShadowed.isEmptyOr(n) || !areNumbers(p.requests, len(waiters)) {
		return false
	}
	decisions := make([]Decision, len(p.policies))
	for i, number := range p.elements {
		decisions[number-1] = p.decision(i)
	}
	rest := decisions
	for _, w := range waiters {
		n := len(w.charges)
		w.answer.Decisions, rest = rest[:n:n], rest[n:]
	}
	for i, number := range p.requests {
		w, binding := waiters[number-1], int(p.bindings[i])-1
		if binding < 0 || binding >= len(w.charges) {
			return false
		}
		w.answer.Decision, w.answer.Binding, w.err = w.answer.Decisions[binding], binding, nil
		w.answer.Allowed = p.requestsAllowed[i]
		w.answer.Replayed = flag(p.requestsReplayed, i)
		w.answer.Shadowed = flag(p.requestsShadowed, i)
	}
	for _, number := range p.refused {
		waiters[number-1].answer = JointDecision{}
	}
	return true
}

func (p *packed) decision(i int) Decision {
	retryAfter := wait(p.retryAfter[i])
	return Decision{
		Allowed:    retryAfter == 0,
		Remaining:  p.remaining[i],
		RetryAfter: retryAfter,
		ResetAfter: wait(p.resetAfter[i]),
		Capacity:   p.capacity[i],
		Replayed:   flag(p.replayed, i),
		Shadowed:   flag(p.shadowed, i),
	}
}

func flag(flags array[bool], i int) bool { return len(flags) > 0 && flags[i] }

// areNumbers reports whether all are of 1 to n.
func areNumbers(numbers []int64, n int) bool {
	return !slices.ContainsFunc(numbers, func(number int64) bool { return number < 1 || number > int64(n) })
}

// An array is read from an array of PostgreSQL, of any dimensions and row by row, into the memory of
// earlier arrays. Null is empty.
type array[T any] []T

// SetDimensions is for pgx, like the methods after it.
func (a *array[T]) SetDimensions(dimensions []pgtype.ArrayDimension) error {
	n := min(1, len(dimensions))
	for _, d := range dimensions {
		n *= int(d.Length)
	}
	*a = slices.Grow((*a)[:0], n)[:n]
	return nil
}

// ScanIndex returns where the element is read to.
func (a *array[T]) ScanIndex(i int) any { return &(*a)[i] }

// ScanIndexType returns a value of the type that ScanIndex returns.
func (a *array[T]) ScanIndexType() any {
	*a = slices.Grow((*a)[:0], 1)
	return &(*a)[:1][0]
}

func (a array[T]) isEmptyOr(n int) bool { return len(a) == 0 || len(a) == n }
