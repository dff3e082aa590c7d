package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	envoypb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
)

// The connections of the callers' process to a service by gRPC.
const servedConnections = 2

// openServed compares pgratelimit serve, by each way to ask it, with Envoy's reference service on Redis. Callers, program and database
// share the cores of this machine.
func openServed(ctx context.Context, s *stage, cells []string) (measure, error) {
	const database = "served"
	pg, err := s.database(ctx, database, append(definePolicies(), "vacuum analyze")...)
	if err != nil {
		return nil, err
	}
	all := map[string]opponent{}
	if wants(cells, "served/envoy/") {
		redis, err := s.redisServer(ctx, false)
		if err != nil {
			return nil, err
		}
		envoy, err := startEnvoy(ctx, s, redis)
		if err != nil {
			return nil, err
		}
		all["served/envoy"] = opponent{acquire: envoy, server: []int{redis.pid}}
		if err := keyspaces()["uniform"].askForAll(ctx, envoy); err != nil {
			return nil, err
		}
	}
	program, err := startProgram(ctx, "DATABASE_URL="+pg.URL(database), "NO_FLUSH=true")
	if err != nil {
		return nil, err
	}
	s.atEnd(program.close)
	conns, err := s.dial(program.grpc)
	if err != nil {
		return nil, err
	}
	for name, o := range map[string]opponent{
		"grpc": {acquire: overGRPC(conns)}, "many": {many: manyOverGRPC(conns)}, "stream": {many: streamed(ctx, conns)}, "json": {acquire: s.overJSON(program)},
	} {
		o.server = []int{pg.pid}
		all["served/"+name] = o
	}
	return loads(ctx, s.window, cells, all)
}

type connectionsOf [servedConnections]*grpc.ClientConn

func (s *stage) dial(address string) (conns connectionsOf, err error) {
	for i := range conns {
		if conns[i], err = grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
			return conns, err
		}
		s.atEnd(conns[i].Close)
	}
	return conns, nil
}

// of has the callers share connections, as those of a process do.
func (c connectionsOf) of(key string) *grpc.ClientConn { return c[int(key[len(key)-1])%len(c)] }

func overGRPC(conns connectionsOf) acquirer {
	return func(ctx context.Context, key string) error {
		d, err := pb.NewRateLimiterClient(conns.of(key)).Acquire(ctx, &pb.Request{Policy: "durable", LogicalKey: key})
		return wanted(d.GetVerdict() == pb.Verdict_ALLOWED, err)
	}
}

func requestsOf(keys []string) []*pb.Request {
	list := make([]*pb.Request, len(keys))
	for i, key := range keys {
		list[i] = &pb.Request{Policy: "durable", LogicalKey: key}
	}
	return list
}

// manyOverGRPC has the requests of many callers in a call.
func manyOverGRPC(conns connectionsOf) manyAcquirer {
	return func(ctx context.Context, keys []string) error {
		r, err := pb.NewRateLimiterClient(conns.of(keys[0])).AcquireMany(ctx, &pb.AcquireManyRequest{Requests: requestsOf(keys)})
		return cmp.Or(err, allGranted(r.GetAnswers(), len(keys)))
	}
}

// streamed has the requests of many callers in a message. A stream carries one at a time.
func streamed(ctx context.Context, conns connectionsOf) manyAcquirer {
	idle := make(chan pb.RateLimiter_AcquireStreamClient, 1000)
	return func(_ context.Context, keys []string) (err error) {
		var stream pb.RateLimiter_AcquireStreamClient
		select {
		case stream = <-idle:
		default:
			if stream, err = pb.NewRateLimiterClient(conns.of(keys[0])).AcquireStream(ctx); err != nil {
				return err
			}
		}
		defer func() { idle <- stream }()
		if err := stream.Send(&pb.AcquireStreamRequest{Id: 1, Requests: requestsOf(keys)}); err != nil {
			return err
		}
		r, err := stream.Recv()
		return cmp.Or(err, allGranted(r.GetAnswers(), len(keys)))
	}
}

func allGranted(answers []*pb.Answer, requests int) error {
	for _, a := range answers {
		if a.GetDecision().GetVerdict() != pb.Verdict_ALLOWED {
			return fmt.Errorf("not granted: %v", a)
		}
	}
	if len(answers) != requests {
		return fmt.Errorf("%d answers to %d requests", len(answers), requests)
	}
	return nil
}

func (s *stage) overJSON(p *program) acquirer {
	// It opens as many connections as it needs: what waits for one is served in order of arrival, and so too late.
	transport := &http.Transport{MaxIdleConnsPerHost: 10_000}
	s.atEnd(func() error { transport.CloseIdleConnections(); return nil })
	callers := http.Client{Transport: transport}
	return func(ctx context.Context, key string) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.http+"/v1/acquire",
			strings.NewReader(`{"policy":"durable","key":`+strconv.Quote(key)+`}`))
		if err != nil {
			return err
		}
		response, err := callers.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		var d struct{ Allowed bool }
		err = json.NewDecoder(response.Body).Decode(&d)
		return wanted(d.Allowed, err)
	}
}

const envoyModule = "github.com/envoyproxy/ratelimit/src/service_cmd@v1.4.1-0.20260122083618-3fb702589d36"

const envoyRules = `domain: bench
descriptors:
  - key: user
    rate_limit: {unit: day, requests_per_unit: 100000000}
`

// envoyProgram is built if it is not there.
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

// startEnvoy starts Envoy's reference service of rate limits, on a Redis, with its own defaults. Its windows are fixed: a counter for each
// day, which a request increases before it is compared, so that denials count, too.
func startEnvoy(ctx context.Context, s *stage, redis *redisServer) (acquirer, error) {
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
	conns, err := s.dial("unix:" + socket)
	if err != nil {
		return nil, err
	}
	ask := func(ctx context.Context, key string) error {
		answer, err := envoypb.NewRateLimitServiceClient(conns.of(key)).ShouldRateLimit(ctx, &envoypb.RateLimitRequest{
			Domain:      "bench",
			Descriptors: []*common.RateLimitDescriptor{{Entries: []*common.RateLimitDescriptor_Entry{{Key: "user", Value: key}}}},
		})
		if err != nil {
			return err
		}
		// A status without a limit is of a request that no rule is for.
		return wanted(answer.OverallCode == envoypb.RateLimitResponse_OK && answer.Statuses[0].CurrentLimit != nil, nil)
	}
	ready := func(ctx context.Context) error { return ask(ctx, "awaited") }
	service, err := startChild(ctx, dir, ready, []string{"HOST=127.0.0.1", "PORT=" + ports[0], "DEBUG_HOST=127.0.0.1", "DEBUG_PORT=" + ports[1], "GRPC_UDS=" + socket,
		"RUNTIME_ROOT=" + dir, "RUNTIME_SUBDIRECTORY=runtime", "RUNTIME_WATCH_ROOT=false",
		"REDIS_SOCKET_TYPE=unix", "REDIS_URL=" + redis.Options().Addr, "USE_STATSD=false", "DISABLE_STATS=true", "LOG_LEVEL=ERROR"}, program)
	if err == nil {
		s.atEnd(service.close)
	}
	return ask, err
}
