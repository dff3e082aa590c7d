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

// Listen makes connections that have a part of the service's memory.
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

// reserve takes the memory of the answer to a request with a list.
func reserve(ctx context.Context, s *service.Service, q any) (*service.Unread, error) {
	var size service.Size
	switch q := q.(type) {
	case *pb.AcquireManyRequest:
		size.Operation, size.Elements = service.AcquireMany, len(q.GetRequests())
	case *pb.AcquireStreamRequest:
		size.Operation, size.Elements = service.AcquireMany, len(q.GetRequests())
	case *pb.AcquireAllRequest:
		size.Operation, size.Elements = service.AcquireAll, len(q.GetCharges())
	case *pb.SettleAllRequest:
		size.Operation, size.Elements = service.SettleAll, len(q.GetSettlements())
	case *envoypb.RateLimitRequest:
		size.Operation, size.Elements = service.Gate, len(q.GetDescriptors())
	}
	if size.IsShort() {
		return nil, nil
	}
	size.Bytes = proto.Size(q.(proto.Message))
	return s.ReserveAnswer(connectionOf(ctx), size)
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
			unread, err := reserve(ctx, s, q)
			if err != nil {
				return nil, err
			}
			response, err := handle(ctx, q)
			if err != nil {
				unread.Done()
				return nil, err
			}
			return message{response.(proto.Message), unread}, nil
		}),
	}
}

// A message is unread until it is written or given up.
type message struct {
	proto.Message
	unread *service.Unread
}

// A codec makes package grpc tell when a message is written.
type codec struct{ encoding.CodecV2 }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	m, isOurs := v.(message)
	if !isOurs {
		return c.CodecV2.Marshal(v)
	}
	if m.unread == nil {
		return c.CodecV2.Marshal(m.Message)
	}
	text, err := proto.Marshal(m.Message)
	if err != nil || mem.IsBelowBufferPoolingThreshold(cap(text)) { // which is not freed
		m.unread.Done()
	} else {
		m.unread.Sent()
	}
	return mem.BufferSlice{mem.NewBuffer(&text, pool(m))}, err
}

// A pool gets the buffer of its message when that is written.
type pool message

func (pool) Get(length int) *[]byte { return new(make([]byte, length)) }
func (p pool) Put(*[]byte)          { p.unread.Done() }
