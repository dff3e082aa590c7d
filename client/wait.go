package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"time"
)

const (
	// maxWait is the longest that the server accepts.
	maxWait = 365 * 24 * time.Hour

	// giveBackTimeout is how long Wait tries to give tokens back after ctx has ended.
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
// answer, it is tried again in the background, a second later, and without an answer for an hour. If the bucket is locked for longer than
// that second, the tokens may stay charged: set a lock_timeout below a second for the sessions of the pool.
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
		case mayRun(err) && ctx.Err() != nil: // it may have taken the tokens
			return Reservation{}, errors.Join(err, undo(giveBack))
		case mayRun(err):
			go func() { _ = undo(giveBack) }()
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
			err = errors.Join(err, undo(giveBack))
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
