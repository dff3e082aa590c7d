package policyfile

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/nearest"
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
}

// isQuota reports whether the policy has a calendar.
func (p Policy) isQuota() bool { return p.Period != "" }

func (p Policy) isSlots() bool { return p.Lease != 0 }

// kind returns what a policy of its kind does, how it begins to, and what it has when it is new.
func (p Policy) kind() (is, begin, then string) {
	switch {
	case p.isSlots():
		return "lends slots", "begin to lend slots", "slots will be free"
	case p.isQuota():
		return "is a quota", "become a quota", "buckets will be full"
	}
	return "refills", "begin to refill", "buckets will be full"
}

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

// A mapping is JSON that the schema has checked.
type mapping = map[string]any

// A reader makes rules of a view.
type reader struct {
	view
	policies map[string]Policy // of the file
	names    []string
	problems Problems
}

func (v view) rules() (*Rules, Problems) {
	root := v.is.(mapping)
	r := &reader{view: v, policies: make(map[string]Policy)}
	rules := &Rules{}
	written := to[mapping](root["policies"])
	for name, fields := range written {
		p := r.policy(name, fields.(mapping))
		r.policies[name] = p
		rules.Policies = append(rules.Policies, p)
	}
	slices.SortFunc(rules.Policies, func(a, b Policy) int { return a.At.Compare(b.At) })
	r.names = slices.Sorted(maps.Keys(written))
	for policy, keys := range to[mapping](root["overrides"]) {
		if !r.checkPolicy(r.at("overrides", policy).name, policy) {
			continue
		}
		for key, fields := range keys.(mapping) {
			rules.Overrides = append(rules.Overrides, r.override(policy, key, written[policy].(mapping), fields.(mapping)))
		}
	}
	slices.SortFunc(rules.Overrides, func(a, b Override) int { return a.At.Compare(b.At) })
	rules.Envoy = r.envoy()
	return rules, r.problems
}

// The calendar of a quota that says nothing else.
const (
	defaultTimeZone = "UTC"
	defaultAnchor   = "2001-01-01"
)

// policy reads a policy. Its fields may be those of an override, too.
func (r *reader) policy(name string, fields mapping) Policy {
	at := r.at("policies", name)
	p := Policy{
		Name: name, Capacity: whole(fields["capacity"]), Refill: whole(fields["refill"]), Every: span(fields["every"]),
		Stepped: to[bool](fields["stepped"]), Durable: fields["durable"] != false, Remember: span(fields["remember"]), Shadow: to[bool](fields["shadow"]),
		Lease: span(fields["lease"]), At: at.name, durableAt: at.name,
	}
	if durable := r.at("policies", name, "durable"); durable != nil {
		p.durableAt = durable.value
	}
	if !p.isSlots() {
		p.Remember = cmp.Or(p.Remember, Day)
	}
	if text, isQuota := fields["period"].(string); isQuota {
		period, _ := client.ParsePeriod(text) // as its format has
		p.Period, p.TimeZone = period.String(), cmp.Or(to[string](fields["time_zone"]), defaultTimeZone)
		p.Anchor = parseAnchor(cmp.Or(to[string](fields["anchor"]), defaultAnchor))
	}
	return p
}

// override reads an override. What it omits is the policy's.
func (r *reader) override(policy, key string, base, fields mapping) Override {
	ofKind := Override{}.of(r.policies[policy]).fields()
	for name := range fields {
		if !slices.ContainsFunc(ofKind, func(v value) bool { return v.field == name }) {
			is, _, _ := r.policies[policy].kind()
			r.problems.Add(r.at("overrides", policy, key, name).name, "%s is not for a key of policy %s, which %s: remove it", name, quote(policy), is)
		}
	}
	o := Override{Key: key, At: r.at("overrides", policy, key).name}.of(r.policy(policy, overlay(base, fields)))
	if text, expires := fields["expires_at"].(string); expires {
		at, _ := time.Parse(time.RFC3339Nano, text)
		o.ExpiresAt = at.UTC()
	}
	return o
}

// of returns the override with the numbers of a policy.
func (o Override) of(p Policy) Override {
	o.Policy, o.Capacity, o.Refill, o.Every, o.TimeZone, o.Anchor, o.Lease = p.Name, p.Capacity, p.Refill, p.Every, p.TimeZone, p.Anchor, p.Lease
	return o
}

// checkPolicy reports a policy that the file does not have.
func (r *reader) checkPolicy(at Position, name string) bool {
	_, isThere := r.policies[name]
	if near := nearest.Of(name, r.names); !isThere && near != "" {
		r.problems.Add(at, "unknown policy %s: did you mean %s?", quote(name), quote(near))
	} else if !isThere {
		r.problems.Add(at, "unknown policy %s: write it below policies", quote(name))
	}
	return isThere
}

// to returns a value of a type, or the zero value if it is left out.
func to[T any](value any) T {
	typed, _ := value.(T)
	return typed
}

func whole(value any) int64 {
	n, _ := to[json.Number](value).Int64()
	return n
}

func span(value any) Span { return parseSpan(to[string](value)) }
