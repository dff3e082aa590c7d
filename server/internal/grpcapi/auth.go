package grpcapi

import (
	"context"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/tap"

	"github.com/pgratelimit/pgratelimit/server/internal/auth"
)

// Tokens are what callers of a gRPC server need.
type Tokens struct {
	Calls  auth.Tokens // for all but
	Health auth.Tokens // for grpc.health.v1.Health
}

// Option makes a gRPC server ask for the tokens, before it reads more of a call than its header: an interceptor would be asked
// when the message of a stranger has been decoded.
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
		return withInfo(codes.Unauthenticated, "no token that the server knows: send the header authorization: Bearer …",
			&errdetails.ErrorInfo{Reason: "UNAUTHENTICATED"})
	}
	return nil
}
