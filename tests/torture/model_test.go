package torture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Random calls, one after the other, get from SQL what the model answers, in every field. Each request of a batch has an answer of its own.
func TestTorture_ModelAgreesWithSQL(t *testing.T) {
	agreeWithSQL(t, allKinds, []meeting{
		{toMeet, func(m *modelRun, t *rapid.T) { m.meetAll(t, "x", "y") }},
		{toMeetOfQuotas, (*modelRun).meetQuotas},
		{[]string{"pauses"}, (*modelRun).meetPauses},
		{toMeetOfSlots, (*modelRun).meetSlots},
		{[]string{"bounds"}, (*modelRun).meetBounds},
	})
}

// Random calls about slots alone, of which a run of all kinds has few.
func TestTorture_SlotsAgreeWithModel(t *testing.T) { agreeWithSQL(t, slotsOnly, nil) }

// A meeting makes calls that meet what no run should leave to its luck.
type meeting struct {
	toMeet []string
	meet   func(*modelRun, *rapid.T)
}

func agreeWithSQL(t *testing.T, kind kindOfRun, meetings []meeting) {
	run := kit.Torture(t, 100)
	db := kit.NewDB(t)
	db.SetTimeZone("Europe/Berlin")
	db.SetClock(kit.T0)
	db.CatchDenials()
	session := db.Session()
	met := sightings{}
	run.Check(func(t *rapid.T) {
		m := newModelRun(t, session, met, kind)
		defer m.end()
		for _, first := range meetings {
			if met.lacks(first.toMeet) != "" {
				first.meet(m, t)
				m = newModelRun(t, session, met, kind)
			}
		}
		t.Repeat(m.actions())
		run.Progress("%d answers", met["answers that agree in every field"])
	})
	run.Counts(met)
}

// sightings count what a run has met. toMeet is what meetAll meets, toMeetOfQuotas what meetQuotas does, and toMeetOfSlots what
// meetSlots does.
type sightings map[string]int

var toMeet = []string{
	"removed by clean-up", "under an override", "after an override", "RL001", "RL002", "22023",
	"of one charge: granted", "of one charge: denied", "of one charge: denied for ever", "of one charge: replayed", "of one charge: shadowed",
	"of several: granted", "of several: denied", "of several: denied for ever", "of several: replayed", "of several: shadowed",
	"of several: granted, in part before", "of several: denied, in part granted before",
	"RL003", "RL004", "charge: debt", "charge: at the floor", "charge: replayed", "settle: gave back", "settle: debt", "settle: replayed", "settle: shadowed",
	"reserve: granted at once", "reserve: waits", "reserve: refused", "reserve: replayed", "reserve: shadowed",
	"acquire_up_to: all", "acquire_up_to: fewer", "acquire_up_to: denied", "acquire_up_to: replayed", "acquire_up_to: shadowed",
}

var toMeetOfQuotas = []string{
	"quota: granted", "quota: denied until a turn", "quota: denied for ever", "quota: less than nothing is left", "quota: under a zone of its own",
	"quota: filled by a turn", "quota: filled by another policy", "quota: filled by an override", "quota: left as it was by an override",
	"quota: settled in a closed period", "quota: charge: at the floor", "quota: reserve: granted at once", "quota: reserve: refused",
	"quota: acquire_up_to: fewer",
}

// lacks names what was not met.
func (s sightings) lacks(toMeet []string) string {
	for _, what := range toMeet {
		if s[what] == 0 {
			return what
		}
	}
	return ""
}

// see counts an answer.
func (s sightings) see(w kit.Whole) {
	inPart := slices.ContainsFunc(w.Decisions, kit.IsReplayed)
	kind := "denied"
	switch {
	case !w.Allowed && w.Replayed:
		kind = "denied, a reserved grant"
	case !w.Allowed && w.RetryAfter == model.Never:
		kind = "denied for ever"
	case !w.Allowed && inPart:
		kind = "denied, in part granted before"
	case w.Replayed:
		kind = "replayed"
	case w.Shadowed:
		kind = "shadowed"
	case w.Allowed && inPart:
		kind = "granted, in part before"
	case w.Allowed:
		kind = "granted"
	}
	size := "of several: "
	if len(w.Decisions) == 1 {
		size = "of one charge: "
	}
	s[size+kind]++
}

// A plantedBug is a mutation of a function of SQL.
type plantedBug struct{ function, pattern, replacement string }

func (b plantedBug) plant(db *kit.TestDB) {
	db.Mutate(kit.Mutation{Pattern: b.pattern, Replacement: b.replacement}, b.function)
}

// A bug planted in SQL makes the same sequences disagree.
func TestModel_FindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	kit.OnDBs(t, map[string]plantedBug{
		"a refill that goes back with the clock":        {"ratelimit.refilled_until", `greatest\(refilled_at, now\)`, "now"},
		"a retry_after a microsecond short":             {"ratelimit.time_below", ` \+ round_up`, ""},
		"a bucket that is named twice is charged twice": {"ratelimit.decide", `if same\[v_i\] = v_i then`, "if true then"},
		"a denial keeps what fits":                      {"ratelimit.decide", `if v_granted and fits\[v_i\]`, "if fits[v_i]"},
		"a repeat in the call is charged":               {"ratelimit.decide", `and fits\[v_i\] and not replayed\[v_i\]`, "and fits[v_i]"},
		"a repeat with another cost is a repeat":        {"ratelimit.decide", `if known\[v_i\]\.cost <> charges\[v_i\] then`, "if false then"},
		"a shadow denies":                               {"ratelimit.decide", `\(fits\[v_i\] or numbers\[v_b\]\.shadow\)`, "fits[v_i]"},
		"an answer is of after the batch":               {"ratelimit.decide", `v_then_level\[v_i\] := levels\[v_b\];`, "v_then_level[v_i] := null;"},
		"a wait that an override just does not outlast": {"ratelimit.wait_past_end", `v_wait_us < v_left_us`, "v_wait_us <= v_left_us"},
		"an override that ends denies for ever":         {"ratelimit.wait_past_end", `v_left_us is null or`, "true or"},
		"a wait is over before the override is": {"ratelimit.wait_after_end",
			`greatest\(v_wait_us, ratelimit\.left_of_numbers\(numbers, now\)\)`, "v_wait_us"},
		"no row of a batch is full by the override": {"ratelimit.rows_of_buckets",
			`greatest\(\(u\.p\)\.capacity, v_policy\.capacity\)`, "(u.p).capacity"},
		"a cost of 0 waits for debt to be paid": {"ratelimit.decide", `fits\[v_i\] := charges\[v_i\] = 0 or`, "fits[v_i] :="},
		"a turn is counted from the turn before": {"ratelimit.turning",
			`\(calendar\.anchor \+ v_turn \* calendar\.period\)([^;]*; calendar\.turns_at := )\(calendar\.anchor \+ \(v_turn \+ 1\) \* calendar\.period\)`,
			"(calendar.anchor + (v_turn - 1) * calendar.period + calendar.period)${1}(calendar.anchor + v_turn * calendar.period + calendar.period)"},
		"a turn comes by the clocks of UTC": {"ratelimit.turning",
			`(calendar\.turned_at := [^;]*) at time zone calendar\.time_zone; (calendar\.turns_at := [^;]*) at time zone calendar\.time_zone`,
			"$1 at time zone 'UTC'; $2 at time zone 'UTC'"},
		"another zone fills": {"ratelimit_override",
			`insert into overrides as o`,
			`
			delete from buckets as b where b.policy_id = v_policy.id and b.key = v_key and ratelimit_override.time_zone is not null; $0`},
		"an abbreviation is a zone": {"ratelimit.check_calendar", `time_zone !~ '/' or`, "false or"},
		"an upgrade forgets what was used": {"ratelimit_define_policy",
			`if not found then`,
			`
			update buckets as b set level = 0 where b.policy_id = v_id and ratelimit_define_policy.capacity > v_policy.capacity; if v_id is null then`},
		"a settlement gives back to the period after": {"ratelimit_settle", `v_back := 0;`, "null;"},
		"clean-up removes a quota's row too early": {"ratelimit.unused",
			`ratelimit\.turning_if_known\(calendar, now\)`, "ratelimit.turning_if_known(calendar, now + interval '1 hour')"},
		"a charge that remembers what it did not take": {"ratelimit_charge",
			`(insert into idempotency_keys [^;]*?)nullif\(v_held - v_level, microtokens\(v_cost\)\)`, "${1}null"},
		"a partial grant of more than was taken": {"ratelimit.partial_of", `then taken else 0`, `then taken + 1 else 0`},
		"a pause that a shorter one ends":        {"ratelimit_pause", `greatest\(v_until, (v_now [^;]*)\);`, "$1;"},
		"a pause leaves its tokens":              {"ratelimit_pause", `v_level := least\(v_level, 0\);`, ""},
		"a pause that refills":                   {"ratelimit_pause", `greatest\(v_refilled_at, v_until\)`, "refilled_until(v_refilled_at, v_now, v_policy.tick)"},
		"a pause to the last interval":           {"ratelimit_pause", `greatest\(v_refilled_at, v_until\)`, "refilled_until(v_refilled_at, v_until, v_policy.tick)"},
		"a pause by numbers that end":            {"ratelimit_pause", `\.ends_at <= v_until`, ".ends_at < v_now"},
		"a refund that ends a pause": {"ratelimit_refund",
			`(case )when b\.paused_until > v_now((?s).*?case )when b\.paused_until > v_now`, "${1}when false${2}when false"},
		"a settlement that ends a pause": {"ratelimit_settle", `v_paused_until > v_now`, "false"},
		"a wait is the difference of local times": {"ratelimit.wait_for_turn",
			`\(quota\.calendar\)\.turns_at - now`,
			"((quota.calendar).turns_at at time zone (quota.calendar).time_zone) - (now at time zone (quota.calendar).time_zone)"},
	}, func(t *testing.T, db *kit.TestDB, bug plantedBug) {
		bug.plant(db)
		findsIt(t, db, tokensOnly, // calls about slots find none of these
			(*modelRun).meetQuotas, (*modelRun).meetPauses, (*modelRun).meetAnEnd, (*modelRun).meetTheFloor)
	})
}

