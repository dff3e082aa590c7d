package main

import (
	"context"
	crypto "crypto/rand"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/pgratelimit/client"
)

// The limit is the same for all, and so high that no bucket runs dry. A token takes 18 s to come back, so that Redis does
// not forget keys between two cells. An empty bucket is full in 14 years: at 15, batches would count in numeric, which
// nobody's policy needs.
const (
	capacity      = 25_000_000
	refillPerHour = 200
)

var limit = redis_rate.Limit{Rate: refillPerHour, Burst: capacity, Period: time.Hour}

var errDenied = errors.New("denied, though the bucket was not to run dry")

func pgratelimit(limiter client.Acquirer) acquirer {
	return func(ctx context.Context, key string) error {
		d, err := limiter.Acquire(ctx, "durable", key)
		return wanted(d.Allowed, err)
	}
}

// wanted makes an error of a denial.
func wanted(granted bool, err error) error {
	if err == nil && !granted {
		err = errDenied
	}
	return err
}

// keyed gives each request an idempotency key that nobody has used.
func keyed(limiter client.Acquirer) acquirer {
	name := newNames()
	return func(ctx context.Context, key string) error {
		d, err := limiter.Acquire(ctx, "durable", key, client.IdempotencyKey(name()))
		return wanted(d.Allowed && !d.Replayed, err)
	}
}

// newNames returns a function that gives no name twice, in any process.
func newNames() func() string {
	var count atomic.Uint64
	process := crypto.Text()
	return func() string { return process + strconv.FormatUint(count.Add(1), 36) }
}

// redisRate asks redis_rate; rdb may be a client or one that puts commands sent at the same time into
// one pipeline.
func redisRate(rdb redis.Cmdable) acquirer {
	limiter := redis_rate.NewLimiter(rdb)
	return func(ctx context.Context, key string) error {
		d, err := limiter.Allow(ctx, key, limit)
		return wanted(err == nil && d.Allowed == 1, err)
	}
}

// limiterTable is what the limiters that are not ours keep their buckets in.
const limiterTable = `create table limiter (
	key text collate "C" primary key, tokens double precision not null, refilled_at timestamptz not null
) with (fillfactor = 70)`

// statements is what limiters on SQL commonly do: a transaction of five statements, each a round trip.
func statements(pool *pgxpool.Pool) acquirer {
	return func(ctx context.Context, key string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "insert into limiter values ($1, $2, clock_timestamp()) on conflict do nothing", key, float64(capacity))
			if err != nil {
				return err
			}
			var tokens, seconds float64
			err = tx.QueryRow(ctx, "select tokens, extract(epoch from clock_timestamp() - refilled_at)::float8 from limiter where key = $1 for update", key).
				Scan(&tokens, &seconds)
			if err != nil {
				return err
			}
			tokens = math.Min(capacity, tokens+seconds*refillPerHour/3600)
			if tokens < 1 {
				return errDenied
			}
			_, err = tx.Exec(ctx, "update limiter set tokens = $2, refilled_at = clock_timestamp() where key = $1", key, tokens-1)
			return err
		})
	}
}

// fillLimiter gives every key a row, as the other opponents' have.
func fillLimiter() string {
	return fmt.Sprintf(`insert into limiter
		select '%[4]s' || i, %[1]d, clock_timestamp() from generate_series(1, %[2]d) as i
		union all select '%[3]s', %[1]d, clock_timestamp()`, capacity, manyKeys, hotKey, userPrefix)
}
