package client

import (
	"hash/maphash"
	"strings"
	"sync"
	"time"
)

const (
	maxDenials       = 1 << 17
	oldestDenial     = time.Minute
	denialCacheParts = 64
	evictOf          = 16
)

// A denialCache remembers for how long buckets are known to deny. The methods that forget work on nil.
type denialCache struct {
	seed  maphash.Seed
	parts [denialCacheParts]denialCachePart
}

type denialCachePart struct {
	mu sync.Mutex
	// changes counts calls that may have made denials of this part untrue. A denial that was asked for
	// before a change and arrives after it is not remembered.
	changes uint64
	byKey   map[bucket]cachedDenial
}

type bucket struct{ policy, key string }

// A cachedDenial holds for its cost and for larger ones. The server decided it between asked and answered.
type cachedDenial struct {
	Decision
	cost            int64
	asked, answered time.Time
}

func newDenialCache() *denialCache {
	c := &denialCache{seed: maphash.MakeSeed()}
	for i := range c.parts {
		c.parts[i].byKey = make(map[bucket]cachedDenial)
	}
	return c
}

// find returns a denial that is known to hold, and the number that learn takes.
func (c *denialCache) find(r request, now time.Time) (d Decision, known bool, changes uint64) {
	b := r.bucket()
	return c.part(b).find(b, r.cost, now)
}

// learn remembers the answer to a request if it is a denial. Never is left out: it ends when the policy changes, and no denial
// promises that time.
func (c *denialCache) learn(r request, d Decision, err error, asked time.Time, changes uint64) {
	if err == nil && !d.Allowed && !d.Never() {
		b := r.bucket()
		c.part(b).store(b, cachedDenial{d, r.cost, asked, time.Now()}, changes)
	}
}

// forget is called when a bucket may have gained tokens, after the server has answered. By then no new
// denial can be older.
func (c *denialCache) forget(policy, key string) {
	if c == nil {
		return
	}
	b := bucket{policy, key}
	part := c.part(b)
	part.mu.Lock()
	defer part.mu.Unlock()
	part.changes++
	delete(part.byKey, b)
}

// forgetAll is forget for every bucket.
func (c *denialCache) forgetAll() {
	if c == nil {
		return
	}
	for i := range c.parts {
		part := &c.parts[i]
		part.mu.Lock()
		part.changes++
		clear(part.byKey)
		part.mu.Unlock()
	}
}

func (c *denialCache) part(b bucket) *denialCachePart {
	return &c.parts[maphash.Comparable(c.seed, b)%denialCacheParts]
}

func (s *denialCachePart) find(b bucket, cost int64, now time.Time) (d Decision, known bool, changes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.byKey[b]
	if !ok || cost < e.cost || cost > e.Capacity || !e.lasts(now) {
		return Decision{}, false, s.changes
	}
	return e.at(now), true, s.changes
}

func (s *denialCachePart) store(b bucket, e cachedDenial, changes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changes != changes {
		return
	}
	old, ok := s.byKey[b]
	if ok && old.cost < e.cost && old.lasts(e.answered) {
		return // it covers more
	}
	if !ok && len(s.byKey) >= maxDenials/denialCacheParts {
		s.evict()
	}
	// The key may be a part of something large.
	s.byKey[bucket{strings.Clone(b.policy), strings.Clone(b.key)}] = e
}

// evict forgets, of a few denials, the one that ends first. A look at all of them would take as long as a call.
func (s *denialCachePart) evict() {
	var first bucket
	var ends time.Time
	looked := 0
	for b, e := range s.byKey { // begins anywhere
		if end := e.asked.Add(e.RetryAfter); ends.IsZero() || end.Before(ends) {
			first, ends = b, end
		}
		if looked++; looked == evictOf {
			break
		}
	}
	delete(s.byKey, first)
}

// lasts counts from before the question, so that no request is denied for longer than RetryAfter. An old denial is asked again: the
// wait of a quota may be a month, in which another program sells a larger plan.
func (e cachedDenial) lasts(now time.Time) bool {
	return now.Sub(e.asked) < min(e.RetryAfter, oldestDenial)
}

// at is the denial as it is now. Its times count from after the answer, so that a request after RetryAfter
// does not come too early.
func (e cachedDenial) at(now time.Time) Decision {
	age := now.Sub(e.answered).Truncate(time.Microsecond)
	d := e.Decision
	d.RetryAfter -= age
	d.ResetAfter = max(0, d.ResetAfter-age)
	return d
}
