package httplimit_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/client/internal/failure"
	"github.com/pgratelimit/pgratelimit/client/internal/failure/failuretest"
)

var t0 = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

// A limited handler is one behind the middleware, on the fake.
type limited struct {
	*clienttest.Fake
	now     time.Time
	t       testing.TB
	handler http.Handler
	ran     int             // how often the handler did
	event   httplimit.Event // the last
	calls   int             // that took tokens or slots, or would have
}

// newLimited defines api, and charges what charges says, by default one token of it. It fails closed unless failure says otherwise.
func newLimited(t testing.TB, charges func(*http.Request) []client.Charge, failure httplimit.Failure, opts ...httplimit.Option) *limited {
	l := newFake(t)
	observe := httplimit.Observe(func(_ *http.Request, e httplimit.Event) { l.event = e })
	l.define(api)
	if charges == nil {
		charges = charge(client.Charge{Policy: "api", Key: "k"})
	}
	limit := httplimit.New(l.Fake, charges, failure, append([]httplimit.Option{observe}, opts...)...)
	l.handler = limit(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		l.ran++
		_, _ = io.WriteString(w, "done")
	}))
	return l
}

// newFake has the fake, and no policy and no handler yet. It counts the calls.
func newFake(t testing.TB) *limited {
	l := &limited{now: t0, t: t}
	l.Fake = clienttest.New(func() time.Time { return l.now }, client.Observe(client.Hooks{Answered: func(_ context.Context, a client.Answer) {
		if a.Takes() {
			l.calls++
		}
	}}))
	return l
}

func (l *limited) define(policies ...client.Policy) {
	for _, p := range policies {
		require.NoError(l.t, l.DefinePolicy(context.Background(), p))
	}
}

// An answer is what the client gets.
type answer struct {
	StatusCode int
	Header     http.Header
	Body       string
}

func (l *limited) get(change ...func(*http.Request)) answer {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	for _, change := range change {
		change(r)
	}
	w := httptest.NewRecorder()
	l.handler.ServeHTTP(w, r)
	return answer{w.Code, w.Header(), w.Body.String()}
}

func charge(charges ...client.Charge) func(*http.Request) []client.Charge {
	return func(*http.Request) []client.Charge { return charges }
}

// noError returns the value of a call that must not fail.
func noError[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T { require.NoError(t, err); return value }
}

var api = client.Policy{Name: "api", Capacity: 100, Refill: 10, Every: time.Second}

func TestMiddleware_ADenialIsAProblem(t *testing.T) {
	t.Parallel()
	l := newLimited(t, charge(
		client.Charge{Policy: "api", Key: "k", Cost: client.Cost(60)},
		client.Charge{Policy: "day", Key: "k"},
		client.Charge{Policy: "hour", Key: "k", Cost: client.Cost(6)},
		client.Charge{Policy: "hour", Key: "other", Cost: client.Cost(6)},
	), httplimit.Closed(time.Second), httplimit.Policies(api))
	l.define(client.Policy{Name: "day", Capacity: 1000, Refill: 1000, Every: 24 * time.Hour},
		client.Policy{Name: "hour", Capacity: 10, Refill: 10, Every: time.Hour})
	require.Equal(t, http.StatusOK, l.get().StatusCode)

	response := l.get()
	require.Equal(t, http.StatusTooManyRequests, response.StatusCode)
	require.Equal(t, 1, l.ran)
	require.Equal(t, "720", response.Header.Get("Retry-After"), "2 tokens of 10 an hour")
	require.Equal(t, []string{`"api";q=100;w=10, "day";q=1000, "hour";q=10`}, response.Header["Ratelimit-Policy"])
	require.Equal(t, []string{`"api";r=40;t=1, "day";r=999;t=87, "hour";r=4;t=360`}, response.Header["Ratelimit"])
	require.Equal(t, "application/problem+json", response.Header.Get("Content-Type"))
	require.JSONEq(t, `{"type": "https://iana.org/assignments/http-problem-types#quota-exceeded", "status": 429,
		"title": "Request cannot be satisfied as assigned quota has been exceeded", "violated-policies": ["api", "hour"]}`, response.Body)

	l.now = l.now.Add(720*time.Second - time.Microsecond)
	require.Equal(t, http.StatusTooManyRequests, l.get().StatusCode)
	l.now = l.now.Add(time.Microsecond)
	require.Equal(t, http.StatusOK, l.get().StatusCode, "Retry-After is a promise")
}

