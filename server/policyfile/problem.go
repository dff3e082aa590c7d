package policyfile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

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

// sorted returns the problems in the order of the file, each once: an environment has many values of the file.
func (p Problems) sorted() Problems {
	slices.SortFunc(p, func(a, b Problem) int { return cmp.Or(a.Compare(b.Position), cmp.Compare(a.Message, b.Message)) })
	return slices.Compact(p)
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

// and joins names: a, b and c.
func and(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " and " + names[last]
}
