package tests

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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
	{"many requests for all", "acquire_all_many(array[@policy, @policy, @policy], array['half', 'known', 'known'], array[1, 1 + 0 * i, 1], array[2, 1]) limit 1"},
}

// denyTimes is a query for how many of n acquires are denied.
func denyTimes(n int, policy, call string) (string, pgx.NamedArgs) {
	return `select count(*) filter (where not d.allowed) from generate_series(1, @n) as i cross join lateral (select * from ratelimit_` + call + `) as d`,
		pgx.NamedArgs{"n": n, "policy": policy}
}

func TestDenial_WritesNothing(t *testing.T) {
	t.Parallel()
	const n = 5_000
	for policy, kind := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		for _, d := range denials {
			t.Run(policy+" "+d.name, func(t *testing.T) {
				db := parallelDB(t).policy(policy, 10, 1, aDay, kind).take(policy, "known", 10, "another").take(policy, "half", 5)
				before := db.rows()
				s := db.begin()
				var times int
				sql, args := denyTimes(n, policy, d.call)
				require.NoError(t, s.QueryRow(context.Background(), sql, args).Scan(&times))
				require.Equal(t, n, times)
				require.Equal(t, traces{}, s.traces())
				require.Equal(t, before, db.rows())
				for _, table := range stateTables {
					db.exec("select from " + table + " for update nowait")
				}
				// A grant does change the rows that are compared.
				s.acquire(policy, "other", 1, "Z")
				require.Equal(t, traces{xid: true, writes: 2}, s.traces())
				s.exec("commit")
				require.NotEqual(t, before, db.rows())
			})
		}
	}
}

// traces is what the open transaction of a session has left so far.
type traces struct {
	xid    bool  // it has a transaction id
	writes int64 // rows inserted, updated, deleted in any table of the package
}

func (s *session) traces() (found traces) {
	s.db.t.Helper()
	require.NoError(s.db.t, s.QueryRow(context.Background(), `
		select pg_current_xact_id_if_assigned() is not null, sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint
		  from pg_stat_xact_user_tables where schemaname = 'ratelimit'`).Scan(&found.xid, &found.writes))
	return found
}

// The counters of pg_stat_user_tables, as monitoring sees them: separate transactions this time.
func TestDenial_CountsAsNoWrite(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, aDay)
	s := db.session().take("p", "known", 10, "another")
	written := func() (n int64) {
		s.exec("select pg_stat_force_next_flush()")
		require.NoError(t, s.QueryRow(context.Background(), `
			select sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint from pg_stat_user_tables where schemaname = 'ratelimit' and relname <> 'policies'`).Scan(&n))
		return n
	}
	before := written()
	require.EqualValues(t, 2, before, "the bucket and its idempotency key")
	s.exec(`do $$ begin
		for i in 1..10000 loop
			if (ratelimit_acquire('p', 'known', 1, case when i % 2 = 0 then 'X' end)).allowed
			   or pg_current_xact_id_if_assigned() is not null then
				raise 'allowed, or wrote';
			end if;
			commit;
		end loop;
	end $$`)
	require.Equal(t, before, written())
}

func TestDenial_WritesNoWAL(t *testing.T) {
	t.Parallel()
	// No snapshots of running transactions for standbys, no checkpoint, no vacuum: nobody else writes.
	db, _ := newPrivateDB(t, "wal_level=minimal", "max_wal_senders=0", "checkpoint_timeout=1h", "autovacuum=off")
	db.policy("p", 10, 1, aDay).take("p", "known", 10, "another").take("p", "half", 5)
	s := db.session().run("checkpoint")
	for _, d := range denials {
		// Should somebody else write after all, then hardly each time; a denial would.
		var wal int64
		for range 5 {
			var before, after int64
			const lsn = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
			sql, args := denyTimes(1000, "p", d.call)
			s.exec(sql, args) // warm
			require.NoError(t, s.QueryRow(context.Background(), lsn).Scan(&before))
			s.exec(sql, args)
			require.NoError(t, s.QueryRow(context.Background(), lsn).Scan(&after))
			if wal = after - before; wal == 0 {
				break
			}
		}
		require.Zero(t, wal, d.name)
	}
	require.Zero(t, s.walRecords("select ratelimit_acquire('p', 'known')"))
	require.NotZero(t, s.walRecords("select ratelimit_acquire('p', 'other')"))
}

