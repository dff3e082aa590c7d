package kit

import (
	"cmp"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/stretchr/testify/require"
)

// A Subject is a database, or the fake that users of the client test with. Tables of calls and decisions are replayed against both.
type Subject interface {
	Of(t testing.TB) Subject // the same for a subtest
	SetClock(now time.Time)
	DefinePolicy(name string, capacity, refill int64, every time.Duration, opts ...PolicyOption)
	DropPolicy(name string)
	PutBucket(policy, key string, b Bucket)
	Acquire(policy, key string, cost int64, idempotencyKey ...string) Decision
	AcquireAt(at time.Time, policy, key string, cost int64, idempotencyKey ...string) Decision
	TryAcquire(policy, key string, cost int64, idempotencyKey ...string) (Decision, error)
	PeekAt(at time.Time, policy, key string, cost int64) Decision
	RefundAt(at time.Time, policy, key string, amount int64) Decision
	Reset(policy, key string)
	Spend(s Spending) (Spent, error)
}

// ParallelDB is newDB for a test that runs beside others. A clock that is given stands still.
func ParallelDB(t *testing.T, clock ...time.Time) *TestDB {
	t.Helper()
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

// OnDBs is inParallel with a database for each case.
func OnDBs[T any](t *testing.T, cases map[string]T, test func(t *testing.T, db *TestDB, of T)) {
	InParallel(t, cases, func(t *testing.T, of T) { test(t, NewDB(t), of) })
}

// EachDurability runs a test against a database, for durable and for ephemeral policies.
func EachDurability(t *testing.T, test func(t *testing.T, db *TestDB, durability PolicyOption)) {
	OnDBs(t, map[string]PolicyOption{"durable": Durable, "ephemeral": Ephemeral}, test)
}

var Subjects = map[string]func(t testing.TB) Subject{
	"database": func(t testing.TB) Subject { return NewDB(t) },
	"fake":     func(t testing.TB) Subject { return NewFake(t) },
}

// OnEachDurability is onEach for durable and for ephemeral policies.
func OnEachDurability(t *testing.T, test func(t *testing.T, db Subject, durability PolicyOption)) {
	InParallel(t, Subjects, func(t *testing.T, open func(t testing.TB) Subject) {
		for name, durability := range map[string]PolicyOption{"durable": Durable, "ephemeral": Ephemeral} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t, open(t), durability)
			})
		}
	})
}

func (db *TestDB) Of(t testing.TB) Subject { return db.In(t) }

func (db *TestDB) TryAcquire(policy, key string, cost int64, idempotencyKey ...string) (Decision, error) {
	return Acquire(db.Pool, policy, key, cost, idempotencyKey...)
}

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
	f.T.Helper()
	var p PolicyOptions
	for _, opt := range opts {
		opt(&p)
	}
	choice := func(b *bool) client.Choice {
		switch {
		case b == nil:
			return client.Keep
		case *b:
			return client.Yes
		}
		return client.No
	}
	require.NoError(f.T, f.Fake.DefinePolicy(f.T.Context(), client.Policy{
		Name: name, Capacity: cmp.Or(capacity, client.Zero), Refill: cmp.Or(refill, client.Zero), Every: every, Stepped: choice(p.stepped), Durable: choice(p.Durable),
		Remember: time.Duration(p.remember.Microseconds) * Us,
	}))
}

func (f *testFake) DropPolicy(name string) {
	f.T.Helper()
	require.NoError(f.T, f.Fake.DropPolicy(f.T.Context(), name))
}

func (f *testFake) PutBucket(policy, key string, b Bucket) {
	f.T.Helper()
	defer f.SetClock(*f.Now)
	f.SetClock(b.RefilledAt)
	require.NoError(f.T, f.Fake.SetLevel(policy, key, float64(b.Level)/1e6))
}

func (f *testFake) Acquire(policy, key string, cost int64, idempotencyKey ...string) Decision {
	f.T.Helper()
	d, err := f.TryAcquire(policy, key, cost, idempotencyKey...)
	require.NoError(f.T, err)
	return d
}

func (f *testFake) AcquireAt(at time.Time, policy, key string, cost int64, idempotencyKey ...string) Decision {
	f.T.Helper()
	f.SetClock(at)
	return f.Acquire(policy, key, cost, idempotencyKey...)
}

func (f *testFake) TryAcquire(policy, key string, cost int64, idempotencyKey ...string) (Decision, error) {
	opts := []client.CallOption{client.Cost(cost)}
	for _, name := range idempotencyKey {
		opts = append(opts, client.IdempotencyKey(name))
	}
	d, err := f.Fake.Acquire(f.T.Context(), policy, key, opts...)
	return DecisionOf(d), err
}

func (f *testFake) PeekAt(at time.Time, policy, key string, cost int64) Decision {
	f.T.Helper()
	f.SetClock(at)
	d, err := f.Fake.Peek(f.T.Context(), policy, key, client.Cost(cost))
	require.NoError(f.T, err)
	return DecisionOf(d)
}

func (f *testFake) RefundAt(at time.Time, policy, key string, amount int64) Decision {
	f.T.Helper()
	f.SetClock(at)
	d, err := f.Fake.Refund(f.T.Context(), policy, key, amount)
	require.NoError(f.T, err)
	return DecisionOf(d)
}

func (f *testFake) Reset(policy, key string) {
	f.T.Helper()
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