// Each kind of field that may be wrong, or may be left out.
func TestFields(t *testing.T) {
	t.Parallel()
	const year = 365 * 24 * time.Hour
	for name, test := range map[string]struct {
		policy        client.Policy
		level         float64
		cost          int64
		override      *client.Override
		policies      string
		limit         string
		notByPolicies bool
		told          time.Duration // Every as Policies has it, if it is another
	}{
		"full":                {policy: api, level: 100, policies: `;q=100;w=10`, limit: `;r=100;t=1`},
		"a slow one":          {policy: client.Policy{Capacity: 3, Refill: 1, Every: time.Hour}, level: 1.5, cost: 1, policies: `;q=3;w=10800`, limit: `;r=0;t=3000`},
		"a window rounded up": {policy: client.Policy{Capacity: 10, Refill: 3, Every: time.Second}, level: 10, policies: `;q=10;w=4`, limit: `;r=10;t=1`},
		"a window below 1 s":  {policy: client.Policy{Capacity: 10, Refill: 1000, Every: time.Second}, level: 10, policies: `;q=10;w=1`, limit: `;r=10;t=1`},
		"stepped":             {policy: client.Policy{Capacity: 10, Refill: 4, Every: time.Minute, Stepped: client.Yes}, level: 10, policies: `;q=10;w=180`, limit: `;r=10;t=1`},
		"never refilled":      {policy: client.Policy{Capacity: 10, Refill: client.Zero, Every: time.Minute}, level: 10, cost: 4, policies: `;q=10`, limit: `;r=6`},
		"an override":         {policy: api, level: 20, override: &client.Override{Capacity: 20}, policies: `;q=20`, limit: `;r=20;t=1`},
		"blocked":             {policy: api, level: 100, override: &client.Override{Capacity: client.Zero}, policies: `;q=0`, limit: `;r=0;t=1`},
		"in debt":             {policy: api, level: -50, policies: `;q=100;w=10`, limit: `;r=0;t=1`},
		"the largest":         {policy: client.Policy{Capacity: 9_000_000_000_000, Refill: 1, Every: time.Millisecond}, level: 0, policies: `;q=9000000000000;w=9000000000`, limit: `;r=0;t=1`},
		"beyond a Duration":   {policy: client.Policy{Capacity: 5000, Refill: 1, Every: year}, level: 0, policies: `;q=5000;w=157680000000`, limit: fmt.Sprintf(";r=0;t=%d", (int64(1<<63-1)/1000*1000/5000+1e9-1)/1e9)},
		"a window beyond a number": { // its seconds would wrap to a number above 0
			policy: client.Policy{Capacity: 9_000_000_000_000, Refill: 1, Every: time.Millisecond}, level: 9_000_000_000_000,
			told: 32 * year, policies: `;q=9000000000000`, limit: `;r=9000000000000;t=1`,
		},
		"a quota":              {policy: client.Policy{Capacity: 100, Period: client.Period{Months: 1}}, level: 100, cost: 30, policies: `;q=100`, limit: `;r=70;t=2678400`},
		"a shadow by its mark": {policy: client.Policy{Capacity: 10, Refill: 1, Every: time.Second, Shadow: client.Yes}, level: 0, cost: 1, notByPolicies: true},
		"a shadow by Policies": {policy: client.Policy{Capacity: 10, Refill: 1, Every: time.Second, Shadow: client.Yes}, level: 10, cost: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test.policy.Name = "p"
			told := test.policy
			told.Every = cmp.Or(test.told, told.Every)
			opts := []httplimit.Option{httplimit.Policies(told)}
			if test.notByPolicies {
				opts = nil
			}
			l := newLimited(t, charge(client.Charge{Policy: "p", Key: "k", Cost: client.Cost(test.cost)}), httplimit.Closed(time.Second), opts...)
			l.define(test.policy)
			require.NoError(t, l.SetLevel("p", "k", test.level))
			if test.override != nil {
				test.override.Policy, test.override.Key = "p", "k"
				require.NoError(t, l.Override(t.Context(), *test.override))
			}
			response := l.get()
			require.Equal(t, http.StatusOK, response.StatusCode)
			want := http.Header{"Content-Type": {"text/plain; charset=utf-8"}}
			if test.policies != "" {
				want["Ratelimit-Policy"], want["Ratelimit"] = []string{`"p"` + test.policies}, []string{`"p"` + test.limit}
			}
			require.Equal(t, want, response.Header)
		})
	}
}

