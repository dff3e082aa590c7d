package server_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	collectorpb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"

	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestHealth_FollowsTheDatabase(t *testing.T) {
	db, postgres := newPrivateDB(t)
	s := start(t, db.URL)
	await := s.watchHealth("pgratelimit.v1.RateLimiter")
	healthz := func() bool { return s.get("/healthz").status == http.StatusOK }
	await(healthpb.HealthCheckResponse_SERVING)
	require.Eventually(t, healthz, 20*time.Second, 10*time.Millisecond)

	require.NoError(t, postgres.Stop(t.Context(), true))
	await(healthpb.HealthCheckResponse_NOT_SERVING)
	requireProblem(t, s.get("/healthz"), http.StatusServiceUnavailable, "")
	require.Equal(t, http.StatusOK, s.get("/livez").status)

	require.NoError(t, postgres.Start(t.Context()))
	if postgres.URL(db.Name) != db.URL {
		return // it has another port: this server cannot find it again
	}
	await(healthpb.HealthCheckResponse_SERVING)
	require.Eventually(t, healthz, 20*time.Second, 10*time.Millisecond)
	require.Contains(t, s.log.String(), "not healthy")
	require.Contains(t, s.log.String(), "healthy again")
}

// watchHealth returns a function that waits for a status: a check that takes a second finds what is well not healthy.
func (s *testServer) watchHealth(service string) (await func(healthpb.HealthCheckResponse_ServingStatus)) {
	watch := kit.NoError(healthpb.NewHealthClient(s.conn).Watch(s.t.Context(), &healthpb.HealthCheckRequest{Service: service}))(s.t)
	return func(status healthpb.HealthCheckResponse_ServingStatus) {
		for got := healthpb.HealthCheckResponse_UNKNOWN; got != status; {
			update := kit.NoError(watch.Recv())(s.t)
			got = update.GetStatus()
		}
	}
}

// Watchers learn that the server is stopping before their connections end.
func TestHealth_WhileStopping(t *testing.T) {
	_, s := parallel(t)
	await := s.watchHealth("")
	await(healthpb.HealthCheckResponse_SERVING)
	go s.stop() //nolint:errcheck // the end of the test says it
	await(healthpb.HealthCheckResponse_NOT_SERVING)
	s.conn.Close() // who watches for ever is waited for no longer than STOP_TIMEOUT
}

