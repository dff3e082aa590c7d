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

// leases compares a leasing client with redis_rate on keys that are asked for often, near its server and a millisecond away,
// and with a combining client on keys that are not. Its cells are named leases/client/keys/64.
type leases struct {
	stage
	keyspaces map[string]*keyspace
	opponents map[string]*opponent
}

const leasesDatabase = "leases"

// leasesAdded are the latencies by the ends of the clients' names.
var leasesAdded = map[string]time.Duration{"": 0, "-1ms": time.Millisecond}

// defineLeasedPolicies defines policies with a larger bucket of the hot key: leases answer millions of requests a second for it.
func defineLeasedPolicies() []string {
	return append(definePolicies(),
		fmt.Sprintf("select ratelimit_define_policy('durable', %d, %d, '1 hour')", 100*capacity/3, 100*refillPerHour/3),
		fmt.Sprintf("select ratelimit_reset('durable', '%s')", hotKey), "vacuum analyze")
}

func (*leases) cells() []string {
	return []string{
		"leases/leaser/hot/64", "leases/redis/hot/64", "leases/combined/hot/64",
		"leases/leaser-1ms/hot/64", "leases/redis-1ms/hot/64", "leases/combined-1ms/hot/64",
		"leases/leaser/uniform/64", "leases/combined/uniform/64",
		"leases/combined-1ms/uniform/64", "leases/redis-1ms/uniform/64", "leases/redis-pipelined-1ms/uniform/64",
	}
}

func (l *leases) open(ctx context.Context, cells []string) error {
	l.keyspaces, l.opponents = keyspaces(), map[string]*opponent{}

	server, err := l.redisServer(ctx, false)
	if err != nil {
		return err
	}
	for name, added := range leasesAdded {
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

	pg, err := l.database(ctx, leasesDatabase, defineLeasedPolicies()...)
	if err != nil {
		return err
	}
	for name, added := range leasesAdded {
		pool, err := l.pool(ctx, pg.URL(leasesDatabase), false, connections, func(config *pgxpool.Config) {
			if added > 0 {
				config.ConnConfig.DialFunc = latency(added).dial
			}
		})
		if err != nil {
			return err
		}
		combiner, leaser := l.combiner(pool), client.NewLeaser(pool, client.Lease{Policy: "durable"})
		l.closers = append(l.closers, leaser.Close)
		l.opponents["combined"+name] = &opponent{pgratelimit(combiner), pg.pid}
		l.opponents["leaser"+name] = &opponent{pgratelimit(leaser), pg.pid}
	}
	for _, cell := range cells { // a moment that does not count, for each to be warm
		if _, err := l.run(ctx, cell); err != nil {
			return errors.Join(errors.New(cell), err)
		}
	}
	return nil
}

func (l *leases) run(ctx context.Context, cell string) (sample, error) {
	part := strings.Split(cell, "/")
	o := l.opponents[part[1]]
	load := load{callers: 64, keys: l.keyspaces[part[2]], acquire: o.acquire, servers: []int{o.server}}
	return load.run(ctx, 2*l.window)
}

func (l *leases) cost() time.Duration { return time.Duration((1 + warmUp) * 2 * float64(l.window)) }
