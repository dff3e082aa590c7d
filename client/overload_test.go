package client_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
)

// A pacedPool is a database whose calls take their time: synctest's, so every figure is exact.
type pacedPool struct {
	gatedPool
	mu             sync.Mutex
	slower         time.Duration // what each call takes more
	thaw           time.Time     // until then no call ends
	underWay, most int
	calls          int
}

const (
	perCall    = 50 * time.Millisecond
	perRequest = 200 * time.Microsecond
	maxBatch   = 256
)

// paceOf is how many requests a second so many calls at a time can answer.
func paceOf(calls int) float64 {
	return float64(calls*maxBatch) / (perCall + maxBatch*perRequest).Seconds()
}

func (db *pacedPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	call := newGatedCall(ctx, sql, args)
	db.mu.Lock()
	db.calls++
	db.underWay++
	db.most = max(db.most, db.underWay)
	takes := perCall + time.Duration(len(call.keys))*perRequest + db.slower
	takes = max(takes, time.Until(db.thaw)+takes)
	db.mu.Unlock()
	defer func() {
		db.mu.Lock()
		db.underWay--
		db.mu.Unlock()
	}()
	select {
	case <-time.After(takes):
		return call.scanner()
	case <-ctx.Done():
		return scanner{ctx.Err()}
	}
}

func (db *pacedPool) set(slower time.Duration, frozen time.Duration) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.slower, db.thaw = slower, time.Now().Add(frozen)
}

// made is how many calls were.
func (db *pacedPool) made() int {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.calls
}

// An outcome is what a caller got, and when.
type outcome struct {
	arrived, answered time.Time
	err               error
}

// A crowd is callers that do not wait for each other.
type crowd struct {
	limiter  client.Acquirer
	within   time.Duration // 0 for no deadline
	key      string        // of all; empty for a key of each
	callers  sync.WaitGroup
	mu       sync.Mutex
	arrivals int
	outcomes []outcome
}

// arrive lets so many callers a second arrive, and returns the time when the first did.
func (c *crowd) arrive(perSecond float64, during time.Duration) time.Time {
	begin := time.Now()
	due := 0.0
	for time.Since(begin) < during {
		for due += perSecond / 1000; due >= 1; due-- {
			c.arrivals++
			key := cmp.Or(c.key, fmt.Sprint("k", c.arrivals))
			c.callers.Go(func() { c.ask(key) })
		}
		time.Sleep(time.Millisecond)
	}
	return begin
}

func (c *crowd) ask(key string) {
	ctx := context.Background()
	if c.within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.within)
		defer cancel()
	}
	o := outcome{arrived: time.Now()}
	_, o.err = c.limiter.Acquire(ctx, "p", key)
	o.answered = time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outcomes = append(c.outcomes, o)
}

// count counts those who arrived between two times, by what they got.
func (c *crowd) count(from, to time.Time) (granted, refused, late int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.outcomes {
		if o.arrived.Before(from) || !o.arrived.Before(to) {
			continue
		}
		switch {
		case o.err == nil:
			granted++
		case errors.Is(o.err, client.ErrOverloaded):
			refused++
		default:
			late++
		}
	}
	return granted, refused, late
}

