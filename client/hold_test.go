package client_test

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
)

var (
	jobs  = client.Policy{Name: "jobs", Capacity: 2, Lease: 30 * time.Second}
	line  = client.Policy{Name: "line", Capacity: 2, Refill: 1, Every: time.Second}
	daily = client.Policy{Name: "daily", Capacity: 2, Period: client.Period{Days: 1}} // which begins at midnight, as the bubble does
)

// newFake is a fake with a policy. Its time is the test's.
func newFake(t *testing.T, p client.Policy, opts ...client.Option) *clienttest.Fake {
	fake := clienttest.New(time.Now, opts...)
	require.NoError(t, fake.DefinePolicy(t.Context(), p))
	return fake
}

// held holds slots that must be there.
func held(t *testing.T, fake *clienttest.Fake, opts ...client.CallOption) *client.Hold {
	h, d, err := fake.Hold(t.Context(), "jobs", "k", opts...)
	require.NoError(t, err)
	require.True(t, d.Allowed)
	return h
}

// operations are the answers since the last look, in words.
func (s *seen) operations() (text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.answers {
		text += a.Operation + " " + string(a.Result()) + "\n"
	}
	s.answers = nil
	return text
}

func TestHold_RenewsAtAThirdOfTheLease(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var s seen
		fake := newFake(t, jobs, client.Observe(s.hooks()))
		type name struct{}
		h, d, err := fake.Hold(context.WithValue(t.Context(), name{}, "value"), "jobs", "k", client.Cost(2))
		require.NoError(t, err)
		require.Equal(t, client.HoldDecision{Allowed: true, HeldFor: 30 * time.Second, Capacity: 2}, d)
		require.Equal(t, "value", h.Context().Value(name{}))
		require.Regexp(t, `^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`, h.Holder())
		time.Sleep(10*time.Second - 1)
		synctest.Wait()
		require.Equal(t, "hold allowed\n", s.operations())
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.Equal(t, "renew allowed\n", s.operations())
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Equal(t, strings.Repeat("renew allowed\n", 360), s.operations())
		require.NoError(t, h.Context().Err())
		require.Equal(t, []client.Holder{{Policy: "jobs", Key: "k", Holder: h.Holder(), Cost: 2, HeldFor: 30 * time.Second}}, noError(fake.Holders(t.Context()))(t))

		require.NoError(t, h.Release(t.Context()))
		require.Equal(t, context.Canceled, context.Cause(h.Context()))
		require.Empty(t, noError(fake.Holders(t.Context()))(t))
		require.NoError(t, h.Release(t.Context()))
		time.Sleep(time.Hour)
		require.Equal(t, "release allowed\n", s.operations(), "once")
	})
}

func TestHold_ADenialHoldsNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var s seen
		fake := newFake(t, jobs, client.Observe(s.hooks()))
		first := held(t, fake, client.Cost(2))
		time.Sleep(time.Second)
		h, d, err := fake.Hold(t.Context(), "jobs", "k")
		require.NoError(t, err)
		require.Equal(t, client.HoldDecision{RetryAfter: 29 * time.Second, Capacity: 2}, d)
		require.Nil(t, h)
		require.NoError(t, h.Release(t.Context()))
		require.Error(t, h.Context().Err())
		require.Empty(t, h.Holder())
		_, d, err = fake.Hold(t.Context(), "jobs", "k", client.Cost(3))
		require.NoError(t, err)
		require.True(t, d.Never())
		require.NoError(t, first.Release(t.Context()))
		require.Equal(t, "hold allowed\nhold denied\nhold denied\nrelease allowed\n", s.operations())
	})
}

