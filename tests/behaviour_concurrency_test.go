package tests

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

func TestConcurrency_ExactlyThoseThatFitAreAllowed(t *testing.T) {
	t.Parallel()
	db := newCrowdDB(t, 20)
	for _, kind := range []policyOption{durable, ephemeral} {
		db.definePolicy("p", 10, 1, aDay, kind)
		for i := range 100 {
			key := fmt.Sprint("k", i)
			answers := db.together(20, func(_ int, q querier) (decision, error) { return acquire(q, "p", key, 1) })
			require.Equal(t, 10, count(answers, isAllowed))
			remaining := map[int64]bool{}
			for _, d := range answers {
				if d.Allowed {
					remaining[d.Remaining] = true
				}
			}
			require.Len(t, remaining, 10, "each grant saw the one before it")
			require.Zero(t, db.left("p", key))
		}
		db.dropPolicy("p")
	}
}

func TestConcurrency_AThousandCallersOnFiftyBuckets(t *testing.T) {
	t.Parallel()
	db := newCrowdDB(t, 1000).policy("p", 100, 1, aDay)
	var granted atomic.Int64
	db.together(1000, func(i int, q querier) (d decision, err error) {
		for j := range 10 { // twice as many as fit
			d, err = acquire(q, "p", fmt.Sprint("k", (i+j)%50), 1)
			if err != nil {
				return d, err
			}
			if d.Allowed {
				granted.Add(1)
			}
		}
		return d, nil
	})
	require.EqualValues(t, 5000, granted.Load())
	require.EqualValues(t, 50, db.number("select count(*) from ratelimit.buckets where level < 1000000"))
}

// Requests for random sets of 2 to 5 of 12 buckets. Each grant took from all its buckets, and a denial from none.
func TestConcurrency_AThousandOverlappingSets(t *testing.T) {
	t.Parallel()
	const calls, buckets = 1000, 12
	for policy, kind := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		for name, capacity := range map[string]int64{"plenty": 10_000, "scarce": 150} {
			t.Run(policy+" "+name, func(t *testing.T) {
				t.Parallel()
				db := newCrowdDB(t, calls).policy(policy, capacity, 1, aDay, kind)
				requests, granted := make([]wholeRequest, calls), make([]whole, calls)
				crowd(t, calls, func(i int) (err error) {
					for _, n := range rand.Perm(buckets)[:2+rand.IntN(4)] {
						requests[i].charges = append(requests[i].charges, chargeOf(policy, fmt.Sprint("k", n), 1+rand.Int64N(3)))
					}
					granted[i], err = requests[i].acquireAll(db.Pool)
					return err
				})
				left, denials := map[string]int64{}, 0
				for i := range buckets {
					left[fmt.Sprint("k", i)] = capacity
				}
				for i, r := range requests {
					for _, c := range r.charges {
						if granted[i].Allowed {
							left[c.Key] -= c.Cost
						}
					}
				}
				for key, want := range left {
					require.Equal(t, want, db.left(policy, key), key)
				}
				for i, r := range requests {
					if granted[i].Allowed {
						continue
					}
					denials++
					require.True(t, slices.ContainsFunc(r.charges, func(c model.Charge) bool { return left[c.Key] < c.Cost }),
						"denied, and all of it is still there: %+v", r)
				}
				require.Equal(t, name == "scarce", denials > 0, "%d denials", denials)
			})
		}
	}
}

// all is a request of one token of each bucket.
func all(policy string, keys ...string) (r wholeRequest) {
	for _, key := range keys {
		r.charges = append(r.charges, chargeOf(policy, key, 1))
	}
	return r
}

func (s *session) startAll(r wholeRequest) *pending {
	return s.start(func(q querier) (decision, error) {
		w, err := r.acquireAll(q)
		return w.Decision, err
	})
}

// awaitLockOrEnd returns when the call waits for a lock or is over.
func (p *pending) awaitLockOrEnd() (over bool) {
	require.Eventually(p.session.db.t, func() bool {
		select {
		case <-p.done:
			over = true
		default:
		}
		return over || p.session.db.number("select count(*) from pg_locks where pid = $1 and not granted", p.session.PgConn().PID()) > 0
	}, patience, ms)
	return over
}