// findsIt requires that SQL and the model disagree, at first in calls that random ones seldom are.
func findsIt(t *testing.T, db *kit.TestDB, kind kindOfRun, first ...func(*modelRun, *rapid.T)) {
	db.SetClock(kit.T0)
	db.CatchDenials()
	session, met := db.Session(), false
	require.True(t, disagrees(t, func(t *rapid.T) *modelRun {
		m := newModelRun(t, session, sightings{}, kind)
		for _, meet := range first {
			if !met {
				meet(m, t)
			}
		}
		met = true
		return m
	}), "it is not found in 2,000 sequences")
}

// disagrees reports whether SQL and the model differ in 2,000 sequences.
func disagrees(t *testing.T, begin func(t *rapid.T) *modelRun) bool {
	told, found, ended := &failing{T: t}, false, make(chan struct{})
	go func() {
		defer close(ended)
		for range 20 {
			rapid.Check(told, func(t *rapid.T) {
				if found {
					return // shrinking would take a while
				}
				found = true
				m := begin(t)
				defer m.end()
				t.Repeat(m.actions())
				found = false
			})
		}
	}()
	<-ended
	return told.Failed()
}

// failing is a test that is expected to fail, and logs nothing.
type failing struct {
	*testing.T
	failed bool
}

func (f *failing) Logf(string, ...any)   {}
func (f *failing) Log(...any)            {}
func (f *failing) Errorf(string, ...any) { f.failed = true }
func (f *failing) Fail()                 { f.failed = true }
func (f *failing) Failed() bool          { return f.failed }
func (f *failing) FailNow()              { f.failed = true; runtime.Goexit() }

// A modelRun makes every call twice, to SQL and to the model.
type modelRun struct {
	session *kit.Session
	only    kindOfRun
	model   *model.Model
	saved   []*model.Model // what a transaction can go back to: its begin, and its savepoints
	now     time.Time

	met sightings

	// What the last calls have made interesting.
	requests []kit.WholeRequest
	instants []time.Time // when something happens
	numbers  []int64     // of tokens
	waits    []model.Micros

	spendings, settled []kit.Spending
}

// A kindOfRun says which policies a run has.
type kindOfRun int

const (
	allKinds kindOfRun = iota
	slotsOnly
	tokensOnly // buckets and quotas
)

const emptyTables = `
	delete from ratelimit.policies; delete from ratelimit.overrides;
	delete from ratelimit.buckets; delete from ratelimit.ephemeral_buckets;
	delete from ratelimit.idempotency_keys; delete from ratelimit.ephemeral_idempotency_keys;
	delete from ratelimit.slots; delete from ratelimit.ephemeral_slots; delete from ratelimit.leases; delete from ratelimit.ephemeral_leases`

func newModelRun(t *rapid.T, s *kit.Session, met sightings, only kindOfRun) *modelRun {
	s.Execute(emptyTables)
	m := &modelRun{
		only: only, session: s, model: model.New(), met: met,
	}
	m.begin(t)
	return m
}

// begin defines the policies at t0.
func (m *modelRun) begin(t *rapid.T) {
	m.setClock(t, kit.T0)
	for _, name := range policyNames {
		for known := false; !known; _, known = m.model.Policy(name) { // not every definition can be
			m.define(t, name)
		}
	}
}

func (m *modelRun) actions() map[string]func(*rapid.T) {
	slots := map[string]func(*rapid.T){
		"hold": m.hold, "hold now": m.hold, "renew": m.renew, "release": m.release, "holders": m.listHolders,
	}
	actions := map[string]func(*rapid.T){
		"peek": m.peek, "override": m.override, "wait": m.wait, "step": m.step,
		"clean up": m.cleanUp, "rarely": m.changeOrRemove, "save": m.save, "roll back": m.rollBackOrNot,
	}
	if m.only != tokensOnly {
		maps.Copy(actions, slots)
	}
	if m.only == slotsOnly {
		actions["hold again"], actions["wait on"], actions["meet the end of a lease"] = m.hold, m.wait, m.meetTheEnd
		return actions
	}
	maps.Copy(actions, map[string]func(*rapid.T){
		"acquire": m.acquire, "again": m.acquireAgain, "many": m.acquireMany, "refund": m.refund, "pause": m.pause,
		"spend": m.spend, "spend now": m.spend, "settle": m.settle,
	})
	return actions
}

// save begins a transaction, or sets a savepoint in it.
func (m *modelRun) save(*rapid.T) {
	if len(m.saved) == 0 {
		m.session.Execute("begin")
	} else {
		m.session.Execute(fmt.Sprint("savepoint s", len(m.saved)))
	}
	m.saved = append(m.saved, m.model.Clone())
}

// rollBackOrNot ends what one save began, and all that was saved since.
func (m *modelRun) rollBackOrNot(t *rapid.T) {
	if len(m.saved) == 0 {
		t.Skip("in no transaction")
	}
	to := rapid.IntRange(0, len(m.saved)-1).Draw(t, "to")
	switch keep := rapid.Bool().Draw(t, "keep"); {
	case !keep:
		m.rollBack(to)
	case to == 0:
		m.session.Execute("commit")
		m.saved = nil
	default:
		m.session.Execute(fmt.Sprint("release s", to))
		m.saved = m.saved[:to]
	}
}

