package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A call has stalled when it has lasted twice as long as usual, and not before: until then it is expected to end at any moment.
func TestPace_ACallHasStalledAfterTwiceTheUsualTime(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	p := newPace(2)
	for range paceCalls {
		require.Zero(t, p.left(time.Hour, now), "too little is known")
		p.observe(100*time.Millisecond, false, now)
	}
	for lasted, left := range map[time.Duration]time.Duration{
		0: 100, 60: 40, 99: 1, 100: 0, 101: 0, 199: 0, 200: 200, 201: 201, 5000: 5000,
	} {
		require.Equal(t, left*time.Millisecond, p.left(lasted*time.Millisecond, now), "after %d ms", lasted)
	}
	require.Zero(t, p.left(time.Hour, now.Add(paceLife+1)), "what is known is too old")
}
