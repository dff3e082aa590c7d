package extension

import (
	"archive/zip"
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/golang-migrate/migrate/v4"
	database "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	_ "github.com/golang-migrate/migrate/v4/source/file" // reads the directory
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"github.com/pgratelimit/pgratelimit/migrations/packages"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"
)

// A migrationTool gets the one file of a release as a migration of its own, by what docs/installing.md says. goose and golang-migrate are
// themselves; the others are what their documentation says of them.
var migrationTools = map[string]struct {
	records string // what it keeps in the database
	file    string
	form    string // of the file, with the release's for %s
	run     func(t *testing.T, db *kit.TestDB, dir, text string) error
}{
	"goose":          {"goose_db_version", "00001_pgratelimit.sql", "-- +goose Up\n-- +goose StatementBegin\n%s\n-- +goose StatementEnd\n", byTool(withGoose)},
	"golang-migrate": {"schema_migrations", "1_pgratelimit.up.sql", "%s", byTool(withMigrate)},
	"flyway": {"", "V1__pgratelimit.sql", "%s", func(t *testing.T, db *kit.TestDB, _, text string) error {
		return inTransaction(t, db, kit.Statements(text)...)
	}},
	"dbmate": {"", "1_pgratelimit.sql", "-- migrate:up\n%s", func(t *testing.T, db *kit.TestDB, _, text string) error {
		return inTransaction(t, db, strings.TrimPrefix(text, "-- migrate:up\n"))
	}},
	// Statement by statement in a pipeline, each parsed when those before it have run.
	"supabase": {"", "1_pgratelimit.sql", "begin;\n%s\ncommit;\n", func(t *testing.T, db *kit.TestDB, _, text string) error {
		batch := new(pgconn.Batch)
		for _, statement := range kit.Statements(text) {
			batch.ExecParams(statement, nil, nil, nil, nil)
		}
		return db.Connect(t).PgConn().ExecBatch(t.Context(), batch).Close()
	}},
}

func byTool(apply func(db *sql.DB, dir string) error) func(t *testing.T, db *kit.TestDB, dir, _ string) error {
	return func(t *testing.T, db *kit.TestDB, dir, _ string) error {
		conn := kit.NoError(sql.Open("pgx", db.URL))(t)
		defer conn.Close()
		return apply(conn, dir)
	}
}

func withGoose(db *sql.DB, dir string) error {
	provider, err := goose.NewProvider(goose.DialectPostgres, db, os.DirFS(dir))
	if err != nil {
		return err
	}
	_, err = provider.Up(context.Background())
	return err
}

func withMigrate(db *sql.DB, dir string) error {
	driver, err := database.WithInstance(db, &database.Config{})
	if err != nil {
		return err
	}
	migrator, err := migrate.NewWithDatabaseInstance("file://"+dir, "pgx5", driver)
	if err != nil {
		return err
	}
	err = migrator.Up()
	ofSource, ofDriver := migrator.Close()
	return errors.Join(err, ofSource, ofDriver)
}

func TestPackages_MigrationTools(t *testing.T) {
	t.Parallel()
	text := string(allPackages(t)["sql/pgratelimit.sql"])
	for name, tool := range migrationTools {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want, db, dir := pgtest.New(t), &kit.TestDB{DB: pgtest.Empty(t), T: t}, t.TempDir()
			migration := strings.Replace(tool.form, "%s", text, 1)
			require.NoError(t, os.WriteFile(filepath.Join(dir, tool.file), []byte(migration), 0o600))
			forget := "select"
			if tool.records != "" {
				forget = "drop table " + tool.records
			}
			require.NoError(t, tool.run(t, db, dir, migration))
			db.Execute(forget)
			require.Equal(t, kit.FingerprintOf(t, want), kit.FingerprintOf(t, db.DB))

			// Nor does it harm where another way has installed the same, and over anything else it changes nothing.
			other := kit.NewDB(t)
			data := other.PutData()
			require.NoError(t, tool.run(t, other, dir, migration))
			data.Check()
			other.Execute(forget)
			require.Equal(t, kit.FingerprintOf(t, want), kit.FingerprintOf(t, other.DB))
			newer := kit.NewDB(t)
			newer.Execute("update ratelimit.version set version = 99")
			before := kit.FingerprintOf(t, newer.DB)
			require.ErrorContains(t, tool.run(t, newer, dir, migration), "a newer schema is installed")
			newer.Execute("drop table if exists goose_db_version, schema_migrations")
			require.Equal(t, before, kit.FingerprintOf(t, newer.DB))
		})
	}
}

