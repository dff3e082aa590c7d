// Package acquire tests what a decision is, beside the model of tests/torture: published vectors, retry_after as a promise, quotas, races of
// idempotency keys and of batches, transactions, collations, changes of policies, and the fake.
package acquire

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/pgratelimit/pgratelimit/tests/vectors"
	"github.com/stretchr/testify/require"
)

// Two acquires in one transaction are made by two readings of the clock, and none is when the
// transaction began: what it stores gives the next caller nothing for the time before.
func TestClock_IsReadInsideTheCall(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, time.Hour)
	ctx := context.Background()
	tx := kit.NoError(db.Pool.Begin(ctx))(t)
	defer tx.Rollback(ctx)
	began := kit.One[time.Time](t, tx, "select now()")
	require.EqualValues(t, 7, db.Acquire("p", "k", 3).Remaining) // another session, later
	others := db.Bucket("p", "k").RefilledAt
	require.Greater(t, others, began)
	refilledAt := func() time.Time { return kit.One[time.Time](t, tx, "select refilled_at from ratelimit.buckets").UTC() }
	db.Must(kit.Acquire(tx, "p", "k", 1))
	first := refilledAt()
	db.Must(kit.Acquire(tx, "p", "k", 1))
	second := refilledAt()
	require.Less(t, others, first)
	require.Less(t, first, second)
	require.NoError(t, tx.Commit(ctx))
	require.EqualValues(t, 5, db.Must(kit.Peek(db.Pool, "p", "k", 1)).Remaining)
}

// Each of two changes is fine beside the policy that it found, and together they would not be.
func TestPolicyChange_TwoAtATimeAreCheckedTogether(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 1000, 1000, time.Hour)
	first, second := db.Begin(), db.Session()
	first.Execute("select ratelimit_define_policy('p', capacity => 10000000000)")
	call := second.Start(func(kit.Querier) (kit.Decision, error) {
		_, err := second.Exec(context.Background(), "select ratelimit_define_policy('p', refill => 1)")
		return kit.Decision{}, err
	})
	call.BlockedBy(first)
	first.Execute("commit")
	_, err := call.Result()
	require.Equal(t, "22023", kit.SQLState(err), "%v", err)
}

// To look a name up reads every file of the time zones. So only a zone that is named is checked, and not that of the policy.
func TestPolicyChange_ChecksOnlyATimeZoneThatItNames(t *testing.T) {
	db := kit.ParallelDB(t)
	db.Execute("select ratelimit_define_policy('p', 10, period => '1 day', time_zone => 'Europe/Berlin')")
	db.Execute("update ratelimit.policies set time_zone = 'Europe/Atlantis'")
	db.Execute("select from ratelimit_override('p', 'k', capacity => 20), ratelimit_define_policy('p', 15)")
	_ = db.Refused("22023", "select ratelimit_override('p', 'k', time_zone => 'Europe/Atlantis')")
	db.Execute("select ratelimit_override('p', 'k', capacity => 20, time_zone => 'UTC')")
	require.EqualValues(t, 19, db.Acquire("p", "k", 1).Remaining)
}

