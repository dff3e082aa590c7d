package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// markdown is the report as a page.
func (r *report) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Benchmark of %s\n\n", r.When.Format("2 January 2006"))
	fmt.Fprintf(&b, "`make bench` wrote this page. Medians of %d rounds with their range; in a round each opponent runs for %s.\n\n",
		r.Rounds, r.Window)
	b.WriteString("| | |\n|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(r.Machine)) {
		fmt.Fprintf(&b, "| %s | %s |\n", name, r.Machine[name])
	}
	for _, keys := range keyNames {
		r.table(&b, keyTitles[keys], byTitle(contenders), callerCounts, func(opponent string, callers int) string {
			return cellName(opponent, keys, callers)
		})
	}
	r.table(&b, jointTitle, byTitle(jointContenders), callerCounts, func(opponent string, callers int) string {
		return cellName(opponent, "uniform", callers)
	})
	r.table(&b, "100,000 keys, all alike, and an idempotency key for each request", byTitle(keyedContenders), keyedCallers, func(opponent string, callers int) string {
		return cellName(opponent, "uniform", callers)
	})
	for _, keys := range npmKeys {
		r.table(&b, "From Node.js: "+strings.ToLower(keyTitles[keys]), npmContenders, npmCallers, func(opponent string, callers int) string {
			return cellName(opponent, keys, callers)
		})
	}
	r.table(&b, "100,000 keys, all alike: calls in flight of a combining client, and latency added to each", callsContenders(), callsCallers,
		func(name string, callers int) string { return fmt.Sprintf("%s/%d", name, callers) })
	r.rest(&b)
	r.settings(&b)
	return b.String()
}

var keyTitles = map[string]string{
	"uniform": "100,000 keys, all alike",
	"zipf":    "100,000 keys, zipfian: one gets 13 % of the requests",
	"hot":     "One hot key",
}

const jointTitle = "Three limits in a request: of the user (100,000, all alike), of the organisation (1,000, zipfian), of everybody"

// table shows a contender in each row and a number of callers in each column.
func (r *report) table(b *strings.Builder, title string, contenders []contender, callerCounts []int, cellName func(contender string, callers int) string) {
	var rows strings.Builder
	for _, contender := range contenders {
		var cells []string
		measured := false
		for _, callers := range callerCounts {
			cell := r.cellText(cellName(contender.name, callers))
			measured = measured || cell != ""
			cells = append(cells, cell)
		}
		if measured {
			fmt.Fprintf(&rows, "| %s | %s |\n", contender.title, strings.Join(cells, " | "))
		}
	}
	if rows.Len() == 0 {
		return
	}
	fmt.Fprintf(b, "\n## %s\n\nDecisions per second; p50 / p95 / p99 in milliseconds; CPU microseconds per decision, server + client.\n\n",
		title)
	b.WriteString("| callers |")
	for _, callers := range callerCounts {
		fmt.Fprintf(b, " %d |", callers)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(callerCounts)) + "\n" + rows.String())
}

func (r *report) cellText(cell string) string {
	value := func(name string) float64 {
		if m := r.find(cell + "/" + name); m != nil {
			return m.Value
		}
		return 0
	}
	switch {
	case value(rate) == 0:
		return ""
	case value(p50) == 0: // a run of some measures only
		return "**" + thousands(value(rate)) + "**"
	}
	return fmt.Sprintf("**%s**<br>%s / %s / %s<br>%s + %s", thousands(value(rate)), figure(value(p50)/1000), figure(value(p95)/1000),
		figure(value(p99)/1000), figure(value(cpuServer)), figure(value(cpuClient)))
}

// rest lists what is in no other table, the ratios first.
func (r *report) rest(b *strings.Builder) {
	b.WriteString("\n## Ratios and other measures\n\n| measure | value | range | unit |\n|---|---|---|---|\n")
	tables := slices.Concat((&grid{}).cells(), (&calls{}).cells(), (&npm{}).cells())
	for _, m := range r.Measures {
		inTable := slices.ContainsFunc(tables, func(cell string) bool { return strings.HasPrefix(m.Name, cell+"/") })
		if !inTable {
			fmt.Fprintf(b, "| %s | %s | %s to %s | %s |\n", m.Name, figure(m.Value), figure(m.Min), figure(m.Max), m.Unit)
		}
	}
}

func (r *report) settings(b *strings.Builder) {
	b.WriteString("\n## Settings that are not PostgreSQL's defaults\n\n")
	for _, name := range slices.Sorted(maps.Keys(r.Settings)) {
		fmt.Fprintf(b, "- `%s = %s`\n", name, r.Settings[name])
	}
}

func thousands(value float64) string {
	text := fmt.Sprintf("%.0f", value)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
