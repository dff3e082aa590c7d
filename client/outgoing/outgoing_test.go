package outgoing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
)

// A world is an upstream, and the buckets of all processes. Its time is the test's.
type world struct {
	*clienttest.Fake
	t       *testing.T
	start   time.Time
	calls   atomic.Int64  // of AcquireAll
	asking  func()        // at the end of such a call
	lost    error         // of Pause
	answers []http.Header // of the next requests, which get 429
	mu      sync.Mutex
	sent    []string // the paths of requests, and when they were sent
}

// in runs a test in a bubble, with a bucket of 2 requests and one of 10 tokens, which gain one each second.
func in(t *testing.T, test func(*testing.T, *world)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &world{Fake: clienttest.New(time.Now), t: t, start: time.Now(), asking: func() {}}
		for name, capacity := range map[string]int64{"requests": 2, "tokens": 10} {
			require.NoError(t, w.DefinePolicy(t.Context(), client.Policy{Name: name, Capacity: capacity, Refill: 1, Every: time.Second}))
		}
		test(t, w)
	})
}

func (w *world) AcquireAll(ctx context.Context, charges []client.Charge, opts ...client.CallOption) (client.JointDecision, error) {
	w.calls.Add(1)
	defer w.asking()
	return w.Fake.AcquireAll(ctx, charges, opts...)
}

func (w *world) Pause(ctx context.Context, policy, key string, d time.Duration) (client.Decision, error) {
	if w.lost != nil {
		return client.Decision{}, w.lost
	}
	return w.Fake.Pause(ctx, policy, key, d)
}

// RoundTrip is the upstream's.
func (w *world) RoundTrip(r *http.Request) (*http.Response, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent = append(w.sent, fmt.Sprint(r.URL.Path, " at ", time.Since(w.start)))
	response := &http.Response{StatusCode: http.StatusOK, Request: r}
	if len(w.answers) > 0 {
		response.StatusCode, response.Header, w.answers = http.StatusTooManyRequests, w.answers[0], w.answers[1:]
	}
	return response, nil
}

// process is what a process sends requests with. Each is charged to requests, /other to another key, and the cost in its context to tokens.
func (w *world) process(opts ...Option) *transport {
	return New(w, func(r *http.Request) []client.Charge {
		charges := []client.Charge{{Policy: "requests", Key: "k"}}
		if r.URL.Path == "/other" {
			charges[0].Key = "other"
		}
		if cost, ok := r.Context().Value(w).(int64); ok {
			charges = append(charges, client.Charge{Policy: "tokens", Key: "k", Cost: client.Cost(cost)})
		}
		return charges
	}, append([]Option{Base(w)}, opts...)...).(*transport)
}

// A body fails a test if it is read.
type body struct {
	*world
	closed bool
}

func (b *body) Read([]byte) (int, error) { b.t.Error("the body is read"); return 0, io.EOF }
func (b *body) Close() error             { b.closed = true; return nil }

// send sends requests one after another, and requires that all succeed.
func (w *world) send(ctx context.Context, p http.RoundTripper, paths ...string) (status int) {
	for _, path := range paths {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://upstream"+path, &body{world: w})
		require.NoError(w.t, err)
		response, err := p.RoundTrip(r) //nolint:bodyclose // there is none
		require.NoError(w.t, err)
		require.Same(w.t, r, response.Request)
		status = response.StatusCode
	}
	return status
}

func (w *world) requireLeft(policy string, tokens int64) {
	synctest.Wait()
	d, err := w.Peek(context.Background(), policy, "k", client.Cost(0))
	require.NoError(w.t, err)
	require.Equal(w.t, tokens, d.Remaining, policy)
}

func TestRoundTrip_SendsWhenTheTokensOfAllBucketsAreThere(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		w.send(t.Context(), w.process(), "/a", "/b", "/c", "/d")
		require.Equal(t, []string{"/a at 0s", "/b at 0s", "/c at 1s", "/d at 2s"}, w.sent)
		require.NoError(t, w.SetLevel("tokens", "k", 4))
		w.send(context.WithValue(t.Context(), w, int64(7)), w.process(), "/e")
		require.Equal(t, "/e at 5s", w.sent[4])
		w.requireLeft("requests", 1)
		w.requireLeft("tokens", 0)
	})
}

