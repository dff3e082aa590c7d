package tests

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// deleted counts the rows that a clean-up deleted.
type deleted struct{ buckets, keys int64 }

func (db *testDB) cleanupAt(at time.Time) deleted {
	db.t.Helper()
	db.setClock(at)
	return db.swept(db.Pool, 10_000)
}

// cleanUpAtOnce makes clean-up judge rows as of now and not of five minutes ago, for tests that are about something else.
func (db *testDB) cleanUpAtOnce() *testDB {
	db.t.Helper()
	db.mutate(mutation{`interval '5 minutes'`, "interval '0'"}, "ratelimit.cleanup_batch")
	return db
}

// cleanup runs one batch.
func cleanup(q querier, maxRows int) (d deleted, err error) {
	err = q.QueryRow(context.Background(),
		"select buckets_deleted, idempotency_keys_deleted from ratelimit_cleanup($1)", maxRows).Scan(&d.buckets, &d.keys)
	return d, err
}

// swept is what one batch deletes, which must not fail.
func (db *testDB) swept(q querier, maxRows int) deleted {
	db.t.Helper()
	d, err := cleanup(q, maxRows)
	require.NoError(db.t, err)
	return d
}

// goesOn runs one batch of ratelimit_cleanup_all, and tells whether another is to follow.
func (db *testDB) goesOn(maxRows int) (more bool) {
	db.t.Helper()
	require.NoError(db.t, db.Pool.QueryRow(context.Background(),
		"select more from ratelimit.cleanup_batch($1, '1 hour', null, null)", maxRows).Scan(&more))
	return more
}

// fillTables gives a policy n buckets that are full by now and n idempotency keys past their time.
func (db *testDB) fillTables(prefix, policy string, n int) {
	db.t.Helper()
	db.exec("insert into ratelimit."+prefix+`buckets (policy_id, key, level, refilled_at, due_at)
		select p.id, 'k' || i, 0, clock_timestamp() - interval '1 year', clock_timestamp() - interval '1 day'
		  from ratelimit.policies as p, generate_series(1, $2::integer) as i where p.name = $1`, policy, n)
	db.exec("insert into ratelimit."+prefix+`idempotency_keys
		       (policy_id, key, idempotency_key, cost, remaining, capacity, reset_after, expires_at)
		select p.id, 'k' || i, 'X', 1, 1, 1, '0', clock_timestamp() - interval '1 day'
		  from ratelimit.policies as p, generate_series(1, $2::integer) as i where p.name = $1`, policy, n)
}

func TestCleanup_RemovesBucketsThatAreFullAndLeavesOthersAsTheyAre(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.cleanUpAtOnce().policy("p", 10, 1, time.Second, kind)
		db.acquireAt(t0, "p", "idle", 2)
		db.acquireAt(t0, "p", "busy", 2)
		db.acquireAt(t0.Add(time.Second), "p", "busy", 5) // full six seconds later
		busy := db.bucket("p", "busy")
		require.Equal(t, deleted{}, db.cleanupAt(t0.Add(2*time.Second-time.Microsecond)))
		require.NotNil(t, db.bucket("p", "idle"))
		require.Equal(t, deleted{buckets: 1}, db.cleanupAt(t0.Add(2*time.Second)))
		require.Nil(t, db.bucket("p", "idle"))
		require.Equal(t, busy, db.bucket("p", "busy"))
		require.Equal(t, deleted{}, db.cleanupAt(t0.Add(7*time.Second-time.Microsecond)))
		require.Equal(t, busy, db.bucket("p", "busy"))
		require.Equal(t, deleted{buckets: 1}, db.cleanupAt(t0.Add(7*time.Second)))
		require.Empty(t, db.rows())
	})
}

