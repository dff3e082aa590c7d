package tests

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// newPrivateDB returns a database on a server of its own.
func newPrivateDB(t testing.TB, settings ...string) (*testDB, *pgtest.Server) {
	t.Helper()
	server := pgtest.Private(t, settings...)
	return newDBOn(t, server), server
}

// newDBOn returns the database of a private server.
func newDBOn(t testing.TB, server *pgtest.Server) *testDB {
	t.Helper()
	ctx := context.Background()
	admin, err := pgx.Connect(ctx, server.URL(""))
	require.NoError(t, err)
	_, err = admin.Exec(ctx, "create database ratelimit_test template template0")
	require.NoError(t, err)
	require.NoError(t, admin.Close(ctx))

	db := openDB(t, server)
	conn := db.Connect(t)
	require.NoError(t, migrations.Up(ctx, conn))
	return db
}

// openDB connects to the database of newPrivateDB, as one does again after a restart.
func openDB(t testing.TB, server *pgtest.Server) *testDB {
	t.Helper()
	const name = "ratelimit_test"
	pool, err := pgxpool.New(context.Background(), server.URL(name))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return &testDB{DB: &pgtest.DB{Pool: pool, URL: server.URL(name), Name: name}, t: t}
}

// createDB creates a database on a server, prepares it with SQL in which %s is its name, and
// installs the package.
func createDB(t *testing.T, server *pgtest.Server, name, prepare string) *testDB {
	t.Helper()
	quoted := pgx.Identifier{name}.Sanitize()
	for _, step := range []struct{ database, sql string }{
		{"", "create database " + quoted + " template template0"},
		{name, strings.ReplaceAll(prepare, "%s", quoted)},
	} {
		conn, err := pgx.Connect(t.Context(), server.URL(step.database))
		require.NoError(t, err)
		_, err = conn.Exec(t.Context(), step.sql)
		require.NoError(t, errors.Join(err, conn.Close(t.Context())))
	}
	return serverDB(t, server, name)
}

// serverDB returns a database of a server, with the package installed.
func serverDB(t *testing.T, server *pgtest.Server, name string) *testDB {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), server.URL(name))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	db := &testDB{DB: &pgtest.DB{Pool: pool, URL: server.URL(name), Name: name}, t: t}
	require.NoError(t, migrations.Up(t.Context(), db.Connect(t)))
	return db
}
