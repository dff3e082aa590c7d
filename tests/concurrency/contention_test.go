package concurrency

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestContention_TwoTransactionsInOppositeOrder(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, kit.ADay)
	take := func(first, second string, between func()) error {
		return pgx.BeginFunc(context.Background(), db.Pool, func(tx pgx.Tx) error {
			by := client.New(tx)
			if _, err := by.Acquire(context.Background(), "p", first, client.Cost(2)); err != nil {
				return err
			}
			between()
			_, err := by.Acquire(context.Background(), "p", second, client.Cost(3))
			return err
		})
	}
	var crossing, done sync.WaitGroup
	crossing.Add(2)
	meet := func() {
		crossing.Done()
		crossing.Wait()
	}
	var ab, ba error
	done.Go(func() { ab = take("a", "b", meet) })
	done.Go(func() { ba = take("b", "a", meet) })
	done.Wait()
	again, victim := func() error { return take("b", "a", func() {}) }, ba
	left := []int64{8, 7}
	if ab != nil {
		again, victim = func() error { return take("a", "b", func() {}) }, ab
		left = []int64{7, 8}
		require.NoError(t, ba)
	}
	require.Equal(t, "40P01", kit.SQLState(victim))
	require.ErrorContains(t, victim, "pgratelimit: acquire: ")
	require.Equal(t, left, []int64{db.Left("p", "a"), db.Left("p", "b")}, "nothing of the victim's is taken")
	require.NoError(t, again())
	require.Equal(t, []int64{5, 5}, []int64{db.Left("p", "a"), db.Left("p", "b")})
}

// A transaction holds a bucket. With lock_timeout, callers of this bucket get a clear error and callers of
// other buckets notice nothing. Without it, callers of this bucket wait.
func TestContention_AHeldBucket(t *testing.T) {
	db := kit.ParallelDB(t)
	l := kit.NewLedger(db, "p", 100, time.Minute)
	config := db.Pool.Config()
	config.ConnConfig.RuntimeParams["lock_timeout"] = "200ms"
	hasty := kit.OpenPool(t, config)
	limiters := []client.Acquirer{client.New(hasty), client.NewCombiner(hasty)}
	require.NoError(t, l.Settle(client.New(db.Pool), l.Request("held", 1, "first")))
	holder := db.Begin().Take("p", "held", 5)
	var insistent, others sync.WaitGroup
	for caller := range 8 {
		by := limiters[caller%2]
		insistent.Go(func() {
			if err := l.Settle(by, l.Request("held", 1, fmt.Sprint(caller))); err != nil {
				t.Error(err)
			}
		})
		others.Go(func() {
			for n := range 5 {
				r := l.Request(fmt.Sprint("free/", caller), 1, fmt.Sprint(n)) // with a key, to share calls with the insistent
				d, err := l.Try(by, r)
				if err != nil {
					t.Error(err)
				}
				l.Enter(r, d)
			}
		})
	}
	others.Wait()
	l.AwaitFailures(t, 10)
	for _, by := range limiters {
		_, err := l.Try(by, l.Request("held", 1, ""))
		require.ErrorIs(t, err, client.ErrLocked)
		require.Equal(t, "55P03", kit.SQLState(err))
	}
	require.EqualValues(t, 99, db.Left("p", "held"))
	patient, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := client.New(db.Pool).Acquire(patient, "p", "held")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, client.ErrLocked)
	l.Lose(l.Request("held", 1, "")) // the server may learn of the end too late
	holder.Execute("rollback")
	insistent.Wait()
	require.Len(t, l.Failed, 1, "%v: 55P03 and nothing else", l.Failed)
	require.Zero(t, l.Denied)
	require.NoError(t, l.Check(db))
}

