package policyfile_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// A mistake is a file with one, or some of a kind, and all that is said about it.
type mistake struct{ name, file, want string }

func mistakes(t testing.TB) (all []mistake) {
	data := kit.NoError(os.ReadFile("testdata/mistakes.txt"))(t)
	for _, section := range strings.Split(string(data), "=== ")[1:] {
		name, text, _ := strings.Cut(section, "\n")
		want := strings.Index("\n"+text, "\nlimits.yaml:")
		all = append(all, mistake{name: name, file: text[:want], want: strings.TrimSpace(text[want:])})
	}
	return all
}

func TestParse_EveryMistakeHasItsPlaceAndRemedy(t *testing.T) {
	t.Parallel()
	policy := func(name string) string { return "policies: {" + name + ": {capacity: 1, refill: 1, every: 1s}}" }
	all := append(mistakes(t), []mistake{
		{"a tab", "policies:\n  \tapi: {}\n", "2:3: this is no YAML: a tab indents this line: write spaces in its place"},
		{"no space after a colon", "policies:\n  api:\n    capacity:5\n    refill: 1\n",
			"4:11: this is no YAML: mapping values are not allowed in this context: perhaps the line before has no space after the colon"},
		{"no UTF-8", "policies: \xff\n", "1:1: this is no YAML: invalid leading UTF-8 octet (value: 255)"},
		{"an empty name", policy(`""`), "1:12: this name has 0 bytes: write 1 to 512"},
		{"a name with \\0", policy(`"a\0b"`), `1:12: this name has the character \0, which PostgreSQL does not store: remove it`},
		{"a long name", policy(strings.Repeat("é", 257)), "1:12: this name has 514 bytes: write 1 to 512"},
		{"columns are characters", `policies: {"é": {capacity: 1, refill: 1, every: 1s}, ü: 1}`,
			"1:57: ü is 1: write capacity, refill and every, each on a line of its own"},
	}...)
	for _, m := range all {
		t.Run(m.name, func(t *testing.T) {
			parsed, err := policyfile.Parse("limits.yaml", []byte(m.file))
			require.Nil(t, parsed)
			require.ErrorAs(t, err, new(policyfile.Problems))
			require.Equal(t, strings.TrimPrefix(m.want, "limits.yaml:"), strings.TrimPrefix(err.Error(), "limits.yaml:"))
		})
	}
	parse(t, policy(strings.Repeat("n", 512)))
}

// A file that was made to exhaust memory or time is refused, with a remedy. Bounds are on work, not on time.
func TestParse_IsBounded(t *testing.T) {
	t.Parallel()
	var laughs strings.Builder
	laughs.WriteString("a: &a0 {k: 1}\n")
	for i := range 30 {
		fmt.Fprintf(&laughs, "b%d: &a%d [%s]\n", i, i+1, strings.Repeat(fmt.Sprintf("*a%d,", i), 9))
	}
	policies := numbered("policies:", "  p%d: {capacity: 1, refill: 1, every: 1s}", 2000)
	for name, test := range map[string]struct{ file, want string }{
		"a billion laughs":        {laughs.String(), "values by here, aliases followed"},
		"an alias in itself":      {"policies: &p {a: *p, b: *p}", "no alias inside of its own anchor"},
		"aliases, one in another": {"a: &a {b: &b {c: *a, d: *b, e: *a}}", "no alias inside of its own anchor"},
		"deep lists":              {strings.Repeat("[", 1<<20), "exceeded max depth of 64"},
		"deep blocks":             {strings.Repeat("- ", 1<<20), "exceeded max depth of 64"},
		"many environments":       {policies + numbered("environments:", "  e%d: {}", 20_000), "with its environments has more than 250000 values"},
		"many bytes":              {strings.Repeat(" ", 3<<20), "larger than 2097152 bytes"},
		"many mistakes":           {"policies: {a: [" + strings.Repeat("!t a,", 100_000) + "]}", "the tag !t is not read"},
		"many wrong values":       {numbered("policies:", "  p%d: {capacit: 1}", 20_000), "did you mean capacity"},
		"misspelled policies":     {policies + numbered("overrides:", "  q%d: {k: {capacity: 1}}", 20_000), "write it below policies"},
		"many anchors":            {strings.Repeat("&a ", 100_000), "no YAML"},
		"a long line":             {strings.Repeat("a", 2_000_000), "the file is"},
		"a long unknown field":    {strings.Repeat("a", 500) + ": 1", "…"},
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			_, err := policyfile.Parse("limits.yaml", []byte(test.file))
			require.ErrorContains(t, err, test.want)
			t.Log(time.Since(start).Round(time.Millisecond)) // without bounds it would be hours
		})
	}
}

// numbered is a beginning and lines with the numbers from 0.
func numbered(begin, line string, n int) string {
	file := strings.Builder{}
	file.WriteString(begin + "\n")
	for i := range n {
		fmt.Fprintf(&file, line+"\n", i)
	}
	return file.String()
}

