package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Charge takes tokens from the bucket of key even if it holds fewer, and returns its new state. Missing tokens are debt:
// Remaining is below zero, and refill pays the debt before anything is granted again. Charge is for usage that is known only
// when it is over. The cost is whole tokens, 0 to 9,000,000,000,000. The option is [IdempotencyKey]. Allowed is always true.
//
// Debt ends at 9,000,000,000,000 tokens, or at the refill of 10,000 years if that is less. Tokens beyond this limit are
// not charged, and not given back by a settlement.
//
// It writes the bucket, and the idempotency key if there is one, and locks both until the transaction ends. A cost of 0 and
// a replay write nothing.
//
// Errors: [ErrUnknownPolicy], [ErrIdempotencyMismatch], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Charge(ctx context.Context, policy, key string, cost int64, opts ...CallOption) (Decision, error) {
	var s settings
	s.read("Charge", opts, "IdempotencyKey")
	defer l.denialCache.forget(policy, key)
	c := tokenCall(verbCharge, "ratelimit_charge($1::text, $2::text, $3::bigint, $4::text)", policy, key, cost, s.idempotencyKey)
	c.repeatable, c.err = s.idempotencyKey != nil, s.err
	return l.answer(ctx, policy, c)
}

// Settle replaces the cost of a grant by its real cost, and returns the new state of the bucket. The grant was made
// under idempotencyKey by Acquire, AcquireAll, AcquireUpTo, Reserve or Charge, and its cost was an estimate. If the estimate was
// too high, the difference goes back, up to full. If it was too low, the difference is taken, also into debt. The cost is whole
// tokens, 0 to 9,000,000,000,000: 0 gives all tokens back. [Limiter.SettleAll] settles all buckets of an AcquireAll.
//
// The first settlement counts. Sent again with the same cost it changes nothing, and is marked Replayed; so it can be
// repeated until it has an answer. With another cost it is [ErrIdempotencyMismatch]. After it, any other
// request that is repeated under the key is [ErrSettled]: the operation is over. A Charge is still replayed.
//
// A grant that is never settled keeps its estimate. Settle in a deferred call, under a context of its own: the context of a
// request ends when its client hangs up.
//
// It writes the bucket and the idempotency key, and locks both until the transaction ends. A repeat writes nothing. Under a
// policy that only watches, a key without a grant is no error: the answer is Shadowed, and nothing was charged.
//
// Errors: [ErrNoGrant], [ErrUnknownPolicy], [ErrIdempotencyMismatch], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Settle(ctx context.Context, policy, key, idempotencyKey string, cost int64) (Decision, error) {
	defer l.denialCache.forget(policy, key)
	c := tokenCall("settle", "ratelimit_settle($1::text, $2::text, $3::text, $4::bigint)", policy, key, idempotencyKey, cost)
	c.repeatable = true
	return l.answer(ctx, policy, c)
}

// A JointSettlement is the answer to [Limiter.SettleAll].
type JointSettlement struct {
	// Replayed means that nothing was settled this time: at least one bucket was settled before, at the same cost.
	Replayed bool

	// Decisions has the new state of the bucket of each settlement.
	Decisions []Decision
}

// SettleAll replaces the costs of the grants of one request by its real costs, of all buckets or of none. The grants were made under
// idempotencyKey, most often by [Limiter.AcquireAll]. The Cost of a settlement is the real cost of its bucket; a bucket that is named
// twice is settled once, at the sum. There are 1 to 1,000 settlements.
//
// Each bucket is settled as by [Limiter.Settle]: once. A bucket that was settled before at the same cost is replayed, and moves no more;
// so SettleAll can be repeated until it has an answer, and completes what single calls have begun. If a bucket has no grant nothing is
// settled, and the error names all of these: leave them out, such as those acquired at a cost of 0.
//
// It writes and locks the rows that as many calls of Settle would, in the order of AcquireAll. A repeat writes nothing.
//
// Errors: as [Limiter.Settle].
func (l *limiter) SettleAll(ctx context.Context, settlements []Charge, idempotencyKey string) (JointSettlement, error) {
	var p packed
	p.add(request{charges: append([]Charge{}, settlements...)}) // none is none, and no plain request
	for _, s := range settlements {
		defer l.denialCache.forget(s.Policy, s.Key)
	}
	begin := l.hooks.begin()
	var settled JointSettlement
	var numbers array[pgtype.Int8]
	err := l.query(ctx, call{
		verb:       "settle all",
		columns:    "replayed, " + numbersOfDecisions,
		function:   "ratelimit_settle_all($1::text[], $2::text[], $3::text, $4::bigint[])",
		args:       []any{p.policies, p.keys, idempotencyKey, p.costs},
		tokens:     true,
		repeatable: true,
	}, &settled.Replayed, &numbers)
	if err == nil {
		settled.Decisions, err = decisionsOf("settle all", numbers, len(settlements))
	}
	var policy string
	var first Decision
	if err == nil {
		policy, first = settlements[0].Policy, settled.Decisions[0]
		first.Replayed = settled.Replayed
	}
	l.hooks.answered(ctx, "settle all", policy, begin, first, err)
	if err != nil {
		return JointSettlement{}, err
	}
	return settled, nil
}

