package client

import (
	"context"
	"fmt"
	"time"
)

// Charge takes tokens from the bucket of key whatever it holds, and reports what it holds then. What it does not hold is
// debt: Remaining is below zero, and refill pays the debt before anything is granted again. It is for usage that is known
// only when it is over. The cost is whole tokens, 0 to 9,000,000,000,000. The option is [IdempotencyKey]. Allowed is always
// true.
//
// Debt ends at 9,000,000,000,000 tokens, or at what the bucket refills in 10,000 years if that is less. What goes beyond is
// not charged, and not given back by a settlement.
//
// It writes the bucket, and the idempotency key if there is one, and locks both until the transaction ends. A cost of 0 and
// a replay write nothing.
//
// Errors: [ErrUnknownPolicy], [ErrIdempotencyMismatch], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Charge(ctx context.Context, policy, key string, cost int64, opts ...CallOption) (Decision, error) {
	var s settings
	s.read("Charge", opts, "IdempotencyKey")
	defer l.denials.forget(policy, key)
	return l.answer(ctx, policy, call{
		verb:     verbCharge,
		function: "ratelimit_charge($1::text, $2::text, $3::bigint, $4::text)",
		args:     []any{policy, key, cost, s.idempotencyKey},
		tokens:   true,
		once:     s.idempotencyKey != nil,
		err:      s.err,
	})
}

// Settle replaces the cost of a grant by what it really cost, and reports what the bucket holds then. The grant was made
// under idempotencyKey by Acquire, AcquireAll, AcquireUpTo, Reserve or Charge, and its cost was an estimate. What was too
// much goes back, up to full; what was too little is taken, also into debt. The cost is whole tokens, 0 to
// 9,000,000,000,000: 0 gives all of it back. Of a grant of AcquireAll, each bucket is settled by itself.
//
// The first settlement counts. Sent again with the same cost it changes nothing, and is marked Replayed; so it can be
// repeated until it has an answer. With another cost it is [ErrIdempotencyMismatch]. Any other
// request that is repeated under the key after it is [ErrSettled]: the operation is over. A Charge is still replayed.
//
// A grant that is never settled keeps its estimate. Settle in a deferred call, under a context of its own: that of a
// request ends when its client hangs up.
//
// It writes the bucket and the idempotency key, and locks both until the transaction ends. A repeat writes nothing. Under a
// policy that only watches, a key without a grant is no error: the answer is Shadowed, and nothing was charged.
//
// Errors: [ErrNoGrant], [ErrUnknownPolicy], [ErrIdempotencyMismatch], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Settle(ctx context.Context, policy, key, idempotencyKey string, cost int64) (Decision, error) {
	defer l.denials.forget(policy, key)
	return l.answer(ctx, policy, call{
		verb:     verbSettle,
		function: "ratelimit_settle($1::text, $2::text, $3::text, $4::bigint)",
		args:     []any{policy, key, idempotencyKey, cost},
		tokens:   true,
		once:     true,
	})
}

// A Reservation is the answer to [Limiter.Reserve]. Times count from the moment the server decided.
type Reservation struct {
	// Allowed tells whether the tokens were taken.
	Allowed bool

	// Wait is how long to wait before acting. Of a refusal it is how long that would have been, [math.MaxInt64] if for
	// ever: see [Reservation.Never].
	Wait time.Duration

	// Remaining is what the bucket holds after the call, in whole tokens, rounded down: below zero, the tokens that
	// others, and this caller, are waiting for.
	Remaining int64

	// ResetAfter, Capacity and Replayed are as in a [Decision].
	ResetAfter time.Duration
	Capacity   int64
	Replayed   bool

	// Shadowed tells that the policy only watches, and that enforcing it would have this caller wait, or refuse it. Wait
	// is then zero.
	Shadowed bool
}

// Never reports whether no wait would help: the cost is above the capacity, or above what a bucket holds whose policy
// refills nothing.
func (r Reservation) Never() bool { return r.Wait == never }