func TestMetrics_CountWhatCallersGot(t *testing.T) {
	db, s := parallel(t)
	db.Exec(t, "select ratelimit_define_policy('default', 10, 1, '1 day'), ratelimit_define_policy('watched', 10, 1, '1 day', shadow => true)")
	for range 11 {
		s.mustPost("/v1/acquire", `{"policy":"api","key":"a secret key"}`)
	}
	for range 2 {
		s.mustPost("/v1/acquire", `{"policy":"budget","key":"k","idempotency_key":"i"}`)
	}
	s.mustPost("/v1/acquire", `{"key":"k"}`)
	s.mustPost("/v1/acquire", `{"policy":"watched","key":"k","cost":11}`)
	s.mustPost("/v1/acquire", `{"policy":"nobody","key":"k"}`)
	s.mustPost("/v1/acquire", `{"policy":"api"}`)
	s.mustPost("/v1/peek", `{"policy":"api","key":"k"}`)
	s.mustPost("/v1/acquire_all", `{"charges":[{"policy":"budget","key":"k"},{"policy":"api","key":"k"}]}`)
	s.mustPost("/v1/acquire_all", `{"charges":[{"policy":"api","key":"k"},{"policy":"nobody","key":"k"}]}`)
	for _, path := range []string{"hold", "hold", "renew"} {
		s.mustPost("/v1/"+path, `{"policy":"jobs","key":"k","holder":"a secret holder"}`)
	}
	s.mustPost("/v1/hold", `{"policy":"jobs","key":"k","holder":"another","cost":10}`)
	s.mustPost("/v1/release", `{"policy":"jobs","key":"k","holder":"a secret holder"}`)
	samples := scrape(s)
	all := map[string]string{
		`ratelimit_requests_total{policy="api",result="allowed"}`:                     "11", // and the one that acquire_all was bound by
		`ratelimit_requests_total{policy="api",result="denied"}`:                      "1",
		`ratelimit_requests_total{policy="api",result="error"}`:                       "1",
		`ratelimit_requests_total{policy="budget",result="allowed"}`:                  "1",
		`ratelimit_requests_total{policy="budget",result="replayed"}`:                 "1",
		`ratelimit_requests_total{policy="default",result="allowed"}`:                 "1",
		`ratelimit_requests_total{policy="watched",result="shadowed"}`:                "1",
		`ratelimit_requests_total{policy="_other",result="error"}`:                    "2",
		`ratelimit_requests_total{policy="jobs",result="allowed"}`:                    "1",
		`ratelimit_requests_total{policy="jobs",result="replayed"}`:                   "1",
		`ratelimit_requests_total{policy="jobs",result="denied"}`:                     "1",
		`ratelimit_server_calls_total{code="OK",operation="acquire"}`:                 "15",
		`ratelimit_server_calls_total{code="UNKNOWN_POLICY",operation="acquire"}`:     "1",
		`ratelimit_server_calls_total{code="INVALID_ARGUMENT",operation="acquire"}`:   "1",
		`ratelimit_server_calls_total{code="OK",operation="acquire_all"}`:             "1",
		`ratelimit_server_calls_total{code="UNKNOWN_POLICY",operation="acquire_all"}`: "1",
		`ratelimit_server_calls_total{code="OK",operation="peek"}`:                    "1",
		`ratelimit_server_calls_total{code="OK",operation="hold"}`:                    "3",
		`ratelimit_server_calls_total{code="OK",operation="renew"}`:                   "1",
		`ratelimit_server_calls_total{code="OK",operation="release"}`:                 "1",
	}
	for sample, value := range samples {
		if name, _, _ := strings.Cut(sample, "{"); name == "ratelimit_requests_total" || name == "ratelimit_server_calls_total" {
			require.Equal(t, all[sample], value, sample)
			delete(all, sample)
		}
		require.NotContains(t, sample, "secret")
		require.NotContains(t, sample, "nobody")
	}
	require.Empty(t, all)
	require.Equal(t, "14", samples[`ratelimit_acquire_duration_seconds_count{result="allowed"}`])
	require.Equal(t, "2", samples[`ratelimit_acquire_duration_seconds_bucket{result="denied",le="5"}`])
	require.Equal(t, "0", samples["ratelimit_server_calls_under_way"])
	require.NotEmpty(t, samples["ratelimit_server_connections"])
	require.NotEmpty(t, samples["go_goroutines"])
}

// scrape reads the samples that Prometheus would, by name and labels.
func scrape(s *testServer) map[string]string {
	samples := map[string]string{}
	for line := range strings.Lines(s.get("/metrics").text) {
		if i := strings.LastIndex(line, " "); line[0] != '#' {
			samples[line[:i]] = strings.TrimSpace(line[i:])
		}
	}
	return samples
}

