package client_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// The Node client has tests of its own.
func TestNode_OwnTests(t *testing.T) {
	t.Parallel()
	runNode(t, pgtest.New(t).URL, "npm", "test")
}

// Sessions belong to other clients after each transaction.
func TestNode_PgBouncer(t *testing.T) {
	t.Parallel()
	db, pooler := pgtest.New(t), pgtest.StartPooler(t)
	t.Log(pooler)
	runNode(t, pooler.URL(db.Name), "node", "--test", "--test-concurrency=1", "test/vectors.test.js", "test/drivers.test.js")
}

// runNode runs a command in client/node, on a database of its own.
func runNode(t *testing.T, url, command string, args ...string) {
	t.Helper()
	needNode(t)
	c := exec.CommandContext(t.Context(), command, args...)
	c.Dir = "../../client/node"
	c.Env = append(os.Environ(), kit.PgVariables(t, url)...)
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Regexp(t, `(?m)^# pass [1-9]\d*$`, string(out))
	require.Regexp(t, `(?m)^# skipped 0$`, string(out))
}

// needNode skips the test where Node.js is missing, unless RATELIMIT_TEST_EXAMPLES is "all": then it is installed.
func needNode(t *testing.T) {
	t.Helper()
	err := nodePackages()
	if err != nil && os.Getenv("RATELIMIT_TEST_EXAMPLES") != "all" {
		t.Skipf("RATELIMIT_TEST_EXAMPLES=all installs Node.js and the packages of client/node: %v", err)
	}
	require.NoError(t, err)
}

var nodePackages = sync.OnceValue(func() error {
	prepare := func() error {
		out, err := kit.Command("../..", nil, "sh", "-c",
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
