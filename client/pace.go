package client

import (
	"slices"
	"time"
)

// A pace is how long the last calls took. A request that cannot be answered in time is refused by it, so it has to notice a
// slow database, and to forget it again: few calls are looked at.
type pace struct {
	last [5]time.Duration // the newest replaces the oldest
	n    int
}

// observe is told how long a call took. One that was given up is expected to have lasted as long again.
func (p *pace) observe(took time.Duration, isLost bool) {
	if isLost {
		took *= 2
	}
	p.last[p.n%len(p.last)] = took
	p.n++
}

// call is how long a call takes: the median, or 0 if nothing is known. One call that stalls changes nothing.
func (p *pace) call() time.Duration {
	sorted := p.last // a copy
	known := sorted[:min(p.n, len(sorted))]
	if len(known) == 0 {
		return 0
	}
	slices.Sort(known)
	return known[len(known)/2]
}

// least is what the shortest of the calls took.
func (p *pace) least() time.Duration {
	known := p.last[:min(p.n, len(p.last))]
	if len(known) == 0 {
		return 0
	}
	return slices.Min(known)
}

// left is how much longer a call will take that began so long ago. One that lasts twice as long as usual has stalled: it is
// expected to last as long again as it has.
func (p *pace) left(lasted time.Duration) time.Duration {
	usual := p.call()
	if lasted < 2*usual {
		return max(0, usual-lasted)
	}
	return lasted
}
