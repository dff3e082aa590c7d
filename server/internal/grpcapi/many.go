package grpcapi

import (
	"context"
	"errors"
	"io"
	"sync"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// maxUnderWay is how many messages of a stream are answered at a time. A long message counts for several.
const maxUnderWay = 100

func (a api) AcquireMany(ctx context.Context, q *pb.AcquireManyRequest) (*pb.Answers, error) {
	list, err := a.service.AcquireMany(ctx, each(q.GetRequests(), request))
	return &pb.Answers{Answers: answers(list)}, err
}

type acquireStream = grpc.BidiStreamingServer[pb.AcquireStreamRequest, pb.AcquireStreamResponse]

// AcquireStream answers messages side by side. It ends when all that it has begun to answer is answered.
func (a api) AcquireStream(stream acquireStream) error {
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
		defer a.service.Unread(connectionOf(stream.Context())).Stop()
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
			place, err := place(stream.Context(), a.service, q)
			if e, ok := errors.AsType[*service.Error](err); ok {
				send(&pb.AcquireStreamResponse{Id: q.GetId(), Error: errorOf(e)}) // here, so that a client that does not read is read no further
				continue
			}
			size := 1 + int(place.Memory()*maxUnderWay/service.RoomOfStream)
			underWay += size
			answering.Go(func() {
				send(placed{a.answer(stream.Context(), q), place})
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
	list, err := a.service.AcquireMany(ctx, each(q.GetRequests(), request))
	if e, ok := errors.AsType[*service.Error](err); ok {
		response.Error = errorOf(e)
	} else {
		response.Answers = answers(list)
	}
	return response
}

func answers(list []service.Answer) []*pb.Answer {
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

func errorOf(e *service.Error) *pb.Error {
	return &pb.Error{Code: int32(e.Kind.Code()), Message: e.Error(), Reason: e.Kind.Reason(), Sqlstate: e.SQLState}
}

func each[From, To any](list []From, convert func(From) To) []To {
	converted := make([]To, len(list))
	for i, from := range list {
		converted[i] = convert(from)
	}
	return converted
}
