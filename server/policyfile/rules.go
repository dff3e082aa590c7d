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

// Numbers are what each bucket or key has. Those of a quota have a TimeZone and an Anchor in place of Refill and Every, and those of
// slots a Lease.
type Numbers struct {
	Capacity         int64
	Refill           int64
	Every            Span
	TimeZone, Anchor string // of a date, or a date and a time of day with a T between
	Lease            Span
}

func (n Numbers) isQuota() bool { return n.TimeZone != "" }
func (n Numbers) isSlots() bool { return n.Lease != 0 }

// kind returns what a policy of these numbers does, how it begins to, and what it has when it is new.
func (n Numbers) kind() (is, begin, then string) {
	switch {
	case n.isSlots():
		return "lends slots", "begin to lend slots", "slots will be free"
	case n.isQuota():
		return "is a quota", "become a quota", "buckets will be full"
	}
	return "refills", "begin to refill", "buckets will be full"
}

// A Policy has the fields of ratelimit_define_policy, with the defaults of a file. A quota has a Period, and is not Stepped. Slots
// have no Remember.
type Policy struct {
	Name string
	Numbers
	Stepped  bool
	Durable  bool
	Remember Span
	Shadow   bool
	Period   string // as [client.Period] writes it

	// At is where its name stands.
	At Position

	durableAt Position
}

// MarshalJSON writes null for what a quota or slots do not have, as ratelimit_policies lists it.
func (p Policy) MarshalJSON() ([]byte, error) {
	object := map[string]any{"policy": p.Name, "refill": nil, "every": nil, "stepped": nil, "remember": nil}
	for _, v := range p.fields() {
		object[v.field] = v.is
	}
	return json.Marshal(object)
}

// An Override has the numbers of one key. Those that the file omits are the policy's.
type Override struct {
	Policy, Key string
	Numbers

	// ExpiresAt ends the override. The zero time is never.
	ExpiresAt time.Time

	// At is where its key stands.
	At Position
}

// A value is the value of a field, as a file writes it: an int64, a bool, a string or a Span, or nil for an override that does not
// expire.
type value struct {
	field string
	is    any
}

// fields returns the fields of numbers of their kind, always in the same order.
func (n Numbers) fields() []value {
	switch {
	case n.isSlots():
		return []value{{"capacity", n.Capacity}, {"lease", n.Lease}}
	case n.isQuota():
		return []value{{"capacity", n.Capacity}, {"time_zone", n.TimeZone}, {"anchor", n.Anchor}}
	}
	return []value{{"capacity", n.Capacity}, {"refill", n.Refill}, {"every", n.Every}}
}

func (p Policy) fields() []value {
	fields := p.Numbers.fields()
	switch {
	case p.isSlots():
		return append(fields, value{"durable", p.Durable}, value{"shadow", p.Shadow})
	case p.isQuota():
		fields = slices.Insert(fields, 1, value{"period", p.Period})
	default:
		fields = append(fields, value{"stepped", p.Stepped})
	}
	return append(fields, value{"durable", p.Durable}, value{"remember", p.Remember}, value{"shadow", p.Shadow})
}

// fields writes expires_at in UTC. If its year then has five digits, the zone is the one furthest behind that PostgreSQL reads.
func (o Override) fields() []value {
	expires := value{field: "expires_at"}
	if at := o.ExpiresAt; !at.IsZero() {
		if at.Year() > 9999 {
			at = at.In(time.FixedZone("", -(16*60-1)*60))
		}
		expires.is = at.Format(time.RFC3339Nano)
	}
	return append(o.Numbers.fields(), expires)
}

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

func (r *reader) policy(name string, fields mapping) Policy {
	at := r.at("policies", name)
	p := Policy{
		Name: name, Numbers: numbers(fields), Stepped: to[bool](fields["stepped"]), Durable: fields["durable"] != false,
		Remember: span(fields["remember"]), Shadow: to[bool](fields["shadow"]), At: at.name, durableAt: at.name,
	}
	if durable := r.at("policies", name, "durable"); durable != nil {
		p.durableAt = durable.value
	}
	if !p.isSlots() {
		p.Remember = cmp.Or(p.Remember, Day)
	}
	if p.isQuota() {
		period, _ := client.ParsePeriod(to[string](fields["period"])) // as its format has
		p.Period = period.String()
	}
	return p
}

// numbers reads those of a policy, or of a policy with an override of its fields.
func numbers(fields mapping) Numbers {
	n := Numbers{Capacity: whole(fields["capacity"]), Refill: whole(fields["refill"]), Every: span(fields["every"]), Lease: span(fields["lease"])}
	if fields["period"] != nil {
		n.TimeZone = cmp.Or(to[string](fields["time_zone"]), defaultTimeZone)
		n.Anchor = parseAnchor(cmp.Or(to[string](fields["anchor"]), defaultAnchor))
	}
	return n
}

// override reads an override. What it omits is the policy's.
func (r *reader) override(policy, key string, base, fields mapping) Override {
	ofKind := Override{Numbers: r.policies[policy].Numbers}.fields()
	for name := range fields {
		if !slices.ContainsFunc(ofKind, func(v value) bool { return v.field == name }) {
			is, _, _ := r.policies[policy].kind()
			r.problems.Add(r.at("overrides", policy, key, name).name, "%s is not for a key of policy %s, which %s: remove it", name, quote(policy), is)
		}
	}
	o := Override{Policy: policy, Key: key, Numbers: numbers(overlay(base, fields)), At: r.at("overrides", policy, key).name}
	if text, expires := fields["expires_at"].(string); expires {
		at, _ := time.Parse(time.RFC3339Nano, text)
		o.ExpiresAt = at.UTC()
	}
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