func (m *modelRun) rollBack(to int) {
	m.met["rollbacks"]++
	m.model = m.saved[to]
	if to == 0 {
		m.session.Execute("rollback")
		m.saved = nil
		return
	}
	m.session.Execute(fmt.Sprint("rollback to s", to)) // which stays
	m.saved = append(m.saved[:to], m.model.Clone())
}

// end leaves the session to the next sequence, also when this one has failed.
func (m *modelRun) end() { m.session.Execute("rollback") }

var policyNames = []string{"a", "b", "c"}

var (
	bucketIDs = rapid.Custom(func(t *rapid.T) model.BucketID {
		return model.BucketID{Policy: rapid.SampledFrom(policyNames).Draw(t, "policy"), Key: rapid.SampledFrom([]string{"x", "y"}).Draw(t, "key")}
	})
	// Every magnitude is as likely as any other.
	magnitudes = rapid.Custom(func(t *rapid.T) int64 {
		return rapid.Int64Range(1, 1<<rapid.IntRange(1, 43).Draw(t, "bits")).Draw(t, "number")
	})
	tokens = rapid.OneOf(rapid.Int64Range(1, 20), magnitudes)
	spans  = rapid.OneOf(
		rapid.SampledFrom([]model.Micros{1, 3, 1_000, 1_000_000, 10_000_000, kit.Day / 24, kit.Day, 7 * kit.Day, 365250 * kit.Day}),
		rapid.Map(magnitudes, func(n int64) model.Micros { return model.Micros(n) }),
	)
	seldom  = rapid.Map(rapid.IntRange(0, 2), func(n int) bool { return n == 2 })
	refills = rapid.OneOf(rapid.Map(tokens, atMost9e12), rapid.Map(tokens, atMost9e12), rapid.Map(tokens, atMost9e12), rapid.Just[int64](0))
	// What an override has in place of its policy's: mostly little, so that it shows.
	overridden = rapid.Custom(func(t *rapid.T) model.Numbers {
		return model.Numbers{
			Capacity: orNil(rapid.OneOf(rapid.Int64Range(0, 20), rapid.Map(tokens, atMost9e12))).Draw(t, "capacity"),
			Refill:   rapid.Ptr(refills, true).Draw(t, "refill"), Every: rapid.Ptr(spans, true).Draw(t, "every"),
		}
	})
	periods = rapid.OneOf(
		rapid.SampledFrom([]model.Period{{Days: 1}, {Days: 1}, {Days: 7}, {Months: 1}, {Months: 1}, {Months: 12}, {Months: 12_000}, {Days: 365_250}}),
		rapid.Map(rapid.IntRange(1, 100), func(n int) model.Period { return model.Period{Days: n} }),
		rapid.Map(rapid.IntRange(1, 100), func(n int) model.Period { return model.Period{Months: n} }),
	)
	zones = rapid.SampledFrom([]string{
		"UTC", "UTC", "Europe/Berlin", "Europe/Berlin", "America/New_York", "America/Los_Angeles", "America/Sao_Paulo", "America/Havana",
		"Pacific/Auckland", "Pacific/Apia", "Australia/Lord_Howe", "Asia/Kathmandu", "GMT",
	})
	// Mostly about when the clock begins, on the eve of a change of clocks in Europe.
	anchors = rapid.Custom(func(t *rapid.T) time.Time {
		day := rapid.OneOf(rapid.Just(0), rapid.IntRange(-70, 70), rapid.IntRange(-20_000, 20_000)).Draw(t, "days")
		minutes := rapid.OneOf(rapid.Just(0), rapid.SampledFrom([]int{-12 * 60, -9*60 - 30, -11*60 - 30}), rapid.IntRange(-720, 720)).Draw(t, "minutes")
		return kit.T0.AddDate(0, 0, day).Add(time.Duration(minutes) * time.Minute)
	})
	// What an override of a quota's key has. Of a policy that refills it cannot have a zone or an anchor.
	overriddenQuota = rapid.Custom(func(t *rapid.T) model.Numbers {
		return model.Numbers{
			Capacity: orNil(rapid.OneOf(rapid.Int64Range(0, 20), rapid.Map(tokens, atMost9e12))).Draw(t, "capacity"),
			Zone:     rapid.Ptr(zones, true).Draw(t, "zone"), Anchor: rapid.Ptr(anchors, true).Draw(t, "anchor"),
		}
	})
	quotas = rapid.Custom(func(t *rapid.T) model.Definition {
		return model.Definition{
			Numbers: model.Numbers{
				Capacity: orNil(rapid.OneOf(rapid.Int64Range(0, 20), refills)).Draw(t, "capacity"),
				Zone:     rapid.Ptr(zones, true).Draw(t, "zone"), Anchor: rapid.Ptr(anchors, true).Draw(t, "anchor"),
			},
			Period:   orNil(periods).Draw(t, "period"),
			Durable:  rapid.Ptr(rapid.Bool(), true).Draw(t, "durable"),
			Remember: rapid.Ptr(spans, true).Draw(t, "remember"),
			Shadow:   rapid.Ptr(seldom, true).Draw(t, "shadow"),
		}
	})
	leases = rapid.OneOf(
		rapid.SampledFrom([]model.Micros{1_000, 1_000_000, 60_000_000, 60_000_000, kit.Day, 365250 * kit.Day}), spans)
	// What an override of a key of slots has.
	overriddenSlots = rapid.Custom(func(t *rapid.T) model.Numbers {
		return model.Numbers{
			Capacity: orNil(rapid.OneOf(rapid.Int64Range(0, 9), rapid.Int64Range(0, 10_001))).Draw(t, "capacity"),
			Lease:    rapid.Ptr(leases, true).Draw(t, "lease"),
		}
	})
	slots = rapid.Custom(func(t *rapid.T) model.Definition {
		return model.Definition{
			Numbers: model.Numbers{
				Capacity: orNil(rapid.OneOf(rapid.Int64Range(1, 9), rapid.Int64Range(1, 9), rapid.Int64Range(0, 10_001))).Draw(t, "capacity"),
				Lease:    orNil(leases).Draw(t, "lease"),
			},
			Durable: rapid.Ptr(rapid.Bool(), true).Draw(t, "durable"),
			Shadow:  rapid.Ptr(seldom, true).Draw(t, "shadow"),
		}
	})
	definitions = rapid.Custom(func(t *rapid.T) model.Definition {
		return model.Definition{
			Numbers: model.Numbers{
				Capacity: orNil(refills).Draw(t, "capacity"), Refill: orNil(refills).Draw(t, "refill"),
				Every: orNil(spans).Draw(t, "every"),
			},
			Stepped:  rapid.Ptr(rapid.Bool(), true).Draw(t, "stepped"),
			Durable:  rapid.Ptr(rapid.Bool(), true).Draw(t, "durable"),
			Remember: rapid.Ptr(spans, true).Draw(t, "remember"),
			Shadow:   rapid.Ptr(seldom, true).Draw(t, "shadow"),
		}
	})
)

// orNil draws nil now and then, which keeps what the policy has.
func orNil[T any](values *rapid.Generator[T]) *rapid.Generator[*T] {
	return rapid.Custom(func(t *rapid.T) *T {
		if rapid.IntRange(0, 7).Draw(t, "given") == 7 {
			return nil
		}
		return new(values.Draw(t, "value"))
	})
}

func atMost9e12(n int64) int64 { return min(n, kit.MaxTokens) }

