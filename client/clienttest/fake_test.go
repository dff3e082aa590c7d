package clienttest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
)

// What the fake answers is compared with the server in tests/: here is what only the fake has.

var _ client.Acquirer = (*clienttest.Fake)(nil)

var api = client.Policy{
	Name: "api", Capacity: 10, Refill: 1, Every: time.Second, Stepped: client.No, Durable: client.Yes, Remember: 24 * time.Hour, Shadow: client.No,
}

func newFake(t *testing.T, now func() time.Time) *clienttest.Fake {
	t.Helper()
	fake := clienttest.New(now)
	require.NoError(t, fake.DefinePolicy(t.Context(), api))
	return fake
}

func frozen() time.Time { return time.Unix(0, 0) }

// noError returns the value of a call that must not fail.
func noError[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T { t.Helper(); require.NoError(t, err); return value }
}

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
}

func TestFake_DefinePolicyKeepsWhatIsZero(t *testing.T) {
	t.Parallel()
	fake := newFake(t, nil)
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "api", Refill: 7, Remember: time.Hour}))
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "<b>\"é\"", Capacity: 1, Refill: 1, Every: 1000, Stepped: client.Yes}))
	policies := noError(fake.Policies(t.Context()))(t)
	changed := api
	changed.Refill, changed.Remember = 7, time.Hour
	require.Equal(t, []client.Policy{
		{
			Name: "<b>\"é\"", Capacity: 1, Refill: 1, Every: 1000,
			Stepped: client.Yes, Durable: client.Yes, Remember: 24 * time.Hour, Shadow: client.No,
		},
		changed,
	}, policies)
	require.ErrorIs(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "new", Refill: 7}), client.ErrInvalidArgument)
}

func TestFake_RefillsNothing(t *testing.T) {
	t.Parallel()
	fake := newFake(t, frozen)
	budget := client.Policy{Name: "budget", Capacity: 10, Refill: client.Zero, Every: time.Second}
	require.NoError(t, fake.DefinePolicy(t.Context(), budget))
	d := noError(fake.Acquire(t.Context(), "budget", "k", client.Cost(8)))(t)
	require.True(t, d.Allowed && d.NeverFull())
	d = noError(fake.Acquire(t.Context(), "budget", "k", client.Cost(3)))(t)
	require.True(t, !d.Allowed && d.Never() && d.NeverFull())
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "budget", Capacity: 20}))
	require.EqualValues(t, client.Zero, noError(fake.Policies(t.Context()))(t)[1].Refill, "which a field left open keeps")
	require.ErrorIs(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "new", Capacity: 1, Every: time.Second}), client.ErrInvalidArgument)
	require.ErrorIs(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "new", Refill: 1, Every: 1e9}), client.ErrInvalidArgument)
}

func TestFake_Shadow(t *testing.T) {
	t.Parallel()
	fake := newFake(t, frozen)
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "api", Shadow: client.Yes}))
	for _, want := range []bool{false, true} {
		d := noError(fake.Acquire(t.Context(), "api", "k", client.Cost(6)))(t)
		require.Equal(t, client.Decision{Allowed: true, Remaining: 4, ResetAfter: 6 * time.Second, Capacity: 10, Shadowed: want}, d)
	}
}

func TestFake_AcquireAll(t *testing.T) {
	t.Parallel()
	fake := newFake(t, frozen)
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "org", Capacity: 5, Refill: 1, Every: time.Second}))
	charges := []client.Charge{{Policy: "api", Key: "user"}, {Policy: "org", Key: "org", Cost: client.Cost(3)}}
	user := client.Decision{Allowed: true, Remaining: 9, ResetAfter: time.Second, Capacity: 10}
	org := client.Decision{Allowed: true, Remaining: 2, ResetAfter: 3 * time.Second, Capacity: 5}
	for _, replayed := range []bool{false, true} {
		d := noError(fake.AcquireAll(t.Context(), charges, client.IdempotencyKey("once")))(t)
		user.Replayed, org.Replayed = replayed, replayed
		require.Equal(t, client.JointDecision{Decision: org, Binding: 1, Decisions: []client.Decision{user, org}}, d)
	}
	d := noError(fake.AcquireAll(t.Context(), charges))(t)
	user.Replayed, org.Replayed = false, false
	org.Allowed, org.RetryAfter = false, time.Second
	require.Equal(t, client.JointDecision{Decision: org, Binding: 1, Decisions: []client.Decision{user, org}}, d, "nothing was taken")
	charges[0].Cost = client.Cost(2)
	_, err := fake.AcquireAll(t.Context(), charges, client.IdempotencyKey("once"))
	require.ErrorIs(t, err, client.ErrIdempotencyMismatch)
	_, err = fake.AcquireAll(t.Context(), nil)
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	_, err = fake.AcquireAll(t.Context(), append(charges, client.Charge{Policy: "none", Key: "k"}))
	require.ErrorIs(t, err, client.ErrUnknownPolicy)
	_, err = fake.AcquireAll(t.Context(), append(charges, client.Charge{Policy: "none"}))
	require.ErrorIs(t, err, client.ErrInvalidArgument)
}

