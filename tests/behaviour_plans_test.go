package tests

import (
	"context"
	"fmt"
	"strings"
	"testing"

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
