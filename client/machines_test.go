package client

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A stock grants its last token, until its life is over. It ends to the instant when its life does, and when nobody has asked for Idle. Of
// a policy that is gone it has nothing, and after a refill without an answer it takes nothing until a caller has had one.
func TestStock_AtItsEnds(t *testing.T) {
	t.Parallel()
	seen := sight{Decision{Allowed: true, Remaining: 9_900, Capacity: 10_000, ResetAfter: time.Hour}, time.Millisecond}
	refilled := func(idle time.Duration) *stock {
		s := newStock(Prefetch{MaxTokens: 100, MaxShare: 1, Idle: idle}, 100, sight{Decision: Decision{Remaining: 10_000, Capacity: 10_000}})
		require.EqualValues(t, 100, s.take(0, false))
		s.took(PartialDecision{seen.Decision, 100}, nil, 0, seen.at)
		require.Equal(t, seen, s.seen)
		return &s
	}
	s := refilled(time.Hour)
	for cost, now := range map[int64]time.Duration{99: 0, 1: stockLife - 1} {
		d, ok, _ := s.grant(cost, now)
		require.True(t, ok && d.Estimated)
	}
	_, ok, _ := refilled(time.Hour).grant(1, stockLife)
	require.False(t, ok)

	const idle = stockLife / 2
	for _, test := range []struct{ idle, ends time.Duration }{{time.Hour, stockLife}, {idle, idle}} {
		s := refilled(test.idle)
		s.visit(test.ends - 1)
		require.NotEqual(t, ending, s.state)
		s.rest()
		s.visit(test.ends)
		require.Equal(t, ending, s.state)
	}

	s = refilled(time.Hour)
	s.grant(60, seen.at)
	s.took(PartialDecision{}, errors.New("no answer"), 0, seen.at)
	require.EqualValues(t, 40, s.left)
	require.Zero(t, s.take(seen.at, false))
	s.learn(seen)
	require.Zero(t, s.take(seen.at, true), "while the policy changes")
	require.EqualValues(t, 60, s.take(seen.at, false))
	s.took(PartialDecision{}, ErrUnknownPolicy, 0, seen.at)
	require.Zero(t, s.left)
}

// Whatever the demand and the bucket, a stock keeps within its bounds, and leaves others as much as it has.
func TestStockSize_KeepsItsBounds(t *testing.T) {
	t.Parallel()
	require.Equal(t, Prefetch{MaxTokens: 9e12, MaxShare: 0.1, Idle: 250 * time.Millisecond}, Prefetch{}.withDefaults())
	require.Zero(t, stockSize{full: 10}.excess(20), "not worth a call")
	require.EqualValues(t, 11, stockSize{full: 10}.excess(21))
	random(t, 1000, func(t *testing.T, r *rand.Rand) {
		between := func(least, most int64) int64 { // often at an end, often small
			return min(most, least+pick(r, 0, most-least, r.Int64N(most-least+1), int64(math.Pow(float64(most-least), r.Float64()))))
		}
		l := Prefetch{MaxTokens: between(1, 1e6), MaxShare: (1 - 0.999*r.Float64())}
		capacity := between(0, 9e12)
		seen := sight{Decision: Decision{
			Capacity: capacity, Remaining: between(-100, capacity), ResetAfter: duration(between(0, time.Hour.Microseconds())),
			Shadowed: r.IntN(10) == 0,
		}}
		if r.IntN(10) == 0 {
			seen.ResetAfter = never
		}
		level := seen.level(time.Duration(between(0, int64(2*time.Hour))))
		require.GreaterOrEqual(t, level, seen.Remaining)
		require.LessOrEqual(t, level, capacity)

		d := seen.with(between(0, 2e6))
		require.True(t, d.Allowed && d.Estimated)
		require.GreaterOrEqual(t, d.Remaining, max(0, seen.Remaining))
		require.LessOrEqual(t, d.Remaining, capacity)
		require.GreaterOrEqual(t, d.ResetAfter, time.Duration(0))
		require.LessOrEqual(t, d.ResetAfter, seen.ResetAfter)
		if d.Remaining == capacity && seen.Remaining < capacity && !seen.NeverFull() {
			require.Zero(t, d.ResetAfter, "it is full")
		}

		asked := demand(math.Pow(10, 9*r.Float64()) - 1)
		size := l.size(asked, seen)
		require.LessOrEqual(t, size.full, l.MaxTokens)
		require.LessOrEqual(t, float64(size.full), l.MaxShare*float64(capacity))
		require.LessOrEqual(t, float64(size.full), float64(asked)*0.8)
		require.LessOrEqual(t, size.low, size.full)
		if seen.Shadowed || seen.NeverFull() {
			require.Zero(t, size.full)
		}

		left := between(0, 2e6)
		n := size.refill(left, level)
		require.GreaterOrEqual(t, n, int64(0))
		if n > 0 {
			require.LessOrEqual(t, left+n, size.full)
			require.LessOrEqual(t, left+n, level-n)
		}
		if excess := size.excess(left); excess > 0 {
			require.Equal(t, size.full, left-excess)
			require.Zero(t, n)
		}
	})
}

