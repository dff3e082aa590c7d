package main

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func (l *listening) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.log.String(), text)
}

// SIGHUP reads Envoy's rules again. Those that cannot be used change nothing, and the log says why.
func TestServe_SIGHUP(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	rules := filepath.Join(t.TempDir(), "rules.yaml")
	write := func(requests string) {
		text := "{domain: edge, descriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: " + requests + "}}]}"
		require.NoError(t, os.WriteFile(rules, []byte(text), 0o600))
	}
	write("0")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	program, err := os.Executable()
	require.NoError(t, err)
	c := exec.CommandContext(ctx, program, "serve", "--config", settingsFile(t))
	c.Env = append(os.Environ(), asProgram+"=1", "DATABASE_URL="+db.URL, "ENVOY_RULES="+rules)
	log := &listening{address: make(chan string, 1)}
	c.Stderr = log
	require.NoError(t, c.Start())
	address := <-log.address
	status := func() int {
		t.Helper()
		response, err := http.Post("http://"+address+"/json", "application/json",
			strings.NewReader(`{"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]}`))
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode
	}
	hangUp := func(logs string) {
		t.Helper()
		before := log.count(logs)
		require.NoError(t, c.Process.Signal(syscall.SIGHUP))
		require.Eventually(t, func() bool { return log.count(logs) > before }, 30*time.Second, 5*time.Millisecond)
	}
	require.Equal(t, 429, status())
	write("many")
	hangUp("the rules stay as they are")
	require.Positive(t, log.count("rules.yaml:1:85: requests_per_unit is"))
	require.Equal(t, 429, status())
	write("1")
	hangUp("rules read")
	require.Eventually(t, func() bool { return status() == 200 }, 30*time.Second, 5*time.Millisecond)
	require.Equal(t, 429, status())
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	require.NoError(t, c.Wait(), "%s", &log.log)
}
