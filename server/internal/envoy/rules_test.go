package envoy_test

import (
	"context"
	"encoding/json"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	bootstrap "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ratelimit/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	manager "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/server/internal/envoy"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

func folder(t testing.TB, files map[string]string) string {
	dir := t.TempDir()
	for name, text := range files {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return dir
}

// read reads rules that are right.
func read(t testing.TB, text string) *envoy.Rules {
	return kit.NoError(envoy.Read(filepath.Join(folder(t, map[string]string{"rules.yaml": text}), "rules.yaml")))(t)
}

// mistakes are the lines of an error, without the folder.
func mistakes(t testing.TB, files map[string]string) []string {
	dir := folder(t, files)
	_, err := envoy.Read(dir)
	require.Error(t, err)
	return strings.Split(strings.ReplaceAll(err.Error(), dir+string(filepath.Separator), ""), "\n")
}

// A book is a gate that lets everything pass, and has what was asked of it.
type book struct {
	charges   []service.GateCharge
	unmatched []string
}

func (b *book) Admit(_ context.Context, charges []service.GateCharge, blocked bool) (client.JointDecision, error) {
	b.charges = charges
	return client.JointDecision{Decision: client.Decision{Allowed: !blocked}, Decisions: make([]client.Decision, len(charges))}, nil
}

func (b *book) RefundAll(_ context.Context, charges []service.GateCharge) ([]client.Decision, error) {
	b.charges = charges
	return make([]client.Decision, len(charges)), nil
}

func (b *book) Unmatched(domain, keys string) {
	b.unmatched = append(b.unmatched, domain+": "+keys)
}

// ask sends descriptors to rules, and returns what the gate was asked.
func ask(t testing.TB, rules *envoy.Rules, descriptors ...*common.RateLimitDescriptor) (*pb.RateLimitResponse, *book) {
	b := &book{}
	answer := kit.NoError(envoy.New(b, rules).ShouldRateLimit(t.Context(), &pb.RateLimitRequest{Domain: "d", Descriptors: descriptors}))(t)
	return answer, b
}

// of is a descriptor: keys and values in turns.
func of(pairs ...string) *common.RateLimitDescriptor {
	d := &common.RateLimitDescriptor{}
	for i := 0; i < len(pairs); i += 2 {
		d.Entries = append(d.Entries, &common.RateLimitDescriptor_Entry{Key: pairs[i], Value: pairs[i+1]})
	}
	return d
}

const matching = `
domain: d
descriptors:
  - {key: any, rate_limit: {unit: second, requests_per_unit: 1}}
  - {key: one, value: x, rate_limit: {unit: second, requests_per_unit: 2}}
  - {key: default, rate_limit: {unit: second, requests_per_unit: 3}}
  - {key: default, value: x, rate_limit: {unit: second, requests_per_unit: 4}}
  - key: path
    descriptors:
      - key: deep
        rate_limit: {unit: second, requests_per_unit: 5, name: five}
        descriptors: [{key: deeper, rate_limit: {unit: second, requests_per_unit: 6}}, {key: bare}]
  - {key: glob, value: /a/b*, rate_limit: {unit: second, requests_per_unit: 8}}
  - {key: glob, value: /a/*, rate_limit: {unit: second, requests_per_unit: 7}}
  - {key: glob, value: "*/z", rate_limit: {unit: second, requests_per_unit: 14}}
  - {key: host, value: "*.example.com", rate_limit: {unit: second, requests_per_unit: 15}}
  - {key: tenant, value: t*prod, share_threshold: true, rate_limit: {unit: second, requests_per_unit: 16}, metadata: {a: [{b: 1}]}}
  - {key: parts, value: a*aba*a, rate_limit: {unit: second, requests_per_unit: 17}}
  - {key: "*mid*", rate_limit: {unit: second, requests_per_unit: 18}}
  - {key: glob, value: /a/b/c, rate_limit: {unit: second, requests_per_unit: 9}}
  - {key: glob, rate_limit: {unit: second, requests_per_unit: 10}}
  - key: shared
    value: f*
    share_threshold: true
    rate_limit: {unit: second, requests_per_unit: 11}
    descriptors: [{key: user, rate_limit: {unit: second, requests_per_unit: 12}}]
  - {key: star*, share_threshold: true, rate_limit: {unit: second, requests_per_unit: 13}}
`

// The rules and buckets of descriptors, as Envoy's reference finds them.
func TestRules_Matching(t *testing.T) {
	t.Parallel()
	rules := read(t, matching)
	for _, test := range []struct {
		pairs       string
		policy, key string // empty for none
	}{
		{"any=", "d.any", `[["any",""]]`},
		{"any=thing", "d.any", `[["any","thing"]]`},
		{"other=thing", "", ""},
		{"", "", ""},
		{"one=x", "d.one_x", `[["one","x"]]`},
		{"one=y", "", ""},
		{"one=", "", ""},
		{"one_x=", "d.one_x", `[["one_x",""]]`}, // as the reference, which puts them together
		{"default=x", "d.default_x", `[["default","x"]]`},
		{"default=y", "d.default", `[["default","y"]]`},
		{"path=p", "", ""},
		{"path=p deep=q", "five", `[["path","p"],["deep","q"]]`},
		{"path=p deep=q deeper=r", "d.path.deep.deeper", `[["path","p"],["deep","q"],["deeper","r"]]`},
		{"path=p deep=q deeper=r deepest=s", "", ""},
		{"path=p deeper=r", "", ""},
		{"deep=q", "", ""},
		{"any=thing any=thing", "", ""},
		{"glob=/a/", "d.glob_/a/*", `[["glob","/a/"]]`},
		{"glob=/a/b", "d.glob_/a/b*", `[["glob","/a/b"]]`}, // the first of the file
		{"glob=/a/z", "d.glob_/a/*", `[["glob","/a/z"]]`},
		{"glob=/z", "d.glob_*/z", `[["glob","/z"]]`},
		{"host=www.example.com", "d.host_*.example.com", `[["host","www.example.com"]]`},
		{"host=.example.com", "d.host_*.example.com", `[["host",".example.com"]]`},
		{"xhost=.example.com", "", ""},
		{"path= deep=x bare=x", "", ""}, // not the rule above
		{"host=example.com", "", ""},
		{"host=www.example.com.org", "", ""},
		{"host=", "", ""},
		{"tenant=t1prod", "d.tenant_t*prod", `[["tenant","t*prod"]]`},
		{"tenant=tprod", "d.tenant_t*prod", `[["tenant","t*prod"]]`},
		{"tenant=t1prod2", "", ""},
		{"tenant=tpro", "", ""}, // the parts do not overlap
		{"parts=aabaa", "d.parts_a*aba*a", `[["parts","aabaa"]]`},
		{"parts=aababa", "d.parts_a*aba*a", `[["parts","aababa"]]`},
		{"parts=aaba", "", ""},
		{"parts=aba", "", ""},
		{"amidst=x", "d.*mid*", `[["amidst","x"]]`},
		{"x=amid", "d.*mid*", `[["x","amid"]]`},
		{"glob=/a/b/c", "d.glob_/a/b/c", `[["glob","/a/b/c"]]`},
		{"glob=/b", "d.glob", `[["glob","/b"]]`},
		{"shared=file", "d.shared_f*", `[["shared","f*"]]`},
		{"shared=f", "d.shared_f*", `[["shared","f*"]]`},
		{"shared=file user=ann", "d.shared_f*.user", `[["shared","f*"],["user","ann"]]`},
		{"shared=g", "", ""},
		{"starring=x", "d.star*", `[["starring","star*"]]`},
	} {
		var pairs []string
		for pair := range strings.FieldsSeq(test.pairs) {
			key, value, _ := strings.Cut(pair, "=")
			pairs = append(pairs, key, value)
		}
		_, b := ask(t, rules, of(pairs...))
		if test.policy == "" {
			require.Empty(t, b.charges, test.pairs)
			continue
		}
		require.Len(t, b.charges, 1, test.pairs)
		require.Equal(t, []string{test.policy, test.key}, []string{b.charges[0].Policy, b.charges[0].Key}, test.pairs)
	}
}

// A rule of 0 requests denies everything, and in shadow nothing.
func TestAnswer_ABlockedRuleThatWatchesRefusesNothing(t *testing.T) {
	t.Parallel()
	answer, b := ask(t, read(t, "domain: d\ndescriptors: [{key: k, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 0}}]"), of("k", "x"))
	require.Equal(t, pb.RateLimitResponse_OK, answer.OverallCode)
	require.Equal(t, pb.RateLimitResponse_OK, answer.Statuses[0].Code)
	require.Empty(t, b.charges)
}

// As with the reference, which does not look at the names of unlimited rules.
func TestAnswer_AnUnlimitedRuleIsNotReplaced(t *testing.T) {
	t.Parallel()
	answer, _ := ask(t, read(t, `
domain: d
descriptors:
  - {key: free, rate_limit: {unlimited: true, name: n}}
  - {key: other, rate_limit: {unit: day, requests_per_unit: 1, replaces: [{name: n}]}}
`), of("free", "x"), of("other", "x"))
	require.EqualValues(t, math.MaxUint32, answer.Statuses[0].LimitRemaining)
}

func TestAnswer_AnInvalidRequestIsNotAsked(t *testing.T) {
	t.Parallel()
	rules := read(t, matching)
	back, limited := of("any", "x"), of("any", "x")
	back.IsNegativeHits, limited.Limit = true, &common.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 1} // its sender would expect it to count
	for _, test := range []struct {
		domain      string
		descriptors []*common.RateLimitDescriptor
		want        string
	}{
		{"", []*common.RateLimitDescriptor{of("any", "x")}, "invalid domain"},
		{"d", nil, "descriptors has 0 elements"},
		{"d", slices.Repeat([]*common.RateLimitDescriptor{of("any", "x")}, 1001), "descriptors has 1001 elements"},
		{"d", []*common.RateLimitDescriptor{of("any", "x"), of("any", "x"), limited}, "descriptor 2 has a limit of its own"},
		{"d", []*common.RateLimitDescriptor{of("any", "x"), back}, "descriptors 0 and 1 have hits of different signs"},
		{"d", []*common.RateLimitDescriptor{back, of("nobody", "x")}, "descriptors 0 and 1 have hits of different signs"},
	} {
		b := &book{}
		_, err := envoy.New(b, rules).ShouldRateLimit(t.Context(), &pb.RateLimitRequest{Domain: test.domain, Descriptors: test.descriptors})
		var e *service.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, service.InvalidArgument, e.Kind)
		require.ErrorContains(t, err, test.want)
		require.Empty(t, b.charges)
	}
}

