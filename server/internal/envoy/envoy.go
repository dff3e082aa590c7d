// Package envoy is envoy.service.ratelimit.v3.RateLimitService: it finds the rules of a request's descriptors, and charges all
// their buckets at once.
//
//   - rules.go: [Read] reads one file or all files of a folder, and makes a tree of rules, in which the entries of a descriptor find
//     theirs. Settle defines the policies that rules describe; other policies must exist.
//   - envoy.go: the service over gRPC and JSON. answer makes charges of a request, and statuses of their decisions. The rules change
//     between two requests.
package envoy

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
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

// Handler responds as /json of the reference does: with 200, or 429 over a limit. An error is a [jsonapi.Problem].
func Handler(s *Service, maxBytes int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, ok := jsonapi.ReadPost(w, r, maxBytes)
		if !ok {
			return
		}
		var q pb.RateLimitRequest
		if err := protojson.Unmarshal(text, &q); err != nil {
			jsonapi.Unreadable(withoutPackage(err)).Refuse(w, r)
			return
		}
		answer, err := s.ShouldRateLimit(r.Context(), &q)
		if err == nil {
			text, err = protojson.Marshal(answer)
		}
		if err != nil {
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

// A Gate admits requests: *[service.Service].
type Gate interface {
	Admit(ctx context.Context, charges []service.GateCharge, blocked bool) (client.JointDecision, error)
	RefundAll(ctx context.Context, charges []service.GateCharge) ([]client.Decision, error)
	Unmatched(domain, keys string)
}

// answer decides a request. It returns the error of the gate, or why the request is invalid.
func (r *Rules) answer(ctx context.Context, gate Gate, q *pb.RateLimitRequest) (*pb.RateLimitResponse, error) {
	isBack, err := check(q)
	if err != nil {
		return nil, err
	}
	matches := r.matches(q)
	if !slices.ContainsFunc(matches, func(m match) bool { return m.rule != nil }) {
		gate.Unmatched(q.GetDomain(), keysOf(q))
	}
	var charges []service.GateCharge
	var blocked, isZeroQuota, hasQuota bool // hasQuota: one that may be within its limit
	chargeOf := make([]int, len(matches))   // -1 for none
	for i, m := range matches {
		chargeOf[i] = -1
		if m.rule == nil {
			continue
		}
		blocked = blocked || m.isZero() && !m.quota
		isZeroQuota = isZeroQuota || m.isZero() && m.quota
		if m.policy != "" {
			hasQuota = hasQuota || m.quota
			chargeOf[i] = len(charges)
			charges = append(charges, service.GateCharge{
				Policy: m.policy, Key: m.key, Cost: hits(q, q.GetDescriptors()[i]), Overdraw: m.Overdraw, Shadow: m.shadow, Quota: m.quota,
			})
		}
	}
	blocked = blocked || isZeroQuota && !hasQuota
	whole := client.JointDecision{Decision: client.Decision{Allowed: true}}
	switch {
	case isBack:
		if len(charges) > 0 {
			whole.Decisions, err = gate.RefundAll(ctx, charges)
		}
	case blocked || len(charges) > 0:
		whole, err = gate.Admit(ctx, charges, blocked)
	}
	if err != nil {
		return nil, err
	}
	answer := &pb.RateLimitResponse{OverallCode: pb.RateLimitResponse_OK, Statuses: make([]*pb.RateLimitResponse_DescriptorStatus, len(matches))}
	if !whole.Allowed {
		answer.OverallCode = pb.RateLimitResponse_OVER_LIMIT
	}
	for i, m := range matches {
		var d client.Decision
		switch {
		case chargeOf[i] >= 0:
			d = whole.Decisions[chargeOf[i]]
		case m.rule != nil && m.isZero() && !isBack:
			d = client.Decision{RetryAfter: math.MaxInt64} // Never
		default:
			d.Allowed = true
		}
		answer.Statuses[i] = status(m, d)
	}
	return answer, nil
}

// check returns whether a request gives tokens back, or why it is invalid.
func check(q *pb.RateLimitRequest) (isBack bool, err error) {
	descriptors := q.GetDescriptors()
	switch {
	case q.GetDomain() == "":
		return false, service.Invalid("invalid domain", "domain is empty.", "Name the domain of the rules.")
	case len(descriptors) == 0 || len(descriptors) > service.MaxRequests:
		return false, service.Invalid("invalid descriptors", fmt.Sprintf("descriptors has %d elements.", len(descriptors)), fmt.Sprintf("Send 1 to %d.", service.MaxRequests))
	}
	isBack = descriptors[0].GetIsNegativeHits()
	for i, d := range descriptors {
		if d.GetIsNegativeHits() != isBack {
			return false, service.Invalid("invalid hits", fmt.Sprintf("descriptors 0 and %d have hits of different signs.", i),
				"Give tokens back in a request of negative hits only.")
		}
		if d.GetLimit() != nil {
			return false, service.Invalid("invalid limit", fmt.Sprintf("descriptor %d has a limit of its own.", i),
				"Limits are those of the rules: write one for it.")
		}
	}
	return isBack, nil
}

// keysOf returns the keys of all entries without their values: those of a descriptor are joined by dots, as in the name of a policy.
func keysOf(q *pb.RateLimitRequest) string {
	descriptors := make([]string, len(q.GetDescriptors()))
	for i, d := range q.GetDescriptors() {
		keys := make([]string, len(d.GetEntries()))
		for j, entry := range d.GetEntries() {
			keys[j] = entry.GetKey()
		}
		descriptors[i] = strings.Join(keys, ".")
	}
	return strings.Join(descriptors, ", ")
}

// hits returns the tokens that a descriptor takes or gives back.
func hits(q *pb.RateLimitRequest, d *common.RateLimitDescriptor) int64 {
	if own := d.GetHitsAddend(); own != nil {
		return int64(min(own.GetValue(), math.MaxInt64))
	}
	return int64(max(1, q.GetHitsAddend()))
}

// matches finds the rules of all descriptors, without the rules that another rule replaces.
func (r *Rules) matches(q *pb.RateLimitRequest) []match {
	matches := make([]match, len(q.GetDescriptors()))
	var replaced map[string]bool
	for i, d := range q.GetDescriptors() {
		matches[i] = r.find(q.GetDomain(), d.GetEntries())
		if matches[i].rule == nil {
			continue
		}
		for _, name := range matches[i].Replaces {
			if replaced == nil {
				replaced = make(map[string]bool)
			}
			replaced[name] = true
		}
	}
	for i := range matches {
		if m := matches[i].rule; m != nil && m.Name != "" && replaced[m.Name] && !m.Unlimited {
			matches[i] = match{}
		}
	}
	return matches
}

// status converts a decision for Envoy. Without a bucket it has no numbers.
func status(m match, d client.Decision) *pb.RateLimitResponse_DescriptorStatus {
	s := &pb.RateLimitResponse_DescriptorStatus{Code: pb.RateLimitResponse_OK}
	switch {
	case m.rule == nil:
		return s
	case m.Unlimited:
		s.LimitRemaining = math.MaxUint32
		return s
	}
	s.CurrentLimit = &pb.RateLimitResponse_RateLimit{Name: m.Name, RequestsPerUnit: m.RequestsPerUnit, Unit: units[m.Unit]}
	if m.Policy != "" { // the rule does not have the policy's numbers
		s.CurrentLimit.RequestsPerUnit = clamp(d.Capacity)
	}
	s.LimitRemaining = clamp(d.Remaining)
	s.DurationUntilReset = wholeSeconds(d.ResetAfter)
	if !d.Allowed || m.quota && d.Shadowed {
		s.Code = pb.RateLimitResponse_OVER_LIMIT
	}
	if !d.Allowed {
		s.DurationUntilReset = wholeSeconds(d.RetryAfter) // for never, the longest there is
	}
	return s
}

// wholeSeconds rounds up. Envoy passes on whole seconds only: after 2 s of 2.9 s a client would be denied again.
func wholeSeconds(d time.Duration) *durationpb.Duration {
	seconds := int64(d / time.Second)
	if d%time.Second > 0 {
		seconds++
	}
	return &durationpb.Duration{Seconds: seconds}
}

func clamp(tokens int64) uint32 { return uint32(min(max(tokens, 0), math.MaxUint32)) }
