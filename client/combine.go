package client

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"runtime"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	defaultCalls = 2

	// maxBatch bounds the requests of one call, and so the locks it holds and what its callers
	// wait for.
	maxBatch = 256

	// minShare is where a call costs the server about a quarter of what its requests do.
	minShare = 32

	// maxApart buckets are asked for at a time after a locked one has failed their call.
	maxApart = 8

	// maxLength of policies, keys and idempotency keys, in bytes.
	maxLength = 512

	// Buckets are told apart by a hash of so many values: few of a batch meet another's by chance.
	stripes = 4096
)

// Pool is what *pgxpool.Pool has, and neither a connection nor a transaction does.
type Pool interface {
	Querier
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	Close()
}

// A Combiner is a [Limiter] for many callers at once: requests that wait at the same moment share one
// call. Its methods other than [Combiner.Acquire] are the Limiter's own, one call each.
//
// Close it when it is no longer used.
type Combiner struct {
	limiter
	pool    Pool
	calls   int // under way at a time, at most
	seed    maphash.Seed
	waiters sync.Pool
	running sync.WaitGroup

	mu     sync.Mutex
	closed bool
	open   int             // calls under way, or about to be
	sent   int             // requests under way
	crowd  int             // requests of the last call from the queue
	queue  []*waiter       // in order of arrival
	gone   int             // of the queue, whose callers have left
	ready  int             // of the queue, for whose buckets nothing is under way; more when some left
	owners [stripes]*batch // what is under way for a bucket
}

// A waiter is a request that others send.
type waiter struct {
	request
	stripe uint64
	done   chan struct{} // gets one value when the answer is there
	answer Decision
	err    error

	batch *batch // nil in the queue
	gone  bool   // the caller has left
}

// A batch is the requests of one call.
type batch struct {
	waiters []*waiter
	stripes []uint64
	callers int                // of the waiters, that have not left
	cancel  context.CancelFunc // for when all have

	// Arguments of the call.
	policies, keys, idempotencyKeys []string
	costs                           []int64
}

// alone owns the buckets of callers that make their own calls.
var alone = new(batch)

// NewCombiner returns a Combiner that calls the functions installed in the database of pool. The role
// needs EXECUTE on ratelimit_acquire and on ratelimit_acquire_many. Options are [CallsInFlight] and
// those of [New]. Panics if CallsInFlight is not positive.
func NewCombiner(pool Pool, opts ...CombinerOption) *Combiner {
	config := config{calls: defaultCalls}
	for _, opt := range opts {
		opt.configure(&config)
	}
	if config.calls < 1 {
		panic("client: CallsInFlight must be positive")
	}
	return &Combiner{
		limiter: newLimiter(pool, config),
		pool:    pool,
		calls:   config.calls,
		seed:    maphash.MakeSeed(),
		waiters: sync.Pool{New: func() any { return &waiter{done: make(chan struct{}, 1)} }},
	}
}

// Acquire is [Limiter.Acquire], with the same answers, at a fraction of the work when there are many
// callers. Few callers, no more than [CallsInFlight], make their own calls as a Limiter does, unless the
// last call was shared. Of more, those who arrive while calls are under way share the next, which starts
// at once when there are enough of them or a call has ended: nobody waits for a timer. Requests for one
// bucket are never in two calls at a time.
//
// A caller whose ctx ends gets its error at once, and the others notice nothing. What has not been sent
// by then is not sent; what has may be granted all the same, and the tokens taken, as with any answer
// that is lost. With an [IdempotencyKey], asking again settles it. A call ends early when all of its
// callers have left.
//
// A call is one transaction. If it fails, each of its callers gets the error, and no tokens were taken,
// unless the connection was lost, when that is unknown. Only requests with an idempotency key, which
// travel apart from those without, are then sent again. A bucket that another transaction has locked
// holds up all requests of the call: set lock_timeout for the sessions of the pool where transactions
// that take tokens may last. When it ends, each bucket of the call is asked for anew by itself, eight at
// a time, and [ErrLocked] is for those alone who want one that is locked still.
//
// Errors: those of Limiter.Acquire, and [ErrClosed].
func (c *Combiner) Acquire(ctx context.Context, policy, key string, opts ...AcquireOption) (Decision, error) {
	return c.acquire(ctx, newRequest(policy, key, opts), c.combine)
}

// Close lets no more requests in, and waits for those that are. Then Acquire fails with [ErrClosed];
// the other methods work as long as the pool does, which stays open.
func (c *Combiner) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.running.Wait()
	c.denials.forgetAll()
}

