package client_test

import (
	"cmp"
	"context"
	"errors"
	"math"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
)

// newJobs is a fake with 2 slots of each key, for leases of 30 seconds. Its time is the test's.
func newJobs(t *testing.T, opts ...client.Option) *clienttest.Fake {
	fake := clienttest.New(time.Now, opts...)
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "jobs", Capacity: 2, Lease: 30 * time.Second}))
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
		fake := newJobs(t, client.Observe(s.hooks()))
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
		fake := newJobs(t, client.Observe(s.hooks()))
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

// Whatever the cause, the context ends, with its reason.
func TestHold_EndsWithItsLease(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		lose  func(context.Context, *clienttest.Fake) error
		after time.Duration
		frees bool // for the next
	}{
		"no answer":     {func(_ context.Context, f *clienttest.Fake) error { f.FailAll(errors.New("no connection")); return nil }, 30 * time.Second, true},
		"a reset":       {func(ctx context.Context, f *clienttest.Fake) error { return f.Reset(ctx, "jobs", "k") }, 10 * time.Second, true},
		"a policy gone": {func(ctx context.Context, f *clienttest.Fake) error { return f.DropPolicy(ctx, "jobs") }, 10 * time.Second, false},
		"tokens in place of slots": {func(ctx context.Context, f *clienttest.Fake) error {
			return errors.Join(f.DropPolicy(ctx, "jobs"), f.DefinePolicy(ctx, client.Policy{Name: "jobs", Capacity: 1, Refill: 1, Every: time.Second}))
		}, 10 * time.Second, false},
		"no answer once": {func(_ context.Context, f *clienttest.Fake) error { f.FailNext(errors.New("no connection")); return nil }, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				fake := newJobs(t)
				h := held(t, fake)
				begin := time.Now()
				require.NoError(t, test.lose(t.Context(), fake))
				if test.after == 0 { // it does not end
					time.Sleep(time.Minute)
					require.NoError(t, h.Context().Err())
					require.NoError(t, h.Release(t.Context()))
					return
				}
				<-h.Context().Done()
				require.Equal(t, test.after, time.Since(begin))
				require.Equal(t, client.ErrLeaseLost, context.Cause(h.Context()))
				require.Equal(t, context.Canceled, h.Context().Err())
				fake.FailAll(nil)
				if test.frees {
					require.NoError(t, held(t, fake, client.Cost(2)).Release(t.Context()))
				}
				if name != "tokens in place of slots" { // of which a release is invalid
					require.NoError(t, h.Release(t.Context()), "there is nothing to release")
				}
			})
		})
	}
}

// A lease may be longer than a Duration, and shorter than any pause.
func TestHold_LeasesOfAnyLength(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := newSlotDB()
		db.hold = func(context.Context) any {
			return row{true, int64(1), int64(0), int64(math.MaxInt64), int64(2), false, false}
		}
		db.renew = func(context.Context) any { return row{int64(math.MaxInt64)} }
		h := db.held(t)
		time.Sleep(150 * 365 * 24 * time.Hour)
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Release(t.Context()))
		require.Equal(t, []string{"hold", "renew", "renew", "renew", "renew", "release"}, db.calls())

		db = newSlotDB()
		db.hold = func(context.Context) any { return row{true, int64(1), int64(0), int64(1), int64(2), false, false} }
		db.renew = silent
		begin := time.Now()
		h = db.held(t)
		<-h.Context().Done()
		require.Equal(t, time.Microsecond, time.Since(begin))
		require.NoError(t, h.Release(t.Context()))
	})
}

// Done is closed at the end of the lease that was renewed last, whenever a renewal that fails would have looked next.
func TestHold_DoneEndsWithTheRenewedLeaseToTheInstant(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for range 20 { // pauses between renewals are random
			db := newSlotDB()
			var renewals atomic.Int64
			db.renew = func(context.Context) any {
				if renewals.Add(1) == 1 {
					return row{tenSeconds}
				}
				return pgError("53300")
			}
			begin := time.Now()
			h := db.held(t)
			<-h.Context().Done()
			require.Equal(t, tenSeconds/3+tenSeconds, time.Since(begin).Microseconds())
			require.NoError(t, h.Release(t.Context()))
		}
	})
}

