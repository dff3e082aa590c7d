package pgtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx" for wait.ForSQL
	"github.com/moby/moby/api/pkg/authconfig"
	dockercontainer "github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
	"github.com/testcontainers/testcontainers-go/wait"
)

// A container runs the image of docker/Dockerfile. When this process dies, testcontainers' reaper
// removes it, and so does a guard where there is a docker command: the reaper can be disabled.
type container struct {
	*testcontainers.DockerContainer
	guard    *guard // may be nil
	engine   client.APIClient
	password string
	port     string // its own
	address  string // host and port
}

func init() { log.SetDefault(log.NewNoopLogger()) } // what goes wrong is in the errors

func startContainer(ctx context.Context, settings []string) (host, error) {
	return runContainer(ctx, settings, false)
}

// startContainerInMemory is for a server that nobody stops, because its data would be gone. Most time of the tests goes into files.
func startContainerInMemory(ctx context.Context, settings []string) (host, error) {
	return runContainer(ctx, settings, true)
}

func runContainer(ctx context.Context, settings []string, inMemory bool) (host, error) {
	engine, err := engineWithImages()
	if err != nil {
		return nil, err
	}
	if inMemory {
		about, err := engine.Info(ctx, client.InfoOptions{})
		if err != nil {
			return nil, err
		}
		inMemory = about.Info.MemTotal >= 8<<30
	}
	root, err := findRoot()
	if err != nil {
		return nil, err
	}
	command := []string{"postgres"}
	for _, setting := range slices.Concat(defaults, settings) {
		command = append(command, "-c", setting)
	}

	c := &container{engine: engine, password: rand.Text(), port: "5432/tcp"}
	file := testcontainers.FromDockerfile{Context: root, Dockerfile: "docker/Dockerfile", Repo: "pgratelimit"}
	// The server of the first start's scripts does not listen on TCP: what answers is the final one.
	err = c.run(ctx, file, func(address string) string { return c.url(address, "") },
		testcontainers.WithEnv(map[string]string{"POSTGRES_PASSWORD": c.password, "RATELIMIT_APP_PASSWORD": c.password}),
		testcontainers.WithCmd(command...),
		testcontainers.WithHostConfigModifier(func(config *dockercontainer.HostConfig) {
			if inMemory {
				config.Tmpfs = map[string]string{"/var/lib/postgresql/data": ""}
			}
		}))
	if err != nil {
		return nil, err
	}
	return c, nil
}

// run builds the image and starts the container, and returns when what is at the URL of its address answers.
func (c *container) run(ctx context.Context, file testcontainers.FromDockerfile, url func(address string) string,
	options ...testcontainers.ContainerCustomizer) error {
	name := "ratelimit-test-" + strings.ToLower(rand.Text())
	if err := c.watch(name); err != nil {
		return err
	}
	var build bytes.Buffer
	file.Tag, file.KeepImage, file.BuildLogWriter = "test", true, &build
	ready := wait.ForSQL(c.port, "pgx", func(host string, port network.Port) string { return url(net.JoinHostPort(host, port.Port())) })
	var err error
	c.DockerContainer, err = testcontainers.Run(ctx, "", append(options, testcontainers.WithDockerfile(file), testcontainers.WithName(name),
		testcontainers.WithExposedPorts(c.port), testcontainers.WithWaitStrategyAndDeadline(patience, ready))...)
	if err == nil {
		err = c.locate(ctx)
	}
	if err != nil {
		return errors.Join(err, c.discard(ctx, &build))
	}
	return nil
}

// findEngine returns a Docker engine that answers within a minute.
func findEngine(ctx context.Context) (client.APIClient, error) {
	type answer struct {
		engine client.APIClient
		err    error
	}
	answers := make(chan answer, 1)
	go func() { // looking for the engine's address takes no context, and may hang
		provider, err := testcontainers.NewDockerProvider()
		if err != nil {
			answers <- answer{nil, err}
			return
		}
		_, err = provider.Client().Ping(ctx, client.PingOptions{})
		answers <- answer{provider.Client(), err}
	}()
	select {
	case a := <-answers:
		if a.err != nil {
			return nil, fmt.Errorf("no engine: %s", strings.ReplaceAll(a.err.Error(), "\n", ": "))
		}
		return a.engine, nil
	case <-time.After(time.Minute):
		return nil, errors.New("the engine does not answer within a minute")
	}
}

// engineWithImages returns an engine that has the images which ours begin with. Where it neither has them nor reaches their
// registry, Docker is absent; after that our Dockerfile has to do. It is asked once.
var engineWithImages = sync.OnceValues(func() (client.APIClient, error) {
	engine, err := findEngine(context.Background())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAbsent, err)
	}
	root, err := findRoot()
	if err != nil {
		return nil, err
	}
	file, err := os.ReadFile(filepath.Join(root, "docker", "Dockerfile"))
	if err != nil {
		return nil, err
	}
	var images []string
	for _, from := range regexp.MustCompile(`(?m)^FROM (\S+)`).FindAllSubmatch(file, -1) {
		images = append(images, string(from[1]))
	}
	if config := testcontainers.ReadConfig(); !config.RyukDisabled && config.Config.HubImageNamePrefix == "" {
		images = append(images, testcontainers.ReaperDefaultImage) //nolint:staticcheck // deprecated, and the only name there is
	}
	for _, image := range images {
		err := fetch(engine, image)
		if errors.Is(err, errAbsent) && os.Getenv("RATELIMIT_TEST_REQUIRE") != rungDocker {
			fmt.Fprintf(os.Stderr, "pgtest: going on without Docker: %v\n", err)
		}
		if err != nil {
			return nil, err
		}
	}
	return engine, nil
})