// A bucket gets its row while a request waits for another bucket, and is held when its own turn comes.
func TestConcurrency_ABucketCreatedMeanwhileIsCharged(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.policy("p", 10, 1, aDay, kind).take("p", "a", 1)
		holder, other := db.begin(), db.begin()
		holder.acquire("p", "a", 1)
		call := db.session().startAll(all("p", "a", "b")).blockedBy(holder)
		db.acquire("p", "b", 1)
		other.acquire("p", "b", 1)
		holder.exec("rollback")
		call.awaitBlockedBy(other)
		other.exec("commit")
		require.True(t, call.answer().Allowed)
		require.Equal(t, []int64{8, 7}, []int64{db.left("p", "a"), db.left("p", "b")})
	})
}

// A batch has taken from one bucket and is about to create two others, of which the second gets its row meanwhile.
func TestConcurrency_CreatingABucketIsPartOfTheOrder(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, aDay).take("p", "x", 1)
	many := func(requests ...nullableRequest) *pending {
		call, _ := startBatch(db.session(), acquireMany, requests...)
		return call
	}
	holder := db.begin().take("p", "a", 1)
	first := many(requestOf("p", "x", 1), requestOf("p", "a", 1), requestOf("p", "b", 1))
	first.awaitBlockedBy(holder)
	db.acquire("p", "b", 1)
	second := many(requestOf("p", "b", 1), requestOf("p", "x", 1))
	second.awaitLockOrEnd()
	holder.exec("rollback")
	first.answer()
	second.answer()
	require.Equal(t, []int64{9, 7, 7}, []int64{db.left("p", "a"), db.left("p", "b"), db.left("p", "x")})
}

// A batch waits for its second bucket, does not get it, and goes back for its first, which has tokens by now.
func TestConcurrency_NoLockIsLeftOfAWaitInVain(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, aDay).take("p", "a", 10).take("p", "b", 1)
	holder, rival := db.begin(), db.begin()
	holder.acquire("p", "b", 1)
	call := db.session().startExec("select ratelimit_acquire_many(array['p', 'p'], array['a', 'b'])").blockedBy(holder)
	db.must(refund(db.Pool, "p", "a", 10))
	rival.acquire("p", "a", 1)
	rivals := rival.startAcquire("p", "b", 1).blockedBy(call.session)
	holder.exec("commit")
	rivals.answer()
	rival.exec("commit")
	call.answer()
}

// A batch locks all its buckets, rows or not, when one that did not fit at first has tokens after a wait. The bucket of a
// denial has no row after that either.
func TestConcurrency_ADenialLeavesNoRow(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		db.policy("p", 10, 1, aDay, kind).take("p", "x", 1).take("p", "z", 10)
		holder := db.begin().take("p", "x", 1)
		never := wholeRequest{charges: []model.Charge{chargeOf("p", "y", 11)}}
		call, answers := startBatch(db.session(), acquireAllMany, all("p", "x"), never, all("p", "z"))
		call.awaitBlockedBy(holder)
		db.must(refund(db.Pool, "p", "z", 5))
		holder.exec("commit")
		call.answer()
		for i, a := range *answers {
			require.Equal(t, i != 1, a.Whole.Allowed)
		}
		require.Nil(t, db.bucket("p", "y"))
	})
}

