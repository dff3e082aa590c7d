package tests

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func onFronts(t *testing.T, test func(t *testing.T, f *front)) {
	for _, of := range []int{2, 4} {
		t.Run(fmt.Sprint(of, " shards"), func(t *testing.T) {
			t.Parallel()
			test(t, newFront(t, of))
		})
	}
}

// The front has each public function as one server has it: arguments, defaults, result, comment; and nobody may execute it. A
// later run keeps the grants.
func TestPLProxy_SameFunctions(t *testing.T) {
	t.Parallel()
	app := newRole(t)
	f := newFront(t, 2)
	const declared = `
		select format('%s %s(%s) returns %s %s: %s', p.prokind, p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
		              p.provolatile, obj_description(p.oid, 'pg_proc'))
		  from pg_proc as p
		 where p.pronamespace = 'public'::regnamespace and starts_with(p.proname, 'ratelimit_')
		 order by 1`
	want := column(t, f.shards[0].DB, declared)
	require.Greater(t, len(want), 25)
	require.Equal(t, want, column(t, f.DB, declared))
	const typed = `
		select format('%s.%s %s: %s', t.typname, a.attname, format_type(a.atttypid, a.atttypmod), obj_description(t.oid, 'pg_type'))
		  from pg_type as t
		  join pg_attribute as a on a.attrelid = t.typrelid
		 where t.typnamespace = 'ratelimit'::regnamespace and t.typname in ('decision', 'packed', 'reservation', 'partial_decision')
		 order by 1`
	require.Equal(t, column(t, f.shards[0].DB, typed), column(t, f.DB, typed))

	const granted = `
		select format('%s %s %s', p.oid::regprocedure, a.grantee::regrole, a.is_grantable)
		  from pg_proc as p
		 cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a
		 where p.pronamespace in ('public'::regnamespace, 'ratelimit'::regnamespace)
		   and p.proname not like 'plproxy%' and a.grantee <> p.proowner
		 order by 1`
	require.Empty(t, column(t, f.DB, granted))
	f.exec("grant execute on function ratelimit_acquire, ratelimit_peek to " + app + "; grant execute on function ratelimit_charge to " + app + " with grant option")
	want = column(t, f.DB, granted)
	require.Len(t, want, 3)
	out, err := f.installAgain(t)
	require.NoError(t, err, out)
	require.Equal(t, want, column(t, f.DB, granted))

	// A role with EXECUTE needs nothing else, neither here nor there, and gets nothing else.
	f.definePolicy("p", 10, 1, second)
	conn := connectAs(t, f.DB, app)
	require.Contains(t, linesOf(conn, "select * from ratelimit_acquire('p', 'k')")[0], "true 9")
	require.Contains(t, linesOf(conn, "select * from ratelimit_refund('p', 'k', 1)")[0], "42501")
	require.Contains(t, linesOf(conn, "select ratelimit.at_reset(0, '0 of 2', 'p', 'k')")[0], "42501")
	require.Contains(t, linesOf(conn, "create function f() returns integer language plproxy as $$ cluster 'ratelimit'; run on 0; select 1; $$")[0], "42501")
}

// The vectors that one server and the fake of the client are held to.
func TestPLProxy_Vectors(t *testing.T) {
	t.Parallel()
	f := newFront(t, 2)
	for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		t.Run(name, func(t *testing.T) {
			for _, v := range vectors {
				v.replay(t, f.of(t), durability)
				f.dropPolicy(v.origin)
			}
		})
	}
}

// The front routes by the one rule.
func TestPLProxy_Routing(t *testing.T) {
	t.Parallel()
	f := newFront(t, 4)
	for i := range 300 {
		key := fmt.Sprint("clé ", i, " 🔑")
		require.EqualValues(t, client.ShardOf(key, 4), f.number("select ratelimit.shard_of($1)", key))
	}
}