// It rises at once, falls by and by, and takes a moment for no rate.
func TestDemand_FollowsTheRate(t *testing.T) {
	t.Parallel()
	var d demand
	d.observe(100, 50*time.Millisecond)
	require.InDelta(t, 2000, float64(d), 1)
	for range 6 {
		d.observe(0, 50*time.Millisecond)
	}
	require.InDelta(t, 2000/2.718, float64(d), 1)
	for range 60 {
		d.observe(5, 50*time.Millisecond)
	}
	require.InDelta(t, 100, float64(d), 1)
	d.observe(10, time.Microsecond)
	require.InDelta(t, 2000, float64(d), 1)
}

// What a bucket holds grows from what was seen until it is full, if it gains anything.
func TestSight_TheLevelGrowsUntilTheBucketIsFull(t *testing.T) {
	t.Parallel()
	const seen = time.Minute
	s := sight{Decision{Remaining: 20, Capacity: 100, ResetAfter: 8 * time.Second}, seen}
	for after, level := range map[time.Duration]int64{0: 20, 1: 30, 4: 60, 8: 100, 9: 100} {
		require.Equal(t, level, s.level(seen+after*time.Second))
	}
	s.ResetAfter = never
	require.EqualValues(t, 20, s.level(2*seen))
}

// A renewal may take a third of the lease, or a second if that is more, and ends with the lease. What is over stays over.
func TestTenure_ARenewalEndsWithTheLease(t *testing.T) {
	t.Parallel()
	tenure, short := newTenure(30*time.Second), newTenure(time.Second)
	for sent, patience := range map[time.Duration]time.Duration{10: 10, 20: 10, 25: 5, 29: 1} {
		require.Equal(t, patience*time.Second, tenure.patience(sent*time.Second), "sent at %d s", sent)
	}
	require.Equal(t, 600*time.Millisecond, short.patience(400*time.Millisecond))
	tenure.renewed(10*time.Second, 30*time.Second)
	require.Equal(t, 20*time.Second, tenure.due)
	require.False(t, tenure.over(40*time.Second-1))
	require.True(t, tenure.over(40*time.Second))
	tenure.renewed(39*time.Second, time.Hour)
	require.True(t, tenure.over(0))
	short.end()
	require.True(t, short.over(0))
}

// Many holders of a database that was away do not ask at one instant.
func TestTenure_PausesAfterAFailureAreRandom(t *testing.T) {
	t.Parallel()
	due := map[time.Duration]bool{}
	for range 100 {
		tenure := newTenure(time.Hour)
		tenure.failed(0)
		require.GreaterOrEqual(t, tenure.due, maxAskPause/2)
		require.LessOrEqual(t, tenure.due, maxAskPause)
		due[tenure.due] = true
	}
	require.Greater(t, len(due), 50)
}

