package policyfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
	"go.yaml.in/yaml/v4/plugin/loaderlimits"
)

// MaxBytes is the longest file. A thousand policies with ten thousand overrides are a tenth of it.
const MaxBytes = 2 << 20

// These limits stop a file that was made to exhaust memory or time.
const (
	maxDepth  = 64
	maxValues = 250_000 // aliases followed, and once for each environment
)

const maxName = 512 // bytes

type document struct {
	file     string
	root     *node
	values   int      // so far
	problems Problems // of YAML, of which the schema knows nothing
}

// A node is a value of the file and where it stands. Aliases are followed.
type node struct {
	name     string           // of the field, or what an element is called in messages
	json     any              // map[string]any, []any, string, json.Number, bool or nil: what the schema validates
	children map[string]*node // fields by name, elements by number

	nameAt, valueAt Position
	near            string // in an environment: the name outside of it that this one may mean
}

// find returns the node at a path, or nil.
func (n *node) find(path ...string) *node {
	for _, name := range path {
		if n == nil {
			return nil
		}
		n = n.children[name]
	}
	return n
}

// inOrder returns the fields or elements in the order of the file. The node may be nil, as for the methods below.
func (n *node) inOrder() []*node {
	if n == nil {
		return nil
	}
	return slices.SortedFunc(maps.Values(n.children), func(a, b *node) int { return a.nameAt.Compare(b.nameAt) })
}

func (n *node) names() (names []string) {
	for _, field := range n.inOrder() {
		names = append(names, field.name)
	}
	return names
}

// text returns a text, also of a number or boolean without quotes.
func (n *node) text() string {
	if n == nil {
		return ""
	}
	return fmt.Sprint(n.json)
}

func (n *node) isTrue() bool { return n != nil && n.json == true }

