package concurrency

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// The denials that are decided without waiting, each on a bucket of capacity 10 that has no token
// left, or on one that has no row; to an unknown key only what never fits is denied.
var denials = []struct{ name, call string }{
	{"known key", "acquire(@policy, 'known', 1 + 0 * i)"},
	{"known key, never", "acquire(@policy, 'known', 11 + 0 * i)"},
	{"unknown key, never", "acquire(@policy, 'unknown' || i, 11)"},
	{"known key, idempotent", "acquire(@policy, 'known', 1 + 0 * i, 'X')"},
	{"known key, never, idempotent", "acquire(@policy, 'known', 11 + 0 * i, 'X')"},
	{"unknown key, never, idempotent", "acquire(@policy, 'unknown' || i, 11, 'X' || i)"},
	{"all of two, the first has tokens", "acquire_all(array[@policy, @policy], array['half', 'known'], array[1 + 0 * i, 1])"},
	{"all of two, the second has tokens", "acquire_all(array[@policy, @policy], array['known', 'half'], array[1 + 0 * i, 1], 'X')"},
	{"all of two, one is unknown", "acquire_all(array[@policy, @policy], array['unknown' || i, 'known'])"},
	{"all of two, never", "acquire_all(array[@policy, @policy], array['unknown' || i, 'half'], array[1, 11], 'X' || i)"},
	{"all of one that is named twice", "acquire_all(array[@policy, @policy], array['half', 'half'], array[3, 3 + 0 * i])"},
	{"many", "acquire_many(array[@policy, @policy], array['known', 'known'], array[1 + 0 * i, 1]) limit 1"},
	{"many, idempotent and not", "acquire_many(array[@policy, @policy, @policy], array['known', 'known', 'known'], array[1 + 0 * i, 1, 1], array['X', null, 'Y']) limit 1"},
	{"many, idempotent twice", "acquire_many(array[@policy, @policy], array['known', 'known'], array[1 + 0 * i, 1], array['X', 'X']) limit 1"},
	{"many requests for all", "acquire_many(array[@policy, @policy, @policy], array['half', 'known', 'known'], array[1, 1 + 0 * i, 1], sizes => array[2, 1]) limit 1"},
}

// denyTimes is a query for how many of n acquires are denied.
func denyTimes(n int, policy, call string) (string, pgx.NamedArgs) {
	return `select count(*) filter (where not d.allowed) from generate_series(1, @n) as i cross join lateral (select * from ratelimit_` + call + `) as d`,
		pgx.NamedArgs{"n": n, "policy": policy}
}

func TestDenial_WritesNothing(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		const n = 20 // a plan is kept after five
		db.Policy("p", 10, 1, kit.ADay, kind).Take("p", "known", 10, "another").Take("p", "half", 5)
		s := db.Session()
		for _, d := range denials {
			before := db.Rows()
			s.Execute("begin")
			sql, args := denyTimes(n, "p", d.call)
			require.Equal(t, n, kit.One[int](t, s, sql, args), d.name)
			require.Equal(t, kit.Traces{}, s.Traces(), d.name)
			require.Equal(t, before, db.Rows(), d.name)
			for _, table := range kit.StateTables {
				db.Execute("select from " + table + " for update nowait")
			}
			s.Execute("commit")
		}
		// A grant does change the rows that are compared.
		before := db.Rows()
		s.Execute("begin")
		s.Acquire("p", "other", 1, "Z")
		require.Equal(t, kit.Traces{Xid: true, Writes: 2}, s.Traces())
		s.Execute("commit")
		require.NotEqual(t, before, db.Rows())
	})
}

func TestDenial_WritesNoWAL(t *testing.T) {
	t.Parallel()
	// No snapshots of running transactions for standbys, no checkpoint, no vacuum: nobody else writes.
	db, _ := kit.NewPrivateDB(t, "wal_level=minimal", "max_wal_senders=0", "checkpoint_timeout=1h", "autovacuum=off")
	db.Policy("p", 10, 1, kit.ADay).Take("p", "known", 10, "another").Take("p", "half", 5)
	s := db.Session().Execute("checkpoint")
	for _, d := range denials {
		// Another process may write once; a denial that wrote would do so in all five tries.
		var wal int64
		for range 5 {
			const lsn = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
			sql, args := denyTimes(100, "p", d.call)
			s.Execute(sql, args) // warm
			before := kit.One[int64](t, s, lsn)
			s.Execute(sql, args)
			if wal = kit.One[int64](t, s, lsn) - before; wal == 0 {
				break
			}
		}
		require.Zero(t, wal, d.name)
	}
	require.Zero(t, s.WalRecords("select ratelimit_acquire('p', 'known')"))
	require.NotZero(t, s.WalRecords("select ratelimit_acquire('p', 'other')"))
}

