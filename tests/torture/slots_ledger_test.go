package torture

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// A slotEvent is what a session knows of one call about slots. Instants are microseconds of the server's clock.
type slotEvent struct {
	Kind    string // "hold", "renew" or "release"; "death": the session has closed its connection
	Policy  string
	Key     string
	Holder  string
	Cost    int64
	Outcome string // "sent", before a release is sent; then "committed", "rolled back", or "unknown" to a session without an answer

	Held    bool  // the answer
	Renewed bool  // a hold by a holder that held
	Before  int64 // the call. Of one that was sent: the newest instant that the session knew
	After   int64 // the call
	Sealed  int64 // the last instant at which the transaction was seen to be open
	Changes int64 // of the key, by this transaction
}

// locked reports whether the transaction had the row of the key.
func (e slotEvent) locked() bool {
	return e.Held && (e.Outcome == "committed" || e.Outcome == "rolled back")
}

// what names the event in figures, and in what a run has to meet.
func (e slotEvent) what() string {
	answer := map[string][2]string{
		"hold": {"denied", "held"}, "renew": {"lost, by renew", "renewed"}, "release": {"lost, by release", "released"}, "death": {"deaths", "deaths"},
	}[e.Kind][map[bool]int{true: 1}[e.Held]]
	switch {
	case e.Outcome == "unknown":
		return e.Kind + " without an answer"
	case e.Renewed:
		answer = "held again"
	}
	if e.Outcome == "rolled back" {
		answer += ", rolled back"
	}
	return answer
}

// A slotLedger judges what sessions were told of slots. Its leases are those that were certainly live: from the instant at which the
// answer was there until the earliest at which it can have ended. This is exact but for what the server does in between: of a key, a
// transaction that has the row reads the clock later than any that had it before was open.
type slotLedger struct {
	capacity int64
	lease    map[string]int64 // by policy
	forget   map[string]bool  // the policies that a crash empties

	mu     sync.Mutex
	events []slotEvent
	met    map[string]int
	outage [][2]int64 // from before a crash until after the recovery
	wrong  error      // of a call that failed as none may
}

func (l *slotLedger) note(e slotEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
	if e.Outcome != "sent" {
		l.met[e.what()]++
	}
}

func (l *slotLedger) saw(what string, times int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.met[what] += times
}

func (l *slotLedger) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wrong = cmp.Or(l.wrong, err)
}

func (l *slotLedger) counts() (met map[string]int, wrong error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.met), l.wrong
}

// A certainLease was live from an instant until just before another.
type certainLease struct {
	holder   string
	cost     int64
	from, to int64
}

// audit returns the first thing that cannot be, and how many leases were certain.
func (l *slotLedger) audit() (leases int, err error) {
	type bucket struct{ policy, key string }
	buckets := map[bucket][]slotEvent{}
	for _, e := range l.events {
		of := bucket{e.Policy, e.Key}
		buckets[of] = append(buckets[of], e)
	}
	for of, events := range buckets {
		certain, err := l.certain(events)
		if err == nil {
			err = overfull(certain, l.capacity)
		}
		if err != nil {
			return 0, fmt.Errorf("%s of %s: %w", of.key, of.policy, err)
		}
		leases += len(certain)
	}
	return leases, nil
}

// certain are the leases of the events of one key.
func (l *slotLedger) certain(events []slotEvent) (leases []certainLease, err error) {
	earliest := readAt(events)
	type holding struct {
		now    *certainLease // nil: none is certain
		latest int64         // the lease cannot have ended later
		lost   bool          // whether an answer is missing, and latest is not known
		sent   int64         // the release
		gone   bool          // whether the session died before it noted an answer to that
	}
	holders := map[string]*holding{}
	end := func(h *holding, at int64) {
		if h.now != nil && min(h.now.to, at) > h.now.from {
			h.now.to = min(h.now.to, at)
			leases = append(leases, *h.now)
		}
		h.now = nil
	}
	for n, e := range events {
		h := holders[e.Holder]
		if h == nil {
			h = new(holding)
			holders[e.Holder] = h
		}
		lease := l.lease[e.Policy]
		h.gone = e.Outcome == "sent"
		switch {
		case e.Kind == "death":
		case e.Outcome == "sent":
			h.sent = e.Before
		case e.Outcome == "unknown" && e.Kind == "release":
			end(h, h.sent)
		case e.Outcome == "unknown":
			h.lost = true
		case !e.Held && e.Kind != "hold" && h.now != nil && e.After < h.now.to:
			return nil, fmt.Errorf("%s lost its lease %d µs before it can have ended: %+v", e.Holder, h.now.to-e.After, e)
		case !e.Held && e.Kind == "hold" && h.now != nil && e.After < h.now.to:
			return nil, fmt.Errorf("%s holds and was denied: %+v", e.Holder, e)
		case e.Kind == "renew" && e.Held && !h.lost && h.latest <= e.Before:
			return nil, fmt.Errorf("%s renewed a lease that was over %d µs ago: %+v", e.Holder, e.Before-h.latest, e)
		case e.Outcome == "rolled back" || !e.Held:
		case e.Kind == "release":
			end(h, earliest[n])
			if !h.lost {
				h.latest = min(h.latest, e.After)
			}
		default:
			to := l.untilCrash(e.Policy, e.After, earliest[n]+lease)
			if h.now != nil && e.After >= h.now.to {
				end(h, h.now.to)
			}
			if h.now == nil {
				h.now = &certainLease{e.Holder, e.Cost, e.After, to}
			}
			h.now.to = max(h.now.to, to)
			h.latest = max(h.latest, e.After+lease)
		}
	}
	for _, h := range holders {
		if h.gone {
			end(h, h.sent)
		} else if h.now != nil {
			end(h, h.now.to)
		}
	}
	return leases, nil
}

