package client_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// What a request costs the client: go test ./tests/client -bench Combiner -benchmem -run '^$'. How many decisions a
// server makes is for make bench.
func BenchmarkCombiner(b *testing.B) {
	db := pgtest.New(b)
	db.Exec(b, "select ratelimit_define_policy('api', 1000000000, 1, '1 second')")
	limiter := client.NewCombiner(db.Pool)
	defer limiter.Close()
	for _, callers := range []int{1, 64} {
		b.Run(fmt.Sprintf("acquire/callers=%d", callers), func(b *testing.B) {
			share(b, callers, func(ctx context.Context, caller int) error { return errOf(limiter.Acquire(ctx, "api", keys[caller])) })
		})
		b.Run(fmt.Sprintf("acquire all of 3 of its own/callers=%d", callers), func(b *testing.B) {
			share(b, callers, func(ctx context.Context, caller int) error {
				_, err := limiter.AcquireAll(ctx, []client.Charge{
					{Policy: "api", Key: keys[caller]}, {Policy: "api", Key: keys[caller] + "a"}, {Policy: "api", Key: keys[caller] + "b"},
				})
				return err
			})
		})
		b.Run(fmt.Sprintf("acquire all of 3/callers=%d", callers), func(b *testing.B) {
			share(b, callers, func(ctx context.Context, caller int) error {
				_, err := limiter.AcquireAll(ctx, []client.Charge{
					{Policy: "api", Key: keys[caller]}, {Policy: "api", Key: "org"}, {Policy: "api", Key: "everybody"},
				})
				return err
			})
		})
	}
}

var keys = func() (keys [64]string) {
	for i := range keys {
		keys[i] = fmt.Sprint("user:", i)
	}
	return keys
}()

// share lets callers make b.N calls between them.
func share(b *testing.B, callers int, call func(ctx context.Context, caller int) error) {
	b.ReportAllocs()
	var wg sync.WaitGroup
	for caller := range callers {
		wg.Go(func() {
			for n := caller; n < b.N; n += callers {
				if err := call(b.Context(), caller); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	require.False(b, b.Failed())
}

// What the middleware adds to a request: go test ./tests/client -bench Middleware -run '^$'. A handler is called without
// HTTP, and in a server by clients of this process. The database is there in both cases.
func BenchmarkMiddleware(b *testing.B) {
	db := pgtest.New(b)
	ctx := context.Background()
	generous := client.Policy{Name: "generous", Capacity: 9_000_000_000_000, Refill: 1_000_000_000, Every: time.Second}
	empty := client.Policy{Name: "empty", Capacity: 1, Refill: 1, Every: 1000 * time.Hour}
	admin := client.New(db.Pool)
	require.NoError(b, admin.DefinePolicy(ctx, generous))
	require.NoError(b, admin.DefinePolicy(ctx, empty))
	for caller := range 256 {
		noError(admin.Acquire(ctx, empty.Name, fmt.Sprint("user:", caller)))(b)
	}
	combiner := client.NewCombiner(db.Pool, client.DenialCache())
	defer combiner.Close()

	bare := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	user := httplimit.ByUser(func(r *http.Request) string { return r.Header.Get("User") }, httplimit.ByIP(0))
	limited := func(p client.Policy) http.Handler {
		return httplimit.New(combiner, httplimit.Per(p.Name, user), httplimit.Closed(time.Minute), httplimit.Policies(p))(bare)
	}
	for _, bench := range []struct {
		name    string
		handler http.Handler
		status  int
		callers []int
	}{
		{"bare handler", bare, http.StatusNoContent, []int{1, 64}},
		{"denial cache hit", limited(empty), http.StatusTooManyRequests, []int{1, 64}},
		{"combined acquire", limited(generous), http.StatusNoContent, []int{1, 64, 256}},
	} {
		server := httptest.NewServer(bench.handler)
		transport := &http.Transport{MaxIdleConnsPerHost: 256}
		overHTTP := func(r *http.Request) (status int, err error) {
			r.URL, err = url.Parse(server.URL)
			if err != nil {
				return 0, err
			}
			response, err := transport.RoundTrip(r)
			if err != nil {
				return 0, err
			}
			_, err = io.Copy(io.Discard, response.Body)
			response.Body.Close()
			return response.StatusCode, err
		}
		call := func(r *http.Request) (status int, err error) {
			w := httptest.NewRecorder()
			bench.handler.ServeHTTP(w, r)
			return w.Code, nil
		}
		for _, callers := range bench.callers {
			name := fmt.Sprintf("%s/callers=%d", bench.name, callers)
			b.Run("call/"+name, func(b *testing.B) { shareOf(b, callers, bench.status, call) })
			b.Run("http/"+name, func(b *testing.B) { shareOf(b, callers, bench.status, overHTTP) })
		}
		transport.CloseIdleConnections()
		server.Close()
	}
}

// share lets callers send b.N requests between them.
func shareOf(b *testing.B, callers, want int, send func(*http.Request) (status int, err error)) {
	share(b, callers, func(ctx context.Context, caller int) error {
		header := http.Header{"User": {strconv.Itoa(caller)}}
		status, err := send((&http.Request{Method: http.MethodGet, Header: header, RemoteAddr: "192.0.2.1:80"}).WithContext(ctx))
		if err == nil && status != want {
			err = fmt.Errorf("status %d", status)
		}
		return err
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
}
