package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// applied runs apply with a file, or with standard input where its argument is "-".
func applied(t *testing.T, url, text string, args ...string) ran {
	path := filepath.Join(t.TempDir(), "limits.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	if len(args) == 0 || args[0] != "-" {
		args = append([]string{path}, args...)
	}
	var out, errors bytes.Buffer
	code := run(t.Context(), append([]string{"apply", "--database-url", url}, args...), strings.NewReader(text), &out, &errors)
	return ran{code, strings.ReplaceAll(out.String(), path, "limits.yaml"), strings.ReplaceAll(errors.String(), path, "limits.yaml")}
}

const onePolicy = "policies: {api: {capacity: 1, refill: 1, every: 1s}}\n"

func TestApply_ShowsAndChanges(t *testing.T) {
	db := kit.ParallelDB(t).DB
	const file = onePolicy + "environments: {staging: {policies: {api: {capacity: 5}}}}"
	const created = `+ policy "api": capacity 5, refill 1, every 1s, stepped false, durable true, remember 1d, shadow false` + "\n"
	require.Equal(t, ran{code: exitNo, out: created + "1 change, not made: this is a dry run.\n"}, applied(t, db.URL, file, "--env", "staging", "--dry-run"))
	require.Equal(t, "There is no policy yet.\n", on(t, db, "policies").out)
	require.Equal(t, ran{out: created + "1 change made.\n"}, applied(t, db.URL, file, "--env", "staging"))
	require.Contains(t, on(t, db, "policies").out, "\napi     5         1       1s ")
	for _, args := range [][]string{{"--env", "staging"}, {"--env", "staging", "--dry-run"}, {"-", "--env", "staging", "--prune"}} {
		require.Equal(t, ran{out: "The database is as the file says.\n"}, applied(t, db.URL, file, args...))
	}
}

// An override that the file does not have is a difference: the database is never called as the file says.
func TestApply_OverridesThatTheFileDoesNotHave(t *testing.T) {
	db := kit.ParallelDB(t).DB
	applied(t, db.URL, onePolicy)
	db.Exec(t, "select count(ratelimit_override('api', 'k' || n, capacity => 2)) from generate_series(10, 34) as n")
	for args, code := range map[string]int{"--dry-run": exitNo, "--prune": exitDone} {
		r := applied(t, db.URL, onePolicy, args)
		require.True(t, strings.HasPrefix(r.out, "  override \"k10\" of \"api\" is not in the file, and stays\n"), r.out)
		require.True(t, strings.HasSuffix(r.out, "  … and 5 more\nThe database has 25 overrides that the file does not have: --prune=overrides removes them.\n"), r.out)
		require.Equal(t, code, r.code)
	}
	var told struct{ Drift []policyfile.DriftingOverride }
	require.NoError(t, json.Unmarshal([]byte(applied(t, db.URL, onePolicy, "--json").out), &told))
	require.Len(t, told.Drift, 25, "programs are told of all")
	r := applied(t, db.URL, onePolicy, "--prune=overrides", "--dry-run")
	require.Equal(t, exitNo, r.code)
	require.Contains(t, r.out, "25 changes, not made")
	require.Contains(t, applied(t, db.URL, onePolicy, "--prune=policies,overrides").out, "\n25 changes made.\n")
	require.Equal(t, ran{out: "The database is as the file says.\n"}, applied(t, db.URL, onePolicy, "--dry-run"))
}

func TestApply_JSON(t *testing.T) {
	db := kit.ParallelDB(t).DB
	const file = "policies: {<api>: {capacity: 1, refill: 1, every: 1s}}\noverrides: {<api>: {k: {capacity: 0}}}\n"
	r := applied(t, db.URL, file, "--dry-run", "--json")
	require.Equal(t, exitNo, r.code)
	require.JSONEq(t, `{"applied": false, "changes": [
		{"action": "create", "policy": "<api>", "fields": [
			{"field": "capacity", "old": null, "new": 1}, {"field": "refill", "old": null, "new": 1},
			{"field": "every", "old": null, "new": "1s"}, {"field": "stepped", "old": null, "new": false},
			{"field": "durable", "old": null, "new": true}, {"field": "remember", "old": null, "new": "1d"},
			{"field": "shadow", "old": null, "new": false}]},
		{"action": "create", "policy": "<api>", "key": "k", "fields": [
			{"field": "capacity", "old": null, "new": 0}, {"field": "refill", "old": null, "new": 1},
			{"field": "every", "old": null, "new": "1s"}, {"field": "expires_at", "old": null, "new": null}]}]}`, r.out)
	require.Equal(t, exitDone, applied(t, db.URL, file, "--json").code)
	require.JSONEq(t, `{"applied": true, "changes": []}`, applied(t, db.URL, file, "--json").out)
	r = applied(t, db.URL, onePolicy, "--prune", "--json")
	require.Equal(t, exitDone, r.code)
	var pruned policyfile.Difference
	require.NoError(t, json.Unmarshal([]byte(r.out), &pruned))
	require.Equal(t, policyfile.Drop, pruned.Changes[1].Action)
	require.Equal(t, &policyfile.Lost{Overrides: 1}, pruned.Changes[1].Lost)
}

// The mistakes are found before apply connects.
func TestApply_Errors(t *testing.T) {
	t.Parallel()
	const nowhere, limits = "postgres://127.0.0.1:1/none", `unknown field "limits": the fields here are policies, overrides, envoy and environments`
	for _, test := range []struct {
		file, args, says string
	}{
		{"policies:\n  api: {capacity: -1}\nlimits: {}\n", "", `limits.yaml:2:3: api has no refill and no every: write refill: 10 and every: 1s
limits.yaml:2:19: capacity is -1: write a whole number from 0 to 9000000000000, in digits
limits.yaml:3:1: ` + limits},
		{"5", "-", "standard input:1:1: the file is 5: write policies, and below it the name of one"},
		{"environments: {staging: {}, production: {}}", "--env=prod", `limits.yaml has no environment "prod": it has staging and production`},
		{"policies: {}", "--env=prod", `limits.yaml has no environment "prod": it has none at all`},
	} {
		require.Equal(t, ran{code: exitError, errors: test.says + "\n"}, applied(t, nowhere, test.file, strings.Fields(test.args)...))
	}
	r := applied(t, nowhere, "limits: {}", "--json")
	require.Equal(t, exitError, r.code)
	require.Empty(t, r.errors, "the mistakes are in the answer, and there alone")
	var told struct{ Problems policyfile.Problems }
	require.NoError(t, json.Unmarshal([]byte(r.out), &told))
	require.Equal(t, policyfile.Problems{{Position: policyfile.Position{File: "limits.yaml", Line: 1, Column: 1}, Message: limits}}, told.Problems)
	require.Equal(t, exitUnavailable, applied(t, nowhere, onePolicy).code)
}
