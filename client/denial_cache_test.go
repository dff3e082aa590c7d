package client_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// The columns of a denial as the server sends them.
func denied(retryAfter time.Duration) row {
	return row{false, int64(3), retryAfter.Microseconds(), (retryAfter + time.Minute).Microseconds(), int64(10), false, false}
}

var never = row{false, int64(10), nil, int64(0), int64(10), false, false}

// cached returns a limiter with a denial cache, on a pool with these answers.
func cached(answers ...any) (*fakePool, *client.Limiter) {
	db := &fakePool{fakeDB{answers: answers}}
	return db, client.New(db, client.DenialCache())
}

func TestDenialCache_KeepsThePromiseAndNoLonger(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db, limiter := cached(denied(10*time.Second), granted(4))
		db.before = func() { time.Sleep(time.Second) }
		db.after = db.before // a second to ask, and a second to answer
		acquire := func() client.Decision {
			return noError(limiter.Acquire(t.Context(), "p", "k", client.Cost(5)))(t)
		}
		asked := time.Now()
		first := acquire()
		require.Equal(t, 2*time.Second, time.Since(asked))
		require.Equal(t, client.Decision{Remaining: 3, RetryAfter: 10 * time.Second, ResetAfter: 70 * time.Second, Capacity: 10}, first)

		// Whenever the server decided, it decided before it answered: the promise counts from there.
		require.Equal(t, first, acquire())
		time.Sleep(3 * time.Second)
		first.RetryAfter, first.ResetAfter = 7*time.Second, 67*time.Second
		require.Equal(t, first, acquire())
		time.Sleep(time.Nanosecond)
		require.Equal(t, first, acquire(), "whole microseconds, rounded up")

		// And not before it was asked: from there counts what is answered here.
		time.Sleep(time.Until(asked.Add(10*time.Second - 1)))
		require.False(t, acquire().Allowed)
		require.Len(t, db.sent(), 1)
		time.Sleep(time.Nanosecond)
		require.True(t, acquire().Allowed)
		require.Len(t, db.sent(), 2)
	})
}

// A denial is for its bucket, its cost and larger ones, until RetryAfter is over, and for a minute at most: a quota may deny for a month,
// in which another program gives tokens back.
func TestDenialCache_AnswersForItsCostAndLarger(t *testing.T) {
	type request struct {
		after   time.Duration
		key     string // and policy p, unless it names another
		cost    int64
		isAsked bool
	}
	minute, month := []any{denied(time.Minute)}, []any{denied(30 * 24 * time.Hour), granted(4)}
	for name, test := range map[string]struct {
		answers  []any
		requests []request
	}{
		"larger costs": {minute, []request{{0, "k", 5, true}, {0, "k", 5, false}, {0, "k", 6, false}, {0, "k", 10, false}}},
		"what is allowed, an error, or never": {minute, []request{
			{0, "k", 5, true}, {0, "k", 0, true}, {0, "k", 5, false}, {0, "k", -1, true}, {0, "k", 5, false}, {0, "k", 11, true},
		}},
		"smaller costs": {minute, []request{
			{0, "k", 5, true}, {0, "k", 4, true}, {0, "k", 4, false}, {0, "k", 5, false}, {0, "k", 3, true},
			{time.Minute, "k", 7, true}, {0, "k", 7, false}, {0, "k", 6, true},
		}},
		"a grant of less": {[]any{denied(time.Minute), granted(1)}, []request{{0, "k", 5, true}, {0, "k", 3, true}, {0, "k", 5, false}}},
		"a minute":        {month, []request{{0, "k", 5, true}, {time.Minute - 1, "k", 5, false}, {1, "k", 5, true}}},
		"each bucket": {minute, []request{
			{0, "k", 1, true}, {0, "l", 1, true}, {0, "q/k", 1, true}, {0, "pk/", 1, true}, {0, "/pk", 1, true},
			{0, "k", 1, false}, {0, "l", 1, false}, {0, "q/k", 1, false}, {0, "pk/", 1, false}, {0, "/pk", 1, false},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				db, limiter := cached(test.answers...)
				for i, r := range test.requests {
					time.Sleep(r.after)
					policy, key, isOther := strings.Cut(r.key, "/")
					if !isOther {
						policy, key = "p", r.key
					}
					before := len(db.sent())
					noError(limiter.Acquire(t.Context(), policy, key, client.Cost(r.cost)))(t)
					require.Equal(t, r.isAsked, len(db.sent()) > before, "request %d", i)
				}
			})
		})
	}
}

