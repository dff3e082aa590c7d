package tests

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

func TestAcquireMany_EqualsOneByOne(t *testing.T) {
	db := parallelDB(t)
	db.setClock(t0)
	ctx := context.Background()
	conn := db.Connect(t)

	pick := func(values ...string) *rapid.Generator[*string] {
		return rapid.Custom(func(t *rapid.T) *string {
			s := rapid.SampledFrom(values).Draw(t, "text")
			return &s
		})
	}
	// Mostly plain requests: those have a way of their own, which one odd request would close.
	plain := rapid.Custom(func(t *rapid.T) nullableRequest {
		cost := rapid.Int64Range(1, 3).Draw(t, "cost")
		return nullableRequest{Policy: pick("a", "b").Draw(t, "policy"), Key: pick("x", "y", "z").Draw(t, "key"), Cost: &cost}
	})
	equal := rapid.Custom(func(t *rapid.T) nullableRequest {
		cost := int64(1)
		return nullableRequest{Policy: pick("a").Draw(t, "policy"), Key: pick("x", "y").Draw(t, "key"), Cost: &cost}
	})
	keyed := rapid.Custom(func(t *rapid.T) nullableRequest {
		w := plain.Draw(t, "request")
		w.Policy = pick("a", "c").Draw(t, "policy")
		w.IdempotencyKey = rapid.Ptr(rapid.SampledFrom([]string{"i", "j", "k", "l", "m", "n"}), true).Draw(t, "idempotency key")
		return w
	})
	odd := rapid.Custom(func(t *rapid.T) nullableRequest {
		w := nullableRequest{
			Policy:         pick("a", "b", "c", "d", "d", "nobody").Draw(t, "policy"),
			Key:            pick("x", "y", "z", "").Draw(t, "key"),
			IdempotencyKey: rapid.Ptr(rapid.SampledFrom([]string{"i", "j", ""}), true).Draw(t, "idempotency key"),
		}
		cost := rapid.SampledFrom([]int64{0, 1, 1, 2, 3, 10, 11, -1}).Draw(t, "cost")
		if rapid.IntRange(0, 9).Draw(t, "null cost") > 0 {
			w.Cost = &cost
		}
		return w
	})

	rapid.Check(rapidTest{t}, func(t *rapid.T) {
		db.exec(`
				delete from ratelimit.policies;
				delete from ratelimit.buckets;
				delete from ratelimit.ephemeral_buckets;
				delete from ratelimit.idempotency_keys;
				delete from ratelimit.ephemeral_idempotency_keys`)
		now := t0
		db.setClock(now)
		db.definePolicy("a", 10, 3, time.Second)
		db.definePolicy("b", 7, 2, 7*time.Second, stepped)
		db.definePolicy("c", 10, 10, time.Second, ephemeral, remember(2*time.Second))
		db.definePolicy("d", 5, 1, time.Minute, stepped, ephemeral)

		for range rapid.IntRange(1, 6).Draw(t, "batches") {
			requests := rapid.OneOf(rapid.SliceOfN(plain, 1, 12), rapid.SliceOfN(equal, 1, 20), rapid.SliceOfN(keyed, 1, 6), rapid.SliceOfN(odd, 1, 12)).Draw(t, "requests")
			now = now.Add(time.Duration(rapid.Int64Range(0, 5_000_000).Draw(t, "wait")) * time.Microsecond)
			db.setClock(now)

			tx, err := conn.Begin(ctx)
			require.NoError(t, err)
			want, err := acquireEach(tx, requests)
			require.NoError(t, err)
			wantState := state(t, tx)
			require.NoError(t, tx.Rollback(ctx))

			got, err := acquireMany(conn, requests)
			require.NoError(t, err)
			require.Equal(t, want, got)
			require.Equal(t, wantState, state(t, conn))
		}
	})
}