// Random calls of all functions, one after another, get from the front what one server answers, line by line.
func TestPLProxy_Parity(t *testing.T) {
	t.Parallel()
	onFronts(t, func(t *testing.T, f *front) {
		one := newDB(t)
		conns := [2]*pgx.Conn{one.Connect(t), f.Connect(t)}
		now := t0
		setClock := func() {
			one.setClock(now)
			f.setClock(now)
		}
		setClock()
		random := rand.New(rand.NewPCG(1, uint64(len(f.shards)))) //nolint:gosec // to be repeated
		counts := map[string]int{}
		same := func(sql string, args ...any) {
			t.Helper()
			want, got := linesOf(conns[0], sql, args...), linesOf(conns[1], sql, args...)
			require.Equal(t, want, got, "%s %v", sql, args)
			counts[regexp.MustCompile(`ratelimit_[a-z_]+`).FindString(sql)]++
		}
		pick := func(of ...any) any { return of[random.IntN(len(of))] }
		policy := func() any { return pick("slow", "slow", "fast", "ephemeral", "shadow", "stepped", "nobody") }
		keys := []any{"user:1", "clé"}
		for n := range f.shards {
			keys = append(keys, f.key(n, "user"))
		}
		key := func() any { return pick(keys...) }
		cost := func() any { return pick(0, 1, 1, 2, 3, 5, 30) }
		token := func() any { return pick(nil, nil, "a", "b", "c") }
		shardOf := func(key any) int { return client.ShardOf(key.(string), len(f.shards)) }
		define := func() {
			for _, name := range []string{"slow", "fast", "ephemeral", "shadow", "stepped"} {
				same("select ratelimit_define_policy($1, $2, $3, $4::text::interval, stepped => $5, durable => $6, shadow => $7)",
					name, 10+random.IntN(5), random.IntN(4), pick("1 second", "1 minute"), name == "stepped", name != "ephemeral", name == "shadow")
			}
		}
		define()
		packedOf := func(function string, sized bool) {
			var policies, names, tokens []any
			var costs, sizes []any
			for range 1 + random.IntN(6) {
				n := 1
				if sized {
					n = 1 + random.IntN(3)
				}
				first := key()
				for range n {
					k := key()
					for shardOf(k) != shardOf(first) {
						k = key()
					}
					policies, names, costs = append(policies, policy()), append(names, k), append(costs, cost())
				}
				sizes, tokens = append(sizes, n), append(tokens, token())
			}
			var sizesOrNull any
			if sized {
				sizesOrNull = sizes
			}
			switch function {
			case "ratelimit_acquire_many":
				same("select * from ratelimit_acquire_many($1::text[], $2::text[], $3::bigint[], $4::text[])", policies, names, costs, tokens)
			case "ratelimit_acquire_all_many":
				same("select d.*, d.decisions::text from ratelimit_acquire_all_many($1::text[], $2::text[], $3::bigint[], $4::integer[], $5::text[]) as d", policies, names, costs, sizes, tokens)
			case "ratelimit_acquire_packed":
				same(`
					select e.*, r.*, f.*
					  from ratelimit_acquire_packed($1::text[], $2::text[], $3::bigint[], $4::integer[], $5::text[]) as p
					 cross join lateral (select array_agg(e order by e.element)::text
					                       from unnest(p.elements, p.remaining, p.retry_after_us, p.reset_after_us, p.capacity, p.replayed, p.shadowed)
					                            as e (element, remaining, retry, reset, capacity, replayed, shadowed)) as e
					 cross join lateral (select array_agg(r order by r.request)::text
					                       from unnest(p.requests, p.requests_allowed, p.requests_replayed, p.requests_shadowed, p.bindings)
					                            as r (request, allowed, replayed, shadowed, binding)) as r
					 cross join lateral (select array_agg(f order by f.request)::text
					                       from unnest(p.refused, p.error_codes, p.error_messages, p.error_details, p.error_hints)
					                            as f (request, code, message, detail, hint)) as f`, policies, names, costs, sizesOrNull, tokens)
			}
		}
		calls := []func(){
			func() { same("select * from ratelimit_acquire($1, $2, $3, $4)", policy(), key(), cost(), token()) },
			func() { same("select * from ratelimit_acquire($1, $2)", policy(), key()) },
			func() { same("select * from ratelimit_peek($1, $2, $3)", policy(), key(), cost()) },
			func() { same("select * from ratelimit_enforce($1, $2, $3, $4)", policy(), key(), cost(), token()) },
			func() { same("select * from ratelimit_refund($1, $2, $3)", policy(), key(), cost()) },
			func() { same("select ratelimit_reset($1, $2)", policy(), key()) },
			func() { same("select * from ratelimit_charge($1, $2, $3, $4)", policy(), key(), cost(), token()) },
			func() { same("select * from ratelimit_settle($1, $2, $3, $4)", policy(), key(), token(), cost()) },
			func() {
				same("select * from ratelimit_reserve($1, $2, $3::text::interval, $4, $5)", policy(), key(), pick("0", "1 minute", "1 day"), cost(), token())
			},
			func() {
				same("select * from ratelimit_acquire_up_to($1, $2, $3, $4, $5)", policy(), key(), cost(), pick(1, 2), token())
			},
			func() {
				same("select ratelimit_override($1, $2, $3, $4, expires_at => $5::text::timestamptz)", policy(), key(), pick(nil, 0, 20), pick(nil, 1), pick(nil, "2024-04-01 00:00:00+02"))
			},
			func() { same("select ratelimit_remove_override($1, $2)", policy(), key()) },
			func() {
				same("select * from ratelimit_overrides($1, $2, $3)", pick(nil, policy()), pick(nil, key()), pick(1, 3, 100))
			},
			func() {
				same("select * from ratelimit_status($1, 1000) where remaining < capacity order by policy, key", pick(nil, policy()))
			},
			func() { same("select * from ratelimit_policies()") },
			func() {
				policies, names := []any{policy()}, []any{key()}
				for range random.IntN(3) {
					k := key()
					for shardOf(k) != shardOf(names[0]) {
						k = key()
					}
					policies, names = append(policies, policy()), append(names, k)
				}
				costs := []any{}
				for range names {
					costs = append(costs, cost())
				}
				same("select d.*, d.decisions::text from ratelimit_acquire_all($1::text[], $2::text[], $3::bigint[], $4) as d", policies, names, costs, token())
			},
			func() { packedOf("ratelimit_acquire_many", false) },
			func() { packedOf("ratelimit_acquire_all_many", true) },
			func() { packedOf("ratelimit_acquire_packed", false) },
			func() { packedOf("ratelimit_acquire_packed", true) },
			func() {
				if random.IntN(10) == 0 {
					same("select ratelimit_drop_policy($1)", policy())
					define()
				}
			},
			func() {
				now = now.Add(time.Duration(random.IntN(20)) * second)
				if random.IntN(20) == 0 {
					now = now.Add(time.Hour)
					setClock()
					for _, conn := range conns { // a full bucket may have a row or none
						require.Len(t, linesOf(conn, "select * from ratelimit_cleanup(1000)"), 1)
					}
					same("call ratelimit_cleanup_all()")
				}
				setClock()
			},
		}
		for range 1000 {
			calls[random.IntN(len(calls))]()
		}
		same("select ratelimit_version()")
		same("select ratelimit_shard()")
		for _, db := range f.shards {
			require.NotZero(t, db.number("select count(*) from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b"), "each shard has keys")
		}
		t.Logf("%v", counts)
	})
}

