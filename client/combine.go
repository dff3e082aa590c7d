package client

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

const (
	defaultCalls   = 2
	defaultWaiting = 10_000

	// maxLinger is how long few requests wait for company while calls are under way. Most calls end sooner.
	maxLinger = 5 * time.Millisecond

	// maxApart is how many buckets are asked for at a time after a locked bucket has failed their call.
	maxApart = 8

	// maxLength of policies, keys and idempotency keys, in bytes.
	maxLength = 512
)

// Pool tells a *pgxpool.Pool from a connection or a transaction, which cannot make two calls at a time. A *pgx.Conn is no Pool, because
// its Close takes a context. A pgx.Tx is none either, because it has no BeginTx. A [Combiner] calls neither method.
type Pool interface {
	Querier
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	Close()
}

// A Combiner is a [Limiter] for many callers at once: requests that wait at the same moment share one
// call. [Combiner.Acquire], [Combiner.AcquireAll] and [Combiner.AcquireMany] share calls. The other methods that ask the database
// are the Limiter's own, one call each.
//
// Close it when it is no longer used.
type Combiner struct {
	limiter
	waiters sync.Pool
	batches sync.Pool
	running sync.WaitGroup

	mu        sync.Mutex // guards what is below, and of waiters batch and gone; an answer is the sender's until done
	closed    bool
	lingering bool // a timer will call hurry
	queue     *queue
}

// NewCombiner returns a Combiner that calls the functions installed in the database of pool. The role needs EXECUTE on
// ratelimit_acquire_packed and ratelimit_acquire, and for AcquireAll on ratelimit_acquire_all. Options are [CallsInFlight],
// [MaxWaiting] and those of [New]. It panics if one of the two numbers is not positive, or if opts has a [Prefetch].
func NewCombiner(pool Pool, opts ...Option) *Combiner {
	return newCombiner(pool, newConfig("NewCombiner", aCombiner, opts))
}

func newCombiner(pool Pool, config config) *Combiner {
	if config.calls < 1 {
		panic("client: CallsInFlight must be positive")
	}
	if config.waiting < 1 {
		panic("client: MaxWaiting must be positive")
	}
	return &Combiner{
		limiter: newLimiter(pool, config),
		queue:   newQueue(config.calls, config.waiting),
		waiters: sync.Pool{New: func() any { return &waiter{done: make(chan struct{}, 1)} }},
		batches: sync.Pool{New: func() any { return new(batch) }},
	}
}

// Acquire is [Limiter.Acquire], with the same answers, at a fraction of the work when there are many
// callers. Few callers, up to three and to [CallsInFlight], make their own calls as a Limiter does, unless the
// last call was shared. With more callers, requests that arrive while calls are under way share the next call. That
// call starts at once when they are worth it, and otherwise when no other call is under way, or 5 ms after a place is free.
// Requests of Acquire for one bucket are never in two calls at a time.
//
// A caller gets an error as soon as its ctx ends, and the other callers notice nothing. A request that has
// not been sent by then is not sent. A request that has been sent may still be granted, and its tokens
// taken, as after any lost answer. With an [IdempotencyKey], asking again settles it. A call ends early when
// all of its callers have left.
//
// A call is one transaction. If it fails, each of its callers gets the error, and no tokens were taken.
// If the connection was lost, it is unknown whether tokens were taken. Only requests with an idempotency key
// are then sent again. They never share a call with requests that have none.
//
// A bucket that another transaction has locked holds up all requests of the call, and all other calls go
// on. As many such calls as CallsInFlight hold up every caller: always set lock_timeout for the sessions of the pool.
// When lock_timeout ends the call, each of its buckets is asked for anew by itself, eight at a time. Only requests for
// a bucket that is still locked fail, with [ErrLocked].
//
// A request is refused at once, with [ErrOverloaded], when [MaxWaiting] requests already wait, and when its ctx has a deadline
// that cannot be met. The estimate uses the quickest of the last calls, the time that calls under way have lasted, and the number
// of requests ahead. A request that can be sent at once is always sent. A request that has waited is refused before its deadline,
// too, and is not sent, if less time is left than each of the last calls took. So under any load the database works for callers
// that are still there. Give every ctx a deadline: without a deadline a request is refused only when the queue is full.
//
// Errors: as Limiter.Acquire, [ErrOverloaded] and [ErrClosed].
func (c *Combiner) Acquire(ctx context.Context, policy, key string, opts ...CallOption) (Decision, error) {
	return c.acquire(ctx, newRequest("Acquire", policy, key, opts), c.combinePlain)
}

func (c *Combiner) combinePlain(ctx context.Context, r request) (Decision, error) {
	d, err := c.combine(ctx, r)
	return d.Decision, err
}

