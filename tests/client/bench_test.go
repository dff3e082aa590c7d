package client_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// What a request costs the client: go test ./tests/client -bench Combiner -benchmem -run '^$'. How many decisions a
// server makes is for make bench.
func BenchmarkCombiner(b *testing.B) {
	db := pgtest.New(b)
	db.Exec(b, "select ratelimit_define_policy('api', 1000000000, 1, '1 second')")
	limiter := client.NewCombiner(db.Pool)
	defer limiter.Close()
	for _, callers := range []int{1, 64} {
		b.Run(fmt.Sprintf("acquire/callers=%d", callers), func(b *testing.B) {
			share(b, callers, func(ctx context.Context, caller int) error { return errOf(limiter.Acquire(ctx, "api", keys[caller])) })
		})
		b.Run(fmt.Sprintf("acquire all of 3 of its own/callers=%d", callers), func(b *testing.B) {
			share(b, callers, func(ctx context.Context, caller int) error {
				_, err := limiter.AcquireAll(ctx, []client.Charge{
					{Policy: "api", Key: keys[caller]}, {Policy: "api", Key: keys[caller] + "a"}, {Policy: "api", Key: keys[caller] + "b"},
				})
				return err
			})
		})
		b.Run(fmt.Sprintf("acquire all of 3/callers=%d", callers), func(b *testing.B) {
			share(b, callers, func(ctx context.Context, caller int) error {
				_, err := limiter.AcquireAll(ctx, []client.Charge{
					{Policy: "api", Key: keys[caller]}, {Policy: "api", Key: "org"}, {Policy: "api", Key: "everybody"},
				})
				return err
			})
		})
	}
}

var keys = func() (keys [64]string) {
	for i := range keys {
		keys[i] = fmt.Sprint("user:", i)
	}
	return keys
}()

// share lets callers make b.N calls between them.
func share(b *testing.B, callers int, call func(ctx context.Context, caller int) error) {
	b.ReportAllocs()
	var wg sync.WaitGroup
	for caller := range callers {
		wg.Go(func() {
			for n := caller; n < b.N; n += callers {
				if err := call(b.Context(), caller); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	require.False(b, b.Failed())
}
