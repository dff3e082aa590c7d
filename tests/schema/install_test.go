// Package schema tests what is installed, and how: each way to install, upgrade and uninstall, the packages, and the rules of the catalogs.
package schema

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/tern/v2/migrate"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/migrations/packages"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

func TestInstall_EveryWayGivesTheSameSchema(t *testing.T) {
	want := pgtest.New(t)
	wantSchema := kit.FingerprintOf(t, want)
	for _, part := range []string{
		"function public.ratelimit_acquire(text,text,bigint,text)",
		"table ratelimit.buckets",
		"comment on table column ratelimit.buckets.level: ",
	} {
		require.Contains(t, wantSchema, part, "the fingerprint has to see what it compares")
	}

	kit.InParallel(t, kit.Installers, func(t *testing.T, install func(t *testing.T, url string)) {
		db := pgtest.Empty(t)
		install(t, db.URL)
		kit.SameSchema(t, want, db)
	})
}

// make runs the program, which installs by migrations.Up.
func TestInstall_ByMake(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	before := kit.FingerprintOf(t, db)
	kit.Run(t, "../..", nil, "make", "install", "DATABASE_URL="+db.URL)
	require.Equal(t, kit.FingerprintOf(t, pgtest.New(t)), kit.FingerprintOf(t, db))
	kit.Run(t, "../..", nil, "make", "uninstall", "DATABASE_URL="+db.URL)
	require.Equal(t, before, kit.FingerprintOf(t, db))
}

// The functions are in a schema of the role's own, unless it owns the database.
func TestInstall_AsEveryKindOfRole(t *testing.T) {
	t.Parallel()
	for circumstance, prepare := range map[string]string{
		"CREATE on the database, no public":          "grant create on database %[2]s to %[1]s; create schema limits authorization %[1]s; drop schema public",
		"CREATE on the database, no right on public": "grant create on database %[2]s to %[1]s; create schema limits authorization %[1]s; revoke all on schema public from public",
		"owner of the database":                      "alter database %[2]s owner to %[1]s; create schema limits authorization %[1]s",
		"superuser":                                  "create schema limits; alter role %[1]s superuser",
	} {
		prepared := func(t *testing.T) (role string, db *pgtest.DB) {
			role, db = kit.NewRole(t), pgtest.Empty(t)
			db.Exec(t, fmt.Sprintf(prepare, role, db.Name))
			return role, db
		}
		role, db := prepared(t)
		kit.Installers["Up"](t, kit.WithSettings(db.URL, "search_path", "limits"))
		want := schemaAsMine(t, role, db)
		for way, install := range kit.Installers {
			t.Run(circumstance+"/"+way, func(t *testing.T) {
				t.Parallel()
				role, got := prepared(t)
				before := kit.FingerprintOf(t, got)
				url := kit.WithSettings(got.URL, "search_path", "limits", "role", role)
				install(t, url)
				require.Equal(t, want, schemaAsMine(t, role, got))
				require.Equal(t, []string{fmt.Sprintf("ratelimit.version (%d)", kit.NewestMigration(t))}, kit.RowsOf(t, got))

				use(t, got, "limits")
				state := kit.SchemaAndRows(t, got)
				install(t, url)
				require.Equal(t, state, kit.SchemaAndRows(t, got), "the second time")

				conn := kit.NoError(pgx.Connect(t.Context(), url))(t)
				defer conn.Close(context.Background())
				for _, call := range []string{
					"select ratelimit_define_policy('p', 10, 1, '1 hour')",
					"select ratelimit_acquire('p', 'k', 3, 'first'), ratelimit_peek('p', 'k'), ratelimit_refund('p', 'k', 1), ratelimit_reset('p', 'k')",
					"select ratelimit_cleanup()",
					"call ratelimit_cleanup_all()",
					"select ratelimit_drop_policy('p')",
				} {
					kit.Execute(t, conn, call)
				}
				require.NoError(t, migrations.Down(t.Context(), conn))
				require.Equal(t, before, kit.FingerprintOf(t, got))
			})
		}
	}
}

