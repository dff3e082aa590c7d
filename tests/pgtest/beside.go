package pgtest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// beside makes a cluster without data beside that of a private server, of the same programs, and a server of the test's own of it. A test
// is skipped when its server is in a container, or comes without a program.
func beside(t testing.TB, of *Server, program string) (server *Server, c, source *cluster) {
	t.Helper()
	source, ok := of.host.(*cluster)
	if !ok {
		t.Skipf("%s takes PostgreSQL on this machine: RATELIMIT_TEST_REQUIRE=local", program)
	}
	if _, err := os.Stat(source.program(program)); err != nil {
		t.Skipf("the server comes without %s: %v", program, err)
	}
	c = noError(newCluster(source.bin, filepath.Dir(source.dir)))(t)
	c.made = source.made
	server = &Server{Rung: of.Rung, Version: of.Version, host: c}
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	return server, c, source
}

// Standby returns a server of the test's own that follows a private one by streaming replication, and
// has the same settings but for those given. It streams when it is returned. A test is skipped when its
// server is in a container, since these do not let each other in, or comes without pg_basebackup.
func Standby(t testing.TB, primary *Server, settings ...string) *Server {
	t.Helper()
	standby, c, source := beside(t, primary, "pg_basebackup")
	standby.HasCron = primary.HasCron
	require.NoError(t, c.follow(context.Background(), source, settings))
	return standby
}

// follow copies a running cluster, starts the copy as its standby, and waits until the source, which has no other, says that it streams.
func (c *cluster) follow(ctx context.Context, source *cluster, settings []string) error {
	err := c.run(ctx, c.program("pg_basebackup"), "--pgdata", c.data(), "--dbname", "user=postgres port=5432 host="+source.dir,
		"--checkpoint", "fast", "--no-sync", "--write-recovery-conf")
	if err != nil {
		return err
	}
	if err := c.configure(append([]string{"unix_socket_directories=" + c.dir}, settings...)); err != nil {
		return err
	}
	if err := c.Start(ctx); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, source.URL(""))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		var streaming bool
		err := conn.QueryRow(ctx, "select exists (select from pg_stat_replication where state = 'streaming' and application_name <> 'pg_basebackup')").Scan(&streaming)
		if err != nil || streaming {
			return err
		}
		if time.Now().After(deadline) {
			return errors.New("pgtest: the standby does not stream")
		}
	}
}

// Upgrade stops a server, and starts what pg_upgrade --link makes of it, with the same version. It skips the test where the server is in a
// container, or comes without pg_upgrade.
func Upgrade(t testing.TB, old *Server, settings ...string) *Server {
	t.Helper()
	upgraded, c, source := beside(t, old, "pg_upgrade")
	require.NoError(t, c.initialize(t.Context(), false, settings))
	require.NoError(t, c.Stop(t.Context(), false))
	require.NoError(t, source.Stop(t.Context(), false))
	require.NoError(t, c.run(t.Context(), c.program("pg_upgrade"), "--link", "--old-bindir", source.bin, "--new-bindir", c.bin,
		"--old-datadir", source.data(), "--new-datadir", c.data(), "--username", "postgres", "--socketdir", c.dir))
	require.NoError(t, c.Start(t.Context()))
	return upgraded
}