// combine asks, or waits to be asked for.
func (c *Combiner) combine(ctx context.Context, r request) (Decision, error) {
	stripe := (maphash.String(c.seed, r.policy)*31 + maphash.String(c.seed, r.key)) % stripes
	sendable := isSendable(r)

	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return Decision{}, failed("acquire", ErrClosed)
	}
	if !sendable {
		c.running.Add(1)
		c.mu.Unlock()
		defer c.running.Done()
		return c.ask(ctx, r)
	}
	if c.owners[stripe] == nil {
		c.ready++
		if c.ready == 1 && c.crowd <= 1 && c.isTime() { // after a shared call others are about to ask too
			c.ready--
			c.open++
			c.sent++
			c.owners[stripe] = alone
			c.running.Add(1)
			c.mu.Unlock()
			defer c.asked(stripe)
			return c.ask(ctx, r)
		}
	}
	w := c.waiters.Get().(*waiter)
	w.request, w.stripe = r, stripe
	c.queue = append(c.queue, w)
	c.start()
	c.mu.Unlock()

	select {
	case <-w.done:
	case <-ctx.Done():
		if c.leave(w) {
			return Decision{}, failed("acquire", ctx.Err())
		}
	}
	d, err := w.answer, w.err
	*w = waiter{done: w.done}
	c.waiters.Put(w)
	return d, err
}

// isSendable reports whether r may share a call. Text that the server cannot read fails the whole call,
// and what is too long for any bucket would burden it.
func isSendable(r request) bool {
	isFit := func(s string) bool {
		return len(s) <= maxLength && utf8.ValidString(s) && !strings.Contains(s, "\x00")
	}
	idempotencyKey, _ := r.idempotencyKey.(string)
	return isFit(r.policy) && isFit(r.key) && isFit(idempotencyKey)
}

// share is how many requests the next call should carry: an equal part, for each call there may be, of
// all there are, but not so few that the cost of a call outweighs them.
func (c *Combiner) share() int {
	all := c.sent + c.ready
	return max((all+c.calls-1)/c.calls, min(all, minShare))
}

// isTime reports whether to make another call: not for much less than a share, which would do better to
// travel with others. When no call is under way it is time for any request.
func (c *Combiner) isTime() bool {
	return c.open < c.calls && c.ready > 0 && c.ready >= c.share()/2
}

func (c *Combiner) start() {
	if c.isTime() {
		c.open++
		c.running.Add(1)
		go c.serve()
	}
}

// asked ends a caller's own call.
func (c *Combiner) asked(stripe uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
	c.sent--
	c.owners[stripe] = nil
	c.countReady()
	c.start()
	c.running.Done()
}

func (c *Combiner) countReady() {
	c.ready = 0
	for _, w := range c.queue {
		if !w.gone && c.owners[w.stripe] == nil {
			c.ready++
		}
	}
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
	w.gone = true
	if b := w.batch; b != nil {
		if b.callers--; b.callers == 0 {
			b.cancel()
		}
		return true
	}
	if c.gone++; c.gone > len(c.queue)/2 {
		c.queue = slices.DeleteFunc(c.queue, func(w *waiter) bool { return w.gone })
		c.gone = 0
	}
	return true
}

// serve makes calls for those in the queue while it is time to.
func (c *Combiner) serve() {
	defer c.running.Done()
	var b batch
	for {
		c.gather()
		ctx := c.take(&b)
		if ctx == nil {
			return
		}
		c.send(ctx, &b)
		b.cancel()
	}
}

// gather lets those run who are about to ask, as those who were just answered often are.
func (c *Combiner) gather() {
	for n := -1; ; {
		runtime.Gosched()
		c.mu.Lock()
		length := len(c.queue)
		c.mu.Unlock()
		if length <= n || length >= maxBatch {
			return
		}
		n = length
	}
}

