package clienttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/stretchr/testify/require"
)

// A distant is the fake's database for a Combiner or a Prefetcher. Each call takes a millisecond of synctest's time.
type distant struct {
	*database
	client.Pool // for the methods that are not called
	mu          sync.Mutex
	calls       map[string]int // by function
	silent      atomic.Bool    // each call waits until its context ends
	slow        atomic.Value   // a function that takes 100 ms
	before      func(function string, args []any)
	took        atomic.Value // when the last call began that took tokens for a stock
}

func (p *distant) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	function, takes, began := functionName.FindString(sql), time.Millisecond, time.Now()
	p.mu.Lock()
	p.calls[function]++
	p.mu.Unlock()
	if p.before != nil {
		p.before(function, args)
	}
	if p.slow.Load() == function {
		takes = 100 * time.Millisecond
	}
	if p.silent.Load() {
		<-ctx.Done()
	}
	select {
	case <-time.After(takes):
		answer := p.database.QueryRow(ctx, sql, args...).(row)
		if answer.err == nil && function == "ratelimit_acquire_up_to" {
			p.took.Store(began)
		}
		return answer
	case <-ctx.Done():
		return row{nil, ctx.Err()}
	}
}

// A prefetching is a Prefetcher on a fake, whose policy p has 10,000 tokens and gains 1,000 a second.
type prefetching struct {
	*testing.T
	*client.Prefetcher
	fake *Fake
	pool *distant
}

func newPrefetching(t *testing.T, l client.Prefetch, opts ...client.Option) *prefetching {
	fake := New(nil)
	for _, p := range []client.Policy{
		{Name: "p", Capacity: 10_000, Refill: 1_000, Every: time.Second},
		{Name: "other", Capacity: 10_000, Refill: 1_000, Every: time.Second},
		{Name: "watch", Capacity: 10_000, Refill: 1, Every: 24 * time.Hour, Shadow: client.Yes},
	} {
		require.NoError(t, fake.DefinePolicy(t.Context(), p))
	}
	pool := &distant{database: fake.db, calls: map[string]int{}}
	prefetcher := client.NewPrefetcher(pool, append(opts, l)...)
	t.Cleanup(prefetcher.Close)
	return &prefetching{t, prefetcher, fake, pool}
}

// withPrefetcher runs a parallel test of a prefetching in a bubble.
func withPrefetcher(t *testing.T, prefetch client.Prefetch, test func(*testing.T, *prefetching), opts ...client.Option) {
	inBubble(t, func(t *testing.T) { test(t, newPrefetching(t, prefetch, opts...)) })
}

// made are the calls since it was asked last.
func (l *prefetching) made() map[string]int {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	made := maps.Clone(l.pool.calls)
	clear(l.pool.calls)
	return made
}

// ask asks for tokens now and then, and returns how many requests were granted, and how many of these from a stock.
func (l *prefetching) ask(policy, key string, requests int, apart time.Duration, opts ...client.CallOption) (granted, prefetched int) {
	for range requests {
		d := noError(l.Acquire(l.Context(), policy, key, opts...))(l)
		if d.Allowed {
			granted++
		}
		if d.Estimated {
			require.True(l, d.Allowed, "a denial is the server's")
			prefetched++
		}
		time.Sleep(apart)
	}
	return granted, prefetched
}

// inBubble runs a parallel test in which time passes when all goroutines wait.
func inBubble(t *testing.T, test func(*testing.T)) { t.Parallel(); synctest.Test(t, test) }

// noError returns the value of a call that must not fail.
func noError[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T { require.NoError(t, err); return value }
}

// remaining is what the server has left, besides what is prefetched.
func (l *prefetching) remaining(policy, key string) int64 {
	return noError(l.fake.Peek(l.Context(), policy, key))(l).Remaining
}

