package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
)

// recordFile has what calls cost when somebody last looked: instructions, transaction ids and WAL of a decision. A test compares.
const recordFile = "instructions.md"

// tolerance is how much dearer a call may get unnoticed. Between runs of one version the counts differ by half of it at most.
const tolerance = 0.02

// A record is the figures of one PostgreSQL.
type record struct {
	server string // its version()
	calls  []recorded
}

// recorded is a row. The reason is that of the last time when the figure rose.
type recorded struct {
	name string
	writing
	reason string
}

const recordHead = `# Instructions of a decision

What the processor executes for one decision, counted by valgrind in a server of one process, and the transaction ids and the bytes
of WAL, without full pages, that the decision writes. ` + "`make instructions`" + ` counts again, and fails if a call takes over 2 % more
than is recorded here, or more ids. ` + "`make instructions-renew REASON='…'`" + ` records what is counted: instructions fall by
themselves, and rise by more than that with a reason only. The statements are in [instructions.go](instructions.go); their server is

`

func (r record) String() string {
	var b strings.Builder
	b.WriteString(recordHead)
	fmt.Fprintf(&b, "    %s\n\n| call | instructions | transaction ids | WAL bytes | why it rose |\n|---|---:|---:|---:|---|\n", r.server)
	for _, c := range r.calls {
		fmt.Fprintf(&b, "| %s | %.0f | %.3g | %.0f | %s |\n", c.name, c.instructions, c.ids, c.wal, c.reason)
	}
	return b.String()
}

var recordLine = regexp.MustCompile(`(?m)^(?:    (.+)|\| ([a-z0-9-]+) \| (\d+) \| (\S+) \| (\d+) \| (.*) \|)$`)

func parseRecord(text string) (r record, err error) {
	for _, cells := range recordLine.FindAllStringSubmatch(text, -1) {
		if cells[1] != "" {
			r.server = cells[1]
			continue
		}
		r.calls = append(r.calls, recorded{cells[2], writing{number(cells[3]), number(cells[4]), number(cells[5])}, cells[6]})
	}
	if r.server == "" || len(r.calls) == 0 {
		return r, errors.New(recordFile + " names no server, or no call")
	}
	return r, nil
}

func (r record) find(name string) *recorded {
	if i := slices.IndexFunc(r.calls, func(c recorded) bool { return c.name == name }); i >= 0 {
		return &r.calls[i]
	}
	return nil
}

// dearer tells which counts, by name, are above the record by more than the tolerance, and which are not in it.
func (r record) dearer(counts map[string]writing) (complaints []string) {
	for _, counted := range countedStatements {
		count, ok := counts[counted.name]
		if !ok {
			continue
		}
		name, c := counted.name, r.find(counted.name)
		switch {
		case c == nil:
			complaints = append(complaints, fmt.Sprintf("%s takes %.0f instructions, and is not recorded", name, count.instructions))
		case count.instructions > c.instructions*(1+tolerance):
			complaints = append(complaints, fmt.Sprintf("%s takes %.0f instructions, %.1f %% more than the %.0f recorded",
				name, count.instructions, 100*(count.instructions/c.instructions-1), c.instructions))
		case count.ids > c.ids*(1+tolerance):
			complaints = append(complaints, fmt.Sprintf("%s takes %.3g transaction ids, more than the %.3g recorded", name, count.ids, c.ids))
		}
	}
	return complaints
}

// renewed is the record with new counts. Instructions that differ by less than the tolerance stay, so that none creeps up.
func (r record) renewed(server string, counts map[string]writing, reason string) (record, error) {
	next := record{server: server}
	for _, counted := range countedStatements {
		name := counted.name
		c, old := recorded{name, counts[name], ""}, r.find(name)
		c.instructions = math.Round(c.instructions)
		switch {
		case old == nil:
		case r.server != server || c.instructions > old.instructions*(1+tolerance):
			if reason == "" {
				return record{}, fmt.Errorf("%s would rise from %.0f to %.0f, or be of another server: say why", name, old.instructions, c.instructions)
			}
			c.reason = strings.ReplaceAll(reason, "|", "/")
		case c.instructions < old.instructions*(1-tolerance):
			c.reason = old.reason
		default:
			c.instructions, c.reason = old.instructions, old.reason
		}
		next.calls = append(next.calls, c)
	}
	return next, nil
}

func renewRecord(ctx context.Context, file, reason string) (err error) {
	var r record
	if text, err := os.ReadFile(file); err == nil {
		r = must(parseRecord(string(text)))
	}
	var i instructions
	defer func() { err = errors.Join(err, i.close(ctx)) }()
	i.prepare(ctx)
	counts := must(i.count(ctx))
	next := must(r.renewed(i.version, counts, reason))
	return os.WriteFile(file, []byte(next.String()), 0o644)
}
