package client_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
)

// newLine is a fake with 2 tokens and one each second. Its time is the test's.
func newLine(t *testing.T) *clienttest.Fake {
	fake := clienttest.New(time.Now)
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "line", Capacity: 2, Refill: 1, Every: time.Second}))
	return fake
}

func TestWait_SleepsAsLongAsTheReservationSays(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		fake := newLine(t)
		start := time.Now()
		for _, want := range []time.Duration{0, 0, time.Second, 2 * time.Second} {
			noError(fake.Wait(t.Context(), "line", "k"))(t)
			require.Equal(t, want, time.Since(start))
		}
		r := noError(fake.Wait(t.Context(), "line", "k", client.Cost(2)))(t)
		require.Equal(t, 4*time.Second, time.Since(start))
		require.Equal(t, 2*time.Second, r.Wait)
	})
}

func TestWait_FailsAtOnceWhenTheDeadlineIsTooNear(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		fake := newLine(t)
		require.NoError(t, fake.SetLevel("line", "k", 0))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second-time.Microsecond)
		defer cancel()
		r, err := fake.Wait(ctx, "line", "k")
		require.ErrorIs(t, err, client.ErrTooLate)
		require.EqualError(t, err, "pgratelimit: wait: the tokens would come too late")
		require.Equal(t, time.Second, r.Wait)
		r, err = fake.Wait(t.Context(), "line", "k", client.Cost(3))
		require.ErrorIs(t, err, client.ErrTooLate)
		require.True(t, r.Never())
		require.Zero(t, noError(fake.Peek(t.Context(), "line", "k"))(t).Remaining, "nothing was taken")
		cancel()
		require.ErrorIs(t, errOf(fake.Wait(ctx, "line", "k")), context.Canceled)
	})
}

func TestWait_GivesBackWhenItsContextEnds(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		fake := newLine(t)
		require.NoError(t, fake.SetLevel("line", "k", 0))
		ctx, cancel := context.WithCancel(t.Context())
		next := make(chan time.Duration)
		start := time.Now()
		go func() {
			time.Sleep(time.Millisecond)
			noError(fake.Wait(context.Background(), "line", "k"))(t)
			next <- time.Since(start)
		}()
		time.AfterFunc(500*time.Millisecond, cancel)
		require.ErrorIs(t, errOf(fake.Wait(ctx, "line", "k", client.Cost(2))), context.Canceled)
		require.Equal(t, 500*time.Millisecond, time.Since(start))
		require.EqualValues(t, -1, noError(fake.Peek(t.Context(), "line", "k", client.Cost(0)))(t).Remaining, "only what the next is waiting for")
		require.Equal(t, 3*time.Second, <-next, "which is not served earlier")
	})
}

// newQuota is a fake with 2 tokens a day, which begins at midnight, as the bubble does.
func newQuota(t *testing.T, opts ...client.Option) *clienttest.Fake {
	fake := clienttest.New(time.Now, opts...)
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "daily", Capacity: 2, Period: client.Period{Days: 1}}))
	return fake
}

func TestWait_SleepsUntilTheTurnOfAQuota(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var slept, lates []time.Duration
		fake := newQuota(t, client.Observe(client.Hooks{Waited: func(_ context.Context, _ string, d time.Duration, err error) {
			require.NoError(t, err)
			slept = append(slept, d)
		}}))
		start := time.Now()
		for day, cost := range []int64{2, 1, 2} { // the third finds one token left, and waits for another turn
			r := noError(fake.Wait(t.Context(), "daily", "k", client.Cost(cost)))(t)
			require.True(t, r.Allowed)
			late := time.Since(start) - time.Duration(day)*24*time.Hour
			require.GreaterOrEqual(t, late, time.Duration(0))
			require.LessOrEqual(t, late, time.Duration(day)*time.Second, "of jitter")
			lates = append(lates, late)
		}
		require.NotEqual(t, lates[1], lates[2]-lates[1], "callers who wait for one turn do not ask at one instant")
		require.Len(t, slept, 3)
		require.Zero(t, slept[0])
		require.Equal(t, time.Since(start), slept[1]+slept[2])
	})
}