// A second installation changes nothing, also when the schema of the functions has another name by then.
func TestInstall_TwiceChangesNothing(t *testing.T) {
	db := pgtest.Parallel(t)
	db.Exec(t, "select ratelimit_define_policy('p', 10, 1, '1 hour')")
	db.Exec(t, "alter schema public rename to elsewhere")
	before := kit.SchemaAndRows(t, db)
	for name, install := range kit.Installers {
		install(t, db.URL)
		require.Equal(t, before, kit.SchemaAndRows(t, db), name)
	}
}

func TestInstall_TwentyAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	var sessions [18]*pgx.Conn
	for i := range sessions {
		sessions[i] = db.Connect(t)
	}
	kit.Crowd(t, len(sessions)+2, func(i int) error {
		if i < len(sessions) {
			return migrations.Up(context.Background(), sessions[i])
		}
		out, err := kit.RunPsql(t, db.URL, "--file", "../../migrations/psql/install.sql")
		if err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	})
	kit.SameSchema(t, pgtest.New(t), db)
	require.Equal(t, []string{fmt.Sprintf("ratelimit.version (%d)", kit.NewestMigration(t))}, kit.RowsOf(t, db))
}

func TestDown_LeavesOnlyTheVersionTable(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	before := kit.FingerprintOf(t, db)
	kit.Installers["Up"](t, db.URL)
	use(t, db, "public")

	kit.Run(t, "../..", nil, kit.Tern(), append(kit.TernMigrate(db.URL), "--destination", "0")...)
	require.Equal(t, before, beforeInstall(kit.FingerprintOf(t, db)))
	require.Equal(t, []string{"ratelimit.version (0)"}, kit.RowsOf(t, db))

	kit.Installers["Up"](t, db.URL)
	kit.SameSchema(t, pgtest.New(t), db)
}

var uninstallers = map[string]func(t *testing.T, db *pgtest.DB) error{
	"Down": func(t *testing.T, db *pgtest.DB) error { return migrations.Down(t.Context(), db.Connect(t)) },
	"psql": func(t *testing.T, db *pgtest.DB) error {
		return kit.ErrorOf(kit.RunPsql(t, db.URL, "--set", "ON_ERROR_STOP=1", "--file", "../../migrations/psql/uninstall.sql"))
	},
}

// A function of the owner that only shares a name, in another schema, stays.
func TestUninstall_LeavesNothing(t *testing.T) {
	kit.InParallel(t, uninstallers, func(t *testing.T, uninstall func(t *testing.T, db *pgtest.DB) error) {
		caller := kit.NewRole(t)
		db := pgtest.Empty(t)
		db.Exec(t, "create schema app; create schema other; create function other.ratelimit_acquire(who integer) returns integer language sql as 'select 1'")
		before := kit.SchemaAndRows(t, db)

		for _, home := range []string{"public", "app"} {
			kit.Installers["Up"](t, kit.WithSettings(db.URL, "search_path", home))
			use(t, db, home)
			db.Exec(t, "grant execute on function "+home+".ratelimit_acquire to "+caller)
			require.NoError(t, uninstall(t, db))
			require.Equal(t, before, kit.SchemaAndRows(t, db))
		}

		require.NoError(t, uninstall(t, db))
		require.Equal(t, before, kit.SchemaAndRows(t, db), "uninstalling what is not there is harmless")
	})
}

