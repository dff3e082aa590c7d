package operate

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// An httpItem is one of a field, as a parser that is not ours reads it. What the field does not have is absent.
type httpItem map[string]int64

const absent = -1

// httpItems reads the lines of a field.
func httpItems(t testing.TB, lines []string, parameters ...string) map[string]httpItem {
	list, err := httpsfv.UnmarshalList(lines)
	require.NoError(t, err, "%q", lines)
	all := make(map[string]httpItem, len(list))
	for _, member := range list {
		member, ok := member.(httpsfv.Item)
		require.True(t, ok, "%q", lines)
		name, ok := member.Value.(string)
		require.True(t, ok, "%q", lines)
		require.NotContains(t, all, name, "each policy once")
		parsed := httpItem{}
		for _, parameter := range parameters {
			parsed[parameter] = absent
		}
		for _, parameter := range member.Params.Names() {
			require.Contains(t, parameters, parameter, "%q", lines)
			value, _ := member.Params.Get(parameter)
			parsed[parameter], ok = value.(int64)
			require.True(t, ok, "%q", lines)
		}
		all[name] = parsed
	}
	return all
}

func policyItems(t testing.TB, header http.Header) map[string]httpItem {
	return httpItems(t, header["Ratelimit-Policy"], "q", "w")
}

func limitItems(t testing.TB, header http.Header) map[string]httpItem {
	return httpItems(t, header["Ratelimit"], "r", "t")
}

// An httpSubject is a handler behind the middleware, on the fake with these policies.
type httpSubject struct {
	*clienttest.Fake
	now     time.Time
	charges []client.Charge
	handler http.Handler
	event   httplimit.Event // the last
}

func newHTTPSubject(t testing.TB, policies ...client.Policy) *httpSubject {
	s := &httpSubject{now: kit.T0}
	s.Fake = clienttest.New(func() time.Time { return s.now })
	for _, p := range policies {
		require.NoError(t, s.DefinePolicy(t.Context(), p))
	}
	limit := httplimit.New(s.Fake, func(*http.Request) []client.Charge { return s.charges }, httplimit.Closed(time.Minute),
		httplimit.Policies(policies...), httplimit.Observe(func(_ *http.Request, e httplimit.Event) { s.event = e }))
	s.handler = limit(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	return s
}

func (s *httpSubject) ask() (status int, header http.Header) {
	w := httptest.NewRecorder()
	s.handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	return w.Code, w.Header()
}

func TestHTTP_PolicyNamesOfAnyBytes(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"api":          "api",
		`a"b\c`:        `a"b\c`,
		"50%":          "50%25",
		"größe":        "gr%C3%B6%C3%9Fe",
		"a\r\nX: 1":    "a%0D%0AX: 1",
		"\x01\x7f; q=": "%01%7F; q=",
	} {
		l := newHTTPSubject(t, client.Policy{Name: name, Capacity: 3, Refill: 1, Every: time.Minute})
		l.charges = []client.Charge{{Policy: name, Key: "k", Cost: client.Cost(2)}}
		_, header := l.ask()
		require.Equal(t, map[string]httpItem{want: {"q": 3, "w": 180}}, policyItems(t, header))
		require.Equal(t, map[string]httpItem{want: {"r": 1, "t": 60}}, limitItems(t, header))
		l.ask()
		require.Equal(t, []string{want}, l.event.Violated())
	}
}