// waitAndLose has a caller with cost 3 of capacity 10, refilled 1 a second, wait for a transaction
// that takes all, and moves the clock on meanwhile.
func waitAndLose(db *kit.TestDB, kind kit.PolicyOption, waited time.Duration) (caller *kit.Session, answer kit.Decision) {
	db.At(kit.T0).Policy("p", 10, 1, time.Second, kind).Take("p", "k", 5)
	holder := db.Begin().Take("p", "k", 5)
	caller = db.Begin()
	call := caller.StartAcquire("p", "k", 3).BlockedBy(holder)
	db.SetClock(kit.T0.Add(waited))
	holder.Execute("commit")
	return caller, call.Answer()
}

func TestDenial_AfterAWaitCountsFromAfterTheWait(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		_, answer := waitAndLose(db, kind, 1500*time.Millisecond)
		require.Equal(t, kit.Denied(1, 1500*time.Millisecond, 8500*time.Millisecond, 10), answer)
	})
	db := kit.NewDB(t)
	defer db.Mutate(kit.Mutation{Pattern: `(?s)v_now := clock\(\);( .*? from buckets as b)`, Replacement: "$1"})()
	_, answer := waitAndLose(db, kit.Durable, 1500*time.Millisecond)
	require.Equal(t, kit.Denied(0, 3*time.Second, 10*time.Second, 10), answer, "the clock read before the wait")
}

func TestDenial_DoesNotComeWhenTheCostFitsAfterTheWait(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		_, answer := waitAndLose(db, kind, 3*time.Second)
		require.Equal(t, kit.Allowed(0, 10*time.Second, 10), answer)
		db = kit.NewDB(t)
		_, answer = waitAndLose(db, kind, 3*time.Second-time.Microsecond)
		require.Equal(t, kit.Denied(2, time.Microsecond, 7*time.Second+time.Microsecond, 10), answer)
	})
}

func TestDenial_AfterAWaitKeepsTheRowLock(t *testing.T) {
	t.Parallel()
	for table, kind := range map[string]kit.PolicyOption{"ratelimit.buckets": kit.Durable, "ratelimit.ephemeral_buckets": kit.Ephemeral} {
		db := kit.NewDB(t)
		caller, answer := waitAndLose(db, kind, 0)
		require.False(t, answer.Allowed)
		require.Equal(t, kit.Traces{Xid: true}, caller.Traces(), "locked, not written")
		lock := "select from " + table + " for update nowait"
		_, err := db.Session().Exec(context.Background(), lock)
		require.Equal(t, "55P03", kit.SQLState(err))
		caller.Execute("commit")
		db.Session().Execute(lock)
	}
}

// A request for several buckets waits for the second, and is denied. While its transaction goes on, nothing is taken,
// and others can lock every bucket.
func TestDenial_OfSeveralAfterAWaitLeavesNothing(t *testing.T) {
	t.Parallel()
	for policy, kind := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		for name, r := range map[string]kit.WholeRequest{
			"of two rows":         kit.All(policy, "a", "b"),
			"of one without":      kit.All(policy, "a", "b", "new"),
			"with an idempotency": {Charges: kit.All(policy, "a", "b", "new").Charges, IdempotencyKey: "X"},
		} {
			t.Run(policy+" "+name, func(t *testing.T) {
				db := kit.ParallelDB(t).Policy(policy, 10, 1, kit.ADay, kind).Take(policy, "a", 4).Take(policy, "b", 9)
				holder := db.Begin().Take(policy, "b", 1)
				caller := db.Begin()
				call := caller.StartAll(r).BlockedBy(holder)
				holder.Execute("commit")
				require.False(t, call.Answer().Allowed)
				hasty := db.Hasty()
				for _, table := range kit.StateTables {
					hasty.Execute("select from " + table + " for update nowait")
				}
				for key, left := range map[string]int64{"a": 6, "b": 0, "new": 10} {
					require.Equal(t, left, db.Left(policy, key), key)
				}
				hasty.Execute("begin")
				require.True(t, hasty.Acquire(policy, "new", 10, "X").Allowed)
				hasty.Execute("rollback")
				caller.Execute("commit")
				require.Zero(t, db.Number("select count(*) from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b where key = 'new'"))
			})
		}
	}
}
