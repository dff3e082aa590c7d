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

import (
	"context"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/internal/failure"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Charges says of a call which buckets it is charged to, and how much. One charge is an Acquire, several are one
// AcquireAll: all of them, or nothing. A call without charges passes without being asked about. method is the full name,
// such as "/shop.v1.Orders/Create".
//
// The interceptor runs before the handler, and the messages of a call are not read yet. Who calls is in ctx: in its peer,
// and in the metadata, of which a client can write what it likes.
type Charges func(ctx context.Context, method string) []client.Charge

// A Failure says what happens to a call when the limiter has not answered within a timeout, or failed. There is no
// default: [Closed] and [Open] make one, and panic unless the timeout is positive.
//
// It decides about errors that are [client.Away]. With a [client.Fault] the call is refused in each mode, with INTERNAL: a client
// could provoke it to get past the limit. So it is with a [client.Setup] until the Interceptor has had its first decision, because a
// limit that was never there would be off. After that it decides about these, too. A call with a client.Setup is tried once more, 0.1
// seconds later: an upgrade may have replaced the functions.
//
// Calls without an answer are logged through log/slog's default logger, with the error and its remedy, once a minute for each error
// and policy.
type Failure struct {
	timeout time.Duration
	open    bool
}

// Closed refuses the call with UNAVAILABLE. It is for what must not run without a limit, such as a login.
func Closed(timeout time.Duration) Failure { return newFailure(timeout, false) }

// Open lets the call pass.
func Open(timeout time.Duration) Failure { return newFailure(timeout, true) }

func newFailure(timeout time.Duration, open bool) Failure {
	if timeout <= 0 {
		panic("grpclimit: the timeout must be positive")
	}
	return Failure{timeout, open}
}

// An Interceptor puts limits before the handlers of a server. It is safe for concurrent use.
type Interceptor struct {
	limiter client.Acquirer
	charges Charges
	failure Failure
	guard   *failure.Guard
}

// New returns an Interceptor, whose methods are for grpc.UnaryInterceptor and grpc.StreamInterceptor, or for a chain.
func New(limiter client.Acquirer, charges Charges, chosen Failure) *Interceptor {
	if limiter == nil || charges == nil {
		panic("grpclimit: New: no limiter, or no charges")
	}
	if chosen.timeout == 0 {
		panic("grpclimit: New: choose Closed or Open")
	}
	return &Interceptor{limiter, charges, chosen, failure.NewGuard()}
}

// Passed returns how many calls [Open] has let pass without an answer, by policy, for metrics.
func (i *Interceptor) Passed() map[string]int64 { return i.guard.Passed() }

// Unary charges a call of one message.
func (i *Interceptor) Unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := i.pass(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return handler(ctx, request)
}

// Stream charges a stream once, when it begins.
func (i *Interceptor) Stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := i.pass(stream.Context(), info.FullMethod); err != nil {
		return err
	}
	return handler(server, stream)
}

// pass returns nil if the handler is to run.
func (i *Interceptor) pass(ctx context.Context, method string) error {
	charges := i.charges(ctx, method)
	if len(charges) == 0 {
		return nil
	}
	d, err := i.guard.Ask(ctx, i.failure.timeout, i.limiter, charges)
	switch {
	case err == nil && d.Allowed:
		return nil
	case err == nil:
		return refuse(ctx, charges, d)
	case ctx.Err() != nil:
		// To go on would let a client pass that asks and leaves, if Open is chosen.
		return status.FromContextError(ctx.Err()).Err()
	}
	fails := i.guard.Fails(err)
	passes := i.failure.open && !fails
	i.guard.Report(ctx, charges, err, passes, "method", method)
	switch {
	case fails:
		return status.Error(codes.Internal, "rate limit: the call cannot be charged")
	case passes:
		return nil
	}
	return status.Error(codes.Unavailable, "rate limit: no answer")
}

// pushback is the trailer by which a server tells a client when to try again, in milliseconds.
const pushback = "grpc-retry-pushback-ms"

// refuse returns the error of a denial, and sets the trailer.
func refuse(ctx context.Context, charges []client.Charge, d client.JointDecision) error {
	quota := &errdetails.QuotaFailure{}
	var refusing []string
	for i, c := range charges {
		if !d.Decisions[i].Allowed && !slices.Contains(refusing, c.Policy) {
			refusing = append(refusing, c.Policy)
			quota.Violations = append(quota.Violations, &errdetails.QuotaFailure_Violation{
				Subject:     "policy:" + c.Policy,
				Description: "The bucket does not hold what the call costs.",
			})
		}
	}
	details := []protoadapt.MessageV1{protoadapt.MessageV1Of(quota)}
	if len(refusing) > 0 {
		details = append(details, protoadapt.MessageV1Of(&errdetails.ErrorInfo{
			Reason: "RATE_LIMITED", Domain: "pgratelimit", Metadata: map[string]string{"policy": refusing[0]},
		}))
	}
	wait := "-1"
	if !d.Never() {
		details = append(details, protoadapt.MessageV1Of(&errdetails.RetryInfo{RetryDelay: durationpb.New(d.RetryAfter)}))
		milliseconds := math.Ceil(float64(d.RetryAfter) / float64(time.Millisecond))
		wait = strconv.Itoa(int(min(milliseconds, math.MaxInt32))) // clients read 32 bits
	}
	// Outside of a call there is no trailer, and nobody to read it.
	_ = grpc.SetTrailer(ctx, metadata.Pairs(pushback, wait))

	s := status.New(codes.ResourceExhausted, "rate limit exceeded")
	if detailed, err := s.WithDetails(details...); err == nil {
		s = detailed
	}
	return s.Err()
}