// The server ends a transaction that holds a bucket and does nothing. Whoever waits gets its turn, and the tokens are back.
func TestContention_AnIdleTransactionEnds(t *testing.T) {
	db := kit.ParallelDB(t)
	for _, known := range []bool{true, false} {
		policy := fmt.Sprint("known=", known)
		db.DefinePolicy(policy, 10, 1, kit.ADay)
		if known {
			db.Acquire(policy, "k", 1)
		}
		before := db.Left(policy, "k")
		holder := db.Begin().Take(policy, "k", 5, "i")
		waiter := db.Session().StartAcquire(policy, "k", 3).BlockedBy(holder)
		holder.Execute("set local idle_in_transaction_session_timeout = '1ms'")
		require.Equal(t, before-3, waiter.Answer().Remaining)
		_, err := holder.Exec(context.Background(), "commit")
		require.Error(t, err)
		require.False(t, db.Acquire(policy, "k", 1, "i").Replayed, "the key is gone with its grant")
	}
}

func TestContention_TooManyConnections(t *testing.T) {
	t.Parallel()
	const most = 12
	db, _ := kit.NewPrivateDB(t, fmt.Sprint("max_connections=", most))
	l := kit.NewLedger(db, "p", 1000, time.Minute)
	pool := kit.Pool(t, db.URL)
	var others []*pgx.Conn
	for {
		conn, err := pgx.Connect(context.Background(), db.URL)
		if err != nil {
			require.Equal(t, "53300", kit.SQLState(err))
			break
		}
		others = append(others, conn)
		require.LessOrEqual(t, len(others), most)
	}
	for _, by := range []client.Acquirer{client.New(pool), client.NewCombiner(pool)} {
		for _, idempotencyKey := range []string{"", "i"} {
			_, err := l.Try(by, l.Request("k", 1, idempotencyKey))
			require.Equal(t, "53300", kit.SQLState(err))
			require.ErrorContains(t, err, "too many clients already")
			var connectErr *pgconn.ConnectError
			require.ErrorAs(t, err, &connectErr)
		}
	}
	for _, conn := range others {
		require.NoError(t, conn.Close(context.Background()))
	}
	require.NoError(t, l.Settle(client.New(pool), l.Request("k", 1, "i")))
	require.NoError(t, l.Settle(client.NewCombiner(pool), l.Request("k", 1, "j")))
	// A pool that is larger than its server, and every call takes a connection for a while.
	large := pool.Config()
	large.MaxConns = 2 * most
	pool = kit.OpenPool(t, large)
	holder := db.Begin().Take("p", "k", 1)
	var callers sync.WaitGroup
	for caller := range large.MaxConns {
		callers.Go(func() {
			if err := l.Settle(client.New(pool), l.Request("k", 1, fmt.Sprint(caller))); err != nil {
				t.Error(err)
			}
		})
	}
	l.AwaitFailures(t, 10)
	holder.Execute("rollback")
	callers.Wait()
	require.Len(t, l.Failed, 1, "%v: 53300 and nothing else", l.Failed)
	require.NoError(t, l.Check(db))
}

// The denials that are decided without waiting, each on a bucket of capacity 10 that has no token
// left, or on one that has no row; to an unknown key only what never fits is denied.
var denials = []struct{ name, call string }{
	{"known key", "acquire(@policy, 'known', 1 + 0 * i)"},
	{"known key, never", "acquire(@policy, 'known', 11 + 0 * i)"},
	{"unknown key, never", "acquire(@policy, 'unknown' || i, 11)"},
	{"known key, idempotent", "acquire(@policy, 'known', 1 + 0 * i, 'X')"},
	{"known key, never, idempotent", "acquire(@policy, 'known', 11 + 0 * i, 'X')"},
	{"unknown key, never, idempotent", "acquire(@policy, 'unknown' || i, 11, 'X' || i)"},
	{"all of two, the first has tokens", "acquire_all(array[@policy, @policy], array['half', 'known'], array[1 + 0 * i, 1])"},
	{"all of two, the second has tokens", "acquire_all(array[@policy, @policy], array['known', 'half'], array[1 + 0 * i, 1], 'X')"},
	{"all of two, one is unknown", "acquire_all(array[@policy, @policy], array['unknown' || i, 'known'])"},
	{"all of two, never", "acquire_all(array[@policy, @policy], array['unknown' || i, 'half'], array[1, 11], 'X' || i)"},
	{"all of one that is named twice", "acquire_all(array[@policy, @policy], array['half', 'half'], array[3, 3 + 0 * i])"},
	{"many", "acquire_many(array[@policy, @policy], array['known', 'known'], array[1 + 0 * i, 1]) limit 1"},
	{"many, idempotent and not", "acquire_many(array[@policy, @policy, @policy], array['known', 'known', 'known'], array[1 + 0 * i, 1, 1], array['X', null, 'Y']) limit 1"},
	{"many, idempotent twice", "acquire_many(array[@policy, @policy], array['known', 'known'], array[1 + 0 * i, 1], array['X', 'X']) limit 1"},
	{"many requests for all", "acquire_many(array[@policy, @policy, @policy], array['half', 'known', 'known'], array[1, 1 + 0 * i, 1], sizes => array[2, 1]) limit 1"},
}

