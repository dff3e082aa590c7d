package client_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Everything the client does, in every way pgx can send it, in sessions that write intervals oddly.
// Twice on one connection, so that cached statements are used too.
func TestExecModes_AnswerAlike(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for mode := pgx.QueryExecModeCacheStatement; mode <= pgx.QueryExecModeSimpleProtocol; mode++ {
		styles := []string{"postgres", "postgres_verbose", "sql_standard", "iso_8601"}
		if mode != pgx.QueryExecModeCacheStatement && mode != pgx.QueryExecModeSimpleProtocol { // one of binary and one of text show them
			styles = styles[2:3]
		}
		for _, style := range styles {
			t.Run(strings.ReplaceAll(mode.String(), " ", "_")+"/"+style, func(t *testing.T) {
				pool := connect(t, db, map[string]string{"IntervalStyle": style}, func(config *pgx.ConnConfig) {
					config.DefaultQueryExecMode = mode
				})
				for range 2 {
					useEverything(t, client.New(pool))
					cleanUpOnce(t, pool, "")
				}
			})
		}
	}
}

func useEverything(t *testing.T, limiter *client.Limiter) {
	ctx := t.Context()
	const day = 24 * time.Hour
	must := func(d client.Decision, err error) client.Decision {
		require.NoError(t, err)
		// Whole hours: the clock runs on between calls.
		if !d.Never() {
			d.RetryAfter = d.RetryAfter.Round(time.Hour)
		}
		d.ResetAfter = d.ResetAfter.Round(time.Hour)
		return d
	}

	policy := client.Policy{Name: "it's \"new\"\n🪣", Capacity: 10, Refill: 1, Every: day}
	require.NoError(t, limiter.DefinePolicy(ctx, policy))
	key := `o'clock \ $1 ` + strings.Repeat("é", 200)

	// No idempotency key is null, and a key is told from none.
	require.Equal(t, client.Decision{Allowed: true, Remaining: 9, ResetAfter: day, Capacity: 10}, must(limiter.Acquire(ctx, policy.Name, key)))
	require.Equal(t, client.Decision{Allowed: true, Remaining: 5, ResetAfter: 5 * day, Capacity: 10},
		must(limiter.Acquire(ctx, policy.Name, key, client.Cost(4), client.IdempotencyKey("null"))))
	require.Equal(t, client.Decision{Allowed: true, Remaining: 5, ResetAfter: 5 * day, Capacity: 10, Replayed: true},
		must(limiter.Acquire(ctx, policy.Name, key, client.Cost(4), client.IdempotencyKey("null"))))
	require.ErrorIs(t, kit.ErrorOf(limiter.Acquire(ctx, policy.Name, key, client.IdempotencyKey("null"))), client.ErrIdempotencyMismatch)

	require.Equal(t, client.Decision{Remaining: 5, RetryAfter: day, ResetAfter: 5 * day, Capacity: 10},
		must(limiter.Acquire(ctx, policy.Name, key, client.Cost(6))))
	require.Equal(t, client.Decision{Remaining: 5, RetryAfter: 2 * day, ResetAfter: 5 * day, Capacity: 10},
		must(limiter.Peek(ctx, policy.Name, key, client.Cost(7))))
	require.True(t, must(limiter.Peek(ctx, policy.Name, key, client.Cost(math.MaxInt64))).Never())
	require.ErrorIs(t, kit.ErrorOf(limiter.Acquire(ctx, policy.Name, key, client.Cost(math.MinInt64))), client.ErrInvalidArgument)
	for _, text := range []string{"", "\x00", "a\x00'b", "\xff", strings.Repeat("é", 257)} {
		require.ErrorIs(t, kit.ErrorOf(limiter.Acquire(ctx, policy.Name, text)), client.ErrInvalidArgument, "%q", text)
	}

	require.Equal(t, client.Decision{Allowed: true, Remaining: 8, ResetAfter: 2 * day, Capacity: 10}, must(limiter.Refund(ctx, policy.Name, key, 3)))
	require.NoError(t, limiter.Reset(ctx, policy.Name, key))
	useAll(t, limiter, policy.Name, key)
	require.NoError(t, limiter.Reset(ctx, policy.Name, key))
	useSpending(t, limiter, policy.Name, key)
	require.NoError(t, limiter.Reset(ctx, policy.Name, key))
	require.Equal(t, client.Decision{Allowed: true, Remaining: 10, Capacity: 10}, must(limiter.Peek(ctx, policy.Name, key)))

	require.Zero(t, kit.NoError(limiter.Cleanup(ctx))(t))

	policy.Every, policy.Stepped, policy.Durable, policy.Remember = math.MaxInt64/1000*time.Microsecond, client.Yes, client.Yes, time.Microsecond
	policy.Shadow = client.No
	require.NoError(t, limiter.DefinePolicy(ctx, policy))
	require.Equal(t, []client.Policy{policy}, kit.NoError(limiter.Policies(ctx))(t))

	useOverrides(t, limiter, policy, key)

	require.NoError(t, limiter.DropPolicy(ctx, policy.Name))
	require.ErrorIs(t, kit.ErrorOf(limiter.Acquire(ctx, policy.Name, key)), client.ErrUnknownPolicy)

	useSlots(t, limiter, key)
}

