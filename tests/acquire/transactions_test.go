package acquire

import (
	"context"
	"fmt"
	"testing"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

var snapshotIsolation = []string{"repeatable read", "serializable"}

func TestTransaction_SnapshotIsolation_AGrantOnAChangedBucketFails(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.Policy("p", 10, 1, kit.ADay, kind).Take("p", "known", 1)
		for i, level := range snapshotIsolation {
			for _, key := range []string{"known", fmt.Sprint("new", i)} {
				s := db.Session().Execute("begin isolation level " + level).Execute("select from ratelimit.policies") // takes the snapshot
				db.Acquire("p", key, 1)
				left := db.Left("p", key)
				_, err := kit.Acquire(s, "p", key, 1)
				require.Equal(t, "40001", kit.SQLState(err), "%s, %s", level, key)
				s.Execute("rollback")
				require.Equal(t, left, db.Left("p", key))
				require.Equal(t, left-1, s.Acquire("p", key, 1).Remaining, "tried again")
			}
			s := db.Session().Execute("begin isolation level " + level)
			require.True(t, s.Acquire("p", fmt.Sprint("unchanged", i), 1).Allowed)
			s.Execute("commit")
		}
	})
}

func TestTransaction_SnapshotIsolation_ADenialIsAsOldAsTheSnapshot(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, kit.ADay)
	for _, level := range snapshotIsolation {
		db.Acquire("p", level, 10)
		s := db.Session().Execute("begin isolation level " + level).Execute("select from ratelimit.policies")
		db.Must(kit.Refund(db.Pool, "p", level, 5))
		require.False(t, s.Acquire("p", level, 1).Allowed)
		require.EqualValues(t, 0, s.Db.Must(kit.Peek(s, "p", level, 1)).Remaining)
		s.Execute("commit")
		require.EqualValues(t, 4, s.Acquire("p", level, 1).Remaining)
	}
}

func TestTransaction_NoSettingOfTheSessionChanges(t *testing.T) {
	s := kit.ParallelDB(t).Session().Execute("do '/* loads plpgsql, which has settings */ begin end'")
	s.Execute("set search_path = pg_catalog; set intervalstyle = iso_8601; set timezone = 'Asia/Tokyo'")
	s.Execute("create temporary table before as select name, setting from pg_settings")
	changed := func() []string {
		return kit.ColumnOf(t, s, `
			select concat(name, ': ', b.setting, ' -> ', n.setting) from before as b full join pg_settings as n using (name)
			 where b.setting is distinct from n.setting`)
	}
	for _, call := range []string{
		"select public.ratelimit_define_policy('p', 10, 1, '1 second')",
		"select public.ratelimit_define_policy('e', 10, 1, '1 second', durable => false)", "select public.ratelimit_acquire('p', 'k', 3)",
		"select public.ratelimit_acquire('e', 'k', 3, 'X')", "select public.ratelimit_acquire('e', 'k', 3, 'X')",
		"select public.ratelimit_acquire('p', 'k', 11)", "select public.ratelimit_acquire('unknown', 'k')",
		"select public.ratelimit_acquire('p', '')", "select public.ratelimit_acquire('e', 'k', 2, 'X')", "select public.ratelimit_peek('p', 'k')",
		"select public.ratelimit_refund('p', 'k', 1)", "select public.ratelimit_reset('p', 'k')", "select public.ratelimit_policies()",
		"select public.ratelimit_version()", "select public.ratelimit_cleanup()", "call public.ratelimit_cleanup_all()",
		"call public.ratelimit_reset_all('p')", "select public.ratelimit_drop_policy('e')",
	} {
		_, err := s.Exec(context.Background(), call)
		require.NotEqual(t, "42883", kit.SQLState(err), call) // undefined function
		require.Empty(t, changed(), call)
	}
	s.Execute("begin")
	s.Execute("select public.ratelimit_acquire('p', 'k', 3, 'X')")
	require.Empty(t, changed())
	s.Execute("commit")
	require.Empty(t, changed())
	s.Execute("set work_mem = '5MB'")
	require.Equal(t, []string{"work_mem: 4096 -> 5120"}, changed())
}

