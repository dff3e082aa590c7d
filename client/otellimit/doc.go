// Package otellimit counts with OpenTelemetry what limiters of pgratelimit do.
//
//	metrics, err := otellimit.New(otel.GetMeterProvider())
//	limiter := client.NewCombiner(pool, client.Observe(metrics.Hooks()))
//
// The instruments:
//
//   - ratelimit.requests counts requests for tokens, by policy and result: allowed, denied, replayed, shadowed, error or
//     fail_open
//   - ratelimit.prefetched counts those that were granted from the stock of a [client.Prefetcher], by policy
//   - ratelimit.acquire.duration is how long their callers waited for the answer, in seconds, by result
//   - ratelimit.wait.duration is how long [client.Limiter.Wait] has slept, in seconds, by result: allowed, or error if its ctx
//     ended first
//   - ratelimit.combiner.batch_size is how many requests shared a call of a [client.Combiner]
//
// A key is never an attribute. A policy that does not exist is _other, and so are those beyond the first 1,000: so there are
// never more than 6,006 series of requests. The SDK has a limit of its own, 2,000 of each instrument unless a program
// chooses another.
//
// # Middleware
//
// fail_open is a request that had no answer and was let pass, which only the middleware knows. So where there is middleware,
// it counts the requests, and the limiter does not count them again:
//
//	hooks := metrics.Hooks()
//	hooks.Answered = nil
//	limiter := client.NewCombiner(pool, client.Observe(hooks))
//	limit := httplimit.New(limiter, charges, httplimit.Open(timeout), httplimit.Observe(metrics.HTTP))
package otellimit
