package server_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

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
		value, err := strconv.ParseFloat(m[3], 64)
		require.NoError(t, err)
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

// Every expression of the dashboard has samples, and every alert fires, of what /metrics has; of a server that is well none does.
func TestPrometheus_DashboardAndAlertsReadWhatMetricsHas(t *testing.T) {
	t.Parallel()
	rules, err := filepath.Abs("../../../docs/prometheus/alerts.yml")
	require.NoError(t, err)
	promtool(t, "check", "rules", rules)
	dashboard, err := os.ReadFile("../../../docs/prometheus/dashboard.json")
	require.NoError(t, err)

	dbs, _ := newShards(t, 2)
	s := start(t, "", "SHARD_URLS="+dbs[0].URL+" postgres://127.0.0.1:1/nowhere", "MAX_CALLS=1")
	acquire := func(policy string, cost, shard int) int {
		return s.ask("/v1/acquire", fmt.Sprintf(`{"policy":%q,"key":%q,"cost":%d}`, policy, keyOn(shard, 2), cost)).status
	}
	require.Equal(t, http.StatusOK, acquire("api", 10, 0))
	require.Equal(t, http.StatusOK, acquire("api", 10, 0), "a denial")
	require.Equal(t, http.StatusNotFound, acquire("typo", 1, 0))
	require.Equal(t, http.StatusServiceUnavailable, acquire("api", 1, 1), "the shard is down")
	unlock := lock(t, dbs[0])
	waited := make(chan int)
	go func() { waited <- acquire("api", 10, 0) }()
	awaitBlocked(t, dbs[0], 1)
	require.Equal(t, http.StatusServiceUnavailable, acquire("api", 1, 0), "too many calls")
	unlock()
	require.Equal(t, http.StatusOK, <-waited)
	metrics := s.text("/metrics")

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
	text, err := os.ReadFile(rules)
	require.NoError(t, err)
	for _, alert := range regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(string(text), -1) {
		ill.isOne(`count(ALERTS{alertstate="firing",alertname="` + alert[1] + `"}) > bool 0`)
	}
	require.Len(t, ill.Tests, 14, "expressions and alerts")
	tests, err := json.Marshal(map[string]any{"rule_files": []string{rules}, "evaluation_interval": "1m", "tests": []evaluation{ill, well}})
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "tests.yml")
	require.NoError(t, os.WriteFile(file, tests, 0o600))
	promtool(t, "test", "rules", file)

	var reasons []string
	for kind := service.UnknownPolicy; kind <= service.Internal; kind++ {
		reasons = append(reasons, kind.Reason())
	}
	for _, codes := range regexp.MustCompile(`code=~?"(.*?)"`).FindAllStringSubmatch(string(text), -1) {
		for code := range strings.SplitSeq(codes[1], "|") {
			require.True(t, slices.Contains(reasons, code), code)
		}
	}
}
