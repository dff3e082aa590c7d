package torture

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// Dozens of callers share a pool whose connections are delayed, cut and reset, and lose replies. A request with an idempotency
// key that is repeated until it is answered is charged at most once, and ends with the true decision. Without one, no token is
// missing beyond the costs of requests without an answer. When the faults end, the pool recovers and leaves no goroutine behind.
// The seed repeats the choice of faults, though not who meets them.
func TestTorture_NetworkFaultsChargeARepeatedRequestOnce(t *testing.T) {
	run := kit.Torture(t, 1)
	db := kit.NewDB(t)
	n := &network{db: db, proxy: kit.NewProxy(t, db), ledger: kit.NewLedger(db, "p", 30, time.Second)}
	random := rand.New(rand.NewPCG(kit.TestSeed(t), 0))

	for rounds := 0; run.GoesOn(); rounds++ {
		chances := odds{kit.Delay: 60, kit.Cut: 6, kit.Reset: 6, kit.Swallow: 3}
		if rounds%4 == 3 {
			chances = odds{kit.Delay: 20, kit.Vanish: 3} // for which pgx has more patience than make test
		}
		n.round(t, chances.random(random), min(run.Budget, 3*time.Second))
		run.Progress("%d grants, %d of them after the first answer was lost", n.ledger.Granted, n.ledger.Replayed)
	}

	run.Counts(n.met())
	run.Figure("connections that went silent", n.proxy.Done[kit.Vanish].Load(), "")
	run.Figure("slowest try, whose ctx ends after 1 s", n.ledger.Slowest.Round(time.Millisecond), "")
	run.Figure("slowest recovery of the pool", n.slowestRecovery.Round(time.Millisecond), "")
}

type network struct {
	db              *kit.TestDB
	proxy           *kit.Proxy
	ledger          *kit.Ledger
	combined        atomic.Int64 // calls for several requests
	slowestRecovery time.Duration
}

// met counts the events of which each must happen.
func (n *network) met() map[string]int {
	met := map[string]int{
		"granted": n.ledger.Granted, "granted, and an answer was lost before": n.ledger.Replayed, "denied": n.ledger.Denied,
		"unknown, without an idempotency key": n.ledger.Unknown, "tries without an answer": n.ledger.Failed[""],
		"calls for several requests": int(n.combined.Load()),
	}
	for what, fault := range map[string]kit.Fault{"delays": kit.Delay, "cuts": kit.Cut, "resets": kit.Reset, "swallowed replies": kit.Swallow} {
		met[what] = int(n.proxy.Done[fault].Load())
	}
	return met
}

// round starts callers on a pool of its own while the network has faults, until they have met what they must, and
// checks the ledger after the faults have ended.
func (n *network) round(t *testing.T, faults kit.Faults, lasts time.Duration) {
	label := t.Name() // on every goroutine that starts in here
	pprof.Do(context.Background(), pprof.Labels("client", label), func(context.Context) {
		pool := n.proxy.Pool(t, n.db, func(config *pgxpool.Config) { config.ConnConfig.Tracer = n })
		combiner := client.NewCombiner(pool)
		n.proxy.Plan(faults)
		callers := n.ledger.Load(t, client.New(pool), combiner)
		callers.RunFor(lasts)
		met := map[string]int{}
		for begin := time.Now(); callers.Ctx.Err() == nil && (len(met) == 0 || slices.Contains(slices.Collect(maps.Values(met)), 0)); time.Sleep(5 * kit.Ms) {
			require.Less(t, time.Since(begin), kit.Patience, "not all kinds of events happen: %v", met)
			n.ledger.Mu.Lock()
			met = n.met()
			n.ledger.Mu.Unlock()
		}
		n.proxy.Heal()
		healed := time.Now()
		require.NoError(t, callers.End())
		awaitRecovery(t, pool)
		n.slowestRecovery = max(n.slowestRecovery, time.Since(healed))
		combiner.Close()
		require.Zero(t, pool.Stat().AcquiredConns())
		pool.Close()
	})
	awaitNoGoroutines(t, label)
	n.db.Await(t, kit.Patience, "select count(*) = 0 from pg_stat_activity where datname = current_database() and application_name = 'through a proxy'")

	require.NoError(t, n.ledger.Check(n.db))
	for state := range n.ledger.Failed {
		require.Empty(t, state, "it is the network's fault")
	}
}

// awaitRecovery returns when each connection of the pool works.
func awaitRecovery(t *testing.T, pool *pgxpool.Pool) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for working := int32(0); working < pool.Config().MaxConns; {
		conn := kit.NoError(pool.Acquire(ctx))(t)
		defer conn.Release()
		short, cancel := context.WithTimeout(ctx, time.Second)
		if conn.Ping(short) == nil {
			working++
		} else {
			conn.Release() // it is replaced
		}
		cancel()
	}
}

