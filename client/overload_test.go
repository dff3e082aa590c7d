package client_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// A pacedPool is a database whose calls take their time: synctest's, so every figure is exact.
type pacedPool struct {
	gatedPool
	thaw time.Time // until then no call ends
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

func (db *pacedPool) pace(call *gatedCall) time.Duration {
	takes := perCall + time.Duration(len(call.keys))*perRequest
	return max(takes, time.Until(db.thaw)+takes)
}

func (db *pacedPool) freeze(d time.Duration) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.thaw = time.Now().Add(d)
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

// paced runs a parallel test, in a bubble, of a combiner on a pacedPool.
func paced(t *testing.T, test func(*testing.T, *pacedPool, *client.Combiner), opts ...client.Option) {
	inBubble(t, func(t *testing.T) {
		db := &pacedPool{}
		db.takes = db.pace
		limiter := client.NewCombiner(db, opts...)
		defer limiter.Close()
		test(t, db, limiter)
	})
}

// requireRefusedInTime requires that no caller is refused after its deadline.
func requireRefusedInTime(t *testing.T, c *crowd) {
	for _, o := range c.outcomes {
		if errors.Is(o.err, client.ErrOverloaded) {
			require.LessOrEqual(t, o.answered.Sub(o.arrived), c.within)
		}
	}
}

// At three times what the database can do, it does all that it can, for callers that are still there. The others are told
// before their time is over. When the load falls, nobody is refused for longer than two calls take.
func TestCombiner_UnderOverload(t *testing.T) {
	t.Parallel()
	const short, long = 300 * time.Millisecond, time.Second
	for _, test := range []struct {
		calls  int
		within time.Duration
		key    string
	}{{1, short, ""}, {1, long, ""}, {2, short, ""}, {2, long, ""}, {4, short, ""}, {4, long, ""}, {2, long, "k1"}} {
		t.Run(fmt.Sprintf("%d calls, within %v, key %q", test.calls, test.within, test.key), func(t *testing.T) {
			paced(t, func(t *testing.T, _ *pacedPool, limiter *client.Combiner) {
				c := &crowd{limiter: limiter, within: test.within, key: test.key}
				best := paceOf(test.calls)
				if test.key != "" { // one bucket is in one call at a time
					best = paceOf(1)
				}
				overload := c.arrive(3*best, 4*time.Second)
				light := c.arrive(best/2, 2*time.Second)
				c.callers.Wait()

				from := overload.Add(time.Second)
				granted, refused, late := c.count(from, light)
				rate := float64(granted) / light.Sub(from).Seconds()
				t.Logf("best %.0f/s, granted %.0f/s, refused %d, late %d", best, rate, refused, late)
				require.Greater(t, rate, 0.9*best)
				require.Less(t, float64(late), 0.01*float64(granted), "refused by nobody, they wait for the end of their time")
				requireRefusedInTime(t, c)
				fullCalls := 2 * (perCall + maxBatch*perRequest)
				granted, refused, late = c.count(light.Add(fullCalls), light.Add(time.Hour))
				require.Zero(t, refused+late, "of %d, two calls after the load has fallen", granted)
			}, client.CallsInFlight(test.calls))
		})
	}
}

// While the database answers nothing, callers are refused at once, few calls are made, and when it is back nothing is made up for.
func TestCombiner_AFrozenDatabaseIsNoticed(t *testing.T) {
	paced(t, func(t *testing.T, db *pacedPool, limiter *client.Combiner) {
		const within = time.Second
		c := &crowd{limiter: limiter, within: within}
		load := paceOf(2) / 2
		c.arrive(load, time.Second)

		db.freeze(10 * time.Second)
		before := db.count()
		frozen := c.arrive(load, 10*time.Second)
		during := db.count() - before
		noticed := frozen.Add(4 * within)
		thawed := c.arrive(load, 2*time.Second)
		c.callers.Wait()

		require.Less(t, during, 50, "each waits for its callers' time")
		require.Equal(t, 2, db.most)
		_, refused, late := c.count(noticed, thawed.Add(-within))
		require.Less(t, late, refused/100, "nearly all are told at once")
		requireRefusedInTime(t, c)
		require.Zero(t, limiter.Waiting())
		granted, refused, late := c.count(thawed.Add(within/2), thawed.Add(time.Hour))
		require.Zero(t, refused+late, "of %d after it is back", granted)
	})
}

// Callers without deadlines are held back by their number alone.
func TestCombiner_TheQueueIsBounded(t *testing.T) {
	paced(t, func(t *testing.T, db *pacedPool, limiter *client.Combiner) {
		c := &crowd{limiter: limiter}
		db.freeze(10 * time.Second)
		frozen := c.arrive(1000, 2*time.Second)
		require.Equal(t, 300, limiter.Waiting())
		_, refused, _ := c.count(frozen, time.Now())
		require.InDelta(t, 2000-300, refused, 10)

		_, err := limiter.Acquire(t.Context(), "p", "k1")
		require.EqualError(t, err, "pgratelimit: acquire: too many requests wait: 300")
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.NotErrorIs(t, errOf(limiter.Acquire(ended, "p", "k1")), client.ErrOverloaded, "it has the error of its ctx")
		require.ErrorIs(t, errOf(limiter.AcquireAll(t.Context(), []client.Charge{{Policy: "p", Key: "k1"}})), client.ErrOverloaded)

		before := db.count()
		c.callers.Wait()
		require.LessOrEqual(t, db.count()-before, 4, "what waits is sent in full calls")
		granted, _, _ := c.count(frozen, time.Now())
		require.Equal(t, c.arrivals-refused, granted)
	}, client.MaxWaiting(300))
}