// The two traps of calling a function that takes tokens, and the forms to write instead.

func TestTransaction_HowOftenAQueryCallsTheFunction(t *testing.T) {
	db := kit.ParallelDB(t)
	for _, q := range []struct {
		query       string
		rows, taken int64
	}{
		{"select (ratelimit_acquire('p', 'k')).*", 1, 7},
		{"select * from ratelimit_acquire('p', 'k')", 1, 1},
		{"select d.* from generate_series(1, 300), ratelimit_acquire('p', 'k') as d", 300, 1},
		{"select (a.d).* from (select ratelimit_acquire('p', 'k') as d from generate_series(1, 300)) as a", 300, 300},
		{"select d.* from generate_series(1, 300) as g cross join lateral ratelimit_acquire('p', 'k', cost => 1 + 0 * g) as d", 300, 300},
		{"select d.* from generate_series(1, 300) as g cross join lateral ratelimit_acquire('p', 'k' || g) as d", 300, 300},
	} {
		db.DefinePolicy("p", 1000, 1, kit.ADay)
		tag, err := db.Pool.Exec(context.Background(), q.query)
		require.NoError(t, err, q.query)
		require.Equal(t, q.rows, tag.RowsAffected(), q.query)
		require.Equal(t, q.taken, db.Number("select sum(1000 - level / 1000000)::bigint from ratelimit.buckets"), q.query)
		db.DropPolicy("p")
	}
}

// What would write is refused, and says what helps. Denials, replays and cost 0 write nothing, so they are answered: alone and in a batch.
func TestTransaction_ReadOnlyAnswersWhatWritesNothing(t *testing.T) {
	db := kit.ParallelDB(t)
	for name, durability := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		db.ForReadOnly(name, durability)
		db.Take(name, "empty", 10).Take(name, "granted", 3, "first")
	}
	before := kit.RowsOf(t, db.DB)
	conn := db.Connect(t)
	kit.Execute(t, conn, "set default_transaction_read_only = on")
	for _, policy := range []string{"durable", "ephemeral"} {
		kit.RequireReadOnly(t, conn, policy, "default_transaction_read_only is on.", false)
		for key, left := range map[string]int64{"known": 7, "empty": 0, "unknown": 10} {
			require.Equal(t, left, db.Must(kit.Peek(conn, policy, key, 1)).Remaining)
			require.Equal(t, left, db.Must(kit.Acquire(conn, policy, key, 0)).Remaining)
		}
		for _, call := range []string{
			"acquire($1, 'empty')", "acquire($1, 'known', 10)", "acquire($1, 'empty', 1, 'i')", "acquire_many(array[$1::text], '{empty}')",
			"acquire_up_to($1, 'empty', 3)",
		} {
			kit.Execute(t, conn, "select ratelimit_"+call, policy)
		}
		eleven, repeat := kit.RequestOf(policy, "known", 11), kit.RequestOf(policy, "granted", 3, "first")
		never, again := db.Must(eleven.Acquire(conn)), db.Must(repeat.Acquire(conn))
		require.True(t, again.Replayed)
		answers := kit.SendBatch(t, conn, kit.AcquireMany, eleven, repeat, kit.RequestOf(policy, "known", 0), kit.RequestOf(policy, "unknown", 0))
		require.Equal(t, &again, answers[1].Decision)
		require.Equal(t, never.Remaining, answers[0].Decision.Remaining)
		for _, second := range []kit.NullableRequest{eleven, kit.RequestOf(policy, "granted", 11), repeat} {
			require.Equal(t, model.Never, kit.SendBatch(t, conn, kit.AcquireMany, eleven, second)[0].Decision.RetryAfter)
		}
	}
	kit.Execute(t, conn, "select ratelimit_policies(), ratelimit_version()")
	require.Equal(t, before, kit.RowsOf(t, db.DB))
}
