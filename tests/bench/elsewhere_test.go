package main

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMerge_WeighsEachProcess(t *testing.T) {
	t.Parallel()
	steps := func(latency float64) (list []float64) {
		for range 10 {
			list = append(list, latency)
		}
		return list
	}
	s := merge([]tale{
		{Count: 9700, Latencies: steps(100), CPU: 970},
		{Count: 200, Latencies: steps(300), CPU: 20},
		{Count: 100, Latencies: steps(200), CPU: 10},
	}, 2*time.Second, 3*time.Millisecond)
	require.Equal(t, sample{rate: 5000, p99: 300, cpuServer: 0.3, cpuClient: 0.1}, s)

	s = merge([]tale{{}, {Count: 1, Latencies: []float64{7}}}, time.Second, 0)
	require.Equal(t, sample{rate: 1, p99: 7, cpuServer: 0, cpuClient: 0}, s)
}

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
			s, err = e.run(t.Context(), callers, "hot", 100*time.Millisecond, os.Getpid())
			require.NoError(t, err)
		}
		require.GreaterOrEqual(t, s[p99], 1000.0)
		require.LessOrEqual(t, s[rate], 1000*float64(callers), "each call takes a millisecond")
	}
	_, err = e.run(t.Context(), 3, "uniform", time.Millisecond, os.Getpid())
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
