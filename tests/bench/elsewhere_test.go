package main

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A process of this test binary obeys; what it counts is what it was granted.
func TestElsewhere_TellsWhatCallersOfAllProcessesGot(t *testing.T) {
	t.Parallel()
	executable, err := os.Executable()
	require.NoError(t, err)
	e, err := start(t.Context(), 3, []string{obedience + "=1"}, executable, "-test.run=^TestElsewhere_Obeys$")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.close()) })
	for _, callers := range []int{1, 8} {
		var s sample
		for s[rate] == 0 { // on a slow machine a window may have no answer
			s, err = e.run(t.Context(), callers, "hot", 100*time.Millisecond)
			require.NoError(t, err)
		}
		require.LessOrEqual(t, s[rate], 1000*float64(callers), "each call takes a millisecond")
	}
	_, err = e.run(t.Context(), 3, "uniform", time.Millisecond)
	require.ErrorContains(t, err, errDenied.Error(), "a process tells what went wrong")
}

const obedience = "RATELIMIT_BENCH_TEST_OBEYS"

func TestElsewhere_Obeys(*testing.T) {
	if os.Getenv(obedience) == "" {
		return
	}
	_ = obey(context.Background(), func(_ context.Context, key string) error {
		if key != hotKey {
			return errDenied
		}
		time.Sleep(time.Millisecond)
		return nil
	})
	os.Exit(0)
}
