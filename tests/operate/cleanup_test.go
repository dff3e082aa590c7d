// Package operate tests what an operator does: clean-up, status and doctor, durability, standbys, poolers, shards, and the fields of HTTP.
package operate

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

func TestCleanup_Rules(t *testing.T) {
	t.Parallel()
	const (
		bucket  = "select ratelimit_define_policy('p', 10, 1, '1 s', durable => (durable))"
		cleanup = "select ratelimit_cleanup()"
	)
	kit.RunSteps(t, map[string][]kit.Step{
		"a full bucket is removed, and a bucket in use stays": {
			{0, bucket, ""},
			{0, "select remaining from ratelimit_acquire('p', 'idle', 2)", "8"},
			{0, "select remaining from ratelimit_acquire('p', 'busy', 2)", "8"},
			{kit.Second, "select remaining from ratelimit_acquire('p', 'busy', 5)", "4"},
			{2*kit.Second - kit.Us, cleanup, "0,0"},
			{2 * kit.Second, cleanup, "1,0"},
			{7*kit.Second - kit.Us, cleanup, "0,0"},
			{7*kit.Second - kit.Us, "select key, level from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b", "busy,4000000"},
			{7 * kit.Second, cleanup, "1,0"},
		},
		"a bucket is full by the policy of today": {
			{0, bucket, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 2)", "8"},
			{0, "select ratelimit_define_policy('p', every => '1 min')", ""},
			{2 * kit.Second, cleanup, "0,0"},
			{2*time.Minute - kit.Us, cleanup, "0,0"},
			{2 * time.Minute, cleanup, "1,0"},
		},
		"a refund makes a bucket removable": {
			{0, bucket, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 7)", "3"},
			{0, "select remaining from ratelimit_refund('p', 'k', 6)", "9"},
			{0, cleanup, "0,0"},
			{0, "select remaining from ratelimit_refund('p', 'k', 1)", "10"},
			{0, cleanup, "1,0"},
		},
		"an override that has expired, and one of another policy, keep no bucket": {
			{0, bucket, ""},
			{0, "select ratelimit_define_policy('another', 10, 1, '1 s', durable => (durable))", ""},
			{0, "select remaining from ratelimit_acquire('p', 'full', 5)", "5"},
			{0, "select remaining from ratelimit_acquire('p', 'used', 5)", "5"},
			{0, "select refill from ratelimit_override('another', 'full', refill => 0)", "0"},
			{0, "select refill from ratelimit_override('p', 'full', refill => 0, expires_at => ratelimit.clock() + '1 s')", "0"},
			{0, "select refill from ratelimit_override('p', 'used', refill => 0, expires_at => ratelimit.clock() + '1 s')", "0"},
			{kit.Second, "select remaining from ratelimit_acquire('p', 'used', 5)", "1"},
			{5 * kit.Second, cleanup, "1,0"},
			{10 * kit.Second, cleanup, "1,0"},
		},
		"what is used of a quota stays until a turn by the policy and by the override": {
			{0, "select ratelimit_define_policy('p', 10, period => '1 month', durable => (durable))", ""}, // which turns in 36 hours
			{0, "select max(remaining) from unnest('{earlier,later,own}'::text[]) as key, lateral ratelimit_acquire('p', key, 3)", "7"},
			{0, "select anchor::date from ratelimit_override('p', 'earlier', anchor => '2024-01-31')", "2024-01-31"},
			{0, "select anchor::date from ratelimit_override('p', 'later', anchor => '2024-01-05', time_zone => 'America/New_York')", "2024-01-05"},
			{0, "select count(*) from ratelimit_override('p', 'later', 0, expires_at => '2024-05-10Z')", "2"}, // of which the calendar stays
			{12 * time.Hour, cleanup, "0,0"},
			{36*time.Hour - kit.Us, cleanup, "0,0"},
			{36 * time.Hour, cleanup, "2,0"},
			{136*time.Hour - kit.Us, cleanup, "0,0"}, // put off until the turn of the other
			{136 * time.Hour, cleanup, "1,0"},
		},
	})
}

