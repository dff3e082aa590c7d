package client

import (
	"context"
	"fmt"
	"hash/maphash"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// leaseTick is the time between two looks at all leases.
	leaseTick = 50 * time.Millisecond

	// hotRequests within a window make a bucket hot.
	hotRequests = 5
	hotTicks    = 4 // of a window

	// maxLeases of one policy.
	maxLeases = 10_000

	// jointOnly requests of several charges, and none of one charge, make a Leaser log that it leases nothing.
	jointOnly = 1000

	leaseShards  = 256     // maps of leases in a policy, each with a mutex
	leaseCounts  = 1 << 16 // counts of requests in a policy
	leaseCalls   = 2       // refills and refunds at a time
	closingCalls = 8       // refunds at a time while leases must end
)

// A Lease lets a [Leaser] hold tokens of the hot buckets of one policy. A Leaser has one for a policy at most.
type Lease struct {
	Policy string

	// MaxTokens is how many tokens of one bucket are held at most. Zero is no bound but MaxShare.
	MaxTokens int64

	// MaxShare is the part of a bucket's capacity that is held at most. Zero is 0.1.
	MaxShare float64

	// Idle is how long a lease gets no requests before its tokens are refunded. Zero is 250 ms.
	Idle time.Duration
}

func (l Lease) option() option {
	return option{func(c *config) { c.leases = append(c.leases, l) }, aLeaser, "a Lease"}
}

func (l Lease) withDefaults() Lease {
	if l.MaxTokens == 0 {
		l.MaxTokens = 9_000_000_000_000 // the largest capacity
	}
	if l.MaxShare == 0 {
		l.MaxShare = 0.1
	}
	if l.Idle == 0 {
		l.Idle = 250 * time.Millisecond
	}
	if l.MaxTokens < 0 || !(l.MaxShare > 0 && l.MaxShare <= 1) || l.Idle < 0 { // NaN is no share
		panic("client: a Lease must have a share between 0 and 1, and neither tokens nor time below 0")
	}
	return l
}

type combiner = Combiner // so that only this package names the field of a Leaser

// A Leaser is a [Combiner] that answers requests for hot buckets by itself, from tokens that it has taken before: their leases.
// It does so for the policies that have a [Lease], and for requests of Acquire without an idempotency key. The Combiner answers
// all other requests.
//
// A bucket is hot when five requests for it come within a fifth of a second. Its lease has the tokens of 0.8 seconds, at the
// rate of the last moments, but no more than Lease.MaxTokens and than Lease.MaxShare of the capacity. As far as the Leaser last
// saw, the bucket keeps at least as many tokens for other processes. With a quarter left, the Leaser refills in the background.
//
// It uses 2 more connections than [CallsInFlight], and up to 8 besides while Close, Reset, Pause, Override, RemoveOverride,
// DefinePolicy or DropPolicy refunds leases.
//
// Guarantees:
//
//   - A grant is charged before it is given. So all processes together never grant more than the server has charged.
//   - Every denial comes from the server. When the lease has fewer tokens than a request costs, the Combiner asks.
//   - Unspent tokens are refunded after Lease.Idle without a request, when the rate falls, and by Close. Tokens that are
//     refunded to a full bucket are lost, as they would have been without the lease.
//   - A process that is killed loses the tokens of its leases: at most MaxShare of the capacity of each hot bucket, and no more
//     than MaxTokens. So does a process whose call to the server got no answer.
//   - A lease is used for at most a second after the server has last given tokens to it. So a policy that is changed or dropped,
//     an override and a block take effect for it within a second, and when the database is away, grants go on for so long.
//     Reset, Pause, Override, RemoveOverride, DefinePolicy and DropPolicy through this Leaser refund leases first. The Leaser takes
//     no tokens for the policy until they are done. After a reset by another program, leased tokens can be spent, or refunded,
//     besides the full bucket.
//
// In a [Decision] from a lease, Remaining and ResetAfter are estimates, and it is marked [Decision.Estimated]. A bucket is not
// leased if it refills nothing, or if a shadow policy would have denied.
//
// Close it when it is no longer used: else its leases are lost.
type Leaser struct {
	*combiner
	own      limiter // for refills and refunds: no caller made them, so hooks are not called
	policies map[string]*leasedPolicy
	start    time.Time       // of the Leaser's clock
	calls    chan struct{}   // has an element for each refill or refund under way
	closed   context.Context // ends when Close begins
	close    context.CancelFunc
	working  context.Context // ends when Close has no more time
	stop     context.CancelFunc

	background sync.WaitGroup // goroutines that refill and refund
	closing    sync.Mutex
	isClosed   bool

	joint     atomic.Int64 // requests of several charges, of a leased policy
	hasSingle atomic.Bool  // a request that a lease might answer
}

