package client

import (
	"context"
	"fmt"
	"hash/maphash"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// prefetchTick is the time between two looks at all stocks.
	prefetchTick = 50 * time.Millisecond

	hotRequests   = 5       // make a bucket hot, within hotTicks
	hotTicks      = 4       // a fifth of a second
	maxHotBuckets = 10_000  // of one policy
	requestCounts = 1 << 16 // likewise
	prefetchCalls = 2       // refills and refunds at a time
	closingCalls  = 8       // refunds at a time while stocks must end
)

// A Prefetch lets a [Prefetcher] take tokens of the hot buckets of one policy.
type Prefetch struct {
	Policy string

	// MaxTokens is how many tokens of one bucket it has at most. Zero is no bound but MaxShare.
	MaxTokens int64

	// MaxShare is the part of a bucket's capacity that it has at most. Zero is 0.1.
	MaxShare float64

	// Idle is how long a stock gets no requests before its tokens are refunded. Zero is 250 ms.
	Idle time.Duration
}

func (p Prefetch) option() option {
	return option{func(c *config) { c.prefetches = append(c.prefetches, p) }, aPrefetcher, "a Prefetch"}
}

func (p Prefetch) withDefaults() Prefetch {
	if p.MaxTokens == 0 {
		p.MaxTokens = 9_000_000_000_000 // the largest capacity
	}
	if p.MaxShare == 0 {
		p.MaxShare = 0.1
	}
	if p.Idle == 0 {
		p.Idle = 250 * time.Millisecond
	}
	if p.MaxTokens < 0 || !(p.MaxShare > 0 && p.MaxShare <= 1) || p.Idle < 0 { // NaN is no share
		panic("client: a Prefetch must have a share between 0 and 1, and neither tokens nor time below 0")
	}
	return p
}

type combiner = Combiner // so that only this package names the field of a Prefetcher

// A Prefetcher is a [Combiner] that grants requests for hot buckets by itself, from tokens that it has taken before: their stocks.
// It does so for the policies that have a [Prefetch], and for requests of Acquire and AcquireMany without an idempotency key.
//
// A bucket is hot when five requests for it come within a fifth of a second. Its stock has the tokens of 0.8 seconds, at the
// rate of the last moments, but no more than MaxTokens and than MaxShare of the capacity. The bucket, as last seen, keeps at least as
// many. With a quarter left, the stock is refilled in the background.
//
// It uses 2 more connections than [CallsInFlight], and up to 8 besides while Close, or a call named below, refunds stocks.
//
// Guarantees:
//
//   - A grant is charged before it is given. So all processes together never grant more than the server has charged.
//   - Every denial comes from the server, or from a [DenialCache]. The Combiner asks when a request costs more than the stock has.
//   - Unspent tokens are refunded after Idle without a request, when the rate falls, and by Close. Those refunded to a full bucket
//     are lost, as they would have been without the stock.
//   - A process that is killed loses the tokens of its stocks: at most MaxShare of the capacity last seen, and MaxTokens, for each
//     hot bucket. Each refill or refund without an answer may lose as many again.
//   - A stock is used for at most a second after the last call that brought tokens was sent. So changes of a policy, overrides
//     and blocks take effect within a second, and when the database is away, grants go on for so long.
//     Reset, ResetAll, Pause, Override, RemoveOverride, DefinePolicy and DropPolicy through this Prefetcher refund stocks first, for
//     up to 5 seconds. It takes no tokens for the policy until they are done. After a reset by another program, prefetched tokens can
//     be spent, or refunded, besides the full bucket.
//
// A [Decision] from a stock is [Decision.Estimated]. A bucket is not prefetched if it refills nothing, or if a shadow policy would have
// denied.
//
// Close it when it is no longer used: else its stocks are lost.
type Prefetcher struct {
	*combiner
	quiet    limiter // without Hooks.Answered, for refills and refunds: no caller made them
	policies map[string]*prefetchedPolicy
	start    time.Time       // of the Prefetcher's clock
	calls    chan struct{}   // an element for each refill or refund under way
	closed   context.Context // ends when Close begins
	close    context.CancelFunc
}