// meetAll gets each kind of answer at least once, so that no run depends on its luck. Policies d and g are alike, e is their
// shadow, and f is unknown.
func (m *modelRun) meetAll(t *rapid.T, x, y string) {
	limit := model.Numbers{Capacity: new(int64(10)), Refill: new(int64(1)), Every: new(model.Micros(1_000_000))}
	of := func(policy, key string, cost int64) model.Charge {
		return model.Charge{BucketID: model.BucketID{Policy: policy, Key: key}, Cost: cost}
	}
	ask := func(idempotencyKey string, charges ...model.Charge) {
		m.sendOne(t, kit.WholeRequest{Charges: charges, IdempotencyKey: idempotencyKey})
	}
	spend := func(function, idempotencyKey string, c model.Charge, atLeast int64, maxWait model.Micros) {
		m.sendSpending(t, kit.Spending{Function: function, BucketID: c.BucketID, Cost: c.Cost, AtLeast: atLeast, MaxWait: maxWait, IdempotencyKey: idempotencyKey})
	}
	m.defineAs(t, "f", model.Definition{}) // 22023
	m.defineAs(t, "d", model.Definition{Numbers: limit})
	m.defineAs(t, "e", model.Definition{Numbers: limit, Shadow: new(true)})
	m.defineAs(t, "g", model.Definition{Numbers: limit})

	ask("", of("f", x, 1)) // RL001
	ask("i", of("d", x, 2))
	ask("i", of("d", x, 2)) // replayed
	ask("i", of("d", x, 3)) // RL002
	ask("", of("d", x, 9))  // denied: 8 are left
	ask("", of("d", x, 11)) // denied for ever
	ask("i", of("d", x, 2), of("d", y, 1))
	ask("i", of("d", x, 2), of("d", y, 1))
	ask("j", of("d", x, 1))
	ask("j", of("d", x, 1), of("d", y, 10)) // denied: 9 are left of y
	ask("", of("d", x, 1), of("d", y, 1))
	ask("", of("d", x, 1), of("d", y, 9))
	ask("", of("d", x, 1), of("d", y, 11))
	ask("", of("e", x, 6))
	ask("", of("e", x, 6)) // shadowed: 4 are left
	ask("", of("e", x, 6), of("e", y, 6))

	ask("k", of("d", x, 5))
	spend("settle", "k", of("d", x, 1), 0, 0) // gives back
	spend("settle", "k", of("d", x, 1), 0, 0)
	ask("k", of("d", x, 5)) // RL004
	ask("l", of("d", x, 1))
	spend("settle", "l", of("d", x, 50), 0, 0)           // into debt
	spend("settle", "no grant", of("d", x, 1), 0, 0)     // RL003
	spend("settle", "no grant", of("e", x, 1), 0, 0)     // which a shadow may not have needed
	spend("charge", "m", of("d", y, 20), 0, 0)           // into debt
	spend("charge", "m", of("d", y, 20), 0, 0)           // replayed
	spend("charge", "", of("d", y, kit.MaxTokens), 0, 0) // to the floor
	spend("reserve", "n", of("g", x, 4), 0, kit.Day)     // at once
	spend("reserve", "n", of("g", x, 4), 0, kit.Day)     // replayed
	spend("reserve", "", of("g", x, 10), 0, kit.Day)     // waits for 4
	spend("reserve", "", of("g", x, 10), 0, 0)           // refused
	spend("reserve", "", of("e", x, 6), 0, 0)            // shadowed
	spend("acquire_up_to", "o", of("g", y, 6), 1, 0)     // all
	spend("acquire_up_to", "o", of("g", y, 6), 1, 0)     // replayed
	spend("acquire_up_to", "", of("g", y, 6), 1, 0)      // 4
	spend("acquire_up_to", "", of("g", y, 6), 1, 0)      // denied
	spend("acquire_up_to", "", of("e", x, 6), 5, 0)      // shadowed

	expires := m.now.Add(time.Minute)
	m.setOverride(t, model.BucketID{Policy: "g", Key: x}, model.Numbers{Capacity: new(int64(20))}, expires)
	ask("", of("g", x, 1))
	m.setClock(t, expires)
	ask("", of("g", x, 1))
	m.setClock(t, expires.Add(time.Hour))
	m.cleanUp(t)
	require.Empty(t, m.met.lacks(toMeet))
}

// meetPauses pauses a bucket before and after what could end the pause.
func (m *modelRun) meetPauses(t *rapid.T) {
	const second = model.Micros(1_000_000)
	limit := model.Numbers{Capacity: new(int64(10)), Refill: new(int64(1)), Every: new(second)}
	for name, stepped := range map[string]bool{"d": false, "g": true} {
		m.defineAs(t, name, model.Definition{Numbers: limit, Stepped: &stepped})
		paused := func(key string) (model.BucketID, func(cost int64)) {
			id := model.BucketID{Policy: name, Key: key}
			ask := func(cost int64) { m.sendOne(t, kit.WholeRequest{Charges: []model.Charge{{BucketID: id, Cost: cost}}}) }
			ask(3)
			m.setClock(t, (second / 2).After(m.now))
			return id, ask
		}
		id, ask := paused("p")
		m.sendOne(t, kit.WholeRequest{Charges: []model.Charge{{BucketID: id, Cost: 5}}, IdempotencyKey: "p"})
		m.sendPause(t, id, 10*second)
		m.sendPause(t, id, 5*second)
		m.sendSpending(t, kit.Spending{Function: "settle", BucketID: id, Cost: 1, IdempotencyKey: "p"})
		for _, later := range []model.Micros{0, 5 * second, 5*second - 1, 1, second} {
			m.setClock(t, later.After(m.now))
			m.sendRefund(t, id, 2)
			ask(1)
		}

		id, ask = paused("o") // whose other numbers end in the pause
		m.setOverride(t, id, model.Numbers{Every: new(3 * second / 10)}, second.After(m.now))
		m.sendPause(t, id, 2*second)
		for range 9 {
			m.setClock(t, (second / 2).After(m.now))
			ask(1)
		}

		id, ask = paused("b") // whose other numbers end in the pause, in debt
		m.setOverride(t, id, model.Numbers{Every: new(3 * second / 10)}, second.After(m.now))
		m.sendSpending(t, kit.Spending{Function: "charge", BucketID: id, Cost: 12})
		m.sendPause(t, id, 2*second)
		m.setClock(t, (2 * second).After(m.now))
		ask(1)

		id, ask = paused("s") // whose interval becomes shorter
		m.sendPause(t, id, 2*second)
		m.setOverride(t, id, model.Numbers{Every: new(second / 10)}, time.Time{})
		m.setClock(t, (2*second - 1).After(m.now))
		ask(1)

		id, ask = paused("n") // whose debt is paid meanwhile
		m.sendSpending(t, kit.Spending{Function: "charge", BucketID: id, Cost: 12})
		m.sendPause(t, id, 3*second)
		m.setClock(t, (3 * second).After(m.now))
		ask(1)
	}
	m.defineAs(t, "d", model.Definition{Numbers: model.Numbers{Capacity: new(int64(0))}}) // of which all buckets are full
	m.sendPause(t, model.BucketID{Policy: "d", Key: "p"}, kit.Day)
	m.setClock(t, model.Micros(kit.Day/2).After(m.now))
	m.cleanUp(t)
	require.NotZero(t, m.met["pauses"])
}

