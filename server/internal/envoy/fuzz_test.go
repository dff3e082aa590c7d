package envoy_test

import (
	"maps"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/server/internal/envoy"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

const fuzzed = `
domain: d
descriptors:
  - {key: a, rate_limit: {policy: p}}
  - {key: a, value: x, rate_limit: {policy: q}}
  - {key: a, value: y*, share_threshold: true, rate_limit: {policy: p}, descriptors: [{key: b, rate_limit: {policy: q, name: n}}]}
  - {key: b, rate_limit: {policy: q, overdraw: true}}
  - {key: c, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: d, rate_limit: {unlimited: true, replaces: [{name: n}]}}
`

// FuzzDescriptors sends whatever protobuf there is, twice, to buckets that do not refill. A request that is allowed has paid for
// each rule that it matches, and one that is refused has paid nothing.
func FuzzDescriptors(f *testing.F) {
	for _, descriptors := range [][]*common.RateLimitDescriptor{
		{of("a", "1")},
		{of("a", "x"), of("a", "x"), of("b", "")},
		{of("a", "y1", "b", "z"), of("a", "y2")},
		{of("c", ""), of("a", "1")},
		{of("d", ""), of("a", "y", "b", "z")},
		{{Entries: of("a", "1").Entries, IsNegativeHits: true}},
		{{Entries: of("a", "1").Entries, HitsAddend: wrapperspb.UInt64(0)}, {Entries: of("b", "1").Entries, HitsAddend: wrapperspb.UInt64(math.MaxUint64)}},
		{{Entries: of("a", "1").Entries, HitsAddend: wrapperspb.UInt64(math.MaxUint64)}, {Entries: of("a", "1").Entries, HitsAddend: wrapperspb.UInt64(6)}},
	} {
		seed := kit.NoError(proto.Marshal(&pb.RateLimitRequest{Domain: "d", Descriptors: descriptors}))(f)
		f.Add(seed)
	}
	rules := read(f, fuzzed)
	f.Fuzz(func(t *testing.T, message []byte) {
		var q pb.RateLimitRequest
		if proto.Unmarshal(message, &q) != nil {
			return
		}
		fake := clienttest.New(func() time.Time { return time.Unix(0, 0) })
		for name, capacity := range map[string]int64{"p": 10, "q": 5} {
			require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: name, Capacity: capacity, Refill: client.Zero, Every: time.Second}))
		}
		limits := service.Limits{Calls: 1, OwnConnections: 1, Time: time.Minute}
		asked := &book{}
		_, _ = envoy.New(asked, rules).ShouldRateLimit(t.Context(), &q)
		s := envoy.New(service.New(service.Single{Limiter: fake}, limits, func(service.Call) {}), rules)
		for range 2 {
			before := levels(t, fake, asked.charges)
			answer, err := s.ShouldRateLimit(t.Context(), &q)
			after := levels(t, fake, asked.charges)
			if err != nil {
				require.Equal(t, before, after, "an error that has taken")
				continue
			}
			require.Len(t, answer.Statuses, len(q.Descriptors))
			over := false
			for _, status := range answer.Statuses {
				over = over || status.Code == pb.RateLimitResponse_OVER_LIMIT
			}
			require.Equal(t, over, answer.OverallCode == pb.RateLimitResponse_OVER_LIMIT)
			switch {
			case over:
				require.Equal(t, before, after, "a refused request has taken")
			case !q.Descriptors[0].IsNegativeHits:
				requirePaid(t, asked.charges, before, after)
			}
		}
	})
}

// FuzzBuckets matches two descriptors, whose entries are split from a text: each has a bucket of its own, if it matches a rule
// at all and is not the other one again.
func FuzzBuckets(f *testing.F) {
	for _, seed := range [][2]string{
		{"a\x001\x00b\x002", "a\x001\x00b_2\x00"},
		{`a` + "\x00" + `1"],["b","2`, "a\x001\x00b\x002"},
		{"a\x00" + strings.Repeat("x", 600), "a\x00" + strings.Repeat("x", 601)},
		{"a\x00sha256:", "a\x00\\"},
		{"a\x00\u2028", "a\x00\\u2028"},
	} {
		f.Add(seed[0], seed[1])
	}
	rules := read(f, `
domain: d
descriptors:
  - {key: "a*", rate_limit: {policy: p}, descriptors: [{key: "b*", rate_limit: {policy: p}, descriptors: [{key: "*", rate_limit: {policy: p}}]}]}
  - {key: a, value: x, rate_limit: {policy: p}}
`)
	f.Fuzz(func(t *testing.T, a, b string) {
		q := &pb.RateLimitRequest{Domain: "d"}
		for _, text := range []string{a, b} {
			if !utf8.ValidString(text) {
				return // it is no protobuf
			}
			pairs := strings.Split(text, "\x00")
			if len(pairs)%2 == 1 {
				pairs = append(pairs, "")
			}
			q.Descriptors = append(q.Descriptors, of(pairs...))
		}
		_, asked := ask(t, rules, q.Descriptors...)
		if len(asked.charges) < 2 {
			return
		}
		areSame := proto.Equal(q.Descriptors[0], q.Descriptors[1])
		require.Equal(t, areSame, asked.charges[0].Key == asked.charges[1].Key, "%q and %q: %q", a, b, asked.charges[0].Key)
		require.LessOrEqual(t, len(asked.charges[0].Key), 512)
	})
}

type bucket struct{ policy, key string }

func levels(t *testing.T, fake *clienttest.Fake, charges []service.GateCharge) map[bucket]int64 {
	levels := make(map[bucket]int64)
	for _, charge := range charges {
		d := kit.NoError(fake.Peek(t.Context(), charge.Policy, charge.Key))(t)
		levels[bucket{charge.Policy, charge.Key}] = d.Remaining
	}
	return levels
}

// requirePaid checks that each bucket lost what was asked of it, and held what it had to.
func requirePaid(t *testing.T, charges []service.GateCharge, before, after map[bucket]int64) {
	const floor = -9_000_000_000_000
	want, lowest := maps.Clone(before), make(map[bucket]int64)
	for _, charge := range charges {
		b := bucket{charge.Policy, charge.Key}
		if !charge.Overdraw || charge.Cost == 0 {
			require.GreaterOrEqual(t, before[b], max(1, charge.Cost), "%v passed without the tokens", charge)
		}
		if charge.Overdraw {
			lowest[b] = floor
		}
		want[b] -= min(charge.Cost, -floor)
	}
	for b := range want {
		require.Equal(t, max(want[b], floor), after[b], "%v", b)
		require.GreaterOrEqual(t, after[b], lowest[b], "%v", b)
	}
}
