package policyfile_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func schema(t testing.TB) *jsonschema.Schema {
	return kit.NoError(jsonschema.NewCompiler().Compile("schema.json"))(t)
}

// asJSON is what an editor's validator sees of a file.
func asJSON(t testing.TB, file string) any {
	var document any
	require.NoError(t, yaml.Load([]byte(file), &document))
	text := kit.NoError(json.Marshal(document))(t)
	return kit.NoError(jsonschema.UnmarshalJSON(bytes.NewReader(text)))(t)
}

// The schema refuses the sections "schema" and no others. JSON cannot have what the sections "yaml" have.
func TestSchema_Mistakes(t *testing.T) {
	t.Parallel()
	compiled := schema(t)
	for _, m := range mistakes(t) {
		if !strings.HasPrefix(m.name, "yaml: ") {
			err := compiled.Validate(asJSON(t, m.file))
			require.Equal(t, strings.HasPrefix(m.name, "schema: "), err != nil, "%s: %v", m.name, err)
		}
	}
}

func TestSchema_ValidFiles(t *testing.T) {
	t.Parallel()
	compiled := schema(t)
	require.NoError(t, compiled.Validate(asJSON(t, valid)))
	rapid.Check(t, func(t *rapid.T) {
		text := jsonOf(t, someDocument(t, "staging", "production"))
		value := kit.NoError(jsonschema.UnmarshalJSON(strings.NewReader(text)))(t)
		require.NoError(t, compiled.Validate(value), text)
	})
}

// beyondSchema are the messages about what a schema cannot express: it calculates nothing, compares no values, knows no
// patterns of net/http, and takes 1.0 for an integer.
var beyondSchema = oneOf(
	`an empty bucket of .*`,                                // the time to fill
	`\w+ is "[0-9a-z]+": write 1[um]s to 365250d.*`,        // the length of a span
	`.* has 600 bytes: write 1 to 512`,                     // a schema counts characters, and of these there are 300
	`expires_at is "\d{4}-\d{2}-\d{2}T[0-9:]*Z": write .*`, // the calendar
	`period is "[0-9]+ \w+": write .*`,                     // its length
	`anchor is "?\d{4}-\d{2}-\d{2}[T0-9:.]*"?: write .*`,   // likewise
	`\w+ is (not )?for (a quota|slots), and policy .*`,     // the policy of an override
	`capacity is [0-9]+: write .* from 0 to 10000, .*`,     // likewise
	`policy .* lends slots, and has no tokens .*`,
	`the policy of this rule would be called .*`, // by its path
	`unknown policy .*`,
	`the pattern .* has no wildcard .*`,
	`.* conflicts with .*`,
	`.* is no pattern of net/http .*`,
	`domain .* is here a second time.*`,
	`key and value are .* together.*`,
	`rate_limit replaces itself.*`,
	`share_threshold is for .*`,
	`.* never matches: .*`,
	`\w+ is [0-9]+(\.0|e[0-9]+): write a whole number.*`,
)

// beyondSchemaInEnvironments are those about what the environment leaves out: the file may have it.
var beyondSchemaInEnvironments = oneOf(
	`policy .* has no .*: write .*`,
	`capacity is [0-9]+: write .* from 1 to 10000, .*`,
	`the charge to .* has no key: write key: ip`,
	`override .* says nothing.*`,
	`route .* charges nothing.*`,
)

func oneOf(patterns ...string) *regexp.Regexp {
	return regexp.MustCompile(`^(` + strings.Join(patterns, "|") + `)$`)
}

// checkAgreement fails unless the parser refuses what the schema refuses. What the parser refuses alone must be something
// that a schema cannot express. It tells what the schema says.
func checkAgreement(t require.TestingT, compiled *jsonschema.Schema, text string) (valid bool) {
	value := kit.NoError(jsonschema.UnmarshalJSON(strings.NewReader(text)))(t)
	invalid := compiled.Validate(value)
	_, err := policyfile.Parse("f", []byte(text))
	if invalid != nil {
		require.Error(t, err, "the schema refuses this: %v\n%s", invalid, text)
		return false
	}
	var problems policyfile.Problems
	errors.As(err, &problems)
	for _, problem := range problems {
		beyond := beyondSchema.MatchString(problem.Message)
		if root, ok := value.(map[string]any); ok && root["environments"] != nil {
			beyond = beyond || beyondSchemaInEnvironments.MatchString(problem.Message)
		}
		require.True(t, beyond, "only the parser refuses this: %v\n%s", problem, text)
	}
	return true
}

// Files with one change, in an environment or without environments.
func TestSchema_AgreesOnEverySingleChange(t *testing.T) {
	t.Parallel()
	compiled := schema(t)
	file := asJSON(t, valid).(map[string]any)
	said := map[bool]int{}
	check := func(changed any) { said[checkAgreement(t, compiled, jsonOf(t, changed))]++ }
	everyChange(file["environments"], func(changed any) {
		file["environments"] = changed
		check(file)
	})
	delete(file, "environments")
	everyChange(file, check)
	t.Logf("%d changed files are valid to the schema, %d are not", said[true], said[false])
	require.NotZero(t, said[true])
	require.NotZero(t, said[false])
}

