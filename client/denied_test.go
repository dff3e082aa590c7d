package client_test

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/stretchr/testify/require"
)

func TestDenied_TellsWhatTheErrorTells(t *testing.T) {
	t.Parallel()
	never := client.Denial{Policy: "p", Cost: 9, Decision: client.Decision{Remaining: -2, Capacity: 5, RetryAfter: 1<<63 - 1}}
	for _, d := range []client.Denial{
		{Policy: "p", Cost: 3, Decision: client.Decision{Remaining: 2, Capacity: 5, RetryAfter: time.Microsecond}},
		{Policy: "ü\n\"", Cost: 1 << 62, Decision: client.Decision{Capacity: 9_000_000_000_000, RetryAfter: 290 * 365 * 24 * time.Hour}},
		never,
	} {
		got, ok := client.Denied(clienttest.Denied(d))
		require.True(t, ok)
		require.Equal(t, d, got)
	}
	require.True(t, never.Never())

	saturated, ok := client.Denied(&pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": 3155760000000, "capacity": 5}`})
	require.True(t, ok)
	require.Positive(t, saturated.RetryAfter)
	require.False(t, saturated.Never())

	for name, err := range map[string]error{
		"nil":             nil,
		"another error":   errors.New("RL429"),
		"another code":    &pgconn.PgError{Code: "RL001", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": 1, "capacity": 5}`},
		"no detail":       &pgconn.PgError{Code: "RL429"},
		"another detail":  &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p"}`},
		"no policy":       &pgconn.PgError{Code: "RL429", Detail: `{"cost": 1, "remaining": 0, "retry_after": 1, "capacity": 5}`},
		"no cost":         &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "remaining": 0, "retry_after": 1, "capacity": 5}`},
		"no remaining":    &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "retry_after": 1, "capacity": 5}`},
		"no capacity":     &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": 1}`},
		"another number":  &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": "soon", "capacity": 5}`},
		"a broken detail": &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p"`},
	} {
		d, ok := client.Denied(err)
		require.False(t, ok, name)
		require.Zero(t, d, name)
	}
}

const longest = math.MaxInt64 / 1000 * time.Microsecond

// Nothing is never, and no time that a Duration cannot hold is. Package clienttest compares the other fields.
func TestDecision_Decodes(t *testing.T) {
	t.Parallel()
	const most = math.MaxInt64 / 1000
	for name, test := range map[string]struct {
		answer row
		want   client.Decision // of capacity 10
	}{
		"never":                  {never, client.Decision{Remaining: 10, RetryAfter: math.MaxInt64}},
		"a grant without refill": {row{true, int64(3), int64(0), nil, int64(10), false, false}, client.Decision{Allowed: true, Remaining: 3, ResetAfter: math.MaxInt64}},
		"the longest durations": {
			row{false, int64(-3), int64(most), int64(most - 1), int64(10), false, false},
			client.Decision{Remaining: -3, RetryAfter: longest, ResetAfter: longest - time.Microsecond},
		},
		"durations beyond that": {
			row{false, int64(0), int64(most + 1), int64(math.MaxInt64), int64(10), false, false}, client.Decision{RetryAfter: longest, ResetAfter: longest},
		},
	} {
		test.want.Capacity = 10
		got := noError(client.New(&fakeDB{answers: []any{test.answer}}).Acquire(t.Context(), "p", "k"))(t)
		require.Equal(t, test.want, got, name)
		require.Equal(t, test.answer[2] == nil, got.Never(), name)
		require.Equal(t, test.answer[3] == nil, got.NeverFull(), name)
	}
}

func TestDecision_RetryAfterSeconds(t *testing.T) {
	t.Parallel()
	for retryAfter, want := range map[time.Duration]int64{
		0:                              0,
		time.Microsecond:               1,
		time.Second - time.Microsecond: 1,
		time.Second:                    1,
		time.Second + time.Microsecond: 2,
		90 * time.Second:               90,
		longest:                        9_223_372_037,
		math.MaxInt64:                  9_223_372_037, // never
	} {
		require.Equal(t, want, client.Decision{RetryAfter: retryAfter}.RetryAfterSeconds(), retryAfter)
	}
}
