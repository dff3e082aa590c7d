package docs

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// The programs of docs/examples are run. Each is the same small API, which policy api limits for each user. One that lacks
// something on this machine is skipped, unless kit.Installs: then the test fails where that cannot be installed.

// A docsExample is a program, and what it takes.
type docsExample struct {
	path     string   // below docs/examples
	run      string   // runs "$1", in sh
	probe    string   // succeeds in sh if all is there
	packages []string // Debian's, which bring it
	npm      bool     // takes the packages of docs/examples/node
	fields   bool     // answers have RateLimit
}

const (
	// psycopg may be there for the system's Python only, while another one comes first.
	withPsycopg = `export PYTHONPATH=../../../client/python
		for python in python3 /usr/bin/python3; do $python -c 'import psycopg_pool' && exec $python "$@"; done; exit 1`
	withPHP = `exec php -S "127.0.0.1:$PORT" "$1"`
	withGo  = `go build -o "$TMPDIR/api" "$1" && exec "$TMPDIR/api"`
)

var docsExamples = []docsExample{
	{path: "go/main.go", run: withGo, probe: "go version"},
	{path: "node/grpc.mjs", run: `exec node "$1"`, probe: "node --version", packages: []string{"nodejs"}, npm: true},
	{path: "node/sql.mjs", run: `exec node "$1"`, probe: "node --version", packages: []string{"nodejs"}, npm: true},
	{path: "python/sql_api.py", run: withPsycopg, probe: "set -- --version; " + withPsycopg, packages: []string{"python3", "python3-psycopg", "python3-psycopg-pool"}},
	{path: "php/json.php", run: withPHP, probe: "php --version", packages: []string{"php-cli"}},
	{path: "php/sql.php", run: withPHP, probe: "php --ri pdo_pgsql", packages: []string{"php-cli", "php-pgsql"}},
	{path: "php/laravel.php", run: withPHP, probe: "php --ri pdo_pgsql && php -r \"require 'Illuminate/Routing/autoload.php';\"",
		packages: []string{"php-cli", "php-pgsql", "php-laravel-framework"}, fields: true},
	{path: "ruby/json.rb", run: `exec ruby "$1"`, probe: "ruby -rwebrick -e ''", packages: []string{"ruby", "ruby-webrick"}},
	{path: "ruby/sql.rb", run: `exec ruby "$1"`, probe: "ruby -rwebrick -rpg -e ''", packages: []string{"ruby", "ruby-webrick", "ruby-pg"}},
	{path: "ruby/rails.rb", run: `exec ruby -W0 "$1"`, probe: "ruby -W0 -rwebrick -rpg -raction_controller/railtie -ractive_record -e ''",
		packages: []string{"ruby", "ruby-webrick", "ruby-pg", "ruby-railties", "ruby-activerecord", "ruby-actionpack"}, fields: true},
}

// grpcCalls is a client of gRPC that is not ours.
var grpcCalls = docsExample{path: "python/grpc_calls.py", run: `exec /usr/bin/python3 "$1"`, probe: "/usr/bin/python3 -c 'import grpc, google.protobuf'",
	packages: []string{"python3", "python3-grpcio", "python3-protobuf"}}

func TestDocs_Examples(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	paths := []string{grpcCalls.path}
	for _, example := range docsExamples {
		paths = append(paths, example.path)
		t.Run(example.path, func(t *testing.T) {
			t.Parallel()
			example.need(t)
			db := kit.NewDB(t)
			db.DefinePolicy("api", 3, 1, time.Hour)
			port := pgtest.FreePort(t)
			startProgram(t, port, example.program(t, port, append(serverVariables(t, db.DB), kit.PgVariables(t, db.URL)...)))

			get := func(user, path string) (status int, retryAfter, body string) {
				request := kit.NoError(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:"+port+path, nil))(t)
				if user != "" {
					request.Header.Set("X-User", user)
				}
				response, err := http.DefaultClient.Do(request)
				require.NoError(t, err)
				defer response.Body.Close()
				text := kit.NoError(io.ReadAll(response.Body))(t)
				if s := response.StatusCode; example.fields && (s == http.StatusOK || s == http.StatusTooManyRequests) {
					require.Regexp(t, `^"api";r=[0-3];t=\d+$`, response.Header.Get("RateLimit"))
				}
				return response.StatusCode, response.Header.Get("Retry-After"), string(text)
			}
			for range 3 {
				status, _, body := get("42", "/")
				require.Equal(t, http.StatusOK, status)
				require.Contains(t, body, "hello, 42")
			}
			status, retryAfter, _ := get("42", "/")
			require.Equal(t, http.StatusTooManyRequests, status)
			wait := kit.NoError(strconv.Atoi(retryAfter))(t)
			require.LessOrEqual(t, wait, 3600)
			require.Greater(t, wait, 3000)
			status, _, _ = get("43", "/")
			require.Equal(t, http.StatusOK, status, "another user")
			status, retryAfter, _ = get("43", "/export")
			require.Equal(t, http.StatusTooManyRequests, status)
			require.Empty(t, retryAfter, "10 tokens are never there")
			status, _, _ = get("", "/")
			require.Equal(t, http.StatusUnauthorized, status)
			status, _, _ = get("42", "/elsewhere")
			require.Equal(t, http.StatusNotFound, status)

			db.Execute("select ratelimit_drop_policy('api')")
			status, _, _ = get("42", "/")
			require.GreaterOrEqual(t, status, http.StatusInternalServerError, "an error is not a grant")
			db.DefinePolicy("api", 3, 1, time.Hour)
			status, _, _ = get("42", "/")
			require.Equal(t, http.StatusOK, status, "and does not last")
		})
	}
	for _, pattern := range []string{"*.go", "*.mjs", "*.py", "*.php", "*.rb"} {
		found := kit.NoError(filepath.Glob("../../docs/examples/*/" + pattern))(t)
		for _, path := range found {
			if strings.HasPrefix(path, "../../docs/examples/queues/") {
				continue // tests/queues runs them
			}
			require.Contains(t, paths, strings.TrimPrefix(path, "../../docs/examples/"), "every program is run")
		}
	}
}

// It makes every call of the service.
func TestDocs_PythonCallsTheServer(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	grpcCalls.need(t)
	db := kit.NewDB(t)
	db.DefinePolicy("api", 10, 1, kit.ADay)
	db.Execute("select ratelimit_define_policy('budget', 1000, 0, '1 day'), ratelimit_define_policy('jobs', 1, lease => '1 minute')")
	c := grpcCalls.program(t, "", append(serverVariables(t, db.DB, "TOKENS=secret"), kit.PgVariables(t, db.URL)...))
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, "all calls are answered\n", string(out))
}