// A migration locks the policies first, and then other tables. So whoever holds a lock on buckets must have one on the
// policies: if it asked for that later, each would wait for the other. Each call is stopped at each of its clock readings.
func TestConcurrency_ThePoliciesAreLockedBeforeTheBuckets(t *testing.T) {
	onDBs(t, map[string]string{
		"acquire":          "ratelimit_acquire('p', 'row')",
		"acquire, keyed":   "ratelimit_acquire('p', 'row', 1, 'i')",
		"refund":           "ratelimit_refund('p', 'row', 1)",
		"many":             "ratelimit_acquire_many(array['p', 'p'], array['row', 'none'])",
		"all":              "ratelimit_acquire_all(array['p', 'p'], array['row', 'another'])",
		"all, one created": "ratelimit_acquire_all(array['p', 'p'], array['row', 'none'])",
		"all, keyed":       "ratelimit_acquire_all(array['p', 'p'], array['row', 'none'], null, 'i')",
		"all many":         "ratelimit_acquire_all_many(array['p', 'p', 'p'], array['row', 'another', 'none'], null, array[2, 1])",
	}, func(t *testing.T, db *testDB, call string) {
		db.policy("p", 10, 1, aDay).take("p", "row", 1).take("p", "another", 1)
		db.exec("create sequence readings")
		db.exec(`
				create or replace function ratelimit.clock() returns timestamptz language plpgsql volatile as $$
				begin
				  if nextval('public.readings')::text = current_setting('test.stop_at') then
				    perform pg_advisory_xact_lock(1);
				  end if;
				  return clock_timestamp();
				end;
				$$`)
		stops := 0
		for over := false; !over; stops++ {
			gate, caller := db.begin(), db.begin()
			gate.exec("select pg_advisory_xact_lock(1)")
			db.exec("select setval('readings', 1, false)")
			caller.exec(fmt.Sprintf("set test.stop_at = %d", stops+1))
			pending := caller.startExec("select " + call)
			over = pending.awaitLockOrEnd()
			require.Empty(t, column(t, db.DB, `
					select b.relation::regclass::text from pg_locks as b
					 where b.pid = $1 and b.relation in ('ratelimit.buckets'::regclass, 'ratelimit.idempotency_keys'::regclass)
					   and not exists (select from pg_locks as p where p.pid = b.pid and p.relation = 'ratelimit.policies'::regclass)`,
				caller.PgConn().PID()), "at reading %d", stops+1)
			gate.exec("rollback")
			pending.answer()
			caller.exec("rollback")
		}
		require.Greater(t, stops, 1)
	})
}

// A batch goes by one version of a policy: its grants are remembered for as long as the policy said when they were decided.
func TestConcurrency_APolicyThatChangesMeanwhileChangesNoGrant(t *testing.T) {
	onDBs(t, map[string]string{
		"one policy":   "ratelimit_acquire_many(array['p'], array['row'], null, array['i'])",
		"two policies": "ratelimit_acquire_many(array['p', 'q'], array['row', 'row'], null, array['i', 'i'])",
		"all":          "ratelimit_acquire_all(array['p', 'q'], array['row', 'row'], null, 'i')",
		"all many":     "ratelimit_acquire_all_many(array['p', 'q'], array['row', 'row'], null, array[1, 1], array['i', 'i'])",
		"in order":     "ratelimit_acquire_all(array['p', 'p', 'q'], array['row', 'row', 'none'], null, 'i')",
	}, func(t *testing.T, db *testDB, call string) {
		db.policy("p", 10, 1, aDay).policy("q", 10, 1, aDay).take("p", "row", 1).take("q", "row", 1)
		holder := db.begin().take("p", "row", 1)
		pending := db.session().start(func(q querier) (decision, error) { return decide(q, call) }).blockedBy(holder)
		db.definePolicy("p", 20, 1, aDay, remember(time.Millisecond))
		holder.exec("rollback")
		d := pending.answer()
		remembered := db.number("select extract(epoch from k.expires_at - now())::bigint from ratelimit.idempotency_keys as k join ratelimit.policies as p on p.id = k.policy_id where p.name = 'p'")
		if require.True(t, d.Allowed); d.Capacity == 10 {
			require.Greater(t, remembered, int64(3600))
		} else {
			require.LessOrEqual(t, remembered, int64(0))
		}
	})
}

// A batch does not find an idempotency key whose tokens its bucket, as it saw it, still had. It is stopped between the two.
func TestConcurrency_ABatchReadsBucketsAndIdempotencyKeysAsOfOneInstant(t *testing.T) {
	db := parallelDB(t)
	gate := db.gateBefore(`if idempotency_keys is null then`, "ratelimit.look_at_buckets")
	db.policy("p", 10, 1, aDay).take("p", "k", 6)
	call, answers := startBatch(gate.session(), acquireMany, requestOf("p", "k", 3, "i"), requestOf("p", "k", 0))
	call.awaitBlockedBy(gate.keeper)
	first := db.acquire("p", "k", 3, "i")
	gate.open()
	call.answer()
	require.Equal(t, replayed(first), *(*answers)[0].Decision)
	require.EqualValues(t, 1, (*answers)[1].Decision.Remaining)
}

