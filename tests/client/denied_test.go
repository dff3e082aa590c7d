package client_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
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

// A rollback to a savepoint would give back tokens unseen.
func TestDenialCache_IsNotForTransactions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx := t.Context()
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	for name, handle := range handles {
		t.Run(name, func(t *testing.T) {
			var sent tryCounter
			limiter := client.New(handle.open(t, connect(t, db, nil, sent.count)), client.DenialCache())
			for range 3 {
				noError(limiter.Acquire(ctx, "api", name, client.Cost(10)))(t)
			}
			require.EqualValues(t, map[bool]int{true: 2, false: 3}[handle.retries], sent.n.Load(), "one that retries is no transaction")
		})
	}
}

func TestDenialCache_OfACombiner(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx := t.Context()
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	var sent tryCounter
	limiter := client.NewCombiner(connect(t, db, nil, sent.count), client.DenialCache())
	defer limiter.Close()
	for n := range 5 {
		require.Equal(t, n == 0, noError(limiter.Acquire(ctx, "api", "k", client.Cost(6)))(t).Allowed)
	}
	require.EqualValues(t, 2, sent.n.Load())

	require.True(t, noError(limiter.Acquire(ctx, "api", "k", client.Cost(4)))(t).Allowed)
	noError(limiter.Refund(ctx, "api", "k", 10))(t)
	require.True(t, noError(limiter.Acquire(ctx, "api", "k", client.Cost(6)))(t).Allowed)
}

const longest = math.MaxInt64 / 1000 * time.Microsecond

func TestWait_IsNotForTransactions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	tx := begin(t, db.Pool)
	limiter := client.New(db.Pool)
	for name, in := range map[string]*client.Limiter{"Tx": client.New(tx), "WithTx": limiter.WithTx(tx), "Conn": client.New(tx.Conn())} {
		_, err := in.Wait(t.Context(), "line", "k")
		require.ErrorIs(t, err, client.ErrInvalidArgument, name)
		require.True(t, strings.HasSuffix(err.Error(), "outside a transaction"), err)
	}
}