// What one server refuses the front refuses with the same words, also NULL in every argument of every function.
func TestPLProxy_BadInput(t *testing.T) {
	t.Parallel()
	f := newFront(t, 2)
	one := newDB(t)
	one.setClock(t0)
	f.setClock(t0)
	conns := [2]*pgx.Conn{one.Connect(t), f.Connect(t)}
	for _, db := range []interface {
		definePolicy(name string, capacity, refill int64, every time.Duration, opts ...policyOption)
		acquire(policy, key string, cost int64, idempotencyKey ...string) decision
	}{one, f} {
		for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
			db.definePolicy(name, 10, 1, time.Hour, durability)
			db.acquire(name, "k", 3, "first")
		}
	}
	several, compared := 0, 0
	for _, call := range badCalls(15) {
		args := append([]any{pgx.QueryExecModeExec}, call.args...)
		want, got := linesOf(conns[0], call.sql, args...), linesOf(conns[1], call.sql, args...)
		if strings.HasPrefix(fmt.Sprint(got), "[22023 | several shards") {
			several++
			continue
		}
		require.Equal(t, want, got, "%s", call)
		compared++
	}
	require.Greater(t, compared, 10*several)

	const arguments = `
		select p.prokind::text || p.proname || ' ' || string_agg(format('%s => %s', a.name, case
		         when a.n = b.n                                then 'null'
		         when a.name in ('policy', 'policies')         then '$$durable$$'
		         when a.name in ('key', 'keys')                then '$$k$$'
		         when a.name ~ '^idempotency'                  then '$$again$$'
		         when a.name = 'expires_at'                    then '$$2030-01-01$$'
		         when a.type = 'interval'                      then '$$1 hour$$'
		         when a.type = 'boolean'                       then 'true'
		         else '5' end), ', ' order by a.n)
		  from pg_proc as p
		 cross join lateral (select n, p.proargnames[n] as name, format_type(p.proargtypes[n - 1], null) as type
		                       from generate_series(1, p.pronargs) as n) as a
		 cross join lateral generate_series(1, p.pronargs) as b (n)
		 where p.pronamespace = 'public'::regnamespace and starts_with(p.proname, 'ratelimit_')
		   and p.proname not in ('ratelimit_define_shard', 'ratelimit_acquire_all_many', 'ratelimit_acquire_many', 'ratelimit_acquire_packed', 'ratelimit_acquire_all')
		 group by p.oid, p.prokind, p.proname, b.n
		 order by 1`
	nulls := column(t, one.DB, arguments)
	require.Greater(t, len(nulls), 40)
	for _, call := range nulls {
		name, list, _ := strings.Cut(call[1:], " ")
		sql := "select * from " + name + "(" + list + ")"
		if call[0] == 'p' {
			sql = "call " + name + "(" + list + ")"
		}
		require.Equal(t, linesOf(conns[0], sql), linesOf(conns[1], sql), sql)
	}
	for _, function := range []struct {
		name string
		args []string
	}{
		{"ratelimit_acquire_all", []string{"array['durable']", "array['k']", "array[1]", "'x'"}},
		{"ratelimit_acquire_many", []string{"array['durable', 'ephemeral']", "array['k', 'l']", "array[1, 1]", "array['x', 'y']"}},
		{"ratelimit_acquire_packed", []string{"array['durable']", "array['k']", "array[1]", "array[1]", "array['x']"}},
		{"ratelimit_acquire_all_many", []string{"array['durable']", "array['k']", "array[1]", "array[1]", "array['x']"}},
	} {
		for n := range function.args {
			for _, bad := range []string{"null", "'{}'", "'{null}'", "'{null,null,null}'", "'{{1},{1}}'"} {
				args := slices.Clone(function.args)
				args[n] = bad
				sql := "select d::text from " + function.name + "(" + strings.Join(args, ", ") + ") as d"
				require.Equal(t, linesOf(conns[0], sql), linesOf(conns[1], sql), sql)
			}
		}
	}
}

