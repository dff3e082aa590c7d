package concurrency

import (
	"context"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// A call reads the rows it is about however large the tables are, also when the session planned its
// statements while they were empty, and no statistics have told it otherwise since.
func TestPlans_ReadOnlyWhatTheyNeed(t *testing.T) {
	t.Parallel()
	const rows, atMost = 3000, 100
	for name, statistics := range map[string]string{
		"never analyzed":      "",
		"analyzed when empty": "vacuum analyze ratelimit.policies, ratelimit.buckets, ratelimit.idempotency_keys, ratelimit.ephemeral_buckets, ratelimit.ephemeral_idempotency_keys",
	} {
		for _, durability := range []kit.PolicyOption{kit.Durable, kit.Ephemeral} {
			t.Run(name, func(t *testing.T) {
				db := kit.ParallelDB(t)
				for _, table := range kit.BucketTables {
					db.Execute("alter table ratelimit." + table + " set (autovacuum_enabled = off)")
				}
				if statistics != "" {
					db.Execute(statistics)
				}
				db.DefinePolicy("p", rows, 1, kit.ADay, durability)
				db.Execute("select ratelimit_override('p', 'first', 5)")
				session := db.Session()
				for i := range 10 { // enough for a plan to be kept
					for _, call := range planCalls {
						rowsRead(session, strings.ReplaceAll(call, "KEY", fmt.Sprintf("a%d", i)))
					}
				}
				for i := range rows / 500 {
					db.Execute(fmt.Sprintf(`
						select count(*) from ratelimit_acquire_many(
							array_fill('p'::text, array[500]), array(select 'g' || i from generate_series(%[1]d, %[1]d + 499) as i),
							null, array(select 'i' || i from generate_series(1, 500) as i))`, i*500))
				}
				db.Execute("select ratelimit_override('p', 'g' || i, 5, expires_at => '2100-01-01'::timestamptz + i * interval '1 second') from generate_series(1, $1::integer) as i", rows)
				for _, call := range planCalls {
					for _, key := range []string{"b", "b", "g7", "a3"} {
						sql := strings.ReplaceAll(call, "KEY", key)
						if n := rowsRead(session, sql); n >= atMost {
							t.Errorf("%d %s", n, sql)
						}
					}
				}
			})
		}
	}
}

// planCalls are about one key or a few of policy p. A policy that refills lends no slots.
var planCalls = func() (calls []string) {
	for name, f := range kit.Functions {
		if regexp.MustCompile(` key(\[\]|s:key\[\])?( |$)`).MatchString(f.Arguments) && f.Writes != "slots" {
			calls = append(calls, f.Samples(name)...)
		}
	}
	return append(calls, "select from ratelimit_overrides('p', 'KEY', 10)", "select from ratelimit_cleanup(10)")
}()

// Calls for many buckets lock them in the order of key, and find each by its newest version, whatever the statistics
// and the caller's settings say.
func TestPlans_LockInOrder(t *testing.T) {
	db := kit.ParallelDB(t)
	for _, table := range kit.BucketTables {
		db.Execute("alter table ratelimit." + table + " set (autovacuum_enabled = off)")
	}
	pinned := kit.Column(t, db.DB, `
		select format('set %s = %s', split_part(c, '=', 1), split_part(c, '=', 2))
		  from pg_proc, unnest(proconfig) as c where oid = 'ratelimit.acquire_batch'::regproc`)
	settings := []string{
		"set enable_nestloop = off", "set enable_tidscan = off", "set enable_indexscan = off", "set enable_bitmapscan = off",
		"set enable_indexonlyscan = off", "set enable_sort = off", "set enable_hashagg = off", "set enable_material = off", "set enable_memoize = off",
		"set random_page_cost = 0", "set random_page_cost = 10000", "set seq_page_cost = 0", "set cpu_tuple_cost = 1000",
		"set cpu_operator_cost = 1000", "set cpu_index_tuple_cost = 1000", "set effective_cache_size = 1", "set work_mem = 64",
		"set from_collapse_limit = 1; set join_collapse_limit = 1", "set geqo_threshold = 2", "set constraint_exclusion = on",
		"set parallel_setup_cost = 0; set parallel_tuple_cost = 0; set min_parallel_table_scan_size = 0",
	}
	together := strings.Join(slices.DeleteFunc(slices.Clone(settings), func(setting string) bool {
		return strings.Contains(setting, "geqo") || strings.Contains(setting, "= 0")
	}), "; ")
	db.Policy("p", 1000, 1, kit.ADay).Policy("e", 1000, 1, kit.ADay, kit.Ephemeral).Policy("o", 1000, 1, kit.ADay)
	planner := newPlanner(db)
	const fill = `
		insert into ratelimit.%[1]s (policy_id, key, level, refilled_at, due_at)
		select 99, 'k' || i, 1, now(), now() from generate_series(%[2]d, %[3]d) as i`
	for i, rows := range []string{
		"",
		"vacuum analyze ratelimit.buckets, ratelimit.ephemeral_buckets",
		fmt.Sprintf(fill, "buckets", 1, 100) + ";" + fmt.Sprintf(fill, "ephemeral_buckets", 1, 100),
		"analyze ratelimit.buckets, ratelimit.ephemeral_buckets",
		fmt.Sprintf(fill, "buckets", 101, 50_000) + ";" + fmt.Sprintf(fill, "ephemeral_buckets", 101, 50_000),
		"analyze ratelimit.buckets, ratelimit.ephemeral_buckets",
		"update pg_class set reltuples = 1, relpages = 1000000 where relname ~ 'buckets'",
		"update pg_class set reltuples = 1000000000, relpages = 1 where relname ~ 'buckets'",
	} {
		kit.Execute(t, db.Connect(t), rows, pgx.QueryExecModeSimpleProtocol)
		planned := []string{"", together}
		if i == 0 || i == 5 { // empty and never analyzed, large and analyzed: there each alone
			planned = append(planned, settings...)
		}
		for _, setting := range planned {
			locking := map[string]bool{}
			for _, plan := range planner.plansOf(setting+";"+strings.Join(pinned, ";"), lockingCalls) {
				var want string
				switch { // an outer side that comes in order, and an inner side that finds one row
				case strings.HasPrefix(plan.statement, "with taken as ( update"):
					want = `Update on (ephemeral_)?buckets b_1; Nested Loop; (Subquery|Function) Scan on (unnest )?u(_\d)?; .*Tid Scan on (ephemeral_)?buckets b_1; Limit; Index Scan Backward using \w+ on \S+ b(_\d)?;`
				case strings.HasPrefix(plan.statement, "with lent as ( update"):
					want = `Update on (ephemeral_)?buckets b; Nested Loop; Subquery Scan on u; Nested Loop; .*Function Scan on unnest u_\d; .*Limit; Index Scan Backward using \w+ on \S+ b_2; Tid Scan on (ephemeral_)?buckets b;`
				case strings.Contains(plan.statement, "skip locked"):
					want = `LockRows; (Sort; .*|Index Scan using \w+_pkey on)`
				case strings.Contains(plan.statement, "for update") && !strings.Contains(plan.statement, "from overrides as o"): // one of a key
					want = `(^|Nested Loop Left Join; .*Subquery Scan on b; |Nested Loop Left Join; .*)Limit; LockRows; Index Scan Backward using \w+ on`
				default:
					continue
				}
				locking[plan.statement] = true
				require.Regexp(t, want, plan.nodes, "%s, %s: %s", rows, setting, plan.statement)
			}
			require.Len(t, locking, 19, "take, with and without what was seen, take_any, lock_demanded, lock, drop_policy; durable and ephemeral, and of usage")
		}
	}
}

// What runs every statement that locks buckets: POLICY is p or e.
var lockingCalls = []string{
	"select from ratelimit_acquire_many('{POLICY,POLICY}', '{k1,new}')",
	"select from ratelimit_acquire_many('{POLICY,o}', '{k1,k1}')",
	"select from ratelimit_acquire_many('{POLICY,POLICY}', '{k1,k1}', '{1,5000}')",
	"select case when durable then ratelimit.lock_demanded_buckets(p, asked) else ratelimit.lock_demanded_ephemeral_buckets(p, asked) end" +
		" from ratelimit.policies as p, cast(array[row('k1', 1, '{1}', 1)] as ratelimit.demand[]) as asked where name = 'POLICY'",
	"select from ratelimit_override('POLICY', 'another', 5)",
	"select from ratelimit_acquire_many('{POLICY,POLICY}', '{k1,new}')",
	"select from ratelimit_drop_policy('POLICY')",
}

// rowsRead makes a call, which may be refused, and counts the rows of the package's tables that it read.
func rowsRead(s *kit.Session, sql string) (rows int64) {
	count := func() (rows int64) {
		require.NoError(s.Db.T, s.QueryRow(context.Background(), `
			select sum(seq_tup_read + idx_tup_fetch)::bigint from pg_stat_xact_user_tables where schemaname = 'ratelimit'`).Scan(&rows))
		return rows
	}
	s.Execute("begin; savepoint before")
	before := count()
	if err := kit.ErrorOf(s.Exec(context.Background(), sql)); err != nil {
		require.Regexp(s.Db.T, "^RL", kit.SQLState(err), "%s: %v", sql, err)
		s.Execute("rollback to before")
	}
	rows = count() - before
	s.Execute("commit")
	return rows
}

// A plan is what the server made of a statement of a function.
type plan struct{ statement, nodes string }

// A planner is a session that returns the plans of the statements of functions.
type planner struct {
	t     testing.TB
	conn  *pgx.Conn
	plans []plan
}

func newPlanner(db *kit.TestDB) *planner {
	p := &planner{t: db.T}
	note := func(_ *pgconn.PgConn, notice *pgconn.Notice) {
		if _, text, found := strings.Cut(notice.Message, "Query Text: "); found {
			var statement, nodes string
			for line := range strings.Lines(text) {
				if node, _, found := strings.Cut(line, "  (cost="); found {
					nodes += strings.TrimPrefix(strings.TrimLeft(node, " "), "->  ") + "; "
				} else if nodes == "" {
					statement += line
				}
			}
			statement, _, _ = strings.Cut(statement, "\nQuery Parameters: ") // since PostgreSQL 16
			p.plans = append(p.plans, plan{strings.Join(strings.Fields(statement), " "), nodes})
		}
	}
	p.conn = db.Connect(db.T, func(config *pgx.ConnConfig) { config.OnNotice = note })
	kit.Execute(db.T, p.conn, "load 'auto_explain'")
	return p
}

// plansOf runs calls that are rolled back, for a durable and an ephemeral policy, and returns the plans of all statements.
func (p *planner) plansOf(settings string, calls []string) []plan {
	kit.Execute(p.t, p.conn, "reset all; discard plans; "+settings+`; set search_path = ratelimit, public; set jit = off;
		set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on;
		set client_min_messages = log; set log_min_messages = panic`, pgx.QueryExecModeSimpleProtocol)
	p.plans = nil
	for _, policy := range []string{"p", "e"} {
		all := strings.ReplaceAll(strings.Join(calls, "; "), "POLICY", policy)
		kit.Execute(p.t, p.conn, "begin; "+all+"; rollback", pgx.QueryExecModeSimpleProtocol)
	}
	return p.plans
}

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
