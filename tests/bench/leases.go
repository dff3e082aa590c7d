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

// leases compares a leasing client with redis_rate on keys that are asked for often, near its server and a millisecond away, and
// with a combining client on keys that are not. Its cells are named leases/client/keys, and all have 64 callers.
type leases struct {
	lab       *lab
	keyspaces map[string]*keyspace
	opponents map[string]*opponent
	closers   []func()
}

const (
	leasesDatabase = "leases"
	leasesCallers  = 64
	leasesAway     = time.Millisecond
)

var leasesCells = []string{
	"leases/leaser/hot", "leases/redis/hot", "leases/combined/hot",
	"leases/leaser-1ms/hot", "leases/redis-1ms/hot", "leases/combined-1ms/hot",
	"leases/leaser/zipf-1000", "leases/redis/zipf-1000", "leases/combined/zipf-1000",
	"leases/leaser/uniform", "leases/combined/uniform",
}

func (*leases) cells() []string { return slices.Clone(leasesCells) }

func (l *leases) open(ctx context.Context, _ []string) error {
	l.keyspaces, l.opponents = keyspaces(), map[string]*opponent{}
	source := rand.New(rand.NewPCG(5, 6))
	zipf := rand.NewZipf(source, zipfExponent, 1, 999)
	l.keyspaces["zipf-1000"] = &keyspace{l.keyspaces["uniform"].keys, order(func() uint32 { return uint32(zipf.Uint64()) })}

	server, err := l.lab.redisServer(ctx, false)
	if err != nil {
		return err
	}
	l.opponents["redis"] = &opponent{redisRate(server), server.pid}
	away := *server.Options()
	away.Dialer = func(ctx context.Context, network, address string) (net.Conn, error) {
		return latency(leasesAway).dial(ctx, network, address)
	}
	distant := redis.NewClient(&away)
	l.closers = append(l.closers, func() { _ = distant.Close() })
	l.opponents["redis-1ms"] = &opponent{redisRate(distant), server.pid}

	pg, err := l.lab.postgres(ctx)
	if err != nil {
		return err
	}
	// Leases answer millions of requests a second for one bucket.
	statements := append(definePolicies(),
		fmt.Sprintf("select ratelimit_define_policy('durable', %d, %d, '1 hour')", 100*capacity/3, 100*refillPerHour/3),
		fmt.Sprintf("select ratelimit_reset('durable', '%s')", hotKey), "vacuum analyze")
	if err := pg.database(ctx, leasesDatabase, statements...); err != nil {
		return err
	}
	for name, added := range map[string]time.Duration{"": 0, "-1ms": leasesAway} {
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
	for _, cell := range leasesCells { // a moment that does not count, for each to be warm
		if _, err := l.run(ctx, cell); err != nil {
			return errors.Join(errors.New(cell), err)
		}
	}
	return nil
}

func (l *leases) run(ctx context.Context, cell string) (sample, error) {
	part := strings.Split(cell, "/")
	o := l.opponents[part[1]]
	load := load{callers: leasesCallers, keys: l.keyspaces[part[2]], acquire: o.acquire, server: o.server}
	return load.run(ctx, 2*l.lab.window)
}

func (l *leases) cost() time.Duration { return time.Duration((1 + warmUp) * 2 * float64(l.lab.window)) }

func (l *leases) close(ctx context.Context) error {
	for _, close := range slices.Backward(l.closers) {
		close()
	}
	return l.lab.dropDatabases(ctx, leasesDatabase)
}
