package policyfile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// An EnvoyDomain has the rules of one domain, as Envoy's reference service writes them. Each level of descriptors matches one entry
// of a request.
type EnvoyDomain struct {
	Name        string
	Descriptors []EnvoyDescriptor

	// At is where its name stands.
	At Position
}

// An EnvoyDescriptor matches one entry of a request: its key, and any value if Value is empty.
type EnvoyDescriptor struct {
	Key, Value string

	// Limit is the rule for requests that end here, or nil.
	Limit *EnvoyLimit

	// Descriptors match the next entry.
	Descriptors []EnvoyDescriptor

	Watches        bool // shadow_mode or quota_mode: the rule alone denies nothing
	Quota          bool // quota_mode: a request is denied where all its rules of this mode are over their limits
	ShareThreshold bool

	// At is where it begins.
	At Position
}

// An EnvoyLimit is a rule. It has a Policy, or a Unit and RequestsPerUnit, or is Unlimited.
type EnvoyLimit struct {
	// Policy must exist.
	Policy string

	// RequestsPerUnit of 0 denies all requests.
	RequestsPerUnit uint32
	Unit            EnvoyUnit

	// Calendar makes the policy a quota: its buckets are full at the start of each day, week, month or year in UTC.
	Calendar bool

	Unlimited bool

	// Overdraw charges whatever the bucket holds, for the end of a stream.
	Overdraw bool

	// Name names the rule. Replaces names the rules that do not count beside it.
	Name     string
	Replaces []string

	// At is where it begins.
	At Position
}

// PolicyAt returns the policy of a rule at a path: the domain and the composites of its descriptors, joined by dots. A rule that
// needs no policy has none.
func (l *EnvoyLimit) PolicyAt(path string) string {
	if l.Unlimited || l.Policy == "" && l.RequestsPerUnit == 0 {
		return ""
	}
	return cmp.Or(l.Policy, l.Name, path)
}

// EnvoyPolicies returns the policies that rules describe by their unit, each once. The problems are rules that must not share a
// policy, and would.
func EnvoyPolicies(domains []EnvoyDomain) (policies []Policy, problems Problems) {
	type rule struct {
		Policy
		domain string
	}
	first := make(map[string]rule)
	var walk func(domain, path string, descriptors []EnvoyDescriptor)
	walk = func(domain, path string, descriptors []EnvoyDescriptor) {
		for _, d := range descriptors {
			at := path + "." + d.Composite()
			if d.Limit != nil && d.Limit.Policy == "" && d.Limit.Unit != "" && d.Limit.PolicyAt(at) != "" {
				p := d.policy(at)
				other, isSecond := first[p.Name]
				problem := ""
				switch {
				case len(p.Name) > maxName:
					problem = fmt.Sprintf("the policy of this rule would be called by its domain and path, which have %d bytes: give the rule a name of up to %d", len(p.Name), maxName)
				case !isSecond:
					first[p.Name] = rule{p, domain}
					policies = append(policies, p)
				case other.domain != domain:
					problem = fmt.Sprintf("the policy of this rule would be called %q, as that of the rule at %s, and share its buckets: give this rule another name", p.Name, other.At)
				case other.Capacity != p.Capacity || other.Every != p.Every || other.Period != p.Period || other.Shadow != p.Shadow:
					problem = fmt.Sprintf("the policy of this rule would be called %q, as that of the rule at %s, which has other numbers: give this rule another name", p.Name, other.At)
				}
				if problem != "" {
					problems.Add(p.At, "%s", problem)
				}
			}
			walk(domain, at, d.Descriptors)
		}
	}
	for _, d := range domains {
		walk(d.Name, d.Name, d.Descriptors)
	}
	return policies, problems
}

// policy returns the policy that a rule describes: it refills the requests of a unit in each unit, or has them from its calendar. No
// rule sets durable and remember.
func (d *EnvoyDescriptor) policy(path string) Policy {
	p := Policy{
		Name: d.Limit.PolicyAt(path), Capacity: int64(d.Limit.RequestsPerUnit), Durable: true, Remember: Day,
		Shadow: d.Watches, At: d.Limit.At, durableAt: d.Limit.At,
	}
	if d.Limit.Calendar {
		p.Period, p.TimeZone, p.Anchor = envoyPeriods[d.Limit.Unit], defaultTimeZone, defaultAnchor
	} else {
		p.Refill, p.Every = p.Capacity, d.Limit.Unit.Span()
	}
	return p
}

// envoyPeriods are the units that a calendar has.
var envoyPeriods = map[EnvoyUnit]string{"day": "1 day", "week": "7 days", "month": "1 month", "year": "1 year"}

// An EnvoyUnit is a unit of time, in lower case.
type EnvoyUnit string

var envoyUnits = map[EnvoyUnit]Span{
	"second": Second, "minute": Minute, "hour": Hour, "day": Day, "week": Week, "month": 30 * Day, "year": 365 * Day,
}

