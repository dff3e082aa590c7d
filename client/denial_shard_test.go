package client

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A denial that is renewed takes the place of the one before, and a new one that of a denial that ends soon.
func TestDenialCache_IsBoundedAndKeepsDenialsThatLast(t *testing.T) {
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

	for key := range 2 * most {
		store(most+key, time.Duration(2+key)*time.Hour)
		require.Len(t, s.byKey, most)
		require.Contains(t, s.byKey, bucket{"p", fmt.Sprint(most + key)})
	}
	kept := 0
	for key := range most / 2 {
		if _, ok := s.byKey[bucket{"p", fmt.Sprint(3*most - 1 - key)}]; ok {
			kept++
		}
	}
	require.Greater(t, kept, most/2*9/10, "of the denials that last longest")
}
