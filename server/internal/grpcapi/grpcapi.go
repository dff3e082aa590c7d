// Package grpcapi is pgratelimit.v1.RateLimiter, the service over gRPC.
package grpcapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
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
	service  *service.Service
	stopping <-chan struct{}
}

func (a api) Acquire(ctx context.Context, q *pb.Request) (*pb.Decision, error) {
	return reply(a.service.Do(ctx, service.Acquire, request(q)))
}

func request(q *pb.Request) service.Request {
	return service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.Cost, IdempotencyKey: q.RequestId}
}

func (a api) AcquireUpTo(ctx context.Context, q *pb.AcquireUpToRequest) (*pb.PartialDecision, error) {
	d, err := a.service.Do(ctx, service.AcquireUpTo, service.Request{
		Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.AtMost, AtLeast: q.AtLeast, IdempotencyKey: q.RequestId,
	})
	return &pb.PartialDecision{Decision: decision(d.Decision), Taken: d.Taken}, err
}

func (a api) Reserve(ctx context.Context, q *pb.ReserveRequest) (*pb.Reservation, error) {
	d, err := a.service.Do(ctx, service.Reserve, service.Request{
		Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.Cost, IdempotencyKey: q.RequestId, Time: timeOf(q.GetMaxWait()),
	})
	like := decision(d.Decision)
	return &pb.Reservation{
		Verdict: like.Verdict, Wait: like.RetryAfter, Remaining: d.Remaining, ResetAfter: like.ResetAfter,
		Capacity: d.Capacity, Replayed: d.Replayed, Shadowed: d.Shadowed,
	}, err
}

func timeOf(d *durationpb.Duration) *service.Time {
	seconds := d.GetSeconds()
	switch {
	case d == nil:
		return nil
	case !d.IsValid() || seconds < -service.MaxTime || seconds > service.MaxTime:
		return &service.Time{Text: fmt.Sprintf("%d seconds and %d nanoseconds", seconds, d.GetNanos())}
	}
	return &service.Time{Duration: d.AsDuration()}
}

func (a api) Charge(ctx context.Context, q *pb.Request) (*pb.Decision, error) {
	return reply(a.service.Do(ctx, service.Charge, request(q)))
}

func (a api) Settle(ctx context.Context, q *pb.Request) (*pb.Decision, error) {
	return reply(a.service.Do(ctx, service.Settle, request(q)))
}

func (a api) Peek(ctx context.Context, q *pb.Charge) (*pb.Decision, error) {
	return reply(a.service.Do(ctx, service.Peek, charge(q)))
}

func charge(q *pb.Charge) service.Request {
	return service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.Cost}
}

func (a api) Refund(ctx context.Context, q *pb.RefundRequest) (*pb.Decision, error) {
	return reply(a.service.Do(ctx, service.Refund, service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Cost: q.Amount}))
}

func (a api) Pause(ctx context.Context, q *pb.PauseRequest) (*pb.Decision, error) {
	return reply(a.service.Do(ctx, service.Pause, service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Time: timeOf(q.GetPauseFor())}))
}

func (a api) Hold(ctx context.Context, q *pb.HoldRequest) (*pb.HoldDecision, error) {
	d, err := a.service.Do(ctx, service.Hold, service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Holder: q.GetHolder(), Cost: q.Cost})
	like := decision(d.Decision)
	return &pb.HoldDecision{
		Verdict: like.Verdict, Remaining: d.Remaining, RetryAfter: like.RetryAfter, HeldFor: durationpb.New(d.HeldFor),
		Capacity: d.Capacity, Renewed: d.Replayed, Shadowed: d.Shadowed,
	}, err
}

func (a api) Renew(ctx context.Context, q *pb.Holder) (*pb.RenewResponse, error) {
	d, err := a.service.Do(ctx, service.Renew, holder(q))
	if !d.Allowed {
		return &pb.RenewResponse{}, err
	}
	return &pb.RenewResponse{HeldFor: durationpb.New(d.HeldFor)}, err
}

func (a api) Release(ctx context.Context, q *pb.Holder) (*pb.ReleaseResponse, error) {
	d, err := a.service.Do(ctx, service.Release, holder(q))
	return &pb.ReleaseResponse{Released: d.Allowed}, err
}

func holder(q *pb.Holder) service.Request {
	return service.Request{Policy: q.GetPolicy(), Key: q.GetLogicalKey(), Holder: q.GetHolder()}
}

func (a api) AcquireAll(ctx context.Context, q *pb.AcquireAllRequest) (*pb.JointDecision, error) {
	d, err := a.service.Do(ctx, service.AcquireAll, service.Request{List: each(q.GetCharges(), charge), IdempotencyKey: q.RequestId})
	return &pb.JointDecision{Whole: decision(d.Decision), Binding: int32(d.Binding), Decisions: each(d.Decisions, decision)}, err
}

func (a api) SettleAll(ctx context.Context, q *pb.SettleAllRequest) (*pb.JointSettlement, error) {
	d, err := a.service.Do(ctx, service.SettleAll, service.Request{List: each(q.GetSettlements(), charge), IdempotencyKey: q.RequestId})
	return &pb.JointSettlement{Replayed: d.Replayed, Decisions: each(d.Decisions, decision)}, err
}