// A key is the JSON of the entries. A key that is too long is no error, because Envoy may be told to ignore errors.
func TestAnswer_AKeyHas512Bytes(t *testing.T) {
	t.Parallel()
	rules := read(t, matching)
	keyOf := func(value string) string {
		_, b := ask(t, rules, of("any", value))
		return b.charges[0].Key
	}
	for length, isHash := range map[int]bool{511: false, 512: false, 513: true, 10_000: true} {
		key := keyOf(strings.Repeat("x", length-len(`[["any",""]]`)))
		require.Equal(t, isHash, strings.HasPrefix(key, "sha256:"), length)
		require.Equal(t, !isHash, len(key) == length)
	}
	require.Equal(t, `[["any","a\"],[\\ \u0000\n é <&>"]]`, keyOf("a\"],[\\ \x00\n é <&>"))
}

func TestRead_Mistakes(t *testing.T) {
	t.Parallel()
	limit := func(rest string) string { return "{unit: day, requests_per_unit: 1" + rest + "}" }
	for name, test := range map[string]struct {
		files map[string]string
		want  []string
	}{
		"a domain twice": {map[string]string{"a.yaml": "domain: d\n", "b.yml": "domain: d\n"},
			[]string{`b.yml:1:9: domain "d" is in a.yaml:1:9, too: write all its descriptors there`}},
		"mistakes in two files": {map[string]string{"a.yaml": "domain: ''\n", "b.yaml": "domains: d\n"},
			[]string{`a.yaml:1:9: domain is "": write text of one character or more`,
				`b.yaml:1:1: the file has no domain: write domain: edge`,
				`b.yaml:1:1: unknown field "domains": did you mean domain?`}},
		"a policy that shadow_mode cannot change": {map[string]string{"a.yaml": "domain: d\ndescriptors:\n- {key: k, shadow_mode: true, rate_limit: {policy: p}}"},
			[]string{`a.yaml:3:3: shadow_mode and quota_mode are for a rule with unit: policy "p" watches if it is defined with shadow`}},
		"a rule that replaces itself": {map[string]string{"a.yaml": "domain: d\ndescriptors: [{key: k, rate_limit: " + limit(", name: k, replaces: [{name: k}]") + "}]"},
			[]string{`a.yaml:2:24: "k" replaces itself or a rule that replaces it, and a request of both would have no limit: remove one of the two`}},
		"rules that replace each other": {map[string]string{"a.yaml": "domain: d\ndescriptors:\n- {key: k, rate_limit: " + limit(", name: k, replaces: [{name: l}]") + "}\n- {key: l, rate_limit: " + limit(", name: l, replaces: [{name: m}, {name: n}]") + "}\n- {key: m, rate_limit: {unit: day, requests_per_unit: 0, name: m, replaces: [{name: k}]}}\n- {key: n, rate_limit: {unlimited: true, name: n, replaces: [{name: l}]}}"},
			[]string{`a.yaml:3:12: "k" replaces itself or a rule that replaces it, and a request of both would have no limit: remove one of the two`,
				`a.yaml:4:12: "l" replaces itself or a rule that replaces it, and a request of both would have no limit: remove one of the two`,
				`a.yaml:5:12: "m" replaces itself or a rule that replaces it, and a request of both would have no limit: remove one of the two`}},
		"overdraw nothing": {map[string]string{"a.yaml": "domain: d\ndescriptors:\n- {key: k, rate_limit: {unit: day, requests_per_unit: 0, overdraw: true}}"},
			[]string{`a.yaml:3:12: nothing passes a rule of 0 requests, so there is nothing to overdraw: remove overdraw, or allow some requests`}},
		"a name for a rule that watches and one that does not": {map[string]string{"a.yaml": "domain: d\ndescriptors:\n- {key: k, rate_limit: " + limit(", name: n") + "}\n- {key: l, shadow_mode: true, rate_limit: " + limit(", name: n") + "}"},
			[]string{`a.yaml:4:31: the policy of this rule would be called "n", as that of the rule at a.yaml:3:12, which has other numbers: give this rule another name`}},
		"a name for two domains": {map[string]string{"a.yaml": "domain: d\ndescriptors: [{key: k, rate_limit: " + limit(", name: n") + "}]", "b.yaml": "domain: e\ndescriptors: [{key: k, rate_limit: " + limit(", name: n") + "}]"},
			[]string{`b.yaml:2:24: the policy of this rule would be called "n", as that of the rule at a.yaml:2:24, and share its buckets: give this rule another name`}},
		"a long path": {map[string]string{"a.yaml": "domain: d\ndescriptors: [{key: " + strings.Repeat("k", 511) + ", rate_limit: " + limit("") + "}]"},
			[]string{`a.yaml:2:534: the policy of this rule would be called by its domain and path, which have 513 bytes: give the rule a name of up to 512`}},
		"a rule that never matches": {map[string]string{"a.yaml": "domain: d\ndescriptors:\n- {key: k}\n- {key: k, value: 'a*'}\n- {key: k, value: 'a*b*'}\n- {key: k, value: 'a**'}\n- {key: k, value: ab}\n- {key: k, value: '*'}\n- {key: 'k_*a'}\n- key: l\n  descriptors: [{key: 'm*'}, {key: m}, {key: n}]"},
			[]string{`a.yaml:3:3: "k" never matches: the descriptor at 8:3 comes first for all its values: remove one of the two, or put the narrower pattern first`,
				`a.yaml:5:3: "k_a*b*" never matches: the descriptor at 4:3 comes first for all its values: remove one of the two, or put the narrower pattern first`,
				`a.yaml:6:3: "k_a**" never matches: the descriptor at 4:3 comes first for all its values: remove one of the two, or put the narrower pattern first`,
				`a.yaml:9:3: "k_*a" never matches: the descriptor at 8:3 comes first for all its values: remove one of the two, or put the narrower pattern first`,
				`a.yaml:11:30: "m" never matches: the descriptor at 11:17 comes first for all its values: remove one of the two, or put the narrower pattern first`}},
		"a file that would not be read": {map[string]string{"a.yaml": "domain: d", "b.json": "{}"},
			[]string{`b.json does not end in .yaml or .yml: rename it, or give it a name that begins with a dot`}},
		"a folder in a folder": {map[string]string{"a.yaml": "domain: d", "more/b.yaml": "domain: e"},
			[]string{`more is a folder in a folder of rules: move its files one up, or give it a name that begins with a dot`}},
		"a policy file": {map[string]string{"a.yaml": "policies: {p: {}}\nenvoy: [{domain: d}]"},
			[]string{`a.yaml:1:12: p has no capacity and no refill and no every: write capacity: 100, refill: 10 and every: 1s`}},
	} {
		require.Equal(t, test.want, mistakes(t, test.files), name)
	}
	empty := t.TempDir()
	_, err := envoy.Read(empty)
	require.EqualError(t, err, empty+" has no file whose name ends in .yaml or .yml")
	policies := folder(t, map[string]string{"limits.yaml": "policies: {p: {capacity: 1, refill: 1, every: 1s}}"})
	_, err = envoy.Read(policies)
	require.EqualError(t, err, policies+" has no rule: write domain and descriptors, or in a policy file the section envoy")
	_, err = envoy.Read(filepath.Join(empty, "none"))
	require.ErrorContains(t, err, "no such file")
}

