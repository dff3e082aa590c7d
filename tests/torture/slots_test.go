package torture

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
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

var toMeetOfSlots = []string{
	"slots: granted", "slots: denied", "slots: denied for ever", "slots: renewed", "slots: shadowed", "slots: less than nothing is free",
	"slots: a wait that an override ends", "slots: renewed by renew", "slots: lost", "slots: released", "slots: released before", "slots: listed",
	"slots: removed by clean-up",
}

// meetSlots gets each kind of answer about slots at least once.
func (m *modelRun) meetSlots(t *rapid.T) {
	id, shadow := model.BucketID{Policy: "s", Key: "x"}, model.BucketID{Policy: "w", Key: "x"}
	numbers := func(capacity int64) model.Numbers {
		return model.Numbers{Capacity: &capacity, Lease: new(model.Micros(60_000_000))}
	}
	m.defineAs(t, "s", model.Definition{Numbers: numbers(3)})
	m.defineAs(t, "w", model.Definition{Numbers: numbers(1), Shadow: new(true)})
	m.sendHold(t, id, "a", 2)
	m.sendHold(t, id, "a", 2)
	m.sendHold(t, id, "b", 2)
	m.sendHold(t, id, "b", 4)
	m.sendHold(t, shadow, "a", 1)
	m.sendHold(t, shadow, "b", 1)
	m.sendRenew(t, id, "a")
	m.sendRenew(t, id, "b")
	m.setOverride(t, id, numbers(1), m.now.Add(time.Second))
	m.sendHold(t, id, "a", 2) // which holds, although the capacity is lower by now
	m.sendHold(t, id, "b", 1)
	m.sendHold(t, id, "b", 2) // which does not fit when the override ends
	m.checkHolders(t, nil, nil)
	m.setClock(t, m.now.Add(time.Second))
	m.sendRelease(t, id, "a")
	m.sendRelease(t, id, "a")
	m.sendHold(t, id, "c", 1)
	m.setClock(t, m.now.Add(time.Hour))
	m.cleanUp(t)
	require.Empty(t, m.met.lacks(toMeetOfSlots))
}

var holders = rapid.SampledFrom([]string{"a", "b", "c", "d", "e"})

func (m *modelRun) hold(t *rapid.T) {
	id := bucketIDs.Draw(t, "bucket")
	cost := rapid.OneOf(rapid.Int64Range(1, 3), rapid.Just[int64](1), rapid.Int64Range(-1, 10_001)).Draw(t, "cost")
	m.sendHold(t, id, holders.Draw(t, "holder"), cost)
}

func (m *modelRun) sendHold(t *rapid.T, id model.BucketID, holder string, cost int64) {
	p, _ := m.model.Policy(id.Policy)
	want, wantErr := m.model.Hold(m.now, id, holder, cost)
	got, err := kit.Hold(m.session, id.Policy, id.Key, holder, cost)
	if m.sameError(t, wantErr, err); err != nil {
		return
	}
	require.Equal(t, want, got, "%s holds %d of %v", holder, cost, id)
	switch {
	case want.Renewed:
		m.saw("slots: renewed")
	case want.Shadowed:
		m.saw("slots: shadowed")
	case want.Allowed:
		m.saw("slots: granted")
	case want.RetryAfter == model.Never:
		m.saw("slots: denied for ever")
	case want.Capacity != p.Capacity && want.Remaining+cost <= p.Capacity:
		m.saw("slots: a wait that an override ends")
	default:
		m.saw("slots: denied")
	}
	if want.Remaining < 0 {
		m.met["slots: less than nothing is free"]++
	}
	for _, wait := range []model.Micros{want.RetryAfter, want.HeldFor} {
		if wait != model.Never {
			m.instants = lastFew(append(m.instants, wait.After(m.now), wait.After(m.now).Add(model.CleanUpMargin)))
		}
	}
}

func (m *modelRun) renew(t *rapid.T) {
	m.sendRenew(t, bucketIDs.Draw(t, "bucket"), holders.Draw(t, "holder"))
}

func (m *modelRun) sendRenew(t *rapid.T, id model.BucketID, holder string) {
	want, holds, wantErr := m.model.Renew(m.now, id, holder)
	if !holds {
		want = model.Never
	}
	got, err := kit.Renew(m.session, id.Policy, id.Key, holder)
	if m.sameError(t, wantErr, err); err != nil {
		return
	}
	require.Equal(t, want, got, "%s of %v", holder, id)
	if m.saw("slots: lost"); holds {
		m.saw("slots: renewed by renew")
		m.instants = lastFew(append(m.instants, want.After(m.now)))
	}
}

func (m *modelRun) release(t *rapid.T) {
	m.sendRelease(t, bucketIDs.Draw(t, "bucket"), holders.Draw(t, "holder"))
}

func (m *modelRun) sendRelease(t *rapid.T, id model.BucketID, holder string) {
	want, wantErr := m.model.Release(m.now, id, holder)
	got, err := kit.Release(m.session, id.Policy, id.Key, holder)
	if m.sameError(t, wantErr, err); err != nil {
		return
	}
	require.Equal(t, want, got, "%s of %v", holder, id)
	if m.saw("slots: released before"); want {
		m.saw("slots: released")
	}
}

