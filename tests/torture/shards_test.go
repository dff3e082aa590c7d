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
		w := newWorkload(db, "plain durable", "continuous durable", "stepped durable", "plain ephemeral", "stepped ephemeral")
		w.tally, w.oneIn, w.seed = counts, 2, w.seed+uint64(n)<<32
		w.key = func(name string) string { return s.Key(n, name) }
		workloads, pools[n] = append(workloads, w), w.pool
	}
	limiter := s.Limiter(pools)
	for turn := 0; run.GoesOn(); turn++ {
		var writers sync.WaitGroup
		for c := turn % kit.DatabasesOfServer; c < len(workloads); c += kit.DatabasesOfServer {
			workloads[c].combiner = limiter
			writers.Go(func() { workloads[c].judgeFour(run) })
		}
		writers.Wait()
	}
	require.Empty(t, counts.lacks([]string{"acquire, granted", "acquire, denied", "acquire, replayed", "acquire_all, granted", "acquire_all, denied"}))
	workloads[0].report(run)
}

// A shard is killed, frozen, and cut off without a sign. Calls about its keys fail when their time is over, with an error that names
// it. Calls about other keys go on and have no error, also while calls about its keys wait that have all the time in the world.
func TestTorture_ShardsFaultStaysOnItsShard(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 20) // answers of each shard before the fault and meanwhile
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
	for _, fault := range []struct {
		name       string
		shards     []int
		begin, end func()
	}{
		{"cut off", []int{alone}, func() { proxy.Plan(func(bool) kit.Fault { return kit.Vanish }) }, func() { proxy.Heal(); proxy.HangUp() }},
		{"frozen", theirs, func() { pgtest.OrSkip(t, second.Freeze(t.Context())) }, func() { require.NoError(t, second.Thaw(t.Context())) }},
		{"killed", theirs, func() { kill(t, second) }, func() { require.NoError(t, second.Start(t.Context())) }},
	} {
		hasFault := func(n int) bool { return slices.Contains(fault.shards, n) }
		waits, release := context.WithCancel(t.Context()) // the calls of those who have time
		defer release()
		var phase atomic.Int32 // before, during and after the fault
		var mu sync.Mutex
		answers, failures := make([][3]int, s.Of()), make([][]error, s.Of())
		load := kit.NewLoad(t)
		load.Start(4*s.Of(), func(caller int) error {
			time.Sleep(rand.N(20 * kit.Ms)) // so that calls wait for a fault and not for each other
			n, in, ctx := caller%s.Of(), phase.Load(), t.Context()
			switch isPatient := caller >= 2*s.Of(); {
			case in == 2 || !hasFault(n):
			case isPatient:
				ctx = waits
			default:
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, time.Second)
				defer cancel()
			}
			_, err := limiter.Acquire(ctx, "p", s.Key(n, fmt.Sprint("user ", rand.N(16))))
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failures[n] = append(failures[n], err)
			} else if in == phase.Load() {
				answers[n][in]++
			}
			return nil
		})
		await := func(done func(n int) bool) {
			time.Sleep(run.Budget / 9)
			require.Eventually(t, func() bool {
				mu.Lock()
				defer mu.Unlock()
				for n := range answers {
					if !done(n) {
						return false
					}
				}
				return true
			}, 2*kit.Patience, 5*kit.Ms, "%s, phase %d", fault.name, phase.Load())
		}
		await(func(n int) bool { return answers[n][0] >= int(run.Steps) })
		fault.begin()
		phase.Store(1)
		await(func(n int) bool {
			return hasFault(n) && len(failures[n]) > 0 || !hasFault(n) && answers[n][1] >= int(run.Steps)
		})
		phase.Store(2)
		fault.end()
		release()
		require.Eventually(t, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			return !slices.ContainsFunc(fault.shards, func(n int) bool {
				_, err := limiter.Acquire(ctx, "p", s.Key(n, "hot"))
				return err != nil
			})
		}, 2*kit.Patience, 50*kit.Ms, fault.name)
		require.NoError(t, load.End(), fault.name)
		for n := range s.Of() {
			for _, err := range failures[n] {
				var of *client.ShardError
				require.True(t, hasFault(n) && errors.As(err, &of) && of.Shard == n, "%s: shard %d: %v", fault.name, n, err)
			}
		}
		run.Figure("shards "+fault.name, len(fault.shards), "")
	}
}

// The calls of TestTorture_CallsAgreeWithTheModel, through each node of a Citus cluster, while shards move: the answers are those of the
// model, and no node crashes.
func TestTorture_CitusAgreesWithTheModel(t *testing.T) {
	pgtest.OncePerServer(t)
	c := kit.NewCitus(t, "citus.shard_count=2")
	db := c.Create(t, "called")
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
	moves := db.MovesDuring(c, anyKey, func() {
		for ; run.GoesOn() && !t.Failed(); rounds++ {
			if err := callers[rounds%len(db)].round(seed, badInput); err != nil {
				t.Errorf("through node %d: %v\n%s", rounds%len(db), err, kit.Repeats(t, seed))
			}
			seed++
			run.Progress("%d inputs", inputs.of("inputs"))
		}
	})
	for n, node := range db {
		restarts := kit.One[int](t, node.Pool,
			"select count(*) from pg_stat_activity where backend_type = 'checkpointer' and backend_start > pg_postmaster_start_time() + interval '10 seconds'")
		require.Zero(t, restarts, "node %d: a crash starts the checkpointer anew", n)
	}
	run.Figures("rounds", rounds, "moves", moves)
	run.Counts(inputs.counts)
}

// Clients of all nodes of a Citus cluster make the calls of TestTorture_LinearizabilityOfCallsOnBuckets, and those of the test of slots,
// while shards move. A call that a move had fail did nothing, and so did one that failed with 40001. Nothing else fails, as by a deadlock.
func TestTorture_CitusLinearizabilityOfCalls(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 4)
	c := kit.NewCitus(t, "citus.shard_count=2")
	db := c.Create(t, "histories")
	counts := newTally()
	workloads := []*workload{
		newWorkload(db[0], "plain durable", "continuous durable", "stepped durable", "quota durable", "plain ephemeral", "quota ephemeral"),
		newSlotsWorkload(db[0], "slots durable", "slots ephemeral"),
	}
	workloads[0].key = func(name string) string { // two buckets of a history have one key
		last := len(name) - 1
		return name[:last] + fmt.Sprint(name[last]/2)
	}
	for _, w := range workloads {
		w.tally, w.citus = counts, true
		for n, client := range w.clients {
			client.Conn = db[n%len(db)].Connect(t, client.noteReadings)
		}
	}
	moves := db.MovesDuring(c, anyKey, func() {
		for turn := 0; run.GoesOn() && !t.Failed(); turn++ {
			workloads[turn%2].judgeFour(run)
		}
	})
	require.Empty(t, counts.lacks([]string{"acquire, granted", "acquire, replayed", "acquire_all, granted", "requests in batches", "hold, granted"}))
	run.Figures("moves", moves)
	workloads[0].report(run)
}

func anyKey() string { return fmt.Sprint(rand.Uint64()) }
