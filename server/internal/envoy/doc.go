// Package envoy is envoy.service.ratelimit.v3.RateLimitService: it finds the rules of a request's descriptors, and asks the
// buckets of all of them at once.
//
//   - files: rules are read, from one file or all those of a folder.
//   - rules: they become a tree, in which the entries of a descriptor find one.
//   - policies: those that rules describe are defined, and others must be there.
//   - answer: a request becomes charges, and what the buckets say becomes statuses.
//   - api: the service over gRPC and JSON. It changes to other rules between two requests.
package envoy
