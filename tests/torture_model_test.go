package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/tests/model"
)

// Random calls, one after the other, get from SQL what the model answers, in every field. Requests of
// a batch count as calls.
func TestTorture_ModelAgreesWithSQL(t *testing.T) {
	run := torture(t, 15*time.Second)
	db := newDB(t)
	db.setTimeZone("Europe/Berlin")
	db.setClock(t0)
	session := db.session()

	var calls, rollbacks int
	for run.goesOn() {
		rapid.Check(quiet{t}, func(t *rapid.T) {
			m := newModelRun(t, session)
			defer m.end()
			t.Repeat(m.actions())
			calls += m.calls
			rollbacks += m.rollbacks
			run.progress("%d calls, %d rollbacks", calls, rollbacks)
		})
	}
	require.NotZero(t, rollbacks)
	run.figure("calls that agree in every field", calls, "")
	run.figure("rollbacks among them", rollbacks, "")
}

// A bug planted in SQL makes the same sequences disagree soon.
func TestModel_FindsPlantedBugs(t *testing.T) {
	t.Parallel()
	for function, bug := range map[string]mutation{
		"ratelimit.refilled_until": {`greatest\(refilled_at, now\)`, "now"}, // goes back with the clock
		"ratelimit.wait_below":     {` \+ round_up`, ""},                    // a microsecond short
	} {
		db := newDB(t)
		db.setClock(t0)
		db.mutate(bug, function)
		session := db.session()

		told, found, ended := &failing{T: t}, false, make(chan struct{})
		go func() {
			defer close(ended)
			rapid.Check(told, func(t *rapid.T) {
				if found {
					return // shrinking would take a while
				}
				m := newModelRun(t, session)
				defer m.end()
				found = true
				t.Repeat(m.actions())
				found = false
			})
		}()
		<-ended
		require.True(t, told.Failed(), function)
		require.NoError(t, os.RemoveAll(filepath.Join("testdata", "rapid", t.Name()))) // not to be repeated
	}
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

// quiet leaves out rapid's line about every hundred sequences.
type quiet struct{ *testing.T }

func (q quiet) Logf(format string, args ...any) {
	q.Helper()
	if !strings.HasPrefix(format, "[rapid] OK") {
		q.T.Logf(format, args...)
	}
}

// A modelRun makes every call twice, to SQL and to the model.
type modelRun struct {
	session *session
	model   *model.Model
	saved   []*model.Model // what a transaction can go back to: its begin, and its savepoints
	now     time.Time

	calls, rollbacks int

	// What the last calls have made interesting.
	requests []request
	instants []time.Time // when something happens
	numbers  []int64     // of tokens
}

func newModelRun(t *rapid.T, s *session) *modelRun {
	s.exec(`
		delete from ratelimit.policies;
		delete from ratelimit.buckets;
		delete from ratelimit.ephemeral_buckets;
		delete from ratelimit.idempotency_keys;
		delete from ratelimit.ephemeral_idempotency_keys`)
	m := &modelRun{session: s, model: model.New()}
	m.setClock(t, t0)
	for _, name := range policyNames {
		m.define(t, name)
	}
	return m
}

func (m *modelRun) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"acquire":   m.acquire,
		"again":     m.acquireAgain,
		"many":      m.acquireMany,
		"peek":      m.peek,
		"refund":    m.refund,
		"wait":      m.wait,
		"step":      m.step,
		"clean up":  m.cleanUp,
		"rarely":    m.changeOrRemove,
		"save":      m.save,
		"roll back": m.rollBackOrNot,
	}
}

// save begins a transaction, or sets a savepoint in it.
func (m *modelRun) save(*rapid.T) {
	if len(m.saved) == 0 {
		m.session.exec("begin")
	} else {
		m.session.exec(fmt.Sprint("savepoint s", len(m.saved)))
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
		m.session.exec("commit")
		m.saved = nil
	default:
		m.session.exec(fmt.Sprint("release s", to))
		m.saved = m.saved[:to]
	}
}

func (m *modelRun) rollBack(to int) {
	m.rollbacks++
	m.model = m.saved[to]
	if to == 0 {
		m.session.exec("rollback")
		m.saved = nil
		return
	}
	m.session.exec(fmt.Sprint("rollback to s", to)) // which stays
	m.saved = append(m.saved[:to], m.model.Clone())
}

// end leaves the session to the next sequence, also when this one has failed.
func (m *modelRun) end() { m.session.exec("rollback") }

var policyNames = []string{"a", "b"}

