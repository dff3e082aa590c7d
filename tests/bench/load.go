package main

import (
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// An acquirer takes one token of a key's bucket. No bucket runs dry here, so a denial is an error.
type acquirer func(ctx context.Context, key string) error

// A manyAcquirer takes one token of each key's bucket.
type manyAcquirer func(ctx context.Context, keys []string) error

// A load is callers that each ask again as soon as they are answered. With many, some of them ask in one call.
type load struct {
	callers int
	keys    *keyspace
	acquire acquirer
	many    manyAcquirer // nil for none
	servers []int        // the processes whose CPU time is counted with their children's
}

// perCall is how many callers share a call of a manyAcquirer.
const perCall = 32

// warmUp is how much of a window goes before it: connections are made and statements prepared.
const warmUp = 0.3

// run measures for a while. A call counts when it ends within that time.
func (l load) run(ctx context.Context, window time.Duration) (sample, error) {
	return l.during(ctx, time.Duration(warmUp*float64(window)), func(ctx context.Context) error {
		return pause(ctx, window)
	})
}

// during measures for as long as what goes on beside the load takes.
func (l load) during(ctx context.Context, warmUp time.Duration, beside func(context.Context) error) (sample, error) {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	inCall := 1
	if l.many != nil {
		inCall = perCall
	}
	var (
		callers         sync.WaitGroup
		counting, ended atomic.Bool
		latencies       = make([][]time.Duration, l.callers/inCall)
	)
	for i := range latencies {
		callers.Go(func() {
			next := l.keys.from(i)
			ask := func() error { return l.acquire(ctx, next()) }
			if keys := make([]string, inCall); l.many != nil {
				ask = func() error {
					for i := range keys {
						keys[i] = next()
					}
					return l.many(ctx, keys)
				}
			}
			for begin := time.Now(); !ended.Load(); {
				if err := ask(); err != nil {
					fail(err)
					return
				}
				end := time.Now()
				if counting.Load() {
					latencies[i] = append(latencies[i], end.Sub(begin))
				}
				begin = end
			}
		})
	}
	_ = pause(ctx, warmUp) // an error of the callers is looked at below

	begin, own, server := time.Now(), cpuOwn(), cpuOf(l.servers...)
	counting.Store(true)
	err := beside(ctx)
	counting.Store(false)
	elapsed := time.Since(begin)
	own, server = cpuOwn()-own, cpuOf(l.servers...)-server
	ended.Store(true)
	callers.Wait()
	if cause := context.Cause(ctx); cause != nil {
		return nil, cause
	}
	if err != nil {
		return nil, err
	}

	all := slices.Concat(latencies...)
	slices.Sort(all)
	decisions := float64(max(1, inCall*len(all)))
	return sample{
		rate:      float64(inCall*len(all)) / elapsed.Seconds(),
		p99:       quantile(all, 0.99),
		cpuServer: float64(server.Microseconds()) / decisions,
		cpuClient: float64(own.Microseconds()) / decisions,
	}, nil
}

// quantile returns microseconds.
func quantile(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return float64(sorted[int(q*float64(len(sorted)-1))].Nanoseconds()) / 1000
}

// pause waits unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// A keyspace is the keys that callers ask for, in a random order drawn beforehand: drawing costs no
// opponent anything, and all get the same.
type keyspace struct {
	keys  []string
	order []uint32
}

const manyKeys = 100_000

// keyspaces are the shapes of traffic by name.
func keyspaces() map[string]*keyspace {
	keys := make([]string, manyKeys)
	for i := range keys {
		keys[i] = keyName(userPrefix, i+1)
	}
	source := rand.New(rand.NewPCG(1, 2))
	return map[string]*keyspace{
		"uniform": {keys, order(func() uint32 { return source.Uint32N(manyKeys) })},
		"hot":     {[]string{hotKey}, []uint32{0}},
	}
}

const (
	hotKey             = "hot"
	userPrefix         = "user:"
	organisationPrefix = "organisation:"
)

// keyName is prefix || n in SQL.
func keyName(prefix string, n int) string { return prefix + strconv.Itoa(n) }

func order(next func() uint32) []uint32 {
	indexes := make([]uint32, 1<<20)
	for i := range indexes {
		indexes[i] = next()
	}
	return indexes
}

// from returns the keys that one of many callers asks for, one after another.
func (k *keyspace) from(caller int) func() string {
	i := caller * 7919 % len(k.order)
	return func() string {
		key := k.keys[k.order[i]]
		if i++; i == len(k.order) {
			i = 0
		}
		return key
	}
}

// askForAll lets every key be asked for once.
func (k *keyspace) askForAll(ctx context.Context, acquire acquirer) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(64)
	for _, key := range k.keys {
		group.Go(func() error { return acquire(ctx, key) })
	}
	return group.Wait()
}
