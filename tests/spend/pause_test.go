package spend

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// asked are the ways to ask for a token of a bucket, or about one.
var asked = []string{
	"ratelimit_acquire('p', 'k')",
	"ratelimit_acquire_all('{p,p}', '{k,other}')",
	"ratelimit_acquire_many('{p,p}', '{k,k}')",
	"ratelimit_acquire_many('{p,p}', '{k,k}', null, '{a,b}')",
	"(select true = any (requests_allowed) as allowed, null::interval as retry_after from ratelimit_acquire_packed('{p,p,p}', '{k,other,k}', sizes => '{2,1}'))",
	"ratelimit_acquire_up_to('p', 'k', 5)",
	"(select allowed, wait as retry_after from ratelimit_reserve('p', 'k', max_wait => '0'))",
	"(select false as allowed, wait as retry_after from ratelimit_reserve('p', 'k', max_wait => '30 days'))",
	"ratelimit_peek('p', 'k')",
	"(select remaining > 0 as allowed, retry_after from ratelimit_status('p', key => 'k'))",
}

// A pause of 59 minutes holds to its last microsecond, whatever the numbers become and whatever is given back. Then the bucket refills.
func TestPause_HoldsWhateverTheNumbersBecome(t *testing.T) {
	db := kit.ParallelDB(t)
	session := db.Session()
	const length = 59 * time.Minute
	end := kit.T0.Add(30*kit.Second + length)
	for name, c := range map[string]struct{ before, change string }{
		"they stay":               {"", ""},
		"a shorter interval":      {"", "select ratelimit_define_policy('p', every => '1 minute')"},
		"more tokens":             {"", "select ratelimit_define_policy('p', 1000, 1000, '1 microsecond')"},
		"no refill, and one":      {"", "select ratelimit_define_policy('p', refill => 0); select ratelimit_define_policy('p', 5, 9, '1 second')"},
		"steps":                   {"", "select ratelimit_define_policy('p', 5, 5, '1 second', stepped => true)"},
		"no steps":                {"", "select ratelimit_define_policy('p', 5, 5, '1 second', stepped => false)"},
		"an override":             {"", "select ratelimit_override('p', 'k', every => '1 minute')"},
		"an override with an end": {"", "select ratelimit_override('p', 'k', every => '1 minute', expires_at => ratelimit.clock() + '33 seconds')"},
		"the policy's own": {"select ratelimit_override('p', 'k', every => '1 hour')",
			"select ratelimit_define_policy('p', every => '1 minute'); select ratelimit_remove_override('p', 'k')"},
		"those after an override": {"select ratelimit_override('p', 'k', every => '1 hour', expires_at => ratelimit.clock() + '33 seconds')",
			"select ratelimit_define_policy('p', every => '1 minute')"},
		"what is given back":          {"", "select ratelimit_define_policy('p', every => '1 minute'); select ratelimit_refund('p', 'k', 5); select ratelimit_settle('p', 'k', 'i', 0)"},
		"clean-up while nothing fits": {"", "select ratelimit_define_policy('p', 0, 5, '1 minute'); select ratelimit_cleanup(); select ratelimit_define_policy('p', 5)"},
		"a shorter pause":             {"", "select ratelimit_define_policy('p', every => '1 minute'); select ratelimit_pause('p', 'k', '1 second')"},
		"a debt":                      {"select ratelimit_charge('p', 'k', 1)", "select ratelimit_define_policy('p', every => '1 minute')"},
	} {
		for _, stepped := range []bool{true, false} {
			for _, durable := range []bool{true, false} {
				say := fmt.Sprintf("%s, stepped %v, durable %v", name, stepped, durable)
				db.SetClock(kit.T0)
				session.Execute("select ratelimit_define_policy('p', 5, 5, '1 hour', $1, $2)", stepped, durable).Take("p", "k", 5, "i")
				db.SetClock(end.Add(-length))
				for _, statement := range []string{c.before, fmt.Sprintf("select ratelimit_pause('p', 'k', '%d s')", int(length.Seconds())), c.change} {
					_, err := session.PgConn().Exec(t.Context(), statement).ReadAll()
					require.NoError(t, err, "%s: %s", say, statement)
				}
				for _, left := range []time.Duration{length, length - 33*kit.Second, length / 2, time.Microsecond} {
					db.SetClock(end.Add(-left))
					for _, ask := range asked {
						session.Execute("begin")
						early := kit.ColumnOf(t, session, "select a.allowed || ' ' || a.retry_after from "+ask+" as a where a.allowed or a.retry_after < $1 * interval '1 microsecond'", left.Microseconds())
						require.Empty(t, early, "%s: %v before the end, %s", say, left, ask)
						session.Execute("rollback")
					}
				}
				wait := db.Must(kit.Peek(session, "p", "k", 1)).RetryAfter
				db.SetClock(wait.After(end.Add(-time.Microsecond)))
				require.True(t, session.Acquire("p", "k", 1).Allowed, "%s: %v later", say, wait)
				session.Execute("select ratelimit_drop_policy('p')")
			}
		}
	}
}
