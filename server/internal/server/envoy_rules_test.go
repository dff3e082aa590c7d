package server_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/server"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// policies are those of a database, by name.
func policies(t testing.TB, db *pgtest.DB) map[string]client.Policy {
	t.Helper()
	all, err := client.New(db.Pool).Policies(t.Context())
	require.NoError(t, err)
	byName := make(map[string]client.Policy)
	for _, p := range all {
		byName[p.Name] = p
	}
	return byName
}

// startError is why a server does not start.
func startError(t testing.TB, url string, settings ...string) error {
	t.Helper()
	s, err := server.Start(t.Context(), load(t, url, settings...), slog.New(slog.DiscardHandler))
	if s != nil {
		require.NoError(t, s.Stop())
	}
	require.Error(t, err)
	return err
}

// requests_per_unit at once, and as many in each unit, by the name of the rule or its domain and path.
func TestEnvoyRules_DefinePolicies(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, `select ratelimit_define_policy('edge.kept', 1, 1, '1 hour', durable => false, remember => '7 days', stepped => true)`)
	path := rulesFile(t, `
domain: edge
descriptors:
  - {key: kept, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: user, value: gold, descriptors: [{key: path, rate_limit: {unit: second, requests_per_unit: 4294967295}}]}
  - {key: m, rate_limit: {unit: month, requests_per_unit: 1, name: it's monthly}}
  - {key: y, shadow_mode: true, rate_limit: {unit: YEAR, requests_per_unit: 1}}
  - {key: q, quota_mode: true, rate_limit: {unit: Week, requests_per_unit: 1}}
  - {key: none, rate_limit: {unit: second, requests_per_unit: 0}}
  - {key: free, rate_limit: {unlimited: true}}
`)
	s := start(t, db.URL, "ENVOY_RULES="+path)
	has := policies(t, db)
	require.Len(t, has, 2+5, "api and budget, and these")
	want := client.Policy{Stepped: client.No, Durable: client.Yes, Remember: day, Shadow: client.No}
	for _, policy := range []struct {
		name    string
		n       int64
		every   time.Duration
		watches client.Choice
	}{
		{"edge.user_gold.path", 1<<32 - 1, time.Second, client.No},
		{"it's monthly", 1, 30 * day, client.No},
		{"edge.y", 1, 365 * day, client.Yes},
		{"edge.q", 1, 7 * day, client.Yes},
	} {
		want.Name, want.Capacity, want.Refill, want.Every, want.Shadow = policy.name, policy.n, policy.n, policy.every, policy.watches
		require.Equal(t, want, has[policy.name])
	}
	require.Equal(t, client.Policy{Name: "edge.kept", Capacity: 2, Refill: 2, Every: time.Hour, Stepped: client.No, Durable: client.No, Remember: 7 * day, Shadow: client.No}, has["edge.kept"])

	rows := func() (version string) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), "select string_agg(xmin::text, ' ' order by name) from ratelimit.policies").Scan(&version))
		return version
	}
	before := rows()
	require.NoError(t, s.Reload(t.Context()))
	require.Equal(t, before, rows(), "what is there is not written again")
}

// What pgratelimit apply makes of a file is what the server wants of it: none of the two changes the other's policies.
func TestEnvoyRules_OfAPolicyFileAreAppliedAsTheyAreServed(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	path := rulesFile(t, `
policies: {llm: {capacity: 5, refill: 0, every: 1s}}
envoy:
  - domain: edge
    descriptors:
      - {key: user, value: gold, descriptors: [{key: path, rate_limit: {unit: month, requests_per_unit: 4294967295}}]}
      - {key: y, quota_mode: true, rate_limit: {unit: YEAR, requests_per_unit: 1, name: yearly}}
      - {key: tokens, rate_limit: {policy: llm, overdraw: true}}
`)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	file, err := policyfile.Parse(path, text)
	require.NoError(t, err)
	db.Exec(t, "select ratelimit_define_policy('llm', 5, 0, '1 second')")
	s := start(t, db.URL, "ENVOY_RULES="+path)
	served := policies(t, db)
	d, err := policyfile.Apply(t.Context(), db.Pool, file, policyfile.Options{})
	require.NoError(t, err)
	require.Empty(t, d.Changes)
	db.Exec(t, "select ratelimit_drop_policy('yearly'), ratelimit_drop_policy('edge.user_gold.path')")
	_, err = policyfile.Apply(t.Context(), db.Pool, file, policyfile.Options{})
	require.NoError(t, err)
	require.Equal(t, served, policies(t, db))
	require.NoError(t, s.Reload(t.Context()))
	require.Equal(t, served, policies(t, db))
}

// What differs in one field alone is made what the rule says again. What rules do not say stays.
func TestEnvoyRules_EachFieldOfAPolicyIsTheRules(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL, "ENVOY_RULES="+rulesFile(t, "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 10}}]"))
	want := policies(t, db)["edge.user"]
	for _, change := range []string{"capacity => 11", "refill => 11", "every => '1 hour'", "stepped => true", "shadow => true"} {
		db.Exec(t, "select ratelimit_define_policy('edge.user', "+change+")")
		require.NotEqual(t, want, policies(t, db)["edge.user"])
		require.NoError(t, s.Reload(t.Context()))
		require.Equal(t, want, policies(t, db)["edge.user"], change)
	}
	db.Exec(t, "select ratelimit_define_policy('edge.user', remember => '7 days')")
	require.NoError(t, s.Reload(t.Context()))
	require.Equal(t, 7*day, policies(t, db)["edge.user"].Remember)
}