// At three times what the database can do, it does all that it can, for callers that are still there. The others are told
// before their time is over. When the load falls, nobody is refused for longer than two calls take.
func TestCombiner_UnderOverload(t *testing.T) {
	t.Parallel()
	for _, calls := range []int{1, 2, 4} {
		for _, within := range []time.Duration{300 * time.Millisecond, time.Second} {
			t.Run(fmt.Sprintf("%d calls, within %v", calls, within), func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					db := &pacedPool{}
					limiter := client.NewCombiner(db, client.CallsInFlight(calls))
					defer limiter.Close()
					c := &crowd{limiter: limiter, within: within}
					best := paceOf(calls)

					overload := c.arrive(3*best, 4*time.Second)
					light := c.arrive(best/2, 2*time.Second)
					c.callers.Wait()

					measured := overload.Add(time.Second)
					granted, refused, late := c.count(measured, light)
					rate := float64(granted) / light.Sub(measured).Seconds()
					t.Logf("best %.0f/s, of %.0f/s granted %.0f/s, refused %d, late %d", best, 3*best, rate, refused, late)
					require.Greater(t, rate, 0.9*best)
					require.Less(t, float64(late), 0.01*float64(granted), "refused by nobody, they wait for the end of their time")
					for _, o := range c.outcomes {
						if errors.Is(o.err, client.ErrOverloaded) {
							require.LessOrEqual(t, o.answered.Sub(o.arrived), within)
						}
					}
					fullCalls := 2 * (perCall + maxBatch*perRequest)
					granted, refused, late = c.count(light.Add(fullCalls), light.Add(time.Hour))
					require.Zero(t, refused+late, "of %d, two calls after the load has fallen", granted)
				})
			})
		}
	}
}

// One bucket is in one call at a time, however many there may be.
func TestCombiner_UnderOverloadOfOneKey(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		limiter := client.NewCombiner(&pacedPool{}, client.CallsInFlight(2))
		defer limiter.Close()
		c := &crowd{limiter: limiter, within: time.Second, key: "k1"}
		best := paceOf(1)
		overload := c.arrive(3*best, 4*time.Second)
		light := c.arrive(best/2, time.Second)
		c.callers.Wait()
		measured := overload.Add(time.Second)
		granted, refused, late := c.count(measured, light)
		rate := float64(granted) / light.Sub(measured).Seconds()
		t.Logf("best %.0f/s, of %.0f/s granted %.0f/s, refused %d, late %d", best, 3*best, rate, refused, late)
		require.Greater(t, rate, 0.9*best)
		require.Less(t, float64(late), 0.01*float64(granted))
	})
}

// While the database answers nothing, callers are refused at once, few calls are made, and when it is back nothing is made up for.
func TestCombiner_AFrozenDatabaseIsNoticed(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := &pacedPool{}
		limiter := client.NewCombiner(db)
		defer limiter.Close()
		const within = time.Second
		c := &crowd{limiter: limiter, within: within}
		load := paceOf(2) / 2
		c.arrive(load, time.Second)

		db.set(0, 10*time.Second)
		before := db.made()
		frozen := c.arrive(load, 10*time.Second)
		during := db.made() - before
		noticed := frozen.Add(4 * within)
		thawed := c.arrive(load, 2*time.Second)
		c.callers.Wait()

		require.Less(t, during, 50, "each waits for its callers' time")
		require.Equal(t, 2, db.most)
		_, refused, late := c.count(noticed, thawed.Add(-within))
		require.Less(t, late, refused/100, "nearly all are told at once")
		for _, o := range c.outcomes {
			if errors.Is(o.err, client.ErrOverloaded) {
				require.LessOrEqual(t, o.answered.Sub(o.arrived), within)
			}
		}
		require.Zero(t, limiter.Waiting())
		granted, refused, late := c.count(thawed.Add(within/2), thawed.Add(time.Hour))
		require.Zero(t, refused+late, "of %d after it is back", granted)
	})
}

// Callers without deadlines are held back by their number alone.
func TestCombiner_TheQueueIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := &pacedPool{}
		limiter := client.NewCombiner(db, client.MaxWaiting(300))
		defer limiter.Close()
		c := &crowd{limiter: limiter}
		db.set(0, 10*time.Second)
		frozen := c.arrive(1000, 2*time.Second)
		require.Equal(t, 300, limiter.Waiting())
		_, refused, _ := c.count(frozen, time.Now())
		require.InDelta(t, 2000-300, refused, 10)

		_, err := limiter.Acquire(t.Context(), "p", "k1")
		var overloaded *client.OverloadedError
		require.ErrorAs(t, err, &overloaded)
		require.Equal(t, client.OverloadedError{Waiting: 300}, *overloaded)
		require.EqualError(t, err, "pgratelimit: acquire: too many requests wait: 300")
		_, err = limiter.AcquireAll(t.Context(), []client.Charge{{Policy: "p", Key: "k1"}})
		require.ErrorIs(t, err, client.ErrOverloaded)

		before := db.made()
		c.callers.Wait()
		require.LessOrEqual(t, db.made()-before, 4, "what waits is sent in full calls")
		granted, _, _ := c.count(frozen, time.Now())
		require.Equal(t, c.arrivals-refused, granted)
	})
}