// A version of the time before the first release had another version table. It is refused, and removed.
func TestInstall_OverADevelopmentVersion(t *testing.T) {
	t.Parallel()
	empty := pgtest.Empty(t)
	before := kit.SchemaAndRows(t, empty)
	files := kit.NoError(packages.One(os.DirFS("../.."), "sql"))(t)
	plain := kit.File(t, "pgratelimit.sql", string(files["sql/pgratelimit.sql"]))
	for name, uninstall := range uninstallers {
		db := pgtest.New(t)
		use(t, db, "public")
		db.Exec(t, "drop table ratelimit.version; create table ratelimit.schema_version as select 2 as version")
		state := kit.SchemaAndRows(t, db)
		for range 2 {
			err := migrations.Up(t.Context(), db.Connect(t))
			kit.RequireState(t, "55000", err)
			require.ErrorContains(t, err, "a development version of pgratelimit is installed")
			require.ErrorContains(t, err, "Run uninstall.sql of this release")
			for _, args := range [][]string{{"--file", "../../migrations/psql/install.sql"}, {"--single-transaction", "--set", "ON_ERROR_STOP=1", "--file", plain}} {
				out, status := kit.PsqlStatus(t, db.URL, append(args, "--set", "VERBOSITY=verbose")...)
				require.Equal(t, 3, status, out)
				require.Contains(t, out, "55000: a development version of pgratelimit is installed")
				require.Contains(t, out, "Run uninstall.sql of this release")
			}
			require.Equal(t, state, kit.SchemaAndRows(t, db))
		}
		_, err := kit.Command("../..", nil, kit.Tern(), kit.TernMigrate(db.URL)...).Output()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.Contains(t, string(exit.Stderr), "a development version of pgratelimit is installed")
		require.Contains(t, string(exit.Stderr), "uninstall.sql removes it") // tern shows no hint
		db.Exec(t, "drop table ratelimit.version")                           // tern made it before it began
		require.Equal(t, state, kit.SchemaAndRows(t, db))

		require.NoError(t, uninstall(t, db), name)
		require.Equal(t, before, kit.SchemaAndRows(t, db), name)
	}
}

func TestUninstall_StopsAtObjectsThatDependOnIt(t *testing.T) {
	db := pgtest.Parallel(t)
	db.Exec(t, "create view mine as select * from ratelimit_policies()")
	before := kit.SchemaAndRows(t, db)
	for name, uninstall := range uninstallers {
		require.Error(t, uninstall(t, db), name)
		require.Equal(t, before, kit.SchemaAndRows(t, db), name)
	}
	kit.RequireState(t, "2BP01", uninstallers["Down"](t, db))
}

// All calls would wait behind it.
func TestUninstall_DoesNotWaitForLong(t *testing.T) {
	db := pgtest.Parallel(t)
	called := kit.NoError(db.Connect(t).Begin(t.Context()))(t)
	require.NoError(t, kit.ErrorOf(called.Exec(t.Context(), "select ratelimit_policies()")))
	for name, uninstall := range uninstallers {
		require.Error(t, uninstall(t, db), name)
	}
	kit.RequireState(t, "55P03", uninstallers["Down"](t, db))
}

// As a restore of rows alone would.
func TestInstall_HasOneVersion(t *testing.T) {
	db := pgtest.Parallel(t)
	kit.RequireState(t, "23505", kit.ErrorOf(db.Connect(t).Exec(t.Context(), "insert into ratelimit.version values (1)")))
}

func TestUp_NewerSchemaIsLeftAlone(t *testing.T) {
	db := pgtest.Parallel(t)
	known := kit.NewestMigration(t)
	db.Exec(t, "update ratelimit.version set version = $1", known+1)
	before := kit.SchemaAndRows(t, db)

	err := migrations.Up(context.Background(), db.Connect(t))
	var newer *migrations.NewerSchemaError
	require.ErrorAs(t, err, &newer)
	require.Equal(t, &migrations.NewerSchemaError{Installed: known + 1, Known: known}, newer)
	require.Equal(t, before, kit.SchemaAndRows(t, db))

	require.Error(t, migrations.Down(context.Background(), db.Connect(t)))
	require.Equal(t, before, kit.SchemaAndRows(t, db))
}

func TestUp_RefusesATransaction(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := pgtest.Empty(t)
	before := kit.SchemaAndRows(t, db)
	conn := db.Connect(t)

	tx := kit.NoError(conn.Begin(ctx))(t)
	for _, migrate := range []func(context.Context, *pgx.Conn) error{migrations.Up, migrations.Down} {
		require.ErrorContains(t, migrate(ctx, conn), "inside a transaction")
		require.Equal(t, byte('T'), conn.PgConn().TxStatus(), "the transaction goes on")
	}
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, before, kit.SchemaAndRows(t, db))

	kit.RequireState(t, "22012", kit.ErrorOf(conn.Exec(ctx, "begin; select 1/0")))
	require.ErrorContains(t, migrations.Up(ctx, conn), "inside a transaction", "nor one that failed")
	require.Equal(t, before, kit.SchemaAndRows(t, db))
}

