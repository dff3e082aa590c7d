package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// 1,000 callers ask 10,000 times for 5,000 tokens, a part of them with idempotency keys. Each token is
// granted once, and each grant is told what it left.
func TestCombiner_GrantsExactlyWhatIsThere(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string][]client.Option{
		"by default":          nil,
		"one call":            {client.CallsInFlight(1)},
		"eight calls, cached": {client.CallsInFlight(8), client.DenialCache(), client.NoFlush()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			db.Exec(t, "select ratelimit_define_policy('api', 100, 1, '1 day')")
			limiter := newCombiner(t, db.Pool, opts...)

			const callers, each, keys = 1_000, 10, 50
			answers := make([][]client.Decision, callers)
			var wg sync.WaitGroup
			for caller := range callers {
				wg.Go(func() {
					for n := range each {
						var opts []client.CallOption
						if n%5 == 0 {
							opts = append(opts, client.IdempotencyKey(fmt.Sprint(caller, "/", n)))
						}
						d, err := limiter.Acquire(t.Context(), "api", fmt.Sprint((caller+n)%keys), opts...)
						if err != nil {
							t.Error(err)
							return
						}
						answers[caller] = append(answers[caller], d)
					}
				})
			}
			wg.Wait()

			var left [keys][100]int
			for caller, decisions := range answers {
				require.Len(t, decisions, each)
				for n, d := range decisions {
					require.EqualValues(t, 100, d.Capacity)
					require.Equal(t, d.Allowed, d.RetryAfter == 0)
					if d.Allowed {
						left[(caller+n)%keys][d.Remaining]++
					}
				}
			}
			for key := range left {
				for remaining, grants := range left[key] {
					require.Equal(t, 1, grants, "key %d, grants that left %d", key, remaining)
				}
			}
		})
	}
}

// The same requests, in the same order, on two databases whose clocks say the same.
func TestCombiner_AnswersLikeAPlainLimiter(t *testing.T) {
	t.Parallel()
	const seed = 3
	for _, keyed := range []bool{false, true} {
		t.Run(fmt.Sprintf("idempotency_keys=%v", keyed), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(seed, seed))
			pick := func(from ...string) string { return from[random.IntN(len(from))] }
			databases := []*pgtest.DB{pgtest.New(t), pgtest.New(t)}
			for _, db := range databases {
				db.Exec(t, `
					select ratelimit_define_policy('gate', 9, 1, '1 day'),
					       ratelimit_define_policy('continuous', 10, 3, '2 seconds'),
					       ratelimit_define_policy('stepped', 10, 3, '2 seconds', stepped => true),
					       ratelimit_define_policy('ephemeral', 10, 3, '2 seconds', durable => false)`)
			}
			plain := client.New(databases[0].Pool)
			limiter := newCombiner(t, databases[1].Pool, client.CallsInFlight(1))
			seen := make(map[string]int)
			for round := range 8 {
				for _, db := range databases {
					setClock(t, db, round*700)
				}
				var requests []request
				for range 30 {
					r := request{
						policy: pick("continuous", "continuous", "stepped", "ephemeral", "none", ""),
						key:    pick("a", "a", "a", "b", "é", "", strings.Repeat("x", 513)),
						opts:   []client.CallOption{client.Cost(random.Int64N(14) - 1)},
					}
					if n := random.Int64N(5); keyed && n > 0 {
						r.opts = []client.CallOption{client.Cost(n), client.IdempotencyKey(pick("x", fmt.Sprint(n), fmt.Sprint(n), ""))}
					} else if keyed {
						r.opts = append(r.opts, client.IdempotencyKey("x"))
					}
					requests = append(requests, r)
				}
				got := combine(t, databases[1], limiter, requests)()
				for n, r := range requests {
					d, err := plain.Acquire(t.Context(), r.policy, r.key, r.opts...)
					require.Equal(t, d, got[n].Decision, "round %d, request %d: %+v", round, n, r)
					if err == nil {
						require.NoError(t, got[n].err)
						seen[fmt.Sprint(d.Allowed, d.Never(), d.Replayed)]++
						continue
					}
					require.EqualError(t, got[n].err, err.Error())
					for _, kind := range kinds {
						require.Equal(t, errors.Is(err, kind), errors.Is(got[n].err, kind), err)
						if errors.Is(err, kind) {
							seen[kind.Error()]++
						}
					}
				}
			}
			kinds := []string{"true false false", "false false false", "false true false", client.ErrUnknownPolicy.Error(), client.ErrInvalidArgument.Error()}
			if keyed {
				kinds = append(kinds, "true false true", client.ErrIdempotencyMismatch.Error())
			}
			require.Subset(t, slices.Collect(maps.Keys(seen)), kinds)
		})
	}
}

