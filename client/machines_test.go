package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// Whatever is asked for, answered and missed in whatever order, the invariants of a stock hold after each step, and in the end all
// of it was granted, refunded or lost. What should hold is worked out from the calls of its methods alone.
func TestStock_KeepsItsInvariants(t *testing.T) {
	t.Parallel()
	saw := map[string]int{}
	random(t, 300, func(t *testing.T, r *rand.Rand) {
		d := &drivenStock{T: t, Rand: r, saw: saw, watches: r.IntN(2) == 0, state: refilling, bucket: pick[int64](r, 5, 1000, 100_000)}
		d.seen = d.sight()
		l := Prefetch{MaxTokens: pick[int64](r, 10, 1e9), MaxShare: pick(r, 0.1, 1), Idle: pick[time.Duration](r, 100, 500, 2000) * time.Millisecond}
		d.stock, d.lastDemand = newStock(l, pick[int64](r, 1, 10, 1000), d.seen), d.now
		for range 200 {
			switch r.IntN(6) {
			case 0:
				d.work()
			case 1:
				d.visit()
			case 2:
				d.seen = d.sight()
				d.stock.learn(d.seen)
				d.silent = false
			case 3:
				d.now += pick[time.Duration](r, 1, 10, 50, 400) * time.Millisecond
				d.bucket += r.Int64N(10)
			case 4:
				if r.IntN(10) == 0 && d.stock.begin(ending) {
					d.begins(ending)
				}
			default:
				for range pick(r, 1, 3, 20) {
					d.grant(pick[int64](r, 1, 1, 1, 50))
				}
			}
			d.check()
		}
		for n := 0; d.state != ended; n++ {
			require.Less(t, n, 200, "nobody asks, and it ends")
			d.now += prefetchTick
			d.visit()
			d.work()
			d.check()
		}
		require.Zero(t, d.stock.left, "nothing is forgotten")
	})
	for _, what := range []string{"granted", "refused", "over", "taken", "partly", "denied", "silent", "dropped", "doubt", "not refunded", "refunded", "shrunk",
		"taken beside a doubt"} {
		require.NotZero(t, saw[what], "%s: %v", what, saw)
	}
}

// A drivenStock knows what its stock was told and what it has answered.
type drivenStock struct {
	*testing.T
	*rand.Rand
	saw        map[string]int
	stock      stock
	now, until time.Duration
	state      state
	calling    bool // for the state
	asking     int64
	sent       time.Duration
	seen       sight
	silent     bool
	watches    bool // of the policy
	doubt      bool
	bucket     int64
	left       int64
	charged    int64         // in truth, since nothing was left
	isAsked    bool          // since the last look
	lastDemand time.Duration // the first look after the last request
}

func (d *drivenStock) sight() sight {
	return sight{Decision{Allowed: true, Remaining: d.bucket, Capacity: max(d.bucket, 100), ResetAfter: time.Hour}, d.now}
}

func (d *drivenStock) check() {
	require.Equal(d, d.left, d.stock.left)
	require.GreaterOrEqual(d, d.left, int64(0))
	require.Equal(d, d.state, d.stock.state)
}

func (d *drivenStock) begins(work state) {
	require.Equal(d, resting, d.state, "one call at a time")
	d.state = work
}

func (d *drivenStock) looks() {
	if d.isAsked {
		d.isAsked, d.lastDemand = false, d.now
	}
}

func (d *drivenStock) grant(cost int64) {
	d.isAsked = true
	decision, ok, begins := d.stock.grant(cost, d.now)
	require.Equal(d, cost <= d.left && d.now < d.until, ok)
	require.Equal(d, ok, decision.Allowed)
	switch {
	case ok:
		d.left -= cost
		d.saw["granted"]++
	case cost <= d.left:
		d.saw["over"]++
	default:
		d.saw["refused"]++
	}
	if begins {
		d.begins(refilling)
	}
}