func awaitNoGoroutines(t *testing.T, label string) {
	for start := time.Now(); goroutines(label) != ""; time.Sleep(10 * time.Millisecond) {
		require.Less(t, time.Since(start), kit.Patience, goroutines(label))
	}
}

// goroutines returns the stacks of the goroutines that have a label.
func goroutines(label string) string {
	var all bytes.Buffer
	_ = pprof.Lookup("goroutine").WriteTo(&all, 1)
	var found []string
	for _, group := range strings.Split(all.String(), "\n\n") {
		if strings.Contains(group, strconv.Quote(label)) {
			found = append(found, group)
		}
	}
	return strings.Join(found, "\n\n")
}

func (n *network) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, "ratelimit_acquire_packed") {
		n.combined.Add(1)
	}
	return ctx
}

func (*network) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// onBoth runs a test with each kind of limiter, on a pool that connects through a proxy, however long that takes.
func onBoth(t *testing.T, test func(t *testing.T, db *kit.TestDB, proxy *kit.Proxy, by client.Acquirer)) {
	for name, open := range map[string]func(*pgxpool.Pool) client.Acquirer{
		"Limiter":  func(pool *pgxpool.Pool) client.Acquirer { return client.New(pool) },
		"Combiner": func(pool *pgxpool.Pool) client.Acquirer { return client.NewCombiner(pool) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := kit.NewDB(t)
			proxy := kit.NewProxy(t, db)
			test(t, db, proxy, open(proxy.Pool(t, db, patient, func(config *pgxpool.Config) { // the first message of a call is the call
				config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
			})))
		})
	}
}

// patient gives each connection a minute.
func patient(config *pgxpool.Config) { config.ConnConfig.ConnectTimeout = kit.Patience }

// The server has committed, and its reply is lost on the way.
func TestNetwork_ALostReply(t *testing.T) {
	type testCase struct {
		fault  kit.Fault
		leaves bool // the caller, when the reply is lost
		tries  int  // without an answer: with an idempotency key the client tries again for a caller who waits
	}
	kit.InParallel(t, map[string]testCase{
		"cut":       {kit.Cut, false, 1},
		"reset":     {kit.Reset, false, 1},
		"swallowed": {kit.Swallow, true, 2},
	}, func(t *testing.T, lost testCase) {
		onBoth(t, func(t *testing.T, db *kit.TestDB, proxy *kit.Proxy, by client.Acquirer) {
			l := kit.NewLedger(db, "p", 10, time.Minute)
			caller := &leaver{Acquirer: by}
			for _, r := range []kit.Request{l.Request("k", 3, "i"), l.Request("k", 2, "")} {
				require.NoError(t, l.Settle(by, l.Request("other", 1, "")), "connects")
				proxy.Plan(nextReply(lost.fault, func() {
					if lost.leaves {
						caller.leave()
					}
				}))
				require.NoError(t, l.Settle(caller, r))
			}
			require.Equal(t, 1, l.Replayed)
			require.Equal(t, 1, l.Unknown)
			require.Equal(t, lost.tries, l.Failed[""])
			require.EqualValues(t, 5, db.Left("p", "k"))
			require.NoError(t, l.Check(db))
		})
	})
}

func TestNetwork_ACallerWhoRetriesWithoutAnIdempotencyKeyIsChargedTwice(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, db *kit.TestDB, proxy *kit.Proxy, by client.Acquirer) {
		l := kit.NewLedger(db, "p", 10, time.Minute)
		r := l.Request("k", 3, "")
		require.NoError(t, l.Settle(by, l.Request("other", 1, "")))
		proxy.Plan(nextReply(kit.Cut, func() {}))
		require.Error(t, kit.ErrorOf(l.Try(by, r)))
		require.NoError(t, l.Settle(by, r))
		require.ErrorContains(t, l.Check(db), "3 tokens are gone that were granted to nobody; requests without an answer wanted 0")
	})
}

// All places of the pool are taken by connection attempts without an answer.
func TestNetwork_ConnectingHangs(t *testing.T) {
	db := kit.ParallelDB(t)
	proxy := kit.NewProxy(t, db)
	pool := proxy.Pool(t, db, patient)
	l := kit.NewLedger(db, "p", 10, time.Second)
	proxy.Plan(func(bool) kit.Fault { return kit.Vanish })
	kit.Crowd(t, int(pool.Config().MaxConns), func(int) error {
		if kit.ErrorOf(l.Try(client.New(pool), l.Request("k", 1, "i"))) == nil {
			return errors.New("an answer from nowhere")
		}
		return nil
	})
	require.Equal(t, pool.Config().MaxConns, pool.Stat().ConstructingConns())

	proxy.Heal()
	proxy.HangUp()
	require.NoError(t, l.Settle(client.New(pool), l.Request("k", 1, "i")))
	require.NoError(t, l.Check(db))
}

