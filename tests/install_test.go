package tests

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/tern/v2/migrate"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// The ways to install. Each is given a database that is empty or has the package already.
var installers = map[string]func(t *testing.T, url string){
	"Up": func(t *testing.T, url string) {
		conn, err := pgx.Connect(context.Background(), url)
		require.NoError(t, err)
		defer conn.Close(context.Background())
		require.NoError(t, migrations.Up(context.Background(), conn))
	},
	"tern --conn-string": func(t *testing.T, url string) {
		run(t, "..", nil, "go", ternMigrate(url)...)
	},
	"tern with PG variables": func(t *testing.T, url string) {
		run(t, "../migrations", pgVariables(t, url), "go", "tool", "tern", "migrate")
	},
	"make install": func(t *testing.T, url string) {
		run(t, "..", nil, "make", "install", "DATABASE_URL="+url)
	},
}

func TestInstall_EveryWayGivesTheSameSchema(t *testing.T) {
	t.Parallel()
	want := pgtest.New(t)
	wantSchema := fingerprintOf(t, want)
	for _, part := range []string{
		"function public.ratelimit_acquire(text,text,bigint,text)",
		"table ratelimit.buckets",
		"comment on table column ratelimit.buckets.level: ",
	} {
		require.Contains(t, wantSchema, part, "the fingerprint has to see what it compares")
	}

	for name, install := range installers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			install(t, db.URL)
			require.Equal(t, wantSchema, fingerprintOf(t, db))

			t.Run("pg_dump", func(t *testing.T) {
				pgDump := findPgDump(t)
				wantDump := dump(t, pgDump, want.URL)
				require.Contains(t, wantDump, "COMMENT ON FUNCTION public.ratelimit_acquire")
				require.Contains(t, wantDump, "REVOKE ALL ON FUNCTION public.ratelimit_acquire")
				require.Equal(t, wantDump, dump(t, pgDump, db.URL))
			})
		})
	}
}

func TestInstall_TwiceChangesNothing(t *testing.T) {
	t.Parallel()
	for name, install := range installers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			db.Exec(t, "select ratelimit_define_policy('p', 10, 1, '1 hour')")
			db.Exec(t, "select ratelimit_acquire('p', 'k', 3, 'first')")
			before := stateOf(t, db)

			install(t, db.URL)
			require.Equal(t, before, stateOf(t, db))
		})
	}
}

func TestInstall_TwentyAtOnce(t *testing.T) {
	t.Parallel()
	const sessions, processes = 18, 2
	db := pgtest.Empty(t)

	var all sync.WaitGroup
	start := make(chan struct{})
	errs := make(chan error, sessions+processes)
	for range sessions {
		conn := db.Connect(t)
		all.Go(func() {
			<-start
			errs <- migrations.Up(context.Background(), conn)
		})
	}
	for range processes {
		cmd := command("..", nil, "go", ternMigrate(db.URL)...)
		all.Go(func() {
			<-start
			if out, err := cmd.CombinedOutput(); err != nil {
				errs <- fmt.Errorf("%w\n%s", err, out)
			}
		})
	}
	close(start)
	all.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.Equal(t, fingerprintOf(t, pgtest.New(t)), fingerprintOf(t, db))
	require.Equal(t, []string{fmt.Sprintf("public.ratelimit_schema_version (%d)", newestMigration(t))}, rowsOf(t, db))
}

func TestDown_LeavesOnlyTheVersionTable(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	before := fingerprintOf(t, db)
	installers["Up"](t, db.URL)
	use(t, db, "public")

	run(t, "..", nil, "go", append(ternMigrate(db.URL), "--destination", "0")...)
	require.Equal(t, before, withoutVersionTable(fingerprintOf(t, db)))
	require.Equal(t, []string{"public.ratelimit_schema_version (0)"}, rowsOf(t, db))

	installers["Up"](t, db.URL)
	require.Equal(t, fingerprintOf(t, pgtest.New(t)), fingerprintOf(t, db), "installed anew")
}