// A batch works out small numbers in another way than large ones. The largest small ones and the smallest large ones are
// among those here, and buckets in debt, overfull, or not asked for a long time.
func TestAcquireMany_EqualsOneByOneForNumbersOfEverySize(t *testing.T) {
	db := parallelDB(t)
	inside := db.session()
	inside.exec("set search_path = ratelimit; set track_functions = pl")
	magnitude := func(most float64) int64 { return int64(math.Exp(rand.Float64() * math.Log(most))) }
	met := map[string]int{}
	for i := 0; len(met) < 4 || met["small, granted"] < 100 || met["large, granted"] < 100; i++ {
		capacity, refill, every := magnitude(9e12), magnitude(9e12), magnitude(1e15)
		if i < 10 { // the product of two ticks is no bigint; one fills the bucket
			capacity, refill, every = 1_300_000_000_000, 5_000_000_000_000, 1
		}
		if float64(capacity)*float64(every) > float64(refill)*3e17 { // longer than 10,000 years to fill
			continue
		}
		kind := []policyOption{continuous, stepped}[rand.IntN(2)]
		db.definePolicy("p", capacity, refill, time.Microsecond, kind)
		db.exec("select ratelimit_define_policy('p', every => $1 * interval '1 microsecond')", every)
		db.exec("delete from ratelimit.buckets")
		b := bucket{RefilledAt: t0.Add(-time.Duration(magnitude(9e14)) * time.Microsecond)}
		switch rand.IntN(4) {
		case 0:
			b.Level = -rand.Int64N(1_000_000 * min(3*capacity, 9e12))
		case 1:
			b.Level = magnitude(9e18)
		default:
			b.Level = rand.Int64N(1_000_000 * capacity)
		}
		db.setClock(t0)
		for _, key := range []string{"one", "batch", "another"} {
			db.putBucket("p", key, b)
		}
		cost := min(capacity, magnitude(2e9))
		want := db.acquire("p", "one", cost)
		policy, keys := "p", []string{"batch", "another"}
		answers, err := acquireMany(db.Pool, []nullableRequest{
			{Policy: &policy, Key: &keys[0], Cost: &cost}, {Policy: &policy, Key: &keys[1], Cost: &cost},
		})
		require.NoError(t, err)
		for i, key := range keys {
			require.Equal(t, answer{Decision: &want}, answers[i], "%d of %d and %d every %d us: %+v", cost, capacity, refill, every, b)
			require.Equal(t, db.bucket("p", "one"), db.bucket("p", key), "%d of %d and %d every %d us: %+v", cost, capacity, refill, every, b)
		}
		size, result := "small", "denied"
		inside.exec("select pg_stat_force_next_flush()") // counts from zero
		if len(columnOf(t, inside, `
			select 'large'
			  from (select t.places is null and pg_stat_get_xact_function_calls('take_any_from_buckets'::regproc) > 0 as taken_over
			          from policies as p, take_from_buckets(p, array['none'], array[1], null, null, clock()) as t
			        offset 0) as s
			 where s.taken_over`)) > 0 {
			size = "large"
		}
		if want.Allowed {
			result = "granted"
		}
		met[size+", "+result]++
	}
	t.Log(met)
}

// Batches take the same buckets in opposite orders, some of them for the first time, all too large for what is there.
func TestAcquireMany_NeverDeadlocks(t *testing.T) {
	t.Parallel()
	const (
		callers = 8
		batches = 40
		buckets = 10
	)
	db := newDB(t)
	db.definePolicy("p", 30, 1, 1000*time.Hour)
	db.warm(callers)

	allowed := make([]int, callers*batches)
	decisions := db.together(callers, func(caller int, _ querier) (decision, error) {
		for batch := range batches {
			var requests []nullableRequest
			for i := range 2 * buckets { // each bucket twice, each batch's buckets shared by all callers
				policy, key, cost := "p", fmt.Sprintf("%d/%d", batch, i%buckets), int64(1+i%3)
				requests = append(requests, nullableRequest{Policy: &policy, Key: &key, Cost: &cost})
			}
			rand.Shuffle(len(requests), func(i, j int) { requests[i], requests[j] = requests[j], requests[i] })
			answers, err := acquireMany(db.Pool, requests)
			if err != nil {
				return decision{}, err
			}
			for i, o := range answers {
				if o.Decision.Allowed {
					allowed[caller*batches+batch] += int(*requests[i].Cost)
				}
			}
		}
		return decision{}, nil
	})
	require.Len(t, decisions, callers)

	total := 0
	for _, n := range allowed {
		total += n
	}
	require.EqualValues(t, total, db.number("select sum(30 - level / 1000000) from ratelimit.buckets"), "what was granted is what is gone")
}

