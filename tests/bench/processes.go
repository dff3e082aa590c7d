package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/pgratelimit/client"
)

// processes compares limiters whose callers are in four processes that all ask for one key, as programs behind a load balancer do.
// Its cells are named processes/client, and all have 64 callers.
type processes struct {
	lab   *lab
	ways  map[string]elsewhere
	redis int // its process
}

const (
	processesDatabase = "processes"
	processesCount    = 4
	processesCallers  = 64
)

var processesCells = []string{"processes/combined", "processes/redis", "processes/leaser", "processes/plain"}

func (*processes) cells() []string { return slices.Clone(processesCells) }

// helperEnv tells a process of this program that it is one of those: the name of its limiter and what it asks.
const helperEnv = "RATELIMIT_BENCH_HELPER"

func (p *processes) open(ctx context.Context, cells []string) error {
	p.ways = map[string]elsewhere{}
	pg, err := p.lab.postgres(ctx)
	if err != nil {
		return err
	}
	if err := pg.database(ctx, processesDatabase, defineLeasedPolicies()...); err != nil {
		return err
	}
	executable, err := os.Executable()
	if err != nil {
		return err
	}
	for _, cell := range cells {
		way, url := strings.TrimPrefix(cell, "processes/"), pg.URL(processesDatabase)
		if way == "redis" {
			server, err := p.lab.redisServer(ctx, false)
			if err != nil {
				return err
			}
			p.redis, url = server.pid, server.Options().Addr
		}
		if p.ways[cell], err = start(ctx, processesCount, []string{helperEnv + "=" + way + " " + url}, executable); err != nil {
			return err
		}
	}
	return nil
}

// help is what a process does that was started with helperEnv.
func help(ctx context.Context, what string) error {
	way, url, _ := strings.Cut(what, " ")
	if way == "far" {
		var added, network, server string
		if _, err := fmt.Sscan(url, &added, &network, &server); err != nil {
			return err
		}
		away, err := time.ParseDuration(added)
		if err != nil {
			return err
		}
		return latency(away).serve(ctx, network, server)
	}
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
		return obey(ctx, pgratelimit(client.New(pool), "durable"))
	case "combined":
		combiner := newCombiner(pool, 0)
		defer combiner.Close()
		return obey(ctx, pgratelimit(combiner, "durable"))
	case "leaser":
		leaser := client.NewLeaser(pool, client.Lease{Policy: "durable"})
		defer leaser.Close()
		return obey(ctx, pgratelimit(leaser, "durable"))
	default:
		return fmt.Errorf("%s: %q", helperEnv, way)
	}
}

func (p *processes) run(ctx context.Context, cell string) (sample, error) {
	server := p.lab.pg.pid
	if cell == "processes/redis" {
		server = p.redis
	}
	return p.ways[cell].run(ctx, processesCallers, "hot", p.lab.window, server)
}

func (p *processes) cost() time.Duration { return time.Duration((1 + warmUp) * float64(p.lab.window)) }

func (p *processes) close(ctx context.Context) (err error) {
	for _, way := range p.ways {
		err = errors.Join(err, way.close())
	}
	return errors.Join(err, p.lab.dropDatabases(ctx, processesDatabase))
}
