package grpcapi

import (
	"context"
	"net"

	envoypb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec for short answers
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// Listen makes connections that have a part of the service's room.
func Listen(l net.Listener, s *service.Service) net.Listener { return listener{l, s} }

type listener struct {
	net.Listener
	service *service.Service
}

func (l listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &connection{Conn: conn, service: l.service}
	c.Connection.Close = func() { _ = c.Close() }
	return c, nil
}

// A connection is found by its address, which package grpc passes on.
type connection struct {
	net.Conn
	service.Connection
	service *service.Service
}

func (c *connection) Close() error {
	c.service.End(&c.Connection)
	return c.Conn.Close()
}

func (c *connection) RemoteAddr() net.Addr { return address{c.Conn.RemoteAddr(), c} }

type address struct {
	net.Addr
	of *connection
}

// place takes the memory of the answer to a request with a list.
func place(ctx context.Context, s *service.Service, q any) (*service.Place, error) {
	var size service.Size
	switch q := q.(type) {
	case *pb.AcquireManyRequest:
		size.Operation, size.Elements = service.AcquireMany, len(q.GetRequests())
	case *pb.AcquireStreamRequest:
		size.Operation, size.Elements = service.AcquireMany, len(q.GetRequests())
	case *pb.AcquireAllRequest:
		size.Operation, size.Elements = service.AcquireAll, len(q.GetCharges())
	case *envoypb.RateLimitRequest:
		size.Operation, size.Elements = service.Gate, len(q.GetDescriptors())
	}
	if size.IsShort() {
		return nil, nil
	}
	size.Bytes = proto.Size(q.(proto.Message))
	return s.Place(connectionOf(ctx), size)
}

func connectionOf(ctx context.Context) *service.Connection {
	p, _ := peer.FromContext(ctx)
	return &p.Addr.(address).of.Connection
}

// BoundUnread bounds the memory of the answers that clients do not read.
func BoundUnread(s *service.Service) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(codec{encoding.GetCodecV2("proto")}),
		grpc.UnaryInterceptor(func(ctx context.Context, q any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			place, err := place(ctx, s, q)
			if err != nil {
				return nil, err
			}
			response, err := handle(ctx, q)
			if err != nil {
				place.Leave()
				return nil, err
			}
			return placed{response.(proto.Message), place}, nil
		}),
	}
}

// A placed message has a place, or nil, until it is written or given up.
type placed struct {
	proto.Message
	place *service.Place
}

// A codec makes package grpc leave the places of messages.
type codec struct{ encoding.CodecV2 }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	p, isPlaced := v.(placed)
	if !isPlaced {
		return c.CodecV2.Marshal(v)
	}
	if p.place == nil {
		return c.CodecV2.Marshal(p.Message)
	}
	text, err := proto.Marshal(p.Message)
	if err != nil || mem.IsBelowBufferPoolingThreshold(cap(text)) { // which is not freed
		p.place.Leave()
	} else {
		p.place.Send()
	}
	return mem.BufferSlice{mem.NewBuffer(&text, pool(p))}, err
}

// A pool gets the buffer of its message when that is written.
type pool placed

func (pool) Get(length int) *[]byte { return new(make([]byte, length)) }
func (p pool) Put(*[]byte)          { p.place.Leave() }
