package client

import (
	"errors"
	"math"
	"time"
)

const (
	// stockFor is how long a stock should last at the rate of the last moments.
	stockFor = 800 * time.Millisecond

	// stockLife is how long a stock grants tokens after the last call that brought some was sent.
	stockLife = time.Second

	// shortestLook is the shortest time over which a rate is measured. Shorter bursts are no rate.
	shortestLook = 5 * time.Millisecond

	// demandFades is the time in which a demand that has ended falls to a third.
	demandFades = 300 * time.Millisecond

	// coldDemand is how many tokens a second are not worth a stock.
	coldDemand = 10
)

// A stock is the tokens of one bucket that the server has charged and that are not yet granted. It decides which requests are
// granted, when to take more tokens, and when to refund some. It has no SQL, goroutines, clock or lock: its owner serialises the
// methods, makes the calls, and passes the time.
//
//	resting ──grant, visit──> refilling ──take────> (call) ──took──> resting
//	resting ──visit─────────> shrinking ──refund──> (call) ──rest──> resting
//	resting ──visit, enter──> ending ─────refund──> (call), and it is removed
//
// grant, visit and enter return true if the stock has left the state resting. The owner then does the work of the new state, at
// once or later, or skips it and calls rest. grant grants in every state: from refund on, an ending stock has no token.
//
// Invariants, between any two methods:
//
//  1. left is never below zero. The tokens granted, refunded and lost are never more than the server has charged.
//  2. At most one call is under way, and none in the state resting.
//  3. Grants stop stockLife after the last call that brought tokens was sent.
//  4. take never asks for more tokens than the stock lacks. It leaves the bucket, as last seen, at least as many as the stock then has.
//  5. After a refill that failed, take returns 0 until a caller has had an answer of the server.
type stock struct {
	Prefetch // the settings, with defaults
	state    state

	left   int64         // tokens to grant
	until  time.Duration // grants stop then
	low    int64         // a grant that leaves fewer begins a refill; below zero, none does
	seen   sight         // the last decision about the bucket
	silent bool          // the last refill failed, and learn was not called since

	demand     demand
	asked      int64         // tokens requested since the last look, granted or not
	looked     time.Duration // time of the last look
	lastDemand time.Duration // the last look that found a request
}

// A state is the work that is under way for a stock.
type state int

const (
	resting   state = iota
	refilling       // takes tokens
	shrinking       // refunds the excess
	ending          // refunds all
)

// newStock returns the stock of a bucket that hotRequests of this cost have just made hot. Its state is refilling.
func newStock(p Prefetch, cost int64, seen sight) stock {
	s := stock{Prefetch: p, state: refilling, seen: seen, looked: seen.at, lastDemand: seen.at}
	s.demand.observe(hotRequests*cost, hotTicks*prefetchTick)
	return s
}

// grant takes cost from left, unless left is less or grants have stopped.
func (s *stock) grant(cost int64, now time.Duration) (d Decision, ok, hasWork bool) {
	s.asked += cost
	if ok = s.left >= cost && now < s.until; ok {
		s.left -= cost
		d = s.seen.with(s.left)
	}
	return d, ok, s.left < s.low && s.enter(refilling)
}

// learn sees a decision that a caller got of the server.
func (s *stock) learn(seen sight) { s.seen, s.silent = seen, false }

// visit makes a resting stock end when it is idle, cold or too old, shrink, or refill.
func (s *stock) visit(now time.Duration) (hasWork bool) {
	if s.state != resting {
		return false
	}
	size := s.look(now)
	switch ends := s.until - now; {
	case now-s.lastDemand >= s.Idle, s.demand < coldDemand, s.left > 0 && ends <= 0:
		return s.enter(ending)
	case size.excess(s.left) > 0:
		return s.enter(shrinking)
	case s.left < size.low, s.left < size.full && ends < 2*prefetchTick:
		return s.enter(refilling)
	}
	s.low = size.low
	return false
}

func (s *stock) enter(work state) bool {
	if s.state != resting {
		return false
	}
	s.state = work
	return true
}

// rest ends the work, done or skipped.
func (s *stock) rest() { s.state = resting }

