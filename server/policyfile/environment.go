package policyfile

import "maps"

// environments returns what the file has for each environment.
func (d *document) environments() (merged []*node, problems Problems) {
	shared := &node{is: d.root.is, below: maps.Clone(d.root.below)}
	delete(shared.below, "environments")
	environments := d.root.find("environments").children()
	if d.values*(1+len(environments)) > maxValues {
		problems.Add(d.root.find("environments").name, "the file with its environments has more than %d values: write several files", maxValues)
		return nil, problems
	}
	for _, environment := range environments {
		merged = append(merged, overlay(shared, environment))
	}
	return merged, nil
}

// overlay returns base with the values of over: mappings are merged by field, to any depth, other values replaced. Base may be nil.
func overlay(base, over *node) *node {
	if base == nil || !base.isMapping() || !over.isMapping() {
		return over
	}
	merged, is := *over, make(map[string]any)
	merged.is, merged.below = is, maps.Clone(base.below)
	for name, n := range over.below {
		merged.below[name] = overlay(base.below[name], n)
	}
	for name, n := range merged.below {
		is[name] = n.is
	}
	return &merged
}

func (n *node) isMapping() bool {
	_, isMapping := n.is.(map[string]any)
	return isMapping
}
