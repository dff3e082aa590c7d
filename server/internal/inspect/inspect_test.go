package inspect

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// PostgreSQL has intervals up to 1000 years, Go durations up to 292. A longer time becomes the longest duration.
func TestSeconds_AreNoLongerThanADuration(t *testing.T) {
	t.Parallel()
	require.Nil(t, seconds(nil))
	for micros, want := range map[int64]time.Duration{
		0: 0, 1: time.Microsecond, 365_250 * 86_400_000_000: 1<<63 - 1, math.MaxInt64: 1<<63 - 1,
	} {
		require.Equal(t, want.Truncate(time.Microsecond), time.Duration(*seconds(&micros)))
	}
}
