package kit

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Tern is the path of the program that "go tool tern" runs. To find it takes go longer than tern takes to migrate.
var Tern = sync.OnceValue(func() string {
	path, err := Command("../..", nil, "go", "tool", "-n", "tern").Output()
	if err != nil {
		panic(err)
	}
	return strings.TrimSpace(string(path))
})

var built = struct {
	sync.Mutex
	paths map[string]bool
}{paths: map[string]bool{}}

// Built is the path of a program of the repository, which each package of tests builds once: go run takes longer to find that
// nothing has changed than most programs run.
func Built(t testing.TB, folder string) string {
	built.Lock()
	defer built.Unlock()
	path := NoError(filepath.Abs(filepath.Join("../../build", filepath.Base(os.Args[0]), filepath.Base(folder))))(t)
	if !built.paths[path] {
		out, err := Command("../..", nil, "go", "build", "-o", path, "./"+folder).CombinedOutput()
		require.NoError(t, err, "%s", out)
		built.paths[path] = true
	}
	return path
}

func TernMigrate(url string) []string {
	return []string{"migrate", "--config", "migrations/tern.conf", "--migrations", "migrations", "--conn-string", url}
}

func Command(dir string, env []string, name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	return cmd
}

// Run runs a command and shows its standard error if it fails; tern's standard output is all of the SQL.
func Run(t *testing.T, dir string, env []string, name string, args ...string) {
	_, err := Command(dir, env, name, args...).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		require.NoError(t, err, "%s %s\n%s", name, args, exit.Stderr)
	}
	require.NoError(t, err)
}

// Start starts a program that ends with the test. What it wrote is shown if the test fails.
func Start(t testing.TB, c *exec.Cmd) {
	t.Helper()
	log := NoError(os.Create(filepath.Join(t.TempDir(), "log")))(t)
	c.Stdout, c.Stderr = log, log
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()         // it was killed
		if text, err := os.ReadFile(log.Name()); assert.NoError(t, err) && t.Failed() {
			t.Logf("%s\n%s", c, text)
		}
		log.Close()
	})
}

// A Log is read while it is written.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func PgVariables(t *testing.T, url string) []string {
	config := NoError(pgx.ParseConfig(url))(t)
	return []string{
		"PGHOST=" + config.Host, fmt.Sprintf("PGPORT=%d", config.Port), "PGUSER=" + config.User,
		"PGPASSWORD=" + config.Password, "PGDATABASE=" + config.Database,
		"PGOPTIONS=" + config.RuntimeParams["options"],
	}
}

// WithSettings is a connection string with names and values of settings, which psql takes too.
func WithSettings(dsn string, settings ...string) string {
	options := ""
	for setting := range slices.Chunk(settings, 2) {
		options += fmt.Sprintf(" -c %s=%s", setting[0], strings.NewReplacer(`\`, `\\`, " ", `\ `).Replace(setting[1]))
	}
	u, err := url.Parse(dsn)
	if err != nil || u.Scheme == "" {
		return dsn + " options='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(options) + "'"
	}
	query := u.Query()
	query.Set("options", options)
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20")
	return u.String()
}

// createSchema creates the schema that has to exist before tern's command line runs.
func createSchema(t *testing.T, url string) {
	conn := NoError(pgx.Connect(t.Context(), url))(t)
	_, err := conn.Exec(t.Context(), "create schema ratelimit")
	if SQLState(err) != "42P06" { // the second time
		require.NoError(t, err)
	}
	require.NoError(t, conn.Close(t.Context()))
}

// PsqlFile runs a file of migrations/psql, and returns what psql said.
func PsqlFile(t *testing.T, url, name string) string {
	out, err := RunPsql(t, url, "--set", "ON_ERROR_STOP=1", "--file", "../../migrations/psql/"+name)
	require.NoError(t, err, out)
	return out
}

func RunPsql(t *testing.T, url string, args ...string) (string, error) {
	t.Helper()
	program, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("psql is not installed")
	}
	out, err := exec.Command(program, append(args, "--no-psqlrc", "--dbname", url)...).CombinedOutput()
	return string(out), err
}

func PsqlStatus(t *testing.T, url string, args ...string) (out string, status int) {
	out, err := RunPsql(t, url, args...)
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return out, exit.ExitCode()
	}
	require.NoError(t, err)
	return out, 0
}

// Script is one of pg_cron's scripts for a client that is not psql.
func Script(t testing.TB, name string) string {
	return NoError(pgtest.CronScript(name))(t)
}

// RunScript runs one of pg_cron's scripts as a client that is not psql.
func RunScript(db *TestDB, name string) error {
	return ErrorOf(db.Pool.Exec(context.Background(), Script(db.T, name)))
}

// NewRole returns a role without rights. Call it before creating the database in which it gets some, which is then dropped first.
func NewRole(t testing.TB) string {
	ctx := context.Background()
	conn := NoError(pgx.Connect(ctx, pgtest.Shared(t).URL("")))(t)
	name := "ratelimit_test_" + strings.ToLower(rand.Text())
	require.NoError(t, ErrorOf(conn.Exec(ctx, "create role "+name+" role current_user")))
	t.Cleanup(func() {
		assert.NoError(t, ErrorOf(conn.Exec(ctx, "drop role "+name)))
		assert.NoError(t, conn.Close(ctx))
	})
	return name
}

// ConnectAs returns a connection with the rights of a role and none of our own.
func ConnectAs(t testing.TB, db *pgtest.DB, role string) *pgx.Conn {
	conn := db.Connect(t)
	Execute(t, conn, "set role "+role)
	return conn
}

func Execute(t testing.TB, conn *pgx.Conn, sql string, args ...any) {
	require.NoError(t, ErrorOf(conn.Exec(context.Background(), sql, args...)), "%.200s", sql)
}

// Installs tells whether tests install what they lack. Otherwise they are skipped.
var Installs = os.Getenv("RATELIMIT_TEST_EXAMPLES") == "all"

// Npm makes a target of the Makefile that takes npm, while no other process does, so that the others find it made.
func Npm(target string) error {
	lock, err := pgtest.Lock("../../Makefile")
	if err != nil {
		return err
	}
	defer lock.Close()
	if _, err := exec.LookPath("npm"); err != nil && Installs {
		if err := pgtest.Install(context.Background(), "nodejs", "npm"); err != nil {
			return err
		}
	}
	if out, err := Command("../..", nil, "make", "--no-print-directory", target).CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

// NeedNode returns if there are Node.js and the packages of client/node, which may be installed for it.
func NeedNode(t *testing.T) {
	t.Helper()
	err := nodePackages()
	if err != nil && !Installs {
		t.Skipf("RATELIMIT_TEST_EXAMPLES=all installs Node.js and the packages of client/node: %v", err)
	}
	require.NoError(t, err)
}

// RunNode runs tests of client/node on a database, if there is Node.js.
func RunNode(t *testing.T, url string, env []string, command string, args ...string) {
	NeedNode(t)
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
	if err := Npm("client/node/node_modules"); err != nil {
		return err
	}
	return exec.Command("node", "--eval", `if (parseInt(process.versions.node) < 20) throw "Node.js 20 or later"`).Run()
})
