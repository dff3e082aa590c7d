// Package httplimit is middleware for net/http: requests are charged to buckets of pgratelimit, and refused
// with 429 when a bucket does not cover its charge.
//
//	limit := httplimit.New(limiter, httplimit.Per("api", httplimit.ByIP(0)), httplimit.Open(100*time.Millisecond))
//	err := http.ListenAndServe(":8080", limit(mux))
//
// Behind a proxy it is ByIP(1): see [ByIP].
//
// The program must choose three things, which have no default: the buckets that a request is charged to, the
// limiter ([client.Limiter], [client.Combiner], or any other [client.Acquirer]), and the fate of requests
// while the database does not answer: [Closed], [Open] or [Local].
//
// # The answer to a client
//
// An answer has the fields of draft-ietf-httpapi-ratelimit-headers-11, for each policy that was charged:
//
//	RateLimit-Policy: "api";q=100;w=10
//	RateLimit: "api";r=37;t=1
//
// The bucket holds 100 tokens (q), an empty one is full in 10 seconds (w, only with [Policies]), 37 are
// left (r), and there will be more in about a second (t). A client that takes no more than r within t is not
// refused, if no other client takes from the same bucket.
//
// A request that a bucket does not cover is answered with 429 and problem+json, which names the policies that
// refused. Retry-After is the time until the same request is allowed, in seconds, rounded up. It is left out when
// no wait would help.
//
// The answer never has the key of a bucket.
//
// # At most so many at a time
//
// [Slots] is middleware of its own, which holds slots while a request is served:
//
//	slots := httplimit.Slots(limiter, httplimit.Per("reports", httplimit.ByIP(0)), httplimit.Closed(time.Second))
//	mux.Handle("GET /reports", slots(reports))
//
// # Streaming and other headers
//
// The handler gets the ResponseWriter that the server made: streaming, hijacking and everything else that an
// [http.ResponseController] does works as without the middleware.
//
// A header such as Idempotency-Key or X-Request-ID means nothing to this package. A client that chooses the
// idempotency key of its own charge repeats one, and passes every time: see [IdempotencyKey].
package httplimit
