// Package grpcapi is pgratelimit.v1.RateLimiter, the service over gRPC.
package grpcapi

import (
	"context"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/pgratelimit/client"
	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/auth"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// Register adds s to a gRPC server. When stopping is done, streams end.
func Register(server grpc.ServiceRegistrar, s *service.Service, stopping <-chan struct{}) {
	pb.RegisterRateLimiterServer(server, api{service: s, stopping: stopping})
}

// An api converts requests and answers. Its methods return errors of the service, which have a status of gRPC.
type api struct {
	pb.UnimplementedRateLimiterServer
	service  *service.Service
	stopping <-chan struct{}
}

func (a api) Acquire(ctx context.Context, q *pb.AcquireRequest) (*pb.Decision, error) {
	return reply(a.service.Acquire(ctx, acquireRequest(q)))
}

func acquireRequest(q *pb.AcquireRequest) service.Request {
	return service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.Cost, IdempotencyKey: q.RequestId}
}

func (a api) AcquireUpTo(ctx context.Context, q *pb.AcquireUpToRequest) (*pb.PartialDecision, error) {
	r := service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), IdempotencyKey: q.RequestId}
	d, err := a.service.AcquireUpTo(ctx, r, q.AtMost, q.AtLeast)
	return &pb.PartialDecision{Decision: decision(d.Decision), Taken: d.Taken}, err
}

func (a api) Reserve(ctx context.Context, q *pb.ReserveRequest) (*pb.Reservation, error) {
	r := service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.Cost, IdempotencyKey: q.RequestId}
	d, err := a.service.Reserve(ctx, r, span(q.GetMaxWait()))
	like := decision(client.Decision{Allowed: d.Allowed, RetryAfter: d.Wait, ResetAfter: d.ResetAfter})
	return &pb.Reservation{
		Verdict: like.Verdict, Wait: like.RetryAfter, Remaining: d.Remaining, ResetAfter: like.ResetAfter,
		Capacity: d.Capacity, Replayed: d.Replayed, Shadowed: d.Shadowed,
	}, err
}

func span(d *durationpb.Duration) *time.Duration {
	if d == nil {
		return nil
	}
	return new(d.AsDuration())
}

func (a api) Charge(ctx context.Context, q *pb.ChargeRequest) (*pb.Decision, error) {
	return reply(a.service.Charge(ctx, service.Request{
		Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.Cost, IdempotencyKey: q.RequestId,
	}))
}

func (a api) Settle(ctx context.Context, q *pb.SettleRequest) (*pb.Decision, error) {
	return reply(a.service.Settle(ctx, service.Request{
		Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.Cost, IdempotencyKey: q.RequestId,
	}))
}

func (a api) Peek(ctx context.Context, q *pb.PeekRequest) (*pb.Decision, error) {
	return reply(a.service.Peek(ctx, peekRequest(q)))
}

func peekRequest(q *pb.PeekRequest) service.Request {
	return service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.Cost}
}

func (a api) Refund(ctx context.Context, q *pb.RefundRequest) (*pb.Decision, error) {
	return reply(a.service.Refund(ctx, service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.Amount}))
}

func (a api) Pause(ctx context.Context, q *pb.PauseRequest) (*pb.Decision, error) {
	return reply(a.service.Pause(ctx, service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey()}, span(q.GetPauseFor())))
}

func (a api) Hold(ctx context.Context, q *pb.HoldRequest) (*pb.HoldDecision, error) {
	d, err := a.service.Hold(ctx, service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Holder: q.GetHolder(), Cost: q.Cost})
	like := decision(client.Decision{Allowed: d.Allowed, RetryAfter: d.RetryAfter})
	return &pb.HoldDecision{
		Verdict: like.Verdict, Remaining: d.Remaining, RetryAfter: like.RetryAfter, HeldFor: durationpb.New(d.HeldFor),
		Capacity: d.Capacity, Renewed: d.Renewed, Shadowed: d.Shadowed,
	}, err
}

func (a api) Renew(ctx context.Context, q *pb.RenewRequest) (*pb.RenewResponse, error) {
	heldFor, err := a.service.Renew(ctx, service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Holder: q.GetHolder()})
	if heldFor == 0 {
		return &pb.RenewResponse{}, err
	}
	return &pb.RenewResponse{HeldFor: durationpb.New(heldFor)}, err
}

func (a api) Release(ctx context.Context, q *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
	held, err := a.service.Release(ctx, service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Holder: q.GetHolder()})
	return &pb.ReleaseResponse{Released: held}, err
}

func (a api) AcquireAll(ctx context.Context, q *pb.AcquireAllRequest) (*pb.JointDecision, error) {
	r := service.JointRequest{Charges: make([]service.Request, len(q.GetCharges())), IdempotencyKey: q.RequestId}
	for i, c := range q.GetCharges() {
		r.Charges[i] = service.Request{Policy: c.GetPolicy(), Key: c.GetLogicalKey(), Cost: c.Cost}
	}
	d, err := a.service.AcquireAll(ctx, r)
	whole := &pb.JointDecision{Whole: decision(d.Decision), Binding: int32(d.Binding), Decisions: make([]*pb.Decision, len(d.Decisions))}
	for i := range d.Decisions {
		whole.Decisions[i] = decision(d.Decisions[i])
	}
	return whole, err
}

func reply(d client.Decision, err error) (*pb.Decision, error) { return decision(d), err }

func decision(d client.Decision) *pb.Decision { return new(memory).decision(d) }

// A memory is that of one decision.
type memory struct {
	pb.Decision
	retryAfter, resetAfter durationpb.Duration
}

func (m *memory) decision(d client.Decision) *pb.Decision {
	answer := &m.Decision
	answer.Verdict = pb.Verdict_DENIED
	if d.Allowed {
		answer.Verdict = pb.Verdict_ALLOWED
	}
	answer.Remaining, answer.Capacity = d.Remaining, d.Capacity
	answer.Replayed, answer.Shadowed, answer.Estimated = d.Replayed, d.Shadowed, d.Estimated
	set := func(to *durationpb.Duration, d time.Duration) *durationpb.Duration {
		to.Seconds, to.Nanos = int64(d/time.Second), int32(d%time.Second)
		return to
	}
	if !d.Never() {
		answer.RetryAfter = set(&m.retryAfter, d.RetryAfter)
	}
	if !d.NeverFull() {
		answer.ResetAfter = set(&m.resetAfter, d.ResetAfter)
	}
	return answer
}

// Tokens are the bearer tokens of a gRPC server.
type Tokens struct {
	Calls  auth.Tokens // for all but
	Health auth.Tokens // for grpc.health.v1.Health
}

// Option makes a gRPC server check the tokens when it has read the header of a call. An interceptor would run after the message has
// been decoded.
func (t Tokens) Option() grpc.ServerOption {
	return grpc.InTapHandle(func(ctx context.Context, call *tap.Info) (context.Context, error) {
		return ctx, t.admit(call.FullMethodName, call.Header)
	})
}

func (t Tokens) admit(method string, header metadata.MD) error {
	tokens := t.Calls
	if strings.HasPrefix(method, "/grpc.health.v1.Health/") {
		tokens = t.Health
	}
	if !tokens.Admit(header["authorization"]) {
		return service.StatusWith(codes.Unauthenticated, "no token that the server knows: send the header authorization: Bearer …",
			&errdetails.ErrorInfo{Reason: "UNAUTHENTICATED"}).Err()
	}
	return nil
}