// meetQuotas does so with two days of a quota: the first ends as clocks change.
func (m *modelRun) meetQuotas(t *rapid.T) {
	at := func(key string) model.BucketID { return model.BucketID{Policy: "q", Key: key} }
	ask := func(key string, cost int64, idempotencyKey string) {
		m.sendOne(t, kit.WholeRequest{Charges: []model.Charge{{BucketID: at(key), Cost: cost}}, IdempotencyKey: idempotencyKey})
	}
	spend := func(function, key string, cost int64, idempotencyKey string) {
		m.sendSpending(t, kit.Spending{Function: function, BucketID: at(key), Cost: cost, AtLeast: 1, MaxWait: kit.Day, IdempotencyKey: idempotencyKey})
	}
	capacity := func(n int64) model.Numbers { return model.Numbers{Capacity: &n} }
	m.defineAs(t, "q", model.Definition{
		Period: &model.Period{Days: 1}, Numbers: model.Numbers{Capacity: new(int64(10)), Zone: new("Europe/Berlin")}, Remember: new(model.Micros(7 * kit.Day)),
	})
	ask("x", 8, "i")
	ask("x", 3, "")
	ask("x", 11, "")
	m.defineAs(t, "q", model.Definition{Numbers: capacity(5)})
	ask("x", 0, "")
	m.defineAs(t, "q", model.Definition{Numbers: capacity(10)})
	turn := time.Date(2024, 3, 30, 23, 0, 0, 0, time.UTC)
	m.setClock(t, turn.Add(-time.Microsecond))
	ask("x", 3, "")
	m.setClock(t, turn)
	ask("x", 3, "")
	spend("settle", "x", 1, "i") // gives nothing back to the day after
	spend("reserve", "x", 7, "")
	spend("reserve", "x", 7, "")
	spend("acquire_up_to", "y", 11, "")
	spend("charge", "y", kit.MaxTokens, "")
	m.setClock(t, turn.Add(2*time.Hour))
	m.defineAs(t, "q", model.Definition{Numbers: model.Numbers{Anchor: new(time.Date(2024, 3, 31, 1, 30, 0, 0, time.UTC))}})
	ask("x", 10, "")
	m.setOverride(t, at("x"), model.Numbers{Zone: new("Europe/London")}, time.Time{}) // its turn was an hour after the policy's
	ask("x", 1, "")
	m.setOverride(t, at("x"), model.Numbers{Anchor: new(time.Date(2024, 3, 31, 0, 15, 0, 0, time.UTC))}, turn.Add(3*time.Hour)) // none since
	ask("x", 10, "")
	m.setClock(t, turn.Add(150*time.Minute))
	m.setOverride(t, at("x"), model.Numbers{Anchor: new(time.Date(2024, 3, 31, 2, 15, 0, 0, time.UTC))}, turn.Add(3*time.Hour))
	require.Empty(t, m.met.lacks(toMeetOfQuotas))
}

// meetAnEnd asks for as many tokens as the override's refill has brought at its end: by then the policy's refill counts, from the last write.
func (m *modelRun) meetAnEnd(t *rapid.T) {
	numbers := func(every model.Micros) model.Numbers {
		return model.Numbers{Capacity: new(int64(10)), Refill: new(int64(1)), Every: &every}
	}
	id := model.BucketID{Policy: "ends", Key: "x"}
	m.defineAs(t, "ends", model.Definition{Numbers: numbers(3600 * 1_000_000)})
	m.sendOne(t, kit.WholeRequest{Charges: []model.Charge{{BucketID: id, Cost: 10}}})
	m.setOverride(t, id, numbers(1_000_000), m.now.Add(4*time.Second))
	for cost := range int64(5) {
		m.sendAlone(t, "acquire", kit.WholeRequest{Charges: []model.Charge{{BucketID: id, Cost: cost + 1}}})
	}
}

// meetTheFloor settles a charge that took a part of its cost: the bucket was at its floor then.
func (m *modelRun) meetTheFloor(t *rapid.T) {
	m.defineAs(t, "floor", model.Definition{
		Numbers: model.Numbers{Capacity: new(int64(10)), Refill: new(int64(1)), Every: new(model.Micros(1_000_000))},
	})
	s := kit.Spending{Function: "charge", BucketID: model.BucketID{Policy: "floor", Key: "x"}, Cost: kit.MaxTokens, IdempotencyKey: "i"}
	m.sendSpending(t, s)
	s.Function, s.Cost = "settle", 100
	m.sendSpending(t, s)
}

func (m *modelRun) define(t *rapid.T, name string) {
	p, known := m.model.Policy(name)
	kind := rapid.SampledFrom([]string{"bucket", "bucket", "quota", "slots"}).Draw(t, "kind")
	switch {
	case m.only == slotsOnly:
		kind = "slots"
	case m.only == tokensOnly && kind == "slots":
		kind = "bucket"
	case known && rapid.IntRange(0, 7).Draw(t, "another kind if 7") < 7:
		kind = kindOf(p)
	}
	of := map[string]*rapid.Generator[model.Definition]{"bucket": definitions, "quota": quotas, "slots": slots}[kind]
	m.defineAs(t, name, of.Draw(t, kind+" "+name))
}

func kindOf(p model.Policy) string {
	switch {
	case p.IsQuota():
		return "quota"
	case p.IsSlots():
		return "slots"
	}
	return "bucket"
}

func (m *modelRun) defineAs(t *rapid.T, name string, def model.Definition) {
	text, _ := json.Marshal(def) // which has no year 10,000
	t.Logf("defined: %s", text)
	err := m.call("ratelimit_define_policy($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
		name, def.Capacity, def.Refill, intervalOrNull(def.Every), def.Stepped, def.Durable, intervalOrNull(def.Remember), def.Shadow,
		periodOrNull(def.Period), def.Zone, def.Anchor, intervalOrNull(def.Lease))
	var wantErr error
	m.seeFills(" by another policy", func() { wantErr = m.model.Define(name, def) })
	m.sameError(t, wantErr, err)
}

// seeFills counts the buckets of quotas that were used and are full after a change, or as full as they were.
func (m *modelRun) seeFills(by string, change func()) {
	used := func(id model.BucketID) int64 {
		d, _ := m.model.Peek(m.now, id, 0)
		return d.Capacity - d.Remaining
	}
	before := map[model.BucketID]int64{}
	for _, id := range m.model.Buckets() {
		if p, _ := m.model.Policy(id.Policy); p.IsQuota() && used(id) > 0 {
			before[id] = used(id)
		}
	}
	change()
	for id, n := range before {
		switch used(id) {
		case 0:
			m.met["quota: filled"+by]++
		case n:
			m.met["quota: left as it was"+by]++
		}
	}
}

// changeOrRemove makes calls that would leave little to compare if they were frequent.
func (m *modelRun) changeOrRemove(t *rapid.T) {
	id := bucketIDs.Draw(t, "bucket")
	switch rapid.SampledFrom([]string{"define", "define again", "reset", "reset all", "drop"}).Draw(t, "what") {
	case "define", "define again":
		m.define(t, id.Policy)
	case "reset":
		m.sameError(t, m.model.Reset(id), m.call("ratelimit_reset($1, $2)", id.Policy, id.Key))
	case "reset all":
		if len(m.saved) == 0 { // it commits
			_, err := m.session.Exec(context.Background(), "call ratelimit_reset_all($1)", id.Policy)
			m.sameError(t, m.model.ResetAll(id.Policy), err)
		}
	case "drop":
		m.sameError(t, m.model.Drop(id.Policy), m.call("ratelimit_drop_policy($1)", id.Policy))
		if !seldom.Draw(t, "leave it") {
			m.define(t, id.Policy)
		}
	}
}

// request draws one of a single charge or, as often, of several: few buckets, some of them twice.
func (m *modelRun) request(t *rapid.T) kit.WholeRequest {
	n := rapid.OneOf(rapid.Just(1), rapid.IntRange(2, 6)).Draw(t, "charges")
	r := kit.WholeRequest{IdempotencyKey: idempotencyKeys.Draw(t, "idempotency key")}
	for range n {
		r.Charges = append(r.Charges, m.charge(t, n))
	}
	return r
}

var idempotencyKeys = rapid.SampledFrom([]string{"", "", "1", "2"})

