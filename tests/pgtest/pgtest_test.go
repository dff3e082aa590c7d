package pgtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { Main(m) }

func TestNew_IsDroppedWhenTheTestEnds(t *testing.T) {
	t.Parallel()
	var name string
	t.Run("test", func(t *testing.T) { name = New(t).Name })
	require.NotEmpty(t, name)
	require.False(t, query[bool](t, Shared(t).URL(""), "select exists (select from pg_database where datname = $1)", name))
}

func TestDatabases_OfKilledProcessesAreSwept(t *testing.T) {
	t.Parallel()
	server := Shared(t)
	alive := New(t)
	left := prefix + "0123456789_1"
	run(t, server.URL(""), "create database "+left+" template template0")

	next := noError(newDatabases(t.Context(), server))(t)
	require.NoError(t, next.close(t.Context()))

	const exists = "select exists (select from pg_database where datname = $1)"
	require.False(t, query[bool](t, server.URL(""), exists, left))
	require.True(t, query[bool](t, server.URL(""), exists, alive.Name))
	require.False(t, query[bool](t, server.URL(""), exists, next.template))
}

func TestPrivateOnDisk_IsUnmountedWhenTheTestEnds(t *testing.T) {
	t.Parallel()
	var dir string
	t.Run("test", func(t *testing.T) {
		var server *Server
		server, dir = PrivateOnDisk(t, 128)
		require.Contains(t, query[string](t, server.URL(""), "select current_setting('data_directory')"), dir)
		file := noError(os.Create(filepath.Join(dir, "large")))(t)
		defer file.Close()
		_, err := file.Write(make([]byte, 128<<20))
		require.ErrorIs(t, err, syscall.ENOSPC)
	})
	if dir == "" {
		t.Skip("as the test in it")
	}
	require.NoDirExists(t, dir)
}

func TestKill_LeavesAServerThatRecovers(t *testing.T) {
	t.Parallel()
	server := Private(t, "work_mem=7MB")
	for i := range 3 {
		run(t, server.URL(""), fmt.Sprintf("create table kept%d ()", i))
		if cluster, ok := server.host.(*cluster); ok && i > 0 {
			require.NoError(t, os.Truncate(cluster.lockFiles()[i-1], 0)) // as if killed before it was written
		}
		OrSkip(t, server.Kill(t.Context()))
		_, err := pgx.Connect(t.Context(), server.URL(""))
		require.Error(t, err)
		require.NoError(t, server.Start(t.Context()))
		require.Equal(t, "7MB", query[string](t, server.URL(""), "select current_setting('work_mem')"))
	}
	require.True(t, query[bool](t, server.URL(""), "select to_regclass('kept0') < to_regclass('kept2')"))
}

func TestFreeze_AServerAnswersNobodyUntilItThaws(t *testing.T) {
	t.Parallel()
	server := Private(t)
	conn := noError(pgx.Connect(t.Context(), server.URL("")))(t)
	defer conn.Close(context.Background())
	OrSkip(t, server.Freeze(t.Context()))
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := pgx.Connect(short, server.URL(""))
	require.ErrorIs(t, err, context.DeadlineExceeded)

	require.NoError(t, server.Thaw(t.Context()))
	_, err = conn.Exec(t.Context(), "select 1")
	require.NoError(t, err)

	require.NoError(t, server.Freeze(t.Context()), "and so it is closed")
}

func TestServer_DiesWithItsProcess(t *testing.T) {
	t.Parallel()
	if os.Getenv("PGTEST_VICTIM") != "" {
		fmt.Println(own(t).URL(""))
		_, _ = io.Copy(io.Discard, os.Stdin) // not beyond the test that started it
	}

	ownRung(t)
	victim := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	victim.Env = append(os.Environ(), "PGTEST_VICTIM=1")
	stdin := noError(victim.StdinPipe())(t)
	defer stdin.Close()
	stdout := noError(victim.StdoutPipe())(t)
	require.NoError(t, victim.Start())
	url := noError(bufio.NewReader(stdout).ReadString('\n'))(t)
	url = strings.TrimSpace(url)
	require.Equal(t, int32(1), query[int32](t, url, "select 1"))

	require.NoError(t, victim.Process.Kill())
	_ = victim.Wait()
	require.Eventually(t, func() bool { return gone(t, url) }, time.Minute, 50*time.Millisecond)
}

func TestKeep_LeavesAServerThatRemoveRemoves(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "kept", "server.json")
	server := own(t)

	require.NoError(t, server.Keep(file))
	require.Equal(t, int32(1), query[int32](t, server.URL(""), "select 1"))
	require.NoError(t, Remove(t.Context(), file))
	require.True(t, gone(t, server.URL("")))
	require.NoError(t, Remove(t.Context(), file), "nothing is left to remove")
}