// A change is dated and signed, and what changes nothing writes nothing. The flag of a policy's first override is no change of it.
func TestPolicyChange_HasItsTimeAndItsRole(t *testing.T) {
	t.Parallel()
	role := kit.NewRole(t) // which goes after the database
	db := kit.NewDB(t)
	db.Execute("grant execute on function ratelimit_define_policy, ratelimit_override to " + role)
	me := kit.Column(t, db.DB, "select session_user::text")[0]
	session := db.Session()
	for i, step := range []struct{ call, policy, override string }{
		{"ratelimit_define_policy('p', 10, 1, '1 s')", "0 " + me, ""},
		{"ratelimit_define_policy('p', 10, every => '1000 ms')", "0 " + me, ""},
		{"ratelimit_override('p', 'k', 20)", "0 " + me, "2 " + me},
		{"ratelimit_override('p', 'k', 20)", "0 " + me, "2 " + me},
		{"ratelimit_override('p', 'k', 20, expires_at => '2100-01-01')", "0 " + me, "4 " + me},
		{"ratelimit_override('p', 'k', expires_at => '2100-01-01')", "0 " + me, "4 " + me},
		{"set role", "0 " + me, "4 " + me},
		{"ratelimit_define_policy('p', shadow => true)", "7 " + me + "/" + role, "4 " + me},
		{"ratelimit_override('p', 'k', expires_at => '2100-01-02')", "7 " + me + "/" + role, "8 " + me + "/" + role},
	} {
		db.SetClock(kit.T0.Add(time.Duration(i) * time.Second))
		if step.call == "set role" {
			session.Execute("set role " + role)
			continue
		}
		rows := func() []string {
			return kit.Column(t, db.DB, "select p.xmin::text from ratelimit.policies as p where not overridden union all select xmin::text from ratelimit.overrides")
		}
		before := rows()
		session.Execute("select from " + step.call)
		if i%2 == 1 && i < 6 {
			require.Equal(t, before, rows(), "%d", i)
		}
		changed := func(from string) string {
			return strings.Join(slices.Compact(kit.Column(t, db.DB, "select extract(epoch from changed_at - '2024-03-30 12:00Z')::integer || ' ' || changed_by from "+from)), ", ")
		}
		require.Equal(t, step.policy, changed("ratelimit_policies()"), "%d", i)
		require.Equal(t, step.override, changed("ratelimit_overrides()"), "%d", i)
	}
}

// Two patches of one key, or a patch and a change of the policy: the second waits, and adds to the first.
func TestOverride_OfTwoPatchesBothCount(t *testing.T) {
	patch, change := "select ratelimit_override('p', 'k', 20)", "select ratelimit_define_policy('p', 15, every => '2 seconds')"
	kit.OnDBs(t, map[string][]string{
		"of a key that has none":         {"", patch, "20, 5, 00:00:01"},
		"of a key that has one":          {"select ratelimit_override('p', 'k', 1, expires_at => 'tomorrow')", patch, "20, 5, 00:00:01"},
		"while the policy is changed":    {"", change, ", 5, 00:00:02"},
		"where the first is rolled back": {"", "select 1/count(*) from ratelimit_override('p', 'k', 20) where capacity < 0", ", 5, 00:00:01"},
	}, func(t *testing.T, db *kit.TestDB, is []string) {
		for _, strict := range []bool{false, true} {
			db.Execute("select ratelimit_define_policy('p', 10, 1, '1 second')")
			db.Execute("select count(ratelimit_remove_override('p', 'k'))")
			if is[0] != "" {
				db.Execute(is[0])
			}
			first, then := db.Session(), db.Session()
			if strict {
				then.Execute("begin isolation level repeatable read").Execute("table ratelimit.overrides")
			}
			_, failed := first.Execute("begin").Exec(context.Background(), is[1])
			call := then.Start(func(kit.Querier) (kit.Decision, error) {
				return kit.Decision{}, kit.ErrorOf(then.Exec(context.Background(), "select ratelimit_override('p', 'k', refill => 5)"))
			})
			if failed == nil {
				call.BlockedBy(first)
			}
			first.Execute("commit")
			_, err := call.Result()
			if strict && failed == nil {
				require.Equal(t, "40001", kit.SQLState(err), "%v", err)
				then.Execute("rollback")
				continue
			}
			require.NoError(t, err)
			then.Execute("commit")
			require.Equal(t, is[2:], kit.Column(t, db.DB, "select format('%s, %s, %s', capacity, refill, every) from ratelimit_overrides('p', 'k')"))
		}
	})
}