// odds of so many in a thousand make faults, of which the first ones are one of each kind.
type odds map[kit.Fault]int

func (o odds) random(random *rand.Rand) kit.Faults {
	var mu sync.Mutex
	first := slices.Sorted(maps.Keys(o))
	return func(reply bool) kit.Fault {
		mu.Lock()
		defer mu.Unlock()
		n := random.IntN(1000)
		for f := kit.Delay; f <= kit.Vanish; f++ {
			if n -= o[f]; n >= 0 {
				continue
			}
			if len(first) > 0 {
				f = first[0]
			}
			if f == kit.Swallow && !reply {
				break
			}
			first = first[min(1, len(first)):]
			return f
		}
		return kit.Pass
	}
}

// A leaver makes one call at a time, and can leave it.
type leaver struct {
	client.Acquirer
	leave context.CancelFunc
}

func (l *leaver) Acquire(ctx context.Context, policy, key string, opts ...client.CallOption) (client.Decision, error) {
	ctx, l.leave = context.WithCancel(ctx)
	defer l.leave()
	return l.Acquirer.Acquire(ctx, policy, key, opts...)
}

// nextReply does one fault to the next reply of the server.
func nextReply(f kit.Fault, met func()) kit.Faults {
	var done atomic.Bool
	return func(reply bool) kit.Fault {
		if reply && done.CompareAndSwap(false, true) {
			met()
			return f
		}
		return kit.Pass
	}
}

// simple is SQL in the simple protocol.
func simple(sql string) kit.Message { return kit.Message{&pgproto3.Query{String: sql}} }

// extended is a statement prepared under a name, with parameters, in the extended protocol.
func extended(name string, formats []int16, parameters [][]byte) kit.Message {
	return kit.Message{
		&pgproto3.Bind{PreparedStatement: name, ParameterFormatCodes: formats, Parameters: parameters},
		&pgproto3.Execute{},
		&pgproto3.Sync{},
	}
}

func prepare(name, sql string) kit.Message {
	return kit.Message{&pgproto3.Parse{Name: name, Query: sql}, &pgproto3.Sync{}}
}

// Callers of the Node client share a pool whose sessions are killed and whose connections are delayed, cut and reset, which loses
// replies. No token is minted, and none is missing beyond the costs of requests without an answer. No call has a time limit: what
// happens at its end is tested with a clock that the test moves, in client/node.
func TestTorture_NodeFaultsMintNoToken(t *testing.T) {
	run := kit.Torture(t, 1)
	db := kit.NewDB(t)
	proxy := kit.NewProxy(t, db)
	proxy.Plan(odds{kit.Delay: 200, kit.Cut: 30, kit.Reset: 30}.random(rand.New(rand.NewPCG(kit.TestSeed(t), 0))))
	kit.RunNode(t, db.URL, []string{"RATELIMIT_TEST_PROXY=" + proxy.Listener.Addr().String()}, "node", "--test", "test/storm.test.js")
	run.Figures("delays", proxy.Done[kit.Delay].Load(), "cuts", proxy.Done[kit.Cut].Load(), "resets", proxy.Done[kit.Reset].Load())
}

func TestLedger_SeesWhatDoesNotAddUp(t *testing.T) {
	db := kit.ParallelDB(t)
	by := client.New(db.Pool)
	granted := func(remaining int64) client.Decision { return client.Decision{Allowed: true, Remaining: remaining} }
	for wrong, happen := range map[string]func(l *kit.Ledger){
		"": func(l *kit.Ledger) {
			l.Lose(l.Request("k", 2, ""))
			db.Acquire(l.Policy, "k", 2)
		},
		"2 tokens are gone that were granted to nobody; requests without an answer wanted 0": func(l *kit.Ledger) { db.Acquire(l.Policy, "k", 2) },
		"tokens were granted twice": func(l *kit.Ledger) { l.Enter(l.Request("k", 2, ""), granted(6)) },
		"lost: 7 are left":          func(l *kit.Ledger) { l.Enter(l.Request("k", 2, ""), granted(5)) },
		"is replayed as": func(l *kit.Ledger) {
			l.Enter(l.Request("k", 2, "j"), granted(5))
			db.Acquire(l.Policy, "k", 2)
		},
		"2 idempotency keys are remembered of 1": func(l *kit.Ledger) {
			l.Lose(l.Request("k", 2, ""))
			db.Acquire(l.Policy, "k", 2, "j")
		},
	} {
		l := kit.NewLedger(db, "policy: "+wrong, 10, time.Minute)
		require.NoError(t, l.Settle(by, l.Request("k", 3, "i")))
		happen(l)
		if err := l.Check(db); wrong == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, wrong)
		}
	}
}
