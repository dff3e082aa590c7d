package client_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

type acquirer interface {
	Acquire(ctx context.Context, policy, key string, opts ...client.Option) (client.Decision, error)
}

// Grants, by callers who each send their next request when they have the answer to the last.
func BenchmarkAcquire(b *testing.B) {
	db := pgtest.New(b)
	db.Exec(b, "select ratelimit_define_policy('api', 9000000000000, 1000000, '1 second')")
	db.Exec(b, "select count(*) from (select ratelimit_acquire('api', 'user:' || i) from generate_series(0, 99999) as i) as made")
	db.Exec(b, "vacuum analyze")
	keys := make([]string, 100_000)
	for i := range keys {
		keys[i] = fmt.Sprint("user:", i)
	}

	for _, flush := range []bool{false, true} {
		var opts []client.LimiterOption
		if !flush {
			opts = append(opts, client.NoFlush())
		}
		config, err := pgxpool.ParseConfig(db.URL)
		require.NoError(b, err)
		config.MaxConns = 16
		pool, err := pgxpool.NewWithConfig(b.Context(), config)
		require.NoError(b, err)
		b.Cleanup(pool.Close)
		poolCalls = func() int64 { return pool.Stat().AcquireCount() }

		combined := []client.CombinerOption{}
		for _, opt := range opts {
			combined = append(combined, opt)
		}
		for name, keys := range map[string][]string{"many": keys, "hot": keys[:1]} {
			for _, callers := range []int{1, 16, 64, 256} {
				b.Run(fmt.Sprintf("flush=%v/keys=%s/callers=%d/plain", flush, name, callers), func(b *testing.B) {
					measure(b, client.New(pool, opts...), callers, keys)
				})
				for _, calls := range []int{1, 2, 3, 4, 8} {
					b.Run(fmt.Sprintf("flush=%v/keys=%s/callers=%d/combined%d", flush, name, callers, calls), func(b *testing.B) {
						limiter := client.NewCombiner(pool, append(combined, client.CallsInFlight(calls))...)
						defer limiter.Close()
						measure(b, limiter, callers, keys)
					})
				}
			}
		}
	}
}

func measure(b *testing.B, limiter acquirer, callers int, keys []string) {
	var (
		sent  atomic.Int64
		wg    sync.WaitGroup
		times = make([][]time.Duration, callers)
	)
	b.ReportAllocs()
	b.ResetTimer()
	cpu := cpuTime(b)
	srv, calls := serverCPU(), poolCalls()
	for i := range times {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(b.Context()) // as a request has
			defer cancel()
			for sent.Add(1) <= int64(b.N) {
				start := time.Now()
				d, err := limiter.Acquire(ctx, "api", keys[rand.IntN(len(keys))])
				if err != nil || !d.Allowed {
					b.Errorf("%+v, %v", d, err)
					return
				}
				times[i] = append(times[i], time.Since(start))
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	cpu = cpuTime(b) - cpu
	srv, calls = serverCPU()-srv, poolCalls()-calls
	b.ReportMetric(float64(srv.Nanoseconds())/1000/float64(b.N), "srv-µs/op")
	b.ReportMetric(float64(b.N)/float64(calls), "per-call")
	all := slices.Concat(times...)
	slices.Sort(all)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "decisions/s")
	b.ReportMetric(float64(cpu.Nanoseconds())/1000/float64(b.N), "cpu-µs/op") // of this process, and not of the server
	b.ReportMetric(float64(all[len(all)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(all[len(all)*99/100].Microseconds()), "p99-µs")
}

func cpuTime(b *testing.B) time.Duration {
	var usage syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
