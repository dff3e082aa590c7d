package kit

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// RunNode runs tests of client/node on a database. Where Node.js is missing the test is skipped, unless RATELIMIT_TEST_EXAMPLES is
// "all": then it is installed.
func RunNode(t *testing.T, url string, env []string, command string, args ...string) {
	t.Helper()
	err := nodePackages()
	if err != nil && os.Getenv("RATELIMIT_TEST_EXAMPLES") != "all" {
		t.Skipf("RATELIMIT_TEST_EXAMPLES=all installs Node.js and the packages of client/node: %v", err)
	}
	require.NoError(t, err)
	c := exec.CommandContext(t.Context(), command, args...)
	c.Dir = "../../client/node"
	c.Env = append(append(os.Environ(), PgVariables(t, url)...), env...)
	c.Env = append(c.Env, "NODE_OPTIONS=--test-reporter=tap") // of Node.js 20 the default
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Regexp(t, `(?m)^# pass [1-9]\d*$`, string(out))
	require.Regexp(t, `(?m)^# skipped 0$`, string(out))
}

var nodePackages = sync.OnceValue(func() error {
	prepare := func() error {
		out, err := Command("../..", nil, "sh", "-c",
			`node --eval 'if (parseInt(process.versions.node) < 20) throw "Node.js 20 or later"' && make --no-print-directory client/node/node_modules`).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	}
	err := prepare()
	if err != nil && os.Getenv("RATELIMIT_TEST_EXAMPLES") == "all" {
		if err := pgtest.Install(context.Background(), "nodejs", "npm"); err != nil {
			return err
		}
		return prepare()
	}
	return err
})