// A clock that runs ahead for less than five minutes costs nobody's tokens twice.
func TestCleanup_LeavesForFiveMinutesWhatIsDue(t *testing.T) {
	const margin = model.CleanUpMargin
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.DefinePolicy("p", 10, 1, time.Second, kind, kit.Remember(time.Minute))
		first := db.AcquireAt(kit.T0, "p", "k", 10, "X")
		db.Acquire("p", "anew", 10)
		require.Equal(t, kit.Deleted{}, db.CleanupAt(kit.T0.Add(10*time.Second+margin-time.Microsecond)))
		require.Equal(t, kit.Replayed(first), db.AcquireAt(kit.T0.Add(time.Second), "p", "k", 10, "X"))
		require.Equal(t, kit.Denied(1, 9*time.Second, 9*time.Second, 10), db.Acquire("p", "k", 10))
		require.Equal(t, kit.Deleted{Buckets: 2}, db.CleanupAt(kit.T0.Add(10*time.Second+margin)))
		require.Equal(t, kit.Deleted{}, db.CleanupAt(kit.T0.Add(time.Minute+margin-time.Microsecond)))
		require.Equal(t, kit.Deleted{Keys: 1}, db.CleanupAt(kit.T0.Add(time.Minute+margin)))
	})
}

// A bucket is looked at every day, because its policy may have become faster.
func TestCleanup_LooksAtABucketEveryDay(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.CleanUpAtOnce().Policy("p", 1000, 1, time.Hour, kind)
		db.AcquireAt(kit.T0, "p", "created", 1000)
		require.Equal(t, kit.Deleted{}, db.CleanupAt(kit.T0.Add(kit.ADay)), "put off, by a day at most")
		db.Acquire("p", "new", 1000)
		db.DefinePolicy("p", 1000, 1000, time.Second)
		require.Equal(t, kit.Deleted{}, db.CleanupAt(kit.T0.Add(2*kit.ADay-time.Microsecond)))
		require.Equal(t, kit.Deleted{Buckets: 2}, db.CleanupAt(kit.T0.Add(2*kit.ADay)), "of the bucket put off and of the new one")
	})
}

// A bucket that is full by the policy's numbers and never by its override's, or the other way around, is looked at once a day, too.
func TestCleanup_ABucketThatIsNeverFullIsNotDueAtOnce(t *testing.T) {
	t.Parallel()
	for name, refill := range map[string]struct{ policy, override string }{"by the policy": {"0", "10"}, "by the override": {"10", "0"}, "by either": {"0", "0"}} {
		for _, kind := range []string{"true", "false"} {
			db := kit.NewDB(t)
			db.SetClock(kit.T0)
			db.Execute("select ratelimit_define_policy('p', 10, " + refill.policy + ", '1 second', durable => " + kind + ")")
			db.Execute("select ratelimit_override('p', 'k', refill => " + refill.override + ")")
			db.Acquire("p", "k", 5)
			db.SetClock(kit.T0.Add(2 * kit.ADay))
			db.Session().Execute("set statement_timeout = '5min'").Execute("call ratelimit_cleanup_all()")
			require.Equal(t, []string{"1 day"}, kit.Column(t, db.DB, `
				select (due_at - (ratelimit.clock() - interval '5 minutes'))::text
				  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b`), name)
		}
	}
}

