// Package extension tests CREATE EXTENSION, the packages for other tools, and pg_upgrade.
package extension

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

func TestExtension(t *testing.T) {
	t.Parallel()
	onExtensionServer(t, newExtensionServer(t, "../.."), map[string]func(*testing.T, extensionServer){
		"AsEveryKindOfRole":     testExtensionRoles,
		"IntoASchema":           testExtensionSchemas,
		"RestoredByASuperuser":  testExtensionRestoredBySuperuser,
		"RefusesPlantedObjects": testExtensionPlanted,
		"AdoptsNothingElse":     testExtensionAdopt,
		"OtherWaysToInstall":    testExtensionOtherWays,
		"DropStopsAtDependents": testExtensionDrop,
	})
}

// A made-up next release.
func TestExtension_Update(t *testing.T) {
	t.Parallel()
	root := kit.NextRepository(t, "create table ratelimit.next (id bigint);", "drop table ratelimit.next;", kit.Edits...)
	s := newExtensionServer(t, root)
	s.migrations = os.DirFS(filepath.Join(root, "migrations"))
	onExtensionServer(t, s, map[string]func(*testing.T, extensionServer){
		"ByEveryPath":            testExtensionPaths,
		"KeepsMigrationsAway":    testExtensionKeepsMigrationsAway,
		"RestoresAnOlderVersion": testExtensionRestoreOlder,
		"RefusesPlantedObjects":  testExtensionUpdatePlanted,
		"NotAsAnotherRelease":    testExtensionNotAsAnother,
	})
}

func onExtensionServer(t *testing.T, s extensionServer, tests map[string]func(*testing.T, extensionServer)) {
	kit.OnServer(t, s.Server, "", "create role app; create role cron; create role monitor; create role owner; create role planter")
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, s)
		})
	}
}

// The catalog is that of make install by the same role, and nothing is left when the extension is dropped.
func testExtensionRoles(t *testing.T, s extensionServer) {
	for name, prepare := range map[string]string{
		"superuser":              "set role postgres",
		"CREATE on the database": "grant create on database %s to owner; create schema limits authorization owner; set role owner",
		"default privileges": `
			grant create on database %s to owner; create schema limits authorization owner; set role owner;
			alter default privileges grant all on functions to app with grant option;
			alter default privileges grant all on tables to app, public;
			alter default privileges grant all on types to app;
			alter default privileges grant all on schemas to app`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want, got := s.empty(t), s.empty(t)
			var conns []*pgx.Conn
			for _, db := range []*kit.TestDB{want, got} {
				conn := db.Connect(t)
				kit.Execute(t, conn, strings.ReplaceAll(prepare, "%s", db.Name), pgx.QueryExecModeSimpleProtocol)
				if strings.Contains(prepare, "limits") {
					kit.Execute(t, conn, "set search_path = limits")
				}
				conns = append(conns, conn)
			}
			before := kit.FingerprintOf(t, got.DB)
			require.NoError(t, migrations.Up(t.Context(), conns[0]))
			kit.Execute(t, conns[1], "create extension pgratelimit")
			sameButExtension(t, want, got)
			for _, line := range membership(t, got) {
				require.NotRegexp(t, "^granted ", line)
			}
			for _, call := range []string{
				"select ratelimit_define_policy('p', 10, 1, '1 hour')",
				"select ratelimit_acquire('p', 'k', 3, 'first'), ratelimit_peek('p', 'k'), ratelimit_refund('p', 'k', 1), ratelimit_reset('p', 'k')",
				"call ratelimit_cleanup_all()",
				"drop extension pgratelimit",
			} {
				kit.Execute(t, conns[1], call)
			}
			require.Equal(t, before, kit.FingerprintOf(t, got.DB))
		})
	}
}

func testExtensionSchemas(t *testing.T, s extensionServer) {
	for _, schema := range []string{"app", `Odd "Schema"; drop $$ {{ö`} {
		quoted := pgx.Identifier{schema}.Sanitize()
		for name, sql := range map[string]string{
			"SCHEMA":      "create extension pgratelimit schema " + quoted,
			"search_path": "set search_path = " + quoted + ", public; create extension pgratelimit",
			"adopted":     "set search_path = " + quoted + "; create extension pgratelimit version 'unpackaged'; alter extension pgratelimit update",
		} {
			t.Run(schema+"/"+name, func(t *testing.T) {
				t.Parallel()
				want, got := s.with(t, "create schema "+quoted), s.with(t, "create schema "+quoted)
				kit.Installers["Up"](t, kit.WithSettings(want.URL, "search_path", quoted))
				if name == "adopted" {
					kit.Installers["Up"](t, kit.WithSettings(got.URL, "search_path", quoted))
				}
				kit.Execute(t, got.Connect(t), sql, pgx.QueryExecModeSimpleProtocol)
				sameButExtension(t, want, got)
			})
		}
	}
	kit.RequireState(t, "3F000", kit.ErrorOf(s.with(t, "drop schema public").Connect(t).Exec(t.Context(), "create extension pgratelimit")))
}

