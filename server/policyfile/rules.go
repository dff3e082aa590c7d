package policyfile

import (
	"cmp"
	"encoding/json"
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

func (n Numbers) kind() string {
	switch {
	case n.isSlots():
		return "lends slots"
	case n.isQuota():
		return "is a quota"
	}
	return "refills"
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

	node *node
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

	node *node
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

// A reader makes rules of nodes that the schema has checked.
type reader struct {
	policies map[string]Policy // of the file; nil if rules may name any
	names    []string
	problems Problems
}

func (n *node) rules() (*Rules, Problems) {
	r, rules := &reader{policies: make(map[string]Policy)}, &Rules{}
	for _, n := range n.find("policies").children() {
		p := policy(n)
		r.policies[p.Name] = p
		r.names = append(r.names, p.Name)
		rules.Policies = append(rules.Policies, p)
	}
	for _, keys := range n.find("overrides").children() {
		if r.checkPolicy(keys.name, keys.key) {
			for _, key := range keys.children() {
				rules.Overrides = append(rules.Overrides, r.override(n.find("policies", keys.key), key))
			}
		}
	}
	rules.Envoy = r.envoy(n.find("envoy"))
	return rules, r.problems
}

// The calendar of a quota that says nothing else.
const (
	defaultTimeZone = "UTC"
	defaultAnchor   = "2001-01-01"
)

func policy(n *node) Policy {
	p := Policy{
		Name: n.key, Numbers: numbers(n), Stepped: n.find("stepped").isTrue(), Shadow: n.find("shadow").isTrue(),
		Durable: n.find("durable") == nil || n.find("durable").isTrue(), Remember: parseSpan(n.find("remember").text()), At: n.name, node: n,
	}
	if !p.isSlots() {
		p.Remember = cmp.Or(p.Remember, Day)
	}
	if p.isQuota() {
		period, _ := client.ParsePeriod(n.find("period").text()) // as its format has
		p.Period = period.String()
	}
	return p
}

// numbers reads those of a policy, or of a policy with an override of its fields.
func numbers(n *node) Numbers {
	numbers := Numbers{
		Capacity: n.find("capacity").whole(), Refill: n.find("refill").whole(), Every: parseSpan(n.find("every").text()),
		Lease: parseSpan(n.find("lease").text()),
	}
	if n.find("period") != nil {
		numbers.TimeZone = cmp.Or(n.find("time_zone").text(), defaultTimeZone)
		numbers.Anchor = parseAnchor(cmp.Or(n.find("anchor").text(), defaultAnchor))
	}
	return numbers
}

// override reads an override. What it omits is the policy's.
func (r *reader) override(policy, n *node) Override {
	base := r.policies[policy.key]
	fields := Override{Numbers: base.Numbers}.fields()
	for _, field := range n.children() {
		if !slices.ContainsFunc(fields, func(v value) bool { return v.field == field.key }) {
			r.problems.Add(field.name, "%s is not for a key of policy %s, which %s: remove it", field.key, quote(base.Name), base.kind())
		}
	}
	o := Override{Policy: base.Name, Key: n.key, Numbers: numbers(overlay(policy, n)), At: n.name, node: n}
	if expires := n.find("expires_at"); expires != nil {
		at, _ := time.Parse(time.RFC3339Nano, expires.text())
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
