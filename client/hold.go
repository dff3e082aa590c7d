package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

const (
	// releaseTimeout is how long a release goes on after its context has ended.
	releaseTimeout = 5 * time.Second

	// maxAskPause is the longest pause between two tries to renew, and about the longest between two tries to hold.
	maxAskPause = time.Second

	// undoFor is how long a call is undone whose answer was lost, and with it the length of the lease. An hour outlasts a failover. What is
	// held longer ends with its lease.
	undoFor = time.Hour

	// maxUndoPause is the longest pause between two tries to undo.
	maxUndoPause = 30 * time.Second

	// maxUndoing bounds the calls of this process that wait to be undone. Each takes a connection twice, for up to 10 seconds, after each
	// pause.
	maxUndoing = 10_000

	// maxHeldFor keeps sums of times in range.
	maxHeldFor = 100 * 365 * 24 * time.Hour

	// leastPatience is how long a renewal may take even if a third of the lease is less.
	leastPatience = time.Second
)

// undoing counts the calls that wait to be undone.
var undoing atomic.Int64

// A HoldDecision is the answer to [Limiter.Hold]. Times count from the moment the server decided, in whole microseconds.
type HoldDecision struct {
	// Allowed reports whether the slots are held.
	Allowed bool

	// Remaining is the number of slots that are free after the call. It is below zero after the capacity was lowered.
	Remaining int64

	// RetryAfter is how long until the same request is allowed if no holder holds, renews or releases meanwhile. Holders
	// usually release earlier. Zero when allowed, [math.MaxInt64] when it never will be: see [HoldDecision.Never].
	RetryAfter time.Duration

	// HeldFor is the length of the lease. Zero when denied.
	HeldFor time.Duration

	// Capacity is the number of slots of a key: the policy's number, or the override's.
	Capacity int64

	// Renewed means that the holder held the slots already: this call was repeated after a lost answer, or its HoldAs was.
	Renewed bool

	// Shadowed means that the policy only watches, and that enforcing it would have denied: nothing is held.
	Shadowed bool
}

// Never reports whether no wait would help: the cost is above the capacity, and no override that ends is the reason.
func (d HoldDecision) Never() bool { return d.RetryAfter == never }

// A Hold is slots that this program holds, by a lease that it renews. A nil Hold holds nothing. Its methods are safe for
// concurrent use.
type Hold struct {
	limiter             *limiter
	policy, key, holder string
	ctx                 holdContext
	stop                context.CancelCauseFunc // ends ctx
	calls               context.Context         // of renewals: it does not end
	began               time.Time               // from here a tenure counts
	idle                chan struct{}           // closed when no renewal is under way, nor will be
	releasing           chan struct{}           // has an element while a Release is under way
	released            bool                    // guarded by releasing
	late                atomic.Bool             // a Release has failed, and is repeated in the background
	timer               *time.Timer             // at the end of the lease

	mu      sync.Mutex
	tenure  tenure // guarded by mu
	failure error  // of the last renewal, guarded by mu
}

// Hold takes slots of key if enough are free, and holds them until [Hold.Release], or until this program dies. It is for
// policies with a [Policy.Lease]. The option is [Cost], 1 or more. A denial is a nil *Hold, a [HoldDecision] that is not Allowed,
// and a nil error.
//
//	h, d, err := limiter.Hold(ctx, "jobs", "tenant:7")
//	switch {
//	case err != nil:
//		// The database could not answer.
//	case !d.Allowed:
//		// Try again in d.RetryAfter, or earlier.
//	default:
//		defer h.Release(ctx)
//		work(h.Context())
//	}
//
// The holder is a uuid that is drawn for the call. While the Hold lasts, it renews the lease in the background: when a third of
// the lease is over, and if that fails again and again until the lease ends. When ctx ends, nothing is renewed any more, and the
// slots are free when the lease ends, or by Release. When ctx ends during the call, the call returns.
//
// When the answer is lost, with ctx or with the connection, the server may hold for this call, or may yet. Such slots are released in
// the background, as soon as the database answers within an hour. A release that finds nothing is made again: a second later, and for an
// hour while pg_stat_activity shows such a call under way. If this role does not see it there, set a lock_timeout below a second for the
// sessions of the pool: behind a row that is locked for longer the server may hold after the releases, until the lease ends.
//
// Under a policy that only watches, a Hold that is Shadowed holds nothing, and makes no more calls.
//
// A Hold needs a pool. In a transaction call the SQL function ratelimit_hold as the last statement, with a holder of your own.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Hold(ctx context.Context, policy, key string, opts ...CallOption) (*Hold, HoldDecision, error) {
	s, err := l.newHold("Hold", opts)
	if err != nil {
		return nil, HoldDecision{}, err
	}
	return l.hold(ctx, policy, key, newHolder(), s)
}