// However slow the database was: when it is quick again, somebody finds out.
func TestCombiner_ForgetsThatTheDatabaseWasSlow(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := &pacedPool{}
		limiter := client.NewCombiner(db)
		defer limiter.Close()
		db.set(5*time.Second, 0)
		patient := &crowd{limiter: limiter}
		patient.arrive(10, 20*time.Second)
		patient.callers.Wait()

		db.set(0, 0)
		c := &crowd{limiter: limiter, within: time.Second}
		quick := c.arrive(1000, 3*time.Second)
		c.callers.Wait()
		granted, refused, late := c.count(quick.Add(500*time.Millisecond), time.Now())
		require.Zero(t, refused+late, "of %d", granted)
	})
}

// An impatient caller is refused before it waits, and told how long the answer would have taken.
func TestCombiner_RefusesWhatItCannotAnswerInTime(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := &pacedPool{}
		limiter := client.NewCombiner(db, client.CallsInFlight(1))
		defer limiter.Close()
		for range 5 { // fewer say too little
			noError(limiter.Acquire(t.Context(), "p", "k1"))(t)
		}
		underWay := ask(t.Context(), limiter, "k1")

		ctx, cancel := context.WithTimeout(t.Context(), 80*time.Millisecond) // the rest of one call and all of another are 100
		defer cancel()
		begin := time.Now()
		_, err := limiter.Acquire(ctx, "p", "k2")
		require.Zero(t, time.Since(begin))
		var overloaded *client.OverloadedError
		require.ErrorAs(t, err, &overloaded)
		require.Equal(t, client.OverloadedError{Expected: (2*perCall + 2*perRequest) * 5 / 4}, *overloaded)
		require.ErrorContains(t, err, "too many requests wait: 0; the answer would come after the deadline, in 125.5ms or later")

		ctx, cancel = context.WithTimeout(t.Context(), 130*time.Millisecond)
		defer cancel()
		noError(limiter.Acquire(ctx, "p", "k2"))(t)
		requireGranted(t, underWay)

		// A while later nothing is known about the database.
		time.Sleep(6 * time.Second)
		underWay = ask(t.Context(), limiter, "k1")
		ctx, cancel = context.WithTimeout(t.Context(), 80*time.Millisecond)
		defer cancel()
		_, err = limiter.Acquire(ctx, "p", "k2")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		requireGranted(t, underWay)
	})
}

// Calls that were slow for once refuse nobody: neither the first ones, which connect, nor some that stall together.
func TestCombiner_SlowCallsNowAndThenRefuseNobody(t *testing.T) {
	t.Parallel()
	for _, calls := range []int{1, 2, 8} {
		t.Run(fmt.Sprint(calls, " calls"), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				db := &pacedPool{}
				limiter := client.NewCombiner(db, client.CallsInFlight(calls))
				defer limiter.Close()
				c := &crowd{limiter: limiter, within: 2 * time.Second}
				db.set(500*time.Millisecond, 0)
				for range calls { // at a time
					c.callers.Go(func() { c.ask("slow") })
				}
				c.callers.Wait()
				db.set(0, 0)
				c.arrive(paceOf(calls)/2, time.Second)
				c.callers.Wait()
				db.set(500*time.Millisecond, 0)
				c.arrive(1000, 5*time.Millisecond) // one round of calls that stall together
				db.set(0, 0)
				c.arrive(paceOf(calls)/2, time.Second)
				c.callers.Wait()
				_, refused, late := c.count(time.Time{}, time.Now().Add(time.Hour))
				require.Zero(t, refused+late, "of %d", len(c.outcomes))
			})
		})
	}
}

