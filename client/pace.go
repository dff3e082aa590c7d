package client

import (
	"slices"
	"time"
)

const (
	// paceCalls is the least number of calls to judge by: the first calls also connect.
	paceCalls = 5

	// paceLife is how long a pace is true after a call has ended.
	paceLife = 5 * time.Second
)

// A pace is how long the last calls took. A Combiner refuses requests that cannot be answered in time at this pace. The quickest of
// the calls counts, so that calls that stall, alone or together, make it refuse no request.
type pace struct {
	last []time.Duration // the newest replaces the oldest
	n    int
	at   time.Time // of the newest
}

// newPace is for a queue with so many calls at a time, which may all stall at once.
func newPace(limit int) pace {
	return pace{last: make([]time.Duration, max(paceCalls, 2*limit+1))}
}

// observe records how long a call took that ends now. An abandoned call is expected to have lasted as long again.
func (p *pace) observe(took time.Duration, abandoned bool, now time.Time) {
	if abandoned {
		took *= 2
	}
	p.last[p.n%len(p.last)] = took
	p.n++
	p.at = now
}

// call is how long a call takes at least, or 0 if nothing is known.
func (p *pace) call(now time.Time) time.Duration {
	if p.n < paceCalls || now.Sub(p.at) > paceLife {
		return 0
	}
	return slices.Min(p.last[:min(p.n, len(p.last))])
}

// left is how much longer a call will take that began so long ago. A call that lasts twice as long as usual has stalled: it is
// expected to last as long again as it has. If the usual time is unknown, left is 0.
func (p *pace) left(lasted time.Duration, now time.Time) time.Duration {
	usual := p.call(now)
	if lasted < 2*usual {
		return max(0, usual-lasted)
	}
	if usual == 0 {
		return 0
	}
	return lasted
}