func TestFields_AreAddedToThoseOfOtherMiddleware(t *testing.T) {
	t.Parallel()
	l := newLimited(t, nil, httplimit.Closed(time.Second))
	l.define(client.Policy{Name: "all", Capacity: 5, Refill: 1, Every: time.Second})
	l.handler = httplimit.New(l, charge(client.Charge{Policy: "all", Key: "k"}), httplimit.Closed(time.Second))(l.handler)
	require.Equal(t, []string{`"all";r=4;t=1`, `"api";r=99;t=1`}, l.get().Header["Ratelimit"])
}

// Whatever happens, no answer has the key.
func TestMiddleware_TheKeyNeverReachesTheClient(t *testing.T) {
	t.Parallel()
	const secret = "s3cret"
	cost := int64(1)
	policy, key, idempotencyKey := "api", secret, ""
	l := newLimited(t, func(*http.Request) []client.Charge {
		return []client.Charge{{Policy: policy, Key: key, Cost: client.Cost(cost)}}
	}, httplimit.Closed(time.Second), httplimit.IdempotencyKey(func(*http.Request) string { return idempotencyKey }))
	expect := func(status int) {
		response := l.get()
		require.Equal(t, status, response.StatusCode)
		require.NotContains(t, fmt.Sprint(response.Header, response.Body), secret)
	}
	expect(http.StatusOK)
	cost = 1000
	expect(http.StatusTooManyRequests)
	cost, idempotencyKey = 2, secret
	expect(http.StatusOK)
	cost = 3
	expect(http.StatusConflict)
	require.Contains(t, l.event.Err.Error(), secret, "or this proves nothing")
	idempotencyKey = secret + "\x00"
	expect(http.StatusBadRequest)
	idempotencyKey, key = "", secret+"\x00"
	expect(http.StatusInternalServerError)
	policy, key = secret, "k"
	expect(http.StatusInternalServerError)
	require.Contains(t, l.event.Err.Error(), secret)
	l.FailAll(errors.New(secret))
	expect(http.StatusServiceUnavailable)
	require.Contains(t, l.event.Err.Error(), secret)
}

