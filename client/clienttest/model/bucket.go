package model

import (
	"math/big"
	"path"
	"sort"
	"strings"
	"sync"
	"time"
)

// A Policy is the rules of its buckets: they hold Capacity tokens and gain Refill tokens Every so long, by the microsecond or, Stepped, all at
// once after each whole interval. A Refill of 0 refills nothing. A quota has turns in place of a refill: its buckets are full at each, and
// gain nothing in between. Slots have a Lease in place of a refill, and no buckets. A Shadow policy denies nothing: it answers that it would
// have.
type Policy struct {
	Calendar
	Capacity, Refill int64
	Every            Micros
	Lease            Micros // of slots
	History          Period // of a durable quota: how long usage is kept; none: it is not
	counts           bool   // it has had a history
	Stepped          bool
	Durable          bool
	Remember         Micros
	Shadow           bool

	ends time.Time // when some of the numbers end,
	then *Policy   // and what they are from then on
}

// A Bucket held Level microtokens at an instant. Below zero is debt. A quota's is counted from its capacity, so that what is
// used stays used when the capacity changes.
type Bucket struct {
	Level      *big.Int // never changed in place
	RefilledAt time.Time
	paused     time.Time // the end of the last pause
	from       time.Time // of a quota with a history, from when it counts; zero: from the last turn
	untouched  bool      // without a row: full by whatever numbers apply
}

var million = big.NewInt(1_000_000)

func microtokens(tokens int64) *big.Int {
	return new(big.Int).Mul(big.NewInt(tokens), million)
}

// Full is a bucket that nobody has taken from.
func (p Policy) Full(now time.Time) Bucket {
	full := Bucket{Level: p.full(), RefilledAt: now, untouched: true}
	if p.counts {
		full.from = p.Last(now)
	}
	return full
}

// full is the level of a full bucket.
func (p Policy) full() *big.Int {
	if p.IsQuota() {
		return new(big.Int)
	}
	return microtokens(p.Capacity)
}

// Refilled is the bucket as of now. A clock that reads less than it did credits nothing, and the
// instant never moves back; a stepped bucket's moves by whole intervals.
func (p Policy) Refilled(b Bucket, now time.Time) Bucket {
	if p.IsQuota() {
		b = Bucket{Level: b.Level, RefilledAt: b.RefilledAt, from: b.from}
		if p.isOver(b, now) {
			b.Level = p.full()
			if p.counts {
				b.from = p.Last(now)
			}
		}
		if now.After(b.RefilledAt) {
			b.RefilledAt = now
		}
		return b
	}
	elapsed := max(0, now.UnixMicro()-b.RefilledAt.UnixMicro())
	if p.Stepped {
		elapsed -= elapsed % int64(p.Every)
	}
	credit := new(big.Int).Mul(big.NewInt(elapsed), microtokens(p.Refill))
	credit.Div(credit, big.NewInt(int64(p.Every)))
	return Bucket{
		Level:      least(p.full(), credit.Add(credit, b.Level)),
		RefilledAt: Micros(elapsed).After(b.RefilledAt),
		paused:     b.paused,
	}
}

// most is how much a bucket may hold after tokens were given back.
func (p Policy) most(b Bucket, now time.Time) *big.Int {
	if now.Before(b.paused) {
		return new(big.Int)
	}
	return p.full()
}

// Peek answers whether cost tokens are there, and what is there.
func (p Policy) Peek(b Bucket, now time.Time, cost int64) Decision {
	if cost == 0 { // allowed even in debt
		return p.answer(b, now, 0)
	}
	return p.answer(b, now, p.pastEnd(b, now, waitFor(now, cost, microtokens(cost))))
}

// waitFor is the wait for a target that a cost needs.
func waitFor(now time.Time, cost int64, target *big.Int) func(Policy, Bucket) Micros {
	return func(p Policy, b Bucket) Micros {
		if cost > p.Capacity {
			return Never
		}
		return p.wait(b, now, target)
	}
}

// pastEnd is a wait by the numbers that apply, if it is over before they end; from then on it is the wait by what stays.
func (p Policy) pastEnd(b Bucket, now time.Time, wait func(Policy, Bucket) Micros) Micros {
	first := wait(p, b)
	if p.then == nil || first != Never && first < p.left(now) {
		return first
	}
	return p.afterEnd(b, now, wait)
}

// afterEnd is a wait by the policy's own numbers: not before they apply.
func (p Policy) afterEnd(b Bucket, now time.Time, wait func(Policy, Bucket) Micros) Micros {
	if b.untouched {
		b = p.then.Full(now)
	}
	then := wait(*p.then, b)
	if then == Never {
		return Never
	}
	return max(then, p.left(now))
}

// left is how long the numbers of an override still apply.
func (p Policy) left(now time.Time) Micros {
	return min(Longest, Micros(p.ends.UnixMicro()-now.UnixMicro()))
}

// Take answers the grant of a cost that is there, and returns the bucket without it.
func (p Policy) Take(b Bucket, now time.Time, cost int64) (Bucket, Decision) {
	taken := p.Refilled(b, now)
	taken.Level = new(big.Int).Sub(taken.Level, microtokens(cost))
	return taken, p.answer(taken, now, 0)
}

func (p Policy) answer(b Bucket, now time.Time, retryAfter Micros) Decision {
	return Decision{
		Allowed:    retryAfter == 0,
		Remaining:  p.remaining(b, now),
		RetryAfter: retryAfter,
		ResetAfter: p.resetAfter(b, now),
		Capacity:   p.Capacity,
	}
}

func (p Policy) remaining(b Bucket, now time.Time) int64 {
	return new(big.Int).Div(p.holds(b, now), million).Int64() // rounds down below zero too
}