func TestInstall_IntoTheSchemaAtTheHeadOfSearchPath(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"app", `Odd "Schema"; drop $$ {{ö`} {
		quoted := pgx.Identifier{schema}.Sanitize()
		for _, way := range []string{"by SET", "Up", "tern --conn-string", "psql"} {
			t.Run(schema+"/"+way, func(t *testing.T) {
				t.Parallel()
				caller := kit.NewRole(t)
				db := pgtest.Empty(t)
				db.Exec(t, "create schema "+quoted)
				if way == "by SET" {
					conn := db.Connect(t)
					kit.Execute(t, conn, "set search_path = "+quoted+", public")
					require.NoError(t, migrations.Up(t.Context(), conn))
				} else {
					kit.Installers[way](t, kit.WithSettings(db.URL, "search_path", quoted))
				}
				home := func() []string {
					return kit.Column(t, db, `
						select distinct nspname from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
						 where proname like 'ratelimit\_%'`)
				}
				require.Equal(t, []string{schema}, home())
				use(t, db, quoted)
				db.Exec(t, "grant execute on function "+quoted+".ratelimit_acquire to "+caller)
				before := kit.SchemaAndRows(t, db)

				// A later migration finds another search_path: tern resets the session after each.
				kit.ReinstallCode(t, db.Connect(t))
				require.Equal(t, []string{schema}, home())
				require.Equal(t, before, kit.SchemaAndRows(t, db))
			})
		}
	}
}

func TestInstall_AgainReplacesFunctionsAndKeepsGrants(t *testing.T) {
	kit.InParallel(t, map[string]func(t *testing.T, db *pgtest.DB){
		"InstallCodePackage": func(t *testing.T, db *pgtest.DB) { kit.ReinstallCode(t, db.Connect(t)) },
		"tern code install": func(t *testing.T, db *pgtest.DB) {
			kit.Run(t, "../..", nil, kit.Tern(), "code", "install", "sql", "--config", "migrations/tern.conf", "--conn-string", db.URL)
		},
	}, func(t *testing.T, reinstall func(t *testing.T, db *pgtest.DB)) {
		caller, greedy := kit.NewRole(t), kit.NewRole(t)
		db := pgtest.New(t)
		db.Exec(t, "grant execute on function ratelimit_acquire, ratelimit_peek to "+caller+`;
				grant execute on procedure ratelimit_cleanup_all to `+caller+`;
				grant execute on function ratelimit.cleanup_batch to `+caller)
		want := kit.SchemaAndRows(t, db)

		// What the new version changes and what it adds.
		db.Exec(t, "alter default privileges grant execute on functions to "+greedy+`;
				drop function ratelimit_overrides;
				create or replace function ratelimit.clock() returns timestamptz language sql as $$ select now() $$`)
		require.NotEqual(t, want, kit.SchemaAndRows(t, db))
		reinstall(t, db)
		db.Exec(t, "alter default privileges revoke execute on functions from "+greedy)
		require.Equal(t, want, kit.SchemaAndRows(t, db))
	})
}

func TestInstall_WithoutASchema(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"''", "nowhere"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			before := kit.FingerprintOf(t, db)
			conn := db.Connect(t)
			kit.Execute(t, conn, "set search_path = "+path)

			err := migrations.Up(context.Background(), conn)
			kit.RequireState(t, "3F000", err)
			require.ErrorContains(t, err, "no schema to install into")
			require.ErrorContains(t, err, "search_path", "the remedy is told")
			require.Equal(t, before, beforeInstall(kit.FingerprintOf(t, db)))
		})
	}
}

