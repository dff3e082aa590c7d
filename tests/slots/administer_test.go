package slots

import (
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestDropPolicy_RemovesHolders(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 2, lease, kind)
		db.Hold("a", 1)
		holder := db.Begin()
		kit.NoError(kit.Hold(holder, "p", "busy", "a", 1))(t)
		db.DropPolicy("p")
		require.Len(t, db.LeaseRows(), 0)
		holder.Execute("commit")
		db.Lend("p", 1, lease, kind)
		require.True(t, kit.NoError(kit.Hold(db.Pool, "p", "busy", "b", 1))(t).Allowed, "another policy of that name")
		require.Len(t, db.LeaseRows(), 4)
		require.Equal(t, kit.Deleted{Buckets: 2}, db.Cleanup(), "a row and a lease of the policy that was dropped")
		require.Len(t, db.LeaseRows(), 2)
	})
}

func TestCleanup_RemovesABoundedNumberOfLeases(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 10_000, lease, kind)
		db.Execute("select ratelimit_hold('p', 'k' || k, h::text) from generate_series(1, 30) as k, generate_series(1, 20) as h")
		left := func() int64 {
			return db.Number("select count(*) from (table ratelimit.leases union all table ratelimit.ephemeral_leases) as l")
		}
		db.SetClock(at(time.Hour))
		busy := db.Begin()
		kit.NoError(kit.Hold(busy, "p", "k1", "new", 1))(t)
		require.True(t, db.GoesOn(100))
		require.EqualValues(t, 500, left())
		for db.GoesOn(100) {
		}
		require.EqualValues(t, 20, left(), "but for the key that is locked")
		busy.Execute("commit")
		require.Equal(t, kit.Deleted{}, db.Cleanup())
		require.EqualValues(t, 1, left())
		require.Equal(t, kit.Deleted{Buckets: 1}, db.CleanupAt(at(2*time.Hour)))
	})
}

func TestDoctor_KnowsTheTablesOfSlots(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.GiveAway()
		db.At(kit.T0).Lend("p", 1, lease, kind)
		db.Hold("a", 1)
		db.SetClock(at(lease))
		require.Empty(t, db.Findings())
		db.SetClock(at(time.Hour))
		db.RequireFinding("warning", "slots has 1 row overdue for clean-up")
		db.Execute("call ratelimit_cleanup_all()")
		require.Empty(t, db.Findings())
	})
}
