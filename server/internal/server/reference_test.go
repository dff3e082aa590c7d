//go:build reference

package server_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	envoypb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/pgratelimit/pgratelimit/server/internal/envoy"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// These tests run programs that make test-envoy builds into this folder.
var programs = os.Getenv("RATELIMIT_ENVOY_PROGRAMS")

func program(t *testing.T, name string, args ...string) *exec.Cmd {
	require.NotEmpty(t, programs, "run make test-envoy")
	return exec.CommandContext(t.Context(), filepath.Join(programs, name), args...)
}

func startReference(t *testing.T, files map[string]string) envoypb.RateLimitServiceClient {
	dir := kit.NoError(os.MkdirTemp("", "envoy"))(t) // t.TempDir is too long for a socket
	t.Cleanup(func() { os.RemoveAll(dir) })
	redis, socket := filepath.Join(dir, "redis"), filepath.Join(dir, "grpc")
	redisServer := kit.NoError(pgtest.Program(t.Context(), "redis-server"))(t)
	kit.Start(t, exec.CommandContext(t.Context(), redisServer, "--port", "0", "--unixsocket", redis, "--save", "", "--dir", dir))
	require.Eventually(t, func() bool {
		conn, err := net.Dial("unix", redis)
		if err != nil {
			return false
		}
		return conn.Close() == nil
	}, 20*time.Second, 10*time.Millisecond)
	config := filepath.Join(dir, "runtime", "config")
	require.NoError(t, os.MkdirAll(config, 0o700))
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(config, name), []byte(text), 0o600))
	}
	c := program(t, "service_cmd")
	c.Dir = dir
	c.Env = append(os.Environ(), "HOST=127.0.0.1", "PORT="+pgtest.FreePort(t), "DEBUG_HOST=127.0.0.1", "DEBUG_PORT="+pgtest.FreePort(t), "GRPC_UDS="+socket,
		"RUNTIME_ROOT="+dir, "RUNTIME_SUBDIRECTORY=runtime", "RUNTIME_WATCH_ROOT=false",
		"REDIS_SOCKET_TYPE=unix", "REDIS_URL="+redis, "USE_STATSD=false", "DISABLE_STATS=true", "LOG_LEVEL=ERROR")
	kit.Start(t, c)
	conn := kit.NoError(grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	t.Cleanup(func() { conn.Close() })
	reference := envoypb.NewRateLimitServiceClient(conn)
	require.Eventually(t, func() bool {
		_, err := reference.ShouldRateLimit(t.Context(), &envoypb.RateLimitRequest{Domain: "nobody", Descriptors: list{of("k", "v")}}, grpc.WaitForReady(true))
		return err == nil
	}, time.Minute, 50*time.Millisecond)
	return reference
}

// A generator makes rules up, of so few words that requests of the same words match often.
type generator struct {
	*rand.Rand
	domain string
	tree   []map[string]any
	rules  int
}

func (g *generator) one(of ...string) string { return of[g.IntN(len(of))] }

func (g *generator) maybe(percent int) bool { return g.IntN(100) < percent }

func (g *generator) descriptors(depth int) (list []map[string]any) {
	seen := map[string]bool{}
	for range 1 + g.IntN(6) {
		d := map[string]any{"key": g.one("a", "a", "b", "b", "ab", "a_x", "a*", "*")}
		composite := d["key"].(string)
		if g.maybe(60) {
			d["value"] = g.one("x", "xy", "x*", "xy*", "*x", "x*y", "*y*", "x**y", "*", "x_y", "5")
			composite += "_" + d["value"].(string)
		}
		if seen[composite] {
			continue
		}
		seen[composite] = true
		if strings.Contains(composite, "*") && g.maybe(40) {
			d["share_threshold"] = true
		}
		for _, option := range []string{"shadow_mode", "quota_mode", "detailed_metric", "value_to_metric"} {
			if g.maybe(10) {
				d[option] = option != "quota_mode" || d["shadow_mode"] == nil // both are an error here
			}
		}
		if g.maybe(70) {
			d["rate_limit"] = g.limit()
		}
		if depth < 3 && g.maybe(50) {
			d["descriptors"] = g.descriptors(depth + 1)
		}
		list = append(list, d)
	}
	return list
}

func (g *generator) limit() map[string]any {
	g.rules++
	l := map[string]any{}
	name := func(rule int) string { return fmt.Sprint(g.domain, " ", rule) }
	if g.maybe(50) {
		l["name"] = name(g.rules)
	}
	if g.maybe(15) {
		l["replaces"] = []map[string]any{{"name": name(g.rules - 1 - g.IntN(3))}}
	}
	if g.maybe(10) {
		l["unlimited"] = true
		return l
	}
	l["unit"] = g.one("second", "MINUTE", "hour", "day", "Week", "month", "year")
	l["requests_per_unit"] = 100_000 + g.rules // by which a status shows its rule
	if g.maybe(4) {
		l["requests_per_unit"] = 0
	}
	return l
}

