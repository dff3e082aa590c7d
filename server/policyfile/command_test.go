package policyfile_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// exitCode is what the program ends with: 0, 2 for a difference, or another one.
func exitCode(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, policyfile.ErrDifference):
		return 2
	}
	return 1
}

// run runs the command, with a file as its argument, or as standard input where that is "-".
func run(t *testing.T, db *pgtest.DB, file string, args ...string) (out string, code int, err error) {
	t.Helper()
	command := policyfile.Command(func(ctx context.Context) ([]policyfile.Target, error) {
		if db == nil {
			return nil, errors.New("there is no database")
		}
		conn, err := pgx.Connect(ctx, db.URL)
		return []policyfile.Target{{Conn: conn}}, err
	})
	path := filepath.Join(t.TempDir(), "limits.yaml")
	require.NoError(t, os.WriteFile(path, []byte(file), 0o600))
	if len(args) == 0 || args[0] != "-" {
		args = append([]string{path}, args...)
	}
	var buffer bytes.Buffer
	command.SetArgs(args)
	command.SetIn(strings.NewReader(file))
	command.SetOut(&buffer)
	command.SetErr(&buffer)
	err = command.ExecuteContext(t.Context())
	return strings.ReplaceAll(buffer.String(), path, "limits.yaml"), exitCode(err), err
}

func TestCommand_ApplyShowsAndChanges(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const file = `
policies:
  api: {capacity: 100, refill: 10, every: 1s}
environments:
  staging:
    policies:
      api: {capacity: 5}
`
	const created = `+ policy "api": capacity 5, refill 10, every 1s, stepped false, durable true, remember 1d, shadow false` + "\n"

	out, code, _ := run(t, db, file, "--env", "staging", "--dry-run")
	require.Equal(t, created+"1 change, not made: this is a dry run.\n", out)
	require.Equal(t, 2, code)
	require.Empty(t, policiesIn(t, db))

	out, code, err := run(t, db, file, "--env", "staging")
	require.NoError(t, err)
	require.Equal(t, created+"1 change made.\n", out)
	require.Equal(t, 0, code)
	require.Equal(t, []string{"api 5 10 1000000 f t 86400000000 f"}, policiesIn(t, db))

	for _, args := range [][]string{{"--env", "staging"}, {"--env", "staging", "--dry-run"}, {"-", "--env", "staging", "--prune"}} {
		out, code, err = run(t, db, file, args...)
		require.NoError(t, err)
		require.Equal(t, "The database is as the file says.\n", out)
		require.Equal(t, 0, code)
	}
}

// An override that the file does not have is a difference: the database is never called as the file says.
func TestCommand_OverridesThatTheFileDoesNotHave(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const file = "policies: {api: {capacity: 1, refill: 1, every: 1s}}"
	apply(t, db.Pool, file)
	db.Exec(t, "select count(ratelimit_override('api', 'k' || n, capacity => 2)) from generate_series(10, 34) as n")
	for _, args := range [][]string{{"--dry-run"}, nil, {"--prune"}} {
		out, code, _ := run(t, db, file, args...)
		require.True(t, strings.HasPrefix(out, "  override \"k10\" of \"api\" is not in the file, and stays\n"), out)
		require.True(t, strings.HasSuffix(out, "  … and 5 more\nThe database has 25 overrides that the file does not have: --prune=overrides removes them.\n"), out)
		require.Equal(t, map[bool]int{true: 2}[args != nil && args[0] == "--dry-run"], code)
	}
	out, _, _ := run(t, db, file, "--json")
	var told struct{ Drift []policyfile.DriftingOverride }
	require.NoError(t, json.Unmarshal([]byte(out), &told))
	require.Len(t, told.Drift, 25, "programs are told of all")
	out, code, _ := run(t, db, file, "--prune=overrides", "--dry-run")
	require.Equal(t, 2, code)
	require.Contains(t, out, "25 changes, not made")
	out, code, _ = run(t, db, file, "--prune=policies,overrides")
	require.Equal(t, 0, code)
	require.Contains(t, out, "\n25 changes made.\n")
	out, code, _ = run(t, db, file, "--dry-run")
	require.Equal(t, "The database is as the file says.\n", out)
	require.Equal(t, 0, code)
	_, code, err := run(t, db, file, "--prune=all")
	require.Equal(t, 1, code)
	require.ErrorContains(t, err, "policies, overrides, or policies,overrides")
}

// A difference of any database is one, also if those after it have none.
func TestCommand_DryRunOfSeveralDatabases(t *testing.T) {
	t.Parallel()
	const file = "policies: {api: {capacity: 1, refill: 1, every: 1s}}"
	differs, same := pgtest.New(t), pgtest.New(t)
	apply(t, same.Pool, file)
	for _, order := range [][]*pgtest.DB{{differs, same}, {same, differs}} {
		command := policyfile.Command(func(context.Context) ([]policyfile.Target, error) {
			return []policyfile.Target{{Conn: order[0].Connect(t), Name: "shard 0"}, {Conn: order[1].Connect(t), Name: "shard 1"}}, nil
		})
		command.SetArgs([]string{"-", "--dry-run"})
		command.SetIn(strings.NewReader(file))
		var out bytes.Buffer
		command.SetOut(&out)
		require.ErrorIs(t, command.ExecuteContext(t.Context()), policyfile.ErrDifference)
		require.Contains(t, out.String(), ": The database is as the file says.")
		require.Contains(t, out.String(), "1 change, not made: this is a dry run.")
	}
}

