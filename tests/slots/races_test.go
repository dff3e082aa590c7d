package slots

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// A race is steps of several sessions in a fixed order. They have the outcome only because of one passage of a function: in the
// mutation without it the steps have another outcome, or fail. Most often first is a transaction, and second a call that waits for it.
type race struct {
	capacity int64                                 // of policy p; 0 is 1
	steps    func(db *kit.TestDB) (outcome string) // on policy p, with a lease of a minute, at T0
	outcome  string
	function string // empty if no passage is needed
	without  kit.Mutation
}

// holding is a transaction in which a holder holds one slot.
func holding(db *kit.TestDB, holder string) *kit.Session {
	first := db.Begin()
	first.Hold(holder, 1)
	return first
}

// decided is the decision about a hold after the end of the transaction that it waited for, and who holds then.
func decided(ended *kit.Session, second *kit.Lent) string {
	return fmt.Sprint(second.Over().HoldDecision, ended.Db.Holders("p"))
}

var races = map[string]race{
	"a hold that waits for another is denied": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			require.True(db.T, db.Release("a")) // the key has a row
			first := holding(db, "a")
			second := db.Session().StartHold("b", 1).BlockedBy(first)
			return decided(first.Execute("commit"), second)
		},
		outcome:  fmt.Sprint(kit.NotHeld(0, lease, 1)) + " [a:1]",
		function: "ratelimit_hold",
		without:  kit.Mutation{Pattern: `and s\.held <= v_policy\.capacity - v_cost`, Replacement: ""},
	},
	"a hold that waits for one that rolls back is granted, from then on": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			require.True(db.T, db.Release("a"))
			first := holding(db, "a")
			second := db.Session().StartHold("b", 1).BlockedBy(first)
			db.SetClock(at(30 * time.Second))
			first.Execute("rollback")
			require.True(db.T, second.Over().Allowed)
			return fmt.Sprint(kit.Column(db.T, db.DB, "select held_for::text from ratelimit_holders()"))
		},
		outcome:  "[00:01:00]",
		function: "ratelimit_hold",
		without:  kit.Mutation{Pattern: `v_seen_at := v_now; v_now := clock\(\);`, Replacement: "v_seen_at := v_now;"},
	},
	"a release that is committed lets the next hold": {
		capacity: 2, steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			first := holding(db, "b")
			require.True(db.T, kit.NoError(kit.Release(first, "p", "k", "a"))(db.T))
			second := db.Session().StartHold("c", 1).BlockedBy(first)
			return decided(first.Execute("commit"), second)
		},
		outcome: fmt.Sprint(kit.Held(0, lease, 2)) + " [b:1 c:1]", // after the wait, and not denied by the leases seen before
	},
	"a hold that waits counts by the capacity of after the wait": {
		capacity: 2, steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(lease))
			first := holding(db, "a")
			second := db.Session().StartHold("b", 1).BlockedBy(first)
			db.Execute("select ratelimit_define_policy('p', 1)")
			return decided(first.Execute("commit"), second)
		},
		outcome:  fmt.Sprint(kit.NotHeld(0, lease, 1)) + " [a:1]",
		function: "ratelimit_hold", without: kit.Mutation{Pattern: `v_policy := v_numbers\.policy;`, Replacement: ""},
	},
	"a hold that waits for the first of a key counts by the capacity of after the wait": {
		capacity: 2, steps: func(db *kit.TestDB) string {
			first := holding(db, "a")
			second := db.Session().StartHold("b", 1).BlockedBy(first)
			db.Execute("select ratelimit_define_policy('p', 1)")
			return decided(first.Execute("commit"), second)
		},
		outcome: fmt.Sprint(kit.NotHeld(0, lease, 1)) + " [a:1]",
	},
	"a lease that holds again when the clock goes back is in the sum": {
		capacity: 4, steps: func(db *kit.TestDB) string {
			db.Hold("a", 2)
			db.SetClock(at(lease))
			first := holding(db, "b") // a has ended
			second := db.Session().StartHold("c", 3).BlockedBy(first)
			db.SetClock(at(lease / 2)) // a holds again
			first.Execute("rollback")
			return fmt.Sprint(second.Over().Allowed, db.Hold("d", 1).Remaining)
		},
		outcome: "false 1",
	},
	"a holder whose lease clean-up has removed holds anew, by a clock that went back": {
		capacity: 2, steps: holdAcrossCleanUp("a"),
		outcome: fmt.Sprint(kit.Held(0, lease, 2)) + " [a:1 b:1]",
	},
	"an override that ends while a hold waits does not apply any more": {
		steps: func(db *kit.TestDB) string {
			db.Execute("select ratelimit_override('p', 'k', 2, expires_at => $1)", at(30*time.Second))
			db.Hold("a", 1)
			first := holding(db, "b")
			second := db.Session().StartHold("c", 1).BlockedBy(first)
			db.SetClock(at(30 * time.Second))
			return decided(first.Execute("rollback"), second)
		},
		outcome:  fmt.Sprint(kit.NotHeld(0, lease-30*time.Second, 1)) + " [a:1]",
		function: "ratelimit_hold", without: kit.Mutation{Pattern: `least\(v_until, v_numbers_end\)`, Replacement: "v_until"},
	},
	"a lease that ends while its holder waits to hold again is no renewal": {
		capacity: 2, steps: holdAcrossTheEnd("a"),
		outcome:  fmt.Sprint(kit.Held(1, lease, 2)) + " [a:1]",
		function: "ratelimit_hold", without: kit.Mutation{Pattern: `and l\.ends_at > v_now; if`, Replacement: "and l.ends_at >= v_now; if"},
	},
	"a lease that ends while another holder waits counts no more": {
		capacity: 2, steps: holdAcrossTheEnd("c"),
		outcome:  fmt.Sprint(kit.Held(1, lease, 2)) + " [c:1]",
		function: "ratelimit_hold", without: kit.Mutation{Pattern: `and v_now < least\(v_until, v_numbers_end\)`, Replacement: ""},
	},
	"a hold that waits for the first of a key counts under a lock": {
		capacity: 2, steps: func(db *kit.TestDB) string {
			gate := db.GateBefore(`update slots as s set held = v_held,`, "ratelimit_hold")
			defer gate.Remove()
			first := holding(db, "a")
			second := gate.Session().StartHold("b", 1).BlockedBy(first)
			first.Execute("commit")
			second.AwaitLockOrEnd()
			third := db.Session().StartHold("c", 1)
			third.AwaitLockOrEnd()
			gate.Open()
			return fmt.Sprint(second.Over().Allowed, third.Over().Allowed, db.Holders("p"))
		},
		outcome:  "true false [a:1 b:1]",
		function: "ratelimit_hold", without: kit.Mutation{Pattern: `if found then v_now`, Replacement: "if true then v_now"},
	},
	"a renewal that waits for a release takes nothing": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			first := db.Begin()
			require.True(db.T, kit.NoError(kit.Release(first, "p", "k", "a"))(db.T))
			second := db.Session().StartRenew("a").BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().HeldFor == model.Never, db.Holders("p"))
		},
		outcome:  "true []",
		function: "ratelimit_renew",
		without: kit.Mutation{Pattern: `update leases as l set ends_at = v_ends_at where [^;]*;`, Replacement: `
			insert into leases values (v_policy.id, v_ends_at, 1, v_key, v_holder)
			on conflict on constraint leases_pkey do update set ends_at = excluded.ends_at;`},
	},
	"a release that waits for a renewal frees the slots": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			first := db.Begin()
			kit.NoError(kit.Renew(first, "p", "k", "a"))(db.T)
			second := db.Session().StartRelease("a").BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().Released, db.Holders("p"))
		},
		outcome:  "true []",
		function: "ratelimit_release", without: kit.Mutation{Pattern: `delete from leases as l [^;]*;`, Replacement: "perform 1;"},
	},
	"a release after the end of a lease waits for a renewal from before it": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(lease / 2))
			first := db.Begin()
			kit.NoError(kit.Renew(first, "p", "k", "a"))(db.T)
			db.SetClock(at(lease))
			second := db.Session().StartRelease("a").BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().Released, db.Holders("p"))
		},
		outcome:  "true []",
		function: "ratelimit_release",
		without:  kit.Mutation{Pattern: `and l\.holder = v_holder collate "C"; if v_cost`, Replacement: "and l.holder = v_holder and l.ends_at > v_now; if v_cost"},
	},
	"a renewal after the end of a lease waits for one from before it": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(lease / 2))
			first := db.Begin()
			kit.NoError(kit.Renew(first, "p", "k", "a"))(db.T)
			db.SetClock(at(lease))
			second := db.Session().StartRenew("a").BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().HeldFor == model.Never, db.Holders("p"))
		},
		outcome:  "false [a:1]",
		function: "ratelimit_renew",
		without:  kit.Mutation{Pattern: `and l\.holder = v_holder; if found`, Replacement: "and l.holder = v_holder and l.ends_at > v_now; if found"},
	},
	"a lease that had ended counts again when the clock goes back during a wait": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(lease))
			first := holding(db, "b")
			second := db.Session().StartHold("c", 1).BlockedBy(first)
			db.SetClock(at(lease / 2))
			return decided(first.Execute("rollback"), second)
		},
		outcome:  fmt.Sprint(kit.NotHeld(0, lease/2, 1)) + " [a:1]",
		function: "ratelimit_hold", without: kit.Mutation{Pattern: `if found then v_now := clock\(\);`, Replacement: "if found then"},
	},
	"a lease ends before the sum when the clock went back while its hold waited": {
		capacity: 3, steps: func(db *kit.TestDB) string {
			db.SetClock(at(lease / 2))
			db.Hold("a", 1)
			first := holding(db, "b")
			second := db.Session().StartHold("c", 1).BlockedBy(first)
			db.SetClock(at(0))
			first.Execute("rollback")
			require.True(db.T, second.Over().Allowed)
			db.SetClock(at(lease))
			return fmt.Sprint(db.Hold("d", 1).Remaining)
		},
		outcome:  "1",
		function: "ratelimit_hold", without: kit.Mutation{Pattern: `v_now >= v_seen_at and`, Replacement: ""},
	},
	"a lease that ends while its renewal waits is not renewed": {
		capacity: 2, steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			first := holding(db, "b")
			second := db.Session().StartRenew("a").BlockedBy(first)
			db.SetClock(at(lease))
			first.Execute("rollback")
			return fmt.Sprint(second.Over().HeldFor == model.Never, db.Holders("p"))
		},
		outcome:  "true []",
		function: "ratelimit_renew",
		without:  kit.Mutation{Pattern: `and l\.holder = v_holder and l\.ends_at > v_now; elsif`, Replacement: "and l.holder = v_holder; elsif"},
	},
	"a lease that ends while its release waits was not held until then": {
		capacity: 2, steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			first := holding(db, "b")
			second := db.Session().StartRelease("a").BlockedBy(first)
			db.SetClock(at(lease))
			first.Execute("rollback")
			return fmt.Sprint(second.Over().Released)
		},
		outcome:  "false",
		function: "ratelimit_release", without: kit.Mutation{Pattern: `v_now := clock\(\); delete`, Replacement: "delete"},
	},
	"a hold that waits for clean-up creates the row of the key anew": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(time.Hour))
			first := db.Begin()
			require.Equal(db.T, kit.Deleted{Buckets: 1}, db.Swept(first, 100))
			second := db.Session().StartHold("b", 1).BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().HoldDecision, db.Hold("c", 1).Allowed, db.Number("select count(*) from ratelimit.slots"))
		},
		outcome:  fmt.Sprint(kit.Held(0, lease, 1), false, 1),
		function: "ratelimit_hold", without: kit.Mutation{Pattern: `if not found then insert`, Replacement: "if false then insert"},
	},
	"clean-up that waits for nothing looks at the leases under its lock": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			require.True(db.T, db.Release("a"))
			db.SetClock(at(time.Hour))
			defer db.Mutate(kit.Mutation{Pattern: "lock_timeout TO .100ms.", Replacement: "lock_timeout TO 0"}, "ratelimit.cleanup_batch")()
			defer db.Mutate(kit.Mutation{Pattern: `where s\.due_at <= \$1`, Replacement: "$0 and pg_advisory_xact_lock_shared(1)::text = ''''"}, "ratelimit.cleanup_slots")()
			keeper := db.Session().Execute("select pg_advisory_lock(1)")
			batch := db.Session().StartExec("select ratelimit_cleanup(100)").BlockedBy(keeper)
			db.Hold("b", 1) // after the snapshot of the batch, and before its lock
			keeper.Execute("select pg_advisory_unlock(1)")
			batch.Answer()
			return fmt.Sprint(db.Holders("p"), db.Number("select count(*) from ratelimit.slots"))
		},
		outcome:  "[b:1] 1",
		function: "ratelimit.cleanup_slots",
		without:  kit.Mutation{Pattern: `where not exists \(select from %2\$s as l where [^)]*\)`, Replacement: ""},
	},
	"a denied holder that holds by the second look is renewed": {
		steps: func(db *kit.TestDB) string {
			db.Hold("x", 1)
			gate := db.GateBefore(`select l\.\* into v_look`, "ratelimit_hold")
			defer gate.Remove()
			second := gate.Session().StartHold("a", 1).BlockedBy(gate.Keeper)
			require.True(db.T, db.Release("x"))
			db.Hold("a", 1)
			gate.Open()
			return fmt.Sprint(second.Over().HoldDecision)
		},
		outcome:  fmt.Sprint(kit.Renewed(kit.Held(0, lease, 1))),
		function: "ratelimit_hold",
		without:  kit.Mutation{Pattern: `not v_look\.holds and`, Replacement: ""},
	},
	"a denial uses the shadow flag of the policy that it reports": {
		steps: func(db *kit.TestDB) string {
			db.Hold("x", 1)
			gate := db.GateBefore(`select l\.\* into v_look`, "ratelimit_hold")
			defer gate.Remove()
			second := gate.Session().StartHold("a", 1).BlockedBy(gate.Keeper)
			db.Execute("select ratelimit_define_policy('p', shadow => true)")
			gate.Open()
			return fmt.Sprint(second.Over().Shadowed)
		},
		outcome:  "true",
		function: "ratelimit_hold", without: kit.Mutation{Pattern: `if v_look\.shadow then`, Replacement: "if v_policy.shadow then"},
	},
	"a renewal whose row clean-up has removed renews no later lease": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			db.SetClock(at(time.Hour))
			first := db.Begin()
			require.Equal(db.T, kit.Deleted{Buckets: 1}, db.Swept(first, 100))
			gate := db.GateBefore(`v_now := clock\(\); if v_override\.expires_at`, "ratelimit_renew")
			defer gate.Remove()
			second := gate.Session().StartRenew("a").BlockedBy(first)
			first.Execute("commit")
			second.BlockedBy(gate.Keeper)
			db.Hold("a", 1)
			gate.Open()
			return fmt.Sprint(second.Over().HeldFor == model.Never)
		},
		outcome:  "true",
		function: "ratelimit_renew", without: kit.Mutation{Pattern: `where v_locked and`, Replacement: "where"},
	},
	"a reset of a key without a row deletes no lease of later": {
		steps: func(db *kit.TestDB) string {
			first := holding(db, "a")
			gate := db.GateBefore(`delete from leases as l`, "ratelimit_reset")
			defer gate.Remove()
			reset := gate.Session().StartExec("select ratelimit_reset('p', 'k')")
			reset.AwaitLockOrEnd()
			first.Execute("commit")
			gate.Open()
			reset.Answer()
			return fmt.Sprint(db.Holders("p"))
		},
		outcome:  "[a:1]",
		function: "ratelimit_reset",
		without:  kit.Mutation{Pattern: `if found then delete from leases`, Replacement: "if true then delete from leases"},
	},
	"a hold that waits for clean-up counts again, by a clock that went back": {
		capacity: 3, steps: holdAcrossCleanUp("c"),
		outcome:  fmt.Sprint(kit.Held(1, lease, 3)) + " [b:1 c:1]",
		function: "ratelimit.cleanup_slots", without: kit.Mutation{Pattern: `counted_until = ''-infinity'',`, Replacement: ""},
	},
	"a lease that ends while its release waits is in the sum when the clock went back": {
		steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			first := db.Begin().Execute("select ratelimit_renew('p', 'k', 'a')")
			second := db.Session().StartRelease("a").BlockedBy(first)
			db.SetClock(at(lease))
			first.Execute("rollback")
			released := second.Over().Released
			db.SetClock(at(lease / 2))
			return fmt.Sprint(released, db.Hold("b", 1).Allowed)
		},
		outcome:  "false false",
		function: "ratelimit_release",
		without:  kit.Mutation{Pattern: `if v_released = v_cost then return true; end if;`, Replacement: "return v_released is not null;"},
	},
	"a release of a lease that has another cost by then takes that cost from the sum": {
		capacity: 3, steps: func(db *kit.TestDB) string {
			db.Hold("a", 1)
			first := db.Begin().Execute("select ratelimit_release('p', 'k', 'a')")
			first.Hold("a", 2)
			second := db.Session().StartRelease("a").BlockedBy(first)
			first.Execute("commit")
			return fmt.Sprint(second.Over().Released, db.Hold("b", 1).Remaining)
		},
		outcome:  "true 2",
		function: "ratelimit_release",
		without:  kit.Mutation{Pattern: `if v_released = v_cost then return true; end if;`, Replacement: "return v_released is not null;"},
	},
	"a renewal ends before the sum when the clock went back while it waited": {
		capacity: 2, steps: func(db *kit.TestDB) string {
			db.SetClock(at(lease / 2))
			db.Hold("a", 1)
			first := db.Begin().Execute("select ratelimit_renew('p', 'k', 'a')")
			second := db.Session().StartRenew("a").BlockedBy(first)
			db.SetClock(at(0))
			first.Execute("commit")
			second.Over()
			db.SetClock(at(lease))
			return fmt.Sprint(db.Hold("b", 1).Remaining)
		},
		outcome:  "1",
		function: "ratelimit_renew", without: kit.Mutation{Pattern: `if v_ends_at < v_earlier then`, Replacement: "if false then"},
	},
	"a grant that does not follow leaves no sum behind": {
		steps: func(db *kit.TestDB) string {
			db.Execute("select ratelimit_override('p', 'k', 4, expires_at => $1)", at(lease/2))
			db.Hold("a", 1)
			first := holding(db, "b")
			second := db.Session().StartHold("c", 3).BlockedBy(first)
			db.SetClock(at(lease / 2)) // the override has ended
			first.Execute("rollback")
			denied := !second.Over().Allowed
			db.Execute("select ratelimit_define_policy('p', 10)")
			return fmt.Sprint(denied, db.Hold("d", 1).Remaining)
		},
		outcome:  "true 8",
		function: "ratelimit_hold",
		without:  kit.Mutation{Pattern: `set counted_until = '-infinity'`, Replacement: "set counted_until = s.counted_until"},
	},
}

