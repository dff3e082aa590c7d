package client_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Texts that have broken other people's quoting: of a policy, and of a key.
const oddName, oddKey = "it's \"new\"\n🪣 {,}", `o'clock \ $1 "{NULL}", ` + "éééééééééééééééé"

// inEachMode runs a test with a pool for each way in which pgx can send a call, in sessions that write intervals oddly, and with a
// fake that answers what they should. All clocks say the same.
func inEachMode(t *testing.T, test func(t *testing.T, db *kit.TestDB, pool *pgxpool.Pool, fake *client.Limiter)) {
	t.Parallel()
	for mode := pgx.QueryExecModeCacheStatement; mode <= pgx.QueryExecModeSimpleProtocol; mode++ {
		styles := []string{"postgres", "postgres_verbose", "sql_standard", "iso_8601"}
		if mode != pgx.QueryExecModeCacheStatement && mode != pgx.QueryExecModeSimpleProtocol { // one of binary and one of text show them
			styles = styles[2:3]
		}
		for _, style := range styles {
			t.Run(strings.ReplaceAll(mode.String(), " ", "_")+"/"+style, func(t *testing.T) {
				t.Parallel()
				db, fake := kit.NewDB(t), kit.NewFake(t)
				db.SetClock(kit.T0)
				fake.SetClock(kit.T0)
				test(t, db, connect(t, db.DB, map[string]string{"IntervalStyle": style}, func(config *pgx.ConnConfig) {
					config.DefaultQueryExecMode = mode
				}), fake.Fake.Limiter)
			})
		}
	}
}

// Twice on one connection, so that cached statements are used too.
func TestExecModes_AnswerLikeTheFake(t *testing.T) {
	inEachMode(t, func(t *testing.T, _ *kit.TestDB, pool *pgxpool.Pool, fake *client.Limiter) {
		for range 2 {
			require.Equal(t, useEverything(t.Context(), fake), useEverything(t.Context(), client.New(pool)))
		}
	})
}

func TestSchema_FindsFunctionsOffThePath(t *testing.T) {
	t.Parallel()
	db, fake := &kit.TestDB{DB: pgtest.Empty(t), T: t}, kit.NewFake(t)
	const schema = `odd "schema".x`
	db.Execute("create schema " + pgx.Identifier{schema}.Sanitize())
	installer := acquired(t, connect(t, db.DB, map[string]string{"search_path": pgx.Identifier{schema}.Sanitize()}))
	require.NoError(t, migrations.Up(t.Context(), installer.Conn()))
	db.SetClock(kit.T0)
	fake.SetClock(kit.T0)

	pathless := connect(t, db.DB, map[string]string{"search_path": ""})
	_, err := client.New(pathless).Policies(t.Context())
	kit.RequireState(t, "42883", err)
	require.Equal(t, useEverything(t.Context(), fake.Fake.Limiter), useEverything(t.Context(), client.New(pathless, client.Schema(schema))))
}