// Outside a transaction it changes nothing, whether or not the client goes on after the first error.
func TestPackages_NeedATransaction(t *testing.T) {
	t.Parallel()
	path := kit.File(t, "pgratelimit.sql", string(allPackages(t)["sql/pgratelimit.sql"]))
	for _, stop := range []string{"0", "1"} {
		for _, db := range []*pgtest.DB{pgtest.Empty(t), pgtest.New(t)} {
			before := kit.SchemaAndRows(t, db)
			out, _ := kit.PsqlStatus(t, db.URL, "--set", "ON_ERROR_STOP="+stop, "--file", path, "--command", "select 'read only: ' || current_setting('default_transaction_read_only')")
			require.Contains(t, out, "this file needs a transaction")
			require.Equal(t, stop == "0", strings.Contains(out, "read only: off"))
			require.Equal(t, before, kit.SchemaAndRows(t, db))
		}
	}
}

// A table stands in for pg_tle and shows what it is told: the scripts of the extension.
func TestPackages_PgTLE(t *testing.T) {
	t.Parallel()
	files := allPackages(t)
	db := &kit.TestDB{DB: pgtest.Empty(t), T: t}
	db.Execute(`
		create schema pgtle;
		create table pgtle.script (name text, source text, target text, text text, comment text);
		create table pgtle.choice (version text);
		create function pgtle.install_extension(name text, version text, description text, ext text,
		                                        requires text[] default null, schema text default null)
		  returns boolean language sql as $$ insert into pgtle.script values ($1, null, $2, $4, $3) returning true $$;
		create function pgtle.install_extension_version_sql(name text, version text, ext text)
		  returns boolean language sql as $$ insert into pgtle.script values ($1, null, $2, $3) returning true $$;
		create function pgtle.install_update_path(name text, fromvers text, tovers text, ext text)
		  returns boolean language sql as $$ insert into pgtle.script values ($1, $2, $3, $4) returning true $$;
		create function pgtle.set_default_version(name text, version text)
		  returns boolean language sql as $$ delete from pgtle.choice; insert into pgtle.choice values ($2) returning true $$;
		create function pgtle.available_extensions(out name text) returns setof text
		  language sql as $$ select distinct name from pgtle.script $$;
		create function pgtle.available_extension_versions(out name text, out version text) returns setof record
		  language sql as $$ select name, target from pgtle.script where source is null $$;
		create function pgtle.extension_update_paths(name text, out path text) returns setof text
		  language sql as $$ select s.source || '--' || s.target from pgtle.script as s where s.name = $1 $$`)
	for range 2 {
		require.NoError(t, kit.ErrorOf(db.Connect(t).Exec(t.Context(), string(files["pg_tle/pg_tle.sql"]))))

		told := map[string]string{}
		rows := kit.NoError(db.Pool.Query(t.Context(), `
			select concat_ws('--', name, source, target) || '.sql', text from pgtle.script`))(t)
		var name, text string
		_, err := pgx.ForEachRow(rows, []any{&name, &text}, func() error {
			require.NotContains(t, told, name)
			told[name] = text
			return nil
		})
		require.NoError(t, err)
		want := map[string]string{}
		for path, text := range files {
			if name, ok := strings.CutPrefix(path, "extension/"); ok && strings.HasSuffix(name, ".sql") {
				_, script, _ := strings.Cut(string(text), "\n") // without the line for psql
				want[name] = script
			}
		}
		require.Equal(t, want, told)
		control := string(files["extension/pgratelimit.control"])
		require.Contains(t, control, "default_version = '"+kit.Column(t, db.DB, "select version from pgtle.choice")[0]+"'\n")
		require.Contains(t, control, "comment = '"+kit.Column(t, db.DB, "select comment from pgtle.script where comment is not null")[0]+"'\n")
	}
}