// holdAcrossTheEnd has a holder wait for another session, while the lease of a ends.
func holdAcrossTheEnd(holder string) func(db *kit.TestDB) string {
	return func(db *kit.TestDB) string {
		db.Hold("a", 1)
		first := holding(db, "b")
		second := db.Session().StartHold(holder, 1).BlockedBy(first)
		db.SetClock(at(lease))
		return decided(first.Execute("rollback"), second)
	}
}

// holdAcrossCleanUp holds when clean-up has removed a's lease, and not b's, by a clock that goes back.
func holdAcrossCleanUp(holder string) func(db *kit.TestDB) string {
	return func(db *kit.TestDB) string {
		db.Hold("a", 1)
		db.SetClock(at(lease / 2))
		db.Hold("b", 1)
		db.SetClock(at(lease + 5*time.Minute))
		first := db.Begin()
		db.Swept(first, 100)
		db.SetClock(at(lease / 2))
		second := db.Session().StartHold(holder, 1).BlockedBy(first)
		return decided(first.Execute("commit"), second)
	}
}

func TestHold_Races(t *testing.T) {
	kit.InParallel(t, races, func(t *testing.T, r race) {
		capacity := max(1, r.capacity)
		db := kit.NewDB(t).At(kit.T0).Lend("p", capacity, lease)
		require.Equal(t, r.outcome, r.steps(db))

		if r.function == "" {
			return
		}
		db.Execute("select ratelimit_drop_policy('p')")
		db.At(kit.T0).Lend("p", capacity, lease)
		db.Mutate(r.without, r.function)
		other := r.stepsThatMayFail(db)
		t.Logf("without it: %q", other)
		require.NotEqual(t, r.outcome, other, "the race does not need %s", r.without.Pattern)
	})
}