func TestUninstall_LeavesNothing(t *testing.T) {
	t.Parallel()
	for name, uninstall := range map[string]func(t *testing.T, db *pgtest.DB){
		"Down": func(t *testing.T, db *pgtest.DB) {
			require.NoError(t, migrations.Down(context.Background(), db.Connect(t)))
		},
		"make uninstall": func(t *testing.T, db *pgtest.DB) {
			run(t, "..", nil, "make", "uninstall", "DATABASE_URL="+db.URL)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caller := newRole(t)
			db := pgtest.Empty(t)
			db.Exec(t, `
				create schema app;
				create schema other;
				create function other.ratelimit_mine() returns integer language sql as 'select 1'`)
			before := stateOf(t, db)

			for _, home := range []string{"public", "app"} {
				installers["Up"](t, withSearchPath(t, db.URL, home))
				use(t, db, home)
				db.Exec(t, "grant execute on function "+home+".ratelimit_acquire to "+caller)
				uninstall(t, db)
				require.Equal(t, before, stateOf(t, db))
			}

			uninstall(t, db)
			require.Equal(t, before, stateOf(t, db), "uninstalling what is not there is harmless")
		})
	}
}

func TestDown_StopsAtObjectsThatDependOnIt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "create view mine as select * from ratelimit_policies()")
	before := stateOf(t, db)

	err := migrations.Down(context.Background(), db.Connect(t))
	require.Equal(t, "2BP01", sqlState(err), err)
	require.Equal(t, before, stateOf(t, db))
}

func TestDown_KeepsFunctionsOfItsOwnerThatOnlyShareTheName(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	db.Exec(t, `
		create schema app;
		create function app.ratelimit_acquire(who integer) returns boolean language sql
		  as $$ select (public.ratelimit_acquire('app', who::text)).allowed $$ set check_function_bodies = off`)
	before := fingerprintOf(t, db)
	installers["Up"](t, db.URL)

	require.NoError(t, migrations.Down(context.Background(), db.Connect(t)))
	require.Equal(t, before, fingerprintOf(t, db))
}

func TestUp_NewerSchemaIsLeftAlone(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	known := newestMigration(t)
	db.Exec(t, "update ratelimit_schema_version set version = $1", known+1)
	before := stateOf(t, db)

	err := migrations.Up(context.Background(), db.Connect(t))
	var newer *migrations.NewerSchemaError
	require.ErrorAs(t, err, &newer)
	require.Equal(t, &migrations.NewerSchemaError{Installed: known + 1, Known: known}, newer)
	require.Equal(t, before, stateOf(t, db))

	require.Error(t, migrations.Down(context.Background(), db.Connect(t)))
	require.Equal(t, before, stateOf(t, db))
}

func TestUp_RefusesATransaction(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := pgtest.Empty(t)
	before := stateOf(t, db)
	conn := db.Connect(t)

	tx, err := conn.Begin(ctx)
	require.NoError(t, err)
	for _, migrate := range []func(context.Context, *pgx.Conn) error{migrations.Up, migrations.Down} {
		require.ErrorContains(t, migrate(ctx, conn), "inside a transaction")
		require.Equal(t, byte('T'), conn.PgConn().TxStatus(), "the transaction goes on")
	}
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, before, stateOf(t, db))

	_, err = conn.Exec(ctx, "begin; select 1/0")
	require.Equal(t, "22012", sqlState(err), err)
	require.ErrorContains(t, migrations.Up(ctx, conn), "inside a transaction", "nor one that failed")
	require.Equal(t, before, stateOf(t, db))
}