var (
	bucketIDs = rapid.Custom(func(t *rapid.T) model.BucketID {
		return model.BucketID{
			Policy: rapid.SampledFrom(policyNames).Draw(t, "policy"),
			Key:    rapid.SampledFrom([]string{"x", "y"}).Draw(t, "key"),
		}
	})
	// Every magnitude is as likely as any other.
	magnitudes = rapid.Custom(func(t *rapid.T) int64 {
		return rapid.Int64Range(1, 1<<rapid.IntRange(1, 43).Draw(t, "bits")).Draw(t, "number")
	})
	tokens = rapid.OneOf(rapid.Int64Range(1, 20), magnitudes)
	spans  = rapid.OneOf(
		rapid.SampledFrom([]model.Micros{1, 3, 1_000, 1_000_000, 10_000_000, day / 24, day, 7 * day, 365250 * day}),
		rapid.Map(magnitudes, func(n int64) model.Micros { return model.Micros(n) }),
	)
	definitions = rapid.Custom(func(t *rapid.T) model.Definition {
		return model.Definition{
			Capacity: min(orZero(tokens).Draw(t, "capacity"), 9e12),
			Refill:   min(orZero(tokens).Draw(t, "refill"), 9e12),
			Every:    orZero(spans).Draw(t, "every"),
			Stepped:  rapid.Ptr(rapid.Bool(), true).Draw(t, "stepped"),
			Durable:  rapid.Ptr(rapid.Bool(), true).Draw(t, "durable"),
			Remember: rapid.Ptr(spans, true).Draw(t, "remember"),
		}
	})
)

// orZero draws zero now and then, which keeps what the policy has.
func orZero[T int64 | model.Micros](values *rapid.Generator[T]) *rapid.Generator[T] {
	return rapid.Custom(func(t *rapid.T) T {
		if rapid.IntRange(0, 7).Draw(t, "given") == 7 {
			return 0
		}
		return values.Draw(t, "value")
	})
}

func (m *modelRun) define(t *rapid.T, name string) {
	def := definitions.Draw(t, "policy "+name)
	readable, err := json.Marshal(def)
	require.NoError(t, err)
	t.Logf("defined: %s", readable)
	var remember pgtype.Interval
	if def.Remember != nil {
		remember = intervalOfDays(*def.Remember)
	}
	var every pgtype.Interval
	if def.Every != 0 {
		every = intervalOfDays(def.Every)
	}
	err = m.call("ratelimit_define_policy($1, nullif($2::bigint, 0), nullif($3::bigint, 0), $4, $5, $6, $7)",
		name, def.Capacity, def.Refill, every, def.Stepped, def.Durable, remember)
	m.sameError(t, m.model.Define(name, def), err)
}

// changeOrRemove makes calls that would leave little to compare if they were frequent.
func (m *modelRun) changeOrRemove(t *rapid.T) {
	id := bucketIDs.Draw(t, "bucket")
	switch rapid.SampledFrom([]string{"define", "define again", "reset", "drop"}).Draw(t, "what") {
	case "define", "define again":
		m.define(t, id.Policy)
	case "reset":
		m.sameError(t, m.model.Reset(id), m.call("ratelimit_reset($1, $2)", id.Policy, id.Key))
	case "drop":
		m.sameError(t, m.model.Drop(id.Policy), m.call("ratelimit_drop_policy($1)", id.Policy))
		if rapid.Bool().Draw(t, "define anew") {
			m.define(t, id.Policy)
		}
	}
}

func (m *modelRun) request(t *rapid.T) request {
	id := bucketIDs.Draw(t, "bucket")
	return request{
		BucketID:       id,
		cost:           m.amount(t, id.Policy),
		idempotencyKey: rapid.SampledFrom([]string{"", "", "1", "2"}).Draw(t, "idempotency key"),
	}
}

func (m *modelRun) acquire(t *rapid.T) { m.send(t, m.request(t)) }

func (m *modelRun) acquireAgain(t *rapid.T) {
	if len(m.requests) == 0 {
		t.Skip("nothing to repeat")
	}
	m.send(t, rapid.SampledFrom(m.requests).Draw(t, "request"))
}

func (m *modelRun) send(t *rapid.T, r request) {
	want, wantErr := m.model.Acquire(m.now, r.BucketID, r.cost, r.idempotencyKey)
	got, err := r.acquire(m.session)
	m.same(t, want, got, wantErr, err)
	m.remember(r)
}

// acquireMany sends requests in one call, some of them several times. An error stands in the row of its request.
func (m *modelRun) acquireMany(t *rapid.T) {
	var (
		requests []nullableRequest
		want     []answer
	)
	for range rapid.IntRange(1, 5).Draw(t, "requests") {
		r := m.request(t)
		for range rapid.IntRange(1, 3).Draw(t, "times") {
			m.calls++
			d, err := m.model.Acquire(m.now, r.BucketID, r.cost, r.idempotencyKey)
			requests = append(requests, r.nullable())
			if err == nil {
				want = append(want, answer{Decision: &d})
			} else {
				want = append(want, answer{Error: err.Error()})
			}
		}
		m.remember(r)
	}
	got, err := acquireMany(m.session, requests)
	require.NoError(t, err)
	for i := range got {
		got[i].Error, _, _ = strings.Cut(got[i].Error, ":")
	}
	require.Equal(t, want, got)
}

