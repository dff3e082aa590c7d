package pgtest

import (
	"os"
	"path/filepath"
	"testing"

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
	c, err := newCluster(source.bin, filepath.Dir(source.dir))
	require.NoError(t, err)
	c.made = source.made
	server = &Server{Rung: of.Rung, Version: of.Version, host: c}
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	return server, c, source
}