func TestInstall_IntoTheSchemaAtTheHeadOfSearchPath(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"app", `Odd "Schema"; drop $$ {{ö`} {
		quoted := pgx.Identifier{schema}.Sanitize()
		for name, install := range map[string]func(t *testing.T, db *pgtest.DB){
			"Up, by SET": func(t *testing.T, db *pgtest.DB) {
				conn := db.Connect(t)
				execute(t, conn, "set search_path = "+quoted+", public")
				require.NoError(t, migrations.Up(context.Background(), conn))
			},
			"Up, by connection string": func(t *testing.T, db *pgtest.DB) {
				installers["Up"](t, withSearchPath(t, db.URL, quoted))
			},
			"tern, by connection string": func(t *testing.T, db *pgtest.DB) {
				installers["tern --conn-string"](t, withSearchPath(t, db.URL, quoted))
			},
		} {
			t.Run(schema+"/"+name, func(t *testing.T) {
				t.Parallel()
				caller := newRole(t)
				db := pgtest.Empty(t)
				db.Exec(t, "create schema "+quoted)
				install(t, db)
				home := func() []string {
					return column(t, db, `
						select distinct nspname from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
						 where proname like 'ratelimit\_%'`)
				}
				require.Equal(t, []string{schema}, home())
				use(t, db, quoted)
				db.Exec(t, "grant execute on function "+quoted+".ratelimit_acquire to "+caller)
				before := stateOf(t, db)

				// A later migration finds another search_path: tern resets the session after each.
				reinstallCode(t, db.Connect(t))
				require.Equal(t, []string{schema}, home())
				require.Equal(t, before, stateOf(t, db))
			})
		}
	}
}

func TestInstall_AgainReplacesFunctionsAndKeepsGrants(t *testing.T) {
	t.Parallel()
	for name, reinstall := range map[string]func(t *testing.T, db *pgtest.DB){
		"InstallCodePackage": func(t *testing.T, db *pgtest.DB) { reinstallCode(t, db.Connect(t)) },
		"tern code install": func(t *testing.T, db *pgtest.DB) {
			run(t, "..", nil, "go", "tool", "tern", "code", "install", "sql",
				"--config", "migrations/tern.conf", "--conn-string", db.URL)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caller, greedy := newRole(t), newRole(t)
			db := pgtest.New(t)
			db.Exec(t, `
				grant execute on function ratelimit_acquire, ratelimit_peek to `+caller+`;
				grant execute on procedure ratelimit_cleanup_all to `+caller+`;
				grant execute on function ratelimit.cleanup_batch to `+caller)
			want := stateOf(t, db)

			// What the new version changes and what it adds.
			db.Exec(t, `
				alter default privileges grant execute on functions to `+greedy+`;
				drop function ratelimit_version;
				create or replace function ratelimit.clock() returns timestamptz language sql as $$ select now() $$`)
			require.NotEqual(t, want, stateOf(t, db))
			reinstall(t, db)
			db.Exec(t, "alter default privileges revoke execute on functions from "+greedy)
			require.Equal(t, want, stateOf(t, db))
		})
	}
}

func TestInstall_WithoutASchema(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"''", "nowhere"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			before := fingerprintOf(t, db)
			conn := db.Connect(t)
			execute(t, conn, "set search_path = "+path)

			err := migrations.Up(context.Background(), conn)
			require.Equal(t, "3F000", sqlState(err), err)
			require.ErrorContains(t, err, "no schema to install into")
			require.ErrorContains(t, err, "search_path", "the remedy is told")
			require.Equal(t, before, withoutVersionTable(fingerprintOf(t, db)))
		})
	}
}

func TestInstall_RefusesPlantedObjects(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ plant, code, message string }{
		"the same function": {
			`create function ratelimit_acquire(policy text, key text, cost bigint default 1, idempotency_key text default null)
			   returns boolean language sql as 'select true'`,
			"42723", "functions named ratelimit_* exist already",
		},
		"another signature": {
			"create function ratelimit_acquire(policy text) returns boolean language sql as 'select true'",
			"42723", "functions named ratelimit_* exist already",
		},
		"a name of a later release": {
			"create function ratelimit_later() returns boolean language sql as 'select true'",
			"42723", "functions named ratelimit_* exist already",
		},
		"a procedure": {
			"create procedure ratelimit_cleanup_all() language sql as 'select true'",
			"42723", "functions named ratelimit_* exist already",
		},
		"the private schema": {
			"create schema ratelimit", "42P06", `schema "ratelimit" already exists`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			planter := newRole(t)
			db := pgtest.Empty(t)
			db.Exec(t, "grant create on schema public to "+planter)
			db.Exec(t, "grant create on database "+db.Name+" to "+planter)
			execute(t, connectAs(t, db, planter), test.plant)
			before := fingerprintOf(t, db)

			err := migrations.Up(context.Background(), db.Connect(t))
			require.Equal(t, test.code, sqlState(err), err)
			require.ErrorContains(t, err, test.message)
			require.Equal(t, before, withoutVersionTable(fingerprintOf(t, db)))
		})
	}
}