// Each row of the table, in each mode, before the first decision and after it, with an idempotency key and without. It replaces the
// program's logger, so it is not parallel.
func TestFailure_AsTheTableOfErrorsSays(t *testing.T) {
	memory := func() client.Acquirer { return httplimit.NewMemory(api) }
	for mode, test := range map[string]struct {
		failure func() httplimit.Failure
		away    int
	}{
		"closed": {func() httplimit.Failure { return httplimit.Closed(time.Second) }, http.StatusServiceUnavailable},
		"open":   {func() httplimit.Failure { return httplimit.Open(time.Second) }, http.StatusOK},
		"local":  {func() httplimit.Failure { return httplimit.Local(time.Second, memory()) }, http.StatusOK},
	} {
		for _, row := range failuretest.Read(t) {
			for _, hasDecided := range []bool{false, true} {
				for _, way := range []string{"", "keyed", "slots"} {
					if way == "slots" && mode == "local" {
						continue
					}
					want := test.away
					if row.Fails(hasDecided) {
						want = http.StatusInternalServerError
						if row.Kind == "fault" && way == "keyed" {
							want = row.Keyed
						} else if row.Kind == "fault" {
							want = row.Status
						}
					}
					t.Run(fmt.Sprintf("%s, %s, %t, %s", row.Error, mode, hasDecided, way), func(t *testing.T) {
						log, err := failuretest.Log(t), row.Err(t)
						synctest.Test(t, func(t *testing.T) {
							l := newTable(t, test.failure(), way)
							if hasDecided {
								require.Equal(t, http.StatusOK, l.get().StatusCode)
								l.calls = 0
							}
							l.FailAll(err)
							begin := time.Now()
							require.Equal(t, want, l.get().StatusCode)
							if row.Kind == "setup" {
								require.Equal(t, 2, l.calls, "it is tried once more")
								require.Equal(t, 100*time.Millisecond, time.Since(begin))
							} else {
								require.Equal(t, 1, l.calls)
							}
							if want == http.StatusOK && mode == "open" {
								require.Contains(t, log.String(), "passed=map[api:1]")
							}
							require.Equal(t, want, l.get().StatusCode)
							row.RequireLog(t, log.String())
							log.Reset()
							time.Sleep(time.Minute)
							require.Equal(t, want, l.get().StatusCode)
							row.RequireLog(t, log.String())
							if want == http.StatusOK && mode == "open" {
								require.Contains(t, log.String(), "passed=map[api:3]")
							}
							l.FailNext(err) // an upgrade
							l.FailAll(nil)
							if row.Kind == "setup" {
								require.Equal(t, http.StatusOK, l.get().StatusCode)
							}
						})
					})
				}
			}
		}
	}
}

// newTable is a handler behind New, with an idempotency key if it is keyed, or behind Slots.
func newTable(t *testing.T, failure httplimit.Failure, way string) *limited {
	switch way {
	case "keyed":
		return newLimited(t, nil, failure, httplimit.IdempotencyKey(func(*http.Request) string { return "once" }))
	case "slots":
		l := newFake(t)
		l.define(client.Policy{Name: "api", Capacity: 1, Lease: time.Minute})
		handler := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
		l.handler = httplimit.Slots(l, charge(client.Charge{Policy: "api", Key: "k"}), failure)(handler)
		return l
	}
	return newLimited(t, nil, failure)
}

// generous is a limiter that allows everything.
type generous struct{ client.Acquirer }

func (generous) Acquire(context.Context, string, string, ...client.CallOption) (client.Decision, error) {
	return client.Decision{Allowed: true}, nil
}

func (generous) AcquireAll(context.Context, []client.Charge, ...client.CallOption) (client.JointDecision, error) {
	return client.JointDecision{}, nil // a denial of nothing
}

func TestFailure_AnAnswerAboutOtherChargesIsNone(t *testing.T) {
	t.Parallel()
	l := newLimited(t, charge(client.Charge{Policy: "api", Key: "k"}, client.Charge{Policy: "api", Key: "l"}), httplimit.Local(time.Second, generous{}))
	l.FailAll(errors.New("no database"))
	require.Equal(t, http.StatusInternalServerError, l.get().StatusCode)
	require.ErrorContains(t, l.event.Err, "0 decisions about 2 charges")
}

// silent is a limiter that answers when its ctx ends.
type silent struct{ client.Acquirer }

func (silent) Acquire(ctx context.Context, _, _ string, _ ...client.CallOption) (client.Decision, error) {
	<-ctx.Done()
	return client.Decision{}, ctx.Err()
}