// HoldWait is Hold, and waits until the slots are free or ctx ends. It asks again when RetryAfter is over, or after about a
// second if that is earlier: holders release before their leases end. Callers who wait are in no order. It fails at once, with
// [ErrTooLate], if no wait would help: [HoldDecision.Never].
//
// Errors: [ErrTooLate], the error of ctx, and the errors of Hold.
func (l *limiter) HoldWait(ctx context.Context, policy, key string, opts ...CallOption) (*Hold, HoldDecision, error) {
	s, err := l.newHold("HoldWait", opts)
	if err != nil {
		return nil, HoldDecision{}, err
	}
	holder := newHolder()
	var slept time.Duration
	for {
		h, d, err := l.hold(ctx, policy, key, holder, s)
		switch {
		case err != nil:
			return nil, d, err
		case d.Never():
			return nil, d, failed(verbHold, ErrTooLate)
		case d.Allowed:
			l.hooks.slept(ctx, policy, slept, nil)
			return h, d, nil
		}
		begin := time.Now()
		err = sleep(ctx, min(d.RetryAfter, maxAskPause*3/4+mathrand.N(maxAskPause/2)))
		slept += time.Since(begin)
		if err != nil {
			l.hooks.slept(ctx, policy, slept, err)
			return nil, d, failed(verbHold, err)
		}
	}
}

// newHold reads options, and refuses a handle on which a Hold cannot renew.
func (l *limiter) newHold(method string, opts []CallOption) (s settings, err error) {
	if l.inTx || isTx(l.db) || connOf(l.db) != nil { // it is for one caller at a time
		return s, failed(verbHold, fmt.Errorf("%w: %s needs a pool, because it renews; in a transaction call the SQL function ratelimit_hold",
			ErrInvalidArgument, method))
	}
	s.read(method, opts, "Cost")
	return s, s.err
}

// newHolder draws a uuid.
func newHolder() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

var holdColumns = "allowed, remaining, " + microseconds("retry_after") + ", " + microseconds("held_for") + ", capacity, renewed, shadowed"

// hold makes one call. The server takes a second call of the holder for the first, so it can be sent again.
func (l *limiter) hold(ctx context.Context, policy, key, holder string, s settings) (*Hold, HoldDecision, error) {
	if err := ctx.Err(); err != nil {
		return nil, HoldDecision{}, failed(verbHold, err)
	}
	h := &Hold{limiter: l, policy: policy, key: key, holder: holder, calls: context.WithoutCancel(ctx), began: time.Now()}
	d, err := l.holdAs(ctx, policy, key, holder, s)
	switch {
	case lostStatement(err) != "": // it may hold, and only this call knows its holder
		go func() {
			_ = l.undo(err, func() (bool, error) { // else the lease ends by itself
				ctx, cancel := context.WithTimeout(h.calls, releaseTimeout)
				defer cancel()
				return h.send(ctx)
			})
		}()
		return nil, d, err
	case err != nil || !d.Allowed:
		return nil, d, err
	}
	h.start(ctx, d)
	return h, d, nil
}

// HoldAs is one call of the SQL function ratelimit_hold, for a program that names its holder and renews by itself, such as a server
// between a holder and the database. It works in a transaction, too. The option is [Cost], 1 or more. Sent again by a holder that
// holds, it is Renewed, and begins the lease anew. holder has 1 to 512 bytes, a new one for each attempt: two attempts under one
// name are one holder, and each could release the slots of the other.
//
// Errors: [ErrUnknownPolicy], [ErrIdempotencyMismatch] for a holder that holds with another cost, [ErrInvalidArgument],
// [ErrLocked].
func (l *limiter) HoldAs(ctx context.Context, policy, key, holder string, opts ...CallOption) (HoldDecision, error) {
	var s settings
	s.read("HoldAs", opts, "Cost")
	return l.holdAs(ctx, policy, key, holder, s)
}

