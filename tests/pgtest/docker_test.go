package pgtest

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A reply of a stand-in for the engine to one path of its API. After one without a status it says nothing more.
type reply struct {
	status int
	body   string
}

func TestDocker_WithoutImageAndRegistryIsPassedOver(t *testing.T) {
	t.Parallel()
	const passed = "local: reached"
	unreachable := reply{500, `{"message": "lookup registry-1.docker.io: no such host"}`}
	for name, test := range map[string]struct {
		require string
		engine  map[string]reply
		want    []string
	}{
		"the registry cannot be reached": {
			"", map[string]reply{"/images/create": unreachable},
			[]string{"pgtest: going on without Docker: not available: the engine lacks the image postgres:17-trixie: ", "no such host", passed},
		},
		"the registry falls silent": {
			"", map[string]reply{"/images/create": {0, `{"status": "Pulling from library/postgres"}`}},
			[]string{"going on without Docker", "the registry was silent for 100ms", passed},
		},
		"the line breaks": {
			"", map[string]reply{"/images/create": {200, `{"status": "Pulling from library/postgres"}{"errorDetail": {"message": "unexpected EOF"}}`}},
			[]string{"going on without Docker", "unexpected EOF", passed},
		},
		"but not where Docker is required": {
			rungDocker, map[string]reply{"/images/create": unreachable},
			[]string{"no PostgreSQL:", "docker: not available: the engine lacks the image postgres:17-trixie"},
		},
		"nor when the registry does not know the image": {
			"", map[string]reply{"/images/create": {404, `{"message": "manifest unknown"}`}},
			[]string{"pgtest: docker: image postgres:17-trixie: ", "manifest unknown"},
		},
		"nor when our Dockerfile is broken": {
			"", map[string]reply{
				"/images/postgres:17-trixie/json": {200, "{}"}, "/networks": {200, `[{"Name": "bridge"}]`},
				"/build": {200, `{"errorDetail": {"message": "returned a non-zero code: 100"}}`},
			},
			[]string{"pgtest: docker: ", "build image: returned a non-zero code: 100"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out := climbWithEngine(t, test.require, test.engine)
			for _, want := range test.want {
				require.Contains(t, out, want)
			}
			if test.want[len(test.want)-1] != passed {
				require.NotContains(t, out, passed)
				require.NotContains(t, out, "going on")
			}
		})
	}
}

// climbWithEngine climbs in a process of its own, since one asks for the engine once, and returns what that wrote.
func climbWithEngine(t *testing.T, needs string, engine map[string]reply) string {
	dir := noError(os.MkdirTemp(tempDir, "ratelimit-"))(t)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	listener := noError(net.Listen("unix", filepath.Join(dir, "socket")))(t)
	server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := regexp.MustCompile(`^/v[\d.]+`).ReplaceAllString(r.URL.Path, "")
		reply, ok := engine[path]
		if path == "/_ping" || path == "/info" {
			reply.status, reply.body = 200, "{}"
		} else if !ok {
			reply.status, reply.body = 404, `{"message": "no such object"}`
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Api-Version", "1.44")
		if reply.status != 0 {
			w.WriteHeader(reply.status)
		}
		_, _ = io.WriteString(w, reply.body)
		if reply.status == 0 {
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Close() })
	climb := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestDocker_TheClimbOfAnotherTest$")
	patience := time.Hour // but for silence, an answer has all the time it takes
	if create, ok := engine["/images/create"]; ok && create.status == 0 {
		patience = 100 * time.Millisecond
	}
	climb.Env = append(os.Environ(), "PGTEST_CLIMB="+patience.String(), "DOCKER_HOST=unix://"+filepath.Join(dir, "socket"), "HOME="+dir,
		"RATELIMIT_TEST_REQUIRE="+needs, "TESTCONTAINERS_RYUK_DISABLED=true")
	out, err := climb.CombinedOutput()
	require.Error(t, err)
	return string(out)
}

func TestDocker_TheClimbOfAnotherTest(t *testing.T) {
	if os.Getenv("PGTEST_CLIMB") == "" {
		return
	}
	var err error
	registryPatience, err = time.ParseDuration(os.Getenv("PGTEST_CLIMB"))
	require.NoError(t, err)
	rungs := only(ladder, os.Getenv("RATELIMIT_TEST_REQUIRE"))
	if rungs == nil {
		reached := func(context.Context, []string) (host, error) { return nil, errors.New("reached") }
		rungs = []rung{{rungDocker, startContainer}, {rungLocal, reached}}
	}
	_, err = climb(t.Context(), rungs, nil)
	t.Fatal(err)
}