// A rule may name the policy that another one describes: it is there when both are in use. It watches if that one does.
func TestEnvoyRules_ARuleNamesThePolicyOfAnother(t *testing.T) {
	t.Parallel()
	e := startEdge(t, `
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 10}}
  - {key: other, rate_limit: {policy: edge.user}}
  - {key: watched, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: watching, rate_limit: {policy: edge.watched}}
`)
	e.requireStatuses(list{of("other", "x")}, ok(per(0, 10, ""), 9, day/10))
	e.requireStatuses(list{of("watching", "x")}, ok(per(0, 1, ""), 0, day))
	e.requireStatuses(list{times(0, of("watching", "x"))}, ok(per(0, 1, ""), 0, day))
}

// current_limit is what a rule says, and not what one key has in its place.
func TestEnvoyRules_AnOverrideIsNotTheLimitOfTheRule(t *testing.T) {
	t.Parallel()
	e := startEdge(t, edgeRules)
	e.db.Exec(t, `select ratelimit_override('edge.user', '[["user","ann"]]', capacity => 100, refill => 100)`)
	e.requireStatuses(list{of("user", "ann")}, ok(userLimit, 99, day/100))
}

// A role that may not define policies is told what an administrator has to run, and that is enough.
func TestEnvoyRules_WithoutTheRight(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	role := newRole(t, db)
	db.Exec(t, "grant execute on function ratelimit_acquire, ratelimit_acquire_all, ratelimit_acquire_packed to "+role)
	db.Exec(t, `select ratelimit_define_policy('edge.b', 7, 7, '1 day')`)
	path := rulesFile(t, `
domain: edge
descriptors:
  - {key: a, rate_limit: {unit: minute, requests_per_unit: 60, name: it's a\b}}
  - {key: b, rate_limit: {unit: day, requests_per_unit: 8}}
  - {key: c, rate_limit: {policy: nobody}}
  - {key: d, rate_limit: {policy: api}}
`)
	settings := []string{"ENVOY_RULES=" + path}
	err := startError(t, as(t, db, role), settings...)
	require.Equal(t, 1, strings.Count(err.Error(), "grant execute on function"))
	require.ErrorContains(t, err, "grant execute on function ratelimit_policies() to <role>;")
	db.Exec(t, "grant execute on function ratelimit_policies to "+role)

	err = startError(t, as(t, db, role), settings...)
	lines := strings.Split(err.Error(), "\n")
	require.Equal(t, []string{
		`ENVOY_RULES: policies of the rules: ` + path + `:4:14: policy "it's a\\b" is missing, and this role may not define it. An administrator has to run: ` +
			`select ratelimit_define_policy('it''s a\b', capacity => 60, refill => 60, every => '60 seconds', stepped => false, shadow => false);`,
		path + `:5:14: policy "edge.b" has other numbers, and this role may not define it. An administrator has to run: ` +
			`select ratelimit_define_policy('edge.b', capacity => 8, refill => 8, every => '86400 seconds', stepped => false, shadow => false);`,
		path + `:6:14: there is no policy "nobody": define it first, or give the rule unit and requests_per_unit`,
	}, lines)
	for _, line := range lines[:2] {
		_, statement, _ := strings.Cut(line, "run: ")
		db.Exec(t, statement)
	}
	db.Exec(t, "select ratelimit_define_policy('nobody', 1, 1, '1 second')")
	start(t, as(t, db, role), settings...)
}

// All or nothing: a mistake leaves no policy of a file.
func TestEnvoyRules_AnErrorChangesNothing(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	before := policies(t, db)
	err := startError(t, db.URL, "ENVOY_RULES="+rulesFile(t, `{domain: edge, descriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1}}, {key: b, rate_limit: {policy: nobody}}]}`))
	require.ErrorContains(t, err, `there is no policy "nobody"`)
	require.Equal(t, before, policies(t, db))
}

func TestEnvoyRules_Reload(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, freeze)
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	rule := func(domain, numbers string) string {
		return "{domain: " + domain + ", descriptors: [{key: user, rate_limit: " + numbers + "}]}"
	}
	write("edge.yaml", rule("edge", "{unit: day, requests_per_unit: 10}"))
	e := newEdge(t, db, "ENVOY_RULES="+dir)
	e.requireStatuses(list{of("user", "ann")}, ok(userLimit, 9, day/10))

	for name, text := range map[string]string{
		"edge.yaml:1:66: unknown field": rule("edge", "{unit: day, request_per_unit: 20}"),
		`there is no policy "nobody"`:   rule("edge", "{policy: nobody}"),
		`domain "other" is in`:          rule("other", "{unit: day, requests_per_unit: 20}"),
		"this is no YAML":               "{",
	} {
		write("edge.yaml", text)
		write("other.yaml", rule("other", "{unit: day, requests_per_unit: 30}"))
		err := e.Reload(t.Context())
		require.ErrorContains(t, err, name)
		require.Contains(t, e.log.String(), "the rules stay as they are")
		e.requireStatuses(list{times(0, of("user", "ann"))}, ok(userLimit, 9, day/10))
		require.NotContains(t, policies(t, db), "other.user")
	}

	write("edge.yaml", rule("edge", "{unit: day, requests_per_unit: 20}"))
	require.NoError(t, e.Reload(t.Context()))
	e.requireStatuses(list{of("user", "ann")}, ok(per(userLimit.Unit, 20, ""), 8, 12*day/20))
	write("edge.yaml", "domain: edge")
	require.NoError(t, e.Reload(t.Context()))
	e.requireStatuses(list{of("user", "ann")}, none)
}
