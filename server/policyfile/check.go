package policyfile

import (
	_ "embed"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

//go:embed schema.json
var schemaText []byte

// The schema of a policy file, and that of a file of Envoy's reference service.
var (
	schema                   = readSchema()
	fileSchema, domainSchema = compile("schema.json"), compile("schema.json#/$defs/envoyDomain")
)

func readSchema() *node {
	d, err := readDocument("schema.json", schemaText)
	if err != nil {
		panic(err)
	}
	return d.root
}

func compile(url string) *jsonschema.Schema {
	compiler := jsonschema.NewCompiler()
	for name, form := range forms {
		compiler.RegisterFormat(&jsonschema.Format{Name: name, Validate: func(value any) error {
			if text, isText := value.(string); isText && form.read(text) == nil {
				return errors.New("another format")
			}
			return nil
		}})
	}
	compiler.AssertFormat()
	if err := compiler.AddResource("schema.json", schema.json); err != nil {
		panic(err)
	}
	return compiler.MustCompile(url)
}

// examples are of fields that an object must have.
var examples = map[string]string{
	"capacity": "100", "refill": "10", "every": "1s", "domain": "edge", "key": "remote_address",
	"unit": "second", "requests_per_unit": "10", "name": "and the name of a rule",
}

// check returns what the schema refuses.
func (n *node) check(schema *jsonschema.Schema) (problems Problems) {
	var invalid *jsonschema.ValidationError
	if errors.As(schema.Validate(n.json), &invalid) {
		n.explain(&problems, invalid, "")
	}
	return problems
}

// explain adds the problems of a validation error. The remedy beside a $ref counts before that of the schema it refers to.
func (n *node) explain(problems *Problems, invalid *jsonschema.ValidationError, remedy string) {
	place, _ := url.Parse(invalid.SchemaURL)
	refuses := schema.find(strings.Split(place.Fragment, "/")[1:]...)
	at := n.find(invalid.InstanceLocation...)
	if remedy == "" {
		remedy = refuses.find("errorMessage").text()
	}
	switch is := invalid.ErrorKind.(type) {
	case *kind.Schema, *kind.Group, *kind.Reference:
		_, refers := is.(*kind.Reference)
		for _, cause := range invalid.Causes {
			inherited := ""
			if refers && len(cause.InstanceLocation) == len(invalid.InstanceLocation) {
				inherited = remedy
			}
			n.explain(problems, cause, inherited)
		}
	case *kind.PropertyNames: // which the document has checked, in bytes
	case *kind.Required:
		var names, lines []string
		for _, name := range slices.DeleteFunc(is.Missing, at.misspells) { // which is reported
			names, lines = append(names, name), append(lines, name+": "+examples[name])
		}
		remedy := "write " + and(lines)
		if at.near != "" {
			remedy = "did you mean " + quote(at.near) + "? Else " + remedy
		}
		if names != nil {
			problems.Add(at.nameAt, "%s has no %s: %s", shorten(at.name), strings.Join(names, " and no "), remedy)
		}
	case *kind.AdditionalProperties:
		names := refuses.find("properties").names()
		for _, name := range is.Properties {
			remedy := "the fields here are " + and(names)
			if near := nearest(name, names); near != "" {
				remedy = "did you mean " + near + "?"
			}
			if before, _, isPair := strings.Cut(name, ":"); isPair && slices.Contains(names, before) {
				remedy = "write a space after the colon"
			}
			problems.Add(at.find(name).nameAt, "unknown field %s: %s", quote(name), remedy)
		}
	default:
		switch {
		case !strings.HasPrefix(remedy, "write "):
			problems.Add(at.nameAt, "%s %s", shorten(at.name), remedy)
		case at.json == nil:
			problems.Add(at.valueAt, "%s is empty: %s, or remove the line", shorten(at.name), remedy)
		default:
			problems.Add(at.valueAt, "%s is %s: %s", shorten(at.name), describe(at.json), remedy)
		}
	}
}

// misspells reports whether an unknown field of a policy is said to mean this one.
func (n *node) misspells(name string) bool {
	known := schema.find("$defs", "policy", "properties")
	return slices.ContainsFunc(n.names(), func(wrong string) bool { return known.find(wrong) == nil && nearest(wrong, known.names()) == name })
}

// describe returns what a value is, for a message that wants something else.
func describe(value any) string {
	switch value := value.(type) {
	case map[string]any:
		if len(value) == 0 {
			return "{}"
		}
		return "a mapping"
	case []any:
		return "a list"
	case string:
		return quote(value)
	}
	return shorten(fmt.Sprint(value))
}

// nearest returns the name that is most like a misspelled one, or nothing. It does not search among many names.
func nearest(wrong string, names []string) string {
	if len(names) > 100 {
		return ""
	}
	best, least := "", 2+len(wrong)/3
	for _, name := range names {
		if d := difference(wrong, name); d < least {
			best, least = name, d // the first of equals
		}
	}
	return best
}

// difference returns the bytes between what two names have in common at their beginnings and at their ends.
func difference(a, b string) int {
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for a != "" && b != "" && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return max(len(a), len(b))
}
