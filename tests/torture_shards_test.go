package tests

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/model"
)

// TestTorture_Linearizability with a client.Sharded in place of the combiner, in every other history. A database of each
// server has histories at a time: with more, so many calls overlap that their orders are too many to try.
func TestTorture_ShardsLinearizability(t *testing.T) {
	run := torture(t, 8*time.Second)
	s := newShards(t)
	var chroniclers []*chronicler
	pools := map[int]*pgxpool.Pool{}
	for n, db := range s.dbs {
		c := newChronicler(db, "continuous durable", "stepped durable", "continuous ephemeral", "stepped ephemeral")
		c.oneIn, c.least = 2, 2
		c.key = func(name string) string { return s.key(n, name) }
		chroniclers, pools[n] = append(chroniclers, c), c.pool
	}
	limiter := s.limiter(pools)
	var mu sync.Mutex
	var n operationCounts
	check := func(seed uint64, histories []history, err error) bool {
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			t.Errorf("history %d: %v: %+v", seed, err, pgError(err))
		}
		n.buckets += len(histories)
		for _, h := range histories {
			n.count(h)
			switch violation, decided := h.check(); {
			case !decided:
				n.undecided++
			case violation != "":
				t.Errorf("history %d: %s", seed, violation)
			}
		}
		n.histories++
		run.progress("%d operations in %d histories", n.operations, n.histories)
		return !t.Failed()
	}
	for i := range databasesOfServer {
		var writers sync.WaitGroup
		end := time.Now().Add(run.budget / databasesOfServer)
		for c := i; c < len(chroniclers); c += databasesOfServer {
			chroniclers[c].combiner = limiter
			writers.Go(func() {
				chroniclers[c].write(func() bool { return time.Now().Before(end) }, check)
			})
		}
		writers.Wait()
	}
	require.NotContains(t, []int{n.grants, n.denials, n.replays, n.wholes, n.denied}, 0, "%+v", n)
	require.Less(t, 2*n.undecided, n.buckets, "%+v", n)
	run.figure("histories", n.histories, "")
	run.figure("operations", n.operations, "")
	run.figure("grants", n.grants, "")
	run.figure("denials", n.denials, "")
	run.figure("replays", n.replays, "")
}

// One of the two servers is killed, over and over, under a load that goes through a client.Sharded. On no shard is a grant
// lost, or a token granted twice, and callers of the other server notice nothing.
func TestTorture_ShardsCrash(t *testing.T) {
	run := torture(t, 6*time.Second)
	s := newShards(t, "synchronous_commit=on")
	s.each((*testDB).defineExact)
	all := make([]settlement, len(s.servers))
	crashes := 0
	for ; crashes < 2 || run.goesOn(); crashes++ {
		victim := crashes % len(s.servers)
		limiter := s.limiter(nil)
		l := startCrashLoadOn(t, crashTarget{limiter, limiter, func(caller int, key string) string {
			return s.key(caller%s.of(), key)
		}}, fmt.Sprint("crash ", crashes), []string{"durable", "ephemeral"}, 0)
		l.runFor(t, 1500*time.Millisecond)
		kill(t, s.servers[victim])
		l.end()
		limiter.Close()
		require.NoError(t, s.servers[victim].Start(t.Context()))
		s.reopen()
		for n, db := range s.dbs {
			part := l.of(n, s.of())
			if s.serverOf(n) != s.servers[victim] {
				require.Empty(t, part.unanswered, "shard %d was well", n)
				part.grants = slices.DeleteFunc(part.grants, func(e entry) bool { return e.Policy == "ephemeral" }) // which nobody has forgotten
			}
			all[victim].add(part.settle(db, map[model.BucketID]int64{}))
		}
		require.Zero(t, all[victim].lost)
		run.progress("%d crashes", crashes+1)
	}
	sum := all[0]
	sum.add(all[1])
	require.NotZero(t, sum.unanswered)
	require.NotZero(t, sum.forgotten)
	run.figure("crashes", crashes, "")
	run.figure("grants told", sum.grants, "")
	run.figure("of these lost", sum.lost, "")
	run.figure("requests without an answer", sum.unanswered, "")
	run.figure("asked again by idempotency key, each charged once", sum.again, "")
}

// A shardFault is done to some of the shards, and undone.
type shardFault struct {
	name   string
	shards []int
	begin  func()
	end    func()
}

