package tests

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

func TestTransaction_ARollbackGivesBackExactlyWhatWasTaken(t *testing.T) {
	t.Parallel()
	for _, kind := range []policyOption{durable, ephemeral} {
		for _, refilled := range []policyOption{continuous, stepped} {
			db := newDB(t).policy("p", 10, 3, time.Second, kind, refilled)
			db.acquireAt(t0, "p", "known", 4)
			db.acquireAt(t0, "p", "twin", 4)
			before := db.bucket("p", "known")
			db.setClock(t0.Add(1234567 * time.Microsecond))
			s := db.begin().take("p", "known", 5, "X").take("p", "known", 1).take("p", "new", 1).run("rollback")
			require.Equal(t, before, db.bucket("p", "known"))
			require.Nil(t, db.bucket("p", "new"))
			s.exec("begin")
			s.acquire("p", "known", 1)
			s.exec("savepoint s")
			s.acquire("p", "known", 5, "X")
			s.acquire("p", "new", 1)
			s.exec("rollback to s")
			s.acquire("p", "known", 4)
			s.exec("commit")
			db.take("p", "twin", 1).take("p", "twin", 4)
			require.Equal(t, db.bucket("p", "twin"), db.bucket("p", "known"))
			require.Nil(t, db.bucket("p", "new"))
		}
	}
}

func TestTransaction_HasAnyNumberOfCalls(t *testing.T) {
	db := parallelDB(t, t0).policy("p", 5, 1, time.Second)
	s := db.begin()
	for left := int64(4); left >= 0; left-- {
		require.Equal(t, left, s.acquire("p", "k", 1, fmt.Sprint("X", left)).Remaining)
	}
	require.Equal(t, denied(0, time.Second, 5*time.Second, 5), s.acquire("p", "k", 1))
	require.Equal(t, replayed(allowed(3, 2*time.Second, 5)), s.acquire("p", "k", 1, "X3"))
	require.Equal(t, allowed(4, time.Second, 5), s.acquire("p", "other", 1))
	require.EqualValues(t, 5, db.left("p", "k"), "nothing is seen before the commit")
	s.exec("commit")
	require.Equal(t, []int64{0, 4}, []int64{db.left("p", "k"), db.left("p", "other")})
}

var snapshotIsolation = []string{"repeatable read", "serializable"}

func TestTransaction_SnapshotIsolation_AGrantOnAChangedBucketFails(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.policy("p", 10, 1, aDay, kind).take("p", "known", 1)
		for i, level := range snapshotIsolation {
			for _, key := range []string{"known", fmt.Sprint("new", i)} {
				s := db.session().run("begin isolation level " + level).run("select from ratelimit.policies") // takes the snapshot
				db.acquire("p", key, 1)
				left := db.left("p", key)
				_, err := acquire(s, "p", key, 1)
				require.Equal(t, "40001", sqlState(err), "%s, %s", level, key)
				s.exec("rollback")
				require.Equal(t, left, db.left("p", key))
				require.Equal(t, left-1, s.acquire("p", key, 1).Remaining, "tried again")
			}
			s := db.session().run("begin isolation level " + level)
			require.True(t, s.acquire("p", fmt.Sprint("unchanged", i), 1).Allowed)
			s.exec("commit")
		}
	})
}

func TestTransaction_SnapshotIsolation_ADenialIsAsOldAsTheSnapshot(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, aDay)
	for _, level := range snapshotIsolation {
		db.acquire("p", level, 10)
		s := db.session().run("begin isolation level " + level).run("select from ratelimit.policies")
		db.must(refund(db.Pool, "p", level, 5))
		require.False(t, s.acquire("p", level, 1).Allowed)
		require.EqualValues(t, 0, s.db.must(peek(s, "p", level, 1)).Remaining)
		s.exec("commit")
		require.EqualValues(t, 4, s.acquire("p", level, 1).Remaining)
	}
}