// A slotDB answers the three calls with functions of the test.
type slotDB struct {
	fakePool
	hold, renew, release func(context.Context) any
}

func (db *slotDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	db.mu.Lock()
	db.queries = append(db.queries, query{sql, args})
	db.mu.Unlock()
	switch {
	case strings.Contains(sql, "ratelimit_hold("):
		return scanner{db.hold(ctx)}
	case strings.Contains(sql, "ratelimit_renew("):
		return scanner{db.renew(ctx)}
	}
	return scanner{db.release(ctx)}
}

var called = regexp.MustCompile(`ratelimit_(\w+)\(`)

// calls are the functions that were called.
func (db *slotDB) calls() (names []string) {
	for _, q := range db.sent() {
		names = append(names, called.FindStringSubmatch(q.sql)[1])
	}
	return names
}

const tenSeconds = int64(10_000_000)

func newSlotDB() *slotDB {
	return &slotDB{
		hold:    func(context.Context) any { return row{true, int64(1), int64(0), tenSeconds, int64(2), false, false} },
		renew:   func(context.Context) any { return row{tenSeconds} },
		release: func(context.Context) any { return row{true} },
	}
}

func (db *slotDB) held(t *testing.T) *client.Hold {
	h, d, err := client.New(db).Hold(t.Context(), "jobs", "k")
	require.NoError(t, err)
	require.True(t, d.Allowed)
	return h
}

func silent(ctx context.Context) any { <-ctx.Done(); return ctx.Err() }

// The server began the lease somewhere between the call and its answer, so it counts from the call.
func TestHold_CountsFromBeforeTheCall(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := newSlotDB()
		grant, renewal := db.hold, db.renew
		db.hold = func(ctx context.Context) any { time.Sleep(4 * time.Second); return grant(ctx) }
		var renewals atomic.Int64
		db.renew = func(ctx context.Context) any {
			if renewals.Add(1) > 1 {
				return silent(ctx)
			}
			time.Sleep(2 * time.Second)
			return renewal(ctx)
		}
		begin := time.Now()
		h := db.held(t)
		<-h.Context().Done()
		require.Equal(t, 4*time.Second+10*time.Second, time.Since(begin), "the renewal was sent at once, because a third was over")
		require.Equal(t, client.ErrLeaseLost, context.Cause(h.Context()))
		require.NoError(t, h.Release(t.Context()))

		db.hold = func(ctx context.Context) any { time.Sleep(10 * time.Second); return grant(ctx) }
		h = db.held(t)
		require.Error(t, h.Context().Err(), "it came too late")
		require.NoError(t, h.Release(t.Context()))
	})
}

// A renewal that hangs leaves time for another.
func TestHold_RenewsAgainUntilTheEnd(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := newSlotDB()
		var tries atomic.Int64
		db.renew = func(ctx context.Context) any {
			switch tries.Add(1) {
			case 1:
				return silent(ctx)
			case 2, 3:
				return pgError("53300")
			}
			return row{tenSeconds}
		}
		h := db.held(t)
		time.Sleep(time.Hour)
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Release(t.Context()))

		tries.Store(-1_000_000)
		db.renew = func(context.Context) any { tries.Add(1); return pgError("53300") }
		h = db.held(t)
		<-h.Context().Done()
		require.Greater(t, tries.Load(), int64(-1_000_000+6))
		require.Less(t, tries.Load(), int64(-1_000_000+20))
		require.NoError(t, h.Release(t.Context()))
	})
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
			"a child": func(ctx context.Context) bool {
				child, cancel := context.WithCancel(ctx)
				defer cancel()
				return child.Err() != nil
			},
		} {
			db := newSlotDB()
			proceed := make(chan struct{})
			db.renew = func(context.Context) any { <-proceed; return row{nil} }
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
		db := newSlotDB()
		proceed := make(chan struct{})
		db.renew = func(context.Context) any { <-proceed; return row{tenSeconds} }
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

func TestHold_ReleaseOutlivesItsContext(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := newSlotDB()
		db.release = silent
		h := db.held(t)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		begin := time.Now()
		require.ErrorIs(t, h.Release(ended), context.Canceled)
		require.Equal(t, 5*time.Second, time.Since(begin))

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begin = time.Now()
		db.release = func(ctx context.Context) any {
			time.Sleep(2 * time.Second)
			require.NoError(t, ctx.Err())
			return row{true}
		}
		require.NoError(t, h.Release(ctx), "one that has failed is repeated")
		require.Equal(t, 2*time.Second, time.Since(begin))
		require.NoError(t, h.Release(ctx))
		require.Equal(t, []string{"hold", "release", "release"}, db.calls())
	})
}

