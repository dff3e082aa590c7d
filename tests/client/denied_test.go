package client_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
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
		return errOf(db.Pool.Exec(ctx, `select ratelimit_enforce('a "policy"', 'user:42', $1)`, cost))
	}
	require.NoError(t, enforce(4))
	_, ok := client.Denied(enforce(1))
	require.False(t, ok)

	want := noError(client.New(db.Pool).Peek(ctx, `a "policy"`, "user:42", client.Cost(7)))(t)
	for name, err := range map[string]error{
		"enforce": enforce(7),
		"guard": func() error {
			return errOf(db.Pool.Exec(ctx, "insert into orders values ('user:42', 3), ('user:42', 4), ('user:43', 5)"))
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
