// Package policyfile reads policies, overrides and Envoy's rules from one YAML file, and applies them to a database.
//
//	file, err := policyfile.Parse("limits.yaml", data)
//	if err != nil {
//		return err // the mistakes, each as file:line:column: message
//	}
//	difference, err := policyfile.Apply(ctx, conn, file, policyfile.Options{Environment: "staging"})
//
// schema.json says what a file may have, and what to write in place of a mistake. A file goes through these steps, each in a source
// file; the first with mistakes is the last:
//
//   - document.go: YAML becomes a tree of nodes, JSON values with their places. A file that was made to exhaust memory or time is refused.
//   - environment.go: the tree of an environment is that of the file, with values replaced.
//   - check.go: the schema validates a tree. Its errors become [Problems].
//   - rules.go and envoy.go: a tree becomes [Rules]. What no schema can say is checked here, such as an override of an unknown policy.
//   - state.go: the policies and overrides of a database are read.
//   - plan.go: rules and state become a [Difference], which show.go prints.
//   - apply.go: the difference is made, in one transaction, through the public SQL functions, which check the numbers once more.
//
// export.go writes a state as a file. span.go has the intervals and dates of a file.
package policyfile

import "fmt"

// A File has no mistakes that can be found without a database.
type File struct {
	name         string
	environments []string
	rules        map[string]*Rules // by environment
}

// Rules has the contents of a file for one environment, each kind in the order of the file.
type Rules struct {
	Policies  []Policy
	Overrides []Override
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
		return nil, problems.sorted() // which environments would repeat
	}
	file.rules[""] = rules
	environments, problems := d.environments()
	for _, environment := range environments {
		rules, found := read(environment)
		for _, p := range found {
			problems.Add(p.Position, "%s (in environment %s)", p.Message, shorten(environment.key))
		}
		file.rules[environment.key] = rules
		file.environments = append(file.environments, environment.key)
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
	rules := f.rules[environment]
	switch {
	case rules != nil:
		return rules, nil
	case f.environments == nil:
		return nil, fmt.Errorf("%s has no environment %q: it has none at all", f.name, environment)
	}
	return nil, fmt.Errorf("%s has no environment %q: it has %s", f.name, environment, and(f.environments))
}
