package schema

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/migrations/packages"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

func TestPsql_CopiesAreMadeOfTheOtherFiles(t *testing.T) {
	t.Parallel()
	files := kit.NoError(packages.Copies(os.DirFS("../../sql")))(t)
	committed := kit.NoError(os.ReadFile("../../sql/copies.sql"))(t)
	if string(files["copies.sql"]) != string(committed) {
		t.Error("sql/copies.sql is not made of the other files: make psql")
	}
}

func TestPsql_FilesAreMadeOfTheMigrations(t *testing.T) {
	t.Parallel()
	files := kit.NoError(packages.Psql(os.DirFS("../../migrations")))(t)
	require.Len(t, files, 2)
	for name, text := range files {
		committed := kit.NoError(os.ReadFile(filepath.Join("../../migrations/psql", name)))(t)
		if string(text) != string(committed) {
			t.Errorf("migrations/psql/%s is not made of the migrations: make psql", name)
		}
		require.NotRegexp(t, `[^\x00-\x7f]`, string(text), "psql takes the file to be in the encoding of its locale")
	}
}

// psql upgrades to the next version and back, with data and grants in the database. A failure changes nothing.
func TestPsql_Upgrade(t *testing.T) {
	t.Parallel()
	app := kit.NewRole(t)
	newest := kit.NewestMigration(t)
	up := "alter table ratelimit.policies add column next boolean not null default false;"
	down := "alter table ratelimit.policies drop column next;"
	changed := append([]kit.Edit{kit.NextColumn}, kit.Edits...)
	next, failing := kit.NextVersion(t, up, down, changed...), kit.NextVersion(t, up+"select 1 / 0;", down, changed...)
	run := func(files fs.FS, name string, db *pgtest.DB) (string, int) {
		made := kit.NoError(packages.Psql(files))(t)
		dir := t.TempDir()
		require.NoError(t, os.CopyFS(dir, files)) // of which it includes some
		path := filepath.Join(dir, "psql", name)
		require.NoError(t, os.WriteFile(path, made[name], 0o600))
		return kit.PsqlStatus(t, db.URL, "--file", path)
	}
	grants := "grant execute on function ratelimit_acquire, ratelimit_peek to " + app

	db := kit.NewDB(t)
	db.Execute(grants)
	data := db.PutData()
	before := kit.SchemaAndRows(t, db.DB)

	out, status := run(failing, "install.sql", db.DB)
	require.Equal(t, 3, status, out)
	require.Contains(t, out, "division by zero")
	require.Equal(t, before, kit.SchemaAndRows(t, db.DB))

	want := kit.InstalledAt(t, next, newest+1)
	want.Execute(grants)
	for range 2 {
		out, status = run(next, "install.sql", db.DB)
		require.Equal(t, 0, status, out)
		require.Equal(t, fmt.Sprintf("pgratelimit %s is installed in schema public; its schema version is %d.\n", kit.Releases[newest], newest+1), out)
		kit.SameSchema(t, want.DB, db.DB)
		data.Check()
	}
	first := pgtest.Empty(t)
	out, status = run(next, "install.sql", first)
	require.Equal(t, 0, status, out)
	first.Exec(t, grants)
	kit.SameSchema(t, want.DB, first)

	before = kit.SchemaAndRows(t, db.DB)
	for _, name := range []string{"install.sql", "uninstall.sql"} {
		out, status = kit.PsqlStatus(t, db.URL, "--file", "../../migrations/psql/"+name)
		require.Equal(t, 3, status, out)
		require.Contains(t, out, "a newer schema is installed")
		require.Contains(t, out, fmt.Sprintf("Schema version %d is installed", newest+1))
		require.Equal(t, before, kit.SchemaAndRows(t, db.DB))
	}

	out, status = run(next, "uninstall.sql", db.DB)
	require.Equal(t, 0, status, out)
	require.Equal(t, kit.FingerprintOf(t, pgtest.Empty(t)), kit.FingerprintOf(t, db.DB))
}

// The schema that is told is where the functions are, not the one that heads search_path now.
func TestPsql_SaysWhatIsInstalledAndWhere(t *testing.T) {
	t.Parallel()
	db, newest := pgtest.Empty(t), kit.NewestMigration(t)
	db.Exec(t, `create schema "Odd ""Schema"`)
	for _, step := range []struct{ prepare, path, told string }{
		{"select", `"Odd ""Schema"`, `"Odd ""Schema"`},
		{"select", "public", `"Odd ""Schema"`},
		{`drop schema "Odd ""Schema" cascade`, "public", "none (the functions are missing)"},
	} {
		db.Exec(t, step.prepare)
		out, status := kit.PsqlStatus(t, kit.WithSettings(db.URL, "search_path", step.path), "--file", "../../migrations/psql/install.sql")
		require.Equal(t, 0, status, out)
		require.Equal(t, fmt.Sprintf("pgratelimit %s is installed in schema %s; its schema version is %d.\n", kit.Releases[newest], step.told, newest), out)
	}
}