func TestRoundTrip_WaitsInLine(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		require.NoError(t, w.SetLevel("requests", "k", 1))
		leaving, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		p := w.process()
		var waiting sync.WaitGroup
		for i, ctx := range []context.Context{t.Context(), t.Context(), t.Context(), leaving, t.Context()} {
			waiting.Go(func() {
				r, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprint("http://upstream/", i), nil)
				require.NoError(t, err)
				_, err = p.RoundTrip(r) //nolint:bodyclose // there is none
				require.Equal(t, ctx == leaving, errors.Is(err, context.DeadlineExceeded))
			})
			synctest.Wait()
		}
		waiting.Wait()
		require.Equal(t, []string{"/0 at 0s", "/1 at 1s", "/2 at 2s", "/4 at 3s"}, w.sent)
		require.EqualValues(t, 4+3, w.calls.Load(), "a denial for each that waited")
		require.Empty(t, p.last)
	})
}

func TestRoundTrip_OneRequestOfALineAsksAtATime(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		require.NoError(t, w.SetLevel("requests", "k", 0))
		p := w.process()
		var waiting sync.WaitGroup
		defer waiting.Wait()
		for _, path := range []string{"/a", "/b"} {
			waiting.Go(func() { w.send(context.WithoutCancel(t.Context()), p, path) })
			synctest.Wait()
		}
		w.send(t.Context(), p, "/other")
		time.Sleep(1500 * time.Millisecond)
		synctest.Wait()
		calls := w.calls.Load()
		waiting.Go(func() { w.send(context.WithoutCancel(t.Context()), p, "/late") })
		synctest.Wait()
		require.Equal(t, calls, w.calls.Load(), "the first has left, and the second waits for its tokens")
		waiting.Wait()
		require.Equal(t, []string{"/other at 0s", "/a at 1s", "/b at 2s", "/late at 3s"}, w.sent, "another bucket has another line")
	})
}

func TestRoundTrip_OneAnswerStopsAllProcesses(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		w.answers = []http.Header{{"Retry-After": {"30"}}}
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), w, int64(4)))
		leaving := w.process(PauseFor(func(response *http.Response) time.Duration { cancel(); return RetryAfter(response) }))
		require.Equal(t, http.StatusTooManyRequests, w.send(ctx, leaving, "/refused"), "there is no retry")
		w.requireLeft("tokens", 6) // the bucket of the first charge is paused
		w.send(t.Context(), w.process(), "/a", "/b")
		require.Equal(t, []string{"/refused at 0s", "/a at 31s", "/b at 32s"}, w.sent, "there is no herd")
	})
}

func TestRoundTrip_BoundsThePause(t *testing.T) {
	for _, invalid := range []time.Duration{0, -time.Second} {
		require.PanicsWithValue(t, fmt.Sprintf("outgoing: MaxPause(%v): pass a duration above 0; without pauses, give PauseFor a function that returns 0", invalid),
			func() { MaxPause(invalid) })
	}
	in(t, func(t *testing.T, w *world) {
		w.answers = []http.Header{{}, {"Retry-After": {"86400"}}}
		w.send(t.Context(), w.process(MaxPause(5*time.Second)), "/refused", "/again", "/a")
		require.Equal(t, []string{"/refused at 0s", "/again at 0s", "/a at 6s"}, w.sent, "without a field there is no pause")
		w.send(t.Context(), w.process(PauseFor(func(*http.Response) time.Duration { return 1 })), "/b", "/c")
		require.Equal(t, "/c at 8.001s", w.sent[4], "a millisecond is the shortest pause")
		for _, pause := range []time.Duration{math.MinInt64, -1, 0} {
			w.send(t.Context(), w.process(PauseFor(func(*http.Response) time.Duration { return pause })), "/d")
		}
		require.Equal(t, "/d at 11.002s", w.sent[7], "no pause")
		w.answers = []http.Header{{"Retry-After": {"86400"}}}
		w.send(t.Context(), w.process(), "/refused", "/e")
		require.Equal(t, "/e at 1h0m13.002s", w.sent[9], "an hour is the longest pause by default")
		year := PauseFor(func(*http.Response) time.Duration { return math.MaxInt64 })
		w.send(t.Context(), w.process(MaxPause(math.MaxInt64), year), "/f", "/g")
		require.Equal(t, "/g at 8761h0m15.002s", w.sent[11], "365 days are the longest pause")
	})
}

