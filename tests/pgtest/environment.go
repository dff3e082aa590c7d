package pgtest

import (
	"os"
	"regexp"
	"syscall"
	"testing"
)

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

// OncePerServer marks a test whose outcome does not depend on the PostgreSQL. RATELIMIT_TEST_ONCE=skip leaves it out, for a run
// on a further version.
func OncePerServer(t testing.TB) {
	t.Helper()
	if os.Getenv("RATELIMIT_TEST_ONCE") == "skip" {
		t.Skip("does not depend on the PostgreSQL")
	}
}