func TestPsql_FailureChangesNothing(t *testing.T) {
	role := kit.NewRole(t)
	type testCase struct {
		prepare, message string
		args             []string
	}
	kit.InParallel(t, map[string]testCase{
		"no schema to install into":     {"drop schema public", "no schema to install into", nil},
		"functions of somebody else":    {"create function ratelimit_acquire() returns integer language sql as 'select 1'", "exist already", nil},
		"no right to create schemas":    {"", "permission denied for database", []string{"--command", "set role " + role}},
		"inside a transaction of psql":  {"", "inside a transaction", []string{"--single-transaction"}},
		"inside a transaction of yours": {"", "inside a transaction", []string{"--command", "begin"}},
	}, func(t *testing.T, test testCase) {
		db := pgtest.Empty(t)
		if test.prepare != "" {
			db.Exec(t, test.prepare)
		}
		before := kit.SchemaAndRows(t, db)
		out, status := kit.PsqlStatus(t, db.URL, append(test.args, "--file", "../../migrations/psql/install.sql")...)
		require.Equal(t, 3, status, out)
		require.Contains(t, out, test.message)
		require.Equal(t, before, kit.SchemaAndRows(t, db))
	})
}

func TestPsql_LeavesTheSessionAsItWas(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	session := func(files ...string) string {
		args := []string{"--set", "ON_ERROR_STOP=off", "--command", "set search_path = public, elsewhere"}
		for _, name := range files {
			args = append(args, "--command", `\i ../../migrations/psql/`+name)
		}
		out, status := kit.PsqlStatus(t, db.URL, append(args, "--command", `\echo session: :ON_ERROR_STOP :QUIET :{?pgratelimit_quiet} :{?pgratelimit_missing}`,
			"--command", "select current_setting('search_path'), current_setting('transaction_isolation'), count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()")...)
		require.Equal(t, 0, status, out)
		_, state, _ := strings.Cut(out, "session: ")
		return state
	}
	want := session()
	require.Contains(t, want, "off off FALSE FALSE")
	require.Contains(t, want, "public, elsewhere")
	require.Equal(t, want, session("install.sql", "install.sql", "uninstall.sql", "uninstall.sql"))
}

// The migrations stand beside install.sql. Run by mistake, their second half would remove everything.
func TestPsql_AMigrationByMistake(t *testing.T) {
	t.Parallel()
	files := kit.NoError(filepath.Glob("../../migrations/[0-9]*.sql"))(t)
	require.Len(t, files, int(kit.NewestMigration(t)))
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			for name, db := range map[string]*pgtest.DB{"installed": pgtest.New(t), "empty": pgtest.Empty(t)} {
				before := kit.SchemaAndRows(t, db)
				out, status := kit.PsqlStatus(t, db.URL, "--file", file)
				require.Equal(t, 3, status, out)
				require.Contains(t, out, "migrations/psql/install.sql", "the remedy is told")
				require.Equal(t, before, kit.SchemaAndRows(t, db), name)

				require.Error(t, kit.ErrorOf(db.Pool.Exec(t.Context(), string(kit.NoError(os.ReadFile(file))(t)))), "nor by another client")
				require.Equal(t, before, kit.SchemaAndRows(t, db), name)
			}
		})
	}
}

// Each line that an error's context names is the line that make show prints under that number.
func TestShow_NumbersLinesAsErrorsDo(t *testing.T) {
	t.Parallel()
	_, err := pgtest.New(t).Pool.Exec(context.Background(), "select ratelimit_acquire('unknown', 'k')")
	var pgErr *pgconn.PgError
	require.True(t, errors.As(err, &pgErr))
	frames := regexp.MustCompile(`function ([\w.]+)\(.* line (\d+) at (\w+)`).FindAllStringSubmatch(pgErr.Where, -1)
	require.Len(t, frames, 2, pgErr.Where)
	for _, frame := range frames {
		function, line, statement := frame[1], frame[2], strings.ToLower(frame[3])
		shown, err := kit.Command("../..", nil, "make", "--silent", "show", "FUNCTION="+function).CombinedOutput()
		require.NoError(t, err, "%s", shown)
		require.Regexp(t, `(?m)^ *`+line+` +`+statement+` `, string(shown), pgErr.Where)
	}
}