// NewLeaser returns a Leaser. The role needs the rights that [NewCombiner] names, and EXECUTE on ratelimit_acquire_up_to and on
// ratelimit_refund. Options are the options of NewCombiner and one [Lease] for each policy whose tokens may be held. Panics if two
// Leases are for the same policy, if a Lease is out of range, and where NewCombiner does.
func NewLeaser(pool Pool, opts ...Option) *Leaser {
	config := newConfig("NewLeaser", aLeaser, opts)
	l := &Leaser{
		combiner: newCombiner(pool, config),
		policies: make(map[string]*leasedPolicy),
		start:    time.Now(),
		calls:    make(chan struct{}, leaseCalls),
	}
	l.closed, l.close = context.WithCancel(context.Background())
	l.working, l.stop = context.WithCancel(context.Background())
	l.own = l.combiner.limiter
	l.own.hooks.Answered = nil
	for _, lease := range config.leases {
		if l.policies[lease.Policy] != nil {
			panic(fmt.Sprintf("client: NewLeaser: two Leases for policy %q", lease.Policy))
		}
		l.policies[lease.Policy] = &leasedPolicy{Lease: lease.withDefaults(), seed: maphash.MakeSeed()}
	}
	if len(l.policies) > 0 {
		l.background.Go(func() { l.watch(l.closed) })
	}
	return l
}

// A leasedPolicy has the leases of one policy. Its maps are copied when they change, so that reading takes no lock.
type leasedPolicy struct {
	Lease
	seed   maphash.Seed
	shards [leaseShards]leaseShard
	held   atomic.Int64 // leases

	// changing counts calls under way that must find no lease, such as Reset. Meanwhile no tokens are taken.
	changing atomic.Int64

	// counts count the requests for buckets without a lease. Buckets that share a count are leased a little early.
	counts  [leaseCounts]atomic.Uint32
	counted atomic.Bool
}

type leaseShard struct {
	leases  atomic.Pointer[map[string]*lease]
	writing sync.Mutex
}

func (s *leaseShard) find(key string) *lease {
	leases := s.leases.Load()
	if leases == nil {
		return nil
	}
	return (*leases)[key]
}

// change replaces the map by a changed copy.
func (s *leaseShard) change(change func(map[string]*lease)) {
	s.writing.Lock()
	defer s.writing.Unlock()
	leases := make(map[string]*lease)
	if old := s.leases.Load(); old != nil {
		maps.Copy(leases, *old)
	}
	change(leases)
	s.leases.Store(&leases)
}

// A lease is an entry of a leaseShard: a holding, and the mutex that serialises its methods.
type lease struct {
	policy *leasedPolicy
	key    string
	hash   uint64

	mu      sync.Mutex
	holding holding
}

func (e *lease) do(step func(*holding)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	step(&e.holding)
}