// 50,000 random states of one to three buckets, each asked for once, and what the answer promised:
//
//   - Within t, never less than r: what a client takes by r and t, in portions and at times of its choosing, is granted.
//   - After t there is more, unless the bucket is full, is stepped, holds a debt, or is waited for by another.
//   - A denied request that is repeated after Retry-After is allowed, and Retry-After is not a second too long.
//   - t is the formula of its definition, by exact arithmetic, and at most Retry-After.
//   - q is the capacity, w the time to fill.
func TestHTTP_FieldsArePromises(t *testing.T) {
	t.Parallel()
	const states = 50_000
	const workers = 4
	for worker := range workers {
		t.Run(strconv.Itoa(worker), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(13, uint64(worker)))
			var seen httpSeen
			for range states / workers {
				seen.check(t, random)
			}
			t.Logf("%+v", seen)
			require.Greater(t, seen.granted, states/workers/10)
			require.Greater(t, seen.denied, states/workers/10)
			require.Greater(t, seen.never, states/workers/100)
			require.Greater(t, seen.spent, states/workers/10)
			require.Greater(t, seen.more, states/workers/100)
			require.Greater(t, seen.early, states/workers/100)
		})
	}
}

// httpSeen counts what the states were, so that a promise about none of them is not taken for kept.
type httpSeen struct{ granted, denied, never, spent, more, early int }

func (s *httpSeen) check(t *testing.T, random *rand.Rand) {
	upTo := func(n int64) int64 { // of any magnitude
		return 1 + random.Int64N(max(1, n>>random.IntN(big.NewInt(n).BitLen())))
	}
	policies := make([]client.Policy, 1+random.IntN(3))
	charges := make([]client.Charge, 1+random.IntN(3))
	for i := range policies {
		p := client.Policy{Name: fmt.Sprint("p", i), Capacity: upTo(1_000_000), Refill: upTo(1_000_000)}
		p.Every = time.Duration(upTo(int64(30*24*time.Hour/time.Microsecond))) * time.Microsecond
		if years := httpWindow(p) / (365 * 24 * 3600); years > 100 { // beyond a Duration, with a debt
			p.Every = time.Duration(1+int64(p.Every/time.Microsecond)/years) * time.Microsecond
		}
		if random.IntN(4) == 0 {
			p.Stepped = client.Yes
		}
		if random.IntN(20) == 0 {
			p.Refill = client.Zero
		}
		policies[i] = p
	}
	l := newHTTPSubject(t, policies...)
	l.charges = charges
	byName := map[string]client.Policy{}
	for _, p := range policies {
		byName[p.Name] = p
	}
	for i := range charges {
		p := policies[random.IntN(len(policies))]
		charges[i] = client.Charge{Policy: p.Name, Key: fmt.Sprint(random.IntN(2)), Cost: client.Cost(random.Int64N(min(p.Capacity, upTo(p.Capacity)) + 1))}
		switch random.IntN(8) {
		case 0: // full
		case 1:
			require.NoError(t, l.SetLevel(p.Name, charges[i].Key, -random.Float64()*float64(p.Capacity)))
		default:
			require.NoError(t, l.SetLevel(p.Name, charges[i].Key, random.Float64()*float64(upTo(p.Capacity))))
		}
	}
	l.now = l.now.Add(time.Duration(upTo(int64(time.Hour/time.Microsecond))) * time.Microsecond)
	asked := l.now
	status, header := l.ask()
	whole := l.event.Decision
	limits, quotas := limitItems(t, header), policyItems(t, header)
	retryAfter := int64(absent)
	if text := header.Get("Retry-After"); text != "" {
		retryAfter = kit.NoError(strconv.ParseInt(text, 10, 64))(t)
	}
	switch {
	case status == http.StatusOK:
		s.granted++
		require.EqualValues(t, absent, retryAfter)
	case whole.Never():
		s.never++
		require.EqualValues(t, absent, retryAfter)
	default:
		s.denied++
		require.Positive(t, retryAfter)
	}
	least := map[string]client.Decision{} // of each policy
	keys := map[string][]string{}
	for i, c := range charges {
		d, ok := least[c.Policy]
		if this := whole.Decisions[i]; !ok || this.Remaining < d.Remaining || this.Remaining == d.Remaining && this.ResetAfter > d.ResetAfter {
			least[c.Policy] = this
		}
		keys[c.Policy] = append(keys[c.Policy], c.Key)
	}
	require.Len(t, limits, len(least))
	require.Len(t, quotas, len(least))
	for name, d := range least {
		p, limit := byName[name], limits[name]
		require.Equal(t, httpItem{"q": p.Capacity, "w": httpWindow(p)}, quotas[name], "%+v", p)
		require.Equal(t, max(0, d.Remaining), limit["r"])
		require.Equal(t, httpUntil(d, retryAfter), limit["t"], "%+v", d)
		if d.NeverFull() {
			continue
		}
		if retryAfter != absent {
			require.LessOrEqual(t, limit["t"], retryAfter)
		}
		if limit["t"] != retryAfter && p.Stepped != client.Yes && 0 <= d.Remaining && d.Remaining < p.Capacity {
			l.now = asked.Add(time.Duration(limit["t"]) * time.Second)
			for _, key := range keys[name] {
				more := kit.NoError(l.Peek(t.Context(), name, key, client.Cost(limit["r"]+1)))(t)
				require.True(t, more.Allowed, "after t there is more: %+v of %+v", limit, p)
			}
			s.more++
		}
	}
	// Now time goes on. Either the client does what RateLimit says, or it does what Retry-After says.
	if retryAfter == absent || random.IntN(2) == 0 {
		for name, limit := range limits {
			s.spend(t, l, random, name, keys[name][0], limit, asked)
		}
		return
	}
	l.now = asked.Add(time.Duration(retryAfter-1) * time.Second)
	if retryAfter > 1 {
		status, _ = l.ask()
		require.Equal(t, http.StatusTooManyRequests, status, "a second before Retry-After")
		s.early++
	}
	l.now = asked.Add(time.Duration(retryAfter) * time.Second)
	status, _ = l.ask()
	require.Equal(t, http.StatusOK, status, "after Retry-After")
}

