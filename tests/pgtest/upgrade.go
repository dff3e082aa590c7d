package pgtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Upgrade stops a server, and starts what pg_upgrade --link makes of it, with the same version. It skips the test where the server is in a
// container, or comes without pg_upgrade.
func Upgrade(t testing.TB, old *Server, settings ...string) *Server {
	t.Helper()
	source, ok := old.host.(*cluster)
	if !ok {
		t.Skip("pg_upgrade takes PostgreSQL on this machine: RATELIMIT_TEST_REQUIRE=local")
	}
	if _, err := os.Stat(source.program("pg_upgrade")); err != nil {
		t.Skipf("the server comes without pg_upgrade: %v", err)
	}
	c, err := newCluster(source.bin, filepath.Dir(source.dir))
	require.NoError(t, err)
	c.made = source.made
	upgraded := &Server{Rung: old.Rung, Version: old.Version, host: c}
	t.Cleanup(func() { assert.NoError(t, upgraded.Close()) })
	require.NoError(t, c.initialize(t.Context(), false, settings))
	require.NoError(t, c.Stop(t.Context(), false))
	require.NoError(t, source.Stop(t.Context(), false))
	require.NoError(t, c.run(t.Context(), c.program("pg_upgrade"), "--link", "--old-bindir", source.bin, "--new-bindir", c.bin,
		"--old-datadir", source.data(), "--new-datadir", c.data(), "--username", "postgres", "--socketdir", c.dir))
	require.NoError(t, c.Start(t.Context()))
	return upgraded
}
