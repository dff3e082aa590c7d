package metrics

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"os"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
)

// OTLP returns what sends metrics to a collector, as the variables say by which every program with OpenTelemetry is told. It
// is nothing unless one of them names an endpoint, or OTEL_METRICS_EXPORTER is otlp. The SDK reads those that are not looked
// at here, such as headers, interval and certificates.
func OTLP(ctx context.Context) ([]sdk.Option, error) {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return nil, nil
	}
	var hasEndpoint bool
	for _, name := range []string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"} {
		endpoint := os.Getenv(name)
		if endpoint == "" {
			continue
		}
		hasEndpoint = true
		// The SDK would go on with localhost.
		if u, err := url.Parse(endpoint); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return nil, fmt.Errorf("%s: %q is no URL such as http://collector:4318", name, endpoint)
		}
	}
	switch exporters := os.Getenv("OTEL_METRICS_EXPORTER"); {
	case exporters == "none", exporters == "" && !hasEndpoint:
		return nil, nil
	case exporters != "" && exporters != "otlp":
		return nil, fmt.Errorf("OTEL_METRICS_EXPORTER: %q is neither otlp nor none", exporters)
	}
	var exporter sdk.Exporter
	var err error
	switch protocol := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"), os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"), "http/protobuf"); protocol {
	case "http/protobuf":
		exporter, err = otlpmetrichttp.New(ctx)
	case "grpc":
		exporter, err = otlpmetricgrpc.New(ctx)
	default:
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL: %q is neither http/protobuf nor grpc", protocol)
	}
	if err != nil {
		return nil, fmt.Errorf("OTLP: %w", err)
	}
	who, err := resource.New(ctx,
		resource.WithTelemetrySDK(),
		resource.WithAttributes(attribute.String("service.name", "pgratelimit"), attribute.String("service.instance.id", rand.Text())),
		resource.WithFromEnv(), // so that it has the last word
	)
	if err != nil {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	return []sdk.Option{sdk.WithResource(who), sdk.WithReader(sdk.NewPeriodicReader(exporter))}, nil
}