// NewPrefetcher returns a Prefetcher. The role needs the rights that [NewCombiner] names, and EXECUTE on ratelimit_acquire_up_to and
// ratelimit_refund. Options are those of NewCombiner and one [Prefetch] for each policy to prefetch for. Panics at a second
// for a policy, at one out of range, and where NewCombiner does.
func NewPrefetcher(pool Pool, opts ...Option) *Prefetcher {
	config := newConfig("NewPrefetcher", aPrefetcher, opts)
	l := &Prefetcher{
		combiner: newCombiner(pool, config),
		policies: make(map[string]*prefetchedPolicy),
		start:    time.Now(),
		calls:    make(chan struct{}, prefetchCalls),
	}
	l.closed, l.close = context.WithCancel(context.Background())
	l.quiet = l.combiner.limiter
	l.quiet.hooks.Answered = nil
	l.combiner.prefetcher = l
	for _, prefetch := range config.prefetches {
		if l.policies[prefetch.Policy] != nil {
			panic(fmt.Sprintf("client: NewPrefetcher: two Prefetches for policy %q", prefetch.Policy))
		}
		l.policies[prefetch.Policy] = &prefetchedPolicy{Prefetch: prefetch.withDefaults(), seed: maphash.MakeSeed()}
	}
	if len(l.policies) > 0 {
		go l.watch()
	}
	return l
}

// A prefetchedPolicy has the hot buckets of one policy.
type prefetchedPolicy struct {
	Prefetch
	seed maphash.Seed
	hot  sync.Map     // a *hotBucket by its key
	size atomic.Int64 // hot buckets

	// changing counts calls under way that must find no stock, such as Reset. Meanwhile no tokens are taken.
	changing atomic.Int64

	// counts are of the requests for buckets without a stock. Buckets that share one are prefetched a little early.
	counts  [requestCounts]atomic.Uint32
	counted atomic.Bool // since watch has cleared them
}

// A hotBucket serialises the methods of a stock.
type hotBucket struct {
	policy *prefetchedPolicy
	key    string

	mu    sync.Mutex
	stock stock
}

func (b *hotBucket) do(method func(*stock)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	method(&b.stock)
}

// Goroutines of four kinds meet at a hotBucket. Its [stock] decides about its tokens.
//
//   - The caller of Acquire has the stock grant. If it cannot, the Combiner asks, and learn has the stock see the answer, or begins one.
//   - watch visits each stock every prefetchTick.
//   - When a grant or a visit says so, startWork has a goroutine of its own make the call: refill or refund.
//   - Close, and the calls that change a policy, seize each stock, and refund it.

// Acquire is [Limiter.Acquire]. A hot bucket's stock grants without a call to the server. All other requests go the way of
// [Combiner.Acquire].
//
// Errors: as Combiner.Acquire.
func (l *Prefetcher) Acquire(ctx context.Context, policy, key string, opts ...CallOption) (Decision, error) {
	r := newRequest("Acquire", policy, key, opts)
	if d, ok := l.grant(ctx, r); ok {
		return d, nil
	}
	d, err := l.acquire(ctx, r, l.combinePlain)
	if err == nil {
		l.learn(r, d)
	}
	return d, err
}

// find returns no policy if no stock may answer, and no bucket unless it is hot.
func (l *Prefetcher) find(r request) (*prefetchedPolicy, *hotBucket) {
	p := l.policies[r.policy]
	if p == nil || r.keyed() || r.cost < 1 || r.err != nil {
		return nil, nil
	}
	hot, _ := p.hot.Load(r.key)
	b, _ := hot.(*hotBucket)
	return p, b
}

func (l *Prefetcher) grant(ctx context.Context, r request) (d Decision, ok bool) {
	_, b := l.find(r)
	if b == nil || ctx.Err() != nil {
		return Decision{}, false
	}
	begin, now, hasWork := l.hooks.begin(), l.now(), false
	b.do(func(s *stock) { d, ok, hasWork = s.grant(r.cost, now) })
	if hasWork {
		l.startWork(b)
	}
	if ok {
		l.hooks.answered(ctx, verbAcquire, r.policy, begin, d, nil)
	}
	return d, ok
}

// learn has the stock see the answer that a caller got, or begins one.
func (l *Prefetcher) learn(r request, d Decision) {
	p, b := l.find(r)
	if p == nil {
		return
	}
	seen := sight{d, l.now()}
	if b != nil {
		if d.Allowed || l.denialCache == nil { // a denial may be a cached one, which is old
			b.do(func(s *stock) { s.learn(seen) })
		}
		return
	}
	p.counted.Store(true)
	count := &p.counts[maphash.String(p.seed, r.key)%requestCounts]
	if count.Add(1) < hotRequests || !d.Allowed || !seen.isPrefetchable() || p.size.Load() >= maxHotBuckets {
		return
	}
	b = &hotBucket{policy: p, key: strings.Clone(r.key), stock: newStock(p.Prefetch, r.cost, seen)}
	if _, isHot := p.hot.LoadOrStore(b.key, b); !isHot {
		p.size.Add(1)
		l.startWork(b)
	}
}

func (l *Prefetcher) now() time.Duration { return time.Since(l.start) }