// StopTimer makes a Hold find out by itself that its lease has ended.
func StopTimer(h *Hold) { h.timer.Stop() }

// Whatever arrives, leaves and ends in whatever order, the invariants of the queue hold after each step, and in the
// end every request was sent or refused, or its caller has left. The test knows the queue by the calls of its methods alone.
func TestQueue_KeepsItsInvariants(t *testing.T) {
	t.Parallel()
	random(t, 100, func(t *testing.T, r *rand.Rand) {
		d := &drivenQueue{T: t, limit: 1 + r.IntN(4), maxWaiting: pick(r, 1, 20, 300, 10_000), now: time.Unix(0, 0)}
		d.queue, d.taken, d.claimed = newQueue(d.limit, d.maxWaiting), map[*waiter]*batch{}, map[*batch]request{}
		arrive := func() {
			spread := pick(r, 1, 5, 300)
			for range pick(r, 1, 1, 1, 40, 300) {
				next := request{policy: pick(r, "p", "q"), key: fmt.Sprint(r.IntN(spread + 1))}
				if r.IntN(4) == 0 {
					next.idempotencyKey = "once"
				}
				if r.IntN(3) == 0 {
					next.policy = ""
					next.charges = make([]Charge, pick(r, 1, 3, 1000))
				}
				d.arrive(next, pick[time.Duration](r, 0, 1, 50, 1000, 1e6)*time.Millisecond)
				d.check()
			}
		}
		for range 30 {
			switch step := r.IntN(6); {
			case step == 0:
				arrive()
			case step == 1 && d.reserved:
				d.take()
			case step == 2 && len(d.batches) > 0:
				d.finish(pick(r, d.batches...))
			case step == 3 && len(d.callers()) > 0:
				d.leave(pick(r, d.callers()...))
			case step == 4 && d.lingering:
				d.hurry()
			default:
				d.now = d.now.Add(time.Duration(1+r.IntN(100)) * time.Millisecond)
			}
			d.check()
		}

		for d.reserved || d.lingering || len(d.batches) > 0 {
			switch {
			case d.reserved:
				d.take()
			case d.lingering:
				d.hurry()
			default:
				d.finish(d.batches[0])
			}
			d.check()
		}
		require.Empty(t, d.waiting, "nobody is forgotten")
		require.Empty(t, d.queue.owners, "nor is a bucket kept")
	})
}