// charge draws one of n in a request. A request of many should have some hope.
func (m *modelRun) charge(t *rapid.T, n int) model.Charge {
	id := bucketIDs.Draw(t, "bucket")
	if n > 1 && !seldom.Draw(t, "much") {
		p, _ := m.model.Policy(id.Policy)
		return model.Charge{BucketID: id, Cost: rapid.OneOf(rapid.Int64Range(0, 3), rapid.Int64Range(0, p.Capacity/int64(n))).Draw(t, "amount")}
	}
	return model.Charge{BucketID: id, Cost: m.amount(t, id.Policy)}
}

// earlier draws a request that was made before, or one that is like it but for one thing.
func (m *modelRun) earlier(t *rapid.T) kit.WholeRequest {
	if len(m.requests) == 0 {
		t.Skip("nothing to repeat")
	}
	r := rapid.SampledFrom(m.requests).Draw(t, "request")
	charges := slices.Clone(r.Charges)
	i := rapid.IntRange(0, len(charges)-1).Draw(t, "charge")
	switch rapid.SampledFrom([]string{"same", "same", "more", "too much more", "fewer", "another cost", "parts", "turned", "another key"}).Draw(t, "but for") {
	case "more":
		charges = append(charges, m.charge(t, 2))
	case "too much more":
		c := m.charge(t, 2)
		if d, err := m.model.Peek(m.now, c.BucketID, 0); err == nil {
			c.Cost = max(c.Cost, d.Remaining+1)
		}
		charges = append(charges, c)
	case "fewer":
		if len(charges) > 1 {
			charges = slices.Delete(charges, i, i+1)
		}
	case "another cost":
		charges[i].Cost = m.amount(t, charges[i].Policy)
	case "parts": // of the same sum
		part := rapid.Int64Range(0, charges[i].Cost).Draw(t, "part")
		charges[i].Cost -= part
		charges = append(charges, model.Charge{BucketID: charges[i].BucketID, Cost: part})
	case "turned":
		slices.Reverse(charges)
	case "another key":
		r.IdempotencyKey = idempotencyKeys.Draw(t, "idempotency key")
	}
	r.Charges = charges[:min(6, len(charges))]
	return r
}

func (m *modelRun) acquire(t *rapid.T) { m.send(t, m.remembered(m.request(t))) }

func (m *modelRun) acquireAgain(t *rapid.T) { m.send(t, m.remembered(m.earlier(t))) }

// acquireMany sends requests together, some of them several times.
func (m *modelRun) acquireMany(t *rapid.T) {
	var requests []kit.WholeRequest
	for range rapid.IntRange(1, 5).Draw(t, "requests") {
		r := m.request(t)
		if len(m.requests) > 0 && rapid.Bool().Draw(t, "earlier") {
			r = m.earlier(t)
		}
		for range rapid.IntRange(1, 3).Draw(t, "times") {
			requests = append(requests, m.remembered(r))
		}
	}
	if seldom.Draw(t, "one without charges") {
		requests = slices.Insert(requests, rapid.IntRange(0, len(requests)).Draw(t, "place"), kit.WholeRequest{})
	}
	m.send(t, requests...)
}

// send makes requests by one of the functions that can carry them. In a batch an error stands in the row of its request.
func (m *modelRun) send(t *rapid.T, requests ...kit.WholeRequest) {
	functions := []string{"acquire_all", "acquire_many, with sizes", "acquire_packed, with sizes"}
	if !slices.ContainsFunc(requests, func(r kit.WholeRequest) bool { return len(r.Charges) != 1 }) {
		functions = append(functions, "acquire", "enforce", "acquire_many", "acquire_packed")
	}
	function := rapid.SampledFrom(functions).Draw(t, "function")
	switch function {
	case "acquire", "enforce", "acquire_all":
		for _, r := range requests {
			m.sendAlone(t, function, r)
		}
		return
	}
	var got []kit.WholeAnswer
	var err error
	switch function {
	case "acquire_many":
		got, err = kit.AcquireManyWholes(m.session, requests)
	case "acquire_many, with sizes":
		got, err = kit.AcquireManyWithSizes(m.session, requests)
	default:
		got, err = kit.AcquirePacked(m.session, requests, function != "acquire_packed")
	}
	require.NoError(t, err)
	require.Len(t, got, len(requests))
	for i, r := range requests {
		want := kit.WholeAnswer{}
		if w, err := m.model.AcquireAll(m.now, r.Charges, r.IdempotencyKey); err != nil {
			m.saw(err.Error())
			want.Error = err.Error()
			got[i].Error, _, _ = strings.Cut(got[i].Error, ":")
		} else {
			m.sawWhole(r, w)
			want.Whole = &w
		}
		require.Equal(t, want, got[i], "request %d: %+v", i+1, r)
	}
}

func (m *modelRun) sendOne(t *rapid.T, r kit.WholeRequest) { m.sendAlone(t, "acquire_all", r) }

func (m *modelRun) sendAlone(t *rapid.T, function string, r kit.WholeRequest) {
	want, wantErr := m.model.AcquireAll(m.now, r.Charges, r.IdempotencyKey)
	var got kit.Whole
	var err error
	switch function {
	case "acquire":
		var d kit.Decision
		d, err = r.Single().Acquire(m.session)
		got = kit.WholeOf(d)
	case "enforce":
		var d kit.Decision
		if d, err = r.Single().Enforce(m.session); err == nil && !d.Allowed {
			d.ResetAfter, d.Replayed = want.ResetAfter, want.Replayed // which its error does not tell
		}
		got = kit.WholeOf(d)
	default:
		got, err = r.AcquireAll(m.session)
	}
	if m.sameError(t, wantErr, err); err == nil {
		require.Equal(t, want, got, "%+v", r)
		m.sawWhole(r, want)
	}
}

func (m *modelRun) sawWhole(r kit.WholeRequest, w kit.Whole) {
	m.met["answers that agree in every field"]++
	m.met.see(w)
	for i, c := range r.Charges {
		m.seeQuota(c.BucketID, w.Decisions[i])
		switch o, ok := m.model.Overrides()[c.BucketID]; {
		case ok && o.Live(m.now):
			m.met["under an override"]++
		case ok:
			m.met["after an override"]++
		}
	}
	m.sawDecision(w.Decision)
	m.sawDecision(w.Decisions[len(w.Decisions)-1])
}

func (m *modelRun) seeQuota(id model.BucketID, d kit.Decision) {
	p, _ := m.model.Policy(id.Policy)
	if !p.IsQuota() {
		return
	}
	if o, ok := m.model.Overrides()[id]; ok && o.Live(m.now) && o.Zone != p.Zone {
		m.met["quota: under a zone of its own"]++
	}
	switch {
	case d.Remaining < 0:
		m.met["quota: less than nothing is left"]++
	case d.Allowed:
		m.met["quota: granted"]++
	case d.RetryAfter == model.Never:
		m.met["quota: denied for ever"]++
	default:
		m.met["quota: denied until a turn"]++
	}
}

func (m *modelRun) saw(code string) {
	m.met["answers that agree in every field"]++
	m.met[code]++
}

// remembered keeps a request for earlier.
func (m *modelRun) remembered(r kit.WholeRequest) kit.WholeRequest {
	m.requests = lastFew(append(m.requests, r))
	if p, ok := m.model.Policy(r.Charges[0].Policy); ok {
		m.instants = lastFew(append(m.instants, p.Remember.After(m.now), p.Remember.After(m.now).Add(model.CleanUpMargin)))
	}
	return r
}

