package model

import (
	"cmp"
	"maps"
	"math"
	"math/big"
	"slices"
	"strings"
	"time"
)

// A Usage is what a key of a quota has used in a period.
type Usage struct {
	BucketID
	Began, Ended time.Time
	Used         int64
	Closed       bool
	expires      time.Time
}

// isOver reports whether a turn has come since the last write of a quota's bucket.
func (c Calendar) isOver(b Bucket, now time.Time) bool { return !c.Next(b.RefilledAt).After(now) }

// keepsUsage reports whether the usage of closed periods is kept.
func (p Policy) keepsUsage() bool { return p.History != Period{} }

// closing are the periods of a key once that of its bucket is closed: it begins where the bucket counts from, but not before the last
// one ends, and ends at the first turn after the last write. If nothing is left between, the last one has what was used.
func (p Policy) closing(id BucketID, kept []Usage, b Bucket) []Usage {
	used := new(big.Int).Div(new(big.Int).Neg(b.Level), million).Int64()
	if used == 0 {
		return kept
	}
	u := Usage{BucketID: id, Began: b.from, Ended: p.Next(b.RefilledAt), Used: used}
	if u.Began.IsZero() {
		u.Began = p.Last(b.RefilledAt)
	}
	kept = slices.Clone(kept)
	if n := len(kept); n > 0 && !kept[n-1].Ended.Before(u.Ended) {
		kept[n-1].Used += used
		kept[n-1].Closed = false
		return kept
	} else if n > 0 && kept[n-1].Ended.After(u.Began) {
		u.Began = kept[n-1].Ended
	}
	_, offset := u.Ended.In(zone(p.Zone)).Zone()
	u.expires = Calendar{p.History, p.Zone, u.Ended.Add(time.Duration(offset) * time.Second)}.Turn(1)
	return append(kept, u)
}

// close closes the period of a key if it is over, by the numbers that apply to it.
func (m *Model) close(now time.Time, id BucketID, p Policy) {
	s := m.states[id]
	if s.bucket == nil || !p.counts || !p.isOver(*s.bucket, now) {
		return
	}
	m.keep(id, p)
	next := p.Refilled(*s.bucket, now)
	m.states[id] = State{&next, s.grants}
}

func (m *Model) keep(id BucketID, p Policy) {
	if !p.keepsUsage() {
		return
	}
	kept := p.closing(id, m.usage[id], *m.states[id].bucket)
	for i := range kept {
		kept[i].Closed = true
	}
	m.usage[id] = kept
}

// put has a call leave a key so. If it has written the bucket, it has closed the period before.
func (m *Model) put(now time.Time, id BucketID, p Policy, next State) {
	if next.bucket != m.states[id].bucket {
		m.close(now, id, p)
	}
	m.states[id] = next
}

// ForgetUsage removes the usage past its time, as clean-up does after it has removed buckets.
func (m *Model) ForgetUsage(now time.Time) {
	for id, kept := range m.usage {
		m.usage[id] = slices.DeleteFunc(slices.Clone(kept), func(u Usage) bool { return !u.expires.After(now.Add(-CleanUpMargin)) })
	}
}

// Kept returns how many closed periods are kept.
func (m *Model) Kept() (n int) {
	for _, kept := range m.usage {
		n += len(kept)
	}
	return n
}

// Usage returns the periods of a policy in which anything was used, and that end after since and begin before until, by key. A nil
// key is any, and so is a nil bound.
func (m *Model) Usage(now time.Time, policy string, key *string, since, until *time.Time) (all []Usage, err error) {
	if p, ok := m.policies[policy]; !ok {
		return nil, UnknownPolicy
	} else if !p.IsQuota() || !p.Durable || since != nil && until != nil && !since.Before(*until) {
		return nil, InvalidArgument
	}
	ids := map[BucketID]bool{}
	for id := range m.usage {
		ids[id] = true
	}
	for id := range m.states {
		ids[id] = true
	}
	for id := range maps.Keys(ids) {
		if id.Policy != policy || key != nil && *key != id.Key {
			continue
		}
		kept := m.usage[id]
		p, _ := m.numbers(now, id)
		if b := m.states[id].bucket; b != nil && (p.keepsUsage() || !p.isOver(*b, now)) {
			kept = p.closing(id, kept, *b)
		}
		for _, u := range kept {
			if (since == nil || u.Ended.After(*since)) && (until == nil || u.Began.Before(*until)) {
				all = append(all, u)
			}
		}
	}
	slices.SortFunc(all, func(a, b Usage) int { return cmp.Or(strings.Compare(a.Key, b.Key), a.Began.Compare(b.Began)) })
	return all, nil
}

