// Package policyfile reads policies, overrides and rules from one YAML file, and applies them to a database.
//
//	file, err := policyfile.Parse("limits.yaml", data)
//	if err != nil {
//		return err // all mistakes, each as file:line:column: message
//	}
//	difference, err := policyfile.Apply(ctx, conn, file, policyfile.Options{Environment: "staging"})
//
// A file goes through these steps, each in a source file:
//
//   - tree: YAML becomes nodes, each with its place. A file that was made to exhaust memory or time is stopped here.
//   - parse: an environment replaces nodes.
//   - read, and policy, http and envoy: nodes become [Rules]. Mistakes are collected, and reading goes on.
//   - plan: rules and the state of the database become a [Difference].
//   - apply: the difference is made, in one transaction, through the public SQL functions.
//
// Rules for HTTP and Envoy are read and checked here, and enforced elsewhere: [HTTP.Charges] is for package httplimit.
package policyfile

import (
	"fmt"
	"slices"
)

// A File has no mistakes that can be found without a database.
type File struct {
	name         string
	base         *Rules
	environments []environment
}

type environment struct {
	name  string
	rules *Rules
}

// Rules has the contents of a file for one environment, each kind in the order of the file.
type Rules struct {
	Policies  []Policy
	Overrides []Override
	HTTP      HTTP
	Envoy     []EnvoyDomain
}

// Parse reads a file with all its environments. The name is for messages. Its error is [Problems], with all mistakes.
func Parse(name string, data []byte) (*File, error) {
	c := &collector{}
	root := parseTree(c, name, data)
	if root == nil {
		return nil, c.err()
	}
	file := &File{name: name}
	budget := maxValues - root.values()
	environments := func(f field) {
		(&reader{collector: c}).each(f, "the name of an environment, and below it policies, overrides and http", func(f field) {
			if budget < 0 {
				return
			}
			merged := overlay(only(root, shared...), only(f.value, replaceable...))
			if budget -= merged.values(); budget < 0 {
				c.add(f.at, "the file with its environments has more than %d values by here: write several files", maxValues)
				return
			}
			checkEnvironment(c, f)
			file.environments = append(file.environments, environment{f.name, readRules(c, field{name: f.name, at: f.at, value: merged})})
		})
	}
	file.base = readRules(c, field{name: "the file", at: root.at, value: root}, known{"environments", environments})
	if err := c.err(); err != nil {
		return nil, err
	}
	return file, nil
}

// An environment cannot replace domains of Envoy: the elements of a list have no names. Rules name policies, whose numbers each
// environment can replace.
var (
	shared      = []string{"policies", "overrides", "http", "envoy"}
	replaceable = shared[:3]
)

// checkEnvironment reports mistakes in the section of an environment itself.
func checkEnvironment(c *collector, f field) {
	r := &reader{collector: c}
	r.checkName(f.at, "the name of an environment", f.name)
	var fields []known
	for _, name := range replaceable {
		fields = append(fields, known{name, func(field) {}})
	}
	r.object(f, "an environment", fields...)
}

// readRules reads policies first, and then the sections that refer to them. More are fields of the file alone.
func readRules(c *collector, f field, more ...known) *Rules {
	rules, r := &Rules{}, &reader{collector: c}
	policies := func(f field) {
		r.each(f, "the name of a policy, and below it capacity, refill and every", func(f field) {
			rules.Policies = append(rules.Policies, r.policy(f))
		})
	}
	if value := f.value.get("policies"); value != nil {
		policies(field{name: "policies", value: value}) // first, wherever they stand: the rest refers to them
	}
	r.know(rules.Policies)
	fields := []known{
		{"policies", func(field) {}},
		{"overrides", func(f field) { rules.Overrides = r.overrides(f) }},
		{"http", func(f field) { rules.HTTP = r.http(f) }},
		{"envoy", func(f field) { rules.Envoy = r.envoy(f) }},
	}
	r.object(f, "the file", append(fields, more...)...)
	described, problems := EnvoyPolicies(rules.Envoy)
	for _, p := range problems {
		c.add(p.Position, "%s", p.Message)
	}
	for _, p := range described {
		if _, isThere := r.policies[p.Name]; isThere {
			c.add(p.At, "the policy of this rule would be called %s, as one below policies: write policy: %[1]s in its place, or give the rule another name", quote(p.Name))
		}
	}
	return rules
}

// Environments returns the names of the environments, in the order of the file.
func (f *File) Environments() []string {
	var names []string
	for _, e := range f.environments {
		names = append(names, e.name)
	}
	return names
}

// Rules returns the rules of an environment, or for "" the rules outside of environments.
func (f *File) Rules(environment string) (*Rules, error) {
	if environment == "" {
		return f.base, nil
	}
	for _, e := range f.environments {
		if e.name == environment {
			return e.rules, nil
		}
	}
	if len(f.environments) == 0 {
		return nil, fmt.Errorf("%s has no environment %q: it has none at all", f.name, environment)
	}
	return nil, fmt.Errorf("%s has no environment %q: it has %s", f.name, environment, and(f.Environments()))
}

// overlay returns base with the values of over: mappings are merged by field, to any depth, other values replaced. A field keeps
// its place in base. Neither is changed.
func overlay(base, over *node) *node {
	if base == nil || base.kind != mapping || over.kind != mapping {
		return over
	}
	merged := &node{at: over.at, kind: mapping, fields: append([]field(nil), base.fields...)}
	places := make(map[string]int, len(base.fields))
	for i := range base.fields {
		places[base.fields[i].name] = i
	}
	for _, f := range over.fields {
		if i, ok := places[f.name]; ok {
			merged.fields[i].value = overlay(base.fields[i].value, f.value)
		} else {
			merged.fields = append(merged.fields, f)
		}
	}
	return merged
}

// only returns the fields of a mapping that have one of the names.
func only(n *node, names ...string) *node {
	some := &node{at: n.at, kind: mapping}
	for _, f := range n.fields {
		if slices.Contains(names, f.name) {
			some.fields = append(some.fields, f)
		}
	}
	return some
}
