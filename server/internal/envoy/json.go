package envoy

import (
	"errors"
	"net/http"
	"strings"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
)

// Handler answers for s as the reference's /json does: with 200, or 429 if the request is over a limit. An error is a
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
		answer, err := s.Answer(r.Context(), &q)
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
		_, _ = w.Write(append(text, '\n')) // who has left needs no answer
	})
}

// withoutPackage is the error of package proto without its name, after which there is a space or another.
func withoutPackage(err error) error {
	return errors.New(strings.TrimLeft(strings.TrimPrefix(err.Error(), "proto:"), " \u00a0"))
}
