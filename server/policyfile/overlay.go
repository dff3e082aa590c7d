package policyfile

import "slices"

// overlay returns base with what over says in place of it: mappings field by field, to any depth, anything else as a
// whole. A name that both have stays where base has it. Neither is changed.
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

// only returns a mapping with those of its fields that have one of the names.
func only(n *node, names ...string) *node {
	some := &node{at: n.at, kind: mapping}
	for _, f := range n.fields {
		if slices.Contains(names, f.name) {
			some.fields = append(some.fields, f)
		}
	}
	return some
}