// random runs a test of random choices under the seeds from 0 on, and logs the seed that fails.
func random(t *testing.T, seeds uint64, test func(*testing.T, *rand.Rand)) {
	t.Helper()
	seed := uint64(0)
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	for ; seed < seeds && !t.Failed(); seed++ {
		test(t, rand.New(rand.NewPCG(seed, 0)))
	}
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

// A drivenQueue records the calls of its queue's methods, and requires what follows from them.
type drivenQueue struct {
	*testing.T
	queue      *queue
	limit      int
	maxWaiting int
	now        time.Time
	calls      []time.Duration // of the calls that have ended
	ended      time.Time       // when the last call did
	reserved   bool
	lingering  bool
	waiting    []*waiter          // in order of arrival
	batches    []*batch           // open
	claimed    map[*batch]request // those of batches that claim opened, for it
	abandoned  []*batch           // those of batches whose callers have all left
	taken      map[*waiter]*batch
}

func (d *drivenQueue) do(next step) {
	switch next {
	case serve:
		require.False(d, d.reserved, "one place is reserved at a time")
		d.reserved = true
	case linger:
		require.NotEmpty(d, d.batches)
		d.lingering = true
	}
}

func (d *drivenQueue) hurry() {
	d.lingering = false
	next := d.queue.hurry()
	require.NotEqual(d, linger, next)
	d.do(next)
}

// recent returns the times of the calls that the queue may judge by.
func (d *drivenQueue) recent() []time.Duration {
	return d.calls[max(0, len(d.calls)-max(paceCalls, 2*d.limit+1)):]
}

// judges reports whether the queue knows of enough calls, of which the last has just ended.
func (d *drivenQueue) judges() bool {
	return len(d.calls) >= paceCalls && d.now.Sub(d.ended) <= paceLife
}

func (d *drivenQueue) arrive(r request, within time.Duration) {
	first := d.queue.canTake()
	if b := d.queue.claim(r, d.now); b != nil {
		require.False(d, first, "a request that waits and can be taken goes first")
		require.False(d, d.reserved)
		d.batches, d.claimed[b] = append(d.batches, b), r
		return
	}
	w := &waiter{request: r}
	if within > 0 {
		w.deadline = d.now.Add(within)
	}
	refusal := d.queue.refusal(w, d.now)
	d.checkRefusal(w, within, refusal)
	if refusal != nil {
		return
	}
	d.waiting = append(d.waiting, w)
	d.do(d.queue.add(w))
}

// checkRefusal requires no refusal of a request that can be sent at once, and one where the queue is full.
func (d *drivenQueue) checkRefusal(w *waiter, within time.Duration, refusal *OverloadedError) {
	isFree := !d.reserved && len(d.batches) < d.limit
	if isFree && d.owners()[w.bucket()] == nil {
		require.Nil(d, refusal, "it can be sent at once")
		return
	}
	if len(d.waiting) >= d.maxWaiting {
		require.NotNil(d, refusal)
		return
	}
	if !d.judges() {
		require.Nil(d, refusal, "too little is known")
	}
	if refusal != nil {
		require.Equal(d, len(d.waiting), refusal.Waiting)
		require.NotZero(d, within)
		require.Greater(d, refusal.Expected, within)
	}
}

func (d *drivenQueue) take() {
	d.reserved = false
	b := new(batch)
	before := len(d.waiting)
	taken := d.queue.take(b, d.now)
	d.checkLate(b, before)
	if !taken {
		return
	}
	require.NotEmpty(d, b.waiters)
	elements := 0
	passed := map[[2]any]bool{} // by order
	inBatch := map[*waiter]bool{}
	for _, w := range b.waiters {
		require.Less(d, elements, maxBatch, "a full batch takes no more")
		elements += max(1, len(w.charges))
		require.Equal(d, b.waiters[0].keyed(), w.keyed())
		require.Equal(d, b.waiters[0].isJoint(), w.isJoint())
		inBatch[w] = true
	}
	for _, w := range d.waiting {
		order := [2]any{w.bucket(), w.keyed()}
		if !inBatch[w] {
			passed[order] = true
			continue
		}
		require.False(d, passed[order], "one that arrived before it still waits")
		d.taken[w] = b
	}
	left := len(d.waiting) - len(b.waiters)
	d.waiting = slices.DeleteFunc(d.waiting, func(w *waiter) bool { return inBatch[w] })
	require.Len(d, d.waiting, left, "all of them waited")
	d.batches = append(d.batches, b)
	d.do(d.queue.next())
}

// checkLate requires that take refused only requests that cannot be answered in time, and not the last one that waited.
func (d *drivenQueue) checkLate(b *batch, before int) {
	soonest := d.now
	if d.judges() {
		soonest = soonest.Add(slices.Min(d.recent()))
	}
	late := map[*waiter]bool{}
	for _, w := range b.late {
		require.True(d, !w.deadline.IsZero() && w.deadline.Before(soonest))
		require.Contains(d, d.waiting, w)
		late[w] = true
	}
	d.waiting = slices.DeleteFunc(d.waiting, func(w *waiter) bool { return late[w] })
	require.Len(d, d.waiting, before-len(b.late))
	if before > 0 {
		require.NotEmpty(d, d.waiting)
	}
	for _, w := range b.waiters {
		require.True(d, w.deadline.IsZero() || !w.deadline.Before(soonest) || len(d.waiting) == 1, "it is sent in vain")
	}
}

func (d *drivenQueue) finish(b *batch) {
	took := d.now.Sub(b.began)
	if slices.Contains(d.abandoned, b) {
		took *= 2
	}
	d.calls, d.ended = append(d.calls, took), d.now
	d.batches = slices.DeleteFunc(d.batches, func(o *batch) bool { return o == b })
	delete(d.claimed, b)
	maps.DeleteFunc(d.taken, func(_ *waiter, by *batch) bool { return by == b })
	d.do(d.queue.finish(b, d.now))
}

// callers returns the waiters whose callers have not left.
func (d *drivenQueue) callers() []*waiter {
	callers := slices.Clone(d.waiting)
	for _, b := range d.batches {
		for _, w := range b.waiters {
			if d.taken[w] == b {
				callers = append(callers, w)
			}
		}
	}
	return callers
}

func (d *drivenQueue) leave(w *waiter) {
	abandoned := d.queue.leave(w)
	b := d.taken[w]
	if b == nil {
		require.Nil(d, abandoned)
		d.waiting = slices.DeleteFunc(d.waiting, func(o *waiter) bool { return o == w })
		return
	}
	delete(d.taken, w)
	for _, by := range d.taken {
		if by == b {
			require.Nil(d, abandoned, "others wait for that batch")
			return
		}
	}
	require.Same(d, b, abandoned)
	d.abandoned = append(d.abandoned, b)
}

func (d *drivenQueue) check() {
	places := len(d.batches)
	if d.reserved {
		places++
	}
	require.LessOrEqual(d, places, d.limit)
	require.LessOrEqual(d, len(d.waiting), d.maxWaiting+1)
	elements := 0
	for _, w := range d.waiting {
		elements += w.elements()
	}
	require.Equal(d, elements, d.queue.elements)

	owners := d.owners()
	if places == d.limit || d.reserved || d.lingering {
		return
	}
	for _, w := range d.waiting {
		require.NotNil(d, owners[w.bucket()], "%v waits for nobody, and a place is free", w.bucket())
	}
}

// owners returns the open batch of each bucket.
func (d *drivenQueue) owners() map[bucket]*batch {
	owners := map[bucket]*batch{}
	owned := func(b *batch, r request) {
		require.True(d, owners[r.bucket()] == nil || owners[r.bucket()] == b, "%v is in two calls", r.bucket())
		owners[r.bucket()] = b
	}
	for _, b := range d.batches {
		for _, w := range b.waiters {
			owned(b, w.request)
		}
	}
	for b, r := range d.claimed {
		owned(b, r)
	}
	return owners
}

// Each list of buckets has a name of its own, whatever texts the policies and keys are.
func TestQueue_TellsListsOfBucketsApart(t *testing.T) {
	t.Parallel()
	names := map[string][]Charge{}
	for _, charges := range [][]Charge{
		{{Policy: "p", Key: "k"}},
		{{Policy: "pk", Key: ""}},
		{{Policy: "", Key: "pk"}},
		{{Policy: "p", Key: "k1 p1 k"}},
		{{Policy: "p", Key: "k"}, {Policy: "p", Key: "k"}},
		{{Policy: "p", Key: "k"}, {Policy: "p", Key: "l"}},
		{{Policy: "p", Key: "l"}, {Policy: "p", Key: "k"}},
		{{Policy: "p", Key: "1 k"}, {Policy: "", Key: ""}},
		{{Policy: "p", Key: ""}, {Policy: "k", Key: ""}},
	} {
		name := nameOfAll(charges)
		require.NotContains(t, names, name, "%v", charges)
		names[name] = charges
	}
}

// A batch gets an equal share of the requests for each place: at least minShare, and at most maxBatch. Further requests
// for its own buckets do not count, because no other batch could take them.
func TestQueue_Shares(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ limit, keys, each, want int }{
		{1, 10, 1, 10},
		{1, 300, 1, 256},
		{2, 6, 1, 6},
		{2, 12, 1, 8},
		{2, 20, 1, 10},
		{2, 64, 1, 32},
		{2, 200, 1, 100},
		{2, 2000, 1, 256},
		{4, 200, 1, 50},
		{4, 20, 1, 8},
		{4, 1, 200, 200},
		{4, 1, 300, 256},
		{2, 40, 3, 120}, // a share of sixty requests has all buckets, and then all their requests
	} {
		q := newQueue(test.limit, 10_000)
		for i := range test.keys * test.each {
			q.add(&waiter{request: request{policy: "p", key: fmt.Sprint(i % test.keys)}})
		}
		var b batch
		require.True(t, q.take(&b, time.Time{}))
		require.Len(t, b.waiters, test.want, "%+v", test)
	}
}

