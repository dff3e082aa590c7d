package server_test

import (
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	envoypb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

const edgeRules = `
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: day, requests_per_unit: 10}
  - key: address
    rate_limit: {name: by address, unit: hour, requests_per_unit: 3600}
  - key: blocked
    rate_limit: {unit: second, requests_per_unit: 0}
  - key: free
    rate_limit: {unlimited: true}
  - key: watched
    shadow_mode: true
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: api
    rate_limit: {policy: api}
  - key: llm
    rate_limit: {policy: budget, overdraw: true}
  - key: vip
    rate_limit: {unit: day, requests_per_unit: 5, name: vip, replaces: [{name: by address}]}
`

// An edge is a server with Envoy's rules, and a database in which time stands still.
type edge struct {
	*testServer
	db    *pgtest.DB
	envoy envoypb.RateLimitServiceClient
}

// startEdge is for a test that runs beside others.
func startEdge(t *testing.T, rules string) edge {
	db := parallelDB(t)
	db.Exec(t, freeze)
	return newEdge(t, db, "ENVOY_RULES="+kit.File(t, "rules.yaml", rules))
}

func newEdge(t *testing.T, db *pgtest.DB, settings ...string) edge {
	s := start(t, db.URL, settings...)
	return edge{s, db, envoypb.NewRateLimitServiceClient(s.conn)}
}

// of is a descriptor: keys and values in turns.
func of(pairs ...string) *common.RateLimitDescriptor {
	d := &common.RateLimitDescriptor{}
	for i := 0; i < len(pairs); i += 2 {
		d.Entries = append(d.Entries, &common.RateLimitDescriptor_Entry{Key: pairs[i], Value: pairs[i+1]})
	}
	return d
}

func times(hits uint64, d *common.RateLimitDescriptor) *common.RateLimitDescriptor {
	d.HitsAddend = wrapperspb.UInt64(hits)
	return d
}

func back(d *common.RateLimitDescriptor) *common.RateLimitDescriptor {
	d.IsNegativeHits = true
	return d
}

func (e edge) ask(descriptors ...*common.RateLimitDescriptor) (*envoypb.RateLimitResponse, error) {
	return e.envoy.ShouldRateLimit(e.t.Context(), &envoypb.RateLimitRequest{Domain: "edge", Descriptors: descriptors})
}

// ok and over are statuses of rules.
func ok(limit *envoypb.RateLimitResponse_RateLimit, remaining uint32, reset time.Duration) *envoypb.RateLimitResponse_DescriptorStatus {
	return &envoypb.RateLimitResponse_DescriptorStatus{
		Code: envoypb.RateLimitResponse_OK, CurrentLimit: limit, LimitRemaining: remaining, DurationUntilReset: &durationpb.Duration{Seconds: int64(math.Ceil(reset.Seconds()))},
	}
}

func over(limit *envoypb.RateLimitResponse_RateLimit, remaining uint32, retry time.Duration) *envoypb.RateLimitResponse_DescriptorStatus {
	s := ok(limit, remaining, retry)
	s.Code = envoypb.RateLimitResponse_OVER_LIMIT
	return s
}

func per(unit envoypb.RateLimitResponse_RateLimit_Unit, n uint32, name string) *envoypb.RateLimitResponse_RateLimit {
	return &envoypb.RateLimitResponse_RateLimit{Unit: unit, RequestsPerUnit: n, Name: name}
}

var (
	userLimit    = per(envoypb.RateLimitResponse_RateLimit_DAY, 10, "")
	addressLimit = per(envoypb.RateLimitResponse_RateLimit_HOUR, 3600, "by address")
	blockedLimit = per(envoypb.RateLimitResponse_RateLimit_SECOND, 0, "")
	watchedLimit = per(envoypb.RateLimitResponse_RateLimit_DAY, 1, "")
	vipLimit     = per(envoypb.RateLimitResponse_RateLimit_DAY, 5, "vip")
	apiLimit     = per(envoypb.RateLimitResponse_RateLimit_UNKNOWN, 10, "")
	llmLimit     = per(envoypb.RateLimitResponse_RateLimit_UNKNOWN, 1_000_000, "")
	none         = &envoypb.RateLimitResponse_DescriptorStatus{Code: envoypb.RateLimitResponse_OK}
	unlimited    = &envoypb.RateLimitResponse_DescriptorStatus{Code: envoypb.RateLimitResponse_OK, LimitRemaining: math.MaxUint32}
)

const (
	day   = 24 * time.Hour
	never = time.Duration(math.MaxInt64)
)

// requireStatuses asks, and checks the whole answer.
func (e edge) requireStatuses(descriptors list, statuses ...*envoypb.RateLimitResponse_DescriptorStatus) {
	requireAnswer(e.t, kit.NoError(e.ask(descriptors...))(e.t), statuses...)
}

// requireAnswer checks a whole answer: it is over the limit if a status is.
func requireAnswer(t testing.TB, got *envoypb.RateLimitResponse, statuses ...*envoypb.RateLimitResponse_DescriptorStatus) {
	want := &envoypb.RateLimitResponse{OverallCode: envoypb.RateLimitResponse_OK, Statuses: statuses}
	for _, s := range statuses {
		if s.Code == envoypb.RateLimitResponse_OVER_LIMIT {
			want.OverallCode = envoypb.RateLimitResponse_OVER_LIMIT
		}
	}
	require.True(t, proto.Equal(want, got), "want %v\ngot  %v", want, got)
}

type (
	list     = []*common.RateLimitDescriptor
	statuses = []*envoypb.RateLimitResponse_DescriptorStatus
)

func TestEnvoy_StatusesInOrder(t *testing.T) {
	e := startEdge(t, edgeRules)
	e.requireStatuses(list{of("nobody", "x"), of("user", "ann"), of("free", "x"), of("address", "::1"), of("user", "ann", "more", "x"), of("api", "k")},
		none, ok(userLimit, 9, day/10), unlimited, ok(addressLimit, 3599, time.Second), none, ok(apiLimit, 9, day))
	e.requireStatuses(list{of("user", "bob")}, ok(userLimit, 9, day/10))
	got := kit.NoError(e.envoy.ShouldRateLimit(t.Context(), &envoypb.RateLimitRequest{Domain: "elsewhere", Descriptors: list{of("user", "ann")}}))(t)
	requireAnswer(t, got, none)
}

// Envoy's reference charges the other descriptors, and denied ones too.
func TestEnvoy_ARefusedRequestTakesNothing(t *testing.T) {
	e := startEdge(t, edgeRules)
	for range 3 {
		e.requireStatuses(list{of("address", "::1"), times(11, of("user", "ann"))}, ok(addressLimit, 3600, 0), over(userLimit, 10, never))
		e.requireStatuses(list{of("address", "::1"), of("blocked", "x")}, ok(addressLimit, 3600, 0), over(blockedLimit, 0, never))
	}
	e.requireStatuses(list{times(8, of("user", "ann"))}, ok(userLimit, 2, 8*day/10))
	e.requireStatuses(list{times(4, of("user", "ann")), of("llm", "ann")}, over(userLimit, 2, 2*day/10), ok(llmLimit, 1_000_000, 0))
	e.requireStatuses(list{times(4, of("user", "ann")), of("blocked", "x"), times(3, of("llm", "ann"))},
		over(userLimit, 2, 2*day/10), over(blockedLimit, 0, never), ok(llmLimit, 1_000_000, 0))
	require.Zero(t, taken(t, e.db))
}

func TestEnvoy_Hits(t *testing.T) {
	e := startEdge(t, edgeRules)
	whole, err := e.envoy.ShouldRateLimit(t.Context(), &envoypb.RateLimitRequest{
		Domain: "edge", HitsAddend: 3, Descriptors: list{of("user", "ann"), times(2, of("user", "bob"))},
	})
	require.NoError(t, err)
	require.EqualValues(t, 7, whole.Statuses[0].LimitRemaining)
	require.EqualValues(t, 8, whole.Statuses[1].LimitRemaining)
	e.requireStatuses(list{times(math.MaxUint64, of("user", "ann"))}, over(userLimit, 7, never))
	e.requireStatuses(list{times(math.MaxInt64, of("user", "ann")), times(math.MaxInt64, of("user", "ann"))}, over(userLimit, 7, never), over(userLimit, 7, never))
	e.requireStatuses(list{times(3, of("user", "ann")), times(4, of("user", "ann"))}, ok(userLimit, 0, day), ok(userLimit, 0, day))
}

// 0 hits are denied while the bucket holds no whole token, and take nothing.
func TestEnvoy_ZeroHits(t *testing.T) {
	e := startEdge(t, edgeRules)
	for range 3 {
		e.requireStatuses(list{times(0, of("user", "ann"))}, ok(userLimit, 10, 0))
	}
	e.requireStatuses(list{times(10, of("user", "ann"))}, ok(userLimit, 0, day))
	e.requireStatuses(list{times(0, of("user", "ann")), of("address", "::1")}, over(userLimit, 0, day/10), ok(addressLimit, 3600, 0))
	e.requireStatuses(list{times(0, of("blocked", "x"))}, over(blockedLimit, 0, never))
	e.requireStatuses(list{times(0, of("user", "bob")), of("address", "::1")}, ok(userLimit, 10, 0), ok(addressLimit, 3599, time.Second))

	e.requireStatuses(list{of("watched", "x")}, ok(watchedLimit, 0, day))
	e.requireStatuses(list{times(0, of("watched", "x")), times(0, of("user", "bob"))}, ok(watchedLimit, 0, day), ok(userLimit, 10, 0))
	e.db.Exec(t, `select ratelimit_define_policy('api', shadow => true)`)
	require.NoError(t, e.Reload(t.Context()))
	e.requireStatuses(list{times(10, of("api", "k"))}, ok(apiLimit, 0, 10*day))
	e.requireStatuses(list{times(0, of("api", "k"))}, ok(apiLimit, 0, 10*day))
}

// The end of a stream charges what was used. Later requests are denied until the debt is paid.
func TestEnvoy_Overdraw(t *testing.T) {
	e := startEdge(t, edgeRules)
	e.requireStatuses(list{times(0, of("llm", "ann"))}, ok(llmLimit, 1_000_000, 0))
	e.requireStatuses(list{times(1_000_005, of("llm", "ann")), of("user", "ann")}, ok(llmLimit, 0, never), ok(userLimit, 9, day/10))
	e.requireStatuses(list{times(5, of("llm", "ann"))}, ok(llmLimit, 0, never))
	require.EqualValues(t, 1_000_010, taken(t, e.db))
	e.requireStatuses(list{times(0, of("llm", "ann"))}, over(llmLimit, 0, never))
	e.requireStatuses(list{times(math.MaxUint64, of("llm", "bob"))}, ok(llmLimit, 0, never))
}

func TestEnvoy_NegativeHitsGiveBack(t *testing.T) {
	e := startEdge(t, edgeRules)
	e.requireStatuses(list{times(8, of("user", "ann")), times(3, of("address", "::1"))}, ok(userLimit, 2, 8*day/10), ok(addressLimit, 3597, 3*time.Second))
	e.requireStatuses(list{back(times(5, of("user", "ann"))), back(of("address", "::1")), back(of("blocked", "x")), back(of("nobody", "x"))},
		ok(userLimit, 7, 3*day/10), ok(addressLimit, 3598, 2*time.Second), ok(blockedLimit, 0, 0), none)
	e.requireStatuses(list{back(times(math.MaxUint64, of("user", "ann")))}, ok(userLimit, 10, 0))

	_, err := e.ask(back(of("address", "::1")), of("user", "ann"))
	require.Equal(t, codes.InvalidArgument, status.Code(err), "%v", err)
	requireInfo(t, err, "INVALID_ARGUMENT", "22023")
	e.requireStatuses(list{times(0, of("user", "ann")), times(0, of("address", "::1"))}, ok(userLimit, 10, 0), ok(addressLimit, 3598, 2*time.Second))
}

func TestEnvoy_ShadowModeWatches(t *testing.T) {
	e := startEdge(t, edgeRules)
	e.requireStatuses(list{of("watched", "x")}, ok(watchedLimit, 0, day))
	e.requireStatuses(list{of("watched", "x"), of("user", "ann")}, ok(watchedLimit, 0, day), ok(userLimit, 9, day/10))
	e.requireStatuses(list{of("watched", "x"), of("blocked", "ann")}, ok(watchedLimit, 0, day), over(blockedLimit, 0, never))
}

// A request is over the limit if all its descriptors of quota_mode are. Each alone watches.
func TestEnvoy_QuotasRefuseTogether(t *testing.T) {
	e := startEdge(t, `
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 10}}
  - {key: one, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: two, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 2}}
  - {key: none, quota_mode: true, rate_limit: {unit: second, requests_per_unit: 0}}
  - {key: free, quota_mode: true, rate_limit: {unlimited: true}}
  - {key: llm, rate_limit: {policy: budget, overdraw: true}}
`)
	two := per(envoypb.RateLimitResponse_RateLimit_DAY, 2, "")
	user, one, other := of("user", "ann"), of("one", "x"), of("two", "x")
	for _, test := range []struct {
		ask  list
		code envoypb.RateLimitResponse_Code
		want statuses
	}{
		{list{of("free", "x"), of("none", "x")}, envoypb.RateLimitResponse_OVER_LIMIT, statuses{unlimited, over(blockedLimit, 0, never)}},
		{list{of("none", "x"), user}, envoypb.RateLimitResponse_OVER_LIMIT, statuses{over(blockedLimit, 0, never), ok(userLimit, 10, 0)}},
		{list{of("none", "x"), one}, envoypb.RateLimitResponse_OK, statuses{over(blockedLimit, 0, never), ok(watchedLimit, 0, day)}},
		{list{user, one}, envoypb.RateLimitResponse_OVER_LIMIT, statuses{ok(userLimit, 10, 0), over(watchedLimit, 0, day)}},
		{list{one, times(3, of("llm", "ann"))}, envoypb.RateLimitResponse_OVER_LIMIT, statuses{over(watchedLimit, 0, day), ok(llmLimit, 1_000_000, 0)}},
		{list{one, other}, envoypb.RateLimitResponse_OK, statuses{over(watchedLimit, 0, day), ok(two, 1, day/2)}},
		{list{one, times(0, of("two", "x"))}, envoypb.RateLimitResponse_OK, statuses{over(watchedLimit, 0, day), ok(two, 1, day/2)}},
		{list{one, times(2, of("two", "x")), user}, envoypb.RateLimitResponse_OVER_LIMIT, statuses{over(watchedLimit, 0, day), over(two, 1, day/2), ok(userLimit, 10, 0)}},
		{list{times(0, of("one", "x"))}, envoypb.RateLimitResponse_OVER_LIMIT, statuses{over(watchedLimit, 0, day)}},
		{list{one, times(11, of("user", "ann"))}, envoypb.RateLimitResponse_OVER_LIMIT, statuses{over(watchedLimit, 0, day), over(userLimit, 10, never)}},
	} {
		want := &envoypb.RateLimitResponse{OverallCode: test.code, Statuses: test.want}
		got := kit.NoError(e.ask(test.ask...))(t)
		require.True(t, proto.Equal(want, got), "%v\nwant %v\ngot  %v", test.ask, want, got)
	}
	require.Equal(t, "3", scrape(e.testServer)[`ratelimit_requests_total{policy="edge.one",result="denied"}`])
}

func TestEnvoy_RulesReplaceOthers(t *testing.T) {
	e := startEdge(t, edgeRules)
	e.requireStatuses(list{of("address", "::1"), of("vip", "ann")}, none, ok(vipLimit, 4, day/5))
	e.requireStatuses(list{of("address", "::1")}, ok(addressLimit, 3599, time.Second))
}

func TestEnvoy_RemainingIsClamped(t *testing.T) {
	e := startEdge(t, edgeRules)
	e.db.Exec(t, `select ratelimit_define_policy('budget', 9000000000000)`)
	e.requireStatuses(list{times(0, of("llm", "ann"))}, ok(per(0, math.MaxUint32, ""), math.MaxUint32, 0))
	e.db.Exec(t, `select ratelimit_define_policy('budget', 1)`)
	e.requireStatuses(list{times(7, of("llm", "ann"))}, ok(per(0, 1, ""), 0, never))
}

func TestEnvoy_JSON(t *testing.T) {
	e := startEdge(t, edgeRules)
	requirePosted := func(body string, code int, status *envoypb.RateLimitResponse_DescriptorStatus) {
		a := e.mustPost("/json", body)
		require.Equal(t, "application/json", a.header.Get("Content-Type"), a.text)
		require.Equal(t, code, a.status)
		var got envoypb.RateLimitResponse
		require.NoError(t, protojson.Unmarshal([]byte(a.text), &got))
		requireAnswer(t, &got, status)
	}
	body := `{"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}], "hitsAddend": 6}`
	requirePosted(body, 200, ok(userLimit, 4, 6*day/10))
	requirePosted(body, 429, over(userLimit, 4, 2*day/10))
	requirePosted(`{"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "ann"}], "hits_addend": "0"}]}`, 200, ok(userLimit, 4, 6*day/10))

	for body, status := range map[string]int{
		``: 400, `[]`: 400, `{"domain": 1}`: 400, `{"domains": "edge"}`: 400, body + "{}": 400, "{\"domain\": \"\xff\"}": 400,
		`{"domain": "edge"}`: 422, `{}`: 422,
		`"` + strings.Repeat("x", 2<<20) + `"`: 413,
	} {
		sqlState := ""
		if status == 422 {
			sqlState = "22023"
		}
		a := e.mustPost("/json", body)
		requireProblem(t, a, status, sqlState)
		require.NotContains(t, a.body["detail"], "proto")
	}
	requireProblem(t, e.get("/json"), 405, "")
}

// Without rules, the service would allow everything.
func TestEnvoy_OffWithoutRules(t *testing.T) {
	db, s := parallel(t)
	_, err := envoypb.NewRateLimitServiceClient(s.conn).ShouldRateLimit(t.Context(), &envoypb.RateLimitRequest{})
	require.Equal(t, codes.Unimplemented, status.Code(err))
	a := s.mustPost("/json", `{}`)
	requireProblem(t, a, 404, "")
	require.Contains(t, a.body["detail"], "set ENVOY_RULES")
	require.NoError(t, s.Reload(t.Context()))

	e := newEdge(t, db, "ENVOY_RULES="+kit.File(t, "rules.yaml", edgeRules))
	e.watchHealth("envoy.service.ratelimit.v3.RateLimitService")(healthpb.HealthCheckResponse_SERVING)
}

// A misspelled domain and an unknown policy limit nothing: they are counted and logged, without values and keys.
func TestEnvoy_LimitsThatAreOffAreSeen(t *testing.T) {
	e := startEdge(t, edgeRules)
	for range 3 {
		e.requireStatuses(list{of("usr", "ann")}, none)
	}
	_, err := e.call(t.Context(), "acquire", `{"policy":"nobody","key":"ann"}`)
	require.Error(t, err)
	requireProblem(t, e.mustPost("/v1/peek", `{"policy":"nobody","key":"ann"}`), http.StatusNotFound, "RL001")
	samples := scrape(e.testServer)
	require.Equal(t, "3", samples[`ratelimit_requests_total{policy="_other",result="no_rule"}`])
	require.Equal(t, "1", samples[`ratelimit_server_calls_total{code="UNKNOWN_POLICY",operation="acquire"}`])
	require.Equal(t, "1", samples[`ratelimit_server_calls_total{code="UNKNOWN_POLICY",operation="peek"}`])
	require.Equal(t, 1, strings.Count(e.log.String(), "domain=edge keys=usr"))
	require.Equal(t, 1, strings.Count(e.log.String(), "No policy is named 'nobody'."))
	require.NotContains(t, e.log.String(), "ann")
}

func policies(t testing.TB, db *pgtest.DB) map[string]client.Policy {
	all := kit.NoError(client.New(db.Pool).Policies(t.Context()))(t)
	byName := make(map[string]client.Policy)
	for _, p := range all {
		byName[p.Name] = p
	}
	return byName
}

func versions(t testing.TB, db *pgtest.DB) []string {
	return kit.Column(t, db, "select xmin::text from ratelimit.policies order by name")
}

// A policy refills requests_per_unit in each unit. Its name is the rule's, or the domain and path.
func TestEnvoyRules_DefinePolicies(t *testing.T) {
	db := parallelDB(t)
	db.Exec(t, `select ratelimit_define_policy('edge.kept', 1, 1, '1 hour', durable => false, remember => '7 days', stepped => true)`)
	path := kit.File(t, "rules.yaml", `
domain: edge
descriptors:
  - {key: kept, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: user, value: gold, descriptors: [{key: path, rate_limit: {unit: second, requests_per_unit: 4294967295}}]}
  - {key: m, rate_limit: {unit: month, requests_per_unit: 1, name: it's monthly}}
  - {key: y, shadow_mode: true, rate_limit: {unit: YEAR, requests_per_unit: 1}}
  - {key: q, quota_mode: true, rate_limit: {unit: Week, requests_per_unit: 1}}
  - {key: none, rate_limit: {unit: second, requests_per_unit: 0}}
  - {key: free, rate_limit: {unlimited: true}}
`)
	s := start(t, db.URL, "ENVOY_RULES="+path)
	has := policies(t, db)
	require.Len(t, has, 3+5, "api, budget and jobs, and these")
	want := client.Policy{Stepped: client.No, Durable: client.Yes, Remember: day, Shadow: client.No}
	for _, policy := range []struct {
		name    string
		n       int64
		every   time.Duration
		watches client.Choice
	}{
		{"edge.user_gold.path", 1<<32 - 1, time.Second, client.No},
		{"it's monthly", 1, 30 * day, client.No},
		{"edge.y", 1, 365 * day, client.Yes},
		{"edge.q", 1, 7 * day, client.Yes},
	} {
		want.Name, want.Capacity, want.Refill, want.Every, want.Shadow = policy.name, policy.n, policy.n, policy.every, policy.watches
		require.Equal(t, want, has[policy.name])
	}
	require.Equal(t, client.Policy{Name: "edge.kept", Capacity: 2, Refill: 2, Every: time.Hour, Stepped: client.No, Durable: client.No, Remember: 7 * day, Shadow: client.No}, has["edge.kept"])

	before := versions(t, db)
	require.NoError(t, s.Reload(t.Context()))
	require.Equal(t, before, versions(t, db), "what is there is not written again")
}

// A rule may name the policy that another rule describes, and is in shadow if that policy is.
func TestEnvoyRules_ARuleNamesThePolicyOfAnother(t *testing.T) {
	e := startEdge(t, `
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 10}}
  - {key: other, rate_limit: {policy: edge.user}}
  - {key: watched, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: watching, rate_limit: {policy: edge.watched}}
`)
	e.requireStatuses(list{of("other", "x")}, ok(per(0, 10, ""), 9, day/10))
	e.requireStatuses(list{of("watching", "x")}, ok(per(0, 1, ""), 0, day))
	e.requireStatuses(list{times(0, of("watching", "x"))}, ok(per(0, 1, ""), 0, day))
}

func TestEnvoyRules_AnOverrideIsNotTheLimitOfTheRule(t *testing.T) {
	e := startEdge(t, edgeRules)
	e.db.Exec(t, `select ratelimit_override('edge.user', '[["user","ann"]]', capacity => 100, refill => 100)`)
	e.requireStatuses(list{of("user", "ann")}, ok(userLimit, 99, day/100))
}

// Buckets are full at the start of the unit in UTC: here of Wednesday, of Monday, of February and of 2031. A second server finds
// the policies as the rules describe them.
func TestEnvoyRules_ACalendarMakesAQuota(t *testing.T) {
	const rules = `
domain: edge
descriptors:
  - {key: day, rate_limit: {unit: day, requests_per_unit: 2, calendar: true}}
  - {key: week, rate_limit: {unit: week, requests_per_unit: 2, calendar: true}}
  - {key: month, rate_limit: {unit: month, requests_per_unit: 2, calendar: true}}
  - {key: year, rate_limit: {unit: year, requests_per_unit: 2, calendar: true}}
`
	e := startEdge(t, rules)
	turns := map[string]time.Duration{"day": day, "week": 6 * day, "month": 31 * day, "year": 365 * day}
	for unit, turn := range turns {
		limit := per(envoypb.RateLimitResponse_RateLimit_Unit(envoypb.RateLimitResponse_RateLimit_Unit_value[strings.ToUpper(unit)]), 2, "")
		e.requireStatuses(list{of(unit, "a")}, ok(limit, 1, turn))
		e.requireStatuses(list{of(unit, "a")}, ok(limit, 0, turn))
		e.requireStatuses(list{of(unit, "a")}, over(limit, 0, turn))
	}
	before := versions(t, e.db)
	newEdge(t, e.db, "ENVOY_RULES="+kit.File(t, "rules.yaml", rules))
	require.Equal(t, before, versions(t, e.db))
}

// The error has the statements that an administrator must run. They are enough.
func TestEnvoyRules_WithoutTheRight(t *testing.T) {
	t.Parallel()
	db, role, url := newRole(t, "ratelimit_acquire, ratelimit_acquire_all, ratelimit_acquire_packed")
	db.Exec(t, `select ratelimit_define_policy('edge.b', 7, 7, '1 day')`)
	path := kit.File(t, "rules.yaml", `
domain: edge
descriptors:
  - {key: a, rate_limit: {unit: minute, requests_per_unit: 60, name: it's a\b}}
  - {key: b, rate_limit: {unit: day, requests_per_unit: 8}}
  - {key: c, rate_limit: {policy: nobody}}
  - {key: d, rate_limit: {policy: api}}
  - {key: e, rate_limit: {unit: month, requests_per_unit: 9, calendar: true}}
`)
	settings := []string{"ENVOY_RULES=" + path}
	err := startError(t, url, settings...)
	require.Equal(t, 1, strings.Count(err.Error(), "grant execute on function"))
	require.ErrorContains(t, err, "grant execute on function ratelimit_policies to <role>;")
	db.Exec(t, "grant execute on function ratelimit_policies to "+role)

	err = startError(t, url, settings...)
	lines := strings.Split(err.Error(), "\n")
	require.Equal(t, []string{
		`ENVOY_RULES: policies of the rules: ` + path + `:4:14: policy "it's a\\b" is missing, and this role may not define it. An administrator has to run: ` +
			`select ratelimit_define_policy('it''s a\b', capacity => 60, refill => 60, every => '1m', stepped => false, shadow => false);`,
		path + `:5:14: policy "edge.b" has other numbers, and this role may not define it. An administrator has to run: ` +
			`select ratelimit_define_policy('edge.b', capacity => 8, refill => 8, every => '1d', stepped => false, shadow => false);`,
		path + `:8:14: policy "edge.e" is missing, and this role may not define it. An administrator has to run: ` +
			`select ratelimit_define_policy('edge.e', capacity => 9, period => '1 month', time_zone => 'UTC', anchor => '2001-01-01', shadow => false);`,
		path + `:6:14: there is no policy "nobody": define it first, or give the rule unit and requests_per_unit`,
	}, lines)
	for _, line := range lines[:3] {
		_, statement, _ := strings.Cut(line, "run: ")
		db.Exec(t, statement)
	}
	db.Exec(t, "select ratelimit_define_policy('nobody', 1, 1, '1 second')")
	start(t, url, settings...)
}

func TestEnvoyRules_Reload(t *testing.T) {
	db := parallelDB(t)
	db.Exec(t, freeze)
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	rule := func(domain, numbers string) string {
		return "{domain: " + domain + ", descriptors: [{key: user, rate_limit: " + numbers + "}]}"
	}
	write("edge.yaml", rule("edge", "{unit: day, requests_per_unit: 10}"))
	e := newEdge(t, db, "ENVOY_RULES="+dir)
	e.requireStatuses(list{of("user", "ann")}, ok(userLimit, 9, day/10))

	for name, text := range map[string]string{
		"edge.yaml:1:66: unknown field": rule("edge", "{unit: day, request_per_unit: 20}"),
		`there is no policy "nobody"`:   rule("edge", "{policy: nobody}"),
		`policy "jobs" lends slots`:     rule("edge", "{policy: jobs}"),
		`domain "other" is in`:          rule("other", "{unit: day, requests_per_unit: 20}"),
		"this is no YAML":               "{",
	} {
		write("edge.yaml", text)
		write("other.yaml", rule("other", "{unit: day, requests_per_unit: 30}"))
		err := e.Reload(t.Context())
		require.ErrorContains(t, err, name)
		require.Contains(t, e.log.String(), "the rules stay as they are")
		e.requireStatuses(list{times(0, of("user", "ann"))}, ok(userLimit, 9, day/10))
		require.NotContains(t, policies(t, db), "other.user")
	}

	write("edge.yaml", rule("edge", "{unit: day, requests_per_unit: 20}"))
	require.NoError(t, e.Reload(t.Context()))
	e.requireStatuses(list{of("user", "ann")}, ok(per(userLimit.Unit, 20, ""), 8, 12*day/20))
	write("edge.yaml", "domain: edge")
	require.NoError(t, e.Reload(t.Context()))
	e.requireStatuses(list{of("user", "ann")}, none)
}