// Overrides go as other rows do: five minutes after their end, the oldest first, max_rows at most, and none that another session has.
func TestCleanup_RemovesExpiredOverrides(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0).Policy("p", 10, 1, kit.Second)
	for _, n := range []time.Duration{3, 4, 2, 1} {
		db.Execute("select ratelimit_override('p', $1, 5, expires_at => $2)", fmt.Sprint(int(n)), kit.T0.Add(n*kit.Second))
	}
	left := func() []string { return kit.Column(t, db.DB, "select key from ratelimit.overrides order by key") }
	db.SetClock(kit.T0.Add(kit.Second + model.CleanUpMargin - kit.Us))
	require.False(t, db.GoesOn(10))
	require.Equal(t, []string{"1", "2", "3", "4"}, left())
	db.SetClock(kit.T0.Add(kit.Second + model.CleanUpMargin))
	require.True(t, db.GoesOn(10))
	require.Equal(t, []string{"2", "3", "4"}, left())
	db.SetClock(kit.T0.Add(time.Hour))
	holder := db.Begin().Execute("select ratelimit_override('p', '2', 5)")
	require.True(t, db.GoesOn(1))
	require.Equal(t, []string{"2", "4"}, left())
	require.True(t, db.GoesOn(10))
	require.False(t, db.GoesOn(10), "the one that is left is not waited for")
	holder.Execute("commit")
	require.False(t, db.GoesOn(10))
	require.Equal(t, []string{"2"}, left(), "it is live again")
}

// A time zone may leave the server with an upgrade of its time zone data. The doctor names it, and clean-up goes on.
func TestCleanup_GoesOnWhereATimeZoneIsGone(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0).CleanUpAtOnce().Policy("p", 10, 1, time.Second).Take("p", "k", 1)
	for _, quota := range []string{"known", "gone"} {
		db.Execute("select ratelimit_define_policy($1, 10, period => '1 day', time_zone => 'Europe/Berlin')", quota)
		db.Execute("select ratelimit_override($1, 'of a key', time_zone => 'Asia/Tokyo')", quota)
		db.Take(quota, "k", 1)
	}
	db.Execute(`
		update ratelimit.policies set time_zone = 'Asia/Gone' where name = 'gone';
		update ratelimit.overrides set time_zone = 'Asia/Past'`)
	require.Equal(t, []string{
		"The server does not know the time zone 'Asia/Gone' of policy 'gone', so calls about them fail.",
		"The server does not know the time zone 'Asia/Past' of 1 overrides of policy 'gone', 1 overrides of policy 'known', so calls about them fail.",
	}, kit.Column(t, db.DB, "select finding from ratelimit_doctor() where finding ~ 'time zone'"))
	require.Equal(t, kit.Deleted{Buckets: 2}, db.CleanupAt(kit.T0.Add(48*time.Hour)))
	require.Equal(t, []string{"k"}, kit.Column(t, db.DB, "select key from ratelimit.buckets where due_at > $1", kit.T0.Add(48*time.Hour)))
}

func TestCleanup_TakesTheOldestFirst(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.DefinePolicy("p", 10, 1, kit.Second, kind)
		for _, n := range []time.Duration{2, 3, 1} {
			db.AcquireAt(kit.T0.Add(n*kit.Second), "p", fmt.Sprint(int(n)), 1, "X")
		}
		db.SetClock(kit.T0.Add(2 * kit.ADay))
		for _, oldest := range []string{"1", "2", "3"} {
			require.NotNil(t, db.Bucket("p", oldest))
			require.Equal(t, kit.Deleted{Buckets: 1, Keys: 1}, db.Swept(db.Pool, 1))
			require.Nil(t, db.Bucket("p", oldest))
			require.Zero(t, db.Number("select count(*) from (table ratelimit.idempotency_keys union all table ratelimit.ephemeral_idempotency_keys) as k where k.key = $1", oldest))
		}
	})
}

func TestCleanup_WaitsForNoAcquireAndSkipsItsRows(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.CleanUpAtOnce().Policy("p", 10, 1, time.Second, kind, kit.Remember(time.Hour))
		for _, key := range []string{"held", "free"} {
			db.AcquireAt(kit.T0, "p", key, 2, "X")
		}
		db.SetClock(kit.T0.Add(time.Hour)) // all full and expired
		holder := db.Begin()
		require.Equal(t, kit.Allowed(5, 5*time.Second, 10), holder.Acquire("p", "held", 5, "X"))
		holder.Acquire("p", "new", 5, "X")
		require.Equal(t, kit.Deleted{Buckets: 1, Keys: 1}, db.Swept(db.Hasty(), 100))
		holder.Execute("commit")
		for _, key := range []string{"held", "new"} {
			require.EqualValues(t, 5, db.Left("p", key))
			require.True(t, db.Acquire("p", key, 5, "X").Replayed)
		}
		require.Equal(t, kit.Deleted{}, db.Swept(db.Hasty(), 100), "they are in use again")
		require.EqualValues(t, 5, db.Left("p", "held"))
	})
}

