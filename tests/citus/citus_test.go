// Package citus tests the package on a Citus cluster.
package citus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations/packages"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// The package distributed over a coordinator and two workers answers as one server does, from each of them.
func TestCitus(t *testing.T) {
	c := kit.NewCitus(t)
	db := c.Create(t, "limits")
	t.Run("installs", func(t *testing.T) { testCitusInstalls(t, c) })
	t.Run("counts exactly while shards move", func(t *testing.T) { testCitusCounts(t, c, db.In(t)) })
	t.Run("each shard has its own keys", func(t *testing.T) { testCitusKeysOfShards(t, c, db.In(t)) })
	t.Run("a program asks the nodes of its keys", func(t *testing.T) { testCitusProgram(t, c, db.In(t)) })
	t.Run("a server asks the nodes of keys", func(t *testing.T) { testCitusServer(t, c, db.In(t)) })
	t.Run("a move waits for who took", func(t *testing.T) { testCitusMoveWaits(t, c, db.In(t)) })
	t.Run("a call that waited for a move", func(t *testing.T) { testCitusWaitedForMove(t, c, db.In(t)) })
	t.Run("a snapshot older than a move", func(t *testing.T) { testCitusOldSnapshot(t, c, db.In(t)) })
	t.Run("batches take shards in order", func(t *testing.T) { testCitusOrder(t, c, db.In(t)) })
	t.Run("a crowd is no deadlock", func(t *testing.T) { testCitusCrowd(t, c, db.In(t)) })
	t.Run("a deadlock ends", func(t *testing.T) { testCitusDeadlock(t, c, db.In(t)) })
	t.Run("overrides are no deadlock", func(t *testing.T) { testCitusOverrides(t, db.In(t)) })
	t.Run("transactions", func(t *testing.T) { testCitusTransactions(t, db.In(t)) })
	still := c.Create(t, "still")
	still.StopClock()
	t.Run("answers as one server does", func(t *testing.T) { testCitusParity(t, still.In(t)) })
	t.Run("cleans up", func(t *testing.T) { testCitusCleansUp(t, still.In(t)) })
	t.Run("cleans up slots", func(t *testing.T) { testCitusCleansUpSlots(t, still.In(t)) })
	t.Run("a shard that comes meanwhile", func(t *testing.T) { testCitusComes(t, c, db.In(t)) })
	t.Run("two nodes commit together", func(t *testing.T) { testCitusTwoNodes(t, c, db.In(t)) })
	t.Run("a worker down", func(t *testing.T) { testCitusWorkerDown(t, c, db.In(t)) })
	t.Run("shards change", func(t *testing.T) { testCitusShardsChange(t, c, db.In(t)) })
}

func testCitusInstalls(t *testing.T, c *kit.Citus) {
	db := c.CreateOn(t, "installs", 2)
	c.Install(t, "installs")
	db.Coordinator().Execute("create table app (id text primary key)")
	db.Coordinator().Execute("select create_distributed_table('app', 'id')") // is not put with ours, which have another collation
	db.Coordinator().DefinePolicy("before", 10, 1, time.Hour)
	require.Equal(t, int64(7), db[1].Acquire("before", "k", 3, "ik").Remaining)
	c.Install(t, "installs") // again
	c.Add(t, "installs", 2)  // a node that is added gets all of it
	db.Coordinator().Execute("select rebalance_table_shards(shard_transfer_mode => 'block_writes')")
	require.True(t, db[2].Acquire("before", "k", 3, "ik").Replayed)
	c.Install(t, "installs") // so that PUBLIC may execute nothing there
	files := kit.NoError(packages.One(os.DirFS("../.."), "citus"))(t)
	require.NotRegexp(t, `[^\x00-\x7f]`, string(files["citus/citus.sql"]), "psql takes the file to be in the encoding of its locale")
	here := []string{"acquire_batch_here", "acquire_all_here", "settle_all_here"}
	for name, f := range kit.Functions {
		if strings.HasPrefix(f.Arguments+" ", "policy key ") && f.Writes != "anything" && name != "enforce" {
			here = append(here, name+"_here")
		}
	}
	for n, node := range db {
		require.ElementsMatch(t, here, node.Strings(`
			select p.proname::text
			  from pg_dist_object as o
			  join pg_proc as p on p.oid = o.objid and o.classid = 'pg_proc'::regclass
			 where o.distribution_argument_index is not null and o.force_delegation
			 order by 1`), "node %d: these alone may be distributed by an argument: with a null there, Citus crashes", n)
		require.Equal(t, db.Coordinator().Strings(publicFunctions), node.Strings(publicFunctions), "node %d", n)
	}
	db.Coordinator().DefinePolicy("p", 10, 1, time.Hour)
	require.Equal(t, int64(7), db[1].Acquire("p", "k", 3).Remaining)
	c.Make(t, "uninstall-citus", "installs")
	for n, node := range db {
		require.Empty(t, node.Strings(`
			select p.oid::regprocedure::text from pg_proc as p where p.proname ~ '^ratelimit_' union all
			 select n.nspname from pg_namespace as n where n.nspname = 'ratelimit'`), "node %d", n)
	}
	c.Install(t, "installs")
	db.Coordinator().DefinePolicy("p", 10, 1, time.Hour)
	require.Equal(t, int64(7), db[2].Acquire("p", "k", 3).Remaining)
}

const publicFunctions = `
	select format('%s %s %s %s', p.oid::regprocedure, p.proacl, p.prosecdef, md5(p.prosrc)) from pg_proc as p
	 where p.proname ~ '^ratelimit_' or p.pronamespace = 'ratelimit'::regnamespace and p.proname ~ '_here$' order by 1`

// Callers of all nodes share buckets, one of which moves between the workers. In the end exactly what the buckets held was granted.
func testCitusCounts(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	const capacity, callers, keys = 200, 4, 3
	for name, durability := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		db.Coordinator().DefinePolicy(name, capacity, 0, time.Hour, durability)
	}
	var grants [2][keys]atomic.Int64
	var failed atomic.Int64
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var group errgroup.Group
	for n, node := range db {
		for caller := range callers {
			group.Go(func() error {
				denied := map[int]bool{}
				for i := caller; len(denied) < 2*keys; i++ {
					if denied[i%(2*keys)] {
						continue
					}
					policy, key := []string{"durable", "ephemeral"}[i%2], i/2%keys
					var allowed bool
					sql := "select allowed from ratelimit_acquire($1, $2)"
					if n == 0 && caller == 0 {
						sql = "select allowed from ratelimit_acquire_many(array[$1], array[$2])"
					}
					err := node.Pool.QueryRow(ctx, sql, policy, fmt.Sprint("hot ", key)).Scan(&allowed)
					switch {
					case kit.HasMoved(err):
						if failed.Add(1) > 5000 {
							return err
						}
					case err != nil:
						return err
					case allowed:
						grants[i%2][key].Add(1)
					default:
						denied[i%(2*keys)] = true
					}
				}
				return nil
			})
		}
	}
	moves := db.MovesDuring(c, func() string { return "hot 0" }, func() { _ = group.Wait() })
	require.NoError(t, group.Wait())
	for n := range 2 {
		for key := range keys {
			require.Equal(t, int64(capacity), grants[n][key].Load(), "bucket %d of policy %d", key, n)
		}
	}
	t.Logf("%d moves; %d of %d calls failed, and took nothing", moves, failed.Load(), 2*keys*capacity)
}