// Who asks and leaves before there is an answer does not get past the limit, also when it fails open, and is waited for no longer. It is
// no news.
func TestFailure_WhoLeavesDoesNotPass(t *testing.T) {
	log := failuretest.Log(t)
	synctest.Test(t, func(t *testing.T) {
		for stays, err := range map[time.Duration]error{0: nil, 10 * time.Millisecond: &pgconn.PgError{Code: "42883"}} {
			ctx, leave := context.WithTimeout(t.Context(), stays)
			defer leave()
			l, begin := newLimited(t, nil, httplimit.Open(time.Second)), time.Now()
			l.FailAll(err)
			l.handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
			require.Equal(t, httplimit.Abandoned, l.event.Outcome)
			require.Zero(t, l.ran)
			require.Equal(t, stays, time.Since(begin))
		}
	})
	require.Empty(t, log.String())
}

// Any timeout above 0 is one: the longest that there is, and the shortest. A number without a unit is one in nanoseconds, so the log
// tells the timeout, and what to do.
func TestFailure_TimeoutsOfAnyLength(t *testing.T) {
	log := failuretest.Log(t)
	require.Equal(t, http.StatusOK, newLimited(t, nil, httplimit.Closed(math.MaxInt64)).get().StatusCode)
	require.Equal(t, http.StatusOK, newHeld(t, httplimit.Closed(math.MaxInt64), reports).get(t.Context()).Code)
	synctest.Test(t, func(t *testing.T) {
		w, begin := httptest.NewRecorder(), time.Now()
		limit := httplimit.New(silent{}, charge(reports), httplimit.Closed(1))
		limit(http.NotFoundHandler()).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
		require.Equal(t, http.StatusServiceUnavailable, w.Code)
		require.Equal(t, time.Nanosecond, time.Since(begin))
	})
	require.Contains(t, log.String(), "context deadline exceeded: no decision within the timeout of 1ns: raise it, or find what the call waits for")
}

// Who was answered by something else while the limiter waited is left alone: nothing is written twice, and nothing races.
func TestMiddleware_BehindATimeoutHandler(t *testing.T) {
	t.Parallel()
	seen := make(chan httplimit.Event)
	observe := httplimit.Observe(func(_ *http.Request, e httplimit.Event) { seen <- e })
	next := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("it does not run") })
	for name, limit := range map[string]func(http.Handler) http.Handler{
		"New":   httplimit.New(silent{}, charge(reports), httplimit.Open(time.Minute), observe),
		"Slots": httplimit.Slots(silentHolder{}, charge(reports), httplimit.Open(time.Minute), observe),
	} {
		server := httptest.NewServer(http.TimeoutHandler(limit(next), time.Millisecond, "too late"))
		t.Cleanup(server.Close)
		for range 20 {
			response, err := server.Client().Get(server.URL)
			require.NoError(t, err)
			require.Equal(t, http.StatusServiceUnavailable, response.StatusCode, name)
			require.Equal(t, "too late", string(noError(io.ReadAll(response.Body))(t)), name)
			require.NoError(t, response.Body.Close())
			require.Equal(t, httplimit.Abandoned, (<-seen).Outcome, name)
		}
	}
}

// The handler gets the ResponseWriter of the server, which can flush, hijack and so on, and the request as it was.
func TestStreaming_NothingIsWrapped(t *testing.T) {
	t.Parallel()
	for _, charges := range [][]client.Charge{{}, {{Policy: "api", Key: "k"}}} {
		l := newLimited(t, nil, httplimit.Closed(time.Second))
		w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		httplimit.New(l, charge(charges...), httplimit.Closed(time.Second))(http.HandlerFunc(func(gotW http.ResponseWriter, gotR *http.Request) {
			l.ran++
			require.Same(t, w, gotW)
			require.Same(t, r, gotR)
			require.NoError(t, gotR.Context().Err())
		})).ServeHTTP(w, r)
		require.Equal(t, 1, l.ran)
	}
}

