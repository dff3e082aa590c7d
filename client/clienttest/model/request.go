package model

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"time"
)

// A Charge is what a request asks of one bucket, or a part of it: the bucket named twice is charged the sum.
type Charge struct {
	BucketID
	Cost int64
}

// A Whole is the answer to a request of several charges.
type Whole struct {
	Decision             // remaining, reset and capacity are the binding decision's
	Binding   int        // the number of the decision that binds, from 1
	Decisions []Decision // of each charge's bucket, about all that the request charges to it
}

// Acquire is a request of one charge. The empty idempotency key is none.
func (m *Model) Acquire(now time.Time, id BucketID, cost int64, idempotencyKey string) (Decision, error) {
	whole, err := m.AcquireAll(now, []Charge{{id, cost}}, idempotencyKey)
	return whole.Decision, err
}

// AcquireAll takes every charge, or nothing if a bucket does not cover what is charged to it. Buckets that
// remember the idempotency key are not asked. A shadow bucket has no say, and what it does not cover is not
// taken from it. The empty idempotency key is none.
func (m *Model) AcquireAll(now time.Time, charges []Charge, idempotencyKey string) (Whole, error) {
	if len(charges) == 0 {
		return Whole{}, InvalidArgument
	}
	rules, sums := map[BucketID]Policy{}, map[BucketID]int64{}
	var wrong error // slots are a bad argument, which comes before an unknown policy
	for _, c := range charges {
		p, err := m.rules(now, c.BucketID)
		if errors.Is(err, InvalidArgument) {
			return Whole{}, err
		}
		wrong = cmp.Or(wrong, err)
		rules[c.BucketID] = p
		sums[c.BucketID] += min(c.Cost, math.MaxInt64-sums[c.BucketID]) // more is as far above any capacity
	}

	if wrong != nil {
		return Whole{}, wrong
	}

	answers, granted := map[BucketID]Decision{}, true
	var refused error
	for id, p := range rules {
		answer, err := m.states[id].Ask(p, now, sums[id], idempotencyKey)
		if err != nil && !errors.Is(refused, IdempotencyMismatch) { // which comes first
			refused = err
		}
		answers[id] = answer
		granted = granted && answer.Allowed
	}
	if refused != nil {
		return Whole{}, refused
	}
	if granted {
		for id, p := range rules {
			var next State
			next, answers[id], _ = m.states[id].Acquire(p, now, sums[id], idempotencyKey)
			m.put(now, id, p, next)
		}
	} else {
		m.awaitAll(now, rules, sums, answers)
	}

	var whole Whole
	var first []int64 // the rank of the decision that binds
	var replayed, shadowed, charged bool
	waits := true // whatever refuses is a reserved grant
	for i, c := range charges {
		d := answers[c.BucketID]
		whole.Decisions = append(whole.Decisions, d)
		if r := rank(c, rules[c.BucketID], sums[c.BucketID], d, granted); i == 0 || slices.Compare(r, first) < 0 {
			first, whole.Binding, whole.Decision = r, i+1, d
		}
		replayed = replayed || d.Replayed
		shadowed = shadowed || d.Shadowed
		charged = charged || c.Cost > 0 && !d.Replayed && !d.Shadowed
		waits = waits && (d.Allowed || d.Replayed)
	}
	whole.Allowed = granted
	whole.Replayed = granted && replayed && !charged || !granted && waits
	whole.Shadowed = granted && shadowed
	return whole, nil
}

// awaitAll makes the longest wait of a denial the first instant at which all buckets cover: a bucket that covers until its
// override ends may not do so when the others begin to.
func (m *Model) awaitAll(now time.Time, rules map[BucketID]Policy, sums map[BucketID]int64, answers map[BucketID]Decision) {
	over := map[BucketID]bool{}
	for again := true; again; {
		again = false
		var longest Micros
		for _, d := range answers {
			if d.RetryAfter == Never {
				return
			}
			longest = max(longest, d.RetryAfter)
		}
		for id, p := range rules {
			if over[id] || p.then == nil || p.left(now) > longest {
				continue
			}
			answers[id] = m.states[id].AskAfterEnd(p, now, sums[id], answers[id])
			over[id], again = true, true
		}
	}
}

// AskAfterEnd is an answer of Ask in a denied request whose other buckets do not cover before the override of this one ends.
func (s State) AskAfterEnd(p Policy, now time.Time, charge int64, d Decision) Decision {
	if p.then == nil || p.Shadow || d.Replayed || charge == 0 {
		return d
	}
	d.Allowed, d.RetryAfter = false, p.afterEnd(s.at(p, now), now, waitFor(now, charge, microtokens(charge)))
	return d
}

// rank is least for the decision that binds: those of shadow policies come last, then those about no tokens;
// then, of a denial, the longest wait comes first, and of a grant what covers the fewest repeats.
func rank(c Charge, p Policy, sum int64, d Decision, granted bool) []int64 {
	r := []int64{one(p.Shadow), one(c.Cost == 0), 0}
	switch {
	case !granted && d.RetryAfter == Never:
		r[2] = math.MinInt64
	case !granted:
		r[2] = -int64(d.RetryAfter)
	case sum > 0:
		r[2] = new(big.Int).Div(big.NewInt(d.Remaining), big.NewInt(sum)).Int64() // rounds down below zero too
	}
	return r
}

func one(yes bool) int64 {
	if yes {
		return 1
	}
	return 0
}

// A Decision is the answer about one bucket, field by field what ratelimit.decision is.
type Decision struct {
	Allowed    bool
	Remaining  int64
	RetryAfter Micros // zero when allowed
	ResetAfter Micros
	Capacity   int64
	Replayed   bool
	Shadowed   bool // a policy that is no shadow would have denied
}

// Micros are whole microseconds, PostgreSQL's unit of time. A bucket may take 10,000 years to fill,
// which a time.Duration cannot hold.
type Micros int64

// Never is null in SQL: the RetryAfter of a cost above the capacity, and the RetryAfter and ResetAfter of
// a bucket that refills nothing.
const Never Micros = -1

// Longest is 100,000 years: where times saturate.
const Longest Micros = 36_525_000 * day

const day = 24 * 60 * 60 * 1_000_000

// After returns the instant this long after t.
func (m Micros) After(t time.Time) time.Time {
	return time.UnixMicro(t.UnixMicro() + int64(m)).UTC()
}

// Duration is the same time, or the longest Duration of whole microseconds. Of Never it is [math.MaxInt64].
func (m Micros) Duration() time.Duration {
	if m == Never {
		return math.MaxInt64
	}
	return time.Duration(min(m, math.MaxInt64/1000)) * time.Microsecond
}

// String writes days as such: 3650 days and an hour is "3650d1h0m0s".
func (m Micros) String() string {
	if m == Never {
		return "never"
	}
	rest := (time.Duration(m%day) * time.Microsecond).String()
	if m/day == 0 {
		return rest
	}
	return fmt.Sprintf("%dd%s", m/day, rest)
}
