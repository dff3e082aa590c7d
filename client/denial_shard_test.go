package client

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A denial that is renewed takes the place of the one before, also where there is no room for another bucket.
func TestDenialCache_ARenewedDenialDisplacesNoOther(t *testing.T) {
	t.Parallel()
	const most = maxDenials / denialShards
	now := time.Unix(0, 0)
	s := &denialShard{byKey: make(map[bucket]denial)}
	store := func(key int, lasts time.Duration) {
		s.store(bucket{"p", fmt.Sprint(key)}, denial{Decision{RetryAfter: lasts, Capacity: 10}, 1, now, now}, 0)
	}
	for key := range most {
		store(key, time.Minute+time.Duration(key)*time.Second)
	}
	store(most-1, time.Hour)
	require.Len(t, s.byKey, most)
	d, known, _ := s.find(bucket{"p", fmt.Sprint(most - 1)}, 1, now)
	require.True(t, known)
	require.Equal(t, time.Hour, d.RetryAfter)
	store(most, time.Hour)
	require.Len(t, s.byKey, most)
	require.NotContains(t, s.byKey, bucket{"p", "0"}, "it ended first")
}
