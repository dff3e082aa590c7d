package client_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/stretchr/testify/require"
)

// seen is what the hooks were told.
type seen struct {
	mu      sync.Mutex // of answers: a Hold renews in the background
	answers []client.Answer
	waits   []wait
	calls   []int
}

type wait struct {
	policy string
	slept  time.Duration
	err    error
}

func (s *seen) hooks() client.Hooks {
	return client.Hooks{
		Answered: func(_ context.Context, a client.Answer) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.answers = append(s.answers, a)
		},
		Waited: func(_ context.Context, policy string, slept time.Duration, err error) {
			s.waits = append(s.waits, wait{policy, slept, err})
		},
		Combined: func(requests int) { s.calls = append(s.calls, requests) },
	}
}

func TestObserve_SeesEachAnswer(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	var s seen
	now := time.Now()
	fake := clienttest.New(func() time.Time { return now }, client.Observe(s.hooks()))
	for _, p := range []client.Policy{
		{Name: "api", Capacity: 10, Refill: 1, Every: time.Second},
		{Name: "org", Capacity: 3, Refill: 1, Every: time.Second},
		{Name: "trial", Capacity: 1, Refill: 1, Every: time.Second, Shadow: client.Yes},
	} {
		require.NoError(t, fake.DefinePolicy(ctx, p))
	}
	for _, ask := range []struct {
		operation, policy string
		result            client.Result
		takes             bool
		call              func() error
	}{
		{"acquire", "api", client.ResultAllowed, true, func() error { return errOf(fake.Acquire(ctx, "api", "k", client.Cost(2), client.IdempotencyKey("i"))) }},
		{"acquire", "api", client.ResultReplayed, true, func() error { return errOf(fake.Acquire(ctx, "api", "k", client.Cost(2), client.IdempotencyKey("i"))) }},
		{"acquire", "api", client.ResultDenied, true, func() error { return errOf(fake.Acquire(ctx, "api", "k", client.Cost(9))) }},
		{"acquire", "trial", client.ResultShadowed, true, func() error { return errOf(fake.Acquire(ctx, "trial", "k", client.Cost(2))) }},
		{"acquire", "nobody", client.ResultError, true, func() error { return errOf(fake.Acquire(ctx, "nobody", "k")) }},
		{"acquire all", "org", client.ResultAllowed, true, func() error {
			return errOf(fake.AcquireAll(ctx, []client.Charge{{Policy: "api", Key: "k"}, {Policy: "org", Key: "k"}}))
		}},
		{"acquire all", "", client.ResultError, true, func() error {
			return errOf(fake.AcquireAll(ctx, []client.Charge{{Policy: "api", Key: "k"}, {Policy: "nobody", Key: "k"}}))
		}},
		{"acquire up to", "api", client.ResultAllowed, true, func() error { return errOf(fake.AcquireUpTo(ctx, "api", "k", 2)) }},
		{"acquire up to", "nobody", client.ResultError, true, func() error { return errOf(fake.AcquireUpTo(ctx, "nobody", "k", 2)) }},
		{"charge", "api", client.ResultAllowed, true, func() error { return errOf(fake.Charge(ctx, "api", "k", 100)) }},
		{"settle", "api", client.ResultAllowed, false, func() error { return errOf(fake.Settle(ctx, "api", "k", "i", 1)) }},
		{"reserve", "api", client.ResultDenied, true, func() error { return errOf(fake.Reserve(ctx, "api", "k", time.Second)) }},
		{"reserve", "api", client.ResultError, true, func() error { return errOf(fake.Reserve(ctx, "api", "k", time.Nanosecond)) }},
		{"peek", "api", client.ResultDenied, false, func() error { return errOf(fake.Peek(ctx, "api", "k")) }},
		{"refund", "api", client.ResultAllowed, false, func() error { return errOf(fake.Refund(ctx, "api", "k", 1)) }},
	} {
		s.answers = nil
		err := ask.call()
		require.Len(t, s.answers, 1, ask.operation)
		a := s.answers[0]
		require.Equal(t, ask.operation, a.Operation)
		require.Equal(t, ask.policy, a.Policy, ask.operation)
		require.Equal(t, ask.result, a.Result(), ask.operation)
		require.Equal(t, ask.takes, a.Takes(), ask.operation)
		require.Equal(t, err, a.Err, "the caller's")
		require.GreaterOrEqual(t, a.Duration, time.Duration(0))
	}
	require.Empty(t, s.calls, "a Limiter combines nothing")
}

