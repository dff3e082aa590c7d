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
	"slices"
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

// openServed compares ways to ask pgratelimit serve with Envoy's reference service on Redis. All share the cores of this machine.
func openServed(ctx context.Context, s *stage, cells []string) measure {
	const database = "served"
	pg := s.database(ctx, database, append(definePolicies(), "vacuum analyze")...)
	all := map[string]opponent{}
	if slices.ContainsFunc(cells, func(cell string) bool { return strings.HasPrefix(cell, "served/envoy/") }) {
		redis := s.redisServer(ctx, false)
		envoy := startEnvoy(ctx, s, redis)
		all["served/envoy"] = opponent{acquire: envoy, server: []int{redis.pid}}
		check(keyspaces()["uniform"].askForAll(ctx, envoy))
	}
	program := startProgram(ctx, "DATABASE_URL="+pg.URL(database), "NO_FLUSH=true")
	s.atEnd(program.close)
	conns := s.dial(program.grpc)
	for name, o := range map[string]opponent{
		"grpc": {acquire: overGRPC(conns)}, "many": {many: manyOverGRPC(conns)}, "stream": {many: streamed(ctx, conns)}, "json": {acquire: s.overJSON(program)},
	} {
		o.server = []int{pg.pid}
		all["served/"+name] = o
	}
	return loads(ctx, s.window, cells, all)
}

type connectionsOf [servedConnections]*grpc.ClientConn

func (s *stage) dial(address string) (conns connectionsOf) {
	for i := range conns {
		conns[i] = must(grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials())))
		s.atEnd(conns[i].Close)
	}
	return conns
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
func envoyProgram(ctx context.Context) string {
	dir := must(filepath.Abs(filepath.Join("build", "envoy")))
	program := filepath.Join(dir, "service_cmd")
	if _, err := os.Stat(program); err != nil {
		install := exec.CommandContext(ctx, "go", "install", envoyModule)
		install.Env = append(os.Environ(), "GOBIN="+dir)
		output(install)
	}
	return program
}

// startEnvoy starts Envoy's reference service of rate limits, on a Redis, with its own defaults. Its windows are fixed: a counter for each
// day, which a request increases before it is compared, so that denials count, too.
func startEnvoy(ctx context.Context, s *stage, redis *redisServer) acquirer {
	program := envoyProgram(ctx)
	dir := must(os.MkdirTemp("/tmp", "ratelimit-envoy-"))
	config, socket := filepath.Join(dir, "runtime", "config"), filepath.Join(dir, "grpc")
	check(os.MkdirAll(config, 0o700))
	check(os.WriteFile(filepath.Join(config, "bench.yaml"), []byte(envoyRules), 0o600))
	var ports [2]string
	for i := range ports {
		_, ports[i], _ = strings.Cut(freeAddress(ctx), ":")
	}
	conns := s.dial("unix:" + socket)
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
	service := must(startChild(ctx, dir, ready, []string{"HOST=127.0.0.1", "PORT=" + ports[0], "DEBUG_HOST=127.0.0.1", "DEBUG_PORT=" + ports[1], "GRPC_UDS=" + socket,
		"RUNTIME_ROOT=" + dir, "RUNTIME_SUBDIRECTORY=runtime", "RUNTIME_WATCH_ROOT=false",
		"REDIS_SOCKET_TYPE=unix", "REDIS_URL=" + redis.Options().Addr, "USE_STATSD=false", "DISABLE_STATS=true", "LOG_LEVEL=ERROR"}, program))
	s.atEnd(service.close)
	return ask
}
