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
	for name, test := range map[string]struct {
		answer row
		want   client.Decision
		never  bool
		short  bool // for ever
	}{
		"grant": {
			answer: row{true, int64(7), int64(0), int64(1_500_000), int64(10), false, false},
			want:   client.Decision{Allowed: true, Remaining: 7, ResetAfter: 1500 * time.Millisecond, Capacity: 10},
		},
		"denial": {
			answer: row{false, int64(0), int64(1), int64(2), int64(10), false, false},
			want:   client.Decision{RetryAfter: time.Microsecond, ResetAfter: 2 * time.Microsecond, Capacity: 10},
		},
		"replay": {
			answer: row{true, int64(7), int64(0), int64(3), int64(10), true, false},
			want:   client.Decision{Allowed: true, Remaining: 7, ResetAfter: 3 * time.Microsecond, Capacity: 10, Replayed: true},
		},
		"never": {
			answer: row{false, int64(10), nil, int64(0), int64(10), false, false},
			want:   client.Decision{Remaining: 10, RetryAfter: math.MaxInt64, Capacity: 10},
			never:  true,
		},
		"a denial without refill": {
			answer: row{false, int64(3), nil, nil, int64(10), false, false},
			want:   client.Decision{Remaining: 3, RetryAfter: math.MaxInt64, ResetAfter: math.MaxInt64, Capacity: 10},
			never:  true, short: true,
		},
		"a grant without refill": {
			answer: row{true, int64(3), int64(0), nil, int64(10), false, false},
			want:   client.Decision{Allowed: true, Remaining: 3, ResetAfter: math.MaxInt64, Capacity: 10},
			short:  true,
		},
		"a denial that is only watched": {
			answer: row{true, int64(0), int64(0), int64(5), int64(10), false, true},
			want:   client.Decision{Allowed: true, ResetAfter: 5 * time.Microsecond, Capacity: 10, Shadowed: true},
		},
		"debt": {
			answer: row{false, int64(-3), int64(4), int64(5), int64(10), false, false},
			want:   client.Decision{Remaining: -3, RetryAfter: 4 * time.Microsecond, ResetAfter: 5 * time.Microsecond, Capacity: 10},
		},
		"the longest durations": {
			answer: row{false, int64(0), int64(math.MaxInt64 / 1000), int64(math.MaxInt64/1000 - 1), int64(10), false, false},
			want:   client.Decision{RetryAfter: longest, ResetAfter: longest - time.Microsecond, Capacity: 10},
		},
		"durations beyond that are not never": {
			answer: row{false, int64(0), int64(math.MaxInt64/1000 + 1), int64(math.MaxInt64), int64(10), false, false},
			want:   client.Decision{RetryAfter: longest, ResetAfter: longest, Capacity: 10},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limiter := client.New(&fakeDB{answers: []any{test.answer}})
			got := noError(limiter.Acquire(t.Context(), "p", "k"))(t)
			require.Equal(t, test.want, got)
			require.Equal(t, test.never, got.Never())
			require.Equal(t, test.short, got.NeverFull())
		})
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