// When ctx ends the program is to stop. What it does not release, nobody renews, and who waits asks at the instant at which the lease
// ends.
func TestHold_EndsWithTheContextOfTheCall(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		fake := newJobs(t)
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

func TestHold_ReleasesWhatACallWithoutAnAnswerMayHold(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := newSlotDB()
		db.hold = silent
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begin := time.Now()
		h, d, err := client.New(db).Hold(ctx, "jobs", "k")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Second, time.Since(begin), "in the background")
		require.Nil(t, h)
		require.Zero(t, d)
		synctest.Wait()
		require.Equal(t, []string{"hold", "release"}, db.calls())
		require.Equal(t, db.sent()[0].args[:3], db.sent()[1].args, "by the same holder")

		_, _, err = client.New(db).Hold(ctx, "jobs", "k")
		require.EqualError(t, err, "pgratelimit: hold: context deadline exceeded")
		_, _, err = client.New(db).HoldWait(ctx, "jobs", "k")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		synctest.Wait()
		require.Len(t, db.calls(), 2, "nothing was sent")
	})
}

// A call that was committed, and whose answer was lost with the connection, holds for a holder that only the call knew.
func TestHold_ReleasesWhatALostCallMayHold(t *testing.T) {
	t.Parallel()
	refused, lost := refused(t), errors.New("connection reset")
	for name, test := range map[string]struct {
		holds    []any // answers to the three tries
		releases []any // answers to the releases
		none     bool  // nothing is released
		least    int   // releases
		most     int
		longest  time.Duration
	}{
		"lost":                        {holds: []any{lost}, releases: []any{row{true}}, least: 1, most: 1},
		"lost, and then refused":      {holds: []any{lost, refused}, releases: []any{row{true}}, least: 1, most: 1},
		"refused":                     {holds: []any{refused}, none: true},
		"an error of the server":      {holds: []any{pgError("53300")}, none: true},
		"a failover of seven minutes": {holds: []any{lost}, releases: slices.Concat(slices.Repeat([]any{refused}, 60), []any{row{true}}), least: 61, most: 61, longest: 10 * time.Minute},
		"not carried out":             {holds: []any{lost}, releases: []any{row{false}}, least: 2, most: 2, longest: time.Second},
		"carried out late":            {holds: []any{lost}, releases: []any{refused, refused, refused, row{false}, row{true}}, least: 5, most: 5},
		"a policy without slots":      {holds: []any{lost}, releases: []any{refused, refused, refused, pgError("22023")}, least: 4, most: 4},
		"a closed pool":               {holds: []any{lost}, releases: []any{errors.New("closed pool")}, least: 3, most: 6},
		"away for good":               {holds: []any{lost}, releases: []any{refused}, least: 300, most: 1000, longest: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				db := newSlotDB()
				holds, releases := fakeDB{answers: test.holds}, fakeDB{answers: test.releases}
				next := func(db *fakeDB) any { return db.QueryRow(t.Context(), "").(scanner).answer }
				db.hold = func(context.Context) any { return next(&holds) }
				var last time.Time
				db.release = func(context.Context) any { last = time.Now(); return next(&releases) }
				_, _, err := client.New(db).Hold(t.Context(), "jobs", "k")
				require.Error(t, err)
				failed := time.Now()
				time.Sleep(24 * time.Hour)
				synctest.Wait()
				n := len(releases.sent())
				if test.none {
					require.Zero(t, n)
					return
				}
				require.GreaterOrEqual(t, n, test.least)
				require.LessOrEqual(t, n, test.most)
				require.LessOrEqual(t, last.Sub(failed), cmp.Or(test.longest, 10*time.Second))
				for _, q := range db.sent() {
					require.Equal(t, db.sent()[0].args[2], q.args[2], "by the same holder")
				}
			})
		})
	}
}