// denyTimes is a query for how many of n acquires are denied.
func denyTimes(n int, policy, call string) (string, pgx.NamedArgs) {
	return `select count(*) filter (where not d.allowed) from generate_series(1, @n) as i cross join lateral (select * from ratelimit_` + call + `) as d`,
		pgx.NamedArgs{"n": n, "policy": policy}
}

func TestDenial_WritesNothing(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		const n = 20 // a plan is kept after five
		db.Policy("p", 10, 1, kit.ADay, kind).Take("p", "known", 10, "another").Take("p", "half", 5)
		s := db.Session()
		for _, d := range denials {
			before := db.Rows()
			s.Execute("begin")
			sql, args := denyTimes(n, "p", d.call)
			require.Equal(t, n, kit.One[int](t, s, sql, args), d.name)
			require.Equal(t, kit.Traces{}, s.Traces(), d.name)
			require.Equal(t, before, db.Rows(), d.name)
			for _, table := range kit.StateTables {
				db.Execute("select from " + table + " for update nowait")
			}
			s.Execute("commit")
		}
		// A grant does change the rows that are compared.
		before := db.Rows()
		s.Execute("begin")
		s.Acquire("p", "other", 1, "Z")
		require.Equal(t, kit.Traces{Xid: true, Writes: 2}, s.Traces())
		s.Execute("commit")
		require.NotEqual(t, before, db.Rows())
	})
}

func TestDenial_WritesNoWAL(t *testing.T) {
	t.Parallel()
	// No snapshots of running transactions for standbys, no checkpoint, no vacuum: nobody else writes.
	db, _ := kit.NewPrivateDB(t, "wal_level=minimal", "max_wal_senders=0", "checkpoint_timeout=1h", "autovacuum=off")
	db.Policy("p", 10, 1, kit.ADay).Take("p", "known", 10, "another").Take("p", "half", 5)
	s := db.Session().Execute("checkpoint")
	for _, d := range denials {
		// Another process may write once; a denial that wrote would do so in all five tries.
		var wal int64
		for range 5 {
			const lsn = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
			sql, args := denyTimes(100, "p", d.call)
			s.Execute(sql, args) // warm
			before := kit.One[int64](t, s, lsn)
			s.Execute(sql, args)
			if wal = kit.One[int64](t, s, lsn) - before; wal == 0 {
				break
			}
		}
		require.Zero(t, wal, d.name)
	}
	require.Zero(t, s.WalRecords("select ratelimit_acquire('p', 'known')"))
	require.NotZero(t, s.WalRecords("select ratelimit_acquire('p', 'other')"))
}