// The rows of a shard's tables are of keys that Citus finds there, and the functions find the shards that Citus finds.
func testCitusKeysOfShards(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("spread", 10, 0, time.Hour)
	for n, node := range db {
		node.Execute("select ratelimit_acquire('spread', k || $1, 1, 'ik') from generate_series(1, 40) as k", fmt.Sprint(" of ", n))
		node.Execute("select count(*) from ratelimit_acquire_many(array_fill('spread'::text, array[40]), array(select k || $1 from generate_series(1, 40) as k))", fmt.Sprint(" of many of ", n))
		require.Zero(t, node.Number(`select count(*) from generate_series(1, 1000) as k
			where ratelimit.shard_of(k::text) is distinct from get_shard_id_for_distribution_column('ratelimit.buckets', k::text)`), "node %d", n)
	}
	for n := range 20 {
		node, _ := db.ShardOf(c, fmt.Sprint(n))
		require.Equal(t, c.NodeName(node)+":5432", kit.One[string](t, db[n%3].Pool, "select ratelimit_node($1)", fmt.Sprint(n)))
	}
	for table, want := range map[string]int64{"buckets": 240, "idempotency_keys": 120} {
		require.Equal(t, want, db.Coordinator().Number(`select sum(result::bigint) from run_command_on_placements($1, $$
			select count(*) from %1$s as r
			 where r.policy_id = (select p.id from ratelimit.policies as p where p.name = 'spread')
			   and ratelimit.shard_of(r.key) = (select b.shardid from pg_dist_shard as b join pg_dist_shard as s using (shardminvalue)
			                                     where b.logicalrelid = 'ratelimit.buckets'::regclass and s.shardid = substring('%1$s' from '\d+$')::bigint)
			$$)`, "ratelimit."+table), table)
	}
}

// A client.Citus sends a call to the node that has the key, also after the key has moved, and through the coordinator where it has no
// connection to that node.
func testCitusProgram(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("program", 10, 0, time.Hour)
	var calls [3]atomic.Int64 // of the nodes
	citus := kit.NoError(client.NewCitus(t.Context(), &countedPool{db.Coordinator().Pool, &calls[0]}, func(_ context.Context, host string, port int) (client.Pool, error) {
		for n := range db {
			if c.NodeName(n) == host && port == 5432 {
				return &countedPool{kit.NoError(pgxpool.NewWithConfig(t.Context(), db[n].Pool.Config()))(t), &calls[n]}, nil
			}
		}
		return nil, fmt.Errorf("no node is %s:%d", host, port)
	}))(t)
	asks := func(key string) (node int) {
		for n := range calls {
			calls[n].Store(0)
		}
		require.True(t, kit.NoError(citus.Acquire(t.Context(), "program", key, client.Cost(0)))(t).Allowed)
		for calls[node].Load() == 0 {
			node++
		}
		return node
	}
	for n := range 60 {
		key := strings.Repeat("é", n%30) + fmt.Sprint(n)
		node, _ := db.ShardOf(c, key)
		require.Equal(t, node, asks(key), key)
	}
	key, shard, other := keyOn(c, db, 1, "program ")
	require.Equal(t, int64(7), kit.NoError(citus.AcquireAll(t.Context(), []client.Charge{{Policy: "program", Key: key, Cost: client.Cost(3)}}))(t).Remaining)
	db.Coordinator().Execute(c.Move(shard, 1, other))
	require.Eventually(t, func() bool { return asks(key) == other }, kit.Patience, 10*kit.Ms)
	db.Coordinator().DefinePolicy("program", 20, 0, time.Hour)
	require.Equal(t, int64(7), kit.NoError(citus.On(key).Peek(t.Context(), "program", key))(t).Remaining)
	citus.Close()
	moveBack(c, db, shard, other)

	nowhere := db.Coordinator().Pool.Config()
	nowhere.ConnConfig.Host = "/nowhere"
	citus = kit.NoError(client.NewCitus(t.Context(), db.Coordinator().Pool, func(context.Context, string, int) (client.Pool, error) {
		return pgxpool.NewWithConfig(t.Context(), nowhere)
	}))(t)
	defer citus.Close()
	require.Equal(t, int64(6), kit.NoError(citus.Acquire(t.Context(), "program", key))(t).Remaining)
}

// A server with the URL of the coordinator does so, too.
func testCitusServer(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("served", 10, 0, time.Hour)
	address := "127.0.0.1:" + pgtest.FreePort(t)
	server := exec.CommandContext(t.Context(), kit.Built(t, "server/cmd/pgratelimit"), "serve")
	server.Env = append(os.Environ(), "DATABASE_URL="+c.Nodes[0].URL(db[0].Name), "HTTP_ADDR="+address, "GRPC_ADDR=off", "CALL_TIMEOUT=1m")
	var log bytes.Buffer
	server.Stderr = &log
	require.NoError(t, server.Start())
	defer func() {
		require.NoError(t, errors.Join(server.Process.Signal(os.Interrupt), server.Wait()), "%s", &log)
	}()
	require.Eventually(t, func() bool {
		response, err := http.Get("http://" + address + "/healthz")
		return err == nil && response.Body.Close() == nil && response.StatusCode == http.StatusOK
	}, kit.Patience, 10*kit.Ms)
	for worker := 1; worker <= 2; worker++ {
		key, _, _ := keyOn(c, db, worker, "served ")
		response, err := http.Post("http://"+address+"/v1/acquire", "", strings.NewReader(fmt.Sprintf(`{"policy":"served","key":%q,"cost":3}`, key)))
		require.NoError(t, err)
		require.Contains(t, string(kit.NoError(io.ReadAll(response.Body))(t)), `"remaining":7`)
		require.NoError(t, response.Body.Close())
		require.Equal(t, int64(1), db[worker].Number("select count(*) from pg_stat_activity where application_name = 'pgratelimit'"), "worker %d", worker)
	}
}

type countedPool struct {
	*pgxpool.Pool
	calls *atomic.Int64
}

func (p *countedPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	p.calls.Add(1)
	return p.Pool.QueryRow(ctx, sql, args...)
}