// A Grant is what an idempotency key remembers.
type Grant struct {
	BucketID
	IdempotencyKey        string
	Cost                  int64 // that of the settlement once there is one
	Settled               bool
	GrantedFor, ExpiresIn Micros
	expires               time.Time
}

// Granted returns the live grants of a policy, the oldest first. A nil key is any, and so is a nil settled.
func (m *Model) Granted(now time.Time, policy string, key *string, settled *bool) (all []Grant, err error) {
	p, ok := m.policies[policy]
	if !ok {
		return nil, UnknownPolicy
	} else if p.IsSlots() {
		return nil, InvalidArgument
	}
	for id, s := range m.states {
		if id.Policy != policy || key != nil && *key != id.Key {
			continue
		}
		for name, g := range s.grants {
			if !now.Before(g.expires) || settled != nil && *settled != g.isSpent {
				continue
			}
			left := Micros(g.expires.UnixMicro() - now.UnixMicro())
			of := Grant{id, name, g.charge, g.isSpent, max(0, p.Remember-left), min(Longest, left), g.expires}
			if g.isSpent {
				of.Cost = g.spent
			}
			if !g.at.IsZero() {
				of.GrantedFor = max(0, Micros(now.UnixMicro()-g.at.UnixMicro()))
			}
			all = append(all, of)
		}
	}
	slices.SortFunc(all, func(a, b Grant) int {
		return cmp.Or(a.expires.Compare(b.expires), strings.Compare(a.Key, b.Key), strings.Compare(a.IdempotencyKey, b.IdempotencyKey))
	})
	return all, nil
}

// SettleAll settles the grants of several buckets under one idempotency key, or none. A bucket that is named twice is settled with the
// sum. The decisions are parallel to the settlements. Of an error about grants wrong has the buckets of which it is true.
func (m *Model) SettleAll(now time.Time, settlements []Charge, idempotencyKey string) (replayed bool, decisions []Decision, wrong []BucketID, err error) {
	rules, sums := map[BucketID]Policy{}, map[BucketID]int64{}
	var order, missing []BucketID
	for _, c := range settlements {
		p, unknown := m.rules(now, c.BucketID)
		if _, twice := rules[c.BucketID]; !twice {
			order = append(order, c.BucketID)
		}
		rules[c.BucketID] = p
		sums[c.BucketID] += min(c.Cost, math.MaxInt64-sums[c.BucketID])
		if p.IsSlots() || sums[c.BucketID] > 9_000_000_000_000 {
			return false, nil, nil, InvalidArgument
		}
		err = cmp.Or(err, unknown)
	}
	if err != nil {
		return false, nil, nil, err
	}
	for _, id := range order {
		g, ok := m.states[id].live(now, idempotencyKey)
		switch {
		case !ok && !rules[id].Shadow:
			missing = append(missing, id)
		case ok && g.isSpent && g.spent != sums[id]:
			wrong = append(wrong, id)
		}
	}
	if missing != nil {
		return false, nil, missing, NoGrant
	} else if wrong != nil {
		return false, nil, wrong, IdempotencyMismatch
	}
	answers, settled := map[BucketID]Decision{}, false
	for _, id := range order {
		next, d, _ := m.states[id].Settle(rules[id], now, idempotencyKey, sums[id])
		m.put(now, id, rules[id], next)
		answers[id] = d
		replayed = replayed || d.Replayed
		settled = settled || !d.Replayed && !d.Shadowed
	}
	for _, c := range settlements {
		decisions = append(decisions, answers[c.BucketID])
	}
	return replayed && !settled, decisions, nil, nil
}