// spend takes r within t, in up to three portions.
func (s *httpSeen) spend(t *testing.T, l *httpSubject, random *rand.Rand, policy, key string, limit httpItem, asked time.Time) {
	end := asked.Add(time.Minute)
	if limit["t"] != absent {
		end = asked.Add(time.Duration(limit["t"]) * time.Second)
	}
	l.now = asked
	for left, portions := limit["r"], 3; left > 0; portions-- {
		l.now = l.now.Add(time.Duration(random.Int64N(int64(max(1, end.Sub(l.now)))))).Truncate(time.Microsecond)
		portion := left
		if portions > 1 {
			portion = 1 + random.Int64N(left)
		}
		d := kit.NoError(l.Acquire(t.Context(), policy, key, client.Cost(portion)))(t)
		require.True(t, d.Allowed, "%d of what is left of %+v: %+v", portion, limit, d)
		left -= portion
		s.spent++
	}
}

// httpWindow is w by exact arithmetic.
func httpWindow(p client.Policy) int64 {
	if p.Refill == client.Zero {
		return absent
	}
	intervals := big.NewRat(p.Capacity, p.Refill)
	if p.Stepped == client.Yes {
		intervals = new(big.Rat).SetInt64(roundedUp(intervals))
	}
	return roundedUp(intervals.Mul(intervals, big.NewRat(int64(p.Every), int64(time.Second))))
}

// httpUntil is t by exact arithmetic.
func httpUntil(d client.Decision, retryAfter int64) int64 {
	if d.NeverFull() {
		return absent
	}
	seconds := big.NewRat(int64(d.ResetAfter), int64(time.Second))
	t := max(1, roundedUp(seconds.Quo(seconds, new(big.Rat).SetInt64(max(1, d.Capacity-d.Remaining)))))
	if retryAfter != absent {
		t = min(t, retryAfter)
	}
	return t
}

func roundedUp(r *big.Rat) int64 {
	quotient, rest := new(big.Int).QuoRem(r.Num(), r.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		return quotient.Int64() + 1
	}
	return quotient.Int64()
}