// These tests set the environment, and so run before the others. This one is by HTTP. TestOTLP_Variables has gRPC, which the SDK's exporter
// speaks.
func TestOTLP_SendsWhatPrometheusReads(t *testing.T) {
	got := make(chan *collectorpb.ExportMetricsServiceRequest, 10)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		q := new(collectorpb.ExportMetricsServiceRequest)
		if err != nil || r.URL.Path != "/v1/metrics" || proto.Unmarshal(body, q) != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		got <- q
	}))
	defer collector.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-7")
	s := start(t, newDB(t).URL)
	for range 2 {
		s.mustPost("/v1/acquire", `{"policy":"budget","key":"a secret key","idempotency_key":"i"}`)
	}
	s.mustPost("/v1/acquire", `{"policy":"nobody","key":"a secret key"}`)
	require.NoError(t, s.stop(), "the last metrics are sent when it stops")
	require.NotContains(t, s.log.String(), "the last metrics were not sent")
	q := <-got
	require.NotContains(t, q.String(), "secret")
	require.NotContains(t, q.String(), "nobody")
	require.Len(t, q.GetResourceMetrics(), 1)
	of := texts(q.GetResourceMetrics()[0].GetResource().GetAttributes())
	require.Equal(t, "pgratelimit", of["service.name"])
	require.Equal(t, "pod-7", of["service.instance.id"], "the environment has the last word")
	for _, name := range []string{"ratelimit.requests", "ratelimit.combiner.batch_size", "ratelimit.acquire.duration", "ratelimit.server.connections"} {
		require.Contains(t, q.String(), `"`+name+`"`)
	}
}

func texts(attributes []*commonpb.KeyValue) map[string]string {
	texts := map[string]string{}
	for _, attribute := range attributes {
		texts[attribute.GetKey()] = attribute.GetValue().GetStringValue()
	}
	return texts
}