func TestTransaction_NoSettingOfTheSessionChanges(t *testing.T) {
	db := parallelDB(t)
	s := db.session().run("do '/* loads plpgsql, which has settings */ begin end'")
	s.exec("set search_path = pg_catalog; set intervalstyle = iso_8601; set timezone = 'Asia/Tokyo'")
	s.exec("create temporary table before as select name, setting from pg_settings")
	changed := func() []string {
		return columnOf(t, s, `
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
		require.NotEqual(t, "42883", sqlState(err), call) // undefined function
		require.Empty(t, changed(), call)
	}
	s.exec("begin")
	s.exec("select public.ratelimit_acquire('p', 'k', 3, 'X')")
	require.Empty(t, changed())
	s.exec("commit")
	require.Empty(t, changed())
	s.exec("set work_mem = '5MB'")
	require.Equal(t, []string{"work_mem: 4096 -> 5120"}, changed())
}

// The two traps of calling a function that takes tokens, and the forms to write instead.

func TestTransaction_HowOftenAQueryCallsTheFunction(t *testing.T) {
	db := parallelDB(t)
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
		db.definePolicy("p", 1000, 1, aDay)
		tag, err := db.Pool.Exec(context.Background(), q.query)
		require.NoError(t, err, q.query)
		require.Equal(t, q.rows, tag.RowsAffected(), q.query)
		require.Equal(t, q.taken, db.number("select sum(1000 - level / 1000000)::bigint from ratelimit.buckets"), q.query)
		db.dropPolicy("p")
	}
}

func TestReadOnlyTransaction(t *testing.T) {
	ctx := context.Background()
	db := parallelDB(t)
	for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		db.policy(name, 10, 1, aDay, durability).take(name, "known", 3)
		db.take(name, "empty", 10).take(name, "granted", 3, "first")
	}
	before := rowsOf(t, db.DB)
	conn := db.Connect(t)
	execute(t, conn, "set default_transaction_read_only = on")
	for _, policy := range []string{"durable", "ephemeral"} {
		for key, left := range map[string]int64{"known": 7, "empty": 0, "unknown": 10} {
			for _, call := range []string{
				"acquire($1, $2)", "acquire($1, $2, 10)", "acquire($1, $2, 1, 'first')", "acquire_many(array[$1::text], array[$2::text])",
				"refund($1, $2, 1)", "reset($1, $2)",
			} {
				if key == "empty" && strings.HasPrefix(call, "acquire_many") {
					continue // a batch denies without a write
				}
				_, err := conn.Exec(ctx, "select ratelimit_"+call, policy, key)
				require.Equal(t, "25006", sqlState(err), "%s: %v", call, err)
			}
			require.Equal(t, left, db.must(peek(conn, policy, key, 1)).Remaining)
			require.Equal(t, left, db.must(acquire(conn, policy, key, 0)).Remaining, "cost 0 writes nothing")
		}
		// Never, a replay and cost 0 write nothing, so they are answered: alone and in a batch.
		eleven, repeat := requestOf(policy, "known", 11), requestOf(policy, "granted", 3, "first")
		never, again := db.must(eleven.acquire(conn)), db.must(repeat.acquire(conn))
		require.True(t, again.Replayed)
		answers := sendBatch(t, conn, acquireMany, eleven, repeat, requestOf(policy, "known", 0), requestOf(policy, "unknown", 0))
		require.Equal(t, &again, answers[1].Decision)
		require.Equal(t, model.Never, answers[0].Decision.RetryAfter)
		require.Equal(t, never.Remaining, answers[0].Decision.Remaining)
		for _, second := range []nullableRequest{eleven, requestOf(policy, "granted", 11), repeat} {
			require.Equal(t, model.Never, sendBatch(t, conn, acquireMany, eleven, second)[0].Decision.RetryAfter)
		}
		for _, sql := range []string{"select ratelimit_define_policy($1, 10, 1, '1 hour')", "select ratelimit_drop_policy($1)"} {
			_, err := conn.Exec(ctx, sql, policy)
			require.Equal(t, "25006", sqlState(err), "%s: %v", sql, err)
		}
	}
	_, err := conn.Exec(ctx, "select ratelimit_cleanup()")
	require.Equal(t, "25006", sqlState(err), "%v", err)
	execute(t, conn, "select ratelimit_policies(), ratelimit_version()")
	require.Equal(t, before, rowsOf(t, db.DB))
}

func TestReadOnlyTransaction_ErrorSaysWhatHelps(t *testing.T) {
	db := parallelDB(t)
	for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		db.policy(name, 10, 1, time.Hour, durability).take(name, "known", 3, "first")
	}
	conn := db.Connect(t)
	execute(t, conn, "set default_transaction_read_only = on")
	for _, policy := range []string{"durable", "ephemeral"} {
		requireReadOnly(t, conn, policy, "default_transaction_read_only is on.")
	}
}

// requireReadOnly calls what writes, where nothing can be written.
func requireReadOnly(t *testing.T, conn *pgx.Conn, policy, detail string) {
	t.Helper()
	const hint = "Call it on the primary, in a read-write transaction. ratelimit_peek works here, on a standby for durable policies."
	for _, call := range []string{
		"select ratelimit_settle($1, 'known', 'first', 4)",
		"select ratelimit_refund($1, 'known', 1)", "select ratelimit_reset($1, 'known')", "call ratelimit_reset_all($1)",
		"select ratelimit_acquire_many(array[$1], '{known}')", "select ratelimit_acquire_many(array[$1, $1], '{known,new}', null, '{i,j}')",
		"select ratelimit_acquire_all(array[$1], '{known}')", "select ratelimit_acquire_all(array[$1, $1], '{known,new}', null, 'i')",
		"select ratelimit_acquire_all_many(array[$1, $1], '{known,new}', '{1,1}', '{1,1}')", "select ratelimit_acquire_packed(array[$1], '{new}')",
		"select ratelimit_define_policy($1, 20)", "select ratelimit_drop_policy($1)",
		"select ratelimit_override($1, 'known', 20)", "select ratelimit_remove_override($1, 'known')",
		"select ratelimit_define_shard(0, 1) where $1 <> ''", "select ratelimit_cleanup() where $1 <> ''", "call ratelimit_cleanup_all(('1 second' || left($1, 0))::interval)",
	} {
		_, err := conn.Exec(t.Context(), call, pgx.QueryExecModeSimpleProtocol, policy)
		e := pgError(err)
		require.NotNil(t, e, "%s: %v", call, err)
		require.Equal(t, []string{"25006", "cannot write in a read-only transaction", detail, hint}, []string{e.Code, e.Message, e.Detail, e.Hint}, call)
		require.NotRegexp(t, `(?i)"(with|update|insert|delete|lock)|\sfrom\s`, e.Where, call)
	}
}