// override sets, removes or lists overrides.
func (m *modelRun) override(t *rapid.T) {
	id := bucketIDs.Draw(t, "bucket")
	switch rapid.SampledFrom([]string{"set", "set", "set", "remove", "list"}).Draw(t, "what") {
	case "set":
		p, _ := m.model.Policy(id.Policy)
		kind := kindOf(p)
		if rapid.IntRange(0, 7).Draw(t, "of another kind if 7") == 7 {
			kind = rapid.SampledFrom([]string{"bucket", "quota", "slots"}).Draw(t, "kind")
		}
		numbers := map[string]*rapid.Generator[model.Numbers]{"bucket": overridden, "quota": overriddenQuota, "slots": overriddenSlots}[kind]
		n := numbers.Draw(t, "numbers")
		var expires time.Time
		if rapid.Bool().Draw(t, "expires") {
			lasts := rapid.OneOf(rapid.Int64Range(-1, 1), rapid.Map(spans, func(m model.Micros) int64 { return int64(m) }))
			expires = model.Micros(lasts.Draw(t, "after")).After(m.now)
			m.instants = lastFew(append(m.instants, expires, expires.Add(model.CleanUpMargin)))
		}
		m.setOverride(t, id, n, expires)
	case "remove":
		m.removeOverride(t, id)
	case "list":
		m.listOverrides(t, id)
	}
}

func (m *modelRun) setOverride(t *rapid.T, id model.BucketID, n model.Numbers, expires time.Time) {
	var nullable *time.Time
	if !expires.IsZero() {
		nullable = &expires
	}
	err := m.call("ratelimit_override($1, $2, $3, $4, $5, $6, $7, $8, $9)",
		id.Policy, id.Key, n.Capacity, n.Refill, intervalOrNull(n.Every), nullable, n.Zone, n.Anchor, intervalOrNull(n.Lease))
	var wantErr error
	m.seeFills(" by an override", func() { wantErr = m.model.Override(m.now, id, n, expires) })
	m.sameError(t, wantErr, err)
}

func (m *modelRun) removeOverride(t *rapid.T, id model.BucketID) {
	var had bool
	err := m.session.QueryRow(context.Background(), "select ratelimit_remove_override($1, $2)", id.Policy, id.Key).Scan(&had)
	want, wantErr := m.model.RemoveOverride(m.now, id)
	if m.sameError(t, wantErr, err); err == nil {
		require.Equal(t, want, had)
	}
}

// listOverrides compares those of one bucket, one key, one policy, or all.
func (m *modelRun) listOverrides(t *rapid.T, id model.BucketID) {
	var policy, key *string
	if _, known := m.model.Policy(id.Policy); known && rapid.Bool().Draw(t, "of one policy") {
		policy = &id.Policy
	}
	if rapid.Bool().Draw(t, "of one key") {
		key = &id.Key
	}
	rows := kit.NoError(m.session.Query(context.Background(), `
		select policy, key, capacity, coalesce(refill, 0), (extract(epoch from coalesce(every, '0')) * 1000000)::bigint,
		       coalesce(time_zone, ''), anchor, expires_at, (extract(epoch from coalesce(lease, '0')) * 1000000)::bigint
		  from ratelimit_overrides($1, $2)`, policy, key))(t)
	got := map[model.BucketID]model.Override{}
	var at model.BucketID
	var o model.Override
	var anchor, expires *time.Time
	_, err := pgx.ForEachRow(rows, []any{&at.Policy, &at.Key, &o.Capacity, &o.Refill, &o.Every, &o.Zone, &anchor, &expires, &o.Lease}, func() error {
		o.Anchor, o.Expires = time.Time{}, time.Time{}
		if anchor != nil {
			o.Anchor = *anchor
		}
		if expires != nil {
			o.Expires = expires.UTC()
		}
		got[at] = o
		return nil
	})
	require.NoError(t, err)
	want := m.model.Overrides()
	maps.DeleteFunc(want, func(at model.BucketID, o model.Override) bool {
		return !o.Live(m.now) || policy != nil && at.Policy != *policy || key != nil && at.Key != *key
	})
	require.Equal(t, want, got)
	m.saw("lists of overrides")
}

func (m *modelRun) peek(t *rapid.T) {
	id := bucketIDs.Draw(t, "bucket")
	m.sendPeek(t, id, m.amount(t, id.Policy))
}

func (m *modelRun) sendPeek(t *rapid.T, id model.BucketID, cost int64) {
	want, wantErr := m.model.Peek(m.now, id, cost)
	got, err := kit.Peek(m.session, id.Policy, id.Key, cost)
	m.same(t, want, got, wantErr, err)
}

func (m *modelRun) refund(t *rapid.T) {
	id := bucketIDs.Draw(t, "bucket")
	m.sendRefund(t, id, m.amount(t, id.Policy))
}

func (m *modelRun) sendRefund(t *rapid.T, id model.BucketID, amount int64) {
	want, wantErr := m.model.Refund(m.now, id, amount)
	got, err := kit.Refund(m.session, id.Policy, id.Key, amount)
	m.same(t, want, got, wantErr, err)
}

// pause stops a bucket, mostly for a time after which there is something to see.
func (m *modelRun) pause(t *rapid.T) {
	pauses := rapid.OneOf(rapid.SampledFrom([]model.Micros{1_000, 1_001, 50_000, 1_000_000, 10_000_000, kit.Day}), spans)
	m.sendPause(t, bucketIDs.Draw(t, "bucket"), pauses.Draw(t, "for"))
}

func (m *modelRun) sendPause(t *rapid.T, id model.BucketID, pauseFor model.Micros) {
	want, wantErr := m.model.Pause(m.now, id, pauseFor)
	got, err := kit.Pause(m.session, id.Policy, id.Key, pauseFor)
	m.same(t, want, got, wantErr, err)
	if err == nil {
		m.saw("pauses")
		m.instants = lastFew(append(m.instants, pauseFor.After(m.now)))
	}
}

// spend charges, reserves, or acquires what there is.
func (m *modelRun) spend(t *rapid.T) {
	s := kit.Spending{
		Function: rapid.SampledFrom([]string{"charge", "reserve", "reserve", "acquire_up_to"}).Draw(t, "function"),
		BucketID: bucketIDs.Draw(t, "bucket"), IdempotencyKey: idempotencyKeys.Draw(t, "idempotency key"),
	}
	s.Cost = m.amount(t, s.Policy)
	switch s.Function {
	case "charge":
		if seldom.Draw(t, "much") {
			s.Cost = kit.MaxTokens
		}
	case "reserve":
		longest := []*rapid.Generator[model.Micros]{rapid.Just(kit.MaxWaitOfReserve), rapid.Just(kit.MaxWaitOfReserve), spans}
		if len(m.waits) > 0 {
			longest = append(longest, rapid.SampledFrom(m.waits))
		}
		s.MaxWait = min(kit.MaxWaitOfReserve, rapid.OneOf(longest...).Draw(t, "max wait"))
	case "acquire_up_to":
		s.AtLeast = rapid.OneOf(rapid.Just[int64](1), rapid.Int64Range(1, max(1, s.Cost))).Draw(t, "at least")
	}
	if len(m.spendings) > 0 && rapid.Bool().Draw(t, "earlier") {
		earlier := rapid.SampledFrom(m.spendings).Draw(t, "earlier spending")
		earlier.MaxWait = max(earlier.MaxWait, s.MaxWait)
		s = earlier
	}
	m.spendings = lastFew(append(m.spendings, s))
	m.sendSpending(t, s)
	p, known := m.model.Policy(s.Policy)
	if known && s.IdempotencyKey != "" && s.Cost > 0 { // to be repeated as an acquire
		m.remembered(kit.WholeRequest{Charges: []model.Charge{{BucketID: s.BucketID, Cost: min(s.Cost, p.Capacity)}}, IdempotencyKey: s.IdempotencyKey})
		m.remembered(kit.WholeRequest{Charges: []model.Charge{{BucketID: s.BucketID, Cost: s.Cost}}, IdempotencyKey: s.IdempotencyKey})
	}
}

