package main

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/config"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Where no image can be had, these tests hold docker/ to what the program and the repository have.

const root = "../../.."

// The Dockerfile copies all that its command needs, and uses the Go version of the repository.
func TestDocker_ImageHasWhatItBuildsFrom(t *testing.T) {
	t.Parallel()
	src := t.TempDir()
	text := kit.NoError(os.ReadFile(root + "/docker/server.Dockerfile"))(t)
	last := map[string]string{} // what follows a word, in its last line
	for line := range strings.Lines(string(text)) {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		last[word] = rest
		if version, ok := strings.CutPrefix(rest, "golang:"); ok {
			version, _, _ = strings.Cut(version, "-")
			text := kit.NoError(os.ReadFile(root + "/go.work"))(t)
			require.Regexp(t, `(?m)^go `+regexp.QuoteMeta(version)+`(\.|$)`, string(text))
		}
		if files := strings.Fields(rest); word == "COPY" && !strings.HasPrefix(rest, "--from=") {
			for _, file := range files[:len(files)-1] {
				copyForImage(t, src, file)
			}
		}
	}
	require.Regexp(t, `^[1-9]\d*:[1-9]\d*$`, last["USER"])
	require.Equal(t, `["/pgratelimit"]`, last["ENTRYPOINT"])
	require.Contains(t, last["HEALTHCHECK"], `CMD ["/pgratelimit", "health"]`)

	// The command, but that it lists what it would compile.
	listing, found := strings.CutPrefix(last["RUN"], "cd server && ")
	require.True(t, found)
	listing = regexp.MustCompile(`go build .* (\S+)$`).ReplaceAllString(listing, "go list -deps -f '{{with .Error}}{{.}}{{end}}' $1")
	require.Contains(t, listing, "go list")
	c := exec.Command("sh", "-c", listing)
	c.Dir = filepath.Join(src, "server")
	var said strings.Builder // also that it downloads
	c.Stderr = &said
	out, err := c.Output()
	require.NoError(t, err, "%s", &said)
	require.Empty(t, strings.TrimSpace(string(out)))
}

