package tests

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func ternMigrate(url string) []string {
	return []string{"tool", "tern", "migrate", "--config", "migrations/tern.conf", "--migrations", "migrations", "--conn-string", url}
}

func command(dir string, env []string, name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	return cmd
}

// run runs a command and shows its standard error if it fails; tern's standard output is all of the SQL.
func run(t *testing.T, dir string, env []string, name string, args ...string) {
	_, err := command(dir, env, name, args...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		require.NoError(t, err, "%s %s\n%s", name, args, exit.Stderr)
	}
	require.NoError(t, err)
}

func pgVariables(t *testing.T, url string) []string {
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	return []string{
		"PGHOST=" + config.Host, fmt.Sprintf("PGPORT=%d", config.Port), "PGUSER=" + config.User,
		"PGPASSWORD=" + config.Password, "PGDATABASE=" + config.Database,
		"PGOPTIONS=" + config.RuntimeParams["options"],
	}
}

// withSettings is a connection string with names and values of settings, which psql takes too.
func withSettings(t *testing.T, dsn string, settings ...string) string {
	options := ""
	for setting := range slices.Chunk(settings, 2) {
		value := strings.NewReplacer(`\`, `\\`, " ", `\ `).Replace(setting[1])
		options += fmt.Sprintf(" -c %s=%s", setting[0], value)
	}
	u, err := url.Parse(dsn)
	if err != nil || u.Scheme == "" {
		return dsn + " options='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(options) + "'"
	}
	query := u.Query()
	query.Set("options", options)
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20")
	return u.String()
}

// createSchema creates the schema that has to exist before tern's command line runs.
func createSchema(t *testing.T, url string) {
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "create schema ratelimit")
	if sqlState(err) != "42P06" { // the second time
		require.NoError(t, err)
	}
	require.NoError(t, conn.Close(t.Context()))
}

// psqlFile runs a file of migrations/psql, and returns what psql said.
func psqlFile(t *testing.T, url, name string) string {
	out, err := runPsql(t, url, "--set", "ON_ERROR_STOP=1", "--file", "../migrations/psql/"+name)
	require.NoError(t, err, out)
	return out
}

func runPsql(t *testing.T, url string, args ...string) (string, error) {
	t.Helper()
	program, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("psql is not installed")
	}
	out, err := exec.Command(program, append(args, "--no-psqlrc", "--dbname", url)...).CombinedOutput()
	return string(out), err
}

func psqlStatus(t *testing.T, url string, args ...string) (out string, status int) {
	out, err := runPsql(t, url, args...)
	if err != nil {
		exit, ok := err.(*exec.ExitError) //nolint:errorlint // it is not wrapped
		require.True(t, ok, err)
		status = exit.ExitCode()
	}
	return out, status
}

// script is one of pg_cron's scripts for a client that is not psql.
func script(t testing.TB, name string) string {
	sql, err := pgtest.CronScript(name)
	require.NoError(t, err)
	return sql
}

// runScript runs one of pg_cron's scripts as a client that is not psql.
func runScript(db *testDB, name string) error {
	return errorOf(db.Pool.Exec(context.Background(), script(db.t, name)))
}

// psql runs one of pg_cron's scripts with psql.
func psql(t *testing.T, db *testDB, name string) {
	out, err := runPsql(t, db.URL, "--file", filepath.Join("../pg_cron", name))
	require.NoError(t, err, "%s", out)
	require.NotContains(t, out, "ERROR")
}
