package spend

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestSpend_Rules(t *testing.T) {
	t.Parallel()
	const (
		bucket = "select ratelimit_define_policy('p', 10, 1, '1 hour', durable => (durable))"
		quota  = "select ratelimit_define_policy('p', 10, period => '1 day', anchor => '2024-03-30 12:00', durable => (durable))" // which turns at T0
	)
	kit.RunSteps(t, map[string][]kit.Step{
		"what an override's refill has paid of a debt stays paid if it ends in a pause": {
			{0, bucket, ""},
			{0, "select ratelimit_override('p', 'k', refill => 3600, expires_at => ratelimit.clock() + '60 s')", ""},
			{0, "select remaining from ratelimit_charge('p', 'k', 20)", "-10"},
			{30 * kit.Second, "select remaining, retry_after from ratelimit_pause('p', 'k', '2 min')", "0,01:02:00"},
			{3750 * kit.Second, "select allowed from ratelimit_acquire('p', 'k')", "t"},
		},
		"an override that ends with a pause refills no more once the pause has begun": {
			{0, bucket, ""},
			{0, "select ratelimit_override('p', 'k', refill => 3600, expires_at => ratelimit.clock() + '60 s')", ""},
			{0, "select remaining from ratelimit_charge('p', 'k', 110)", "-100"},
			{10 * kit.Second, "select remaining from ratelimit_pause('p', 'k', '50 s')", "-90"},
		},
		"a pause at capacity 0 outlives clean-up": {
			{0, bucket, ""},
			{0, "select remaining from ratelimit_pause('p', 'k', '1 hour')", "0"},
			{0, "select ratelimit_define_policy('p', 0)", ""},
			{kit.Second, "select ratelimit_cleanup()", "0,0"},
			{kit.Second, "select ratelimit_define_policy('p', 10)", ""},
			{2 * kit.Second, "select allowed, retry_after from ratelimit_acquire('p', 'k')", "f,01:59:58"},
		},
		"a shorter pause changes nothing, and what is given back in the longer one is lost": {
			{0, bucket, ""},
			{0, "select retry_after from ratelimit_pause('p', 'k', '1 hour')", "02:00:00"},
			{0, "select retry_after from ratelimit_pause('p', 'k', '1 s')", "02:00:00"},
			{10 * kit.Second, "select remaining from ratelimit_refund('p', 'k', 5)", "0"},
		},
		"a refund of a quota is of the period that runs": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 8)", "2"},
			{kit.ADay, "select remaining from ratelimit_refund('p', 'k', 2)", "10"},
		},
		"a quota that was given back is cleaned up before its turn": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 8)", "2"},
			{kit.Second, "select remaining from ratelimit_refund('p', 'k', 8)", "10"},
			{kit.Second, "select ratelimit_cleanup()", "1,0"},
		},
		"what is used of a quota stays used where the clock goes back and comes again": {
			{0, quota, ""},
			{kit.ADay, "select remaining from ratelimit_acquire('p', 'k', 8)", "2"},
			{0, "select remaining from ratelimit_acquire('p', 'k', 1)", "1"},
			{kit.ADay, "select remaining from ratelimit_peek('p', 'k')", "1"},
		},
		"a refund of a quota gives back all that was used, after a downgrade too": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 8)", "2"},
			{0, "select ratelimit_define_policy('p', 3)", ""},
			{0, "select remaining from ratelimit_refund('p', 'k', 6)", "1"},
			{0, "select remaining from ratelimit_refund('p', 'k', 6)", "3"},
		},
		"reset_after of a quota is by the policy once an override has ended": {
			{0, quota, ""},
			{0, "select ratelimit_override('p', 'k', 5, anchor => '2024-03-30 20:00', expires_at => ratelimit.clock() + '1 hour')", ""},
			{0, "select remaining, reset_after from ratelimit_acquire('p', 'k', 1)", "4,24:00:00"},
			{0, "select remaining, reset_after from ratelimit_peek('p', 'k')", "4,24:00:00"},
		},
		"a grant at the turn of a quota is of the period that begins": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 8, 'i')", "2"},
			{kit.Second, "select remaining from ratelimit_settle('p', 'k', 'i', 3)", "7"},
		},
		"a settlement uses at most 9000000000000 tokens of a quota": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('p', 'k', 5, 'i')", "5"},
			{0, "select remaining from ratelimit_charge('p', 'k', 9000000000000)", "-8999999999990"},
			{0, "select remaining from ratelimit_settle('p', 'k', 'i', 9000000000000)", "-8999999999990"},
		},
	})
}

