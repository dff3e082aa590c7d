package grpclimit

import (
	"context"
	"math"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/pgratelimit/client"
)

// pushback is the trailer by which a server tells a client when to try again, in milliseconds.
const pushback = "grpc-retry-pushback-ms"

// refuse returns the error of a denial, and sets the trailer.
func refuse(ctx context.Context, charges []client.Charge, d client.JointDecision) error {
	quota := &errdetails.QuotaFailure{}
	named := make(map[string]bool, 1)
	for i, c := range charges {
		if !d.Decisions[i].Allowed && !named[c.Policy] {
			named[c.Policy] = true
			quota.Violations = append(quota.Violations, &errdetails.QuotaFailure_Violation{
				Subject:     "policy:" + c.Policy,
				Description: "The bucket does not hold what the call costs.",
			})
		}
	}
	details := []protoadapt.MessageV1{protoadapt.MessageV1Of(quota)}
	for _, c := range charges {
		if named[c.Policy] {
			details = append(details, protoadapt.MessageV1Of(&errdetails.ErrorInfo{
				Reason: "RATE_LIMITED", Domain: "pgratelimit", Metadata: map[string]string{"policy": c.Policy},
			}))
			break
		}
	}
	wait := "-1"
	if !d.Never() {
		details = append(details, protoadapt.MessageV1Of(&errdetails.RetryInfo{RetryDelay: durationpb.New(d.RetryAfter)}))
		wait = strconv.FormatInt(milliseconds(d.RetryAfter), 10)
	}
	// Outside of a call there is no trailer, and nobody to read it.
	_ = grpc.SetTrailer(ctx, metadata.Pairs(pushback, wait))

	s := status.New(codes.ResourceExhausted, "rate limit exceeded")
	if detailed, err := s.WithDetails(details...); err == nil {
		s = detailed
	}
	return s.Err()
}

// milliseconds are rounded up. Clients read 32 bits.
func milliseconds(d time.Duration) int64 {
	ms := int64(d / time.Millisecond)
	if d%time.Millisecond > 0 {
		ms++
	}
	return min(ms, math.MaxInt32)
}
