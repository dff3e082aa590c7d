package acquire

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestOddTexts_AreBucketsOfTheirOwn(t *testing.T) {
	db := kit.ParallelDB(t)
	for _, mode := range kit.Protocols {
		for name, durability := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
			policy := fmt.Sprintf("%s %s", name, mode)
			db.DefinePolicy(policy, 1000, 1, time.Hour, durability)
			conn := db.Connect(t)
			q := kit.InMode{Conn: conn, Mode: mode}
			for i, key := range kit.OddTexts {
				cost := int64(i + 1)
				d, err := kit.Acquire(q, policy, key, cost, key)
				require.NoError(t, err, "%q", key)
				require.Equal(t, 1000-cost, d.Remaining, "%q is a bucket of its own", key)
				if len(key) < 512 {
					d, err = kit.Acquire(q, policy, key, 1, key+"?")
					require.NoError(t, err, "%q", key)
					require.Equal(t, 1000-cost-1, d.Remaining, "%q is an idempotency key of its own", key)
					require.NoError(t, kit.ErrorOf(kit.Refund(q, policy, key, 1)))
				}
			}
			for i, key := range kit.OddTexts {
				cost := int64(i + 1)
				d := kit.NoError(kit.Acquire(q, policy, key, cost, key))(t)
				require.True(t, d.Replayed)
				d = kit.NoError(kit.Peek(q, policy, key, 1))(t)
				require.Equal(t, 1000-cost, d.Remaining)
				require.NoError(t, kit.ErrorOf(conn.Exec(context.Background(), "select ratelimit_reset($1, $2)", mode, policy, key)))
				require.Nil(t, db.Bucket(policy, key))
			}
		}
	}
}

func TestOddTexts_ArePolicies(t *testing.T) {
	db := kit.ParallelDB(t)
	for i, name := range kit.OddTexts {
		db.DefinePolicy(name, int64(i+1), 1, time.Hour)
	}
	names := kit.Column(t, db.DB, "select policy from ratelimit_policies()")
	require.Equal(t, slices.Sorted(slices.Values(kit.OddTexts)), names, "by byte")
	for i, name := range kit.OddTexts {
		require.Equal(t, kit.Allowed(int64(i), time.Hour, int64(i+1)), db.AcquireAt(kit.T0, name, "k", 1, "first"), "%q", name)
		db.RefundAt(kit.T0, name, "k", 1)
		db.Reset(name, "k")
		db.DropPolicy(name)
	}
	require.Empty(t, kit.Column(t, db.DB, "select policy from ratelimit_policies()"))
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