// Where PostgreSQL has pg_tle, it gets the file itself.
func TestPackages_PgTLEItself(t *testing.T) {
	t.Parallel()
	if len(kit.Column(t, pgtest.Empty(t), "select name::text from pg_available_extensions where name = 'pg_tle'")) == 0 {
		t.Skip("PostgreSQL has no pg_tle here; what the file tells it was compared")
	}
	server := pgtest.Private(t, "shared_preload_libraries=pg_tle")
	kit.OnServer(t, server, "", "create role app")
	kit.OnServer(t, server, "", "create database made template template0")
	want := kit.CreateDB(t, server, "wanted")
	db := kit.OpenDB(t, server, "made")
	want.Execute("create extension pg_tle; grant execute on function ratelimit_acquire to app")
	db.Execute("create extension pg_tle")
	for range 2 {
		require.NoError(t, kit.ErrorOf(db.Connect(t).Exec(t.Context(), string(allPackages(t)["pg_tle/pg_tle.sql"]))))
	}
	withoutScripts := func(db *kit.TestDB) string { // which pg_tle keeps in functions
		return strings.Join(slices.DeleteFunc(strings.Split(withoutExtension(kit.FingerprintOf(t, db.DB)), "\n"), func(line string) bool {
			return strings.Contains(line, "pgtle") && strings.Contains(line, "pgratelimit")
		}), "\n")
	}
	before := kit.FingerprintOf(t, db.DB)
	db.Execute("create extension pgratelimit")
	db.Execute("grant execute on function ratelimit_acquire to app")
	db.Pool.Reset()
	db.Await(t, kit.Patience, noTemporaryFunctions)
	require.Equal(t, withoutScripts(want), withoutScripts(db))
	for _, line := range membership(t, db) {
		require.NotRegexp(t, "^granted ", line)
	}
	db.Execute("drop extension pgratelimit")
	require.Equal(t, withoutExtension(before), withoutExtension(kit.FingerprintOf(t, db.DB)))
}

func TestPackages_PGXN(t *testing.T) {
	t.Parallel()
	files := allPackages(t)
	var meta struct {
		Name, Version, Abstract, Maintainer, License string
		Provides                                     map[string]struct{ File, Version, Docfile string }
		MetaSpec                                     struct{ Version string } `json:"meta-spec"`
	}
	require.NoError(t, json.Unmarshal(files["extension/META.json"], &meta))
	version := kit.Column(t, pgtest.New(t), "select ratelimit_version()")[0]
	require.Equal(t, []string{"pgratelimit", version, "postgresql", "1.0.0"}, []string{meta.Name, meta.Version, meta.License, meta.MetaSpec.Version})
	require.NotEmpty(t, meta.Abstract)
	require.NotEmpty(t, meta.Maintainer)
	provided := meta.Provides["pgratelimit"]
	require.Equal(t, version, provided.Version)
	require.Contains(t, files, "extension/"+provided.File)
	require.Contains(t, files, "extension/"+provided.Docfile)
}

// A release is the same bytes each time, and has every package.
func TestPackages_ReleaseIsReproducible(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	first := kit.NoError(packages.Release(os.DirFS("../..")))(t)
	require.Equal(t, first, kit.NoError(packages.Release(os.DirFS("../..")))(t))

	unpacked := packages.Files{}
	zipped := first["pgratelimit-"+kit.Releases[kit.NewestMigration(t)]+".zip"]
	for _, member := range kit.NoError(zip.NewReader(bytes.NewReader(zipped), int64(len(zipped))))(t).File {
		_, name, _ := strings.Cut(member.Name, "/")
		require.Less(t, member.Modified.Year(), 1981, "the zip format has no other way to say: none")
		unpacked["extension/"+name] = kit.NoError(io.ReadAll(kit.NoError(member.Open())(t)))(t)
	}
	all := allPackages(t)
	for _, single := range []string{"sql/pgratelimit.sql", "sql/uninstall.sql", "citus/citus.sql", "citus/citus_uninstall.sql", "pg_tle/pg_tle.sql"} {
		require.Equal(t, string(all[single]), string(first[filepath.Base(single)]), single) // the names that texts and hints say
		delete(all, single)
	}
	require.Equal(t, slices.Sorted(maps.Keys(all)), slices.Sorted(maps.Keys(unpacked)))
	require.Equal(t, all, unpacked)
	require.Equal(t, len(first)-1, bytes.Count(first["SHA256SUMS"], []byte("\n")))
}

func allPackages(t *testing.T) packages.Files {
	return kit.NoError(packages.All(os.DirFS("../..")))(t)
}

func unpack(t *testing.T, repository, name, dir string) {
	for path, text := range kit.NoError(packages.One(os.DirFS(repository), name))(t) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, filepath.Base(path)), text, 0o644))
	}
}

// An extensionServer is a private server that knows the extension.
type extensionServer struct {
	*pgtest.Server
	count      *atomic.Int64
	migrations fs.FS // of the made-up release
}

// newExtensionServer starts a server that knows the extension of a repository.
func newExtensionServer(t *testing.T, repository string) extensionServer {
	server, dir := pgtest.PrivateWithExtensions(t)
	unpack(t, repository, "extension", dir)
	return extensionServer{server, new(atomic.Int64), nil}
}

func (s extensionServer) empty(t testing.TB) *kit.TestDB {
	name := "extension_" + string(rune('a'+s.count.Load()/26)) + string(rune('a'+s.count.Add(1)%26))
	kit.OnServer(t, s.Server, "", "create database "+name+" template template0")
	return kit.OpenDB(t, s.Server, name)
}