// A shard is killed, frozen, and cut off without a sign. Calls about its keys fail in their time, with an error that names
// it. Calls about other keys go on as before.
func TestTorture_ShardsFault(t *testing.T) {
	run := torture(t, 6*time.Second)
	s := newShards(t)
	const alone = 1 // of the first server, behind a proxy
	proxy := newProxy(t, s.dbs[alone])
	pools := map[int]*pgxpool.Pool{alone: proxy.pool(t, s.dbs[alone])}
	for n, db := range s.dbs {
		if n != alone {
			config, err := pgxpool.ParseConfig(db.URL)
			require.NoError(t, err)
			config.ConnConfig.ConnectTimeout = time.Second
			pools[n], err = pgxpool.NewWithConfig(context.Background(), config)
			require.NoError(t, err)
			t.Cleanup(pools[n].Close)
		}
	}
	limiter := s.limiter(pools)
	require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: "p", Capacity: 1e9, Refill: 1000, Every: second}))

	const timeout = time.Second
	phase := max(time.Second, run.budget/9)
	second := s.servers[1]
	var theirs []int
	for n := range s.of() {
		if s.serverOf(n) == second {
			theirs = append(theirs, n)
		}
	}
	do := func(err error) {
		t.Helper()
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip(err)
		}
		require.NoError(t, err)
	}
	for _, fault := range []shardFault{
		{"cut off", []int{alone}, func() { proxy.plan(func(bool) fault { return vanish }) }, proxy.heal},
		{"frozen", theirs, func() { do(second.Freeze(t.Context())) }, func() { do(second.Thaw(t.Context())) }},
		{"killed", theirs, func() { do(second.Kill(t.Context())) }, func() { do(second.Start(t.Context())) }},
	} {
		watch := newShardWatch(s, limiter, timeout)
		load := newLoad(t)
		load.start(4*s.of(), func(caller int) error { return watch.call(caller % s.of()) })
		load.runFor(phase)
		watch.enter(calm)
		load.runFor(phase)
		fault.begin()
		watch.enter(during)
		load.runFor(phase + 2*timeout)
		watch.enter(after)
		fault.end()
		require.Eventually(t, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			return !slices.ContainsFunc(fault.shards, func(n int) bool {
				_, err := limiter.Acquire(ctx, "p", s.key(n, "hot"))
				return err != nil
			})
		}, 2*patience, 50*ms, fault.name)
		require.NoError(t, load.end(), fault.name)

		var before, beside []time.Duration
		for n := range s.of() {
			if slices.Contains(fault.shards, n) {
				require.NotEmpty(t, watch.errors[n], "%s: shard %d", fault.name, n)
				for _, err := range watch.errors[n] {
					require.True(t, isOf(err, n), "%s: shard %d: %v", fault.name, n, err)
				}
				require.LessOrEqual(t, slices.Max(watch.took[during][n]), 2*timeout, fault.name)
				continue
			}
			calls := len(watch.took[calm][n]) + len(watch.took[during][n])
			require.LessOrEqual(t, len(watch.errors[n]), calls/50, "%s: shard %d is well, if the machine is not too slow: %v", fault.name, n, watch.errors[n])
			require.NotEmpty(t, watch.took[during][n], "%s: shard %d", fault.name, n)
			before, beside = append(before, watch.took[calm][n]...), append(beside, watch.took[during][n]...)
		}
		p99 := func(d []time.Duration) time.Duration {
			slices.Sort(d)
			return d[len(d)*99/100]
		}
		run.figure("shards "+fault.name, len(fault.shards), "")
		run.figure("p99 of the others before", p99(before).Microseconds(), "µs")
		run.figure("p99 of the others meanwhile", p99(beside).Microseconds(), "µs")
		run.figure("ratio", fmt.Sprintf("%.2f", float64(p99(beside))/float64(p99(before))), "")
		require.Less(t, p99(beside), timeout, "%s: the others do not wait for it", fault.name)
	}
}

// The phases of a fault.
const (
	warmUp = iota
	calm
	during
	after
)

// A shardWatch has how long the calls of each shard took, and their errors.
type shardWatch struct {
	s       *shards
	limiter *client.Sharded
	timeout time.Duration
	phase   atomic.Int32
	keys    [][]string

	mu     sync.Mutex
	took   [after + 1][][]time.Duration // by the phase they began and ended in
	errors [][]error
}

func newShardWatch(s *shards, limiter *client.Sharded, timeout time.Duration) *shardWatch {
	w := &shardWatch{s: s, limiter: limiter, timeout: timeout, errors: make([][]error, s.of())}
	for phase := range w.took {
		w.took[phase] = make([][]time.Duration, s.of())
	}
	for n := range s.of() {
		var keys []string
		for i := range 16 {
			keys = append(keys, s.key(n, fmt.Sprint("user ", i)))
		}
		w.keys = append(w.keys, keys)
	}
	return w
}

func (w *shardWatch) enter(phase int32) { w.phase.Store(phase) }

// call pauses first, so that calls wait for a fault and not for each other.
func (w *shardWatch) call(shard int) error {
	time.Sleep(rand.N(20 * ms))
	ctx, cancel := context.WithTimeout(context.Background(), w.timeout)
	defer cancel()
	phase, start := w.phase.Load(), time.Now()
	_, err := w.limiter.Acquire(ctx, "p", w.keys[shard][rand.N(16)])
	took := time.Since(start)
	w.mu.Lock()
	defer w.mu.Unlock()
	if phase == w.phase.Load() {
		w.took[phase][shard] = append(w.took[phase][shard], took)
	}
	if err != nil {
		w.errors[shard] = append(w.errors[shard], err)
	}
	return nil
}