func (m *modelRun) remember(r request) {
	m.requests = lastFew(append(m.requests, r))
	if p, ok := m.model.Policy(r.Policy); ok {
		m.instants = lastFew(append(m.instants, p.Remember.After(m.now), p.Remember.After(m.now).Add(model.CleanUpMargin)))
	}
}

func (m *modelRun) peek(t *rapid.T) {
	id := bucketIDs.Draw(t, "bucket")
	cost := m.amount(t, id.Policy)
	want, wantErr := m.model.Peek(m.now, id, cost)
	got, err := peek(m.session, id.Policy, id.Key, cost)
	m.same(t, want, got, wantErr, err)
}

func (m *modelRun) refund(t *rapid.T) {
	id := bucketIDs.Draw(t, "bucket")
	amount := m.amount(t, id.Policy)
	want, wantErr := m.model.Refund(m.now, id, amount)
	got, err := refund(m.session, id.Policy, id.Key, amount)
	m.same(t, want, got, wantErr, err)
}

// cleanUp also compares which buckets, and how many idempotency keys, have rows.
func (m *modelRun) cleanUp(t *rapid.T) {
	require.NoError(t, m.call("ratelimit_cleanup()"))
	m.model.CleanUp(m.now)

	left := map[model.BucketID]bool{}
	rows, err := m.session.Query(context.Background(), `
		select coalesce(p.name, 'gone'), b.key
		  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b
		  left join ratelimit.policies as p on p.id = b.policy_id`)
	require.NoError(t, err)
	var id model.BucketID
	_, err = pgx.ForEachRow(rows, []any{&id.Policy, &id.Key}, func() error {
		left[id] = true
		return nil
	})
	require.NoError(t, err)
	for _, id := range m.model.Buckets() {
		if !left[id] {
			require.True(t, m.model.Remove(m.now, id), "clean-up removed %v, which was not full", id)
		}
		delete(left, id)
	}
	require.Empty(t, left, "buckets that should have no row")

	var grants int
	require.NoError(t, m.session.QueryRow(context.Background(), `
		select count(*) from (table ratelimit.idempotency_keys union all
		                      table ratelimit.ephemeral_idempotency_keys) as k`).Scan(&grants))
	require.Equal(t, m.model.Grants(), grants, "idempotency keys")
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
	m.now = now
	m.session.db.setClock(now)
}

func (m *modelRun) amount(t *rapid.T, policy string) int64 {
	p, _ := m.model.Policy(policy)
	amounts := []*rapid.Generator[int64]{
		rapid.Int64Range(0, 3),
		rapid.Int64Range(0, p.Capacity),
		tokens,
	}
	if len(m.numbers) > 0 {
		amounts = append(amounts, rapid.SampledFrom(m.numbers))
	}
	return rapid.OneOf(amounts...).Draw(t, "amount")
}

func (m *modelRun) call(call string, args ...any) error {
	_, err := m.session.Exec(context.Background(), "select "+call, args...)
	return err
}

func (m *modelRun) same(t *rapid.T, want, got decision, wantErr, err error) {
	m.sameError(t, wantErr, err)
	if err != nil {
		return
	}
	require.Equal(t, want, got)
	m.instants = append(m.instants, got.ResetAfter.After(m.now))
	if got.RetryAfter != model.Never {
		m.instants = append(m.instants, got.RetryAfter.After(m.now))
	}
	m.instants = lastFew(m.instants)
	m.numbers = lastFew(append(m.numbers, got.Capacity, got.Capacity+1, max(0, got.Remaining), got.Remaining+1))
}

func (m *modelRun) sameError(t *rapid.T, want, err error) {
	m.calls++
	var state model.Error
	errors.As(want, &state)
	if state != "" || err != nil {
		require.Equal(t, string(state), sqlState(err), "SQLSTATE of %v", err)
		if len(m.saved) > 0 { // there is no other way on
			m.rollBack(len(m.saved) - 1)
		}
	}
}

// lastFew keeps the newest few elements.
func lastFew[T any](s []T) []T { return s[max(0, len(s)-6):] }

// intervalOfDays counts whole days as such: here a day is 24 hours, whatever the time zone has.
func intervalOfDays(m model.Micros) pgtype.Interval {
	return pgtype.Interval{Days: int32(m / day), Microseconds: int64(m % day), Valid: true}
}