// The fields of a policy with several buckets are those of the bucket with the fewest tokens, and of equals of the one that is full last.
func TestFields_TheTightestBucketSpeaksForItsPolicy(t *testing.T) {
	t.Parallel()
	small, large := client.Charge{Policy: "api", Key: "small"}, client.Charge{Policy: "api", Key: "large"}
	for _, charges := range [][]client.Charge{{small, large}, {large, small}} {
		l := newLimited(t, charge(charges...), httplimit.Closed(time.Second), httplimit.Policies(api))
		require.NoError(t, l.Override(t.Context(), client.Override{Policy: "api", Key: "small", Capacity: 60}))
		for _, test := range []struct {
			small, large float64
			want         string
		}{{51, 51, `"api";q=100;w=10`}, {50, 51, `"api";q=60`}, {51, 50, `"api";q=100;w=10`}} {
			require.NoError(t, l.SetLevel("api", "small", test.small))
			require.NoError(t, l.SetLevel("api", "large", test.large))
			require.Equal(t, test.want, l.get().Header.Get("RateLimit-Policy"), "%+v", test)
		}
	}
}

// What is left of a policy is not known when any of its buckets answers with an earlier grant, whichever charge that is.
func TestFields_AReplayOfOneBucketHidesWhatThePolicyHasLeft(t *testing.T) {
	t.Parallel()
	for _, replayed := range []int{0, 1} {
		both := []client.Charge{{Policy: "api", Key: "0"}, {Policy: "api", Key: "1"}}
		charges := both[replayed : replayed+1]
		l := newLimited(t, func(*http.Request) []client.Charge { return charges }, httplimit.Closed(time.Second),
			httplimit.IdempotencyKey(func(*http.Request) string { return "once" }))
		require.Contains(t, l.get().Header, "Ratelimit")
		charges = both
		again := l.get()
		require.True(t, l.event.Decision.Decisions[replayed].Replayed)
		require.False(t, l.event.Decision.Decisions[1-replayed].Replayed)
		require.Contains(t, again.Header, "Ratelimit-Policy")
		require.NotContains(t, again.Header, "Ratelimit")
	}
}

// The turn is as far as Retry-After, or further than what another policy asks for.
func TestFields_OfAQuotaThatIsUsedUp(t *testing.T) {
	t.Parallel()
	month := client.Policy{Name: "month", Capacity: 10, Period: client.Period{Months: 1}}
	l := newLimited(t, charge(client.Charge{Policy: "api", Key: "k"}, client.Charge{Policy: "month", Key: "k"}), httplimit.Closed(time.Second), httplimit.Policies(api, month))
	l.define(month)
	l.now = t0.Add(time.Nanosecond * 1000)
	require.NoError(t, l.SetLevel("month", "k", 0))
	response := l.get()
	require.Equal(t, []string{"2678400"}, response.Header["Retry-After"])
	require.Equal(t, `"api";r=100;t=1, "month";r=0;t=2678400`, response.Header.Get("RateLimit"))
	require.NoError(t, l.SetLevel("month", "k", 5))
	require.NoError(t, l.SetLevel("api", "k", 0))
	response = l.get()
	require.Equal(t, []string{"1"}, response.Header["Retry-After"])
	require.Equal(t, `"api";r=0;t=1, "month";r=5;t=1`, response.Header.Get("RateLimit"))
}

