// Package pgtest gives every test a private PostgreSQL database with pgratelimit installed.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		t.Parallel()
//		db := pgtest.New(t)
//		…
//	}
//
// The package is installed once per process, into a template that each test's database is copied
// from. The server comes from the first of these that is there:
//
//  1. url: RATELIMIT_DATABASE_URL, a running server whose role may create databases
//  2. docker: a Docker engine, running the image of docker/Dockerfile
//  3. local: PostgreSQL 15 to 18 installed on the machine, as a throw-away cluster;
//     RATELIMIT_PG_BIN names the directory of its binaries when PATH should not decide
//  4. local, after installing PostgreSQL with apt-get, as root or with passwordless sudo
//
// RATELIMIT_TEST_REQUIRE=url, docker or local insists on one of them. Tests never run without a
// server: they fail. RATELIMIT_TEST_LOG names a file that is told which server was used.
//
// RATELIMIT_TEST_DIR is where throw-away clusters are, instead of /dev/shm or, without room there, /tmp.
package pgtest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Main is the TestMain of a package that uses this one, and m a *testing.M. It removes the server, or what the tests
// left on it, when they are done or interrupted.
func Main(m interface{ Run() int }) {
	interrupted, _ := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(interrupted, func() {
		shared.close()
		os.Exit(130)
	})

	isTest = true
	// Unless the command line says another. The loads of more tests than processors starve each other, and those of more than eight
	// want too many connections.
	_ = flag.Set("test.parallel", strconv.Itoa(min(8, runtime.GOMAXPROCS(0))))
	if os.Getenv("RATELIMIT_TEST_DIR") == "" {
		tempDir = inMemory(tempDir)
	}
	code := m.Run()
	if err := shared.close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// New returns a database of its own with the package installed. It is dropped when the test ends.
func New(t testing.TB) *DB { return create(t, true) }

// Parallel is New for a test that runs beside others.
func Parallel(t *testing.T) *DB {
	t.Parallel()
	return New(t)
}

// Empty returns a database of its own without the package. It is dropped when the test ends. Options
// are those of CREATE DATABASE, such as "encoding 'LATIN1'".
func Empty(t testing.TB, options ...string) *DB { return create(t, false, options...) }

// Shared returns the server that New and Empty create databases on.
func Shared(t testing.TB) *Server {
	databases := noError(shared.get())(t)
	return databases.server
}

// Private returns a server of the test's own, for tests that crash it or need other settings, each given as "name=value". It has
// no package installed, but on Docker in its database postgres, where the image does that. It comes from the same rung as the
// shared server; when that is a running one, from the next rung that is there.
func Private(t testing.TB, settings ...string) *Server {
	rungs := ladder[1:]
	if common := Shared(t); common.Rung != rungURL {
		rungs = only(ladder, common.Rung)
	}
	return private(t, rungs, settings)
}

// noError returns the value of a call that must not fail: noError(call())(t).
func noError[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T { require.NoError(t, err); return value }
}

// OrSkip fails a test for an error, but skips it where the machine cannot do what was asked, such as [Server.Kill] without /proc.
func OrSkip(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
}

func private(t testing.TB, rungs []rung, settings []string) *Server {
	server, err := climb(context.Background(), rungs, settings)
	require.NoError(t, err, "a private server")
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	return server
}

func create(t testing.TB, installed bool, options ...string) *DB {
	databases := noError(shared.get())(t)
	db := noError(databases.create(context.Background(), installed, options...))(t)
	t.Cleanup(func() { assert.NoError(t, databases.drop(context.Background(), db)) })
	return db
}

// shared is the server of this process, started by the first test that wants a database.
var shared lazy

type lazy struct {
	mu        sync.Mutex
	databases *databases
	err       error
}

func (l *lazy) get() (*databases, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.databases == nil && l.err == nil {
		l.databases, l.err = open(context.Background())
	}
	return l.databases, l.err
}

func open(ctx context.Context) (*databases, error) {
	server, err := start(ctx, ladderInMemory, nil)
	if err != nil {
		return nil, err
	}
	databases, err := newDatabases(ctx, server)
	if err != nil {
		return nil, errors.Join(err, server.Close())
	}
	return databases, report(server)
}

func (l *lazy) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.databases == nil {
		return nil
	}
	err := errors.Join(l.databases.close(context.Background()), l.databases.server.Close())
	l.databases, l.err = nil, errors.New("pgtest: the tests are over")
	return err
}

// report appends a line about the server to the file that RATELIMIT_TEST_LOG names.
func report(server *Server) error {
	path := os.Getenv("RATELIMIT_TEST_LOG")
	if path == "" {
		return nil
	}
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("pgtest: RATELIMIT_TEST_LOG: %w", err)
	}
	defer file.Close()
	_, err = fmt.Fprintf(file, "%s: %s\n", filepath.Base(os.Args[0]), server)
	return err
}

// What tests start and write is the same whoever runs them.
func init() {
	syscall.Umask(0o022) // root's server runs as another user
	if os.Getenv("RATELIMIT_DATABASE_URL") == "" {
		for _, variable := range os.Environ() { // libpq's
			if name := regexp.MustCompile(`^PG[A-Z]*`).FindString(variable); name != "" && variable[len(name)] == '=' {
				os.Unsetenv(name)
			}
		}
	}
	os.Unsetenv("LANGUAGE")
	os.Setenv("LC_ALL", "C")         // of messages, among others
	os.Setenv("PGCTLTIMEOUT", "600") // pg_ctl sees a server that died at once, and a busy machine is slow
}

// OncePerServer marks a test that does not depend on the PostgreSQL. RATELIMIT_TEST_ONCE=skip leaves it out, for a run on another version.
func OncePerServer(t testing.TB) {
	t.Helper()
	if os.Getenv("RATELIMIT_TEST_ONCE") == "skip" {
		t.Skip("does not depend on the PostgreSQL")
	}
}
