package operate

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestDurability_AfterACrash(t *testing.T) {
	t.Parallel()
	db, server := kit.NewPrivateDB(t, "synchronous_commit=on")
	db.Policy("d", 10, 1, kit.ADay).Policy("e", 10, 1, kit.ADay, kit.Ephemeral)
	first := db.Acquire("d", "k", 3, "X")
	db.Take("d", "k", 4).Take("e", "k", 3, "X").Take("e", "k", 4)
	before := db.Bucket("d", "k")
	open := db.Begin() // and never committed
	open.Acquire("d", "k", 1)
	require.NoError(t, server.Stop(context.Background(), true))
	require.NoError(t, server.Start(context.Background()))
	db = kit.Reopen(t, server)
	require.Equal(t, before, db.Bucket("d", "k"))
	require.EqualValues(t, 3, db.Left("d", "k"))
	require.Equal(t, kit.Replayed(first), db.Acquire("d", "k", 3, "X"))
	require.False(t, db.Acquire("d", "k", 4).Allowed)
	require.Nil(t, db.Bucket("e", "k"))
	again := db.Acquire("e", "k", 3, "X")
	require.False(t, again.Replayed)
	require.EqualValues(t, 7, again.Remaining, "charged again, from a full bucket")
}

// Every table that one call writes has the same durability, so an ephemeral grant has nothing to flush.
func TestDurability_AnEphemeralGrantWritesNoWAL(t *testing.T) {
	db := kit.ParallelDB(t).Policy("d", 10, 1, time.Second).Policy("e", 10, 1, time.Second, kit.Ephemeral)
	s := db.Session()
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
				least[policy] = min(least[policy], s.WalRecords("select ratelimit_"+call))
			}
		}
		require.Zero(t, least["'e'"], call)
		require.NotZero(t, least["'d'"], call)
	}
}