// startWork makes the call of the stock's state, in a goroutine. Once Close has begun, the stock rests, and Close refunds it.
func (l *Prefetcher) startWork(b *hotBucket) {
	go func() {
		select {
		case l.calls <- struct{}{}:
			defer func() { <-l.calls }()
		case <-l.closed.Done():
		}
		if l.closed.Err() != nil {
			b.do((*stock).rest)
			return
		}
		var refills bool
		if b.do(func(s *stock) { refills = s.state == refilling }); refills {
			l.refill(b)
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), giveBackTimeout)
		defer cancel()
		l.refund(ctx, b)
	}()
}

func (l *Prefetcher) refill(b *hotBucket) {
	var n int64
	sent := l.now()
	b.do(func(s *stock) { n = s.take(sent, b.policy.changing.Load() > 0) })
	if n == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), stockLife) // a later reply would bring tokens that are too old to grant
	defer cancel()
	d, err := l.quiet.AcquireUpTo(ctx, b.policy.Policy, b.key, n, AtLeast(n)) // else a shadow policy might report more than it took
	b.do(func(s *stock) { s.took(d, err, sent, l.now()) })
}

func (l *Prefetcher) watch() {
	ticker := time.NewTicker(prefetchTick)
	defer ticker.Stop()
	for n := 0; ; n++ {
		select {
		case <-l.closed.Done():
			return
		case <-ticker.C:
		}
		for _, p := range l.policies {
			for _, b := range p.hot.Range {
				b, hasWork := b.(*hotBucket), false
				if b.do(func(s *stock) { hasWork = s.visit(l.now()) }); hasWork {
					l.startWork(b)
				}
			}
			if n%hotTicks == 0 && p.counted.Swap(false) {
				for i := range p.counts {
					p.counts[i].Store(0)
				}
			}
		}
	}
}

// refund refunds the tokens that the stock does not keep. A refund without an answer is not sent again: it might count twice.
func (l *Prefetcher) refund(ctx context.Context, b *hotBucket) {
	var n int64
	var ends bool
	if b.do(func(s *stock) { n, ends = s.refund(l.now()), s.state == ending }); n > 0 {
		_, _ = l.quiet.Refund(ctx, b.policy.Policy, b.key, n)
	}
	if !ends {
		b.do((*stock).rest)
		return
	}
	b.policy.hot.Delete(b.key) // only now: with a stock that begins, the two could have more than one may
	b.policy.size.Add(-1)
}

// Close refunds the tokens that stocks have left, for up to 5 seconds, and then closes as [Combiner.Close] does.
func (l *Prefetcher) Close() {
	l.close() // what has begun before has no more time than ctx, and stocks that ctx leaves are past stockLife
	ctx, cancel := context.WithTimeout(context.Background(), giveBackTimeout)
	defer cancel()
	for _, p := range l.policies {
		l.endAll(ctx, p, "")
	}
	l.combiner.Close()
}

// endAll ends the stocks of one key, or of all keys if key is empty. When ctx ends, it leaves the rest.
func (l *Prefetcher) endAll(ctx context.Context, p *prefetchedPolicy, key string) {
	var ends sync.WaitGroup
	free := make(chan struct{}, closingCalls)
	for _, b := range p.hot.Range {
		b := b.(*hotBucket)
		if key != "" && b.key != key {
			continue
		}
		free <- struct{}{}
		ends.Go(func() {
			defer func() { <-free }()
			if l.seize(ctx, b) {
				l.refund(ctx, b)
			}
		})
	}
	ends.Wait()
}

// seize waits until the stock rests, and makes it enter the state ending. It returns false if the stock has ended, or ctx.
func (l *Prefetcher) seize(ctx context.Context, b *hotBucket) (seized bool) {
	for {
		if ctx.Err() == nil {
			b.do(func(s *stock) { seized = s.enter(ending) })
		}
		if now, _ := b.policy.hot.Load(b.key); seized || now != b {
			return seized
		}
		if sleep(ctx, time.Millisecond) != nil {
			return false
		}
	}
}

// withoutStocks is endAll, and no tokens are taken for the policy until done is called. It works on nil.
func (l *Prefetcher) withoutStocks(ctx context.Context, policy, key string) (done func()) {
	if l == nil || l.policies[policy] == nil {
		return func() {}
	}
	p := l.policies[policy]
	p.changing.Add(1) // before the stocks are listed: a refill that takes tokens since has seen it
	ctx, cancel := context.WithTimeout(ctx, giveBackTimeout)
	defer cancel()
	l.endAll(ctx, p, key)
	return func() { p.changing.Add(-1) }
}