// take ends one call of b and prepares the next, from the head of the queue. It returns nil when it is
// not time for one. Requests with an idempotency key and without are not mixed: those with one cost the
// server more, and may be sent again.
func (c *Combiner) take(b *batch) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
	c.sent -= len(b.waiters)
	for _, stripe := range b.stripes {
		c.owners[stripe] = nil
	}
	b.waiters, b.stripes = b.waiters[:0], b.stripes[:0]
	c.countReady()
	if !c.isTime() {
		return nil
	}
	share := min(c.share(), maxBatch)
	rest := c.queue[:0]
	for _, w := range c.queue {
		switch owner := c.owners[w.stripe]; {
		case w.gone:
			continue
		case len(b.waiters) > 0 && w.keyed() != b.waiters[0].keyed():
			rest = append(rest, w)
		case owner == nil && len(b.waiters) < share:
			c.owners[w.stripe] = b
			b.stripes = append(b.stripes, w.stripe)
			b.add(w)
		case owner == b && len(b.waiters) < maxBatch: // it could go with nobody else
			b.add(w)
		default:
			rest = append(rest, w)
		}
	}
	clear(c.queue[len(rest):])
	c.queue, c.gone = rest, 0
	c.open++
	c.sent += len(b.waiters)
	c.crowd = len(b.waiters)
	c.countReady()
	c.start()

	ctx, cancel := context.WithCancel(context.Background())
	b.callers, b.cancel = len(b.waiters), cancel
	return ctx
}

func (b *batch) add(w *waiter) {
	w.batch = b
	b.waiters = append(b.waiters, w)
}

// send answers the waiters of a batch.
func (c *Combiner) send(ctx context.Context, b *batch) {
	if len(b.waiters) > 1 {
		err := c.failed(acquireMany, retry(ctx, c.pool, b.waiters[0].keyed(), func() error { return c.askMany(ctx, b) }))
		if errors.Is(err, ErrLocked) {
			if parts := b.parts(); len(parts) > 1 { // nothing was taken, and only those who want that bucket shall fail
				c.sendApart(ctx, parts)
				return
			}
		}
		if !isText(err) {
			for _, w := range b.waiters {
				if err != nil {
					w.answer, w.err = Decision{}, err
				}
				w.done <- struct{}{}
			}
			return
		}
	}
	for _, w := range b.waiters {
		w.answer, w.err = c.ask(ctx, w.request)
		w.done <- struct{}{}
	}
}

// parts are batches of one bucket each.
func (b *batch) parts() (parts []*batch) {
	byBucket := make(map[bucket]*batch)
	for _, w := range b.waiters {
		at := bucket{w.policy, w.key}
		part := byBucket[at]
		if part == nil {
			part = new(batch)
			byBucket[at] = part
			parts = append(parts, part)
		}
		part.waiters = append(part.waiters, w)
	}
	return parts
}

// sendApart sends some batches at a time, without the callers who have left.
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
	b.policies, b.keys, b.costs, b.idempotencyKeys = b.policies[:0], b.keys[:0], b.costs[:0], b.idempotencyKeys[:0]
	for _, w := range b.waiters {
		b.policies = append(b.policies, w.policy)
		b.keys = append(b.keys, w.key)
		b.costs = append(b.costs, w.cost)
		if w.keyed() {
			b.idempotencyKeys = append(b.idempotencyKeys, w.idempotencyKey.(string))
		}
	}
	var idempotencyKeys any
	if len(b.idempotencyKeys) > 0 {
		idempotencyKeys = b.idempotencyKeys
	}
	rows, err := c.pool.Query(ctx, c.statement(acquireMany), b.policies, b.keys, b.costs, idempotencyKeys)
	if err != nil {
		return err
	}
	defer rows.Close()
	var row decisionRow
	columns := append(row.columns(), nil, nil, nil, nil)
	n := 0
	for ; rows.Next(); n++ {
		if n >= len(b.waiters) {
			continue
		}
		w := b.waiters[n]
		if w.err = refusal(rows.RawValues()); w.err != nil {
			w.answer = Decision{}
			continue
		}
		if err := rows.Scan(columns...); err != nil {
			return err
		}
		w.answer = row.decision()
	}
	if err := rows.Err(); err != nil {
		return err // also when the rows came and the commit failed
	}
	if n != len(b.waiters) {
		return fmt.Errorf("%d answers to %d requests", n, len(b.waiters))
	}
	return nil
}

// refusal is the error of one request, from the last columns of its row.
func refusal(columns [][]byte) error {
	e := columns[len(columns)-4:]
	if e[0] == nil {
		return nil
	}
	return failed("acquire", &pgconn.PgError{
		Severity:            "ERROR",
		SeverityUnlocalized: "ERROR",
		Code:                string(e[0]),
		Message:             string(e[1]),
		Detail:              string(e[2]),
		Hint:                string(e[3]),
	})
}

// isText reports whether text is at fault that this database cannot hold.
func isText(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) &&
		(pgErr.Code == "22021" || // character_not_in_repertoire
			pgErr.Code == "22P05") // untranslatable_character
}