const valid = `
policies:
  api: {capacity: 100, refill: 10, every: 1s}
  llm:
    capacity: 1000000
    refill: 0
    every: 30d
    stepped: true
    durable: false
    remember: 1w1h30m5s20ms7us
    shadow: true
  plan: {capacity: 10000, period: 12 months, time_zone: Europe/Berlin, anchor: 2024-01-31T00:00:00}
  days: {capacity: 50, period: 1 day, durable: false}
  jobs: {capacity: 5, lease: 5m, shadow: true}

overrides:
  llm:
    "user:42": {capacity: 0, expires_at: 2999-12-31T23:59:59.123456+01:00}
    "42": &seven {refill: 7, every: 1h}
    "43": [{refill: 9, expires_at: 2999-01-01T00:00:00Z}, {every: 3h}]
  plan:
    "user:42": {time_zone: America/New_York}
    "user:43": {capacity: 0, anchor: 2024-02-29T09:30:00.5}
  jobs: {"user:42": {capacity: 0, lease: 1h}}

envoy:
  - domain: edge
    descriptors:
      - key: tenant
        descriptors:
          - key: path
            value: 7
            rate_limit: {policy: api, overdraw: true}
      - key: remote_address
        shadow_mode: true
        rate_limit: {name: address, unit: MINUTE, requests_per_unit: 0, replaces: [{name: other}]}
      - {key: internal, value: "a*", share_threshold: true, rate_limit: {unlimited: true}, quota_mode: true, detailed_metric: true, value_to_metric: true}
      - {key: plan, rate_limit: {unit: Month, requests_per_unit: 100, calendar: true}}

environments:
  staging:
    policies:
      api: {capacity: 5}
      extra: {capacity: 1, refill: 1, every: 1m}
    overrides:
      llm:
        "42": {every: 2h}
      extra:
        new: *seven
`

const validRules = `api map[capacity:100 durable:true every:1s refill:10 remember:1d shadow:false stepped:false]
days map[anchor:2001-01-01 capacity:50 durable:false period:1 day remember:1d shadow:false time_zone:UTC]
jobs map[capacity:5 durable:true lease:5m shadow:true]
llm map[capacity:1000000 durable:false every:30d refill:0 remember:7d1h30m5s20ms7us shadow:true stepped:true]
override "42" of "llm": refill 7, every 1h
override "43" of "llm": refill 0, every 3h
override "43" of "llm": refill 9, every 3h, expires_at 2999-01-01T00:00:00Z
override "user:42" of "jobs": capacity 0, lease 1h
override "user:42" of "llm": capacity 0, expires_at 2999-12-31T22:59:59.123456Z
override "user:42" of "plan": time_zone America/New_York
override "user:43" of "plan": capacity 0, anchor 2024-02-29T09:30:00.5
plan map[anchor:2024-01-31 capacity:10000 durable:true period:1 year remember:1d shadow:false time_zone:Europe/Berlin]`

func TestParse_ReadsWhatIsWritten(t *testing.T) {
	t.Parallel()
	file := parse(t, valid)
	require.Equal(t, []string{"staging"}, file.Environments())
	base := kit.NoError(file.Rules(""))(t)

	require.Equal(t, validRules, textOf(base))
	at := func(line, column int) policyfile.Position {
		return policyfile.Position{File: "limits.yaml", Line: line, Column: column}
	}
	require.Equal(t, at(3, 3), base.Policies[0].At)
	require.Equal(t, at(18, 5), base.Overrides[0][0].At)
	require.Equal(t, []policyfile.EnvoyDomain{{Name: "edge", At: at(27, 13), Descriptors: []policyfile.EnvoyDescriptor{
		{Key: "tenant", At: at(29, 9), Descriptors: []policyfile.EnvoyDescriptor{
			{Key: "path", Value: "7", At: at(31, 13), Limit: &policyfile.EnvoyLimit{Policy: "api", Overdraw: true, At: at(33, 13)}},
		}},
		{Key: "remote_address", Watches: true, At: at(34, 9), Limit: &policyfile.EnvoyLimit{
			Name: "address", Unit: "minute", Replaces: []string{"other"}, At: at(36, 9),
		}},
		{
			Key: "internal", Value: "a*", ShareThreshold: true, Watches: true, Quota: true, At: at(37, 9),
			Limit: &policyfile.EnvoyLimit{Unlimited: true, At: at(37, 61)},
		},
		{Key: "plan", At: at(38, 9), Limit: &policyfile.EnvoyLimit{Unit: "month", RequestsPerUnit: 100, Calendar: true, At: at(38, 21)}},
	}}}, base.Envoy)
}