// The expected time is the rest of the call that ends first, unless a place is reserved, and the calls that are needed then, each as
// long as the quickest recent call. A quarter is added. A request is refused if and only if its deadline is earlier.
func TestQueue_ExpectsTheNextCallAndThoseThatAreNeeded(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	now := time.Unix(100, 0)
	plain := func(key string) *waiter { return &waiter{request: request{policy: "p", key: key}} }
	joint := func(charges int) *waiter { return &waiter{request: request{charges: make([]Charge, charges)}} }
	for name, test := range map[string]struct {
		limit    int
		lasted   []time.Duration // of the calls under way, for keys 0 and on
		reserved bool
		waiting  int
		waiter   func() *waiter
		want     time.Duration // before a quarter is added
	}{
		"the call that ends first":  {2, []time.Duration{10 * ms, 60 * ms}, false, 0, func() *waiter { return plain("k") }, 40*ms + 100*ms},
		"a reserved place":          {2, []time.Duration{10 * ms}, true, 0, func() *waiter { return plain("k") }, 100 * ms},
		"its bucket's call":         {2, []time.Duration{10 * ms, 60 * ms}, false, 0, func() *waiter { return plain("0") }, 90*ms + 100*ms},
		"one bucket, a call a time": {2, []time.Duration{10 * ms}, false, 600, func() *waiter { return plain("0") }, 90*ms + 3*100*ms},
		"a request is never split":  {1, []time.Duration{10 * ms}, false, 0, func() *waiter { return joint(1000) }, 90*ms + 100*ms},
		"large requests":            {1, []time.Duration{10 * ms}, false, 9, func() *waiter { return joint(20) }, 90*ms + 100*ms},
	} {
		q := newQueue(test.limit, 10_000)
		for range paceCalls {
			q.pace.observe(100*ms, false, now)
		}
		for key, lasted := range test.lasted {
			r := plain(fmt.Sprint(key)).request
			require.NotNil(t, q.claim(r, now.Add(-lasted)), name)
		}
		for range test.waiting {
			q.push(test.waiter())
		}
		q.reserved = test.reserved
		w := test.waiter()
		want := test.want * 5 / 4
		require.Equal(t, want, q.expected(w, now), name)
		w.deadline = now.Add(want)
		require.Nil(t, q.refusal(w, now), name)
		w.deadline = now.Add(want - 1)
		refusal := q.refusal(w, now)
		require.Equal(t, &OverloadedError{Waiting: test.waiting, Expected: want}, refusal, name)
		require.EqualError(t, refusal, fmt.Sprintf("the answer would come after the deadline, in %v or later; requests that wait: %d", want.Round(ms), test.waiting))
	}
}

