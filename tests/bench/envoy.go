package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	envoypb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// envoyService is Envoy's reference service of rate limits, on a Redis, with its own defaults. Its windows are fixed: a counter for each
// day, which a request increases before it is compared, so that denials count, too.
type envoyService struct {
	*child
	conns []*grpc.ClientConn
}

const envoyModule = "github.com/envoyproxy/ratelimit/src/service_cmd@v1.4.1-0.20260122083618-3fb702589d36"

const envoyRules = `domain: bench
descriptors:
  - key: user
    rate_limit: {unit: day, requests_per_unit: 100000000}
`

// envoyProgram is where make test-envoy puts it; if it is not there, it is built.
func envoyProgram(ctx context.Context) (string, error) {
	dir, err := filepath.Abs(filepath.Join("build", "envoy"))
	if err != nil {
		return "", err
	}
	program := filepath.Join(dir, "service_cmd")
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	install := exec.CommandContext(ctx, "go", "install", envoyModule)
	install.Env = append(os.Environ(), "GOBIN="+dir)
	if text, err := install.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go install %s: %w\n%s", envoyModule, err, text)
	}
	return program, nil
}

func startEnvoy(ctx context.Context, redis *redisServer) (_ *envoyService, err error) {
	program, err := envoyProgram(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("/tmp", "ratelimit-envoy-")
	if err != nil {
		return nil, err
	}
	config, socket := filepath.Join(dir, "runtime", "config"), filepath.Join(dir, "grpc")
	if err := os.MkdirAll(config, 0o700); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(config, "bench.yaml"), []byte(envoyRules), 0o600); err != nil {
		return nil, err
	}
	var ports [2]string
	for i := range ports {
		address, err := freeAddress(ctx)
		if err != nil {
			return nil, err
		}
		_, ports[i], _ = strings.Cut(address, ":")
	}
	e := &envoyService{}
	for range servedConnections {
		conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, err
		}
		e.conns = append(e.conns, conn)
	}
	ready := func(ctx context.Context) error { return e.acquirer()(ctx, "awaited") }
	e.child, err = startChild(ctx, dir, ready, []string{"HOST=127.0.0.1", "PORT=" + ports[0], "DEBUG_HOST=127.0.0.1", "DEBUG_PORT=" + ports[1], "GRPC_UDS=" + socket,
		"RUNTIME_ROOT=" + dir, "RUNTIME_SUBDIRECTORY=runtime", "RUNTIME_WATCH_ROOT=false",
		"REDIS_SOCKET_TYPE=unix", "REDIS_URL=" + redis.Options().Addr, "USE_STATSD=false", "DISABLE_STATS=true", "LOG_LEVEL=ERROR"}, program)
	return e, err
}

func (e *envoyService) acquirer() acquirer {
	clients := make([]envoypb.RateLimitServiceClient, len(e.conns))
	for i, conn := range e.conns {
		clients[i] = envoypb.NewRateLimitServiceClient(conn)
	}
	return func(ctx context.Context, key string) error {
		answer, err := clients[int(key[len(key)-1])%len(clients)].ShouldRateLimit(ctx, &envoypb.RateLimitRequest{
			Domain:      "bench",
			Descriptors: []*common.RateLimitDescriptor{{Entries: []*common.RateLimitDescriptor_Entry{{Key: "user", Value: key}}}},
		})
		if err != nil {
			return err
		}
		// A status without a limit is of a request that no rule is for.
		return wanted(answer.OverallCode == envoypb.RateLimitResponse_OK && answer.Statuses[0].CurrentLimit != nil, nil)
	}
}

func (e *envoyService) close() (err error) {
	for _, conn := range e.conns {
		err = errors.Join(err, conn.Close())
	}
	return errors.Join(err, e.child.close())
}
