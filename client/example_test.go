package client_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
)

// newLimiter stands for client.New(pool). The fake answers as a database does.
func newLimiter() *clienttest.Fake { return clienttest.New(nil) }

// check and must keep the examples to the point. A program handles its errors.
func check(err error) {
	if err != nil {
		panic(err)
	}
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

// A denial is an answer: it tells how long to wait, or that waiting is of no use.
func ExampleLimiter_Acquire() {
	ctx := context.Background()
	limiter := newLimiter()

	check(limiter.DefinePolicy(ctx, client.Policy{Name: "exports", Capacity: 10, Refill: 1, Every: time.Hour}))

	for _, cost := range []int64{8, 5, 11} {
		d, err := limiter.Acquire(ctx, "exports", "user:42", client.Cost(cost))
		switch {
		case err != nil:
			panic(err)
		case d.Allowed:
			fmt.Printf("%d: allowed, %d of %d left\n", cost, d.Remaining, d.Capacity)
		case d.Never():
			fmt.Printf("%d: more than %d will never be\n", cost, d.Capacity)
		default: // rounded, because some microseconds have passed since the first
			fmt.Printf("%d: try again in %v\n", cost, d.RetryAfter.Round(time.Minute))
		}
	}
	// Output:
	// 8: allowed, 2 of 10 left
	// 5: try again in 3h0m0s
	// 11: more than 10 will never be
}

// A request that is sent again, because its answer was lost, is charged once.
func ExampleIdempotencyKey() {
	ctx := context.Background()
	limiter := newLimiter()

	check(limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Hour}))

	order := 1042 // the program's own number, the same for every attempt
	once := client.IdempotencyKey(fmt.Sprint("order ", order))
	for range 2 {
		d := must(limiter.Acquire(ctx, "api", "user:42", client.Cost(4), once))
		fmt.Println(d.Allowed, d.Remaining, d.Replayed)
	}

	_, err := limiter.Acquire(ctx, "api", "user:42", client.Cost(5), once)
	fmt.Println(errors.Is(err, client.ErrIdempotencyMismatch))
	// Output:
	// true 6 false
	// true 6 true
	// true
}

// One request, three limits: all of them allow it, or nothing is taken.
func ExampleLimiter_AcquireAll() {
	ctx := context.Background()
	limiter := newLimiter()

	for _, p := range []client.Policy{
		{Name: "user", Capacity: 10, Refill: 10, Every: time.Hour},
		{Name: "org", Capacity: 15, Refill: 15, Every: time.Hour},
		{Name: "endpoint", Capacity: 1000, Refill: 1000, Every: time.Hour},
	} {
		check(limiter.DefinePolicy(ctx, p))
	}
	for _, user := range []string{"42", "43"} {
		charges := []client.Charge{
			{Policy: "user", Key: user, Cost: client.Cost(8)},
			{Policy: "org", Key: "7", Cost: client.Cost(8)},
			{Policy: "endpoint", Key: "/search"}, // 1
		}
		d := must(limiter.AcquireAll(ctx, charges))
		fmt.Printf("%v, because of %s, which has %d left\n", d.Allowed, charges[d.Binding].Policy, d.Remaining)
		for i, c := range charges {
			fmt.Println(" ", c.Policy, d.Decisions[i].Allowed, d.Decisions[i].Remaining)
		}
	}
	// Output:
	// true, because of user, which has 2 left
	//   user true 2
	//   org true 7
	//   endpoint true 999
	// false, because of org, which has 7 left
	//   user true 10
	//   org false 7
	//   endpoint true 999
}

// At most two jobs of a tenant at a time, on any number of machines. A worker that dies frees its slot within a minute.
func ExampleLimiter_Hold() {
	ctx := context.Background()
	limiter := newLimiter()

	check(limiter.DefinePolicy(ctx, client.Policy{Name: "jobs", Capacity: 2, Lease: time.Minute}))

	work := func(ctx context.Context, job string) { fmt.Println(job, ctx.Err()) } // until ctx ends
	run := func(job string, next func()) {
		h, d, err := limiter.Hold(ctx, "jobs", "tenant:7")
		switch {
		case err != nil:
			panic(err)
		case !d.Allowed: // d.RetryAfter is the end of a lease, and slots are usually free earlier
			fmt.Println(job, "has to wait")
			return
		}
		defer func() { check(h.Release(ctx)) }()
		work(h.Context(), job)
		next()
	}
	run("import", func() {
		run("export", func() {
			run("report", func() {})
		})
	})
	run("report", func() {})
	// Output:
	// import <nil>
	// export <nil>
	// report has to wait
	// report <nil>
}