// A clock that runs ahead for less than five minutes costs nobody's tokens twice.
func TestCleanup_LeavesForFiveMinutesWhatIsDue(t *testing.T) {
	const margin = model.CleanUpMargin
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.definePolicy("p", 10, 1, time.Second, kind, remember(time.Minute))
		first := db.acquireAt(t0, "p", "k", 10, "X")
		db.acquire("p", "anew", 10)
		require.Equal(t, deleted{}, db.cleanupAt(t0.Add(10*time.Second+margin-time.Microsecond)))
		require.Equal(t, replayed(first), db.acquireAt(t0.Add(time.Second), "p", "k", 10, "X"))
		require.Equal(t, denied(1, 9*time.Second, 9*time.Second, 10), db.acquire("p", "k", 10))
		require.Equal(t, deleted{buckets: 2}, db.cleanupAt(t0.Add(10*time.Second+margin)))
		require.Equal(t, deleted{}, db.cleanupAt(t0.Add(time.Minute+margin-time.Microsecond)))
		require.Equal(t, deleted{keys: 1}, db.cleanupAt(t0.Add(time.Minute+margin)))
	})
}

// A bucket is looked at every day, because its policy may have become faster.
func TestCleanup_LooksAtABucketEveryDay(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.cleanUpAtOnce().policy("p", 1000, 1, time.Hour, kind)
		db.acquireAt(t0, "p", "created", 1000)
		require.Equal(t, deleted{}, db.cleanupAt(t0.Add(aDay)), "put off, by a day at most")
		db.acquire("p", "new", 1000)
		db.definePolicy("p", 1000, 1000, time.Second)
		require.Equal(t, deleted{}, db.cleanupAt(t0.Add(2*aDay-time.Microsecond)))
		require.Equal(t, deleted{buckets: 2}, db.cleanupAt(t0.Add(2*aDay)), "of the bucket put off and of the new one")
	})
}

// A bucket that is full by the policy's numbers and never by its override's, or the other way around, is looked at once a day, too.
func TestCleanup_ABucketThatIsNeverFullIsNotDueAtOnce(t *testing.T) {
	t.Parallel()
	for name, refill := range map[string]struct{ policy, override string }{"by the policy": {"0", "10"}, "by the override": {"10", "0"}, "by either": {"0", "0"}} {
		for _, kind := range []string{"true", "false"} {
			db := newDB(t)
			db.setClock(t0)
			db.exec("select ratelimit_define_policy('p', 10, " + refill.policy + ", '1 second', durable => " + kind + ")")
			db.exec("select ratelimit_override('p', 'k', refill => " + refill.override + ")")
			db.acquire("p", "k", 5)
			db.setClock(t0.Add(2 * aDay))
			db.session().run("set statement_timeout = '10s'").run("call ratelimit_cleanup_all()")
			require.Equal(t, []string{"1 day"}, column(t, db.DB, `
				select (due_at - (ratelimit.clock() - interval '5 minutes'))::text
				  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b`), name)
		}
	}
}

// Overrides are removed as other rows are: five minutes after they have expired, the oldest first, max_rows of them at most,
// and not while another session has them.
func TestCleanup_RemovesExpiredOverrides(t *testing.T) {
	db := parallelDB(t, t0).policy("p", 10, 1, second)
	for _, n := range []time.Duration{3, 4, 2, 1} {
		db.exec("select ratelimit_override('p', $1, 5, expires_at => $2)", fmt.Sprint(int(n)), t0.Add(n*second))
	}
	left := func() []string { return column(t, db.DB, "select key from ratelimit.overrides order by key") }
	db.setClock(t0.Add(second + model.CleanUpMargin - us))
	require.False(t, db.goesOn(10))
	require.Equal(t, []string{"1", "2", "3", "4"}, left())
	db.setClock(t0.Add(second + model.CleanUpMargin))
	require.True(t, db.goesOn(10))
	require.Equal(t, []string{"2", "3", "4"}, left())
	db.setClock(t0.Add(time.Hour))
	holder := db.begin().run("select ratelimit_override('p', '2', 5)")
	require.True(t, db.goesOn(1))
	require.Equal(t, []string{"2", "4"}, left())
	require.True(t, db.goesOn(10))
	require.False(t, db.goesOn(10), "the one that is left is not waited for")
	holder.exec("commit")
	require.False(t, db.goesOn(10))
	require.Equal(t, []string{"2"}, left(), "it is live again")
}