// keyOn is a key of a worker, its shard, and the other worker.
func keyOn(c *kit.Citus, db kit.CitusDB, worker int, prefix string) (key string, shard int64, other int) {
	for n := 0; ; n++ {
		key = fmt.Sprint(prefix, n)
		if node, shard := db.ShardOf(c, key); node == worker {
			return key, shard, 3 - node
		}
	}
}

// What a transaction took that was open when a move began goes with the shard.
func testCitusMoveWaits(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("waits", 10, 0, time.Hour)
	for _, entry := range []int{1, 0, 2} { // the node of the key, and others
		key, shard, to := keyOn(c, db, 1, fmt.Sprint("waits ", entry, " "))
		taker := db[entry].Begin().Take("waits", key, 3)
		moving := db.Coordinator().Session().StartExec(c.Move(shard, 1, to))
		require.True(t, waitsOn(db, moving, 1, "locktype = 'advisory' and mode = 'ExclusiveLock'"), "the move did not wait")
		taker.Execute("commit")
		_, err := moving.Result()
		require.NoError(t, err)
		require.Equal(t, int64(7), db[entry].Must(kit.Peek(db[entry].Pool, "waits", key, 1)).Remaining, "through node %d", entry)
		moveBack(c, db, shard, to)
	}
}

// waitsOn returns true when as many sessions of a node wait for such locks, and false when the call is over and they do not.
func waitsOn(db kit.CitusDB, p *kit.Pending, sessions int64, lock string) bool {
	for over := false; ; time.Sleep(kit.Ms) {
		for _, node := range db {
			if node.Number("select count(*) from pg_locks where not granted and "+lock) >= sessions {
				return true
			}
		}
		if over {
			return false
		}
		select {
		case <-p.Done:
			over = true
		default:
		}
	}
}

// moveBack moves a shard to worker 1, once Citus has dropped what was left there.
func moveBack(c *kit.Citus, db kit.CitusDB, shard int64, from int) {
	db.DropWhatMovesLeft()
	db.Coordinator().Execute(c.Move(shard, from, 1))
}

// A call that began before a move ended takes nothing from what the move left behind.
func testCitusWaitedForMove(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("waited", 10, 0, time.Hour)
	key, shard, to := keyOn(c, db, 1, "waited ")
	db[1].Take("waited", key, 1)
	reader := db[1].Begin()
	reader.Execute(fmt.Sprintf("select from ratelimit.buckets_%d", shard)) // so that the move leaves its table behind
	mover := db.Coordinator().Begin().Execute(c.Move(shard, 1, to))
	taking := db[1].Session().StartAcquire("waited", key, 3)
	require.False(t, taking.AwaitLockOrEnd(), "the call does not wait for the move")
	mover.Execute("commit")
	_, err := taking.Result()
	require.True(t, kit.HasMoved(err), "%v", err)
	require.Equal(t, int64(9), db[1].Must(kit.Peek(db[1].Pool, "waited", key, 1)).Remaining)
	reader.Execute("commit")
	moveBack(c, db, shard, to)
}

// A transaction of which the snapshot is older than a move takes nothing from what the move left behind.
func testCitusOldSnapshot(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("old", 10, 0, time.Hour)
	key, shard, to := keyOn(c, db, 1, "old ")
	db[1].Take("old", key, 1)
	reader := db[1].Begin()
	reader.Execute(fmt.Sprintf("select from ratelimit.buckets_%d", shard))
	old := db[1].Session().Execute("begin isolation level repeatable read").Execute("select count(*) from pg_dist_placement")
	db.Coordinator().Execute(c.Move(shard, 1, to))
	_, err := kit.Acquire(old, "old", key, 3)
	require.True(t, kit.HasMoved(err), "%v", err)
	require.Equal(t, int64(9), db[1].Must(kit.Peek(db[1].Pool, "old", key, 1)).Remaining)
	old.Execute("rollback")
	reader.Execute("commit")
	moveBack(c, db, shard, to)
}

// A batch takes the tokens of the shard with the lowest number first, whatever its keys are ordered by.
func testCitusOrder(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("order", 100, 0, time.Hour)
	low, first, _ := keyOn(c, db, 1, "order ")
	high, last, _ := keyOn(c, db, 2, "order ")
	at := 2
	if first > last {
		low, high, at = high, low, 1
	}
	for n, node := range db {
		for _, keys := range []string{low + "," + high, high + "," + low} {
			holder := node.Begin().Take("order", low, 1)
			batch := node.Session().StartExec("select ratelimit_acquire_packed('{order,order}', '{" + keys + "}')")
			require.True(t, waitsOn(db, batch, 1, "locktype = 'transactionid'"), "through node %d: the batch did not wait", n)
			_, err := kit.Acquire(db[at].Hasty(), "order", high, 1)
			require.NoError(t, err, "through node %d: %s", n, keys)
			holder.Execute("rollback")
			_, err = batch.Result()
			require.NoError(t, err)
		}
	}
}

// Callers who wait for one bucket are not taken for a deadlock, whatever nodes they called.
func testCitusCrowd(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("crowd", 10, 0, time.Hour)
	key, _, _ := keyOn(c, db, 1, "crowd ")
	db[1].Take("crowd", key, 1)
	holder := db[1].Begin().Take("crowd", key, 1)
	var crowd []*kit.Pending
	for n, node := range db { // the second waits for the first, and the third for both
		crowd = append(crowd, node.Session().StartAcquire("crowd", key, 1))
		require.True(t, waitsOn(db[1:2], crowd[n], int64(n)+1, "locktype in ('transactionid', 'tuple')"))
	}
	for n, node := range db {
		require.False(t, kit.One[bool](t, node.Pool, "select check_distributed_deadlocks()"), "node %d", n)
	}
	holder.Execute("commit")
	for _, call := range crowd {
		require.True(t, call.Answer().Allowed)
	}
}

// Callers of all nodes change policies and overrides at once, and none is in a deadlock.
func testCitusOverrides(t *testing.T, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("overridden", 10, 1, time.Hour)
	kit.Crowd(t, 2*len(db), func(caller int) error {
		for range 5 {
			for _, sql := range []string{
				"select ratelimit_override('overridden', $1, 5)", "select ratelimit_remove_override('overridden', $1)",
				"select ratelimit_define_policy('overridden', 10 + length($1))",
			} {
				if err := kit.ErrorOf(db[caller%len(db)].Pool.Exec(t.Context(), sql, fmt.Sprint(caller))); err != nil {
					return fmt.Errorf("%s: %w", sql, err)
				}
			}
		}
		return nil
	})
}

