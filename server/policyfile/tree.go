package policyfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
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

// A node is a value of a YAML document, with its aliases followed.
type node struct {
	at     Position
	kind   kind
	text   string  // of a scalar, as it is written
	fields []field // of a mapping
	items  []*node // of a list
}

// A field is a name in a mapping, and its value.
type field struct {
	name  string
	at    Position // the name's
	value *node
}

type kind int

const (
	null kind = iota
	text
	integer
	decimal
	boolean
	instant
	mapping
	list
)

// get returns the value of a field, or nil.
func (n *node) get(name string) *node {
	for i := range n.fields {
		if n.fields[i].name == name {
			return n.fields[i].value
		}
	}
	return nil
}

// values counts a node and all below it.
func (n *node) values() int {
	count := 1
	for i := range n.fields {
		count += n.fields[i].value.values()
	}
	for _, item := range n.items {
		count += item.values()
	}
	return count
}

// describe returns what a node is, for a message that wants something else.
func (n *node) describe() string {
	switch n.kind {
	case null:
		return "empty"
	case mapping:
		return "a mapping"
	case list:
		return "a list"
	case text:
		return quote(n.text)
	}
	return shorten(n.text)
}

// quote writes a text for a message.
func quote(text string) string { return fmt.Sprintf("%q", shorten(text)) }

func shorten(text string) string {
	const most = 60
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return text
}

// parseTree reads the document of a file. It returns nil if nothing can be read; the collector has the problems.
func parseTree(c *collector, file string, data []byte) *node {
	start := Position{File: file, Line: 1, Column: 1}
	if len(data) > MaxBytes {
		c.add(start, "the file is larger than %d bytes: split it", MaxBytes)
		return nil
	}
	loader, err := yaml.NewLoader(bytes.NewReader(data),
		yaml.WithUniqueKeys(false), // we tell of all of them
		yaml.WithPlugin(loaderlimits.New(loaderlimits.DepthValue(maxDepth))))
	if err != nil {
		c.add(start, "%v", err)
		return nil
	}
	var document, second yaml.Node
	switch err := loader.Load(&document); {
	case errors.Is(err, io.EOF):
		c.add(start, "the file is empty: write policies, and below it the name of one")
		return nil
	case err != nil:
		c.addSyntax(start, err)
		return nil
	}
	b := builder{collector: c, file: file}
	root := b.build(document.Content[0], 0)
	switch err := loader.Load(&second); {
	case err == nil:
		c.add(b.position(&second), "a second document begins here: remove the line ---, or write it into a file of its own")
	case !errors.Is(err, io.EOF):
		c.addSyntax(start, err)
	}
	if b.stopped {
		return nil
	}
	return root
}

// addSyntax reports an error of the YAML library, which stops at the first mistake.
func (c *collector) addSyntax(at Position, err error) {
	var syntax *yaml.LoadError
	if !errors.As(err, &syntax) {
		c.add(at, "this is no YAML: %v", err)
		return
	}
	if syntax.Mark.Line > 0 {
		at.Line, at.Column = syntax.Mark.Line, max(1, syntax.Mark.Column)
	}
	message := syntax.Message
	if strings.Contains(message, "exceeded max depth") {
		c.add(at, "values are nested more than %d deep here: write fewer levels", maxDepth)
		return
	}
	if syntax.ContextMsg != "" {
		message += " " + syntax.ContextMsg
		if begin := syntax.ContextMark; begin.Line > 0 && begin != syntax.Mark {
			message += fmt.Sprintf(" that begins at %d:%d", begin.Line, begin.Column)
		}
	}
	c.add(at, "this is no YAML: %s", message)
}

// A builder makes nodes of the YAML library's nodes.
type builder struct {
	*collector
	file    string
	values  int
	stopped bool
}

func (b *builder) position(n *yaml.Node) Position {
	return Position{File: b.file, Line: max(1, n.Line), Column: max(1, n.Column)}
}

// stop reports a limit that ends the reading.
func (b *builder) stop(n *yaml.Node, format string, args ...any) *node {
	if !b.stopped {
		b.add(b.position(n), format, args...)
	}
	b.stopped = true
	return &node{at: b.position(n)}
}

func (b *builder) build(n *yaml.Node, depth int) *node {
	b.values++
	switch {
	case b.stopped:
		return &node{at: b.position(n)}
	case b.values > maxValues:
		return b.stop(n, "the file has more than %d values by here, aliases followed: split it, and write fewer aliases", maxValues)
	case depth > maxDepth:
		return b.stop(n, "values are nested more than %d deep here: write fewer levels, and no alias inside of its own anchor", maxDepth)
	case n.Kind == yaml.AliasNode:
		return b.build(n.Alias, depth+1)
	}
	built := &node{at: b.position(n), text: n.Value}
	switch n.Kind {
	case yaml.MappingNode:
		b.checkTag(n, "!!map")
		built.kind = mapping
		b.fields(built, n, depth)
	case yaml.SequenceNode:
		b.checkTag(n, "!!seq")
		built.kind = list
		for _, item := range n.Content {
			built.items = append(built.items, b.build(item, depth+1))
		}
	default:
		built.kind = b.scalar(n)
	}
	return built
}

func (b *builder) fields(built *node, n *yaml.Node, depth int) {
	first := make(map[string]Position, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		name := n.Content[i]
		if name.Kind == yaml.AliasNode {
			name = name.Alias
		}
		at := b.position(n.Content[i])
		value := b.build(n.Content[i+1], depth+1)
		switch {
		case name.Kind != yaml.ScalarNode:
			b.add(at, "a name is a list or a mapping: write a text")
			continue
		case name.Tag == "!!merge":
			b.add(at, "<< is not read: write the fields out, or let an environment replace single ones")
			continue
		case name.Tag != "!!str":
			b.add(at, "the name %s could be read as something else than text: write it in quotes, %q", shorten(name.Value), shorten(name.Value))
			continue
		}
		if before, twice := first[name.Value]; twice {
			b.add(at, "%s is here a second time, after %d:%d: remove one of them", quote(name.Value), before.Line, before.Column)
			continue
		}
		first[name.Value] = at
		built.fields = append(built.fields, field{name: name.Value, at: at, value: value})
	}
}

var digits = regexp.MustCompile(`^-?(?:0|[1-9][0-9]*)$`)

// kinds are those of the tags of YAML.
var kinds = map[string]kind{
	"!!null": null, "!!str": text, "!!merge": text, "!!int": decimal, "!!float": decimal, "!!bool": boolean, "!!timestamp": instant,
}

// scalar returns the kind of a value by its tag. An integer must have the one form that every reader of YAML takes for the same
// number.
func (b *builder) scalar(n *yaml.Node) kind {
	kind, isKnown := kinds[n.Tag]
	switch {
	case n.Tag == "!!int" && digits.MatchString(n.Value):
		return integer
	case !isKnown:
		b.checkTag(n, "")
		return text
	}
	return kind
}

func (b *builder) checkTag(n *yaml.Node, want string) {
	if n.Tag != want {
		b.add(b.position(n), "the tag %s is not read: write the value without it", shorten(n.Tag))
	}
}