// everyChange calls check with a value in which one thing at a time is replaced, left out, added or renamed.
func everyChange(value any, check func(changed any)) {
	for _, other := range someValues {
		check(other)
	}
	switch value := value.(type) {
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(value)) {
			inner := value[name]
			everyChange(inner, func(changed any) {
				value[name] = changed
				check(value)
			})
			delete(value, name)
			check(value)
			for _, other := range someNames {
				if _, taken := value[other]; !taken {
					value[other] = inner
					check(value)
					delete(value, other)
				}
			}
			value[name] = inner
		}
		for _, other := range someNames {
			if _, taken := value[other]; !taken {
				value[other] = map[string]any{}
				check(value)
				delete(value, other)
			}
		}
	case []any:
		for i, inner := range value {
			everyChange(inner, func(changed any) {
				value[i] = changed
				check(value)
			})
			value[i] = inner
		}
	}
}

// Files with several changes.
func TestSchema_AgreesWithTheParser(t *testing.T) {
	t.Parallel()
	compiled := schema(t)
	start := asJSON(t, valid)
	rapid.Check(t, func(t *rapid.T) {
		text := jsonOf(t, start)
		for range rapid.IntRange(1, 3).Draw(t, "mistakes") {
			value := kit.NoError(jsonschema.UnmarshalJSON(strings.NewReader(text)))(t)
			changes := 0
			everyChange(value, func(any) { changes++ })
			chosen := rapid.IntRange(1, changes).Draw(t, "change")
			everyChange(value, func(changed any) {
				if chosen--; chosen == 0 {
					text = jsonOf(t, changed)
				}
			})
		}
		checkAgreement(t, compiled, text)
	})
}

var beyondASCII = regexp.MustCompile(`[\x7f-\x{ffff}]`)

// jsonOf writes JSON that is YAML, too: what YAML does not take as it is, is escaped.
func jsonOf(t require.TestingT, value any) string {
	switch value := value.(type) {
	case map[string]any:
		var fields []string
		for _, name := range slices.Sorted(maps.Keys(value)) {
			fields = append(fields, jsonOf(t, name)+": "+jsonOf(t, value[name]))
		}
		return "{" + strings.Join(fields, ", ") + "}"
	case []any:
		var items []string
		for _, item := range value {
			items = append(items, jsonOf(t, item))
		}
		return "[" + strings.Join(items, ", ") + "]"
	case madeSpan:
		return jsonOf(t, value.text)
	}
	data := kit.NoError(json.Marshal(value))(t)
	return beyondASCII.ReplaceAllStringFunc(string(data), func(s string) string { return fmt.Sprintf(`\u%04x`, []rune(s)[0]) })
}

var someNames = []string{
	"capacity", "refill", "every", "remember", "shadow", "durable", "expires_at", "cost", "key", "value", "domain", "descriptors", "rate_limit",
	"unit", "requests_per_unit", "unlimited", "policy", "overdraw", "replaces", "name", "policies", "overrides", "http", "routes", "environments",
	"envoy", "period", "time_zone", "anchor", "lease", "calendar", "api", "llm", "GET /x", "GET", "", strings.Repeat("n", 513), strings.Repeat("é", 300), "a\x00b",
}

var someValues = []any{
	nil, true, false, "", "true", "api", "nobody", "1s", "0s", "400000d", "99999999999999999999d", "1 s", "10", "1 month", "0 days", "UTC", "CET", "posix/UTC", "a/b", "a\x00/b", "2024-02-30", "2024-02-29T09:00:00", "0000-01-01", "second", "Second", "SECOND", "fortnight",
	"ip", "user", "all", "ip:1", "header:X", "header:", "header:X Y", "path:id", "path:", "path:{", "2999-01-01T00:00:00Z", "2999-02-30T00:00:00Z",
	"2999-01-01T00:00:00.1234567Z", "2999-01-01", json.Number("0"), json.Number("-1"), json.Number("1"), json.Number("1.0"), json.Number("1.5"),
	json.Number("9000000000000"), json.Number("9000000000001"), json.Number("4294967296"), json.Number("1e3"), json.Number("1e99"),
	map[string]any{}, []any{}, []any{map[string]any{}}, map[string]any{"": map[string]any{}}, map[string]any{"capacity": json.Number("1")},
	map[string]any{"api": map[string]any{}}, map[string]any{"api": map[string]any{"key": "ip"}}, map[string]any{"policy": "api"},
	map[string]any{"unlimited": true}, map[string]any{"unlimited": false}, map[string]any{"unit": "day", "requests_per_unit": json.Number("1")},
	map[string]any{"unlimited": true, "overdraw": false}, map[string]any{"unlimited": true, "overdraw": true},
	map[string]any{"name": "x"}, "a\x00b", strings.Repeat("n", 513), strings.Repeat("é", 300),
}

// Every YAML block of the documentation, except for Envoy's, is valid for the schema, and can be applied with each environment.
func TestDocs_ExamplesAreApplied(t *testing.T) {
	t.Parallel()
	compiled := schema(t)
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
			require.NoError(t, compiled.Validate(asJSON(t, example[1])), page)
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