// SKIP LOCKED can still block when a row changes hands. The batch then ends before it can be part of a deadlock.
func TestCleanup_GivesWayWhereItWouldWait(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, time.Second)
	db.AcquireAt(kit.T0, "p", "k", 2)
	db.SetClock(kit.T0.Add(time.Hour))
	holder := db.Begin().Execute("lock table ratelimit.idempotency_keys in exclusive mode")
	impatient := db.Session().Execute("set statement_timeout = '5min'")
	require.Equal(t, kit.Deleted{}, db.Swept(impatient, 100))
	require.Len(t, db.Rows(), 1, "nothing is done by halves")
	require.True(t, db.GoesOn(100), "the row that it did not get may be due")
	impatient.Execute("call ratelimit_cleanup_all('1 microsecond')")
	require.Equal(t, []string{"true"}, kit.Column(t, db.DB, `
		select (split_part(c, '=', 2)::interval < (s.boot_val || s.unit)::interval)::text
		  from pg_proc as p cross join unnest(p.proconfig) as c join pg_settings as s on s.name = 'deadlock_timeout'
		 where p.oid = 'ratelimit.cleanup_batch'::regproc and c like 'lock_timeout=%'`), "before PostgreSQL looks for a deadlock")
	holder.Execute("commit")
	require.Equal(t, kit.Deleted{Buckets: 1, Keys: 0}, db.Swept(impatient, 100))
}

func TestCleanup_LeavesWhatWasUsedBeforeItGotTheLock(t *testing.T) {
	t.Parallel()
	for name, place := range map[string]struct{ function, statement string }{
		"bucket": {"ratelimit.cleanup_buckets", `where b\.due_at <= \$2`},
		"key":    {"ratelimit.cleanup_expired", `where d\.expires_at <= \$1`},
	} {
		t.Run(name, func(t *testing.T) {
			db := kit.ParallelDB(t).CleanUpAtOnce().Policy("p", 10, 1, time.Second, kit.Remember(time.Hour))
			db.AcquireAt(kit.T0, "p", "k", 2, "X")
			db.SetClock(kit.T0.Add(time.Hour))
			if name == "key" {
				db.Reset("p", "k") // or clean-up would lock the bucket first
			}
			db.Mutate(kit.Mutation{Pattern: "lock_timeout TO .100ms.", Replacement: "lock_timeout TO 0"}, "ratelimit.cleanup_batch") // the gate is no busy row
			db.Mutate(kit.Mutation{Pattern: place.statement, Replacement: "$0 and ('%1$$s' like 'ephemeral%%' or pg_advisory_xact_lock_shared(1)::text = '')"}, place.function)
			keeper := db.Session().Execute("select pg_advisory_lock(1)")
			call := db.Session().StartExec("select ratelimit_cleanup(100)").BlockedBy(keeper)
			granted := db.Acquire("p", "k", 4, "X")
			require.Equal(t, kit.Allowed(6, 4*time.Second, 10), granted)
			keeper.Execute("select pg_advisory_unlock(1)")
			call.Answer()
			require.EqualValues(t, 6, db.Left("p", "k"))
			require.Equal(t, kit.Replayed(granted), db.Acquire("p", "k", 4, "X"))
		})
	}
}

func TestCleanup_RowsInUseHideNoneBehindThem(t *testing.T) {
	db := kit.ParallelDB(t).CleanUpAtOnce().Policy("p", 10, 1, time.Second)
	for i := range 40 {
		db.AcquireAt(kit.T0.Add(time.Duration(i/20)*kit.Second), "p", fmt.Sprint("used", i%20), []int64{1, 10}[i/20])
	}
	db.AcquireAt(kit.T0.Add(time.Second), "p", "idle", 1)
	db.SetClock(kit.T0.Add(2 * time.Second))
	for batches := 1; db.GoesOn(10); batches++ {
		require.Less(t, batches, 4)
	}
	require.Nil(t, db.Bucket("p", "idle"))
	require.Len(t, db.Rows(), 20)
}