// An override that has expired neither keeps a bucket that is full by the policy, nor puts one off for longer than until it is full.
func TestCleanup_AnExpiredOverrideHoldsNoBucket(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.cleanUpAtOnce()
		db.at(t0).policy("p", 10, 1, second, kind).policy("another", 10, 1, second, kind)
		for _, key := range []string{"full", "used"} {
			db.exec("select ratelimit_override('another', $1, refill => 0)", key)
			db.acquire("p", key, 5)
			db.exec("select ratelimit_override('p', $1, refill => 0, expires_at => $2)", key, t0.Add(second))
		}
		db.acquireAt(t0.Add(second), "p", "used", 5)
		require.Equal(t, deleted{buckets: 1}, db.cleanupAt(t0.Add(5*second)))
		require.Nil(t, db.bucket("p", "full"))
		require.Equal(t, deleted{buckets: 1}, db.cleanupAt(t0.Add(10*second)))
	})
}

func TestCleanup_GoesByThePolicyOfToday(t *testing.T) {
	db := parallelDB(t).cleanUpAtOnce().policy("p", 10, 1, time.Second)
	db.acquireAt(t0, "p", "k", 2)
	db.definePolicy("p", 10, 1, time.Minute)
	require.Equal(t, deleted{}, db.cleanupAt(t0.Add(2*time.Second)))
	require.Equal(t, deleted{}, db.cleanupAt(t0.Add(2*time.Minute-time.Microsecond)))
	require.EqualValues(t, 9, db.left("p", "k"))
	require.Equal(t, deleted{buckets: 1}, db.cleanupAt(t0.Add(2*time.Minute)))
}

func TestCleanup_ARefundMakesABucketRemovable(t *testing.T) {
	db := parallelDB(t).cleanUpAtOnce().policy("p", 10, 1, aDay)
	db.acquireAt(t0, "p", "k", 7)
	db.refundAt(t0, "p", "k", 6)
	require.Equal(t, deleted{}, db.cleanupAt(t0), "it lacks a token")
	db.refundAt(t0, "p", "k", 1)
	require.Equal(t, deleted{buckets: 1}, db.cleanupAt(t0))
}

func TestCleanup_TakesAtMostMaxRowsOfEachTable(t *testing.T) {
	t.Parallel()
	for prefix, kind := range map[string]policyOption{"": durable, "ephemeral_": ephemeral} {
		db := newDB(t).policy("p", 10, 1, time.Second, kind)
		db.fillTables(prefix, "p", 25)
		s := db.session()
		for _, want := range []int64{10, 10, 5, 0} {
			require.Equal(t, deleted{want, want}, db.swept(s, 10))
		}
	}
}

func TestCleanup_TakesTheOldestFirst(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.definePolicy("p", 10, 1, second, kind)
		for _, n := range []time.Duration{2, 3, 1} {
			db.acquireAt(t0.Add(n*second), "p", fmt.Sprint(int(n)), 1, "X")
		}
		db.setClock(t0.Add(2 * aDay))
		for _, oldest := range []string{"1", "2", "3"} {
			require.NotNil(t, db.bucket("p", oldest))
			require.Equal(t, deleted{1, 1}, db.swept(db.Pool, 1))
			require.Nil(t, db.bucket("p", oldest))
			require.Zero(t, db.number("select count(*) from (table ratelimit.idempotency_keys union all table ratelimit.ephemeral_idempotency_keys) as k where k.key = $1", oldest))
		}
	})
}

func TestCleanup_WaitsForNoAcquireAndSkipsItsRows(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.cleanUpAtOnce().policy("p", 10, 1, time.Second, kind, remember(time.Hour))
		for _, key := range []string{"held", "free"} {
			db.acquireAt(t0, "p", key, 2, "X")
		}
		db.setClock(t0.Add(time.Hour)) // all full and expired
		holder := db.begin()
		require.Equal(t, allowed(5, 5*time.Second, 10), holder.acquire("p", "held", 5, "X"))
		holder.acquire("p", "new", 5, "X")
		require.Equal(t, deleted{1, 1}, db.swept(db.hasty(), 100))
		holder.exec("commit")
		for _, key := range []string{"held", "new"} {
			require.EqualValues(t, 5, db.left("p", key))
			require.True(t, db.acquire("p", key, 5, "X").Replayed)
		}
		require.Equal(t, deleted{}, db.swept(db.hasty(), 100), "they are in use again")
		require.EqualValues(t, 5, db.left("p", "held"))
	})
}