// Span returns the length of the unit: a month has 30 days and a year 365. An empty unit has 0.
func (u EnvoyUnit) Span() Span { return envoyUnits[u] }

// ParseEnvoy reads a file of rules of Envoy's reference service. It does not check the names of policies. Its error is [Problems].
func ParseEnvoy(name string, data []byte) (EnvoyDomain, error) {
	c := &collector{}
	root := parseTree(c, name, data)
	if root == nil {
		return EnvoyDomain{}, c.err()
	}
	r := &reader{collector: c}
	domain := r.envoyDomain(field{name: "the file", at: root.at, value: root})
	return domain, c.err()
}

func (r *reader) envoy(f field) (domains []EnvoyDomain) {
	r.items(f, "a domain", "a list: each element begins with - domain:", func(f field) {
		domain := r.envoyDomain(f)
		i := slices.IndexFunc(domains, func(d EnvoyDomain) bool { return d.Name == domain.Name })
		if i >= 0 && domain.Name != "" {
			first := domains[i].At
			r.add(domain.At, "domain %s is here a second time, after %d:%d: write all its descriptors there", quote(domain.Name), first.Line, first.Column)
		}
		domains = append(domains, domain)
	})
	return domains
}

func (r *reader) envoyDomain(f field) EnvoyDomain {
	d := EnvoyDomain{At: f.at}
	isObject := r.object(f, "a domain",
		known{"domain", func(f field) { d.Name, d.At = r.envoyText(f), f.value.at }},
		known{"descriptors", func(f field) { d.Descriptors = r.envoyDescriptors(f) }},
	)
	switch {
	case isObject && f.value.get("domain") == nil:
		r.add(f.at, "there is no domain: write domain: and the name that Envoy's filter has for it")
	case isObject && f.value.get("domain").kind == text && d.Name == "":
		r.add(d.At, "domain is empty: write the name that Envoy's filter has for it")
	}
	return d
}

func (r *reader) envoyDescriptors(f field) (descriptors []EnvoyDescriptor) {
	first := make(map[string]Position)
	var patterns []EnvoyDescriptor
	isBehind := func(d EnvoyDescriptor, matches string) {
		for _, p := range patterns {
			if p.Pattern().Matches(matches) {
				r.add(d.At, "%s never matches: the descriptor at %d:%d comes first for all its values: remove one of the two, or put the narrower pattern first", quote(d.Composite()), p.At.Line, p.At.Column)
				return
			}
		}
	}
	r.items(f, "a descriptor", "a list: each element begins with - key:", func(f field) {
		d := r.envoyDescriptor(f)
		if composite := d.Composite(); d.Key != "" {
			if at, twice := first[composite]; twice {
				r.add(f.at, "key and value are %s together, as those at %d:%d: remove one of the descriptors", quote(composite), at.Line, at.Column)
			} else {
				first[composite] = f.at
			}
		}
		if d.Pattern() != nil {
			isBehind(d, d.Composite()) // whose * no text of a pattern has
			patterns = append(patterns, d)
		}
		descriptors = append(descriptors, d)
	})
	for _, d := range descriptors {
		if d.Key != "" && d.Value == "" && d.Pattern() == nil {
			isBehind(d, d.Key+"_*")
		}
	}
	return descriptors
}

// An EnvoyPattern has the texts between the * of a key and value, each of which stands for any text.
type EnvoyPattern []string

// Pattern returns nil for a key and value without *.
func (d *EnvoyDescriptor) Pattern() EnvoyPattern {
	if parts := strings.Split(d.Composite(), "*"); len(parts) > 1 {
		return parts
	}
	return nil
}

// Matches reports whether the composite of an entry is as the pattern.
func (p EnvoyPattern) Matches(composite string) bool {
	rest, isMatch := strings.CutPrefix(composite, p[0])
	for _, part := range p[1 : len(p)-1] {
		if isMatch {
			_, rest, isMatch = strings.Cut(rest, part)
		}
	}
	return isMatch && strings.HasSuffix(rest, p[len(p)-1])
}

// Composite returns the key and value by which the reference looks a descriptor up.
func (d *EnvoyDescriptor) Composite() string {
	if d.Value == "" {
		return d.Key
	}
	return d.Key + "_" + d.Value
}

