// Package slots tests limits on what is in flight: who holds, until when, and what a holder may count on.
package slots

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

const lease = time.Minute

func at(d time.Duration) time.Time { return kit.T0.Add(d) }

func TestHold_ADenialWritesAndLocksNothing(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.At(kit.T0).Lend("p", 2, lease, kind)
		db.HoldAt(at(-2*lease), "ended", 1)
		db.HoldAt(at(0), "a", 2)
		before := db.LeaseRows()
		s := db.Begin()
		require.False(t, s.Hold("b", 1).Allowed)
		require.False(t, s.Hold("b", 3).Allowed)
		require.False(t, kit.NoError(kit.Hold(s, "p", "unknown", "b", 3))(t).Allowed)
		require.Equal(t, kit.Traces{}, s.Traces())
		require.Equal(t, before, db.LeaseRows())
		for _, table := range kit.SlotTables {
			db.Execute("select from ratelimit." + table + " for update nowait")
		}
		s.Execute("commit")

		s.Execute("begin read only")
		require.False(t, s.Hold("b", 1).Allowed)
		for _, call := range []string{"hold('p', 'k', 'a', 2)", "renew('p', 'k', 'a')", "release('p', 'k', 'a')", "hold('p', 'new', 'a')"} {
			s.Execute("savepoint s")
			_, err := s.Exec(context.Background(), "select ratelimit_"+call)
			require.Equal(t, "25006", kit.SQLState(err), call)
			s.Execute("rollback to s")
		}
		require.Equal(t, model.Never, kit.NoError(kit.Renew(s, "p", "k", "x"))(t))
	})
}

// Errors have facts and a remedy. That each bad argument is refused, tests/torture tests.
func TestSlots_BadInput(t *testing.T) {
	db := kit.ParallelDB(t).Lend("p", 5, lease).Policy("tokens", 5, 1, time.Second)
	long := strings.Repeat("x", 513)
	db.Hold("a", 2)
	for _, c := range []struct{ code, sql, message, detail, hint string }{
		{"22023", "hold('p', 'k', '" + long + "')", "invalid holder", "holder is 513 bytes long.", "1 to 512"},
		{"22023", "hold('p', 'k', 'h', -1)", "invalid cost", "cost is -1.", "1 or more; ratelimit_release"},
		{"RL001", "hold('none', 'k', 'h')", "unknown policy", "'none'", "capacity => 5, lease => '5 minutes'"},
		{"22023", "holders(max_rows => 0)", "invalid max_rows", "max_rows is 0.", "1 or more"},
		{"RL002", "hold('p', 'k', 'a', 1)", "the holder holds with another cost", "'a' holds 2 slots and is asked to hold 1.", "first cost"},
		{"22023", "hold('tokens', 'k', 'h')", "invalid policy", "'tokens' has tokens", "ratelimit_acquire, or define another policy with a lease"},
		{"22023", "acquire('p', 'k')", "invalid policy", "'p' lends slots", "ratelimit_hold"},
		{"22023", "acquire_all('{tokens,p}', '{k,k}')", "invalid policy", "Element 2 of the request: Policy 'p' lends slots", "ratelimit_hold"},
		{"22023", "define_policy('new', lease => '1 s')", "invalid capacity", "capacity is null.", "capacity and lease"},
		{"22023", "define_policy('new', 10001, lease => '1 s')", "invalid capacity", "capacity is 10001.", "1 to 10000"},
		{"22023", "define_policy('new', 1, lease => '999 us')", "invalid lease", "lease is 00:00:00.000999.", "1 millisecond to 365250 days"},
		{"22023", "define_policy('new', 1, refill => 1, lease => '1 s')", "invalid refill", "refill is 1.", "or drop the policy and define it anew without a lease"},
		{"22023", "define_policy('new', 1, remember => '1 s', lease => '1 s')", "invalid remember", "remember is", "holder"},
		{"22023", "define_policy('p', durable => false)", "invalid durable", "durable => t", "Drop the policy"},
		{"22023", "define_policy('tokens', lease => '1 s')", "invalid lease", "lease is 00:00:01.", "Drop it"},
		{"22023", "override('p', 'k', 10001)", "invalid capacity", "capacity is 10001.", "0 to 10000"},
		{"22023", "override('tokens', 'k', lease => '1 s')", "invalid lease", "lease is 00:00:01.", "Leave it out"},
	} {
		err := db.Refused(c.code, "select ratelimit_"+c.sql)
		require.Equal(t, c.message, err.Message, c.sql)
		require.Contains(t, err.Detail, c.detail, c.sql)
		require.Contains(t, err.Hint, c.hint, c.sql)
	}
	require.Equal(t, []string{"1  allowed", "2 22023 ", "3 RL001 ", "4 22023 "}, kit.Column(t, db.DB, `
		select concat_ws(' ', request, coalesce(error_code, ''), case when allowed then 'allowed' else '' end)
		  from ratelimit_acquire_many('{tokens,p,none,p}', '{k,k,k,k}', '{1,1,1,0}') order by request`), "in batches it is that request's error")
	require.Equal(t, []string{"a:2"}, db.Holders("p"))
	require.Empty(t, db.Rows()[1:], "a bucket of tokens alone")
}

func TestSlots_Rules(t *testing.T) {
	t.Parallel()
	kit.RunSteps(t, map[string][]kit.Step{
		"slots that were released are cleaned up before the lease would have ended": {
			{0, "select ratelimit_define_policy('p', 2, lease => '60 s', durable => (durable))", ""},
			{0, "select ratelimit_define_policy('p', lease => '365250 days')", ""},
			{0, "select allowed from ratelimit_hold('p', 'k', 'a')", "t"},
			{time.Hour, "select ratelimit_cleanup()", "0,0"},
			{2 * time.Hour, "select ratelimit_release('p', 'k', 'a')", "t"},
			{2 * time.Hour, "select ratelimit_cleanup()", "1,0"},
		},
		"a lease that a renewal has shortened is cleaned up after its new end": {
			{0, "select ratelimit_define_policy('p', 2, lease => '10 days', durable => (durable))", ""},
			{0, "select allowed from ratelimit_hold('p', 'k', 'a')", "t"},
			{time.Hour, "select ratelimit_cleanup()", "0,0"},
			{time.Hour, "select ratelimit_define_policy('p', lease => '10 s')", ""},
			{time.Hour, "select ratelimit_renew('p', 'k', 'a')", "00:00:10"},
			{2 * time.Hour, "select ratelimit_cleanup()", "1,0"},
		},
	})
}