// Close admits no more requests: from now on those that ask the database fail with [ErrClosed]. Close waits until all earlier
// requests are answered, as long as that takes: give each a deadline. The pool stays open, and the other methods work as long as it does.
func (c *Combiner) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.running.Wait()
	c.denialCache.forgetAll() // else Acquire would repeat denials for ever
}

// Waiting returns how many requests wait for a call, for a gauge.
func (c *Combiner) Waiting() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queue.waiting.length
}

// A request goes one of three ways. The queue decides which, and when calls begin; its comment has the rules.
//
//	combine ── unfit to share ──────> askAlone
//	        ── claim gives a place ──> askAlone, finishClaimed
//	        ── else ────────────────> enqueue, await <── answer ── send
//
// A goroutine, serve, makes the shared calls of a place, one after another: gather lets more requests arrive, take fills the batch
// with them, send makes the call and answers each waiter, and finish returns whether the place has another call to make. follow
// starts serve when the queue reserves a place, and after maxLinger calls hurry.

// combine returns the answer to a request.
func (c *Combiner) combine(ctx context.Context, r request) (JointDecision, error) {
	shares := mayShare(r)

	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return JointDecision{}, failed(r.verb(), ErrClosed)
	}
	if !shares {
		c.running.Add(1)
		c.mu.Unlock()
		defer c.running.Done()
		return c.askAlone(ctx, r)
	}
	now := time.Now()
	if claimed := c.queue.claim(r, now); claimed != nil {
		c.running.Add(1)
		c.mu.Unlock()
		defer c.finishClaimed(ctx, claimed)
		return c.askAlone(ctx, r)
	}
	w, err := c.enqueue(ctx, r, now)
	c.mu.Unlock()
	if err != nil {
		return JointDecision{}, err
	}
	return c.await(ctx, w)
}

// enqueue adds a request to the queue, or returns why it must not wait. The caller holds c.mu.
func (c *Combiner) enqueue(ctx context.Context, r request, now time.Time) (*waiter, error) {
	w := c.waiters.Get().(*waiter)
	w.request = r
	w.deadline, _ = ctx.Deadline()
	if refusal := c.queue.refusal(w, now); refusal != nil && ctx.Err() == nil { // await returns the error of an ended ctx
		c.recycle(w)
		return nil, failed(r.verb(), refusal)
	}
	c.follow(c.queue.add(w))
	return w, nil
}

// await returns the answer to a request in the queue, or the error of ctx as soon as it ends.
func (c *Combiner) await(ctx context.Context, w *waiter) (JointDecision, error) {
	select {
	case <-w.done: // with many callers the answer is often here already, and this select costs less than the next
	default:
		select {
		case <-w.done:
		case <-ctx.Done():
			if c.leave(w) {
				return JointDecision{}, failed(w.verb(), ctx.Err())
			}
		}
	}
	d, err := w.answer, w.err
	c.recycle(w)
	return d, err
}

// recycle keeps a waiter for another request. One whose caller has left is not recycled: send may still write to it.
func (c *Combiner) recycle(w *waiter) {
	*w = waiter{done: w.done}
	c.waiters.Put(w)
}

// mayShare reports whether r may share a call. Text that the server cannot read would fail the whole call,
// and text that is too long for any bucket would burden it.
func mayShare(r request) bool {
	isFit := func(s string) bool {
		return len(s) <= maxLength && utf8.ValidString(s) && !hasZeroByte(s)
	}
	idempotencyKey, _ := r.idempotencyKey.(string)
	if r.err != nil || !isFit(idempotencyKey) {
		return false
	}
	if r.isJoint() {
		return 0 < len(r.charges) && len(r.charges) <= maxCharges &&
			!slices.ContainsFunc(r.charges, func(c Charge) bool { return !isFit(c.Policy) || !isFit(c.Key) })
	}
	return isFit(r.policy) && isFit(r.key)
}

// follow does the duty that the queue names. The caller holds c.mu.
func (c *Combiner) follow(next step) {
	switch {
	case next == serve:
		c.running.Add(1)
		go c.serve()
	case next == linger && !c.lingering:
		c.lingering = true
		time.AfterFunc(maxLinger, c.hurry)
	}
}

// hurry sends the requests that lingered for company.
func (c *Combiner) hurry() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lingering = false
	c.follow(c.queue.hurry())
}

// serve makes calls for waiting requests in a reserved place, until the place is not reserved any more.
func (c *Combiner) serve() {
	defer c.running.Done()
	b := c.batches.Get().(*batch)
	defer c.batches.Put(b)
	for reserved := true; reserved; reserved = c.finish(b) {
		c.gather()
		ctx := c.take(b)
		if ctx == nil {
			return
		}
		c.send(ctx, b)
		b.cancel()
	}
}