// copyForImage copies a file or folder/, without what .dockerignore leaves out.
func copyForImage(t *testing.T, to, name string) {
	text := kit.NoError(os.ReadFile(root + "/.dockerignore"))(t)
	require.Subset(t, strings.Split(string(text), "\n"), []string{"*", regexp.MustCompile("/$").ReplaceAllString("!"+name, "/**"), "**/*_test.go", "**/testdata", "**/node_modules"})
	out, err := exec.Command("sh", "-c", `tar -C "$1" --exclude '*_test.go' --exclude testdata --exclude node_modules -cf - "$2" | tar -C "$3" -xf -`, "sh", root, name, to).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// A service of docker compose, as far as it is looked at.
type service struct {
	Image       string
	Build       struct{ Context, Dockerfile string }
	Command     string
	Environment map[string]*string // nil is passed on if it is set
	Ports       []string
	Volumes     []string
	DependsOn   map[string]struct{ Condition string } `yaml:"depends_on"`
}

var substituted = regexp.MustCompile(`\$\{\w+:-([^}]*)\}`)

// With compose's environment and the file that it mounts, the program applies the policies, serves, and is healthy.
func TestDocker_ComposeServes(t *testing.T) {
	t.Parallel()
	text := kit.NoError(os.ReadFile(root + "/docker/compose.yaml"))(t)
	require.NotContains(t, string(text), "\n      - 0.0.0.0:", "nobody else's machine is let in")
	var compose struct{ Services map[string]service }
	require.NoError(t, yaml.Unmarshal(substituted.ReplaceAll(text, []byte("$1")), &compose))
	policies, server := compose.Services["policies"], compose.Services["server"]
	for _, s := range []service{policies, server} {
		require.NoError(t, kit.ErrorOf(os.Stat(filepath.Join(root, "docker", s.Build.Context, s.Build.Dockerfile))))
		require.Equal(t, "service_healthy", s.DependsOn["postgres"].Condition)
		require.Equal(t, "postgres", regexp.MustCompile(`@(\w+)/`).FindStringSubmatch(*s.Environment["DATABASE_URL"])[1])
	}
	require.Equal(t, "service_completed_successfully", server.DependsOn["policies"].Condition)
	require.Equal(t, server.Image, policies.Image)
	require.Equal(t, []string{"127.0.0.1:8080:8080", "127.0.0.1:8081:8081"}, server.Ports)

	db := pgtest.New(t)
	mounted, at, _ := strings.Cut(strings.TrimSuffix(policies.Volumes[0], ":ro"), ":")
	args := strings.Fields(policies.Command)
	require.Equal(t, []string{"apply", at}, args)
	require.Equal(t, exitDone, on(t, db, "apply", filepath.Join(root, "docker", mounted)).code)

	var known []string
	for _, setting := range config.Settings() {
		known = append(known, setting.Name)
	}
	env := []string{"DATABASE_URL=" + db.URL}
	for name, value := range server.Environment {
		if name != "PGPASSWORD" {
			require.Contains(t, known, name)
			if name != "DATABASE_URL" && value != nil {
				env = append(env, name+"="+*value)
			}
		}
	}
	awaitHealthy(t, "HTTP_ADDR="+serve(t, env...).http)
	require.Equal(t, exitDone, on(t, db, "acquire", "api", "k").code)
}

// asksHealth needs no database.
func asksHealth(t *testing.T, settings ...string) ran {
	path := kit.File(t, "settings", strings.Join(settings, "\n"))
	return command(t, "health", "--config", path)
}

// awaitHealthy returns when the server is: a check that takes a second finds what is well not healthy.
func awaitHealthy(t *testing.T, settings ...string) {
	require.Eventually(t, func() bool { return asksHealth(t, settings...) == ran{code: exitDone, out: "healthy\n"} }, time.Minute, 10*time.Millisecond, settings)
}

func TestHealth(t *testing.T) {
	db := kit.ParallelDB(t).DB
	address := serve(t, "DATABASE_URL="+db.URL, "MONITORING_TOKENS=secret").http
	other := httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
	_, port, _ := strings.Cut(address, ":")
	for _, setting := range []string{address, "0.0.0.0:" + port, ":" + port, "[::]:" + port} {
		awaitHealthy(t, "HTTP_ADDR="+setting, "MONITORING_TOKENS=secret")
	}
	for settings, says := range map[string]string{
		"HTTP_ADDR=" + address:                               "401",
		"HTTP_ADDR=" + address + "\nMONITORING_TOKENS=wrong": "401",
		"HTTP_ADDR=127.0.0.1:1":                              "no server answers at HTTP_ADDR 127.0.0.1:1: Get \"http://127.0.0.1:1/healthz\": dial tcp 127.0.0.1:1: connect: ",
		"HTTP_ADDR=" + other.Listener.Addr().String():        "another program answers at HTTP_ADDR ",
	} {
		r := asksHealth(t, settings)
		require.Equal(t, exitError, r.code)
		require.Contains(t, r.errors, says)
	}
	require.Equal(t, exitUsage, asksHealth(t, "HTTP_ADDR=off").code)
}

func TestHealth_TLS(t *testing.T) {
	t.Parallel()
	cert, key, _ := kit.Certificate(t)
	settings := []string{"TLS_CERT_FILE=" + cert, "TLS_KEY_FILE=" + key}
	address := serve(t, append(settings, "DATABASE_URL="+pgtest.New(t).URL)...).http
	awaitHealthy(t, append(settings, "HTTP_ADDR="+address)...)
	require.Equal(t, exitError, asksHealth(t, "HTTP_ADDR="+address).code, "in the clear")
}

// SIGHUP reads Envoy's rules again, also after a mistake. TestEnvoyRules_Reload has mistakes.
func TestServe_SIGHUP(t *testing.T) {
	t.Parallel()
	rules := filepath.Join(t.TempDir(), "rules.yaml")
	write := func(requests string) {
		text := "{domain: edge, descriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: " + requests + "}}]}"
		require.NoError(t, os.WriteFile(rules, []byte(text), 0o600))
	}
	write("0")
	p := serve(t, "DATABASE_URL="+pgtest.New(t).URL, "ENVOY_RULES="+rules)
	status := func() int {
		code, _ := p.ask(t, "/json", `{"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]}`)
		return code
	}
	require.Equal(t, 429, status())
	write("many")
	require.NoError(t, p.Process.Signal(syscall.SIGHUP))
	require.Eventually(t, func() bool { return strings.Contains(p.log.String(), "the rules stay as they are") }, 30*time.Second, 5*time.Millisecond)
	write("1")
	require.NoError(t, p.Process.Signal(syscall.SIGHUP))
	require.Eventually(t, func() bool { return status() == 200 }, 30*time.Second, 5*time.Millisecond)
	require.Equal(t, 429, status())
	p.end(t, syscall.SIGTERM)
}

// A process is the program as it serves. SIGINT ends it with the test.
type process struct {
	*exec.Cmd
	grpc, http string
	listening  chan struct{}
	ended      sync.Once
	log        kit.Log
}

func serve(t *testing.T, settings ...string) *process {
	t.Helper()
	return serveBy(t, kit.NoError(os.Executable())(t), settings...)
}

func serveBy(t *testing.T, program string, settings ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(program, "serve", "--config", settingsFile(t)), listening: make(chan struct{})}
	p.Env = append(os.Environ(), append(settings, asProgram+"=1")...)
	p.Stderr = p
	require.NoError(t, p.Start())
	t.Cleanup(func() { p.end(t, os.Interrupt) })
	select {
	case <-p.listening:
	case <-time.After(time.Minute):
		t.Fatal("it does not listen")
	}
	return p
}

