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

// A zero field keeps what is there, so that one thing can be changed without knowing the others. A new policy gets the defaults.
func TestDefinePolicy_ZeroKeeps(t *testing.T) {
	t.Parallel()
	limiter := client.New(pgtest.New(t).Pool)
	want := client.Policy{
		Name: "api", Capacity: 10, Refill: 1, Every: time.Second, Stepped: client.No, Durable: client.Yes, Remember: 24 * time.Hour, Shadow: client.No,
	}
	for _, change := range []struct {
		client.Policy
		field func()
	}{
		{client.Policy{Capacity: 10, Refill: 1, Every: time.Second}, func() {}},
		{want, func() {}}, // what is read can be written
		{client.Policy{}, func() {}},
		{client.Policy{Capacity: 20}, func() { want.Capacity = 20 }},
		{client.Policy{Refill: 2}, func() { want.Refill = 2 }},
		{client.Policy{Every: time.Minute}, func() { want.Every = time.Minute }},
		{client.Policy{Stepped: client.Yes}, func() { want.Stepped = client.Yes }},
		{client.Policy{Stepped: client.No}, func() { want.Stepped = client.No }},
		{client.Policy{Remember: time.Minute}, func() { want.Remember = time.Minute }},
		{client.Policy{Shadow: client.Yes}, func() { want.Shadow = client.Yes }},
		{client.Policy{Refill: client.Zero}, func() { want.Refill = client.Zero }},
		{client.Policy{Refill: 3, Shadow: client.No}, func() { want.Refill, want.Shadow = 3, client.No }},
	} {
		change.Name = "api"
		require.NoError(t, limiter.DefinePolicy(t.Context(), change.Policy))
		change.field()
		require.Equal(t, []client.Policy{want}, noError(limiter.Policies(t.Context()))(t))
	}
	for _, p := range []client.Policy{
		{Name: "new", Refill: 1, Every: time.Second},
		{Name: "new", Capacity: 1, Every: time.Second},
		{Name: "new", Capacity: 1, Refill: 1},
	} {
		require.ErrorIs(t, limiter.DefinePolicy(t.Context(), p), client.ErrInvalidArgument, "%+v", p)
	}
	err := limiter.DefinePolicy(t.Context(), client.Policy{Name: "new", Capacity: 10, Refill: 1, Every: time.Second, Durable: 3})
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	require.ErrorContains(t, err, "Choice(3)")
	ephemeral := want
	ephemeral.Name, ephemeral.Durable = "ephemeral", client.No
	require.NoError(t, limiter.DefinePolicy(t.Context(), ephemeral))
	require.Equal(t, []client.Policy{want, ephemeral}, noError(limiter.Policies(t.Context()))(t))
}
