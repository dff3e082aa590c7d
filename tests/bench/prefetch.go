package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/pgratelimit/client"
)

// prefetching compares a prefetching client with redis_rate on keys that are asked for often, near its server and a millisecond away,
// and with a combining client on keys that are not. Its cells are named prefetch/client/keys/64.
type prefetching struct {
	stage
	keyspaces map[string]*keyspace
	opponents map[string]*opponent
}

const prefetchDatabase = "prefetch"

// prefetchAdded are the latencies by the ends of the clients' names.
var prefetchAdded = map[string]time.Duration{"": 0, "-1ms": time.Millisecond}

// definePrefetchedPolicies defines policies with a larger bucket of the hot key: stocks answer millions of requests a second for it.
func definePrefetchedPolicies() []string {
	return append(definePolicies(),
		fmt.Sprintf("select ratelimit_define_policy('durable', %d, %d, '1 hour')", 100*capacity/3, 100*refillPerHour/3),
		fmt.Sprintf("select ratelimit_reset('durable', '%s')", hotKey), "vacuum analyze")
}

func (*prefetching) cells() []string {
	return []string{
		"prefetch/prefetcher/hot/64", "prefetch/redis/hot/64", "prefetch/combined/hot/64",
		"prefetch/prefetcher-1ms/hot/64", "prefetch/redis-1ms/hot/64", "prefetch/combined-1ms/hot/64",
		"prefetch/prefetcher/uniform/64", "prefetch/combined/uniform/64",
		"prefetch/combined-1ms/uniform/64", "prefetch/redis-1ms/uniform/64", "prefetch/redis-pipelined-1ms/uniform/64",
	}
}

func (l *prefetching) open(ctx context.Context, cells []string) error {
	l.keyspaces, l.opponents = keyspaces(), map[string]*opponent{}

	server, err := l.redisServer(ctx, false)
	if err != nil {
		return err
	}
	for name, added := range prefetchAdded {
		options := *server.Options()
		if added > 0 {
			options.Dialer = func(ctx context.Context, network, address string) (net.Conn, error) {
				return latency(added).dial(ctx, network, address)
			}
		}
		rdb := redis.NewClient(&options)
		l.closers = append(l.closers, func() { _ = rdb.Close() })
		pipelined, err := rdb.AutoPipeline()
		if err != nil {
			return err
		}
		l.opponents["redis"+name] = &opponent{redisRate(rdb), server.pid}
		l.opponents["redis-pipelined"+name] = &opponent{redisRate(pipelined), server.pid}
	}

	pg, err := l.database(ctx, prefetchDatabase, definePrefetchedPolicies()...)
	if err != nil {
		return err
	}
	for name, added := range prefetchAdded {
		pool, err := l.pool(ctx, pg.URL(prefetchDatabase), false, connections, func(config *pgxpool.Config) {
			if added > 0 {
				config.ConnConfig.DialFunc = latency(added).dial
			}
		})
		if err != nil {
			return err
		}
		combiner, prefetcher := l.combiner(pool), client.NewPrefetcher(pool, client.Prefetch{Policy: "durable"})
		l.closers = append(l.closers, prefetcher.Close)
		l.opponents["combined"+name] = &opponent{pgratelimit(combiner), pg.pid}
		l.opponents["prefetcher"+name] = &opponent{pgratelimit(prefetcher), pg.pid}
	}
	for _, cell := range cells { // a moment that does not count, for each to be warm
		if _, err := l.run(ctx, cell); err != nil {
			return errors.Join(errors.New(cell), err)
		}
	}
	return nil
}

func (l *prefetching) run(ctx context.Context, cell string) (sample, error) {
	part := strings.Split(cell, "/")
	o := l.opponents[part[1]]
	load := load{callers: 64, keys: l.keyspaces[part[2]], acquire: o.acquire, servers: []int{o.server}}
	return load.run(ctx, 2*l.window)
}

func (l *prefetching) cost() time.Duration {
	return time.Duration((1 + warmUp) * 2 * float64(l.window))
}