// readAt is for each event of a key the earliest instant at which the clock can have been read by which it was decided: after the
// call began, and after each transaction had ended that had the row before. Those that rolled back have left no change behind.
func readAt(events []slotEvent) (earliest map[int]int64) {
	var locked []int
	for n, e := range events {
		if e.locked() {
			locked = append(locked, n)
		}
	}
	slices.SortStableFunc(locked, func(a, b int) int {
		undone := func(e slotEvent) int { return map[bool]int{true: -1}[e.Outcome == "rolled back"] }
		return cmp.Or(cmp.Compare(events[a].Changes, events[b].Changes), cmp.Compare(undone(events[a]), undone(events[b])))
	})
	earliest = map[int]int64{}
	var open int64
	for _, n := range locked {
		e := events[n]
		if e.Outcome == "committed" {
			earliest[n] = max(e.Before, open)
		}
		open = max(open, e.Sealed)
	}
	return earliest
}

// untilCrash cuts a lease that a crash has forgotten.
func (l *slotLedger) untilCrash(policy string, from, to int64) int64 {
	for _, outage := range l.outage {
		if l.forget[policy] && from < outage[1] && outage[0] < to {
			return outage[0]
		}
	}
	return to
}

// overfull finds an instant at which more was lent than there is.
func overfull(leases []certainLease, capacity int64) error {
	type step struct{ at, by, lease int64 }
	var steps []step
	for n, c := range leases {
		steps = append(steps, step{c.from, c.cost, int64(n)}, step{c.to, -c.cost, int64(n)})
	}
	slices.SortFunc(steps, func(a, b step) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.by, b.by)) })
	live := map[int64]certainLease{}
	var held int64
	for _, s := range steps {
		if held += s.by; s.by > 0 {
			live[s.lease] = leases[s.lease]
		} else {
			delete(live, s.lease)
		}
		if held > capacity {
			return fmt.Errorf("%d of %d slots are held at %d: %+v", held, capacity, s.at, slices.Collect(maps.Values(live)))
		}
	}
	return nil
}

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

// Slots never exceed the capacity. 64 sessions, some of them in processes of their own, hold, renew, release, roll back and die under eight keys, while a process is
// killed, connections are ended, and PostgreSQL is killed with SIGKILL and recovers. At no instant do leases that were certainly live
// have more slots than there are, and no live one is lost but by a crash that empties its table. When the last has ended, all are free.
func TestTorture_SlotsNeverExceedTheCapacity(t *testing.T) {
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

		l.processes[0].Kill(t)
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
		l.processes[1].Close(t)
		l.noneHeld(db, of)
		_, wrong := l.counts()
		require.NoError(t, wrong)
		certain := kit.NoError(l.audit())(t)
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
	run.Counts(met)
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
		db.Execute("select ratelimit_override($1, $2, lease => '1 hour')", policy, key) // or it could end before the release
		require.Equal(db.T, kit.Held(0, time.Hour, slotCapacity), kit.NoError(kit.Hold(db.Pool, policy, key, "all", slotCapacity))(db.T))
		require.True(db.T, kit.NoError(kit.Release(db.Pool, policy, key, "all"))(db.T))
	}
}

