package policyfile

import (
	"cmp"
	"encoding/json"
	"math/bits"
	"time"
)

// A Policy has the fields of ratelimit_define_policy, with the defaults of a file. One with a Period is a quota, without Refill,
// Every and Stepped. One with a Lease lends slots, and has neither these nor Remember and a calendar.
type Policy struct {
	Name     string `json:"policy"`
	Capacity int64  `json:"capacity"`
	Refill   int64  `json:"refill"`
	Every    Span   `json:"every"`
	Stepped  bool   `json:"stepped"`
	Durable  bool   `json:"durable"`
	Remember Span   `json:"remember"`
	Shadow   bool   `json:"shadow"`

	// Period is as [client.Period] writes it. Anchor is a date, or a date and a time of day with a T between.
	Period   string `json:"period,omitempty"`
	TimeZone string `json:"time_zone,omitempty"`
	Anchor   string `json:"anchor,omitempty"`

	Lease Span `json:"lease,omitempty"`

	// At is where its name stands.
	At Position `json:"-"`

	durableAt Position
	flawed    bool
}

// isQuota reports whether the policy has a calendar.
func (p Policy) isQuota() bool { return p.Period != "" }

func (p Policy) isSlots() bool { return p.Lease != 0 }

// MarshalJSON writes null for what a quota or slots do not have, as ratelimit_policies lists it.
func (p Policy) MarshalJSON() ([]byte, error) {
	type plain Policy
	if !p.isQuota() && !p.isSlots() {
		return json.Marshal(plain(p))
	}
	without := struct {
		plain
		Remember *Span  `json:"remember"`
		Refill   *int64 `json:"refill"`
		Every    *Span  `json:"every"`
		Stepped  *bool  `json:"stepped"`
	}{plain: plain(p)}
	if p.isQuota() {
		without.Remember = &p.Remember
	}
	return json.Marshal(without)
}

// policy reads a policy. It must be complete, after an environment has replaced fields.
func (r *reader) policy(f field) Policy {
	p := Policy{Name: f.name, Durable: true, Remember: Day, At: f.at, durableAt: f.at}
	isQuota, isSlots := f.value.get("period") != nil, f.value.get("lease") != nil
	least, most := int64(0), int64(maxTokens)
	if isSlots {
		p.Remember, least, most = 0, 1, maxSlots
	}
	p.flawed = !r.flawless(func() {
		r.checkName(f.at, "the name of a policy", f.name)
		if r.object(f, "a policy",
			known{"capacity", func(f field) { p.Capacity = r.between(f, least, most) }},
			known{"refill", func(f field) { p.Refill = r.whole(f, maxTokens) }},
			known{"every", func(f field) { p.Every = r.span(f) }},
			known{"stepped", func(f field) { p.Stepped = r.boolean(f) }},
			known{"durable", func(f field) { p.Durable, p.durableAt = r.boolean(f), f.value.at }},
			known{"remember", func(f field) { p.Remember = r.span(f) }},
			known{"shadow", func(f field) { p.Shadow = r.boolean(f) }},
			known{"period", func(f field) { p.Period = r.period(f) }},
			known{"time_zone", func(f field) { p.TimeZone = r.timeZone(f) }},
			known{"anchor", func(f field) { p.Anchor = r.anchor(f) }},
			known{"lease", func(f field) { p.Lease = r.lease(f) }}) {
			if isQuota || isSlots {
				r.need(f, "policy "+quote(f.name), "capacity: 100")
			} else {
				r.need(f, "policy "+quote(f.name), "capacity: 100", "refill: 10", "every: 1s")
			}
			r.checkKind(f, f.name, isQuota, isSlots)
		}
	})
	if p.isQuota() && !isSlots {
		p.TimeZone, p.Anchor = cmp.Or(p.TimeZone, defaultTimeZone), cmp.Or(p.Anchor, defaultAnchor)
	} else if !p.flawed {
		r.checkFill(f, p.Capacity, p.Refill, p.Every)
	}
	return p
}

// The calendar of a quota that says nothing else.
const (
	defaultTimeZone = "UTC"
	defaultAnchor   = "2001-01-01"
)