// A thousand calls wait to be undone at most, and what is over makes room. No other test may use the places: it is not parallel.
func TestHold_UndoesAThousandCallsAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, lost := newSlotDB(), errors.New("connection reset")
		var isAway atomic.Bool
		db.hold = func(context.Context) any { return lost }
		db.release = func(context.Context) any {
			if isAway.Load() {
				return lost
			}
			return row{true}
		}
		releases := func(holds int, pause time.Duration) map[any]int { // by holder
			db.mu.Lock()
			db.queries = nil
			db.mu.Unlock()
			for range holds {
				_, _, err := client.New(db).Hold(t.Context(), "jobs", "k")
				require.Error(t, err)
			}
			time.Sleep(pause)
			synctest.Wait()
			calls := make(map[any]int)
			for _, q := range db.sent() {
				if strings.Contains(q.sql, "ratelimit_release(") {
					calls[q.args[2]]++
				}
			}
			return calls
		}
		isAway.Store(true)
		repeated := 0
		for _, n := range releases(1100, 10*time.Minute) {
			if n > 3 { // the tries of the first release
				repeated++
			}
		}
		require.Equal(t, 1000, repeated)
		time.Sleep(2 * time.Hour)
		repeated = 0
		for _, n := range releases(10, time.Minute) {
			if n > 3 {
				repeated++
			}
		}
		require.Equal(t, 10, repeated)
		time.Sleep(2 * time.Hour) // until nothing is tried any more
	})
}

// A release that fails is repeated until the lease ends, and not after a later Release.
func TestHold_RepeatsAReleaseThatFails(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for name, releases := range map[string]struct{ fail, again, most int }{
			"once": {fail: 3, most: 4}, "always": {fail: 1000, most: 40}, "and so does the caller": {fail: 3, again: 1, most: 4},
			"and so does the caller, in vain": {fail: 1000, again: 5, most: 50},
		} {
			db := newSlotDB()
			var calls atomic.Int64
			db.release = func(context.Context) any {
				if calls.Add(1) <= int64(releases.fail) {
					return errors.New("connection reset")
				}
				return row{true}
			}
			h := db.held(t)
			begin := time.Now()
			require.Error(t, h.Release(t.Context()), name)
			for range releases.again {
				require.Equal(t, releases.fail < 10, h.Release(t.Context()) == nil, name)
			}
			for int(calls.Load()) <= min(releases.fail, 10) && time.Since(begin) < time.Minute {
				time.Sleep(time.Millisecond)
			}
			require.Less(t, time.Since(begin), 10*time.Second, name)
			time.Sleep(time.Hour)
			require.GreaterOrEqual(t, int(calls.Load()), min(releases.fail+1, 10), name)
			require.LessOrEqual(t, int(calls.Load()), releases.most, name)
		}
	})
}

// An answer that was lost is asked for again, by the same holder.
func TestHold_IsRepeatedAfterALostConnection(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db := newSlotDB()
		var tries atomic.Int64
		db.hold = func(context.Context) any {
			if tries.Add(1) == 1 {
				return errors.New("connection reset")
			}
			return row{true, int64(1), int64(0), tenSeconds, int64(2), true, false}
		}
		h, d, err := client.New(db).Hold(t.Context(), "jobs", "k")
		require.NoError(t, err)
		require.True(t, d.Allowed && d.Renewed)
		require.Equal(t, db.sent()[0], db.sent()[1])
		require.NoError(t, h.Release(t.Context()))
	})
}

