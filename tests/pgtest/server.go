package pgtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/jackc/pgx/v5"
	"github.com/moby/moby/client"
)

// A Server is a running PostgreSQL and the way to reach it as a role that may create databases.
type Server struct {
	Rung    string // where it came from: "url", "docker" or "local"
	Version string // its server_version
	HasCron bool   // pg_cron is loaded, as far as our role may see

	host
	closed bool
}

// Close stops it and removes its data, unless that was done.
func (s *Server) Close() error {
	if s.closed {
		return nil
	}
	s.closed = true
	return s.host.Close()
}

func (s *Server) String() string { return s.Rung + " PostgreSQL " + s.Version }

type host interface {
	// URL returns the connection string for a database. Ask again after Start: the port may differ.
	URL(database string) string
	// Stop stops the server; immediate leaves it to recover when it is started again.
	Stop(ctx context.Context, immediate bool) error
	// Kill ends all its processes with SIGKILL, whatever they are at, and returns when they are gone.
	Kill(ctx context.Context) error
	// Freeze stops all its processes where they are: it keeps its connections, accepts others, and answers nobody.
	Freeze(ctx context.Context) error
	// Thaw lets them go on.
	Thaw(ctx context.Context) error
	// Start starts it again with the data it had.
	Start(ctx context.Context) error
	// Close stops it and removes its data.
	Close() error
}

// Start gets a server from the ladder that the package comment describes. Its settings, each given
// as "name=value", apply to a server that this process starts, not to a running one.
func Start(ctx context.Context, settings ...string) (*Server, error) {
	return start(ctx, ladder, settings)
}

func start(ctx context.Context, rungs []rung, settings []string) (*Server, error) {
	if require := os.Getenv("RATELIMIT_TEST_REQUIRE"); require != "" {
		if rungs = only(rungs, require); rungs == nil {
			return nil, fmt.Errorf("pgtest: RATELIMIT_TEST_REQUIRE is %q: set it to url, docker or local", require)
		}
	}
	return climb(ctx, rungs, settings)
}

// defaults are settings of every server that this process starts.
var defaults = []string{
	"max_connections=200",
	"max_wal_size=256MB", // which may be in memory
	"fsync=off",          // what a dying process wrote survives it; only a dying machine would need more
}

const (
	rungURL    = "url"
	rungDocker = "docker"
	rungLocal  = "local"
)

type rung struct {
	name  string
	start func(ctx context.Context, settings []string) (host, error)
}

var (
	ladder         = []rung{{rungURL, useURL}, {rungDocker, startContainer}, {rungLocal, startCluster}}
	ladderInMemory = []rung{{rungURL, useURL}, {rungDocker, startContainerInMemory}, {rungLocal, startCluster}}
)

func only(rungs []rung, name string) []rung {
	for i := range rungs {
		if rungs[i].name == name {
			return rungs[i : i+1]
		}
	}
	return nil
}

// errAbsent marks the error of a rung that is not there. Any other error ends the climb: what is
// there but broken is not passed over in silence.
var errAbsent = errors.New("not available")

func climb(ctx context.Context, rungs []rung, settings []string) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*patience) // with installing packages or an image
	defer cancel()
	var absent strings.Builder
	for _, rung := range rungs {
		host, err := rung.start(ctx, settings)
		if errors.Is(err, errAbsent) {
			fmt.Fprintf(&absent, "\n  %s: %v", rung.name, err)
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("pgtest: %s: %w", rung.name, err)
		}
		server := &Server{Rung: rung.name, host: host}
		if err := server.ask(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("pgtest: %s: %w", rung.name, err), host.Close())
		}
		return server, nil
	}
	return nil, fmt.Errorf(`pgtest: no PostgreSQL:%s
Provide any one of these:
  - RATELIMIT_DATABASE_URL, the URL of a running server, with a role that may create databases
  - a running Docker engine
  - PostgreSQL 15 to 18 installed here, in PATH or where RATELIMIT_PG_BIN says
  - Debian or Ubuntu with root or passwordless sudo, where apt-get can install it`, &absent)
}

// patience bounds what a busy machine does in seconds, so that no test waits for ever.
const patience = 10 * time.Minute

func (s *Server) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.URL(""))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return conn.QueryRow(ctx, `
		select current_setting('server_version'),
		       exists (select from pg_settings where name = 'cron.database_name')`,
	).Scan(&s.Version, &s.HasCron)
}