// A request of several shards takes nothing, alone and in a batch; the others of the batch are decided.
func TestPLProxy_SeveralShards(t *testing.T) {
	t.Parallel()
	f := newFront(t, 4)
	f.definePolicy("p", 10, 1, aDay)
	a, b := f.key(0, "a"), f.key(3, "b")
	_, err := wholeRequest{charges: chargesOn("p", a, b)}.acquireAll(f.Pool)
	require.Equal(t, "22023", sqlState(err))
	require.Equal(t, []string{"several shards", "Element 1 belongs to shard 0 of 4, another to shard 3 of 4."}, []string{pgError(err).Message, pgError(err).Detail})

	requests := []wholeRequest{{charges: chargesOn("p", a, b)}, {charges: chargesOn("p", a)}, {charges: chargesOn("p", b, b)}}
	answers, err := acquireAllMany(f.Pool, requests)
	require.NoError(t, err)
	packed, err := acquirePacked(f.Pool, requests, true)
	require.NoError(t, err)
	for _, answers := range [][]wholeAnswer{answers, packed} {
		require.Nil(t, answers[0].Whole)
		require.True(t, strings.HasPrefix(answers[0].Error, "22023: several shards: "), answers[0].Error)
		require.True(t, answers[1].Whole.Allowed && answers[2].Whole.Allowed)
	}
	require.EqualValues(t, 8, f.left("p", a))
	require.EqualValues(t, 6, f.left("p", b))
}

