// Package languages runs the tests of the Node and Python clients.
package languages

import (
	"os"
	"os/exec"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The Node client has tests of its own.
func TestNode_OwnTests(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	kit.RunNode(t, pgtest.New(t).URL, nil, "npm", "test")
}

// Sessions belong to other clients after each transaction.
func TestNode_PgBouncer(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	db, pooler := pgtest.New(t), pgtest.StartPooler(t)
	t.Log(pooler)
	kit.RunNode(t, pooler.URL(db.Name), nil, "node", "--test", "--test-concurrency=1", "test/vectors.test.js", "test/drivers.test.js")
}

// withPython runs Python with the drivers, which may be there for the system's Python only, while another one comes first.
const withPython = `for python in python3 /usr/bin/python3; do
	$python -c 'import asyncpg, psycopg, psycopg_pool, sys; sys.exit(sys.version_info < (3, 11))' && exec $python "$@"
done; exit 1`

var pythonPackages = []string{"python3", "python3-psycopg", "python3-psycopg-pool", "python3-asyncpg"}

// The tests of client/python run on a database of this one.
func TestPython(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	runPython(t, kit.PgVariables(t, kit.NewDB(t).URL))
}

func TestPython_ThroughPgBouncer(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	runPython(t, append(kit.PgVariables(t, pgtest.StartPooler(t).URL(kit.NewDB(t).Name)), "RATELIMIT_TEST_POOLER=1"), "-k", "pooler")
}

// runPython runs unittest. Without Python or a driver the test is skipped, unless RATELIMIT_TEST_EXAMPLES is "all": then they are
// installed.
func runPython(t *testing.T, variables []string, args ...string) {
	python := func(args ...string) *exec.Cmd {
		c := exec.CommandContext(t.Context(), "sh", append([]string{"-c", withPython, "sh"}, args...)...)
		c.Dir = "../../client/python"
		c.Env = append(append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1"), variables...)
		return c
	}
	if python("--version").Run() != nil {
		if os.Getenv("RATELIMIT_TEST_EXAMPLES") != "all" {
			t.Skipf("RATELIMIT_TEST_EXAMPLES=all installs %v", pythonPackages)
		}
		require.NoError(t, pgtest.Install(t.Context(), pythonPackages...))
	}
	out, err := python(append([]string{"-m", "unittest", "discover", "--top-level-directory", ".", "--start-directory", "tests"}, args...)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Regexp(t, `(?m)^Ran [1-9].*\n\nOK$`, string(out))
}
