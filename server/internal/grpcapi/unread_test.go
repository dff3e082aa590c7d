package grpcapi_test

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/pgratelimit/pgratelimit/client/clienttest"
	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/grpcapi"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

func serve(t *testing.T, limits service.Limits) string {
	s := service.New([]service.Limiter{clienttest.New(time.Now)}, limits, func(service.Call) {})
	server := grpc.NewServer(grpcapi.BoundUnread(s)...)
	grpcapi.Register(server, s, nil)
	listener := kit.NoError(net.Listen("tcp", "127.0.0.1:0"))(t)
	go server.Serve(grpcapi.Listen(listener, s)) //nolint:errcheck // until Stop
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}

// dial returns a connection that gets 64 kB of an answer that is not read.
func dial(t *testing.T, address string) *grpc.ClientConn {
	conn := kit.NoError(grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithStaticStreamWindowSize(1<<16)))(t)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// Clients that read no answers are cut off one after the other. Each takes a part of the room only, so that others are answered
// meanwhile, and leaves nothing taken.
func TestUnread_AConnectionThatDoesNotReadIsCutOff(t *testing.T) {
	t.Parallel()
	var requests []*pb.Request
	for range 1000 {
		requests = append(requests, &pb.Request{Policy: strings.Repeat("p", 100), LogicalKey: "k"})
	}
	for method, q := range map[string]proto.Message{
		pb.RateLimiter_AcquireStream_FullMethodName: &pb.AcquireStreamRequest{Requests: requests},
		pb.RateLimiter_AcquireMany_FullMethodName:   &pb.AcquireManyRequest{Requests: requests},
	} {
		t.Run(method[strings.LastIndex(method, "/")+1:], func(t *testing.T) {
			t.Parallel()
			address := serve(t, service.Limits{Calls: 1000, OwnConnections: 100, Time: time.Minute, ReadTime: 3 * time.Second})
			isStream := method == pb.RateLimiter_AcquireStream_FullMethodName
			other := pb.NewRateLimiterClient(dial(t, address))
			for range 5 { // together more than the room of all
				conn := dial(t, address)
				var streams []grpc.ClientStream
				for range 20 {
					streams = append(streams, kit.NoError(conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method))(t))
				}
				for _, stream := range streams {
					go func() {
						err := stream.SendMsg(q)
						for isStream && err == nil {
							err = stream.SendMsg(q)
						}
						_ = stream.CloseSend() // without which a call has no answer
					}()
				}
				for conn.GetState() == connectivity.Ready {
					require.NoError(t, kit.ErrorOf(other.AcquireMany(t.Context(), &pb.AcquireManyRequest{Requests: requests})))
				}
			}
		})
	}
}
