// Package policyfile reads policies, overrides and Envoy's rules from one YAML file, and applies them to a database.
//
//	file, err := policyfile.Parse("limits.yaml", data)
//	if err != nil {
//		return err // the mistakes, each as file:line:column: message
//	}
//	difference, err := policyfile.Apply(ctx, conn, file, policyfile.Options{Environment: "staging"})
//
// schema.json says what a file may have. Its errorMessage, which is ours, says what to do about a mistake: one that begins with write
// is about the value, and any other about the field. An empty enum forbids a field; const false forbids it but for false.
//
// Fields, their order and defaults are in schema.json alone. A field that refers to a new definition needs its form: fields.go.
//
// The path of a file, which ends after the first step that finds mistakes:
//
//   - [Parse], document.go: YAML becomes a tree of nodes, which are JSON values with their places. A file that was made to exhaust
//     memory or time is refused.
//   - overlay: the tree of an environment is that of the file, with fields replaced. Each tree goes through the next two steps.
//   - check.go: the schema validates the tree. Its errors become [Problems].
//   - rules.go, envoy.go: the tree becomes [Rules]. What no schema can say is checked here, such as an override of an unknown policy.
//
// [Apply] then begins a transaction, which [Plan] rolls back and Apply commits:
//
//   - state.go: the policies and overrides of the database are read. [Export] writes such a state as a file.
//   - plan.go: rules are compared with the state. What differs is a [Difference], whose text is what pgratelimit apply prints.
//   - apply.go: calls of public SQL functions make the changes. They check the numbers once more. The place of a field that the
//     database refuses is in the node of the call.
package policyfile

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// A File has no mistakes that can be found without a database.
type File struct {
	name         string
	environments []string
	rules        map[string]*Rules // by environment
}

// Rules has the contents of a file for one environment, each kind in the order of the file.
type Rules struct {
	Policies  []Policy
	Overrides [][]Override // by key: the part that stays, and the part that ends
	Envoy     []EnvoyDomain
}

// Parse reads a file with all its environments. The name is for messages. Its error is [Problems].
func Parse(name string, data []byte) (*File, error) {
	d, err := readDocument(name, data)
	if err != nil {
		return nil, err
	}
	return d.parse()
}

func (d *document) parse() (*File, error) {
	file := &File{name: d.file, rules: make(map[string]*Rules)}
	rules, problems := read(d.root)
	if problems != nil {
		return nil, problems.sorted() // each environment would repeat them
	}
	file.rules[""] = rules
	shared := &node{json: d.root.json, children: maps.Clone(d.root.children)}
	delete(shared.children, "environments")
	environments := d.root.find("environments")
	if d.values*(1+len(environments.inOrder())) > maxValues {
		problems.Add(environments.nameAt, "the file with its environments has more than %d values: write several files", maxValues)
		return nil, problems
	}
	for _, environment := range environments.inOrder() {
		rules, found := read(overlay(shared, environment))
		for _, p := range found {
			problems.Add(p.Position, "%s (in environment %s)", p.Message, shorten(environment.name))
		}
		file.rules[environment.name] = rules
		file.environments = append(file.environments, environment.name)
	}
	if problems != nil {
		return nil, problems.sorted()
	}
	return file, nil
}

func read(root *node) (*Rules, Problems) {
	if problems := root.check(fileSchema); problems != nil {
		return nil, problems
	}
	return root.rules()
}

// Environments returns the names of the environments, in the order of the file.
func (f *File) Environments() []string { return f.environments }

// Rules returns the rules of an environment, or for "" the rules outside of environments.
func (f *File) Rules(environment string) (*Rules, error) {
	if rules := f.rules[environment]; rules != nil {
		return rules, nil
	}
	return nil, fmt.Errorf("%s has no environment %q: it has %s", f.name, environment, cmp.Or(and(f.environments), "none at all"))
}

// overlay returns base with the values of over: mappings are merged by field, to any depth, other values replaced. Base may be nil.
func overlay(base, over *node) *node {
	if base == nil || !base.isMapping() || !over.isMapping() {
		return over
	}
	merged, values := *over, make(map[string]any)
	merged.json, merged.children = values, maps.Clone(base.children)
	names := base.names()
	for name, n := range over.children {
		if base.children[name] == nil {
			added := *n // an alias may have it elsewhere
			n, added.near = &added, nearest(name, names)
		}
		merged.children[name] = overlay(base.children[name], n)
	}
	for name, n := range merged.children {
		values[name] = n.json
	}
	return &merged
}

func (n *node) isMapping() bool {
	_, isMapping := n.json.(map[string]any)
	return isMapping
}

// A Position is a place in a file. Lines and columns count from 1. A column is a character.
type Position struct {
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"`
}

// String is the position as compilers write it: file:line:column.
func (p Position) String() string { return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Column) }

// Compare orders positions by file, line and column.
func (p Position) Compare(q Position) int {
	return cmp.Or(cmp.Compare(p.File, q.File), cmp.Compare(p.Line, q.Line), cmp.Compare(p.Column, q.Column))
}

// A Problem is one mistake in a file, and what to write instead.
type Problem struct {
	Position
	Message string `json:"message"`
}

// Error is file:line:column: message.
func (p Problem) Error() string { return p.String() + ": " + p.Message }

// Problems are the mistakes in a file, in its order: one or more.
type Problems []Problem

// Error has a line for each of them.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i := range p {
		lines[i] = p[i].Error()
	}
	return strings.Join(lines, "\n")
}

// Add appends a problem.
func (p *Problems) Add(at Position, format string, args ...any) {
	*p = append(*p, Problem{Position: at, Message: fmt.Sprintf(format, args...)})
}

// sorted returns the problems in the order of the file, each once: aliases of one anchor have its places.
func (p Problems) sorted() Problems {
	slices.SortFunc(p, func(a, b Problem) int { return cmp.Or(a.Compare(b.Position), cmp.Compare(a.Message, b.Message)) })
	return slices.Compact(p)
}

func quote(text string) string { return fmt.Sprintf("%q", shorten(text)) }

func shorten(text string) string {
	const most = 60
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return text
}

// and joins names: a, b and c.
func and(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " and " + names[last]
}
