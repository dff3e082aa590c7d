package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Whatever the demand and the bucket, a lease keeps within its bounds, and leaves others as much as it has.
func TestLeaseSize_KeepsItsBounds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := Lease{
			MaxTokens: rapid.Int64Range(1, 1e6).Draw(t, "most"),
			MaxShare:  rapid.Float64Range(0.001, 1).Draw(t, "share"),
		}
		capacity := rapid.Int64Range(0, 9e12).Draw(t, "capacity")
		seen := sight{Decision: Decision{
			Capacity:   capacity,
			Remaining:  rapid.Int64Range(-100, capacity).Draw(t, "remaining"),
			ResetAfter: duration(rapid.Int64Range(0, time.Hour.Microseconds()).Draw(t, "reset")),
			Shadowed:   rapid.IntRange(0, 9).Draw(t, "shadowed") == 0,
		}}
		if rapid.IntRange(0, 9).Draw(t, "budget") == 0 {
			seen.ResetAfter = never
		}
		now := time.Duration(rapid.Int64Range(0, int64(2*time.Hour)).Draw(t, "now"))
		level := seen.level(now)
		require.GreaterOrEqual(t, level, seen.Remaining)
		require.LessOrEqual(t, level, capacity)

		d := seen.with(rapid.Int64Range(0, 2e6).Draw(t, "with"))
		require.True(t, d.Allowed && d.Estimated)
		require.GreaterOrEqual(t, d.Remaining, max(0, seen.Remaining))
		require.LessOrEqual(t, d.Remaining, capacity)
		require.GreaterOrEqual(t, d.ResetAfter, time.Duration(0))
		require.LessOrEqual(t, d.ResetAfter, seen.ResetAfter)
		if d.Remaining == capacity && seen.Remaining < capacity && !seen.NeverFull() {
			require.Zero(t, d.ResetAfter, "it is full")
		}

		asked := demand(rapid.Float64Range(0, 1e9).Draw(t, "demand"))
		size := l.size(asked, seen)
		require.LessOrEqual(t, size.full, l.MaxTokens)
		require.LessOrEqual(t, float64(size.full), l.MaxShare*float64(capacity))
		require.LessOrEqual(t, float64(size.full), float64(asked)*0.8)
		require.LessOrEqual(t, size.low, size.full)
		if seen.Shadowed || seen.NeverFull() {
			require.Zero(t, size.full)
		}

		left := rapid.Int64Range(0, 2e6).Draw(t, "left")
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