// need skips the test of an example that cannot run here, or installs what it lacks.
func (e docsExample) need(t *testing.T) {
	t.Helper()
	lacks := func() error {
		if out, err := exec.Command("sh", "-c", e.probe).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	err := lacks()
	if err != nil && kit.Installs {
		require.NoError(t, pgtest.Install(t.Context(), e.packages...))
		err = lacks()
	}
	if err == nil && e.npm {
		err = installNpm()
	}
	switch {
	case err != nil && kit.Installs:
		t.Fatal(err)
	case err != nil:
		t.Skipf("RATELIMIT_TEST_EXAMPLES=all installs %v, and npm's packages: %v", e.packages, err)
	}
}

var installNpm = sync.OnceValue(func() error { return kit.Npm("docs/examples/node/node_modules") })

// patient lets an example wait a minute instead of a second or two, which say how long a user may, and not how slow a machine is.
var patient = strings.NewReplacer(
	"Date.now() + 1000", "Date.now() + 60_000", "connectionTimeoutMillis: 1000", "connectionTimeoutMillis: 60_000", "timeoutMs: 1000,", "timeoutMs: 60_000,",
	"connect_timeout=2", "connect_timeout=60", "'timeout' => 1,", "'timeout' => 60,",
	"open_timeout: 1, read_timeout: 1", "open_timeout: 60, read_timeout: 60", "connect_timeout: 2", "connect_timeout: 60",
	"ATTR_TIMEOUT => 2", "ATTR_TIMEOUT => 60",
	"Closed(time.Second)", "Closed(time.Minute)")

// program is the command of an example, whose patient copy finds what is beside the original.
func (e docsExample) program(t *testing.T, port string, env []string) *exec.Cmd {
	text := kit.NoError(os.ReadFile(filepath.Join("../../docs/examples", e.path)))(t)
	copied := patient.Replace(string(text))
	require.True(t, e.path == grpcCalls.path || copied != string(text), "%s waits for how long?", e.path)
	root := t.TempDir()
	file := filepath.Join(root, "docs/examples", e.path)
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
	require.NoError(t, os.WriteFile(file, []byte(copied), 0o600))
	if e.npm {
		for _, beside := range []string{"server", "docs/examples/node/node_modules"} {
			from := kit.NoError(filepath.Abs(filepath.Join("../..", beside)))(t)
			require.NoError(t, os.Symlink(from, filepath.Join(root, beside)))
		}
	}
	c := exec.CommandContext(t.Context(), "sh", "-c", e.run, "sh", file)
	c.Dir = filepath.Join("../../docs/examples", filepath.Dir(e.path))
	c.Env = append(os.Environ(), append(env, "PORT="+port, "TMPDIR="+t.TempDir(), "PYTHONDONTWRITEBYTECODE=1")...)
	return c
}

// startProgram runs a program until the test ends, and returns when it listens.
func startProgram(t *testing.T, port string, c *exec.Cmd) {
	t.Helper()
	kit.Start(t, c)
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", "127.0.0.1:"+port)
		return err == nil && conn.Close() == nil
	}, 5*time.Minute, 10*time.Millisecond, "%s", c) // a fresh machine compiles the one in Go
}

// serverVariables starts the server on a database and says where it listens, as the examples want to know it.
func serverVariables(t *testing.T, db *pgtest.DB, settings ...string) []string {
	grpc, http := pgtest.FreePort(t), pgtest.FreePort(t)
	c := exec.CommandContext(t.Context(), kit.Built(t, "server/cmd/pgratelimit"), "serve")
	c.Env = append(os.Environ(), append(settings, "DATABASE_URL="+db.URL, "CALL_TIMEOUT=1m", "GRPC_ADDR=127.0.0.1:"+grpc, "HTTP_ADDR=127.0.0.1:"+http)...)
	startProgram(t, http, c)
	return []string{"RATELIMIT_GRPC=127.0.0.1:" + grpc, "RATELIMIT_URL=http://127.0.0.1:" + http}
}