// A batch finds no row and no idempotency key, and denies the key. Before it creates the row, the key is granted, and a
// reset removes the row again.
func TestConcurrency_ABatchThatCreatesABucketKnowsItsIdempotencyKeys(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
		gate := db.gateBefore(`if not true = any \(v_verdict\.wanted\) then`, "ratelimit.decide_in_order")
		db.definePolicy("p", 10, 1, aDay, kind)
		call, answers := startBatch(gate.session(), acquireMany, requestOf("p", "k", 8), requestOf("p", "k", 3, "i"))
		call.awaitBlockedBy(gate.keeper)
		first := db.acquire("p", "k", 3, "i")
		db.exec("select ratelimit_reset('p', 'k')")
		gate.open()
		call.answer()
		require.EqualValues(t, 2, (*answers)[0].Decision.Remaining)
		require.Equal(t, replayed(first), *(*answers)[1].Decision)
	})
}

// Whenever another session takes from a bucket of a batch of requests of several elements, the fast path decides the batch.
func TestConcurrency_ABatchLocksWhatOthersChange(t *testing.T) {
	db := parallelDB(t)
	gate := db.gateBefore(`if v_covered and v_lock then`, "ratelimit.acquire_batch")
	for i, kind := range []policyOption{durable, ephemeral} {
		policy := fmt.Sprint("p", i)
		db.definePolicy(policy, 100, 1, aDay, kind)
		for _, key := range []string{"a", "b", "c"} {
			db.acquire(policy, key, 10)
		}
		start := func(s *session) (call *pending, remaining func() (of []int64, takes string)) {
			s.exec("set track_functions = pl; begin")
			call, wholes := startBatch(s, acquireAllMany, all(policy, "a", "b"), all(policy, "c", "b"))
			return call, func() (of []int64, takes string) {
				call.answer()
				calls := columnOf(t, s, `
					select coalesce(sum(f.calls), 0)::text
					 from unnest('{decide_in_order, take_from_(ephemeral_)?buckets}'::text[]) with ordinality as u (name, n)
					 left join pg_stat_xact_user_functions as f on f.funcname ~ ('^' || u.name || '$') group by u.n order by u.n`)
				require.Equal(t, "0", calls[0], "calls of decide_in_order")
				s.exec("commit")
				for _, a := range *wholes {
					for _, d := range a.Whole.Decisions {
						of = append(of, d.Remaining)
					}
				}
				return of, calls[1]
			}
		}
		// It has the bucket while the batch looks.
		holder := db.begin().take(policy, "b", 20)
		call, remaining := start(db.session())
		call.awaitBlockedBy(holder)
		holder.exec("commit")
		left, takes := remaining()
		require.Equal(t, []int64{89, 69, 89, 68}, left)
		require.Equal(t, "1", takes, "it has waited before")
		// It has taken after the batch has looked.
		call, remaining = start(gate.session())
		call.awaitBlockedBy(gate.keeper)
		db.acquire(policy, "b", 20)
		gate.open()
		left, takes = remaining()
		require.Equal(t, []int64{88, 47, 88, 46}, left)
		require.Equal(t, "2", takes, "the first was rolled back")
		gate.keeper.exec("select pg_advisory_lock(1)")
		// It takes while the batch takes.
		call, remaining = start(gate.session())
		call.awaitBlockedBy(gate.keeper)
		holder.exec("begin")
		holder.acquire(policy, "b", 20)
		gate.open()
		call.awaitBlockedBy(holder)
		holder.exec("commit")
		left, _ = remaining()
		require.Equal(t, []int64{87, 25, 87, 24}, left)
		gate.keeper.exec("select pg_advisory_lock(1)")
	}
}

