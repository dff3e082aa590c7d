package client

import (
	"errors"
	"time"
)

// A holding is the tokens of one bucket that the server has charged and that are still to be granted. It decides what is granted,
// when more tokens are taken, and when some are given back. It is a state machine without SQL, goroutines, clock or lock: its owner
// serialises the methods, makes the calls, and says what time it is.
//
//	resting ──grant, visit──> refilling ──take──> (call) ──took──> resting
//	resting ──visit─────────> shrinking ──giveBack─> (call) ──rest──> resting
//	resting ──visit, begin──> ending ────giveBack─> (call) ──end───> ended
//
// grant, visit and begin report whether the holding has left the state resting. Then the owner does the work that the state names, at once
// or later, or calls rest. Grants go on in each state but ended.
//
// Invariants, between any two methods:
//
//  1. left is never below zero, and what was granted, given back and lost is never more than the server has charged.
//  2. One call is under way at most, and none in the state resting.
//  3. Nothing is granted leaseLife after the request was sent whose answer was the last to bring tokens.
//  4. take never asks for more than the size of the lease lacks, nor for so many that the bucket would be left with fewer than the
//     lease has, by the last sight of it.
//  5. Tokens in doubt are not given back. Doubt ends when nothing is left.
//  6. After a call without an answer nothing is taken until the server has answered a caller.
type holding struct {
	Lease // with its bounds
	state state

	left    int64
	until   time.Duration // when left is granted no more
	low     int64         // with fewer left, more are taken; below zero for not now
	seen    sight         // the last
	lacking int64         // of the size, when the server was asked for tokens
	silent  bool          // the server has not answered the last call
	doubt   bool          // the server may have charged less than it returned: a policy that only watches does so

	demand     demand
	asked      int64         // tokens since the last look, granted or not
	looked     time.Duration // when
	lastDemand time.Duration // when tokens were last asked for, as of the last look
}

// A state is what is done with a holding.
type state int

const (
	resting   state = iota
	refilling       // tokens are taken
	shrinking       // what is too much is given back
	ending          // all is given back
	ended
)

// newHolding returns the holding of a bucket that has just become hot, by requests of such a cost. It is refilling.
func newHolding(l Lease, cost int64, seen sight) holding {
	h := holding{Lease: l, state: refilling, seen: seen, looked: seen.at, lastDemand: seen.at}
	h.demand.observe(hotRequests*cost, hotTicks*leaseTick)
	return h
}

// grant takes cost from what is left, if it is as much.
func (h *holding) grant(cost int64, now time.Duration) (d Decision, ok, begins bool) {
	h.asked += cost
	if ok = h.left >= cost && now < h.until; ok {
		h.left -= cost
		d = h.seen.with(h.left)
	}
	return d, ok, h.left < h.low && h.begin(refilling)
}

// learn uses what the server has answered to a caller.
func (h *holding) learn(seen sight) { h.seen, h.silent = seen, false }

// visit decides what the holding needs.
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

// begin has a holding that rests do work, and reports false if it does other work.
func (h *holding) begin(work state) bool {
	if h.state != resting {
		return false
	}
	h.state = work
	return true
}

// rest ends work that is done, or that is not to be done.
func (h *holding) rest() { h.state = resting }

// end ends the holding, which has nothing left.
func (h *holding) end() { h.state = ended }

// lose forgets what is left, for which there is no bucket any more, or no time.
func (h *holding) lose() { h.left = 0 }

// look learns how much was asked for since the last look, and returns the size that the lease should have.
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

// take returns how many tokens to take from the server. The holding rests if that is none, as it is while the policy changes.
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

// took uses the server's answer to a request that was sent at a time. doubt tells that the policy may watch.
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
	if d.Taken == h.lacking { // else the bucket has little: nothing more until the next visit
		h.low = h.size(h.demand, h.seen).low
	}
}

// giveBack returns how many tokens to give back, which are no longer left.
func (h *holding) giveBack(now time.Duration) int64 {
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
