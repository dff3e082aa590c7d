package client

import (
	mathrand "math/rand/v2"
	"time"
)

const (
	// maxHeldFor keeps sums of times in range.
	maxHeldFor = 100 * 365 * 24 * time.Hour

	// leastPatience is how long a renewal may take even if a third of the lease is less.
	leastPatience = time.Second
)

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
//  3. At most one renewal is under way. None begins at until or later, or after the end.
//  4. A renewal begins when a third of the lease is over, and after one that failed when a pause is over.
type tenure struct {
	lease, until, due time.Duration
	isRenewing        bool
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

// begin reports whether the owner must renew now. After true it calls renewed, failed or end.
func (t *tenure) begin(now time.Duration) bool {
	if t.over(now) || t.isRenewing || now < t.due {
		return false
	}
	t.isRenewing = true
	return true
}

// patience is how long a renewal that begins now may take: so long that another can follow, or until the end.
func (t *tenure) patience(now time.Duration) time.Duration {
	return min(max(t.lease/3, leastPatience), t.until-now)
}

// renewed is the answer to a renewal that was sent at that time. What is over stays over.
func (t *tenure) renewed(sent, heldFor time.Duration) {
	t.isRenewing = false
	if !t.isOver {
		t.extend(sent, heldFor)
	}
}

// failed is a renewal without an answer. The next begins after a pause that is random, so that many holders of a database
// that was away do not ask at once.
func (t *tenure) failed(now time.Duration) {
	t.isRenewing = false
	pause := min(maxAskPause, t.lease/10)
	t.due = now + pause/2 + mathrand.N(pause/2+1)
}

// end is the answer to a renewal that the holder does not hold.
func (t *tenure) end() { t.isRenewing, t.isOver = false, true }
