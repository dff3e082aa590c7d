package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/pgratelimit/client"
)

// processes compares limiters whose callers are in four processes that all ask for one key, as programs behind a load balancer do.
// Its cells are named processes/client, and all have 64 callers.
type processes struct {
	stage
	ways map[string]elsewhere
}

const (
	processesDatabase = "processes"
	processesCount    = 4
	processesCallers  = 64
)

func (*processes) cells() []string {
	return []string{"processes/combined", "processes/redis", "processes/prefetcher", "processes/plain"}
}

// helperEnv tells a process of this program that it is one of those: the name of its limiter and what it asks.
const helperEnv = "RATELIMIT_BENCH_HELPER"

func (p *processes) open(ctx context.Context, cells []string) error {
	p.ways = map[string]elsewhere{}
	pg, err := p.database(ctx, processesDatabase, definePrefetchedPolicies()...)
	if err != nil {
		return err
	}
	executable, err := os.Executable()
	if err != nil {
		return err
	}
	for _, cell := range cells {
		way, url := strings.TrimPrefix(cell, "processes/"), pg.URL(processesDatabase)
		if way == "redis" {
			server, err := p.redisServer(ctx, false)
			if err != nil {
				return err
			}
			url = server.Options().Addr
		}
		processes, err := start(ctx, processesCount, []string{helperEnv + "=" + way + " " + url}, executable)
		if err != nil {
			return err
		}
		p.closers = append(p.closers, func() { _ = processes.close() })
		p.ways[cell] = processes
	}
	return nil
}

// help is what a process does that was started with helperEnv.
func help(ctx context.Context, what string) error {
	way, url, _ := strings.Cut(what, " ")
	if way == "redis" {
		rdb := redis.NewClient(&redis.Options{Network: "unix", Addr: url})
		defer rdb.Close()
		return obey(ctx, redisRate(rdb))
	}
	pool, err := openPool(ctx, url, false, connections/processesCount)
	if err != nil {
		return err
	}
	defer pool.Close()
	switch way {
	case "plain":
		return obey(ctx, pgratelimit(client.New(pool)))
	case "combined":
		combiner := client.NewCombiner(pool)
		defer combiner.Close()
		return obey(ctx, pgratelimit(combiner))
	case "prefetcher":
		prefetcher := client.NewPrefetcher(pool, client.Prefetch{Policy: "durable"})
		defer prefetcher.Close()
		return obey(ctx, pgratelimit(prefetcher))
	default:
		return fmt.Errorf("%s: %q", helperEnv, way)
	}
}

func (p *processes) run(ctx context.Context, cell string) (sample, error) {
	return p.ways[cell].run(ctx, processesCallers, "hot", p.window)
}