func (d *drivenStock) visit() {
	rested := d.state == resting
	if rested {
		d.looks()
	}
	begins := d.stock.visit(d.now)
	if begins {
		d.begins(d.stock.state)
	}
	if rested && d.now-d.lastDemand >= d.stock.Idle {
		require.Equal(d, ending, d.state, "nobody asks")
	}
	if rested && d.left > 0 && d.now >= d.until {
		require.Equal(d, ending, d.state, "its time is over")
	}
}

// work begins or ends a call.
func (d *drivenStock) work() {
	switch {
	case d.state == resting || d.state == ended:
	case !d.calling && d.IntN(10) == 0 && d.state != ending: // there was no time for it
		d.stock.rest()
		d.state = resting
	case d.state == refilling && d.calling:
		d.answer()
	case d.state == refilling:
		d.take()
	case !d.calling:
		d.refund()
	case d.state == shrinking:
		d.stock.rest()
		d.state, d.calling = resting, false
	default:
		d.stock.end()
		d.state, d.calling = ended, false
	}
}

func (d *drivenStock) take() {
	d.looks()
	switch {
	case d.left == 0:
		d.doubt, d.charged = false, 0
	case d.doubt:
		d.saw["taken beside a doubt"]++
	}
	changing := d.IntN(10) == 0
	d.asking, d.sent = d.stock.take(d.now, changing), d.now
	if d.asking == 0 {
		d.state = resting
		return
	}
	d.calling = true
	require.False(d, d.silent || changing)
	held, level := d.left+d.asking, d.seen.level(d.now)
	require.LessOrEqual(d, held, d.stock.MaxTokens)
	require.LessOrEqual(d, float64(held), d.stock.MaxShare*float64(d.seen.Capacity))
	require.LessOrEqual(d, held, level-d.asking, "as much is for others")
}

// answer is what the server would: it may have fewer tokens than were seen.
func (d *drivenStock) answer() {
	d.now += pick[time.Duration](d.Rand, 0, 1, 300, 1100) * time.Millisecond
	d.bucket = pick(d.Rand, d.bucket, d.bucket, d.asking, d.asking-1, 0)
	d.state, d.calling = resting, false
	switch d.IntN(12) {
	case 0:
		d.stock.took(PartialDecision{}, ErrUnknownPolicy, false, d.sent, d.now)
		d.left, d.silent = 0, true
		d.saw["dropped"]++
		return
	case 1:
		d.stock.took(PartialDecision{}, errors.New("no answer"), false, d.sent, d.now)
		d.silent = true
		d.saw["silent"]++
		return
	}
	answer := PartialDecision{Taken: min(d.asking, d.bucket)}
	d.charged += answer.Taken
	d.bucket -= answer.Taken
	answer.Decision = d.sight().Decision
	answer.Shadowed = d.watches && answer.Taken == 0
	answer.Allowed = answer.Taken > 0 || d.watches
	if d.watches {
		answer.Taken = d.asking
	}
	doubt := d.watches && answer.Taken == d.asking && d.bucket == 0
	d.stock.took(answer, nil, doubt, d.sent, d.now)
	d.seen = sight{answer.Decision, d.now}
	if !answer.Allowed || answer.Shadowed {
		d.saw["denied"]++
		return
	}
	d.left += answer.Taken
	d.until = d.sent + stockLife
	d.saw["taken"]++
	if answer.Taken < d.asking {
		d.saw["partly"]++
	}
	if doubt {
		d.doubt = true
		d.saw["doubt"]++
	}
}

func (d *drivenStock) refund() {
	keep := int64(0)
	if d.state == shrinking {
		d.looks()
	}
	n := d.stock.refund(d.now)
	d.calling = true
	if d.state == shrinking {
		keep = d.stock.left
		require.LessOrEqual(d, keep, d.left)
		d.saw["shrunk"]++
	}
	if d.doubt && d.left > 0 {
		require.Zero(d, n, "it may not have been charged")
		d.saw["not refunded"]++
	} else {
		require.Equal(d, d.left-keep, n)
	}
	require.LessOrEqual(d, n, d.charged)
	d.left = keep
	if n > 0 {
		d.saw["refunded"]++
	}
}

// An uncalledPool is one for a Prefetcher that makes no calls.
type uncalledPool struct{ Pool }

