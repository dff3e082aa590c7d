package torture

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
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// TestTorture_LinearizabilityOfCallsOnBuckets with a client.Sharded in place of the combiner, in every other history. A database of each
// server has histories at a time: with more, so many calls overlap that their orders are too many to try.
func TestTorture_ShardsLinearizabilityOfCallsOnBuckets(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, kit.DatabasesOfServer)
	s := kit.NewShards(t)
	var workloads []*workload
	pools, counts := map[int]*pgxpool.Pool{}, newTally()
	for n, db := range s.Dbs {
		w := newWorkload(db, "continuous durable", "stepped durable", "continuous ephemeral", "stepped ephemeral")
		w.tally, w.oneIn, w.seed = counts, 2, w.seed+uint64(n)<<32
		w.key = func(name string) string { return s.Key(n, name) }
		workloads, pools[n] = append(workloads, w), w.pool
	}
	limiter := s.Limiter(pools)
	check := func(seed uint64, histories []history, err error) bool {
		workloads[0].judge(t, seed, histories, err)
		run.Progress("%d operations in %d histories", counts.of("operations"), counts.of("histories"))
		return !t.Failed()
	}
	for turn := 0; run.GoesOn(); turn++ {
		var writers sync.WaitGroup
		for c := turn % kit.DatabasesOfServer; c < len(workloads); c += kit.DatabasesOfServer {
			workloads[c].combiner = limiter
			histories := 4
			writers.Go(func() { workloads[c].write(func() bool { histories--; return histories >= 0 }, check) })
		}
		writers.Wait()
	}
	require.Empty(t, counts.lacks([]string{"acquire, granted", "acquire, denied", "acquire, replayed", "acquire_all, granted", "acquire_all, denied"}))
	workloads[0].report(run)
}

// A shardFault is done to some of the shards, and undone.
type shardFault struct {
	name   string
	shards []int
	begin  func()
	end    func()
}

// A shard is killed, frozen, and cut off without a sign. Calls about its keys fail when their time is over, with an error that names
// it. Calls about other keys go on and have no error, also while calls about its keys wait that have all the time in the world.
func TestTorture_ShardsFaultStaysOnItsShard(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 20) // answers of each shard in each phase
	s := kit.NewShards(t)
	const alone = 1 // of the first server, behind a proxy
	proxy := kit.NewProxy(t, s.Dbs[alone])
	limiter := s.Limiter(map[int]*pgxpool.Pool{alone: proxy.Pool(t, s.Dbs[alone], patient)})
	require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: "p", Capacity: 1e9, Refill: 1000, Every: kit.Second}))

	second := s.Servers[1]
	var theirs []int
	for n := range s.Of() {
		if s.ServerOf(n) == second {
			theirs = append(theirs, n)
		}
	}
	for _, fault := range []shardFault{
		{"cut off", []int{alone}, func() { proxy.Plan(func(bool) kit.Fault { return kit.Vanish }) }, func() { proxy.Heal(); proxy.HangUp() }},
		{"frozen", theirs, func() { pgtest.OrSkip(t, second.Freeze(t.Context())) }, func() { require.NoError(t, second.Thaw(t.Context())) }},
		{"killed", theirs, func() { kill(t, second) }, func() { require.NoError(t, second.Start(t.Context())) }},
	} {
		watch := newShardWatch(s, limiter, fault.shards)
		load := kit.NewLoad(t)
		load.Start(4*s.Of(), func(caller int) error { return watch.call(caller%s.Of(), caller < 2*s.Of()) })
		for _, phase := range []int32{warmUp, calm} {
			watch.enter(phase)
			watch.await(t, run, func(n int) bool { return len(watch.took[phase][n]) >= int(run.Steps) }, fault.name)
		}
		fault.begin()
		watch.enter(during)
		watch.await(t, run, func(n int) bool {
			if slices.Contains(fault.shards, n) {
				return len(watch.errors[n]) > 0
			}
			return len(watch.took[during][n]) >= int(run.Steps)
		}, fault.name)
		watch.enter(after)
		fault.end()
		watch.release()
		require.Eventually(t, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			return !slices.ContainsFunc(fault.shards, func(n int) bool {
				_, err := limiter.Acquire(ctx, "p", s.Key(n, "hot"))
				return err != nil
			})
		}, 2*kit.Patience, 50*kit.Ms, fault.name)
		require.NoError(t, load.End(), fault.name)

		var before, beside []time.Duration
		for n := range s.Of() {
			if slices.Contains(fault.shards, n) {
				for _, err := range watch.errors[n] {
					require.True(t, isOf(err, n), "%s: shard %d: %v", fault.name, n, err)
				}
				continue
			}
			require.Empty(t, watch.errors[n], "%s: shard %d is well", fault.name, n)
			before, beside = append(before, watch.took[calm][n]...), append(beside, watch.took[during][n]...)
		}
		p99 := func(d []time.Duration) time.Duration {
			slices.Sort(d)
			return d[len(d)*99/100]
		}
		run.Figure("shards "+fault.name, len(fault.shards), "")
		run.Figure("p99 of the others before", p99(before).Microseconds(), "µs")
		run.Figure("p99 of the others meanwhile", p99(beside).Microseconds(), "µs")
		run.Figure("ratio", fmt.Sprintf("%.2f", float64(p99(beside))/float64(p99(before))), "")
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
	s       *kit.Shards
	limiter *client.Sharded
	faulty  []int
	phase   atomic.Int32
	patient context.Context // until release
	release func()

	mu     sync.Mutex
	took   [after + 1][][]time.Duration // of those with an answer, by the phase they began and ended in
	errors [][]error
}

