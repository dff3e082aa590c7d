package envoy_test

import (
	"encoding/json"
	"os"
	"regexp"
	"testing"

	bootstrap "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ratelimit/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	manager "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
	"google.golang.org/protobuf/encoding/protojson"
)

// The page has rules that are read, and beside it is a configuration that Envoy's own types accept.
func TestDocs_Examples(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../../docs/envoy.md")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	require.Len(t, blocks, 1)
	require.Equal(t, 2, read(t, blocks[0][1]).Count())

	file, err := os.ReadFile("../../../docs/envoy/envoy.yaml")
	require.NoError(t, err)
	var config any
	require.NoError(t, yaml.Unmarshal(file, &config))
	text, err := json.Marshal(config)
	require.NoError(t, err)
	var b bootstrap.Bootstrap
	require.NoError(t, protojson.Unmarshal(text, &b))
	require.NoError(t, b.ValidateAll())
	var m manager.HttpConnectionManager
	require.NoError(t, b.StaticResources.Listeners[0].FilterChains[0].Filters[0].GetTypedConfig().UnmarshalTo(&m))
	require.NoError(t, m.ValidateAll())
	var r ratelimit.RateLimit
	require.NoError(t, m.HttpFilters[0].GetTypedConfig().UnmarshalTo(&r))
	require.NoError(t, r.ValidateAll())
	require.Equal(t, "edge", r.Domain)
}
