package client_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
)

// newLimiter stands for client.New(pool). The fake answers as a database does.
func newLimiter() *clienttest.Fake { return clienttest.New(nil) }

var pool *pgxpool.Pool // the program's own

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

// In a transaction the tokens are taken if it commits, and only then.
func ExampleLimiter_WithTx() {
	ctx := context.Background()
	limiter := client.New(pool)

	check(limiter.DefinePolicy(ctx, client.Policy{Name: "signups", Capacity: 10, Refill: 1, Every: time.Hour}))

	failed := errors.New("card declined")
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// The work comes first: from here on the bucket is locked.
		d := must(limiter.WithTx(tx).Acquire(ctx, "signups", "203.0.113.7"))
		fmt.Println(d.Remaining) // 9
		return failed
	})
	fmt.Println(err)

	d := must(limiter.Peek(ctx, "signups", "203.0.113.7"))
	fmt.Println(d.Remaining) // 10: the token came back
}

// A budget of tokens a day for a language model: take the most an answer can cost, give back what it
// did not.
func ExampleLimiter_Refund() {
	ctx := context.Background()
	limiter := newLimiter()

	check(limiter.DefinePolicy(ctx, client.Policy{
		Name: "llm-tokens", Capacity: 100_000, Refill: 100_000, Every: 24 * time.Hour, Stepped: client.Yes,
	}))

	const prompt, maxAnswer = 1_200, 4_000
	d := must(limiter.Acquire(ctx, "llm-tokens", "team:7", client.Cost(prompt+maxAnswer)))
	fmt.Println(d.Allowed, d.Remaining)

	answer := int64(850) // as the model reports it
	d = must(limiter.Refund(ctx, "llm-tokens", "team:7", maxAnswer-answer))
	fmt.Println(d.Remaining, "left until the budget is renewed")

	d = must(limiter.Acquire(ctx, "llm-tokens", "team:7", client.Cost(99_000)))
	fmt.Println(d.Allowed, d.RetryAfter.Round(time.Hour))
	// Output:
	// true 94800
	// 97950 left until the budget is renewed
	// false 24h0m0s
}

// Definitions belong to the program: stating them at every start changes nothing that has not changed.
func ExampleLimiter_DefinePolicy() {
	ctx := context.Background()
	limiter := newLimiter()

	for _, p := range []client.Policy{
		{Name: "api", Capacity: 100, Refill: 10, Every: time.Second},
		{Name: "login", Capacity: 5, Refill: 5, Every: 15 * time.Minute, Stepped: client.Yes},
		{Name: "pixel", Capacity: 1000, Refill: 1000, Every: time.Minute, Durable: client.No},
	} {
		check(limiter.DefinePolicy(ctx, p))
	}
	for _, p := range must(limiter.Policies(ctx)) {
		fmt.Printf("%s: %d every %v, stepped %v, durable %v\n", p.Name, p.Refill, p.Every, p.Stepped, p.Durable)
	}
	// Output:
	// api: 10 every 1s, stepped no, durable yes
	// login: 5 every 15m0s, stepped yes, durable yes
	// pixel: 1000 every 1m0s, stepped no, durable no
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

// A customer with a bigger plan, and one that is blocked for a day.
func ExampleLimiter_Override() {
	ctx := context.Background()
	limiter := newLimiter()

	check(limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 100, Refill: 10, Every: time.Second}))
	check(limiter.Override(ctx, client.Override{Policy: "api", Key: "user:42", Capacity: 5000, Refill: 500}))
	check(limiter.Override(ctx, client.Override{
		Policy: "api", Key: "user:66", Capacity: client.Zero, ExpiresAt: time.Now().Add(24 * time.Hour),
	}))

	for _, user := range []string{"user:1", "user:42", "user:66"} {
		d := must(limiter.Acquire(ctx, "api", user))
		fmt.Println(user, d.Allowed, d.Remaining, d.Capacity, d.RetryAfter.Round(time.Hour))
	}
	fmt.Println(must(limiter.RemoveOverride(ctx, "api", "user:66")))
	// Output:
	// user:1 true 99 100 0s
	// user:42 true 4999 5000 0s
	// user:66 false 0 0 24h0m0s
	// true
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

// A worker that has nothing else to do waits for a slot.
func ExampleLimiter_HoldWait() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	limiter := newLimiter()

	check(limiter.DefinePolicy(ctx, client.Policy{Name: "migration", Capacity: 1, Lease: time.Minute}))

	h, _, err := limiter.HoldWait(ctx, "migration", "all")
	check(err)
	defer func() { check(h.Release(ctx)) }() // also after ctx has ended

	_, _, err = limiter.HoldWait(ctx, "migration", "all")
	fmt.Println(errors.Is(err, context.DeadlineExceeded))
	// Output: true
}

// A limit is tried out on real traffic before it is enforced.
func ExamplePolicy_shadow() {
	ctx := context.Background()
	limiter := newLimiter()

	check(limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 2, Refill: 1, Every: time.Hour, Shadow: client.Yes}))
	for range 3 {
		d := must(limiter.Acquire(ctx, "api", "user:42"))
		fmt.Println(d.Allowed, d.Remaining, d.Shadowed)
	}
	check(limiter.DefinePolicy(ctx, client.Policy{Name: "api", Shadow: client.No}))
	fmt.Println(must(limiter.Acquire(ctx, "api", "user:42")).Allowed)
	// Output:
	// true 1 false
	// true 0 false
	// true 0 true
	// false
}

// A server with many requests at a time.
func ExampleNewCombiner() {
	ctx := context.Background()

	limiter := client.NewCombiner(pool)
	defer limiter.Close() // before the pool

	check(limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 100, Refill: 1, Every: time.Hour}))

	var allowed atomic.Int64
	var requests sync.WaitGroup
	for range 300 {
		requests.Go(func() {
			d := must(limiter.Acquire(ctx, "api", "user:42"))
			if d.Allowed {
				allowed.Add(1)
			}
		})
	}
	requests.Wait()
	fmt.Println(allowed.Load()) // 100
}

// A client that does not wait as long as it was told is denied without a call.
func ExampleDenialCache() {
	ctx := context.Background()
	limiter := client.New(pool, client.DenialCache())

	check(limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Hour}))

	must(limiter.Acquire(ctx, "api", "user:42", client.Cost(10)))
	before := pool.Stat().AcquireCount()
	for range 1000 {
		must(limiter.Acquire(ctx, "api", "user:42"))
	}
	fmt.Println(pool.Stat().AcquireCount() - before) // 1

	// What is given back through this limiter is seen at once.
	must(limiter.Refund(ctx, "api", "user:42", 10))
	fmt.Println(must(limiter.Acquire(ctx, "api", "user:42")).Allowed) // true
}