// registryPatience is how long a registry may say nothing while an image comes.
var registryPatience = 20 * time.Second

// fetch gets an image unless the engine has it.
func fetch(engine client.APIClient, image string) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	if _, err := engine.ImageInspect(ctx, image); !cerrdefs.IsNotFound(err) {
		return err
	}
	fmt.Fprintf(os.Stderr, "pgtest: the Docker engine fetches %s\n", image)
	var options client.ImagePullOptions
	if _, login, err := testcontainers.DockerImageAuth(ctx, image); err == nil {
		if options.RegistryAuth, err = authconfig.Encode(login); err != nil {
			return err
		}
	}
	silence := time.AfterFunc(registryPatience, func() { cancel(fmt.Errorf("the registry was silent for %v", registryPatience)) })
	defer silence.Stop()
	pull, err := engine.ImagePull(ctx, image, options)
	if err == nil {
		for message, broken := range pull.JSONMessages(ctx) {
			silence.Reset(registryPatience)
			if err = broken; message.Error != nil {
				err = message.Error
			}
		}
	}
	switch {
	case err == nil:
		return nil
	case cerrdefs.IsNotFound(err): // by the registry: it was reached
		return fmt.Errorf("image %s: %w", image, err)
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	return fmt.Errorf("%w: the engine lacks the image %s: %s", errAbsent, image, strings.ReplaceAll(err.Error(), "\n", ": "))
}

// findRoot returns the repository's root, where the image is built from.
func findRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "docker", "Dockerfile")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("docker/Dockerfile is not in this directory or one above it")
		}
	}
}

func (c *container) watch(name string) (err error) {
	docker, _ := exec.LookPath("docker")
	if docker == "" {
		return nil
	}
	c.guard, err = startGuard(nil, `"$1" rm --force --volumes "$2"`, docker, name)
	return err
}

// locate notes where the container is reached; Docker gives it another port with each start.
func (c *container) locate(ctx context.Context) (err error) {
	c.address, err = c.PortEndpoint(ctx, c.port, "")
	return err
}

func (c *container) URL(database string) string { return c.url(c.address, database) }

func (c *container) url(address, database string) string {
	if database == "" {
		database = "postgres"
	}
	u := url.URL{Scheme: "postgres", User: url.UserPassword("postgres", c.password), Host: address, Path: "/" + database, RawQuery: "sslmode=disable"}
	return u.String()
}

func (c *container) Start(ctx context.Context) error {
	if err := c.DockerContainer.Start(ctx); err != nil {
		return err
	}
	return c.locate(ctx)
}

func (c *container) Stop(ctx context.Context, immediate bool) error {
	signal := "INT" // fast
	if immediate {
		signal = "QUIT"
	}
	return c.kill(ctx, signal)
}

func (c *container) Kill(ctx context.Context) error {
	err := c.kill(ctx, "KILL")
	if cerrdefs.IsConflict(err) {
		return nil // it was not running
	}
	return err
}

// Freeze stops the first process, which starts all others, and then these. The engine cannot pause one whose processes start others.
func (c *container) Freeze(ctx context.Context) error {
	if err := c.signal(ctx, "STOP"); err != nil {
		return err
	}
	return c.signalOthers(ctx, "STOP")
}

func (c *container) Thaw(ctx context.Context) error {
	if err := c.signalOthers(ctx, "CONT"); err != nil {
		return err
	}
	return c.signal(ctx, "CONT")
}

func (c *container) signal(ctx context.Context, signal string) error {
	_, err := c.engine.ContainerKill(ctx, c.GetContainerID(), client.ContainerKillOptions{Signal: signal})
	return err
}

// signalOthers sends a signal to all processes but the first, to which no process of the container can send it.
func (c *container) signalOthers(ctx context.Context, signal string) error {
	status, _, err := c.Exec(ctx, []string{"bash", "-c",
		`for p in /proc/[0-9]*; do p=${p#/proc/}; [ "$p" = 1 ] || [ "$p" = $$ ] || kill -` + signal + ` "$p" 2>/dev/null || [ ! -e "/proc/$p" ]; done`})
	if err == nil && status != 0 {
		err = fmt.Errorf("signal %s: status %d", signal, status)
	}
	return err
}

// kill ends the container by a signal to PostgreSQL, its first process; without that, no other lives.
func (c *container) kill(ctx context.Context, signal string) error {
	if err := c.signal(ctx, signal); err != nil {
		return err
	}
	stopped := c.engine.ContainerWait(ctx, c.GetContainerID(), client.ContainerWaitOptions{})
	select {
	case <-stopped.Result:
		return nil
	case err := <-stopped.Error:
		return err
	}
}

func (c *container) Close() error {
	err := c.Terminate(context.Background(), testcontainers.StopTimeout(0))
	if c.guard != nil {
		err = errors.Join(err, c.guard.dismiss())
	}
	return err
}

// discard removes a container that did not come up, and returns the end of its log, or of the
// build's when there is no container, as an error.
func (c *container) discard(ctx context.Context, build io.Reader) error {
	log, _ := io.ReadAll(build)
	if c.DockerContainer != nil {
		if logs, err := c.Logs(ctx); err == nil {
			log, _ = io.ReadAll(logs)
		}
	}
	return errors.Join(errors.New(tail(log)), c.Close())
}

// Log returns what the container of a server on Docker has written.
func (s *Server) Log(ctx context.Context) (string, error) {
	c, ok := s.host.(*container)
	if !ok {
		return "", errors.New("pgtest: the server is not a container")
	}
	logs, err := c.Logs(ctx)
	if err != nil {
		return "", err
	}
	defer logs.Close()
	log, err := io.ReadAll(logs)
	return string(log), err
}

func tail(log []byte) string { return string(log[max(0, len(log)-4096):]) }
