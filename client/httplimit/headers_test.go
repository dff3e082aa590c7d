package httplimit_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

// Of several buckets of a policy the one that holds the least speaks, and of those that hold as much the one that is full last.
func TestFields_TheTightestBucketSpeaksForItsPolicy(t *testing.T) {
	t.Parallel()
	small, large := client.Charge{Policy: "api", Key: "small"}, client.Charge{Policy: "api", Key: "large"}
	for _, charges := range [][]client.Charge{{small, large}, {large, small}} {
		l := newLimited(t, charge(charges...), httplimit.Closed(time.Second), httplimit.Policies(api))
		require.NoError(t, l.Override(t.Context(), client.Override{Policy: "api", Key: "small", Capacity: 60}))
		for _, test := range []struct {
			small, large float64
			want         string
		}{{51, 51, `"api";q=100;w=10`}, {50, 51, `"api";q=60`}, {51, 50, `"api";q=100;w=10`}} {
			require.NoError(t, l.SetLevel("api", "small", test.small))
			require.NoError(t, l.SetLevel("api", "large", test.large))
			require.Equal(t, test.want, l.get().Header.Get("RateLimit-Policy"), "%+v", test)
		}
	}
}

// What is left of a policy is not known when any of its buckets answers with an earlier grant, whichever charge that is.
func TestFields_AReplayOfOneBucketHidesWhatThePolicyHasLeft(t *testing.T) {
	t.Parallel()
	for _, replayed := range []int{0, 1} {
		both := []client.Charge{{Policy: "api", Key: "0"}, {Policy: "api", Key: "1"}}
		charges := both[replayed : replayed+1]
		l := newLimited(t, func(*http.Request) []client.Charge { return charges }, httplimit.Closed(time.Second),
			httplimit.IdempotencyKey(func(*http.Request) string { return "once" }))
		require.Contains(t, l.get().Header, "Ratelimit")
		charges = both
		again := l.get()
		require.True(t, l.event.Decision.Decisions[replayed].Replayed)
		require.False(t, l.event.Decision.Decisions[1-replayed].Replayed)
		require.Contains(t, again.Header, "Ratelimit-Policy")
		require.NotContains(t, again.Header, "Ratelimit")
	}
}

// The percent sign is escaped, too, so that two policies never look alike.
func TestFields_EscapeThePercentSignOfAPolicy(t *testing.T) {
	t.Parallel()
	l := newLimited(t, charge(client.Charge{Policy: "50%C3", Key: "k"}), httplimit.Closed(time.Second))
	l.define(client.Policy{Name: "50%C3", Capacity: 5, Refill: 1, Every: time.Second})
	require.Equal(t, `"50%25C3";q=5`, l.get().Header.Get("RateLimit-Policy"))
}

// A window of more seconds than a number holds is left out.
func TestFields_AWindowBeyondANumberIsLeftOut(t *testing.T) {
	t.Parallel()
	const most = 9_000_000_000_000
	told := client.Policy{Name: "p", Capacity: most, Refill: 1, Every: 32 * 365 * 24 * time.Hour} // the seconds would wrap to a number above 0
	l := newLimited(t, charge(client.Charge{Policy: "p", Key: "k"}), httplimit.Closed(time.Second), httplimit.Policies(told))
	l.define(client.Policy{Name: "p", Capacity: most, Refill: 1, Every: time.Millisecond})
	require.Equal(t, `"p";q=9000000000000`, l.get().Header.Get("RateLimit-Policy"))
}
