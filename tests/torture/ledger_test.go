package torture

import (
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestLedger_SeesWhatDoesNotAddUp(t *testing.T) {
	t.Parallel()
	db := kit.NewDB(t)
	by := client.New(db.Pool)
	granted := func(remaining int64) client.Decision { return client.Decision{Allowed: true, Remaining: remaining} }
	for wrong, happen := range map[string]func(l *kit.Ledger){
		"": func(l *kit.Ledger) {
			l.Lose(l.Request("k", 2, ""))
			db.Acquire(l.Policy, "k", 2)
		},
		"2 tokens are gone that were granted to nobody; requests without an answer wanted 0": func(l *kit.Ledger) { db.Acquire(l.Policy, "k", 2) },
		"tokens were granted twice": func(l *kit.Ledger) { l.Enter(l.Request("k", 2, ""), granted(6)) },
		"lost: 7 are left":          func(l *kit.Ledger) { l.Enter(l.Request("k", 2, ""), granted(5)) },
		"is replayed as": func(l *kit.Ledger) {
			l.Enter(l.Request("k", 2, "j"), granted(5))
			db.Acquire(l.Policy, "k", 2)
		},
		"2 idempotency keys are remembered of 1": func(l *kit.Ledger) {
			l.Lose(l.Request("k", 2, ""))
			db.Acquire(l.Policy, "k", 2, "j")
		},
	} {
		l := kit.NewLedger(db, "policy: "+wrong, 10, time.Minute)
		require.NoError(t, l.Settle(by, l.Request("k", 3, "i")))
		happen(l)
		if err := l.Check(db); wrong == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, wrong)
		}
	}
}

func TestAudit_FindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	grant := func(cost, remaining int64) kit.Entry {
		return kit.Entry{Request: kit.Request{Cost: cost}, Decision: client.Decision{Allowed: true, Remaining: remaining}}
	}
	grants := []kit.Entry{grant(1, 4), grant(2, 8), grant(3, 5)} // of ten tokens
	inFlight := []kit.Entry{{Request: kit.Request{Cost: 2}}}
	for _, c := range []struct {
		name       string
		left       int64
		grants     []kit.Entry
		unanswered []kit.Entry
		lost       int
		unclaimed  int64
		err        string
	}{
		{"nothing", 4, grants, nil, 0, 0, ""},
		{"a request without an answer was granted", 2, grants, inFlight, 0, 2, ""},
		{"it was granted before others", 4, grants[:2], []kit.Entry{{Request: kit.Request{Cost: 3}}}, 0, 3, ""},
		{"the newest is lost", 5, grants, nil, 1, 0, ""},
		{"two are lost", 8, grants, nil, 2, 0, ""},
		{"all are lost", 10, grants, inFlight, 3, 0, ""},
		{"a token is gone", 3, grants, nil, 0, 0, "granted to nobody"},
		{"more are gone than were asked for", 1, grants, inFlight, 0, 0, "granted to nobody"},
		{"tokens are there that never were", 11, nil, nil, 0, 0, "granted to nobody"},
		{"two callers got the same tokens", 4, append(grants, grant(1, 8)), inFlight, 0, 0, "granted twice"},
		{"a grant is lost in part", 9, grants, nil, 0, 0, "in part"},
	} {
		f, err := kit.Audit(10, c.left, c.grants, c.unanswered)
		if c.err != "" {
			require.ErrorContains(t, err, c.err, c.name)
			continue
		}
		require.NoError(t, err, c.name)
		require.Len(t, f.Lost, c.lost, c.name)
		require.Len(t, f.Kept, len(c.grants)-c.lost, c.name)
		require.Equal(t, c.unclaimed, f.Unclaimed, c.name)
	}
}