// SKIP LOCKED can still block when a row changes hands. The batch then ends before it can be part of a deadlock.
func TestCleanup_GivesWayWhereItWouldWait(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, time.Second)
	db.acquireAt(t0, "p", "k", 2)
	db.setClock(t0.Add(time.Hour))
	holder := db.begin().run("lock table ratelimit.idempotency_keys in exclusive mode")
	impatient := db.session().run("set statement_timeout = '20s'")
	require.Equal(t, deleted{}, db.swept(impatient, 100))
	require.Len(t, db.rows(), 1, "nothing is done by halves")
	require.True(t, db.goesOn(100), "the row that it did not get may be due")
	impatient.exec("call ratelimit_cleanup_all('1 microsecond')")
	require.Equal(t, []string{"true"}, column(t, db.DB, `
		select (split_part(c, '=', 2)::interval < (s.boot_val || s.unit)::interval)::text
		  from pg_proc as p cross join unnest(p.proconfig) as c join pg_settings as s on s.name = 'deadlock_timeout'
		 where p.oid = 'ratelimit.cleanup_batch'::regproc and c like 'lock_timeout=%'`), "before PostgreSQL looks for a deadlock")
	holder.exec("commit")
	require.Equal(t, deleted{1, 0}, db.swept(impatient, 100))
}

func TestCleanup_LeavesWhatWasUsedBeforeItGotTheLock(t *testing.T) {
	t.Parallel()
	for name, statement := range map[string]string{
		"bucket": `from buckets as b [^;]* where b\.due_at <= due_before`,
		"key":    `from idempotency_keys as d where d\.expires_at <= due_before`,
	} {
		t.Run(name, func(t *testing.T) {
			db := parallelDB(t).cleanUpAtOnce().policy("p", 10, 1, time.Second, remember(time.Hour))
			db.acquireAt(t0, "p", "k", 2, "X")
			db.setClock(t0.Add(time.Hour))
			if name == "key" {
				db.reset("p", "k") // or clean-up would lock the bucket first
			}
			db.mutate(mutation{"lock_timeout TO .100ms.", "lock_timeout TO 0"}, "ratelimit.cleanup_batch") // the gate is no busy row
			db.mutate(mutation{statement, "$0 and pg_advisory_xact_lock_shared(1)::text = ''"}, "ratelimit.cleanup_batch")
			keeper := db.session().run("select pg_advisory_lock(1)")
			call := db.session().startExec("select ratelimit_cleanup(100)").blockedBy(keeper)
			granted := db.acquire("p", "k", 4, "X")
			require.Equal(t, allowed(6, 4*time.Second, 10), granted)
			keeper.exec("select pg_advisory_unlock(1)")
			call.answer()
			require.EqualValues(t, 6, db.left("p", "k"))
			require.Equal(t, replayed(granted), db.acquire("p", "k", 4, "X"))
		})
	}
}

func TestCleanup_RowsInUseHideNoneBehindThem(t *testing.T) {
	db := parallelDB(t).cleanUpAtOnce().policy("p", 10, 1, time.Second)
	for i := range 40 {
		db.acquireAt(t0.Add(time.Duration(i/20)*second), "p", fmt.Sprint("used", i%20), []int64{1, 10}[i/20])
	}
	db.acquireAt(t0.Add(time.Second), "p", "idle", 1)
	db.setClock(t0.Add(2 * time.Second))
	for batches := 1; db.goesOn(10); batches++ {
		require.Less(t, batches, 4)
	}
	require.Nil(t, db.bucket("p", "idle"))
	require.Len(t, db.rows(), 20)
}

