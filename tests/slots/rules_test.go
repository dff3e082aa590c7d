package slots

import (
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
)

func TestSlots_Rules(t *testing.T) {
	t.Parallel()
	const define = "select ratelimit_define_policy('p', 2, lease => '60 s', durable => (durable))"
	kit.RunSteps(t, map[string][]kit.Step{
		"a renewal by a shorter lease counts to its end, and no longer": {
			{0, define, ""},
			{0, "select remaining, held_for from ratelimit_hold('p', 'k', 'a')", "1,00:01:00"},
			{0, "select ratelimit_define_policy('p', lease => '10 s')", ""},
			{5 * kit.Second, "select ratelimit_renew('p', 'k', 'a')", "00:00:10"},
			{20 * kit.Second, "select remaining, renewed from ratelimit_hold('p', 'k', 'a')", "1,f"},
		},
		"slots that were released are cleaned up before the lease would have ended": {
			{0, define, ""},
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
		"the release of a lease that has ended frees nothing, whatever the clock says next": {
			{0, define, ""},
			{0, "select allowed from ratelimit_hold('p', 'k', 'a')", "t"},
			{time.Minute, "select ratelimit_release('p', 'k', 'a')", "f"},
			{30 * kit.Second, "select allowed, remaining from ratelimit_hold('p', 'k', 'b', 2)", "f,1"},
		},
		"a lease that ends now is added up at once": {
			{0, define, ""},
			{0, "select remaining from ratelimit_hold('p', 'k', 'a')", "1"},
			{time.Minute, "select remaining from ratelimit_hold('p', 'k', 'b')", "1"},
			{time.Minute, "select max(s.changes) - min(extract(epoch from '2024-03-30 12:00'::timestamptz at time zone 'UTC'))::bigint * 1000000 from (table ratelimit.slots union all table ratelimit.ephemeral_slots) as s", "1"},
		},
	})
}