// A misspelled domain or key switches a limit off.
func TestAnswer_TellsOfARequestThatNoRuleIsAbout(t *testing.T) {
	t.Parallel()
	rules := read(t, matching)
	for _, test := range []struct {
		domain      string
		descriptors []*common.RateLimitDescriptor
		want        []string
	}{
		{"d", []*common.RateLimitDescriptor{of("any", "x")}, nil},
		{"d", []*common.RateLimitDescriptor{of("nobody", "x"), of("any", "x")}, nil},
		{"d", []*common.RateLimitDescriptor{of("nobody", "secret"), of("a", "secret", "b", "secret")}, []string{"d: nobody, a.b"}},
		{"D", []*common.RateLimitDescriptor{of("any", "x")}, []string{"D: any"}},
	} {
		b := &book{}
		_, err := envoy.New(b, rules).ShouldRateLimit(t.Context(), &pb.RateLimitRequest{Domain: test.domain, Descriptors: test.descriptors})
		require.NoError(t, err)
		require.Equal(t, test.want, b.unmatched)
	}
}

type fixed struct {
	envoy.Gate
	client.Decision
}

func (f fixed) Admit(context.Context, []service.GateCharge, bool) (client.JointDecision, error) {
	return client.JointDecision{Decision: f.Decision, Decisions: []client.Decision{f.Decision}}, nil
}