func setClock(t *testing.T, db *pgtest.DB, milliseconds int) {
	db.Exec(t, fmt.Sprintf(`
		create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe
		as $$ select timestamptz '2026-03-28 01:00 UTC' + interval '%d milliseconds' $$`, milliseconds))
}

// The same requests of one charge or several, in the same order, in each mode of pgx, on two databases whose clocks say the same.
// An idempotency key is used twice, so that cached statements are used too.
func TestCombiner_AnswersLikeAPlainLimiterInEachMode(t *testing.T) {
	t.Parallel()
	for mode := pgx.QueryExecModeCacheStatement; mode <= pgx.QueryExecModeSimpleProtocol; mode++ {
		for _, opts := range [][]client.Option{nil, {client.NoFlush()}} {
			t.Run(fmt.Sprintf("%s/%d", strings.ReplaceAll(mode.String(), " ", "_"), len(opts)), func(t *testing.T) {
				t.Parallel()
				const a, b = "it's \"new\"\n🪣 {,}", "b"
				databases := []*pgtest.DB{pgtest.New(t), pgtest.New(t)}
				for _, db := range databases {
					setClock(t, db, 0)
					db.Exec(t, "select ratelimit_define_policy('gate', 9, 1, '1 day'), ratelimit_define_policy('b', 5, 1, '3650 days')")
					db.Exec(t, "select ratelimit_define_policy($1, 10, 3, '2 seconds')", a)
				}
				pool := connect(t, databases[1], map[string]string{"IntervalStyle": "sql_standard"}, func(config *pgx.ConnConfig) {
					config.DefaultQueryExecMode = mode
				})
				plain, limiter := client.New(databases[0].Pool), newCombiner(t, pool, append(opts, client.CallsInFlight(1))...)
				charge := func(policy, key string, cost int64) client.Charge {
					return client.Charge{Policy: policy, Key: key, Cost: client.Cost(cost)}
				}
				odd := `o'clock \ $1 "{NULL}", ` + strings.Repeat("é", 200)
				requests := [][]client.Charge{
					{charge(a, odd, 3), charge(b, "NULL", 2)},
					{charge(b, "NULL", 2), charge(a, odd, 3), charge(a, odd, 4)},
					{charge(a, odd, 8)},
					{charge(a, odd, 1), charge(b, "NULL", 4)},
					{charge(a, odd, 1), charge(b, "NULL", 6)},
					{charge(a, odd, 0), charge(b, "NULL", 0)},
					{charge(a, odd, 1), charge("none", "NULL", 1)},
					{charge(a, odd, 1), charge(b, "", 1)},
					{},
				}
				singles := []client.Charge{
					charge(a, odd, 4), charge(a, odd, 5), charge(a, odd, 2), charge(a, odd, 11), charge(a, "NULL", 1), charge(a, odd, -1),
					charge(a, "a\xffb", 1), charge(a, "a\x00'b", 1), charge("none", odd, 1),
				}
				for _, single := range singles {
					requests = append(requests, []client.Charge{single})
				}
				seen, last := map[string]bool{}, ""
				for _, key := range []string{"", "NULL", "NULL", `"'\`, "a\x00'b"} {
					if key != last {
						require.NoError(t, errors.Join(plain.Reset(t.Context(), a, odd), limiter.Reset(t.Context(), a, odd)))
						last = key
					}
					var single []client.CallOption
					var joint []client.CallOption
					if key != "" {
						single, joint = append(single, client.IdempotencyKey(key)), append(joint, client.IdempotencyKey(key))
					}
					ask := func(by client.Acquirer, i int) (any, error) {
						if i < len(requests) {
							return by.AcquireAll(t.Context(), requests[i], joint...)
						}
						c := singles[i-len(requests)]
						return by.Acquire(t.Context(), c.Policy, c.Key, append(single, c.Cost)...)
					}
					got, errs := make([]any, len(requests)+len(singles)), make([]error, len(requests)+len(singles))
					combineCalls(t, databases[1], limiter, len(got), func(i int) { got[i], errs[i] = ask(limiter, i) })()
					for i := range got {
						want, err := ask(plain, i)
						text := fmt.Sprintf("%+v %v", want, err)
						require.Equal(t, text, fmt.Sprintf("%+v %v", got[i], errs[i]), "request %d, idempotency key %q", i, key)
						for _, kind := range []string{"Allowed:true", "Allowed:false", "Replayed:true", "RL001", "RL002", "22023", "22021", "zero byte"} {
							seen[kind] = seen[kind] || strings.Contains(text, kind)
						}
					}
				}
				for kind, met := range seen {
					require.True(t, met, kind)
				}
			})
		}
	}
}

// What UTF-8 can say and the database cannot hold, nobody knows before it is sent.
func TestCombiner_DatabaseOfAnotherEncoding(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	ctx := t.Context()
	name := db.Name + "_latin1"
	db.Exec(t, "create database "+name+" template template0 encoding 'LATIN1' locale 'C'")
	t.Cleanup(func() { db.Exec(t, "drop database "+name+" with (force)") })
	pool := connect(t, db, map[string]string{"client_encoding": "UTF8"}, func(config *pgx.ConnConfig) { config.Database = name })
	latin1 := &pgtest.DB{Pool: pool}
	require.NoError(t, migrations.Up(ctx, acquired(t, pool).Conn()))
	latin1.Exec(t, "select ratelimit_define_policy('gate', 10, 1, '1 hour'), ratelimit_define_policy('api', 10, 1, '1 hour')")

	limiter := newCombiner(t, pool, client.CallsInFlight(1))
	answers := combine(t, latin1, limiter, []request{{"api", "é", nil}, {"api", "🪣", nil}, {"api", "é", nil}})()
	require.NoError(t, answers[0].err)
	require.EqualValues(t, 9, answers[0].Remaining)
	kit.RequireState(t, "22P05", answers[1].err)
	require.NoError(t, answers[2].err)
	require.EqualValues(t, 8, answers[2].Remaining)
}

// Rows come before the transaction commits.
func TestCombiner_ACommitThatFailsIsAnError(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('gate', 10, 1, '1 day'), ratelimit_define_policy('api', 10, 1, '1 day')")
	limiter := newCombiner(t, db.Pool, client.CallsInFlight(1))
	db.Exec(t, `
		create function refuse() returns trigger language plpgsql as $$
		begin
		  raise exception 'refused' using errcode = '23514';
		end $$;
		create constraint trigger refuse after insert or update on ratelimit.buckets deferrable initially deferred
		  for each row when (new.key = 'bad') execute function public.refuse()`)
	answers := combine(t, db, limiter, []request{{"api", "good", nil}, {"api", "bad", nil}})()
	for _, got := range answers {
		kit.RequireState(t, "23514", got.err)
		require.Zero(t, got.Decision)
	}
	require.EqualValues(t, 10, noError(limiter.Peek(t.Context(), "api", "good"))(t).Remaining)
}

// The server ends the session of a call that waits for a lock.
func TestCombiner_AKilledCallIsRepeatedOnlyWithIdempotencyKeys(t *testing.T) {
	t.Parallel()
	for _, keyed := range []bool{false, true} {
		t.Run(fmt.Sprintf("idempotency_keys=%v", keyed), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			ctx := t.Context()
			db.Exec(t, `
				select ratelimit_define_policy('gate', 10, 1, '1 day'),
				       ratelimit_define_policy('api', 10, 1, '1 day'),
				       ratelimit_acquire('api', 'held')`)
			var tries tryCounter
			limiter := newCombiner(t, connect(t, db, nil, tries.count), client.CallsInFlight(1))
			held := begin(t, db.Pool)
			noError(client.New(held).Acquire(ctx, "api", "held"))(t)

			requests := []request{{"api", "free", nil}, {"api", "held", nil}}
			if keyed {
				requests[0].opts, requests[1].opts = once, once
			}
			answers := combine(t, db, limiter, requests)
			killed := waiter(t, db, "ratelimit_acquire_packed", 0)
			db.Exec(t, "select pg_terminate_backend($1::integer)", killed)
			if keyed {
				waiter(t, db, "ratelimit_acquire_packed", killed)
				require.NoError(t, held.Rollback(ctx))
			}

			for i, got := range answers() {
				if keyed {
					require.NoError(t, got.err)
					require.True(t, got.Allowed)
					require.EqualValues(t, 9-i, got.Remaining)
				} else {
					kit.RequireState(t, "57P01", got.err)
				}
			}
			_ = held.Rollback(ctx)
			for i, r := range requests {
				left := map[bool]int{true: 9, false: 10}[keyed] - i // charged once, or rolled back
				require.EqualValues(t, left, noError(limiter.Peek(ctx, r.policy, r.key))(t).Remaining)
			}
			require.Equal(t, map[bool]int64{false: 1 + 1, true: 1 + 2}[keyed], tries.n.Load(), "a call for the gate, then batches")
		})
	}
}

// A transaction holds one of several buckets for longer than lock_timeout allows.
func TestCombiner_ALockedBucketFailsThoseWhoWantIt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 day'), ratelimit_acquire('api', 'held')")
	limiter := newCombiner(t, connect(t, db, map[string]string{"lock_timeout": "2s"}), client.CallsInFlight(1))
	held := begin(t, db.Pool)
	noError(client.New(held).Acquire(t.Context(), "api", "held"))(t)

	keys := []string{"held", "free", "held", "free", "other", "held"}
	answers := make([]answer, len(keys))
	answered := make(chan string, len(keys))
	var wg sync.WaitGroup
	for i, key := range keys {
		wg.Go(func() {
			answers[i].Decision, answers[i].err = limiter.Acquire(t.Context(), "api", key)
			answered <- key
		})
		if i == 0 {
			waiter(t, db, "ratelimit_acquire(", 0) // and the rest share the next call
		}
	}
	wg.Wait()
	order := make([]string, len(keys))
	for i := range order {
		order[i] = <-answered
	}
	require.Equal(t, []string{"held", "held"}, order[len(order)-2:], "nobody else waits for them again")
	for i, key := range keys {
		if key == "held" {
			kit.RequireState(t, "55P03", answers[i].err)
		} else {
			require.NoError(t, answers[i].err, key)
			require.True(t, answers[i].Allowed)
		}
	}

	require.NoError(t, held.Rollback(t.Context()))
	for key, left := range map[string]int64{"held": 9, "free": 8, "other": 9} {
		require.Equal(t, left-1, noError(limiter.Acquire(t.Context(), "api", key))(t).Remaining)
	}
}

// A call for several buckets and a transaction wait for each other, the transaction first: whoever
// has waited for deadlock_timeout looks for a deadlock, once, and is its victim.
func TestCombiner_ADeadlockWithATransaction(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.New(t)
	db.Exec(t, `
		select ratelimit_define_policy('gate', 10, 1, '1 day'),
		       ratelimit_define_policy('api', 10, 1, '1 day'),
		       ratelimit_acquire('api', 'a'), ratelimit_acquire('api', 'b'), ratelimit_acquire('api', 'c')`)
	var tries tryCounter
	limiter := newCombiner(t, connect(t, db, nil, tries.count), client.CallsInFlight(1))
	door, tx := begin(t, db.Pool), begin(t, db.Pool)
	noError(client.New(door).Acquire(ctx, "api", "b"))(t)
	noError(tx.Exec(ctx, "set local deadlock_timeout = '1h'"))(t)
	noError(client.New(tx).Acquire(ctx, "api", "c"))(t)

	answers := combine(t, db, limiter, []request{{"api", "c", nil}, {"api", "b", nil}, {"api", "a", nil}})
	batch := waiter(t, db, "ratelimit_acquire_packed(", 0) // holds a, waits for b
	done := make(chan error)
	go func() {
		_, err := client.New(tx).Acquire(ctx, "api", "a")
		done <- err
	}()
	waiter(t, db, "ratelimit_acquire(", batch)
	require.NoError(t, door.Commit(ctx))
	require.NoError(t, <-done)
	require.NoError(t, tx.Commit(ctx))
	for _, got := range answers() {
		require.NoError(t, got.err)
		require.EqualValues(t, 7, got.Remaining)
	}
	require.EqualValues(t, 1+2, tries.n.Load(), "a call for the gate, and a batch twice")
}

// The server has committed, and the answer is lost.
func TestRetry_ALostAnswer(t *testing.T) {
	t.Parallel()
	for _, combining := range []bool{false, true} {
		for _, keyed := range []bool{false, true} {
			t.Run(fmt.Sprintf("combined=%v/idempotency_key=%v", combining, keyed), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				db.Exec(t, "select ratelimit_define_policy('gate', 10, 1, '1 day'), ratelimit_define_policy('api', 10, 1, '1 day')")
				line := &lossy{function: "ratelimit_acquire("}
				if combining {
					line.function = "ratelimit_acquire_packed("
				}
				line.losses.Store(1)
				pool := connect(t, db, nil, line.use)
				requests := []request{{"api", "a", nil}, {"api", "b", nil}}
				if keyed {
					requests[0].opts, requests[1].opts = once, once
				}

				var answers []answer
				if combining {
					limiter := newCombiner(t, pool, client.CallsInFlight(1))
					answers = combine(t, db, limiter, requests)()
				} else {
					requests = requests[:1]
					d, err := client.New(pool).Acquire(t.Context(), "api", "a", requests[0].opts...)
					answers = []answer{{d, err}}
				}
				require.EqualValues(t, map[bool]int64{false: 0, true: -1}[keyed], line.losses.Load(), "tries")
				for i, got := range answers {
					if keyed {
						require.NoError(t, got.err)
						require.True(t, got.Allowed && got.Replayed, "the second try found what the first has done")
						require.EqualValues(t, 9, got.Remaining)
					} else {
						require.ErrorIs(t, got.err, io.ErrUnexpectedEOF)
					}
					d := noError(client.New(db.Pool).Peek(t.Context(), "api", requests[i].key))(t)
					require.EqualValues(t, 9, d.Remaining, "charged once")
				}
			})
		}
	}
}

// A lossy line loses the first answers to calls of a function, and the connections they came on.
type lossy struct {
	function string
	losses   atomic.Int64 // still to come
}

func (l *lossy) use(config *pgx.ConnConfig) {
	config.DefaultQueryExecMode = pgx.QueryExecModeExec // so that a call is one message with its SQL
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return &lossyConn{Conn: conn, line: l}, err
	}
}

type lossyConn struct {
	net.Conn
	line *lossy
	lose atomic.Bool
}

func (c *lossyConn) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(c.line.function)) && c.line.losses.Add(-1) >= 0 {
		c.lose.Store(true)
	}
	return c.Conn.Write(p)
}

func (c *lossyConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.lose.Load() { // the server answers when it has committed
		return 0, errors.Join(io.ErrUnexpectedEOF, c.Conn.Close())
	}
	return n, err
}

// A transaction holds one of the buckets of a shared call, for as long as it likes. Whoever comes later for
// another bucket is answered meanwhile.
func TestCombiner_ALockedBucketHoldsUpItsOwnCallOnly(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('gate', 100, 1, '1 day'), ratelimit_define_policy('api', 100, 1, '1 day')")
	db.Exec(t, "select ratelimit_acquire('api', 'k' || n) from generate_series(0, 49) as n")
	limiter := newCombiner(t, db.Pool, client.CallsInFlight(2))
	holder := begin(t, db.Pool)
	noError(client.New(holder).Acquire(t.Context(), "api", "k0"))(t)

	var callers sync.WaitGroup
	ask := func(policy, key string) {
		callers.Go(func() {
			d, err := limiter.Acquire(t.Context(), policy, key)
			if err != nil || !d.Allowed {
				t.Errorf("%s: %+v, %v", key, d, err)
			}
		})
	}
	gate := begin(t, db.Pool)
	for _, key := range []string{"a", "b"} { // a call each, so that the others wait for each other
		noError(client.New(gate).Acquire(t.Context(), "gate", key))(t)
		ask("gate", key)
	}
	db.Await(t, time.Minute, "select count(*) = 2 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'")
	for i := range 50 {
		ask("api", fmt.Sprint("k", i))
		for limiter.Waiting() == i {
			runtime.Gosched()
		}
	}
	require.NoError(t, gate.Commit(t.Context()))
	waiter(t, db, "ratelimit_acquire_packed(", 0)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for i := range 5 {
		require.True(t, noError(limiter.Acquire(ctx, "api", fmt.Sprint("late", i)))(t).Allowed)
	}
	require.NoError(t, holder.Rollback(t.Context()))
	callers.Wait()
}

func TestCombiner_LeavesNoGoroutines(t *testing.T) {
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 day')")
	before := goleak.IgnoreCurrent()
	for range 3 {
		limiter := client.NewCombiner(db.Pool)
		var wg sync.WaitGroup
		for caller := range 200 {
			wg.Go(func() {
				ctx, cancel := context.WithCancel(t.Context())
				if caller%3 == 0 {
					go cancel()
				}
				defer cancel()
				_, _ = limiter.Acquire(ctx, "api", fmt.Sprint(caller%7))
			})
		}
		wg.Wait()
		limiter.Close()
	}
	db.Pool.Close() // waits for its connections
	goleak.VerifyNone(t, before)
}

// A role that may make its own calls but not share one is told so by the first call that is shared.
func TestCombiner_SaysThatItNeedsAcquirePacked(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	role := pgx.Identifier{"combiner of " + db.Name}.Sanitize()
	db.Exec(t, "select ratelimit_define_policy('gate', 10, 1, '1 day')")
	db.Exec(t, "create role "+role+" role current_user; grant execute on function ratelimit_acquire to "+role)
	t.Cleanup(func() { db.Exec(t, "drop owned by "+role+"; drop role "+role) })

	limiter := newCombiner(t, connect(t, db, map[string]string{"role": "combiner of " + db.Name}), client.CallsInFlight(1))
	for _, got := range combine(t, db, limiter, []request{{"gate", "l", nil}, {"gate", "m", nil}})() {
		kit.RequireState(t, "42501", got.err)
		require.EqualError(t, got.err, "pgratelimit: acquire: ERROR: permission denied for function ratelimit_acquire_packed (SQLSTATE 42501). "+
			"Its owner can run: grant execute on function ratelimit_acquire_packed(text[], text[], bigint[], integer[], text[]) to <role>;")
	}
	db.Exec(t, "grant execute on function ratelimit_acquire_packed(text[], text[], bigint[], integer[], text[]) to "+role)
	for _, got := range combine(t, db, limiter, []request{{"gate", "l", nil}, {"gate", "m", nil}})() {
		require.NoError(t, got.err)
		require.True(t, got.Allowed)
	}
}

// newCombiner returns a combiner that is closed after the test, and after the transactions that the test begins later.
func newCombiner(t *testing.T, pool client.Pool, opts ...client.Option) *client.Combiner {
	limiter := client.NewCombiner(pool, opts...)
	t.Cleanup(limiter.Close)
	return limiter
}

// A request asks for tokens of one bucket.
type request struct {
	policy, key string
	opts        []client.CallOption
}

var once = []client.CallOption{client.IdempotencyKey("once")}

// combine lets requests wait in order behind a call that waits for a lock, and then go. The policy of
// that call is gate.
func combine(t *testing.T, db *pgtest.DB, limiter *client.Combiner, requests []request) (answers func() []answer) {
	t.Helper()
	got := make([]answer, len(requests))
	wait := combineCalls(t, db, limiter, len(requests), func(i int) {
		r := requests[i]
		got[i].Decision, got[i].err = limiter.Acquire(t.Context(), r.policy, r.key, r.opts...)
	})
	return func() []answer {
		wait()
		return got
	}
}

// combineCalls is combine for any requests.
func combineCalls(t *testing.T, db *pgtest.DB, limiter *client.Combiner, requests int, ask func(int)) (wait func()) {
	t.Helper()
	ctx := t.Context()
	db.Exec(t, "select ratelimit_reset('gate', 'k'), ratelimit_acquire('gate', 'k')")
	gate := begin(t, db.Pool)
	noError(client.New(gate).Acquire(ctx, "gate", "k"))(t)

	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := limiter.Acquire(ctx, "gate", "k"); err != nil {
			t.Error(err)
		}
	})
	waiter(t, db, "ratelimit_acquire(", 0)
	waiting := 0
	for i := range requests {
		done := make(chan struct{})
		wg.Go(func() {
			defer close(done)
			ask(i)
		})
		for limiter.Waiting() == waiting {
			select {
			case <-done: // text that cannot be sent does not wait
				waiting--
			case <-time.After(100 * time.Microsecond):
			}
		}
		waiting++
	}
	require.NoError(t, gate.Commit(ctx))
	return wg.Wait
}

// waiter returns the process of a session, another than not, that waits for a lock in such a statement.
func waiter(t *testing.T, db *pgtest.DB, statement string, not int32) (pid int32) {
	t.Helper()
	const find = `
		select coalesce(min(pid), 0)
		  from pg_stat_activity
		 where datname = current_database() and wait_event_type = 'Lock' and query like '%' || $1 || '%' and pid <> $2`
	db.Await(t, time.Minute, "select ("+find+") <> 0", statement, not)
	require.NoError(t, db.Pool.QueryRow(t.Context(), find, statement, not).Scan(&pid))
	return pid
}