// walRecords runs a query and returns how many WAL records this session wrote for it.
func (s *session) walRecords(sql string) int64 {
	s.db.t.Helper()
	var explained []byte
	require.NoError(s.db.t, s.QueryRow(context.Background(), "explain (analyze, wal, format json) "+sql).Scan(&explained))
	var plans []struct {
		Plan struct {
			Records *int64 `json:"WAL Records"`
		}
	}
	require.NoError(s.db.t, json.Unmarshal(explained, &plans))
	require.Len(s.db.t, plans, 1)
	require.NotNil(s.db.t, plans[0].Plan.Records)
	return *plans[0].Plan.Records
}

// waitAndLose has a caller with cost 3 of capacity 10, refilled 1 a second, wait for a transaction
// that takes all, and moves the clock on meanwhile.
func waitAndLose(db *testDB, kind policyOption, waited time.Duration) (caller *session, answer decision) {
	db.at(t0).policy("p", 10, 1, time.Second, kind).take("p", "k", 5)
	holder := db.begin().take("p", "k", 5)
	caller = db.begin()
	call := caller.startAcquire("p", "k", 3).blockedBy(holder)
	db.setClock(t0.Add(waited))
	holder.exec("commit")
	return caller, call.answer()
}

func TestDenial_AfterAWaitCountsFromAfterTheWait(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		_, answer := waitAndLose(db, kind, 1500*time.Millisecond)
		require.Equal(t, denied(1, 1500*time.Millisecond, 8500*time.Millisecond, 10), answer)
	})
	db := newDB(t)
	defer db.mutate(mutation{`(?s)v_now := clock\(\);( .*? from buckets as b)`, "$1"})()
	_, answer := waitAndLose(db, durable, 1500*time.Millisecond)
	require.Equal(t, denied(0, 3*time.Second, 10*time.Second, 10), answer, "the clock read before the wait")
}

func TestDenial_DoesNotComeWhenTheCostFitsAfterTheWait(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		_, answer := waitAndLose(db, kind, 3*time.Second)
		require.Equal(t, allowed(0, 10*time.Second, 10), answer)
		db = newDB(t)
		_, answer = waitAndLose(db, kind, 3*time.Second-time.Microsecond)
		require.Equal(t, denied(2, time.Microsecond, 7*time.Second+time.Microsecond, 10), answer)
	})
}

func TestDenial_AfterAWaitKeepsTheRowLock(t *testing.T) {
	t.Parallel()
	for table, kind := range map[string]policyOption{"ratelimit.buckets": durable, "ratelimit.ephemeral_buckets": ephemeral} {
		db := newDB(t)
		caller, answer := waitAndLose(db, kind, 0)
		require.False(t, answer.Allowed)
		require.Equal(t, traces{xid: true}, caller.traces(), "locked, not written")
		lock := "select from " + table + " for update nowait"
		_, err := db.session().Exec(context.Background(), lock)
		require.Equal(t, "55P03", sqlState(err))
		caller.exec("commit")
		db.session().exec(lock)
	}
}

// A request for several buckets waits for the second, and is denied. While its transaction goes on, nothing is taken,
// and others can lock every bucket.
func TestDenial_OfSeveralAfterAWaitLeavesNothing(t *testing.T) {
	t.Parallel()
	for policy, kind := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		for name, r := range map[string]wholeRequest{
			"of two rows":         all(policy, "a", "b"),
			"of one without":      all(policy, "a", "b", "new"),
			"with an idempotency": {all(policy, "a", "b", "new").charges, "X"},
		} {
			t.Run(policy+" "+name, func(t *testing.T) {
				db := parallelDB(t).policy(policy, 10, 1, aDay, kind).take(policy, "a", 4).take(policy, "b", 9)
				holder := db.begin().take(policy, "b", 1)
				caller := db.begin()
				call := caller.startAll(r).blockedBy(holder)
				holder.exec("commit")
				require.False(t, call.answer().Allowed)
				hasty := db.hasty()
				for _, table := range stateTables {
					hasty.exec("select from " + table + " for update nowait")
				}
				for key, left := range map[string]int64{"a": 6, "b": 0, "new": 10} {
					require.Equal(t, left, db.left(policy, key), key)
				}
				hasty.exec("begin")
				require.True(t, hasty.acquire(policy, "new", 10, "X").Allowed)
				hasty.exec("rollback")
				caller.exec("commit")
				require.Zero(t, db.number("select count(*) from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b where key = 'new'"))
			})
		}
	}
}
