package httplimit

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
)

// Where nothing is forgotten, a Memory answers as the database does, in each field.
func TestMemory_AnswersAsTheDatabaseDoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		policies := []client.Policy{
			{Name: "api", Capacity: 10, Refill: 3, Every: time.Second},
			{Name: "stepped", Capacity: 5, Refill: 2, Every: time.Second, Stepped: client.Yes},
			{Name: "far", Capacity: 200, Refill: 1, Every: 365 * 24 * time.Hour},
			{Name: "budget", Capacity: 50, Refill: client.Zero},
			{Name: "closed", Capacity: client.Zero, Refill: 1, Every: time.Second},
			{Name: "shadow", Capacity: 3, Refill: 1, Every: time.Second, Shadow: client.Yes},
		}
		fake, memory := clienttest.New(nil), NewMemory(policies...)
		for _, p := range policies {
			p.Every = max(1000, p.Every)
			require.NoError(t, fake.DefinePolicy(t.Context(), p))
		}
		random := rand.New(rand.NewPCG(1, 2))
		for range 2000 {
			charges := make([]client.Charge, 1+random.IntN(4))
			for i := range charges {
				cost := []int64{0, 1, 2, 3, 300, math.MaxInt64}[min(random.IntN(6), random.IntN(6))]
				charges[i] = client.Charge{Policy: policies[random.IntN(len(policies))].Name, Key: fmt.Sprint(random.IntN(2)), Cost: client.Cost(cost)}
			}
			want, err := fake.AcquireAll(t.Context(), charges)
			require.NoError(t, err)
			got, err := memory.AcquireAll(t.Context(), charges)
			require.NoError(t, err)
			require.Equal(t, want, got, "%+v", charges)
			time.Sleep(time.Duration(random.IntN(400_000)) * time.Microsecond)
		}
	})
}

// A bucket that is asked for again and again is not forgotten, however many others there are, and those take no more
// memory than they may.
func TestMemory_ForgetsWhatIsNotAskedFor(t *testing.T) {
	t.Parallel()
	memory := NewMemory(client.Policy{Name: "p", Capacity: 1000, Refill: client.Zero})
	acquire := func(key string, cost int64) client.Decision {
		d, err := memory.Acquire(t.Context(), "p", key, client.Cost(cost))
		require.NoError(t, err)
		return d
	}
	require.True(t, acquire("drained", 1000).Allowed)
	for n := range 120_000 {
		acquire(fmt.Sprint("other ", n), 1)
		if n%1000 == 0 {
			acquire("regular", 1)
			require.False(t, acquire("drained", 1).Allowed, "denials count as asking")
		}
	}
	require.LessOrEqual(t, memory.young.Size()+memory.old.Size(), 100_000)
	require.EqualValues(t, 1000-121, acquire("regular", 1).Remaining)
	require.EqualValues(t, 998, acquire("other 119999", 1).Remaining)
	require.EqualValues(t, 999, acquire("other 0", 1).Remaining, "forgotten")
	_, err := memory.AcquireAll(t.Context(), []client.Charge{{Policy: "p", Key: "k"}}, client.Cost(5))
	require.ErrorIs(t, err, client.ErrInvalidArgument, "nobody is charged less than the program meant")
}
