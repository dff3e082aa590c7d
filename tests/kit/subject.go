package kit

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/vectors"
	"github.com/stretchr/testify/require"
)

// A Subject is a database, or the fake that users of the client test with. Tables of calls and decisions are replayed against both.
type Subject interface {
	Of(t testing.TB) Subject // the same for a subtest
	SetClock(now time.Time)
	DefinePolicy(name string, capacity, refill int64, every time.Duration, opts ...PolicyOption)
	Acquire(policy, key string, cost int64, idempotencyKey ...string) Decision
	AcquireAt(at time.Time, policy, key string, cost int64, idempotencyKey ...string) Decision
	PeekAt(at time.Time, policy, key string, cost int64) Decision
	RefundAt(at time.Time, policy, key string, amount int64) Decision
	Reset(policy, key string)
	Spend(s Spending) (Spent, error)
}

// ParallelDB is NewDB for a test that runs beside others. A clock that is given stands still.
func ParallelDB(t *testing.T, clock ...time.Time) *TestDB {
	t.Parallel()
	db := NewDB(t)
	for _, now := range clock {
		db.SetClock(now)
	}
	return db
}

// InParallel runs a subtest of each case, beside other tests.
func InParallel[T any](t *testing.T, cases map[string]T, test func(t *testing.T, of T)) {
	t.Parallel()
	for name, of := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, of)
		})
	}
}

// OnDBs is InParallel with a database for each case.
func OnDBs[T any](t *testing.T, cases map[string]T, test func(t *testing.T, db *TestDB, of T)) {
	InParallel(t, cases, func(t *testing.T, of T) { test(t, NewDB(t), of) })
}

// EachDurability runs a test against a database, for durable and for ephemeral policies.
func EachDurability(t *testing.T, test func(t *testing.T, db *TestDB, durability PolicyOption)) {
	OnDBs(t, map[string]PolicyOption{"durable": Durable, "ephemeral": Ephemeral}, test)
}

func (db *TestDB) Of(t testing.TB) Subject { return db.In(t) }

func (db *TestDB) Spend(s Spending) (Spent, error) { return s.By(db.Pool) }

// A testFake is to the fake what testDB is to a database.
type testFake struct {
	Fake *clienttest.Fake
	Now  *time.Time
	T    testing.TB
}

func NewFake(t testing.TB) *testFake {
	now := new(time.Time)
	return &testFake{clienttest.New(func() time.Time { return *now }), now, t}
}

func (f *testFake) Of(t testing.TB) Subject { return &testFake{f.Fake, f.Now, t} }

func (f *testFake) SetClock(now time.Time) { *f.Now = now }

func (f *testFake) DefinePolicy(name string, capacity, refill int64, every time.Duration, opts ...PolicyOption) {
	p := optionsOf(opts)
	require.NoError(f.T, f.Fake.DefinePolicy(f.T.Context(), client.Policy{
		Name: name, Capacity: cmp.Or(capacity, client.Zero), Refill: cmp.Or(refill, client.Zero), Every: every, Stepped: ChoiceOf(p.stepped), Durable: ChoiceOf(p.Durable),
		Remember: time.Duration(p.remember.Microseconds) * Us,
	}))
}

// ChoiceOf is a nullable boolean in the form of the client.
func ChoiceOf(b *bool) client.Choice {
	switch {
	case b == nil:
		return client.Keep
	case *b:
		return client.Yes
	}
	return client.No
}

func (f *testFake) Acquire(policy, key string, cost int64, idempotencyKey ...string) Decision {
	opts := []client.CallOption{client.Cost(cost)}
	for _, name := range idempotencyKey {
		opts = append(opts, client.IdempotencyKey(name))
	}
	return DecisionOf(NoError(f.Fake.Acquire(f.T.Context(), policy, key, opts...))(f.T))
}

func (f *testFake) AcquireAt(at time.Time, policy, key string, cost int64, idempotencyKey ...string) Decision {
	f.SetClock(at)
	return f.Acquire(policy, key, cost, idempotencyKey...)
}

func (f *testFake) PeekAt(at time.Time, policy, key string, cost int64) Decision {
	f.SetClock(at)
	return DecisionOf(NoError(f.Fake.Peek(f.T.Context(), policy, key, client.Cost(cost)))(f.T))
}

func (f *testFake) RefundAt(at time.Time, policy, key string, amount int64) Decision {
	f.SetClock(at)
	return DecisionOf(NoError(f.Fake.Refund(f.T.Context(), policy, key, amount))(f.T))
}

func (f *testFake) Reset(policy, key string) {
	require.NoError(f.T, f.Fake.Reset(f.T.Context(), policy, key))
}

