package tests

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// The image is built without Go, from a file that tern generates and that is committed.
func TestDocker_InstallSQLIsGeneratedFromTheMigrations(t *testing.T) {
	t.Parallel()
	committed, err := os.ReadFile("../docker/install.sql")
	require.NoError(t, err)
	require.True(t, gengen(t) == string(committed), "docker/install.sql is stale: run make docker/install.sql")
}

// Run by psql, it gives what migrations.Up gives, so that a later Up goes on from there.
func TestDocker_InstallSQLInstallsWhatUpDoes(t *testing.T) {
	t.Parallel()
	byUp, byPsql := newDB(t), &testDB{DB: pgtest.Empty(t), t: t}
	for range 2 { // the second time there is nothing to do
		byPsql.exec(missingMigrations(t, byPsql))
	}

	require.Equal(t, schemaOf(byUp), schemaOf(byPsql))
	require.NotEmpty(t, schemaOf(byUp))
}

// The image has installed the package and scheduled clean-up when it answers for the first time.
func TestDocker_ImageIsReadyToUse(t *testing.T) {
	t.Parallel()
	if pgtest.Shared(t).Rung != "docker" {
		t.Skip("the tests do not run on Docker")
	}
	server := pgtest.Private(t)
	require.True(t, server.HasCron)
	db := serverDB(t, server, "postgres")
	require.Equal(t, []string{"1"}, texts(db, "select count(*)::text from pg_extension where extname = 'pg_cron'"))
	require.Equal(t, schemaOf(newDB(t)), schemaOf(db))
	require.Len(t, jobs(db), 2)
}

// missingMigrations returns the SQL that install.sql prints.
func missingMigrations(t *testing.T, db *testDB) string {
	t.Helper()
	results, err := db.Connect(t).PgConn().Exec(t.Context(), gengen(t)).ReadAll()
	require.NoError(t, err)
	var sql strings.Builder
	for _, row := range results[len(results)-1].Rows {
		sql.Write(row[0])
	}
	return sql.String()
}

func gengen(t *testing.T) string {
	t.Helper()
	tern := exec.CommandContext(t.Context(), "go", "tool", "tern", "gengen")
	tern.Dir = "../migrations"
	tern.Env = append(os.Environ(), "PGDATABASE=unused")
	var stderr strings.Builder
	tern.Stderr = &stderr
	sql, err := tern.Output()
	require.NoError(t, err, stderr.String())
	return string(sql)
}

// schemaOf returns the functions, columns and constraints of the package, and its schema version.
func schemaOf(db *testDB) []string {
	return texts(db, `
		select pg_get_functiondef(p.oid) || coalesce(p.proacl::text, '')
		  from pg_proc as p
		 where p.proname like 'ratelimit\_%' or p.pronamespace = 'ratelimit'::regnamespace
		union all
		select format('%s.%s %s %s', a.attrelid::regclass, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull)
		  from pg_attribute as a join pg_class as c on c.oid = a.attrelid
		 where c.relnamespace = 'ratelimit'::regnamespace and not a.attisdropped
		union all
		select format('%s %s %s', conrelid::regclass, conname, pg_get_constraintdef(oid))
		  from pg_constraint where connamespace = 'ratelimit'::regnamespace
		union all
		select 'version ' || version from public.ratelimit_schema_version
		order by 1`)
}
