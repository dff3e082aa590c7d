package operate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// A pooled database is reached through PgBouncer too, where every transaction may be on another of the few connections to the server.
type pooledDB struct {
	*kit.TestDB
	pooler *pgtest.Pooler
}

// newPooledDB starts a PgBouncer, and lets the test run beside others.
func newPooledDB(t *testing.T) *pooledDB {
	t.Helper()
	db := &pooledDB{kit.ParallelDB(t), pgtest.StartPooler(t)}
	t.Log(db.pooler)
	return db
}

// connect returns a pool of many clients of the pooler.
func (db *pooledDB) connect(t testing.TB, mode pgx.QueryExecMode, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	clients := func(config *pgxpool.Config) {
		config.ConnConfig.DefaultQueryExecMode = mode
		config.MaxConns = 32
	}
	return kit.Pool(t, db.pooler.URL(db.Name), slices.Insert(change, 0, clients)...)
}

// inEachMode runs a test in each of pgx's modes that work through this PgBouncer.
func (db *pooledDB) inEachMode(t *testing.T, test func(t *testing.T, policy string, pool *pgxpool.Pool)) {
	modes := []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeCacheDescribe}
	if db.pooler.Prepares() {
		modes = append(modes, pgx.QueryExecModeCacheStatement)
	}
	for i, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			policy := fmt.Sprint("p", i)
			db.In(t).DefinePolicy(policy, 500, 1, kit.ADay)
			test(t, policy, db.connect(t, mode))
		})
	}
}

// Every way to acquire at once, on one bucket: of 1,000 calls for 500 tokens exactly those that fit pass.
func TestPooler_CountsAreExactUnderLoad(t *testing.T) {
	db := newPooledDB(t)
	db.inEachMode(t, func(t *testing.T, policy string, pool *pgxpool.Pool) {
		combiner := client.NewCombiner(pool)
		defer combiner.Close()
		unflushedCombiner := client.NewCombiner(pool, client.NoFlush())
		defer unflushedCombiner.Close()
		plain, unflushed := client.New(pool), client.New(pool, client.NoFlush())
		ways := []func(id string) (client.Decision, error){
			func(string) (client.Decision, error) { return plain.Acquire(t.Context(), policy, "k") },
			func(string) (client.Decision, error) { return unflushed.Acquire(t.Context(), policy, "k") },
			func(string) (client.Decision, error) { return combiner.Acquire(t.Context(), policy, "k") },
			func(id string) (client.Decision, error) {
				return unflushedCombiner.Acquire(t.Context(), policy, "k", client.IdempotencyKey(id))
			},
			func(id string) (client.Decision, error) { return acquireTwiceKeepOne(t.Context(), pool, policy, id) },
		}
		granted := make([]atomic.Int64, len(ways))
		kit.Crowd(t, 50, func(caller int) error {
			for i := range 20 {
				way := (caller + i) % len(ways)
				d, err := ways[way](fmt.Sprint(caller, " ", i))
				if err != nil {
					return fmt.Errorf("way %d: %w", way, err)
				}
				if d.Allowed {
					granted[way].Add(1)
				}
			}
			return nil
		})
		var sum int64
		for way := range granted {
			require.NotZero(t, granted[way].Load(), "way %d", way)
			sum += granted[way].Load()
		}
		require.EqualValues(t, 500, sum)
		require.Zero(t, db.In(t).Left(policy, "k"))
	})
}

// acquireTwiceKeepOne takes a token in a transaction that is rolled back, and one in the next.
func acquireTwiceKeepOne(ctx context.Context, pool *pgxpool.Pool, policy, id string) (d client.Decision, err error) {
	errRollback := errors.New("rollback")
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// A bucket that nobody else wants: a token on its way back would deny others theirs.
		if _, err := client.New(tx).Acquire(ctx, policy, id, client.IdempotencyKey(id)); err != nil {
			return err
		}
		return errRollback
	})
	if !errors.Is(err, errRollback) {
		return client.Decision{}, err
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		mine, err := client.New(tx).Peek(ctx, policy, id)
		if err != nil || mine.Remaining != mine.Capacity {
			return fmt.Errorf("a rollback left %d tokens: %w", mine.Remaining, err)
		}
		d, err = client.New(tx).Acquire(ctx, policy, "k", client.IdempotencyKey(id))
		return err
	})
	return d, err
}

func TestPooler_CleansUp(t *testing.T) {
	db := newPooledDB(t)
	db.CleanUpAtOnce()
	db.inEachMode(t, func(t *testing.T, policy string, pool *pgxpool.Pool) {
		db := db.In(t)
		db.Policy(policy, 500, 500, kit.Us).Take(policy, "due", 1)
		ctx, cancel := context.WithCancel(t.Context())
		var cleaning sync.WaitGroup
		cleaning.Go(func() { client.New(pool).RunCleanup(ctx, kit.ADay, client.OnError(func(err error) { t.Error(err) })) })
		db.Await(t, kit.Patience, "select not exists (select from ratelimit.buckets)")
		cancel()
		cleaning.Wait()
	})
}