// What the cache answers is an answer like others.
func TestObserve_SeesTheDenialCache(t *testing.T) {
	t.Parallel()
	var s seen
	db := &fakePool{fakeDB{answers: []any{denied(time.Minute)}}}
	limiter := client.New(db, client.DenialCache(), client.Observe(s.hooks()))
	for range 3 {
		noError(limiter.Acquire(t.Context(), "api", "k"))(t)
	}
	require.Len(t, db.sent(), 1)
	require.Len(t, s.answers, 3)
	require.Equal(t, client.ResultDenied, s.answers[2].Result())
}

func TestObserve_SeesWaits(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var s seen
		fake := clienttest.New(time.Now, client.Observe(s.hooks()))
		require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "line", Capacity: 1, Refill: 1, Every: time.Second}))
		for range 2 {
			noError(fake.Wait(t.Context(), "line", "k"))(t)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second-time.Microsecond)
		defer cancel()
		require.ErrorIs(t, errOf(fake.Wait(ctx, "line", "k")), client.ErrTooLate)
		ctx, cancel = context.WithCancel(t.Context())
		time.AfterFunc(time.Second/4, cancel)
		require.ErrorIs(t, errOf(fake.Wait(ctx, "line", "k")), context.Canceled)
		require.Equal(t, []wait{{"line", 0, nil}, {"line", time.Second, nil}, {"line", time.Second / 4, context.Canceled}}, s.waits)

		var operations []string
		for _, a := range s.answers {
			operations = append(operations, a.Operation+" "+string(a.Result()))
		}
		require.Equal(t, []string{"reserve allowed", "reserve allowed", "reserve denied", "reserve allowed", "settle allowed"}, operations)
	})
}

// Each request that is sent is in one call.
func TestObserve_SeesTheSizeOfCalls(t *testing.T) {
	var s seen
	atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		askKeys(t.Context(), limiter, 1, 4)
		_ = askAll(t.Context(), limiter, []string{"k5", "k6"})
		_ = askAll(t.Context(), limiter, []string{"k7", "k8"})
		_ = ask(t.Context(), limiter, strings.Repeat("k", 513))
		db.grantAll()
		require.ElementsMatch(t, []int{1, 1, 3, 2}, s.calls)
		require.Len(t, s.answers, 7)
	}, client.Observe(s.hooks()))
}

func TestRunCleanup_CallsAndPausesAlsoAfterAnError(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		broken := errors.New("connection refused")
		db := &fakePool{fakeDB{answers: []any{broken, pgx.ErrNoRows}}}
		ctx, cancel := context.WithCancel(t.Context())
		reported := make(chan error, 10)
		go client.New(db, client.Schema("app")).RunCleanup(ctx, time.Minute, client.OnError(func(err error) { reported <- err }))

		synctest.Wait()
		call := query{`call "app".ratelimit_cleanup_all($1::text::interval)`, []any{"60000000 microseconds"}}
		require.Equal(t, []query{call}, db.sent())
		err := <-reported
		require.ErrorIs(t, err, broken)
		require.EqualError(t, err, "pgratelimit: clean up: connection refused")
		time.Sleep(time.Minute - 1)
		synctest.Wait()
		require.Len(t, db.sent(), 1)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.Equal(t, []query{call, call}, db.sent())

		cancel()
		synctest.Wait()
		time.Sleep(time.Hour)
		require.Len(t, db.sent(), 2, "it ends with its context; synctest fails when the goroutine does not")
		require.Empty(t, reported)
	})
}

func TestRunCleanup_EndOfContextIsNoError(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	db := &fakePool{fakeDB{answers: []any{context.Canceled}, after: cancel}}
	client.New(db).RunCleanup(ctx, time.Minute, client.OnError(func(err error) { t.Error(err) }))
	require.Len(t, db.sent(), 1)
}

// It replaces the program's logger, so it is not parallel.
func TestRunCleanup_LogsErrorsUnlessTold(t *testing.T) {
	var log strings.Builder
	previous := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(previous)

	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		go client.New(&fakeDB{answers: []any{errors.New("connection refused")}}).RunCleanup(ctx, time.Minute)
		synctest.Wait()
		cancel()
	})
	require.Contains(t, log.String(), `level=WARN msg="rate limit clean-up failed" error="pgratelimit: clean up: connection refused"`)
}
