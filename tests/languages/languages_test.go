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

// A pythonNeed is what some tests of Python import, and the packages of Debian that bring it.
type pythonNeed struct {
	imports  string
	packages []string
}

var (
	drivers    = pythonNeed{"asyncpg, psycopg, psycopg_pool", []string{"python3", "python3-psycopg", "python3-psycopg-pool", "python3-asyncpg"}}
	frameworks = pythonNeed{drivers.imports + ", django, fastapi, flask, httpx, limits, psycopg2, requests", append([]string{
		"python3-django", "python3-fastapi", "python3-flask", "python3-httpx", "python3-limits", "python3-psycopg2", "python3-requests",
	}, drivers.packages...)}
)

// command runs Python with what is needed, which may be there for the system's Python only, while another one comes first.
func (n pythonNeed) command() string {
	return `for python in python3 /usr/bin/python3; do
	$python -c 'import ` + n.imports + `, sys; sys.exit(sys.version_info < (3, 11))' && exec $python "$@"
done; exit 1`
}

// The tests of client/python run on a database of this one.
func TestPython(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	runPython(t, drivers, kit.PgVariables(t, kit.NewDB(t).URL))
}

// Views, connections and storages of frameworks, as Debian has them.
func TestPython_Frameworks(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	runPython(t, frameworks, kit.PgVariables(t, kit.NewDB(t).URL), "--pattern", "frameworks.py")
}

func TestPython_ThroughPgBouncer(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	runPython(t, drivers, append(kit.PgVariables(t, pgtest.StartPooler(t).URL(kit.NewDB(t).Name)), "RATELIMIT_TEST_POOLER=1"), "-k", "pooler")
}

// runPython runs unittest. Without Python or what it needs the test is skipped, unless RATELIMIT_TEST_EXAMPLES is "all": then they are
// installed.
func runPython(t *testing.T, need pythonNeed, variables []string, args ...string) {
	python := func(args ...string) *exec.Cmd {
		c := exec.CommandContext(t.Context(), "sh", append([]string{"-c", need.command(), "sh"}, args...)...)
		c.Dir = "../../client/python"
		c.Env = append(append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1"), variables...)
		return c
	}
	if python("--version").Run() != nil {
		if os.Getenv("RATELIMIT_TEST_EXAMPLES") != "all" {
			t.Skipf("RATELIMIT_TEST_EXAMPLES=all installs %v", need.packages)
		}
		require.NoError(t, pgtest.Install(t.Context(), need.packages...))
	}
	out, err := python(append([]string{"-m", "unittest", "discover", "--top-level-directory", ".", "--start-directory", "tests"}, args...)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Regexp(t, `(?m)^Ran [1-9].*\n\nOK$`, string(out))
}
