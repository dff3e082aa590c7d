package server_test

import (
	"bufio"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func (s *testServer) get(path string) answer {
	s.t.Helper()
	a, err := s.do(s.t.Context(), http.MethodGet, path, nil)
	require.NoError(s.t, err)
	return a
}

// Health follows the database; the process lives on.
func TestHealth_FollowsTheDatabase(t *testing.T) {
	t.Parallel()
	postgres := pgtest.Private(t)
	db := install(t, postgres)
	s := start(t, db.URL)
	watch, err := healthpb.NewHealthClient(s.conn).Watch(t.Context(), &healthpb.HealthCheckRequest{Service: "pgratelimit.v1.RateLimiter"})
	require.NoError(t, err)
	await := func(status healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		for { // a check that takes a second finds what is well not healthy
			update, err := watch.Recv()
			require.NoError(t, err)
			if update.GetStatus() == status {
				return
			}
		}
	}
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

// A stopping server says so to those who watch it, before it ends their connections.
func TestHealth_WhileStopping(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL)
	watch, err := healthpb.NewHealthClient(s.conn).Watch(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	update, err := watch.Recv()
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, update.GetStatus())
	go s.stop() //nolint:errcheck // the end of the test says it
	update, err = watch.Recv()
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, update.GetStatus())
	s.conn.Close() // who watches for ever is waited for no longer than STOP_TIMEOUT
}

func TestMetrics_CountWhatCallersGot(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL)
	for range 11 {
		s.mustPost("/v1/acquire", `{"policy":"api","key":"a secret key"}`)
	}
	for range 2 {
		s.mustPost("/v1/acquire", `{"policy":"budget","key":"k","idempotency_key":"i"}`)
	}
	s.mustPost("/v1/acquire", `{"policy":"nobody","key":"k"}`)
	s.mustPost("/v1/acquire", `{"policy":"api"}`)
	s.mustPost("/v1/peek", `{"policy":"api","key":"k"}`)
	s.mustPost("/v1/acquire_all", `{"charges":[{"policy":"api","key":"k"},{"policy":"budget","key":"k"}]}`)
	samples := scrape(t, s)
	for sample, want := range map[string]string{
		`ratelimit_requests_total{policy="api",result="allowed"}`:                   "11", // and the one that acquire_all was bound by
		`ratelimit_requests_total{policy="api",result="denied"}`:                    "1",
		`ratelimit_requests_total{policy="api",result="error"}`:                     "1",
		`ratelimit_requests_total{policy="budget",result="allowed"}`:                "1",
		`ratelimit_requests_total{policy="budget",result="replayed"}`:               "1",
		`ratelimit_requests_total{policy="_other",result="error"}`:                  "1",
		`ratelimit_acquire_duration_seconds_count{result="allowed"}`:                "12",
		`ratelimit_acquire_duration_seconds_bucket{result="denied",le="5"}`:         "1",
		`ratelimit_server_calls_total{code="OK",operation="acquire"}`:               "13",
		`ratelimit_server_calls_total{code="UNKNOWN_POLICY",operation="acquire"}`:   "1",
		`ratelimit_server_calls_total{code="INVALID_ARGUMENT",operation="acquire"}`: "1",
		`ratelimit_server_calls_total{code="OK",operation="peek"}`:                  "1",
		`ratelimit_server_calls_under_way`:                                          "0",
	} {
		require.Equal(t, want, samples[sample], sample)
	}
	require.NotEmpty(t, samples["ratelimit_server_connections"])
	require.NotEmpty(t, samples["go_goroutines"])
	for sample := range samples {
		require.NotContains(t, sample, "secret")
		require.NotContains(t, sample, "nobody")
	}
}

// scrape reads the samples that Prometheus would, by name and labels.
func scrape(t testing.TB, s *testServer) map[string]string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+"/metrics", nil)
	require.NoError(t, err)
	response, err := s.http.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	samples := map[string]string{}
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if name, value, ok := strings.Cut(lines.Text(), "} "); ok {
			samples[name+"}"] = value
		} else if name, value, ok := strings.Cut(lines.Text(), " "); ok && name != "#" {
			samples[name] = value
		}
	}
	require.NoError(t, lines.Err())
	return samples
}
