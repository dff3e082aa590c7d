package policyfile

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
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
	History  string // likewise; "0 days" for none, and empty where a file leaves it as it is

	// At is where its name stands.
	At Position

	node *node
}

// MarshalJSON writes null for what a quota or slots do not have, as ratelimit_policies lists it.
func (p Policy) MarshalJSON() ([]byte, error) {
	object := map[string]any{"policy": p.Name, "refill": nil, "every": nil, "stepped": nil, "remember": nil}
	for _, v := range p.fields() {
		object[v.field] = v.value
	}
	return json.Marshal(object)
}

// An Override is one part of the override of a key: numbers that stay, or that end.
type Override struct {
	Policy, Key string

	// ExpiresAt ends the numbers. The zero time is never.
	ExpiresAt time.Time

	// At is where its key stands, or its entry in the list of a key.
	At Position

	node *node
	sets []fieldValue
}

// A fieldValue is a field as a file writes it: an int64, a bool, a string or a Span. The argument of the SQL function has its name.
type fieldValue struct {
	field string
	value any
}

// fields returns the fields of numbers of their kind, always in the same order.
func (n Numbers) fields() []fieldValue {
	switch {
	case n.isSlots():
		return []fieldValue{{"capacity", n.Capacity}, {"lease", n.Lease}}
	case n.isQuota():
		return []fieldValue{{"capacity", n.Capacity}, {"time_zone", n.TimeZone}, {"anchor", n.Anchor}}
	}
	return []fieldValue{{"capacity", n.Capacity}, {"refill", n.Refill}, {"every", n.Every}}
}

func (p Policy) fields() []fieldValue {
	fields := p.Numbers.fields()
	switch {
	case p.isSlots():
		return append(fields, fieldValue{"durable", p.Durable}, fieldValue{"shadow", p.Shadow})
	case p.isQuota():
		fields = slices.Insert(fields, 1, fieldValue{"period", p.Period})
	default:
		fields = append(fields, fieldValue{"stepped", p.Stepped})
	}
	fields = append(fields, fieldValue{"durable", p.Durable}, fieldValue{"remember", p.Remember}, fieldValue{"shadow", p.Shadow})
	if p.History != "" {
		fields = append(fields, fieldValue{"history", p.History})
	}
	return fields
}

// fields has expires_at of a part that ends, in UTC. If its year then has five digits, the zone is the one furthest behind that PostgreSQL
// reads.
func (o Override) fields() []fieldValue {
	at := o.ExpiresAt
	if at.IsZero() {
		return o.sets
	}
	if at.Year() > 9999 {
		at = at.In(time.FixedZone("", -(16*60-1)*60))
	}
	return append(slices.Clip(o.sets), fieldValue{"expires_at", at.Format(time.RFC3339Nano)})
}

func (o Override) String() string {
	set := make([]string, 0, len(o.sets)+1)
	for _, v := range o.fields() {
		set = append(set, fmt.Sprint(v.field, " ", v.value))
	}
	return fmt.Sprintf("override %q of %q: %s", o.Key, o.Policy, strings.Join(set, ", "))
}

// MarshalJSON writes what the part sets.
func (o Override) MarshalJSON() ([]byte, error) {
	object := map[string]any{"policy": o.Policy, "key": o.Key}
	for _, v := range o.fields() {
		object[v.field] = v.value
	}
	return json.Marshal(object)
}

// A reader makes rules of nodes that the schema has checked.
type reader struct {
	policies map[string]Policy // of the file; nil if rules may name any
	names    []string
	problems Problems
}

func (n *node) rules() (*Rules, Problems) {
	r, rules := &reader{policies: make(map[string]Policy)}, &Rules{}
	for _, child := range n.find("policies").inOrder() {
		p := policy(child)
		r.policies[p.Name] = p
		r.names = append(r.names, p.Name)
		rules.Policies = append(rules.Policies, p)
	}
	for _, keys := range n.find("overrides").inOrder() {
		if r.checkPolicy(keys.nameAt, keys.name) {
			for _, key := range keys.inOrder() {
				rules.Overrides = append(rules.Overrides, r.override(n.find("policies", keys.name), key)...)
			}
		}
	}
	rules.Envoy = r.envoy(n.find("envoy"))
	return rules, r.problems
}

// noHistory keeps no usage.
const noHistory = "0 days"

// The calendar of a quota that says nothing else.
const (
	defaultTimeZone = "UTC"
	defaultAnchor   = "2001-01-01"
)