func TestFake_Overrides(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	fake := newFake(t, func() time.Time { return now })
	ctx := t.Context()
	require.NoError(t, fake.DefinePolicy(ctx, client.Policy{Name: "other", Capacity: 1, Refill: 1, Every: time.Second}))
	block := client.Override{
		Policy: "api", Key: "k", Capacity: client.Zero, Refill: client.Zero, Every: time.Hour, ExpiresAt: now.Add(time.Minute).UTC(),
	}
	plan := client.Override{Policy: "other", Key: "k", Capacity: 100, Refill: 1, Every: time.Second}
	for _, o := range []client.Override{{Policy: "other", Key: "k", Capacity: 100}, {Policy: "api", Key: "k"}, block} {
		require.NoError(t, fake.Override(ctx, o))
	}
	list := func(opts ...client.OverridesOption) []client.Override {
		overrides := noError(fake.Overrides(ctx, opts...))(t)
		return overrides
	}
	require.Equal(t, []client.Override{block, plan}, list())
	require.Equal(t, []client.Override{plan}, list(client.OfPolicy("other")))
	require.Empty(t, list(client.OfKey("l")))
	require.Equal(t, []client.Override{block}, list(client.OfKey("k"), client.MaxRows(1)))
	_, err := fake.Overrides(ctx, client.MaxRows(0))
	require.ErrorIs(t, err, client.ErrInvalidArgument)

	require.True(t, noError(fake.Acquire(ctx, "api", "k"))(t).Never())
	now = now.Add(time.Minute)
	require.True(t, noError(fake.Acquire(ctx, "api", "k"))(t).Allowed)
	require.Equal(t, []client.Override{plan}, list())
	for _, want := range []bool{true, false} {
		require.Equal(t, want, noError(fake.RemoveOverride(ctx, "other", "k"))(t))
	}
	require.ErrorIs(t, fake.Override(ctx, client.Override{Policy: "none", Key: "k"}), client.ErrUnknownPolicy)
	for _, unfit := range []client.Override{
		{Policy: "api"},
		{Policy: "api", Key: "k", Capacity: -2},
		{Policy: "api", Key: "k", Refill: -2},
		{Policy: "api", Key: "k", Every: -time.Second},
		{Policy: "api", Key: "k", Every: time.Nanosecond},
		{Policy: "api", Key: "k", ExpiresAt: now},
		{Policy: "api", Key: "k", ExpiresAt: time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC)},
	} {
		require.ErrorIs(t, fake.Override(ctx, unfit), client.ErrInvalidArgument, "%+v", unfit)
	}
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

// limited is a handler of a program that limits its users.
func limited(limiter client.Acquirer) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d, err := limiter.Acquire(r.Context(), "api", r.RemoteAddr)
		switch {
		case err != nil:
			w.WriteHeader(http.StatusServiceUnavailable)
		case !d.Allowed:
			if !d.Never() {
				w.Header().Set("Retry-After", strconv.FormatInt(d.RetryAfterSeconds(), 10))
			}
			w.WriteHeader(http.StatusTooManyRequests)
		}
	})
}

// A program is tested without a database, at times of the test's choosing.
func ExampleNew() {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	fake := clienttest.New(func() time.Time { return now })
	err := fake.DefinePolicy(context.Background(), client.Policy{Name: "api", Capacity: 1, Refill: 1, Every: 90 * time.Second})
	if err != nil {
		panic(err)
	}
	handler := limited(fake)
	request := func() {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
		fmt.Println(w.Code, w.Header()["Retry-After"])
	}

	request()
	now = now.Add(500 * time.Millisecond)
	request()
	now = now.Add(90 * time.Second)
	request()
	fake.FailNext(errors.New("connection refused"))
	request()
	// Output:
	// 200 []
	// 429 [90]
	// 200 []
	// 503 []
}
