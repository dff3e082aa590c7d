package tests

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// privateName is the database of a private server.
const privateName = "ratelimit_test"

// newPrivateDB returns a database on a server of its own.
func newPrivateDB(t testing.TB, settings ...string) (*testDB, *pgtest.Server) {
	server := pgtest.Private(t, settings...)
	return createDB(t, server, privateName), server
}

// reopen connects to the database of newPrivateDB again, after a restart or on a standby.
func reopen(t testing.TB, server *pgtest.Server) *testDB { return openDB(t, server, privateName) }

// createDB creates a database on a server, prepares it with SQL in which %s is its name, and installs the package.
func createDB(t testing.TB, server *pgtest.Server, name string, prepare ...string) *testDB {
	quoted := pgx.Identifier{name}.Sanitize()
	onServer(t, server, "", "create database "+quoted+" template template0")
	for _, sql := range prepare {
		onServer(t, server, name, strings.ReplaceAll(sql, "%s", quoted))
	}
	return installedDB(t, server, name)
}

// onServer runs SQL in a database of a server, on a connection of its own.
func onServer(t testing.TB, server *pgtest.Server, database, sql string) {
	conn, err := pgx.Connect(t.Context(), server.URL(database))
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), sql)
	require.NoError(t, errors.Join(err, conn.Close(t.Context())))
}

// installedDB returns a database of a server, with the package installed.
func installedDB(t testing.TB, server *pgtest.Server, name string) *testDB {
	db := openDB(t, server, name)
	require.NoError(t, migrations.Up(t.Context(), db.Connect(t)))
	return db
}

// openDB returns a database of a server as it is.
func openDB(t testing.TB, server *pgtest.Server, name string) *testDB {
	pool, err := pgxpool.New(context.Background(), server.URL(name))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return &testDB{DB: &pgtest.DB{Pool: pool, URL: server.URL(name), Name: name}, t: t}
}

// An address is the URL of a database that moves: a container that is started again has another port.
type address struct{ url atomic.Pointer[string] }

func (a *address) moveTo(url string) { a.url.Store(&url) }

// config is that of a pool whose new connections go where the database is then.
func (a *address) config(t testing.TB) *pgxpool.Config {
	config, err := pgxpool.ParseConfig(*a.url.Load())
	require.NoError(t, err)
	config.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		now, err := pgx.ParseConfig(*a.url.Load())
		if err == nil {
			c.Host, c.Port, c.Fallbacks = now.Host, now.Port, now.Fallbacks
		}
		return err
	}
	return config
}
