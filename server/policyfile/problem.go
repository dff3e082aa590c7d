package policyfile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/server/internal/nearest"
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

// maxProblems is the largest number of problems in an error.
const maxProblems = 1000

// A collector gathers problems, each once. Parts outside of environments are read again for each environment.
type collector struct {
	problems Problems
	seen     map[Problem]bool
	reported int // also those that were seen before
	guesses  int // of what was meant
}

func (c *collector) add(at Position, format string, args ...any) {
	c.reported++
	problem := Problem{Position: at, Message: fmt.Sprintf(format, args...)}
	if c.seen[problem] || len(c.seen) > maxProblems {
		return
	}
	if c.seen == nil {
		c.seen = make(map[Problem]bool)
	}
	c.seen[problem] = true
	c.problems = append(c.problems, problem)
}

// nearest returns the name that a misspelled one probably stands for, or nothing. After many guesses it stops.
func (c *collector) nearest(wrong string, names []string) string {
	if c.guesses++; c.guesses > maxProblems {
		return ""
	}
	return nearest.Of(wrong, names)
}

// flawless reports whether read adds no problem.
func (c *collector) flawless(read func()) bool {
	before := c.reported
	read()
	return c.reported == before
}

// err returns the problems in the order of the file, or nil.
func (c *collector) err() error {
	if len(c.problems) == 0 {
		return nil
	}
	slices.SortStableFunc(c.problems, func(a, b Problem) int { return a.Compare(b.Position) })
	if len(c.problems) > maxProblems {
		last := c.problems[maxProblems]
		last.Message = fmt.Sprintf("there are more than %d mistakes, and the rest is not listed: correct these first", maxProblems)
		c.problems = append(c.problems[:maxProblems], last)
	}
	return c.problems
}