// A call has stalled when it has lasted twice as long as usual, and not before: until then it is expected to end at any moment.
func TestPace_ACallHasStalledAfterTwiceTheUsualTime(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	p := newPace(2)
	for range paceCalls {
		require.Zero(t, p.left(time.Hour, now), "too little is known")
		p.observe(100*time.Millisecond, false, now)
	}
	for lasted, left := range map[time.Duration]time.Duration{
		0: 100, 60: 40, 99: 1, 100: 0, 101: 0, 199: 0, 200: 200, 201: 201, 5000: 5000,
	} {
		require.Equal(t, left*time.Millisecond, p.left(lasted*time.Millisecond, now), "after %d ms", lasted)
	}
	require.Zero(t, p.left(time.Hour, now.Add(paceLife+1)), "what is known is too old")
}

// The pace is that of the quickest recent call. Two slow rounds of calls do not change it: the first ones connect, and some may stall.
func TestPace_SlowCallsNowAndThenDoNotCount(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	for _, limit := range []int{1, 2, 8} {
		p := newPace(limit)
		observe := func(calls int, took time.Duration) time.Duration {
			for range calls {
				p.observe(took, false, now)
			}
			return p.call(now)
		}
		observe(2*limit, 500*time.Millisecond)
		require.Equal(t, 50*time.Millisecond, observe(paceCalls, 50*time.Millisecond))
		require.Equal(t, 50*time.Millisecond, observe(2*limit, 500*time.Millisecond))
		require.Equal(t, 500*time.Millisecond, observe(paceCalls, 500*time.Millisecond), "all are slow now")
	}
}

