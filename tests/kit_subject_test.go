package tests

import (
	"cmp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// A subject is a database, or the fake that users of the client test with. Tables of calls and decisions are replayed against both.
type subject interface {
	of(t testing.TB) subject // the same for a subtest
	setClock(now time.Time)
	definePolicy(name string, capacity, refill int64, every time.Duration, opts ...policyOption)
	dropPolicy(name string)
	putBucket(policy, key string, b bucket)
	acquire(policy, key string, cost int64, idempotencyKey ...string) decision
	acquireAt(at time.Time, policy, key string, cost int64, idempotencyKey ...string) decision
	tryAcquire(policy, key string, cost int64, idempotencyKey ...string) (decision, error)
	peekAt(at time.Time, policy, key string, cost int64) decision
	refundAt(at time.Time, policy, key string, amount int64) decision
	reset(policy, key string)
	spend(s spending) (spent, error)
}

// parallelDB is newDB for a test that runs beside others. A clock that is given stands still.
func parallelDB(t *testing.T, clock ...time.Time) *testDB {
	t.Helper()
	t.Parallel()
	db := newDB(t)
	for _, now := range clock {
		db.setClock(now)
	}
	return db
}

// inParallel runs a subtest of each case, beside other tests.
func inParallel[T any](t *testing.T, cases map[string]T, test func(t *testing.T, of T)) {
	t.Parallel()
	for name, of := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, of)
		})
	}
}

// onDBs is inParallel with a database for each case.
func onDBs[T any](t *testing.T, cases map[string]T, test func(t *testing.T, db *testDB, of T)) {
	inParallel(t, cases, func(t *testing.T, of T) { test(t, newDB(t), of) })
}

// eachDurability runs a test against a database, for durable and for ephemeral policies.
func eachDurability(t *testing.T, test func(t *testing.T, db *testDB, durability policyOption)) {
	onDBs(t, map[string]policyOption{"durable": durable, "ephemeral": ephemeral}, test)
}

var subjects = map[string]func(t testing.TB) subject{
	"database": func(t testing.TB) subject { return newDB(t) },
	"fake":     func(t testing.TB) subject { return newFake(t) },
}

// onEach runs a test against a database and against the fake.
func onEach(t *testing.T, test func(t *testing.T, db subject)) {
	inParallel(t, subjects, func(t *testing.T, open func(t testing.TB) subject) { test(t, open(t)) })
}

// onEachDurability is onEach for durable and for ephemeral policies.
func onEachDurability(t *testing.T, test func(t *testing.T, db subject, durability policyOption)) {
	inParallel(t, subjects, func(t *testing.T, open func(t testing.TB) subject) {
		for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t, open(t), durability)
			})
		}
	})
}

func (db *testDB) of(t testing.TB) subject { return db.in(t) }

func (db *testDB) tryAcquire(policy, key string, cost int64, idempotencyKey ...string) (decision, error) {
	return acquire(db.Pool, policy, key, cost, idempotencyKey...)
}

func (db *testDB) spend(s spending) (spent, error) { return s.by(db.Pool) }

// A testFake is to the fake what testDB is to a database.
type testFake struct {
	*clienttest.Fake
	now *time.Time
	t   testing.TB
}

func newFake(t testing.TB) *testFake {
	now := new(time.Time)
	return &testFake{clienttest.New(func() time.Time { return *now }), now, t}
}

func (f *testFake) of(t testing.TB) subject { return &testFake{f.Fake, f.now, t} }

func (f *testFake) setClock(now time.Time) { *f.now = now }

func (f *testFake) definePolicy(name string, capacity, refill int64, every time.Duration, opts ...policyOption) {
	f.t.Helper()
	var p policyOptions
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
	require.NoError(f.t, f.DefinePolicy(f.t.Context(), client.Policy{
		Name: name, Capacity: cmp.Or(capacity, client.Zero), Refill: cmp.Or(refill, client.Zero), Every: every, Stepped: choice(p.stepped), Durable: choice(p.durable),
		Remember: time.Duration(p.remember.Microseconds) * us,
	}))
}

func (f *testFake) dropPolicy(name string) {
	f.t.Helper()
	require.NoError(f.t, f.DropPolicy(f.t.Context(), name))
}

func (f *testFake) putBucket(policy, key string, b bucket) {
	f.t.Helper()
	defer f.setClock(*f.now)
	f.setClock(b.RefilledAt)
	require.NoError(f.t, f.SetLevel(policy, key, float64(b.Level)/1e6))
}

func (f *testFake) acquire(policy, key string, cost int64, idempotencyKey ...string) decision {
	f.t.Helper()
	d, err := f.tryAcquire(policy, key, cost, idempotencyKey...)
	require.NoError(f.t, err)
	return d
}

func (f *testFake) acquireAt(at time.Time, policy, key string, cost int64, idempotencyKey ...string) decision {
	f.t.Helper()
	f.setClock(at)
	return f.acquire(policy, key, cost, idempotencyKey...)
}

func (f *testFake) tryAcquire(policy, key string, cost int64, idempotencyKey ...string) (decision, error) {
	opts := []client.CallOption{client.Cost(cost)}
	for _, name := range idempotencyKey {
		opts = append(opts, client.IdempotencyKey(name))
	}
	d, err := f.Acquire(f.t.Context(), policy, key, opts...)
	return decisionOf(d), err
}

func (f *testFake) peekAt(at time.Time, policy, key string, cost int64) decision {
	f.t.Helper()
	f.setClock(at)
	d, err := f.Peek(f.t.Context(), policy, key, client.Cost(cost))
	require.NoError(f.t, err)
	return decisionOf(d)
}

func (f *testFake) refundAt(at time.Time, policy, key string, amount int64) decision {
	f.t.Helper()
	f.setClock(at)
	d, err := f.Refund(f.t.Context(), policy, key, amount)
	require.NoError(f.t, err)
	return decisionOf(d)
}

func (f *testFake) reset(policy, key string) {
	f.t.Helper()
	require.NoError(f.t, f.Reset(f.t.Context(), policy, key))
}

func (f *testFake) spend(s spending) (spent, error) { return s.with(f.t.Context(), f.Limiter) }

// decisionOf is a decision of the client in the form of SQL.
func decisionOf(d client.Decision) decision {
	retryAfter := micros(d.RetryAfter)
	if d.Never() {
		retryAfter = model.Never
	}
	resetAfter := micros(d.ResetAfter)
	if d.NeverFull() {
		resetAfter = model.Never
	}
	return decision{
		Allowed: d.Allowed, Remaining: d.Remaining, RetryAfter: retryAfter, ResetAfter: resetAfter,
		Capacity: d.Capacity, Replayed: d.Replayed, Shadowed: d.Shadowed,
	}
}