var listens = regexp.MustCompile(`msg=listening protocol=(\S+) address=(\S+)`)

// Write keeps what the program logs, and finds its addresses there: that for HTTP is the last one.
func (p *process) Write(text []byte) (int, error) {
	for _, found := range listens.FindAllStringSubmatch(string(text), -1) {
		if found[1] == "gRPC" {
			p.grpc = found[2]
		} else {
			p.http = found[2]
			close(p.listening)
		}
	}
	return p.log.Write(text)
}

// end ends the program by a signal, with exit code 0.
func (p *process) end(t *testing.T, signal os.Signal) {
	p.ended.Do(func() {
		require.NoError(t, p.Process.Signal(signal))
		require.NoError(t, p.Wait(), "%s", p.log.String())
		require.Contains(t, p.log.String(), "msg=stopped")
		require.NotContains(t, p.log.String(), "panic")
	})
}

// ask posts a body, or gets what is at the path if there is none.
func (p *process) ask(t *testing.T, path, body string) (status int, text string) {
	method := http.MethodPost
	if body == "" {
		method = http.MethodGet
	}
	r := kit.NoError(http.NewRequestWithContext(t.Context(), method, "http://"+p.http+path, strings.NewReader(body)))(t)
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	answer := kit.NoError(io.ReadAll(response.Body))(t)
	return response.StatusCode, string(answer)
}

// live returns the megabytes that were in use when the collector looked, at most; with GODEBUG=gctrace=1 it says so each time. Garbage
// does not count, which a busy machine collects late.
func (p *process) live(t *testing.T) (most int) {
	for _, looked := range regexp.MustCompile(`(?m)^gc \d+ .*->(\d+) MB, `).FindAllStringSubmatch(p.log.String(), -1) {
		most = max(most, kit.NoError(strconv.Atoi(looked[1]))(t))
	}
	return most
}

// A thousand clients send messages of 500 requests, and read no answer. The requests themselves are not bounded: where all streams are
// decoded at once, they take 64 KB for the window of each and 125 KB for its message, 190 MB. Answers may take 32 MB.
func TestServe_AnswersThatNobodyReadsTakeBoundedMemory(t *testing.T) {
	const connections, streams, most = 10, 100, 300
	db := kit.ParallelDB(t).DB
	program := filepath.Join(t.TempDir(), "pgratelimit") // this one may have the race detector, which takes memory
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	for name, length := range map[string]int{"short": 3, "long": 25} {
		q := &pb.AcquireStreamRequest{Id: 1}
		for range 500 {
			q.Requests = append(q.Requests, &pb.Request{Policy: strings.Repeat("p", length), LogicalKey: strings.Repeat("k", length)})
		}
		p := serveBy(t, program, "DATABASE_URL="+db.URL, "GRPC_ADDR=127.0.0.1:0", "GODEBUG=gctrace=1")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var clients sync.WaitGroup
		for range connections {
			conn := kit.NoError(grpc.NewClient(p.grpc, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
			defer conn.Close()
			for range streams {
				clients.Go(func() {
					stream, err := pb.NewRateLimiterClient(conn).AcquireStream(ctx)
					for sent := 0; err == nil && sent < 130_000; sent += proto.Size(q) {
						err = stream.Send(q) // until the server reads no more, or ends the connection
					}
				})
			}
		}
		ended := make(chan struct{})
		go func() {
			clients.Wait()
			close(ended)
		}()
		isAnswered := func() bool { // what the server has read
			select {
			case <-ended:
				_, text := p.ask(t, "/metrics", "")
				return strings.Contains(text, "ratelimit_server_calls_under_way 0\n")
			default:
				return false
			}
		}
		for !isAnswered() {
			if now := p.live(t); now > most {
				require.NoError(t, p.Process.Kill())
				t.Fatalf("%s names: %d MB", name, now)
			}
			time.Sleep(100 * time.Millisecond) // until the next look
		}
		t.Logf("%s names: messages of %d bytes, at most %d MB", name, proto.Size(q), p.live(t))
		require.LessOrEqual(t, p.live(t), most)
		require.Eventually(t, func() bool { // when it has answered what it has read
			_, text := p.ask(t, "/v1/acquire", `{"policy":"nobody","key":"k"}`)
			return strings.Contains(text, "RL001")
		}, time.Minute, 10*time.Millisecond)
	}
}
