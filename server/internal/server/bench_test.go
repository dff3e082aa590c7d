package server_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/server"
)

// What a request costs with everything on this machine: callers, server and database share its cores.
//
//	go test ./server/internal/server -run '^$' -bench . -benchtime 5s
func BenchmarkServer(b *testing.B) {
	defer debug.SetGCPercent(debug.SetGCPercent(server.GCPercent))
	db := newDB(b)
	db.Exec(b, "select ratelimit_define_policy('plenty', 1000000000, 1, '1 second')")
	db.Exec(b, fmt.Sprintf("select count(ratelimit_acquire('plenty', 'user:' || n)) from generate_series(0, %d) as n", keys-1)) // all have rows
	s := start(b, db.URL, "NO_FLUSH=true")
	combiner := client.NewCombiner(db.Pool, client.NoFlush())
	defer combiner.Close()
	ways := map[string]func(ctx context.Context, key string) (bool, error){
		"in process": func(ctx context.Context, key string) (bool, error) {
			d, err := combiner.Acquire(ctx, "plenty", key)
			return d.Allowed, err
		},
		"gRPC": func(ctx context.Context, key string) (bool, error) {
			d, err := s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "plenty", LogicalKey: key})
			return d.GetVerdict() == pb.Verdict_ALLOWED, err
		},
		"JSON": func(ctx context.Context, key string) (bool, error) {
			a, err := s.post(ctx, "/v1/acquire", `{"policy":"plenty","key":"`+key+`"}`)
			return a.body["allowed"] == true, err
		},
	}
	for _, way := range []string{"in process", "gRPC", "JSON"} {
		for _, callers := range []int{64, 256} {
			b.Run(fmt.Sprintf("%s/callers=%d", way, callers), func(b *testing.B) { ask(b, callers, ways[way]) })
		}
	}
}

const keys = 100_000

// ask lets callers make b.N requests between them.
func ask(b *testing.B, callers int, acquire func(ctx context.Context, key string) (bool, error)) {
	var made atomic.Int64
	var wg sync.WaitGroup
	latencies := make([][]time.Duration, callers)
	cpu := cpuTime(b)
	b.ResetTimer()
	for i := range callers {
		random := rand.New(rand.NewPCG(5, uint64(i)))
		wg.Go(func() {
			for made.Add(1) <= int64(b.N) {
				begin := time.Now()
				allowed, err := acquire(b.Context(), fmt.Sprint("user:", random.IntN(keys)))
				if err != nil || !allowed {
					b.Errorf("allowed %t, error %v", allowed, err)
					return
				}
				latencies[i] = append(latencies[i], time.Since(begin))
			}
		})
	}
	wg.Wait()
	require.False(b, b.Failed())
	all := slices.Concat(latencies...)
	slices.Sort(all)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
	b.ReportMetric(float64(all[len(all)*99/100].Microseconds())/1000, "ms-p99")
	b.ReportMetric(float64((cpuTime(b)-cpu).Microseconds())/float64(b.N), "µs-cpu") // of callers and server; the database is not this process
	b.ReportMetric(0, "ns/op")
}

func cpuTime(b *testing.B) time.Duration {
	var used syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