// The connection to the server is lost while a call waits on it: the client asks again, through the pooler's next one.
func TestPooler_ALostConnectionIsNoSecondCharge(t *testing.T) {
	db := newPooledDB(t)
	db.inEachMode(t, func(t *testing.T, policy string, pool *pgxpool.Pool) {
		db := db.In(t)
		db.Acquire(policy, "k", 1)
		holder := db.Begin().Take(policy, "k", 1)
		waiting := `
			select array_agg(a.pid) from pg_stat_activity as a
			 where a.datname = current_database() and a.wait_event_type = 'Lock' and $1 = any (pg_blocking_pids(a.pid))`
		type answer struct {
			client.Decision
			error
		}
		answers := make(chan answer, 1)
		go func() {
			d, err := client.New(pool).Acquire(t.Context(), policy, "k", client.IdempotencyKey("once"))
			answers <- answer{d, err}
		}()
		for try := range 2 {
			db.Await(t, kit.Patience, "select ("+waiting+") is not null", holder.PgConn().PID())
			if try == 0 {
				killed := db.Number("select w.pid from unnest(("+waiting+")) as w (pid), pg_terminate_backend(w.pid)", holder.PgConn().PID())
				db.Await(t, kit.Patience, "select not exists (select from pg_stat_activity where pid = $1)", killed)
			}
		}
		holder.Execute("commit")
		got := <-answers
		require.NoError(t, got.error)
		require.EqualValues(t, 497, got.Remaining)
		require.False(t, got.Replayed)
		require.EqualValues(t, 497, db.Left(policy, "k"))
	})
}

// A setting of one client's call is gone for the next client of the same connection.
func TestPooler_NoFlushLeavesNothingBehind(t *testing.T) {
	db := newPooledDB(t)
	db.inEachMode(t, func(t *testing.T, policy string, pool *pgxpool.Pool) {
		quick := client.NewCombiner(pool, client.NoFlush())
		defer quick.Close()
		var backends sync.Map
		kit.Crowd(t, 32, func(caller int) error {
			for i := range 10 {
				if _, err := quick.Acquire(t.Context(), policy, fmt.Sprint(caller, i)); err != nil {
					return err
				}
				var setting string
				var pid int
				if err := pool.QueryRow(t.Context(), "select current_setting('synchronous_commit'), pg_backend_pid()").Scan(&setting, &pid); err != nil {
					return err
				}
				backends.Store(pid, nil)
				if setting != "on" {
					return fmt.Errorf("synchronous_commit is %s", setting)
				}
			}
			return nil
		})
		servers := 0
		backends.Range(func(any, any) bool { servers++; return true })
		require.LessOrEqual(t, servers, db.pooler.Servers, "32 clients share them")
		require.NotZero(t, servers)
	})
}

// Which of pgx's modes can be used when, between the round trips of one call, another client takes the connection.
func TestPooler_ExecModesWhenTheConnectionChanges(t *testing.T) {
	pooler := newPooledDB(t).pooler
	const unknownStatement = "26000" // invalid_sql_statement_name
	cacheStatement := unknownStatement
	if pooler.Prepares() {
		cacheStatement = ""
	}
	for mode, code := range map[pgx.QueryExecMode]string{
		pgx.QueryExecModeExec:           "",
		pgx.QueryExecModeSimpleProtocol: "",
		pgx.QueryExecModeCacheDescribe:  "",
		pgx.QueryExecModeCacheStatement: cacheStatement,
		pgx.QueryExecModeDescribeExec:   unknownStatement, // its statement has no name: no pooler keeps it
	} {
		t.Run(mode.String(), func(t *testing.T) {
			db := &pooledDB{kit.NewDB(t), pooler} // no connection that another mode left a statement on
			db.DefinePolicy("p", 1000, 1, kit.ADay)
			change := &changer{t: t, pool: db.connect(t, pgx.QueryExecModeSimpleProtocol)}
			pool := db.connect(t, mode, func(config *pgxpool.Config) {
				config.MaxConns = 1
				config.ConnConfig.Tracer = change
			})
			limiter := client.New(pool)
			for i := range 3 {
				d, err := limiter.Acquire(t.Context(), "p", "k")
				change.giveBack()
				if code != "" {
					require.Equal(t, code, kit.SQLState(err), "%v", err)
					require.EqualValues(t, 1000, db.Left("p", "k"))
					return
				}
				require.NoError(t, err)
				require.EqualValues(t, 999-i, d.Remaining)
				change.take() // and between calls
			}
			change.giveBack()
			require.NotZero(t, change.count)
		})
	}
}

// A changer takes the server connection that was used last, which the pooler would lend next.
type changer struct {
	t     *testing.T
	pool  *pgxpool.Pool
	taken []pgx.Tx
	count int
}

func (c *changer) take() {
	tx := kit.NoError(c.pool.Begin(context.Background()))(c.t)
	_, err := tx.Exec(context.Background(), "select") // for the pooler a transaction begins with its first statement
	require.NoError(c.t, err)
	c.taken = append(c.taken, tx)
	c.count++
}

func (c *changer) giveBack() {
	for _, tx := range c.taken {
		require.NoError(c.t, tx.Rollback(context.Background()))
	}
	c.taken = nil
}

func (*changer) TracePrepareStart(ctx context.Context, _ *pgx.Conn, _ pgx.TracePrepareStartData) context.Context {
	return ctx
}

func (c *changer) TracePrepareEnd(context.Context, *pgx.Conn, pgx.TracePrepareEndData) {
	c.take()
}

func (*changer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (*changer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