// A request of several elements locks its buckets before it takes, if another session has one. It may have waited for that lock.
func TestConcurrency_WhatWaitedForALockGoesByTheClockAndThePolicyAfterTheWait(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		meanwhile func(db *testDB, holder *session)
		want      []decision
	}{
		"clock": {func(db *testDB, _ *session) { db.setClock(t0.Add(3 * second)) }, []decision{allowed(7, 3*second, 10), allowed(6, 4*second, 10)}},
		"policy": {
			func(_ *testDB, holder *session) { holder.exec("select ratelimit_define_policy('p', 5)") },
			[]decision{allowed(4, second, 5), allowed(3, 2*second, 5)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachDurability(t, func(t *testing.T, db *testDB, kind policyOption) {
				db.at(t0).policy("p", 10, 1, second, kind).take("p", "a", 5).take("p", "b", 5)
				holder := db.begin().take("p", "b", 1)
				call, answers := startBatch(db.session(), acquireAllMany, all("p", "a", "b"))
				call.awaitBlockedBy(holder)
				test.meanwhile(db, holder)
				holder.exec("commit")
				call.answer()
				require.Equal(t, test.want, (*answers)[0].Whole.Decisions)
			})
		})
	}
}

// A waits for b, of which a transaction makes a smaller plan meanwhile.
func TestConcurrency_AnOverrideIsReadAgainAfterAWait(t *testing.T) {
	onDBs(t, map[string]func(s *session) *pending{
		"acquire":     func(s *session) *pending { return s.startAcquire("p", "b", 1) },
		"acquire all": func(s *session) *pending { return s.startAll(all("p", "a", "b")) },
	}, func(t *testing.T, db *testDB, call func(s *session) *pending) {
		db.policy("p", 10, 1, aDay).take("p", "b", 1)
		holder := db.begin().take("p", "b", 1).run("select ratelimit_override('p', 'b', capacity => 0)")
		pending := call(db.session())
		pending.awaitBlockedBy(holder)
		holder.exec("select ratelimit_reset('p', 'b')")
		holder.exec("commit")
		require.Equal(t, never(0, 0, 0), pending.answer())
		require.EqualValues(t, 10, db.left("p", "a"))
	})
}

// Rows of a policy that is gone would stay for ever: clean-up looks for such buckets and idempotency keys only.
func TestConcurrency_AnOverrideAndADropOfItsPolicyTakeTurns(t *testing.T) {
	db := parallelDB(t)
	override, drop := "select ratelimit_override('p', 'k', 5)", "select ratelimit_drop_policy('p')"
	for _, inTurn := range [][2]string{{override, drop}, {drop, override}} {
		db.definePolicy("p", 10, 1, aDay)
		db.exec("select ratelimit_override('p', 'first', 5)") // which writes the row of the policy
		holder := db.begin().run(inTurn[0])
		call := db.session().startExec(inTurn[1]).blockedBy(holder)
		holder.exec("commit")
		_, err := call.result()
		require.Equal(t, map[string]string{drop: "", override: "RL001"}[inTurn[1]], sqlState(err), "%v", err)
		require.Zero(t, db.number("select count(*) from ratelimit.overrides"))
	}
}

func TestConcurrency_Vectors(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		name             string
		capacity, refill int64
		every            time.Duration
		refilled         policyOption
		callers, keys    int
		cost             int64
		granted          int
		left             int64 // in each bucket
	}{
		{"24 parallel initialization", 10, 1, time.Minute, stepped, 4, 1, 1, 4, 6},
		{"30 simultaneous requests", 5, 1, time.Second, continuous, 15, 1, 1, 5, 0},
		{"49 race", 100, 10, time.Minute, stepped, 50, 1, 5, 20, 0},
		{"49 stress", 200, 10, time.Minute, stepped, 100, 10, 15, 100, 50},
		{"59 parallel, stepped", 20, 5, 10 * time.Second, stepped, 50, 1, 1, 20, 0},
		{"59 parallel, continuous", 20, 5, 10 * time.Second, continuous, 50, 1, 1, 20, 0},
	} {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			db := newCrowdDB(t, v.callers)
			db.at(t0).policy("p", v.capacity, v.refill, v.every, v.refilled)
			answers := db.together(v.callers, func(i int, q querier) (decision, error) { return acquire(q, "p", fmt.Sprint("k", i%v.keys), v.cost) })
			require.Equal(t, v.granted, count(answers, isAllowed))
			for i := range v.keys {
				require.Equal(t, v.left, db.left("p", fmt.Sprint("k", i)))
			}
		})
	}
}