// Callers who meet at a bucket of each shard share exactly what it holds, with calls of their own and through a Combiner.
func TestPLProxy_ExactCounts(t *testing.T) {
	t.Parallel()
	onFronts(t, func(t *testing.T, f *front) {
		const capacity, callers = 200, 24
		config, err := pgxpool.ParseConfig(f.URL)
		require.NoError(t, err)
		config.MaxConns = 8
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		defer pool.Close()
		combiner := client.NewCombiner(pool)
		defer combiner.Close()
		for policy, by := range map[string]client.Acquirer{"alone": client.New(pool), "combined": combiner} {
			f.definePolicy(policy, capacity, 0, second)
			f.definePolicy("with "+policy, capacity, 0, second)
			var keys []string
			for n := range f.shards {
				keys = append(keys, f.key(n, "hot"))
			}
			granted := make([]atomic.Int64, len(keys))
			both := make([]atomic.Int64, len(keys))
			var group errgroup.Group
			for range callers {
				group.Go(func() error {
					for i := range 2 * capacity * len(keys) / callers {
						n := i % len(keys)
						d, err := by.Acquire(t.Context(), policy, keys[n])
						if err != nil {
							return err
						}
						if d.Allowed {
							granted[n].Add(1)
						}
						if i%8 < len(keys) {
							whole, err := by.AcquireAll(t.Context(), []client.Charge{{Policy: "with " + policy, Key: keys[n], Cost: client.Cost(3)}, {Policy: "with " + policy, Key: keys[n]}})
							if err != nil {
								return err
							}
							if whole.Allowed {
								both[n].Add(1)
							}
						}
					}
					return nil
				})
			}
			require.NoError(t, group.Wait())
			for n, key := range keys {
				require.EqualValues(t, capacity, granted[n].Load(), "%s, shard %d", policy, n)
				require.Zero(t, f.left(policy, key))
				require.EqualValues(t, capacity-4*both[n].Load(), f.left("with "+policy, key))
				require.EqualValues(t, 0, f.shards[n].left(policy, key), "it is in this shard")
			}
		}
	})
}

