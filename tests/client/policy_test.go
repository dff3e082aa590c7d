package client_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestDefinePolicy_KeepsWhatIsLeftOpen(t *testing.T) {
	t.Parallel()
	limiter := client.New(pgtest.New(t).Pool)
	define := func(p client.Policy) client.Policy {
		t.Helper()
		require.NoError(t, limiter.DefinePolicy(t.Context(), p))
		policies := noError(limiter.Policies(t.Context()))(t)
		require.Len(t, policies, 1)
		return policies[0]
	}

	p := client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Second}
	defaults := client.Policy{
		Name: "api", Capacity: 10, Refill: 1, Every: time.Second,
		Stepped: client.No, Durable: client.Yes, Remember: 24 * time.Hour, Shadow: client.No,
	}
	require.Equal(t, defaults, define(p))
	require.Equal(t, defaults, define(defaults), "what is read can be written")

	changed := client.Policy{
		Name: "api", Capacity: 20, Refill: 2, Every: time.Minute,
		Stepped: client.Yes, Durable: client.Yes, Remember: time.Hour, Shadow: client.No,
	}
	require.Equal(t, changed, define(changed))

	p = client.Policy{Name: "api", Capacity: 30, Refill: 3, Every: time.Hour}
	changed.Capacity, changed.Refill, changed.Every = p.Capacity, p.Refill, p.Every
	require.Equal(t, changed, define(p))

	p.Stepped = client.No
	changed.Stepped = client.No
	require.Equal(t, changed, define(p))
}

func TestDefinePolicy_Ephemeral(t *testing.T) {
	t.Parallel()
	limiter := client.New(pgtest.New(t).Pool)
	p := client.Policy{
		Name: "api", Capacity: 10, Refill: 1, Every: time.Second,
		Stepped: client.No, Durable: client.No, Remember: 24 * time.Hour, Shadow: client.No,
	}
	require.NoError(t, limiter.DefinePolicy(t.Context(), p))
	require.Equal(t, []client.Policy{p}, noError(limiter.Policies(t.Context()))(t))
}

func TestDefinePolicy_RefusesAnUnknownChoice(t *testing.T) {
	t.Parallel()
	limiter := client.New(pgtest.New(t).Pool)
	err := limiter.DefinePolicy(t.Context(), client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Second, Durable: 3})
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	require.ErrorContains(t, err, "Choice(3)")
}

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

// A zero field keeps what is there, so that one thing can be changed without knowing the others.
func TestDefinePolicy_ZeroKeeps(t *testing.T) {
	t.Parallel()
	limiter := client.New(pgtest.New(t).Pool)
	want := client.Policy{
		Name: "api", Capacity: 10, Refill: 1, Every: time.Second,
		Stepped: client.No, Durable: client.Yes, Remember: time.Hour, Shadow: client.No,
	}
	require.NoError(t, limiter.DefinePolicy(t.Context(), want))
	for _, change := range []struct {
		client.Policy
		field func()
	}{
		{client.Policy{}, func() {}},
		{client.Policy{Capacity: 20}, func() { want.Capacity = 20 }},
		{client.Policy{Refill: 2}, func() { want.Refill = 2 }},
		{client.Policy{Every: time.Minute}, func() { want.Every = time.Minute }},
		{client.Policy{Stepped: client.Yes}, func() { want.Stepped = client.Yes }},
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
}
