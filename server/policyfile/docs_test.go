package policyfile_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Every block of YAML in the documentation, but for Envoy's own, is a policy file that a database takes, with each of its environments, and that
// the schema accepts.
func TestDocs_ExamplesAreApplied(t *testing.T) {
	t.Parallel()
	compiled := schema(t)
	block := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```")
	pages, err := filepath.Glob("../../docs/*.md")
	require.NoError(t, err)
	found := 0
	for _, page := range append(pages, "../../README.md") {
		if filepath.Base(page) == "envoy.md" {
			continue // package envoy reads it
		}
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, example := range block.FindAllStringSubmatch(string(text), -1) {
			found++
			value, ok := asJSON(t, example[1])
			require.True(t, ok, page)
			require.NoError(t, compiled.Validate(value), page)
			file, err := policyfile.Parse(page, []byte(example[1]))
			require.NoError(t, err)
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
