package jsonapi_test

import (
	"encoding/json"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

var paths = []string{"/v1/acquire", "/v1/acquire_all", "/v1/charge", "/v1/settle", "/v1/peek", "/v1/refund",
	"/v1/acquire_many", "/v1/acquire_up_to", "/v1/reserve", "/v1/peek_many"}

// A body is what encoding/json reads in a request of any path.
type body struct {
	charge
	IdempotencyKey *string  `json:"idempotency_key"`
	Amount         int64    `json:"amount"`
	Charges        []charge `json:"charges"`
	Requests       []charge `json:"requests"`
}

// A response is what any path answers.
type response struct {
	Allowed, Replayed bool
	Taken             int64
	Answers           []struct{ Decision response }
}

type charge struct {
	Policy string `json:"policy"`
	Key    string `json:"key"`
	Cost   *int64 `json:"cost"`
}

type bucket struct{ policy, key string }

func (c charge) bucket() bucket {
	if c.Policy == "" {
		c.Policy = service.DefaultPolicy
	}
	return bucket{c.Policy, c.Key}
}

func (c charge) cost() int64 {
	if c.Cost == nil {
		return 1
	}
	return *c.Cost
}

// FuzzBodies posts whatever bytes there are to each path, twice, for buckets that do not refill. What is granted has been
// paid by the buckets that another reader of JSON finds in the body, and by no others. What is refused has cost nothing.
func FuzzBodies(f *testing.F) {
	for _, seed := range []string{
		`{"policy":"p","key":"k"}`,
		`{"policy":"p","key":"k","cost":5,"idempotency_key":"i"}`,
		`{"policy":"p","key":"k","cost":-1}`,
		`{"key":"\u0000","cost":9000000000000}`,
		`{"policy":"p","key":"k","amount":7}`,
		`{"charges":[{"policy":"p","key":"k","cost":6},{"policy":"p","key":"k","cost":4},{"key":"l"}],"idempotency_key":"i"}`,
		`{"charges":[]}`,
		`{"policy":"p","key":"a\ud800"}`,
		"{\"policy\":\"p\",\"key\":\"\xff\"}",
		`{"policy":"p","key":"k","key":"l"}`,
		`{"policy":"p","Key":"k"}`,
		`{"policy":"p","key":"k","cost":1e1}`,
		`{"policy":"p","key":"k","cost":null,"idempotency_key":null} `,
		`{"requests":[{"policy":"p","key":"k","cost":6},{"policy":"p","key":"k","cost":6},{"policy":"nobody","key":"k"},{"key":"l"}]}`,
		`{"requests":[{"policy":"p","key":"k","idempotency_key":"i"},{"policy":"p","key":"k","idempotency_key":"i"}]}`,
		`{"policy":"p","key":"k","at_most":7,"at_least":2,"idempotency_key":"i"}`,
		`{"policy":"p","key":"k","cost":6,"max_wait":1.5}`,
		`{"policy":"p","key":"k","max_wait":1e300}`,
		`null`,
	} {
		for path := range paths {
			f.Add(uint8(path), []byte(seed))
		}
	}
	f.Fuzz(func(t *testing.T, number uint8, text []byte) {
		path := paths[int(number)%len(paths)]
		noon := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
		fake := clienttest.New(func() time.Time { return noon })
		for name, capacity := range map[string]int64{"p": 10, service.DefaultPolicy: 5} {
			require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: name, Capacity: capacity, Refill: client.Zero, Every: time.Second}))
		}
		limits := service.Limits{Calls: 1, OwnConnections: 1, Time: time.Minute}
		mux := http.NewServeMux()
		jsonapi.Register(mux, service.New(fake, limits, func(service.Call) {}), 10_000)
		q, isRead := read(text)
		for range 2 {
			before := levels(t, fake, q)
			w := httptest.NewRecorder()
			mux.ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, strings.NewReader(string(text))))
			after := levels(t, fake, q)
			var answer response
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &answer), "%s", w.Body)
			if w.Code != http.StatusOK {
				require.Contains(t, []int{400, 404, 409, 413, 422}, w.Code, "%s", w.Body)
				require.Equal(t, before, after, "an error that has taken")
				continue
			}
			require.True(t, isRead, "%q is answered, and another reader cannot read it", text)
			want := maps.Clone(before)
			q.pay(path, want, answer)
			require.Equal(t, want, after, "%s %q: %s", path, text, w.Body)
		}
	})
}

func read(text []byte) (q body, ok bool) { return q, json.Unmarshal(text, &q) == nil }

func (q body) charges() []charge { return slices.Concat(q.Charges, q.Requests, []charge{q.charge}) }

// levels are those of all buckets that the body names.
func levels(t *testing.T, fake *clienttest.Fake, q body) map[bucket]int64 {
	levels := make(map[bucket]int64)
	for _, c := range q.charges() {
		if d, err := fake.Peek(t.Context(), c.bucket().policy, c.Key); err == nil {
			levels[c.bucket()] = d.Remaining
		}
	}
	return levels
}

// pay takes from the levels what the response has granted. A settlement finds no grant that had another cost.
func (q body) pay(path string, levels map[bucket]int64, got response) {
	const floor = -9_000_000_000_000
	b := q.bucket()
	for i, a := range got.Answers {
		body{charge: q.Requests[i]}.pay(strings.Replace(path, "_many", "", 1), levels, a.Decision)
	}
	if !got.Allowed || got.Replayed {
		return
	}
	switch path {
	case "/v1/acquire", "/v1/reserve":
		levels[b] -= q.cost()
	case "/v1/acquire_up_to":
		levels[b] -= got.Taken
	case "/v1/charge":
		levels[b] = max(floor, levels[b]-q.cost())
	case "/v1/refund":
		capacity := map[string]int64{"p": 10, service.DefaultPolicy: 5}[b.policy]
		levels[b] = min(capacity, levels[b]+min(q.Amount, math.MaxInt64-capacity))
	case "/v1/acquire_all":
		for _, c := range q.Charges {
			levels[c.bucket()] -= c.cost()
		}
	}
}

// Go, JavaScript and Python write these numbers.
func TestTimeout_TakesADecimalNumberOfSeconds(t *testing.T) {
	t.Parallel()
	ask := func(text string) (status int, given time.Duration) {
		begin := time.Now()
		handler := jsonapi.Timeout(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			deadline, _ := r.Context().Deadline()
			given = deadline.Sub(begin)
		}))
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set("Request-Timeout", text)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w.Code, given
	}
	const hour = 3600.0
	for text, seconds := range map[string]float64{
		"5": 5, "0.5": .5, ".5": .5, "5.": 5, "0.30000000000000004": .3, "1.234567890123456": 1.234567890123456, "999999999": 999999999,
		"5e-05": 0, "1e-7": 0, "1.5e-05": 0, "00.5": .5,
	} {
		status, given := ask(text)
		require.Equal(t, http.StatusOK, status, text)
		require.InDelta(t, seconds, given.Seconds(), hour, text)
		require.GreaterOrEqual(t, given.Seconds(), seconds-1e-6, text)
	}
	for _, text := range []string{"0", "0.0", ".", "-1", "+1", "1s", "0.5 s", "1e3", "1e+3", "e-3", "0x1", "1_0", "NaN", "inf", "1, 2", "9999999999", "½"} {
		status, _ := ask(text)
		require.Equal(t, http.StatusBadRequest, status, text)
	}
}