func TestCommand_JSON(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const file = "policies: {<api>: {capacity: 1, refill: 1, every: 1s}}\noverrides: {<api>: {k: {capacity: 0}}}\n"

	out, code, _ := run(t, db, file, "--dry-run", "--json")
	require.Equal(t, 2, code)
	require.JSONEq(t, `{"applied": false, "changes": [
		{"action": "create", "policy": "<api>", "fields": [
			{"field": "capacity", "old": null, "new": 1}, {"field": "refill", "old": null, "new": 1},
			{"field": "every", "old": null, "new": "1s"}, {"field": "stepped", "old": null, "new": false},
			{"field": "durable", "old": null, "new": true}, {"field": "remember", "old": null, "new": "1d"},
			{"field": "shadow", "old": null, "new": false}]},
		{"action": "create", "policy": "<api>", "key": "k", "fields": [
			{"field": "capacity", "old": null, "new": 0}, {"field": "refill", "old": null, "new": 1},
			{"field": "every", "old": null, "new": "1s"}, {"field": "expires_at", "old": null, "new": null}]}]}`, out)

	_, code, err := run(t, db, file, "--json")
	require.NoError(t, err)
	require.Equal(t, 0, code)
	out, _, _ = run(t, db, file, "--json")
	require.JSONEq(t, `{"applied": true, "changes": []}`, out)

	out, code, _ = run(t, db, "policies: {api: {capacity: 1, refill: 1, every: 1s}}", "--prune", "--json")
	require.Equal(t, 0, code)
	var pruned struct {
		Changes []struct {
			Action, Policy string
			Lost           *policyfile.Lost
		}
	}
	require.NoError(t, json.Unmarshal([]byte(out), &pruned))
	require.Equal(t, "drop", pruned.Changes[1].Action)
	require.Equal(t, &policyfile.Lost{Overrides: 1}, pruned.Changes[1].Lost)
}

// A file with mistakes, and an environment that it does not have, are told before anybody connects.
func TestCommand_Errors(t *testing.T) {
	t.Parallel()
	const wrong = "policies:\n  api: {capacity: -1}\nlimits: {}\n"
	for name, test := range map[string]struct {
		file string
		args []string
		out  string
		err  string
	}{
		"mistakes": {
			file: wrong,
			err: `limits.yaml:2:3: policy "api" has no refill and no every: write refill: 10 and every: 1s
limits.yaml:2:19: capacity is -1: write a whole number from 0 to 9000000000000, in digits
limits.yaml:3:1: unknown field "limits": the file has policies, overrides, http, envoy and environments`,
		},
		"mistakes in JSON": {
			file: "limits: {}", args: []string{"--json"},
			out: `{
  "problems": [
    {
      "file": "limits.yaml",
      "line": 1,
      "column": 1,
      "message": "unknown field \"limits\": the file has policies, overrides, http, envoy and environments"
    }
  ]
}
`,
			err: `limits.yaml:1:1: unknown field "limits": the file has policies, overrides, http, envoy and environments`,
		},
		"mistakes in standard input": {
			file: "5", args: []string{"-"},
			err: "standard input:1:1: the file is 5: write its fields, each on a line of its own: policies, overrides, http, envoy and environments",
		},
		"an unknown environment": {
			file: "environments: {staging: {}, production: {}}", args: []string{"--env", "prod"},
			err: `limits.yaml has no environment "prod": it has staging and production`,
		},
		"no environments": {
			file: "policies: {}", args: []string{"--env", "prod"},
			err: `limits.yaml has no environment "prod": it has none at all`,
		},
		"no database":     {file: "policies: {}", err: "there is no database"},
		"an unknown flag": {file: "policies: {}", args: []string{"--force"}, err: "unknown flag: --force"},
		"no such file":    {args: []string{"-", "other.yaml"}, err: "accepts 1 arg(s), received 2"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, code, err := run(t, nil, test.file, test.args...)
			require.Error(t, err)
			require.Equal(t, 1, code)
			require.Equal(t, test.err, strings.ReplaceAll(err.Error(), pathOf(err), "limits.yaml"))
			require.Equal(t, test.out, out)
		})
	}
}

// pathOf finds the path of the test's own directory in a message.
func pathOf(err error) string {
	for _, word := range strings.FieldsFunc(err.Error(), func(r rune) bool { return strings.ContainsRune(" :\n", r) }) {
		if strings.HasSuffix(word, "/limits.yaml") {
			return word
		}
	}
	return "limits.yaml"
}
