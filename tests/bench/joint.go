package main

import (
	"context"
	_ "embed"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/pgratelimit/client"
)

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

// redisRate asks redis_rate about each bucket, and sends the three calls in one pipeline. Each of them takes or
// does not, whatever the others do.
func (m membership) redisRate(rdb redis.Cmdable) acquirer {
	return func(ctx context.Context, user string) error {
		pipe := rdb.Pipeline()
		calls := pipelined{Cmdable: pipe}
		limiter := redis_rate.NewLimiter(&calls)
		for _, key := range []string{user, m.of(user), everybody} {
			if _, err := limiter.Allow(ctx, key, limit); err != nil {
				return err
			}
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}
		for _, call := range calls.sent {
			if err := isAllowed(call); err != nil {
				return err
			}
		}
		return nil
	}
}

// A pipelined is a pipeline that redis_rate can call. It reads an answer as soon as it has made a call, so it is
// given one; the true answers are those of sent. The server must know the script already.
type pipelined struct {
	redis.Cmdable
	sent []*redis.Cmd
}

func (p *pipelined) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	p.sent = append(p.sent, p.Cmdable.EvalSha(ctx, sha, keys, args...))
	return redis.NewCmdResult([]any{int64(1), int64(1), "-1", "0"}, nil)
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