// settle settles a grant, if there is one; now and then as it did before.
func (m *modelRun) settle(t *rapid.T) {
	s := kit.Spending{
		Function: "settle", BucketID: bucketIDs.Draw(t, "bucket"),
		IdempotencyKey: rapid.SampledFrom([]string{"1", "2"}).Draw(t, "idempotency key"),
	}
	if len(m.settled) > 0 && rapid.Bool().Draw(t, "again") {
		m.sendSpending(t, rapid.SampledFrom(m.settled).Draw(t, "earlier"))
		return
	}
	s.Cost = rapid.OneOf(rapid.Int64Range(0, 2), rapid.Just(min(kit.MaxTokens, m.amount(t, s.Policy))), rapid.Just[int64](kit.MaxTokens)).Draw(t, "cost")
	m.settled = lastFew(append(m.settled, s))
	m.sendSpending(t, s)
}

func (m *modelRun) sendSpending(t *rapid.T, s kit.Spending) {
	before, _ := m.model.Peek(m.now, s.BucketID, 0)
	granted, _ := m.model.Remembered(m.now, s.BucketID, s.IdempotencyKey)
	var want kit.Spent
	var wantErr error
	switch {
	case s.Function == "acquire_up_to" && s.Cost < 1 || s.Function == "charge" && s.Cost > kit.MaxTokens:
		wantErr = model.InvalidArgument
	default:
		want, wantErr = s.Of(m.model, m.now)
	}
	got, err := s.By(m.session)
	if m.sameError(t, wantErr, err); err != nil {
		return
	}
	require.Equal(t, kit.Spent{Decision: want.Decision, Taken: want.Taken}, got, "%v", s)
	m.met["answers that agree in every field"]++
	m.met[s.Function+": "+s.KindOf(want, before)]++
	if p, _ := m.model.Policy(s.Policy); p.IsQuota() {
		m.met["quota: "+s.Function+": "+s.KindOf(want, before)]++
		if !want.Replayed && s.Function == "settle" && s.Cost < granted && want.Remaining == before.Remaining && before.Remaining < before.Capacity {
			m.met["quota: settled in a closed period"]++
		}
	}
	m.sawDecision(want.Decision)
	if s.Function == "reserve" && want.RetryAfter != model.Never {
		m.waits = append(m.waits, want.RetryAfter, max(0, want.RetryAfter-1))
		m.waits = lastFew(m.waits)
	}
}

// cleanUp also compares which buckets, and how many overrides and idempotency keys, have rows.
func (m *modelRun) cleanUp(t *rapid.T) {
	require.NoError(t, m.call("ratelimit_cleanup()"))
	m.model.CleanUp(m.now)

	m.compareLeft(t, bucketsLeft(t, m.session))

	var grants, overrides int
	require.NoError(t, m.session.QueryRow(context.Background(), `
		select (select count(*) from ratelimit.idempotency_keys) + (select count(*) from ratelimit.ephemeral_idempotency_keys),
		       (select count(*) from ratelimit.overrides)`).Scan(&grants, &overrides))
	m.compareLeases(t)
	require.Equal(t, m.model.Grants(), grants, "idempotency keys")
	require.Len(t, m.model.Overrides(), overrides, "overrides")
}

// bucketsLeft are those that have a row.
func bucketsLeft(t require.TestingT, q kit.RowsQuerier) map[model.BucketID]bool {
	left := map[model.BucketID]bool{}
	for _, id := range kit.ColumnOf(t, q, `
		select coalesce(p.name, 'gone') || ' ' || b.key
		  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b left join ratelimit.policies as p on p.id = b.policy_id`) {
		policy, key, _ := strings.Cut(id, " ")
		left[model.BucketID{Policy: policy, Key: key}] = true
	}
	return left
}

// compareLeft takes the buckets without a row from the model.
func (m *modelRun) compareLeft(t *rapid.T, left map[model.BucketID]bool) {
	for _, id := range m.model.Buckets() {
		if !left[id] {
			require.True(t, m.model.Remove(m.now, id), "clean-up removed %v, which was not full", id)
			m.met["removed by clean-up"]++
		}
		delete(left, id)
	}
	require.Empty(t, left, "buckets that should have no row")
}

// wait moves the clock to when something happens, or to a microsecond beside it.
func (m *modelRun) wait(t *rapid.T) {
	if len(m.instants) == 0 {
		t.Skip("nothing to wait for")
	}
	at := rapid.SampledFrom(m.instants).Draw(t, "instant")
	m.setClock(t, model.Micros(rapid.Int64Range(-1, 1).Draw(t, "beside")).After(at))
}

// step moves the clock forward, or now and then back.
func (m *modelRun) step(t *rapid.T) {
	d := spans.Draw(t, "by")
	if rapid.IntRange(0, 3).Draw(t, "back if 3") == 3 {
		d = -d
	}
	m.setClock(t, d.After(m.now))
}

func (m *modelRun) setClock(t *rapid.T, now time.Time) {
	if now.Year() < 0 || now.Year() > 200_000 {
		t.Skip("PostgreSQL's calendar would soon end")
	}
	m.seeFills(" by a turn", func() { m.now = now })
	m.session.Db.SetClock(now)
}

func (m *modelRun) amount(t *rapid.T, policy string) int64 {
	p, _ := m.model.Policy(policy)
	amounts := []*rapid.Generator[int64]{rapid.Int64Range(0, 3), rapid.Int64Range(0, p.Capacity), tokens}
	if len(m.numbers) > 0 {
		amounts = append(amounts, rapid.SampledFrom(m.numbers))
	}
	return rapid.OneOf(amounts...).Draw(t, "amount")
}

func (m *modelRun) call(call string, args ...any) error {
	return kit.ErrorOf(m.session.Exec(context.Background(), "select "+call, args...))
}

func (m *modelRun) same(t *rapid.T, want, got kit.Decision, wantErr, err error) {
	if m.sameError(t, wantErr, err); err == nil {
		require.Equal(t, want, got)
		m.saw("peeks and refunds")
		m.sawDecision(want)
	}
}

// sawDecision remembers what it makes interesting.
func (m *modelRun) sawDecision(d kit.Decision) {
	for _, wait := range []model.Micros{d.RetryAfter, d.ResetAfter} {
		if wait != model.Never {
			m.instants = append(m.instants, wait.After(m.now))
		}
	}
	m.instants = lastFew(m.instants)
	m.numbers = lastFew(append(m.numbers, d.Capacity, d.Capacity+1, max(0, d.Remaining), max(0, d.Remaining+1)))
}

// sameError counts an error, which ends the transaction or what there is of it since the last savepoint.
func (m *modelRun) sameError(t *rapid.T, want, err error) {
	var state model.Error
	errors.As(want, &state)
	if state == "" && err == nil {
		return
	}
	require.Equal(t, string(state), kit.SQLState(err), "SQLSTATE of %v", err)
	m.saw(string(state))
	if len(m.saved) > 0 { // there is no other way on
		m.rollBack(len(m.saved) - 1)
	}
}

// lastFew keeps the newest few elements.
func lastFew[T any](s []T) []T { return s[max(0, len(s)-8):] }

func periodOrNull(p *model.Period) pgtype.Interval {
	if p == nil {
		return pgtype.Interval{}
	}
	return pgtype.Interval{Months: int32(p.Months), Days: int32(p.Days), Valid: true}
}

// intervalOrNull is null for nil.
func intervalOrNull(m *model.Micros) pgtype.Interval {
	if m == nil {
		return pgtype.Interval{}
	}
	return kit.IntervalOfDays(*m)
}
