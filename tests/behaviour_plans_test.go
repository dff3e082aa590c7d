package tests

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
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
		for _, durability := range []policyOption{durable, ephemeral} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				db := newDB(t)
				for _, table := range bucketTables {
					db.exec("alter table ratelimit." + table + " set (autovacuum_enabled = off)")
				}
				if statistics != "" {
					db.exec(statistics)
				}
				db.definePolicy("p", rows, 1, aDay, durability)
				db.exec("select ratelimit_override('p', 'first')")
				session := db.session()
				for i := range 10 { // enough for a plan to be kept
					for _, call := range planCalls {
						session.exec(strings.ReplaceAll(call, "KEY", fmt.Sprintf("a%d", i)))
					}
				}
				for i := range rows / 500 {
					db.exec(fmt.Sprintf(`
						select count(*) from ratelimit_acquire_many(
							array_fill('p'::text, array[500]), array(select 'g' || i from generate_series(%[1]d, %[1]d + 499) as i),
							null, array(select 'i' || i from generate_series(1, 500) as i))`, i*500))
				}
				db.exec("select ratelimit_override('p', 'g' || i, expires_at => '2100-01-01'::timestamptz + i * interval '1 second') from generate_series(1, $1::integer) as i", rows)

				for _, call := range planCalls {
					for _, key := range []string{"b", "b", "g7", "a3"} {
						sql := strings.ReplaceAll(call, "KEY", key)
						if n := session.rowsRead(sql); n >= atMost {
							t.Errorf("%d %s", n, sql)
						}
					}
				}
			})
		}
	}
}

var planCalls = []string{
	"select from ratelimit_acquire('p', 'KEY')",
	"select from ratelimit_acquire('p', 'KEY', 5000)",
	"select from ratelimit_acquire('p', 'KEY', 1, 'i1')",
	"select from ratelimit_peek('p', 'KEY')",
	"select from ratelimit_refund('p', 'KEY', 1)",
	"select from ratelimit_acquire_many('{p,p}', '{KEY,KEY}')",
	"select from ratelimit_acquire_many('{p,p}', '{KEY,KEY.}')",
	"select from ratelimit_acquire_many('{p,p}', '{KEY,KEY.}', '{1,4000}')",
	"select from ratelimit_acquire_many('{p,p}', '{KEY,KEY.}', '{1,2}', '{i1,i2}')",
	"select from ratelimit_acquire_many('{p,p}', '{KEY,KEY.}', '{1,3000}', '{j1,j2}')",
	"select from ratelimit_acquire_all('{p,p}', '{KEY,KEY.}')",
	"select from ratelimit_acquire_all('{p,p}', '{KEY,KEY.}', '{1,4000}')",
	"select from ratelimit_acquire_all('{p,p}', '{KEY,KEY.}', '{1,2}', 'i3')",
	"select from ratelimit_acquire_all_many('{p,p,p}', '{KEY,KEY.,KEY}', null, '{2,1}')",
	"select from ratelimit_acquire_packed('{p,p}', '{KEY,KEY.}')",
	"select from ratelimit_override('p', 'KEY', expires_at => '2099-01-01')",
	"select from ratelimit_overrides('p', 'KEY')",
	"select from ratelimit_remove_override('p', 'KEY')",
	"select from ratelimit_reset('p', 'KEY')",
	"select from ratelimit_cleanup(10)",
}

// rowsRead runs SQL and counts the rows of the package's tables that it read.
func (s *session) rowsRead(sql string) (rows int64) {
	s.db.t.Helper()
	count := func() (rows int64) {
		require.NoError(s.db.t, s.QueryRow(context.Background(), `
			select sum(seq_tup_read + idx_tup_fetch)::bigint
			  from pg_stat_xact_user_tables where schemaname = 'ratelimit'`).Scan(&rows))
		return rows
	}
	s.exec("begin")
	before := count()
	s.exec(sql)
	rows = count() - before
	s.exec("commit")
	return rows
}