// Transactions that wait for each other on different nodes are a deadlock that Citus ends, although both began where their key is.
func testCitusDeadlock(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("deadlock", 10, 0, time.Hour)
	one, _, _ := keyOn(c, db, 1, "deadlock ")
	two, _, _ := keyOn(c, db, 2, "deadlock ")
	first, second := db[1].Begin().Take("deadlock", one, 3), db[2].Begin().Take("deadlock", two, 3)
	calls := []*kit.Pending{first.StartAcquire("deadlock", two, 3), second.StartAcquire("deadlock", one, 3)}
	left, ended := int64(10), 0
	for _, call := range calls {
		if _, err := call.Result(); err == nil {
			left -= 3
		} else {
			require.Equal(t, "40P01", kit.SQLState(err))
			ended++
		}
		call.Session.Execute("commit")
	}
	require.NotZero(t, ended, "the nodes look at the same time, and each can end one")
	for _, key := range []string{one, two} {
		require.Equal(t, left, db[0].Must(kit.Peek(db[0].Pool, "deadlock", key, 1)).Remaining)
	}
}

// After the shards have other numbers, calls fail and count nothing until the package is installed again.
func testCitusShardsChange(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("changed", 10, 0, time.Hour)
	for _, key := range []string{"a", "b", "c", "d"} {
		db.Coordinator().Take("changed", key, 3, "ik")
	}
	left := int64(7)
	for _, change := range []string{
		"select alter_distributed_table('ratelimit.buckets', shard_count => 3, cascade_to_colocated => true)",
		`select citus_split_shard_by_split_points(s.shardid, array[((s.shardminvalue::bigint + s.shardmaxvalue::bigint) / 2)::text],
			(select array_agg(n.nodeid) from pg_dist_node as n where n.groupid > 0), 'block_writes')
		   from pg_dist_shard as s where s.shardid = ratelimit.shard_of('a')`,
	} {
		db.Coordinator().Execute(change)
		for n, node := range db {
			for _, sql := range []string{
				"select ratelimit_acquire('changed', 'a')", "select ratelimit_acquire_many('{changed,changed}', '{a,b}')",
				"select ratelimit_acquire_all('{changed}', '{a}')", "select ratelimit_settle('changed', 'a', 'ik', 1)", "select ratelimit_peek('changed', 'a')",
			} {
				_, err := node.Pool.Exec(t.Context(), sql)
				refused := kit.PgError(err)
				require.NotNil(t, refused, "node %d: %s: %v", n, sql, err)
				require.Equal(t, "55000 the shards have changed", refused.Code+" "+refused.Message, "node %d: %s", n, sql)
				require.Contains(t, refused.Hint, "make install-citus")
			}
		}
		c.Install(t, "limits")
		for n, node := range db {
			for _, key := range []string{"a", "b", "c", "d"} {
				require.Equal(t, left, node.Must(kit.Peek(node.Pool, "changed", key, 1)).Remaining, "node %d", n)
				require.True(t, node.Acquire("changed", key, 3, "ik").Replayed)
				node.Take("changed", key, 1)
			}
			left--
		}
	}
}

func testCitusTransactions(t *testing.T, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("tx", 10, 0, time.Hour)
	for n, node := range db {
		keys := []string{fmt.Sprint("a", n), fmt.Sprint("b", n), fmt.Sprint("c", n), fmt.Sprint("d", n)} // on both workers
		remaining := func(want int64) {
			for _, key := range keys {
				require.Equal(t, want, node.Must(kit.Peek(node.Pool, "tx", key, 1)).Remaining, key)
			}
		}
		all := func(s *kit.Session) {
			for _, key := range keys {
				s.Acquire("tx", key, 2)
			}
		}
		s := node.Begin()
		all(s)
		s.Execute("rollback")
		remaining(10)
		s.Execute("begin")
		all(s)
		s.Execute("savepoint one")
		all(s)
		s.Execute("rollback to one")
		all(s)
		s.Execute("commit")
		remaining(6)
		// A pipeline is one transaction without BEGIN: a statement that fails takes back those before it.
		var batch pgx.Batch
		for _, key := range keys {
			batch.Queue("select ratelimit_acquire('tx', $1, 2)", key)
		}
		batch.Queue("select 1 / 0")
		require.Equal(t, "22012", kit.SQLState(node.Pool.SendBatch(t.Context(), &batch).Close()))
		remaining(6)
		// A statement of many calls takes back what it took when it fails.
		_, err := node.Pool.Exec(t.Context(), "select (ratelimit_acquire('tx', k.key, 2)).allowed, 1 / (1 - k.n) from unnest($1::text[]) with ordinality as k (key, n)", keys)
		require.Equal(t, "22012", kit.SQLState(err))
		remaining(6)
		_, err = node.Pool.Exec(t.Context(), "do $$ begin perform ratelimit_acquire('tx', 'a"+fmt.Sprint(n)+"', 2); raise exception 'no'; exception when others then null; end $$")
		require.NoError(t, err)
		remaining(6)
		// A denial writes nothing, on one node after the other.
		s.Execute("begin read only")
		for _, key := range slices.Concat(keys, keys) {
			require.False(t, kit.NoError(kit.Acquire(s, "tx", key, 7))(t).Allowed)
		}
		s.Execute("rollback")
		// Others wait for who has a bucket locked, and the wait ends with its transaction.
		other := db[(n+1)%3].Session()
		s.Execute("begin")
		s.Acquire("tx", keys[0], 6)
		waiting := other.StartAcquire("tx", keys[0], 6)
		s.Execute("rollback")
		<-waiting.Done
		require.NoError(t, waiting.Err)
		require.True(t, waiting.Decision.Allowed)
	}
}

// A call that does not see its shard here has Citus call the function of the node that has it. Meanwhile that may be this node: then the
// call is to be repeated.
func testCitusComes(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("comes", 10, 0, time.Hour)
	here, shard, _ := keyOn(c, db, 1, "comes ")
	elsewhere, _, _ := keyOn(c, db, 2, "comes ")
	for _, call := range []string{
		"acquire_here('comes', v_key, 1, null)",
		"acquire_all_here(v_key, '{comes}', array[v_key], null, null)",
		fmt.Sprintf("acquire_batch_here(v_ring, %d, '{comes}', array[v_key], '{1}', null, null)", shard),
	} {
		s := db[1].Begin().Take("comes", elsewhere, 1)
		_, err := s.StartExec(fmt.Sprintf(`do $$
			declare
				v_key  text collate "C" := '%s';
				v_ring text collate "C" := ratelimit.ring_of(%d);
			begin
				perform d.* from ratelimit.%s as d;
			end $$`, here, shard, call)).Result()
		require.True(t, kit.HasMoved(err), "%s: %v", call, err)
		s.Execute("rollback")
	}
}

