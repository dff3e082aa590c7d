package tests

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/tests/model"
)

// A subject is what tables of calls and answers are replayed against: a database, or the fake that users
// of the client test with.
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
}

// onEach runs a test against a database and against the fake.
func onEach(t *testing.T, test func(t *testing.T, db subject)) {
	for name, open := range map[string]func(t *testing.T) subject{
		"database": func(t *testing.T) subject { return newDB(t) },
		"fake":     func(t *testing.T) subject { return newFake(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

// onEachDurability is onEach for durable and for ephemeral policies.
func onEachDurability(t *testing.T, test func(t *testing.T, db subject, durability policyOption)) {
	for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onEach(t, func(t *testing.T, db subject) { test(t, db, durability) })
		})
	}
}

func (db *testDB) of(t testing.TB) subject { return db.in(t) }

func (db *testDB) tryAcquire(policy, key string, cost int64, idempotencyKey ...string) (decision, error) {
	return acquire(db.Pool, policy, key, cost, idempotencyKey...)
}

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
		Name: name, Capacity: capacity, Refill: refill, Every: every, Stepped: choice(p.stepped), Durable: choice(p.durable),
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
	opts := []client.AcquireOption{client.Cost(cost)}
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

// decisionOf is the client's answer as SQL gives it.
func decisionOf(d client.Decision) decision {
	retryAfter := micros(d.RetryAfter)
	if d.Never() {
		retryAfter = model.Never
	}
	return decision{
		Allowed: d.Allowed, Remaining: d.Remaining, RetryAfter: retryAfter, ResetAfter: micros(d.ResetAfter),
		Capacity: d.Capacity, Replayed: d.Replayed,
	}
}

// The fake refuses what the server refuses, with its SQLSTATE and message, and changes nothing.
func TestFake_RefusesWhatTheServerRefuses(t *testing.T) {
	t.Parallel()
	db, fake := newDB(t), newFake(t)
	names := []string{"", strings.Repeat("é", 257), "\xff", "a\x00", "nobody", "p", "q"}
	costs := []int64{-1, 0, 1, 11}
	for _, s := range []subject{db, fake} {
		s.setClock(t0)
		s.definePolicy("p", 10, 1, second)
		s.definePolicy("q", 10, 1, second, ephemeral)
		s.acquire("p", "p", 2, "p")
	}
	calls := map[string]func(l *client.Limiter) error{}
	add := func(name string, call func(l *client.Limiter) error) { calls[name] = call }
	ctx := t.Context()
	for _, policy := range names {
		add(fmt.Sprintf("drop %q", policy), func(l *client.Limiter) error {
			if policy == "p" || policy == "q" {
				return nil
			}
			return l.DropPolicy(ctx, policy)
		})
		for _, key := range names {
			add(fmt.Sprintf("reset %q %q", policy, key), func(l *client.Limiter) error { return l.Reset(ctx, policy, key) })
			for _, cost := range costs {
				add(fmt.Sprintf("peek %q %q %d", policy, key, cost), func(l *client.Limiter) error {
					_, err := l.Peek(ctx, policy, key, client.Cost(cost))
					return err
				})
				add(fmt.Sprintf("refund %q %q %d", policy, key, cost), func(l *client.Limiter) error {
					_, err := l.Refund(ctx, policy, key, cost)
					return err
				})
				for _, idempotencyKey := range names {
					add(fmt.Sprintf("acquire %q %q %d %q", policy, key, cost, idempotencyKey), func(l *client.Limiter) error {
						_, err := l.Acquire(ctx, policy, key, client.Cost(cost), client.IdempotencyKey(idempotencyKey))
						return err
					})
				}
			}
		}
	}
	numbers := []int64{-1, 0, 1, 9_000_000_000_000, 9_000_000_000_001} // 0 keeps what is there
	spans := []time.Duration{-us, 0, us, time.Hour, 1<<63 - 808}       // up to 292 years
	for _, name := range names {
		for i, n := range numbers {
			for j, every := range spans {
				for k, choice := range []client.Choice{client.Keep, client.Yes, client.No, 7} {
					p := client.Policy{
						Name: name, Capacity: n, Refill: numbers[(i+j+k)%5], Every: every, Durable: choice, Stepped: client.Choice((i + k) % 3),
						Remember: spans[(j+k)%5],
					}
					add(fmt.Sprintf("define %+v", p), func(l *client.Limiter) error { return l.DefinePolicy(ctx, p) })
				}
			}
		}
	}
	onServer := client.New(db.Pool)
	refused := 0
	for name, call := range calls {
		want, got := call(onServer), call(fake.Limiter)
		require.Equal(t, want == nil, got == nil, "%s: %v, %v", name, want, got)
		if want == nil {
			continue
		}
		refused++
		for _, kind := range []error{client.ErrUnknownPolicy, client.ErrIdempotencyMismatch, client.ErrInvalidArgument} {
			require.Equal(t, errors.Is(want, kind), errors.Is(got, kind), "%s: %v, %v", name, want, got)
		}
		require.Equal(t, sqlState(want), sqlState(got), "%s: %v, %v", name, want, got)
		var wantErr, gotErr *pgconn.PgError
		if errors.As(want, &wantErr) && errors.As(got, &gotErr) && wantErr.Code != "22021" { // whose message shows the bytes
			require.Equal(t, wantErr.Message, gotErr.Message, name)
		}
	}
	require.Greater(t, refused, 500)
	want, err := onServer.Policies(ctx)
	require.NoError(t, err)
	got, err := fake.Policies(ctx)
	require.NoError(t, err)
	require.Equal(t, want, got)
}
