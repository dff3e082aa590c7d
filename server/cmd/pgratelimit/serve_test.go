package main

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"

	"github.com/pgratelimit/pgratelimit/server/internal/config"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Where no image can be had, these tests hold docker/ to what the program and the repository have.

const root = "../../.."

// instructions are those of a Dockerfile, in order, each a word and the rest of its line.
func instructions(t *testing.T, path string) (list [][2]string) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		if word, rest, ok := strings.Cut(strings.TrimSpace(line), " "); ok && word != "#" {
			list = append(list, [2]string{word, rest})
		}
	}
	return list
}

// What the Dockerfile copies is what its command needs, in a Go of the version that the repository has.
func TestDocker_ImageHasWhatItBuildsFrom(t *testing.T) {
	t.Parallel()
	src := t.TempDir()
	var build, entrypoint, user, healthcheck string
	for _, instruction := range instructions(t, root+"/docker/server.Dockerfile") {
		word, rest := instruction[0], instruction[1]
		switch word {
		case "FROM":
			if version, ok := strings.CutPrefix(rest, "golang:"); ok {
				version, _, _ = strings.Cut(version, "-")
				text, err := os.ReadFile(root + "/go.work")
				require.NoError(t, err)
				require.Regexp(t, `(?m)^go `+regexp.QuoteMeta(version)+`(\.|$)`, string(text))
			}
		case "COPY":
			if !strings.HasPrefix(rest, "--from=") {
				files := strings.Fields(rest)
				for _, file := range files[:len(files)-1] {
					copyForImage(t, src, strings.TrimSuffix(file, "/"))
				}
			}
		case "RUN":
			build = rest
		case "USER":
			user = rest
		case "ENTRYPOINT":
			entrypoint = rest
		case "HEALTHCHECK":
			healthcheck = rest
		}
	}
	require.Regexp(t, `^[1-9]\d*:[1-9]\d*$`, user)
	require.Equal(t, `["/pgratelimit"]`, entrypoint)
	require.Contains(t, healthcheck, `CMD ["/pgratelimit", "health"]`)

	// The command, but that it lists what it would compile.
	listing, found := strings.CutPrefix(build, "cd server && ")
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

// copyForImage copies a file or folder, without what .dockerignore leaves out.
func copyForImage(t *testing.T, to, name string) {
	t.Helper()
	text, err := os.ReadFile(root + "/.dockerignore")
	require.NoError(t, err)
	lines := strings.Split(string(text), "\n")
	info, err := os.Stat(filepath.Join(root, name))
	require.NoError(t, err)
	if !info.IsDir() {
		require.Contains(t, lines, "!"+name)
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(to, name)), 0o700))
		copied, err := os.ReadFile(filepath.Join(root, name))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(to, name), copied, 0o600))
		return
	}
	require.Contains(t, lines, "!"+name+"/**")
	require.Contains(t, lines, "**/*_test.go")
	require.Contains(t, lines, "**/testdata")
	from := os.DirFS(filepath.Join(root, name))
	require.NoError(t, fs.WalkDir(from, ".", func(path string, entry fs.DirEntry, err error) error {
		at := filepath.Join(to, name, path)
		switch {
		case err != nil:
			return err
		case entry.IsDir() && entry.Name() == "testdata":
			return fs.SkipDir
		case entry.IsDir():
			return os.MkdirAll(at, 0o700)
		case strings.HasSuffix(path, "_test.go"), entry.Type() == fs.ModeSymlink: // to sql/, which is copied, too
			return nil
		}
		copied, err := fs.ReadFile(from, path)
		if err != nil {
			return err
		}
		return os.WriteFile(at, copied, 0o600)
	}))
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
	text, err := os.ReadFile(root + "/docker/compose.yaml")
	require.NoError(t, err)
	require.NotContains(t, string(text), "\n      - 0.0.0.0:", "nobody else's machine is let in")
	var compose struct{ Services map[string]service }
	require.NoError(t, yaml.Unmarshal(substituted.ReplaceAll(text, []byte("$1")), &compose))
	policies, server := compose.Services["policies"], compose.Services["server"]
	for _, s := range []service{policies, server} {
		_, err := os.Stat(filepath.Join(root, "docker", s.Build.Context, s.Build.Dockerfile))
		require.NoError(t, err)
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
	env := []string{"DATABASE_URL=" + db.URL, "GRPC_ADDR=off", "HTTP_ADDR=127.0.0.1:0"}
	for name, value := range server.Environment {
		if name != "PGPASSWORD" {
			require.Contains(t, known, name)
			if name != "DATABASE_URL" && value != nil {
				env = append(env, name+"="+*value)
			}
		}
	}
	address := serve(t, env...)
	require.Equal(t, ran{code: exitDone, out: "healthy\n"}, asksHealth(t, "HTTP_ADDR="+address))
	require.Equal(t, exitDone, on(t, db, "acquire", "api", "k").code)
}

