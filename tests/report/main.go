// Command report reads what go test -json prints and shows what a person wants of it: a line for each package as it ends,
// and at the end each test that failed, with its output and the command that runs it alone.
//
//	go test -json ./... | go run ./tests/report
//
// A panic ends all tests of its package. Report names the test that panicked, and only counts those that had not ended.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
)

const module = "github.com/pgratelimit/pgratelimit"

func main() {
	r := report{out: os.Stdout}
	if err := r.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(2)
	}
	if !r.end() {
		os.Exit(1)
	}
}

// An event is a line of go test -json: see go doc cmd/test2json.
type event struct {
	Action, Package, ImportPath, Test, Output string
	Elapsed                                   float64
}

// A result is a test, or a package as a whole, whose name is empty.
type result struct {
	pkg, name string
	action    string // the last of run, pause, cont, pass, fail and skip
	output    strings.Builder
}

type report struct {
	out     io.Writer
	results []*result
	byName  map[[2]string]*result
	broken  bool // a package does not compile
}

func (r *report) read(in io.Reader) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.Action == "" {
			fmt.Fprintln(r.out, lines.Text())
			continue
		}
		r.add(e)
	}
	return lines.Err()
}

func (r *report) add(e event) {
	switch e.Action {
	case "build-output":
		fmt.Fprint(r.out, e.Output)
		return
	case "build-fail":
		r.broken = true
		return
	}
	name := [2]string{e.Package, e.Test}
	t := r.byName[name]
	if t == nil {
		t = &result{pkg: e.Package, name: e.Test}
		if r.byName == nil {
			r.byName = map[[2]string]*result{}
		}
		r.byName[name], r.results = t, append(r.results, t)
	}
	if e.Action == "output" {
		t.output.WriteString(e.Output)
		return
	}
	t.action = e.Action
	if e.Test != "" || !t.ended() {
		return
	}
	passed, failed, skipped, _ := count(r.of(e.Package))
	if passed+failed+skipped > 0 || e.Action == "fail" {
		fmt.Fprintf(r.out, "%-4s  %s  %d passed, %d failed, %d skipped, %.1fs\n", e.Action, folder(e.Package), passed, failed, skipped, e.Elapsed)
	}
}

func (t *result) ended() bool { return slices.Contains([]string{"pass", "fail", "skip"}, t.action) }

// of returns the results of a package.
func (r *report) of(pkg string) (results []*result) {
	for _, t := range r.results {
		if t.pkg == pkg {
			results = append(results, t)
		}
	}
	return results
}

// count counts tests and subtests, but no packages.
func count(results []*result) (passed, failed, skipped, ended int) {
	for _, t := range results {
		switch {
		case t.name == "":
		case t.action == "pass":
			passed++
		case t.action == "skip":
			skipped++
		case t.action == "fail", t.running():
			failed++
		default:
			ended++ // with its package
		}
	}
	return passed, failed, skipped, ended
}

// running is true for a test that ran when its package ended, and said why.
func (t *result) running() bool { return !t.ended() && strings.Contains(t.output.String(), "panic: ") }

// end prints what was skipped and what failed, and reports whether nothing did.
func (r *report) end() bool {
	ok, causes := !r.broken, 0
	for _, t := range r.results {
		if t.action == "skip" && t.name != "" {
			fmt.Fprintf(r.out, "\n=== SKIP %s %s\n%s", folder(t.pkg), t.name, indented(t))
		}
	}
	for _, t := range r.results {
		failed := t.action == "fail" || t.running()
		ok = ok && !failed
		if !failed || !r.isCause(t) {
			continue
		}
		causes++
		fmt.Fprintf(r.out, "\n=== FAIL %s %s\n%s", folder(t.pkg), t.name, indented(t))
		if t.name == "" {
			for _, other := range r.of(t.pkg) {
				if other.action == "run" || other.action == "cont" {
					fmt.Fprintf(r.out, "  was running: %s\n", other.name)
				}
			}
		}
		fmt.Fprintf(r.out, "  alone: %s\n", alone(t))
	}
	passed, _, skipped, ended := count(r.results)
	if ended > 0 {
		fmt.Fprintf(r.out, "\n%d more tests had not ended when their package did.\n", ended)
	}
	fmt.Fprintf(r.out, "\n%d passed, %d failed, %d skipped\n", passed, causes, skipped)
	return ok && passed > 0
}

// isCause is false for a test that failed because a subtest did, and for a package that failed because a test did.
func (r *report) isCause(t *result) bool {
	return !slices.ContainsFunc(r.of(t.pkg), func(other *result) bool {
		below := t.name == "" || strings.HasPrefix(other.name, t.name+"/")
		return other != t && below && (other.action == "fail" || other.running())
	})
}

var (
	noise   = regexp.MustCompile(`^\s*=== (RUN|PAUSE|CONT|NAME) `)
	shuffle = regexp.MustCompile(`(?m)^-test\.shuffle (\d+)`)
	seed    = regexp.MustCompile(`RATELIMIT_TEST_SEED=\d+`)
)

func indented(t *result) string {
	var text strings.Builder
	for line := range strings.Lines(t.output.String()) {
		if !noise.MatchString(line) {
			text.WriteString("  " + line)
		}
	}
	return text.String()
}

// alone is the command that runs a test alone, with its seed, or a package in the same order.
func alone(t *result) string {
	command := "go test ./" + folder(t.pkg) + " -count=1"
	if t.name != "" {
		parts := strings.Split(t.name, "/")
		for i, part := range parts {
			parts[i] = "^" + regexp.QuoteMeta(part) + "$"
		}
		command += " -run '" + strings.Join(parts, "/") + "'"
	} else if match := shuffle.FindStringSubmatch(t.output.String()); match != nil {
		command += " -shuffle=" + match[1]
	}
	if match := seed.FindString(t.output.String()); match != "" {
		command = match + " " + command
	}
	return command
}

func folder(pkg string) string {
	if pkg == module {
		return "."
	}
	return path.Clean(strings.TrimPrefix(pkg, module+"/"))
}