// A role that may not create the schema, or the functions, is told all grants that it lacks, and no other.
func TestInstall_WithoutCreateNamesTheGrant(t *testing.T) {
	t.Parallel()
	for way, install := range map[string]func(url string) string{
		"Up": func(url string) string {
			conn := kit.NoError(pgx.Connect(t.Context(), url))(t)
			defer conn.Close(t.Context())
			return fmt.Sprint(migrations.Up(t.Context(), conn))
		},
		"psql": func(url string) string {
			out, _ := kit.PsqlStatus(t, url, "--file", "../../migrations/psql/install.sql")
			return out
		},
	} {
		role, db := kit.NewRole(t), pgtest.Empty(t)
		db.Exec(t, "create schema app; grant usage on schema app to "+role)
		url := kit.WithSettings(db.URL, "role", role, "search_path", "app")
		onDatabase, onSchema := fmt.Sprintf("grant create on database %s to %s", db.Name, role), "grant create on schema app to "+role
		told := func(database, schema bool) {
			t.Helper()
			out := install(url)
			require.Equal(t, []bool{database, schema}, []bool{strings.Contains(out, onDatabase), strings.Contains(out, onSchema)}, "%s: %s", way, out)
		}
		told(true, true)
		db.Exec(t, onSchema)
		told(true, false)
		db.Exec(t, "revoke create on schema app from "+role+"; "+onDatabase)
		told(false, true)
		db.Exec(t, onSchema)
		require.NotContains(t, install(url), "may not", way)
		require.Equal(t, []string{"app"}, kit.Column(t, db, "select p.pronamespace::regnamespace::text from pg_proc as p where p.proname = 'ratelimit_version'"))
	}
}

func TestInstall_RefusesPlantedObjects(t *testing.T) {
	const taken = "functions named ratelimit_* exist already"
	type testCase struct{ plant, code, message string }
	kit.InParallel(t, map[string]testCase{
		"the same function": {`create function ratelimit_acquire(policy text, key text, cost bigint default 1, idempotency_key text default null)
			returns boolean language sql as 'select true'`, "42723", taken},
		"another signature":          {"create function ratelimit_acquire(policy text) returns boolean language sql as 'select true'", "42723", taken},
		"a name of a later release":  {"create function ratelimit_later() returns boolean language sql as 'select true'", "42723", taken},
		"a procedure":                {"create procedure ratelimit_cleanup_all() language sql as 'select true'", "42723", taken},
		"the private schema":         {"create schema ratelimit", "42501", "schema ratelimit belongs to another role"},
		"a type in a schema of ours": {"create domain ratelimit.decision as boolean", "42P06", "schema ratelimit is not empty"},
		"a function in a schema of ours": {
			"create function ratelimit.refuse(text) returns boolean language sql as 'select true'", "42P06", "schema ratelimit is not empty",
		},
	}, func(t *testing.T, test testCase) {
		planter := kit.NewRole(t)
		db := pgtest.Empty(t)
		db.Exec(t, "grant create on schema public to "+planter)
		db.Exec(t, "grant create on database "+db.Name+" to "+planter)
		if strings.Contains(test.plant, "ratelimit.") {
			db.Exec(t, "create schema ratelimit; grant all on schema ratelimit to "+planter)
		}
		kit.Execute(t, kit.ConnectAs(t, db, planter), test.plant)
		before := kit.FingerprintOf(t, db)

		out, status := kit.PsqlStatus(t, db.URL, "--file", "../../migrations/psql/install.sql", "--set", "VERBOSITY=verbose")
		require.Equal(t, 3, status)
		require.Contains(t, out, test.code+": "+test.message)
		require.Equal(t, before, kit.FingerprintOf(t, db))

		err := migrations.Up(context.Background(), db.Connect(t))
		kit.RequireState(t, test.code, err)
		require.ErrorContains(t, err, test.message)
		require.Equal(t, beforeInstall(before), beforeInstall(kit.FingerprintOf(t, db)))
	})
}