// What another session does ends a Hold at its next renewal.
func TestHold_EndsWithWhatHappensToItsSlots(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(context.Context, *clienttest.Fake) error{
		"a reset":       func(ctx context.Context, f *clienttest.Fake) error { return f.Reset(ctx, "jobs", "k") },
		"a policy gone": func(ctx context.Context, f *clienttest.Fake) error { return f.DropPolicy(ctx, "jobs") },
		"tokens in place of slots": func(ctx context.Context, f *clienttest.Fake) error {
			return errors.Join(f.DropPolicy(ctx, "jobs"), f.DefinePolicy(ctx, client.Policy{Name: "jobs", Capacity: 1, Refill: 1, Every: time.Second}))
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			fake := newFake(t, jobs)
			h, begin := held(t, fake), time.Now()
			require.NoError(t, lose(t.Context(), fake))
			<-h.Context().Done()
			require.Equal(t, 10*time.Second, time.Since(begin), name)
			require.ErrorIs(t, context.Cause(h.Context()), client.ErrLeaseLost)
			require.Equal(t, context.Canceled, h.Context().Err())
			if name == "a reset" {
				require.NoError(t, held(t, fake, client.Cost(2)).Release(t.Context()))
			}
			require.Equal(t, name == "tokens in place of slots", h.Release(t.Context()) != nil, "of tokens a release is invalid")
		})
	}
}

// replies are the answers to "hold", "renew" and "release", and to "activity", which is true while a hold goes on. Without one, 1 of 2
// slots is held for 10 seconds.
type replies map[string][]any

// A slotDB gives them in turn; the last one of a function stays.
type slotDB struct {
	fakePool
	by map[string]*fakeDB
}

func newSlotDB(r replies) *slotDB {
	db := &slotDB{by: map[string]*fakeDB{"hold": {answers: []any{heldFor(tenSeconds)}}, "renew": {answers: []any{row{tenSeconds}}}, "release": {answers: []any{row{true}}}, "activity": {answers: []any{row{false}}}}}
	for function, answers := range r {
		db.by[function].answers = answers
	}
	return db
}

var called = regexp.MustCompile(`(?:ratelimit|pg_stat)_(\w+)[( ]`)

func (db *slotDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	db.mu.Lock()
	db.queries = append(db.queries, query{sql, args})
	db.mu.Unlock()
	return db.by[called.FindStringSubmatch(sql)[1]].QueryRow(ctx, sql, args...)
}

// calls are the functions that were called.
func (db *slotDB) calls() (names []string) {
	for _, q := range db.sent() {
		names = append(names, called.FindStringSubmatch(q.sql)[1])
	}
	return names
}

const tenSeconds = int64(10_000_000)

// heldFor is a grant with a lease of so many microseconds.
func heldFor(micros int64) row {
	return row{true, int64(1), int64(0), micros, int64(2), false, false}
}

func (db *slotDB) held(t *testing.T) *client.Hold {
	h, d, err := client.New(db).Hold(t.Context(), "jobs", "k")
	require.NoError(t, err)
	require.True(t, d.Allowed)
	return h
}

// A lease is renewed when a third is over, and if that fails again until its end. It counts from before the call that began it, because
// the server began it somewhere between the call and its answer. It may be longer than a Duration, and shorter than any pause.
func TestHold_LastsUntilTheEndOfTheLeaseThatWasRenewedLast(t *testing.T) {
	t.Parallel()
	full := pgError("53300")
	for name, test := range map[string]struct {
		replies     replies
		lasts       time.Duration // at least, for a Hold that is not lost
		lost        time.Duration
		least, most int // renewals
	}{
		"no answer":                      {replies{"renew": {silent}}, 0, 10 * time.Second, 2, 3},
		"errors":                         {replies{"renew": {full}}, 0, 10 * time.Second, 7, 20},
		"no answer, and errors":          {replies{"renew": {silent, full, full, row{tenSeconds}}}, time.Hour, 0, 1000, 1100},
		"renewed once":                   {replies{"renew": {row{tenSeconds}, full}}, 0, 13_333_333 * time.Microsecond, 7, 20},
		"an answer that is late":         {replies{"hold": {after(4*time.Second, heldFor(tenSeconds))}, "renew": {after(2*time.Second, row{tenSeconds}), silent}}, 0, 14 * time.Second, 3, 10},
		"an answer that is too late":     {replies{"hold": {after(10*time.Second, heldFor(tenSeconds))}}, 0, 10 * time.Second, 0, 0},
		"a lease longer than a Duration": {replies{"hold": {heldFor(math.MaxInt64)}, "renew": {row{int64(math.MaxInt64)}}}, 150 * 365 * 24 * time.Hour, 0, 4, 4},
		"a lease shorter than any pause": {replies{"hold": {heldFor(1)}, "renew": {silent}}, 0, time.Microsecond, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				for range cmp.Or(min(test.lasts, 1), 20) { // pauses between renewals are random
					db, begin := newSlotDB(test.replies), time.Now()
					h := db.held(t)
					if test.lasts > 0 {
						time.Sleep(test.lasts)
						require.NoError(t, h.Context().Err())
					} else {
						<-h.Context().Done()
						require.Equal(t, test.lost, time.Since(begin).Truncate(time.Microsecond), "to the instant")
						require.ErrorIs(t, context.Cause(h.Context()), client.ErrLeaseLost)
						require.Equal(t, slices.Contains(test.replies["renew"], any(full)), errors.Is(context.Cause(h.Context()), full))
					}
					require.NoError(t, h.Release(t.Context()))
					require.GreaterOrEqual(t, len(db.by["renew"].sent()), test.least)
					require.LessOrEqual(t, len(db.by["renew"].sent()), test.most)
				}
			})
		})
	}
}