func TestRunning_URLNamesTheDatabase(t *testing.T) {
	t.Parallel()
	for dsn, want := range map[string]string{
		"postgres://u:p@h:1/d?sslmode=disable": "h 1 u it's",
		"postgresql:///d?host=/tmp&user=u":     "/tmp 5432 u it's",
		"host=h port=1 user=u dbname=d":        "h 1 u it's",
	} {
		config, err := pgx.ParseConfig(running(dsn).URL("it's"))
		require.NoError(t, err, dsn)
		require.Equal(t, want, fmt.Sprint(config.Host, " ", config.Port, " ", config.User, " ", config.Database), dsn)
		require.Equal(t, dsn, running(dsn).URL(""))
	}
}

func TestStart_RefusesAnUnknownRequirement(t *testing.T) {
	t.Setenv("RATELIMIT_TEST_REQUIRE", "podman")
	_, err := Start(t.Context())
	require.ErrorContains(t, err, "set it to url, docker or local")
}

func TestStart_NamesAllWaysWhenThereIsNone(t *testing.T) {
	absent := func(context.Context, []string) (host, error) { return nil, errAbsent }
	_, err := climb(t.Context(), []rung{{rungURL, absent}, {rungDocker, absent}, {rungLocal, absent}}, nil)
	for _, way := range []string{"RATELIMIT_DATABASE_URL", "Docker", "RATELIMIT_PG_BIN", "apt-get"} {
		require.ErrorContains(t, err, way)
	}
}

// own starts a server that only this test ends.
func own(t *testing.T) *Server {
	return noError(climb(t.Context(), ownRung(t), nil))(t)
}

func ownRung(t *testing.T) []rung {
	t.Helper()
	name := Shared(t).Rung
	if name == rungURL {
		t.Skip("the tests run on a server that was there")
	}
	return only(ladder, name)
}

// gone tells whether a server does not answer, and left no directory.
func gone(t *testing.T, url string) bool {
	config := noError(pgx.ParseConfig(url))(t)
	if conn, err := pgx.ConnectConfig(t.Context(), config); err == nil {
		require.NoError(t, conn.Close(t.Context()))
		return false
	}
	_, err := os.Stat(config.Host)
	return errors.Is(err, os.ErrNotExist)
}

func run(t *testing.T, url, sql string) {
	conn := noError(pgx.Connect(t.Context(), url))(t)
	defer conn.Close(t.Context())
	_, err := conn.Exec(t.Context(), sql)
	require.NoError(t, err)
}

func query[T any](t *testing.T, url, sql string, args ...any) (answer T) {
	conn := noError(pgx.Connect(t.Context(), url))(t)
	defer conn.Close(t.Context())
	require.NoError(t, conn.QueryRow(t.Context(), sql, args...).Scan(&answer))
	return answer
}

// The installation is a stand-in, so that a failure damages none. Package managers put links into it.
func TestPrivateWithExtensions_WhatATestChangesStaysInItsOwnFolder(t *testing.T) {
	t.Parallel()
	prefix, cellar := t.TempDir(), t.TempDir()
	for _, name := range []string{"bin/initdb", "bin/pg_ctl", "bin/postgres", "lib/libpq.so", "share/postgresql/postgres.bki",
		"share/postgresql/tsearch_data/german.stop", "share/postgresql/extension/pgratelimit.control"} {
		writeFile(t, filepath.Join(prefix, name))
	}
	writeFile(t, filepath.Join(cellar, "linked.control"))
	require.NoError(t, os.Symlink(filepath.Join(cellar, "linked.control"), filepath.Join(prefix, "share/postgresql/extension/linked.control")))
	tree := func() string {
		return string(noError(exec.Command("sh", "-c", `ls -lR "$@"; grep -r . "$@"`, "sh", prefix, cellar).Output())(t))
	}
	before := tree()

	bin, extensions, err := copyPrograms(t, filepath.Join(prefix, "bin"))
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(bin, "postgres"))
	require.FileExists(t, filepath.Join(bin, "../lib/libpq.so"))
	require.NoError(t, exec.Command("sh", "-c", `find "$1" -type f -exec sh -c 'echo changed >"$0"' {} ';'`, "sh", filepath.Dir(extensions)).Run())
	for _, name := range []string{"extension/pgratelimit.control", "extension/linked.control", "postgres.bki", "tsearch_data/german.stop"} {
		require.Equal(t, "changed\n", string(noError(os.ReadFile(filepath.Join(filepath.Dir(extensions), name)))(t)))
	}
	require.Equal(t, before, tree())
}

func writeFile(t *testing.T, path string) {
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(path), 0o600))
}
