//go:build reference

package envoy_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/internal/envoy"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// The rule files of the reference's tests and examples, as they are now, are read, but for those that it refuses itself.
func TestReference_ReadsItsRuleFiles(t *testing.T) {
	var read, refused []string
	for _, folder := range []string{"examples/ratelimit/config", "test/config", "test/integration/runtime/current/ratelimit/config"} {
		paths := kit.NoError(filepath.Glob(filepath.Join(os.Getenv("RATELIMIT_ENVOY_REFERENCE"), folder, "*.yaml")))(t)
		require.NotEmpty(t, paths, "run make test-envoy")
		for _, path := range paths {
			name := filepath.Base(path)
			rules, err := envoy.Read(path)
			if err != nil {
				refused = append(refused, name)
				t.Logf("%s: %v", name, err)
				continue
			}
			read = append(read, name)
			require.Positive(t, rules.Count(), name)
		}
	}
	t.Logf("read: %v", read)
	require.ElementsMatch(t, []string{"bad_limit_unit.yaml", "bad_yaml.yaml", "duplicate_domain.yaml", "duplicate_key.yaml", "empty_domain.yaml", "empty_key.yaml", "misspelled_key.yaml",
		"misspelled_key2.yaml", "non_map_list.yaml", "non_string_key.yaml", "replaces_empty.yaml", "replaces_self.yaml", "unlimited_with_unit.yaml"}, refused)
	require.Subset(t, read, []string{"example.yaml", "share_threshold.yaml", "wildcard.yaml", "metadata.yaml"})
}
