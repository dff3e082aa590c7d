package httplimit_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

// Where the policies are continuous and nothing is forgotten, a Memory answers as the database does, in each field.
func TestMemory_AnswersAsTheDatabaseDoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		policies := []client.Policy{
			{Name: "api", Capacity: 10, Refill: 3, Every: time.Second},
			{Name: "slow", Capacity: 5, Refill: 7, Every: time.Hour},
			{Name: "fast", Capacity: 9_000_000_000_000, Refill: 9_000_000_000_000, Every: time.Millisecond},
			{Name: "far", Capacity: 200, Refill: 1, Every: 365 * 24 * time.Hour},
			{Name: "budget", Capacity: 50, Refill: client.Zero, Every: time.Second},
			{Name: "closed", Capacity: client.Zero, Refill: 1, Every: time.Second},
			{Name: "shadow", Capacity: 3, Refill: 1, Every: time.Second, Shadow: client.Yes},
		}
		fake, memory := clienttest.New(nil), httplimit.NewMemory(policies...)
		for _, p := range policies {
			require.NoError(t, fake.DefinePolicy(t.Context(), p))
		}
		random := rand.New(rand.NewPCG(1, 2))
		denied, shadowed := 0, 0
		for range 30_000 {
			charges := make([]client.Charge, 1+random.IntN(4))
			for i := range charges {
				p := policies[random.IntN(len(policies))]
				cost := random.Int64N(4)
				if random.IntN(20) == 0 {
					cost = random.Int64N(max(0, p.Capacity) + 2)
				}
				charges[i] = client.Charge{Policy: p.Name, Key: fmt.Sprint(random.IntN(2)), Cost: client.Cost(cost)}
			}
			want := noError(fake.AcquireAll(t.Context(), charges))(t)
			require.Equal(t, want, noError(memory.AcquireAll(t.Context(), charges))(t), "%+v", charges)
			if !want.Allowed {
				denied++
			}
			if want.Shadowed {
				shadowed++
			}

			c := charges[0]
			one := noError(fake.Acquire(t.Context(), c.Policy, c.Key, c.Cost))(t)
			require.Equal(t, one, noError(memory.Acquire(t.Context(), c.Policy, c.Key, c.Cost))(t), "%+v", c)
			time.Sleep(time.Duration(random.IntN(400_000)) * time.Microsecond)
			if random.IntN(1000) == 0 {
				time.Sleep(time.Duration(random.IntN(5)) * 365 * 24 * time.Hour)
			}
		}
		require.Greater(t, denied, 1000)
		require.Greater(t, shadowed, 100)
	})
}

// A bucket that is asked for again and again is not forgotten, however many others there are, and those take no more
// memory than they may.
func TestMemory_ForgetsWhatIsNotAskedFor(t *testing.T) {
	t.Parallel()
	memory := httplimit.NewMemory(client.Policy{Name: "p", Capacity: 1000, Refill: client.Zero})
	for n := range 300_000 {
		noError(memory.Acquire(t.Context(), "p", fmt.Sprint("other ", n)))(t)
		if n%1000 == 0 {
			noError(memory.Acquire(t.Context(), "p", "regular"))(t)
		}
	}
	require.EqualValues(t, 1000-301, noError(memory.Acquire(t.Context(), "p", "regular"))(t).Remaining)
	require.LessOrEqual(t, memory.Buckets(), 100_000)
	require.True(t, noError(memory.Acquire(t.Context(), "p", "drained", client.Cost(1000)))(t).Allowed)
	for n := range 200_000 {
		noError(memory.Acquire(t.Context(), "p", fmt.Sprint("more ", n)))(t)
		if n%1000 == 0 {
			require.False(t, noError(memory.Acquire(t.Context(), "p", "drained"))(t).Allowed, "denials count as asking")
		}
	}
	require.EqualValues(t, 998, noError(memory.Acquire(t.Context(), "p", "more 199999"))(t).Remaining)
	require.EqualValues(t, 999, noError(memory.Acquire(t.Context(), "p", "other 0"))(t).Remaining, "forgotten")
}

// A bucket that is named several times is asked for the sum, also where that is more than a number holds: that is denied for ever,
// and neither fills the bucket nor takes from it.
func TestMemory_TheSumOfCostsDoesNotOverflow(t *testing.T) {
	t.Parallel()
	policy := client.Policy{Name: "p", Capacity: 10, Refill: client.Zero}
	for _, costs := range [][]int64{
		{math.MaxInt64, 1},
		{math.MaxInt64, math.MaxInt64},
		{math.MaxInt64, math.MaxInt64, 3}, // 1, if it wrapped
		{1 << 62, 1 << 62, 1 << 62, 1 << 62},
	} {
		memory := httplimit.NewMemory(policy)
		noError(memory.Acquire(t.Context(), "p", "k", client.Cost(4)))(t)
		charges := make([]client.Charge, len(costs))
		for i, cost := range costs {
			charges[i] = client.Charge{Policy: "p", Key: "k", Cost: client.Cost(cost)}
		}
		whole := noError(memory.AcquireAll(t.Context(), charges))(t)
		require.False(t, whole.Allowed, "%v", costs)
		require.True(t, whole.Never())
		require.EqualValues(t, 6, noError(memory.Acquire(t.Context(), "p", "k", client.Cost(0)))(t).Remaining, "%v", costs)
	}
}
