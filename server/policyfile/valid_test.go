package policyfile_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

const valid = `
policies:
  api: {capacity: 100, refill: 10, every: 1s}
  llm:
    capacity: 1000000
    refill: 0
    every: 30d
    stepped: true
    durable: false
    remember: 1w1h30m5s20ms7us
    shadow: true

overrides:
  llm:
    "user:42": {capacity: 0, expires_at: 2999-12-31T23:59:59.123456+01:00}
    "42": {refill: 7, every: 1h}

http:
  trusted_proxies: 1
  routes:
    POST /orders/{id}:
      api: {cost: 5, key: user}
      llm: {key: "path:id", cost: 0}
    /files/{path...}: {api: {key: "header:X-Tenant"}}

envoy:
  - domain: edge
    descriptors:
      - key: tenant
        descriptors:
          - key: path
            value: 7
            rate_limit: {policy: api, overdraw: true}
      - key: remote_address
        shadow_mode: true
        rate_limit: {name: address, unit: MINUTE, requests_per_unit: 0, replaces: [{name: other}]}
      - {key: internal, value: "a*", share_threshold: true, rate_limit: {unlimited: true}, quota_mode: true, detailed_metric: true, value_to_metric: true}

environments:
  staging:
    policies:
      api: {capacity: 5}
      extra: {capacity: 1, refill: 1, every: 1m}
    overrides:
      llm:
        "42": {every: 2h}
      extra:
        new: {capacity: 2}
    http:
      trusted_proxies: 0
      routes:
        POST /orders/{id}:
          api: {cost: 1}
`

func TestParse_ReadsWhatIsWritten(t *testing.T) {
	t.Parallel()
	file, err := policyfile.Parse("limits.yaml", []byte(valid))
	require.NoError(t, err)
	require.Equal(t, []string{"staging"}, file.Environments())
	base, err := file.Rules("")
	require.NoError(t, err)

	require.Len(t, base.Policies, 2)
	api, llm := base.Policies[0], base.Policies[1]
	require.Equal(t, "limits.yaml:3:3", api.At.String())
	require.Equal(t, "api 100 10 1s false true 1d false", written(api))
	require.Equal(t, "llm 1000000 0 30d true false 7d1h30m5s20ms7us true", written(llm))
	require.Equal(t, 7*policyfile.Day+policyfile.Hour+30*policyfile.Minute+5*policyfile.Second+20*policyfile.Millisecond+7, llm.Remember)

	at := func(line, column int) policyfile.Position {
		return policyfile.Position{File: "limits.yaml", Line: line, Column: column}
	}
	require.Equal(t, []policyfile.Override{
		{
			Policy: "llm", Key: "user:42", Refill: 0, Every: 30 * policyfile.Day, At: at(15, 5),
			ExpiresAt: time.Date(2999, 12, 31, 22, 59, 59, 123456000, time.UTC),
		},
		{Policy: "llm", Key: "42", Capacity: 1000000, Refill: 7, Every: policyfile.Hour, At: at(16, 5)},
	}, base.Overrides)

	require.Equal(t, policyfile.HTTP{TrustedProxies: 1, Routes: []policyfile.Route{
		{Pattern: "POST /orders/{id}", At: at(21, 5), Charges: []policyfile.Charge{
			{Policy: "api", Cost: 5, Key: policyfile.Key{From: policyfile.User}, At: at(22, 7)},
			{Policy: "llm", Cost: 0, Key: policyfile.Key{From: policyfile.Path, Name: "id"}, At: at(23, 7)},
		}},
		{Pattern: "/files/{path...}", At: at(24, 5), Charges: []policyfile.Charge{
			{Policy: "api", Cost: 1, Key: policyfile.Key{From: policyfile.Header, Name: "X-Tenant"}, At: at(24, 24)},
		}},
	}}, base.HTTP)

	require.Equal(t, []policyfile.EnvoyDomain{{Name: "edge", At: at(27, 13), Descriptors: []policyfile.EnvoyDescriptor{
		{Key: "tenant", At: at(29, 9), Descriptors: []policyfile.EnvoyDescriptor{
			{Key: "path", Value: "7", At: at(31, 13), Limit: &policyfile.EnvoyLimit{Policy: "api", Overdraw: true, At: at(33, 13)}},
		}},
		{Key: "remote_address", ShadowMode: true, At: at(34, 9), Limit: &policyfile.EnvoyLimit{
			Name: "address", Unit: "minute", Replaces: []string{"other"}, At: at(36, 9),
		}},
		{
			Key: "internal", Value: "a*", ShareThreshold: true, QuotaMode: true, DetailedMetric: true, ValueToMetric: true, At: at(37, 9),
			Limit: &policyfile.EnvoyLimit{Unlimited: true, At: at(37, 61)},
		},
	}}}, base.Envoy)
}

