package slots

import (
	"context"
	"fmt"
	"strings"
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

// An application role holds, renews and releases; it lists nobody, and touches no table.
func TestGrants_AnApplicationHoldsAndListsNobody(t *testing.T) {
	db := kit.ParallelDB(t).Lend("p", 2, time.Hour).Lend("e", 2, time.Hour, kit.Ephemeral)
	role := fmt.Sprint("slots_", strings.ToLower(db.Name))
	db.Execute("create role " + role + " login")
	t.Cleanup(func() {
		require.NoError(t, kit.ErrorOf(db.Pool.Exec(context.Background(), "drop owned by "+role+"; drop role "+role)))
	})
	db.Execute("grant execute on function ratelimit_hold, ratelimit_renew, ratelimit_release to " + role)
	conn := kit.ConnectAs(t, db.DB, role)
	for _, policy := range []string{"p", "e"} {
		require.True(t, kit.NoError(kit.Hold(conn, policy, "k", "a", 1))(t).Allowed)
		require.True(t, kit.NoError(kit.Hold(conn, policy, "k", "b", 1))(t).Allowed)
		require.False(t, kit.NoError(kit.Hold(conn, policy, "k", "c", 1))(t).Allowed)
		require.Equal(t, kit.Micros(time.Hour), kit.NoError(kit.Renew(conn, policy, "k", "a"))(t))
		require.True(t, kit.NoError(kit.Release(conn, policy, "k", "a"))(t))
	}
	for _, sql := range []string{"select ratelimit_holders()", "table ratelimit.leases", "table ratelimit.slots", "select ratelimit.reset_slots(1, true, 'k')"} {
		kit.RequireState(t, "42501", kit.ErrorOf(conn.Exec(t.Context(), sql)))
	}
}
