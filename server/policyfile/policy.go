package policyfile

import (
	"cmp"
	"encoding/json"
	"math/bits"
	"time"
)

// A Policy has the fields of ratelimit_define_policy, with the defaults of a file. One with a Period is a quota, without Refill,
// Every and Stepped.
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

	// At is where its name stands.
	At Position `json:"-"`

	durableAt Position
	flawed    bool
}

// isQuota reports whether the policy has a calendar.
func (p Policy) isQuota() bool { return p.Period != "" }

// MarshalJSON writes null for what a quota does not have, as ratelimit_policies lists it.
func (p Policy) MarshalJSON() ([]byte, error) {
	type plain Policy
	if !p.isQuota() {
		return json.Marshal(plain(p))
	}
	return json.Marshal(struct {
		plain
		Refill  *int64 `json:"refill"`
		Every   *Span  `json:"every"`
		Stepped *bool  `json:"stepped"`
	}{plain: plain(p)})
}

// policy reads a policy. It must be complete, after an environment has replaced fields.
func (r *reader) policy(f field) Policy {
	p := Policy{Name: f.name, Durable: true, Remember: Day, At: f.at, durableAt: f.at}
	p.flawed = !r.flawless(func() {
		r.checkName(f.at, "the name of a policy", f.name)
		if r.object(f, "a policy",
			known{"capacity", func(f field) { p.Capacity = r.whole(f, maxTokens) }},
			known{"refill", func(f field) { p.Refill = r.whole(f, maxTokens) }},
			known{"every", func(f field) { p.Every = r.span(f) }},
			known{"stepped", func(f field) { p.Stepped = r.boolean(f) }},
			known{"durable", func(f field) { p.Durable, p.durableAt = r.boolean(f), f.value.at }},
			known{"remember", func(f field) { p.Remember = r.span(f) }},
			known{"shadow", func(f field) { p.Shadow = r.boolean(f) }},
			known{"period", func(f field) { p.Period = r.period(f) }},
			known{"time_zone", func(f field) { p.TimeZone = r.timeZone(f) }},
			known{"anchor", func(f field) { p.Anchor = r.anchor(f) }}) {
			isQuota := f.value.get("period") != nil
			if isQuota {
				r.need(f, "policy "+quote(f.name), "capacity: 100")
			} else {
				r.need(f, "policy "+quote(f.name), "capacity: 100", "refill: 10", "every: 1s")
			}
			r.checkKind(f, f.name, isQuota)
		}
	})
	if p.isQuota() {
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

// checkKind reports fields, of a policy or its override, that are for policies of the other kind.
func (r *reader) checkKind(f field, policy string, isQuota bool) {
	for _, field := range f.value.fields {
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

	// ExpiresAt ends the override. The zero time is never.
	ExpiresAt time.Time

	// At is where its key stands.
	At Position
}

// isOfQuota reports whether the override is of a quota's key.
func (o Override) isOfQuota() bool { return o.TimeZone != "" }

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
	if policy != nil {
		o.Policy, o.Capacity, o.Refill, o.Every = policy.Name, policy.Capacity, policy.Refill, policy.Every
		o.TimeZone, o.Anchor = policy.TimeZone, policy.Anchor
	}
	flawless := r.flawless(func() {
		r.checkName(f.at, "a key", f.name)
		if r.object(f, "an override",
			known{"capacity", func(f field) { o.Capacity = r.whole(f, maxTokens) }},
			known{"refill", func(f field) { o.Refill = r.whole(f, maxTokens) }},
			known{"every", func(f field) { o.Every = r.span(f) }},
			known{"expires_at", func(f field) { o.ExpiresAt = r.instant(f) }},
			known{"time_zone", func(f field) { o.TimeZone = r.timeZone(f) }},
			known{"anchor", func(f field) { o.Anchor = r.anchor(f) }}) && len(f.value.fields) == 0 {
			r.add(f.at, "override %s says nothing: write capacity or another field, or remove it", quote(f.name))
		}
	})
	if flawless && policy != nil && !policy.flawed {
		r.checkKind(f, policy.Name, policy.isQuota())
		r.checkFill(f, o.Capacity, o.Refill, o.Every)
	}
	return o
}