// useSpending expects the bucket of key to be full, and one token a day.
func useSpending(t *testing.T, limiter *client.Limiter, policy, key string) {
	ctx := t.Context()
	const day = 24 * time.Hour
	once := fmt.Sprint("spending ", time.Now().UnixNano(), " ", key[:51])

	up := kit.NoError(limiter.AcquireUpTo(ctx, policy, key, 12, client.AtLeast(10), client.IdempotencyKey(once)))(t)
	require.True(t, up.Allowed)
	require.EqualValues(t, 10, up.Taken)
	up = kit.NoError(limiter.AcquireUpTo(ctx, policy, key, 12, client.IdempotencyKey(once)))(t)
	require.True(t, up.Replayed)
	require.EqualValues(t, 10, up.Taken)
	up = kit.NoError(limiter.AcquireUpTo(ctx, policy, key, 1))(t)
	require.True(t, !up.Allowed && up.Taken == 0 && up.RetryAfter > 23*time.Hour)
	require.EqualValues(t, 1, kit.NoError(limiter.Settle(ctx, policy, key, once, 9))(t).Remaining)
	require.ErrorIs(t, kit.ErrorOf(limiter.Settle(ctx, policy, key, once, 8)), client.ErrIdempotencyMismatch)
	require.ErrorIs(t, kit.ErrorOf(limiter.Settle(ctx, policy, key, "never granted", 8)), client.ErrNoGrant)

	d := kit.NoError(limiter.Charge(ctx, policy, key, 3))(t)
	require.True(t, d.Allowed)
	require.EqualValues(t, -2, d.Remaining)
	r := kit.NoError(limiter.Reserve(ctx, policy, key, 3*day, client.Cost(2)))(t)
	require.False(t, r.Allowed || r.Never())
	require.Equal(t, 4*day, r.Wait.Round(time.Hour))
	r = kit.NoError(limiter.Reserve(ctx, policy, key, 5*day, client.Cost(2), client.IdempotencyKey(once+"r")))(t)
	require.True(t, r.Allowed && !r.Replayed)
	require.EqualValues(t, -4, r.Remaining)
	require.Equal(t, 14*day, r.ResetAfter.Round(time.Hour))
	r = kit.NoError(limiter.Reserve(ctx, policy, key, 0, client.Cost(2), client.IdempotencyKey(once+"r")))(t)
	require.True(t, r.Allowed && r.Replayed)
	require.Equal(t, 4*day, r.Wait.Round(time.Hour))
	r = kit.NoError(limiter.Reserve(ctx, policy, key, 0, client.Cost(11)))(t)
	require.True(t, !r.Allowed && r.Never())
}

