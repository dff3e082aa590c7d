package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/testcontainers/testcontainers-go"
)

// A Pooler is a PgBouncer in transaction mode before the shared server.
type Pooler struct {
	Version string
	// Servers is how many connections to the server its clients share, for each database.
	Servers int

	url func(database string) string
}

// URL returns the connection string for a database, or for PgBouncer's console, "pgbouncer".
func (p *Pooler) URL(database string) string { return p.url(database) }

func (p *Pooler) String() string { return "PgBouncer " + p.Version }

// Prepares tells whether prepared statements work: since 1.21.
func (p *Pooler) Prepares() bool {
	var major, minor int
	_, err := fmt.Sscanf(p.Version, "%d.%d", &major, &minor)
	return err == nil && (major > 1 || minor >= 21)
}

// StartPooler returns a PgBouncer of the test's own. On Docker it is the newest that its packages have; otherwise that of the
// machine, installed with apt-get when there is none. The test is skipped where neither can be.
func StartPooler(t testing.TB) *Pooler {
	t.Helper()
	ctx := context.Background()
	server := Shared(t)
	upstream := noError(pgx.ParseConfig(server.URL("")))(t)
	p := &Pooler{Servers: 4}
	var end func() error
	var err error
	if c, ok := server.host.(*container); ok {
		end, err = p.startContainer(ctx, c, upstream)
	} else {
		end, err = p.startProcess(ctx, upstream)
	}
	if errors.Is(err, errAbsent) {
		t.Skip(err)
	}
	require.NoError(t, err, "PgBouncer")
	t.Cleanup(func() { assert.NoError(t, end()) })
	if p.Version, err = p.ask(ctx); err != nil {
		t.Fatalf("PgBouncer: %v", err)
	}
	return p
}

// configuration is PgBouncer's, with any name for its users: it logs in to the server as we do.
func (p *Pooler) configuration(server *pgx.ConnConfig, host string, port uint16, settings ...string) string {
	upstream := ""
	for name, value := range map[string]string{
		"host": host, "port": fmt.Sprint(port), "user": server.User, "password": server.Password,
	} {
		if value != "" { // which it would not understand
			upstream += fmt.Sprintf(" %s='%s'", name, strings.ReplaceAll(value, "'", "''"))
		}
	}
	return fmt.Sprintf(`[databases]
* =%s
[pgbouncer]
pool_mode = transaction
default_pool_size = %d
max_client_conn = 500
auth_type = any
%s
`, upstream, p.Servers, strings.Join(settings, "\n"))
}

// startProcess starts the machine's PgBouncer in a directory of its own, where its socket is, too.
func (p *Pooler) startProcess(ctx context.Context, upstream *pgx.ConnConfig) (end func() error, err error) {
	bin, err := Program(ctx, "pgbouncer")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAbsent, err)
	}
	owner, err := unprivileged()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(tempDir, "ratelimit-")
	if err != nil {
		return nil, err
	}
	p.url = func(database string) string {
		query := url.Values{"host": {dir}, "port": {"6432"}, "user": {"postgres"}}
		return "postgres:///" + url.PathEscape(database) + "?" + query.Encode()
	}
	config := filepath.Join(dir, "pgbouncer.ini")
	settings := []string{
		"listen_port = 6432", // part of the socket's name: it listens on no address
		"unix_socket_dir = " + dir,
		"logfile = " + filepath.Join(dir, "log"),
		"pidfile = " + filepath.Join(dir, "pid"),
	}
	err = os.WriteFile(config, []byte(p.configuration(upstream, upstream.Host, upstream.Port, settings...)), 0o600)
	if err == nil && owner != nil {
		err = errors.Join(os.Chown(dir, int(owner.Uid), int(owner.Gid)), os.Chown(config, int(owner.Uid), int(owner.Gid)))
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	guard, err := startGuard(owner, `kill -KILL "$(cat "$1/pid")"; rm -rf "$1"`, dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	cmd := exec.CommandContext(ctx, bin, "--quiet", "--daemon", config)
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: owner}
	if out, err := cmd.CombinedOutput(); err != nil {
		log, _ := os.ReadFile(filepath.Join(dir, "log"))
		return nil, errors.Join(fmt.Errorf("%w\n%s%s", err, out, tail(log)), guard.release())
	}
	return guard.release, nil
}

// startContainer starts PgBouncer in a container beside the server's.
func (p *Pooler) startContainer(ctx context.Context, server *container, upstream *pgx.ConnConfig) (end func() error, err error) {
	root, err := findRoot()
	if err != nil {
		return nil, err
	}
	host, err := server.ContainerIP(ctx)
	if err != nil {
		return nil, err
	}
	const file = "/etc/pgbouncer/test.ini"
	urlAt := func(address, database string) string {
		return "postgres://postgres@" + address + "/" + url.PathEscape(database) + "?sslmode=disable"
	}
	c := &container{port: "6432/tcp"}
	image := testcontainers.FromDockerfile{Context: filepath.Join(root, "tests", "pgtest", "pgbouncer"), Repo: "pgratelimit-pgbouncer"}
	err = c.run(ctx, image, func(address string) string { return urlAt(address, "postgres") },
		testcontainers.WithFiles(testcontainers.ContainerFile{
			Reader: strings.NewReader(p.configuration(upstream, host, 5432,
				"listen_addr = *", "listen_port = 6432", "unix_socket_dir =", "max_prepared_statements = 200")),
			ContainerFilePath: file,
			FileMode:          0o644,
		}),
		testcontainers.WithCmd("pgbouncer", "-u", "postgres", file))
	if err != nil {
		return nil, err
	}
	p.url = func(database string) string { return urlAt(c.address, database) }
	return c.Close, nil
}

// ask waits until PgBouncer answers, and returns its version.
func (p *Pooler) ask(ctx context.Context) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, p.URL("pgbouncer"))
		if err == nil {
			defer conn.Close(ctx)
			err = conn.QueryRow(ctx, "show version", pgx.QueryExecModeSimpleProtocol).Scan(&version)
			return strings.TrimPrefix(version, "PgBouncer "), err
		}
		select {
		case <-ctx.Done():
			return "", err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

var portsGiven sync.Map

// FreePort returns a port of 127.0.0.1 on which nobody listens, and which no other test of this program has been given.
func FreePort(t testing.TB) string {
	for {
		l := noError(net.Listen("tcp", "127.0.0.1:0"))(t)
		_, port, err := net.SplitHostPort(l.Addr().String())
		require.NoError(t, err)
		require.NoError(t, l.Close())
		if _, given := portsGiven.LoadOrStore(port, true); !given {
			return port
		}
	}
}