func TestCleanup_AnAcquireOnABucketBeingRemovedWaitsForTheBatch(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.cleanUpAtOnce().policy("p", 10, 1, time.Second, kind)
		for _, end := range []string{"commit", "rollback"} {
			db.acquireAt(t0, "p", "k", 10)
			db.setClock(t0.Add(time.Minute))
			batch := db.begin()
			require.Equal(t, deleted{buckets: 1}, db.swept(batch, 100))
			call := db.session().startAcquire("p", "k", 4).blockedBy(batch)
			batch.exec(end)
			require.Equal(t, allowed(6, 4*time.Second, 10), call.answer())
			require.EqualValues(t, 6, db.left("p", "k"))
			db.reset("p", "k")
		}
	})
}

func TestCleanup_LoadBesideItLosesNothing(t *testing.T) {
	t.Parallel()
	db := newCrowdDB(t, 9).cleanUpAtOnce()
	db.definePolicy("brief", 5, 5_000_000, time.Second) // full again after a microsecond
	db.definePolicy("long", 104, 1, aDay)
	// One session cleans up meanwhile: rows that are due and full, and rows that refunds make due too early.
	load, buckets := newLoad(t), int64(0)
	load.start(1, func(int) error {
		d, err := cleanup(db.Pool, 50)
		buckets += d.buckets
		return err
	})
	crowd(t, 8, func(i int) error {
		for j := range 240 {
			long := fmt.Sprint("k", j%20)
			_, err := acquire(db.Pool, "brief", fmt.Sprint("k", j%7), 5)
			_, taken := acquire(db.Pool, "long", long, 2, fmt.Sprint(i, " ", j))
			_, given := refund(db.Pool, "long", long, 1)
			if err = errors.Join(err, taken, given); err != nil {
				return err
			}
		}
		return nil
	})
	require.NoError(t, load.end())
	require.Greater(t, buckets, int64(7))
	for i := range 20 {
		require.EqualValues(t, 104-8*240/20, db.left("long", fmt.Sprint("k", i)))
	}
}

func TestCleanup_SeveralAtOnceShareTheWork(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, time.Second)
	db.fillTables("", "p", 2000)
	db.acquire("p", "used", 10, "X")
	first := db.begin() // holds what it deleted
	require.Equal(t, deleted{500, 500}, db.swept(first, 500))
	second := db.hasty()
	require.Equal(t, deleted{500, 500}, db.swept(second, 500))
	first.exec("commit")
	var buckets, keys atomic.Int64
	crowd(t, 4, func(int) error {
		for {
			d, err := cleanup(db.Pool, 50)
			if err != nil || d == (deleted{}) {
				return err
			}
			buckets.Add(d.buckets)
			keys.Add(d.keys)
		}
	})
	require.EqualValues(t, 1000, buckets.Load())
	require.EqualValues(t, 1000, keys.Load())
	require.Len(t, db.rows(), 2, "the used bucket and its key")
}

func TestCleanupAll_DrainsInBatchesThatCommit(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, time.Second).policy("e", 10, 1, time.Second, ephemeral)
	db.fillTables("", "p", 25_000)
	db.fillTables("ephemeral_", "e", 12_000)
	db.acquire("p", "used", 10, "X")
	db.exec(`
		create table public.batches (xid xid8, deleted bigint);
		create function public.count_batch() returns trigger language plpgsql as $$
		begin
			insert into public.batches select pg_current_xact_id(), count(*) from gone;
			return null;
		end $$;
		create trigger count_batch after delete on ratelimit.buckets referencing old table as gone
			for each statement execute function public.count_batch()`)
	db.exec("create table public.asked (due_before timestamptz, deadline timestamptz)")
	db.mutate(mutation{`perform check_max_rows\(max_rows\);`, "insert into public.asked values (due_before, deadline); $0"}, "ratelimit.cleanup_batch")
	db.exec("call ratelimit_cleanup_all()")
	require.Len(t, db.rows(), 2, "the used bucket and its key")
	require.Equal(t, []string{"4 batches, 1 instant of the first, 1 deadline"}, column(t, db.DB, `
		select format('%s batches, %s instant of the first, %s deadline', count(*), count(distinct due_before), count(distinct deadline)) from public.asked`))
	require.Equal(t, []string{"10000", "10000", "5000"},
		column(t, db.DB, "select sum(deleted)::text from public.batches group by xid having sum(deleted) > 0 order by xid"))
}

