package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
)

// served compares pgratelimit serve, by each way to ask it, with Envoy's reference service on Redis. Callers, program and database
// share the cores of this machine. Its cells are named served/way/callers.
type served struct {
	stage
	keys    *keyspace
	acquire map[string]acquirer // by way
	many    map[string]manyAcquirer
}

const servedDatabase = "served"

// The connections of the callers' process to the program by gRPC.
const servedConnections = 2

func (*served) cells() (cells []string) {
	for _, callers := range fewCallers {
		for _, way := range []string{"grpc", "many", "stream", "json", "envoy"} {
			cells = append(cells, fmt.Sprintf("served/%s/%d", way, callers))
		}
	}
	return cells
}

func (s *served) open(ctx context.Context, cells []string) error {
	s.keys = keyspaces()["uniform"]
	s.acquire = map[string]acquirer{}
	pg, err := s.database(ctx, servedDatabase, append(definePolicies(), "vacuum analyze")...)
	if err != nil {
		return err
	}
	needs := func(way string) bool {
		return slices.ContainsFunc(cells, func(cell string) bool { return strings.HasPrefix(cell, "served/"+way+"/") })
	}
	if needs("envoy") {
		redis, err := s.redisServer(ctx, false)
		if err != nil {
			return err
		}
		envoy, err := startEnvoy(ctx, redis)
		if err != nil {
			return err
		}
		s.closers = append(s.closers, func() { _ = envoy.close() })
		s.acquire["envoy"] = envoy.acquirer()
		if err := s.keys.askForAll(ctx, s.acquire["envoy"]); err != nil {
			return err
		}
	}
	program, err := startProgram(ctx, "DATABASE_URL="+pg.URL(servedDatabase), "NO_FLUSH=true")
	if err != nil {
		return err
	}
	s.closers = append(s.closers, func() { _ = program.close() })
	conns, err := s.connect(program)
	if err != nil {
		return err
	}
	s.acquire["grpc"], s.acquire["json"] = overGRPC(conns), s.overJSON(program)
	s.many, err = manyOverGRPC(ctx, conns)
	return err
}

// overGRPC has callers share connections, as those of a process do.
func overGRPC(conns [servedConnections]*grpc.ClientConn) acquirer {
	return func(ctx context.Context, key string) error {
		conn := conns[int(key[len(key)-1])%servedConnections]
		d, err := pb.NewRateLimiterClient(conn).Acquire(ctx, &pb.Request{Policy: "durable", LogicalKey: key})
		return wanted(d.GetVerdict() == pb.Verdict_ALLOWED, err)
	}
}

func (s *served) connect(p *program) (conns [servedConnections]*grpc.ClientConn, err error) {
	for i := range conns {
		if conns[i], err = grpc.NewClient(p.grpc, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
			return conns, err
		}
		s.closers = append(s.closers, func() { _ = conns[i].Close() })
	}
	return conns, nil
}

// manyOverGRPC has the requests of many callers in one message: as calls of AcquireMany, or on one stream for each connection.
func manyOverGRPC(ctx context.Context, conns [servedConnections]*grpc.ClientConn) (map[string]manyAcquirer, error) {
	streams := make([]*answered, len(conns))
	for i, conn := range conns {
		stream, err := pb.NewRateLimiterClient(conn).AcquireStream(ctx)
		if err != nil {
			return nil, err
		}
		streams[i] = &answered{stream: stream, waiting: make(map[uint64]chan []*pb.Answer)}
		go streams[i].receive()
	}
	var turn atomic.Uint64
	requests := func(keys []string) []*pb.Request {
		list, all := make([]*pb.Request, len(keys)), make([]pb.Request, len(keys))
		for i, key := range keys {
			list[i] = &all[i]
			list[i].Policy, list[i].LogicalKey = "durable", key
		}
		return list
	}
	return map[string]manyAcquirer{
		"many": func(ctx context.Context, keys []string) error {
			conn := conns[turn.Add(1)%servedConnections]
			r, err := pb.NewRateLimiterClient(conn).AcquireMany(ctx, &pb.AcquireManyRequest{Requests: requests(keys)})
			return cmp.Or(err, allGranted(r.GetAnswers(), len(keys)))
		},
		"stream": func(_ context.Context, keys []string) error {
			id := turn.Add(1)
			answers, err := streams[id%servedConnections].ask(&pb.AcquireStreamRequest{Id: id, Requests: requests(keys)})
			return cmp.Or(err, allGranted(answers, len(keys)))
		},
	}, nil
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

// An answered is a stream whose callers wait for their answers.
type answered struct {
	stream  pb.RateLimiter_AcquireStreamClient
	mu      sync.Mutex
	waiting map[uint64]chan []*pb.Answer
	err     error // of the stream
}

func (a *answered) ask(q *pb.AcquireStreamRequest) ([]*pb.Answer, error) {
	answer := make(chan []*pb.Answer, 1)
	a.mu.Lock()
	a.waiting[q.GetId()] = answer
	err := cmp.Or(a.err, a.stream.Send(q))
	a.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return <-answer, nil
}

func (a *answered) receive() {
	for {
		r, err := a.stream.Recv()
		a.mu.Lock()
		if err != nil {
			a.err = err
			for _, answer := range a.waiting {
				answer <- nil
			}
			a.mu.Unlock()
			return
		}
		answer := a.waiting[r.GetId()]
		delete(a.waiting, r.GetId())
		a.mu.Unlock()
		answer <- r.GetAnswers()
	}
}

func (s *served) overJSON(p *program) acquirer {
	// It opens as many connections as it needs: what waits for one is served in order of arrival, and so too late.
	transport := &http.Transport{MaxIdleConnsPerHost: 10_000}
	s.closers = append(s.closers, transport.CloseIdleConnections)
	url := "http://" + p.http + "/v1/acquire"
	return func(ctx context.Context, key string) error {
		body := strings.NewReader(`{"policy":"durable","key":` + strconv.Quote(key) + `}`)
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
		if err != nil {
			return err
		}
		if until, ok := ctx.Deadline(); ok {
			request.Header.Set("Request-Timeout", strconv.FormatFloat(max(0.001, time.Until(until).Seconds()), 'f', 3, 64))
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			return err
		}
		if response.StatusCode != http.StatusOK {
			return errors.New(response.Status)
		}
		var d struct{ Allowed bool }
		err = json.Unmarshal(text, &d)
		return wanted(d.Allowed, err)
	}
}

func (s *served) run(ctx context.Context, cell string) (_ sample, err error) {
	part := strings.Split(cell, "/")
	way := part[1]
	l := load{keys: s.keys, acquire: s.acquire[way], many: s.many[way], servers: []int{s.pg.pid}}
	if way == "envoy" {
		l.servers = []int{s.redis[false].pid}
	}
	if l.callers, err = strconv.Atoi(part[2]); err != nil {
		return nil, err
	}
	return l.run(ctx, s.window)
}