// While the database is away the Memory decides, of requests that can be charged. Its numbers are not for clients.
func TestFailure_LocalDecidesWhileTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	charges := []client.Charge{{Policy: "api", Key: "k"}}
	memory := httplimit.NewMemory(client.Policy{Name: "api", Capacity: 2, Refill: 1, Every: time.Hour})
	l := newLimited(t, func(*http.Request) []client.Charge { return charges }, httplimit.Local(time.Second, memory))
	l.FailAll(errors.New("no database"))
	for _, status := range []int{http.StatusOK, http.StatusOK, http.StatusTooManyRequests} {
		response := l.get()
		require.Equal(t, status, response.StatusCode)
		require.NotContains(t, response.Header, "Ratelimit")
		require.NotContains(t, response.Header, "Ratelimit-Policy")
		require.Equal(t, status != http.StatusOK, response.Header.Get("Retry-After") != "")
		require.True(t, l.event.Local)
		require.ErrorContains(t, l.event.Err, "no database")
	}
	for _, unfit := range []client.Charge{
		{Policy: "nobody", Key: "k"}, {Policy: "api"}, {Policy: "api", Key: strings.Repeat("k", 513)}, {Policy: "api", Key: "k\x00"},
		{Policy: "api", Key: "\xff"}, {Policy: "api", Key: "k", Cost: client.Cost(-1)},
	} {
		charges = []client.Charge{unfit}
		require.Equal(t, http.StatusInternalServerError, l.get().StatusCode, "%+v", unfit)
		require.Equal(t, httplimit.Invalid, l.event.Outcome)
	}
	require.Equal(t, 2, l.ran)
}

func TestNew_InsistsOnWhatHasNoDefault(t *testing.T) {
	t.Parallel()
	fake, per, open := clienttest.New(nil), httplimit.Per("api", httplimit.ByIP(0)), httplimit.Open(1)
	for name, call := range map[string]func(){
		"New without a limiter":   func() { httplimit.New(nil, per, open) },
		"New without charges":     func() { httplimit.New(fake, nil, open) },
		"New without a failure":   func() { httplimit.New(fake, per, httplimit.Failure{}) },
		"Observe nothing":         func() { httplimit.New(fake, per, open, httplimit.Observe(nil)) },
		"RefuseWith nothing":      func() { httplimit.New(fake, per, open, httplimit.RefuseWith(nil)) },
		"Slots without a limiter": func() { httplimit.Slots(nil, per, open) },
		"Slots without charges":   func() { httplimit.Slots(fake, nil, open) },
		"Slots without a failure": func() { httplimit.Slots(fake, per, httplimit.Failure{}) },
		"Slots of a Memory":       func() { httplimit.Slots(fake, per, httplimit.Local(1, fake)) },
		"Slots with Policies":     func() { httplimit.Slots(fake, per, open, httplimit.Policies()) },
		"Slots with an idempotency key": func() {
			httplimit.Slots(fake, per, open, httplimit.IdempotencyKey(func(*http.Request) string { return "" }))
		},
		"no timeout":                   func() { httplimit.Open(0) },
		"a negative timeout":           func() { httplimit.Closed(-1) },
		"Local without a limiter":      func() { httplimit.Local(1, nil) },
		"a negative number of proxies": func() { httplimit.ByIP(-1) },
		"ByUser without a user":        func() { httplimit.ByUser(nil, httplimit.ByIP(0)) },
		"a network of no bits":         func() { httplimit.ByNetwork(0, 0) },
		"a network of too many bits":   func() { httplimit.ByNetwork(0, 129) },
		"Per without a key":            func() { httplimit.Per("api", nil) },
		"a Memory of slots":            func() { httplimit.NewMemory(client.Policy{Name: "p", Capacity: 1, Lease: time.Second}) },
		"a Memory without a refill":    func() { httplimit.NewMemory(client.Policy{Name: "p", Capacity: 1}) },
		"a Memory of a negative interval": func() {
			httplimit.NewMemory(client.Policy{Name: "p", Capacity: 1, Refill: client.Zero, Every: -time.Second})
		},
		"a Memory of half a microsecond": func() { httplimit.NewMemory(client.Policy{Name: "p", Capacity: 1, Refill: 1, Every: 1500}) },
	} {
		require.Panics(t, call, name)
	}
}