// What a transaction took on two nodes is kept on both or on neither, when one is killed while it prepares, or when the other has decided.
func testCitusTwoNodes(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("two", 100, 0, time.Hour)
	one, _, _ := keyOn(c, db, 1, "two ")
	two, _, _ := keyOn(c, db, 2, "two ")
	left := int64(100)
	for _, entry := range db[:2] {
		for _, keys := range [][]string{{one, two}, {two, one}} {
			for _, waits := range []*kit.TestDB{db[2], entry} {
				taker := entry.Begin().Take("two", keys[0], 1).Take("two", keys[1], 1)
				holdCommits(waits)
				commit := taker.StartExec("commit")
				waits.Await(t, kit.Patience, "select count(*) = 2 from pg_stat_activity where wait_event = 'SyncRep'")
				waits.Execute("alter system reset synchronous_standby_names")
				require.NoError(t, c.Nodes[2].Stop(t.Context(), true))
				if waits == entry {
					left--
					waits.Execute("select pg_reload_conf()")
				}
				_, err := commit.Result()
				require.Equal(t, waits == entry, err == nil, err)
				require.NoError(t, c.Nodes[2].Start(t.Context()))
				for _, node := range db {
					node.Pool.Reset() // sessions there have connections to the node that was killed
				}
				entry.Session().Execute("select recover_prepared_transactions()")
				require.Equal(t, []int64{left, left}, []int64{db[2].Left("two", one), db[2].Left("two", two)}, "through %s, which commits: %v", entry.URL, err)
			}
		}
	}
}

// holdCommits has every commit on a node wait, once it is written, and one that waits already.
func holdCommits(db *kit.TestDB) {
	db.Execute("alter system set synchronous_standby_names = 'nobody'")
	db.Execute("select pg_reload_conf()")
	for held := false; !held; {
		probe := db.Session().StartExec("select lo_create(0)")
		for over := false; !held && !over; held = db.Number("select count(*) from pg_stat_activity where wait_event = 'SyncRep'") > 0 {
			select {
			case <-probe.Done:
				over = true
			case <-time.After(kit.Ms):
			}
		}
	}
}