// The update drops ratelimit_shard, and creates it anew.
const grants = `
	grant execute on function ratelimit_acquire, ratelimit_peek, ratelimit_shard to app;
	grant execute on function ratelimit_acquire_many, ratelimit_shard to app with grant option;
	grant execute on function ratelimit_version to public;
	grant usage on schema ratelimit to cron;
	grant execute on function ratelimit.cleanup_batch to cron;
	grant execute on procedure ratelimit_cleanup_all to cron;
	grant select on ratelimit.policies to monitor;
	grant select (policy_id, level) on ratelimit.buckets to monitor with grant option;`

// However the extension came to its version, it is the same, with rows and grants; a dump brings all back; and a drop leaves nothing.
func testExtensionPaths(t *testing.T, s extensionServer) {
	first, newest := kit.Releases[1], kit.Releases[2]
	createdAt := func(version string) func(*testing.T, *kit.TestDB) {
		return func(_ *testing.T, db *kit.TestDB) {
			db.Execute("create extension pgratelimit version '" + version + "'")
		}
	}
	ternAt := func(version int32) func(*testing.T, *kit.TestDB) {
		return func(t *testing.T, db *kit.TestDB) { kit.MigrateTo(t, db.DB, s.migrations, version) }
	}
	want := s.empty(t)
	kit.MigrateTo(t, want.DB, s.migrations, 1)
	want.Execute(grants)
	kit.MigrateTo(t, want.DB, s.migrations, 2)
	fresh := s.with(t, "create extension pgratelimit")
	wantMembers := membership(t, fresh)
	require.Greater(t, len(wantMembers), 100)
	for _, table := range kit.Column(t, fresh.DB, "select oid::regclass::text from pg_class where relkind = 'r' and relnamespace = 'ratelimit'::regnamespace") {
		if table != "ratelimit.version" { // of which the restored extension has its own
			require.Contains(t, wantMembers, "rows of "+table+" ")
		}
	}

	for name, path := range map[string]struct {
		begin  func(*testing.T, *kit.TestDB)
		update string
	}{
		"installed": {createdAt(newest), "select"},
		"updated":   {createdAt(first), "alter extension pgratelimit update"},
		"updated twice in a session": {createdAt(first), `
			alter extension pgratelimit update; drop extension pgratelimit; create extension pgratelimit version '` + first + "';" + grants +
			"alter extension pgratelimit update"},
		"made of a tern install": {ternAt(2), `
			create extension pgratelimit version 'unpackaged'; alter extension pgratelimit update`},
		"made of a tern install, and updated": {ternAt(1), fmt.Sprintf(`
			create extension pgratelimit version 'unpackaged'; alter extension pgratelimit update to '%s';
			alter extension pgratelimit update`, first)},
		"made of a tern install, and updated, in a transaction": {ternAt(1), fmt.Sprintf(`
			begin; create extension pgratelimit version 'unpackaged'; alter extension pgratelimit update to '%s';
			alter extension pgratelimit update; commit`, first)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := s.empty(t)
			before := kit.FingerprintOf(t, db.DB)
			path.begin(t, db)
			db.Execute(grants)
			lost := name == "updated twice in a session"
			var data *kit.Data
			if !lost {
				data = db.PutData()
			}
			conn := db.Connect(t)
			for _, statement := range kit.Statements(path.update + ";") {
				kit.Execute(t, conn, statement, pgx.QueryExecModeSimpleProtocol)
			}
			if lost {
				data = db.PutData()
			}
			require.NoError(t, conn.Close(t.Context()))
			db.Await(t, kit.Patience, noTemporaryFunctions)

			sameButExtension(t, want, db)
			require.Equal(t, wantMembers, membership(t, db))
			data.Check()
			db.Execute("select ratelimit_override('kept', 'k', 20)")

			t.Run("dump", func(t *testing.T) {
				restored := restore(t, s, db)
				sameButExtension(t, db, restored)
				require.Equal(t, kit.RowsOf(t, db.DB), kit.RowsOf(t, restored.DB))
				require.Equal(t, wantMembers, membership(t, restored))
				data.In(restored).Check()
				require.EqualValues(t, 20, restored.Must(kit.Peek(restored.Pool, "kept", "k", 0)).Capacity)
			})
			db.Execute("drop extension pgratelimit")
			require.Equal(t, before, withoutExtension(kit.FingerprintOf(t, db.DB)))
		})
	}
}

