package policyfile

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// A Policy has the values of its kind, but for those that stay as the database has them: history, if a file has none, and durable and
// remember, if a rule of Envoy's describes it.
type Policy struct {
	Name string
	Values

	// At is where its name stands.
	At Position

	node *node
}

// Over adds the values that stay, from the old policy, or for a new one from the defaults.
func (p Policy) Over(old Policy) Policy {
	if old.Values == nil {
		old.Values = defaults[p.kind()]
	}
	p.Values = old.with(p.Values)
	return p
}

// IsAs reports whether a policy has the same name and values.
func (p Policy) IsAs(other Policy) bool {
	return p.Name == other.Name && maps.Equal(p.Values, other.Values)
}

// MarshalJSON writes null for what a quota or slots do not have, as ratelimit_policies lists it.
func (p Policy) MarshalJSON() ([]byte, error) {
	return json.Marshal(Values{"policy": p.Name, "refill": nil, "every": nil, "stepped": nil, "remember": nil}.with(p.Values))
}

// A Bucket is a key of a policy.
type Bucket struct {
	Policy string `json:"policy"`
	Key    string `json:"key,omitempty"`
}

func (b Bucket) compare(c Bucket) int {
	return cmp.Or(cmp.Compare(b.Policy, c.Policy), cmp.Compare(b.Key, c.Key))
}

// An Override is one part of the override of a key: values that stay, or with expires_at values that end.
type Override struct {
	Bucket
	Values

	// At is where its key stands, or its entry in the list of a key.
	At Position

	node *node
}

func (o Override) String() string {
	return fmt.Sprintf("override %q of %q: %s", o.Key, o.Policy, o.list("%s %v"))
}

// MarshalJSON writes what the part sets.
func (o Override) MarshalJSON() ([]byte, error) {
	return json.Marshal(Values{"policy": o.Policy, "key": o.Key}.with(o.Values))
}

// A reader makes rules of nodes that the schema has checked.
type reader struct {
	policies map[string]Policy // of the file; nil if rules may name any
	names    []string
	problems Problems
}

func (n *node) rules() (*Rules, Problems) {
	r, rules := &reader{policies: make(map[string]Policy), names: n.find("policies").names()}, &Rules{}
	for _, child := range n.find("policies").inOrder() {
		p := policy(child)
		r.policies[p.Name] = p
		rules.Policies = append(rules.Policies, p)
	}
	for _, keys := range n.find("overrides").inOrder() {
		if r.checkPolicy(keys.nameAt, keys.name) {
			for _, key := range keys.inOrder() {
				rules.Overrides = append(rules.Overrides, r.override(r.policies[keys.name], key))
			}
		}
	}
	rules.Envoy = r.envoy(n.find("envoy"))
	return rules, r.problems
}

func policy(n *node) Policy {
	said := n.values()
	return Policy{Name: n.name, Values: defaults[said.kind()].with(said), At: n.nameAt, node: n}
}

// override reads the parts of a key: the one that stays, and the one that ends. A part inherits what it omits from the one that stays,
// or from the policy. If it has refill or every, the override sets both.
func (r *reader) override(policy Policy, key *node) []Override {
	entries := []*node{key}
	if !key.isMapping() {
		entries = key.inOrder()
	}
	ends := func(entry *node) bool { return entry.find("expires_at") != nil }
	if len(entries) == 2 && ends(entries[0]) == ends(entries[1]) {
		with := map[bool]string{true: "with", false: "without"}[ends(entries[0])]
		r.problems.Add(entries[1].nameAt, "%s has two entries %s expires_at: write one without and one with it", quote(key.name), with)
	}
	if ends(entries[0]) {
		slices.Reverse(entries)
	}
	var parts []Override
	inherited := policy.Values
	for _, entry := range entries {
		sets := entry.values()
		for _, field := range entry.inOrder() {
			switch {
			case field.name == "expires_at":
				if len(sets) == 1 {
					r.problems.Add(field.nameAt, "nothing ends then: write capacity or another number")
				}
			case policy.Values[field.name] == nil:
				r.problems.Add(field.nameAt, "%s is not for a key of policy %s, which %s: remove it", field.name, quote(policy.Name), does[policy.kind()])
			case ends(entry) && (field.name == "time_zone" || field.name == "anchor"):
				r.problems.Add(field.nameAt, "%s does not end: write it into an entry without expires_at", field.name)
			}
		}
		inherited = inherited.with(sets)
		if sets["refill"] != nil || sets["every"] != nil {
			sets["refill"], sets["every"] = inherited["refill"], inherited["every"]
		}
		parts = append(parts, Override{Bucket: Bucket{policy.Name, key.name}, Values: sets, At: entry.nameAt, node: entry})
	}
	return parts
}

// checkPolicy reports a policy that the file does not have.
func (r *reader) checkPolicy(at Position, name string) bool {
	_, isThere := r.policies[name]
	if !isThere {
		remedy := "write it below policies"
		if near := nearest(name, r.names); near != "" {
			remedy = "did you mean " + quote(near) + "?"
		}
		r.problems.Add(at, "unknown policy %s: %s", quote(name), remedy)
	}
	return isThere
}