// look measures the demand since the last look, and returns the size that the stock should have. It keeps the present size while
// the server is silent.
func (s *stock) look(now time.Duration) stockSize {
	if s.asked > 0 {
		s.lastDemand = now
	}
	s.demand.observe(s.asked, now-s.looked)
	s.looked, s.asked = now, 0
	if s.silent {
		return stockSize{full: s.left}
	}
	return s.size(s.demand, s.seen)
}

// take returns how many tokens to take from the server. At 0, as while the policy is changing, the stock rests.
func (s *stock) take(now time.Duration, changing bool) int64 {
	size := s.look(now)
	n := size.refill(s.left, s.seen.level(now))
	s.low = -1
	if n == 0 || changing {
		s.rest()
		return 0
	}
	if n == size.full-s.left { // otherwise the bucket has few tokens, and the next refill waits for a visit
		s.low = size.low
	}
	return n
}

// took ends a call of take, made at the time sent.
func (s *stock) took(d PartialDecision, err error, sent, now time.Duration) {
	s.rest()
	if err != nil {
		s.silent = true
		if errors.Is(err, ErrUnknownPolicy) {
			s.left = 0
		}
		return
	}
	s.seen = sight{d.Decision, now}
	if !d.Allowed || d.Shadowed {
		return
	}
	s.until = sent + stockLife
	s.left += d.Taken
}

// refund removes from left the tokens that the stock does not keep, and returns how many to refund.
func (s *stock) refund(now time.Duration) int64 {
	keep := int64(0)
	if s.state == shrinking {
		keep = min(s.left, s.look(now).full)
	}
	n := s.left - keep
	s.left = keep
	return n
}

// A demand is how many tokens a second are asked for. It rises at once and falls by and by.
type demand float64

func (d *demand) observe(tokens int64, during time.Duration) {
	now := demand(float64(tokens) / max(during, shortestLook).Seconds())
	if now < *d {
		now += (*d - now) * demand(math.Exp(-during.Seconds()/demandFades.Seconds()))
	}
	*d = now
}

// A sight is a decision of the server on a bucket, and its time.
type sight struct {
	Decision
	at time.Duration
}

// level is about how many tokens the bucket holds, if no other caller takes any.
func (s sight) level(now time.Duration) int64 {
	if s.ResetAfter <= 0 || s.NeverFull() {
		return s.Remaining
	}
	part := min(1, float64(now-s.at)/float64(s.ResetAfter))
	return s.Remaining + int64(part*float64(s.Capacity-s.Remaining))
}

// with is a grant of a stock that has so many tokens left, as if the bucket had them.
func (s sight) with(left int64) Decision {
	d := Decision{Allowed: true, Estimated: true, Remaining: min(s.Capacity, max(0, s.Remaining)+left), ResetAfter: s.ResetAfter, Capacity: s.Capacity}
	if s.Remaining < s.Capacity && !s.NeverFull() {
		part := float64(s.Capacity-d.Remaining) / float64(s.Capacity-s.Remaining)
		d.ResetAfter = time.Duration(part * float64(s.ResetAfter)).Round(time.Microsecond)
	}
	return d
}

// isPrefetchable is false for a bucket that refills nothing, whose tokens would be lost for good with a process, and for a shadow policy
// that would deny: it must see each such request.
func (s sight) isPrefetchable() bool { return !s.NeverFull() && !s.Shadowed }

// A stockSize is how many tokens a stock should have.
type stockSize struct {
	full int64 // how many
	low  int64 // with fewer it is refilled
}

// size is the size that the demand asks for, within the bounds of the settings.
func (p Prefetch) size(d demand, s sight) stockSize {
	full := min(float64(d)*stockFor.Seconds(), p.MaxShare*float64(s.Capacity), float64(p.MaxTokens))
	if !s.isPrefetchable() {
		full = 0
	}
	return stockSize{full: int64(full), low: (int64(full) + 3) / 4}
}

// refill is how many tokens to take for a stock that has so many left: up to its full size, but never so many that the stock has
// more than the bucket, whose tokens are for other processes.
func (s stockSize) refill(left, level int64) int64 {
	return max(0, min(s.full-left, (level-left)/2))
}

// excess is how many tokens to refund: those above the full size, if they are worth a call.
func (s stockSize) excess(left int64) int64 {
	if left <= 2*s.full {
		return 0
	}
	return left - s.full
}