func TestHold_UnderAPolicyThatWatches(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var s seen
		fake := newJobs(t, client.Observe(s.hooks()))
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
	for name, limiter := range map[string]interface {
		Hold(context.Context, string, string, ...client.CallOption) (*client.Hold, client.HoldDecision, error)
		HoldWait(context.Context, string, string, ...client.CallOption) (*client.Hold, client.HoldDecision, error)
	}{
		"WithTx":        client.New(db).WithTx(nil),
		"a transaction": client.New(struct{ pgx.Tx }{}),
		"a connection":  client.New(&pgx.Conn{}),
	} {
		for _, hold := range []func(context.Context, string, string, ...client.CallOption) (*client.Hold, client.HoldDecision, error){limiter.Hold, limiter.HoldWait} {
			_, _, err := hold(ctx, "jobs", "k")
			require.ErrorIs(t, err, client.ErrInvalidArgument, name)
			require.ErrorContains(t, err, "in a transaction call the SQL function ratelimit_hold", name)
		}
	}
	_, _, err := client.New(db).Hold(ctx, "jobs", "k", client.IdempotencyKey("i"))
	require.ErrorContains(t, err, "IdempotencyKey is no option of Hold, which takes Cost")
	require.Empty(t, db.sent())
	require.ErrorContains(t, client.New(db).DefinePolicy(ctx, client.Policy{Name: "p", Lease: 1500}), "lease 1.5µs must be whole microseconds")
	require.ErrorContains(t, client.New(db).Override(ctx, client.Override{Policy: "p", Key: "k", Lease: 1500}), "lease 1.5µs must be whole microseconds")

	fake := newJobs(t)
	for _, cost := range []int64{0, -1} {
		_, _, err = fake.Hold(ctx, "jobs", "k", client.Cost(cost))
		require.ErrorIs(t, err, client.ErrInvalidArgument)
	}
	_, _, err = fake.Hold(ctx, "nobody", "k")
	require.ErrorIs(t, err, client.ErrUnknownPolicy)
}

func TestHoldWait(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var s seen
		fake := newJobs(t, client.Observe(client.Hooks{Waited: s.hooks().Waited}))
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

// A program that names its holder makes each call by itself, and nothing renews for it.
func TestHoldAs_IsOneCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &seen{}
		ctx, fake := t.Context(), newJobs(t, client.Observe(s.hooks()))
		holdAs := func(holder string, opts ...client.CallOption) client.HoldDecision {
			return noError(fake.HoldAs(ctx, "jobs", "k", holder, opts...))(t)
		}
		granted := client.HoldDecision{Allowed: true, HeldFor: 30 * time.Second, Capacity: 2}
		require.Equal(t, granted, holdAs("a", client.Cost(2)))
		time.Sleep(20 * time.Second)
		require.Equal(t, client.HoldDecision{RetryAfter: 10 * time.Second, Capacity: 2}, holdAs("b"))
		granted.Renewed = true
		require.Equal(t, granted, holdAs("a", client.Cost(2)))
		_, err := fake.HoldAs(ctx, "jobs", "k", "a")
		require.ErrorIs(t, err, client.ErrIdempotencyMismatch)
		time.Sleep(20 * time.Second)
		require.Equal(t, 30*time.Second, noError(fake.Renew(ctx, "jobs", "k", "a"))(t))
		require.True(t, noError(fake.Release(ctx, "jobs", "k", "a"))(t))
		require.False(t, noError(fake.Release(ctx, "jobs", "k", "a"))(t))
		require.Zero(t, noError(fake.Renew(ctx, "jobs", "k", "a"))(t), "a renewal takes nothing")
		require.True(t, holdAs("b").Allowed)
		time.Sleep(30 * time.Second)
		require.Zero(t, noError(fake.Renew(ctx, "jobs", "k", "b"))(t), "it was not renewed")
		require.Equal(t, "hold allowed\nhold denied\nhold replayed\nhold error\nrenew allowed\nrelease allowed\nrelease denied\nrenew denied\n"+
			"hold allowed\nrenew denied\n", s.operations())
	})
}