func newShardWatch(s *kit.Shards, limiter *client.Sharded, faulty []int) *shardWatch {
	w := &shardWatch{s: s, limiter: limiter, faulty: faulty, errors: make([][]error, s.Of())}
	w.patient, w.release = context.WithCancel(s.T.Context())
	for phase := range w.took {
		w.took[phase] = make([][]time.Duration, s.Of())
	}
	return w
}

func (w *shardWatch) enter(phase int32) { w.phase.Store(phase) }

// await returns when all shards are done with a phase, in make torture after its time.
func (w *shardWatch) await(t *testing.T, run *kit.TortureRun, done func(shard int) bool, fault string) {
	time.Sleep(run.Budget / 9)
	require.Eventually(t, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		for n := range w.s.Of() {
			if !done(n) {
				return false
			}
		}
		return true
	}, 2*kit.Patience, 5*kit.Ms, "%s, phase %d", fault, w.phase.Load())
}

// call pauses first, so that calls wait for a fault and not for each other. About a shard with a fault the impatient wait for a
// second, and the others until they are released.
func (w *shardWatch) call(shard int, impatient bool) error {
	time.Sleep(rand.N(20 * kit.Ms))
	phase, ctx := w.phase.Load(), w.s.T.Context()
	switch {
	case phase == after || !slices.Contains(w.faulty, shard):
	case impatient:
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Second)
		defer cancel()
	default:
		ctx = w.patient
	}
	key, start := w.s.Key(shard, fmt.Sprint("user ", rand.N(16))), time.Now()
	_, err := w.limiter.Acquire(ctx, "p", key)
	took := time.Since(start)
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case err != nil:
		w.errors[shard] = append(w.errors[shard], err)
	case phase == w.phase.Load():
		w.took[phase][shard] = append(w.took[phase][shard], took)
	}
	return nil
}

// isOf reports whether an error is one of these shards.
func isOf(err error, shards ...int) bool {
	var e *client.ShardError
	return errors.As(err, &e) && slices.Contains(shards, e.Shard)
}

// The calls of TestTorture_CallsAgreeWithTheModel, through each node of a Citus cluster: the answers are those of the model, and no node crashes.
func TestTorture_CitusAgreesWithTheModel(t *testing.T) {
	pgtest.OncePerServer(t)
	db := kit.NewCitus(t).Create(t, "called")
	db.StopClock()
	var callers []*caller
	inputs := newTally()
	for _, node := range db {
		c := &caller{
			db: node, inputs: inputs, citus: true,
			setClock: "update public.test_clock set now = '%s'",
		}
		c.begin(t)
		callers = append(callers, c)
	}
	run, seed := kit.Torture(t, 6), kit.FirstSeed(t)
	rounds := 0
	for ; run.GoesOn(); rounds++ {
		require.NoError(t, callers[rounds%len(db)].round(seed, badInput), "through node %d\n%s", rounds%len(db), kit.Repeats(t, seed))
		seed++
		run.Progress("%d inputs", inputs.of("inputs"))
	}
	for n, node := range db {
		restarts := kit.One[int](t, node.Pool,
			"select count(*) from pg_stat_activity where backend_type = 'checkpointer' and backend_start > pg_postmaster_start_time() + interval '10 seconds'")
		require.Zero(t, restarts, "node %d: a crash starts the checkpointer anew", n)
	}
	run.Figure("rounds", rounds, "")
	run.Counts(inputs.counts)
}