// A role that may create schemas can plant ours, with a version table that runs code when it is read or changed.
// So can a role that may create objects in our schema.
func TestInstall_RunsNothingOfAPlantedVersionTable(t *testing.T) {
	t.Parallel()
	for name, plant := range map[string]string{
		"a table with a trigger": `
			create table ratelimit.version as select 0 as version;
			create trigger escalate before update on ratelimit.version for each row execute function escalate()`,
		"an empty table with a trigger": `
			create table ratelimit.version (version integer);
			create trigger escalate before insert on ratelimit.version for each row execute function escalate()`,
		"a view with a trigger": `
			create view ratelimit.version as select 0 as version where false;
			create trigger escalate instead of insert or update on ratelimit.version for each row execute function escalate()`,
		"a view that runs code": "create view ratelimit.version as select public.version_told() as version",
		"a policy that runs code": `
			create table ratelimit.version as select 1 as version;
			alter table ratelimit.version enable row level security;
			create policy escalate on ratelimit.version using (public.version_told() = 1)`,
		"a cast that runs code": `
			create type public.told as (version integer);
			create function public.version_of(public.told) returns integer language sql as 'select public.version_told()';
			create cast (public.told as integer) with function public.version_of(public.told) as assignment;
			create table ratelimit.version as select row(1)::public.told as version`,
	} {
		for _, schema := range []string{"the planter's schema", "the installer's schema"} {
			t.Run(name+"/"+schema, func(t *testing.T) {
				t.Parallel()
				planter, installer := kit.NewRole(t), kit.NewRole(t)
				db := pgtest.Empty(t)
				db.Exec(t, fmt.Sprintf(`
					grant create on schema public to %[1]s, %[2]s;
					grant create on database %[3]s to %[1]s, %[2]s`, planter, installer, db.Name))
				owner := planter
				if schema == "the installer's schema" {
					owner = installer
				}
				conn := kit.ConnectAs(t, db, planter)
				db.Exec(t, fmt.Sprintf("create schema ratelimit authorization %s; grant all on schema ratelimit to %s", owner, planter))
				kit.Execute(t, conn, `
					create sequence public.escalated;  -- which no rollback takes back
					grant all on sequence public.escalated to public;
					create function public.version_told() returns integer language sql as $$ select nextval('public.escalated'); select 1 $$;
					create function escalate() returns trigger language plpgsql as $$ begin perform public.version_told(); return new; end $$`)
				kit.Execute(t, conn, plant)
				kit.Execute(t, conn, "grant usage on schema ratelimit to public; grant all on ratelimit.version to public",
					pgx.QueryExecModeSimpleProtocol)
				before := kit.SchemaAndRows(t, db)

				for _, url := range []string{db.URL, kit.WithSettings(db.URL, "role", installer)} {
					conn := kit.NoError(pgx.Connect(t.Context(), url))(t)
					kit.RequireState(t, "42501", migrations.Up(t.Context(), conn))
					require.NoError(t, conn.Close(t.Context()))
					require.Error(t, kit.ErrorOf(kit.RunPsql(t, url, "--file", "../../migrations/psql/install.sql")))
				}
				if schema == "the planter's schema" && strings.HasPrefix(name, "a table with") {
					// tern itself trusts the version table, so the migration looks whose schema that is in.
					_, err := kit.Command("../..", nil, kit.Tern(), kit.TernMigrate(db.URL)...).Output()
					var exit *exec.ExitError
					require.ErrorAs(t, err, &exit)
					require.Contains(t, string(exit.Stderr), "schema ratelimit belongs to another role")
				}
				require.Equal(t, before, kit.SchemaAndRows(t, db))
				require.Equal(t, []string{"false"}, kit.Column(t, db, "select is_called::text from public.escalated"))
			})
		}
	}
}

// A role that finds the newest version installed needs to own nothing.
func TestInstall_OfAnotherRole(t *testing.T) {
	t.Parallel()
	owner := kit.NewRole(t)
	db := pgtest.Empty(t)
	db.Exec(t, fmt.Sprintf("alter database %s owner to %s", db.Name, owner))
	require.NoError(t, migrations.Up(t.Context(), kit.ConnectAs(t, db, owner)))
	for name, install := range kit.Installers {
		t.Run(name, func(t *testing.T) {
			before := kit.SchemaAndRows(t, db)
			install(t, db.URL)
			require.Equal(t, before, kit.SchemaAndRows(t, db))
		})
	}
	for version, message := range map[int32]string{kit.NewestMigration(t) - 1: "PGOPTIONS='-c role=" + owner, kit.NewestMigration(t) + 1: "newer|later"} {
		db.Exec(t, "update ratelimit.version set version = $1", version)
		before := kit.SchemaAndRows(t, db)
		require.Regexp(t, message+"|upgrade the program", migrations.Up(t.Context(), db.Connect(t)).Error())
		out, err := kit.RunPsql(t, db.URL, "--file", "../../migrations/psql/install.sql")
		require.Error(t, err)
		require.Regexp(t, message, out)
		require.Equal(t, before, kit.SchemaAndRows(t, db))
	}
	db.Exec(t, "update ratelimit.version set version = $1", kit.NewestMigration(t))
	before := kit.SchemaAndRows(t, db)
	require.Equal(t, "42501", kit.SQLState(migrations.Down(t.Context(), db.Connect(t))))
	require.Equal(t, before, kit.SchemaAndRows(t, db))
	require.NoError(t, migrations.Down(t.Context(), kit.ConnectAs(t, db, owner)))
}

