package main

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/pgratelimit/client"
)

// A cycle is one hold and one release, each a transaction or a command of its own, of a holder that is new. There are more slots than
// callers: a denial is an error.
const (
	slotCapacity = 1000
	slotLease    = time.Minute
)

// defineSlots defines the policy slots, and gives every key a row.
func defineSlots() []string {
	return []string{
		fmt.Sprintf("select ratelimit_define_policy('slots', %d, lease => '%v')", slotCapacity, slotLease),
		fmt.Sprintf(`insert into ratelimit.slots (policy_id, key, changes, held, counted_until, due_at)
			select p.id, k.key, 1, 0, ratelimit.clock(), ratelimit.clock()
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

// held makes cycles of two calls.
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

// heldRedis makes cycles of a script and a ZREM.
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