func (g *generator) request() *envoypb.RateLimitRequest {
	q := &envoypb.RateLimitRequest{Domain: g.domain, HitsAddend: uint32(g.IntN(4))}
	for range 1 + g.IntN(3) {
		d := &common.RateLimitDescriptor{}
		noise := g.IntN(4)
		if g.maybe(70) { // of entries that match, and seldom one more
			below := g.enter(d, g.tree)
			for len(below) > 0 && g.maybe(60) {
				below = g.enter(d, below)
			}
			noise = g.IntN(20) / 19
		}
		for range noise {
			d.Entries = append(d.Entries, &common.RateLimitDescriptor_Entry{Key: g.one("a", "a", "b", "b", "ab", "a_x", "c"), Value: g.one("", "x", "xy", "xyz", "x_y", "y", "5", "x*")})
		}
		q.Descriptors = append(q.Descriptors, d)
	}
	return q
}

// enter adds an entry that one of the rules is for, and returns those below it.
func (g *generator) enter(d *common.RateLimitDescriptor, rules []map[string]any) (below []map[string]any) {
	rule := rules[g.IntN(len(rules))]
	value, _ := rule["value"].(string)
	if value == "" {
		value = g.one("", "x", "xyz", "5")
	}
	d.Entries = append(d.Entries, &common.RateLimitDescriptor_Entry{
		Key: strings.TrimSuffix(rule["key"].(string), "*"), Value: strings.ReplaceAll(value, "*", g.one("", "x", "y", "*")),
	})
	below, _ = rule["descriptors"].([]map[string]any)
	return below
}

// Descriptors find the same rules as in the reference, and are refused alike. docs/envoy.md has what differs by intention.
func TestReference_MatchesAlike(t *testing.T) {
	const domains, requests = 400, 40
	seed := kit.FirstSeed(t)
	t.Logf("RATELIMIT_TEST_SEED=%d", seed)
	files := make(map[string]string)
	generators := make([]*generator, domains)
	folder := t.TempDir()
	for i := range generators {
		g := &generator{Rand: rand.New(rand.NewPCG(seed, uint64(i))), domain: fmt.Sprintf("domain%d", i)}
		generators[i] = g
		path := filepath.Join(folder, g.domain+".yaml")
		for isRead := false; !isRead; { // here a rule that never matches is an error
			g.tree = g.descriptors(1)
			text := kit.NoError(json.Marshal(map[string]any{"domain": g.domain, "descriptors": g.tree}))(t)
			files[g.domain+".yaml"] = string(text)
			require.NoError(t, os.WriteFile(path, text, 0o600))
			_, err := envoy.Read(path)
			if isRead = err == nil; !isRead {
				require.Contains(t, err.Error(), "never matches")
			}
		}
	}
	reference := startReference(t, files)
	db := newDB(t)
	db.Exec(t, freeze)
	s := start(t, db.URL, "ENVOY_RULES="+folder)
	ours := envoypb.NewRateLimitServiceClient(s.conn)

	var statuses, limited, refused atomic.Int64
	t.Run("domains", func(t *testing.T) {
		for _, g := range generators {
			t.Run(g.domain, func(t *testing.T) {
				t.Parallel()
				for range requests {
					q := g.request()
					want := kit.NoError(reference.ShouldRateLimit(t.Context(), q))(t)
					got := kit.NoError(ours.ShouldRateLimit(t.Context(), q))(t)
					rulesOf := func(answer *envoypb.RateLimitResponse) (rules []string) {
						for _, s := range answer.Statuses {
							rules = append(rules, fmt.Sprint(s.Code, " ", s.CurrentLimit))
						}
						return rules
					}
					require.Equal(t, rulesOf(want), rulesOf(got), "rules %s\nrequest %v\nreference %v\nours %v", files[g.domain+".yaml"], q, want, got)
					require.Equal(t, want.OverallCode, got.OverallCode)
					if want.OverallCode == envoypb.RateLimitResponse_OVER_LIMIT {
						refused.Add(1)
					}
					for _, s := range want.Statuses {
						statuses.Add(1)
						if s.CurrentLimit != nil {
							limited.Add(1)
						}
					}
				}
			})
		}
	})
	t.Logf("%d configurations, %d requests (%d refused), %d statuses: %d of a rule", domains, domains*requests, refused.Load(), statuses.Load(), limited.Load())
	require.Greater(t, limited.Load(), statuses.Load()/5, "the requests match too little to show anything")
	require.Positive(t, refused.Load())
}

// The rule files of the reference's tests and examples, as they are now, are read, but for those that it refuses itself.
func TestReference_ReadsItsRuleFiles(t *testing.T) {
	var read, refused []string
	for _, folder := range []string{"examples/ratelimit/config", "test/config", "test/integration/runtime/current/ratelimit/config"} {
		paths := kit.NoError(filepath.Glob(filepath.Join(programs, "reference", folder, "*.yaml")))(t)
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