// Each of these bugs is found by the same load and the same ledger.
func TestSlots_TheLedgerFindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	type testCase struct {
		plantedBug
		says string
	}
	kit.InParallel(t, map[string]testCase{
		"none":                         {},
		"a sum from before the lock":   {plantedBug{"ratelimit_hold", `and s\.key = v_key and s\.changes = v_changes`, "and s.key = v_key"}, ""},
		"a lease from before the wait": {plantedBug{"ratelimit_hold", `v_seen_at := v_now; v_now := clock\(\);`, "v_seen_at := v_now;"}, ""},
		"a renewal that acquires": {plantedBug{"ratelimit_renew", `if found then if`, `
				if not found then
				  insert into leases (policy_id, key, holder, cost, ends_at) values (v_policy.id, v_key, v_holder, 3, v_now + interval '1 second');
				end if;
				if true then if`}, ""},
		"a renewal of what is over": {plantedBug{"ratelimit_renew",
			`and l\.holder = v_holder and l\.ends_at > v_now`, "and l.holder = v_holder"}, "renewed a lease that was over"},
		"a release of what is live still": {plantedBug{"ratelimit_hold",
			`and l\.ends_at <= v_now`, "and l.ends_at <= v_now + interval '20 ms'"}, ""},
	}, func(t *testing.T, bug testCase) {
		db := kit.NewCrowdDB(t, 2)
		lendNoted(db)
		if bug.function != "" {
			bug.plant(db)
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

func TestSlotLedger_SeesWhatDoesNotAddUp(t *testing.T) {
	t.Parallel()
	call := func(kind, holder string, at int64, held bool, changes int64) slotEvent {
		return slotEvent{Kind: kind, Policy: "p", Key: "k", Holder: holder, Cost: 1, Outcome: "committed", Held: held, Before: at, After: at, Sealed: at, Changes: changes}
	}
	with := func(e slotEvent, outcome string, after, sealed int64) slotEvent {
		e.Outcome, e.After, e.Sealed = outcome, after, sealed
		return e
	}
	sent := func(holder string, at int64) slotEvent {
		return slotEvent{Kind: "release", Policy: "p", Key: "k", Holder: holder, Outcome: "sent", Before: at}
	}
	a := call("hold", "a", 0, true, 1)
	for _, c := range []struct {
		name   string
		events []slotEvent
		leases int
		err    string
	}{
		{"one after the other", []slotEvent{a, call("hold", "b", 100, true, 2)}, 2, ""},
		{"a microsecond too early", []slotEvent{a, call("hold", "b", 99, true, 2)}, 0, "2 of 1 slots"},
		{"one that was renewed", []slotEvent{a, call("renew", "a", 50, true, 2), call("hold", "b", 149, true, 3)}, 0, "2 of 1 slots"},
		{"a renewal that was undone", []slotEvent{a, with(call("renew", "a", 50, true, 2), "rolled back", 50, 50), call("hold", "b", 100, true, 2)}, 2, ""},
		{"one that was released", []slotEvent{a, sent("a", 8), call("release", "a", 10, true, 2), call("hold", "b", 10, true, 3)}, 2, ""},
		{"before the release", []slotEvent{a, sent("a", 8), call("release", "a", 10, true, 3), call("hold", "b", 9, true, 2)}, 0, "2 of 1 slots"},
		{"a release without an answer", []slotEvent{a, sent("a", 8), with(call("release", "a", 0, false, 0), "unknown", 0, 0), call("hold", "b", 9, true, 3)}, 2, ""},
		{"a release whose sender died", []slotEvent{a, sent("a", 8), call("hold", "b", 9, true, 3)}, 2, ""},
		{"before its sender died", []slotEvent{a, sent("a", 8), call("hold", "b", 7, true, 3)}, 0, "2 of 1 slots"},
		{"before it was sent", []slotEvent{a, sent("a", 8), with(call("release", "a", 0, false, 0), "unknown", 0, 0), call("hold", "b", 7, true, 3)}, 0, "2 of 1 slots"},
		{"a release that was undone", []slotEvent{a, sent("a", 8), with(call("release", "a", 10, true, 2), "rolled back", 10, 10), call("hold", "b", 99, true, 2)}, 0, "2 of 1 slots"},
		{"a lease from after the wait", []slotEvent{
			with(call("hold", "x", 0, true, 1), "rolled back", 0, 50), with(a, "committed", 51, 51), call("hold", "b", 149, true, 2),
		}, 0, "2 of 1 slots"},
		{"a hold without an answer", []slotEvent{with(a, "unknown", 0, 0), call("hold", "b", 9, true, 2), call("renew", "a", 150, true, 3)}, 2, ""},
		{"a renewal of nothing", []slotEvent{a, call("renew", "a", 100, true, 2)}, 0, "over 0 µs ago"},
		{"a renewal after the release", []slotEvent{a, sent("a", 8), call("release", "a", 10, true, 2), call("renew", "a", 11, true, 3)}, 0, "over 1 µs ago"},
		{"a lease that is lost", []slotEvent{a, call("renew", "a", 99, false, 2)}, 0, "1 µs before"},
		{"a lease that is over", []slotEvent{a, call("renew", "a", 100, false, 2)}, 1, ""},
		{"a holder is denied", []slotEvent{a, call("hold", "a", 99, false, 2)}, 0, "holds and was denied"},
	} {
		l := &slotLedger{capacity: 1, lease: map[string]int64{"p": 100}, events: c.events}
		leases, err := l.audit()
		if c.err != "" {
			require.ErrorContains(t, err, c.err, c.name)
			continue
		}
		require.NoError(t, err, c.name)
		require.Equal(t, c.leases, leases, c.name)
	}

	crashed := &slotLedger{capacity: 1, lease: map[string]int64{"p": 100}, forget: map[string]bool{"p": true}, outage: [][2]int64{{50, 60}}}
	crashed.events = []slotEvent{a, call("renew", "a", 70, false, 0), call("hold", "b", 61, true, 2)}
	require.Equal(t, 2, kit.NoError(crashed.audit())(t), "what a crash forgets")
	crashed.events[2].Before, crashed.events[2].After = 49, 49
	_, err := crashed.audit()
	require.ErrorContains(t, err, "2 of 1 slots")
}