func TestWait_AtAQuotaKeepsItsDeadline(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		fake := newQuota(t)
		require.NoError(t, fake.SetLevel("daily", "k", 0))
		wait := func(timeout time.Duration, opts ...client.CallOption) (client.Reservation, error) {
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			return fake.Wait(ctx, "daily", "k", opts...)
		}
		start := time.Now()
		r, err := wait(24*time.Hour - time.Microsecond)
		require.ErrorIs(t, err, client.ErrTooLate)
		require.Equal(t, 24*time.Hour, r.Wait)
		require.ErrorIs(t, errOf(wait(48*time.Hour, client.Cost(3))), client.ErrTooLate, "above the capacity")
		require.Zero(t, time.Since(start))
		require.NoError(t, errOf(wait(24*time.Hour+time.Millisecond)), "the jitter ends before the deadline")
		require.NoError(t, fake.SetLevel("daily", "k", 0))

		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Hour, cancel)
		start = time.Now()
		require.ErrorIs(t, errOf(fake.Wait(ctx, "daily", "k")), context.Canceled)
		require.Equal(t, time.Hour, time.Since(start))
		require.Zero(t, noError(fake.Peek(t.Context(), "daily", "k"))(t).Remaining)
	})
}

// Without a deadline a Wait that other callers are always ahead of ends after 365 days of sleep.
func TestWait_AtAQuotaEnds(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		fake := newQuota(t)
		require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "yearly", Capacity: 1, Period: client.Period{Days: 300}}))
		require.NoError(t, fake.Override(t.Context(), client.Override{Policy: "yearly", Key: "k", Anchor: time.Now()}))
		require.NoError(t, fake.SetLevel("yearly", "k", 0))
		start := time.Now()
		time.AfterFunc(300*24*time.Hour, func() { noError(fake.Acquire(context.Background(), "yearly", "k"))(t) })
		r, err := fake.Wait(t.Context(), "yearly", "k")
		require.ErrorIs(t, err, client.ErrTooLate)
		require.Greater(t, r.Wait, 65*24*time.Hour)
		require.InDelta(t, 300*24*time.Hour, time.Since(start), float64(time.Second))
	})
}

// A block is no turn, so Wait fails at once.
func TestWait_DoesNotWaitForTheEndOfABlock(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		fake := newQuota(t)
		for policy, fake := range map[string]*clienttest.Fake{"daily": fake, "line": newLine(t)} {
			require.NoError(t, fake.Override(t.Context(), client.Override{Policy: policy, Key: "k", Capacity: client.Zero, ExpiresAt: time.Now().Add(time.Minute)}))
			r, err := fake.Wait(t.Context(), policy, "k")
			require.ErrorIs(t, err, client.ErrTooLate)
			require.Equal(t, time.Minute, r.Wait)
		}
	})
}

// A call that gets no answer may have reserved, and so is settled. Where there is nothing to give back, the error is that of the call
// alone: nobody asked about a grant.
func TestWait_GivesBackWhatACallWithoutAnAnswerMayHaveTaken(t *testing.T) {
	t.Parallel()
	for _, lost := range []error{errors.New("connection lost"), context.Canceled} {
		ctx, cancel := context.WithCancel(t.Context())
		db := &fakePool{fakeDB{answers: []any{lost, pgError("RL003")}, after: cancel}}
		err := errOf(client.New(db).Wait(ctx, "line", "k"))
		require.EqualError(t, err, "pgratelimit: reserve: "+lost.Error())
		require.ErrorIs(t, err, lost)
		require.NotErrorIs(t, err, client.ErrNoGrant)
		sent := db.sent()
		require.Len(t, sent, 2)
		require.Contains(t, sent[0].sql, "ratelimit_reserve")
		require.Contains(t, sent[1].sql, "ratelimit_settle")
		require.Equal(t, sent[0].args[4], sent[1].args[2], "under the same key")
		require.EqualValues(t, 0, sent[1].args[3])
		require.Equal(t, "31536000000000 microseconds", sent[0].args[2])
	}
}
