package client

import (
	"errors"
	"time"
)

// A holding is the tokens of one bucket that the server has charged and that are not yet granted. It decides which requests are
// granted, when to take more tokens, and when to refund some. It is a state machine without SQL, goroutines, clock or lock: its
// owner serialises the methods, makes the calls, and passes the time.
//
//	resting ──grant, visit──> refilling ──take────> (call) ──took──> resting
//	resting ──visit─────────> shrinking ──refund──> (call) ──rest──> resting
//	resting ──visit, begin──> ending ─────refund──> (call) ──end───> ended
//
// grant, visit and begin return true if the holding has left the state resting. The owner then does the work of the new state, at
// once or later, or skips it and calls rest. Grants continue in every state except ended.
//
// Invariants, between any two methods:
//
//  1. left is never below zero. The tokens granted, refunded and lost are never more than the server has charged.
//  2. At most one call is under way, and none in the state resting.
//  3. Grants stop leaseLife after the last call that brought tokens was sent.
//  4. take never asks for more tokens than the lease lacks. It leaves the bucket at least as many tokens as the lease then has, by
//     the last sight of the bucket.
//  5. Tokens in doubt are not refunded. The doubt ends when no token is left.
//  6. After a call without a reply, take returns 0 until the server has answered a caller.
type holding struct {
	Lease // the settings, with defaults
	state state

	left    int64         // tokens to grant
	until   time.Duration // grants stop then
	low     int64         // a grant that leaves fewer begins a refill; below zero, none does
	seen    sight         // the last decision about the bucket
	lacking int64         // tokens missing from the full size at the last take
	silent  bool          // the last call had no reply
	doubt   bool          // the server may have charged less than it returned, as a shadow policy does

	demand     demand
	asked      int64         // tokens requested since the last look, granted or not
	looked     time.Duration // time of the last look
	lastDemand time.Duration // the last look that found a request
}

// A state is the work that is under way for a holding.
type state int

const (
	resting   state = iota
	refilling       // takes tokens
	shrinking       // refunds the excess
	ending          // refunds all
	ended
)

// newHolding returns the holding of a bucket that hotRequests of this cost have just made hot. Its state is refilling.
func newHolding(l Lease, cost int64, seen sight) holding {
	h := holding{Lease: l, state: refilling, seen: seen, looked: seen.at, lastDemand: seen.at}
	h.demand.observe(hotRequests*cost, hotTicks*leaseTick)
	return h
}

// grant takes cost from left. ok is false if left is less or grants have stopped. begins is true if a refill is due.
func (h *holding) grant(cost int64, now time.Duration) (d Decision, ok, begins bool) {
	h.asked += cost
	if ok = h.left >= cost && now < h.until; ok {
		h.left -= cost
		d = h.seen.with(h.left)
	}
	return d, ok, h.left < h.low && h.begin(refilling)
}

// learn uses the server's decision for a caller.
func (h *holding) learn(seen sight) { h.seen, h.silent = seen, false }

// visit begins the work that a resting holding needs: to end when idle, cold or too old, to shrink, or to refill.
func (h *holding) visit(now time.Duration) (begins bool) {
	if h.state != resting {
		return false
	}
	size := h.look(now)
	switch ends := h.until - now; {
	case now-h.lastDemand >= h.Idle, h.demand < coldDemand, h.left > 0 && ends <= 0:
		return h.begin(ending)
	case size.excess(h.left) > 0:
		return h.begin(shrinking)
	case h.left < size.low, h.left < size.full && ends < 2*leaseTick:
		return h.begin(refilling)
	}
	h.low = size.low
	return false
}

// begin changes the state from resting to work. It returns false if the holding was not resting.
func (h *holding) begin(work state) bool {
	if h.state != resting {
		return false
	}
	h.state = work
	return true
}

// rest ends the work, done or skipped.
func (h *holding) rest() { h.state = resting }

// end ends the holding, which has no token left.
func (h *holding) end() { h.state = ended }

// lose forgets the tokens left: their bucket is gone, or Close has no time to refund them.
func (h *holding) lose() { h.left = 0 }

// look measures the demand since the last look, and returns the size that the lease should have. It keeps the present size while
// the server is silent.
func (h *holding) look(now time.Duration) leaseSize {
	if h.asked > 0 {
		h.lastDemand = now
	}
	h.demand.observe(h.asked, now-h.looked)
	h.looked, h.asked = now, 0
	if h.silent {
		return leaseSize{full: h.left}
	}
	return h.size(h.demand, h.seen)
}

// take returns how many tokens to take from the server. At 0, as while the policy is changing, the holding rests.
func (h *holding) take(now time.Duration, changing bool) int64 {
	size := h.look(now)
	h.doubt = h.doubt && h.left > 0
	h.low = -1
	h.lacking = size.full - h.left
	n := size.refill(h.left, h.seen.level(now))
	if n == 0 || changing {
		h.rest()
		return 0
	}
	return n
}

// took uses the reply to a call of take, made at the time sent. doubt is true if the policy may be a shadow policy.
func (h *holding) took(d PartialDecision, err error, doubt bool, sent, now time.Duration) {
	h.rest()
	if err != nil {
		h.silent = true
		if errors.Is(err, ErrUnknownPolicy) {
			h.lose()
		}
		return
	}
	h.seen = sight{d.Decision, now}
	if !d.Allowed || d.Shadowed {
		return
	}
	h.doubt = h.doubt || doubt
	h.until = sent + leaseLife
	h.left += d.Taken
	if d.Taken == h.lacking { // otherwise the bucket has few tokens, and the next refill waits for a visit
		h.low = h.size(h.demand, h.seen).low
	}
}

// refund removes from left the tokens that the holding does not keep, and returns how many to refund: none in doubt.
func (h *holding) refund(now time.Duration) int64 {
	keep := int64(0)
	if h.state == shrinking {
		keep = min(h.left, h.look(now).full)
	}
	n := h.left - keep
	h.left = keep
	if h.doubt {
		return 0
	}
	return n
}
