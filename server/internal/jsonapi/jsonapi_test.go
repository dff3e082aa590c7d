package jsonapi_test

import (
	"encoding/json"
	"errors"
	"maps"
	"math"
	"math/big"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

var paths = []string{"/v1/acquire", "/v1/acquire_all", "/v1/charge", "/v1/settle", "/v1/peek", "/v1/refund",
	"/v1/acquire_many", "/v1/acquire_up_to", "/v1/reserve"}

// A body is what encoding/json reads in a request of any path.
type body struct {
	charge
	IdempotencyKey *string  `json:"idempotency_key"`
	Amount         whole    `json:"amount"`
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
	Cost   *whole `json:"cost"`
}

// A whole number is written in any form.
type whole int64

func (n *whole) UnmarshalJSON(text []byte) error {
	var plain float64
	if err := json.Unmarshal(text, &plain); err != nil || math.Abs(plain) > math.MaxInt64 {
		return errors.New("no number")
	}
	r, ok := new(big.Rat).SetString(string(text))
	if !ok || !r.IsInt() || !r.Num().IsInt64() {
		return errors.New("not whole")
	}
	*n = whole(r.Num().Int64())
	return nil
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
	return int64(*c.Cost)
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
		`{"policy":"p","key":"k","cost":0.02e2,"amount":1.0,"at_most":20e-1}`,
		`{"policy":"p","key":"k","cost":1.5,"amount":1e99999999999,"at_most":1e-99999999999}`,
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
		mux := serve(fake, 10_000)
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

func serve(limiter service.Limiter, maxBytes int64) *http.ServeMux {
	mux, limits := http.NewServeMux(), service.Limits{Calls: 1, OwnConnections: 1, Time: time.Minute}
	jsonapi.Register(mux, service.New([]service.Limiter{limiter}, limits, func(service.Call) {}), maxBytes)
	return mux
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
		levels[b] = min(capacity, levels[b]+min(int64(q.Amount), math.MaxInt64-capacity))
	case "/v1/acquire_all":
		for _, c := range q.Charges {
			levels[c.bucket()] -= c.cost()
		}
	}
}

// A number is whole by what it is worth. One that is not is refused with the name of its argument.
func TestNumbers_AreWholeInAnyForm(t *testing.T) {
	t.Parallel()
	post := func(path, body, number string) *httptest.ResponseRecorder {
		fake := clienttest.New(func() time.Time { return time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC) })
		require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "p", Capacity: 100, Refill: client.Zero, Every: time.Second}))
		w := httptest.NewRecorder()
		serve(fake, 10_000).ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/"+path, strings.NewReader(strings.ReplaceAll(body, "N", number))))
		return w
	}
	for path, body := range map[string]string{
		"acquire": `{"policy":"p","key":"k","cost":N}`, "charge": `{"policy":"p","key":"k","cost":N}`, "peek": `{"policy":"p","key":"k","cost":N}`,
		"reserve": `{"policy":"p","key":"k","max_wait":1,"cost":N}`, "settle": `{"policy":"p","key":"k","idempotency_key":"i","cost":N}`, "hold": `{"policy":"p","key":"k","holder":"h","cost":N}`,
		"refund": `{"policy":"p","key":"k","amount":N}`, "acquire_up_to": `{"policy":"p","key":"k","at_most":N}`,
		"acquire_many": `{"requests":[{"policy":"p","key":"k"},{"policy":"p","key":"k","cost":N}]}`,
		"acquire_all":  `{"charges":[{"policy":"p","key":"k","cost":N}]}`,
	} {
		argument := regexp.MustCompile(`"(\w+)":N`).FindStringSubmatch(body)[1]
		for number, plain := range map[string]string{
			"1.0": "1", "1e0": "1", "1E+0": "1", "10e-1": "1", "0.01e2": "1", "1.000000000000000000000": "1", "-0.0": "0", "0e99999999999": "0", "-20e-1": "-2",
			"9223372036854775807.0": "9223372036854775807", "922337203685477580.7e1": "9223372036854775807", "1e18": "1000000000000000000",
		} {
			got, want := post(path, body, number), post(path, body, plain)
			require.Equal(t, []any{want.Code, want.Body.String()}, []any{got.Code, got.Body.String()}, "%s %s", path, number)
		}
		for _, number := range []string{"1.5", "1e-1", "0.1e0", "1e19", "9223372036854775808", "9007199254740993.5", "1e99999999999999999999", "1e-99999999999999999999"} {
			w := post(path, body, number)
			require.Equal(t, http.StatusUnprocessableEntity, w.Code, "%s %s: %s", path, number, w.Body)
			require.Contains(t, w.Body.String(), `"title":"invalid `+argument+`"`)
			require.Contains(t, w.Body.String(), argument+" is "+number+`."`)
			require.Contains(t, w.Body.String(), `"sqlstate":"22023"`)
		}
	}
}

