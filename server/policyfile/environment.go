package policyfile

import (
	"maps"
	"slices"
)

// A view is what a document says to one environment, or without one.
type view struct {
	document    *document
	environment string
	is          any // JSON
}

// views returns the document as it is, and as each environment has it, in the order of the file.
func (d *document) views() (views []view, problems Problems) {
	views = []view{{document: d, is: d.root.is}}
	root, _ := d.root.is.(map[string]any)
	environments, _ := root["environments"].(map[string]any)
	if d.values*(1+len(environments)) > maxValues {
		problems.Add(d.root.find("environments").name, "the file with its environments has more than %d values: write several files", maxValues)
		return views, problems
	}
	for name, replaced := range environments {
		if replaced, isMapping := replaced.(map[string]any); isMapping {
			merged := overlay(root, replaced)
			delete(merged, "environments")
			views = append(views, view{d, name, merged})
		}
	}
	slices.SortFunc(views[1:], func(a, b view) int { return a.section().name.Compare(b.section().name) })
	return views, nil
}

// overlay returns base with the values of over: mappings are merged by field, to any depth, other values replaced.
func overlay(base, over map[string]any) map[string]any {
	merged := make(map[string]any, len(base))
	maps.Copy(merged, base)
	for name, value := range over {
		before, wasMapping := merged[name].(map[string]any)
		if inner, isMapping := value.(map[string]any); isMapping && wasMapping {
			value = overlay(before, inner)
		}
		merged[name] = value
	}
	return merged
}

// section returns the node of the environment.
func (v view) section() *node { return v.document.root.find("environments", v.environment) }

// at returns the node from which the view has a value: that of its environment, or else the file's. It may be nil.
func (v view) at(path ...string) *node {
	if v.environment != "" && len(path) > 0 {
		if n := v.section().find(path...); n != nil {
			return n
		}
	}
	return v.document.root.find(path...)
}