// useAll expects the bucket of key to be full.
func useAll(t *testing.T, limiter *client.Limiter, policy, key string) {
	ctx := t.Context()
	other := "NULL {\"}, " + key[:101]
	require.NoError(t, limiter.Reset(ctx, policy, other))
	charges := []client.Charge{{Policy: policy, Key: other}, {Policy: policy, Key: key, Cost: client.Cost(7)}, {Policy: policy, Key: other, Cost: client.Cost(0)}}
	acquire := func(opts ...client.CallOption) client.JointDecision {
		d := kit.NoError(limiter.AcquireAll(ctx, charges, opts...))(t)
		require.Len(t, d.Decisions, 3)
		binding := d.Decisions[d.Binding]
		require.Equal(t, []any{d.Remaining, d.ResetAfter, d.RetryAfter}, []any{binding.Remaining, binding.ResetAfter, binding.RetryAfter})
		return d
	}
	remaining := func(d client.JointDecision) []int64 {
		return []int64{d.Decisions[0].Remaining, d.Decisions[1].Remaining, d.Decisions[2].Remaining}
	}
	once := client.IdempotencyKey("all " + key[:101])
	d := acquire(once)
	require.True(t, d.Allowed)
	require.Equal(t, 1, d.Binding)
	require.Equal(t, []int64{9, 3, 9}, remaining(d))
	d = acquire(once)
	require.True(t, d.Allowed && d.Replayed && d.Decisions[1].Replayed)
	require.Equal(t, []int64{9, 3, 9}, remaining(d))
	d = acquire()
	require.False(t, d.Allowed)
	require.Equal(t, 1, d.Binding)
	require.Equal(t, []int64{9, 3, 9}, remaining(d), "nothing was taken")
	require.Positive(t, d.RetryAfter)
	charges[1].Cost = client.Cost(11)
	require.True(t, acquire().Never())
	charges[1].Cost = client.Cost(1)
	require.ErrorIs(t, kit.ErrorOf(limiter.AcquireAll(ctx, charges, once)), client.ErrIdempotencyMismatch)
	for _, text := range []string{"", "\x00", "a\x00'b", "\xff", strings.Repeat("é", 257)} {
		charges[1].Key = text
		require.ErrorIs(t, kit.ErrorOf(limiter.AcquireAll(ctx, charges)), client.ErrInvalidArgument, "%q", text)
	}
	require.ErrorIs(t, kit.ErrorOf(limiter.AcquireAll(ctx, nil)), client.ErrInvalidArgument)
}

func useOverrides(t *testing.T, limiter *client.Limiter, policy client.Policy, key string) {
	ctx := t.Context()
	expires := time.Date(2100, 1, 2, 3, 4, 5, 678_901_999, time.FixedZone("", 3600))
	block := client.Override{Policy: policy.Name, Key: key, Capacity: client.Zero, Refill: client.Zero, Every: time.Hour, ExpiresAt: expires}
	require.NoError(t, limiter.Override(ctx, block))
	require.NoError(t, limiter.Override(ctx, client.Override{Policy: policy.Name, Key: "b"}))
	block.ExpiresAt = time.Date(2100, 1, 2, 2, 4, 5, 678_901_000, time.UTC)
	same := client.Override{Policy: policy.Name, Key: "b", Capacity: policy.Capacity, Refill: policy.Refill, Every: policy.Every}
	list := func(opts ...client.CallOption) []client.Override {
		return kit.NoError(limiter.Overrides(ctx, opts...))(t)
	}
	require.ElementsMatch(t, []client.Override{same, block}, list())
	require.Equal(t, []client.Override{block}, list(client.OfPolicy(policy.Name), client.OfKey(key)))
	require.Empty(t, list(client.OfKey("none")))
	require.ErrorIs(t, kit.ErrorOf(limiter.Overrides(ctx, client.OfPolicy("none"))), client.ErrUnknownPolicy)
	require.Len(t, list(client.MaxRows(1)), 1)
	require.NoError(t, limiter.Override(ctx, block), "what is read can be written")

	d := kit.NoError(limiter.Acquire(ctx, policy.Name, key))(t)
	require.Equal(t, client.Decision{RetryAfter: d.RetryAfter}, d)
	require.InDelta(t, time.Until(block.ExpiresAt).Hours(), d.RetryAfter.Hours(), 1)
	for _, want := range []bool{true, false} {
		require.Equal(t, want, kit.NoError(limiter.RemoveOverride(ctx, policy.Name, key))(t))
	}
	require.ErrorIs(t, kit.ErrorOf(limiter.RemoveOverride(ctx, "none", key)), client.ErrUnknownPolicy)
	for _, unfit := range []client.Override{
		{Policy: policy.Name, Key: ""},
		{Policy: policy.Name, Key: key, Capacity: -2},
		{Policy: policy.Name, Key: key, Every: time.Nanosecond},
		{Policy: policy.Name, Key: key, ExpiresAt: time.Unix(0, 0)},
		{Policy: policy.Name, Key: key, ExpiresAt: time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC)},
		{Policy: policy.Name, Key: key, ExpiresAt: time.Date(300_000, 1, 1, 0, 0, 0, 0, time.UTC)},
	} {
		require.ErrorIs(t, limiter.Override(ctx, unfit), client.ErrInvalidArgument, "%+v", unfit)
	}
	require.ErrorIs(t, limiter.Override(ctx, client.Override{Policy: "none", Key: key}), client.ErrUnknownPolicy)
}