// A request that waited for its bucket is decided by what the bucket holds after the wait.
func TestAcquireMany_WaitsAndDecidesAfresh(t *testing.T) {
	db := parallelDB(t)
	db.definePolicy("p", 10, 1, 1000*time.Hour)
	policy, key, cost := "p", "k", int64(2)
	db.acquire(policy, key, 2) // the bucket has a row: 8 left

	holder, waiter := db.begin(), db.session()
	holder.acquire(policy, key, 5) // 3 left, when it commits
	var answers []answer
	call := waiter.start(func(querier) (_ decision, err error) {
		w := nullableRequest{Policy: &policy, Key: &key, Cost: &cost}
		answers, err = acquireMany(waiter, []nullableRequest{w, w, w, w})
		return decision{}, err
	})
	call.awaitBlockedBy(holder)
	holder.exec("commit")
	call.answer()

	var granted []bool
	for _, o := range answers {
		granted = append(granted, o.Decision.Allowed)
	}
	require.Equal(t, []bool{true, false, false, false}, granted)
	require.EqualValues(t, 1, db.left(policy, key))
}

// The transaction that the batch waited for leaves no trace, but time has passed: a bucket that was empty
// when the batch began has refilled, and a single acquire would be granted.
func TestAcquireMany_AWaitThatEndsInARollbackIsDecidedAfresh(t *testing.T) {
	db := parallelDB(t)
	for name, kind := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		for _, keyed := range []bool{false, true} {
			policy, a, b, one, five := fmt.Sprint(name, keyed), "a", "b", int64(1), int64(5)
			db.definePolicy(policy, 10, 10, time.Second, kind)
			db.acquire(policy, a, 1)

			holder, waiter := db.begin(), db.session()
			holder.acquire(policy, a, 1)
			requests := []nullableRequest{{Policy: &policy, Key: &a, Cost: &one}, {Policy: &policy, Key: &b, Cost: &five}}
			if keyed {
				requests[0].IdempotencyKey = &a
			}
			db.acquire(policy, b, 10)
			var answers []answer
			call := waiter.start(func(querier) (_ decision, err error) {
				answers, err = acquireMany(waiter, requests)
				return decision{}, err
			})
			call.awaitBlockedBy(holder)
			db.Await(t, patience, "select allowed from ratelimit_peek($1, $2, 5)", policy, b)
			holder.exec("rollback")
			call.answer()
			require.True(t, answers[0].Decision.Allowed)
			require.True(t, answers[1].Decision.Allowed, "peek had said so: %+v", answers[1].Decision)
		}
	}
}

// Two batches over two policies in opposite orders would wait for each other if the order of their requests were the order of their locks.
func TestAcquireMany_TakesPoliciesInOneOrder(t *testing.T) {
	db := parallelDB(t)
	policies, key, cost := []string{"p", "q"}, "k", int64(1)
	for _, policy := range policies {
		db.definePolicy(policy, 10, 1, aDay)
		db.acquire(policy, key, 1)
	}
	many := func(first, second int) *pending {
		requests := []nullableRequest{{&policies[first], &key, &cost, nil}, {&policies[second], &key, &cost, nil}}
		return db.session().start(func(q querier) (decision, error) {
			_, err := acquireMany(q.(rowsQuerier), requests)
			return decision{}, err
		})
	}
	holder := db.begin()
	holder.acquire("p", key, 1)
	pq := many(0, 1)
	pq.awaitBlockedBy(holder)
	qp := many(1, 0)
	qp.awaitBlockedBy(pq.session) // for p; it would have q by now
	holder.exec("rollback")
	pq.answer()
	qp.answer()
	require.EqualValues(t, 7, db.left("p", key))
	require.EqualValues(t, 7, db.left("q", key))
}