func (r *reader) envoyDescriptor(f field) EnvoyDescriptor {
	d := EnvoyDescriptor{At: f.at}
	thresholdAt := f.at
	isObject := r.object(f, "a descriptor",
		known{"key", func(f field) { d.Key = r.envoyText(f) }},
		known{"value", func(f field) { d.Value = r.envoyText(f) }},
		known{"rate_limit", func(f field) { d.Limit = r.envoyLimit(f) }},
		known{"descriptors", func(f field) { d.Descriptors = r.envoyDescriptors(f) }},
		known{"shadow_mode", func(f field) { d.Watches = r.boolean(f) }},
		known{"quota_mode", func(f field) { d.Quota = r.boolean(f) }},
		known{"detailed_metric", func(f field) { r.boolean(f) }}, // here only the reference has these metrics
		known{"value_to_metric", func(f field) { r.boolean(f) }},
		known{"metadata", r.envoyMetadata}, // which only the reference sends to Envoy
		known{"share_threshold", func(f field) { d.ShareThreshold, thresholdAt = r.boolean(f), f.value.at }},
	)
	if d.Quota && d.Watches {
		r.add(f.at, "a rule with shadow_mode is never over its limit, so quota_mode refuses nothing: remove one of the two")
	}
	d.Watches = d.Watches || d.Quota
	if !isObject {
		return d
	}
	r.need(f, "a descriptor", "key: remote_address")
	if key := f.value.get("key"); key != nil && key.kind == text && d.Key == "" {
		r.add(key.at, "key is empty: write the key of an entry, such as remote_address")
	}
	if d.ShareThreshold && d.Pattern() == nil {
		r.add(thresholdAt, "share_threshold is for a value with *: write one, or remove share_threshold")
	}
	return d
}

func (r *reader) envoyMetadata(f field) {
	if f.value.kind != mapping {
		r.wrong(f, "names with values")
	}
}

func (r *reader) envoyLimit(f field) *EnvoyLimit {
	l := &EnvoyLimit{At: f.at}
	flawless := r.flawless(func() {
		r.object(f, "rate_limit",
			known{"policy", func(f field) { l.Policy = r.envoyPolicy(f) }},
			known{"unit", func(f field) { l.Unit = r.envoyUnit(f) }},
			known{"requests_per_unit", func(f field) { l.RequestsPerUnit = uint32(r.whole(f, 1<<32-1)) }},
			known{"calendar", func(f field) { l.Calendar = r.boolean(f) }},
			known{"unlimited", func(f field) { l.Unlimited = r.boolean(f) }},
			known{"overdraw", func(f field) { l.Overdraw = r.boolean(f) }},
			known{"name", func(f field) { l.Name = r.envoyText(f) }},
			known{"replaces", func(f field) { l.Replaces = r.envoyReplaces(f) }},
		)
	})
	if flawless {
		r.checkLimit(f, l)
	}
	return l
}

// checkLimit reports a rule without a limit, or with several.
func (r *reader) checkLimit(f field, l *EnvoyLimit) {
	has := func(name string) bool { return f.value.get(name) != nil }
	numbers := has("unit") || has("requests_per_unit")
	switch {
	case l.Unlimited && (has("policy") || numbers || l.Calendar || l.Overdraw):
		r.add(f.at, "rate_limit is unlimited and has a limit, too: remove unlimited, or all of policy, unit, requests_per_unit, calendar and overdraw")
	case has("policy") && (numbers || l.Calendar):
		r.add(f.at, "rate_limit has a policy and numbers, too: remove policy, or unit, requests_per_unit and calendar")
	case l.Calendar && has("unit") && envoyPeriods[l.Unit] == "":
		r.add(f.value.get("calendar").at, "calendar is for unit day, week, month and year: write one of them, or remove calendar")
	case !l.Unlimited && !has("policy"):
		r.need(f, "rate_limit", "unit: second", "requests_per_unit: 10")
	}
	for i, name := range l.Replaces {
		if name == l.Name {
			r.add(f.value.get("replaces").items[i].at, "rate_limit replaces itself, %s: remove this element", quote(name))
		}
	}
}

func (r *reader) envoyPolicy(f field) string {
	name := r.text(f, "the name of a policy")
	if f.value.kind == text {
		r.checkName(f.value.at, "policy", name)
	}
	if name != "" {
		r.checkTokens(f.value.at, name)
	}
	return name
}

func (r *reader) envoyUnit(f field) EnvoyUnit {
	unit := EnvoyUnit(strings.ToLower(f.value.text))
	if f.value.kind != text || unit.Span() == 0 {
		r.wrong(f, "second, minute, hour, day, week, month or year")
		return ""
	}
	return unit
}

func (r *reader) envoyReplaces(f field) (names []string) {
	r.items(f, "an element of replaces", "a list: each element is - name: and the name of a rule", func(f field) {
		name := ""
		isObject := r.object(f, "an element of replaces", known{"name", func(f field) { name = r.envoyText(f) }})
		if isObject && name == "" {
			r.add(f.at, "an element of replaces names no rule: write name: and the name of one")
		}
		names = append(names, name)
	})
	return names
}

// envoyText reads text as the reference does: also numbers and booleans without quotes.
func (r *reader) envoyText(f field) string {
	switch f.value.kind {
	case null, mapping, list:
		r.wrong(f, "text")
		return ""
	}
	if strings.ContainsRune(f.value.text, 0) {
		r.add(f.value.at, "%s has the character \\0, which PostgreSQL does not store: remove it", f.name)
	}
	return f.value.text
}
