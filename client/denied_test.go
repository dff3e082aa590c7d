package client_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
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
