package clienttest

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// The same requests, in the same order: one by one, and many in a call.
func TestCombiner_AnswersLikeALimiter(t *testing.T) {
	t.Parallel()
	for _, keyed := range []bool{false, true} {
		for _, joint := range []bool{false, true} {
			t.Run(fmt.Sprintf("keyed=%v/joint=%v", keyed, joint), func(t *testing.T) {
				inBubble(t, func(t *testing.T) { compare(t, keyed, joint, false) })
			})
		}
		t.Run(fmt.Sprintf("keyed=%v/many", keyed), func(t *testing.T) {
			inBubble(t, func(t *testing.T) { compare(t, keyed, false, true) })
		})
	}
}

func compare(t *testing.T, keyed, joint, many bool) {
	ctx := t.Context()
	now := func() time.Time { return time.Unix(0, 0) }
	plain, other := New(now), New(now)
	for _, fake := range []*Fake{plain, other} {
		for _, p := range []client.Policy{
			{Name: "p", Capacity: 20, Refill: 1, Every: time.Second},
			{Name: "budget", Capacity: 6, Refill: client.Zero, Every: time.Second},
			{Name: "shadow", Capacity: 5, Refill: 1, Every: time.Second, Shadow: client.Yes},
		} {
			require.NoError(t, fake.DefinePolicy(ctx, p))
		}
	}
	gate := make(chan struct{})
	db := &distant{database: other.db, calls: map[string]int{}, before: func(string, []any) { <-gate }}
	combiner := client.NewCombiner(db, client.CallsInFlight(1))

	type answer struct {
		client.JointDecision
		err error
	}
	random := rand.New(rand.NewPCG(1, 1))
	ask := func(by client.Acquirer, charges []client.Charge, once client.CallOption) (a answer) {
		switch {
		case joint && keyed:
			a.JointDecision, a.err = by.AcquireAll(ctx, charges, once)
		case joint:
			a.JointDecision, a.err = by.AcquireAll(ctx, charges)
		case keyed:
			a.Decision, a.err = by.Acquire(ctx, charges[0].Policy, charges[0].Key, charges[0].Cost, once)
		default:
			a.Decision, a.err = by.Acquire(ctx, charges[0].Policy, charges[0].Key, charges[0].Cost)
		}
		return a
	}
	const requests = 400
	var want, got [requests]answer
	var charges []client.Charge
	var once client.CallOption
	var name string
	var all []client.Request
	for n := range requests {
		isNew := n == 0 || random.IntN(2) == 0 // or the last one again
		if isNew {
			name = fmt.Sprint(random.IntN(40))
			charges, once = nil, client.IdempotencyKey(name)
		}
		for isNew && len(charges) < 3 && (len(charges) == 0 || random.IntN(2) == 0) {
			policies, keys := []string{"p", "p", "budget", "shadow", "none"}, []string{"a", "b", "c", ""}
			charges = append(charges, client.Charge{
				Policy: policies[min(random.IntN(40), random.IntN(5))], Key: keys[min(random.IntN(40), random.IntN(4))],
				Cost: client.Cost(random.Int64N(8) - int64(random.IntN(20)/19)),
			})
		}
		want[n] = ask(plain, charges, once)
		if many {
			all = append(all, client.Request{Policy: charges[0].Policy, Key: charges[0].Key, Cost: charges[0].Cost})
			if keyed {
				all[n].IdempotencyKey = &[]string{name}[0]
			}
			continue
		}
		go func() { got[n] = ask(combiner, charges, once) }()
		synctest.Wait() // until it waits in its turn
	}
	close(gate)
	for n, a := range combiner.AcquireMany(ctx, all) {
		got[n].Decision, got[n].err = a.Decision, a.Err
	}
	combiner.Close()
	synctest.Wait()
	calls := 0
	for _, n := range db.calls {
		calls += n
	}
	require.Less(t, calls, requests/10)
	seen := map[string]int{}
	for n := range requests {
		if want[n].err != nil {
			require.EqualError(t, got[n].err, want[n].err.Error(), n)
			got[n].err, want[n].err = nil, nil
			seen["error"]++
		}
		require.Equal(t, want[n], got[n], n)
		seen[fmt.Sprint(got[n].Allowed, got[n].Never(), got[n].Replayed, got[n].Shadowed)]++
	}
	for _, kind := range []string{"error", "true false false false", "false false false false", "false true false false", "true false false true"} {
		require.NotZero(t, seen[kind], "%s: %v", kind, seen)
	}
	require.Equal(t, keyed, seen["true false true false"] > 0, seen)
}