// Policies that clients make up fill neither the memory nor the log, and a request counts once for a policy that it names twice.
func TestGuard_IsBounded(t *testing.T) {
	log := failuretest.Log(t)
	synctest.Test(t, func(t *testing.T) {
		guard, away := failure.NewGuard(), errors.New("no connection")
		report := func(policy string) {
			guard.Report(t.Context(), []client.Charge{{Policy: policy, Key: "a"}, {Policy: policy, Key: "b"}}, away, true)
		}
		for n := range 2000 {
			report(fmt.Sprint("p", n))
		}
		require.Equal(t, 1000, strings.Count(log.String(), "\n"))
		require.Len(t, guard.Passed(), 1001)
		require.EqualValues(t, 1, guard.Passed()["p0"])
		require.EqualValues(t, 1000, guard.Passed()["_other"])
		time.Sleep(time.Minute)
		report("p0")
		report("new")
		require.Equal(t, 1002, strings.Count(log.String(), "\n"), "there is room again")
	})
}

func from(remote string, forwarded ...string) *http.Request {
	return &http.Request{Method: http.MethodGet, RemoteAddr: remote, Header: http.Header{"X-Forwarded-For": forwarded}}
}

// Each client has the same key for an address: tests/vectors.
func TestByIP(t *testing.T) {
	t.Parallel()
	var vectors []struct {
		Peer      string
		Forwarded []string
		Proxies   int
		Key       string
	}
	require.NoError(t, json.Unmarshal(noError(os.ReadFile("../../tests/vectors/addresses.json"))(t), &vectors))
	for _, v := range vectors {
		remote := "@" // a socket of the machine
		if v.Peer != "" {
			remote = net.JoinHostPort(v.Peer, "4711")
		}
		require.Equal(t, v.Key, httplimit.ByIP(v.Proxies)(from(remote, v.Forwarded...)), "%+v", v)
	}
}

// The network of an IPv6 address has the bits that the program chose, of an IPv4 address none are cut.
func TestByNetwork(t *testing.T) {
	t.Parallel()
	for bits, want := range map[int]string{
		1: "ip:8000::/1", 32: "ip:fe80:db8::/32", 48: "ip:fe80:db8:a::/48", 56: "ip:fe80:db8:a:ff00::/56",
		64: "ip:fe80:db8:a:fffe::/64", 127: "ip:fe80:db8:a:fffe::6/127", 128: "ip:fe80:db8:a:fffe::7/128",
	} {
		key := httplimit.ByNetwork(1, bits)
		require.Equal(t, want, key(from("192.0.2.1:80", "[fe80:db8:a:fffe::7]:80")))
		require.Equal(t, want, key(from("[fe80:db8:a:fffe::7%eth0]:80")))
		require.Equal(t, "ip:192.0.2.1", key(from("[::ffff:192.0.2.1]:80")))
		require.Equal(t, "ip:unknown", key(from("@")))
	}
	same := from("[2001:db8::1]:80")
	require.Equal(t, httplimit.ByIP(0)(same), httplimit.ByNetwork(0, 64)(same))
}

func TestByUser(t *testing.T) {
	t.Parallel()
	key := httplimit.ByUser(func(r *http.Request) string { return r.Header.Get("Who") }, httplimit.ByIP(0))
	for name, want := range map[string]string{
		"":                       "ip:192.0.2.1",
		"42":                     "user:42",
		"ip:192.0.2.1":           "user:ip:192.0.2.1",
		"sha256:ab":              "user:sha256:ab",
		strings.Repeat("a", 507): "user:" + strings.Repeat("a", 507),
		strings.Repeat("a", 508): "user-sha256:f93f35cc413fbd7a7bc53ce4e81776e9bdc5e9cfbb509b3fbfb6aa59687a1124",
		"\xff":                   "user-sha256:a8100ae6aa1940d0b663bb31cd466142ebbdbd5187131b92d93818987832eb89",
	} {
		r := from("192.0.2.1:80")
		r.Header.Set("Who", name)
		require.Equal(t, want, key(r))
	}
}
