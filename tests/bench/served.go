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
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
)

// served compares pgratelimit serve, by both of its protocols, with a Combiner in the callers' process and with redis_rate.
// Callers, program and database share the cores of this machine. Its cells are named served/way/callers, and
// served/way/overload.
type served struct {
	lab     *lab
	keys    *keyspace
	acquire map[string]acquirer // by way
	program *program
	closers []func()
}

const servedDatabase = "served"

var (
	servedWays    = []string{"combiner", "grpc", "json", "redis"}
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
	if slices.ContainsFunc(cells, func(cell string) bool { return strings.HasPrefix(cell, "served/redis/") }) {
		redis, err := s.lab.redisServer(ctx, false)
		if err != nil {
			return err
		}
		s.acquire["redis"] = redisRate(redis)
		if err := s.keys.askForAll(ctx, s.acquire["redis"]); err != nil {
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
	if way == "redis" {
		l.server = s.lab.redis[false].pid
	}
	if rest == "overload" {
		return s.overload(ctx, l)
	}
	if _, err := fmt.Sscan(rest, &l.callers); err != nil {
		return nil, err
	}
	return l.run(ctx, s.lab.window)
}

// The metrics of a cell under too much load.
const (
	best    = "best"    // answers per second that callers got who wait for each
	offered = "offered" // requests per second, twice as many
	late    = "late"    // of these, without an answer before their deadline
	refused = "refused" // of these, refused at once
)

// overloadDeadline is how long callers wait for an answer under too much load.
const overloadDeadline = 250 * time.Millisecond

// overload finds the rate at which 256 callers are answered, and then sends requests at twice that rate whether or not
// earlier ones are answered. Rate counts those that were granted within their deadline.
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
	perSecond := 2 * found[rate]
	var (
		mu       sync.Mutex
		times    []time.Duration
		failures = map[string]float64{late: 0, refused: 0}
		sent     float64
		requests sync.WaitGroup
	)
	next := l.keys.from(1)
	warm := time.Now().Add(time.Duration(warmUp * float64(s.lab.window)))
	end := warm.Add(s.lab.window)
	send := func(begin time.Time) {
		key := next()
		requests.Go(func() {
			ctx, cancel := context.WithDeadline(ctx, begin.Add(overloadDeadline))
			defer cancel()
			err := l.acquire(ctx, key)
			took := time.Since(begin)
			if begin.Before(warm) {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			sent++
			switch {
			case err == nil && took <= overloadDeadline:
				times = append(times, took)
			case ctx.Err() != nil || err == nil:
				failures[late]++
			default:
				failures[refused]++
			}
		})
	}
	start := time.Now()
	for made := 0; ; {
		now := time.Now()
		if now.After(end) {
			break
		}
		for due := int(now.Sub(start).Seconds() * perSecond); made < due; made++ {
			send(now)
		}
		if err := pause(ctx, time.Millisecond); err != nil {
			return nil, err
		}
	}
	requests.Wait()
	slices.Sort(times)
	window := s.lab.window.Seconds()
	return sample{
		rate: float64(len(times)) / window, best: found[rate], offered: sent / window,
		late: failures[late] / sent, refused: failures[refused] / sent,
		p50: quantile(times, 0.50), p99: quantile(times, 0.99),
	}, nil
}

func (s *served) cost() time.Duration { return time.Duration((1 + warmUp) * float64(s.lab.window)) }

func (s *served) close(ctx context.Context) error {
	for _, close := range slices.Backward(s.closers) {
		close()
	}
	return s.lab.dropDatabases(ctx, servedDatabase)
}
