package grpcapi

import (
	"errors"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// Domain is that of the ErrorInfo in each error.
const Domain = "pgratelimit"

// StatusOf is an error as gRPC sends it.
func StatusOf(err error) error {
	var e *service.Error
	if !errors.As(err, &e) {
		return status.Error(codes.Internal, err.Error())
	}
	info := &errdetails.ErrorInfo{Reason: e.Kind.Reason()}
	if e.SQLState != "" {
		info.Metadata = map[string]string{"sqlstate": e.SQLState}
	}
	return withInfo(e.Kind.Code(), e.Error(), info)
}

func withInfo(code codes.Code, message string, info *errdetails.ErrorInfo) error {
	info.Domain = Domain
	plain := status.New(code, message)
	detailed, err := plain.WithDetails(info)
	if err != nil {
		return plain.Err()
	}
	return detailed.Err()
}
