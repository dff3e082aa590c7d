package torture

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

func newSlotLedger() *slotLedger {
	lease := slotLease.Microseconds()
	return &slotLedger{
		capacity: slotCapacity, lease: map[string]int64{"durable": lease, "ephemeral": lease}, forget: map[string]bool{"ephemeral": true},
		met: map[string]int{},
	}
}

// What sessions meet of themselves, by their plans.
var toMeetOfSlotLoad = []string{
	"held", "held, rolled back", "held again", "denied", "renewed", "renewed, rolled back", "lost, by renew", "released", "released, rolled back",
	"lost, by release", "deaths",
}

// 64 sessions, some of them in processes of their own, hold, renew, release, roll back and die under eight keys, while a process is
// killed, connections are ended, and PostgreSQL is killed with SIGKILL and recovers. At no instant do leases that were certainly live
// have more slots than there are, and no live one is lost but by a crash that empties its table. When the last has ended, all are free.
func TestTorture_Slots(t *testing.T) {
	run := kit.Torture(t, 2)
	db, server := kit.NewPrivateDB(t, "synchronous_commit=on")
	lendNoted(db)
	met := map[string]int{}
	leases := 0
	for round := 0; run.GoesOn(); round++ {
		ledger := newSlotLedger()
		of := slotSessions{Name: fmt.Sprint(round), Policies: []string{"durable", "durable", "durable", "durable", "durable", "durable", "ephemeral", "ephemeral"}, Sessions: 48}
		l := startSlotLoad(t, ledger, db.URL, of, 2)
		l.meets(t, 200, toMeetOfSlotLoad)

		l.processes[0].kill(t)
		l.saw("processes killed", 1)
		l.meets(t, 100, nil)
		ended := kit.ColumnOf(t, db.Pool, `
			select pid::text from (select pid from pg_stat_activity where application_name = 'slots' order by random() limit 8) as s
			 where pg_terminate_backend(pid)`)
		l.saw("connections ended", len(ended))
		l.meets(t, 100, toMeetOfSlotLoad)

		outage := [2]int64{db.Now().UnixMicro()}
		kill(t, server)
		require.NoError(t, server.Start(t.Context()))
		db.Pool.Close()
		db = kit.Reopen(t, server)
		l.url.Store(&db.URL)
		outage[1] = db.Now().UnixMicro()
		l.outage = append(l.outage, outage)
		l.saw("crashes", 1)
		l.meets(t, 200, toMeetOfSlotLoad)

		l.end()
		l.processes[1].close(t)
		l.noneHeld(db, of)
		_, wrong := l.counts()
		require.NoError(t, wrong)
		certain, err := l.audit()
		require.NoError(t, err)
		leases += certain
		for what, n := range l.met {
			met[what] += n
		}
		run.Progress("%d rounds, %d leases, of which none was one too many", round+1, leases)
	}
	for _, what := range append(slices.Clone(toMeetOfSlotLoad), "hold without an answer", "processes killed", "connections ended", "crashes") {
		require.NotZero(t, met[what], what)
	}
	run.Figures("leases certain, of which none was one too many", leases)
	for _, what := range slices.Sorted(maps.Keys(met)) {
		run.Figure(what, met[what], "")
	}
}

// noneHeld waits for the last lease to end. Then all of each key is free, although rows of leases are there.
func (l *slotLoad) noneHeld(db *kit.TestDB, of slotSessions) {
	for n, policy := range of.Policies {
		key := fmt.Sprint(of.Name, "/", n)
		kit.NoError(kit.Hold(db.Pool, policy, key, "last", 1))(db.T) // if it is denied, somebody else is there
	}
	db.Await(db.T, kit.Patience, "select count(*) = 0 from ratelimit_holders()")
	require.GreaterOrEqual(db.T, db.Number("select count(distinct (policy_id, key)) from (table ratelimit.leases union all table ratelimit.ephemeral_leases) as l"),
		int64(len(of.Policies)), "leases that have ended")
	for n, policy := range of.Policies {
		key := fmt.Sprint(of.Name, "/", n)
		require.Equal(db.T, kit.Allowed(slotCapacity, 0, slotCapacity), db.Must(kit.Peek(db.Pool, policy, key, slotCapacity)))
		require.Equal(db.T, kit.Held(0, slotLease, slotCapacity), kit.NoError(kit.Hold(db.Pool, policy, key, "all", slotCapacity))(db.T))
		require.True(db.T, kit.NoError(kit.Release(db.Pool, policy, key, "all"))(db.T))
	}
}

// Each of these bugs is found by the same load and the same ledger.
func TestSlots_TheLedgerFindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	type testCase struct {
		function string
		kit.Mutation
		says string
	}
	kit.InParallel(t, map[string]testCase{
		"none": {},
		"a sum from before the lock": {"ratelimit_hold", kit.Mutation{
			Pattern: `and s\.key = v_key and s\.changes = v_changes`, Replacement: "and s.key = v_key"}, ""},
		"a lease from before the wait": {"ratelimit_hold", kit.Mutation{
			Pattern: `v_seen_at := v_now; v_now := clock\(\);`, Replacement: "v_seen_at := v_now;"}, ""},
		"a renewal that acquires": {"ratelimit_renew", kit.Mutation{
			Pattern: `if found then if`, Replacement: `
				if not found then
				  insert into leases (policy_id, key, holder, cost, ends_at) values (v_policy.id, v_key, v_holder, 3, v_now + interval '1 second');
				end if;
				if true then if`}, ""},
		"a renewal of what is over": {"ratelimit_renew", kit.Mutation{
			Pattern: `and l\.holder = v_holder and l\.ends_at > v_now`, Replacement: "and l.holder = v_holder"}, "renewed a lease that was over"},
		"a release of what is live still": {"ratelimit_hold", kit.Mutation{
			Pattern: `and l\.ends_at <= v_now`, Replacement: "and l.ends_at <= v_now + interval '20 ms'"}, ""},
	}, func(t *testing.T, bug testCase) {
		db := kit.NewCrowdDB(t, 2)
		lendNoted(db)
		if bug.function != "" {
			db.Mutate(bug.Mutation, bug.function)
		}
		for round := range 20 {
			l := startSlotLoad(t, newSlotLedger(), db.URL, slotSessions{Name: fmt.Sprint(round), Policies: []string{"durable", "durable"}, Sessions: 16}, 0)
			l.meets(t, 100, nil)
			l.end()
			_, err := l.audit()
			if bug.function == "" {
				require.NoError(t, err)
				if round == 2 {
					return
				}
			} else if err != nil {
				require.ErrorContains(t, err, bug.says)
				t.Logf("round %d: %.300v", round+1, err)
				return
			}
		}
		require.FailNow(t, "it is not found in 20 rounds")
	})
}
