package tests

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations/packages"
	"github.com/pgratelimit/pgratelimit/tests/model"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// A front is a database with the functions of PL/Proxy, over shards. It is a subject: what sets a clock or looks at rows goes to
// the shards.
type front struct{ *testDB }

// newFront makes one with so many shards, all on one server.
func newFront(t *testing.T, of int) *front {
	t.Helper()
	needPLProxy(t, pgtest.Shared(t))
	f := &front{&testDB{DB: pgtest.Empty(t), t: t}}
	for n := range of {
		f.addShard(newDB(t), n, of)
	}
	f.install(t)
	return f
}

// needPLProxy skips a test where PL/Proxy is not, and says so; it fails if RATELIMIT_TEST_NEED is plproxy.
func needPLProxy(t *testing.T, server *pgtest.Server) {
	t.Helper()
	var there bool
	conn, err := pgx.Connect(t.Context(), server.URL(""))
	require.NoError(t, err)
	defer conn.Close(t.Context())
	require.NoError(t, conn.QueryRow(t.Context(), "select exists (select from pg_available_extensions where name = 'plproxy')").Scan(&there))
	switch {
	case there:
	case os.Getenv("RATELIMIT_TEST_NEED") == "plproxy":
		t.Fatalf("%v has no extension plproxy; Debian has it for its own PostgreSQL, in postgresql-15-plproxy", server)
	default:
		t.Skipf("%v has no extension plproxy", server)
	}
}

func (f *front) addShard(db *testDB, n, of int) {
	db.t.Helper()
	db.exec("select ratelimit_define_shard($1, $2)", n, of)
	f.shards = append(f.shards, db)
}

// install makes the database a front, with the files that a user has.
func (f *front) install(t *testing.T) {
	t.Helper()
	out, err := f.installAgain(t)
	require.NoError(t, err, out)
}

func (f *front) installAgain(t *testing.T) (string, error) {
	t.Helper()
	var urls []string
	for _, db := range f.shards {
		urls = append(urls, db.URL)
	}
	cluster, err := packages.Cluster(strings.Join(urls, " "))
	require.NoError(t, err)
	f.exec(cluster)
	return f.runFile(t)
}

// runFile runs front.sql.
func (f *front) runFile(t *testing.T) (string, error) {
	t.Helper()
	files, err := packages.One(os.DirFS(".."), "plproxy")
	require.NoError(t, err)
	name := filepath.Join(t.TempDir(), "front.sql")
	require.NoError(t, os.WriteFile(name, files["plproxy/front.sql"], 0o600))
	return runPsql(t, f.URL, "--set", "ON_ERROR_STOP=1", "--set", "VERBOSITY=verbose", "--quiet", "--file", name)
}

// key is a name with something after it, so that it belongs to a shard.
func (f *front) key(n int, name string) string {
	return (&shards{dbs: f.shards}).key(n, name)
}

func (f *front) shardOf(key string) *testDB { return f.shards[client.ShardOf(key, len(f.shards))] }

func (f *front) of(t testing.TB) subject { return f.in(t) }

func (f *front) in(t testing.TB) *front {
	return &front{f.testDB.in(t)}
}

func (f *front) putBucket(policy, key string, b bucket) {
	f.t.Helper()
	f.shardOf(key).putBucket(policy, key, b)
}

// linesOf are the rows that a statement answers, as text, or the one line of its error.
func linesOf(conn *pgx.Conn, sql string, args ...any) []string {
	rows, err := conn.Query(context.Background(), sql, args...)
	if err == nil {
		var lines []string
		lines, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
			values, err := row.Values()
			return fmt.Sprint(values...), err
		})
		if err == nil {
			return lines
		}
	}
	if e := pgError(err); e != nil {
		return []string{strings.Join([]string{e.Code, e.Message, e.Detail, e.Hint}, " | ")}
	}
	return []string{err.Error()}
}

func chargesOn(policy string, keys ...string) (charges []model.Charge) {
	for _, key := range keys {
		charges = append(charges, model.Charge{BucketID: model.BucketID{Policy: policy, Key: key}, Cost: 1})
	}
	return charges
}
