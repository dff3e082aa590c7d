package acquire

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestBadInput_HugeArrays(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 1_000_000, 1, time.Hour)
	const n = 20_000
	rows := kit.Column(t, db.DB, `
		select format('%s %s', coalesce(error_code, 'allowed'), count(*))
		 from ratelimit_acquire_many((select array_agg(case i % 4 when 0 then 'p' when 1 then 'nobody' when 2 then null else '' end order by i) from generate_series(1, $1) as i),
		 array_fill('k'::text, array[$1])) group by error_code order by 1`, n)
	require.Equal(t, []string{"22023 10000", "RL001 5000", "allowed 5000"}, rows)
	require.EqualValues(t, 1_000_000-n/4, db.Left("p", "k"))
	require.Zero(t, db.Number("select count(*) from ratelimit_acquire_many('{}', '{}')"), "no request, no answer")
	before := kit.RowsOf(t, db.DB)
	for _, sql := range []string{
		"select ratelimit_acquire_many(array_fill(null::text, array[1000000]), array['k'])",
		"select ratelimit_acquire_many(array['p'], array_fill(null::text, array[1000000]))",
		"select ratelimit_acquire_many(array['p'], array['k'], array_fill(1::bigint, array[1000000]))",
		"select ratelimit_acquire_many(array['p'], array['k'], null, array_fill(null::text, array[1000000]))",
		"select ratelimit_acquire('p', repeat('x', 1000000))", "select ratelimit_acquire(repeat('x', 1000000), 'k', 1, repeat('x', 1000000))",
		"select ratelimit_define_policy(repeat('x', 1000000), 1, 1, '1 second')",
	} {
		_ = db.Refused("22023", sql)
	}
	require.Equal(t, before, kit.RowsOf(t, db.DB))
}

func TestErrors_CountOneAndSeveral(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0).Policy("p", 10, 1, time.Second).Take("p", "k", 10)
	for call, want := range map[string]string{
		"acquire_many('{p,p}', '{k}')":                            "keys is 1 element long, policies 2.",
		"acquire_many('{p}', '{k,l}')":                            "keys is 2 elements long, policies 1.",
		"acquire_many('{p}', '{k}', sizes => '{2}')":              "sizes is 2 in sum, policies 1 element long.",
		"acquire_many('{p,p}', '{k,l}', sizes => '{1}')":          "sizes is 1 in sum, policies 2 elements long.",
		"acquire_many('{p,p}', '{k,l}', '{1,1}', '{i}', '{1,1}')": "idempotency_keys is 1 element long, sizes 2.",
	} {
		require.Equal(t, want, db.Refused("22023", "select ratelimit_"+call).Detail, call)
	}
	for cost, want := range map[int64]string{1: "Try again in 1 second.", 2: "Try again in 2 seconds.", 3: "Try again in 3 seconds."} {
		_, err := db.Pool.Exec(t.Context(), "select ratelimit_enforce('p', 'k', $1)", cost)
		denial, ok := client.AsDenial(err)
		require.True(t, ok, "%v", err)
		require.Equal(t, want, kit.PgError(err).Hint)
		fakes := kit.PgError(clienttest.DenialError(denial))
		require.Equal(t, []string{kit.PgError(err).Detail, want}, []string{fakes.Detail, fakes.Hint})
	}
}

