package tests

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// The image has installed the package and scheduled clean-up when it answers for the first time.
func TestDocker_ImageIsReadyToUse(t *testing.T) {
	t.Parallel()
	if pgtest.Shared(t).Rung != "docker" {
		t.Skip("the tests do not run on Docker")
	}
	server := pgtest.Private(t)
	require.True(t, server.HasCron)
	db := serverDB(t, server, "postgres")
	require.Len(t, jobs(db), 2)
}