// A batch that is not full is not the last: there may be rows of dropped policies, or it put rows off or gave way to a lock.
func TestCleanupAll_GoesOnAfterAShortBatch(t *testing.T) {
	db := parallelDB(t).policy("gone", 10, 1, aDay)
	holder := db.begin().take("gone", "k", 1, "X")
	db.dropPolicy("gone")
	holder.exec("commit")
	require.EqualValues(t, 2, db.orphans())
	db.definePolicy("p", 10, 1, time.Second)
	db.fillTables("", "p", 1)
	db.exec("call ratelimit_cleanup_all()")
	require.Empty(t, db.rows())
}

func TestCleanupAll_StopsWhenItsBudgetIsSpent(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, time.Second)
	db.fillTables("", "p", 10_001)
	db.exec("call ratelimit_cleanup_all('1 microsecond')")
	require.Len(t, db.rows(), 2, "one batch is done always")
	db.exec("call ratelimit_cleanup_all(budget => '10 seconds')")
	require.Empty(t, db.rows())
	db.fillTables("", "p", 10_001)
	db.exec("call ratelimit_cleanup_all(budget => '178000000 years')") // beyond the last timestamp
	require.Empty(t, db.rows())
}

func TestCleanupAll_IsRefusedInsideATransaction(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, time.Second)
	db.fillTables("", "p", 1)
	s := db.begin()
	_, err := s.Exec(context.Background(), "call ratelimit_cleanup_all()")
	require.Equal(t, "2D000", sqlState(err))
	s.exec("rollback")
	require.Len(t, db.rows(), 2)
}

func TestResetAll_FillsTheBucketsOfAPolicyAndNothingElse(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.at(t0).policy("p", 10, 1, second, durability).policy("q", 10, 1, second, durability)
		db.exec("select ratelimit_override('p', '7', 20)")
		first := db.acquire("p", "7", 5, "i")
		for _, policy := range []string{"p", "q"} {
			db.exec("select count(*) from ratelimit_acquire_many(array_fill($1::text, array[2500]), array(select n::text from generate_series(1, 2500) as n))", policy)
		}
		db.exec("call ratelimit_reset_all('p')")
		require.Equal(t, []string{"q|2500"}, column(t, db.DB, `
			select p.name || '|' || count(*) from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b
			  join ratelimit.policies as p on p.id = b.policy_id group by p.name`))
		require.Equal(t, replayed(first), db.acquire("p", "7", 5, "i"))
		require.EqualValues(t, 20, db.left("p", "7"))
		db.exec("call ratelimit_reset_all(policy => 'p')") // which has none
		for argument, code := range map[string]string{"'none'": "RL001", "null": "22023", "''": "22023"} {
			db.refused(code, "call ratelimit_reset_all("+argument+")")
		}
		_, err := db.begin().Exec(t.Context(), "call ratelimit_reset_all('p')")
		require.Equal(t, "2D000", sqlState(err))
	})
}

// So acquires wait for a batch, and not for all of them.
func TestResetAll_CommitsEachBatch(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, time.Hour)
	db.exec("select count(*) from ratelimit_acquire_many(array_fill('p'::text, array[1500]), array(select to_char(n, 'FM0000') from generate_series(1, 1500) as n))")
	holder := db.begin().run("select ratelimit_acquire('p', '1200')")
	call := db.session().startExec("call ratelimit_reset_all('p')").blockedBy(holder)
	require.Nil(t, db.bucket("p", "1000"))
	require.NotNil(t, db.bucket("p", "1001"), "not committed")
	db.hasty().acquire("p", "1000", 1)
	holder.exec("commit")
	call.answer()
	require.EqualValues(t, 1, db.number("select count(*) from ratelimit.buckets"), "what was taken from after its turn")
}

// orphans counts rows whose policy was dropped.
func (db *testDB) orphans() (n int64) {
	db.t.Helper()
	for _, table := range stateTables {
		n += db.number("select count(*) from " + table + " where policy_id not in (select id from ratelimit.policies)")
	}
	return n
}