// What is taken through the front is taken, also if the transaction is rolled back; in a shard it is given back.
func TestPLProxy_IsNoPartOfTheTransaction(t *testing.T) {
	t.Parallel()
	f := newFront(t, 2)
	f.definePolicy("p", 10, 1, aDay)
	take := func(db *testDB, key string) {
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = acquire(tx, "p", key, 4)
		require.NoError(t, err)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	take(f.testDB, "user:42")
	require.EqualValues(t, 6, f.left("p", "user:42"), "not given back")
	take(f.shardOf("user:42"), "user:42")
	require.EqualValues(t, 6, f.left("p", "user:42"), "given back")

	// While the transaction goes on, others do not wait for the bucket.
	tx, err := f.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = acquire(tx, "p", "user:42", 1)
	require.NoError(t, err)
	require.EqualValues(t, 4, f.acquire("p", "user:42", 1).Remaining)

	// Nor does a read-only transaction of the front keep it from taking.
	readOnly, err := f.Pool.BeginTx(t.Context(), pgx.TxOptions{AccessMode: pgx.ReadOnly})
	require.NoError(t, err)
	defer readOnly.Rollback(context.Background())
	d, err := acquire(readOnly, "p", "user:42", 1)
	require.NoError(t, err)
	require.EqualValues(t, 3, d.Remaining)
}

// A guard would keep what it took from a statement that fails, so there is none; and a front is no shard.
func TestPLProxy_Refuses(t *testing.T) {
	t.Parallel()
	f := newFront(t, 2)
	f.exec(`
		create table orders (customer text);
		create trigger limited after insert on orders referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer')`)
	for _, sql := range []string{"insert into orders values ('k')", "select ratelimit_define_shard(0, 2)"} {
		_, err := f.Pool.Exec(t.Context(), sql)
		require.Equal(t, "0A000", sqlState(err), sql)
		require.NotEmpty(t, pgError(err).Detail)
		require.NotEmpty(t, pgError(err).Hint)
	}
	_, err := client.NewSharded(t.Context(), []*pgxpool.Pool{f.Pool})
	require.ErrorIs(t, err, client.ErrWrongShard)

	// Over pgratelimit itself it does not install.
	file := filepath.Join(t.TempDir(), "front.sql")
	require.NoError(t, os.WriteFile(file, packagesOf(t, "..")["plproxy/front.sql"], 0o600))
	out, err := runPsql(t, f.shards[0].URL, "--quiet", "--file", file)
	require.Error(t, err)
	require.Contains(t, out, "pgratelimit itself is installed here")
}

// A database that is listed as another shard gives no tokens: not when the front is installed, and not when the list is
// changed under sessions that have connections.
func TestPLProxy_AWrongShardIsRefused(t *testing.T) {
	t.Parallel()
	f := newFront(t, 2)
	f.definePolicy("p", 10, 1, aDay)
	key := f.key(0, "user")
	conn := f.Connect(t)
	_, err := acquire(conn, "p", key, 1)
	require.NoError(t, err)

	swap := func(n, as int) {
		config, err := pgx.ParseConfig(f.shards[as].URL)
		require.NoError(t, err)
		f.exec(fmt.Sprintf("alter server ratelimit options (set p%d 'host=%s dbname=%s')", n, config.Host, config.Database))
	}
	swap(0, 1)
	for range 3 {
		_, err = acquire(conn, "p", key, 1)
		require.Equal(t, "55000", sqlState(err))
		require.Equal(t, []string{"wrong shard", "The database that is listed as shard 0 of 2 says that it is 1 of 2."}, []string{pgError(err).Message, pgError(err).Detail})
	}
	answers, err := acquireMany(conn, []nullableRequest{
		wholeRequest{charges: chargesOn("p", key)}.single().nullable(), wholeRequest{charges: chargesOn("p", f.key(1, "user"))}.single().nullable(),
	})
	require.NoError(t, err)
	require.Nil(t, answers[0].Decision)
	require.True(t, strings.HasPrefix(answers[0].Error, "55000: wrong shard"), answers[0].Error)
	require.EqualValues(t, 9, answers[1].Decision.Remaining)
	require.Len(t, column(t, f.DB, "select finding from ratelimit_doctor() where finding like 'Shard 0 of 2: wrong shard%'"), 1)
	out, err := f.runFile(t)
	require.Error(t, err)
	require.Contains(t, out, "wrong shard")
	require.Zero(t, f.shards[1].number("select count(*) from ratelimit.buckets where key = $1", key))

	swap(0, 0)
	d, err := acquire(conn, "p", key, 1)
	require.NoError(t, err)
	require.EqualValues(t, 8, d.Remaining)

	// A database without a number is no shard.
	f.shards[0].exec("truncate ratelimit.shard")
	fresh := f.Connect(t)
	_, err = acquire(fresh, "p", key, 1)
	require.Equal(t, "55000", sqlState(err))
	require.Contains(t, pgError(err).Detail, "says that it is none")
}

// While a shard is down, its keys have a prompt error that says so, also in a batch with others. Others are answered. When it
// is back, so are its keys, in the same sessions.
func TestPLProxy_AShardIsDown(t *testing.T) {
	t.Parallel()
	needPLProxy(t, pgtest.Shared(t))
	other := pgtest.Private(t)
	f := &front{&testDB{DB: pgtest.Empty(t), t: t}}
	f.addShard(newDB(t), 0, 2)
	f.addShard(createDB(t, other, privateName), 1, 2)
	f.install(t)
	f.definePolicy("p", 100, 1, aDay)
	alive, dead := f.key(0, "user"), f.key(1, "user")
	conn := f.Connect(t)
	for _, key := range []string{alive, dead} {
		_, err := acquire(conn, "p", key, 1)
		require.NoError(t, err)
	}
	check := func(codes ...string) {
		t.Helper()
		for range 3 {
			begin := time.Now()
			_, err := acquire(conn, "p", dead, 1)
			require.Contains(t, codes, sqlState(err), "%v", err)
			require.Contains(t, fmt.Sprint(pgError(err).Message, pgError(err).Detail), "Shard 1 of 2")
			require.Less(t, time.Since(begin), patience)
			_, err = acquire(conn, "p", alive, 1)
			require.NoError(t, err)
		}
		answers, err := acquireMany(conn, []nullableRequest{wholeRequest{charges: chargesOn("p", dead)}.single().nullable(), wholeRequest{charges: chargesOn("p", alive)}.single().nullable()})
		require.NoError(t, err)
		require.Nil(t, answers[0].Decision)
		require.Contains(t, answers[0].Error, "no answer from a shard")
		require.NotNil(t, answers[1].Decision)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		for _, statement := range []string{"select ratelimit_define_policy('p', remember => '2 days')", "call ratelimit_cleanup_all()"} {
			_, err = conn.Exec(ctx, statement)
			require.Contains(t, codes, sqlState(err), statement)
			require.Contains(t, pgError(err).Detail, "Failed: shard 1 of 2.", statement)
		}
	}
	f.shards[1].Pool.Close()
	require.NoError(t, other.Stop(t.Context(), true))
	_, _ = acquire(conn, "p", dead, 1) // an open connection was lost
	check("08001")
	require.NotEmpty(t, column(t, f.DB, "select finding from ratelimit_doctor() where finding like 'Shard 1 of 2: no answer%'"))

	require.NoError(t, other.Start(t.Context()))
	d, err := acquire(conn, "p", dead, 1)
	require.NoError(t, err)
	require.EqualValues(t, 98, d.Remaining)
}