// gather lets other goroutines run until no more requests arrive: callers that were just answered often ask
// again at once.
func (c *Combiner) gather() {
	for n := -1; ; {
		runtime.Gosched()
		c.mu.Lock()
		length := c.queue.waiting.length
		c.mu.Unlock()
		if length <= n || length >= maxBatch {
			return
		}
		n = length
	}
}

// take fills the batch and returns the context of its call, or nil if no request is left. It refuses the requests that are too late.
func (c *Combiner) take(b *batch) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	taken := c.queue.take(b, now)
	for _, w := range b.late {
		w.err = failed(w.verb(), &OverloadedError{Waiting: c.queue.waiting.length, Expected: c.queue.pace.call(now)})
		w.done <- struct{}{}
	}
	clear(b.late)
	if !taken {
		return nil
	}
	c.follow(c.queue.next())
	var ctx context.Context
	ctx, b.cancel = context.WithCancel(context.Background()) // of no caller: the call ends when the last of them leaves
	return ctx
}

// finish ends a call, and reports whether its place is reserved for another call.
func (c *Combiner) finish(b *batch) (reserved bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := c.queue.finish(b, time.Now())
	if next == serve {
		return true
	}
	c.follow(next)
	return false
}

// finishClaimed ends the call that a caller has made for itself.
func (c *Combiner) finishClaimed(ctx context.Context, b *batch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b.abandoned = ctx.Err() != nil
	c.follow(c.queue.finish(b, time.Now()))
	c.running.Done()
}

// leave takes back a request, unless it is answered.
func (c *Combiner) leave(w *waiter) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-w.done:
		return false
	default:
	}
	if abandoned := c.queue.leave(w); abandoned != nil {
		abandoned.cancel()
	}
	return true
}

// send makes the call of a batch, and wakes each waiter when its answer is set.
func (c *Combiner) send(ctx context.Context, b *batch) {
	var err error
	isShared := len(b.waiters) > 1
	if isShared {
		err = c.askMany(ctx, b)
	}
	if errors.Is(err, ErrLocked) {
		if parts := b.parts(); len(parts) > 1 { // nothing was taken; only requests for the locked bucket are to fail
			c.sendApart(ctx, parts)
			return
		}
	}
	for _, w := range b.waiters {
		switch {
		case isShared && isUnfitText(err) && c.hasLeft(w): // the call took nothing, and nobody waits for the answer
		case !isShared, isUnfitText(err): // text of one request fails the call, and not the other requests
			w.answer, w.err = c.askAlone(ctx, w.request)
		case err != nil:
			w.answer, w.err = JointDecision{}, err
		}
		w.done <- struct{}{}
	}
}

func (c *Combiner) hasLeft(w *waiter) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return w.gone
}

// askAlone sends one request in a call of its own.
func (c *Combiner) askAlone(ctx context.Context, r request) (JointDecision, error) {
	c.hooks.combined(1)
	if r.isJoint() {
		return c.askAll(ctx, r)
	}
	d, err := c.ask(ctx, r)
	return JointDecision{Decision: d}, err
}

// parts returns the requests of the batch in batches of one bucket each.
func (b *batch) parts() (parts []*batch) {
	byBucket := make(map[bucket]*batch)
	for _, w := range b.waiters {
		part := byBucket[w.bucket()]
		if part == nil {
			part = new(batch)
			byBucket[w.bucket()] = part
			parts = append(parts, part)
		}
		part.waiters = append(part.waiters, w)
	}
	return parts
}

// sendApart sends maxApart batches at a time, without the requests whose callers have left.
func (c *Combiner) sendApart(ctx context.Context, batches []*batch) {
	var sending sync.WaitGroup
	free := make(chan struct{}, maxApart)
	for _, b := range batches {
		free <- struct{}{}
		sending.Go(func() {
			defer func() { <-free }()
			c.mu.Lock()
			b.waiters = slices.DeleteFunc(b.waiters, func(w *waiter) bool { return w.gone })
			c.mu.Unlock()
			c.send(ctx, b)
		})
	}
	sending.Wait()
}

// askMany sends a batch in one call.
func (c *Combiner) askMany(ctx context.Context, b *batch) error {
	if b.packed == nil {
		b.packed = newPacked()
	}
	c.hooks.combined(len(b.waiters))
	call, dest := b.packed.call(b.waiters)
	if err := c.query(ctx, call, dest...); err != nil {
		return err
	}
	return failed(call.verb, b.packed.answer(b.waiters))
}