func TestConcurrency_DifferentBucketsNeverWaitOnEachOther(t *testing.T) {
	t.Parallel()
	db := newCrowdDB(t, 1).policy("p", 10, 1, aDay).policy("q", 10, 1, aDay)
	for i := range 8 {
		db.acquire("p", fmt.Sprint("k", i), 1) // half of the buckets have a row
	}
	// Each holds its bucket and its idempotency key until the test ends.
	for i := range 16 {
		for _, policy := range []string{"p", "q"} {
			s := db.hasty().run("begin")
			require.True(t, s.acquire(policy, fmt.Sprint("k", i), 1, "the same").Allowed)
		}
	}
}

func TestConcurrency_AnAcquireWaitsForTheSameBucketOnly(t *testing.T) {
	onDBs(t, map[string]bool{"known bucket": true, "first use": false}, func(t *testing.T, db *testDB, existing bool) {
		db.definePolicy("p", 10, 1, aDay)
		if existing {
			db.take("p", "mine", 1).take("p", "other", 1)
		}
		before := db.left("p", "mine")
		holder := db.begin().take("p", "mine", 2)
		waiter := db.session().startAcquire("p", "mine", 3).blockedBy(holder)
		require.True(t, db.hasty().acquire("p", "other", 1).Allowed)
		// What waits waits for the holder's transaction, and for nothing else.
		require.EqualValues(t, 1, db.number(
			"select count(*) from pg_locks where not granted and pid in (select pid from pg_stat_activity where datname = current_database())"))
		holder.exec("commit")
		require.Equal(t, before-5, waiter.answer().Remaining)
	})
}

func TestConcurrency_APeekAndADenialWaitForNobody(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, aDay).take("p", "k", 8)
	db.begin().take("p", "k", 1)
	hasty := db.hasty()
	require.False(t, hasty.acquire("p", "k", 3).Allowed)
	require.EqualValues(t, 2, db.must(peek(hasty, "p", "k", 1)).Remaining, "what is committed")
}

func TestGrant_IsAnsweredAsOfOneInstant(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, time.Second)
	db.acquireAt(t0, "p", "k", 1)
	holder, waiter := db.begin(), db.session()
	holder.acquire("p", "k", 4)
	call := waiter.startAcquire("p", "k", 3, "i").blockedBy(holder)
	db.setClock(t0.Add(1500 * time.Millisecond))
	holder.exec("commit")
	want := allowed(2, 8*time.Second, 10)
	require.Equal(t, want, call.answer())
	require.Equal(t, replayed(want), db.acquire("p", "k", 3, "i"))
	require.Equal(t, allowed(3, 6500*time.Millisecond, 10), db.peekAt(t0.Add(1500*time.Millisecond), "p", "k", 3))
}

// A bucket that fits at every look and at no update, as others' calls could have it in theory, ends in an error and not in a backend that spins.
func TestGrant_GivesUpAfterManyRounds(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, time.Second)
	db.acquireAt(t0, "p", "k", 3)
	db.mutate(mutation{`greatest\(refilled_at, now\)`, "now"}, "ratelimit.refilled_until")
	db.setClock(t0.Add(-100 * time.Second)) // update and look disagree
	s := db.session().run("set statement_timeout = '20s'")
	_, err := acquire(s, "p", "k", 7)
	require.Equal(t, "40001", sqlState(err), err)
	// A batch repeats its round when it wants a bucket that it has not locked.
	db.mutate(mutation{`(unnest\(v_verdict\.wanted, v_look\.has_row\) [^;]*? where u\.wanted) and u\.has_row\)`, "$1)"}, "ratelimit.decide_in_order")
	db.mutate(mutation{`(elsif exists \(select from unnest\(v_verdict\.wanted, v_lock\) [^;]*? where u\.wanted) and not u\.locked\)`, "$1)"}, "ratelimit.decide_in_order")
	_, err = acquireMany(s, []nullableRequest{requestOf("p", "new", 7)})
	require.Equal(t, "40001", sqlState(err), err)
	require.Nil(t, db.bucket("p", "new"))
}