func useSlots(t *testing.T, limiter *client.Limiter, key string) {
	ctx := t.Context()
	policy := client.Policy{Name: "it's slots", Capacity: 3, Lease: time.Hour, Durable: client.No, Shadow: client.No}
	require.NoError(t, limiter.DefinePolicy(ctx, policy))
	require.Equal(t, []client.Policy{policy}, kit.NoError(limiter.Policies(ctx))(t))
	require.NoError(t, limiter.DefinePolicy(ctx, policy), "what is listed can be passed back")

	h, d, err := limiter.Hold(ctx, policy.Name, key, client.Cost(2))
	require.NoError(t, err)
	require.Equal(t, client.HoldDecision{Allowed: true, Remaining: 1, HeldFor: time.Hour, Capacity: 3}, d)
	none, d, err := limiter.Hold(ctx, policy.Name, key, client.Cost(2))
	require.NoError(t, err)
	require.Nil(t, none)
	require.InDelta(t, time.Hour, d.RetryAfter, float64(time.Minute))
	d.RetryAfter = 0
	require.Equal(t, client.HoldDecision{Remaining: 1, Capacity: 3}, d)
	_, d, err = limiter.HoldWait(ctx, policy.Name, key, client.Cost(4))
	require.ErrorIs(t, err, client.ErrTooLate)
	require.True(t, d.Never())
	peek := kit.NoError(limiter.Peek(ctx, policy.Name, key))(t)
	require.True(t, peek.Allowed)
	require.EqualValues(t, 1, peek.Remaining)
	require.InDelta(t, time.Hour, peek.ResetAfter, float64(time.Minute))

	list := kit.NoError(limiter.Holders(ctx, client.OfPolicy(policy.Name), client.OfKey(key), client.MaxRows(2)))(t)
	require.Len(t, list, 1)
	require.InDelta(t, time.Hour, list[0].HeldFor, float64(time.Minute))
	list[0].HeldFor = 0
	require.Equal(t, client.Holder{Policy: policy.Name, Key: key, Holder: h.Holder(), Cost: 2}, list[0])

	plan := client.Override{Policy: policy.Name, Key: key, Capacity: client.Zero, Lease: time.Minute, ExpiresAt: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)}
	require.NoError(t, limiter.Override(ctx, plan))
	require.Equal(t, []client.Override{plan}, kit.NoError(limiter.Overrides(ctx))(t))
	_, d, err = limiter.Hold(ctx, policy.Name, key)
	require.NoError(t, err)
	require.EqualValues(t, -2, d.Remaining)

	require.NoError(t, h.Release(ctx))
	require.Empty(t, kit.NoError(limiter.Holders(ctx))(t))
	require.ErrorIs(t, kit.ErrorOf(limiter.Acquire(ctx, policy.Name, key)), client.ErrInvalidArgument)
	require.NoError(t, limiter.DropPolicy(ctx, policy.Name))
	_, _, err = limiter.Hold(ctx, policy.Name, key)
	require.ErrorIs(t, err, client.ErrUnknownPolicy)
}

// cleanUpOnce lets RunCleanup make one call.
func cleanUpOnce(t *testing.T, conn client.Querier, schema string) {
	once := &firstCall{Querier: conn}
	ctx, cancel := context.WithCancel(t.Context())
	once.ended = cancel
	client.New(once, client.Schema(schema)).RunCleanup(ctx, time.Hour)
	require.ErrorIs(t, once.err, pgx.ErrNoRows, "a procedure answers no row, and no error of the server")
}

// A firstCall keeps the error of a call, and says that it has ended.
type firstCall struct {
	client.Querier
	pgx.Row
	ended func()
	err   error
}

func (c *firstCall) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	c.Row = c.Querier.QueryRow(ctx, sql, args...)
	return c
}

func (c *firstCall) Scan(dest ...any) error {
	defer c.ended()
	c.err = c.Row.Scan(dest...)
	return c.err
}

func TestSchema_FindsFunctionsOffThePath(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	const schema = `odd "schema".x`
	db.Exec(t, "create schema "+pgx.Identifier{schema}.Sanitize())
	installer := acquired(t, connect(t, db, map[string]string{"search_path": pgx.Identifier{schema}.Sanitize()}))
	require.NoError(t, migrations.Up(t.Context(), installer.Conn()))

	pathless := connect(t, db, map[string]string{"search_path": ""})
	_, err := client.New(pathless).Policies(t.Context())
	kit.RequireState(t, "42883", err)
	useEverything(t, client.New(pathless, client.Schema(schema)))
	cleanUpOnce(t, pathless, schema)
}
