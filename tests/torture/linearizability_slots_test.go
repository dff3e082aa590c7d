package torture

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Holders hold, renew and release slots of few keys at once, by clocks that disagree and jump, and leases end meanwhile. Their calls
// have an order as those of TestTorture_LinearizabilityOfCallsOnBuckets have, each by the last reading of the clock that it took.
func TestTorture_LinearizabilityOfCallsOnSlots(t *testing.T) {
	run := kit.Torture(t, 40)
	c := newSlotsChronicler(kit.NewDB(t), "slots durable", "slots ephemeral")
	n := operationCounts{}
	for _, what := range kindsOfLent {
		n[what] = 0
	}
	n.judgeAll(t, run, c)
	n["changes of policies"], n["overrides"], n["failed with 40001"] = c.changes, c.overrides, c.conflicts
	require.NotContains(t, slices.Collect(maps.Values(n)), 0, "%v", n)
	n.report(run)
}

var kindsOfLent = []string{
	"holds granted", "holds denied", "holds renewed", "holds shadowed", "holds with another cost", "renewals", "renewals that lost", "releases",
	"releases that held nothing", "holders listed", "peeks", "resets", "keys cleaned up", "rolled back",
}

// kindOfLent is what a call about slots has met.
func (op *operation) kindOfLent() string {
	var d kit.Decision
	if op.answer != nil && op.answer.Decision != nil {
		d = *op.answer.Decision
	}
	switch {
	case op.answer.Is(model.IdempotencyMismatch):
		return "holds with another cost"
	case op.kind == holds && d.Replayed:
		return "holds renewed"
	case op.kind == holds && d.Shadowed:
		return "holds shadowed"
	case op.kind == holds && d.Allowed:
		return "holds granted"
	case op.kind == holds:
		return "holds denied"
	case op.kind == renews && op.answer.Rows[0] == "":
		return "renewals that lost"
	case op.kind == releases && op.answer.Rows[0] == "f":
		return "releases that held nothing"
	}
	return map[string]string{
		renews: "renewals", releases: "releases", lists: "holders listed", peeks: "peeks", resets: "resets", cleansUp: "keys cleaned up",
	}[op.kind]
}

// A bug about slots planted in SQL is found.
func TestLinearizability_FindsPlantedBugsOfSlots(t *testing.T) {
	pgtest.OncePerServer(t)
	bugs := maps.Clone(bugsOfSlotHistories)
	maps.Copy(bugs, bugsOfHolders)
	kit.OnDBs(t, bugs, func(t *testing.T, db *kit.TestDB, bug plantedBug) {
		bug.plant(db)
		newSlotsChronicler(db, "slots durable").requireNoOrder(t)
	})
}

// newSlotsChronicler has clocks that tick, so that calls meet the very end of a lease.
func newSlotsChronicler(db *kit.TestDB, policies ...string) *chronicler {
	c := newChronicler(db, policies...)
	c.oneIn = 0
	db.Mutate(kit.Mutation{
		Pattern:     `v_now := (clock_timestamp\(\) \+ v_ahead_us \* interval '1 microsecond');`,
		Replacement: fmt.Sprintf("v_now := date_bin('%d microseconds', $1, 'epoch');", tick),
	}, "ratelimit.clock")
	return c
}

const tick model.Micros = 200

func isSlots(policy string) bool { return strings.HasPrefix(policy, "slots") }

// lease mostly ends while the calls are made, at a tick or not.
func (h *chronicle) lease(random *rand.Rand) model.Micros {
	switch random.IntN(4) {
	case 0:
		return 1000 + model.Micros(random.Int64N(20_000))
	case 1:
		return 1_000_000
	}
	return tick * model.Micros(5+random.Int64N(40))
}

func (h *chronicle) defineSlots(random *rand.Rand, q *recorder, policy string) error {
	p := model.Policy{Capacity: 1 + random.Int64N(4), Lease: h.lease(random), Durable: isDurable(policy), Shadow: random.IntN(6) == 0}
	since := h.now()
	_, err := q.Exec(context.Background(), "select ratelimit_define_policy($1, $2, lease => $3, durable => $4, shadow => $5)",
		policy, p.Capacity, kit.IntervalOfDays(p.Lease), p.Durable, p.Shadow)
	h.defined(policy, p, since)
	return err
}

// actOnSlots makes one call. A transaction that is stricter than READ COMMITTED may fail, and has done nothing then.
func (a *actor) actOnSlots() error {
	switch n := a.random.IntN(100); {
	case n < 45:
		return a.lend(holds)
	case n < 60:
		return a.lend(renews)
	case n < 78:
		return a.lend(releases)
	case n < 82:
		return a.lend(lists)
	case n < 86:
		return a.lend(peeks)
	case n < 94 && a.client < len(a.buckets): // as in act
		return a.override(a.buckets[a.client])
	case n < 95:
		return a.decide(resets)
	case n < 98 || a.client > 0:
		return a.cleanUp()
	default:
		return a.change()
	}
}

func (a *actor) lend(kind string) error {
	op := a.operation(kind, a.bucket())
	op.Cost = 1 + max(0, a.random.Int64N(5)-2)
	op.holder = string(rune('a' + a.random.IntN(4)))
	if a.random.IntN(10) > 0 { // mostly one cost of a holder
		op.Cost = 1 + int64(op.holder[0])%3
	}
	a.strict = a.random.IntN(2) == 0
	defer func() { a.strict = false }()
	_, err := a.transactIn(a.random.IntN(3) == 0, func() error { return op.sent(a) }, op)
	if a.strict && kit.SQLState(err) == "40001" {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.conflicts++
		return nil
	}
	return err
}

// lends returns the slots that the operation may lead to. It decides by the last reading of the clock, and its numbers may be of an
// earlier one.
func (op *operation) lends(s model.Slots, answer *kit.Answer) (left []model.Slots) {
	switch op.kind {
	case resets:
		return []model.Slots{{}}
	case cleansUp: // which leaves keys alone that are locked or not due
		left = append(left, s)
		for _, now := range op.readings {
			left = append(left, s.Without(now))
		}
		return left
	}
	now := op.readings[len(op.readings)-1]
	for _, r := range op.rules {
		for _, read := range op.readings {
			told, next := op.answerOf(r.at(read), model.State{}, s, now)
			if _, after := next.Left(op.BucketID); op.isTold(told, now, answer) && !slices.ContainsFunc(left, after.Equal) {
				left = append(left, after)
			}
		}
	}
	return left
}
