package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// beside makes a cluster without data beside that of a private server, of the same programs, and a server of the test's own of it. A test
// is skipped when its server is in a container, or comes without a program.
func beside(t testing.TB, of *Server, program string) (server *Server, c, source *cluster) {
	t.Helper()
	source, ok := of.host.(*cluster)
	if !ok {
		t.Skipf("%s takes PostgreSQL on this machine: RATELIMIT_TEST_REQUIRE=local", program)
	}
	if _, err := os.Stat(source.program(program)); err != nil {
		t.Skipf("the server comes without %s: %v", program, err)
	}
	c = noError(newCluster(source.bin, source.made, filepath.Dir(source.dir)))(t)
	server = &Server{Rung: of.Rung, Version: of.Version, host: c}
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	return server, c, source
}

// Standby returns a server of the test's own that follows a private one by streaming replication, and
// has the same settings but for those given. It streams when it is returned. A test is skipped when its
// server is in a container, since these do not let each other in, or comes without pg_basebackup.
func Standby(t testing.TB, primary *Server, settings ...string) *Server {
	t.Helper()
	standby, c, source := beside(t, primary, "pg_basebackup")
	standby.HasCron = primary.HasCron
	require.NoError(t, c.follow(context.Background(), source, settings))
	return standby
}

// follow copies a running cluster, starts the copy as its standby, and waits until the source, which has no other, says that it streams.
func (c *cluster) follow(ctx context.Context, source *cluster, settings []string) error {
	err := c.run(ctx, c.program("pg_basebackup"), "--pgdata", c.data(), "--dbname", "user=postgres port=5432 host="+source.dir,
		"--checkpoint", "fast", "--no-sync", "--write-recovery-conf")
	if err != nil {
		return err
	}
	if err := c.configure(append([]string{"unix_socket_directories=" + c.dir}, settings...)); err != nil {
		return err
	}
	if err := c.Start(ctx); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, source.URL(""))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		var streaming bool
		err := conn.QueryRow(ctx, "select exists (select from pg_stat_replication where state = 'streaming' and application_name <> 'pg_basebackup')").Scan(&streaming)
		if err != nil || streaming {
			return err
		}
		if time.Now().After(deadline) {
			return errors.New("pgtest: the standby does not stream")
		}
	}
}

// Upgrade stops a server, and starts what pg_upgrade --link makes of it, with the same version. It skips the test where that cannot be.
func Upgrade(t testing.TB, old *Server, settings ...string) *Server {
	t.Helper()
	upgraded, c, source := beside(t, old, "pg_upgrade")
	require.NoError(t, c.initialize(t.Context(), false, settings))
	require.NoError(t, c.Stop(t.Context(), false))
	require.NoError(t, source.Stop(t.Context(), false))
	require.NoError(t, c.run(t.Context(), c.program("pg_upgrade"), "--link", "--old-bindir", source.bin, "--new-bindir", c.bin,
		"--old-datadir", source.data(), "--new-datadir", c.data(), "--username", "postgres", "--socketdir", c.dir))
	require.NoError(t, c.Start(t.Context()))
	return upgraded
}

// PrivateOnDisk is Private with the data on a disk of its own, a tmpfs of so many megabytes whose
// directory it returns. Where that cannot be, the test is skipped.
func PrivateOnDisk(t testing.TB, megabytes int, settings ...string) (server *Server, dir string) {
	t.Helper()
	if Shared(t).Rung == rungDocker {
		t.Skip("a container's data is on a disk of the Docker engine")
	}
	dir = mount(t, megabytes)
	start := func(ctx context.Context, settings []string) (host, error) { return startClusterIn(ctx, dir, settings) }
	return private(t, []rung{{rungLocal, start}}, settings), dir
}