// ratelimit_status answers what ratelimit_peek does, whatever a bucket has been through.
func TestPeek_IsAsListed(t *testing.T) {
	const keys = 3
	db := kit.ParallelDB(t, kit.T0)
	random := rand.New(rand.NewPCG(kit.TestSeed(t), 0))
	now := kit.T0
	var policies []string
	for name, numbers := range map[string]string{
		"plain": "10, 1, '1 s'", "stepped": "10, 3, '7 s', stepped => true", "unlogged": "10, 1, '1 s', durable => false", "large": "9000000000000, 9000000000000, '1 day'",
		"never": "10, 0, '1 s'", "overridden": "10, 1, '1 s'", "quota": "10, period => '1 day'",
	} {
		policies = append(policies, name)
		db.Execute("select ratelimit_define_policy('" + name + "', " + numbers + ")")
		db.Execute("select ratelimit_charge($1, 'k1', 1000), ratelimit_charge($1, 'k2', 9000000000000)", name)
	}
	db.Execute("select ratelimit_define_policy('stepped', every => '1 day')") // its debts are of a policy that refilled faster
	db.Execute("select ratelimit_override('overridden', 'k1', refill => 2, expires_at => ratelimit.clock() + '1 minute')")
	pick := func(from ...string) string { return from[random.IntN(len(from))] }
	compare := func(now time.Time, after string) {
		db.SetClock(now)
		require.Empty(t, kit.Column(t, db.DB, `
			select format('%s: %s, listed %s', (a.p, a.k), o, s)
			  from (select p, 'k' || k as k from unnest($1::text[]) as p, generate_series(0, $2) as k) as a
			 cross join lateral ratelimit_peek(a.p, a.k) as o
			  join ratelimit_status(max_rows => 1000) as s on s.policy = a.p and s.key = a.k
			 where (o.remaining, o.retry_after, o.reset_after, o.capacity) is distinct from (s.remaining, s.retry_after, s.reset_after, s.capacity)`,
			policies, keys-1), "after %s", after)
	}
	compare(now, "debts and an override")
	for range 100 {
		policy, key, tokens := pick(policies...), fmt.Sprint("k", random.IntN(keys)), pick("1", "3", "10", "11", "1000", "9000000000000")
		call := strings.NewReplacer("(p, k", "('"+policy+"', '"+key+"'", "n)", tokens+")", " n,", " "+tokens+",").Replace(pick(
			"ratelimit_acquire(p, k, n)", "ratelimit_charge(p, k, n)", "ratelimit_charge(p, k, n)", "ratelimit_refund(p, k, n)", "ratelimit_reset(p, k)",
			"ratelimit_pause(p, k, '10 s')", "ratelimit_define_policy('plain', n)",
			"ratelimit_override('overridden', 'k0', n, expires_at => ratelimit.clock() + '1 h')", "ratelimit_override('quota', 'k0', n)"))
		if _, err := db.Pool.Exec(t.Context(), "select "+call); err != nil {
			require.Equal(t, "22023", kit.SQLState(err), "%s: %v", call, err)
		}
		now = now.Add([]time.Duration{0, kit.Us, kit.Second, 17 * time.Minute, 26 * time.Hour}[random.IntN(5)])
		compare(now, call)
	}
	compare(kit.T0.AddDate(-600, 0, 0), "the clock went back")
}