// A version table that somebody else made may have a trigger, which runs with the installer's rights.
func TestInstall_RefusesAPlantedVersionTable(t *testing.T) {
	t.Parallel()
	for name, plant := range map[string]string{
		"table": `
			create table ratelimit_schema_version as select 0 as version;
			create trigger escalate before update on ratelimit_schema_version for each row execute function escalate()`,
		"view": `
			create view ratelimit_schema_version as select 0 as version;
			create trigger escalate instead of insert or update on ratelimit_schema_version for each row execute function escalate()`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			planter := newRole(t)
			db := pgtest.Empty(t)
			db.Exec(t, "grant create on schema public to "+planter)
			conn := connectAs(t, db, planter)
			execute(t, conn, `
				create function escalate() returns trigger language plpgsql as $$
				begin
				  create table loot as select current_user;
				  return new;
				end;
				$$`)
			execute(t, conn, plant)
			execute(t, conn, "grant all on ratelimit_schema_version to public")
			before := stateOf(t, db)

			require.Error(t, migrations.Up(context.Background(), db.Connect(t)))
			require.Equal(t, before, stateOf(t, db))
		})
	}
}

func TestInstall_AgainRefusesPlantedFunctions(t *testing.T) {
	t.Parallel()
	planter := newRole(t)
	db := pgtest.New(t)
	db.Exec(t, "grant create on schema public to "+planter)
	execute(t, connectAs(t, db, planter), "create function ratelimit_later() returns boolean language sql as 'select true'")
	before := stateOf(t, db)

	err := migrate.InstallCodePackage(context.Background(), db.Connect(t), nil, codePackage(t))
	require.Equal(t, "42501", sqlState(err), err)
	require.ErrorContains(t, err, "belongs to another role")
	require.Equal(t, before, stateOf(t, db))

	// In a schema where the package is not, it is nobody's business.
	execute(t, connectAs(t, db, planter), "drop function ratelimit_later")
	db.Exec(t, "create schema app authorization "+planter)
	execute(t, connectAs(t, db, planter), "create function app.ratelimit_acquire(policy text, key text, cost bigint, idempotency_key text) returns boolean language sql as 'select true'")
	before = stateOf(t, db)
	conn := db.Connect(t)
	execute(t, conn, "set search_path = app")
	reinstallCode(t, conn)
	require.Equal(t, before, stateOf(t, db))
}

func TestInstall_AsDatabaseOwnerWithoutSuperuser(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	owner := newRole(t)
	db := pgtest.Empty(t)
	before := fingerprintOf(t, db)
	db.Exec(t, fmt.Sprintf("alter database %s owner to %s", db.Name, owner))
	conn := connectAs(t, db, owner)

	require.NoError(t, migrations.Up(ctx, conn))
	me := column(t, db, "select current_user::text")[0]
	lines := strings.Split(strings.ReplaceAll(fingerprintOf(t, db), owner, me), "\n")
	slices.Sort(lines)
	require.Equal(t, fingerprintOf(t, pgtest.New(t)), strings.Join(lines, "\n"))

	for _, call := range []string{
		"select ratelimit_define_policy('p', 10, 1, '1 hour')",
		"select ratelimit_define_policy('e', 10, 1, '1 hour', durable => false)",
		"select ratelimit_acquire('p', 'k', 3, 'first'), ratelimit_acquire('e', 'k', 3, 'first')",
		"select ratelimit_peek('p', 'k'), ratelimit_refund('p', 'k', 1), ratelimit_reset('p', 'k')",
		"select ratelimit_cleanup()",
		"call ratelimit_cleanup_all()",
		"select ratelimit_drop_policy('p')",
	} {
		execute(t, conn, call)
	}
	require.NoError(t, migrations.Down(ctx, conn))
	require.Equal(t, before, fingerprintOf(t, db))
}