func policy(n *node) Policy {
	p := Policy{
		Name: n.name, Numbers: numbers(n), Stepped: n.find("stepped").isTrue(), Shadow: n.find("shadow").isTrue(),
		Durable: n.find("durable") == nil || n.find("durable").isTrue(), Remember: parseSpan(n.find("remember").text()), At: n.nameAt, node: n,
	}
	if !p.isSlots() {
		p.Remember = cmp.Or(p.Remember, Day)
	}
	if p.isQuota() {
		period, _ := client.ParsePeriod(n.find("period").text()) // as its format has
		p.Period = period.String()
		if history := n.find("history"); history != nil {
			period, _ := client.ParsePeriod(history.text())
			p.History = cmp.Or(period.String(), noHistory)
		}
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

// override reads the entries of a key: the one that stays, and the one that ends. An entry inherits what it omits from the entry that
// stays, or from the policy. If it has refill or every, the override sets both.
func (r *reader) override(policy, key *node) (parts []Override) {
	entries := []*node{key}
	if !key.isMapping() {
		entries = slices.SortedStableFunc(slices.Values(key.inOrder()), func(a, b *node) int { return cmp.Compare(a.find("expires_at").text(), b.find("expires_at").text()) })
	}
	base, inherited := r.policies[policy.name], policy
	for i, entry := range entries {
		o := Override{Policy: base.Name, Key: key.name, At: entry.nameAt, node: entry}
		expires := entry.find("expires_at")
		if expires != nil {
			at, _ := time.Parse(time.RFC3339Nano, expires.text())
			o.ExpiresAt = at.UTC()
		}
		if i == 1 && (expires == nil || entries[0].find("expires_at") != nil) {
			r.problems.Add(entry.nameAt, "%s has two entries %s expires_at: write one without and one with it", quote(key.name), with[expires != nil])
		}
		merged := overlay(inherited, entry)
		for _, v := range numbers(merged).fields() {
			if entry.find(v.field) != nil || v.field == "refill" && entry.find("every") != nil || v.field == "every" && entry.find("refill") != nil {
				o.sets = append(o.sets, v)
			}
		}
		for _, field := range entry.inOrder() {
			switch {
			case field.name == "expires_at":
			case !slices.ContainsFunc(base.Numbers.fields(), func(v fieldValue) bool { return v.field == field.name }):
				r.problems.Add(field.nameAt, "%s is not for a key of policy %s, which %s: remove it", field.name, quote(base.Name), base.kind())
			case expires != nil && (field.name == "time_zone" || field.name == "anchor"):
				r.problems.Add(field.nameAt, "%s does not end: write it into an entry without expires_at", field.name)
			}
		}
		if len(entry.inOrder()) == 1 && expires != nil {
			r.problems.Add(expires.nameAt, "nothing ends then: write capacity or another number")
		}
		parts, inherited = append(parts, o), merged
	}
	return parts
}

var with = map[bool]string{true: "with", false: "without"}

// checkPolicy reports a policy that the file does not have.
func (r *reader) checkPolicy(at Position, name string) bool {
	_, isThere := r.policies[name]
	if near := nearest(name, r.names); !isThere && near != "" {
		r.problems.Add(at, "unknown policy %s: did you mean %s?", quote(name), quote(near))
	} else if !isThere {
		r.problems.Add(at, "unknown policy %s: write it below policies", quote(name))
	}
	return isThere
}

// formats are those that the schema names, beside a pattern. They know the calendar and the longest times.
var formats = map[string]func(string) bool{
	"span":    func(text string) bool { return parseSpan(text) > 0 },
	"lease":   func(text string) bool { return parseSpan(text) >= Millisecond },
	"period":  func(text string) bool { _, err := client.ParsePeriod(text); return err == nil },
	"history": func(text string) bool { _, err := client.ParsePeriod(text); return err == nil || text == noHistory },
	"anchor":  func(text string) bool { return parseAnchor(text) != "" },
	"instant": func(text string) bool { _, err := time.Parse(time.RFC3339Nano, text); return err == nil },
}

// A Span is a time in microseconds, up to 1000 years. A [time.Duration] ends at 292.
type Span int64

// The units of a Span.
const (
	Microsecond Span = 1
	Millisecond      = 1000 * Microsecond
	Second           = 1000 * Millisecond
	Minute           = 60 * Second
	Hour             = 60 * Minute
	Day              = 24 * Hour
	Week             = 7 * Day
)

const maxSpan = 365_250 * Day

type unit struct {
	name string
	span Span
}

// units are the units in a file, the largest first, and weeks, which String does not write.
var units = []unit{{"d", Day}, {"h", Hour}, {"m", Minute}, {"s", Second}, {"ms", Millisecond}, {"us", Microsecond}, {"w", Week}}

var spanPart = regexp.MustCompile(`([0-9]+)([a-z]+)`)

// parseSpan adds the numbers with units in a text that has the schema's pattern, such as 1h30m. It returns 0 for an unknown unit, and
// for more than 1000 years.
func parseSpan(text string) (span Span) {
	for _, part := range spanPart.FindAllStringSubmatch(text, -1) {
		n, err := strconv.ParseInt(part[1], 10, 64)
		i := slices.IndexFunc(units, func(u unit) bool { return u.name == part[2] })
		if err != nil || i < 0 || n > int64(maxSpan/units[i].span) {
			return 0
		}
		if span += Span(n) * units[i].span; span > maxSpan {
			return 0
		}
	}
	return span
}

// String writes the span as a file does: 30d, 1h30m, 1s500ms.
func (s Span) String() string {
	if s <= 0 {
		return fmt.Sprintf("%dus", int64(s))
	}
	var text strings.Builder
	for _, unit := range units {
		if n := s / unit.span; n > 0 {
			fmt.Fprintf(&text, "%d%s", n, unit.name)
			s %= unit.span
		}
	}
	return text.String()
}

// MarshalText is String.
func (s Span) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

const anchorLayout = "2006-01-02T15:04:05.999999"

// parseAnchor reads a date, or a date with a time of day, and writes it as anchorText does. It returns "" for anything else.
func parseAnchor(text string) string {
	if !strings.Contains(text, "T") {
		text += "T00:00:00"
	}
	at, err := time.Parse(anchorLayout, text)
	if err != nil || at.Year() < 1 {
		return ""
	}
	return anchorText(at)
}

// anchorText writes an anchor as a file does.
func anchorText(at time.Time) string { return strings.TrimSuffix(at.Format(anchorLayout), "T00:00:00") }