// A hot bucket is answered from memory, an ordinary one and other policies are not. Hooks see what callers get, from a stock or not, and
// not what the Prefetcher takes and gives back.
func TestPrefetcher_AnswersForHotBuckets(t *testing.T) {
	var mu sync.Mutex
	var answers []client.Answer
	withPrefetcher(t, client.Prefetch{Policy: "p"}, func(t *testing.T, l *prefetching) {
		granted, hot := l.ask("p", "hot", 1000, time.Millisecond)
		require.Equal(t, 1000, granted)
		require.Greater(t, hot, 980)
		made := l.made()
		require.Less(t, made["ratelimit_acquire"], 20)
		require.InDelta(t, 6, made["ratelimit_acquire_up_to"], 6)

		_, prefetched := l.ask("p", "cold", 100, 60*time.Millisecond)
		require.Zero(t, prefetched)
		_, prefetched = l.ask("other", "hot", 100, time.Millisecond)
		require.Zero(t, prefetched)
		made = l.made()
		require.Zero(t, made["ratelimit_acquire_up_to"])
		require.Positive(t, made["ratelimit_refund"])

		require.Len(t, answers, 1200)
		for i, a := range answers {
			require.Equal(t, map[bool]string{true: "p", false: "other"}[i < 1100], a.Policy)
			require.Equal(t, "acquire allowed", a.Operation+" "+string(a.Result()))
			if a.Decision.Estimated {
				hot--
			}
		}
		require.Zero(t, hot)
	}, client.Observe(client.Hooks{Answered: func(_ context.Context, a client.Answer) {
		mu.Lock()
		defer mu.Unlock()
		answers = append(answers, a)
	}}))
}

