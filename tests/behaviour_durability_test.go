package tests

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestDurability_AfterACrash(t *testing.T) {
	t.Parallel()
	db, server := newPrivateDB(t, "synchronous_commit=on")
	db.policy("d", 10, 1, aDay).policy("e", 10, 1, aDay, ephemeral)
	first := db.acquire("d", "k", 3, "X")
	db.take("d", "k", 4).take("e", "k", 3, "X").take("e", "k", 4)
	before := db.bucket("d", "k")
	open := db.begin() // and never committed
	open.acquire("d", "k", 1)
	require.NoError(t, server.Stop(context.Background(), true))
	require.NoError(t, server.Start(context.Background()))
	db = reopen(t, server)
	require.Equal(t, before, db.bucket("d", "k"))
	require.EqualValues(t, 3, db.left("d", "k"))
	require.Equal(t, replayed(first), db.acquire("d", "k", 3, "X"))
	require.False(t, db.acquire("d", "k", 4).Allowed)
	require.Nil(t, db.bucket("e", "k"))
	again := db.acquire("e", "k", 3, "X")
	require.False(t, again.Replayed)
	require.EqualValues(t, 7, again.Remaining, "charged again, from a full bucket")
}

// Every table that one call writes has the same durability, so an ephemeral grant has nothing to flush.
func TestDurability_AnEphemeralGrantWritesNoWAL(t *testing.T) {
	db := parallelDB(t).policy("d", 10, 1, time.Second).policy("e", 10, 1, time.Second, ephemeral)
	s := db.session()
	for _, call := range []string{
		"acquire(%, k)", // creates the bucket
		"acquire(%, k, 2)",
		"acquire(%, k, 3, 'X')",
		"refund(%, k, 1)",
		"reset(%, k)",
	} {
		// Reading a catalog may prune it, so the smallest of several counts.
		least := map[string]int64{"'d'": math.MaxInt64, "'e'": math.MaxInt64}
		for i := range 5 {
			for policy := range least {
				call := strings.NewReplacer("%", policy, "k", fmt.Sprintf("'k%d'", i)).Replace(call)
				least[policy] = min(least[policy], s.walRecords("select ratelimit_"+call))
			}
		}
		require.Zero(t, least["'e'"], call)
		require.NotZero(t, least["'d'"], call)
	}
}
