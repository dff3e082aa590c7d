package client

import (
	"hash/maphash"
	"strings"
	"sync"
	"time"
)

const (
	maxDenials   = 1 << 17
	oldestDenial = time.Minute
	denialShards = 64
	evictOf      = 16
)

// denials remembers for how long buckets are known to deny. The methods that forget work on nil.
type denials struct {
	seed   maphash.Seed
	shards [denialShards]denialShard
}

type denialShard struct {
	mu sync.Mutex
	// changes counts calls that may have made denials of this shard untrue. A denial that was asked for
	// before a change and arrives after it is not remembered.
	changes uint64
	byKey   map[bucket]denial
}

type bucket struct{ policy, key string }

// A denial holds for its cost and for larger ones. The server decided it between asked and answered.
type denial struct {
	Decision
	cost            int64
	asked, answered time.Time
}

func newDenials() *denials {
	c := &denials{seed: maphash.MakeSeed()}
	for i := range c.shards {
		c.shards[i].byKey = make(map[bucket]denial)
	}
	return c
}

func (c *denials) acquire(r request, ask func() (Decision, error)) (Decision, error) {
	asked := time.Now()
	d, known, changes := c.find(r, asked)
	if known {
		return d, nil
	}
	d, err := ask()
	c.learn(r, d, err, asked, changes)
	return d, err
}

// find returns a denial that is known to hold, and the number that learn takes.
func (c *denials) find(r request, now time.Time) (d Decision, known bool, changes uint64) {
	b := r.bucket()
	return c.shard(b).find(b, r.cost, now)
}

// learn remembers the answer to a request if it is a denial. Never is left out: it ends when the policy changes, and no denial
// promises that time.
func (c *denials) learn(r request, d Decision, err error, asked time.Time, changes uint64) {
	if err == nil && !d.Allowed && !d.Never() {
		b := r.bucket()
		c.shard(b).store(b, denial{d, r.cost, asked, time.Now()}, changes)
	}
}

// forget is called when a bucket may have gained tokens, after the server has answered. By then no new
// denial can be older.
func (c *denials) forget(policy, key string) {
	if c == nil {
		return
	}
	b := bucket{policy, key}
	shard := c.shard(b)
	shard.mu.Lock()
	defer shard.mu.Unlock()
	shard.changes++
	delete(shard.byKey, b)
}

// forgetAll is forget for every bucket.
func (c *denials) forgetAll() {
	if c == nil {
		return
	}
	for i := range c.shards {
		shard := &c.shards[i]
		shard.mu.Lock()
		shard.changes++
		clear(shard.byKey)
		shard.mu.Unlock()
	}
}

func (c *denials) shard(b bucket) *denialShard {
	return &c.shards[maphash.Comparable(c.seed, b)%denialShards]
}

func (s *denialShard) find(b bucket, cost int64, now time.Time) (d Decision, known bool, changes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.byKey[b]
	if !ok || cost < e.cost || cost > e.Capacity || !e.lasts(now) {
		return Decision{}, false, s.changes
	}
	return e.at(now), true, s.changes
}

func (s *denialShard) store(b bucket, e denial, changes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changes != changes {
		return
	}
	old, ok := s.byKey[b]
	if ok && old.cost < e.cost && old.lasts(e.answered) {
		return // it covers more
	}
	if !ok && len(s.byKey) >= maxDenials/denialShards {
		s.evict()
	}
	// The key may be a part of something large.
	s.byKey[bucket{strings.Clone(b.policy), strings.Clone(b.key)}] = e
}

// evict forgets, of a few denials, the one that ends first. A look at all of them would take as long as a call.
func (s *denialShard) evict() {
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
func (e denial) lasts(now time.Time) bool {
	return now.Sub(e.asked) < min(e.RetryAfter, oldestDenial)
}

// at is the denial as it is now. Its times count from after the answer, so that a request after RetryAfter
// does not come too early.
func (e denial) at(now time.Time) Decision {
	age := now.Sub(e.answered).Truncate(time.Microsecond)
	d := e.Decision
	d.RetryAfter -= age
	d.ResetAfter = max(0, d.ResetAfter-age)
	return d
}
