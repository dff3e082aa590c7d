package clienttest

import (
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// What the fake answers is compared with the server in tests/: here is what only the fake has.

var _ client.Acquirer = (*Fake)(nil)

var api = client.Policy{
	Name: "api", Capacity: 10, Refill: 1, Every: time.Second, Stepped: client.No, Durable: client.Yes, Remember: 24 * time.Hour, Shadow: client.No,
}

func newFake(t *testing.T, now func() time.Time) *Fake {
	fake := New(now)
	require.NoError(t, fake.DefinePolicy(t.Context(), api))
	return fake
}

func frozen() time.Time { return time.Unix(0, 0) }

func TestFailNext_FailsAsManyCallsAsItHasErrors(t *testing.T) {
	t.Parallel()
	fake := newFake(t, frozen)
	lost := &pgconn.PgError{Severity: "FATAL", Code: "57P01", Message: "terminating connection"}
	fake.FailNext(io.ErrUnexpectedEOF, nil)
	fake.FailNext(lost)

	d, err := fake.Acquire(t.Context(), "api", "k", client.IdempotencyKey("once"))
	require.EqualError(t, err, "pgratelimit: acquire: unexpected EOF", "not even with an idempotency key is it sent again")
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Zero(t, d)
	require.EqualValues(t, 10, noError(fake.Peek(t.Context(), "api", "k"))(t).Remaining, "a call that failed took nothing")
	err = fake.Reset(t.Context(), "api", "k")
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Same(t, lost, pgErr)
	noError(fake.Acquire(t.Context(), "api", "k"))(t)
}

func TestFailAll_FailsUntilTold(t *testing.T) {
	t.Parallel()
	fake := newFake(t, frozen)
	fake.FailAll(client.ErrLocked)
	fake.FailNext(nil, io.EOF, &client.OverloadedError{Waiting: 7})
	for _, want := range []error{nil, io.EOF, client.ErrOverloaded, client.ErrLocked, client.ErrLocked} {
		_, err := fake.Acquire(t.Context(), "api", "k")
		require.ErrorIs(t, err, want)
	}
	fake.FailAll(nil)
	noError(fake.Acquire(t.Context(), "api", "k"))(t)
}

func TestSetLevel(t *testing.T) {
	t.Parallel()
	fake := newFake(t, frozen)
	for tokens, want := range map[float64]client.Decision{
		10:       {Allowed: true, Remaining: 10, Capacity: 10},
		0.999999: {RetryAfter: time.Microsecond, ResetAfter: 9*time.Second + time.Microsecond, Capacity: 10},
		0:        {RetryAfter: time.Second, ResetAfter: 10 * time.Second, Capacity: 10},
		-2.5:     {Remaining: -3, RetryAfter: 3500 * time.Millisecond, ResetAfter: 12500 * time.Millisecond, Capacity: 10},
	} {
		require.NoError(t, fake.SetLevel("api", "k", tokens))
		require.Equal(t, want, noError(fake.Peek(t.Context(), "api", "k"))(t), tokens)
	}
	require.ErrorIs(t, fake.SetLevel("none", "k", 1), client.ErrUnknownPolicy)
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "jobs", Capacity: 5, Lease: time.Hour}))
	require.ErrorIs(t, fake.SetLevel("jobs", "k", 1), client.ErrInvalidArgument)
}

func TestFake_CleanUpFindsNothing(t *testing.T) {
	t.Parallel()
	fake := newFake(t, nil)
	require.Zero(t, noError(fake.Cleanup(t.Context()))(t))
	ctx, cancel := context.WithCancel(t.Context())
	fake.FailNext(nil, io.EOF)
	fake.RunCleanup(ctx, time.Microsecond, client.OnError(func(err error) {
		cancel()
		require.ErrorIs(t, err, io.EOF)
	}))
}

func TestFake_EndOfContext(t *testing.T) {
	t.Parallel()
	fake := newFake(t, nil)
	fake.FailNext(io.EOF)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := fake.Acquire(ctx, "api", "k")
	require.ErrorIs(t, err, context.Canceled)
	_, err = fake.Acquire(t.Context(), "api", "k")
	require.ErrorIs(t, err, io.EOF, "which waits for a call that is made")
}

func TestFake_IsExactUnderConcurrency(t *testing.T) {
	t.Parallel()
	fake := newFake(t, frozen)
	fake.FailNext(make([]error, 100)...)
	fake.FailNext(io.EOF, io.EOF)
	var granted, failed atomic.Int64
	var callers sync.WaitGroup
	for n := range 200 {
		callers.Go(func() {
			d, err := fake.Acquire(context.Background(), "api", "k", client.IdempotencyKey(fmt.Sprint(n)))
			if err != nil {
				failed.Add(1)
			}
			if d.Allowed {
				granted.Add(1)
			}
		})
	}
	callers.Wait()
	require.EqualValues(t, 10, granted.Load())
	require.EqualValues(t, 2, failed.Load())
}

func TestSettleAll_OfNothingIsAboutPolicies(t *testing.T) {
	t.Parallel()
	_, err := New(nil).SettleAll(t.Context(), nil, "i")
	require.ErrorContains(t, err, "invalid policies")
}