func (l *limiter) holdAs(ctx context.Context, policy, key, holder string, s settings) (d HoldDecision, err error) {
	var retryAfter pgtype.Int8
	var heldFor int64
	begin := l.hooks.begin()
	c := newCall(verbHold, "ratelimit_hold($1::text, $2::text, $3::text, $4::bigint)", policy, key, holder, s.cost.Tokens())
	c.columns, c.repeatable, c.err = holdColumns, true, s.err
	err = l.query(ctx, c, &d.Allowed, &d.Remaining, &retryAfter, &heldFor, &d.Capacity, &d.Renewed, &d.Shadowed)
	if err != nil {
		d = HoldDecision{}
	} else {
		d.RetryAfter, d.HeldFor = wait(retryAfter), duration(heldFor)
	}
	l.hooks.answered(ctx, verbHold, policy, begin, d.decision(), err)
	return d, err
}

// Renew begins the lease of a holder anew, and returns how long it lasts: 0 if the holder does not hold. Then nothing is taken, and
// the work under the slots must stop. It is for holders of [Limiter.HoldAs]; a [Hold] renews by itself.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Renew(ctx context.Context, policy, key, holder string) (heldFor time.Duration, err error) {
	var left pgtype.Int8 // null: it does not hold
	begin := l.hooks.begin()
	c := newCall(verbRenew, "ratelimit_renew($1::text, $2::text, $3::text)", policy, key, holder)
	c.columns, c.repeatable = microseconds("ratelimit_renew"), true
	err = l.query(ctx, c, &left)
	l.hooks.answered(ctx, verbRenew, policy, begin, Decision{Allowed: left.Valid}, err)
	return duration(left.Int64), err
}

// Release frees the slots of a holder, and reports whether it held until now. It is safe to repeat. It is for holders of
// [Limiter.HoldAs]; a [Hold] has its own [Hold.Release].
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Release(ctx context.Context, policy, key, holder string) (held bool, err error) {
	begin := l.hooks.begin()
	c := newCall(verbRelease, "ratelimit_release($1::text, $2::text, $3::text)", policy, key, holder)
	c.columns, c.repeatable = "ratelimit_release", true
	err = l.query(ctx, c, &held)
	l.hooks.answered(ctx, verbRelease, policy, begin, Decision{Allowed: held}, err)
	return held, err
}

// decision is for hooks.
func (d HoldDecision) decision() Decision {
	return Decision{
		Allowed: d.Allowed, Remaining: d.Remaining, RetryAfter: d.RetryAfter, Capacity: d.Capacity, Replayed: d.Renewed, Shadowed: d.Shadowed,
	}
}

func (h *Hold) start(ctx context.Context, d HoldDecision) {
	ctx, h.stop = context.WithCancelCause(ctx)
	h.ctx = holdContext{ctx, h}
	h.idle, h.releasing = make(chan struct{}), make(chan struct{}, 1)
	h.tenure = newTenure(d.HeldFor)
	if d.Shadowed {
		h.tenure.until, h.released = never, true
		close(h.idle)
		return
	}
	h.timer = time.AfterFunc(h.tenure.until-h.now(), func() { h.endIfOver() })
	go h.keep()
}

func (h *Hold) now() time.Duration { return time.Since(h.began) }

// endIfOver ends the context if the lease has ended, and reports whether the context has ended.
func (h *Hold) endIfOver() bool {
	if h.ctx.Context.Err() != nil {
		return true
	}
	h.mu.Lock()
	isOver, failure := h.tenure.over(h.now()), h.failure
	h.mu.Unlock()
	switch {
	case isOver && failure != nil:
		h.stop(fmt.Errorf("%w: %w", ErrLeaseLost, failure))
	case isOver:
		h.stop(ErrLeaseLost)
	}
	return isOver
}

// keep renews until the context ends.
func (h *Hold) keep() {
	defer close(h.idle)
	for {
		h.mu.Lock()
		pause := h.tenure.due - h.now()
		h.mu.Unlock()
		if sleep(h.ctx.Context, pause) != nil || h.endIfOver() {
			break
		}
		h.renew()
	}
	h.timer.Stop()
}

func (h *Hold) renew() {
	h.mu.Lock()
	sent := h.now()
	patience := h.tenure.patience(sent)
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(h.calls, patience)
	defer cancel()
	heldFor, err := h.limiter.Renew(ctx, h.policy, h.key, h.holder)

	h.mu.Lock()
	defer h.mu.Unlock()
	h.failure = err
	switch now := h.now(); {
	case err == nil && heldFor > 0:
		h.tenure.renewed(sent, heldFor)
		h.timer.Reset(h.tenure.until - now)
	case err == nil || errors.Is(err, ErrUnknownPolicy) || errors.Is(err, ErrInvalidArgument): // it was reset or dropped, or has ended
		h.tenure.end() // keep ends the context at once: due is over
	default:
		h.tenure.failed(now)
	}
}