// restore restores a dump into a new database, as whoever restores a dump does.
func restore(t *testing.T, s extensionServer, db *kit.TestDB) *kit.TestDB {
	restored := s.empty(t)
	kit.Restore(t, db.URL, restored.URL)
	return restored
}

// A restore installs the newest version, whatever was dumped.
func testExtensionRestoreOlder(t *testing.T, s extensionServer) {
	db := s.with(t, "create extension pgratelimit version '"+kit.Releases[1]+"'")
	data := db.PutData()
	db.Execute("grant execute on function ratelimit_acquire to app")
	restored := restore(t, s, db)
	data.In(restored).Check()
	want := s.with(t, "create extension pgratelimit; grant execute on function ratelimit_acquire to app")
	require.Equal(t, kit.FingerprintOf(t, want.DB), kit.FingerprintOf(t, restored.DB))
}

// pg_dump does not name the owner of an extension, so a superuser who restores it becomes the owner. pg_restore --role
// keeps the owner; afterwards the statements of the doctor bring it back.
func testExtensionRestoredBySuperuser(t *testing.T, s extensionServer) {
	kit.OnServer(t, s.Server, "", "create role limits; grant pg_read_all_stats to limits")
	for name, schema := range map[string]string{"public": "public", "a schema of its own": `"Odd ""Schema"`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prepared := func(prepare string) *kit.TestDB {
				return s.with(t, fmt.Sprintf("%s; grant create on schema public to limits; do $$ begin execute format('grant create on database %%I to limits', current_database()); end $$", prepare))
			}
			db := prepared("create schema if not exists " + schema + " authorization limits")
			conn := kit.ConnectAs(t, db.DB, "limits")
			kit.Execute(t, conn, "create extension pgratelimit schema "+schema)
			kit.Execute(t, conn, "set search_path = "+schema)
			kit.Execute(t, conn, "grant execute on function ratelimit_acquire to app")
			db.Execute("alter database " + db.Name + " set search_path = " + schema)
			db.Pool.Reset()
			data := db.PutData()
			require.Empty(t, db.Findings())
			program, file := kit.FindPgDump(t), filepath.Join(t.TempDir(), "dump")
			kit.Run(t, "../..", nil, program, "--format=custom", "--file", file, "--dbname", db.URL)
			restored := func(options ...string) *kit.TestDB {
				got := prepared("select")
				args := append([]string{"--exit-on-error", "--dbname", got.URL, file}, options...)
				kit.Run(t, "../..", nil, filepath.Join(filepath.Dir(program), "pg_restore"), args...)
				got.Execute("alter database " + got.Name + " set search_path = " + schema)
				got.Pool.Reset()
				return got
			}
			same := func(got *kit.TestDB) {
				require.Empty(t, got.Findings())
				sameButExtension(t, db, got)
				require.Equal(t, membership(t, db), membership(t, got))
				data.In(got).Check()
				kit.Execute(t, kit.ConnectAs(t, got.DB, "limits"), "alter extension pgratelimit update")
			}

			same(restored("--role=limits", "--no-owner"))

			got := restored()
			kit.RequireState(t, "42501", kit.ErrorOf(kit.ConnectAs(t, got.DB, "limits").Exec(t.Context(), "select ratelimit_policies()")))
			got.Follow(got.RequireFinding("notice", "The owner of the package, postgres, is a superuser"), "limits")
			got.Await(t, kit.Patience, noTemporaryFunctions)
			same(got)

			// The statements for objects of the package do not move the extension.
			got.Execute("update pg_extension set extowner = 'app'::regrole where extname = 'pgratelimit'")
			got.Follow(got.RequireFinding("warning", "1 objects of the package belong to app, and others to limits"), "")
			got.Await(t, kit.Patience, noTemporaryFunctions)
			same(got)
		})
	}
}