// Acquire is [Limiter.Acquire]. A hot bucket's lease grants without a call to the server. Requests that it cannot grant, and all
// other requests, go the way of [Combiner.Acquire].
//
// Errors: as Combiner.Acquire.
func (l *Leaser) Acquire(ctx context.Context, policy, key string, opts ...CallOption) (Decision, error) {
	r := newRequest("Acquire", policy, key, opts)
	at := l.find(r)
	if d, ok := l.grantFrom(ctx, at, r); ok {
		return d, nil
	}
	d, err := l.acquire(ctx, r, l.combinePlain)
	if err == nil {
		l.learn(at, r, d)
	}
	return d, err
}

// A leasable is the bucket of a request that a lease may answer. It has no policy if none may.
type leasable struct {
	policy *leasedPolicy
	lease  *lease // nil for none
	hash   uint64
}

func (l *Leaser) find(r request) leasable {
	p := l.policies[r.policy]
	if p == nil || r.keyed() || r.cost < 1 || r.err != nil {
		return leasable{}
	}
	hash := maphash.String(p.seed, r.key)
	return leasable{p, p.shards[hash%leaseShards].find(r.key), hash}
}

// grantFrom takes from the lease of the bucket, if there is one that has as much.
func (l *Leaser) grantFrom(ctx context.Context, at leasable, r request) (Decision, bool) {
	if at.lease != nil && ctx.Err() == nil {
		begin := l.hooks.begin()
		if d, ok := l.grant(at.lease, r.cost); ok {
			l.hooks.answered(ctx, verbAcquire, r.policy, begin, d, nil)
			return d, true
		}
	}
	if at.policy != nil && !l.hasSingle.Load() {
		l.hasSingle.Store(true)
	}
	return Decision{}, false
}

// AcquireAll is [Combiner.AcquireAll]: a lease answers requests of Acquire only. A Leaser that gets no such request of its
// policies logs one warning through log/slog's default logger.
func (l *Leaser) AcquireAll(ctx context.Context, charges []Charge, opts ...CallOption) (JointDecision, error) {
	isLeased := func(c Charge) bool { return l.policies[c.Policy] != nil }
	if slices.ContainsFunc(charges, isLeased) && l.joint.Add(1) == jointOnly && !l.hasSingle.Load() {
		slog.Warn("a Leaser leases nothing: all requests of its policies are AcquireAll, which a lease cannot answer", "requests", jointOnly)
	}
	return l.combiner.AcquireAll(ctx, charges, opts...)
}

// grant takes from the lease, if it has as much.
func (l *Leaser) grant(e *lease, cost int64) (Decision, bool) {
	now := l.now()
	e.mu.Lock()
	d, ok, begins := e.holding.grant(cost, now)
	e.mu.Unlock()
	if begins {
		l.begin(e)
	}
	return d, ok
}

// learn uses an answer of the server: for the lease, or to begin a lease.
func (l *Leaser) learn(at leasable, r request, d Decision) {
	p, e, hash := at.policy, at.lease, at.hash
	if p == nil {
		return
	}
	seen := sight{d, l.now()}
	if e != nil {
		e.do(func(h *holding) { h.learn(seen) })
		return
	}
	p.counted.Store(true)
	if p.counts[hash%leaseCounts].Add(1) < hotRequests || !d.Allowed || !seen.isLeasable() || p.held.Load() >= maxLeases {
		return
	}
	p.shards[hash%leaseShards].change(func(leases map[string]*lease) {
		if leases[r.key] != nil {
			return
		}
		e = &lease{policy: p, key: strings.Clone(r.key), hash: hash, holding: newHolding(p.Lease, r.cost, seen)}
		leases[e.key] = e
		p.held.Add(1)
	})
	if e != nil {
		l.begin(e)
	}
}

// now is the time on the Leaser's own clock.
func (l *Leaser) now() time.Duration { return time.Since(l.start) }