// Envoy's headers have whole seconds, after which a client must be allowed.
func TestAnswer_TimesAreWholeSecondsRoundedUp(t *testing.T) {
	t.Parallel()
	rules := read(t, matching)
	q := &pb.RateLimitRequest{Domain: "d", Descriptors: []*common.RateLimitDescriptor{of("any", "x")}}
	for wait, want := range map[time.Duration]int64{
		0: 0, 1: 1, time.Microsecond: 1, time.Second: 1, time.Second + 1: 2, 2900 * time.Millisecond: 3, math.MaxInt64: 9223372037,
	} {
		for _, d := range []client.Decision{{Allowed: true, ResetAfter: wait}, {RetryAfter: wait}} {
			answer := kit.NoError(envoy.New(fixed{Decision: d}, rules).ShouldRateLimit(t.Context(), q))(t)
			require.Equal(t, want, answer.GetStatuses()[0].GetDurationUntilReset().GetSeconds(), wait)
			require.Zero(t, answer.GetStatuses()[0].GetDurationUntilReset().GetNanos(), wait)
		}
	}
}

func TestRead_Folders(t *testing.T) {
	t.Parallel()
	rules, err := envoy.Read(folder(t, map[string]string{
		"a.yaml": "domain: a\ndescriptors: [{key: k, rate_limit: {unit: DAY, requests_per_unit: 1}}]", ".b.yaml": "domain: a", ".git/c.yaml": "domain: a",
		"limits.yml": "policies: {p: {capacity: 1, refill: 1, every: 1s}}\nenvoy:\n- {domain: b, descriptors: [{key: k, rate_limit: {policy: p}}]}\n- domain: c",
	}))
	require.NoError(t, err)
	require.Equal(t, 3, rules.Domains())
	require.Equal(t, 2, rules.Count())
}