func TestRoundTrip_ReturnsTheAnswerIfThePauseFails(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		w.answers, w.lost = []http.Header{{"Retry-After": {"3"}}}, errors.New("lost")
		var seen error
		status := w.send(t.Context(), w.process(OnError(func(_ *http.Request, err error) { seen = err })), "/a")
		require.Equal(t, http.StatusTooManyRequests, status)
		require.ErrorIs(t, seen, w.lost)
	})
}

func TestRoundTrip_WithoutChargesMakesNoCall(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		w.answers = []http.Header{{"Retry-After": {"3"}}}
		w.send(t.Context(), New(w, func(*http.Request) []client.Charge { return nil }, Base(w)), "/a")
		require.Zero(t, w.calls.Load())
		w.requireLeft("requests", 2)
	})
}

func TestRoundTrip_FailsUnsentAndTakesNothing(t *testing.T) {
	lost := errors.New("lost")
	for name, test := range map[string]struct {
		cost    int64
		level   float64 // of tokens
		prepare func(*world, context.CancelFunc)
		want    error
		at      time.Duration
	}{
		"a cost above the capacity":     {11, 10, func(*world, context.CancelFunc) {}, client.ErrTooLate, 0},
		"a deadline that is too near":   {10, -11, func(*world, context.CancelFunc) {}, client.ErrTooLate, 0},
		"a context that ended":          {10, 10, func(w *world, cancel context.CancelFunc) { cancel(); w.asking = func() { w.t.Error("a call") } }, context.Canceled, 0},
		"a context that ends in sleep":  {10, 0, func(_ *world, cancel context.CancelFunc) { time.AfterFunc(3*time.Second, cancel) }, context.Canceled, 3 * time.Second},
		"a context that ends in a call": {10, 10, func(w *world, cancel context.CancelFunc) { w.asking = cancel }, context.Canceled, 0},
		"a limiter that fails":          {10, 10, func(w *world, _ context.CancelFunc) { w.FailNext(lost) }, lost, 0},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				ctx, cancel := context.WithCancel(context.WithValue(t.Context(), w, test.cost))
				defer cancel()
				if test.level < 0 {
					ctx, cancel = context.WithTimeout(ctx, 20*time.Second)
					defer cancel()
				}
				require.NoError(t, w.SetLevel("tokens", "k", test.level))
				test.prepare(w, cancel)
				b, p := &body{world: w}, w.process()
				r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://upstream", b)
				require.NoError(t, err)
				_, err = p.RoundTrip(r) //nolint:bodyclose // there is none
				require.ErrorIs(t, err, test.want)
				named := fmt.Sprintf(`a request of %d tokens of the policy "tokens", whose capacity is 10`, test.cost)
				require.Equal(t, errors.Is(test.want, client.ErrTooLate), strings.Contains(err.Error(), named), err)
				require.Equal(t, test.at, time.Since(w.start))
				require.True(t, b.closed)
				require.Empty(t, w.sent)
				w.requireLeft("tokens", int64(test.level+test.at.Seconds()))
				w.requireLeft("requests", 2)
				require.Empty(t, p.last)
			})
		})
	}
}

// Each client reads the same wait in the fields of an answer. The clock is the local one.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../testdata/upstream.json")
	require.NoError(t, err)
	var table struct {
		Clock   time.Time
		Answers []struct {
			Source  string
			Status  int
			Fields  []string
			Seconds float64
		}
	}
	require.NoError(t, json.Unmarshal(text, &table))
	require.Greater(t, len(table.Answers), 100)
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(table.Clock)) // the bubble's
		for _, answer := range table.Answers {
			h := http.Header{}
			for _, field := range answer.Fields {
				name, value, _ := strings.Cut(field, ": ")
				h.Add(name, value)
			}
			got := RetryAfter(&http.Response{StatusCode: answer.Status, Header: h})
			assert.InDelta(t, answer.Seconds, got.Seconds(), 0.001, "%s: %q", answer.Source, answer.Fields)
		}
	})
}
