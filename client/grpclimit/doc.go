// Package grpclimit is interceptors for gRPC servers: calls are charged to buckets of pgratelimit, and refused with
// RESOURCE_EXHAUSTED when a bucket does not cover its charge.
//
//	limit := grpclimit.New(limiter, charges, grpclimit.Open(100*time.Millisecond))
//	server := grpc.NewServer(grpc.UnaryInterceptor(limit.Unary), grpc.StreamInterceptor(limit.Stream))
//
// Three things are the program's to say, and have no default: which buckets a call is charged to, who answers
// ([client.Limiter], [client.Combiner], or any other [client.Acquirer]), and what happens to calls while the database
// does not answer: [Closed] or [Open].
//
// # The answer to a client
//
// A refusal has three details of google.rpc. RetryInfo is the time until the same call is allowed. QuotaFailure names the
// policies that refused. ErrorInfo has the reason RATE_LIMITED, the domain pgratelimit, and the first of these policies.
// The trailer grpc-retry-pushback-ms tells clients that retry by themselves how long to wait: -1, which is not at all, if
// no wait would help. Then there is no RetryInfo either.
//
// The key of a bucket is in none of this.
package grpclimit
