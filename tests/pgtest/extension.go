package pgtest

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

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
		c, err := newCluster(bin, tempDir)
		if err != nil {
			return nil, err
		}
		c.made = original
		if err := c.initialize(ctx, false, settings); err != nil {
			return nil, errors.Join(err, c.Close())
		}
		return c, nil
	}
	return private(t, []rung{{rungLocal, start}}, settings), dir
}

// copyPrograms makes a tree with copies of the programs in bin and of their SHAREDIR, until the test ends. Its libraries are
// those of bin, by a link.
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
