package envoy

import (
	"context"
	"sync/atomic"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"

	"github.com/pgratelimit/pgratelimit/server/internal/grpcapi"
)

// Name is that of the service.
var Name = pb.RateLimitService_ServiceDesc.ServiceName

// A Service answers by rules that can be changed.
type Service struct {
	gate  Gate
	rules atomic.Pointer[Rules]
}

// New returns a Service.
func New(gate Gate, rules *Rules) *Service {
	s := &Service{gate: gate}
	s.Use(rules)
	return s
}

// Use makes the next requests those of other rules.
func (s *Service) Use(rules *Rules) { s.rules.Store(rules) }

// Answer decides a request.
func (s *Service) Answer(ctx context.Context, q *pb.RateLimitRequest) (*pb.RateLimitResponse, error) {
	return s.rules.Load().answer(ctx, s.gate, q)
}

// Register lets a gRPC server answer for s.
func Register(server grpc.ServiceRegistrar, s *Service) {
	pb.RegisterRateLimitServiceServer(server, api{service: s})
}

type api struct {
	pb.UnimplementedRateLimitServiceServer
	service *Service
}

func (a api) ShouldRateLimit(ctx context.Context, q *pb.RateLimitRequest) (*pb.RateLimitResponse, error) {
	answer, err := a.service.Answer(ctx, q)
	if err != nil {
		return nil, grpcapi.StatusOf(err)
	}
	return answer, nil
}