// begin starts the work that a holding asks for. A Leaser that closes lets the holding rest.
func (l *Leaser) begin(e *lease) {
	l.closing.Lock()
	defer l.closing.Unlock()
	if l.isClosed {
		e.do((*holding).rest)
		return
	}
	l.background.Go(func() {
		select {
		case l.calls <- struct{}{}:
			defer func() { <-l.calls }()
			l.work(e)
		case <-l.closed.Done(): // then Close refunds the tokens
			e.do((*holding).rest)
		}
	})
}

// work does what the state of the holding names.
func (l *Leaser) work(e *lease) {
	var work state
	e.do(func(h *holding) { work = h.state })
	switch work {
	case refilling:
		l.refill(e)
	case shrinking:
		l.refundRest(l.working, e)
		e.do((*holding).rest)
	default:
		l.end(l.working, e)
	}
}

// refill takes tokens for the lease, unless a call under way must find no lease.
func (l *Leaser) refill(e *lease) {
	var n int64
	sent := l.now()
	e.do(func(h *holding) { n = h.take(sent, e.policy.changing.Load() > 0) })
	if n == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(l.working, leaseLife)
	defer cancel()
	d, err := l.own.AcquireUpTo(ctx, e.policy.Policy, e.key, n)
	doubt := err == nil && d.Taken == n && d.Remaining <= 0 && l.mayBeShadow(ctx, e)
	e.do(func(h *holding) { h.took(d, err, doubt, sent, l.now()) })
}

// mayBeShadow reports whether the policy grants more than any bucket has. Only a shadow policy does. After an error it may be one.
func (l *Leaser) mayBeShadow(ctx context.Context, e *lease) bool {
	d, err := l.own.AcquireUpTo(ctx, e.policy.Policy, e.key, math.MaxInt64, AtLeast(math.MaxInt64))
	return err != nil || d.Allowed
}

// watch looks at all leases every leaseTick, and forgets the counts of requests every hotTicks.
func (l *Leaser) watch(ctx context.Context) {
	ticker := time.NewTicker(leaseTick)
	defer ticker.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, p := range l.policies {
			p.each(func(e *lease) {
				begins := false
				if e.do(func(h *holding) { begins = h.visit(l.now()) }); begins {
					l.begin(e)
				}
			})
			if n%hotTicks == 0 && p.counted.Swap(false) {
				for i := range p.counts {
					p.counts[i].Store(0)
				}
			}
		}
	}
}

// each visits the leases of the policy.
func (p *leasedPolicy) each(visit func(*lease)) {
	if p.held.Load() == 0 {
		return
	}
	for i := range p.shards {
		if leases := p.shards[i].leases.Load(); leases != nil {
			for _, e := range *leases {
				visit(e)
			}
		}
	}
}

// end refunds all tokens that are left. Only then the bucket may have another lease: the bounds are for both.
func (l *Leaser) end(ctx context.Context, e *lease) {
	l.refundRest(ctx, e)
	e.policy.shards[e.hash%leaseShards].change(func(leases map[string]*lease) {
		if leases[e.key] == e {
			delete(leases, e.key)
			e.policy.held.Add(-1)
		}
	})
	e.do((*holding).end)
}

// refundRest refunds the tokens that the holding does not keep. It does not retry: a retry might refund tokens twice that were
// charged once.
func (l *Leaser) refundRest(ctx context.Context, e *lease) {
	ctx, cancel := context.WithTimeout(ctx, giveBackTimeout)
	defer cancel()
	var n int64
	if e.do(func(h *holding) { n = h.refund(l.now()) }); n > 0 {
		_, _ = l.own.Refund(ctx, e.policy.Policy, e.key, n)
	}
}

// Close refunds the tokens that leases have left, for up to 5 seconds, and then closes as [Combiner.Close] does.
func (l *Leaser) Close() {
	l.closing.Lock()
	l.isClosed = true
	l.closing.Unlock()
	l.close()
	ctx, cancel := context.WithTimeout(context.Background(), giveBackTimeout)
	defer cancel()
	context.AfterFunc(ctx, l.stop)
	l.endAll(ctx, slices.Collect(maps.Values(l.policies)), "")
	l.background.Wait()
	for _, p := range l.policies {
		p.each(func(e *lease) { e.do((*holding).lose) }) // leases for which the time was too short grant no more
	}
	l.combiner.Close()
}

