package client_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

const longest = math.MaxInt64 / 1000 * time.Microsecond

func TestDecision_IntervalsOfTenThousandYears(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('slow', 10, 1, '365250 days')")
	limiter := client.New(db.Pool)

	d := noError(limiter.Acquire(t.Context(), "slow", "k", client.Cost(10)))(t)
	require.Equal(t, client.Decision{Allowed: true, ResetAfter: longest, Capacity: 10}, d)

	d = noError(limiter.Acquire(t.Context(), "slow", "k"))(t)
	require.Equal(t, client.Decision{RetryAfter: longest, ResetAfter: longest, Capacity: 10}, d)
	require.False(t, d.Never())

	require.True(t, noError(limiter.Acquire(t.Context(), "slow", "k", client.Cost(11)))(t).Never())
}