func TestOTLP_NobodyListensOrItIsMisspelled(t *testing.T) {
	db := newDB(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	s := start(t, db.URL)
	require.Equal(t, http.StatusOK, s.mustPost("/v1/acquire", `{"policy":"budget","key":"k"}`).status)
	require.NoError(t, s.stop())
	require.Contains(t, s.log.String(), "the last metrics were not sent")

	t.Setenv("OTEL_METRICS_EXPORTER", "console")
	require.ErrorContains(t, startError(t, db.URL), `OTEL_METRICS_EXPORTER: "console"`)
}

// promtool runs the command of Prometheus that checks rules, which Debian's package prometheus has.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	if _, err := exec.LookPath("promtool"); err != nil {
		if os.Getenv("RATELIMIT_TEST_EXAMPLES") != "all" {
			t.Skipf("RATELIMIT_TEST_EXAMPLES=all installs [prometheus]: %v", err)
		}
		require.NoError(t, pgtest.Install(t.Context(), "prometheus"))
	}
	out, err := exec.Command("promtool", args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// An evaluation is one of promtool test rules: each expression has one sample, 1.
type evaluation struct {
	Interval string              `json:"interval"`
	Series   []map[string]string `json:"input_series"`
	Tests    []map[string]any    `json:"promql_expr_test"`
}

func (e *evaluation) isOne(expr string) {
	e.Tests = append(e.Tests, map[string]any{"expr": expr, "eval_time": "30m", "exp_samples": []any{map[string]any{"labels": "{}", "value": 1}}})
}

func (e *evaluation) add(series string, from, step float64) {
	e.Series = append(e.Series, map[string]string{"series": series, "values": fmt.Sprintf("%f+%fx30", from, step)})
}

var sampleLine = regexp.MustCompile(`(?m)^(ratelimit_\w+)(?:\{(.*)\})? (\S+)$`)

// fill adds what /metrics has. The counters of a server that is ill rise each minute by what they are, and its requests took
// longer than a second; those of one that is well stand still.
func (e *evaluation) fill(t *testing.T, metrics string, isIll bool) {
	for _, m := range sampleLine.FindAllStringSubmatch(metrics, -1) {
		value := kit.NoError(strconv.ParseFloat(m[3], 64))(t)
		step := 0.0
		if isIll && regexp.MustCompile("_(total|bucket|sum|count)$").MatchString(m[1]) {
			step = value
		}
		if m[1] == "ratelimit_acquire_duration_seconds_bucket" && regexp.MustCompile(`le="(0\..*|1|1e-.*)"`).MatchString(m[2]) {
			step = 0
		}
		e.add(m[1]+"{"+strings.Trim(m[2]+`,job="pgratelimit",instance="a"`, ",")+"}", value, step)
	}
}

// With the samples of /metrics every expression of the dashboard has a value, and every alert fires; with those of a healthy server, none.
func TestPrometheus_DashboardAndAlertsReadWhatMetricsHas(t *testing.T) {
	t.Parallel()
	alerts := kit.NoError(filepath.Abs("../../../docs/prometheus/alerts.yml"))(t)
	promtool(t, "check", "rules", alerts)
	dashboard := kit.NoError(os.ReadFile("../../../docs/prometheus/dashboard.json"))(t)

	dbs, _ := newShards(t, 2)
	rules := kit.File(t, "rules.yaml", "domain: edge\ndescriptors: [{key: a, rate_limit: {unlimited: true}}]")
	s := start(t, "", "SHARD_URLS="+dbs[0].URL+" postgres://127.0.0.1:1/nowhere", "MAX_CALLS=1", "TOKENS=secret", "ENVOY_RULES="+rules)
	const token = "Authorization: Bearer secret"
	acquire := func(policy string, cost, shard int) int {
		return s.mustPost("/v1/acquire", fmt.Sprintf(`{"policy":%q,"key":%q,"cost":%d}`, policy, keyOn(shard, 2), cost), token).status
	}
	require.Equal(t, http.StatusOK, acquire("api", 10, 0))
	require.Equal(t, http.StatusOK, acquire("api", 10, 0), "a denial")
	require.Equal(t, http.StatusNotFound, acquire("typo", 1, 0))
	require.Equal(t, http.StatusServiceUnavailable, acquire("api", 1, 1), "the shard is down")
	require.Equal(t, http.StatusUnauthorized, s.mustPost("/v1/acquire", "{}").status)
	require.Equal(t, http.StatusOK, s.mustPost("/json", `{"domain":"edge","descriptors":[{"entries":[{"key":"b"}]}]}`, token).status, "no rule")
	unlock := lock(t, dbs[0])
	waited := make(chan int)
	go func() { waited <- acquire("api", 10, 0) }()
	awaitBlocked(t, dbs[0], 1)
	require.Equal(t, http.StatusServiceUnavailable, acquire("api", 1, 0), "too many calls")
	unlock()
	require.Equal(t, http.StatusOK, <-waited)
	metrics := s.get("/metrics").text

	var ill, well evaluation
	ill.Interval, well.Interval = "1m", "1m"
	ill.fill(t, metrics, true)
	ill.add(`up{job="pgratelimit",instance="b"}`, 0, 0)
	well.fill(t, metrics, false)
	well.add(`up{job="pgratelimit",instance="a"}`, 1, 0)
	well.isOne("absent(ALERTS)")
	well.isOne("max(up)")
	var panels struct {
		Panels []struct{ Targets []struct{ Expr string } }
	}
	require.NoError(t, json.Unmarshal(dashboard, &panels))
	for _, panel := range panels.Panels {
		for _, target := range panel.Targets {
			ill.isOne("count(" + target.Expr + ") > bool 0")
		}
	}
	text := kit.NoError(os.ReadFile(alerts))(t)
	for _, alert := range regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(string(text), -1) {
		ill.isOne(`count(ALERTS{alertstate="firing",alertname="` + alert[1] + `"}) > bool 0`)
	}
	require.Len(t, ill.Tests, 16, "expressions and alerts")
	tests := kit.NoError(json.Marshal(map[string]any{"rule_files": []string{alerts}, "evaluation_interval": "1m", "tests": []evaluation{ill, well}}))(t)
	promtool(t, "test", "rules", kit.File(t, "tests.yml", string(tests)))

	var reasons []string
	for _, kind := range service.Kinds {
		reasons = append(reasons, kind.Reason)
	}
	for _, codes := range regexp.MustCompile(`code=~?"(.*?)"`).FindAllStringSubmatch(string(text), -1) {
		for code := range strings.SplitSeq(codes[1], "|") {
			require.True(t, slices.Contains(reasons, code), code)
		}
	}
}

// page asks for the status page as a browser does, with a token as the password.
func (s *testServer) page(password string) answer {
	return s.get("/?refresh=on", "Authorization: Basic "+base64.StdEncoding.EncodeToString([]byte("anybody:"+password)))
}

func TestPage_IsOffUnlessAskedFor(t *testing.T) {
	db := parallelDB(t)
	requireProblem(t, start(t, db.URL).get("/"), http.StatusNotFound, "")
	s := start(t, db.URL, "TOKENS=secret")
	requireProblem(t, s.get("/"), http.StatusUnauthorized, "")
	a := s.page("secret")
	require.Equal(t, http.StatusUnauthorized, a.status)
	require.Equal(t, []string{"Bearer"}, a.header.Values("WWW-Authenticate"))
}

// The page needs a token of the calls, not of health and metrics. HTTP Basic is valid for the page alone: a browser would also send
// it with calls of other sites.
func TestPage_NeedsTheToken(t *testing.T) {
	_, s := parallel(t, "STATUS_PAGE=true", "TOKENS=secret,other", "MONITORING_TOKENS=watch")
	for password, want := range map[string]int{"": 401, "wrong": 401, "watch": 401, "secret": 200, "other": 200} {
		a := s.page(password)
		require.Equal(t, want, a.status, password)
		require.Equal(t, want == 200, strings.Contains(a.text, "Emptiest buckets"))
		if want == 401 {
			require.Equal(t, []string{`Basic realm="pgratelimit", charset="UTF-8"`, "Bearer"}, a.header.Values("WWW-Authenticate"))
		}
	}
	require.Equal(t, http.StatusOK, s.get("/", "Authorization: Bearer secret").status)
	require.Equal(t, http.StatusUnauthorized, s.get("/").status)

	basic := "Authorization: Basic YW55Ym9keTpzZWNyZXQ=" // anybody:secret
	require.Equal(t, http.StatusOK, s.get("/", basic, "Host: any.example").status, "who has a token may use any name")
	requireProblem(t, s.mustPost("/v1/acquire", `{"policy":"api","key":"k"}`, basic), http.StatusUnauthorized, "")
	requireProblem(t, s.get("/metrics", basic), http.StatusUnauthorized, "")
	requireProblem(t, s.mustPost("/", "", "Authorization: Bearer secret"), http.StatusNotFound, "")
}

// The page shows requests, and works without the database.
func TestPage_WithAndWithoutTheDatabase(t *testing.T) {
	db, postgres := newPrivateDB(t)
	s := start(t, db.URL, "STATUS_PAGE=true")
	for range 12 {
		s.mustPost("/v1/acquire", `{"policy":"api","key":"user:42"}`)
	}
	s.mustPost("/v1/peek", `{"policy":"api","key":"user:42"}`)
	var page string
	require.Eventually(t, func() bool { // a sample takes 5 seconds; what the page could not read in time it reads later
		page = s.get("/?refresh=on").text
		return strings.Contains(page, "Healthy") && strings.Contains(page, "user:42") && regexp.MustCompile(`>denied<.*[1-9]</bdi></td></tr>`).MatchString(page)
	}, time.Minute, 50*time.Millisecond)
	require.Regexp(t, `>allowed<.*[1-9]</bdi></td></tr>`, page)
	require.Regexp(t, `>error<.*>0</bdi></td></tr>`, page)
	require.NotContains(t, page, "in advance", "without PREFETCH nothing is")

	require.NoError(t, postgres.Stop(t.Context(), true))
	require.Eventually(t, func() bool { return s.get("/healthz").status == http.StatusServiceUnavailable }, 20*time.Second, 10*time.Millisecond)
	a := s.get("/?refresh=on")
	require.Equal(t, http.StatusOK, a.status)
	require.Contains(t, a.text, "Not healthy: the database cannot be used.")
	require.Contains(t, a.text, "user:42", "as it was seen last")
}