// A conversation is what is said to one server and to each node of the cluster. {key} is another key for each of them.
var conversation = func() []string {
	said := strings.Split(strings.ReplaceAll(strings.TrimSpace(`
select ratelimit_define_policy('p', 10, 1, '1 h') ;; select ratelimit_define_policy('q', 5, 1, '1 h', durable => false)
select ratelimit_define_policy('s', 1, 1, '1 h', shadow => true) ;; select ratelimit_define_policy('step', 9, 3, '1 h', stepped => true)
select ratelimit_define_policy('p', durable => false) ;; select ratelimit_define_policy(null, 1, 1, '1 h')
select ratelimit_define_policy('bad', 0, 1, '1 h') ;; select * from ratelimit_policies() ;; select * from ratelimit_acquire('p', '{key}')
select * from ratelimit_acquire('p', '{key}', 3, 'ik') ;; select * from ratelimit_acquire('p', '{key}', 3, 'ik')
select * from ratelimit_acquire('p', '{key}', 4, 'ik') ;; select * from ratelimit_acquire('p', '{key}', 7)
select * from ratelimit_acquire('p', '{key}', 11) ;; select * from ratelimit_acquire('p', '{key}', 0)
select * from ratelimit_acquire('p', '{key}', -1) ;; select * from ratelimit_acquire('step', '{key}', 4)
select * from ratelimit_acquire('s', '{key}', 1) ;; select * from ratelimit_acquire('s', '{key}', 1)
select * from ratelimit_acquire('none', '{key}') ;; select * from ratelimit_acquire('p', '') ;; select * from ratelimit_acquire('p', repeat('x', 513))
select v.key, ratelimit_acquire('p', v.key) from (values ('{key} v')) as v (key)
select v.key, ratelimit_acquire('p', v.key) from (values ('{key} v'), (null)) as v (key)
select d.* from (values ('{key} v')) as v (key), ratelimit_acquire('p', v.key) as d
select d.* from generate_series(1, 3) as n, ratelimit_acquire('p', '{key} n' || n) as d
select d.* from generate_series(1, 3) as n, ratelimit_acquire('p', '{key} m') as d ;; select ratelimit_acquire('p', (select '{key} v'))
select (select ratelimit_acquire('p', '{key} v')) ;; select ratelimit_acquire('p', (select null::text))
select ratelimit_acquire((select null::text), '{key}') ;; with d as materialized (select ratelimit_acquire('p', '{key} w') as d) select d from d
select (ratelimit_acquire('p', '{key} w')).remaining ;; select ratelimit_acquire(policy => 'p', key => '{key} w', cost => 2)
select ratelimit_acquire('p', case when (ratelimit_peek('p', '{key} w')).allowed then '{key} w' end)
do $$ declare d record; begin select * into d from ratelimit_acquire('p', '{key} w', 2); if d.remaining <> 2 then raise 'remaining %', d.remaining; end if; end $$
select * from ratelimit_peek('p', '{key} w') ;; select * from ratelimit_peek('p', '{key} w', 9) ;; select * from ratelimit_peek('p', '{key} new', 11)
select * from ratelimit_acquire('q', '{key}', 3, 'ik') ;; select * from ratelimit_acquire('q', '{key}', 3, 'ik')
select * from ratelimit_acquire('q', '{key}', 3) ;; select * from ratelimit_refund('q', '{key}', 2)
select * from ratelimit_refund('q', '{key}', 100) ;; select * from ratelimit_refund('q', '{key} new', 1)
select * from ratelimit_pause('q', '{key} paused', '1 h') ;; select * from ratelimit_refund('q', '{key} paused', 2) ;; select ratelimit_pause('p', '{key}', '0')
select * from ratelimit_refund('q', '{key}', -1) ;; select * from ratelimit_charge('p', '{key} c', 20, 'ck')
select * from ratelimit_charge('p', '{key} c', 20, 'ck') ;; select * from ratelimit_charge('p', '{key} c', 21, 'ck')
select * from ratelimit_charge('q', '{key} c', 20) ;; select * from ratelimit_charge('q', '{key} c', 0)
select * from ratelimit_settle('p', '{key} c', 'ck', 5) ;; select * from ratelimit_settle('p', '{key} c', 'ck', 5)
select * from ratelimit_settle('p', '{key} c', 'ck', 6) ;; select * from ratelimit_settle('p', '{key} c', 'none', 6)
select * from ratelimit_settle('s', '{key} c', 'none', 6) ;; select * from ratelimit_settle('p', '{key} c', null, 6)
select * from ratelimit_reserve('p', '{key} r', '2 h', 10) ;; select * from ratelimit_reserve('p', '{key} r', '2 h', 2, 'rk')
select * from ratelimit_reserve('p', '{key} r', '2 h', 2, 'rk') ;; select * from ratelimit_acquire('p', '{key} r', 2, 'rk')
select * from ratelimit_reserve('p', '{key} r', '2 h', 1) ;; select * from ratelimit_reserve('p', '{key} r', '2 h', 11)
select * from ratelimit_reserve('p', '{key} r', '-1 h', 1) ;; select * from ratelimit_acquire_up_to('p', '{key} u', 20, 1, 'uk')
select * from ratelimit_acquire_up_to('p', '{key} u', 20, 1, 'uk') ;; select * from ratelimit_acquire_up_to('p', '{key} u', 20, 1)
select * from ratelimit_acquire_up_to('p', '{key} u', 1, 2) ;; select ratelimit_reset('p', '{key} u') ;; select * from ratelimit_peek('p', '{key} u')
select * from ratelimit_enforce('p', '{key} e', 10) ;; select * from ratelimit_enforce('p', '{key} e', 1)
select * from ratelimit_enforce('p', null, 1) ;; select ratelimit_override('p', '{key} o', 100) ;; select * from ratelimit_acquire('p', '{key} o', 20)
select * from ratelimit_acquire_many(array['p', 'p'], array['{key} o', '{key} o'], array[20, 1]) ;; select * from ratelimit_overrides('p', '{key} o')
select ratelimit_override('p', '{key} o', expires_at => '2000-01-01') ;; select ratelimit_remove_override('p', '{key} o')
select ratelimit_remove_override('p', '{key} o')
select * from ratelimit_acquire_many(array['p','p','q','none','p','p',null,'q','s','s'], array['{key} 1','{key} 2','{key} 1','{key} 1','{key} 1',null,'{key} x','','{key} s','{key} s'], array[1,11,2,1,9,1,1,1,1,1])
select * from ratelimit_acquire_many(array['p','p','p'], array['{key} i','{key} i','{key} i'], array[1,1,2], array['x','x','x'])
select * from ratelimit_acquire_many(array['p','p','p'], array['{key} i','{key} i','{key} j'], array[1,1,2], array['x','y','x'])
select * from ratelimit_acquire_many(array['none','p'], array['{key} i2','{key} i3'], array[1,-1])
select * from ratelimit_acquire_many(array['p','p'], array['{key} i']) ;; select * from ratelimit_acquire_many(null, array['{key} i'])
select * from ratelimit_acquire_many('{}', '{}') ;; select * from ratelimit_acquire_packed(array['p'], array['{key} pk'], array[1])
select * from ratelimit_acquire_packed(array['p','q'], array['{key} pk','{key} pk'], array[1,9], array[2])
select * from ratelimit_acquire_all(array['p','q'], array['{key} a','{key} a'], array[1,2])
select * from ratelimit_acquire_all(array['p','q'], array['{key} a','{key} a'], array[1,4])
select * from ratelimit_acquire_all(array['p','q','p'], array['{key} a','{key} a','{key} a'], array[1,2,3], 'k')
select * from ratelimit_acquire_all(array['p','q','p'], array['{key} a','{key} a','{key} a'], array[1,2,3], 'k')
select * from ratelimit_acquire_all(array['p','q','p'], array['{key} a','{key} a','{key} a'], array[1,2,4], 'k')
select * from ratelimit_acquire_all(array['p','none'], array['{key} a','{key} a'])
select * from ratelimit_acquire_all(array['p',null], array['{key} a','{key} a'])
select * from ratelimit_acquire_all(array['p','q'], array['{key} a',null]) ;; select * from ratelimit_acquire_all('{}', '{}')
select * from ratelimit_acquire_many(array['p','q','p','q'], array['{key} b','{key} b','{key} g','{key} g'], array[1,2,1,9], sizes => array[2,2,0])
select * from ratelimit_status('p', 3) ;; select * from ratelimit_status('none') ;; select * from ratelimit_shard() ;; select ratelimit_version() ;; select ratelimit_http_fields('p', d) from ratelimit_peek('p', '{key} full') as d
begin read only; select * from ratelimit_peek('p', '{key} ro'); select * from ratelimit_acquire('p', '{key} ro', 11); select * from ratelimit_acquire('p', '{key} ro'); rollback
begin; select * from ratelimit_acquire('p', '{key} t1'); select * from ratelimit_acquire('p', '{key} t2'); savepoint s; select * from ratelimit_acquire('p', '{key} t1', 4); rollback to s; select * from ratelimit_acquire('p', '{key} t1', 2); commit
select ratelimit_define_policy('month', 10, period => '1 month') ;; select ratelimit_define_policy('day', 10, period => '1 day', durable => false)
select * from ratelimit_acquire('month', '{key}', 3, 'ik') ;; select * from ratelimit_acquire('month', '{key}', 3, 'ik') ;; select * from ratelimit_acquire('day', '{key}', 11)
select ratelimit_override('month', '{key}', 20, time_zone => 'Europe/Berlin', anchor => '2024-01-31') ;; select * from ratelimit_acquire_up_to('month', '{key}', 30)
select * from ratelimit_acquire_many(array['month','day','day','p'], array['{key}','{key}','{key} y','{key} y'], array[1,4,5,1], array['a','b','c','d'])
select * from ratelimit_acquire_all(array['day','month'], array['{key}','{key}'], array[6,1]) ;; select * from ratelimit_charge('day', '{key}', 20, 'ck')
select * from ratelimit_settle('day', '{key}', 'ck', 2) ;; select * from ratelimit_settle('month', '{key} z', 'none', 2) ;; select * from ratelimit_charge('month', '{key} z', 2)
select * from ratelimit_refund('day', '{key}', 3) ;; select * from ratelimit_reserve('day', '{key}', '1 day', 9) ;; select * from ratelimit_peek('month', '{key}', 5)
select * from ratelimit_acquire_all(array['day','month'], array['{key} n','{key} n'], array[6,1], 'k') ;; select * from ratelimit_overrides('month', '{key}')
select * from ratelimit_settle_all(array['month','day'], array['{key} n','{key} n'], 'k', array[2,9]) ;; select * from ratelimit_settle_all(array['month','day'], array['{key} n','{key} n'], 'k', array[2,9])
select * from ratelimit_settle_all(array['month','day','p'], array['{key} n','{key} n','{key} n'], 'k', array[2,9,1]) ;; select * from ratelimit_settle_all(array['month'], array['{key} n'], 'k', array[3])
select key, idempotency_key, cost, settled from ratelimit_grants('month', '{key} n') ;; select ratelimit_define_policy('month', history => '1 year')
select * from ratelimit_usage('day', '{key} n')
select * from ratelimit_status('month', 9, '{key}') ;; select * from ratelimit_policies() ;; select * from ratelimit_enforce('month', '{key}', 1)
select ratelimit_define_policy('jobs', 5, lease => '1 hour') ;; select ratelimit_define_policy('streams', 5, lease => '1 day', durable => false)
select * from ratelimit_hold('jobs', '{key}', 'a', 2) ;; select * from ratelimit_hold('jobs', '{key}', 'b', 3) ;; select * from ratelimit_hold('jobs', '{key}', 'c')
select * from ratelimit_hold('jobs', '{key}', 'a', 2) ;; select * from ratelimit_hold('jobs', '{key}', 'a', 1) ;; select * from ratelimit_hold('streams', '{key}', 'a', 6)
select ratelimit_renew('jobs', '{key}', 'a') ;; select ratelimit_renew('jobs', '{key}', 'x') ;; select * from ratelimit_peek('jobs', '{key}', 4)
select ratelimit_release('jobs', '{key}', 'b') ;; select ratelimit_release('jobs', '{key}', 'b') ;; select * from ratelimit_holders('jobs', '{key}')
select ratelimit_override('jobs', '{key}', 1, expires_at => '2100-01-01Z', lease => '1 minute') ;; select * from ratelimit_hold('jobs', '{key}', 'd')
select * from ratelimit_hold('streams', '{key}', 'a', 5) ;; select * from ratelimit_holders('streams', '{key}') ;; select * from ratelimit_status('jobs', 9, '{key}')
select * from ratelimit_acquire('jobs', '{key}') ;; select * from ratelimit_acquire_many(array['jobs','p'], array['{key} s','{key} s']) ;; select * from ratelimit_charge('jobs', '{key}', 0)
select * from ratelimit_acquire_all(array['p','jobs'], array['{key} s','{key} s']) ;; select * from ratelimit_hold('p', '{key}', 'a') ;; select * from ratelimit_hold('none', '{key}', 'a')
select ratelimit_reset('jobs', '{key}') ;; select * from ratelimit_peek('jobs', '{key}') ;; select ratelimit_remove_override('jobs', '{key}')
select * from ratelimit_peek('p', '{key} t1') ;; select ratelimit_drop_policy('none') ;; select ratelimit_drop_policy(null)
`), " ;; ", "\n"), "\n")
	// Every argument null, one by one and all at once.
	for _, name := range slices.Sorted(maps.Keys(kit.Functions)) {
		f := kit.Functions[name]
		if !strings.Contains(f.Arguments, " key") {
			continue
		}
		policy := map[bool]string{true: "jobs", false: "p"}[f.Writes == "slots"]
		call := strings.NewReplacer("select from ", "", "{KEY,KEY.}", "{k,k}", "KEY", "{key}", "(null", "('p'", "'p'", "'"+policy+"'").Replace(f.Samples(name)[0])
		function, list, _ := strings.Cut(strings.TrimSuffix(call, ")"), "(")
		args := strings.Split(list, ", ")
		if !f.List()[0].Nullable {
			said = append(said, "select * from "+function+"(null"+strings.Repeat(", null", len(args)-1)+")")
		}
		for n := range args {
			if n > 0 || !f.List()[0].Nullable { // else it is about all policies
				said = append(said, "select * from "+function+"("+strings.Join(slices.Replace(slices.Clone(args), n, n+1, "null"), ", ")+")")
			}
		}
	}
	return said
}()

