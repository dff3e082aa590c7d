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
		"another number":  &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": "soon", "capacity": 5}`},
		"a broken detail": &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p"`},
	} {
		d, ok := client.Denied(err)
		require.False(t, ok, name)
		require.Zero(t, d, name)
	}
}

const longest = math.MaxInt64 / 1000 * time.Microsecond

func TestDecision_Decodes(t *testing.T) {
	t.Parallel()
	const us, null = time.Microsecond, -1
	sent := func(allowed bool, remaining, retryAfter, resetAfter int64, replayed, shadowed bool) row {
		columns := row{allowed, remaining, retryAfter, resetAfter, int64(10), replayed, shadowed}
		for i := range columns[2:4] {
			if columns[2+i] == int64(null) {
				columns[2+i] = nil
			}
		}
		return columns
	}
	const most = math.MaxInt64 / 1000
	for name, test := range map[string]struct {
		answer row
		want   client.Decision // of capacity 10
	}{
		"grant":                         {sent(true, 7, 0, 1_500_000, false, false), client.Decision{Allowed: true, Remaining: 7, ResetAfter: 1_500_000 * us}},
		"denial":                        {sent(false, 0, 1, 2, false, false), client.Decision{RetryAfter: us, ResetAfter: 2 * us}},
		"replay":                        {sent(true, 7, 0, 3, true, false), client.Decision{Allowed: true, Remaining: 7, ResetAfter: 3 * us, Replayed: true}},
		"never":                         {sent(false, 10, null, 0, false, false), client.Decision{Remaining: 10, RetryAfter: math.MaxInt64}},
		"a denial without refill":       {sent(false, 3, null, null, false, false), client.Decision{Remaining: 3, RetryAfter: math.MaxInt64, ResetAfter: math.MaxInt64}},
		"a grant without refill":        {sent(true, 3, 0, null, false, false), client.Decision{Allowed: true, Remaining: 3, ResetAfter: math.MaxInt64}},
		"a denial that is only watched": {sent(true, 0, 0, 5, false, true), client.Decision{Allowed: true, ResetAfter: 5 * us, Shadowed: true}},
		"debt":                          {sent(false, -3, 4, 5, false, false), client.Decision{Remaining: -3, RetryAfter: 4 * us, ResetAfter: 5 * us}},
		"the longest durations":         {sent(false, 0, most, most-1, false, false), client.Decision{RetryAfter: longest, ResetAfter: longest - us}},
		"durations beyond that are not never": {
			sent(false, 0, most+1, math.MaxInt64, false, false), client.Decision{RetryAfter: longest, ResetAfter: longest},
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