// A Reservation is the answer to [Limiter.Reserve]. Of its Decision, RetryAfter is Wait, Remaining below zero counts the tokens that
// callers, this one included, are waiting for, and Shadowed means that enforcing the policy would make this caller wait, or refuse it.
type Reservation struct {
	Decision

	// Wait is how long to wait before acting. After a refusal it is how long the wait would have been, or [math.MaxInt64] if
	// no wait would help: see [Decision.Never].
	Wait time.Duration
}

// Reserve takes tokens from the bucket of key now, if it will have them within maxWait, and returns how long to wait before
// acting. Options are [Cost] and [IdempotencyKey]. maxWait is whole microseconds, up to 365 days; with 0 it is Acquire. A
// refusal is a [Reservation] that is not Allowed, and a nil error. [Limiter.Wait] waits, too.
//
// Tokens that are not there yet are taken all the same, as debt. So callers are served in the order of their calls, and an Acquire
// is denied while callers wait. A caller that reserves and then does not act gives the tokens back with [Limiter.Settle] at a cost
// of 0. Callers already in line keep their wait.
//
// The grant is remembered for as long as the policy remembers after the wait is over. A repeat has the rest of the wait.
// Acquire under the same key returns a denial until the wait is over, and then the grant.
//
// A quota lends nothing of a period that has not begun: it grants with a Wait of 0, or refuses, and Wait is the time to the next
// turn.
//
// It writes and locks the same rows as an Acquire. A refusal writes nothing. A [DenialCache] neither answers nor remembers.
//
// Errors: as [Limiter.Acquire].
func (l *limiter) Reserve(ctx context.Context, policy, key string, maxWait time.Duration, opts ...CallOption) (Reservation, error) {
	begin := l.hooks.begin()
	d, err := l.reserve(ctx, newRequest("Reserve", policy, key, opts), maxWait)
	l.hooks.answered(ctx, verbReserve, policy, begin, d, err)
	return Reservation{d, d.RetryAfter}, err
}

// reserve returns a decision whose RetryAfter is the wait.
func (l *limiter) reserve(ctx context.Context, r request, maxWait time.Duration) (Decision, error) {
	if maxWait%time.Microsecond != 0 {
		return Decision{}, failed(verbReserve, fmt.Errorf("%w: maxWait %v must be whole microseconds", ErrInvalidArgument, maxWait))
	}
	return l.decide(ctx, call{
		verb:       verbReserve,
		columns:    reservationColumns,
		function:   "ratelimit_reserve($1::text, $2::text, $3::text::interval, $4::bigint, $5::text)",
		args:       []any{r.policy, r.key, interval(maxWait), r.cost, r.idempotencyKey},
		tokens:     true,
		repeatable: r.keyed(),
		err:        r.err,
	})
}

// A PartialDecision is the answer to [Limiter.AcquireUpTo].
type PartialDecision struct {
	Decision

	// Taken is how many tokens were taken: between [AtLeast] and atMost, or 0 for a denial. Under a policy
	// that only watches it is always atMost.
	Taken int64
}

var partialColumns = decisionColumns + ", taken"

// AcquireUpTo takes as many whole tokens from the bucket of key as it holds, up to atMost, and returns how many. If the bucket
// holds fewer than [AtLeast], it takes none, and returns a denial. RetryAfter is then the time until the bucket holds AtLeast.
// Options are AtLeast and [IdempotencyKey]. Both numbers are 1 or more, and AtLeast is no more than atMost.
//
// A repeat under the same idempotency key has the same Taken; it is [ErrIdempotencyMismatch] if Taken is outside its own
// bounds. To Acquire, the key names a grant whose cost is Taken.
//
// It writes and locks the same rows as an Acquire. A [DenialCache] neither answers nor remembers.
//
// Errors: as [Limiter.Acquire].
func (l *limiter) AcquireUpTo(ctx context.Context, policy, key string, atMost int64, opts ...CallOption) (PartialDecision, error) {
	s := settings{atLeast: 1}
	s.read("AcquireUpTo", opts, "AtLeast", "IdempotencyKey")
	begin := l.hooks.begin()
	var taken int64
	d, err := l.decide(ctx, call{
		verb:       verbAcquireUpTo,
		columns:    partialColumns,
		function:   "ratelimit_acquire_up_to($1::text, $2::text, $3::bigint, $4::bigint, $5::text)",
		args:       []any{policy, key, atMost, s.atLeast, s.idempotencyKey},
		tokens:     true,
		repeatable: s.idempotencyKey != nil,
		err:        s.err,
	}, &taken)
	if err != nil {
		taken = 0 // a row comes before the commit, which may fail
	}
	l.hooks.answered(ctx, verbAcquireUpTo, policy, begin, d, err)
	return PartialDecision{d, taken}, err
}