// say answers as the server does: rows as text, errors with all that the package says.
func say(t testing.TB, conn *pgx.Conn, sql string) (lines []string) {
	results, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
	for _, r := range results {
		for _, row := range r.Rows {
			var columns []string
			for _, column := range row {
				columns = append(columns, string(column))
			}
			lines = append(lines, strings.Join(columns, "|"))
		}
		lines = append(lines, r.CommandTag.String())
	}
	if err != nil {
		e := kit.PgError(err)
		require.NotNil(t, e, "%s: %v", sql, err)
		lines = append(lines, fmt.Sprintf("%s %s / %s / %s", e.Code, e.Message, e.Detail, e.Hint))
		if conn.PgConn().TxStatus() != 'I' {
			require.NoError(t, kit.ErrorOf(conn.Exec(context.Background(), "rollback")))
		}
	}
	return lines
}

// Every public function answers from each node, to its owner and to a role that may execute and no more, as one server does.
func testCitusParity(t *testing.T, db kit.CitusDB) {
	plain := kit.NewDB(t)
	plain.SetClock(kit.T0)
	for _, on := range []*kit.TestDB{plain, db.Coordinator()} {
		on.Execute(`do $$ begin if not exists (select from pg_roles where rolname = 'caller') then create role caller login; end if; end $$`)
		on.Execute(`do $$ declare f regprocedure; begin
			for f in select p.oid from pg_proc as p where p.proname ~ '^ratelimit_' and p.prokind = 'f' loop
				execute format('grant execute on function %s to caller', f);
			end loop; end $$`)
	}
	t.Cleanup(func() { plain.Execute("drop owned by caller"); plain.Execute("drop role caller") })
	differences := 0
	for n, node := range db {
		for _, role := range []string{"", "caller"} {
			one, all := plain.As(role), node.As(role)
			for _, sql := range conversation {
				sql = strings.ReplaceAll(sql, "{key}", fmt.Sprintf("key %d%s", n, role))
				want, got := say(t, one, sql), say(t, all, sql)
				if !slices.Equal(want, got) && differences < 20 {
					differences++
					t.Errorf("node %d as %q: %s\none server: %s\nCitus:      %s", n, role, sql, strings.Join(want, "\n            "), strings.Join(got, "\n            "))
				}
			}
			for _, on := range []*kit.TestDB{plain, node} {
				for _, policy := range []string{"p", "q", "s", "step", "month", "day"} {
					on.DropPolicy(policy)
				}
			}
		}
	}
	// What differs: a request of several keys is refused.
	node := db[1]
	node.DefinePolicy("p", 10, 1, time.Hour)
	_, err := node.Pool.Exec(t.Context(), "select ratelimit_acquire_all(array['p', 'p'], array['a', 'b'])")
	require.Equal(t, "0A000", kit.SQLState(err))
	require.Equal(t, int64(10), node.Must(kit.Peek(node.Pool, "p", "a", 1)).Remaining)
	node.DropPolicy("p")
}