// endAll ends the leases of policies, of one key or of all keys. When ctx ends, it leaves the remaining leases.
func (l *Leaser) endAll(ctx context.Context, policies []*leasedPolicy, key string) {
	ctx, cancel := context.WithTimeout(ctx, giveBackTimeout)
	defer cancel()
	var ends sync.WaitGroup
	free := make(chan struct{}, closingCalls)
	for _, p := range policies {
		p.each(func(e *lease) {
			if key != "" && e.key != key {
				return
			}
			free <- struct{}{}
			ends.Go(func() {
				defer func() { <-free }()
				if l.seize(ctx, e) {
					l.end(ctx, e)
				}
			})
		})
	}
	ends.Wait()
}

// seize waits until the holding rests and has it end, or reports false if it has ended, or ctx has.
func (l *Leaser) seize(ctx context.Context, e *lease) (seized bool) {
	for {
		if ctx.Err() == nil {
			e.do(func(h *holding) { seized = h.begin(ending) })
		}
		if seized || e.policy.shards[e.hash%leaseShards].find(e.key) != e {
			return seized
		}
		if sleep(ctx, time.Millisecond) != nil {
			return false
		}
	}
}

// withoutLeases makes a change to a policy when its leases, of one key or of all keys, are refunded. Meanwhile it takes no tokens
// for the policy.
func (l *Leaser) withoutLeases(ctx context.Context, policy, key string, change func() error) error {
	if p := l.policies[policy]; p != nil {
		p.changing.Add(1) // before the leases are listed: a refill that takes tokens since has seen it
		defer p.changing.Add(-1)
		l.endAll(ctx, []*leasedPolicy{p}, key)
	}
	return change()
}

// Reset is [Limiter.Reset]. Leased tokens are refunded before.
func (l *Leaser) Reset(ctx context.Context, policy, key string) error {
	return l.withoutLeases(ctx, policy, key, func() error { return l.combiner.Reset(ctx, policy, key) })
}

// Pause is [Limiter.Pause]. Leased tokens are refunded before. Those of other processes are used for a second at most.
func (l *Leaser) Pause(ctx context.Context, policy, key string, pauseFor time.Duration) (d Decision, err error) {
	err = l.withoutLeases(ctx, policy, key, func() error {
		d, err = l.combiner.Pause(ctx, policy, key, pauseFor)
		return err
	})
	return d, err
}

// Override is [Limiter.Override]. Leased tokens are refunded before.
func (l *Leaser) Override(ctx context.Context, o Override) error {
	return l.withoutLeases(ctx, o.Policy, o.Key, func() error { return l.combiner.Override(ctx, o) })
}

// RemoveOverride is [Limiter.RemoveOverride]. Leased tokens are refunded before.
func (l *Leaser) RemoveOverride(ctx context.Context, policy, key string) (removed bool, err error) {
	err = l.withoutLeases(ctx, policy, key, func() error {
		removed, err = l.combiner.RemoveOverride(ctx, policy, key)
		return err
	})
	return removed, err
}

// DefinePolicy is [Limiter.DefinePolicy]. Leased tokens are refunded before.
func (l *Leaser) DefinePolicy(ctx context.Context, p Policy) error {
	return l.withoutLeases(ctx, p.Name, "", func() error { return l.combiner.DefinePolicy(ctx, p) })
}

// DropPolicy is [Limiter.DropPolicy]. Leased tokens are refunded before.
func (l *Leaser) DropPolicy(ctx context.Context, name string) error {
	return l.withoutLeases(ctx, name, "", func() error { return l.combiner.DropPolicy(ctx, name) })
}
