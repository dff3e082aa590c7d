// An API that asks the database itself, with the middleware for net/http.
//
//	PGHOST=localhost PGUSER=app PGPASSWORD=… PGDATABASE=app go run ./docs/examples/go
//	curl -i -H 'X-User: 42' localhost:3000/
package main

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

// What each path costs, in tokens.
var costs = map[string]int64{"/": 1, "/export": 10}

func main() {
	config, err := pgxpool.ParseConfig("") // what is not said comes from PG… of the environment
	if err != nil {
		log.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["lock_timeout"] = "500ms" // or a locked bucket holds up all that share its call
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		log.Fatal(err)
	}
	limiter := client.NewCombiner(pool) // requests that wait at the same moment share a call

	limit := httplimit.New(limiter, charges, httplimit.Closed(time.Second)) // or Open: that is for you to decide
	server := &http.Server{
		Addr:              "127.0.0.1:" + cmp.Or(os.Getenv("PORT"), "3000"),
		Handler:           limit(http.HandlerFunc(hello)),
		ReadHeaderTimeout: 5 * time.Second,
	}
	log.Fatal(server.ListenAndServe())
}

// userOf returns whom the request is from: an API of yours knows whom it has authenticated.
func userOf(r *http.Request) string { return r.Header.Get("X-User") }

// charges says what a request costs. Without a charge it passes.
func charges(r *http.Request) []client.Charge {
	user, cost := userOf(r), costs[r.URL.Path]
	if user == "" || cost == 0 {
		return nil
	}
	return []client.Charge{{Policy: "api", Key: "user:" + user, Cost: client.Cost(cost)}}
}

// hello is the API. The middleware has answered those who were denied, and has told all others in RateLimit what is left.
func hello(w http.ResponseWriter, r *http.Request) {
	switch {
	case costs[r.URL.Path] == 0:
		http.NotFound(w, r)
	case userOf(r) == "":
		http.Error(w, "who are you?", http.StatusUnauthorized)
	default:
		fmt.Fprintf(w, "hello, %s\n", userOf(r))
	}
}
