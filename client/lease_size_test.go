package client

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Whatever the demand and the bucket, a lease keeps within its bounds, and leaves others as much as it has.
func TestLeaseSize_KeepsItsBounds(t *testing.T) {
	t.Parallel()
	random(t, 1000, func(t *testing.T, r *rand.Rand) {
		between := func(least, most int64) int64 { // often at an end, often small
			return min(most, least+pick(r, 0, most-least, r.Int64N(most-least+1), int64(math.Pow(float64(most-least), r.Float64()))))
		}
		l := Lease{MaxTokens: between(1, 1e6), MaxShare: (1 - 0.999*r.Float64())}
		capacity := between(0, 9e12)
		seen := sight{Decision: Decision{
			Capacity:   capacity,
			Remaining:  between(-100, capacity),
			ResetAfter: duration(between(0, time.Hour.Microseconds())),
			Shadowed:   r.IntN(10) == 0,
		}}
		if r.IntN(10) == 0 {
			seen.ResetAfter = never
		}
		now := time.Duration(between(0, int64(2*time.Hour)))
		level := seen.level(now)
		require.GreaterOrEqual(t, level, seen.Remaining)
		require.LessOrEqual(t, level, capacity)

		d := seen.with(between(0, 2e6))
		require.True(t, d.Allowed && d.Estimated)
		require.GreaterOrEqual(t, d.Remaining, max(0, seen.Remaining))
		require.LessOrEqual(t, d.Remaining, capacity)
		require.GreaterOrEqual(t, d.ResetAfter, time.Duration(0))
		require.LessOrEqual(t, d.ResetAfter, seen.ResetAfter)
		if d.Remaining == capacity && seen.Remaining < capacity && !seen.NeverFull() {
			require.Zero(t, d.ResetAfter, "it is full")
		}

		asked := demand(math.Pow(10, 9*r.Float64()) - 1)
		size := l.size(asked, seen)
		require.LessOrEqual(t, size.full, l.MaxTokens)
		require.LessOrEqual(t, float64(size.full), l.MaxShare*float64(capacity))
		require.LessOrEqual(t, float64(size.full), float64(asked)*0.8)
		require.LessOrEqual(t, size.low, size.full)
		if seen.Shadowed || seen.NeverFull() {
			require.Zero(t, size.full)
		}

		left := between(0, 2e6)
		n := size.refill(left, level)
		require.GreaterOrEqual(t, n, int64(0))
		if n > 0 {
			require.LessOrEqual(t, left+n, size.full)
			require.LessOrEqual(t, left+n, level-n)
		}
		if excess := size.excess(left); excess > 0 {
			require.Equal(t, size.full, left-excess)
			require.Zero(t, n)
		}
	})
}

// It rises at once, falls by and by, and takes a moment for no rate.
func TestDemand_FollowsTheRate(t *testing.T) {
	t.Parallel()
	var d demand
	d.observe(100, 50*time.Millisecond)
	require.InDelta(t, 2000, float64(d), 1)
	for range 6 {
		d.observe(0, 50*time.Millisecond)
	}
	require.InDelta(t, 2000/2.718, float64(d), 1)
	for range 60 {
		d.observe(5, 50*time.Millisecond)
	}
	require.InDelta(t, 100, float64(d), 1)
	d.observe(10, time.Microsecond)
	require.InDelta(t, 2000, float64(d), 1)
}

// What a bucket holds grows from what was seen until it is full, if it gains anything.
func TestSight_TheLevelGrowsUntilTheBucketIsFull(t *testing.T) {
	t.Parallel()
	const seen = time.Minute
	s := sight{Decision{Remaining: 20, Capacity: 100, ResetAfter: 8 * time.Second}, seen}
	for after, level := range map[time.Duration]int64{0: 20, 1: 30, 4: 60, 8: 100, 9: 100} {
		require.Equal(t, level, s.level(seen+after*time.Second))
	}
	s.ResetAfter = never
	require.EqualValues(t, 20, s.level(2*seen))
}
