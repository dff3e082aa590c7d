package policyfile_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

// A handler with the costs that a file says.
func ExampleHTTP_Charges() {
	const text = `
policies:
  api: {capacity: 100, refill: 10, every: 1s}
http:
  routes:
    GET /items/{id}: {api: {key: user}}
    POST /exports: {api: {key: user, cost: 80}}
`
	limiter := clienttest.New(nil) // a client.Combiner in a program
	if err := limiter.DefinePolicy(context.Background(), client.Policy{Name: "api", Capacity: 100, Refill: 10, Every: time.Second}); err != nil {
		log.Fatal(err)
	}
	handler := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	userOf := func(*http.Request) string { return "ann" } // who the program has verified

	file, err := policyfile.Parse("limits.yaml", []byte(text))
	if err != nil {
		log.Fatal(err)
	}
	rules, err := file.Rules("") // or of an environment
	if err != nil {
		log.Fatal(err)
	}
	charges, err := rules.HTTP.Charges(userOf)
	if err != nil {
		log.Fatal(err)
	}
	limited := httplimit.New(limiter, charges, httplimit.Closed(time.Second))(handler)

	for _, request := range []string{"GET /items/5", "POST /exports", "POST /exports", "GET /about"} {
		var method, path string
		_, _ = fmt.Sscan(request, &method, &path)
		w := httptest.NewRecorder()
		limited.ServeHTTP(w, httptest.NewRequest(method, path, nil))
		fmt.Println(request, w.Code)
	}
	// Output:
	// GET /items/5 200
	// POST /exports 200
	// POST /exports 429
	// GET /about 200
}