// Nothing that is there is taken over.
func testExtensionPlanted(t *testing.T, s extensionServer) {
	for name, test := range map[string]struct{ plant, code string }{
		"the same function": {
			`create function ratelimit_acquire(policy text, key text, cost bigint default 1, idempotency_key text default null)
			   returns boolean language sql as 'select true'`, "42723",
		},
		"a name of a later release":     {"create function ratelimit_later() returns boolean language sql as 'select true'", "42723"},
		"a procedure":                   {"create procedure ratelimit_cleanup_all() language sql as 'select true'", "42723"},
		"the private schema":            {"create schema ratelimit", "42P06"},
		"a table in the private schema": {"create schema ratelimit; create table ratelimit.buckets (policy_id bigint)", "42P06"},
		"a version table":               {"create schema ratelimit; create table ratelimit.version (version int4)", "42P06"},
		"a development version":         {"create schema ratelimit; create table ratelimit.schema_version (version int4)", "55000"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, planter := range []string{"planter", "postgres"} {
				db := s.empty(t)
				db.Execute("grant create on database " + db.Name + " to planter; grant create on schema public to planter")
				kit.Execute(t, kit.ConnectAs(t, db.DB, planter), test.plant, pgx.QueryExecModeSimpleProtocol)
				before := kit.SchemaAndRows(t, db.DB)
				code := test.code
				if code == "55000" && planter == "planter" { // which is looked at first
					code = "42501"
				}
				kit.RequireState(t, code, kit.ErrorOf(db.Connect(t).Exec(t.Context(), "create extension pgratelimit")))
				require.Equal(t, before, kit.SchemaAndRows(t, db.DB))
				err := kit.ErrorOf(db.Connect(t).Exec(t.Context(), "create extension pgratelimit version 'unpackaged'"))
				require.Error(t, err)
				if test.code == "55000" {
					kit.RequireState(t, code, err)
				}
				require.Equal(t, before, kit.SchemaAndRows(t, db.DB))
			}
		})
	}
}

func testExtensionUpdatePlanted(t *testing.T, s extensionServer) {
	for name, plant := range map[string]string{
		"a new function":   "create function ratelimit_next() returns integer language sql as 'select 1'",
		"another function": "create function ratelimit_later() returns boolean language sql as 'select true'",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := s.with(t, "create extension pgratelimit version '"+kit.Releases[1]+"'; grant create on schema public to planter; grant usage on schema ratelimit to planter")
			kit.Execute(t, kit.ConnectAs(t, db.DB, "planter"), plant)
			before := kit.SchemaAndRows(t, db.DB)
			require.Error(t, kit.ErrorOf(db.Connect(t).Exec(t.Context(), "alter extension pgratelimit update")))
			require.Equal(t, before, kit.SchemaAndRows(t, db.DB))
		})
	}
}

// Only an install of one's own becomes an extension, and only as the release that it is.
func testExtensionAdopt(t *testing.T, s extensionServer) {
	const adopt = "create extension pgratelimit version 'unpackaged'"
	for name, test := range map[string]struct{ prepare, adopt, code, message string }{
		"not installed":       {"drop schema ratelimit cascade", adopt, "55000", "create extension pgratelimit"},
		"another role's":      {"grant create on schema public to owner", "set role owner; " + adopt, "42501", "schema ratelimit belongs to another role"},
		"in another schema":   {"create schema app", adopt + " schema app", "55000", "schema public"},
		"a planted function":  {"alter function ratelimit_peek owner to planter", adopt, "42501", "belongs to another role"},
		"a planted helper":    {"alter function ratelimit.clock owner to planter", adopt, "42501", "belongs to another role"},
		"a planted type":      {"alter type ratelimit.packed owner to planter", adopt, "42501", "belongs to another role"},
		"a copy of a version": {"create schema app; create function app.ratelimit_version() returns text language sql as 'select 1::text'", adopt, "42883", "not found"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := s.empty(t)
			kit.Installers["Up"](t, db.URL)
			db.Execute(test.prepare)
			before := kit.SchemaAndRows(t, db.DB)
			_, err := db.Connect(t).Exec(t.Context(), test.adopt)
			kit.RequireState(t, test.code, err)
			require.Contains(t, told(err), test.message)
			require.Equal(t, before, kit.SchemaAndRows(t, db.DB))
		})
	}

	// What else is in the schema stays the user's.
	db := s.empty(t)
	kit.Installers["Up"](t, db.URL)
	out, err := kit.RunPsql(t, db.URL, "--file", "../../docs/postgrest/install.sql")
	require.NoError(t, err, out)
	db.Execute(adopt)
	db.Execute("alter extension pgratelimit update")
	_, err = db.Connect(t).Exec(t.Context(), "drop extension pgratelimit")
	kit.RequireState(t, "2BP01", err)
	require.Contains(t, told(err), "pre_request")
	for _, line := range membership(t, db) {
		require.NotContains(t, line, "pre_request")
	}
}