// A caller's collation must neither make two keys one nor leave the functions without any.
func TestCollations_StayOutside(t *testing.T) {
	db := kit.ParallelDB(t)
	collations := kit.Column(t, db.DB, `
		select quote_ident(collname) from pg_collation
		 where collname in ('C', 'POSIX', 'ucs_basic', 'und-x-icu', 'tr-x-icu', 'en_US.utf8', 'C.utf8', 'pg_c_utf8')
		   and collencoding in (-1, pg_char_to_encoding(getdatabaseencoding()))`)
	if slices.Contains(collations, `"und-x-icu"`) {
		db.Execute("create collation careless (provider = icu, locale = 'und-u-ks-level1', deterministic = false)")
		collations = append(collations, "careless")
	} else {
		t.Log("the server was built without ICU: only the collations of libc are tried")
	}
	require.GreaterOrEqual(t, len(collations), 3)
	texts := []string{"key", "KEY", "kéy", "k\u00e9y ", "İ", "ı"}
	for i, collation := range collations {
		t.Run(collation, func(t *testing.T) {
			policy, table := fmt.Sprintf("policy %d", i), fmt.Sprintf("texts_%d", i)
			db.Execute(fmt.Sprintf("create table %s (policy text collate %s, key text collate %[2]s, other text collate %s)",
				table, collation, collations[(i+1)%len(collations)]))
			for _, text := range texts {
				db.Execute("insert into "+table+" values ($1, $2, $2)", policy, text)
			}
			every := "from " + table + " as t"
			db.Execute("select ratelimit_define_policy(t.policy, 10, 1, '1 hour') " + every)
			for _, argument := range []string{"key", "other"} { // of two collations no one is chosen
				require.Equal(t, repeat("9", len(texts)), kit.Column(t, db.DB, fmt.Sprintf("select (ratelimit_acquire(t.policy, t.%s, 1, t.key)).remaining::text %s", argument, every)))
				require.Equal(t, repeat("9", len(texts)), kit.Column(t, db.DB, fmt.Sprintf("select (ratelimit_peek(t.policy, t.%s)).remaining::text %s", argument, every)))
				require.Equal(t, repeat("true", len(texts)), kit.Column(t, db.DB, fmt.Sprintf("select (ratelimit_acquire(t.policy, t.%s, 1, t.key)).replayed::text %s", argument, every)))
				require.Equal(t, repeat("10", len(texts)), kit.Column(t, db.DB, fmt.Sprintf("select (ratelimit_refund(t.policy, t.%s, 1)).remaining::text %s", argument, every)))
				for _, call := range []string{
					"acquire_many(array[t.policy], array[t.%[1]s], '{1}', array[t.key || '!'])", "acquire_all(array[t.policy], array[t.%[1]s], '{1}', t.key || '?')",
					"acquire_many(array[t.policy, t.%[1]s], array[t.%[1]s, t.key], '{1,0}', array[t.key || '.', null], '{1,1}')",
				} {
					require.Equal(t, repeat("9", len(texts)), kit.Column(t, db.DB, fmt.Sprintf("select d.remaining::text %[2]s cross join lateral ratelimit_"+call+" as d where d.remaining is not null", argument, every)), call)
					db.Execute(fmt.Sprintf("select ratelimit_refund(t.policy, t.%s, 1) %s", argument, every))
				}
				require.Equal(t, repeat("{9}", len(texts)), kit.Column(t, db.DB, fmt.Sprintf("select d.remaining::text %[2]s cross join lateral ratelimit_acquire_packed(array[t.policy], array[t.%[1]s]) as d", argument, every)))
				db.Execute(fmt.Sprintf("select ratelimit_refund(t.policy, t.%s, 1) %s", argument, every))
				require.Equal(t, repeat("{4,4}", len(texts)), kit.Column(t, db.DB, fmt.Sprintf( // more than there is: they are decided in order
					"select d.remaining::text %[2]s cross join lateral ratelimit_acquire_packed(array[t.policy, t.policy], array[t.%[1]s, t.%[1]s], '{6,6}') as d", argument, every)))
				db.Execute(fmt.Sprintf("select ratelimit_override(t.policy, t.%s, 20) %s", argument, every))
				require.Equal(t, repeat("20", len(texts)), kit.Column(t, db.DB, fmt.Sprintf("select o.capacity::text %[2]s cross join lateral ratelimit_overrides(t.policy, t.%[1]s) as o", argument, every)))
				require.Equal(t, repeat("true", len(texts)), kit.Column(t, db.DB, fmt.Sprintf("select ratelimit_remove_override(t.policy, t.%s)::text %s", argument, every)))
				db.Execute(fmt.Sprintf("select ratelimit_reset(t.policy, t.%s) %s", argument, every))
				db.Execute("delete from ratelimit.idempotency_keys")
			}
			for _, sql := range []string{
				"select ratelimit_acquire(t.policy, left(t.other, 0)) ", "select ratelimit_acquire(left(t.policy, 0), t.other) ",
				"select ratelimit_peek(t.policy, left(t.other, 0)) ", "select ratelimit_refund(t.policy, left(t.key, 0), 1) ",
				"select ratelimit_reset(left(t.policy, 0), t.other) ", "select ratelimit_acquire(t.policy, t.key, 1, left(t.other, 0)) ",
			} {
				_ = db.Refused("22023", sql+every)
			}
			db.Execute("select ratelimit_drop_policy(t.policy) " + every + " limit 1")
			db.Execute("select ratelimit_define_policy('quota', 1, period => '1 day', time_zone => 'Europe/Berlin' collate " + collation + ")")
			for _, zone := range []string{"utc", "europe/berlin"} {
				for _, call := range []string{"define_policy('quota', ", "override('quota', 'k', "} {
					_ = db.Refused("22023", "select ratelimit_"+call+"time_zone => '"+zone+"' collate "+collation+")")
				}
			}
			_ = db.Refused("RL001", "select ratelimit_drop_policy(t.policy) "+every)
		})
	}
}

func repeat(value string, n int) []string { return slices.Repeat([]string{value}, n) }
