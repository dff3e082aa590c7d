package client_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

const longest = math.MaxInt64 / 1000 * time.Microsecond

func TestDecision_Decodes(t *testing.T) {
	t.Parallel()
	const us, null = time.Microsecond, -1
	sent := func(allowed bool, remaining, retryAfter, resetAfter int64, replayed, shadowed bool) row {
		columns := row{allowed, remaining, retryAfter, resetAfter, int64(10), replayed, shadowed}
		for i := range columns[2:4] {
			if columns[2+i] == int64(null) {
				columns[2+i] = nil
			}
		}
		return columns
	}
	const most = math.MaxInt64 / 1000
	for name, test := range map[string]struct {
		answer row
		want   client.Decision // of capacity 10
	}{
		"grant":                         {sent(true, 7, 0, 1_500_000, false, false), client.Decision{Allowed: true, Remaining: 7, ResetAfter: 1_500_000 * us}},
		"denial":                        {sent(false, 0, 1, 2, false, false), client.Decision{RetryAfter: us, ResetAfter: 2 * us}},
		"replay":                        {sent(true, 7, 0, 3, true, false), client.Decision{Allowed: true, Remaining: 7, ResetAfter: 3 * us, Replayed: true}},
		"never":                         {sent(false, 10, null, 0, false, false), client.Decision{Remaining: 10, RetryAfter: math.MaxInt64}},
		"a denial without refill":       {sent(false, 3, null, null, false, false), client.Decision{Remaining: 3, RetryAfter: math.MaxInt64, ResetAfter: math.MaxInt64}},
		"a grant without refill":        {sent(true, 3, 0, null, false, false), client.Decision{Allowed: true, Remaining: 3, ResetAfter: math.MaxInt64}},
		"a denial that is only watched": {sent(true, 0, 0, 5, false, true), client.Decision{Allowed: true, ResetAfter: 5 * us, Shadowed: true}},
		"debt":                          {sent(false, -3, 4, 5, false, false), client.Decision{Remaining: -3, RetryAfter: 4 * us, ResetAfter: 5 * us}},
		"the longest durations":         {sent(false, 0, most, most-1, false, false), client.Decision{RetryAfter: longest, ResetAfter: longest - us}},
		"durations beyond that are not never": {
			sent(false, 0, most+1, math.MaxInt64, false, false), client.Decision{RetryAfter: longest, ResetAfter: longest},
		},
	} {
		test.want.Capacity = 10
		got := noError(client.New(&fakeDB{answers: []any{test.answer}}).Acquire(t.Context(), "p", "k"))(t)
		require.Equal(t, test.want, got, name)
		require.Equal(t, test.answer[2] == nil, got.Never(), name)
		require.Equal(t, test.answer[3] == nil, got.NeverFull(), name)
	}
}

func TestDecision_RetryAfterSeconds(t *testing.T) {
	t.Parallel()
	for retryAfter, want := range map[time.Duration]int64{
		0:                              0,
		time.Microsecond:               1,
		time.Second - time.Microsecond: 1,
		time.Second:                    1,
		time.Second + time.Microsecond: 2,
		90 * time.Second:               90,
		longest:                        9_223_372_037,
		math.MaxInt64:                  9_223_372_037, // never
	} {
		require.Equal(t, want, client.Decision{RetryAfter: retryAfter}.RetryAfterSeconds(), retryAfter)
	}
}