// Reserve takes tokens from the bucket of key now, if it will have them within maxWait, and tells how long to wait before
// acting. Options are [Cost] and [IdempotencyKey]. maxWait is whole microseconds, up to 365 days; with 0 it is Acquire. A
// refusal is a [Reservation] that is not Allowed, and a nil error. [Limiter.Wait] waits, too.
//
// What is not there yet is taken all the same, as debt. So callers are served in the order of their calls, and an Acquire is
// denied while others wait. Who reserves and then does not act gives the tokens back with [Limiter.Settle] at a cost of 0.
// That does not shorten the wait of those behind.
//
// The grant is remembered for as long as the policy remembers after the wait is over. A repeat has the rest of the wait.
// Until then Acquire under the same key answers a denial, and then the grant.
//
// It writes and locks what an Acquire does. A refusal writes nothing. A [DenialCache] neither answers nor remembers.
//
// Errors: those of [Limiter.Acquire].
func (l *limiter) Reserve(ctx context.Context, policy, key string, maxWait time.Duration, opts ...CallOption) (Reservation, error) {
	begin := l.hooks.begin()
	d, err := l.reserve(ctx, newRequest("Reserve", policy, key, opts), maxWait)
	l.hooks.answered(ctx, verbReserve, policy, begin, d, err)
	return Reservation{
		Allowed:    d.Allowed,
		Wait:       d.RetryAfter,
		Remaining:  d.Remaining,
		ResetAfter: d.ResetAfter,
		Capacity:   d.Capacity,
		Replayed:   d.Replayed,
		Shadowed:   d.Shadowed,
	}, err
}

// reserve returns a decision whose RetryAfter is the wait.
func (l *limiter) reserve(ctx context.Context, r request, maxWait time.Duration) (Decision, error) {
	if maxWait%time.Microsecond != 0 {
		return Decision{}, failed(verbReserve, fmt.Errorf("%w: maxWait %v must be whole microseconds", ErrInvalidArgument, maxWait))
	}
	var row decisionRow
	err := l.query(ctx, call{
		verb:     verbReserve,
		columns:  reservationColumns,
		function: "ratelimit_reserve($1::text, $2::text, $3::text::interval, $4::bigint, $5::text)",
		args:     []any{r.policy, r.key, interval(maxWait), r.cost, r.idempotencyKey},
		tokens:   true,
		once:     r.keyed(),
		err:      r.err,
	}, row.columns()...)
	if err != nil {
		return Decision{}, err
	}
	return row.decision(), nil
}

// A PartialDecision is the answer to [Limiter.AcquireUpTo].
type PartialDecision struct {
	Decision

	// Taken is how many tokens were taken: between those asked for at least and at most, or 0 for a denial. Under a policy
	// that only watches it is always what was asked for at most.
	Taken int64
}

var partialColumns = decisionColumns + ", taken"

// AcquireUpTo takes as many whole tokens from the bucket of key as it holds, atMost, and tells how many. With fewer than
// [AtLeast] it takes none, and answers a denial, whose RetryAfter is the time until that many are there. Options are AtLeast
// and [IdempotencyKey]. Both numbers are 1 or more, and AtLeast is no more than atMost.
//
// A repeat under the same idempotency key has the same Taken; it is [ErrIdempotencyMismatch] if that is outside its own
// bounds. To Acquire, the key is that of a grant of this cost.
//
// It writes and locks what an Acquire does. A [DenialCache] neither answers nor remembers.
//
// Errors: those of [Limiter.Acquire].
func (l *limiter) AcquireUpTo(ctx context.Context, policy, key string, atMost int64, opts ...CallOption) (PartialDecision, error) {
	s := settings{atLeast: 1}
	s.read("AcquireUpTo", opts, "AtLeast", "IdempotencyKey")
	var row decisionRow
	var d PartialDecision
	begin := l.hooks.begin()
	err := l.query(ctx, call{
		verb:     verbAcquireUpTo,
		columns:  partialColumns,
		function: "ratelimit_acquire_up_to($1::text, $2::text, $3::bigint, $4::bigint, $5::text)",
		args:     []any{policy, key, atMost, s.atLeast, s.idempotencyKey},
		tokens:   true,
		once:     s.idempotencyKey != nil,
		err:      s.err,
	}, append(row.columns(), &d.Taken)...)
	if err != nil {
		d = PartialDecision{}
	} else {
		d.Decision = row.decision()
	}
	l.hooks.answered(ctx, verbAcquireUpTo, policy, begin, d.Decision, err)
	return d, err
}
