package policyfile

import (
	"cmp"
	"strconv"
	"strings"
)

// An EnvoyDomain has rules as Envoy's reference service writes them. Each level of descriptors matches one entry of a request.
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

// PolicyAt returns the policy of a rule at a path: the domain and the composites of its descriptors, joined by dots. Some need none.
func (l *EnvoyLimit) PolicyAt(path string) string {
	if l.Unlimited || l.Policy == "" && l.RequestsPerUnit == 0 {
		return ""
	}
	return cmp.Or(l.Policy, l.Name, path)
}

// EnvoyPolicies returns the policies that rules describe by their unit, each once. The problems are domains that are there twice, and
// rules that must not share a policy, and would.
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
			p := d.policy(at)
			other, isSecond := first[p.Name]
			switch {
			case p.Name == "":
			case len(p.Name) > maxName:
				problems.Add(p.At, "the policy of this rule would be called by its domain and path, which have %d bytes: give the rule a name of up to %d",
					len(p.Name), maxName)
			case !isSecond:
				first[p.Name] = rule{p, domain}
				policies = append(policies, p)
			case other.domain != domain:
				problems.Add(p.At, "the policy of this rule would be called %q, as that of the rule at %s, and share its buckets: "+
					"give this rule another name", p.Name, other.At)
			case !other.IsAs(p):
				problems.Add(p.At, "the policy of this rule would be called %q, as that of the rule at %s, which has other numbers: "+
					"give this rule another name", p.Name, other.At)
			}
			walk(domain, at, d.Descriptors)
		}
	}
	names := make(map[string]Position)
	for _, d := range domains {
		if at, isSecond := names[d.Name]; isSecond {
			problems.Add(d.At, "domain %s is in %s, too: write all its descriptors there", quote(d.Name), at)
			continue
		}
		names[d.Name] = d.At
		walk(d.Name, d.Name, d.Descriptors)
	}
	return policies, problems
}

// policy returns the policy that a rule describes, if it names none: it refills the requests of a unit in each unit, or has them from
// its calendar. It leaves durable and remember to the database.
func (d *EnvoyDescriptor) policy(path string) Policy {
	if d.Limit == nil || d.Limit.Policy != "" {
		return Policy{}
	}
	requests := int64(d.Limit.RequestsPerUnit)
	values := Values{"capacity": requests, "refill": requests, "every": d.Limit.Unit.Span(), "shadow": d.Watches}
	if d.Limit.Calendar {
		values = Values{"capacity": requests, "period": envoyPeriods[d.Limit.Unit], "shadow": d.Watches}
	}
	values = defaults[values.kind()].with(values)
	delete(values, "durable")
	delete(values, "remember")
	return Policy{Name: d.Limit.PolicyAt(path), Values: values, At: d.Limit.At}
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

// ParseEnvoy reads the rules of a policy file, or of a file of Envoy's reference service: the latter has a domain, and policies that
// are defined elsewhere. Its error is [Problems].
func ParseEnvoy(name string, data []byte) ([]EnvoyDomain, error) {
	d, err := readDocument(name, data)
	if err != nil {
		return nil, err
	}
	if d.root.find("domain") == nil && (d.root.find("envoy") != nil || d.root.find("policies") != nil) {
		file, err := d.parse()
		if err != nil {
			return nil, err
		}
		return file.rules[""].Envoy, nil
	}
	if problems := d.root.check(domainSchema); problems != nil {
		return nil, problems.sorted()
	}
	r := &reader{}
	domain := r.envoyDomain(d.root)
	if r.problems != nil {
		return nil, r.problems.sorted()
	}
	return []EnvoyDomain{domain}, nil
}

func (r *reader) envoy(list *node) (domains []EnvoyDomain) {
	for _, n := range list.inOrder() {
		domains = append(domains, r.envoyDomain(n))
	}
	described, problems := EnvoyPolicies(domains)
	r.problems = append(r.problems, problems...)
	for _, p := range described {
		if _, isThere := r.policies[p.Name]; isThere {
			r.problems.Add(p.At, "the policy of this rule would be called %s, as one below policies: write policy: %[1]s in its place, "+
				"or give the rule another name", quote(p.Name))
		}
	}
	return domains
}

func (r *reader) envoyDomain(n *node) EnvoyDomain {
	domain := n.find("domain")
	return EnvoyDomain{Name: domain.text(), At: domain.valueAt, Descriptors: r.envoyDescriptors(n.find("descriptors"))}
}

func (r *reader) envoyDescriptors(list *node) (descriptors []EnvoyDescriptor) {
	first := make(map[string]Position)
	var patterns []EnvoyDescriptor
	isBehind := func(d EnvoyDescriptor, matches string) {
		for _, p := range patterns {
			if p.Pattern().Matches(matches) {
				r.problems.Add(d.At, "%s never matches: the descriptor at %d:%d comes first for all its values: "+
					"remove one of the two, or put the narrower pattern first", quote(d.Composite()), p.At.Line, p.At.Column)
				return
			}
		}
	}
	for _, n := range list.inOrder() {
		d := EnvoyDescriptor{
			Key: n.find("key").text(), Value: n.find("value").text(), Limit: r.envoyLimit(n.find("rate_limit")),
			Descriptors: r.envoyDescriptors(n.find("descriptors")), Quota: n.find("quota_mode").isTrue(),
			Watches: n.find("shadow_mode").isTrue() || n.find("quota_mode").isTrue(), ShareThreshold: n.find("share_threshold").isTrue(), At: n.valueAt,
		}
		composite := d.Composite()
		if at, isSecond := first[composite]; isSecond {
			r.problems.Add(d.At, "key and value are %s together, as those at %d:%d: remove one of the descriptors", quote(composite), at.Line, at.Column)
		} else {
			first[composite] = d.At
		}
		if d.Pattern() != nil {
			isBehind(d, composite) // whose * no text of a pattern has
			patterns = append(patterns, d)
		} else if d.ShareThreshold {
			r.problems.Add(n.find("share_threshold").valueAt, "share_threshold is for a value with *: write one, or remove share_threshold")
		}
		descriptors = append(descriptors, d)
	}
	for _, d := range descriptors {
		if d.Value == "" && d.Pattern() == nil {
			isBehind(d, d.Key+"_*")
		}
	}
	return descriptors
}

func (r *reader) envoyLimit(n *node) *EnvoyLimit {
	if n == nil {
		return nil
	}
	requests, _ := strconv.ParseUint(n.find("requests_per_unit").text(), 10, 32)
	l := &EnvoyLimit{
		Policy: n.find("policy").text(), Name: n.find("name").text(), At: n.nameAt,
		RequestsPerUnit: uint32(requests), Unit: EnvoyUnit(strings.ToLower(n.find("unit").text())),
		Calendar: n.find("calendar").isTrue(), Unlimited: n.find("unlimited").isTrue(), Overdraw: n.find("overdraw").isTrue(),
	}
	for _, replaced := range n.find("replaces").inOrder() {
		l.Replaces = append(l.Replaces, replaced.find("name").text())
	}
	if r.policies != nil && l.Policy != "" && r.checkPolicy(n.find("policy").valueAt, l.Policy) && r.policies[l.Policy].kind() == "slots" {
		r.problems.Add(n.find("policy").valueAt, "policy %s lends slots, and has no tokens to take: write another policy", quote(l.Policy))
	}
	return l
}
