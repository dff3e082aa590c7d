package server_test

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
)

// methodsOf lists what a server can be asked, as reflection tells it to one who may ask.
func methodsOf(ctx context.Context, t *testing.T, s *testServer) (methods []string) {
	t.Helper()
	stream, err := reflectionpb.NewServerReflectionClient(s.conn).ServerReflectionInfo(ctx)
	require.NoError(t, err)
	ask := func(q *reflectionpb.ServerReflectionRequest) *reflectionpb.ServerReflectionResponse {
		t.Helper()
		require.NoError(t, stream.Send(q))
		reply, err := stream.Recv()
		require.NoError(t, err)
		return reply
	}
	list := ask(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}})
	for _, service := range list.GetListServicesResponse().GetService() {
		reply := ask(&reflectionpb.ServerReflectionRequest{
			MessageRequest: &reflectionpb.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: service.GetName()},
		})
		for _, text := range reply.GetFileDescriptorResponse().GetFileDescriptorProto() {
			var file descriptorpb.FileDescriptorProto
			require.NoError(t, proto.Unmarshal(text, &file))
			for _, found := range file.GetService() {
				if file.GetPackage()+"."+found.GetName() != service.GetName() {
					continue
				}
				for _, method := range found.GetMethod() {
					methods = append(methods, "/"+service.GetName()+"/"+method.GetName())
				}
			}
		}
	}
	require.NoError(t, stream.CloseSend())
	return methods
}

// invoke sends one message by a method of any kind, and returns the first error.
func invoke(ctx context.Context, s *testServer, method string, message []byte) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method, grpc.ForceCodec(raw{}))
	if err != nil {
		return err
	}
	if err := stream.SendMsg(&message); err != nil && !errors.Is(err, io.EOF) { // whose reason the next one tells
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	var reply []byte
	return stream.RecvMsg(&reply)
}