func TestSnapshot_NewestIsTheCode(t *testing.T) {
	t.Parallel()
	snapshots, err := filepath.Glob("../migrations/snapshots/*")
	require.NoError(t, err)
	require.NotEmpty(t, snapshots)
	newest := slices.Max(snapshots)

	require.Equal(t, readTree(t, "../sql"), readTree(t, newest),
		"sql/ changed: take a snapshot of it, see CONTRIBUTING.md")

	files, err := filepath.Glob("../migrations/*.sql")
	require.NoError(t, err)
	last := ""
	for _, file := range files { // in order
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, match := range regexp.MustCompile(`install_snapshot "([^"]+)"`).FindAllSubmatch(text, -1) {
			last = string(match[1])
		}
	}
	require.Equal(t, filepath.Base(newest), last, "the last snapshot that a migration installs")
}

func TestInstall_LeavesNoTemplateSyntax(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	require.Empty(t, column(t, db, `
		select p.oid::regprocedure::text from pg_proc as p
		 where (pronamespace = 'ratelimit'::regnamespace or proname like 'ratelimit\_%')
		   and prosrc ~ '\{\{|\}\}|<no value>|<nil>'`))
}

// use leaves policies, buckets and keys behind.
func use(t *testing.T, db *pgtest.DB, home string) {
	t.Helper()
	for _, durable := range []string{"true", "false"} {
		db.Exec(t, fmt.Sprintf(`
			select %[1]s.ratelimit_define_policy('durable %[2]s', 10, 1, '1 hour', durable => %[2]s);
			select %[1]s.ratelimit_acquire('durable %[2]s', 'k', 3, 'first')`, home, durable))
	}
}

func reinstallCode(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	require.NoError(t, migrate.InstallCodePackage(context.Background(), conn, nil, codePackage(t)))
}

func codePackage(t *testing.T) *migrate.CodePackage {
	t.Helper()
	code, err := migrate.LoadCodePackage(os.DirFS("../sql"))
	require.NoError(t, err)
	return code
}

func newestMigration(t *testing.T) int32 {
	t.Helper()
	files, err := migrate.FindMigrations(os.DirFS("../migrations"))
	require.NoError(t, err)
	return int32(len(files))
}

func readTree(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	require.NoError(t, fs.WalkDir(os.DirFS(dir), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(filepath.Join(dir, path))
		files[path] = string(text)
		return err
	}))
	require.Contains(t, files, "install.sql")
	return files
}

func ternMigrate(url string) []string {
	return []string{
		"tool", "tern", "migrate", "--config", "migrations/tern.conf", "--migrations", "migrations",
		"--conn-string", url,
	}
}

func command(dir string, env []string, name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	return cmd
}

// run shows what a command complains about; tern's other output is all of the SQL.
func run(t *testing.T, dir string, env []string, name string, args ...string) {
	t.Helper()
	_, err := command(dir, env, name, args...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		require.NoError(t, err, "%s %s\n%s", name, args, exit.Stderr)
	}
	require.NoError(t, err)
}

func pgVariables(t *testing.T, url string) []string {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	return []string{
		"PGHOST=" + config.Host, fmt.Sprintf("PGPORT=%d", config.Port), "PGUSER=" + config.User,
		"PGPASSWORD=" + config.Password, "PGDATABASE=" + config.Database,
	}
}