// A client that reads by position would give callers each other's answers. What is asked again finds its buckets there, which is the fast path.
func TestAcquireAllMany_ARequestWithoutElementsHasARowOfItsOwn(t *testing.T) {
	t.Parallel()
	for name, sizes := range map[string][]int{
		"in the middle": {1, 0, 1}, "first": {0, 1, 1}, "last": {2, 0}, "several": {0, 2, 0, 0, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
				db.definePolicy("p", 10, 1, time.Hour, durability)
				var requests []wholeRequest
				for i, size := range sizes {
					var r wholeRequest
					for j := range size {
						r.charges = append(r.charges, model.Charge{BucketID: model.BucketID{Policy: "p", Key: fmt.Sprint(i, j)}, Cost: 1})
					}
					requests = append(requests, r)
				}
				for n := range 4 {
					answers, err := acquireAllMany(db.Pool, requests)
					if n%2 == 1 {
						answers, err = acquirePacked(db.Pool, requests, true)
					}
					require.NoError(t, err)
					require.Len(t, answers, len(sizes))
					for i, a := range answers {
						if sizes[i] > 0 {
							require.True(t, a.Whole.Allowed)
							require.Len(t, a.Whole.Decisions, sizes[i])
							continue
						}
						require.Nil(t, a.Whole)
						require.Equal(t, fmt.Sprintf("22023: invalid sizes: Request %d has 0 elements.: Pass 1 to 1000 elements for each request.", i+1), a.Error)
					}
				}
			})
		})
	}
}

func TestAcquireMany_DenialsWriteNothing(t *testing.T) {
	db := parallelDB(t)
	db.definePolicy("p", 1, 1, 1000*time.Hour)
	db.acquire("p", "k", 1)
	s := db.begin()
	policy, key, cost, idempotencyKey, another := "p", "k", int64(1), "i", "j"
	w := nullableRequest{Policy: &policy, Key: &key, Cost: &cost}
	keyed, keyedToo := w, w
	keyed.IdempotencyKey, keyedToo.IdempotencyKey = &idempotencyKey, &another
	for _, requests := range [][]nullableRequest{{w, w, w}, {keyed, w, keyedToo}, {keyed, keyed}} {
		answers, err := acquireMany(s, requests)
		require.NoError(t, err)
		for _, o := range answers {
			assert.False(t, o.Decision.Allowed)
		}
	}
	var xid *string
	require.NoError(t, s.QueryRow(context.Background(), "select pg_current_xact_id_if_assigned()::text").Scan(&xid))
	require.Nil(t, xid)
	db.hasty().exec("select from ratelimit.buckets for update nowait")
}

// The repeat stands beside requests that are granted at once, and its bucket is empty by now.
func TestAcquireMany_ARepeatIsNoDenial(t *testing.T) {
	db := parallelDB(t)
	db.definePolicy("p", 3, 1, 1000*time.Hour)
	db.acquire("p", "other", 1)
	first := db.acquire("p", "k", 3, "i")
	first.Replayed = true
	policy, key, other, one, three, idempotencyKey := "p", "k", "other", int64(1), int64(3), "i"
	answers, err := acquireMany(db.session(), []nullableRequest{
		{Policy: &policy, Key: &other, Cost: &one},
		{Policy: &policy, Key: &key, Cost: &three, IdempotencyKey: &idempotencyKey},
	})
	require.NoError(t, err)
	require.True(t, answers[0].Decision.Allowed)
	require.Equal(t, &first, answers[1].Decision)
}