func (f *testFake) Spend(s Spending) (Spent, error) { return s.With(f.T.Context(), f.Fake.Limiter) }

// DecisionOf is a decision of the client in the form of SQL.
func DecisionOf(d client.Decision) Decision {
	retryAfter := Micros(d.RetryAfter)
	if d.Never() {
		retryAfter = model.Never
	}
	resetAfter := Micros(d.ResetAfter)
	if d.NeverFull() {
		resetAfter = model.Never
	}
	return Decision{
		Allowed: d.Allowed, Remaining: d.Remaining, RetryAfter: retryAfter, ResetAfter: resetAfter,
		Capacity: d.Capacity, Replayed: d.Replayed, Shadowed: d.Shadowed,
	}
}

// ReplayVector makes the calls and compares the decisions. A call that takes and gives nothing must leave the bucket's row as it is, or absent.
func ReplayVector(t *testing.T, db Subject, v vectors.Bucket, durability PolicyOption) {
	rowOf := func(string, string) *Bucket { return nil } // the fake shows none
	if db, ok := db.(*TestDB); ok {
		rowOf = db.Bucket
	}
	refill := Continuous
	if v.Stepped {
		refill = Stepped
	}
	policy, key := v.Name, "k"
	db.DefinePolicy(policy, v.Capacity, v.Refill, time.Duration(v.Every)*Ms, refill, durability)
	if v.Taken > 0 {
		require.Equal(t, v.Capacity-v.Taken, db.AcquireAt(T0, policy, key, v.Taken).Remaining)
	}
	for i, s := range v.Steps {
		at, before := T0.Add(time.Duration(s.At)*Ms), rowOf(policy, key)
		var got Decision
		switch s.Call {
		case "acquire":
			got = db.AcquireAt(at, policy, key, s.Tokens)
		case "peek":
			got = db.PeekAt(at, policy, key, s.Tokens)
		case "refund":
			got = db.RefundAt(at, policy, key, s.Tokens)
		case "charge":
			db.SetClock(at)
			got = NoError(db.Spend(Spending{Function: "charge", BucketID: model.BucketID{Policy: policy, Key: key}, Cost: s.Tokens}))(t).Decision
		case "reset":
			db.Reset(policy, key)
			got = db.PeekAt(at, policy, key, 0)
		}
		call := fmt.Sprintf("step %d at %d ms: %s(%d) answered %+v", i, s.At, s.Call, s.Tokens, got)
		checkStep(t, s, got, call)
		require.Equal(t, v.Capacity, got.Capacity, call)
		if s.Call == "peek" || s.Call == "acquire" && (!got.Allowed || s.Tokens == 0) {
			require.Equal(t, before, rowOf(policy, key), call)
		}
	}
}

func checkStep(t testing.TB, want vectors.Step, got Decision, call string) {
	require.Equal(t, want.Allowed, got.Allowed, call)
	require.Equal(t, got.Allowed, got.RetryAfter == 0, call)
	require.False(t, got.Replayed, call)
	if want.Remaining != nil {
		require.Equal(t, *want.Remaining, got.Remaining, call)
	}
	switch text := string(want.RetryAfter); text {
	case "":
	case "null":
		require.Equal(t, model.Never, got.RetryAfter, call)
	default:
		require.Equal(t, Micros(time.Duration(NoError(strconv.ParseInt(text, 10, 64))(t))*Ms), got.RetryAfter, call)
	}
	if want.ResetAfter != nil {
		require.Equal(t, Micros(time.Duration(*want.ResetAfter)*Ms), got.ResetAfter, call)
	}
}

// A Step is a query at a time after T0, and the columns of its answer, separated by commas.
type Step = struct {
	At        time.Duration
	SQL, Want string
}

// RunSteps makes the calls of each rule one after the other, on durable and on ephemeral policies: what stands for (durable) in a query.
func RunSteps(t *testing.T, rules map[string][]Step) {
	for rule, steps := range rules {
		for _, durable := range []string{"true", "false"} {
			t.Run(rule+"/durable="+durable, func(t *testing.T) {
				db := ParallelDB(t).CleanUpAtOnce()
				db.RunSteps(steps, "(durable)", durable)
			})
		}
	}
}

// RunSteps makes the calls of a rule. What stands for something in a query is replaced by it.
func (db *TestDB) RunSteps(steps []Step, replaced ...string) {
	for i, step := range steps {
		db.SetClock(T0.Add(step.At))
		sql := `select trim(both '()"' from r::text) from (` + strings.NewReplacer(replaced...).Replace(step.SQL) + ") as r"
		require.Equal(db.T, []string{step.Want}, Column(db.T, db.DB, sql), "step %d: %s", i+1, step.SQL)
	}
}
