package client_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestDenied_OfTheServer(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.New(t)
	db.Exec(t, `
		select ratelimit_define_policy('a "policy"', 10, 1, '1 hour');
		create or replace function ratelimit.clock() returns timestamptz language sql stable as $$ select timestamptz '2030-01-01 00:00:00+00' $$;
		create table orders (customer text, size integer);
		create trigger limited after insert on orders referencing new table as inserted
		  for each statement execute function ratelimit_guard('a "policy"', 'customer', 'size')`)
	enforce := func(cost int64) error {
		_, err := db.Pool.Exec(ctx, `select ratelimit_enforce('a "policy"', 'user:42', $1)`, cost)
		return err
	}
	require.NoError(t, enforce(4))
	_, ok := client.Denied(enforce(1))
	require.False(t, ok)

	want, err := client.New(db.Pool).Peek(ctx, `a "policy"`, "user:42", client.Cost(7))
	require.NoError(t, err)
	for name, err := range map[string]error{
		"enforce": enforce(7),
		"guard": func() error {
			_, err := db.Pool.Exec(ctx, "insert into orders values ('user:42', 3), ('user:42', 4), ('user:43', 5)")
			return err
		}(),
	} {
		d, ok := client.Denied(fmt.Errorf("wrapped: %w", err))
		require.True(t, ok, "%s: %v", name, err)
		require.Equal(t, `a "policy"`, d.Policy)
		require.EqualValues(t, 7, d.Cost)
		require.False(t, d.Allowed)
		require.False(t, d.Never())
		require.Equal(t, want.Remaining, d.Remaining)
		require.Equal(t, want.Capacity, d.Capacity)
		require.Equal(t, want.RetryAfter, d.RetryAfter)
		require.NotContains(t, err.Error(), "user:42")
	}

	d, ok := client.Denied(enforce(11))
	require.True(t, ok)
	require.True(t, d.Never())
}

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