func (s extensionServer) with(t testing.TB, sql string) *kit.TestDB {
	db := s.empty(t)
	db.Execute(sql)
	return db
}

// sameButExtension requires the same objects of two databases, but the extension itself and what is left of temporary objects.
func sameButExtension(t *testing.T, want, got *kit.TestDB) {
	require.Equal(t, withoutExtension(kit.FingerprintOf(t, want.DB)), withoutExtension(kit.FingerprintOf(t, got.DB)))
}

var ofExtension = regexp.MustCompile(`^(object |comment on )?extension pgratelimit\b|^object schema pg_(toast_)?temp_`)

func withoutExtension(schema string) string {
	return strings.Join(slices.DeleteFunc(strings.Split(schema, "\n"), ofExtension.MatchString), "\n")
}

// An update leaves a temporary function to its session, which may end a moment later than its connection.
const noTemporaryFunctions = "select not exists (select from pg_proc where pronamespace::regnamespace::text ~ '^pg_temp')"

// membership lists what is of the extension, the tables whose rows pg_dump takes along, and what was granted to
// others than the owner as a part of the extension.
func membership(t *testing.T, db *kit.TestDB) []string {
	return kit.Column(t, db.DB, `
		with extension as (select * from pg_extension where extname = 'pgratelimit'),
		     member as (select i.type || ' ' || i.identity as name, d.*
		                  from extension as e
		                  join pg_depend as d on d.refclassid = 'pg_extension'::regclass and d.refobjid = e.oid and d.deptype = 'e'
		                 cross join lateral pg_identify_object(d.classid, d.objid, d.objsubid) as i)
		select 'member ' || name from member
		union all
		select format('rows of %s %s', c.oid::regclass, c.condition)
		  from extension as e, unnest(e.extconfig, e.extcondition) as c (oid, condition)
		union all
		select format('granted %s %s', m.name, a)
		  from member as m
		  join pg_init_privs as i on (i.classoid, i.objoid) = (m.classid, m.objid)
		 cross join extension as e
		 cross join lateral aclexplode(i.initprivs) as a
		 where a.grantee <> e.extowner
		union all
		select format('version %s in %s of %s', extversion, extnamespace::regnamespace, extowner::regrole) from extension
		 order by 1`)
}

func inTransaction(t *testing.T, db *kit.TestDB, statements ...string) error {
	return pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		for _, statement := range statements {
			if _, err := tx.Exec(t.Context(), statement, pgx.QueryExecModeSimpleProtocol); err != nil {
				return err
			}
		}
		return nil
	})
}

// told is all that an error of the server says.
func told(err error) string {
	pgErr := kit.PgError(err)
	if pgErr == nil {
		return fmt.Sprint(err)
	}
	return strings.Join([]string{pgErr.Message, pgErr.Detail, pgErr.Hint}, "\n")
}

// A server of another version takes other programs: this one goes from its version to the same, by the same steps.
func TestPgUpgrade_KeepsAllBuckets(t *testing.T) {
	t.Parallel()
	s := newExtensionServer(t, "../..")
	installed := map[string]string{"plain": "", "extension": "create extension pgratelimit"}
	for name, create := range installed {
		kit.OnServer(t, s.Server, "", "create database "+name+" template template0")
		db := kit.OpenDB(t, s.Server, name)
		if create != "" {
			db.Execute(create)
		} else {
			db = kit.InstalledDB(t, s.Server, name)
		}
		db.Policy("durable", 10, 1, kit.ADay).Policy("ephemeral", 10, 1, kit.ADay, kit.Ephemeral).Lend("slots", 3, kit.ADay)
		db.Take("durable", "k", 3, "id").Take("ephemeral", "k", 4)
		require.True(t, kit.NoError(kit.Hold(db.Pool, "slots", "k", "holder", 2))(t).Allowed)
		db.Pool.Close()
	}
	upgraded := pgtest.Upgrade(t, s.Server)
	for name, create := range installed {
		db := kit.OpenDB(t, upgraded, name)
		require.Equal(t, []int64{7, 6, 1}, []int64{db.Left("durable", "k"), db.Left("ephemeral", "k"), db.Left("slots", "k")}, name)
		require.True(t, db.Acquire("durable", "k", 3, "id").Replayed, name)
		require.EqualValues(t, 5, db.Acquire("durable", "k", 2).Remaining, name)
		require.Equal(t, create != "", db.Number("select count(*) from pg_extension where extname = 'pgratelimit'") == 1, name)
	}
}