// An environment replaces single fields at any depth, and adds others. An alias is what its anchor names.
func TestParse_EnvironmentsReplaceFields(t *testing.T) {
	t.Parallel()
	file := parse(t, valid)
	base := kit.NoError(file.Rules(""))(t)
	staging := kit.NoError(file.Rules("staging"))(t)

	require.Equal(t, strings.NewReplacer("capacity:100 ", "capacity:5 ", "every 1h\n", "every 2h\n",
		"override \"user:42\" of \"jobs\"", "override \"new\" of \"extra\": refill 7, every 1h\noverride \"user:42\" of \"jobs\"",
		"jobs map", "extra map[capacity:1 durable:true every:1m refill:1 remember:1d shadow:false stepped:false]\njobs map").Replace(validRules), textOf(staging))
	require.Equal(t, base.Envoy, staging.Envoy)

	_, err := file.Rules("stagin")
	require.EqualError(t, err, `limits.yaml has no environment "stagin": it has staging`)
}

// A file of Envoy's reference needs no policies, and no quotes around numbers.
func TestParseEnvoy(t *testing.T) {
	t.Parallel()
	domains, err := policyfile.ParseEnvoy("rules.yaml", []byte(`
domain: 7
descriptors:
  - key: true
    value: 1.50
    quota_mode: true
    detailed_metric: true
    value_to_metric: true
    rate_limit: {policy: elsewhere}
  - {key: True, value: 0x10}
`))
	require.NoError(t, err)
	require.Len(t, domains, 1)
	require.Equal(t, "7", domains[0].Name)
	descriptors := domains[0].Descriptors
	require.Equal(t, "true=1.50", descriptors[0].Key+"="+descriptors[0].Value)
	require.Equal(t, "elsewhere", descriptors[0].Limit.Policy)
	require.Equal(t, "True=0x10", descriptors[1].Key+"="+descriptors[1].Value)

	_, err = policyfile.ParseEnvoy("rules.yaml", []byte("domain: a\ndescriptors:\n  - {key: a, rate_limit: {unit: eon}}\npolicies: {}\n"))
	require.EqualError(t, err, `rules.yaml:3:14: rate_limit has no requests_per_unit: write requests_per_unit: 10
rules.yaml:3:33: unit is "eon": write second, minute, hour, day, week, month or year
rules.yaml:4:1: unknown field "policies": the fields here are domain and descriptors`)
}

// Whatever a file has in it, parsing ends soon, with rules, also of Envoy alone, or with problems that have their places in it.
func FuzzParse(f *testing.F) {
	for _, m := range mistakes(f) {
		f.Add([]byte(m.file))
	}
	f.Add([]byte(valid))
	f.Add([]byte("a: &a [&b [*a, *b], *a]"))
	f.Add([]byte("domain: edge\ndescriptors:\n  - key: a\n    value: b\n    rate_limit: {unit: second, requests_per_unit: 5}\n"))
	f.Add([]byte("domain: edge\ndescriptors: [{key: a, descriptors: [{key: b*, share_threshold: true, rate_limit: {policy: p, replaces: [{name: c}]}}]}]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		tooLong := time.AfterFunc(30*time.Second, func() { panic(fmt.Sprintf("%d bytes take too long", len(data))) })
		domains, err := policyfile.ParseEnvoy("f", data)
		checkProblems(t, data, err)
		for _, domain := range domains {
			require.NotEmpty(t, domain.Name)
		}
		file, err := policyfile.Parse("f", data)
		tooLong.Stop()
		checkProblems(t, data, err)
		if err == nil {
			for _, environment := range append(file.Environments(), "") {
				require.NotNil(t, kit.NoError(file.Rules(environment))(t))
			}
		}
	})
}

func checkProblems(t *testing.T, data []byte, err error) {
	var problems policyfile.Problems
	if err != nil && (!errors.As(err, &problems) || len(problems) == 0) {
		t.Fatalf("an error of another kind: %v", err)
	}
	for i, p := range problems {
		if p.File != "f" || p.Line < 1 || p.Column < 1 || p.Message == "" || p.Line > len(data)+1 || p.Column > len(data)+1 {
			t.Errorf("a problem that is nowhere: %v", p)
		}
		if i > 0 && p.Compare(problems[i-1].Position) < 0 {
			t.Errorf("not in the order of the file: %v", p)
		}
	}
}

// Every YAML block of the documentation, except for Envoy's, can be applied with each environment.
func TestDocs_ExamplesAreApplied(t *testing.T) {
	t.Parallel()
	block := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```")
	pages := kit.NoError(filepath.Glob("../../docs/*.md"))(t)
	found := 0
	for _, page := range append(pages, "../../README.md") {
		if filepath.Base(page) == "envoy.md" {
			continue // package envoy reads it
		}
		text := kit.NoError(os.ReadFile(page))(t)
		for _, example := range block.FindAllStringSubmatch(string(text), -1) {
			found++
			file := kit.NoError(policyfile.Parse(page, []byte(example[1])))(t)
			for _, environment := range append(file.Environments(), "") {
				db := pgtest.New(t)
				options := policyfile.Options{Environment: environment}
				require.False(t, apply(t, db.Pool, example[1], options).Empty())
				require.True(t, apply(t, db.Pool, example[1], options).Empty())
			}
		}
	}
	require.NotZero(t, found)
}