func TestDocs_Examples(t *testing.T) {
	t.Parallel()
	page := kit.NoError(os.ReadFile("../../../docs/envoy.md"))(t)
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	require.Len(t, blocks, 1)
	require.Equal(t, 2, read(t, blocks[0][1]).Count())

	file := kit.NoError(os.ReadFile("../../../docs/envoy/envoy.yaml"))(t)
	var config any
	require.NoError(t, yaml.Unmarshal(file, &config))
	text := kit.NoError(json.Marshal(config))(t)
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

const fuzzed = `
domain: d
descriptors:
  - {key: a, rate_limit: {policy: p}}
  - {key: a, value: x, rate_limit: {policy: q}}
  - {key: a, value: y*, share_threshold: true, rate_limit: {policy: p}, descriptors: [{key: b, rate_limit: {policy: q, name: n}}]}
  - {key: b, rate_limit: {policy: q, overdraw: true}}
  - {key: c, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: d, rate_limit: {unlimited: true, replaces: [{name: n}]}}
`

// FuzzDescriptors sends whatever protobuf there is, twice, to buckets that do not refill. A request that is allowed has paid for
// each rule that it matches, and one that is refused has paid nothing.
func FuzzDescriptors(f *testing.F) {
	for _, descriptors := range [][]*common.RateLimitDescriptor{
		{of("a", "1")},
		{of("a", "x"), of("a", "x"), of("b", "")},
		{of("a", "y1", "b", "z"), of("a", "y2")},
		{of("c", ""), of("a", "1")},
		{of("d", ""), of("a", "y", "b", "z")},
		{{Entries: of("a", "1").Entries, IsNegativeHits: true}},
		{{Entries: of("a", "1").Entries, HitsAddend: wrapperspb.UInt64(0)}, {Entries: of("b", "1").Entries, HitsAddend: wrapperspb.UInt64(math.MaxUint64)}},
		{{Entries: of("a", "1").Entries, HitsAddend: wrapperspb.UInt64(math.MaxUint64)}, {Entries: of("a", "1").Entries, HitsAddend: wrapperspb.UInt64(6)}},
	} {
		seed := kit.NoError(proto.Marshal(&pb.RateLimitRequest{Domain: "d", Descriptors: descriptors}))(f)
		f.Add(seed)
	}
	rules := read(f, fuzzed)
	f.Fuzz(func(t *testing.T, message []byte) {
		var q pb.RateLimitRequest
		if proto.Unmarshal(message, &q) != nil {
			return
		}
		fake := clienttest.New(func() time.Time { return time.Unix(0, 0) })
		for name, capacity := range map[string]int64{"p": 10, "q": 5} {
			require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: name, Capacity: capacity, Refill: client.Zero, Every: time.Second}))
		}
		limits := service.Limits{Calls: 1, OwnConnections: 1, Time: time.Minute}
		asked := &book{}
		_, _ = envoy.New(asked, rules).ShouldRateLimit(t.Context(), &q)
		s := envoy.New(service.New([]service.Limiter{fake}, limits, func(service.Call) {}), rules)
		for range 2 {
			before := levels(t, fake, asked.charges)
			answer, err := s.ShouldRateLimit(t.Context(), &q)
			after := levels(t, fake, asked.charges)
			if err != nil {
				require.Equal(t, before, after, "an error that has taken")
				continue
			}
			require.Len(t, answer.Statuses, len(q.Descriptors))
			over := false
			for _, status := range answer.Statuses {
				over = over || status.Code == pb.RateLimitResponse_OVER_LIMIT
			}
			require.Equal(t, over, answer.OverallCode == pb.RateLimitResponse_OVER_LIMIT)
			switch {
			case over:
				require.Equal(t, before, after, "a refused request has taken")
			case !q.Descriptors[0].IsNegativeHits:
				requirePaid(t, asked.charges, before, after)
			}
		}
	})
}

