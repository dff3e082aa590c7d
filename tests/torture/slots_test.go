package torture

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// A denied hold is promised its retry_after to the microsecond: the same hold is granted exactly then, and one microsecond earlier it is
// denied. What is denied for ever is denied when every lease and override has ended, too.
func TestTorture_SlotsKeepTheirPromises(t *testing.T) {
	run := kit.Torture(t, 1000)
	db := kit.NewDB(t)
	random, session := rand.New(rand.NewPCG(kit.TestSeed(t), 0)), db.Session()
	met := map[string]int{}
	for run.GoesOn() {
		verdict := promiseOfSlots(t, db, session, random)
		require.Contains(t, goodVerdicts, verdict)
		met[verdict]++
		run.Progress("%v", met)
	}
	for _, verdict := range goodVerdicts {
		require.NotZero(t, met[verdict], verdict)
		run.Figure("promises of slots: "+verdict, met[verdict], "")
	}
}

func TestSlotsPromises_FindPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	kit.OnDBs(t, map[string]kit.Mutation{
		"a microsecond short":               {Pattern: `microseconds\(v_first - v_now\)`, Replacement: "greatest(microseconds(v_first - v_now) - 1, 1)"},
		"a microsecond long":                {Pattern: `microseconds\(v_first - v_now\)`, Replacement: "microseconds(v_first - v_now) + 1"},
		"when the last lease ends":          {Pattern: `select min\(u\.at\)`, Replacement: "select max(u.at)"},
		"the capacity of the override only": {Pattern: `u\.at >= v_ends_at`, Replacement: "false"},
		"an end to for ever":                {Pattern: `if v_first is not null then`, Replacement: "v_first := coalesce(v_first, v_now + interval '1 day'); if true then"},
	}, func(t *testing.T, db *kit.TestDB, bug kit.Mutation) {
		db.Mutate(bug, "ratelimit.look_at_slots")
		random, session := rand.New(rand.NewPCG(kit.TestSeed(t), 0)), db.Session()
		for range 5000 {
			if !slices.Contains(goodVerdicts, promiseOfSlots(t, db, session, random)) {
				return
			}
		}
		t.Error("it is not found among 5,000 promises")
	})
}

// promiseOfSlots has random holders, and returns a verdict on the answer to one more.
func promiseOfSlots(t *testing.T, db *kit.TestDB, s *kit.Session, random *rand.Rand) string {
	defer s.Execute("select ratelimit_drop_policy('p')")
	db.At(kit.T0).Lend("p", 1+random.Int64N(8), time.Duration(1+random.IntN(9))*time.Second, []kit.PolicyOption{kit.Durable, kit.Ephemeral}[random.IntN(2)])
	now := kit.T0
	for holder := range random.IntN(8) {
		now = now.Add(time.Duration(random.IntN(3_000_000)) * time.Microsecond)
		db.SetClock(now)
		kit.NoError(kit.Hold(s, "p", "k", fmt.Sprint(holder%5), 1+random.Int64N(3)))
		if random.IntN(3) == 0 {
			kit.NoError(kit.Renew(s, "p", "k", fmt.Sprint(random.IntN(5))))(t)
		}
	}
	if random.IntN(2) == 0 {
		s.Execute("select ratelimit_override('p', 'k', $1, expires_at => $2)", random.IntN(9), now.Add(time.Duration(1+random.IntN(9_000_000))*time.Microsecond))
	}
	if random.IntN(3) == 0 {
		s.Execute("select ratelimit_define_policy('p', $1)", 1+random.IntN(8))
	}
	cost := 1 + random.Int64N(4)
	d := s.Hold("new", cost)
	switch {
	case d.Allowed:
		return "allowed"
	case d.RetryAfter == model.Never:
		db.SetClock(now.Add(time.Hour))
		if late := s.Hold("new", cost); late.Allowed {
			return fmt.Sprintf("denied for ever by %+v, and granted: %+v", d, late)
		}
		return "kept for ever"
	}
	then := d.RetryAfter.After(now)
	db.SetClock(then.Add(-time.Microsecond))
	if early := s.Hold("new", cost); early.Allowed {
		return fmt.Sprintf("granted a microsecond before the promise of %+v", d)
	}
	db.SetClock(then)
	if !s.Hold("new", cost).Allowed {
		return fmt.Sprintf("denied at the promise of %+v", d)
	}
	return "kept"
}
