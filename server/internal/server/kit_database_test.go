package server_test

import (
	"context"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// newRole returns a role without rights, which is dropped after the rights that it got in db.
func newRole(t testing.TB, db *pgtest.DB) string {
	t.Helper()
	role := db.Name + "_app"
	db.Exec(t, "create role "+role+" role current_user")
	t.Cleanup(func() {
		_, err := db.Pool.Exec(context.Background(), "drop owned by "+role+"; drop role "+role)
		assert.NoError(t, err)
	})
	return role
}

// as is the connection string of db with the rights of a role and none of our own.
func as(t testing.TB, db *pgtest.DB, role string) string {
	t.Helper()
	u, err := url.Parse(db.URL)
	require.NoError(t, err)
	query := u.Query()
	query.Set("role", role)
	u.RawQuery = query.Encode()
	return u.String()
}

// install returns a database of a private server, with the package and the policies of newDB.
func install(t testing.TB, postgres *pgtest.Server) *pgtest.DB {
	t.Helper()
	const name = "limits"
	conn, err := pgx.Connect(t.Context(), postgres.URL(""))
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "create database "+name+" template template0")
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
	db := &pgtest.DB{Name: name, URL: postgres.URL(name)}
	require.NoError(t, migrations.Up(t.Context(), db.Connect(t)))
	db.Pool, err = pgxpool.New(t.Context(), db.URL)
	require.NoError(t, err)
	t.Cleanup(db.Pool.Close)
	definePolicies(t, db)
	return db
}