func TestDenialCache_RemembersDenialsOnly(t *testing.T) {
	t.Parallel()
	acquire := func(ctx context.Context, l *client.Limiter) error { return errOf(l.Acquire(ctx, "p", "k")) }
	for name, test := range map[string]struct {
		answer any
		call   func(context.Context, *client.Limiter) error
	}{
		"a grant":  {granted(1), acquire},
		"an error": {pgError("RL001"), acquire},
		"never":    {never, acquire},
		"a peek":   {denied(time.Minute), func(ctx context.Context, l *client.Limiter) error { return errOf(l.Peek(ctx, "p", "k")) }},
		"a refund": {denied(time.Minute), func(ctx context.Context, l *client.Limiter) error { return errOf(l.Refund(ctx, "p", "k", 0)) }},
		"a request with an idempotency key": {denied(time.Minute), func(ctx context.Context, l *client.Limiter) error {
			return errOf(l.Acquire(ctx, "p", "k", client.IdempotencyKey("i")))
		}},
	} {
		db, limiter := cached(test.answer)
		for range 2 {
			require.Equal(t, name == "an error", test.call(t.Context(), limiter) != nil, name)
		}
		_, _ = limiter.Acquire(t.Context(), "p", "k")
		_ = test.call(t.Context(), limiter)
		require.Len(t, db.sent(), 4, "%s: nor is it answered from memory", name)
	}
}

// givesBack are calls that give tokens back. They are believed even when their own answer was lost.
var givesBack = map[string]func(context.Context, *client.Limiter) error{
	"refund": func(ctx context.Context, l *client.Limiter) error { return errOf(l.Refund(ctx, "p", "k", 1)) },
	"reset":  func(ctx context.Context, l *client.Limiter) error { return l.Reset(ctx, "p", "k") },
	"define policy": func(ctx context.Context, l *client.Limiter) error {
		return l.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 1, Refill: 1, Every: time.Second})
	},
	"override": func(ctx context.Context, l *client.Limiter) error {
		return l.Override(ctx, client.Override{Policy: "p", Key: "k", Capacity: 100})
	},
	"remove override": func(ctx context.Context, l *client.Limiter) error { return errOf(l.RemoveOverride(ctx, "p", "k")) },
	"drop policy":     func(ctx context.Context, l *client.Limiter) error { return l.DropPolicy(ctx, "p") },
}

// A denial that was decided before tokens came back may arrive while they do, or after.
func TestDenialCache_IsNotOvertaken(t *testing.T) {
	t.Parallel()
	for name, giveBack := range givesBack {
		for _, askedFirst := range []bool{true, false} {
			for _, answeredFirst := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/asked first=%v/answered first=%v", name, askedFirst, answeredFirst), func(t *testing.T) {
					inBubble(t, func(t *testing.T) {
						db := &gatedPool{}
						limiter := client.New(db, client.DenialCache())
						var asked <-chan answer
						gaveBack := make(chan error, 1)
						for _, asks := range []bool{askedFirst, !askedFirst} {
							if asks {
								asked = ask(t.Context(), limiter, "k")
							} else {
								go func() { gaveBack <- giveBack(t.Context(), limiter) }()
								synctest.Wait()
							}
						}
						calls := db.underWay()
						require.Len(t, calls, 2)
						if !askedFirst {
							slices.Reverse(calls)
						}
						for _, answered := range []bool{answeredFirst, !answeredFirst} {
							if answered {
								calls[0].deny(time.Hour)
								require.False(t, (<-asked).Allowed)
							} else {
								calls[1].answer <- errors.New("connection lost")
								require.Error(t, <-gaveBack)
							}
						}

						asked = ask(t.Context(), limiter, "k")
						db.only(t).grant()
						requireGranted(t, asked)
					})
				})
			}
		}
	}
}
