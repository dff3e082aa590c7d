package main

import (
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestHoldScript_LendsTheSlotsOfAKeyUntilLeasesEnd(t *testing.T) {
	t.Parallel()
	server := newRedis(t)
	hold := func(holder string) bool {
		err := isAllowed(holdScript.Run(t.Context(), server, []string{"key"}, holder, 2, time.Hour.Microseconds()))
		require.True(t, err == nil || errors.Is(err, errDenied), err)
		return err == nil
	}
	require.True(t, hold("a"))
	require.True(t, hold("b"))
	require.False(t, hold("c"))
	require.True(t, hold("a"), "a holder begins its lease anew")
	require.EqualValues(t, 2, server.ZCard(t.Context(), "key").Val())

	require.NoError(t, server.ZIncrBy(t.Context(), "key", -float64(time.Hour.Microseconds()), "b").Err()) // instead of waiting
	require.True(t, hold("c"), "the lease of b has ended")
	require.False(t, hold("b"))
	require.EqualValues(t, 1, server.ZRem(t.Context(), "key", "a").Val())
	require.True(t, hold("b"))
	require.Positive(t, server.PTTL(t.Context(), "key").Val())
	require.LessOrEqual(t, server.PTTL(t.Context(), "key").Val(), time.Hour)
}

// A denial must not count as a cycle: the slots are taken, and released.
func TestHeld_FailsWithoutAFreeSlotAndKeepsNone(t *testing.T) {
	t.Parallel()
	db, server := pgtest.New(t), newRedis(t)
	take := append(defineSlots(), "select ratelimit_hold('slots', 'hot', 'all', 1000)")
	free := "select ratelimit_release('slots', 'hot', 'all')"
	for _, sql := range take {
		_, err := db.Pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	for i := range slotCapacity {
		require.NoError(t, server.ZAdd(t.Context(), "slots:hot", redis.Z{Score: 1e18, Member: i}).Err())
	}
	ways := []acquirer{held(client.New(db.Pool)), heldRedis(server)}
	for _, way := range ways {
		require.ErrorIs(t, way(t.Context(), "hot"), errDenied)
	}
	_, err := db.Pool.Exec(t.Context(), free)
	require.NoError(t, err)
	require.NoError(t, server.Del(t.Context(), "slots:hot").Err())
	for _, way := range ways {
		var callers errgroup.Group
		for range 8 {
			callers.Go(func() error { return way(t.Context(), "hot") })
		}
		require.NoError(t, callers.Wait())
	}
	var count int
	require.NoError(t, db.Pool.QueryRow(t.Context(), "select count(*) from ratelimit.leases").Scan(&count))
	require.Zero(t, count)
	require.Zero(t, server.ZCard(t.Context(), "slots:hot").Val())
}
