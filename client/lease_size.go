package client

import (
	"math"
	"time"
)

const (
	// leaseFor is how long a lease should last at the rate of the last moments. A quarter of that is left when it is refilled.
	leaseFor = 800 * time.Millisecond

	// leaseLife is how long a lease grants tokens after the server has last given tokens to it.
	leaseLife = time.Second

	// shortestLook is the shortest time over which a rate is measured. Shorter bursts are no rate.
	shortestLook = 5 * time.Millisecond

	// demandFades is the time in which a demand that has ended falls to a third.
	demandFades = 300 * time.Millisecond

	// coldDemand is how many tokens a second are not worth a lease.
	coldDemand = 10
)

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

// with is a grant of a lease that has so many tokens left, as if the bucket had them.
func (s sight) with(left int64) Decision {
	d := Decision{Allowed: true, Estimated: true, Remaining: min(s.Capacity, max(0, s.Remaining)+left), ResetAfter: s.ResetAfter, Capacity: s.Capacity}
	if s.Remaining < s.Capacity && !s.NeverFull() {
		part := float64(s.Capacity-d.Remaining) / float64(s.Capacity-s.Remaining)
		d.ResetAfter = time.Duration(part * float64(s.ResetAfter)).Round(time.Microsecond)
	}
	return d
}

// isLeasable reports whether tokens of the bucket may be held. Tokens of a bucket that refills nothing would be lost for good with
// a process. A shadow policy must see each request that it would deny.
func (s sight) isLeasable() bool { return !s.NeverFull() && !s.Shadowed }

// A leaseSize is how many tokens a lease should hold.
type leaseSize struct {
	full int64 // how many
	low  int64 // with fewer it is refilled
}

// size is the size that the demand asks for, within the bounds.
func (l Lease) size(d demand, s sight) leaseSize {
	full := min(float64(d)*leaseFor.Seconds(), l.MaxShare*float64(s.Capacity), float64(l.MaxTokens))
	if !s.isLeasable() {
		full = 0
	}
	return leaseSize{full: int64(full), low: (int64(full) + 3) / 4}
}

// refill is how many tokens to take for a lease that has so many left: up to its full size, but never so many that the lease has
// more than the bucket. The bucket's tokens are for other processes.
func (s leaseSize) refill(left, level int64) int64 {
	return max(0, min(s.full-left, (level-left)/2))
}

// excess is how many tokens to refund: the tokens above the full size, if they are so many that they are worth a call.
func (s leaseSize) excess(left int64) int64 {
	if left <= 2*s.full {
		return 0
	}
	return left - s.full
}
