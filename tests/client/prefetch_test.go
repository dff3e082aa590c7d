package client_test

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Close while callers ask gives back all that they did not get, and leaves nothing running.
func TestPrefetcher_ClosesUnderLoadAndLeavesNoGoroutines(t *testing.T) {
	pgtest.OncePerServer(t)
	db := pgtest.New(t)
	const capacity = 1_000_000
	db.Exec(t, "select ratelimit_define_policy('api', 1000000, 1, '1 day')")
	require.NoError(t, db.Pool.Ping(t.Context()))
	before := goleak.IgnoreCurrent()
	for n := range 3 {
		prefetcher := client.NewPrefetcher(kit.PatientPool{Pool: db.Pool}, client.Prefetch{Policy: "api"})
		key := fmt.Sprint(n)
		var granted, prefetched atomic.Int64
		isHot := make(chan struct{})
		var callers sync.WaitGroup
		for range 16 {
			callers.Go(func() {
				for {
					d, err := prefetcher.Acquire(t.Context(), "api", key)
					if err != nil {
						if !errors.Is(err, client.ErrClosed) {
							t.Error(err)
						}
						return
					}
					granted.Add(1)
					if d.Estimated && prefetched.Add(1) == 1000 {
						close(isHot)
					}
				}
			})
		}
		<-isHot
		prefetcher.Close()
		callers.Wait()
		prefetcher.Close() // again
		require.Equal(t, granted.Load(), capacity-kit.NoError(client.New(db.Pool).Peek(t.Context(), "api", key))(t).Remaining)
	}
	db.Pool.Close() // waits for its connections, which are no goroutines of a Prefetcher
	requireNoLeak(t, before)
}

// It replaces the program's logger, so it is not parallel.
func TestPrefetcher_SaysOnceThatItTakesNothingInAdvance(t *testing.T) {
	pgtest.OncePerServer(t)
	var log strings.Builder
	previous := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(previous)
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 9000, 1, '1 day'), ratelimit_define_policy('other', 9000, 1, '1 day')")
	acquireAll := func(prefetcher *client.Prefetcher, requests int, policy string) string {
		log.Reset()
		for range requests {
			kit.NoError(prefetcher.AcquireAll(t.Context(), []client.Charge{{Policy: "other", Key: "k"}, {Policy: policy, Key: "l"}}))(t)
		}
		return log.String()
	}
	newPrefetcher := func() *client.Prefetcher {
		prefetcher := client.NewPrefetcher(db.Pool, client.Prefetch{Policy: "api"})
		t.Cleanup(prefetcher.Close)
		return prefetcher
	}
	prefetcher := newPrefetcher()
	require.Empty(t, acquireAll(prefetcher, 1000, "other"), "of no prefetched policy")
	require.Empty(t, acquireAll(prefetcher, 999, "api"))
	require.Contains(t, acquireAll(prefetcher, 1, "api"), `level=WARN msg="a Prefetcher takes nothing in advance: `)
	require.Empty(t, acquireAll(prefetcher, 1, "api"))

	prefetcher = newPrefetcher()
	kit.NoError(prefetcher.Acquire(t.Context(), "api", "k"))(t)
	require.Empty(t, acquireAll(prefetcher, 1000, "api"), "a stock may answer some")
}
