package grpcapi

import (
	"context"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/pgratelimit/pgratelimit/server/internal/auth"
)

// Tokens are what callers of a gRPC server need.
type Tokens struct {
	Calls  auth.Tokens // for all but
	Health auth.Tokens // for grpc.health.v1.Health
}

// Options make a gRPC server ask for the tokens.
func (t Tokens) Options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			if err := t.admit(ctx, info.FullMethod); err != nil {
				return nil, err
			}
			return handle(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			if err := t.admit(stream.Context(), info.FullMethod); err != nil {
				return err
			}
			return handle(srv, stream)
		}),
	}
}

func (t Tokens) admit(ctx context.Context, method string) error {
	tokens := t.Calls
	if strings.HasPrefix(method, "/grpc.health.v1.Health/") {
		tokens = t.Health
	}
	authorization := ""
	if given := metadata.ValueFromIncomingContext(ctx, "authorization"); len(given) == 1 {
		authorization = given[0]
	}
	if !tokens.Admit(authorization) {
		return withInfo(codes.Unauthenticated, "no token that the server knows: send the header authorization: Bearer …",
			&errdetails.ErrorInfo{Reason: "UNAUTHENTICATED"})
	}
	return nil
}
