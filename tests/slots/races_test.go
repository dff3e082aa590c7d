package slots

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// A race has its steps in the order in which they happen. outcome is what came of it. Without the passage that the mutation changes,
// in ratelimit_hold or another function, something else comes of it.
type race struct {
	steps    func(t *testing.T, db *kit.TestDB) (outcome string)
	outcome  string
	without  kit.Mutation
	function string
}

// On policy p, of capacity 1 and a lease of a minute, at T0.
var races = map[string]race{
	"a hold that waits for another is denied": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			require.True(t, db.Release("a")) // the key has a row
			first := db.Begin()
			first.Hold("a", 1)
			second := db.Session().StartHold("b", 1).BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().HoldDecision, db.Holders("p"))
		},
		fmt.Sprint(kit.NotHeld(0, lease, 1)) + " [a:1]",
		kit.Mutation{Pattern: `and s\.key = v_key and s\.changes = v_changes`, Replacement: "and s.key = v_key"}, "ratelimit_hold",
	},
	"a hold that waits for the first of a key is denied": {
		func(_ *testing.T, db *kit.TestDB) string {
			first := db.Begin()
			first.Hold("a", 1)
			second := db.Session().StartHold("b", 1).BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().HoldDecision, db.Holders("p"))
		},
		fmt.Sprint(kit.NotHeld(0, lease, 1)) + " [a:1]",
		kit.Mutation{Pattern: `v_written := found;`, Replacement: "v_written := true;"}, "ratelimit_hold",
	},
	"a hold that waits for one that rolls back is granted, from then on": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			require.True(t, db.Release("a"))
			first := db.Begin()
			first.Hold("a", 1)
			second := db.Session().StartHold("b", 1).BlockedBy(first)
			db.SetClock(at(30 * time.Second))
			first.Execute("rollback")
			require.True(t, second.Over().Allowed)
			return fmt.Sprint(kit.Column(t, db.DB, "select held_for::text from ratelimit_holders()"))
		},
		"[00:01:00]",
		kit.Mutation{Pattern: `v_seen_at := v_now; v_now := clock\(\);`, Replacement: "v_seen_at := v_now;"}, "ratelimit_hold",
	},
	"a release that is committed lets the next hold": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Execute("select ratelimit_define_policy('p', 2)")
			db.Hold("a", 1)
			first := db.Begin()
			first.Hold("b", 1)
			require.True(t, kit.NoError(kit.Release(first, "p", "k", "a"))(t))
			second := db.Session().StartHold("c", 1).BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().HoldDecision, db.Holders("p"))
		},
		fmt.Sprint(kit.Held(0, lease, 2)) + " [b:1 c:1]",
		kit.Mutation{}, "", // it waits, and may not be denied by what it saw before
	},
	"a hold that waits counts by the capacity of after the wait": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Execute("select ratelimit_define_policy('p', 2)")
			first := db.Begin()
			first.Hold("a", 1)
			second := db.Session().StartHold("b", 1).BlockedBy(first)
			db.Execute("select ratelimit_define_policy('p', 1)")
			first.Execute("commit")
			return fmt.Sprint(second.Over().HoldDecision, db.Holders("p"))
		},
		fmt.Sprint(kit.NotHeld(0, lease, 1)) + " [a:1]",
		kit.Mutation{Pattern: `v_policy := numbers_again\(v_policy, v_key, v_now\);`, Replacement: ""}, "ratelimit_hold",
	},
	"an override that ends while a hold waits does not apply any more": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Execute("select ratelimit_override('p', 'k', 2, expires_at => $1)", at(30*time.Second))
			db.Hold("a", 1)
			first := db.Begin()
			first.Hold("b", 1)
			second := db.Session().StartHold("c", 1).BlockedBy(first)
			db.SetClock(at(30 * time.Second))
			first.Execute("rollback")
			return fmt.Sprint(second.Over().HoldDecision, db.Holders("p"))
		},
		fmt.Sprint(kit.NotHeld(0, lease-30*time.Second, 1)) + " [a:1]",
		kit.Mutation{Pattern: `and \(v_policy\.calendar\)\.ends_at > v_now\)`, Replacement: ")"}, "ratelimit_hold",
	},
	"a lease that ends while its holder waits to hold again is no renewal": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Execute("select ratelimit_define_policy('p', 2)")
			db.Hold("a", 1)
			first := db.Begin()
			first.Hold("b", 1)
			second := db.Session().StartHold("a", 1).BlockedBy(first)
			db.SetClock(at(lease))
			first.Execute("rollback")
			return fmt.Sprint(second.Over().HoldDecision, db.Holders("p"))
		},
		fmt.Sprint(kit.Held(1, lease, 2)) + " [a:1]",
		kit.Mutation{Pattern: `\(v_until > v_now and`, Replacement: "(true and"}, "ratelimit_hold",
	},
	"a renewal that waits for a release takes nothing": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			first := db.Begin()
			require.True(t, kit.NoError(kit.Release(first, "p", "k", "a"))(t))
			second := db.Session().StartRenew("a").BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().HeldFor == model.Never, db.Holders("p"))
		},
		"true []",
		kit.Mutation{Pattern: `update leases as l set ends_at = v_ends_at where [^;]*;`, Replacement: `
			insert into leases values (v_policy.id, v_ends_at, 1, v_key, v_holder)
			on conflict on constraint leases_pkey do update set ends_at = excluded.ends_at;`}, "ratelimit_renew",
	},
	"a release that waits for a renewal frees the slots": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			first := db.Begin()
			kit.NoError(kit.Renew(first, "p", "k", "a"))(t)
			second := db.Session().StartRelease("a").BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().Released, db.Holders("p"))
		},
		"true []",
		kit.Mutation{Pattern: `delete from leases as l [^;]*;`, Replacement: "perform 1;"}, "ratelimit_release",
	},
	"a release after the end of a lease waits for a renewal from before it": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(lease / 2))
			first := db.Begin()
			kit.NoError(kit.Renew(first, "p", "k", "a"))(t)
			db.SetClock(at(lease))
			second := db.Session().StartRelease("a").BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().Released, db.Holders("p"))
		},
		"true []",
		kit.Mutation{Pattern: `and l\.holder = v_holder; if not found`, Replacement: "and l.holder = v_holder and l.ends_at > v_now; if not found"}, "ratelimit_release",
	},
	"a renewal after the end of a lease waits for one from before it": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(lease / 2))
			first := db.Begin()
			kit.NoError(kit.Renew(first, "p", "k", "a"))(t)
			db.SetClock(at(lease))
			second := db.Session().StartRenew("a").BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().HeldFor == model.Never, db.Holders("p"))
		},
		"false [a:1]",
		kit.Mutation{Pattern: `and l\.holder = v_holder; if found`, Replacement: "and l.holder = v_holder and l.ends_at > v_now; if found"}, "ratelimit_renew",
	},
	"a lease that had ended counts again when the clock goes back during a wait": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(lease))
			first := db.Begin()
			first.Hold("b", 1)
			second := db.Session().StartHold("c", 1).BlockedBy(first)
			db.SetClock(at(lease / 2))
			first.Execute("rollback")
			return fmt.Sprint(second.Over().HoldDecision, db.Holders("p"))
		},
		fmt.Sprint(kit.NotHeld(0, lease/2, 1)) + " [a:1]",
		kit.Mutation{Pattern: `and v_now >= v_seen_at`, Replacement: ""}, "ratelimit_hold",
	},
	"a lease that ends while its renewal waits is not renewed": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Execute("select ratelimit_define_policy('p', 2)")
			db.Hold("a", 1)
			first := db.Begin()
			first.Hold("b", 1)
			second := db.Session().StartRenew("a").BlockedBy(first)
			db.SetClock(at(lease))
			first.Execute("rollback")
			return fmt.Sprint(second.Over().HeldFor == model.Never, db.Holders("p"))
		},
		"true []",
		kit.Mutation{Pattern: `and l\.holder = v_holder and l\.ends_at > v_now; end if;`, Replacement: "and l.holder = v_holder; end if;"}, "ratelimit_renew",
	},
	"a lease that ends while its release waits was not held until then": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Execute("select ratelimit_define_policy('p', 2)")
			db.Hold("a", 1)
			first := db.Begin()
			first.Hold("b", 1)
			second := db.Session().StartRelease("a").BlockedBy(first)
			db.SetClock(at(lease))
			first.Execute("rollback")
			return fmt.Sprint(second.Over().Released)
		},
		"false",
		kit.Mutation{Pattern: `v_now := clock\(\); delete`, Replacement: "delete"}, "ratelimit_release",
	},
	"a hold that waits for clean-up creates the row of the key anew": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(time.Hour))
			first := db.Begin()
			require.Equal(t, kit.Deleted{Buckets: 1}, db.Swept(first, 100))
			second := db.Session().StartHold("b", 1).BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().HoldDecision, db.Hold("c", 1).Allowed, db.Number("select count(*) from ratelimit.slots"))
		},
		fmt.Sprint(kit.Held(0, lease, 1), false, 1),
		kit.Mutation{Pattern: `exit when v_written and`, Replacement: "exit when true or"}, "ratelimit_hold",
	},
	"clean-up that waits for nothing looks at the leases under its lock": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			require.True(t, db.Release("a"))
			db.SetClock(at(time.Hour))
			defer db.Mutate(kit.Mutation{Pattern: "lock_timeout TO .100ms.", Replacement: "lock_timeout TO 0"}, "ratelimit.cleanup_batch")()
			defer db.Mutate(kit.Mutation{Pattern: `where s\.due_at <= \$1`, Replacement: "$0 and pg_advisory_xact_lock_shared(1)::text = ''''"}, "ratelimit.cleanup_slots")()
			keeper := db.Session().Run("select pg_advisory_lock(1)")
			batch := db.Session().StartExec("select ratelimit_cleanup(100)").BlockedBy(keeper)
			db.Hold("b", 1) // after the snapshot of the batch, and before its lock
			keeper.Execute("select pg_advisory_unlock(1)")
			batch.Answer()
			return fmt.Sprint(db.Holders("p"), db.Number("select count(*) from ratelimit.slots"))
		},
		"[b:1] 1",
		kit.Mutation{Pattern: `where not exists \(select from %2\$s as l where [^)]*\)`, Replacement: ""}, "ratelimit.cleanup_slots",
	},
	"a denial is none of a holder that holds by then": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Hold("x", 1)
			keeper, second := stopBefore(db, `select l\.\* into v_look`, "ratelimit_hold", func(s *kit.Session) *kit.Lent { return s.StartHold("a", 1) })
			require.True(t, db.Release("x"))
			db.Hold("a", 1)
			keeper.Execute("select pg_advisory_unlock(1)")
			return fmt.Sprint(second.Over().HoldDecision)
		},
		fmt.Sprint(kit.Renewed(kit.Held(0, lease, 1))),
		kit.Mutation{Pattern: `case when v_look\.holds then 0 else v_look\.retry_us end`, Replacement: "v_look.retry_us"}, "ratelimit_hold",
	},
	"a denial is by the policy whose numbers it tells": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Hold("x", 1)
			keeper, second := stopBefore(db, `select l\.\* into v_look`, "ratelimit_hold", func(s *kit.Session) *kit.Lent { return s.StartHold("a", 1) })
			db.Execute("select ratelimit_define_policy('p', shadow => true)")
			keeper.Execute("select pg_advisory_unlock(1)")
			return fmt.Sprint(second.Over().Shadowed)
		},
		"true",
		kit.Mutation{Pattern: `and v_look\.shadow then`, Replacement: "and v_policy.shadow then"}, "ratelimit_hold",
	},
	"a renewal whose row clean-up has removed renews no later lease": {
		func(t *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(time.Hour))
			first := db.Begin()
			require.Equal(t, kit.Deleted{Buckets: 1}, db.Swept(first, 100))
			defer db.Mutate(kit.Mutation{Pattern: `v_locked := found;`, Replacement: "$0 perform pg_advisory_xact_lock_shared(1);"}, "ratelimit_renew")()
			keeper := db.Session().Run("select pg_advisory_lock(1)")
			second := db.Session().StartRenew("a").BlockedBy(first)
			first.Execute("commit")
			second.BlockedBy(keeper)
			db.Hold("a", 1)
			keeper.Execute("select pg_advisory_unlock(1)")
			return fmt.Sprint(second.Over().HeldFor == model.Never)
		},
		"true",
		kit.Mutation{Pattern: `where v_locked and`, Replacement: "where"}, "ratelimit_renew",
	},
	"a reset of a key without a row deletes no lease of later": {
		func(_ *testing.T, db *kit.TestDB) string {
			first := db.Begin()
			first.Hold("a", 1)
			defer db.Mutate(kit.Mutation{Pattern: `delete from leases as l`, Replacement: "perform pg_advisory_xact_lock_shared(1); $0"}, "ratelimit.reset_slots")()
			keeper := db.Session().Run("select pg_advisory_lock(1)")
			reset := db.Session().StartExec("select ratelimit_reset('p', 'k')")
			reset.AwaitLockOrEnd()
			first.Execute("commit")
			keeper.Execute("select pg_advisory_unlock(1)")
			reset.Answer()
			return fmt.Sprint(db.Holders("p"))
		},
		"[a:1]",
		kit.Mutation{Pattern: `if not found then return;`, Replacement: "if false then return;"}, "ratelimit.reset_slots",
	},
	"a hold that waits for clean-up counts again, by a clock that went back": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Execute("select ratelimit_define_policy('p', 2)")
			db.Hold("a", 1)
			db.SetClock(at(lease / 2))
			db.Hold("b", 1)
			db.SetClock(at(lease + 5*time.Minute))
			first := db.Begin()
			db.Swept(first, 100) // a's lease, and not b's
			db.SetClock(at(lease / 2))
			second := db.Session().StartHold("a", 1).BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().HoldDecision, db.Holders("p"))
		},
		fmt.Sprint(kit.Held(0, lease, 2)) + " [a:1 b:1]",
		kit.Mutation{Pattern: `set changes = changes \+ 1,`, Replacement: "set"}, "ratelimit.cleanup_slots",
	},
	"a lease that ends while its release waits is in the sum when the clock went back": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Hold("a", 1)
			first := db.Begin()
			first.Run("select ratelimit_renew('p', 'k', 'a')")
			second := db.Session().StartRelease("a").BlockedBy(first)
			db.SetClock(at(lease))
			first.Execute("rollback")
			released := second.Over().Released
			db.SetClock(at(lease / 2))
			return fmt.Sprint(released, db.Hold("b", 1).Allowed)
		},
		"false false",
		kit.Mutation{Pattern: `if v_released is distinct from v_cost then`, Replacement: "if false then"}, "ratelimit_release",
	},
	"a release of a lease that has another cost by then takes that cost from the sum": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Execute("select ratelimit_define_policy('p', 3)")
			db.Hold("a", 1)
			first := db.Begin()
			first.Run("select ratelimit_release('p', 'k', 'a')")
			first.Hold("a", 2)
			second := db.Session().StartRelease("a").BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().Released, db.Hold("b", 1).Remaining)
		},
		"true 2",
		kit.Mutation{Pattern: `if v_released is distinct from v_cost then`, Replacement: "if false then"}, "ratelimit_release",
	},
	"a renewal ends before the sum when the clock went back while it waited": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Execute("select ratelimit_define_policy('p', 2)")
			db.SetClock(at(lease / 2))
			db.Hold("a", 1)
			first := db.Begin()
			first.Run("select ratelimit_renew('p', 'k', 'a')")
			second := db.Session().StartRenew("a").BlockedBy(first)
			db.SetClock(at(0))
			first.Execute("commit")
			second.Over()
			db.SetClock(at(lease))
			return fmt.Sprint(db.Hold("b", 1).Remaining)
		},
		"1",
		kit.Mutation{Pattern: `if v_ends_at < v_earlier then`, Replacement: "if false then"}, "ratelimit_renew",
	},
	"a grant that does not follow leaves no sum behind": {
		func(_ *testing.T, db *kit.TestDB) string {
			db.Execute("select ratelimit_define_policy('p', 4)")
			db.Hold("a", 2)
			db.SetClock(at(lease))
			first := db.Begin()
			first.Hold("b", 1) // a has ended
			second := db.Session().StartHold("c", 3).BlockedBy(first)
			db.SetClock(at(lease / 2)) // a holds again
			first.Execute("rollback")
			return fmt.Sprint(second.Over().Allowed, db.Hold("d", 1).Remaining)
		},
		"false 1",
		kit.Mutation{Pattern: `set counted_until = '-infinity'`, Replacement: "set counted_until = s.counted_until"}, "ratelimit_hold",
	},
}

