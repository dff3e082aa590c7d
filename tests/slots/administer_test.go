package slots

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestOverride_OfAKeyHasCapacityLeaseAndAnEnd(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 1, lease, kind)
		db.Hold("a", 1)
		db.Execute("select ratelimit_override('p', 'k', 3, lease => '1 hour', expires_at => $1)", at(10*kit.Second))
		require.Equal(t, []string{"p k 3 <NULL> <NULL> 01:00:00"}, kit.Column(t, db.DB,
			"select format('%s %s %s %s %s %s', policy, key, capacity, coalesce(refill::text, '<NULL>'), coalesce(every::text, '<NULL>'), lease) from ratelimit_overrides()"))
		require.Equal(t, kit.Held(0, time.Hour, 3), db.Hold("b", 2))
		require.Equal(t, kit.Micros(time.Hour), db.Renew("a"))
		require.Equal(t, kit.Held(0, lease, 1), kit.NoError(kit.Hold(db.Pool, "p", "another", "a", 1))(t))
		db.SetClock(at(10 * kit.Second))
		require.Equal(t, kit.Renewed(kit.Held(-2, lease, 1)), db.Hold("a", 1), "it is over")
		db.Execute("select ratelimit_override('p', 'k', lease => '2 minutes')")
		require.Equal(t, kit.Micros(2*lease), db.Renew("a"), "the capacity is the policy's")
		db.Execute("select ratelimit_override('p', 'k', 4)")
		require.Equal(t, kit.Held(0, lease, 4), db.Hold("c", 1), "the lease is the policy's again")
		require.Equal(t, []string{"true"}, kit.Column(t, db.DB, "select ratelimit_remove_override('p', 'k')::text"))
		require.Equal(t, never(-3, 1), db.Hold("d", 2))
	})
}

func TestPolicies_ListsTheLease(t *testing.T) {
	db := kit.ParallelDB(t).Lend("p", 5, lease, kit.Ephemeral).Policy("tokens", 1, 1, time.Second)
	require.Equal(t, []string{"(p,5,,,,f,,f,,,,00:01:00)", "(tokens,1,1,00:00:01,f,t,24:00:00,f,,,,)"}, kit.Column(t, db.DB, "select p::text from ratelimit_policies() as p"))
	db.Execute("select ratelimit_define_policy('p', lease => '2 days')")
	db.Execute("select ratelimit_define_policy('p', 7)")
	require.Equal(t, []string{"7 2 days"}, kit.Column(t, db.DB, "select capacity || ' ' || lease from ratelimit_policies() where policy = 'p'"))
}

func TestReset_FreesTheSlotsOfAKey(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 2, lease, kind).Lend("q", 2, lease, kind)
		for _, policy := range []string{"p", "q"} {
			for _, key := range []string{"k", "l"} {
				for _, holder := range []string{"a", "b"} {
					require.True(t, kit.NoError(kit.Hold(db.Pool, policy, key, holder, 1))(t).Allowed)
				}
			}
		}
		db.Reset("p", "k")
		db.Reset("p", "unknown")
		require.Equal(t, model.Never, db.Renew("a"))
		require.False(t, db.Release("b"))
		require.Equal(t, kit.Held(0, lease, 2), db.Hold("c", 2))
		require.Len(t, db.Holders("p"), 3)
		db.Execute("call ratelimit_reset_all('p')")
		require.Empty(t, db.Holders("p"))
		require.Len(t, db.Holders("q"), 4)
	})
}

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

