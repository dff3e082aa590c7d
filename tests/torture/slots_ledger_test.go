package torture

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
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
