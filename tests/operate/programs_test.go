package operate

import (
	"path/filepath"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// psql runs one of pg_cron's scripts with psql.
func psql(t *testing.T, db *kit.TestDB, name string) {
	out, err := kit.RunPsql(t, db.URL, "--file", filepath.Join("../../pg_cron", name))
	require.NoError(t, err, "%s", out)
	require.NotContains(t, out, "ERROR")
}
