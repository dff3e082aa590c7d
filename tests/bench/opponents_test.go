package main

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
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

// Each bucket gains a token in an hour, and the answers have times in whole hours, rounded up. Redis runs one script at a time, so
// callers beside each other are as callers in turn.
func TestScript_TakesFromAllBucketsOrFromNone(t *testing.T) {
	t.Parallel()
	const gain = int64(time.Hour / time.Microsecond)
	type bucket struct {
		key            string
		capacity, cost int
	}
	server := newRedis(t)
	user, organisation, all := bucket{"user", 5, 1}, bucket{"organisation", 3, 1}, bucket{"all", 10, 2}
	ask := func(want []int64, buckets ...bucket) {
		t.Helper()
		var (
			keys []string
			args []any
		)
		for _, b := range buckets {
			keys, args = append(keys, b.key), append(args, b.capacity, gain, b.cost)
		}
		answer, err := acquireAllScript.Run(t.Context(), server, keys, args...).Int64Slice()
		require.NoError(t, err)
		for i := range buckets {
			for _, n := range []int{3*i + 2, 3*i + 3} {
				answer[n] = (answer[n] + gain - 1) / gain
			}
		}
		require.Equal(t, want, answer)
	}
	ask([]int64{1, 4, 0, 1, 2, 0, 1, 8, 0, 2}, user, organisation, all)
	ask([]int64{1, 3, 0, 2, 1, 0, 2, 6, 0, 4}, user, organisation, all)
	ask([]int64{1, 2, 0, 3, 0, 0, 3, 4, 0, 6}, user, organisation, all)
	for range 3 {
		ask([]int64{0, 2, 0, 3, 0, 1, 3, 4, 0, 6}, user, organisation, all)
	}
	ask([]int64{1, 1, 0, 4, 2, 0, 8}, user, all)
	ask([]int64{0, 1, 0, 4, 2, 1, 8}, user, bucket{"all", 10, 3})
	ask([]int64{0, 1, 9, 4}, bucket{"user", 5, 10})

	pass := func(d time.Duration) { // what is stored is moved to an earlier time, instead of waiting
		require.NoError(t, server.IncrBy(t.Context(), "user", -d.Microseconds()).Err())
	}
	ask([]int64{1, 0, 0, 5}, user)
	pass(50 * time.Minute)
	ask([]int64{0, 0, 1, 5}, user)
	pass(11 * time.Minute)
	ask([]int64{1, 0, 0, 5}, user)
	pass(9 * time.Hour)
	ask([]int64{1, 4, 0, 1}, user)
	require.Positive(t, server.PTTL(t.Context(), "user").Val())
	require.LessOrEqual(t, server.PTTL(t.Context(), "user").Val(), time.Hour)
}

func TestHoldScript_LendsTheSlotsOfAKeyUntilLeasesEnd(t *testing.T) {
	t.Parallel()
	server := newRedis(t)
	hold := func(want error, holder string) {
		t.Helper()
		require.Equal(t, want, isAllowed(holdScript.Run(t.Context(), server, []string{"key"}, holder, 2, time.Hour.Microseconds())))
	}
	hold(nil, "a")
	hold(nil, "b")
	hold(errDenied, "c")
	hold(nil, "a") // a holder begins its lease anew
	require.EqualValues(t, 2, server.ZCard(t.Context(), "key").Val())

	require.NoError(t, server.ZIncrBy(t.Context(), "key", -float64(time.Hour.Microseconds()), "b").Err()) // instead of waiting
	hold(nil, "c")                                                                                        // the lease of b has ended
	hold(errDenied, "b")
	require.EqualValues(t, 1, server.ZRem(t.Context(), "key", "a").Val())
	hold(nil, "b")
	require.Positive(t, server.PTTL(t.Context(), "key").Val())
	require.LessOrEqual(t, server.PTTL(t.Context(), "key").Val(), time.Hour)
}

// A denial must not count as a cycle: the slots are taken, and released.
func TestHeld_FailsWithoutAFreeSlotAndKeepsNone(t *testing.T) {
	t.Parallel()
	db, server := pgtest.New(t), newRedis(t)
	execute := func(statements ...string) {
		for _, sql := range statements {
			_, err := db.Pool.Exec(t.Context(), sql)
			require.NoError(t, err)
		}
	}
	execute(append(defineSlots(), "select ratelimit_hold('slots', 'hot', 'all', 1000)")...)
	for i := range slotCapacity {
		require.NoError(t, server.ZAdd(t.Context(), "slots:hot", redis.Z{Score: 1e18, Member: i}).Err())
	}
	ways := []acquirer{held(client.New(db.Pool)), heldRedis(server)}
	for _, way := range ways {
		require.ErrorIs(t, way(t.Context(), "hot"), errDenied)
	}
	execute("select ratelimit_release('slots', 'hot', 'all')")
	require.NoError(t, server.Del(t.Context(), "slots:hot").Err())
	for _, way := range ways {
		require.NoError(t, way(t.Context(), "hot"))
	}
	var count int
	require.NoError(t, db.Pool.QueryRow(t.Context(), "select count(*) from ratelimit.leases").Scan(&count))
	require.Zero(t, count)
	require.Zero(t, server.ZCard(t.Context(), "slots:hot").Val())
}