// A slow client reads when it may.
type slow struct {
	*httptest.ResponseRecorder
	writing, may chan struct{}
}

func (s slow) Write(text []byte) (int, error) {
	s.writing <- struct{}{}
	<-s.may
	return s.ResponseRecorder.Write(text)
}

// Long answers that are not read take room, of which there is as much as the server can spare.
func TestUnread_LongAnswersTakeRoomUntilTheyAreRead(t *testing.T) {
	t.Parallel()
	mux := serve(clienttest.New(time.Now), 1<<20)
	body := `{"requests":[` + strings.Repeat(`{"policy":"p","key":"k"},`, 999) + `{"policy":"p","key":"k"}]}`
	post := func(w http.ResponseWriter, body string) {
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/acquire_many", strings.NewReader(body)))
	}
	may := make(chan struct{})
	var clients sync.WaitGroup
	for n := 0; ; n++ {
		w := slow{httptest.NewRecorder(), make(chan struct{}), may}
		clients.Go(func() { post(w, body) })
		<-w.writing
		if w.Code == http.StatusServiceUnavailable {
			require.Greater(t, n, 15)
			break
		}
		require.Less(t, n, 32)
	}
	refused, short := httptest.NewRecorder(), httptest.NewRecorder()
	post(refused, body)
	require.Equal(t, http.StatusServiceUnavailable, refused.Code)
	require.Contains(t, refused.Body.String(), "too many calls under way")
	post(short, `{"requests":[{"policy":"p","key":"k"}]}`)
	require.Equal(t, http.StatusOK, short.Code, "a short answer takes none")
	close(may)
	clients.Wait()
	again := httptest.NewRecorder()
	post(again, body)
	require.Equal(t, http.StatusOK, again.Code)
}

// Go, JavaScript and Python write these numbers.
func TestTimeout_IsANumberOfSeconds(t *testing.T) {
	t.Parallel()
	for text, seconds := range map[string]float64{ // 0 for none
		"5": 5, "0.5": .5, ".5": .5, "5.": 5, "0.30000000000000004": .3, "999999999": 999999999, "5e-05": 5e-05,
		"0": 0, "0.0": 0, ".": 0, "-1": 0, "1s": 0, "0.5 s": 0, "1e9": 0, "NaN": 0, "inf": 0, "1, 2": 0, "½": 0,
	} {
		begin, w, given := time.Now(), httptest.NewRecorder(), time.Duration(0)
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set("Request-Timeout", text)
		jsonapi.Timeout(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			deadline, _ := r.Context().Deadline()
			given = deadline.Sub(begin)
		})).ServeHTTP(w, r)
		require.Equal(t, seconds == 0, w.Code == http.StatusBadRequest, text)
		require.InDelta(t, seconds, given.Seconds(), 3600, text)
		require.GreaterOrEqual(t, given.Seconds(), seconds-1e-6, text)
	}
}
