package httplimit_test

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

// limiterWith stands for client.New(pool) or client.NewCombiner(pool), with policies defined.
func limiterWith(policies ...client.Policy) client.Acquirer {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	fake := clienttest.New(func() time.Time { return now })
	for _, p := range policies {
		if err := fake.DefinePolicy(context.Background(), p); err != nil {
			panic(err)
		}
	}
	return fake
}

// show sends requests, such as GET /, to a handler and prints what a client sees. It logs in with a name and a password.
func show(handler http.Handler, login string, requests ...string) {
	for _, request := range requests {
		method, path, _ := strings.Cut(request, " ")
		r := httptest.NewRequest(method, path, nil)
		if name, password, ok := strings.Cut(login, ":"); ok {
			r.SetBasicAuth(name, password)
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		fmt.Println(request, w.Code, cmp.Or(w.Header().Get("RateLimit"), "no limit"))
	}
}

// One limit for each address, behind one proxy.
func ExampleNew() {
	api := client.Policy{Name: "api", Capacity: 100, Refill: 10, Every: time.Second}
	limiter := limiterWith(api)

	mux := http.NewServeMux()
	mux.HandleFunc("GET /", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })

	limit := httplimit.New(limiter,
		httplimit.Per("api", httplimit.ByIP(1)),
		httplimit.Open(time.Second), // without an answer, requests pass
		httplimit.Policies(api),
	)
	handler := limit(mux) // for http.ListenAndServe

	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Header.Set("X-Forwarded-For", "203.0.113.7") // as the proxy says
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	fmt.Println(w.Code, w.Body, w.Header().Get("RateLimit-Policy"), w.Header().Get("RateLimit"))
	// Output: 200 hello "api";q=100;w=10 "api";r=99;t=1
}

// Some endpoints of a mux cost more, one costs nothing.
func ExampleNew_costPerEndpoint() {
	limiter := limiterWith(client.Policy{Name: "api", Capacity: 100, Refill: 10, Every: time.Second})

	mux := http.NewServeMux()
	for _, pattern := range []string{"GET /health", "GET /items/{id}", "GET /search", "POST /exports"} {
		mux.HandleFunc(pattern, func(http.ResponseWriter, *http.Request) {})
	}
	costs := map[string]int64{"GET /health": 0, "GET /search": 5, "POST /exports": 50}
	key := httplimit.ByIP(0)
	charges := func(r *http.Request) []client.Charge {
		_, pattern := mux.Handler(r)
		cost, ok := costs[pattern]
		switch {
		case !ok:
			cost = 1 // also of what does not exist
		case cost == 0:
			return nil // the limiter is not asked
		}
		return []client.Charge{{Policy: "api", Key: key(r), Cost: client.Cost(cost)}}
	}
	handler := httplimit.New(limiter, charges, httplimit.Closed(time.Second))(mux)

	show(handler, "", "GET /health", "GET /items/7", "GET /search", "POST /exports", "POST /exports", "GET /no/such/thing")
	// Output:
	// GET /health 200 no limit
	// GET /items/7 200 "api";r=99;t=1
	// GET /search 200 "api";r=94;t=1
	// POST /exports 200 "api";r=44;t=1
	// POST /exports 429 "api";r=44;t=1
	// GET /no/such/thing 404 "api";r=43;t=1
}

// Users have a bucket each, whoever is not logged in has that of the address. All of them share one for the
// whole service: a request takes from both, or from none.
func ExampleByUser() {
	limiter := limiterWith(client.Policy{Name: "person", Capacity: 2, Refill: 1, Every: time.Minute},
		client.Policy{Name: "service", Capacity: 1000, Refill: 1000, Every: time.Second})
	verifiedUser := func(r *http.Request) string {
		name, password, _ := r.BasicAuth()
		if password != "correct" {
			return ""
		}
		return name
	}
	key := httplimit.ByUser(verifiedUser, httplimit.ByIP(0))
	charges := func(r *http.Request) []client.Charge {
		return []client.Charge{{Policy: "person", Key: key(r)}, {Policy: "service", Key: "all"}}
	}
	handler := httplimit.New(limiter, charges, httplimit.Closed(time.Second))(http.NotFoundHandler())

	show(handler, "ann:correct", "GET /", "GET /", "GET /")
	show(handler, "", "GET /")
	show(handler, "ann:guess", "GET /") // of anybody
	show(handler, "", "GET /")
	// Output:
	// GET / 404 "person";r=1;t=60, "service";r=999;t=1
	// GET / 404 "person";r=0;t=60, "service";r=998;t=1
	// GET / 429 "person";r=0;t=60, "service";r=998;t=1
	// GET / 404 "person";r=1;t=60, "service";r=997;t=1
	// GET / 404 "person";r=0;t=60, "service";r=996;t=1
	// GET / 429 "person";r=0;t=60, "service";r=996;t=1
}