// meetTheEnd has a holder come at the end of its lease, or a microsecond beside it. Among several keys and holders calls seldom do.
func (m *modelRun) meetTheEnd(t *rapid.T) {
	id := bucketIDs.Draw(t, "bucket")
	all := m.model.Leases(id)
	if len(all) == 0 {
		t.Skip("nobody holds")
	}
	holder := rapid.SampledFrom(slices.Sorted(maps.Keys(all))).Draw(t, "holder")
	m.setClock(t, model.Micros(rapid.Int64Range(-1, 1).Draw(t, "beside")).After(all[holder].Ends))
	switch rapid.SampledFrom([]string{"hold", "renew", "release"}).Draw(t, "what") {
	case "hold":
		m.sendHold(t, id, holder, all[holder].Cost)
	case "renew":
		m.sendRenew(t, id, holder)
	case "release":
		m.sendRelease(t, id, holder)
	}
}

// listHolders compares those of one key, one policy, or all.
func (m *modelRun) listHolders(t *rapid.T) {
	id := bucketIDs.Draw(t, "bucket")
	var policy, key *string
	if _, known := m.model.Policy(id.Policy); known && rapid.Bool().Draw(t, "of one policy") {
		policy = &id.Policy
	}
	if rapid.Bool().Draw(t, "of one key") {
		key = &id.Key
	}
	m.checkHolders(t, policy, key)
}

func (m *modelRun) checkHolders(t *rapid.T, policy, key *string) {
	require.Equal(t, m.model.Holders(m.now, policy, key), kit.NoError(kit.Holders(m.session, policy, key))(t))
	m.saw("slots: listed")
}

// compareLeases compares the leases that there are, also those that have ended. A key whose last one clean-up has removed has no row.
func (m *modelRun) compareLeases(t *rapid.T) {
	want, got := map[string]bool{}, map[string]bool{}
	for name := range m.model.Policies() {
		for _, key := range []string{"x", "y"} {
			for holder, l := range m.model.Leases(model.BucketID{Policy: name, Key: key}) {
				want[fmt.Sprint(name, " ", key, " ", holder, " ", l.Cost, " ", l.Ends.UnixMicro())] = true
			}
		}
	}
	for _, lease := range kit.ColumnOf(t, m.session, `
		select concat_ws(' ', coalesce(p.name, 'gone'), l.key, l.holder, l.cost, (extract(epoch from l.ends_at) * 1000000)::bigint)
		  from (table ratelimit.leases union all table ratelimit.ephemeral_leases) as l left join ratelimit.policies as p on p.id = l.policy_id`) {
		got[lease] = true
	}
	require.Equal(t, want, got)
	require.Empty(t, kit.ColumnOf(t, m.session, `
		select l.key from (select policy_id, key from ratelimit.leases union all select policy_id, key from ratelimit.ephemeral_leases) as l
		 where (l.policy_id, l.key) not in (select policy_id, key from ratelimit.slots union all select policy_id, key from ratelimit.ephemeral_slots)`),
		"leases without their lock")
	require.Empty(t, kit.ColumnOf(t, m.session, `
		select s.key
		  from (table ratelimit.slots union all table ratelimit.ephemeral_slots) as s
		  left join (table ratelimit.leases union all table ratelimit.ephemeral_leases) as l using (policy_id, key)
		 group by s.policy_id, s.key, s.held, s.counted_until
		having s.counted_until > '-infinity' and (s.held <> coalesce(sum(l.cost), 0) or s.counted_until > min(l.ends_at))`),
		"sums in the rows of keys that are not those of their leases")
	if len(got) == 0 {
		m.met["slots: removed by clean-up"]++
	}
}

// A bug about slots planted in SQL makes the same sequences disagree.
func TestModel_FindsPlantedBugsOfSlots(t *testing.T) {
	pgtest.OncePerServer(t)
	bugs := map[string]plantedBug{
		"a lease counts at its end":                     {"ratelimit_hold", `(sum\(l\.cost\) filter \(where l\.ends_at) >`, "$1 >="},
		"a shorter lease ends behind the sum":           {"ratelimit_hold", `least\(v_until, v_ends_at\)`, "coalesce(v_until, v_ends_at)"},
		"a renewal that is shorter ends behind the sum": {"ratelimit_renew", `least\(s\.counted_until, v_earlier\)`, "s.counted_until"},
		"a release of an ended lease lowers the sum":    {"ratelimit_release", `v_released is distinct from v_cost`, "false"},
		"a release keeps the sum":                       {"ratelimit_release", `held = s\.held - v_cost,`, ""},
		"a grant keeps the leases that have ended": {"ratelimit_hold",
			`delete from leases as l where l\.policy_id = v_policy\.id and l\.key = v_key and`, "$0 l.holder = v_holder and"},
		"a wait by the override that ends": {"ratelimit.look_at_slots", `u\.at >= v_ends_at`, "u.at > v_ends_at"},
		"a wait a microsecond short": {"ratelimit.look_at_slots",
			`microseconds\(v_first - v_now\)`, "microseconds(v_first - v_now) - 1"},
		"a renewal is denied when capacity was lowered": {"ratelimit_hold",
			`if not v_renewed and v_cost > v_policy\.capacity - v_held then`, "if v_cost > v_policy.capacity - v_held + v_renewed::integer * v_cost then"},
	}
	maps.Copy(bugs, bugsOfHolders)
	kit.OnDBs(t, bugs, func(t *testing.T, db *kit.TestDB, bug plantedBug) {
		bug.plant(db)
		findsIt(t, db, slotsOnly, (*modelRun).meetSlots)
	})
}