func withSearchPath(t *testing.T, dsn, path string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil || u.Scheme == "" {
		return dsn + " search_path='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(path) + "'"
	}
	query := u.Query()
	query.Set("search_path", path)
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // pgx takes + for itself
	return u.String()
}

// newRole returns a role without rights. Call it before creating the database in which it gets some,
// which is then dropped first.
func newRole(t testing.TB) string {
	t.Helper()
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, pgtest.Shared(t).URL(""))
	require.NoError(t, err)
	name := "ratelimit_test_" + strings.ToLower(rand.Text())
	_, err = conn.Exec(ctx, "create role "+name+" role current_user")
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := conn.Exec(ctx, "drop role "+name)
		assert.NoError(t, err)
		assert.NoError(t, conn.Close(ctx))
	})
	return name
}

// connectAs returns a connection with the rights of a role and none of our own.
func connectAs(t testing.TB, db *pgtest.DB, role string) *pgx.Conn {
	t.Helper()
	conn := db.Connect(t)
	execute(t, conn, "set role "+role)
	return conn
}

func execute(t testing.TB, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	_, err := conn.Exec(context.Background(), sql, args...)
	require.NoError(t, err, "%.200s", sql)
}

func column(t testing.TB, db *pgtest.DB, sql string, args ...any) []string {
	t.Helper()
	rows, err := db.Pool.Query(context.Background(), sql, args...)
	require.NoError(t, err)
	values, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return values
}

// fingerprintOf describes everything in a database that is not PostgreSQL's own, a line each.
func fingerprintOf(t testing.TB, db *pgtest.DB) string {
	t.Helper()
	var lines []string
	require.NoError(t, pgx.BeginFunc(context.Background(), db.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(context.Background(), "set local search_path = ''"); err != nil { // so that names are told in full
			return err
		}
		rows, err := tx.Query(context.Background(), schemaQuery)
		if err != nil {
			return err
		}
		lines, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	}))
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// rowsOf lists the rows of all tables.
func rowsOf(t testing.TB, db *pgtest.DB) []string {
	t.Helper()
	var rows []string
	for _, table := range column(t, db, `
		select format('%I.%I', nspname, relname)
		  from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
		 where c.relkind = 'r' and c.oid >= 16384
		 order by 1`) {
		rows = append(rows, column(t, db, fmt.Sprintf("select '%[1]s ' || t::text from %[1]s as t order by t::text", table))...)
	}
	return rows
}

func stateOf(t testing.TB, db *pgtest.DB) string {
	t.Helper()
	return fingerprintOf(t, db) + "\n" + strings.Join(rowsOf(t, db), "\n")
}

func withoutVersionTable(schema string) string {
	lines := slices.DeleteFunc(strings.Split(schema, "\n"), func(line string) bool {
		return strings.Contains(line, "ratelimit_schema_version")
	})
	return strings.Join(lines, "\n")
}

