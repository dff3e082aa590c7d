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