// holds is what is in the bucket now, in microtokens.
func (p Policy) holds(b Bucket, now time.Time) *big.Int {
	empty := new(big.Int).Sub(p.full(), microtokens(p.Capacity))
	return empty.Sub(p.Refilled(b, now).Level, empty)
}

func (p Policy) resetAfter(b Bucket, now time.Time) Micros {
	return p.pastEnd(b, now, func(p Policy, b Bucket) Micros { return p.wait(b, now, microtokens(p.Capacity)) })
}

// wait searches for the least time after which the bucket holds target microtokens, at most the capacity.
// It starts at an estimate, which makes the search short, and not its result.
func (p Policy) wait(b Bucket, now time.Time, target *big.Int) Micros {
	enough := func(m Micros) bool { return p.holds(b, m.After(now)).Cmp(target) >= 0 }
	switch {
	case enough(0):
		return 0
	case p.Refill == 0 && !p.IsQuota():
		return Never
	case !enough(Longest):
		return Longest
	}
	tooShort, longEnough := Micros(0), max(1, p.estimate(b, now, target))
	for step := Micros(1); !enough(longEnough); step *= 2 {
		tooShort, longEnough = longEnough, longEnough+step
	}
	for step := Micros(1); longEnough-step > tooShort; step *= 2 {
		if !enough(longEnough - step) {
			tooShort = longEnough - step
			break
		}
		longEnough -= step
	}
	for longEnough-tooShort > 1 {
		if middle := tooShort + (longEnough-tooShort)/2; enough(middle) {
			longEnough = middle
		} else {
			tooShort = middle
		}
	}
	return longEnough
}

func (p Policy) estimate(b Bucket, now time.Time, target *big.Int) Micros {
	if p.IsQuota() {
		since := now
		if b.RefilledAt.After(now) {
			since = b.RefilledAt
		}
		return Micros(p.Next(since).UnixMicro() - now.UnixMicro())
	}
	missing := new(big.Int).Sub(target, b.Level)
	fill := missing.Mul(missing, big.NewInt(int64(p.Every)))
	fill.Div(fill, microtokens(p.Refill))
	fill.Add(fill, big.NewInt(b.RefilledAt.UnixMicro()-now.UnixMicro()))
	return Micros(least(fill, big.NewInt(int64(Longest))).Int64())
}

func least(a, b *big.Int) *big.Int {
	if a.Cmp(b) < 0 {
		return a
	}
	return b
}

// A Period is a number of months or of days, not of both.
type Period struct{ Months, Days int }

// A Calendar has a turn each Period, counted from Anchor, which is what clocks show in Zone: a time of day without a zone,
// written as one in UTC. Without a period it has no turns.
type Calendar struct {
	Period Period
	Zone   string
	Anchor time.Time
}

// IsQuota reports whether there are turns.
func (c Calendar) IsQuota() bool { return c.Period != Period{} }

// isValid reports whether there can be such a calendar.
func (c Calendar) isValid() bool {
	return c.Period.isValid() && IsZone(c.Zone) && isAnchor(c.Anchor)
}

func (p Period) isValid() bool {
	return 0 <= p.Months && p.Months <= 12_000 && 0 <= p.Days && p.Days <= 365_250 && (p.Months == 0) != (p.Days == 0)
}

func isAnchor(anchor time.Time) bool { return 1 <= anchor.Year() && anchor.Year() <= 9999 }

// IsZone reports whether a calendar can have a zone of this name.
func IsZone(name string) bool {
	return zone(name) != nil && (name == "UTC" || strings.Contains(name, "/") && path.Clean(name) == name &&
		!strings.HasPrefix(name, "posix/") && !strings.HasPrefix(name, "right/"))
}

var zones sync.Map // by name

// zone is nil if there is none of that name.
func zone(name string) *time.Location {
	if known, ok := zones.Load(name); ok {
		return known.(*time.Location)
	}
	location, err := time.LoadLocation(name)
	if err != nil {
		return nil
	}
	zones.Store(name, location)
	return location
}

// Turn is the instant of turn n, which may be negative. A month that has no such day has its last instead.
func (c Calendar) Turn(n int) time.Time {
	a := c.Anchor
	month := a.Month() + time.Month(n*c.Period.Months)
	day := min(a.Day(), time.Date(a.Year(), month+1, 0, 0, 0, 0, 0, time.UTC).Day()) + n*c.Period.Days
	return instant(time.Date(a.Year(), month, day, a.Hour(), a.Minute(), a.Second(), a.Nanosecond(), time.UTC), zone(c.Zone))
}

// Next is the first turn after t.
func (c Calendar) Next(t time.Time) time.Time { return c.Turn(c.next(t)).UTC() }

// Last is the last turn not after t.
func (c Calendar) Last(t time.Time) time.Time { return c.Turn(c.next(t) - 1).UTC() }

func (c Calendar) next(t time.Time) int {
	isAfter := func(n int) bool { return c.Turn(n).After(t) }
	low, high := -1, 1
	for isAfter(low) {
		low *= 2
	}
	for !isAfter(high) {
		high *= 2
	}
	return low + sort.Search(high-low, func(i int) bool { return isAfter(low + i) })
}

// instant is when clocks of a zone show a time. Of two such instants it is the later. A time that clocks skip is counted from
// before they do. The search begins with the offset that holds when all zones have passed the time, and goes back.
func instant(shown time.Time, zone *time.Location) time.Time {
	for t := shown.Add(24 * time.Hour).In(zone); ; {
		_, offset := t.Zone()
		at := shown.Add(-time.Duration(offset) * time.Second)
		began, _ := t.ZoneBounds()
		if began.IsZero() || !at.Before(began) {
			return at
		}
		t = began.Add(-1)
	}
}
