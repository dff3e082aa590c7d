// Package envoy is envoy.service.ratelimit.v3.RateLimitService: it finds the rules of a request's descriptors, and charges all
// their buckets at once.
//
//   - files: rules are read from one file, or from all files of a folder.
//   - rules: rules become a tree, in which the entries of a descriptor find their rule.
//   - policies: the policies that rules describe are defined. Other policies must exist.
//   - answer: a request becomes charges, and decisions become statuses.
//   - envoy: the service over gRPC and JSON. It changes to other rules between two requests.
package envoy

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
)

// Name is the name of the service.
var Name = pb.RateLimitService_ServiceDesc.ServiceName

// A Service answers requests by rules, which may be replaced.
type Service struct {
	pb.UnimplementedRateLimitServiceServer
	gate  Gate
	rules atomic.Pointer[Rules]
}

// New returns a Service.
func New(gate Gate, rules *Rules) *Service {
	s := &Service{gate: gate}
	s.Use(rules)
	return s
}

// Use replaces the rules for the next requests.
func (s *Service) Use(rules *Rules) { s.rules.Store(rules) }

// Register adds s to a gRPC server.
func Register(server grpc.ServiceRegistrar, s *Service) { pb.RegisterRateLimitServiceServer(server, s) }

// ShouldRateLimit decides a request.
func (s *Service) ShouldRateLimit(ctx context.Context, q *pb.RateLimitRequest) (*pb.RateLimitResponse, error) {
	return s.rules.Load().answer(ctx, s.gate, q)
}

// Handler responds as /json of the reference does: with 200, or 429 if the request is over a limit. An error is a
// [jsonapi.Problem].
func Handler(s *Service, maxBytes int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, ok := jsonapi.ReadPost(w, r, maxBytes)
		if !ok {
			return
		}
		var q pb.RateLimitRequest
		if err := protojson.Unmarshal(text, &q); err != nil {
			jsonapi.Unreadable(withoutPackage(err)).Write(w)
			return
		}
		answer, err := s.ShouldRateLimit(r.Context(), &q)
		if err != nil {
			jsonapi.NewProblem(err).Write(w)
			return
		}
		if text, err = protojson.Marshal(answer); err != nil {
			jsonapi.NewProblem(err).Write(w)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if answer.GetOverallCode() == pb.RateLimitResponse_OVER_LIMIT {
			w.WriteHeader(http.StatusTooManyRequests)
		}
		_, _ = w.Write(append(text, '\n')) // an error here means that the client has hung up
	})
}

// withoutPackage removes the name of package proto from an error. A space or a no-break space follows it.
func withoutPackage(err error) error {
	return errors.New(strings.TrimLeft(strings.TrimPrefix(err.Error(), "proto:"), " \u00a0"))
}