func TestCleanup_AnAcquireOnABucketBeingRemovedWaitsForTheBatch(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.CleanUpAtOnce().Policy("p", 10, 1, time.Second, kind)
		for _, end := range []string{"commit", "rollback"} {
			db.AcquireAt(kit.T0, "p", "k", 10)
			db.SetClock(kit.T0.Add(time.Minute))
			batch := db.Begin()
			require.Equal(t, kit.Deleted{Buckets: 1}, db.Swept(batch, 100))
			call := db.Session().StartAcquire("p", "k", 4).BlockedBy(batch)
			batch.Execute(end)
			require.Equal(t, kit.Allowed(6, 4*time.Second, 10), call.Answer())
			require.EqualValues(t, 6, db.Left("p", "k"))
			db.Reset("p", "k")
		}
	})
}

func TestCleanup_SeveralAtOnceShareTheWork(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, time.Second)
	db.FillTables("", "p", 2000)
	db.Acquire("p", "used", 10, "X")
	first := db.Begin() // holds what it deleted
	require.Equal(t, kit.Deleted{Buckets: 500, Keys: 500}, db.Swept(first, 500))
	require.Equal(t, kit.Deleted{Buckets: 500, Keys: 500}, db.Swept(db.Hasty(), 500))
	first.Execute("commit")
	require.Equal(t, kit.Deleted{Buckets: 1000, Keys: 1000}, db.Cleanup())
	require.Len(t, db.Rows(), 2, "the used bucket and its key")
}

func TestCleanupAll_DrainsInBatchesThatCommit(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, time.Second).Policy("e", 10, 1, time.Second, kit.Ephemeral)
	db.FillTables("", "p", 25_000)
	db.FillTables("ephemeral_", "e", 12_000)
	db.Acquire("p", "used", 10, "X")
	db.Execute(`
		create table public.batches (xid xid8, deleted bigint);
		create function public.count_batch() returns trigger language plpgsql as $$
		begin
			insert into public.batches select pg_current_xact_id(), count(*) from gone;
			return null;
		end $$;
		create trigger count_batch after delete on ratelimit.buckets referencing old table as gone
			for each statement execute function public.count_batch()`)
	db.Execute("create table public.asked (due_before timestamptz, deadline timestamptz)")
	db.Mutate(kit.Mutation{Pattern: `perform check_max_rows\(max_rows\);`, Replacement: "insert into public.asked values (due_before, deadline); $0"}, "ratelimit.cleanup_batch")
	db.Execute("call ratelimit_cleanup_all()")
	require.Len(t, db.Rows(), 2, "the used bucket and its key")
	require.Equal(t, []string{"4 batches, 1 instant of the first, 1 deadline"}, kit.Column(t, db.DB, `
		select format('%s batches, %s instant of the first, %s deadline', count(*), count(distinct due_before), count(distinct deadline)) from public.asked`))
	require.Equal(t, []string{"10000", "10000", "5000"},
		kit.Column(t, db.DB, "select sum(deleted)::text from public.batches group by xid having sum(deleted) > 0 order by xid"))
}

// A batch that is not full is not the last: there may be rows of dropped policies, or it put rows off or gave way to a lock.
func TestCleanupAll_GoesOnAfterAShortBatch(t *testing.T) {
	db := kit.ParallelDB(t).Policy("gone", 10, 1, kit.ADay)
	holder := db.Begin().Take("gone", "k", 1, "X")
	db.DropPolicy("gone")
	holder.Execute("commit")
	require.EqualValues(t, 2, db.Orphans())
	db.DefinePolicy("p", 10, 1, time.Second)
	db.FillTables("", "p", 1)
	db.Execute("call ratelimit_cleanup_all()")
	require.Empty(t, db.Rows())
}