// checkKind reports fields, of a policy or its override, that are for policies of another kind.
func (r *reader) checkKind(f field, policy string, isQuota, isSlots bool) {
	for _, field := range f.value.fields {
		switch field.name {
		case "lease":
			if !isSlots {
				r.add(field.at, "lease is for slots, and policy %s has no lease: write one there, or remove lease", quote(policy))
			}
			continue
		case "refill", "every", "stepped", "remember", "period", "time_zone", "anchor":
			if isSlots {
				r.add(field.at, "%s is not for slots, and policy %s has a lease: remove %[1]s", field.name, quote(policy))
				continue
			}
		}
		switch field.name {
		case "refill", "every", "stepped":
			if isQuota {
				r.add(field.at, "%s is not for a quota, and policy %s has a period: remove %[1]s", field.name, quote(policy))
			}
		case "time_zone", "anchor":
			if !isQuota {
				r.add(field.at, "%s is for a quota, and policy %s has no period: write one there, or remove %[1]s", field.name, quote(policy))
			}
		}
	}
}

// checkFill reports a bucket that takes too long to fill, at the last of its numbers.
func (r *reader) checkFill(f field, capacity, refill int64, every Span) {
	const longest = 3_652_500 * Day
	neededHigh, neededLow := bits.Mul64(uint64(capacity), uint64(every))
	gainedHigh, gainedLow := bits.Mul64(uint64(refill), uint64(longest))
	if refill == 0 || neededHigh < gainedHigh || neededHigh == gainedHigh && neededLow <= gainedLow {
		return
	}
	at := f.at
	for _, name := range []string{"capacity", "refill", "every"} {
		if number := f.value.get(name); number != nil && at.Compare(number.at) < 0 {
			at = number.at
		}
	}
	r.add(at, "an empty bucket of %s, with %d tokens, would take more than 10000 years to fill: "+
		"refill faster, lower the capacity, or write refill: 0 for buckets that are filled by hand", quote(f.name), capacity)
}

// An Override has the numbers of one key. Fields that the file omits are the policy's.
type Override struct {
	Policy, Key string
	Capacity    int64
	Refill      int64
	Every       Span

	// TimeZone and Anchor are for the key of a quota, which has no Refill and Every.
	TimeZone, Anchor string

	// Lease is for a key of slots, which has none of these either.
	Lease Span

	// ExpiresAt ends the override. The zero time is never.
	ExpiresAt time.Time

	// At is where its key stands.
	At Position
}

func (o Override) isOfQuota() bool { return o.TimeZone != "" }
func (o Override) isOfSlots() bool { return o.Lease != 0 }

func (r *reader) overrides(f field) (overrides []Override) {
	r.each(f, "the name of a policy, and below it the keys of buckets", func(f field) {
		r.checkPolicy(f.at, f.name)
		policy := r.policies[f.name]
		r.each(f, "the key of a bucket, and below it its numbers", func(f field) {
			overrides = append(overrides, r.override(f, policy))
		})
	})
	return overrides
}

// override reads an override. The policy is nil if the file has no policy of the name.
func (r *reader) override(f field, policy *Policy) Override {
	o := Override{Key: f.name, At: f.at}
	most := int64(maxTokens)
	if policy != nil {
		o.Policy, o.Capacity, o.Refill, o.Every = policy.Name, policy.Capacity, policy.Refill, policy.Every
		o.TimeZone, o.Anchor, o.Lease = policy.TimeZone, policy.Anchor, policy.Lease
		if policy.isSlots() {
			most = maxSlots
		}
	}
	flawless := r.flawless(func() {
		r.checkName(f.at, "a key", f.name)
		if r.object(f, "an override",
			known{"capacity", func(f field) { o.Capacity = r.whole(f, most) }},
			known{"refill", func(f field) { o.Refill = r.whole(f, maxTokens) }},
			known{"every", func(f field) { o.Every = r.span(f) }},
			known{"expires_at", func(f field) { o.ExpiresAt = r.instant(f) }},
			known{"time_zone", func(f field) { o.TimeZone = r.timeZone(f) }},
			known{"anchor", func(f field) { o.Anchor = r.anchor(f) }},
			known{"lease", func(f field) { o.Lease = r.lease(f) }}) && len(f.value.fields) == 0 {
			r.add(f.at, "override %s says nothing: write capacity or another field, or remove it", quote(f.name))
		}
	})
	if flawless && policy != nil && !policy.flawed {
		r.checkKind(f, policy.Name, policy.isQuota(), policy.isSlots())
		r.checkFill(f, o.Capacity, o.Refill, o.Every)
	}
	return o
}
