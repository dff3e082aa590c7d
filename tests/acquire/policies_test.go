// Package acquire tests what a decision is, beside the model of tests/torture: published vectors, retry_after as a promise, quotas, races of
// idempotency keys and of batches, transactions, collations, changes of policies, and the fake.
package acquire

import (
	"context"
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
	db.Execute("select ratelimit_override('p', 'k', capacity => 20), ratelimit_define_policy('p', 15)")
	_ = db.Refused("22023", "select ratelimit_override('p', 'k', time_zone => 'Europe/Atlantis')")
	db.Execute("select ratelimit_override('p', 'k', capacity => 20, time_zone => 'UTC')")
	require.EqualValues(t, 19, db.Acquire("p", "k", 1).Remaining)
}

func TestPolicyChange_OverridesFollowStepped(t *testing.T) {
	type testCase struct{ first, then []string }
	kit.OnDBs(t, map[string]testCase{
		"an override, while the policy is changed": {
			[]string{"begin", "select ratelimit_define_policy('p', capacity => 20, stepped => true)"},
			[]string{"select ratelimit_override('p', 'k', refill => 5)"},
		},
		"a change, while there is a first override": {
			[]string{"begin", "select ratelimit_override('p', 'k', capacity => 20, refill => 5)"},
			[]string{"select ratelimit_define_policy('p', stepped => true)"},
		},
		"a change, while policy and override are created": {
			[]string{"select ratelimit_drop_policy('p')", "begin", "select ratelimit_define_policy('p', 20, 1, '1 second')", "select ratelimit_override('p', 'k', refill => 5)"},
			[]string{"select ratelimit_define_policy('p', 20, 1, '1 second', stepped => true)"},
		},
	}, func(t *testing.T, db *kit.TestDB, is testCase) {
		db.DefinePolicy("p", 10, 1, kit.Second)
		first, then := db.Session(), db.Session()
		for _, sql := range is.first {
			first.Execute(sql)
		}
		call := then.Start(func(kit.Querier) (d kit.Decision, err error) {
			for _, sql := range is.then {
				_, err = then.Exec(context.Background(), sql)
			}
			return d, err
		})
		call.BlockedBy(first)
		first.Execute("commit")
		require.NoError(t, kit.ErrorOf(call.Result()))
		require.Equal(t, []string{"true, 20, 5"}, kit.Column(t, db.DB, "select stepped::text || ', ' || capacity || ', ' || refill from ratelimit.overrides"))
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

func TestVectors(t *testing.T) {
	kit.OnEachDurability(t, func(t *testing.T, db kit.Subject, durability kit.PolicyOption) {
		for _, v := range vectors.Buckets {
			t.Run(v.Name, func(t *testing.T) { kit.ReplayVector(t, db.Of(t), v, durability) })
		}
	})
}

func TestMain(m *testing.M) { pgtest.Main(m) }
