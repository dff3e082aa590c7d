package client_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestPolicies_OrderedByName(t *testing.T) {
	t.Parallel()
	limiter := client.New(pgtest.New(t).Pool)
	require.Empty(t, noError(limiter.Policies(t.Context()))(t))

	for _, name := range []string{"b", "a", "B"} {
		require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: name, Capacity: 1, Refill: 1, Every: time.Second}))
	}
	policies := noError(limiter.Policies(t.Context()))(t)
	var names []string
	for _, p := range policies {
		names = append(names, p.Name)
	}
	require.Equal(t, []string{"B", "a", "b"}, names)
}

func TestPolicies_LongIntervalsAreCut(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('slow', 1, 1, '365250 days', remember => '365250 days')")
	policies := noError(client.New(db.Pool).Policies(t.Context()))(t)
	require.Equal(t, longest, policies[0].Every)
	require.Equal(t, longest, policies[0].Remember)
}