// A running server, named by its connection string.
type running string

func useURL(context.Context, []string) (host, error) {
	dsn := os.Getenv("RATELIMIT_DATABASE_URL")
	if dsn == "" {
		return nil, fmt.Errorf("%w: RATELIMIT_DATABASE_URL is not set", errAbsent)
	}
	return running(dsn), nil
}

func (dsn running) URL(database string) string {
	if database == "" {
		return string(dsn)
	}
	if u, err := url.Parse(string(dsn)); err == nil && u.Scheme != "" {
		u.Path = "/" + database
		return u.String()
	}
	return string(dsn) + " dbname='" + strings.ReplaceAll(database, "'", `\'`) + "'" // the last one counts
}

var errNotOurs = errors.New("pgtest: the server of RATELIMIT_DATABASE_URL is not the tests' to stop")

func (running) Stop(context.Context, bool) error { return errNotOurs }
func (running) Kill(context.Context) error       { return errNotOurs }
func (running) Freeze(context.Context) error     { return errNotOurs }
func (running) Thaw(context.Context) error       { return errNotOurs }
func (running) Start(context.Context) error      { return errNotOurs }
func (running) Close() error                     { return nil }

// What a file says about a server that outlives the process that started it.
type kept struct {
	Container string `json:",omitempty"`
	Bin, Dir  string `json:",omitempty"`
}

// Keep lets the server outlive this process, and writes to a file what [Remove] needs to remove it. A server that was running
// before stays in any case. A container is kept only when testcontainers' reaper is off: TESTCONTAINERS_RYUK_DISABLED=true.
func (s *Server) Keep(file string) error {
	var k kept
	var g *guard
	switch h := s.host.(type) {
	case *container:
		k.Container, g = h.GetContainerID(), h.guard
	case *cluster:
		k.Bin, k.Dir, g = h.bin, h.dir, h.guard
	default:
		return nil
	}
	data, err := json.Marshal(k)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return err
	}
	if g == nil {
		return nil
	}
	return g.dismiss()
}

// Remove stops and removes the server that was kept, if there is one.
func Remove(ctx context.Context, file string) error {
	data, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var k kept
	if err := json.Unmarshal(data, &k); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if k.Container != "" {
		err = removeContainer(ctx, k.Container)
	}
	if k.Dir != "" {
		err = removeCluster(ctx, k.Bin, k.Dir)
	}
	if err != nil {
		return err
	}
	return os.Remove(file)
}

func removeContainer(ctx context.Context, id string) error {
	engine, err := findEngine(ctx)
	if err != nil {
		return err
	}
	_, err = engine.ContainerRemove(ctx, id, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
	if cerrdefs.IsNotFound(err) {
		return nil // somebody else was faster
	}
	return err
}

func removeCluster(ctx context.Context, bin, dir string) error {
	owner, err := unprivileged()
	if err != nil {
		return err
	}
	c := &cluster{bin: bin, dir: dir, owner: owner}
	if _, err := os.Stat(filepath.Join(c.data(), "postmaster.pid")); err == nil {
		if err := c.Stop(ctx, true); err != nil {
			return err
		}
	}
	return os.RemoveAll(dir)
}

// A guard is a shell that waits for the end of its standard input, which comes when this process
// closes it or dies, however that happens, and then runs a script. A line of input dismisses it.
type guard struct {
	cmd   *exec.Cmd
	alive io.WriteCloser
}

// startGuard starts a guard as another user, or as oneself when owner is nil.
func startGuard(owner *syscall.Credential, script string, args ...string) (*guard, error) {
	cmd := exec.Command("/bin/sh", append([]string{"-c", "if read -r dismissed; then exit; fi\n" + script, "guard"}, args...)...)
	cmd.Dir = "/" // where every user may be
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: owner,
		Setpgid:    true, // Ctrl-C is for the tests
	}
	alive, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	return &guard{cmd: cmd, alive: alive}, cmd.Start()
}

// release lets it run its script, and waits for that.
func (g *guard) release() error { return errors.Join(g.alive.Close(), g.cmd.Wait()) }

// dismiss ends it without.
func (g *guard) dismiss() error {
	_, err := io.WriteString(g.alive, "\n")
	return errors.Join(err, g.release())
}