// stopBefore makes a call that waits at a passage of a function until the keeper unlocks it.
func stopBefore(db *kit.TestDB, passage, function string, call func(s *kit.Session) *kit.Lent) (keeper *kit.Session, waits *kit.Lent) {
	defer db.Mutate(kit.Mutation{Pattern: passage, Replacement: "perform pg_advisory_xact_lock_shared(1); $0"}, function)()
	keeper = db.Session().Run("select pg_advisory_lock(1)")
	return keeper, call(db.Session()).BlockedBy(keeper)
}

func TestRace(t *testing.T) {
	kit.InParallel(t, races, func(t *testing.T, r race) {
		db := kit.NewDB(t).At(kit.T0).Lend("p", 1, lease)
		require.Equal(t, r.outcome, r.steps(t, db))

		if r.function == "" {
			return
		}
		db.Execute("select ratelimit_drop_policy('p')")
		db.At(kit.T0).Lend("p", 1, lease)
		db.Mutate(r.without, r.function)
		mutated := &mayFail{TB: t}
		db.T = mutated
		outcome := make(chan string, 1)
		go func() {
			defer func() { _ = recover(); close(outcome) }()
			outcome <- r.steps(t, db)
		}()
		other := <-outcome
		t.Logf("without it: %q", other)
		require.NotEqual(t, r.outcome, other, "the race does not need %s", r.without.Pattern)
		db.T = t
	})
}

