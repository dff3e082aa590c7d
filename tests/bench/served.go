package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
)

// served compares pgratelimit serve, by both of its protocols, with a Combiner in the callers' process, with redis_rate, and with
// Envoy's reference service on Redis.
// Callers, program and database share the cores of this machine. Its cells are named served/way/callers, and
// served/way/overload.
type served struct {
	lab     *lab
	keys    *keyspace
	acquire map[string]acquirer // by way
	program *program
	envoy   *envoyService
	closers []func()
}

const servedDatabase = "served"

var (
	servedWays    = []string{"combiner", "grpc", "json", "envoy", "redis"}
	servedCallers = []int{64, 256}
)

// The connections of the callers' process to the program by gRPC.
const servedConnections = 2

func servedName(way string, callers int) string { return fmt.Sprintf("served/%s/%d", way, callers) }

func overloadName(way string) string { return "served/" + way + "/overload" }

func (*served) cells() (cells []string) {
	for _, callers := range servedCallers {
		for _, way := range servedWays {
			cells = append(cells, servedName(way, callers))
		}
	}
	return append(cells, overloadName("grpc"), overloadName("json"))
}

func (s *served) open(ctx context.Context, cells []string) error {
	s.keys = keyspaces()["uniform"]
	s.acquire = map[string]acquirer{}
	pg, err := s.lab.postgres(ctx)
	if err != nil {
		return err
	}
	if err := pg.database(ctx, servedDatabase, append(definePolicies(), "vacuum analyze")...); err != nil {
		return err
	}
	pool, err := pg.pool(ctx, servedDatabase, false, connections)
	if err != nil {
		return err
	}
	combiner := newCombiner(pool, s.lab.calls)
	s.closers = append(s.closers, pool.Close, combiner.Close)
	s.acquire["combiner"] = pgratelimit(combiner, "durable")
	if err := s.keys.askForAll(ctx, s.acquire["combiner"]); err != nil { // all have rows
		return err
	}
	needs := func(way string) bool {
		return slices.ContainsFunc(cells, func(cell string) bool { return strings.HasPrefix(cell, "served/"+way+"/") })
	}
	if needs("redis") || needs("envoy") {
		redis, err := s.lab.redisServer(ctx, false)
		if err != nil {
			return err
		}
		s.acquire["redis"] = redisRate(redis)
		if err := s.keys.askForAll(ctx, s.acquire["redis"]); err != nil {
			return err
		}
	}
	if needs("envoy") {
		if s.envoy, err = startEnvoy(ctx, s.lab.redis[false]); err != nil {
			return err
		}
		s.closers = append(s.closers, func() { _ = s.envoy.close() })
		s.acquire["envoy"] = s.envoy.acquirer()
		if err := s.keys.askForAll(ctx, s.acquire["envoy"]); err != nil {
			return err
		}
	}
	if s.program, err = startProgram(ctx, "DATABASE_URL="+pg.URL(servedDatabase), "NO_FLUSH=true"); err != nil {
		return err
	}
	s.closers = append(s.closers, func() { _ = s.program.close() })
	if s.acquire["grpc"], err = s.overGRPC(); err != nil {
		return err
	}
	s.acquire["json"] = s.overJSON()
	return nil
}

// overGRPC has callers share connections, as those of a process do.
func (s *served) overGRPC() (acquirer, error) {
	clients := make([]pb.RateLimiterClient, servedConnections)
	for i := range clients {
		conn, err := grpc.NewClient(s.program.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, err
		}
		s.closers = append(s.closers, func() { _ = conn.Close() })
		clients[i] = pb.NewRateLimiterClient(conn)
	}
	return func(ctx context.Context, key string) error {
		d, err := clients[int(key[len(key)-1])%servedConnections].Acquire(ctx, &pb.AcquireRequest{Policy: "durable", LogicalKey: key})
		if err == nil && d.GetVerdict() != pb.Verdict_ALLOWED {
			err = errDenied
		}
		return err
	}, nil
}

func (s *served) overJSON() acquirer {
	// It opens as many connections as it needs: what waits for one is served in order of arrival, and so too late.
	transport := &http.Transport{MaxIdleConnsPerHost: 10_000}
	s.closers = append(s.closers, transport.CloseIdleConnections)
	url := "http://" + s.program.http + "/v1/acquire"
	return func(ctx context.Context, key string) error {
		body := strings.NewReader(`{"policy":"durable","key":` + strconv.Quote(key) + `}`)
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
		if err != nil {
			return err
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		var text bytes.Buffer
		if _, err := io.Copy(&text, response.Body); err != nil {
			return err
		}
		var d struct{ Allowed bool }
		if response.StatusCode != http.StatusOK {
			return errors.New(response.Status)
		}
		if err := json.Unmarshal(text.Bytes(), &d); err != nil {
			return err
		}
		if !d.Allowed {
			return errDenied
		}
		return nil
	}
}

func (s *served) run(ctx context.Context, cell string) (sample, error) {
	_, rest, _ := strings.Cut(cell, "/")
	way, rest, _ := strings.Cut(rest, "/")
	l := load{keys: s.keys, acquire: s.acquire[way], server: s.lab.pg.pid, program: s.program.pid}
	switch way {
	case "redis":
		l.server = s.lab.redis[false].pid
	case "envoy":
		l.server, l.program = s.lab.redis[false].pid, s.envoy.pid
	}
	if rest == "overload" {
		return s.overload(ctx, l)
	}
	if _, err := fmt.Sscan(rest, &l.callers); err != nil {
		return nil, err
	}
	return l.run(ctx, s.lab.window)
}

// servedDeadline is how long callers wait for an answer under too much load.
const servedDeadline = 250 * time.Millisecond

// overload finds the rate at which 256 callers are answered, and then offers twice as much.
//
// Callers have cores of their own. What is asked of the server here takes nothing from it there.
func (s *served) overload(ctx context.Context, l load) (sample, error) {
	back, err := separate(l.program, l.server)
	if err != nil {
		return nil, err
	}
	defer back()
	l.callers = 256
	found, err := l.run(ctx, s.lab.window)
	if err != nil {
		return nil, err
	}
	over := offer{
		keys: l.keys, acquire: l.acquire, perSecond: 2 * found[rate], deadline: servedDeadline,
		warm: time.Duration(warmUp * float64(s.lab.window)), during: s.lab.window,
	}.run(ctx)
	over[best] = found[rate]
	return over, ctx.Err()
}

func (s *served) cost() time.Duration { return time.Duration((1 + warmUp) * float64(s.lab.window)) }

func (s *served) close(ctx context.Context) error {
	for _, close := range slices.Backward(s.closers) {
		close()
	}
	return s.lab.dropDatabases(ctx, servedDatabase)
}