const schemaQuery = `
	-- everything that has a place among the others, whatever it is
	select 'object ' || i.type || ' ' || i.identity
	  from (select classid, objid from pg_depend
	         union
	        select 'pg_namespace'::regclass, oid from pg_namespace) as d
	 cross join lateral pg_identify_object(d.classid, d.objid, 0) as i
	 where d.objid >= 16384
	   and i.schema is distinct from 'pg_toast'
	   and i.type <> 'toast table'
	union all
	select format('comment on %s %s: %s', i.type, i.identity, d.description)
	  from pg_description as d
	 cross join lateral pg_identify_object(d.classoid, d.objoid, d.objsubid) as i
	 where d.objoid >= 16384
	union all
	select format('schema %I owner %s acl %s', nspname, nspowner::regrole, nspacl)
	  from pg_namespace
	 where nspname !~ '^pg_'
	union all
	select format('function %s owner %s acl %s cost %s rows %s leakproof %s: %s', p.oid::regprocedure, proowner::regrole,
	              proacl, procost, prorows, proleakproof, replace(pg_get_functiondef(p.oid), E'\n', '\n'))
	  from pg_proc as p
	 where p.oid >= 16384 and prokind <> 'a'
	union all
	select format('%s %s persistence %s owner %s acl %s method %s tablespace %s rls %s options %s',
	              case relkind when 'r' then 'table' else relkind::text end, c.oid::regclass, relpersistence,
	              relowner::regrole, relacl, a.amname, reltablespace, relrowsecurity, reloptions)
	  from pg_class as c
	  left join pg_am as a on a.oid = c.relam
	 where c.oid >= 16384 and relnamespace <> 'pg_toast'::regnamespace
	union all
	select format('column %s.%I #%s %s collate %s not null %s identity %s generated %s default %s storage %s %s statistics %s acl %s options %s',
	              c.oid::regclass, attname, attnum, format_type(atttypid, atttypmod), nullif(attcollation, 0)::regcollation,
	              attnotnull, attidentity, attgenerated, translate(pg_get_expr(d.adbin, d.adrelid), e'\n', ' '), attstorage, attcompression,
	              attstattarget, attacl, attoptions)
	  from pg_attribute as a
	  join pg_class as c on c.oid = a.attrelid
	  left join pg_attrdef as d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
	 where c.oid >= 16384 and attnum > 0 and not attisdropped and relnamespace <> 'pg_toast'::regnamespace
	union all
	select format('constraint %I on %s: %s validated %s', conname, conrelid::regclass, pg_get_constraintdef(oid), convalidated)
	  from pg_constraint
	 where oid >= 16384
	union all
	select format('index %s valid %s', pg_get_indexdef(i.indexrelid), indisvalid)
	  from pg_index as i
	  join pg_class as c on c.oid = i.indexrelid
	 where c.oid >= 16384 and c.relnamespace <> 'pg_toast'::regnamespace
	union all
	select format('type %s owner %s acl %s', t.oid::regtype, typowner::regrole, typacl)
	  from pg_type as t
	 where oid >= 16384
	union all
	select 'trigger ' || pg_get_triggerdef(oid) from pg_trigger where oid >= 16384 and not tgisinternal
	union all
	select format('default privileges of %s in %s on %s: %s', defaclrole::regrole, nullif(defaclnamespace, 0)::regnamespace, defaclobjtype, defaclacl)
	  from pg_default_acl
	union all
	select format('setting of role %s: %s', setrole, setconfig)
	  from pg_db_role_setting
	 where setdatabase = (select oid from pg_database where datname = current_database())`

// findPgDump returns a pg_dump that is at least as new as the server, or skips the test.
func findPgDump(t *testing.T) string {
	t.Helper()
	want, err := strconv.Atoi(regexp.MustCompile(`^\d+`).FindString(pgtest.Shared(t).Version))
	require.NoError(t, err)
	candidates, _ := filepath.Glob("/usr/lib/postgresql/*/bin/pg_dump")
	candidates = append(candidates, "pg_dump")
	if bin := os.Getenv("RATELIMIT_PG_BIN"); bin != "" {
		candidates = append(candidates, filepath.Join(bin, "pg_dump"))
	}
	for _, candidate := range slices.Backward(candidates) {
		out, err := exec.Command(candidate, "--version").Output()
		if err != nil {
			continue
		}
		match := regexp.MustCompile(`\) (\d+)`).FindSubmatch(out)
		if match == nil {
			continue
		}
		if have, _ := strconv.Atoi(string(match[1])); have >= want {
			return candidate
		}
	}
	t.Skipf("no pg_dump of PostgreSQL %d or newer on this machine; the catalogs were compared", want)
	return ""
}

func dump(t *testing.T, pgDump, url string, options ...string) string {
	t.Helper()
	out, err := exec.Command(pgDump, append(options, "--dbname", url)...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		t.Fatalf("%v\n%s", err, exit.Stderr)
	}
	require.NoError(t, err)
	// The argument of \restrict is drawn by each run.
	return regexp.MustCompile(`(?m)^\\(un)?restrict .*$`).ReplaceAllString(string(out), "")
}