// What a joint request costs is its charges: one that fills a call by itself is one call.
func TestCombiner_LargeRequestsAreNotManyCalls(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := &pacedPool{}
		limiter := client.NewCombiner(db, client.CallsInFlight(1))
		defer limiter.Close()
		for range 5 {
			noError(limiter.Acquire(t.Context(), "p", "k"))(t)
		}
		underWay := ask(t.Context(), limiter, "k")
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		charges := make([]client.Charge, 1000)
		for i := range charges {
			charges[i] = client.Charge{Policy: "p", Key: fmt.Sprint(i)}
		}
		_, err := limiter.AcquireAll(ctx, charges)
		require.NotErrorIs(t, err, client.ErrOverloaded)
		requireGranted(t, underWay)
	})
}

// A program can be tested with it.
func TestCombiner_OverloadOfTheFake(t *testing.T) {
	t.Parallel()
	fake := clienttest.New(nil)
	fake.FailNext(&client.OverloadedError{Waiting: 7}, io.EOF)
	_, err := fake.Acquire(t.Context(), "p", "k")
	require.ErrorIs(t, err, client.ErrOverloaded)
	_, err = fake.Acquire(t.Context(), "p", "k")
	require.NotErrorIs(t, err, client.ErrOverloaded)
}

// A call that its caller has given up is expected to have lasted as long again.
func TestCombiner_ACallThatWasGivenUpCountsTwice(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		limiter := client.NewCombiner(&pacedPool{}, client.CallsInFlight(1))
		defer limiter.Close()
		const patience = 40 * time.Millisecond // of a call of 50
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			_, err := limiter.Acquire(ctx, "p", "k1")
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		underWay := ask(t.Context(), limiter, "k1")
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err := limiter.Acquire(ctx, "p", "k2")
		var overloaded *client.OverloadedError
		require.ErrorAs(t, err, &overloaded)
		require.Equal(t, client.OverloadedError{Expected: 2 * 2 * patience * 5 / 4}, *overloaded)
		requireGranted(t, underWay)
	})
}

// Who is refused after a while in the queue is told how long a call takes.
func TestCombiner_TellsWhoIsRefusedLateHowLongACallTakes(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := &pacedPool{}
		limiter := client.NewCombiner(db, client.CallsInFlight(1))
		defer limiter.Close()
		for range 5 {
			noError(limiter.Acquire(t.Context(), "p", "k1"))(t)
		}
		db.set(100*time.Millisecond, 0)
		underWay := ask(t.Context(), limiter, "k1")
		patient := ask(t.Context(), limiter, "k2")
		ctx, cancel := context.WithTimeout(t.Context(), 180*time.Millisecond) // when the call ends, 30 are left
		defer cancel()
		_, err := limiter.Acquire(ctx, "p", "k3")
		var overloaded *client.OverloadedError
		require.ErrorAs(t, err, &overloaded)
		require.Equal(t, client.OverloadedError{Expected: perCall + perRequest}, *overloaded)
		requireGranted(t, underWay)
		requireGranted(t, patient)
	})
}

// Whose ctx has ended gets its error, also from a queue that is full.
func TestCombiner_AFullQueueRefusesNobodyWhoseContextHasEnded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		limiter := client.NewCombiner(&pacedPool{}, client.CallsInFlight(1), client.MaxWaiting(1))
		defer limiter.Close()
		underWay := ask(t.Context(), limiter, "k1")
		waiting := ask(t.Context(), limiter, "k2")
		ctx, cancel := context.WithCancel(t.Context())
		_, err := limiter.Acquire(ctx, "p", "k3")
		require.ErrorIs(t, err, client.ErrOverloaded)
		cancel()
		_, err = limiter.Acquire(ctx, "p", "k3")
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, client.ErrOverloaded)
		requireGranted(t, underWay)
		requireGranted(t, waiting)
	})
}
