package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/pgratelimit/client"
)

// leases compares a leasing client with redis_rate on keys that are asked for often, near its server and a millisecond or five away,
// and with a combining client on keys that are not. Its cells are named leases/client/keys, and all have 64 callers.
type leases struct {
	lab       *lab
	keyspaces map[string]*keyspace
	opponents map[string]*opponent
	closers   []func()
}

const (
	leasesDatabase = "leases"
	leasesCallers  = 64
)

// leasesAdded are the latencies by the ends of the clients' names.
var leasesAdded = map[string]time.Duration{"": 0, "-1ms": time.Millisecond, "-5ms": 5 * time.Millisecond}

var leasesCells = []string{
	"leases/leaser/hot", "leases/redis/hot", "leases/combined/hot",
	"leases/leaser-1ms/hot", "leases/redis-1ms/hot", "leases/combined-1ms/hot",
	"leases/leaser-5ms/hot", "leases/redis-5ms/hot", "leases/combined-5ms/hot",
	"leases/leaser/zipf-1000", "leases/redis/zipf-1000", "leases/combined/zipf-1000",
	"leases/leaser/uniform", "leases/combined/uniform",
	"leases/combined-1ms/uniform", "leases/redis-1ms/uniform", "leases/redis-pipelined-1ms/uniform",
	"leases/combined-5ms/uniform", "leases/redis-5ms/uniform", "leases/redis-pipelined-5ms/uniform",
}

// defineLeasedPolicies defines policies with a larger bucket of the hot key: leases answer millions of requests a second for it.
func defineLeasedPolicies() []string {
	return append(definePolicies(),
		fmt.Sprintf("select ratelimit_define_policy('durable', %d, %d, '1 hour')", 100*capacity/3, 100*refillPerHour/3),
		fmt.Sprintf("select ratelimit_reset('durable', '%s')", hotKey), "vacuum analyze")
}

func (*leases) cells() []string { return slices.Clone(leasesCells) }

func (l *leases) open(ctx context.Context, cells []string) error {
	l.keyspaces, l.opponents = keyspaces(), map[string]*opponent{}
	source := rand.New(rand.NewPCG(5, 6))
	zipf := rand.NewZipf(source, zipfExponent, 1, 999)
	l.keyspaces["zipf-1000"] = &keyspace{l.keyspaces["uniform"].keys, order(func() uint32 { return uint32(zipf.Uint64()) })}

	server, err := l.lab.redisServer(ctx, false)
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

	pg, err := l.lab.postgres(ctx)
	if err != nil {
		return err
	}
	if err := pg.database(ctx, leasesDatabase, defineLeasedPolicies()...); err != nil {
		return err
	}
	for name, added := range leasesAdded {
		pool, err := pg.pool(ctx, leasesDatabase, false, connections, func(config *pgxpool.Config) {
			if added > 0 {
				config.ConnConfig.DialFunc = latency(added).dial
			}
		})
		if err != nil {
			return err
		}
		combiner, leaser := newCombiner(pool, l.lab.calls), client.NewLeaser(pool, client.Lease{Policy: "durable"})
		l.closers = append(l.closers, pool.Close, combiner.Close, leaser.Close)
		l.opponents["combined"+name] = &opponent{pgratelimit(combiner, "durable"), pg.pid}
		l.opponents["leaser"+name] = &opponent{pgratelimit(leaser, "durable"), pg.pid}
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
	load := load{callers: leasesCallers, keys: l.keyspaces[part[2]], acquire: o.acquire, servers: []int{o.server}}
	return load.run(ctx, 2*l.lab.window)
}

func (l *leases) cost() time.Duration { return time.Duration((1 + warmUp) * 2 * float64(l.lab.window)) }

func (l *leases) close(ctx context.Context) error {
	for _, close := range slices.Backward(l.closers) {
		close()
	}
	return l.lab.dropDatabases(ctx, leasesDatabase)
}
