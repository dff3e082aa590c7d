// Digest reads the output of go test -json. It prints a line for each package and the output of each
// test that failed, and ends with what was skipped and why, the servers that were used, and the counts:
//
//	go test -json work | go run ./tests/digest build/servers.log
//
// It exits with 1 when something failed.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// An event is a line of go test -json, as go doc test2json describes it.
type event struct {
	Action     string
	Package    string
	ImportPath string // instead of Package when it is about building
	Test       string
	Output     string
	Elapsed    float64
}

type test struct{ pkg, name string }

type digest struct {
	out     io.Writer
	output  map[test][]string // of what is under way
	done    map[test]string   // the action that ended it, or unfinished
	reasons map[test]string   // of skips
	parents map[test]bool
	broken  []string // packages that failed without a test's doing
}

func main() {
	var servers string
	if len(os.Args) > 1 {
		servers = os.Args[1]
	}
	failed, err := run(os.Stdin, os.Stdout, servers)
	if err != nil {
		fmt.Fprintln(os.Stderr, "digest:", err)
	}
	if err != nil || failed > 0 {
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, servers string) (failed int, err error) {
	d := digest{out, map[test][]string{}, map[test]string{}, map[test]string{}, map[test]bool{}, nil}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			fmt.Fprintln(out, lines.Text()) // go's own words
			continue
		}
		d.add(e)
	}
	d.printServers(servers)
	return d.print(), lines.Err()
}

func (d *digest) add(e event) {
	t := test{cmp.Or(e.Package, e.ImportPath), e.Test}
	switch e.Action {
	case "output", "build-output":
		d.output[t] = append(d.output[t], e.Output)
	case "run":
		d.done[t] = "unfinished"
		for i, r := range t.name {
			if r == '/' {
				d.parents[test{t.pkg, t.name[:i]}] = true
			}
		}
	case "pass", "fail", "skip":
		if t.name == "" {
			d.finish(e, t)
		} else {
			d.done[t] = e.Action
		}
		switch {
		case e.Action == "fail":
			fmt.Fprint(d.out, strings.Join(d.output[t], ""))
		case e.Action == "skip" && t.name != "":
			d.reasons[t] = reason(d.output[t])
		}
		delete(d.output, t)
	case "build-fail":
		fmt.Fprint(d.out, strings.Join(d.output[t], ""))
	}
}

// finish notes that a package is done. Skipped means that it has no tests.
func (d *digest) finish(e event, t test) {
	if e.Action == "skip" {
		return
	}
	if e.Action == "fail" {
		if !d.failedBelow(t.pkg, "") {
			d.broken = append(d.broken, "failed "+t.pkg)
		}
		d.printRest(t.pkg)
	}
	fmt.Fprintf(d.out, "%s %s %v\n", e.Action, t.pkg, time.Duration(e.Elapsed*float64(time.Second)).Round(time.Millisecond))
}

// printRest prints what tests said after their end or without one: a panic or a timeout shows up in any.
func (d *digest) printRest(pkg string) {
	for t, output := range d.output {
		if t.pkg == pkg && t.name != "" {
			fmt.Fprint(d.out, strings.Join(output, ""))
			delete(d.output, t)
		}
	}
}

// reason is what t.Skip was told.
func reason(output []string) string {
	for _, line := range output {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "===") && !strings.HasPrefix(line, "---") {
			return line
		}
	}
	return "no reason given"
}

// print counts leaves, so that a test is not counted again with its subtests, and returns how many failed.
func (d *digest) print() (failed int) {
	var passed int
	var skipped []string
	broken := d.broken
	for t, action := range d.done {
		switch {
		case d.parents[t] && (action != "fail" || d.failedBelow(t.pkg, t.name+"/")):
		case action == "pass":
			passed++
		case action == "fail":
			broken = append(broken, fmt.Sprintf("failed %s (%s)", t.name, t.pkg))
		case action == "unfinished":
			broken = append(broken, fmt.Sprintf("failed %s (%s): it did not finish", t.name, t.pkg))
		case action == "skip":
			skipped = append(skipped, fmt.Sprintf("skipped %s: %s", t.name, d.reasons[t]))
		}
	}
	for _, line := range slices.Concat(slices.Sorted(slices.Values(skipped)), slices.Sorted(slices.Values(broken))) {
		fmt.Fprintln(d.out, line)
	}
	failed = len(broken)
	fmt.Fprintf(d.out, "%d passed, %d failed, %d skipped\n", passed, failed, len(skipped))
	return failed
}

func (d *digest) failedBelow(pkg, prefix string) bool {
	for t, action := range d.done {
		if action == "fail" && t.pkg == pkg && strings.HasPrefix(t.name, prefix) {
			return true
		}
	}
	return false
}

// printServers prints each server of RATELIMIT_TEST_LOG once, with the test processes that used it.
func (d *digest) printServers(log string) {
	data, err := os.ReadFile(log)
	if err != nil {
		return // no test wanted one
	}
	users := map[string][]string{}
	for line := range strings.Lines(string(data)) {
		if user, server, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			users[server] = append(users[server], user)
		}
	}
	for _, server := range slices.Sorted(maps.Keys(users)) {
		fmt.Fprintf(d.out, "server %s (%s)\n", server, strings.Join(slices.Compact(slices.Sorted(slices.Values(users[server]))), ", "))
	}
}