func TestCleanupAll_StopsWhenItsBudgetIsSpent(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, time.Second)
	db.FillTables("", "p", 10_001)
	db.Execute("call ratelimit_cleanup_all('1 microsecond')")
	require.Len(t, db.Rows(), 2, "one batch is done always")
	db.Execute("call ratelimit_cleanup_all(budget => '10 seconds')")
	require.Empty(t, db.Rows())
	db.FillTables("", "p", 10_001)
	db.Execute("call ratelimit_cleanup_all(budget => '178000000 years')") // beyond the last timestamp
	require.Empty(t, db.Rows())
}

func TestCleanupAll_IsRefusedInsideATransaction(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, time.Second)
	db.FillTables("", "p", 1)
	s := db.Begin()
	_, err := s.Exec(context.Background(), "call ratelimit_cleanup_all()")
	require.Equal(t, "2D000", kit.SQLState(err))
	s.Execute("rollback")
	require.Len(t, db.Rows(), 2)
}

func TestResetAll_FillsTheBucketsOfAPolicyAndNothingElse(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability).Policy("q", 10, 1, kit.Second, durability)
		db.Execute("select ratelimit_override('p', '7', 20)")
		first := db.Acquire("p", "7", 5, "i")
		for _, policy := range []string{"p", "q"} {
			db.Execute("select count(*) from ratelimit_acquire_many(array_fill($1::text, array[2500]), array(select n::text from generate_series(1, 2500) as n))", policy)
		}
		db.Execute("call ratelimit_reset_all('p')")
		require.Equal(t, []string{"q|2500"}, kit.Column(t, db.DB, `
			select p.name || '|' || count(*) from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b
			  join ratelimit.policies as p on p.id = b.policy_id group by p.name`))
		require.Equal(t, kit.Replayed(first), db.Acquire("p", "7", 5, "i"))
		require.EqualValues(t, 20, db.Left("p", "7"))
		db.Execute("call ratelimit_reset_all(policy => 'p')") // which has none
		for argument, code := range map[string]string{"'none'": "RL001", "null": "22023", "''": "22023"} {
			_ = db.Refused(code, "call ratelimit_reset_all("+argument+")")
		}
		_, err := db.Begin().Exec(t.Context(), "call ratelimit_reset_all('p')")
		require.Equal(t, "2D000", kit.SQLState(err))
	})
}

// So acquires wait for a batch, and not for all of them.
func TestResetAll_CommitsEachBatch(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, time.Hour)
	db.Execute("select count(*) from ratelimit_acquire_many(array_fill('p'::text, array[1500]), array(select to_char(n, 'FM0000') from generate_series(1, 1500) as n))")
	holder := db.Begin().Execute("select ratelimit_acquire('p', '1200')")
	call := db.Session().StartExec("call ratelimit_reset_all('p')").BlockedBy(holder)
	require.Nil(t, db.Bucket("p", "1000"))
	require.NotNil(t, db.Bucket("p", "1001"), "not committed")
	db.Hasty().Acquire("p", "1000", 1)
	holder.Execute("commit")
	call.Answer()
	require.EqualValues(t, 1, db.Number("select count(*) from ratelimit.buckets"), "what was taken from after its turn")
}