// Calls for many buckets lock them in the order of key, and find each by its newest version, whatever the statistics
// and the caller's settings say.
func TestPlans_LockInOrder(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for _, table := range bucketTables {
		db.exec("alter table ratelimit." + table + " set (autovacuum_enabled = off)")
	}
	pinned := column(t, db.DB, `
		select format('set %s = %s', split_part(c, '=', 1), split_part(c, '=', 2))
		  from pg_proc, unnest(proconfig) as c where oid = 'ratelimit.acquire_batch'::regproc`)
	settings := []string{
		"", "set enable_nestloop = off", "set enable_tidscan = off", "set enable_indexscan = off", "set enable_bitmapscan = off",
		"set enable_indexonlyscan = off", "set enable_sort = off", "set enable_hashagg = off", "set enable_material = off", "set enable_memoize = off",
		"set random_page_cost = 0", "set random_page_cost = 10000", "set seq_page_cost = 0", "set cpu_tuple_cost = 1000",
		"set cpu_operator_cost = 1000", "set cpu_index_tuple_cost = 1000", "set effective_cache_size = 1", "set work_mem = 64",
		"set from_collapse_limit = 1; set join_collapse_limit = 1", "set geqo_threshold = 2", "set constraint_exclusion = on",
		"set parallel_setup_cost = 0; set parallel_tuple_cost = 0; set min_parallel_table_scan_size = 0",
	}
	var all []string
	for _, setting := range settings {
		if setting != "" && !strings.Contains(setting, "geqo") && !strings.Contains(setting, "= 0") {
			all = append(all, setting)
		}
	}
	settings = append(settings, strings.Join(all, "; "))

	var sources []*source
	for _, function := range []string{"ratelimit.take", "ratelimit.take_any", "ratelimit.lock_buckets", "ratelimit.decide_in_order", "ratelimit_drop_policy"} {
		sources = append(sources, sourceOf(t, db.DB, function))
	}
	const fill = `
		insert into ratelimit.%[1]s (policy_id, key, level, refilled_at, due_at)
		select 1, 'k' || i, 1, now(), now() from generate_series(%[2]d, %[3]d) as i`
	for _, rows := range []string{
		"",
		"vacuum analyze ratelimit.buckets, ratelimit.ephemeral_buckets",
		fmt.Sprintf(fill, "buckets", 1, 100) + ";" + fmt.Sprintf(fill, "ephemeral_buckets", 1, 100),
		"analyze ratelimit.buckets, ratelimit.ephemeral_buckets",
		fmt.Sprintf(fill, "buckets", 101, 50_000) + ";" + fmt.Sprintf(fill, "ephemeral_buckets", 101, 50_000),
		"analyze ratelimit.buckets, ratelimit.ephemeral_buckets",
		"update pg_class set reltuples = 1, relpages = 1000000 where relname ~ 'buckets'",
		"update pg_class set reltuples = 1000000000, relpages = 1 where relname ~ 'buckets'",
	} {
		execute(t, db.Connect(t), rows, pgx.QueryExecModeSimpleProtocol)
		for _, setting := range settings {
			conn := db.Connect(t)
			execute(t, conn, setting+";"+strings.Join(pinned, ";"), pgx.QueryExecModeSimpleProtocol)
			locking := 0
			for _, s := range sources {
				for _, f := range s.fragments {
					var want string
					switch statement := f.String(); { // an outer side that comes in order, and an inner side that finds one row
					case strings.HasPrefix(statement, "with taken as ( update"):
						want = `Update on ratelimit\.(ephemeral_)?buckets b_1; Nested Loop; (Subquery|Function) Scan on (unnest )?u(_\d)?; .*Tid Scan on ratelimit\.(ephemeral_)?buckets b_1; Limit; Index Scan Backward using \w+ on \S+ b(_\d)?;`
					case len(f.bucketTables()) > 0 && strings.Contains(statement, "skip locked"):
						want = `LockRows; (Sort; .*|Index Scan using \w+_pkey on)`
					case len(f.bucketTables()) > 0 && strings.Contains(statement, "for update"):
						want = `(^|Nested Loop Left Join; .*Subquery Scan on b; |Nested Loop Left Join; .*)Limit; LockRows; Index Scan Backward using \w+ on`
					default:
						continue
					}
					locking++
					require.Regexp(t, want, planNodes(s.explain(conn, f)), "%s, %s", rows, setting)
				}
			}
			require.Equal(t, 14, locking)
			require.NoError(t, conn.Close(context.Background()))
		}
	}
}

// planNodes names the nodes of a plan, in its order.
func planNodes(plan string) string {
	var nodes strings.Builder
	for i, line := range strings.Split(plan, "\n") {
		if _, node, found := strings.Cut(line, "->  "); found || i == 0 {
			nodes.WriteString(cmp.Or(node, line) + "; ")
		}
	}
	return nodes.String()
}