// readDocument reads the one document of a file. Its error is [Problems].
func readDocument(file string, data []byte) (*document, error) {
	d := &document{file: file}
	start := Position{File: file, Line: 1, Column: 1}
	if len(data) > MaxBytes {
		return nil, Problems{{start, fmt.Sprintf("the file is larger than %d bytes: split it", MaxBytes)}}
	}
	loader, err := yaml.NewLoader(bytes.NewReader(data),
		yaml.WithUniqueKeys(false), // addFields reports all of them
		yaml.WithPlugin(loaderlimits.New(loaderlimits.DepthValue(maxDepth))))
	if err != nil {
		return nil, err
	}
	var first, second yaml.Node
	switch err = loader.Load(&first); {
	case errors.Is(err, io.EOF):
		d.problems.Add(start, "the file is empty: write policies, and below it the name of one")
	case err == nil:
		content := first.Content[0]
		d.root = d.value("the file", d.position(content), content, 0)
		if err = loader.Load(&second); err == nil {
			d.problems.Add(d.position(&second), "a second document begins here: remove the line ---, or write it into a file of its own")
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		d.addSyntax(strings.Split(string(data), "\n"), start, err)
	}
	if d.problems != nil {
		return nil, d.problems.sorted()
	}
	return d, nil
}

// addSyntax reports an error of the YAML library, which stops at the first mistake.
func (d *document) addSyntax(lines []string, at Position, err error) {
	var syntax *yaml.LoadError
	if !errors.As(err, &syntax) {
		d.problems.Add(at, "this is no YAML: %v", err)
		return
	}
	if syntax.Mark.Line > 0 {
		at.Line, at.Column = syntax.Mark.Line, max(1, syntax.Mark.Column)
	}
	message := syntax.Message
	if syntax.ContextMsg != "" {
		message += " " + syntax.ContextMsg
		if begin := syntax.ContextMark; begin.Line > 0 && begin != syntax.Mark {
			message += fmt.Sprintf(" that begins at %d:%d", begin.Line, begin.Column)
		}
	}
	line := lines[min(at.Line, len(lines))-1]
	switch {
	case strings.TrimLeft(line[:min(at.Column, len(line))], " ") == "\t":
		message = "a tab indents this line: write spaces in its place"
	case strings.Contains(message, "mapping values are not allowed"), strings.Contains(message, "could not find expected ':'"):
		message += ": perhaps the line before has no space after the colon"
	}
	d.problems.Add(at, "this is no YAML: %s", message)
}

func (d *document) position(n *yaml.Node) Position {
	return Position{File: d.file, Line: max(1, n.Line), Column: max(1, n.Column)}
}

func (d *document) value(name string, nameAt Position, n *yaml.Node, depth int) *node {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	value := &node{name: name, nameAt: nameAt, valueAt: d.position(n)}
	switch d.values++; {
	case d.values > maxValues+1: // nothing more is read
	case d.values > maxValues:
		d.problems.Add(value.valueAt, "the file has more than %d values by here, aliases followed: split it, and write fewer aliases", maxValues)
	case depth > maxDepth:
		d.problems.Add(value.valueAt, "values are nested more than %d deep here: write fewer levels, and no alias inside of its own anchor", maxDepth)
		d.values = maxValues + 1
	case n.Kind == yaml.MappingNode:
		d.checkTag(n, "!!map")
		d.addFields(value, n, depth)
	case n.Kind == yaml.SequenceNode:
		d.checkTag(n, "!!seq")
		value.children = make(map[string]*node, len(n.Content))
		items := make([]any, len(n.Content))
		for i, item := range n.Content {
			element := d.value("an element of "+strings.TrimPrefix(name, "an element of "), d.position(item), item, depth+1)
			value.children[strconv.Itoa(i)], items[i] = element, element.json
		}
		value.json = items
	default:
		value.json = d.scalar(n)
	}
	return value
}

func (d *document) addFields(to *node, n *yaml.Node, depth int) {
	to.children = make(map[string]*node, len(n.Content)/2)
	fields := make(map[string]any, len(n.Content)/2)
	to.json = fields
	for i := 0; i+1 < len(n.Content); i += 2 {
		name := n.Content[i]
		if name.Kind == yaml.AliasNode {
			name = name.Alias
		}
		at := d.position(n.Content[i])
		before := to.children[name.Value]
		switch {
		case name.Kind != yaml.ScalarNode:
			d.problems.Add(at, "a name is a list or a mapping: write a text")
		case name.Tag == "!!merge":
			d.problems.Add(at, "<< is not read: write the fields out, or let an environment replace single ones")
		case name.Tag != "!!str":
			d.problems.Add(at, "the name %s could be read as something else than text: write it in quotes, %[1]q", shorten(name.Value))
		case name.Value == "" || len(name.Value) > maxName:
			d.problems.Add(at, "this name has %d bytes: write 1 to %d", len(name.Value), maxName)
		case strings.ContainsRune(name.Value, 0):
			d.problems.Add(at, `this name has the character \0, which PostgreSQL does not store: remove it`)
		case before != nil:
			d.problems.Add(at, "%s is here a second time, after %d:%d: remove one of them", quote(name.Value), before.nameAt.Line, before.nameAt.Column)
		default:
			field := d.value(name.Value, at, n.Content[i+1], depth+1)
			to.children[name.Value], fields[name.Value] = field, field.json
		}
	}
}

// digits are the one form that every reader of YAML takes for the same integer.
var digits = regexp.MustCompile(`^-?(?:0|[1-9][0-9]*)$`)

// scalar returns what every reader of YAML takes for the same value, and the rest as text: 0x10, 1.50, True and 2024-01-31.
func (d *document) scalar(n *yaml.Node) any {
	switch n.Tag {
	case "!!null":
		return nil
	case "!!bool":
		if n.Value == "true" || n.Value == "false" {
			return n.Value == "true"
		}
	case "!!int":
		if digits.MatchString(n.Value) {
			return json.Number(n.Value)
		}
	case "!!float", "!!timestamp", "!!merge":
	default:
		d.checkTag(n, "!!str")
	}
	return n.Value
}

func (d *document) checkTag(n *yaml.Node, want string) {
	if n.Tag != want {
		d.problems.Add(d.position(n), "the tag %s is not read: write the value without it", shorten(n.Tag))
	}
}