// A role that may not read the installed version is told who the owner is, as any other that has something to do.
func TestInstall_ByAnAppRoleNamesTheOwner(t *testing.T) {
	t.Parallel()
	owner, app := kit.NewRole(t), kit.NewRole(t)
	db := pgtest.Empty(t)
	db.Exec(t, fmt.Sprintf("alter database %s owner to %s; grant create on database %[1]s to %[3]s; grant create on schema public to %[3]s", db.Name, owner, app))
	require.NoError(t, migrations.Up(t.Context(), kit.ConnectAs(t, db, owner)))
	for _, grant := range []string{"select", "grant usage on schema ratelimit to " + app} {
		db.Exec(t, grant)
		for _, version := range []int32{kit.NewestMigration(t), kit.NewestMigration(t) - 1} {
			db.Exec(t, "update ratelimit.version set version = $1", version)
			before := kit.SchemaAndRows(t, db)
			err := migrations.Up(t.Context(), kit.ConnectAs(t, db, app))
			require.ErrorContains(t, err, "schema ratelimit belongs to another role")
			require.ErrorContains(t, err, "It belongs to "+owner+". Connect as "+owner)
			out, status := kit.PsqlStatus(t, kit.WithSettings(db.URL, "role", app), "--file", "../../migrations/psql/install.sql")
			require.Equal(t, 3, status, out)
			require.Contains(t, out, "It belongs to "+owner+".")
			require.Contains(t, out, "Connect as "+owner)
			require.Equal(t, before, kit.SchemaAndRows(t, db))
		}
	}
}

func TestInstall_AgainRefusesPlantedFunctions(t *testing.T) {
	t.Parallel()
	planter := kit.NewRole(t)
	db := pgtest.New(t)
	db.Exec(t, "grant create on schema public to "+planter)
	kit.Execute(t, kit.ConnectAs(t, db, planter), "create function ratelimit_later() returns boolean language sql as 'select true'")
	before := kit.SchemaAndRows(t, db)

	err := migrate.InstallCodePackage(context.Background(), db.Connect(t), nil, kit.CodePackage(t))
	kit.RequireState(t, "42501", err)
	require.ErrorContains(t, err, "belongs to another role")
	require.Equal(t, before, kit.SchemaAndRows(t, db))

	// In a schema where the package is not, it is nobody's business.
	kit.Execute(t, kit.ConnectAs(t, db, planter), "drop function ratelimit_later")
	db.Exec(t, "create schema app authorization "+planter)
	kit.Execute(t, kit.ConnectAs(t, db, planter), "create function app.ratelimit_acquire(policy text, key text, cost bigint, idempotency_key text) returns boolean language sql as 'select true'")
	before = kit.SchemaAndRows(t, db)
	conn := db.Connect(t)
	kit.Execute(t, conn, "set search_path = app")
	kit.ReinstallCode(t, conn)
	require.Equal(t, before, kit.SchemaAndRows(t, db))
}

func use(t *testing.T, db *pgtest.DB, home string) {
	for _, durable := range []string{"true", "false"} {
		db.Exec(t, fmt.Sprintf(`
			select %[1]s.ratelimit_define_policy('durable %[2]s', 10, 1, '1 hour', durable => %[2]s);
			select %[1]s.ratelimit_acquire('durable %[2]s', 'k', 3, 'first')`, home, durable))
	}
}

func TestMain(m *testing.M) { pgtest.Main(m) }
