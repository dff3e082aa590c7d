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

// A denial must not count as a cycle: the last slot is taken, and released.
func TestHeld_FailsWithoutAFreeSlotAndKeepsNone(t *testing.T) {
	t.Parallel()
	db, server := pgtest.New(t), newRedis(t)
	for _, sql := range defineSlots() {
		_, err := db.Pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	end := float64(time.Now().Add(time.Hour).UnixMicro())
	for name, way := range map[string]struct {
		acquire    acquirer
		take, free func() error
		count      func() (int64, error)
	}{
		"pgratelimit": {held(client.New(db.Pool)), func() error {
			_, err := db.Pool.Exec(t.Context(), "select ratelimit_hold('slots', 'hot', 'all', 1000)")
			return err
		}, func() error {
			_, err := db.Pool.Exec(t.Context(), "select ratelimit_release('slots', 'hot', 'all')")
			return err
		}, func() (count int64, err error) {
			return count, db.Pool.QueryRow(t.Context(), "select count(*) from ratelimit.leases").Scan(&count)
		}},
		"redis": {heldRedis(server), func() error {
			holders := make([]redis.Z, slotCapacity)
			for i := range holders {
				holders[i] = redis.Z{Score: end, Member: i}
			}
			return server.ZAdd(t.Context(), "slots:hot", holders...).Err()
		}, func() error {
			return server.Del(t.Context(), "slots:hot").Err()
		}, func() (int64, error) { return server.ZCard(t.Context(), "slots:hot").Result() }},
	} {
		require.NoError(t, way.take(), name)
		require.ErrorIs(t, way.acquire(t.Context(), "hot"), errDenied, name)
		require.NoError(t, way.free(), name)
		var callers errgroup.Group
		for range 8 {
			callers.Go(func() error { return way.acquire(t.Context(), "hot") })
		}
		require.NoError(t, callers.Wait(), name)
		count, err := way.count()
		require.NoError(t, err, name)
		require.Zero(t, count, name)
	}
}