// serve starts the program until the test ends, and returns where it listens for HTTP.
func serve(t *testing.T, env ...string) (address string) {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	c := exec.Command(program, "serve")
	c.Env = append(os.Environ(), append(env, asProgram+"=1")...)
	log := &listening{address: make(chan string, 2)}
	c.Stderr = log
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		require.NoError(t, c.Process.Signal(os.Interrupt))
		require.NoError(t, c.Wait(), "%s", &log.log)
	})
	select {
	case address = <-log.address:
	case <-time.After(time.Minute):
		t.Fatal("it does not listen")
	}
	return address
}

// asksHealth runs pgratelimit health with settings.
func asksHealth(t *testing.T, settings ...string) ran {
	t.Helper()
	path := filepath.Join(t.TempDir(), "settings")
	require.NoError(t, os.WriteFile(path, []byte(strings.Join(append(settings, "DATABASE_URL=postgres://nobody"), "\n")), 0o600))
	return command(t, "health", "--config", path)
}

func TestHealth(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	address := serve(t, "DATABASE_URL="+db.URL, "GRPC_ADDR=off", "HTTP_ADDR=127.0.0.1:0", "MONITORING_TOKENS=secret")
	_, port, _ := strings.Cut(address, ":")
	for _, setting := range []string{address, "0.0.0.0:" + port, ":" + port, "[::]:" + port} {
		require.Equal(t, ran{code: exitDone, out: "healthy\n"}, asksHealth(t, "HTTP_ADDR="+setting, "MONITORING_TOKENS=secret"), setting)
	}
	for settings, says := range map[string]string{
		"HTTP_ADDR=" + address:                               "401",
		"HTTP_ADDR=" + address + "\nMONITORING_TOKENS=wrong": "401",
		"HTTP_ADDR=127.0.0.1:1":                              "127.0.0.1:1",
	} {
		r := asksHealth(t, settings)
		require.Equal(t, exitError, r.code)
		require.Contains(t, r.errors, says)
	}
	require.Equal(t, exitUsage, asksHealth(t, "HTTP_ADDR=off").code)
}

func TestHealth_TLS(t *testing.T) {
	t.Parallel()
	own := httptest.NewTLSServer(http.NotFoundHandler()) // for its certificate
	defer own.Close()
	key, err := x509.MarshalPKCS8PrivateKey(own.TLS.Certificates[0].PrivateKey)
	require.NoError(t, err)
	write := func(kind string, der []byte) (path string) {
		path = filepath.Join(t.TempDir(), "pem")
		require.NoError(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	settings := []string{"TLS_CERT_FILE=" + write("CERTIFICATE", own.Certificate().Raw), "TLS_KEY_FILE=" + write("PRIVATE KEY", key)}
	address := serve(t, append(settings, "DATABASE_URL="+pgtest.New(t).URL, "GRPC_ADDR=off", "HTTP_ADDR=127.0.0.1:0")...)
	require.Equal(t, ran{code: exitDone, out: "healthy\n"}, asksHealth(t, append(settings, "HTTP_ADDR="+address)...))
	require.Equal(t, exitError, asksHealth(t, "HTTP_ADDR="+address).code, "in the clear")
}

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