// mayFail is the test of mutated code, which may also fail with an error.
type mayFail struct{ testing.TB }

func (f *mayFail) Errorf(string, ...any) {}
func (f *mayFail) FailNow()              { panic("failed") }

// Under the stricter isolation levels a grant fails if the leases were changed since the snapshot. A mere lock would not tell.
func TestHold_SnapshotIsolation(t *testing.T) {
	t.Parallel()
	for change, call := range map[string]string{
		"a grant": "ratelimit_hold('p', 'k', 'b')", "a renewal": "ratelimit_renew('p', 'k', 'a')", "a release": "ratelimit_release('p', 'k', 'a')",
		"a reset": "ratelimit_reset('p', 'k')",
	} {
		for _, level := range []string{"repeatable read", "serializable"} {
			t.Run(change+" "+level, func(t *testing.T) {
				db := kit.ParallelDB(t).At(kit.T0).Lend("p", 2, lease)
				db.Hold("a", 1)
				for _, of := range []string{"hold('p', 'k', 'c')", "renew('p', 'k', 'a')", "release('p', 'k', 'a')"} {
					s := db.Session().Run("begin isolation level " + level).Run("select 1 from ratelimit_policies()")
					db.Execute("select " + call)
					kit.RequireState(t, "40001", kit.ErrorOf(s.Exec(t.Context(), "select ratelimit_"+of)))
					s.Execute("rollback")
					db.Reset("p", "k")
					db.Hold("a", 1)
				}
			})
		}
	}
}