func testExtensionNotAsAnother(t *testing.T, s extensionServer) {
	db := s.empty(t)
	kit.MigrateTo(t, db.DB, s.migrations, 2)
	before := kit.SchemaAndRows(t, db.DB)
	err := kit.ErrorOf(db.Connect(t).Exec(t.Context(), "create extension pgratelimit version 'unpackaged'; alter extension pgratelimit update to '"+kit.Releases[1]+"'"))
	kit.RequireState(t, "55000", err)
	require.Contains(t, told(err), "another schema version")
	require.Equal(t, before, kit.SchemaAndRows(t, db.DB))
}

// A migration refuses to change an extension, before anything has changed.
func testExtensionKeepsMigrationsAway(t *testing.T, s extensionServer) {
	for _, way := range []struct{ from, to int32 }{{1, 2}, {2, 1}, {2, 0}} {
		db := s.with(t, "create extension pgratelimit version '"+kit.Releases[way.from]+"'")
		before := kit.SchemaAndRows(t, db.DB)
		kit.RequireState(t, "55000", kit.Migrate(t, db.DB, s.migrations, way.to))
		require.Equal(t, before, kit.SchemaAndRows(t, db.DB), way)
	}
}

// The other ways to install leave an extension alone, and say what to do.
func testExtensionOtherWays(t *testing.T, s extensionServer) {
	for _, installed := range []bool{true, false} {
		db := s.with(t, "create extension pgratelimit")
		if !installed { // as if it were of an older release
			db.Execute("update ratelimit.version set version = 0")
		}
		before := kit.SchemaAndRows(t, db.DB)
		err := migrations.Up(t.Context(), db.Connect(t))
		_, status := kit.PsqlStatus(t, db.URL, "--file", "../../migrations/psql/install.sql")
		require.Equal(t, installed, err == nil, err)
		require.Equal(t, installed, status == 0)
		if !installed {
			kit.RequireState(t, "55000", err)
			require.ErrorContains(t, err, "alter extension pgratelimit update")
		}
		err = migrations.Down(t.Context(), db.Connect(t))
		kit.RequireState(t, "55000", err)
		require.ErrorContains(t, err, "drop extension pgratelimit")
		_, status = kit.PsqlStatus(t, db.URL, "--file", "../../migrations/psql/uninstall.sql")
		require.Equal(t, 3, status)
		require.Equal(t, before, kit.SchemaAndRows(t, db.DB))
	}
	// PostgreSQL keeps tern itself away.
	db := s.with(t, "create extension pgratelimit")
	before := kit.SchemaAndRows(t, db.DB)
	_, err := kit.Command("../..", nil, kit.Tern(), append(kit.TernMigrate(db.URL), "--destination", "0")...).Output()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Contains(t, string(exit.Stderr), "extension pgratelimit requires it")
	require.Equal(t, before, kit.SchemaAndRows(t, db.DB))
}

func testExtensionDrop(t *testing.T, s extensionServer) {
	db := s.with(t, "create extension pgratelimit")
	db.Execute("create view mine as select * from ratelimit_policies()")
	before := kit.SchemaAndRows(t, db.DB)
	kit.RequireState(t, "2BP01", kit.ErrorOf(db.Pool.Exec(context.Background(), "drop extension pgratelimit")))
	require.Equal(t, before, kit.SchemaAndRows(t, db.DB))
}

// make install-extension puts the files where PGXS says.
func TestExtension_MakeInstall(t *testing.T) {
	t.Parallel()
	pgxs, err := exec.Command("pg_config", "--pgxs").Output()
	if err == nil {
		_, err = os.Stat(strings.TrimSpace(string(pgxs)))
	}
	if err != nil {
		t.Skipf("no PGXS on this machine: %v", err)
	}
	share := kit.NoError(exec.Command("pg_config", "--sharedir").Output())(t)
	dir := t.TempDir()
	kit.Run(t, "../..", nil, "make", "install-extension", "DESTDIR="+dir)
	installed := filepath.Join(dir, strings.TrimSpace(string(share)), "extension")
	want := t.TempDir()
	unpack(t, "../..", "extension", want)
	for _, other := range []string{"META.json", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"} {
		require.NoError(t, os.Remove(filepath.Join(want, other)))
	}
	require.Equal(t, kit.ReadTree(t, want), kit.ReadTree(t, installed))
}

func TestMain(m *testing.M) { pgtest.Main(m) }