func TestDrop_WhileAnAcquireIsOpen(t *testing.T) {
	t.Parallel()
	for name, existing := range map[string]bool{"known bucket": true, "first use": false} {
		for kindName, kind := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
			t.Run(name+", "+kindName, func(t *testing.T) {
				db := kit.ParallelDB(t, kit.T0).Policy("p", 10, 1, kit.ADay, kind)
				if existing {
					db.Take("p", "k", 1, "old").Take("p", "other", 1, "old")
				}
				holder := db.Begin().Take("p", "k", 4, "X")
				hasty := db.Hasty().Execute("select ratelimit_drop_policy('p')") // waits for nobody
				_, err := kit.Acquire(hasty, "p", "k", 1)
				require.Equal(t, "RL001", kit.SQLState(err))
				db.DefinePolicy("p", 10, 1, kit.ADay, kind)
				require.Equal(t, kit.Allowed(7, 3*kit.ADay, 10), hasty.Acquire("p", "k", 3, "X"), "full, and X is new")
				holder.Execute("commit")
				require.EqualValues(t, 7, db.Left("p", "k"))
				require.Equal(t, kit.Allowed(5, 5*kit.ADay, 10), db.Acquire("p", "k", 2, "old"))
				require.NotZero(t, db.Orphans(), "what was held or not yet visible")
				db.Execute("call ratelimit_cleanup_all()")
				require.Zero(t, db.Orphans())
				require.EqualValues(t, 5, db.Left("p", "k"))
				require.True(t, db.Acquire("p", "k", 3, "X").Replayed)
			})
		}
	}
}

func TestDrop_AnAcquireThatHasReadThePolicyGoesOnUnderIt(t *testing.T) {
	kit.OnDBs(t, map[string]bool{"known bucket": true, "first use": false}, func(t *testing.T, db *kit.TestDB, existing bool) {
		db.At(kit.T0).Policy("p", 10, 1, kit.ADay)
		if existing {
			db.Acquire("p", "k", 1)
		}
		gate := db.GateBefore(kit.AfterLook)
		call := gate.Session().StartAcquire("p", "k", 4, "X").BlockedBy(gate.Keeper)
		db.DropPolicy("p")
		db.DefinePolicy("p", 5, 1, kit.ADay)
		gate.Open()
		require.EqualValues(t, 10, call.Answer().Capacity)
		require.EqualValues(t, 5, db.Left("p", "k"))
		require.Equal(t, kit.Allowed(2, 3*kit.ADay, 5), db.Acquire("p", "k", 3, "X"))
		require.Equal(t, kit.Deleted{Buckets: 1, Keys: 1}, db.Swept(db.Session(), 100))
		require.Zero(t, db.Orphans())
	})
}

// A bucket of a dropped policy has no numbers by which it could be full or be put off.
func TestCleanup_RemovesADueBucketOfADroppedPolicy(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Policy("gone", 10, 1, kit.ADay, kind)
		holder := db.Begin().Take("gone", "k", 5)
		db.DropPolicy("gone")
		holder.Execute("commit")
		require.Equal(t, kit.Deleted{Buckets: 1}, db.CleanupAt(kit.T0.Add(2*kit.ADay)))
	})
}

// Rows of dropped policies come after all others, in batches, too. One that another session has is left to a later batch.
func TestCleanup_TakesOrphansInBatchesToo(t *testing.T) {
	t.Parallel()
	for prefix, kind := range map[string]kit.PolicyOption{"": kit.Durable, "ephemeral_": kit.Ephemeral} {
		db := kit.NewDB(t).Policy("gone", 10, 1, kit.ADay, kind).Policy("p", 10, 1, kit.ADay, kind)
		holder := db.Begin()
		for i := range 25 {
			holder.Acquire("gone", fmt.Sprint("k", i), 1, "X")
		}
		db.DropPolicy("gone")
		holder.Execute("commit")
		db.Acquire("p", "k", 1, "X")
		db.FillTables(prefix, "p", 1)
		holder.Execute("begin")
		holder.Execute("select from ratelimit." + prefix + "buckets where key = 'k7' for update")
		holder.Execute("select from ratelimit." + prefix + "idempotency_keys where key = 'k7' for update")
		for _, want := range []int64{1, 10, 10, 4, 0} {
			require.Equal(t, kit.Deleted{Buckets: want, Keys: want}, db.Swept(db.Pool, 10), prefix)
		}
		holder.Execute("commit")
		require.Equal(t, kit.Deleted{Buckets: 1, Keys: 1}, db.Swept(db.Pool, 10))
		require.Len(t, db.Rows(), 2)
	}
}

func TestMain(m *testing.M) { pgtest.Main(m) }