// Holder is the uuid by which the slots are held. A transaction that writes what only the holder may write can call the SQL
// function ratelimit_renew with it, and roll back unless that returns an interval.
func (h *Hold) Holder() string {
	if h == nil {
		return ""
	}
	return h.holder
}

// Context is for the work under the slots. It has the values of the ctx of the call, and ends with that ctx, by Release, and
// when the lease is lost: [context.Cause] is then an [ErrLeaseLost]. The lease is counted by this machine's monotonic clock, from
// before the call that granted or renewed it, so Context ends no later than the lease. A program that was stopped for longer
// than the lease finds Context ended at its first look, which is Err or Done. Contexts derived from it end a moment later.
//
// Work that goes on afterwards has no slots: another holder may have them. Time in which the whole machine sleeps is not
// counted on most systems: see [Hold.Holder] for a check that holds.
func (h *Hold) Context() context.Context {
	if h == nil {
		ended, cancel := context.WithCancelCause(context.Background())
		cancel(ErrLeaseLost)
		return ended
	}
	return h.ctx
}

// A holdContext looks at the clock before it answers Err or Done.
type holdContext struct {
	context.Context
	hold *Hold
}

func (c holdContext) Err() error {
	c.hold.endIfOver()
	return c.Context.Err()
}

func (c holdContext) Done() <-chan struct{} {
	c.hold.endIfOver()
	return c.Context.Done()
}

// Release ends Context and then frees the slots, after a renewal that is under way. It is safe to repeat: once it has succeeded it
// does nothing, and after an error it tries again. It goes on for up to 5 seconds after ctx has ended, so it can be deferred with the
// ctx of the work. After an error that may pass the release is repeated in the background, until it succeeds or the lease ends, for 10,000
// of a process at most. A lease that had ended before is no error.
//
// Errors: the error of ctx, [ErrLocked].
func (h *Hold) Release(ctx context.Context) error {
	if h == nil {
		return nil
	}
	h.stop(context.Canceled)
	err := h.release(ctx)
	if err != nil && KindOf(err) != Fault && !h.late.Swap(true) {
		h.mu.Lock()
		until := h.began.Add(h.tenure.until)
		h.mu.Unlock()
		h.limiter.undoLater("", func() (bool, error) {
			ctx, cancel := context.WithTimeout(h.calls, releaseTimeout)
			defer cancel()
			err := h.release(ctx)
			return err == nil, err
		}, until, false)
	}
	return err
}

func (h *Hold) release(ctx context.Context) error {
	ctx, cancel := outlive(ctx, releaseTimeout)
	defer cancel()
	select {
	case h.releasing <- struct{}{}:
		defer func() { <-h.releasing }()
	case <-ctx.Done():
		return failed(verbRelease, ctx.Err())
	}
	if h.released {
		return nil
	}
	select {
	case <-h.idle:
	case <-ctx.Done():
		return failed(verbRelease, ctx.Err())
	}
	_, err := h.send(ctx)
	h.released = err == nil
	return err
}

// send makes the call that releases, and reports whether there was something to release.
func (h *Hold) send(ctx context.Context) (released bool, err error) {
	released, err = h.limiter.Release(ctx, h.policy, h.key, h.holder)
	if errors.Is(err, ErrUnknownPolicy) { // it was dropped with its holders
		return false, nil
	}
	return released, err
}

// undo makes the call that undoes a call which failed with that error. If that has no answer either, or nothing to undo yet, because the
// server may carry out a lost call later, undo makes its call again in the background.
func (l *limiter) undo(failure error, call func() (undone bool, err error)) error {
	undone, err := call()
	if !undone {
		l.undoLater(lostStatement(failure), call, time.Now().Add(undoFor), err == nil)
	}
	return err
}

// undoLater makes the call after a second, and again after pauses, until it has undone something, cannot succeed, or the time is over; or
// until it has twice had nothing to undo, and the lost statement was not under way before the last time.
func (l *limiter) undoLater(lost string, call func() (undone bool, err error), until time.Time, answered bool) {
	if undoing.Add(1) > maxUndoing {
		undoing.Add(-1)
		return
	}
	pause := time.Second
	begun := time.Now().Add(pause / 2) // a statement that began before is taken for the lost one; later calls of a busy program are not
	var again func()
	again = func() {
		goesOn := answered && l.goesOn(lost, time.Since(begun))
		undone, err := call()
		ends := undone || err == nil && answered && !goesOn || KindOf(err) == Fault || err != nil && isClosed(err)
		if pause = min(2*pause, maxUndoPause); err == nil && !answered {
			answered, pause = true, 2*time.Second // the next is a second later, at least
		}
		next := pause/2 + mathrand.N(pause/2+1)
		if ends || time.Now().Add(next).After(until) {
			undoing.Add(-1)
			return
		}
		time.AfterFunc(next, again)
	}
	time.AfterFunc(pause, again)
}

