package pgtest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// Standby returns a server of the test's own that follows a private one by streaming replication, and
// has the same settings but for those given. It streams when it is returned. A test is skipped when its
// server is in a container, since these do not let each other in, or comes without pg_basebackup.
func Standby(t testing.TB, primary *Server, settings ...string) *Server {
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
