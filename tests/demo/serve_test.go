package main

import (
	"bufio"
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// make serve-demo: what it tells its reader to run answers, and Ctrl-C ends all of it.
func TestServe_WhatItTellsToRunAnswers(t *testing.T) {
	t.Parallel()
	root := kit.NoError(filepath.Abs("../.."))(t)
	program := kit.Built(t, "tests/demo")
	kit.Run(t, "../..", nil, "make", "build")

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // a fresh machine compiles the server
	defer cancel()
	c := exec.CommandContext(ctx, program, "serve")
	c.Dir = root
	http, grpc := "127.0.0.1:"+pgtest.FreePort(t), "127.0.0.1:"+pgtest.FreePort(t)
	c.Env = append(os.Environ(), "CALL_TIMEOUT=1m", "HTTP_ADDR="+http, "GRPC_ADDR="+grpc)
	var complaints bytes.Buffer
	c.Stderr = &complaints
	stdout := kit.NoError(c.StdoutPipe())(t)
	require.NoError(t, c.Start())
	lines := bufio.NewScanner(stdout)
	var told strings.Builder
	for !strings.HasPrefix(lines.Text(), "Ctrl-C ends") && lines.Scan() {
		told.WriteString(lines.Text() + "\n")
	}
	text := told.String()
	require.Contains(t, text, "Ctrl-C ends", "%s", &complaints)

	commands := regexp.MustCompile(`(?m)^  ((?:curl|build/pgratelimit|psql) .*)$`).FindAllStringSubmatch(text, -1)
	require.Len(t, commands, 7)
	for _, command := range commands {
		if _, err := exec.LookPath(strings.Fields(command[1])[0]); err != nil && !strings.HasPrefix(command[1], "build/") {
			t.Log(err)
			continue
		}
		shell := exec.CommandContext(ctx, "sh", "-c", command[1])
		shell.Dir = root
		answer, err := shell.CombinedOutput()
		require.NoError(t, err, "%s\n%s", command[1], answer)
		require.Regexp(t, `"allowed":|ratelimit_requests_total\{|user:|signup|All is well`, string(answer), command[1])
	}

	require.NoError(t, c.Process.Signal(os.Interrupt))
	for lines.Scan() {
		told.WriteString(lines.Text() + "\n")
	}
	require.NoError(t, c.Wait(), "%s", &complaints)
	require.Regexp(t, `(?m)^In \S+s: [1-9]\d* allowed, \d+ denied, 0 without an answer\.$`, told.String())
	for _, address := range []string{http, grpc} {
		_, err := net.Dial("tcp", address)
		require.Error(t, err, "the server has ended")
	}
	if directory := regexp.MustCompile(`/tmp/ratelimit-\d+`).FindString(text); directory != "" {
		require.NoDirExists(t, directory, "and so has the database")
	}
}
