package metrics_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
)

// These tests set the environment, and so run before the others.

// Of two variables, that for metrics counts, and so do its mistakes.
func TestOTLP_TheVariableForMetricsComesFirst(t *testing.T) {
	for name, test := range map[string]struct {
		settings map[string]string
		want     string // empty for no error
	}{
		"the protocol of metrics is wrong": {map[string]string{"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, `"http/json" is neither`},
		"that of the rest is wrong":        {map[string]string{"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, ""},
		"the endpoint of metrics is wrong": {map[string]string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "collector:4318", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT: "collector:4318"`},
	} {
		t.Run(name, func(t *testing.T) {
			for variable, value := range test.settings {
				t.Setenv(variable, value)
			}
			_, err := metrics.OTLP(t.Context())
			if test.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, test.want)
		})
	}
}

// The specification reads true in any case.
func TestOTLP_IsDisabledInAnyCase(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	t.Setenv("OTEL_SDK_DISABLED", "TRUE")
	options, err := metrics.OTLP(t.Context())
	require.NoError(t, err)
	require.Empty(t, options)
}

// Who runs several servers names them, and the name is not ours then.
func TestOTLP_TheEnvironmentNamesTheService(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	t.Setenv("OTEL_SERVICE_NAME", "limits of the edge")
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-7")
	options, err := metrics.OTLP(t.Context())
	require.NoError(t, err)
	reader := sdk.NewManualReader()
	provider := sdk.NewMeterProvider(append(options, sdk.WithReader(reader))...)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	defer provider.Shutdown(ended) //nolint:errcheck // nobody listens
	var collected metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &collected))
	for name, want := range map[string]string{"service.name": "limits of the edge", "service.instance.id": "pod-7"} {
		value, ok := collected.Resource.Set().Value(attribute.Key(name))
		require.True(t, ok, name)
		require.Equal(t, want, value.AsString())
	}
}