// A process that did not run while its lease ended finds that out by looking at the context, before any timer has fired.
func TestHold_ALookAtTheContextLooksAtTheClock(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for name, isOver := range map[string]func(context.Context) bool{
			"Err": func(ctx context.Context) bool { return ctx.Err() != nil },
			"Done": func(ctx context.Context) bool {
				select {
				case <-ctx.Done():
					return true
				default:
					return false
				}
			},
		} {
			proceed := make(chan struct{})
			db := newSlotDB(replies{"renew": {func(context.Context) any { <-proceed; return row{nil} }}})
			h := db.held(t)
			child, cancel := context.WithCancelCause(h.Context())
			client.StopTimer(h)
			time.Sleep(10*time.Second - 1)
			require.False(t, isOver(h.Context()), name)
			time.Sleep(time.Nanosecond)
			require.True(t, isOver(h.Context()), name)
			require.Equal(t, client.ErrLeaseLost, context.Cause(child))
			cancel(nil)
			close(proceed)
			require.NoError(t, h.Release(t.Context()))
		}
	})
}

func TestHold_ReleaseWaitsForARenewal(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		proceed := make(chan struct{})
		db := newSlotDB(replies{"renew": {func(context.Context) any { <-proceed; return row{tenSeconds} }}})
		h := db.held(t)
		time.Sleep(4 * time.Second)
		released := make(chan error, 2)
		for range cap(released) {
			go func() { released <- h.Release(context.Background()) }()
		}
		synctest.Wait()
		require.Error(t, h.Context().Err(), "the work ends at once")
		require.Equal(t, []string{"hold", "renew"}, db.calls())
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		begin := time.Now()
		require.ErrorIs(t, h.Release(ended), context.Canceled)
		require.Equal(t, 5*time.Second, time.Since(begin), "it has so long of its own")
		close(proceed)
		for range cap(released) {
			require.NoError(t, <-released)
		}
		require.Error(t, h.Context().Err(), "what is over stays over")
		time.Sleep(time.Hour)
		require.Equal(t, []string{"hold", "renew", "release"}, db.calls())
	})
}

// When ctx ends the program is to stop. What it does not release, nobody renews, and who waits asks at the instant at which the lease
// ends.
func TestHold_EndsWithTheContextOfTheCall(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		fake := newFake(t, jobs)
		ctx, cancel := context.WithCancelCause(t.Context())
		h, _, err := fake.Hold(ctx, "jobs", "k", client.Cost(2))
		require.NoError(t, err)
		time.Sleep(65 * time.Second) // it was renewed five seconds ago
		why := errors.New("shutting down")
		cancel(why)
		require.Equal(t, why, context.Cause(h.Context()))
		begin := time.Now()
		next, _, err := fake.HoldWait(t.Context(), "jobs", "k", client.Cost(2))
		require.NoError(t, err)
		require.Equal(t, 25*time.Second, time.Since(begin).Truncate(time.Microsecond))
		require.NoError(t, next.Release(t.Context()))
		require.NoError(t, h.Release(ctx))
	})
}