func testCitusCleansUp(t *testing.T, db kit.CitusDB) {
	rows := func() (counts [3]int64) {
		err := db.Coordinator().Pool.QueryRow(t.Context(), `select (select count(*) from ratelimit.buckets) + (select count(*) from ratelimit.ephemeral_buckets),
			(select count(*) from ratelimit.idempotency_keys) + (select count(*) from ratelimit.ephemeral_idempotency_keys),
			(select count(*) from ratelimit.overrides)`).Scan(&counts[0], &counts[1], &counts[2])
		require.NoError(t, err)
		return counts
	}
	db.Coordinator().Execute("call ratelimit_cleanup_all()") // of policies that were dropped
	require.Equal(t, [3]int64{}, rows())
	db.Coordinator().DefinePolicy("d", 10, 10, time.Hour, kit.Remember(time.Hour))
	db.Coordinator().DefinePolicy("e", 10, 10, time.Hour, kit.Remember(2*time.Hour), kit.Ephemeral)
	db.Coordinator().SetClock(kit.T0)
	for n := range 20 {
		db[n%3].Acquire([]string{"d", "e"}[n%2], fmt.Sprint("k", n), 1, "ik")
	}
	db[1].Execute("select ratelimit_override('d', 'k0', 100, 1, '1 h')") // full much later
	require.Equal(t, [3]int64{20, 20, 1}, rows())
	db.Coordinator().SetClock(kit.T0.Add(90 * time.Minute))
	db[2].Execute("call ratelimit_cleanup_all()")
	require.Equal(t, [3]int64{1, 10, 1}, rows(), "k0 is full by the policy's numbers and not by its override's")
	db.Coordinator().SetClock(kit.T0.Add(3 * time.Hour))
	require.Equal(t, kit.Deleted{Keys: 10}, db[1].Cleanup())
	db[1].DropPolicy("d")
	require.Equal(t, [3]int64{1, 0, 0}, rows(), "the rows of a policy are left to clean-up")
	db.Coordinator().Execute("call ratelimit_cleanup_all()")
	require.Equal(t, [3]int64{}, rows())
	db[0].DropPolicy("e")
}

func testCitusCleansUpSlots(t *testing.T, db kit.CitusDB) {
	rows := func() (counts [2]int64) {
		err := db.Coordinator().Pool.QueryRow(t.Context(), `select (select count(*) from ratelimit.slots) + (select count(*) from ratelimit.ephemeral_slots),
			(select count(*) from ratelimit.leases) + (select count(*) from ratelimit.ephemeral_leases)`).Scan(&counts[0], &counts[1])
		require.NoError(t, err)
		return counts
	}
	for _, policy := range db.Coordinator().Strings("select policy from ratelimit_policies() where lease is not null") {
		db.Coordinator().DropPolicy(policy)
	}
	db.Coordinator().Execute("call ratelimit_cleanup_all()") // of policies that were dropped
	require.Equal(t, [2]int64{}, rows())
	db.Coordinator().SetClock(kit.T0)
	for name, kind := range map[string]string{"d": "true", "e": "false"} {
		db.Coordinator().Execute("select ratelimit_define_policy($1, 5, lease => '1 hour', durable => $2::boolean)", name, kind)
		for n := range 10 {
			db[n%3].Execute("select ratelimit_hold($1, $2, h) from unnest('{a,b}'::text[]) as h", name, fmt.Sprint("k", n))
		}
	}
	db.Coordinator().SetClock(kit.T0.Add(10 * time.Minute))
	db[1].Execute("select ratelimit_renew('d', 'k0', 'b'), ratelimit_release('e', 'k0', 'b')")
	db.Coordinator().SetClock(kit.T0.Add(time.Hour + 5*time.Minute - kit.Us))
	db[2].Execute("call ratelimit_cleanup_all()")
	require.Equal(t, [2]int64{20, 39}, rows())
	db.Coordinator().SetClock(kit.T0.Add(time.Hour + 5*time.Minute))
	require.Equal(t, kit.Deleted{Buckets: 19}, db[1].Cleanup())
	require.Equal(t, [2]int64{1, 1}, rows())
	db.Coordinator().SetClock(kit.T0.Add(2 * time.Hour))
	db[0].Execute("call ratelimit_cleanup_all()")
	require.Equal(t, [2]int64{}, rows())
	db[2].DropPolicy("d")
	db[0].DropPolicy("e")
}

// What a worker has is not to be had while it is down; the rest is, at once. Callers who go on meanwhile are charged once for each grant.
func testCitusWorkerDown(t *testing.T, c *kit.Citus, db kit.CitusDB) {
	db.Coordinator().DefinePolicy("down d", 10, 0, time.Hour)
	db.Coordinator().DefinePolicy("down e", 10, 0, time.Hour, kit.Ephemeral)
	var key [3]string // one of each worker
	for n := 0; key[1] == "" || key[2] == ""; n++ {
		k := fmt.Sprint("down ", n)
		node, _ := db.ShardOf(c, k)
		key[node] = k
	}
	for _, policy := range []string{"down d", "down e"} {
		for _, k := range key[1:] {
			require.Equal(t, int64(7), db.Coordinator().Acquire(policy, k, 3, "ik").Remaining)
		}
	}
	ledger := kit.NewLedger(db.Coordinator(), "down load", 20, 10*time.Second)
	load := ledger.Load(t, client.New(db[0].Pool), client.New(db[1].Pool))
	ledger.AwaitAnswers(t, 100)
	require.NoError(t, c.Nodes[2].Stop(t.Context(), true))
	ledger.AwaitFailures(t, 20)
	ledger.AwaitAnswers(t, 20)
	for _, node := range db[:2] {
		require.Equal(t, int64(6), node.Acquire("down d", key[1], 1, fmt.Sprint("to ", node.URL)).Remaining)
		node.Must(kit.Refund(node.Pool, "down d", key[1], 1))
		began := time.Now()
		_, err := kit.Acquire(node.Pool, "down d", key[2], 1)
		require.Error(t, err)
		require.Less(t, time.Since(began), kit.Patience)
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "08006", refused.Code, refused)
		_, err = node.Pool.Exec(t.Context(), "select ratelimit_define_policy('needs all nodes', 1, 1, '1 s')")
		require.Error(t, err)
		require.NoError(t, kit.ErrorOf(node.Pool.Exec(t.Context(), "call ratelimit_cleanup_all()")), "the other nodes are cleaned up")
	}
	require.NoError(t, c.Nodes[2].Start(t.Context()))
	ledger.AwaitAnswers(t, 100)
	require.NoError(t, load.End())
	require.Subset(t, kit.CitusBroken, slices.Collect(maps.Keys(ledger.Failed)))
	t.Logf("%d grants, %d of them replayed, %d unanswered; failed: %v", ledger.Granted, ledger.Replayed, ledger.Unknown, ledger.Failed)
	for n, node := range db {
		node.Pool.Reset()
		require.Equal(t, int64(7), node.Must(kit.Peek(node.Pool, "down d", key[2], 1)).Remaining, "node %d", n)
		require.Equal(t, int64(10), node.Must(kit.Peek(node.Pool, "down e", key[2], 1)).Remaining, "node %d: full after a crash", n)
		require.Equal(t, int64(7), node.Must(kit.Peek(node.Pool, "down e", key[1], 1)).Remaining, "node %d", n)
	}
	require.True(t, db[2].Acquire("down d", key[2], 3, "ik").Replayed)
	require.NoError(t, ledger.Check(db[2]))
}

func TestMain(m *testing.M) { pgtest.Main(m) }