// FuzzBuckets matches two descriptors, split from texts. Each has a bucket of its own, if it matches a rule and is not the other again.
func FuzzBuckets(f *testing.F) {
	for _, seed := range [][2]string{
		{"a\x001\x00b\x002", "a\x001\x00b_2\x00"},
		{`a` + "\x00" + `1"],["b","2`, "a\x001\x00b\x002"},
		{"a\x00" + strings.Repeat("x", 600), "a\x00" + strings.Repeat("x", 601)},
		{"a\x00sha256:", "a\x00\\"},
		{"a\x00\u2028", "a\x00\\u2028"},
	} {
		f.Add(seed[0], seed[1])
	}
	rules := read(f, `
domain: d
descriptors:
  - {key: "a*", rate_limit: {policy: p}, descriptors: [{key: "b*", rate_limit: {policy: p}, descriptors: [{key: "*", rate_limit: {policy: p}}]}]}
  - {key: a, value: x, rate_limit: {policy: p}}
`)
	f.Fuzz(func(t *testing.T, a, b string) {
		q := &pb.RateLimitRequest{Domain: "d"}
		for _, text := range []string{a, b} {
			if !utf8.ValidString(text) {
				return // it is no protobuf
			}
			pairs := strings.Split(text, "\x00")
			if len(pairs)%2 == 1 {
				pairs = append(pairs, "")
			}
			q.Descriptors = append(q.Descriptors, of(pairs...))
		}
		_, asked := ask(t, rules, q.Descriptors...)
		if len(asked.charges) < 2 {
			return
		}
		areSame := proto.Equal(q.Descriptors[0], q.Descriptors[1])
		require.Equal(t, areSame, asked.charges[0].Key == asked.charges[1].Key, "%q and %q: %q", a, b, asked.charges[0].Key)
		require.LessOrEqual(t, len(asked.charges[0].Key), 512)
	})
}

type bucket struct{ policy, key string }

func levels(t *testing.T, fake *clienttest.Fake, charges []service.GateCharge) map[bucket]int64 {
	levels := make(map[bucket]int64)
	for _, charge := range charges {
		d := kit.NoError(fake.Peek(t.Context(), charge.Policy, charge.Key))(t)
		levels[bucket{charge.Policy, charge.Key}] = d.Remaining
	}
	return levels
}

// requirePaid checks that each bucket lost what was asked of it, and held what it had to.
func requirePaid(t *testing.T, charges []service.GateCharge, before, after map[bucket]int64) {
	const floor = -9_000_000_000_000
	want, lowest := maps.Clone(before), make(map[bucket]int64)
	for _, charge := range charges {
		b := bucket{charge.Policy, charge.Key}
		if !charge.Overdraw || charge.Cost == 0 {
			require.GreaterOrEqual(t, before[b], max(1, charge.Cost), "%v passed without the tokens", charge)
		}
		if charge.Overdraw {
			lowest[b] = floor
		}
		want[b] -= min(charge.Cost, -floor)
	}
	for b := range want {
		require.Equal(t, max(want[b], floor), after[b], "%v", b)
		require.GreaterOrEqual(t, after[b], lowest[b], "%v", b)
	}
}