// A call that was committed, and whose answer was lost with the connection, holds for a holder that only the call knew. So does a
// release that fails, until the lease ends.
func TestHold_ReleasesWhatMayBeHeld(t *testing.T) {
	t.Parallel()
	refused, lost := refused(t), errors.New("connection reset")
	times := func(n int, answers ...any) []any { return append(slices.Repeat(answers[:1], n), answers[1:]...) }
	for name, test := range map[string]struct {
		replies     replies
		least, most int           // calls of release
		longest     time.Duration // until the last one
	}{
		"lost":                              {replies{"hold": {lost}}, 1, 1, time.Second},
		"lost, and then refused":            {replies{"hold": {lost, refused}}, 1, 1, time.Second},
		"refused":                           {replies{"hold": {refused}}, 0, 0, 0},
		"an error of the server":            {replies{"hold": {pgError("53300")}}, 0, 0, 0},
		"a failover of seven minutes":       {replies{"hold": {lost}, "release": times(60, refused, row{true})}, 61, 61, 10 * time.Minute},
		"not carried out":                   {replies{"hold": {lost}, "release": {row{false}}}, 2, 2, time.Second},
		"a look that fails":                 {replies{"hold": {lost}, "release": {row{false}}, "activity": {refused}}, 2, 2, 2 * time.Second},
		"carried out in ten minutes":        {replies{"hold": {lost}, "release": {row{false}}, "activity": times(25, row{true}, row{false})}, 27, 27, 15 * time.Minute},
		"still not carried out":             {replies{"hold": {lost}, "release": {row{false}}, "activity": {row{true}}}, 120, 300, time.Hour},
		"carried out late":                  {replies{"hold": {lost}, "release": times(3, refused, row{false}, row{true})}, 5, 5, 10 * time.Second},
		"a policy without slots":            {replies{"hold": {lost}, "release": times(3, refused, pgError("22023"))}, 4, 4, 10 * time.Second},
		"a closed pool":                     {replies{"hold": {lost}, "release": {errors.New("closed pool")}}, 2, 2, 2 * time.Second},
		"away for good":                     {replies{"hold": {lost}, "release": {refused}}, 300, 1000, time.Hour},
		"asked for again":                   {replies{"hold": {lost, row{true, int64(1), int64(0), tenSeconds, int64(2), true, false}}}, 1, 1, time.Second},
		"a release fails":                   {replies{"release": times(3, lost, row{true})}, 4, 4, 10 * time.Second},
		"a release fails until the end":     {replies{"release": {lost}}, 10, 40, 10 * time.Second},
		"a release that the caller repeats": {replies{"release": times(3, lost, row{true})}, 4, 4, 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				db, last := newSlotDB(test.replies), time.Time{}
				db.by["release"].before = func() { last = time.Now() }
				h, d, err := client.New(db).Hold(t.Context(), "jobs", "k")
				if h != nil {
					require.True(t, d.Allowed && d.Renewed == (name == "asked for again"))
					isReleased := h.Release(t.Context()) == nil
					require.Equal(t, name == "asked for again", isReleased)
					if name == "a release that the caller repeats" {
						require.NoError(t, h.Release(t.Context()))
					}
				} else {
					require.Error(t, err)
				}
				begin := time.Now()
				time.Sleep(24 * time.Hour)
				synctest.Wait()
				n := len(db.by["release"].sent())
				require.GreaterOrEqual(t, n, test.least)
				require.LessOrEqual(t, n, test.most)
				require.LessOrEqual(t, last.Sub(begin), test.longest)
				for _, function := range []string{"hold", "release"} {
					for _, q := range db.by[function].sent() {
						require.Equal(t, db.sent()[0].args[:3], q.args[:3], "by the same holder")
					}
				}
			})
		})
	}
}

// Ten thousand calls wait to be undone at most, and what is over makes room. No other test may use the places: it is not parallel.
func TestHold_UndoesTenThousandCallsAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lost := errors.New("connection reset")
		for _, test := range []struct {
			holds, want int
		}{{10_100, 10_000}, {10, 10}} {
			db := newSlotDB(replies{"hold": {lost}, "release": {lost}})
			for range test.holds {
				_, _, err := client.New(db).Hold(t.Context(), "jobs", "k")
				require.Error(t, err)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			releases := make(map[any]int) // by holder
			for _, q := range db.by["release"].sent() {
				releases[q.args[2]]++
			}
			maps.DeleteFunc(releases, func(_ any, n int) bool { return n <= 3 }) // the tries of the first release
			require.Len(t, releases, test.want)
			db.by["release"].set(row{true})
			time.Sleep(time.Minute) // until nothing is tried any more
		}
	})
}

