package concurrency

import (
	"context"
	"fmt"
	"path"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestHOT_UpdatesAreHeapOnly(t *testing.T) {
	t.Parallel()
	const calls, keys = 4000, 200
	// One session on a server of its own: a transaction that is open, in any of its databases or waiting for a processor, keeps old row versions
	// from being pruned, and updates without room on their page are not HOT.
	db, _ := kit.NewPrivateDB(t, "synchronous_commit=off", "autovacuum=off")
	db.DefinePolicy("p", 1_000_000, 1, kit.ADay)
	db.Execute(fmt.Sprintf(`do $$ begin
		for i in 1..%d loop
			perform ratelimit_acquire('p', 'k' || i * 7 %% %d);
			commit;
		end loop;
		perform pg_stat_force_next_flush();
	end $$`, calls, keys))
	require.EqualValues(t, calls, db.Number("select sum(1000000 - level / 1000000)::bigint from ratelimit.buckets"))
	updates := db.Number("select n_tup_upd from pg_stat_user_tables where relid = 'ratelimit.buckets'::regclass")
	hot := db.Number("select n_tup_hot_upd from pg_stat_user_tables where relid = 'ratelimit.buckets'::regclass")
	require.EqualValues(t, calls-keys, updates)
	require.Equal(t, updates, hot)
}

// A new row has room, which its first update leaves to the next versions, whichever call it is.
func TestHOT_TheFirstUpdateLeavesItsRoom(t *testing.T) {
	db := kit.ParallelDB(t).Policy("durable", 10, 1, kit.ADay).Policy("ephemeral", 10, 1, kit.ADay, kit.Ephemeral).Policy("overridden", 10, 1, kit.ADay)
	db.Execute("select ratelimit_override('overridden', 'another', 5)")
	const has = `select case count(*) when 1 then count(room) else -1 end from (
		select key, room from ratelimit.buckets union all select key, room from ratelimit.ephemeral_buckets) as b where key = $1`
	for name, call := range map[string]string{
		"acquire":              "ratelimit_acquire(q.policy, q.key)",
		"acquire with a key":   "ratelimit_acquire(q.policy, q.key, 1, 'again')",
		"acquire up to":        "ratelimit_acquire_up_to(q.policy, q.key, 1)",
		"all that there is":    "ratelimit_acquire_up_to(q.policy, q.key, 100)",
		"reserve":              "ratelimit_reserve(q.policy, q.key, '1 day')",
		"reserve and wait":     "ratelimit_reserve(q.policy, q.key, '1 day', 10)",
		"charge":               "ratelimit_charge(q.policy, q.key, 100)",
		"refund":               "ratelimit_refund(q.policy, q.key, 1)",
		"settle":               "ratelimit_settle(q.policy, q.key, 'first', 2)",
		"acquire all":          "ratelimit_acquire_all(array[q.policy], array[q.key])",
		"acquire all by a key": "ratelimit_acquire_all(array[q.policy], array[q.key], null, 'again')",
		"many":                 "ratelimit_acquire_many(array[q.policy], array[q.key])",
		"many, one too large":  "ratelimit_acquire_many(array[q.policy, q.policy], array[q.key, q.key], array[10, 1])",
		"all many":             "ratelimit_acquire_many(array[q.policy], array[q.key], sizes => array[1])",
	} {
		for _, policy := range []string{"durable", "ephemeral", "overridden"} {
			key := name + ", " + policy
			db.Execute("select from ratelimit_acquire($1, $2, 1, 'first')", policy, key)
			require.EqualValues(t, 1, db.Number(has, key), "%s: a new row", key)
			db.Execute("select from (select $1::text as policy, $2::text as key) as q, lateral (select from "+call+") as called", policy, key)
			require.EqualValues(t, 0, db.Number(has, key), key)
		}
	}
}

// Of batches: plain calls and ratelimit_acquire_all read them all, as CONTRIBUTING.md says why. An old snapshot keeps every version of a row, and
// no index entry may go. What a call on a hot key has to read must not grow with them.
func TestHOT_AHeldSnapshotDoesNotMakeCallsReadEveryVersion(t *testing.T) {
	kit.OnDBs(t, map[string]kit.PolicyOption{"buckets": kit.Durable, "ephemeral_buckets": kit.Ephemeral}, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		const versions = 12000
		db.Policy("full", 1_000_000, 1, kit.ADay, kind).Policy("empty", versions, 1, kit.ADay, kind)
		db.Execute("select from ratelimit_acquire_many('{full,full,empty}', '{hot,other,hot}')")
		db.Begin().Execute("set transaction isolation level repeatable read").Execute("select from ratelimit.policies")
		// As calls would, but for the time they take.
		db.Execute(fmt.Sprintf(`do $$
			declare
				v_rows tid[] := array(select ctid from ratelimit.%[1]s where key = 'hot');
			begin
				for i in 1..%[2]d loop
					with taken as (update ratelimit.%[1]s set level = level - 1000000, room = null where ctid = any (v_rows) returning ctid)
					select array_agg(ctid) into v_rows from taken;
					commit;
				end loop;
			end $$`, path.Base(t.Name()), versions-1))
		s := db.Session()
		for _, call := range []string{
			"ratelimit_acquire_many('{full,full}', '{hot,hot}')", "ratelimit_acquire_many('{full,full}', '{hot,other}')",
			"ratelimit_acquire_many('{empty,empty}', '{hot,hot}')", "ratelimit_acquire_many('{empty,full}', '{hot,other}')",
			"ratelimit_acquire_many('{full,full}', '{hot,hot}', '{600000,600000}')",
			"ratelimit_acquire_packed('{full,full,empty}', '{hot,other,hot}', null, '{2,1}')",
		} {
			s.Execute("select from " + call) // not to count what is read once in a session
			var plan []struct {
				Plan struct {
					Hit int `json:"Shared Hit Blocks"`
				}
			}
			require.NoError(t, s.QueryRow(context.Background(), "explain (analyze, buffers, format json) select from "+call).Scan(&plan))
			t.Logf("%s: %d pages", call, plan[0].Plan.Hit)
			require.Positive(t, plan[0].Plan.Hit)
			require.Less(t, plan[0].Plan.Hit, versions/150, call) // of which a page has about a hundred
		}
	})
}