// mount mounts a tmpfs until the test ends or this process dies.
func mount(t testing.TB, megabytes int) (dir string) {
	t.Helper()
	sudo, err := asRoot(t.Context())
	if err != nil {
		t.Skipf("mounting a tmpfs: %v", err)
	}
	if dir, err = os.MkdirTemp(tempDir, "disk-"); err != nil {
		t.Fatal(err)
	}
	command := slices.Concat(sudo, []string{"mount", "-t", "tmpfs", "-o", fmt.Sprintf("size=%dm,mode=1777", megabytes), "tmpfs", dir})
	if out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
		os.Remove(dir)
		t.Skipf("mounting a tmpfs: %v: %s", err, out)
	}
	// When this process dies, so does the server, and until then the disk is busy.
	guard, err := startGuard(nil, `
		dir=$1; shift
		for try in 1 2 3 4 5 6 7 8 9; do "$@" umount "$dir" && break; sleep 1; done
		rmdir "$dir"`, slices.Concat([]string{dir}, sudo)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := guard.release(); err != nil {
			t.Errorf("unmounting %s: %v", dir, err)
		}
	})
	return dir
}

// PrivateWithExtensions is Private with a directory of extensions of its own, which it returns: CREATE EXTENSION finds what
// the test puts there. The server's programs are copies, because a PostgreSQL looks for its files beside its program.
// Where the server runs elsewhere, the test is skipped.
func PrivateWithExtensions(t testing.TB, settings ...string) (server *Server, dir string) {
	t.Helper()
	if Shared(t).Rung == rungDocker {
		t.Skip("a container's extensions are in its image")
	}
	start := func(ctx context.Context, settings []string) (host, error) {
		original, err := findBinaries(ctx)
		if err != nil {
			return nil, err
		}
		var bin string
		if bin, dir, err = copyPrograms(t, original); err != nil {
			return nil, err
		}
		return startPrograms(ctx, bin, original, tempDir, false, settings)
	}
	return private(t, []rung{{rungLocal, start}}, settings), dir
}

// copyPrograms copies the programs in bin and their SHAREDIR, until the test ends. The libraries are those of bin, by a link.
func copyPrograms(t testing.TB, bin string) (copiedBin, extensions string, err error) {
	root, err := os.MkdirTemp(tempDir, "ratelimit-")
	if err != nil {
		return "", "", err
	}
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(root)) })
	share := shareOf(bin)
	prefix := filepath.Dir(bin)
	for !strings.HasPrefix(share, prefix+"/") {
		prefix = filepath.Dir(prefix)
	}
	in := func(path string) string { return filepath.Join(root, strings.TrimPrefix(path, prefix)) }
	err = errors.Join(
		os.Chmod(root, 0o755), // another user runs it
		os.MkdirAll(in(bin), 0o755),
		os.MkdirAll(filepath.Dir(in(share)), 0o755),
		os.Symlink(filepath.Join(bin, "../lib"), filepath.Join(in(bin), "../lib")))
	// What links lead to is copied; one that leads nowhere, and a program that is not there, is left out. pg_upgrade runs most of them.
	copying := exec.Command("sh", "-c", `cp -RL "$1" "$2"; cd "$3"
		cp pg_ctl postgres initdb pg_controldata pg_dump pg_dumpall pg_resetwal pg_restore pg_upgrade psql vacuumdb "$4"`,
		"sh", share, in(share), bin, in(bin))
	_ = copying.Run()
	return in(bin), filepath.Join(in(share), "extension"), err
}

// shareOf returns the directory that PostgreSQL calls SHAREDIR.
func shareOf(bin string) string {
	if out, err := exec.Command(filepath.Join(bin, "pg_config"), "--sharedir").Output(); err == nil {
		return strings.TrimSpace(string(out))
	}
	return filepath.Join(bin, "../share/postgresql")
}

// CronScript returns a script of pg_cron/ for a client other than psql, without its line for psql.
func CronScript(name string) (string, error) {
	root, err := findRoot()
	if err != nil {
		return "", err
	}
	script, err := os.ReadFile(filepath.Join(root, "pg_cron", name))
	return strings.Replace(string(script), "\\set ON_ERROR_STOP on\n", "", 1), err
}