// Requests with an idempotency key, of several charges, and of no cost are never answered from a stock.
func TestPrefetcher_LeavesTheRestToTheServer(t *testing.T) {
	withPrefetcher(t, client.Prefetch{Policy: "p"}, func(t *testing.T, l *prefetching) {
		l.ask("p", "hot", 200, time.Millisecond)
		for n := range 10 {
			require.False(t, noError(l.Acquire(t.Context(), "p", "hot", client.IdempotencyKey(fmt.Sprint(n))))(t).Estimated)
			require.False(t, noError(l.AcquireAll(t.Context(), []client.Charge{{Policy: "p", Key: "hot"}}))(t).Estimated)
			for _, cost := range []int64{0, 1200} { // more than a stock has
				require.False(t, noError(l.Acquire(t.Context(), "p", "hot", client.Cost(cost)))(t).Estimated)
			}
			require.True(t, noError(l.Acquire(t.Context(), "p", "hot", client.Cost(10_001)))(t).Never())
			for _, wrong := range []client.CallOption{client.Cost(-1), client.AtLeast(1)} { // the second is of another method
				_, err := l.Acquire(t.Context(), "p", "hot", wrong)
				require.ErrorIs(t, err, client.ErrInvalidArgument)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := l.Acquire(ctx, "p", "hot")
		require.ErrorIs(t, err, context.Canceled)
	})
}

// What nobody asks for is given back after the idle time, and by Close.
func TestPrefetcher_GivesBackWhatIsNotSpent(t *testing.T) {
	t.Parallel()
	for _, closing := range []bool{false, true} {
		t.Run(fmt.Sprint("closing=", closing), func(t *testing.T) {
			withPrefetcher(t, client.Prefetch{Policy: "p", Idle: 400 * time.Millisecond}, func(t *testing.T, l *prefetching) {
				require.NoError(t, l.fake.DefinePolicy(t.Context(), client.Policy{Name: "p", Refill: 1, Every: 24 * time.Hour}))
				granted, prefetched := l.ask("p", "hot", 200, time.Millisecond)
				require.Greater(t, prefetched, 150)
				require.Less(t, l.remaining("p", "hot"), int64(10_000-granted-20), "it holds some")
				if closing {
					l.Close()
				} else {
					time.Sleep(300 * time.Millisecond)
					require.Less(t, l.remaining("p", "hot"), int64(10_000-granted-20))
					time.Sleep(200 * time.Millisecond)
				}
				require.EqualValues(t, 10_000-granted, l.remaining("p", "hot"))
				if closing {
					_, err := l.Acquire(t.Context(), "p", "hot")
					require.ErrorIs(t, err, client.ErrClosed)
				}
			})
		})
	}
}

// The server's denial, with its promise: it holds to the microsecond. With a cache, the stock still comes first.
func TestPrefetcher_DeniesWhenTheServerDoes(t *testing.T) {
	for name, opts := range map[string][]client.Option{"by default": nil, "with a cache": {client.DenialCache()}} {
		t.Run(name, func(t *testing.T) {
			withPrefetcher(t, client.Prefetch{Policy: "p"}, func(t *testing.T, l *prefetching) {
				require.NoError(t, l.fake.DefinePolicy(t.Context(), client.Policy{Name: "p", Capacity: 100, Refill: 10, Every: time.Second}))
				denials, total, prefetched, begin := 0, int64(0), 0, time.Now()
				for time.Since(begin) < 10*time.Second {
					d := noError(l.Acquire(t.Context(), "p", "hot"))(t)
					if d.Estimated {
						prefetched++
					}
					if d.Allowed {
						total++
						continue
					}
					denials++
					require.False(t, d.Estimated)
					require.Positive(t, d.RetryAfter)
					require.LessOrEqual(t, d.RetryAfter, 100*time.Millisecond)
					time.Sleep(5 * time.Millisecond)
				}
				require.Positive(t, prefetched)
				require.Greater(t, denials, 100)
				require.LessOrEqual(t, total, int64(100+10*10))
				require.Greater(t, total, int64(0.97*200)-10)
			}, opts...)
		})
	}
}

// While the database fails, a stock is used for a second after it was last given tokens. The second is exact. What is left of a stock
// by then is granted no more, whenever the stock is looked at next.
func TestPrefetcher_GrantsNothingOnceItsSecondIsOver(t *testing.T) {
	t.Parallel()
	for _, fraction := range []time.Duration{0, 7, 23, 41} { // milliseconds of a tick: so stocks end at different moments of it
		synctest.Test(t, func(t *testing.T) {
			l := newPrefetching(t, client.Prefetch{Policy: "p", Idle: time.Hour})
			l.ask("p", "hot", 1000, time.Millisecond)
			time.Sleep(fraction * time.Millisecond)
			l.fake.FailAll(errors.New("gone"))
			l.made()
			took := l.pool.took.Load().(time.Time)
			var last time.Duration
			for time.Since(took) < 2*time.Second {
				if d, err := l.Acquire(t.Context(), "p", "hot"); err == nil {
					require.True(t, d.Estimated)
					require.Greater(t, d.Remaining, int64(5_000), "as the server said last")
					last = time.Since(took)
				}
				time.Sleep(4 * time.Millisecond)
			}
			require.Less(t, last, time.Second)
			require.Greater(t, last, 990*time.Millisecond, "it had tokens until then")
			require.LessOrEqual(t, l.made()["ratelimit_acquire_up_to"], 1, "nothing is taken until the server has answered somebody")
			l.fake.FailAll(nil)
			_, prefetched := l.ask("p", "hot", 500, time.Millisecond)
			require.Greater(t, prefetched, 400)
		})
	}
}

// Nor does a denial of a DenialCache have it take tokens again: it says nothing of the server.
func TestPrefetcher_ACachedDenialIsNoAnswerOfTheServer(t *testing.T) {
	withPrefetcher(t, client.Prefetch{Policy: "p", Idle: time.Hour}, func(t *testing.T, l *prefetching) {
		l.ask("p", "hot", 1000, time.Millisecond)
		deny := func() {
			require.False(t, noError(l.Acquire(t.Context(), "p", "hot", client.Cost(10_000)))(t).Allowed)
			time.Sleep(time.Millisecond)
		}
		deny()
		l.fake.FailAll(errors.New("gone"))
		for l.made(); l.made()["ratelimit_acquire_up_to"] == 0; {
			l.ask("p", "hot", 1, time.Millisecond)
		}
		for range 100 {
			deny()
		}
		require.Zero(t, l.made()["ratelimit_acquire_up_to"])
		require.True(t, noError(l.Acquire(t.Context(), "p", "hot"))(t).Estimated, "the stock was there all the time")
	}, client.DenialCache())
}

// A policy that others drop, an override and a block take effect within a second.
func TestPrefetcher_NoticesChangesWithinASecond(t *testing.T) {
	t.Parallel()
	type changer interface {
		DropPolicy(context.Context, string) error
		Override(context.Context, client.Override) error
	}
	for name, change := range map[string]func(context.Context, changer) error{
		"dropped": func(ctx context.Context, by changer) error { return by.DropPolicy(ctx, "p") },
		"blocked": func(ctx context.Context, by changer) error {
			return by.Override(ctx, client.Override{Policy: "p", Key: "hot", Capacity: client.Zero})
		},
	} {
		for _, own := range []bool{false, true} {
			t.Run(fmt.Sprint(name, "/own=", own), func(t *testing.T) {
				withPrefetcher(t, client.Prefetch{Policy: "p"}, func(t *testing.T, l *prefetching) {
					l.ask("p", "hot", 1000, time.Millisecond)
					by, within := changer(l.fake), time.Second
					if own {
						by, within = l.Prefetcher, 0
					}
					require.NoError(t, change(t.Context(), by))
					changed := time.Now()
					for time.Since(changed) < 3*time.Second {
						d, err := l.Acquire(t.Context(), "p", "hot")
						if d.Allowed {
							require.LessOrEqual(t, time.Since(changed), within)
						}
						require.True(t, err == nil || errors.Is(err, client.ErrUnknownPolicy), err)
						time.Sleep(time.Millisecond)
					}
				})
			})
		}
	}
}

// Nor does one under load: while it lasts, nothing is taken for a new stock that would be granted after it.
func TestPrefetcher_ResetUnderLoadLeavesNothingBesides(t *testing.T) {
	withPrefetcher(t, client.Prefetch{Policy: "p"}, func(t *testing.T, l *prefetching) {
		require.NoError(t, l.fake.DefinePolicy(t.Context(), client.Policy{Name: "p", Refill: 1, Every: 24 * time.Hour}))
		ctx, stop := context.WithCancel(t.Context())
		var callers sync.WaitGroup
		var granted, prefetched atomic.Int64
		for range 4 {
			callers.Go(func() {
				for ctx.Err() == nil {
					d, err := l.Acquire(t.Context(), "p", "hot")
					if err != nil || !d.Allowed {
						t.Errorf("%+v: %v", d, err)
					}
					granted.Add(1)
					if d.Estimated {
						prefetched.Add(1)
					}
					time.Sleep(time.Millisecond)
				}
			})
		}
		time.Sleep(500 * time.Millisecond)
		require.Greater(t, prefetched.Load(), int64(1000))
		l.pool.slow.Store("ratelimit_reset")
		require.NoError(t, l.Reset(t.Context(), "p", "hot"))
		granted.Store(0)
		prefetched.Store(0)
		time.Sleep(500 * time.Millisecond)
		stop()
		callers.Wait()
		require.Greater(t, prefetched.Load(), int64(1000), "then it is prefetched again")
		l.Close()
		require.InDelta(t, granted.Load(), 10_000-l.remaining("p", "hot"), 8, "but for requests that were under way")
	})
}

// A shadow policy reports a charge as taken in full, also when the bucket had less. The Prefetcher refunds no such tokens.
func TestPrefetcher_GivesBackNothingThatAShadowPolicyDidNotTake(t *testing.T) {
	withPrefetcher(t, client.Prefetch{Policy: "watch"}, func(t *testing.T, l *prefetching) {
		granted, _ := l.ask("watch", "hot", 300, time.Millisecond)
		stock := 10_000 - l.remaining("watch", "hot") - int64(granted)
		require.NoError(t, l.fake.SetLevel("watch", "hot", 3))
		for l.made(); l.made()["ratelimit_acquire_up_to"] == 0; stock-- {
			_, prefetched := l.ask("watch", "hot", 1, time.Millisecond)
			require.Equal(t, 1, prefetched)
		}
		time.Sleep(2 * time.Second)
		require.Equal(t, 3+stock, l.remaining("watch", "hot"))
	})
}

func TestPrefetcher_RefusesAPrefetchThatIsNone(t *testing.T) {
	t.Parallel()
	for _, wrong := range []client.Prefetch{{MaxTokens: -1}, {MaxShare: -0.1}, {MaxShare: 1.1}, {MaxShare: math.NaN()}, {Idle: -1}} {
		require.Panics(t, func() { client.NewPrefetcher(&distant{}, wrong) })
	}
	require.Panics(t, func() { client.NewPrefetcher(&distant{}, client.CallsInFlight(0)) })
	require.PanicsWithValue(t, `client: NewPrefetcher: two Prefetches for policy "p"`, func() {
		client.NewPrefetcher(&distant{}, client.Prefetch{Policy: "p"}, client.Prefetch{Policy: "q"}, client.Prefetch{Policy: "p", MaxShare: 0.2})
	})
}

// Close has its five seconds for all stocks together, however many wait for a database that is silent.
func TestPrefetcher_ClosesInTimeBesideASilentDatabase(t *testing.T) {
	t.Parallel()
	for _, expired := range []bool{false, true} {
		t.Run(fmt.Sprint("expired=", expired), func(t *testing.T) {
			withPrefetcher(t, client.Prefetch{Policy: "p", Idle: time.Hour}, func(t *testing.T, l *prefetching) {
				prefetched := 0
				for key := range 100 {
					_, n := l.ask("p", fmt.Sprint(key), 10, time.Millisecond)
					prefetched += n
				}
				require.Greater(t, prefetched, 200)
				l.pool.silent.Store(true)
				if expired {
					time.Sleep(2 * time.Second)
				}
				begin := time.Now()
				l.Close()
				require.LessOrEqual(t, time.Since(begin), 5*time.Second+100*time.Millisecond)
				for key := range 100 {
					_, err := l.Acquire(t.Context(), "p", fmt.Sprint(key))
					require.ErrorIs(t, err, client.ErrClosed)
				}
			})
		})
	}
}

// What a caller asks of the server lasts no longer than its ctx, whatever is prefetched.
func TestPrefetcher_GivesBackWithinTheContextOfTheCaller(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(context.Context, *prefetching) error{
		"reset":         func(ctx context.Context, l *prefetching) error { return l.Reset(ctx, "p", "hot") },
		"define policy": func(ctx context.Context, l *prefetching) error { return l.DefinePolicy(ctx, client.Policy{Name: "p"}) },
	} {
		t.Run(name, func(t *testing.T) {
			withPrefetcher(t, client.Prefetch{Policy: "p"}, func(t *testing.T, l *prefetching) {
				l.ask("p", "hot", 200, time.Millisecond)
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				ended, end := context.WithCancel(ctx)
				end()
				require.ErrorIs(t, call(ended, l), context.Canceled)
				require.True(t, noError(l.Acquire(t.Context(), "p", "hot"))(t).Estimated, "a call that is over costs no stock")
				l.pool.silent.Store(true)
				begin := time.Now()
				require.ErrorIs(t, call(ctx, l), context.DeadlineExceeded)
				require.Equal(t, 100*time.Millisecond, time.Since(begin))
			})
		})
	}
}

// A grant from a stock allocates nothing. What refills it meanwhile may, once.
func TestPrefetcher_AllocatesNothing(t *testing.T) { // and not in parallel: others do
	synctest.Test(t, func(t *testing.T) {
		l := newPrefetching(t, client.Prefetch{Policy: "p"})
		l.ask("p", "hot", 1000, time.Millisecond)
		prefetched, ctx := 0, t.Context()
		require.Zero(t, testing.AllocsPerRun(100, func() {
			if d, err := l.Acquire(ctx, "p", "hot"); err == nil && d.Estimated {
				prefetched++
			}
		}))
		require.Equal(t, 101, prefetched, "one is to warm up")
	})
}

// A stock that took all that the bucket had, as many as it asked for, gives back what is not spent.
func TestPrefetcher_GivesBackTheLastTokensOfABucket(t *testing.T) {
	withPrefetcher(t, client.Prefetch{Policy: "p"}, func(t *testing.T, l *prefetching) {
		require.NoError(t, l.fake.DefinePolicy(t.Context(), client.Policy{Name: "p", Refill: 1, Every: 24 * time.Hour}))
		var asked atomic.Int64
		l.pool.before = func(function string, args []any) {
			if function == "ratelimit_acquire_up_to" && asked.CompareAndSwap(0, args[2].(int64)) {
				_ = l.fake.SetLevel("p", "hot", float64(asked.Load()))
			}
		}
		for asked.Load() == 0 {
			l.ask("p", "hot", 1, time.Millisecond)
		}
		time.Sleep(5 * time.Millisecond) // until it is answered
		require.Zero(t, l.remaining("p", "hot"))
		_, prefetched := l.ask("p", "hot", 10, 0)
		require.Equal(t, 10, prefetched)
		time.Sleep(2 * time.Second)
		require.Equal(t, asked.Load()-10, l.remaining("p", "hot"))
	})
}

// AcquireMany is answered from stocks, learns of hot buckets, and has the server answer the rest.
func TestPrefetcher_AcquireManyIsGrantedFromStocks(t *testing.T) {
	withPrefetcher(t, client.Prefetch{Policy: "p"}, func(t *testing.T, l *prefetching) {
		list := []client.Request{{Policy: "p", Key: "hot"}, {Policy: "other", Key: "hot"}, {Policy: "p", Key: "hot"}}
		for range 3 {
			for _, a := range l.AcquireMany(t.Context(), list) {
				require.NoError(t, a.Err)
				require.False(t, a.Decision.Estimated)
			}
		}
		time.Sleep(2 * time.Millisecond) // until the stock has tokens
		answers := l.AcquireMany(t.Context(), list)
		for i, isPrefetched := range []bool{true, false, true} {
			require.NoError(t, answers[i].Err)
			require.True(t, answers[i].Decision.Allowed)
			require.Equal(t, isPrefetched, answers[i].Decision.Estimated)
			require.Equal(t, list[i].Policy, answers[i].Policy)
		}
	})
}
