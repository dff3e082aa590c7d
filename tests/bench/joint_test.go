package main

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// newRedis starts a server of the test.
func newRedis(t *testing.T) *redisServer {
	if _, err := pgtest.Program(t.Context(), "redis-server"); err != nil {
		t.Skip(err)
	}
	server, err := startRedis(t.Context(), false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.close()) })
	return server
}

// A scripted is what the script asks of a bucket.
type scripted struct {
	key            string
	capacity, cost int
}

// gain is the time in which a bucket gains a token.
const gain = int64(time.Hour / time.Microsecond)

func call(ctx context.Context, rdb redis.Scripter, buckets ...scripted) ([]int64, error) {
	var (
		keys []string
		args []any
	)
	for _, b := range buckets {
		keys = append(keys, b.key)
		args = append(args, b.capacity, gain, b.cost)
	}
	return acquireAllScript.Run(ctx, rdb, keys, args...).Int64Slice()
}

// ask returns the answer of the script, with times in whole hours, rounded up.
func ask(t *testing.T, rdb redis.Scripter, buckets ...scripted) []int64 {
	answer, err := call(t.Context(), rdb, buckets...)
	require.NoError(t, err)
	require.Len(t, answer, 1+3*len(buckets))
	for i := range buckets {
		for _, n := range []int{3*i + 2, 3*i + 3} {
			answer[n] = (answer[n] + gain - 1) / gain
		}
	}
	return answer
}

func TestScript_TakesFromAllBucketsOrFromNone(t *testing.T) {
	t.Parallel()
	server := newRedis(t)
	user, organisation, all := scripted{"user", 5, 1}, scripted{"organisation", 3, 1}, scripted{"all", 10, 2}

	require.Equal(t, []int64{1, 4, 0, 1, 2, 0, 1, 8, 0, 2}, ask(t, server, user, organisation, all))
	require.Equal(t, []int64{1, 3, 0, 2, 1, 0, 2, 6, 0, 4}, ask(t, server, user, organisation, all))
	require.Equal(t, []int64{1, 2, 0, 3, 0, 0, 3, 4, 0, 6}, ask(t, server, user, organisation, all))
	for range 3 {
		require.Equal(t, []int64{0, 2, 0, 3, 0, 1, 3, 4, 0, 6}, ask(t, server, user, organisation, all))
	}
	require.Equal(t, []int64{1, 1, 0, 4, 2, 0, 8}, ask(t, server, user, all))
	require.Equal(t, []int64{0, 1, 0, 4, 2, 1, 8}, ask(t, server, user, scripted{"all", 10, 3}))
	require.Equal(t, []int64{0, 1, 9, 4}, ask(t, server, scripted{"user", 5, 10}))
}

// What is stored is moved to an earlier time, instead of waiting.
func TestScript_GivesBackATokenInItsTime(t *testing.T) {
	t.Parallel()
	server := newRedis(t)
	b := scripted{"user", 2, 1}
	require.Equal(t, []int64{1, 1, 0, 1}, ask(t, server, b))
	require.Equal(t, []int64{1, 0, 0, 2}, ask(t, server, b))
	require.Equal(t, []int64{0, 0, 1, 2}, ask(t, server, b))

	pass := func(d time.Duration) {
		require.NoError(t, server.IncrBy(t.Context(), "user", -d.Microseconds()).Err())
	}
	pass(50 * time.Minute)
	require.Equal(t, []int64{0, 0, 1, 2}, ask(t, server, b))
	pass(11 * time.Minute)
	require.Equal(t, []int64{1, 0, 0, 2}, ask(t, server, b))
	pass(5 * time.Hour)
	require.Equal(t, []int64{1, 1, 0, 1}, ask(t, server, b))
	require.Positive(t, server.PTTL(t.Context(), "user").Val())
	require.LessOrEqual(t, server.PTTL(t.Context(), "user").Val(), time.Hour)
}

// Each bucket has lost what grants took from it, and nothing for any denial.
func TestScript_CountsExactlyUnderConcurrency(t *testing.T) {
	t.Parallel()
	const callers, requests, capacity = 32, 50, 100
	server := newRedis(t)
	names := []string{"a", "b", "c", "d", "e", "f"}
	var (
		taken   [6]atomic.Int64
		denials atomic.Int64
	)
	running, ctx := errgroup.WithContext(t.Context())
	for caller := range callers {
		running.Go(func() error {
			random := rand.New(rand.NewPCG(1, uint64(caller)))
			for range requests {
				chosen := random.Perm(len(names))[:3]
				var buckets []scripted
				for _, n := range chosen {
					buckets = append(buckets, scripted{names[n], capacity * (n + 1), 1})
				}
				answer, err := call(ctx, server, buckets...)
				if err != nil {
					return err
				}
				if answer[0] == 0 {
					denials.Add(1)
					continue
				}
				for _, n := range chosen {
					taken[n].Add(1)
				}
			}
			return nil
		})
	}
	require.NoError(t, running.Wait())
	require.Positive(t, denials.Load())
	require.EqualValues(t, capacity, taken[0].Load())
	for n, name := range names {
		remaining := ask(t, server, scripted{name, capacity * (n + 1), 0})[1]
		require.EqualValues(t, capacity*(n+1)-int(taken[n].Load()), remaining, name)
	}
}

// redis_rate is given answers in advance, so what it took is looked at.
func TestJoint_RedisRateTakesFromEachBucket(t *testing.T) {
	t.Parallel()
	server := newRedis(t)
	m := membership{"organisation:1", "organisation:1"}
	require.NoError(t, redisRate(server)(t.Context(), "sends the script"))
	acquire := m.redisRate(server)
	for _, user := range []string{"user:1", "user:1", "user:2"} {
		require.NoError(t, acquire(t.Context(), user))
	}
	for key, took := range map[string]int{"user:1": 2, "user:2": 1, "organisation:1": 3, everybody: 3} {
		d, err := redis_rate.NewLimiter(server).AllowN(t.Context(), key, limit, 0)
		require.NoError(t, err)
		require.Equal(t, capacity-took, d.Remaining, key)
	}

	_, err := redis_rate.NewLimiter(server).AllowN(t.Context(), "organisation:1", limit, capacity-3)
	require.NoError(t, err)
	require.ErrorIs(t, acquire(t.Context(), "user:1"), errDenied)
}