// waitAndLose has a caller with cost 3 of capacity 10, refilled 1 a second, wait for a transaction
// that takes all, and moves the clock on meanwhile.
func waitAndLose(db *kit.TestDB, kind kit.PolicyOption, waited time.Duration) (caller *kit.Session, answer kit.Decision) {
	db.At(kit.T0).Policy("p", 10, 1, time.Second, kind).Take("p", "k", 5)
	holder := db.Begin().Take("p", "k", 5)
	caller = db.Begin()
	call := caller.StartAcquire("p", "k", 3).BlockedBy(holder)
	db.SetClock(kit.T0.Add(waited))
	holder.Execute("commit")
	return caller, call.Answer()
}

func TestDenial_AfterAWaitCountsFromAfterTheWait(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		_, answer := waitAndLose(db, kind, 1500*time.Millisecond)
		require.Equal(t, kit.Denied(1, 1500*time.Millisecond, 8500*time.Millisecond, 10), answer)
	})
	db := kit.NewDB(t)
	defer db.Mutate(kit.Mutation{Pattern: `v_now := clock\(\);( select [^;]* from buckets as b)`, Replacement: "$1"})()
	_, answer := waitAndLose(db, kit.Durable, 1500*time.Millisecond)
	require.Equal(t, kit.Denied(0, 3*time.Second, 10*time.Second, 10), answer, "the clock read before the wait")
}

func TestDenial_DoesNotComeWhenTheCostFitsAfterTheWait(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		_, answer := waitAndLose(db, kind, 3*time.Second)
		require.Equal(t, kit.Allowed(0, 10*time.Second, 10), answer)
		db = kit.NewDB(t)
		_, answer = waitAndLose(db, kind, 3*time.Second-time.Microsecond)
		require.Equal(t, kit.Denied(2, time.Microsecond, 7*time.Second+time.Microsecond, 10), answer)
	})
}

func TestDenial_AfterAWaitKeepsTheRowLock(t *testing.T) {
	t.Parallel()
	for table, kind := range map[string]kit.PolicyOption{"ratelimit.buckets": kit.Durable, "ratelimit.ephemeral_buckets": kit.Ephemeral} {
		db := kit.NewDB(t)
		caller, answer := waitAndLose(db, kind, 0)
		require.False(t, answer.Allowed)
		require.Equal(t, kit.Traces{Xid: true}, caller.Traces(), "locked, not written")
		lock := "select from " + table + " for update nowait"
		_, err := db.Session().Exec(context.Background(), lock)
		require.Equal(t, "55P03", kit.SQLState(err))
		caller.Execute("commit")
		db.Session().Execute(lock)
	}
}

// A request for several buckets waits for the second, and is denied. While its transaction goes on, nothing is taken,
// and others can lock every bucket.
func TestDenial_OfSeveralAfterAWaitLeavesNothing(t *testing.T) {
	t.Parallel()
	for policy, kind := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		for name, r := range map[string]kit.WholeRequest{
			"of two rows":         kit.All(policy, "a", "b"),
			"of one without":      kit.All(policy, "a", "b", "new"),
			"with an idempotency": {Charges: kit.All(policy, "a", "b", "new").Charges, IdempotencyKey: "X"},
		} {
			t.Run(policy+" "+name, func(t *testing.T) {
				db := kit.ParallelDB(t).Policy(policy, 10, 1, kit.ADay, kind).Take(policy, "a", 4).Take(policy, "b", 9)
				holder := db.Begin().Take(policy, "b", 1)
				caller := db.Begin()
				call := caller.StartAll(r).BlockedBy(holder)
				holder.Execute("commit")
				require.False(t, call.Answer().Allowed)
				hasty := db.Hasty()
				for _, table := range kit.StateTables {
					hasty.Execute("select from " + table + " for update nowait")
				}
				for key, left := range map[string]int64{"a": 6, "b": 0, "new": 10} {
					require.Equal(t, left, db.Left(policy, key), key)
				}
				hasty.Execute("begin")
				require.True(t, hasty.Acquire(policy, "new", 10, "X").Allowed)
				hasty.Execute("rollback")
				caller.Execute("commit")
				require.Zero(t, db.Number("select count(*) from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b where key = 'new'"))
			})
		}
	}
}