func TestHold_UnderAPolicyThatWatches(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var s seen
		fake := newFake(t, jobs, client.Observe(s.hooks()))
		require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "jobs", Shadow: client.Yes}))
		h, d, err := fake.Hold(t.Context(), "jobs", "k", client.Cost(3))
		require.NoError(t, err)
		require.True(t, d.Allowed && d.Shadowed)
		require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "jobs", Shadow: client.No}))
		time.Sleep(time.Hour)
		require.NoError(t, h.Context().Err(), "it ends no job")
		require.NoError(t, h.Release(t.Context()))
		require.Error(t, h.Context().Err())
		require.Equal(t, "hold shadowed\n", s.operations())
	})
}

func TestHold_Refusals(t *testing.T) {
	t.Parallel()
	ctx, db := t.Context(), &fakePool{fakeDB{answers: []any{errors.New("not to be asked")}}}
	for name, limiter := range map[string]*client.Limiter{
		"WithTx": client.New(db).WithTx(struct{ pgx.Tx }{}), "a transaction": client.New(struct{ pgx.Tx }{}), "a connection": client.New(&pgx.Conn{}),
	} {
		_, _, hold := limiter.Hold(ctx, "jobs", "k")
		_, _, holdWait := limiter.HoldWait(ctx, "jobs", "k")
		for _, err := range []error{hold, holdWait} {
			require.ErrorIs(t, err, client.ErrInvalidArgument, name)
			require.ErrorContains(t, err, "in a transaction call the SQL function ratelimit_hold", name)
		}
	}
	_, _, err := client.New(db).Hold(ctx, "jobs", "k", client.IdempotencyKey("i"))
	require.ErrorContains(t, err, "IdempotencyKey is no option of Hold, which takes Cost")
	require.Empty(t, db.sent())
}

func TestHoldWait(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var s seen
		fake := newFake(t, jobs, client.Observe(client.Hooks{Waited: s.hooks().Waited}))
		holdWait := func(ctx context.Context, cost int64) (*client.Hold, client.HoldDecision, time.Duration, error) {
			begin := time.Now()
			h, d, err := fake.HoldWait(ctx, "jobs", "k", client.Cost(cost))
			return h, d, time.Since(begin), err
		}
		first, _, slept, err := holdWait(t.Context(), 2)
		require.NoError(t, err)
		require.Zero(t, slept)
		time.AfterFunc(7500*time.Millisecond, func() { require.NoError(t, first.Release(context.Background())) })
		second, d, slept, err := holdWait(t.Context(), 2)
		require.NoError(t, err)
		require.True(t, d.Allowed)
		require.GreaterOrEqual(t, slept, 7500*time.Millisecond)
		require.LessOrEqual(t, slept, 8750*time.Millisecond, "about a second later at the latest")

		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, d, slept, err = holdWait(ctx, 1)
		require.EqualError(t, err, "pgratelimit: hold: context deadline exceeded")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 10*time.Second, slept)
		require.False(t, d.Allowed)
		_, d, slept, err = holdWait(t.Context(), 3)
		require.ErrorIs(t, err, client.ErrTooLate)
		require.True(t, d.Never())
		require.Zero(t, slept)
		require.Len(t, s.waits, 3)
		require.Equal(t, wait{"jobs", 10 * time.Second, context.DeadlineExceeded}, s.waits[2])
		require.NoError(t, second.Release(t.Context()))
	})
}

func TestWait_FailsAtOnceWhenTheDeadlineIsTooNear(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		fake := newFake(t, line)
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
		fake := newFake(t, line)
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

func TestWait_SleepsUntilTheTurnOfAQuota(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var slept, lates []time.Duration
		fake := newFake(t, daily, client.Observe(client.Hooks{Waited: func(_ context.Context, _ string, d time.Duration, err error) {
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
		fake := newFake(t, daily)
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
		fake := newFake(t, client.Policy{Name: "yearly", Capacity: 1, Period: client.Period{Days: 300}})
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
		for _, p := range []client.Policy{daily, line} {
			fake := newFake(t, p)
			require.NoError(t, fake.Override(t.Context(), client.Override{Policy: p.Name, Key: "k", Capacity: client.Zero, ExpiresAt: time.Now().Add(time.Minute)}))
			r, err := fake.Wait(t.Context(), p.Name, "k")
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