func TestStatus_ListsTheFullestKeys(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 4, lease, kind).Policy("tokens", 4, 1, time.Minute, kind).Take("tokens", "half", 2)
		for key, cost := range map[string]int64{"k1": 1, "k2": 3, "k3": 4, "free": 2} {
			kit.NoError(kit.Hold(db.Pool, "p", key, "a", cost))(t)
		}
		kit.NoError(kit.Release(db.Pool, "p", "free", "a"))(t)
		db.Execute("select ratelimit_override('p', 'k1', 0, expires_at => $1)", at(10*kit.Second))
		status := func(args string) []string {
			return kit.Column(t, db.DB, "select format('%s %s %s %s %s', key, remaining, coalesce(retry_after::text, 'never'), reset_after, overridden) from ratelimit_status("+args+")")
		}
		require.Equal(t, []string{"k1 -1 00:00:10 00:01:00 t", "k3 0 00:01:00 00:01:00 f", "k2 1 00:00:00 00:01:00 f", "half 2 00:00:00 00:02:00 f"}, status(""))
		require.Equal(t, []string{"k1 -1 00:00:10 00:01:00 t", "k3 0 00:01:00 00:01:00 f"}, status("'p', 2"))
		require.Equal(t, []string{"k2 1 00:00:00 00:01:00 f"}, status("key => 'k2'"))
		db.Execute("select ratelimit_override('p', 'k3', 0)")
		require.Equal(t, []string{"k3 -4 never 00:01:00 t"}, status("'p', 1, 'k3'")[:1])
		db.SetClock(at(lease))
		require.Equal(t, []string{"half 3 00:00:00 00:01:00 f"}, status(""))
		require.Empty(t, db.Holders("p"))
	})
}

func TestHolders_AreListedByPolicyAndKey(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0).Lend("p", 9, lease).Lend("o", 9, time.Hour, kit.Ephemeral)
	for n, id := range []string{"p k b", "p k a", "p j c", "o k d"} {
		f := strings.Fields(id)
		db.SetClock(at(time.Duration(n) * kit.Second))
		kit.NoError(kit.Hold(db.Pool, f[0], f[1], f[2], int64(n+1)))(t)
	}
	list := func(args string) []string {
		return kit.Column(t, db.DB, "select h::text from ratelimit_holders("+args+") as h")
	}
	require.Equal(t, []string{"(o,k,d,4,01:00:00)", "(p,j,c,3,00:00:59)", "(p,k,b,1,00:00:57)", "(p,k,a,2,00:00:58)"}, list(""))
	require.Equal(t, []string{"(p,j,c,3,00:00:59)", "(p,k,b,1,00:00:57)"}, list("'p', max_rows => 2"))
	require.Equal(t, []string{"(o,k,d,4,01:00:00)", "(p,k,b,1,00:00:57)", "(p,k,a,2,00:00:58)"}, list("key => 'k'"))
}

// Clean-up removes a lease five minutes after its end, and with the last one the row of its key.
func TestCleanup_RemovesLeasesFiveMinutesAfterTheirEnd(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 5, time.Hour, kind)
		db.Hold("a", 1)
		db.HoldAt(at(30*time.Minute), "b", 1)
		db.HoldAt(at(31*time.Minute), "c", 1)
		kit.NoError(kit.Hold(db.Pool, "p", "released", "a", 1))(t)
		kit.NoError(kit.Release(db.Pool, "p", "released", "a"))(t)
		count := func() string {
			return kit.Column(t, db.DB, `select (select count(*) from (table ratelimit.slots union all table ratelimit.ephemeral_slots) as s)
				|| ' ' || (select count(*) from (table ratelimit.leases union all table ratelimit.ephemeral_leases) as l)`)[0]
		}
		const margin = 5 * time.Minute
		for _, step := range []struct {
			at      time.Duration
			deleted int64
			left    string
		}{
			{31*time.Minute + margin - kit.Us, 0, "2 3"},
			{31*time.Minute + margin, 1, "1 3"},
			{time.Hour + margin - kit.Us, 0, "1 3"},
			{time.Hour + margin, 0, "1 2"},
			{90*time.Minute + margin, 0, "1 1"},
			{91*time.Minute + margin - kit.Us, 0, "1 1"},
			{91*time.Minute + margin, 1, "0 0"},
		} {
			require.Equal(t, kit.Deleted{Buckets: step.deleted}, db.CleanupAt(at(step.at)), step.at)
			require.Equal(t, step.left, count(), step.at)
		}

		// A shorter lease, and a renewal, are noticed.
		db.Hold("a", 1)
		db.CleanupAt(at(100 * time.Minute))
		db.Execute("select ratelimit_define_policy('p', lease => '1 minute')")
		db.Renew("a")
		require.Equal(t, kit.Deleted{}, db.CleanupAt(at(101*time.Minute+margin-kit.Us)))
		require.Equal(t, kit.Deleted{Buckets: 1}, db.CleanupAt(at(101*time.Minute+margin)))
		require.Equal(t, "0 0", count())
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