// A key gets a zone and a billing day at once. The second of the two waits for the first, and adds to it.
func TestOverride_OfAZoneAndAnAnchorAtOnceBothCount(t *testing.T) {
	zone, anchor := "select ratelimit_override('q', 'k', time_zone => 'Asia/Tokyo')", "select ratelimit_override('q', 'k', anchor => '2024-01-15')"
	kit.OnDBs(t, map[string]string{
		"of a key that has no override":      "select",
		"of a key that has other numbers":    "select from ratelimit_override('q', 'k', 20) as a, ratelimit_override('q', 'k', 30, expires_at => '2100-01-01Z') as b",
		"of a key that has another calendar": "select ratelimit_override('q', 'k', time_zone => 'Europe/Berlin', anchor => '2024-01-20')",
		"of a key whose periods are kept":    "select from ratelimit_define_policy('q', history => '1 year'), ratelimit_acquire('q', 'k', 1)",
	}, func(t *testing.T, db *kit.TestDB, before string) {
		db.SetClock(kit.T0)
		for _, patches := range [][]string{{zone, anchor}, {anchor, zone}} {
			db.Execute("select ratelimit_define_policy('q', 10, period => '1 month')")
			db.Execute("select ratelimit_override('q', 'another', 1)") // the first of a policy locks the policy
			db.Execute(before)
			first := db.Begin().Execute(patches[0])
			call := db.Session().StartExec(patches[1]).BlockedBy(first)
			first.Execute("commit")
			_, err := call.Result()
			require.NoError(t, err)
			require.Equal(t, []string{"Asia/Tokyo 2024-01-15"}, kit.Column(t, db.DB, "select format('%s %s', time_zone, anchor::date) from ratelimit_overrides('q', 'k') where expires_at is null"), patches)
			require.Equal(t, kit.Micros(363*time.Hour), db.Acquire("q", "k", 1).ResetAfter, "until the 15th of April in Tokyo")
			db.DropPolicy("q")
		}
	})
}

// An answer counts hours, not days: added to an instant it is exact in any time zone, here across the night in which summer time begins.
func TestAnswers_HaveNoDays(t *testing.T) {
	db := kit.ParallelDB(t)
	db.SetTimeZone("Europe/Berlin")
	db.DefinePolicy("p", 10, 1, 24*time.Hour)
	db.AcquireAt(kit.T0, "p", "k", 10)
	var retry, reset string
	var then time.Time
	require.NoError(t, db.Pool.QueryRow(context.Background(), `
		select retry_after::text, reset_after::text, timestamptz '2024-03-30 12:00:00+00' + retry_after
		  from ratelimit_acquire('p', 'k')`).Scan(&retry, &reset, &then))
	require.Equal(t, "24:00:00", retry)
	require.Equal(t, "240:00:00", reset)
	require.Equal(t, kit.T0.Add(24*time.Hour), then.UTC())
	require.Equal(t, "216:00:00", kit.One[string](t, db.Pool, "select reset_after::text from ratelimit_refund('p', 'k', 1)"))
}

// The part that ends is in the answer, however long the call takes after it was judged.
func TestOverride_IsAnsweredByOneClock(t *testing.T) {
	t.Parallel()
	db := kit.NewDB(t).Policy("p", 10, 1, time.Second)
	db.Execute(`
		create sequence readings;
		create or replace function ratelimit.clock() returns timestamptz language sql volatile
		as $$ select timestamptz '2024-03-30Z' + nextval('public.readings') * interval '1 second' $$`)
	require.Equal(t, []string{"20"}, kit.Column(t, db.DB, "select capacity::text from ratelimit_override('p', 'k', 20, expires_at => '2024-03-30 00:00:01.5Z')"))
	require.Empty(t, kit.Column(t, db.DB, "select capacity::text from ratelimit_overrides()"))
}

func TestVectors(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		for name, subject := range map[string]kit.Subject{"database": db, "fake": kit.NewFake(t)} {
			for _, v := range vectors.Buckets {
				t.Run(name+"/"+v.Name, func(t *testing.T) { kit.ReplayVector(t, subject.Of(t), v, durability) })
			}
		}
	})
}

func TestMain(m *testing.M) { pgtest.Main(kit.MWithFigures{M: m}) }