func (uncalledPool) QueryRow(context.Context, string, ...any) pgx.Row { panic("a call") }

// However many buckets are hot, no more than 10,000 of a policy have a stock. Another policy has its own.
func TestPrefetcher_HasTenThousandStocksOfAPolicyAtMost(t *testing.T) {
	t.Parallel()
	l := NewPrefetcher(uncalledPool{}, Prefetch{Policy: "p"}, Prefetch{Policy: "q"})
	l.Close() // so that nothing is taken for the stocks, nor looked at
	p := l.policies["p"]
	d := Decision{Allowed: true, Remaining: 9_000, Capacity: 10_000, ResetAfter: time.Second}
	for key := range uint64(10_100) {
		for range hotRequests {
			l.learn(candidate{policy: p, hash: key}, request{policy: "p", key: fmt.Sprint(key), cost: 1}, d)
		}
	}
	held := 0
	p.each(func(*hotBucket) { held++ })
	require.Equal(t, 10_000, held)
	require.EqualValues(t, 10_000, p.size.Load())
	for range hotRequests {
		l.learn(candidate{policy: l.policies["q"]}, request{policy: "q", key: "k", cost: 1}, d)
	}
	require.EqualValues(t, 1, l.policies["q"].size.Load())
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

// Whatever is answered, late, or not at all, and however the time passes between, the client never believes that it holds slots for
// longer than the server does.
func TestTenure_KeepsItsInvariants(t *testing.T) {
	t.Parallel()
	saw := map[string]int{}
	random(t, 500, func(t *testing.T, r *rand.Rand) {
		lease := pick(r, time.Millisecond, 3*time.Second, 10*time.Minute)
		now, isOver := time.Duration(0), false
		onServer := lease + time.Duration(r.Int64N(int64(lease))) // when the lease ends there: the call took a while
		tenure := newTenure(lease)
		isRenewing, sent, renewals := false, time.Duration(0), 0
		for range 100 {
			now += time.Duration(r.Int64N(int64(lease) / pick[int64](r, 3, 30, 300)))
			switch {
			case isRenewing && r.IntN(3) == 0:
				isRenewing = false
				switch executed := sent + time.Duration(r.Int64N(int64(now-sent)+1)); {
				case executed >= onServer || r.IntN(50) == 0: // the latter was reset
					tenure.end()
					isOver, onServer = true, 0
					saw["null"]++
				case r.IntN(2) == 0:
					onServer = max(onServer, pick(r, 0, executed+lease)) // the answer was lost, or the call
					tenure.failed(now)
					require.Greater(t, tenure.due, now-1)
					require.LessOrEqual(t, tenure.due, now+time.Second)
					saw["failed"]++
				default:
					onServer = executed + lease
					tenure.renewed(sent, lease)
					saw["renewed"]++
				}
			case r.IntN(2) == 0:
				until, due := tenure.until, tenure.due
				begins := tenure.begin(now)
				require.Equal(t, !isOver && !isRenewing && now >= due && now < until, begins)
				if begins {
					isRenewing, sent = true, now
					renewals++
					patience := tenure.patience(now)
					require.Positive(t, patience)
					require.LessOrEqual(t, now+patience, until)
				}
				isOver = isOver || now >= until
			default:
				isOver = isOver || now >= tenure.until
				require.Equal(t, isOver, tenure.over(now))
			}
			require.Equal(t, isRenewing, tenure.isRenewing)
			if !tenure.over(now) {
				require.Less(t, now, onServer, "it holds")
				require.LessOrEqual(t, tenure.until, onServer)
			} else {
				isOver = true
				saw["over"]++
			}
		}
		saw["renewals"] += renewals
	})
	for _, what := range []string{"null", "failed", "renewed", "over", "renewals"} {
		require.Greater(t, saw[what], 50, "%s: %v", what, saw)
	}
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

var Backoff = backoff

// Forget empties the cache of denials.
func Forget(l *Limiter) { l.denialCache.forgetAll() }

// StopTimer makes a Hold find out by itself that its lease has ended.
func StopTimer(h *Hold) { h.timer.Stop() }