func TestDrop_WhileAnAcquireIsOpen(t *testing.T) {
	t.Parallel()
	for name, existing := range map[string]bool{"known bucket": true, "first use": false} {
		for kindName, kind := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
			t.Run(name+", "+kindName, func(t *testing.T) {
				db := parallelDB(t, t0).policy("p", 10, 1, aDay, kind)
				if existing {
					db.take("p", "k", 1, "old").take("p", "other", 1, "old")
				}
				holder := db.begin().take("p", "k", 4, "X")
				hasty := db.hasty().run("select ratelimit_drop_policy('p')") // waits for nobody
				_, err := acquire(hasty, "p", "k", 1)
				require.Equal(t, "RL001", sqlState(err))
				db.definePolicy("p", 10, 1, aDay, kind)
				require.Equal(t, allowed(7, 3*aDay, 10), hasty.acquire("p", "k", 3, "X"), "full, and X is new")
				holder.exec("commit")
				require.EqualValues(t, 7, db.left("p", "k"))
				require.Equal(t, allowed(5, 5*aDay, 10), db.acquire("p", "k", 2, "old"))
				require.NotZero(t, db.orphans(), "what was held or not yet visible")
				db.exec("call ratelimit_cleanup_all()")
				require.Zero(t, db.orphans())
				require.EqualValues(t, 5, db.left("p", "k"))
				require.True(t, db.acquire("p", "k", 3, "X").Replayed)
			})
		}
	}
}

func TestDrop_AnAcquireThatHasReadThePolicyGoesOnUnderIt(t *testing.T) {
	onDBs(t, map[string]bool{"known bucket": true, "first use": false}, func(t *testing.T, db *testDB, existing bool) {
		db.at(t0).policy("p", 10, 1, aDay)
		if existing {
			db.acquire("p", "k", 1)
		}
		gate := db.gateBefore(afterLook)
		call := gate.session().startAcquire("p", "k", 4, "X").blockedBy(gate.keeper)
		db.dropPolicy("p")
		db.definePolicy("p", 5, 1, aDay)
		gate.open()
		require.EqualValues(t, 10, call.answer().Capacity)
		require.EqualValues(t, 5, db.left("p", "k"))
		require.Equal(t, allowed(2, 3*aDay, 5), db.acquire("p", "k", 3, "X"))
		require.Equal(t, deleted{1, 1}, db.swept(db.session(), 100))
		require.Zero(t, db.orphans())
	})
}

// A bucket of a dropped policy has no numbers by which it could be full or be put off.
func TestCleanup_RemovesADueBucketOfADroppedPolicy(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.at(t0).policy("gone", 10, 1, aDay, kind)
		holder := db.begin().take("gone", "k", 5)
		db.dropPolicy("gone")
		holder.exec("commit")
		require.Equal(t, deleted{buckets: 1}, db.cleanupAt(t0.Add(2*aDay)))
	})
}

// Rows of dropped policies come after all others, in batches, too. One that another session has is left to a later batch.
func TestCleanup_TakesOrphansInBatchesToo(t *testing.T) {
	t.Parallel()
	for prefix, kind := range map[string]policyOption{"": durable, "ephemeral_": ephemeral} {
		db := newDB(t).policy("gone", 10, 1, aDay, kind).policy("p", 10, 1, aDay, kind)
		holder := db.begin()
		for i := range 25 {
			holder.acquire("gone", fmt.Sprint("k", i), 1, "X")
		}
		db.dropPolicy("gone")
		holder.exec("commit")
		db.acquire("p", "k", 1, "X")
		db.fillTables(prefix, "p", 1)
		holder.exec("begin")
		holder.exec("select from ratelimit." + prefix + "buckets where key = 'k7' for update")
		holder.exec("select from ratelimit." + prefix + "idempotency_keys where key = 'k7' for update")
		for _, want := range []int64{1, 10, 10, 4, 0} {
			require.Equal(t, deleted{want, want}, db.swept(db.Pool, 10), prefix)
		}
		holder.exec("commit")
		require.Equal(t, deleted{1, 1}, db.swept(db.Pool, 10))
		require.Len(t, db.rows(), 2)
	}
}
