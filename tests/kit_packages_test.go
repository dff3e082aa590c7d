package tests

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations/packages"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// packagesOf makes all packages, from the repository in a directory.
func packagesOf(t *testing.T, repository string) packages.Files {
	files, err := packages.All(os.DirFS(repository))
	require.NoError(t, err)
	return files
}

// unpack writes the files of one package into a directory.
func unpack(t *testing.T, repository, name, dir string) {
	files, err := packages.One(os.DirFS(repository), name)
	require.NoError(t, err)
	for path, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, filepath.Base(path)), text, 0o644))
	}
}

// An extensionServer is a private server that knows the extension.
type extensionServer struct {
	*pgtest.Server
	count *atomic.Int64
}

func newExtensionServer(t *testing.T, settings ...string) extensionServer {
	server, dir := pgtest.PrivateWithExtensions(t, settings...)
	unpack(t, "..", "extension", dir)
	return extensionServer{server, new(atomic.Int64)}
}

// empty returns a new database.
func (s extensionServer) empty(t testing.TB) *testDB {
	name := "extension_" + string(rune('a'+s.count.Load()/26)) + string(rune('a'+s.count.Add(1)%26))
	onServer(t, s.Server, "", "create database "+name+" template template0")
	return openDB(t, s.Server, name)
}

// with returns a new database in which SQL was run.
func (s extensionServer) with(t testing.TB, sql string) *testDB {
	db := s.empty(t)
	db.exec(sql)
	return db
}

// sameButExtension requires that two databases hold the same objects, but that one of them holds the extension, and has
// had temporary objects.
func sameButExtension(t *testing.T, want, got *testDB) {
	require.Equal(t, withoutExtension(fingerprintOf(t, want.DB)), withoutExtension(fingerprintOf(t, got.DB)))
}

func withoutExtension(schema string) string {
	return strings.Join(slices.DeleteFunc(strings.Split(schema, "\n"), func(line string) bool {
		return regexp.MustCompile(`^(object |comment on )?extension pgratelimit\b|^object schema pg_(toast_)?temp_`).MatchString(line)
	}), "\n")
}

// An update leaves a temporary function to its session, which may end a moment later than its connection.
const noTemporaryFunctions = "select not exists (select from pg_proc where pronamespace::regnamespace::text ~ '^pg_temp')"

// membership lists what is of the extension, the tables whose rows pg_dump takes along, and what was granted to
// others than the owner as a part of the extension.
func membership(t *testing.T, db *testDB) []string {
	return column(t, db.DB, `
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

// replayVectors replays the public vectors, for both kinds of policy.
func replayVectors(t *testing.T, db *testDB) {
	for _, durability := range []policyOption{durable, ephemeral} {
		for _, v := range vectors {
			v.replay(t, db.in(t), durability)
			db.dropPolicy(v.origin)
		}
	}
}

// statements cuts SQL at the semicolons that end a statement.
func statements(sql string) (cut []string) {
	token := regexp.MustCompile(`(?s)--[^\n]*|'[^']*'|"[^"]*"|\$[A-Za-z_]*\$|;`)
	begin := 0
	for at := 0; ; {
		found := token.FindStringIndex(sql[at:])
		if found == nil {
			return cut
		}
		text := sql[at+found[0] : at+found[1]]
		at += found[1]
		switch text[0] {
		case '$':
			at += strings.Index(sql[at:], text) + len(text)
		case ';':
			cut = append(cut, sql[begin:at])
			begin = at
		}
	}
}

// inTransaction runs statements one by one in a transaction.
func inTransaction(t *testing.T, db *testDB, statements ...string) {
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		for _, statement := range statements {
			if _, err := tx.Exec(t.Context(), statement, pgx.QueryExecModeSimpleProtocol); err != nil {
				return err
			}
		}
		return nil
	}))
}

// told is all that an error of the server says.
func told(err error) string {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return fmt.Sprint(err)
	}
	return strings.Join([]string{pgErr.Message, pgErr.Detail, pgErr.Hint}, "\n")
}
