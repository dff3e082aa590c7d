package server_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	collectorpb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	metricspb "go.opentelemetry.io/proto/otlp/metrics/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/pgratelimit/pgratelimit/server/internal/server"
)

// A collector gets metrics by OTLP.
type collector struct {
	collectorpb.UnimplementedMetricsServiceServer
	got chan *collectorpb.ExportMetricsServiceRequest
}

func (c *collector) Export(_ context.Context, q *collectorpb.ExportMetricsServiceRequest) (*collectorpb.ExportMetricsServiceResponse, error) {
	c.got <- q
	return &collectorpb.ExportMetricsServiceResponse{}, nil
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	q := new(collectorpb.ExportMetricsServiceRequest)
	if err != nil || r.URL.Path != "/v1/metrics" || proto.Unmarshal(body, q) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	c.got <- q
}

// These tests set the environment, and so run before the others.
func TestOTLP_SendsWhatPrometheusReads(t *testing.T) {
	c := &collector{got: make(chan *collectorpb.ExportMetricsServiceRequest, 10)}
	overHTTP := httptest.NewServer(c)
	defer overHTTP.Close()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	overGRPC := grpc.NewServer()
	collectorpb.RegisterMetricsServiceServer(overGRPC, c)
	go overGRPC.Serve(listener) //nolint:errcheck // the test fails without it
	defer overGRPC.Stop()

	db := newDB(t)
	for protocol, endpoint := range map[string]string{"http/protobuf": overHTTP.URL, "grpc": "http://" + listener.Addr().String()} {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
		t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
		t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
		s := start(t, db.URL)
		for range 2 {
			s.mustPost("/v1/acquire", `{"policy":"budget","key":"a secret key","idempotency_key":"`+protocol+`"}`)
		}
		s.mustPost("/v1/acquire", `{"policy":"nobody","key":"a secret key"}`)
		require.NoError(t, s.stop(), "the last metrics are sent when it stops")
		q := <-c.got
		require.NotContains(t, q.String(), "secret")
		require.NotContains(t, q.String(), "nobody")
		require.Len(t, q.GetResourceMetrics(), 1)
		of := map[string]string{}
		for _, attribute := range q.GetResourceMetrics()[0].GetResource().GetAttributes() {
			of[attribute.GetKey()] = attribute.GetValue().GetStringValue()
		}
		require.Equal(t, "pgratelimit", of["service.name"])
		require.Equal(t, "test", of["deployment.environment.name"])
		require.NotEmpty(t, of["service.instance.id"])
		byName := map[string]*metricspb.Metric{}
		for _, scope := range q.GetResourceMetrics()[0].GetScopeMetrics() {
			for _, m := range scope.GetMetrics() {
				byName[m.GetName()] = m
			}
		}
		requests := map[string]int64{}
		for _, point := range byName["ratelimit.requests"].GetSum().GetDataPoints() {
			labels := map[string]string{}
			for _, attribute := range point.GetAttributes() {
				labels[attribute.GetKey()] = attribute.GetValue().GetStringValue()
			}
			requests[labels["policy"]+" "+labels["result"]] = point.GetAsInt()
		}
		require.Equal(t, map[string]int64{"budget allowed": 1, "budget replayed": 1, "_other error": 1}, requests)
		sizes := byName["ratelimit.combiner.batch_size"].GetHistogram().GetDataPoints()
		require.Len(t, sizes, 1)
		require.EqualValues(t, 3, sizes[0].GetSum(), "one at a time")
		require.Contains(t, byName, "ratelimit.acquire.duration")
		require.Contains(t, byName, "ratelimit.server.connections")
	}
}

func TestOTLP_IsOffUnlessAskedFor(t *testing.T) {
	db := newDB(t)
	for _, off := range []map[string]string{
		{},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_METRICS_EXPORTER": "none"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
	} {
		t.Run("", func(t *testing.T) {
			for name, value := range off {
				t.Setenv(name, value)
			}
			s := start(t, db.URL)
			require.NoError(t, s.stop())
			require.NotContains(t, s.log.String(), "metrics", "nothing failed to be sent")
		})
	}
}

func TestOTLP_Mistakes(t *testing.T) {
	db := newDB(t)
	for want, settings := range map[string]map[string]string{
		`OTEL_METRICS_EXPORTER: "console"`:              {"OTEL_METRICS_EXPORTER": "console"},
		`OTEL_EXPORTER_OTLP_PROTOCOL: "http/json"`:      {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
		`OTEL_EXPORTER_OTLP_ENDPOINT: "collector:4318"`: {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"},
	} {
		t.Run("", func(t *testing.T) {
			for name, value := range settings {
				t.Setenv(name, value)
			}
			_, err := server.Start(t.Context(), load(t, db.URL), slog.New(slog.DiscardHandler))
			require.ErrorContains(t, err, want)
		})
	}
}

// A collector that is not there costs no call, and stops nobody.
func TestOTLP_NobodyListens(t *testing.T) {
	db := newDB(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	s := start(t, db.URL)
	require.Equal(t, http.StatusOK, s.mustPost("/v1/acquire", `{"policy":"budget","key":"k"}`).status)
	require.NoError(t, s.stop())
	require.Contains(t, s.log.String(), "the last metrics were not sent")
}