const (
	// maxWait is the longest that the server accepts.
	maxWait = 365 * 24 * time.Hour

	// giveBackTimeout is how long Wait, after ctx has ended, and a Prefetcher try to give tokens back.
	giveBackTimeout = 5 * time.Second
)

// Wait takes tokens from the bucket of key and returns when they are there, or fails. The option is [Cost]. It makes one
// call of [Limiter.Reserve], and sleeps for its Wait: it does not ask again. Callers are served in the order of
// their calls, and none is early.
//
// A quota lends nothing of a period that has not begun. So at a quota, Wait sleeps until the next turn and up to a second more,
// at random, because all callers wait for the same instant. Then it reserves again. Callers of a quota are in no order.
//
// When the tokens would come after the deadline of ctx, or never, Wait fails at once, with [ErrTooLate], and has taken nothing. So it
// does while an override blocks the key, or has a capacity below the cost.
// Without a deadline it sleeps for up to 365 days. Either way the [Reservation] has the time that the wait would have taken.
//
// When ctx ends first, Wait gives the tokens back by [Limiter.Settle] at a cost of 0, for up to 5 seconds under a context of
// its own, and returns the error of ctx. Callers already in line keep their time. The idempotency key for
// this is drawn at random, so each Wait leaves one behind for as long as the policy remembers. So it does in the background when the
// connection breaks while the server reserves. The server may carry out a lost call later: if there was nothing to give back, or no
// answer, it is tried again in the background, a second later, and for an hour without an answer, or while pg_stat_activity shows such a
// call under way. If this role does not see it there, and the bucket is locked for longer than that second, the tokens may stay charged:
// set a lock_timeout below a second for the sessions of the pool.
//
// It is for calls outside of a transaction, which would keep the bucket locked meanwhile.
//
// Errors: [ErrTooLate], the error of ctx, and the errors of Reserve.
func (l *limiter) Wait(ctx context.Context, policy, key string, opts ...CallOption) (Reservation, error) {
	const verb = "wait"
	if isInTransaction(l.db) || l.inTx {
		return Reservation{}, failed(verb, fmt.Errorf("%w: Wait is for calls outside a transaction", ErrInvalidArgument))
	}
	var s settings
	if s.read("Wait", opts, "Cost"); s.err != nil {
		return Reservation{}, s.err
	}
	if err := ctx.Err(); err != nil {
		return Reservation{}, failed(verb, err)
	}

	var slept time.Duration
	for {
		longest := max(0, maxWait-slept.Truncate(time.Microsecond))
		if deadline, ok := ctx.Deadline(); ok {
			longest = min(longest, max(0, time.Until(deadline).Truncate(time.Microsecond)))
		}
		idempotencyKey := rand.Text()
		giveBack := func() (bool, error) { return l.giveBack(ctx, policy, key, idempotencyKey) }
		r, err := l.Reserve(ctx, policy, key, longest, s.cost, IdempotencyKey(idempotencyKey))
		pause := r.Wait
		switch {
		case lostStatement(err) != "" && ctx.Err() != nil: // it may have taken the tokens
			return Reservation{}, errors.Join(err, l.undo(err, giveBack))
		case lostStatement(err) != "":
			go func() { _ = l.undo(err, giveBack) }()
			return Reservation{}, err
		case err != nil:
			return Reservation{}, err
		case !r.Allowed && (r.Wait > longest || s.cost.Tokens() > r.Capacity):
			return r, failed(verb, ErrTooLate)
		case !r.Allowed: // a quota, until its next turn
			pause += mathrand.N(min(time.Second, (longest-r.Wait)/2) + 1)
		case r.Wait == 0:
			l.hooks.slept(ctx, policy, slept, nil)
			return r, nil
		}
		begin := time.Now()
		err = sleep(ctx, pause)
		slept += time.Since(begin)
		if err == nil && !r.Allowed {
			continue
		}
		l.hooks.slept(ctx, policy, slept, err)
		if err == nil {
			return r, nil
		}
		err = failed(verb, err)
		if r.Allowed {
			err = errors.Join(err, l.undo(err, giveBack))
		}
		return r, err
	}
}

// sleep returns the error of ctx if ctx ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// giveBack settles at 0, also when ctx has ended, and reports whether there was something to give back.
func (l *limiter) giveBack(ctx context.Context, policy, key, idempotencyKey string) (given bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
	defer cancel()
	_, err = l.Settle(ctx, policy, key, idempotencyKey, 0)
	if errors.Is(err, ErrNoGrant) {
		return false, nil
	}
	return err == nil, err
}
