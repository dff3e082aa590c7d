package main

import (
	"context"
	crypto "crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
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

func pgratelimit(limiter client.Acquirer) acquirer { return takes(limiter, "durable") }

func takes(limiter client.Acquirer, policy string) acquirer {
	return func(ctx context.Context, key string) error {
		d, err := limiter.Acquire(ctx, policy, key)
		return wanted(d.Allowed, err)
	}
}

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

// redisRate asks redis_rate; rdb may be a client or one that puts commands sent at the same time into one pipeline.
func redisRate(rdb redis.Cmdable) acquirer { return takesOfRedis(rdb, "", limit) }

func takesOfRedis(rdb redis.Cmdable, prefix string, limit redis_rate.Limit) acquirer {
	limiter := redis_rate.NewLimiter(rdb)
	return func(ctx context.Context, key string) error {
		d, err := limiter.Allow(ctx, prefix+key, limit)
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

// dryLimit is that of policy dry: a bucket that a token was taken from stays empty.
var dryLimit = redis_rate.Limit{Rate: 1, Burst: 1, Period: 1000 * 24 * time.Hour}

// defineDry defines policy dry, and makes every bucket empty.
func defineDry(count int) []string {
	return []string{"select ratelimit_define_policy('dry', 1, 1, '1000 days')", fill{policy: "dry", count: count}.sql()}
}

func dry(limiter client.Acquirer) acquirer { return denied(takes(limiter, "dry")) }

// dryRedis takes from buckets that emptyRedis has emptied.
func dryRedis(rdb redis.Cmdable) acquirer { return denied(emptyRedis(rdb)) }

func emptyRedis(rdb redis.Cmdable) acquirer { return takesOfRedis(rdb, "dry:", dryLimit) }

// denied wants a denial.
func denied(acquire acquirer) acquirer {
	return func(ctx context.Context, key string) error {
		switch err := acquire(ctx, key); {
		case err == nil:
			return errors.New("allowed, though the bucket was empty")
		case !errors.Is(err, errDenied):
			return err
		}
		return nil
	}
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

const (
	organisations = 1000
	everybody     = "everybody" // a policy and its only key
)

// A membership has the organisation of each user, of number 1 first. Some are large: with users who are all
// alike, the requests of organisations are zipfian, and one gets 18 % of them.
type membership []string

func newMembership() membership {
	source := rand.New(rand.NewPCG(3, 4))
	zipf := rand.NewZipf(source, 1.1, 1, organisations-1)
	m := make(membership, manyKeys)
	for n := range m {
		m[n] = keyName(organisationPrefix, int(zipf.Uint64())+1)
	}
	return m
}

func (m membership) of(user string) string {
	n, _ := strconv.Atoi(user[len(userPrefix):])
	return m[n-1]
}

// defineJointPolicies defines the three policies, and gives every bucket a row.
func defineJointPolicies() []string {
	users := fill{policy: "user", count: manyKeys, tokens: capacity / 2}
	theirs := fill{policy: "organisation", prefix: organisationPrefix, count: organisations, tokens: capacity / 2}
	return []string{
		definePolicy("user", true), users.sql(), users.inUse(),
		definePolicy("organisation", true), theirs.sql(), theirs.inUse(),
		definePolicy(everybody, true),
		"select ratelimit_acquire('" + everybody + "', '" + everybody + "')",
	}
}

// pgratelimit asks pgratelimit, which takes from all three buckets or from none.
func (m membership) pgratelimit(limiter interface {
	AcquireAll(context.Context, []client.Charge, ...client.CallOption) (client.JointDecision, error)
}) acquirer {
	return func(ctx context.Context, user string) error {
		d, err := limiter.AcquireAll(ctx, []client.Charge{
			{Policy: "user", Key: user}, {Policy: "organisation", Key: m.of(user)}, {Policy: everybody, Key: everybody},
		})
		return wanted(d.Allowed, err)
	}
}

//go:embed acquire_all.lua
var acquireAllLua string

var acquireAllScript = redis.NewScript(acquireAllLua)

// script asks a script that is as exact as pgratelimit is. Its keys are of different users, organisations and
// everybody: in a Redis Cluster they are in different slots, and no script can name them all.
func (m membership) script(rdb redis.Scripter) acquirer {
	gain := (limit.Period / time.Duration(limit.Rate)).Microseconds()
	return func(ctx context.Context, user string) error {
		return isAllowed(acquireAllScript.Run(ctx, rdb, []string{"all:" + user, "all:" + m.of(user), "all:" + everybody},
			limit.Burst, gain, 1, limit.Burst, gain, 1, limit.Burst, gain, 1))
	}
}

// isAllowed reads the answer of a script, whose first number tells how many requests are allowed.
func isAllowed(cmd *redis.Cmd) error {
	answer, err := cmd.Slice()
	return wanted(err == nil && answer[0] == int64(1), err)
}

// A cycle is a hold and a release, each by itself, of a holder that is new. There are more slots than callers: a denial is an error.
const (
	slotCapacity = 1000
	slotLease    = time.Minute
)

// defineSlots defines the policy slots, and gives every key a row.
func defineSlots() []string {
	return []string{
		fmt.Sprintf("select ratelimit_define_policy('slots', %d, lease => '%v')", slotCapacity, slotLease),
		fmt.Sprintf(`insert into ratelimit.slots (policy_id, key, held, counted_until, due_at)
			select p.id, k.key, 0, ratelimit.clock(), ratelimit.clock()
			  from ratelimit.policies as p,
			       (select '%s' || i from generate_series(1, %d) as i union all select '%s') as k (key)
			 where p.name = 'slots'
			 order by hashtext(k.key)`, userPrefix, manyKeys, hotKey),
	}
}

// cycleSQL divides by zero if a slot is not lent, or was lost.
func cycleSQL(key string) string {
	return fmt.Sprintf("select 1 / allowed::integer from ratelimit_hold('slots', %s, 'holder:' || :r);\n"+
		"select 1 / ratelimit_release('slots', %[1]s, 'holder:' || :r)::integer;", key)
}

func held(limiter *client.Limiter) acquirer {
	holder := newNames()
	return func(ctx context.Context, key string) error {
		holder := holder()
		d, err := limiter.HoldAs(ctx, "slots", key, holder)
		if err != nil || !d.Allowed {
			return wanted(false, err)
		}
		return wanted(limiter.Release(ctx, "slots", key, holder))
	}
}

//go:embed hold.lua
var holdLua string

var holdScript = redis.NewScript(holdLua)

func heldRedis(rdb redis.Cmdable) acquirer {
	holder := newNames()
	return func(ctx context.Context, key string) error {
		holder, key := holder(), "slots:"+key
		if err := isAllowed(holdScript.Run(ctx, rdb, []string{key}, holder, slotCapacity, slotLease.Microseconds())); err != nil {
			return err
		}
		removed, err := rdb.ZRem(ctx, key, holder).Result()
		return wanted(removed == 1, err)
	}
}