// A transaction that stalls holds up its own key, and there only who could be granted.
func TestHold_AStalledTransactionHoldsUpItsKeyOnly(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 2, lease, kind)
		db.Hold("a", 1)
		stalled := db.Begin()
		stalled.Hold("b", 1)
		hasty := db.Hasty()
		require.True(t, kit.NoError(kit.Hold(hasty, "p", "other", "c", 2))(t).Allowed)
		require.Equal(t, kit.NotHeld(1, lease, 2), hasty.Hold("c", 2), "the committed leases alone exceed the capacity")
		require.Equal(t, model.Never, kit.NoError(kit.Renew(hasty, "p", "k", "c"))(t))
		require.False(t, kit.NoError(kit.Release(hasty, "p", "k", "c"))(t))
		for _, call := range []string{"hold('p', 'k', 'c')", "renew('p', 'k', 'a')", "release('p', 'k', 'a')"} {
			before := db.LeaseRows()
			kit.RequireState(t, "55P03", kit.ErrorOf(hasty.Exec(t.Context(), "select ratelimit_"+call)))
			require.Equal(t, before, db.LeaseRows(), call)
		}
		stalled.Execute("rollback")
		require.Equal(t, kit.Held(0, lease, 2), hasty.Hold("c", 1))
	})
}

// Of concurrent holds of one key, exactly those that fit are granted.
func TestHold_Concurrency(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		t.Run(name, func(t *testing.T) {
			db := kit.NewCrowdDB(t, 30).Lend("p", 20, time.Hour, kind)
			for round := range 5 {
				var granted atomic.Int64
				kit.Crowd(t, 60, func(caller int) error {
					d, err := kit.Hold(db.Pool, "p", "k", fmt.Sprint(round, " ", caller), int64(1+caller%3))
					if d.Allowed {
						granted.Add(int64(1 + caller%3))
					}
					return err
				})
				require.EqualValues(t, 20, granted.Load())
				kit.Crowd(t, 60, func(caller int) error {
					return kit.ErrorOf(kit.Release(db.Pool, "p", "k", fmt.Sprint(round, " ", caller)))
				})
				require.Equal(t, kit.Allowed(20, 0, 20), db.Must(kit.Peek(db.Pool, "p", "k", 20)))
			}
		})
	}
}