func reply(a service.Answer, err error) (*pb.Decision, error) { return decision(a.Decision), err }

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

// Option checks the tokens when the header of a call is read. An interceptor would run after the message has been decoded.
func (t Tokens) Option(s *service.Service) grpc.ServerOption {
	return grpc.InTapHandle(func(ctx context.Context, call *tap.Info) (context.Context, error) {
		tokens := t.Calls
		if strings.HasPrefix(call.FullMethodName, "/grpc.health.v1.Health/") {
			tokens = t.Health
		}
		if tokens.Admit(call.Header["authorization"]) {
			return ctx, nil
		}
		kind := service.Unauthenticated
		if from, isKnown := peer.FromContext(ctx); isKnown {
			s.Refuse(kind.Status, call.FullMethodName, from.Addr.String())
		}
		return ctx, service.StatusWith(kind.Code, "no token that the server knows: send the header authorization: Bearer …",
			&errdetails.ErrorInfo{Reason: kind.Reason}).Err()
	})
}

// maxUnderWay is how many messages of a stream are answered at a time. A long message counts for several.
const maxUnderWay = 100

func (a api) AcquireMany(ctx context.Context, q *pb.AcquireManyRequest) (*pb.Answers, error) {
	d, err := a.service.Do(ctx, service.AcquireMany, service.Request{List: each(q.GetRequests(), request)})
	return &pb.Answers{Answers: answers(d.Answers)}, err
}

// AcquireStream answers messages side by side. It ends when all that it has begun to answer is answered.
func (a api) AcquireStream(stream pb.RateLimiter_AcquireStreamServer) error {
	next, messages := make(chan struct{}), make(chan *pb.AcquireStreamRequest)
	defer close(next)
	var ended error // set before messages is closed
	go func() {     // until the stream has no more messages, or the handler has returned
		defer close(messages)
		for range next { // a message that was read and waits would take memory
			q, err := stream.Recv()
			if err != nil {
				ended = err
				return
			}
			select {
			case messages <- q:
			case <-stream.Context().Done():
				return
			}
		}
	}()

	var answering sync.WaitGroup
	defer answering.Wait()
	var sending sync.Mutex
	send := func(response any) {
		sending.Lock()
		defer sending.Unlock()
		defer a.service.CloseUnlessRead(connectionOf(stream.Context())).Stop()
		_ = stream.SendMsg(response) // an error ends the stream, and so Recv
	}
	underWay, sent := 0, make(chan int, maxUnderWay)
	for {
		for underWay >= maxUnderWay || len(sent) > 0 {
			select {
			case n := <-sent:
				underWay -= n
			case <-a.stopping:
				return errStopping
			}
		}
		next <- struct{}{}
		select {
		case q, ok := <-messages:
			if !ok && errors.Is(ended, io.EOF) {
				return nil
			}
			if !ok {
				return ended
			}
			unread, err := reserve(stream.Context(), a.service, q)
			if err != nil {
				send(&pb.AcquireStreamResponse{Id: q.GetId(), Error: errorOf(err)}) // here, so that a client that does not read is read no further
				continue
			}
			size := 1
			if unread != nil {
				size += int(unread.Memory * maxUnderWay / service.MemoryOfStream)
			}
			underWay += size
			answering.Go(func() {
				send(message{a.answer(stream.Context(), q), unread})
				sent <- size
			})
		case <-a.stopping:
			return errStopping
		}
	}
}

var errStopping = service.StatusWith(codes.Unavailable, "the server stops: messages without an answer have taken nothing",
	&errdetails.ErrorInfo{Reason: "STOPPING"}).Err()

func (a api) answer(ctx context.Context, q *pb.AcquireStreamRequest) *pb.AcquireStreamResponse {
	response := &pb.AcquireStreamResponse{Id: q.GetId()}
	d, err := a.service.Do(ctx, service.AcquireMany, service.Request{List: each(q.GetRequests(), request)})
	if err != nil {
		response.Error = errorOf(err)
	} else {
		response.Answers = answers(d.Answers)
	}
	return response
}

func answers(list []client.Answer) []*pb.Answer {
	answers := make([]*pb.Answer, len(list))
	all := make([]struct {
		pb.Answer
		memory
	}, len(list)) // at once, for they are many
	for i, a := range list {
		answers[i] = &all[i].Answer
		if a.Err != nil {
			answers[i].Error = errorOf(a.Err)
		} else {
			answers[i].Decision = all[i].decision(a.Decision)
		}
	}
	return answers
}

func errorOf(err error) *pb.Error {
	e, _ := errors.AsType[*service.Error](err) // every error of the service is one
	return &pb.Error{Code: int32(e.Kind.Code), Message: e.Error(), Reason: e.Kind.Reason, Sqlstate: e.SQLState}
}

func each[From, To any](list []From, convert func(From) To) []To {
	converted := make([]To, len(list))
	for i, from := range list {
		converted[i] = convert(from)
	}
	return converted
}