func TestAcquireMany_RefusesUnequalArrays(t *testing.T) {
	db := parallelDB(t)
	db.definePolicy("p", 10, 1, time.Hour)
	for call, argument := range map[string]string{
		"null, array['k']":                                  "policies",
		"array['p'], null":                                  "keys",
		"array['p', 'p'], array['k']":                       "keys",
		"array['p'], array['k'], '{}'":                      "costs",
		"array['p'], array['k'], array[1, 2]":               "costs",
		"array['p'], array['k'], null, array[null, 'i']":    "idempotency_keys",
		"'{}', array['k']":                                  "keys",
		"array['p'], array['k'], array[1], array[]::text[]": "idempotency_keys",
	} {
		_, err := db.Pool.Exec(context.Background(), "select * from ratelimit_acquire_many("+call+")")
		e := pgError(err)
		if assert.NotNil(t, e, call) {
			assert.Equal(t, "22023", e.Code, call)
			assert.Equal(t, "invalid "+argument, e.Message, call)
			assert.NotEmpty(t, e.Hint, call)
		}
	}
	require.Zero(t, db.number("select count(*) from ratelimit.buckets"))

	require.Zero(t, db.number("select count(*) from ratelimit_acquire_many('{}', '{}')"), "no request, no answer")
}

// A batch that waits for a bucket that is being removed takes its buckets in the order of all others
// still, when somebody else has made the bucket anew.
func TestAcquireMany_ABucketRemovedMeanwhileIsTakenInOrder(t *testing.T) {
	db := parallelDB(t)
	db.definePolicy("p", 10, 1, aDay)
	a, b, policy, cost := "a", "b", "p", int64(1)
	for _, key := range []string{a, b} {
		db.acquire(policy, key, 1)
	}
	both := []nullableRequest{{&policy, &a, &cost, nil}, {&policy, &b, &cost, nil}}
	many := func(q querier) (decision, error) {
		_, err := acquireMany(q.(rowsQuerier), both)
		return decision{}, err
	}

	remover, maker := db.begin(), db.begin()
	remover.exec("select ratelimit_reset('p', 'a')")
	keeper := db.begin()
	keeper.acquire(policy, b, 1)
	batch := db.session().start(many)
	batch.awaitBlockedBy(remover)
	remover.exec("commit") // the batch goes on to b
	batch.awaitBlockedBy(keeper)
	maker.acquire(policy, a, 1)
	other := maker.startAcquire(policy, b, 1)
	db.Await(t, patience, "select cardinality(pg_blocking_pids($1)) > 0", maker.PgConn().PID())
	keeper.exec("commit")
	_, err := other.result()
	require.NoError(t, err)
	maker.exec("commit")
	_, err = batch.result()
	require.NoError(t, err)
}

// A batch that is about to create the row of a bucket holds no later bucket. Otherwise it would meet a session that has
// created the row since, and waits for the later bucket.
func TestAcquireMany_ABucketCreatedMeanwhileIsTakenInOrder(t *testing.T) {
	db := parallelDB(t)
	db.definePolicy("p", 10, 1, aDay)
	a, b, policy, cost := "a", "b", "p", int64(1)
	db.acquire(policy, b, 1)
	both := []nullableRequest{{&policy, &a, &cost, nil}, {&policy, &b, &cost, nil}}
	many := func(q querier) (decision, error) {
		_, err := acquireMany(q.(rowsQuerier), both)
		return decision{}, err
	}

	g := db.gateBefore(`insert into buckets \(policy_id, key, level, refilled_at, due_at\) values`, "ratelimit.lock_buckets")
	batch := g.session().start(many)
	batch.awaitBlockedBy(g.keeper)
	db.acquire(policy, a, 1)
	_, err := many(db.session())
	require.NoError(t, err)
	g.open()
	_, err = batch.result()
	require.NoError(t, err)
	require.EqualValues(t, 7, db.left(policy, a))
	require.EqualValues(t, 7, db.left(policy, b))
}
