package pgtest

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Upgrade stops a server, and starts what pg_upgrade --link makes of it, with the same version. It skips the test where the server is in a
// container, or comes without pg_upgrade.
func Upgrade(t testing.TB, old *Server, settings ...string) *Server {
	upgraded, c, source := beside(t, old, "pg_upgrade")
	require.NoError(t, c.initialize(t.Context(), false, settings))
	require.NoError(t, c.Stop(t.Context(), false))
	require.NoError(t, source.Stop(t.Context(), false))
	require.NoError(t, c.run(t.Context(), c.program("pg_upgrade"), "--link", "--old-bindir", source.bin, "--new-bindir", c.bin,
		"--old-datadir", source.data(), "--new-datadir", c.data(), "--username", "postgres", "--socketdir", c.dir))
	require.NoError(t, c.Start(t.Context()))
	return upgraded
}