// useEverything calls each method that sends arguments of its own, or reads an answer of its own. It returns the answers in words.
func useEverything(ctx context.Context, l *client.Limiter) (answers []string) {
	const day, once = 24 * time.Hour, "null"
	see := func(answer any, err error) {
		if err != nil {
			answer = cmp.Or(kit.SQLState(err), err.Error())
		}
		answers = append(answers, fmt.Sprintf("%d: %+v", len(answers), answer))
	}
	do := func(err error) { see("done", err) }

	policy := client.Policy{Name: oddName, Capacity: 10, Refill: 1, Every: day}
	do(l.DefinePolicy(ctx, policy))
	for _, opts := range [][]client.CallOption{
		nil, {client.Cost(4), client.IdempotencyKey(once)}, {client.Cost(4), client.IdempotencyKey(once)}, {client.IdempotencyKey(once)},
		{client.Cost(6)}, {client.Cost(0)}, {client.Cost(math.MaxInt64)}, {client.Cost(math.MinInt64)},
	} {
		see(l.Acquire(ctx, policy.Name, oddKey, opts...))
	}
	see(l.Peek(ctx, policy.Name, oddKey, client.Cost(7)))
	see(l.Refund(ctx, policy.Name, oddKey, 3))
	see(l.Pause(ctx, policy.Name, oddKey, time.Hour+time.Nanosecond))
	do(l.Reset(ctx, policy.Name, oddKey))
	for _, text := range []string{"", "\x00", "a\x00'b", "\xff", strings.Repeat("é", 257)} {
		see(l.Acquire(ctx, policy.Name, text))
		see(l.AcquireAll(ctx, []client.Charge{{Policy: policy.Name, Key: oddKey}, {Policy: policy.Name, Key: text}}))
	}

	charges := []client.Charge{
		{Policy: policy.Name, Key: "NULL {\"},"}, {Policy: policy.Name, Key: oddKey, Cost: client.Cost(7)},
		{Policy: policy.Name, Key: "NULL {\"},", Cost: client.Cost(0)},
	}
	for _, cost := range []int64{7, 7, 8} {
		charges[1].Cost = client.Cost(cost)
		see(l.AcquireAll(ctx, charges, client.IdempotencyKey(oddKey)))
		see(l.AcquireAll(ctx, charges))
	}
	see(l.AcquireAll(ctx, nil))
	do(l.ResetAll(ctx, policy.Name))

	for _, atLeast := range []int64{10, 1, 11} {
		see(l.AcquireUpTo(ctx, policy.Name, oddKey, 12, client.AtLeast(atLeast), client.IdempotencyKey("up to")))
	}
	see(l.AcquireUpTo(ctx, policy.Name, oddKey, 1))
	for _, cost := range []int64{9, 9, 8} {
		see(l.Settle(ctx, policy.Name, oddKey, "up to", cost))
	}
	see(l.Charge(ctx, policy.Name, oddKey, 3, client.IdempotencyKey("charge")))
	for _, maxWait := range []time.Duration{3 * day, 5 * day, 0} {
		see(l.Reserve(ctx, policy.Name, oddKey, maxWait, client.Cost(2), client.IdempotencyKey("reserve")))
	}
	see(l.Reserve(ctx, policy.Name, oddKey, 0, client.Cost(11)))
	see(l.Cleanup(ctx))

	block := client.Override{Policy: policy.Name, Key: oddKey, Capacity: client.Zero, Refill: client.Zero, Every: time.Hour}
	block.ExpiresAt = time.Date(2100, 1, 2, 3, 4, 5, 678_901_999, time.FixedZone("", 3600))
	do(l.Override(ctx, block))
	do(l.Override(ctx, client.Override{Policy: policy.Name, Key: "b", Capacity: 3}))
	see(l.Acquire(ctx, policy.Name, oddKey))
	for _, opts := range [][]client.CallOption{
		nil, {client.OfPolicy(policy.Name), client.OfKey(oddKey)}, {client.OfKey("none")}, {client.OfPolicy("none")}, {client.MaxRows(1)},
	} {
		see(l.Overrides(ctx, opts...))
	}
	for _, expires := range []time.Time{time.Unix(0, 0), time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC)} {
		do(l.Override(ctx, client.Override{Policy: policy.Name, Key: oddKey, ExpiresAt: expires}))
	}
	for range 2 {
		see(l.RemoveOverride(ctx, policy.Name, oddKey))
	}

	policy.Every, policy.Stepped, policy.Durable, policy.Remember = math.MaxInt64/1000*time.Microsecond, client.Yes, client.Yes, time.Microsecond
	do(l.DefinePolicy(ctx, policy))
	do(l.DefinePolicy(ctx, client.Policy{Name: "quota", Capacity: 1, Period: client.Period{Months: 1}, TimeZone: "Europe/Berlin", Anchor: kit.T0, Shadow: client.Yes}))
	do(l.DefinePolicy(ctx, client.Policy{Name: "slots", Capacity: 3, Lease: time.Hour, Durable: client.No}))
	see(l.Policies(ctx))
	see(l.Reserve(ctx, "quota", oddKey, 0, client.Cost(2)))
	for _, holder := range []string{oddKey, oddKey, "another"} {
		see(l.HoldAs(ctx, "slots", oddKey, holder, client.Cost(2)))
	}
	see(l.Peek(ctx, "slots", oddKey))
	see(l.Renew(ctx, "slots", oddKey, oddKey))
	see(l.Renew(ctx, "slots", oddKey, "another"))
	see(l.Holders(ctx, client.OfPolicy("slots"), client.OfKey(oddKey), client.MaxRows(2)))
	for range 2 {
		see(l.Release(ctx, "slots", oddKey, oddKey))
	}
	for _, name := range []string{policy.Name, "quota", "slots"} {
		do(l.DropPolicy(ctx, name))
	}
	do(l.DropPolicy(ctx, "none"))
	return answers
}

