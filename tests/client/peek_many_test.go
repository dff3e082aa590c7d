package client_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// Each answer of many is that of a peek of its own: of the server, in a transaction, and of the fake.
func TestPeekMany_IsAPeekOfEach(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0)
	fake := clienttest.New(func() time.Time { return kit.T0 })
	var charges []client.Charge
	for _, policy := range []string{"plain", "stepped", "ephemeral", "never", "shadow", "quota", "slots", "none", ""} {
		for _, key := range []string{"used", "debt", "raised", "blocked for a day", "new", "", "a\x00b"} {
			for _, cost := range []int64{0, 1, 7, 11, -1} {
				charges = append(charges, client.Charge{Policy: policy, Key: key, Cost: client.Cost(cost)})
			}
		}
	}
	for name, limiter := range map[string]*client.Limiter{"server": client.New(db.Pool), "fake": fake.Limiter} {
		fillForMany(t, name, limiter)
		requirePeeksOfEach(t, name, limiter, charges)
		require.Empty(t, limiter.PeekMany(t.Context(), nil))
	}
	answers := client.New(db.Pool).PeekMany(t.Context(), []client.Charge{{Policy: "plain", Key: "used"}, {Policy: "plain", Key: "\xff"}})
	require.NoError(t, answers[0].Err)
	require.ErrorIs(t, answers[1].Err, client.ErrInvalidArgument, "text that the server cannot read")
	tx := kit.NoError(db.Pool.Begin(t.Context()))(t)
	requirePeeksOfEach(t, "transaction", client.New(db.Pool).WithTx(tx), charges)
	require.NoError(t, tx.Rollback(t.Context()))
}

// fillForMany defines policies of every kind, with buckets in use.
func fillForMany(t *testing.T, name string, limiter *client.Limiter) {
	for _, p := range []client.Policy{
		{Name: "plain", Capacity: 10, Refill: 3, Every: time.Second}, {Name: "stepped", Capacity: 10, Refill: 3, Every: time.Second, Stepped: client.Yes},
		{Name: "ephemeral", Capacity: 10, Refill: 3, Every: time.Second, Durable: client.No}, {Name: "never", Capacity: 10, Refill: client.Zero, Every: time.Second},
		{Name: "shadow", Capacity: 10, Refill: 3, Every: time.Second, Shadow: client.Yes}, {Name: "quota", Capacity: 10, Period: client.Period{Months: 1}},
		{Name: "slots", Capacity: 10, Lease: time.Minute},
	} {
		require.NoError(t, limiter.DefinePolicy(t.Context(), p), name)
		if p.Name != "slots" {
			require.NoError(t, kit.ErrorOf(limiter.Acquire(t.Context(), p.Name, "used", client.Cost(4))), name)
			require.NoError(t, kit.ErrorOf(limiter.Charge(t.Context(), p.Name, "debt", 33)), name)
		}
	}
	require.NoError(t, limiter.Override(t.Context(), client.Override{Policy: "plain", Key: "raised", Capacity: 20, Refill: 1, Every: time.Hour}))
	require.NoError(t, limiter.Override(t.Context(), client.Override{
		Policy: "plain", Key: "blocked for a day", Capacity: client.Zero, Refill: 1, Every: time.Hour, ExpiresAt: kit.T0.Add(24 * time.Hour),
	}))
}

// Each answer of many is that of a call of its own after the others, which the fake tells: of the server, in a transaction, and of the fake.
func TestAcquireUpToMany_IsAnAcquireUpToOfEach(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0)
	at := func() time.Time { return kit.T0 }
	fake, each := clienttest.New(at).Limiter, clienttest.New(at).Limiter
	var charges []client.Charge
	for _, key := range []string{"used", "debt", "raised", "blocked for a day", "new", "", "a\x00b", "used"} {
		for _, policy := range []string{"plain", "stepped", "ephemeral", "never", "shadow", "quota", "slots", "none", ""} {
			charges = append(charges, client.Charge{Policy: policy, Key: key, Cost: client.Cost(int64(len(charges)*7%23 - 1))})
		}
	}
	server := client.New(db.Pool, client.NoFlush())
	for name, limiter := range map[string]*client.Limiter{"server": server, "fake": fake, "each": each} {
		fillForMany(t, name, limiter)
	}
	tx := kit.NoError(db.Pool.Begin(t.Context()))(t)
	inTransaction := client.New(db.Pool).WithTx(tx).AcquireUpToMany(t.Context(), charges)
	require.NoError(t, tx.Rollback(t.Context()))
	many := map[string][]client.PartialAnswer{"server": server.AcquireUpToMany(t.Context(), charges), "fake": fake.AcquireUpToMany(t.Context(), charges), "transaction": inTransaction}
	refused, taken := 0, int64(0)
	for i, c := range charges {
		want, err := each.AcquireUpTo(t.Context(), c.Policy, c.Key, c.Cost.Tokens())
		for name, answers := range many {
			require.Equal(t, want, client.PartialDecision{Decision: answers[i].Decision, Taken: answers[i].Taken}, "%s: %+v", name, c)
			require.Equal(t, []string{c.Policy, "acquire up to"}, []string{answers[i].Policy, answers[i].Operation})
			switch {
			case err == nil:
				require.NoError(t, answers[i].Err, "%s: %+v", name, c)
			case name == "fake":
				require.EqualError(t, answers[i].Err, err.Error(), "%+v", c)
			default:
				require.Equal(t, errors.Is(err, client.ErrUnknownPolicy), errors.Is(answers[i].Err, client.ErrUnknownPolicy), "%+v", c)
				require.Equal(t, errors.Is(err, client.ErrInvalidArgument), errors.Is(answers[i].Err, client.ErrInvalidArgument), "%+v", c)
			}
		}
		if taken += want.Taken; err != nil {
			refused++
		}
	}
	require.Positive(t, taken)
	require.Less(t, refused, len(charges)*2/3)
	require.Empty(t, server.AcquireUpToMany(t.Context(), nil))
	answers := server.AcquireUpToMany(t.Context(), []client.Charge{{Policy: "plain", Key: "text", Cost: client.Cost(99)}, {Policy: "plain", Key: "\xff"}})
	require.EqualValues(t, 10, answers[0].Taken)
	require.ErrorIs(t, answers[1].Err, client.ErrInvalidArgument, "text that the server cannot read")
}

// A peeker is a Limiter or a Combiner.
type peeker interface {
	Peek(ctx context.Context, policy, key string, opts ...client.CallOption) (client.Decision, error)
	PeekMany(ctx context.Context, charges []client.Charge) []client.Answer
}

func requirePeeksOfEach(t *testing.T, name string, by peeker, charges []client.Charge) {
	answers := by.PeekMany(t.Context(), charges)
	require.Len(t, answers, len(charges))
	refused := 0
	for i, c := range charges {
		if name == "transaction" && (c.Policy == "none" || c.Policy == "" || c.Key == "" || strings.Contains(c.Key, "\x00") || c.Cost == client.Cost(-1)) {
			continue // the error of a peek of its own ends the transaction
		}
		want, err := by.Peek(t.Context(), c.Policy, c.Key, c.Cost)
		require.Equal(t, want, answers[i].Decision, "%s: %+v", name, c)
		if err != nil {
			refused++
			require.EqualError(t, answers[i].Err, err.Error(), "%s: %+v", name, c)
		} else {
			require.NoError(t, answers[i].Err, "%s: %+v", name, c)
		}
		require.Equal(t, c.Policy, answers[i].Policy)
	}
	require.Less(t, refused, len(charges)*2/3)
}