// goesOn reports whether the server is seen to go on with this statement, or with another of its text that is as old. The text is compared
// up to its arguments, which the simple protocol writes into it.
func (l *limiter) goesOn(statement string, age time.Duration) (goesOn bool) {
	if statement == "" {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	text, _, _ := strings.Cut(statement, "$")
	c := newCall("look", `pg_catalog.pg_stat_activity where state = 'active' and datname = pg_catalog.current_database()
		and pg_catalog.starts_with(query, $1::text) and query_start <= pg_catalog.clock_timestamp() - $2::text::interval`, text, interval(age))
	c.columns, c.isQuery = "pg_catalog.count(*) > 0", true
	_ = l.query(ctx, c, &goesOn) // without an answer it is not seen
	return goesOn
}

// outlive returns a context that ends d after ctx.
func outlive(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		_ = sleep(longer, d)
		cancel()
	})
	return longer, func() { stop(); cancel() }
}

// A Holder is a lease as [Limiter.Holders] lists it.
type Holder struct {
	Policy, Key string
	Holder      string
	Cost        int64
	HeldFor     time.Duration // how long its lease still lasts
}

// A JSON array keeps the order of the function.
var holderColumns = `coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
		'policy', policy, 'key', key, 'holder', holder, 'cost', cost, 'held_for', ` + microseconds("held_for") + `)), '[]')::text`

// Holders lists who holds slots now, ordered by policy, key and the end of the lease. Options are [OfPolicy], [OfKey] and
// [MaxRows], which defaults to 1,000. It writes and locks nothing.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument].
func (l *limiter) Holders(ctx context.Context, opts ...CallOption) ([]Holder, error) {
	type holderRow struct {
		Holder
		Micros int64 `json:"held_for"`
	}
	rows, err := listKeyed[holderRow](ctx, l, "list holders", holderColumns, "ratelimit_holders", newList("Holders", opts))
	if err != nil {
		return nil, err
	}
	holders := make([]Holder, len(rows))
	for i, r := range rows {
		holders[i] = r.Holder
		holders[i].HeldFor = duration(r.Micros)
	}
	return holders, nil
}

// A tenure is the time for which a holder has its slots, as far as the client knows. It is a state machine without SQL,
// goroutines, clock or lock: its owner serialises the methods, makes the calls, and passes the time, which counts from before
// the call that granted.
//
// Invariants, between any two methods:
//
//  1. until is no later than the end of the lease on the server, because it is counted from before the last call that has an
//     answer. A lease ends earlier if the server's clock steps forward, if the slots are reset or their policy dropped, and if
//     the policy's lease was shortened and a renewal learned that whose answer was lost.
//  2. From until on the tenure is over, whether or not a timer has fired. One that was seen to be over stays over.
//  3. A renewal is due when a third of the lease is over, and after one that failed when a pause is over. It ends at until.
type tenure struct {
	lease, until, due time.Duration
	isOver            bool
}

func newTenure(heldFor time.Duration) (t tenure) {
	t.extend(0, heldFor)
	return t
}

func (t *tenure) extend(sent, heldFor time.Duration) {
	t.lease = min(heldFor, maxHeldFor)
	t.until, t.due = sent+t.lease, sent+t.lease/3
}

// over reports whether the lease has ended, and remembers it: the clock cannot bring it back.
func (t *tenure) over(now time.Duration) bool {
	t.isOver = t.isOver || now >= t.until
	return t.isOver
}

// patience is how long a renewal that begins now may take: so long that another can follow, or until the end.
func (t *tenure) patience(now time.Duration) time.Duration {
	return min(max(t.lease/3, leastPatience), t.until-now)
}

// renewed is the answer to a renewal that was sent at that time. What is over stays over.
func (t *tenure) renewed(sent, heldFor time.Duration) {
	if !t.isOver {
		t.extend(sent, heldFor)
	}
}

// failed is a renewal without an answer. The next begins after a pause that is random, so that many holders of a database
// that was away do not ask at once.
func (t *tenure) failed(now time.Duration) {
	pause := min(maxAskPause, t.lease/10)
	t.due = now + pause/2 + mathrand.N(pause/2+1)
}

// end is the answer to a renewal that the holder does not hold.
func (t *tenure) end() { t.isOver = true }
