package policyfile_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

// A mistake is a file with one, or some of a kind, and all that is said about it.
type mistake struct {
	name, file, want string

	// bySchema tells that the JSON Schema refuses the file, too. For the others testdata says why it cannot.
	bySchema bool
}

// mistakes reads testdata/mistakes.txt.
func mistakes(t testing.TB) (all []mistake) {
	t.Helper()
	data, err := os.ReadFile("testdata/mistakes.txt")
	require.NoError(t, err)
	for _, section := range strings.Split(string(data), "=== ")[1:] {
		name, rest, _ := strings.Cut(section, "\n")
		file, rest, ok := strings.Cut(rest, ">>> ")
		require.True(t, ok, name)
		who, want, _ := strings.Cut(rest, "\n")
		m := mistake{name: name, file: file, want: strings.TrimSuffix(want, "\n"), bySchema: who == "schema"}
		require.True(t, m.bySchema || strings.HasPrefix(who, "no schema: "), name)
		all = append(all, m)
	}
	return all
}

func TestParse_EveryMistakeHasItsPlaceAndRemedy(t *testing.T) {
	t.Parallel()
	all := mistakes(t)
	require.GreaterOrEqual(t, len(all), 20)
	for _, m := range all {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			requireProblems(t, m.file, m.want)
		})
	}
}

func TestParse_MistakesThatAreHardToRead(t *testing.T) {
	t.Parallel()
	policy := func(name string) string {
		return "policies:\n  " + name + ": {capacity: 1, refill: 1, every: 1s}\n"
	}
	for name, m := range map[string]mistake{
		"a tab for indentation": {
			file: "policies:\n\tapi: {}\n",
			want: "limits.yaml:2:1: this is no YAML: found character that cannot start any token while scanning for the next token",
		},
		"bytes that are no text": {
			file: "policies: \xff\n",
			want: "limits.yaml:1:1: this is no YAML: invalid leading UTF-8 octet (value: 255)",
		},
		"a name without characters": {
			file: policy(`""`),
			want: "limits.yaml:2:3: the name of a policy is empty: write 1 to 512 bytes",
		},
		"a name that PostgreSQL does not store": {
			file: policy(`"a\0b"`),
			want: `limits.yaml:2:3: the name of a policy has a character that PostgreSQL does not store, such as \0: remove it`,
		},
		"a long name, in bytes": {
			file: policy(strings.Repeat("é", 257)),
			want: "limits.yaml:2:3: the name of a policy has 514 bytes: write 1 to 512",
		},
		"columns are characters": {
			file: `policies: {"é": {capacity: 1, refill: 1, every: 1s}, ü: 1}`,
			want: "limits.yaml:1:57: ü is 1: write its fields, each on a line of its own: capacity, refill, every, stepped, durable, remember and shadow",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requireProblems(t, m.file, m.want)
		})
	}
	_, err := policyfile.Parse("limits.yaml", []byte(policy(strings.Repeat("n", 512))))
	require.NoError(t, err)
}

func requireProblems(t *testing.T, file, want string) {
	t.Helper()
	parsed, err := policyfile.Parse("limits.yaml", []byte(file))
	require.Nil(t, parsed)
	var problems policyfile.Problems
	require.ErrorAs(t, err, &problems)
	require.Equal(t, want, problems.Error())
}

// What is made to hurt is refused in a moment, and with a message that says what to do. Bounds are on work, not on time: a
// busy machine takes longer.
func TestParse_IsBounded(t *testing.T) {
	t.Parallel()
	var laughs strings.Builder
	laughs.WriteString("a: &a0 {k: 1}\n")
	for i := range 30 {
		fmt.Fprintf(&laughs, "b%d: &a%d [*a%d, *a%d, *a%d, *a%d, *a%d, *a%d, *a%d, *a%d, *a%d]\n", i, i+1, i, i, i, i, i, i, i, i, i)
	}
	var policies strings.Builder
	policies.WriteString("policies:\n")
	for i := range 2000 {
		fmt.Fprintf(&policies, "  p%d: {capacity: 1, refill: 1, every: 1s}\n", i)
	}
	for name, test := range map[string]struct{ file, want string }{
		"a billion laughs":        {laughs.String(), "values by here, aliases followed"},
		"an alias in itself":      {"policies: &p {a: *p, b: *p}", "no alias inside of its own anchor"},
		"aliases, one in another": {"a: &a {b: &b {c: *a, d: *b, e: *a}}", "no alias inside of its own anchor"},
		"deep lists":              {strings.Repeat("[", 1<<20), "more than 64 deep"},
		"deep blocks":             {strings.Repeat("- ", 1<<20), "more than 64 deep"},
		"many environments":       {policies.String() + environments(20_000), "with its environments has more than 250000 values"},
		"many bytes":              {strings.Repeat(" ", 3<<20), "larger than 2097152 bytes"},
		"many mistakes":           {"policies: [" + strings.Repeat("!t a,", 300_000) + "]", "more than 1000 mistakes"},
		"many routes":             {manyRoutes(20_000, "/a%d/{x}"), "more than 1000 routes"},
		"routes that conflict":    {manyRoutes(1000, "/{x%d}/{y}") + environments(20), "conflicts with"},
		"misspelled policies":     {manyRoutes(900, "/a%d/{x}: {apii: {key: ip}}\n    /b%[1]d/{x}") + environments(20), "did you mean"},
		"many anchors":            {strings.Repeat("&a ", 100_000), "no YAML"},
		"a long line":             {strings.Repeat("a", 2_000_000), "the file is"},
		"a long unknown field":    {strings.Repeat("a", 1000) + ": 1", "…"},
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			_, err := policyfile.Parse("limits.yaml", []byte(test.file))
			require.ErrorContains(t, err, test.want)
			t.Log(time.Since(start).Round(time.Millisecond)) // without bounds it would be hours
		})
	}
}

func environments(n int) string {
	var file strings.Builder
	file.WriteString("environments:\n")
	for i := range n {
		fmt.Fprintf(&file, "  e%d: {}\n", i)
	}
	return file.String()
}

func manyRoutes(n int, pattern string) string {
	var file strings.Builder
	file.WriteString("policies: {api: {capacity: 1, refill: 1, every: 1s}}\nhttp:\n  routes:\n")
	for i := range n {
		fmt.Fprintf(&file, "    "+pattern+": {api: {key: ip}}\n", i)
	}
	return file.String()
}