// An environment replaces single fields, at any depth, and adds what the file does not have.
func TestParse_EnvironmentsReplaceFields(t *testing.T) {
	t.Parallel()
	file, err := policyfile.Parse("limits.yaml", []byte(valid))
	require.NoError(t, err)
	base, err := file.Rules("")
	require.NoError(t, err)
	staging, err := file.Rules("staging")
	require.NoError(t, err)

	require.Len(t, staging.Policies, 3)
	require.Equal(t, "api 5 10 1s false true 1d false", written(staging.Policies[0]))
	require.Equal(t, base.Policies[1], staging.Policies[1])
	require.Equal(t, "extra 1 1 1m false true 1d false", written(staging.Policies[2]))

	require.Len(t, staging.Overrides, 3)
	require.Equal(t, base.Overrides[0], staging.Overrides[0])
	require.Equal(t, policyfile.Override{
		Policy: "llm", Key: "42", Capacity: 1000000, Refill: 7, Every: 2 * policyfile.Hour, At: base.Overrides[1].At,
	}, staging.Overrides[1])
	require.Equal(t, "extra", staging.Overrides[2].Policy)
	require.Equal(t, int64(2), staging.Overrides[2].Capacity)

	require.Zero(t, staging.HTTP.TrustedProxies)
	require.Equal(t, int64(1), staging.HTTP.Routes[0].Charges[0].Cost)
	require.Equal(t, policyfile.User, staging.HTTP.Routes[0].Charges[0].Key.From)
	require.Equal(t, base.HTTP.Routes[1], staging.HTTP.Routes[1])
	require.Equal(t, base.Envoy, staging.Envoy)

	_, err = file.Rules("stagin")
	require.EqualError(t, err, `limits.yaml has no environment "stagin": it has staging`)
}

// Aliases stand for what they name, in numbers that nobody could mind.
func TestParse_FollowsAliases(t *testing.T) {
	t.Parallel()
	file, err := policyfile.Parse("limits.yaml", []byte(`
policies:
  api: &plain {capacity: 1, refill: 1, every: &second 1s}
  web: *plain
  llm: {capacity: 1, refill: 1, every: *second}
`))
	require.NoError(t, err)
	rules, err := file.Rules("")
	require.NoError(t, err)
	require.Equal(t, "web 1 1 1s false true 1d false", written(rules.Policies[1]))
	require.Equal(t, "llm 1 1 1s false true 1d false", written(rules.Policies[2]))
}

// The reference's own files are read without policies, and numbers need no quotes in them.
func TestParseEnvoy(t *testing.T) {
	t.Parallel()
	domain, err := policyfile.ParseEnvoy("rules.yaml", []byte(`
domain: 7
descriptors:
  - key: true
    value: 1.50
    quota_mode: true
    detailed_metric: true
    value_to_metric: true
    rate_limit: {policy: elsewhere}
`))
	require.NoError(t, err)
	require.Equal(t, "7", domain.Name)
	require.Equal(t, "true=1.50", domain.Descriptors[0].Key+"="+domain.Descriptors[0].Value)
	require.Equal(t, "elsewhere", domain.Descriptors[0].Limit.Policy)

	_, err = policyfile.ParseEnvoy("rules.yaml", []byte("domain: a\ndescriptors:\n  - {key: a, rate_limit: {unit: eon}}\npolicies: {}\n"))
	require.EqualError(t, err, "rules.yaml:3:33: unit is \"eon\": write second, minute, hour, day, week, month or year\n"+
		"rules.yaml:4:1: unknown field \"policies\": a domain has domain and descriptors")
}

func TestEnvoyUnit_Spans(t *testing.T) {
	t.Parallel()
	for unit, want := range map[policyfile.EnvoyUnit]string{
		"second": "1s", "minute": "1m", "hour": "1h", "day": "1d", "week": "7d", "month": "30d", "year": "365d", "": "0us",
	} {
		require.Equal(t, want, unit.Span().String(), unit)
	}
}
