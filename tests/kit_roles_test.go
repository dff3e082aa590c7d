package tests

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// newRole returns a role without rights. Call it before creating the database in which it gets some, which is then dropped first.
func newRole(t testing.TB) string {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, pgtest.Shared(t).URL(""))
	require.NoError(t, err)
	name := "ratelimit_test_" + strings.ToLower(rand.Text())
	require.NoError(t, errorOf(conn.Exec(ctx, "create role "+name+" role current_user")))
	t.Cleanup(func() {
		assert.NoError(t, errorOf(conn.Exec(ctx, "drop role "+name)))
		assert.NoError(t, conn.Close(ctx))
	})
	return name
}

// connectAs returns a connection with the rights of a role and none of our own.
func connectAs(t testing.TB, db *pgtest.DB, role string) *pgx.Conn {
	conn := db.Connect(t)
	execute(t, conn, "set role "+role)
	return conn
}

func execute(t testing.TB, conn *pgx.Conn, sql string, args ...any) {
	require.NoError(t, errorOf(conn.Exec(context.Background(), sql, args...)), "%.200s", sql)
}