// A later denial of a bucket replaces the earlier one. When the cache is full, a new bucket replaces one whose denial ends soon.
func TestDenialCache_IsBoundedAndKeepsDenialsThatLast(t *testing.T) {
	t.Parallel()
	const most = maxDenials / denialCacheParts
	now := time.Unix(0, 0)
	s := &denialCachePart{byKey: make(map[bucket]cachedDenial)}
	store := func(key int, lasts time.Duration) {
		s.store(bucket{"p", fmt.Sprint(key)}, cachedDenial{Decision{RetryAfter: lasts, Capacity: 10}, 1, now, now}, 0)
	}
	for key := range most {
		store(key, time.Minute+time.Duration(key)*time.Second)
	}
	store(most-1, time.Hour)
	require.Len(t, s.byKey, most)
	d, known, _ := s.find(bucket{"p", fmt.Sprint(most - 1)}, 1, now)
	require.True(t, known)
	require.Equal(t, time.Hour, d.RetryAfter)

	at := bucket{"p", fmt.Sprint(most - 1)}
	s.store(at, cachedDenial{Decision{RetryAfter: 2 * time.Hour, Capacity: 10}, 2, now, now}, 0)
	_, known, _ = s.find(at, 1, now)
	require.True(t, known, "a denial of a larger cost does not replace one of a smaller")

	for key := range 2 * most {
		store(most+key, time.Duration(2+key)*time.Hour)
		require.Len(t, s.byKey, most)
		require.Contains(t, s.byKey, bucket{"p", fmt.Sprint(most + key)})
	}
	kept := 0
	for key := range most / 2 {
		if _, ok := s.byKey[bucket{"p", fmt.Sprint(3*most - 1 - key)}]; ok {
			kept++
		}
	}
	require.Greater(t, kept, most/2*9/10, "of the denials that last longest")
}

// Calls that collided do not meet again, and none pauses for long.
func TestBackoff_IsRandomAndBounded(t *testing.T) {
	t.Parallel()
	for n, limit := range map[int]time.Duration{1: 50, 2: 100, 4: 400, 5: 500, 9: 500} {
		limit *= time.Millisecond
		shortest, longest := limit, time.Duration(0)
		for range 200 {
			pause := backoff(n)
			shortest, longest = min(shortest, pause), max(longest, pause)
		}
		require.True(t, 0 <= shortest && shortest < limit/4 && limit*3/4 < longest && longest < limit, "%d: %v to %v", n, shortest, longest)
	}
}