// The same requests of one charge or several, in the same order: one by one, and in a shared call. An idempotency key is used twice,
// so that cached statements are used too.
func TestCombiner_AnswersLikeAPlainLimiterInEachMode(t *testing.T) {
	inEachMode(t, func(t *testing.T, db *kit.TestDB, pool *pgxpool.Pool, fake *client.Limiter) {
		limiter := newCombiner(t, pool, client.CallsInFlight(1))
		for _, l := range []*client.Limiter{fake, client.New(db.Pool)} {
			for _, p := range []client.Policy{
				{Name: "gate", Capacity: 9, Refill: 1, Every: time.Hour}, {Name: oddName, Capacity: 10, Refill: 3, Every: 2 * time.Second},
				{Name: "b", Capacity: 5, Refill: client.Zero}, {Name: "shadow", Capacity: 1, Refill: 1, Every: time.Hour, Shadow: client.Yes},
			} {
				p.Every = max(p.Every, time.Second)
				require.NoError(t, l.DefinePolicy(t.Context(), p))
			}
		}
		charge := func(policy, key string, cost int64) client.Charge {
			return client.Charge{Policy: policy, Key: key, Cost: client.Cost(cost)}
		}
		requests := [][]client.Charge{
			{charge(oddName, oddKey, 3), charge("b", "NULL", 2)},
			{charge("b", "NULL", 2), charge(oddName, oddKey, 3), charge(oddName, oddKey, 4)},
			{charge(oddName, oddKey, 8), charge("shadow", oddKey, 2)},
			{charge(oddName, oddKey, 1), charge("b", "NULL", 4)},
			{charge(oddName, oddKey, 1), charge("b", "NULL", 6)},
			{charge(oddName, oddKey, 0), charge("b", "NULL", 0)},
			{charge(oddName, oddKey, 1), charge("none", "NULL", 1)},
			{charge(oddName, oddKey, 1), charge("b", "", 1)},
			{},
			{charge("shadow", oddKey, 2), charge(oddName, oddKey, 1)},
		}
		singles := []client.Charge{
			charge(oddName, oddKey, 4), charge(oddName, oddKey, 5), charge(oddName, oddKey, 2), charge(oddName, oddKey, 11), charge(oddName, "NULL", 1),
			charge(oddName, oddKey, -1), charge(oddName, "a\xffb", 1), charge(oddName, "a\x00'b", 1), charge("none", oddKey, 1), charge("shadow", oddKey, 3),
		}
		seen := map[string]bool{}
		for i, key := range []string{"", "NULL", "NULL", `"'\`, "a\x00'b"} {
			if i != 2 {
				require.NoError(t, errors.Join(fake.ResetAll(t.Context(), oddName), limiter.ResetAll(t.Context(), oddName)))
			}
			var opts []client.CallOption
			if key != "" {
				opts = append(opts, client.IdempotencyKey(key))
			}
			ask := func(by client.Acquirer, i int) (answer any, err error) {
				if i < len(requests) {
					answer, err = by.AcquireAll(t.Context(), requests[i], opts...)
				} else {
					c := singles[i-len(requests)]
					answer, err = by.Acquire(t.Context(), c.Policy, c.Key, append(opts, c.Cost)...)
				}
				return answer, err
			}
			got, errs := make([]any, len(requests)+len(singles)), make([]error, len(requests)+len(singles))
			combineCalls(t, db.DB, limiter, len(got), func(i int) { got[i], errs[i] = ask(limiter, i) })()
			for i := range got {
				want, err := ask(fake, i)
				text := fmt.Sprintf("%+v %s", want, kit.SQLState(err))
				require.Equal(t, text, fmt.Sprintf("%+v %s", got[i], kit.SQLState(errs[i])), "request %d, idempotency key %q", i, key)
				require.Equal(t, err == nil, errs[i] == nil)
				for _, kind := range []string{"Allowed:true", "Allowed:false", "Replayed:true", "Shadowed:true", "RL001", "RL002", "22023", "22021"} {
					seen[kind] = seen[kind] || strings.Contains(text, kind)
				}
			}
		}
		for kind, met := range seen {
			require.True(t, met, kind)
		}
	})
}