// stepsThatMayFail returns no outcome if a step fails, which does not fail the test.
func (r race) stepsThatMayFail(db *kit.TestDB) string {
	defer func(t testing.TB) {
		db.T = t
		if p := recover(); p != nil && p != any(errStepFailed) {
			panic(p)
		}
	}(db.T)
	db.T = &mayFail{db.T}
	return r.steps(db)
}

var errStepFailed = errors.New("a step failed")

// mayFail is a test that stops at the first failure and does not fail.
type mayFail struct{ testing.TB }

func (f *mayFail) Errorf(string, ...any) {}
func (f *mayFail) FailNow()              { panic(errStepFailed) }

// Under the stricter isolation levels a grant fails if the leases were changed since the snapshot. A mere lock would not tell.
func TestHold_FailsOnASnapshotOlderThanTheLeases(t *testing.T) {
	t.Parallel()
	for change, call := range map[string]string{
		"a grant": "ratelimit_hold('p', 'k', 'b')", "a renewal": "ratelimit_renew('p', 'k', 'a')", "a release": "ratelimit_release('p', 'k', 'a')",
		"a reset": "ratelimit_reset('p', 'k')",
	} {
		for _, level := range []string{"repeatable read", "serializable"} {
			t.Run(change+" "+level, func(t *testing.T) {
				db := kit.ParallelDB(t).At(kit.T0).Lend("p", 2, lease)
				db.Hold("a", 1)
				for _, stale := range []string{"hold('p', 'k', 'c')", "renew('p', 'k', 'a')", "release('p', 'k', 'a')"} {
					s := db.Session().Execute("begin isolation level " + level).Execute("select 1 from ratelimit_policies()")
					db.Execute("select " + call)
					kit.RequireState(t, "40001", kit.ErrorOf(s.Exec(t.Context(), "select ratelimit_"+stale)))
					s.Execute("rollback")
					db.Reset("p", "k")
					db.Hold("a", 1)
				}
			})
		}
	}
}

// A transaction that stalls holds up its own key, and there only calls that would write.
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
