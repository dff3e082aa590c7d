package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
)

// Denied opponents are named after the share of requests that are denied: a half, or 99 % in a flood. A cached one remembers denials.
var deniedShares = map[string]int{"half": 50, "flood": 99}

// dryLimit is that of policy dry: a bucket that a token was taken from stays empty.
var dryLimit = redis_rate.Limit{Rate: 1, Burst: 1, Period: 1000 * 24 * time.Hour}

// defineDry defines policy dry, and makes every bucket empty.
func defineDry(count int) []string {
	return []string{"select ratelimit_define_policy('dry', 1, 1, '1000 days')", fill{policy: "dry", count: count}.sql()}
}

func (g *grid) addDenied(pool *pgxpool.Pool, pid int) {
	cached := g.combiner(pool, client.DenialCache())
	plain := g.combiner(pool)
	ask := func(limiter *client.Combiner) acquirer {
		return func(ctx context.Context, key string) error {
			d, err := limiter.Acquire(ctx, "dry", key)
			return wantDenied(d.Allowed, err)
		}
	}
	g.flood = ask(cached)
	for name, share := range deniedShares {
		g.opponents[name+"-combined"] = &opponent{mixed(share, ask(plain), pgratelimit(plain)), pid}
		g.opponents[name+"-cached"] = &opponent{mixed(share, ask(cached), pgratelimit(cached)), pid}
	}
}

func (g *grid) openDeniedRedis(ctx context.Context) error {
	server, err := g.redisServer(ctx, false)
	if err != nil {
		return err
	}
	limiter := redis_rate.NewLimiter(server)
	prefix := "dry:"
	for name, share := range deniedShares {
		g.opponents[name+"-redis"] = &opponent{mixed(share, func(ctx context.Context, key string) error {
			d, err := limiter.Allow(ctx, prefix+key, dryLimit)
			return wantDenied(err == nil && d.Allowed > 0, err)
		}, redisRate(server)), server.pid}
	}
	for _, keys := range keyNames {
		err := g.keyspaces[keys].askForAll(ctx, func(ctx context.Context, key string) error {
			_, err := limiter.Allow(ctx, prefix+key, dryLimit)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func wantDenied(allowed bool, err error) error {
	if err == nil && allowed {
		err = errors.New("allowed, though the bucket was empty")
	}
	return err
}

// mixed lets a share of the requests, in percent, ask for a token of an empty bucket.
func mixed(share int, dry, full acquirer) acquirer {
	return func(ctx context.Context, key string) error {
		if rand.IntN(100) < share {
			return dry(ctx, key)
		}
		return full(ctx, key)
	}
}
