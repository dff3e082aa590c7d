package policyfile_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestExport_LeavesOutWhatHasItsDefault(t *testing.T) {
	db := kit.ParallelDB(t).DB
	text := kit.NoError(policyfile.Export(t.Context(), db.Pool))(t)
	require.Equal(t, "policies: {}\n", string(text))
	db.Exec(t, `select ratelimit_define_policy('api', 100, 10, '1 second'), ratelimit_define_policy('closed', 0, 0, '1 day'),
		ratelimit_define_policy(E'odd\n"\u00e9', 5, 1, '90 minutes', stepped => true, durable => false, remember => '7 days', shadow => true)`)
	db.Exec(t, `select ratelimit_override('api', 'user:42', capacity => 1000), ratelimit_override('api', 'blocked', capacity => 0, expires_at => '2999-01-01 12:00:00.5Z'),
		ratelimit_override('closed', 'k', capacity => 1)`)
	db.Exec(t, `select ratelimit_define_policy('plan', 1000, period => '12 months', anchor => '2024-01-31 09:00'), ratelimit_define_policy('days', 50, period => '1 day', time_zone => 'Etc/GMT+5')`)
	db.Exec(t, `select ratelimit_override('plan', 'k', time_zone => 'Europe/Berlin')`)
	db.Exec(t, `select ratelimit_define_policy('jobs', 5, lease => '90 seconds'), ratelimit_define_policy('streams', 2, lease => '1 ms', durable => false, shadow => true)`)
	db.Exec(t, `select ratelimit_override('jobs', 'k', capacity => 0)`)
	text = kit.NoError(policyfile.Export(t.Context(), db.Pool))(t)
	require.Equal(t, `policies:
  "api": {capacity: 100, refill: 10, every: 1s}
  "closed": {capacity: 0, refill: 0, every: 1d}
  "days": {capacity: 50, period: 1 day, time_zone: Etc/GMT+5}
  "jobs": {capacity: 5, lease: 1m30s}
  "odd\n\"é": {capacity: 5, refill: 1, every: 1h30m, stepped: true, durable: false, remember: 7d, shadow: true}
  "plan": {capacity: 1000, period: 1 year, anchor: 2024-01-31T09:00:00}
  "streams": {capacity: 2, lease: 1ms, durable: false, shadow: true}

overrides:
  "api":
    "blocked": {capacity: 0, refill: 10, every: 1s, expires_at: 2999-01-01T12:00:00.5Z}
    "user:42": {capacity: 1000, refill: 10, every: 1s}
  "closed":
    "k": {capacity: 1, refill: 0, every: 1d}
  "jobs":
    "k": {capacity: 0, lease: 1m30s}
  "plan":
    "k": {capacity: 1000, time_zone: Europe/Berlin, anchor: 2024-01-31T09:00:00}
`, string(text))
}

func TestExport_OfShards(t *testing.T) {
	t.Parallel()
	one, two := pgtest.New(t), pgtest.New(t)
	for i, db := range []*pgtest.DB{one, two} {
		db.Exec(t, `select ratelimit_define_policy('api', 100, 10, '1 second')`)
		db.Exec(t, `select ratelimit_override('api', $1, capacity => 5)`, []string{"b", "a"}[i])
	}
	text := kit.NoError(policyfile.Export(t.Context(), one.Pool, two.Pool))(t)
	require.Contains(t, string(text), "    \"a\": {capacity: 5, refill: 10, every: 1s}\n    \"b\": {")
	two.Exec(t, `select ratelimit_define_policy('api', 101)`)
	_, err := policyfile.Export(t.Context(), one.Pool, two.Pool)
	require.ErrorContains(t, err, "the policies of the shards are not the same")
}

func TestExport_RefusesWhatNoFileCanHave(t *testing.T) {
	db := kit.ParallelDB(t).DB
	db.Exec(t, `select ratelimit_define_policy('api', 100, 10, '1 second'); select ratelimit_override('api', 'k', capacity => 5, expires_at => '10001-01-01Z')`)
	_, err := policyfile.Export(t.Context(), db.Pool)
	require.ErrorContains(t, err, "the export:6:")
	require.ErrorContains(t, err, "write an instant")
}
