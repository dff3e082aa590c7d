package schema

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/migrations/packages"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// tern and psql install the same functions in the same order, and the parts of all migrations.
func TestPsql_ListsWhatTernDoes(t *testing.T) {
	t.Parallel()
	read := func(path string) string { return string(kit.NoError(os.ReadFile(path))(t)) }
	listed := func(pattern, text string) (names []string) {
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			names = append(names, match[1])
		}
		return names
	}
	script := read("../../migrations/psql/install.sql")
	functions := listed(`\{\{ template "(\S+)" \. \}\}`, read("../../sql/install.sql"))
	require.Greater(t, len(functions), 50)
	require.Equal(t, functions, listed(`(?m)^\\ir \.\./\.\./sql/(\S+)$`, script))
	require.ElementsMatch(t, kit.NoError(fs.Glob(os.DirFS("../../sql"), "*.sql"))(t), append(functions, "install.sql"))

	var parts []string
	for _, file := range kit.NoError(filepath.Glob("../../migrations/[0-9]*.sql"))(t) {
		parts = append(parts, listed(`\{\{ template "(include/[0-9]+_\S+)" \}\}`, read(file))...)
	}
	require.Equal(t, parts, listed(`(?m)^\\ir \.\./(include/[0-9]+_\S+)$`, script))
	for _, name := range []string{"install.sql", "uninstall.sql"} {
		require.Contains(t, read("../../migrations/psql/"+name), fmt.Sprintf("'ratelimit.known', '%d'", kit.NewestMigration(t)))
	}
}

// tern, CREATE EXTENSION, Flyway and psql would each replace some text of its own, and psql takes a file to be in the encoding of its locale.
func TestPsql_FilesAreSQLForEveryTool(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{"../../sql", "../../migrations/include"} {
		for name, text := range kit.ReadTree(t, dir) {
			if !strings.HasSuffix(name, ".sql") {
				continue
			}
			require.NotRegexp(t, `@extschema|\$\{|[^\x00-\x7f]`, text, name)
			require.NotRegexp(t, `(?m)(^|[^:\w\])]):['"{A-Za-z_]`, regexp.MustCompile(`--[^\n]*|'[^']*'`).ReplaceAllString(text, ""), name)
			if name != "install.sql" && dir == "../../sql" || strings.HasPrefix(name, "0") {
				require.NotContains(t, text, "{{", name)
			}
		}
	}
}

// psql upgrades to the next version, with data and grants in the database. A failure changes nothing.
func TestPsql_Upgrade(t *testing.T) {
	t.Parallel()
	app := kit.NewRole(t)
	newest := kit.NewestMigration(t)
	next, failing := kit.NextRepository(t, nextUp, nextDown, kit.Edits...), kit.NextRepository(t, nextUp+"select 1 / 0;", nextDown, kit.Edits...)
	run := func(root, name string, db *pgtest.DB) (string, int) {
		return kit.PsqlStatus(t, db.URL, "--file", filepath.Join(root, "migrations/psql", name))
	}
	grants := "grant execute on function ratelimit_acquire, ratelimit_peek, ratelimit_shard to " + app

	db, plain := kit.NewDB(t), kit.NewDB(t)
	db.Execute(grants)
	plain.Execute(grants)
	data := db.PutData()
	before := kit.SchemaAndRows(t, db.DB)

	out, status := run(failing, "install.sql", db.DB)
	require.Equal(t, 3, status, out)
	require.Contains(t, out, "division by zero")
	require.Equal(t, before, kit.SchemaAndRows(t, db.DB))

	want := kit.InstalledAt(t, os.DirFS(filepath.Join(next, "migrations")), newest+1)
	want.Execute(grants)
	for range 2 {
		out, status = run(next, "install.sql", db.DB)
		require.Equal(t, 0, status, out)
		require.Equal(t, fmt.Sprintf("pgratelimit %s is installed in schema public; its schema version is %d.\n", kit.Releases[newest+1], newest+1), out)
		kit.SameSchema(t, want.DB, db.DB)
		data.Check()
	}
	first := pgtest.Empty(t)
	out, status = run(next, "install.sql", first)
	require.Equal(t, 0, status, out)
	first.Exec(t, grants)
	kit.SameSchema(t, want.DB, first)

	// So does the one file of a release.
	files := kit.NoError(packages.One(os.DirFS(next), "sql"))(t)
	for range 2 {
		kit.Execute(t, plain.Connect(t), string(files["sql/pgratelimit.sql"]), pgx.QueryExecModeSimpleProtocol)
		kit.SameSchema(t, want.DB, plain.DB)
	}

	before = kit.SchemaAndRows(t, db.DB)
	for _, name := range []string{"install.sql", "uninstall.sql"} {
		out, status = run("../..", name, db.DB)
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
		release := kit.Releases[newest]
		if strings.HasPrefix(step.told, "none") {
			release = "?"
		}
		require.Equal(t, fmt.Sprintf("pgratelimit %s is installed in schema %s; its schema version is %d.\n", release, step.told, newest), out)
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
		"no right to create schemas":    {"", "the role may not create schema ratelimit", []string{"--command", "set role " + role}},
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
		out, status := kit.PsqlStatus(t, db.URL, append(args, "--command", `\echo session: :ON_ERROR_STOP :QUIET :{?pgratelimit_quiet} :{?pgratelimit_missing}:{?pgratelimit_next}:{?pgratelimit_version}:{?pgratelimit_home}:{?pgratelimit_release}`,
			"--command", "select current_setting('search_path'), current_setting('transaction_isolation'), count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()")...)
		require.Equal(t, 0, status, out)
		_, state, _ := strings.Cut(out, "session: ")
		return state
	}
	want := session()
	require.Contains(t, want, "off off FALSE FALSEFALSEFALSEFALSEFALSE")
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
	pgErr := kit.PgError(kit.ErrorOf(pgtest.New(t).Pool.Exec(t.Context(), "select ratelimit_acquire('unknown', 'k')")))
	require.NotNil(t, pgErr)
	frames := regexp.MustCompile(`function ([\w.]+)\(.* line (\d+) at (\w+)`).FindAllStringSubmatch(pgErr.Where, -1)
	require.Len(t, frames, 3, pgErr.Where)
	for _, frame := range frames {
		function, line, statement := frame[1], frame[2], strings.ToLower(frame[3])
		shown, err := kit.Command("../..", nil, "make", "--silent", "show", "FUNCTION="+function).CombinedOutput()
		require.NoError(t, err, "%s", shown)
		require.Regexp(t, `(?m)^ *`+line+` +`+statement+` `, string(shown), pgErr.Where)
	}
}
