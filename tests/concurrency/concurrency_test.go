// Package concurrency tests decisions beside others: races, crowds, deadlocks, and the plans, locks and writes of grants and denials.
package concurrency

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

func TestConcurrency_ExactlyThoseThatFitAreAllowed(t *testing.T) {
	t.Parallel()
	db := kit.NewCrowdDB(t, 20)
	for _, kind := range []kit.PolicyOption{kit.Durable, kit.Ephemeral, kit.Stepped} {
		db.DefinePolicy("p", 10, 1, kit.ADay, kind)
		for i := range 100 {
			key := fmt.Sprint("k", i)
			answers := make([]kit.Decision, 20)
			kit.Crowd(t, len(answers), func(i int) (err error) { answers[i], err = kit.Acquire(db.Pool, "p", key, 1); return err })
			var remaining []int64
			for _, d := range answers {
				if d.Allowed {
					remaining = append(remaining, d.Remaining)
				}
			}
			require.ElementsMatch(t, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, remaining, "each grant saw the one before it")
			require.Zero(t, db.Left("p", key))
		}
		db.DropPolicy("p")
	}
}

// A bucket gets its row while a request waits for another bucket, and is held when its own turn comes.
func TestConcurrency_ABucketCreatedMeanwhileIsCharged(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.Policy("p", 10, 1, kit.ADay, kind).Take("p", "a", 1)
		holder, other := db.Begin(), db.Begin()
		holder.Acquire("p", "a", 1)
		call := db.Session().StartAll(kit.All("p", "a", "b")).BlockedBy(holder)
		db.Acquire("p", "b", 1)
		other.Acquire("p", "b", 1)
		holder.Execute("rollback")
		call.BlockedBy(other)
		other.Execute("commit")
		require.True(t, call.Answer().Allowed)
		require.Equal(t, []int64{8, 7}, []int64{db.Left("p", "a"), db.Left("p", "b")})
	})
}

// A batch has taken from one bucket and is about to create two others, of which the second gets its row meanwhile.
func TestConcurrency_CreatingABucketIsPartOfTheOrder(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, kit.ADay).Take("p", "x", 1)
	many := func(requests ...kit.NullableRequest) *kit.Pending {
		call, _ := kit.StartBatch(db.Session(), kit.AcquireMany, requests...)
		return call
	}
	holder := db.Begin().Take("p", "a", 1)
	first := many(kit.RequestOf("p", "x", 1), kit.RequestOf("p", "a", 1), kit.RequestOf("p", "b", 1))
	first.BlockedBy(holder)
	db.Acquire("p", "b", 1)
	second := many(kit.RequestOf("p", "b", 1), kit.RequestOf("p", "x", 1))
	second.AwaitLockOrEnd()
	holder.Execute("rollback")
	first.Answer()
	second.Answer()
	require.Equal(t, []int64{9, 7, 7}, []int64{db.Left("p", "a"), db.Left("p", "b"), db.Left("p", "x")})
}

// A batch waits for its second bucket, does not get it, and goes back for its first, which has tokens by now.
func TestConcurrency_NoLockIsLeftOfAWaitInVain(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, kit.ADay).Take("p", "a", 10).Take("p", "b", 1)
	holder, rival := db.Begin(), db.Begin()
	holder.Acquire("p", "b", 1)
	call := db.Session().StartExec("select ratelimit_acquire_many(array['p', 'p'], array['a', 'b'])").BlockedBy(holder)
	db.Must(kit.Refund(db.Pool, "p", "a", 10))
	rival.Acquire("p", "a", 1)
	rivals := rival.StartAcquire("p", "b", 1).BlockedBy(call.Session)
	holder.Execute("commit")
	rivals.Answer()
	rival.Execute("commit")
	call.Answer()
}

// A batch locks all its buckets, rows or not, when one that did not fit at first has tokens after a wait. The bucket of a
// denial has no row after that either.
func TestConcurrency_ADenialLeavesNoRow(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.Policy("p", 10, 1, kit.ADay, kind).Take("p", "x", 1).Take("p", "z", 10)
		holder := db.Begin().Take("p", "x", 1)
		never := kit.WholeRequest{Charges: []model.Charge{kit.ChargeOf("p", "y", 11)}}
		call, answers := kit.StartBatch(db.Session(), kit.AcquireManyWithSizes, kit.All("p", "x"), never, kit.All("p", "z"))
		call.BlockedBy(holder)
		db.Must(kit.Refund(db.Pool, "p", "z", 5))
		holder.Execute("commit")
		call.Answer()
		for i, a := range *answers {
			require.Equal(t, i != 1, a.Whole.Allowed)
		}
		require.Nil(t, db.Bucket("p", "y"))
	})
}

// A migration locks the policies first, and then other tables. So whoever holds a lock on buckets must have one on the
// policies: if it asked for that later, each would wait for the other. Each call is stopped at each of its clock readings.
func TestConcurrency_ThePoliciesAreLockedBeforeTheBuckets(t *testing.T) {
	kit.OnDBs(t, map[string]string{
		"acquire":          "ratelimit_acquire('p', 'row')",
		"acquire, keyed":   "ratelimit_acquire('p', 'row', 1, 'i')",
		"refund":           "ratelimit_refund('p', 'row', 1)",
		"many":             "ratelimit_acquire_many(array['p', 'p'], array['row', 'none'])",
		"all":              "ratelimit_acquire_all(array['p', 'p'], array['row', 'another'])",
		"all, one created": "ratelimit_acquire_all(array['p', 'p'], array['row', 'none'])",
		"all, keyed":       "ratelimit_acquire_all(array['p', 'p'], array['row', 'none'], null, 'i')",
		"all many":         "ratelimit_acquire_many(array['p', 'p', 'p'], array['row', 'another', 'none'], sizes => array[2, 1])",
	}, func(t *testing.T, db *kit.TestDB, call string) {
		db.Policy("p", 10, 1, kit.ADay).Take("p", "row", 1).Take("p", "another", 1)
		db.Execute("create sequence readings")
		db.Execute(`
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
			gate, caller := db.Begin(), db.Begin()
			gate.Execute("select pg_advisory_xact_lock(1)")
			db.Execute("select setval('readings', 1, false)")
			caller.Execute(fmt.Sprintf("set test.stop_at = %d", stops+1))
			pending := caller.StartExec("select " + call)
			over = pending.AwaitLockOrEnd()
			require.Empty(t, kit.Column(t, db.DB, `
					select b.relation::regclass::text from pg_locks as b
					 where b.pid = $1 and b.relation in ('ratelimit.buckets'::regclass, 'ratelimit.idempotency_keys'::regclass)
					   and not exists (select from pg_locks as p where p.pid = b.pid and p.relation = 'ratelimit.policies'::regclass)`,
				caller.PgConn().PID()), "at reading %d", stops+1)
			gate.Execute("rollback")
			pending.Answer()
			caller.Execute("rollback")
		}
		require.Greater(t, stops, 1)
	})
}

// A batch goes by one version of a policy: its grants are remembered for as long as the policy said when they were decided.
func TestConcurrency_APolicyThatChangesMeanwhileChangesNoGrant(t *testing.T) {
	kit.OnDBs(t, map[string]string{
		"one policy":   "ratelimit_acquire_many(array['p'], array['row'], null, array['i'])",
		"two policies": "ratelimit_acquire_many(array['p', 'q'], array['row', 'row'], null, array['i', 'i'])",
		"all":          "ratelimit_acquire_all(array['p', 'q'], array['row', 'row'], null, 'i')",
		"all many":     "ratelimit_acquire_many(array['p', 'q'], array['row', 'row'], null, array['i', 'i'], array[1, 1])",
		"in order":     "ratelimit_acquire_all(array['p', 'p', 'q'], array['row', 'row', 'none'], null, 'i')",
	}, func(t *testing.T, db *kit.TestDB, call string) {
		db.Policy("p", 10, 1, kit.ADay).Policy("q", 10, 1, kit.ADay).Take("p", "row", 1).Take("q", "row", 1)
		holder := db.Begin().Take("p", "row", 1)
		pending := db.Session().Start(func(q kit.Querier) (kit.Decision, error) { return kit.Decide(q, call) }).BlockedBy(holder)
		db.DefinePolicy("p", 20, 1, kit.ADay, kit.Remember(time.Millisecond))
		holder.Execute("rollback")
		d := pending.Answer()
		remembered := db.Number("select extract(epoch from k.expires_at - now())::bigint from ratelimit.idempotency_keys as k join ratelimit.policies as p on p.id = k.policy_id where p.name = 'p'")
		if require.True(t, d.Allowed); d.Capacity == 10 {
			require.Greater(t, remembered, int64(3600))
		} else {
			require.LessOrEqual(t, remembered, int64(0))
		}
	})
}

// A batch does not find an idempotency key whose tokens its bucket, as it saw it, still had. It is stopped between the two.
func TestConcurrency_ABatchReadsBucketsAndIdempotencyKeysAsOfOneInstant(t *testing.T) {
	db := kit.ParallelDB(t)
	gate := db.GateBefore(`if idempotency_keys is null then`, "ratelimit.look_at_buckets")
	db.Policy("p", 10, 1, kit.ADay).Take("p", "k", 6)
	call, answers := kit.StartBatch(gate.Session(), kit.AcquireMany, kit.RequestOf("p", "k", 3, "i"), kit.RequestOf("p", "k", 0))
	call.BlockedBy(gate.Keeper)
	first := db.Acquire("p", "k", 3, "i")
	gate.Open()
	call.Answer()
	require.Equal(t, kit.Replayed(first), *(*answers)[0].Decision)
	require.EqualValues(t, 1, (*answers)[1].Decision.Remaining)
}

// A batch finds no row and no idempotency key, and denies the key. Before it creates the row, the key is granted, and a
// reset removes the row again.
func TestConcurrency_ABatchThatCreatesABucketKnowsItsIdempotencyKeys(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		gate := db.GateBefore(`if not true = any \(v_verdict\.wanted\) then`, "ratelimit.decide_in_order")
		db.DefinePolicy("p", 10, 1, kit.ADay, kind)
		call, answers := kit.StartBatch(gate.Session(), kit.AcquireMany, kit.RequestOf("p", "k", 8), kit.RequestOf("p", "k", 3, "i"))
		call.BlockedBy(gate.Keeper)
		first := db.Acquire("p", "k", 3, "i")
		db.Execute("select ratelimit_reset('p', 'k')")
		gate.Open()
		call.Answer()
		require.EqualValues(t, 2, (*answers)[0].Decision.Remaining)
		require.Equal(t, kit.Replayed(first), *(*answers)[1].Decision)
	})
}

// Whenever another session takes from a bucket of a batch of requests of several elements, the fast path decides the batch.
func TestConcurrency_ABatchLocksWhatOthersChange(t *testing.T) {
	db := kit.ParallelDB(t)
	gate := db.GateBefore(`if v_covered and v_lock then`, "ratelimit.acquire_batch")
	for i, kind := range []kit.PolicyOption{kit.Durable, kit.Ephemeral} {
		policy := fmt.Sprint("p", i)
		db.DefinePolicy(policy, 100, 1, kit.ADay, kind)
		for _, key := range []string{"a", "b", "c"} {
			db.Acquire(policy, key, 10)
		}
		start := func(s *kit.Session) (call *kit.Pending, remaining func() (of []int64, takes string)) {
			s.Execute("set track_functions = pl; begin")
			call, wholes := kit.StartBatch(s, kit.AcquireManyWithSizes, kit.All(policy, "a", "b"), kit.All(policy, "c", "b"))
			return call, func() (of []int64, takes string) {
				call.Answer()
				calls := kit.ColumnOf(t, s, `
					select coalesce(sum(f.calls), 0)::text
					 from unnest('{decide_in_order, take_from_(ephemeral_)?buckets}'::text[]) with ordinality as u (name, n)
					 left join pg_stat_xact_user_functions as f on f.funcname ~ ('^' || u.name || '$') group by u.n order by u.n`)
				require.Equal(t, "0", calls[0], "calls of decide_in_order")
				s.Execute("commit")
				for _, a := range *wholes {
					for _, d := range a.Whole.Decisions {
						of = append(of, d.Remaining)
					}
				}
				return of, calls[1]
			}
		}
		// It has the bucket while the batch looks.
		holder := db.Begin().Take(policy, "b", 20)
		call, remaining := start(db.Session())
		call.BlockedBy(holder)
		holder.Execute("commit")
		left, takes := remaining()
		require.Equal(t, []int64{89, 69, 89, 68}, left)
		require.Equal(t, "1", takes, "it has waited before")
		// It has taken after the batch has looked.
		call, remaining = start(gate.Session())
		call.BlockedBy(gate.Keeper)
		db.Acquire(policy, "b", 20)
		gate.Open()
		left, takes = remaining()
		require.Equal(t, []int64{88, 47, 88, 46}, left)
		require.Equal(t, "2", takes, "the first was rolled back")
		gate.Keeper.Execute("select pg_advisory_lock(1)")
		// It takes while the batch takes.
		call, remaining = start(gate.Session())
		call.BlockedBy(gate.Keeper)
		holder.Execute("begin")
		holder.Acquire(policy, "b", 20)
		gate.Open()
		call.BlockedBy(holder)
		holder.Execute("commit")
		left, _ = remaining()
		require.Equal(t, []int64{87, 25, 87, 24}, left)
		gate.Keeper.Execute("select pg_advisory_lock(1)")
	}
}

// A request of several elements locks its buckets before it takes, if another session has one. It may have waited for that lock.
func TestConcurrency_WhatWaitedForALockGoesByTheClockAndThePolicyAfterTheWait(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		meanwhile func(db *kit.TestDB, holder *kit.Session)
		want      []kit.Decision
	}{
		"clock": {func(db *kit.TestDB, _ *kit.Session) { db.SetClock(kit.T0.Add(3 * kit.Second)) }, []kit.Decision{kit.Allowed(7, 3*kit.Second, 10), kit.Allowed(6, 4*kit.Second, 10)}},
		"policy": {
			func(_ *kit.TestDB, holder *kit.Session) { holder.Execute("select ratelimit_define_policy('p', 5)") },
			[]kit.Decision{kit.Allowed(4, kit.Second, 5), kit.Allowed(3, 2*kit.Second, 5)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
				db.At(kit.T0).Policy("p", 10, 1, kit.Second, kind).Take("p", "a", 5).Take("p", "b", 5)
				holder := db.Begin().Take("p", "b", 1)
				call, answers := kit.StartBatch(db.Session(), kit.AcquireManyWithSizes, kit.All("p", "a", "b"))
				call.BlockedBy(holder)
				test.meanwhile(db, holder)
				holder.Execute("commit")
				call.Answer()
				require.Equal(t, test.want, (*answers)[0].Whole.Decisions)
			})
		})
	}
}

// A waits for b, of which a transaction makes a smaller plan meanwhile.
func TestConcurrency_AnOverrideIsReadAgainAfterAWait(t *testing.T) {
	kit.OnDBs(t, map[string]func(s *kit.Session) *kit.Pending{
		"acquire":     func(s *kit.Session) *kit.Pending { return s.StartAcquire("p", "b", 1) },
		"acquire all": func(s *kit.Session) *kit.Pending { return s.StartAll(kit.All("p", "a", "b")) },
	}, func(t *testing.T, db *kit.TestDB, call func(s *kit.Session) *kit.Pending) {
		db.Policy("p", 10, 1, kit.ADay).Take("p", "b", 1)
		holder := db.Begin().Take("p", "b", 1).Execute("select ratelimit_override('p', 'b', capacity => 0)")
		pending := call(db.Session())
		pending.BlockedBy(holder)
		holder.Execute("select ratelimit_reset('p', 'b')")
		holder.Execute("commit")
		require.Equal(t, kit.Never(0, 0, 0), pending.Answer())
		require.EqualValues(t, 10, db.Left("p", "a"))
	})
}

// While a call waits for a bucket, the numbers change that apply once a part of its override has ended. Its answer is by one override:
// what applies now and what applies then were read together.
func TestConcurrency_AnAnswerIsByOneOverride(t *testing.T) {
	tokens, quota := "select ratelimit_define_policy('p', 10, 1, '1 day'", "select ratelimit_define_policy('p', 10, period => '1 day'"
	for name, call := range map[string][]string{
		"acquire":         {tokens, "ratelimit_acquire('p', 'k', 1)"},
		"acquire, keyed":  {tokens, "ratelimit_acquire('p', 'k', 1, 'first')"},
		"up to":           {tokens, "(select allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed from ratelimit_acquire_up_to('p', 'k', 1))"},
		"refund":          {tokens, "ratelimit_refund('p', 'k', 1)"},
		"reserve":         {tokens, "(select allowed, remaining, wait as retry_after, reset_after, capacity, replayed, shadowed from ratelimit_reserve('p', 'k', '1 s'))"},
		"acquire a quota": {quota, "ratelimit_acquire('p', 'k', 1)"},
	} {
		t.Run(name, func(t *testing.T) {
			kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
				var p kit.PolicyOptions
				kind(&p)
				db.SetClock(kit.T0)
				db.Execute(call[0]+", durable => $1::boolean)", p.Durable)
				db.Acquire("p", "k", 8)
				db.Execute("select ratelimit_override('p', 'k', capacity => 20, expires_at => $1)", kit.T0.Add(time.Hour))
				of := func(q kit.Querier) (kit.Decision, error) { return kit.Decide(q, call[1]) }
				before := db.Begin()
				want := before.Start(of).Answer()
				before.Execute("rollback")

				holder := db.Begin().Take("p", "k", 1)
				pending := db.Session().Start(of).BlockedBy(holder)
				if call[0] == quota {
					db.Execute("select ratelimit_override('p', 'k', time_zone => 'Asia/Tokyo')")
				} else {
					db.Execute("select ratelimit_override('p', 'k', refill => 2)")
				}
				holder.Execute("rollback")
				require.Equal(t, want, pending.Answer())
			})
		})
	}
}

// Rows of a policy that is gone would stay for ever: clean-up looks for such buckets and idempotency keys only.
func TestConcurrency_AnOverrideAndADropOfItsPolicyTakeTurns(t *testing.T) {
	db := kit.ParallelDB(t)
	override, drop := "select ratelimit_override('p', 'k', 5)", "select ratelimit_drop_policy('p')"
	for _, inTurn := range [][2]string{{override, drop}, {drop, override}} {
		db.DefinePolicy("p", 10, 1, kit.ADay)
		db.Execute("select ratelimit_override('p', 'first', 5)") // which writes the row of the policy
		holder := db.Begin().Execute(inTurn[0])
		call := db.Session().StartExec(inTurn[1]).BlockedBy(holder)
		holder.Execute("commit")
		_, err := call.Result()
		require.Equal(t, map[string]string{drop: "", override: "RL001"}[inTurn[1]], kit.SQLState(err), "%v", err)
		require.Zero(t, db.Number("select count(*) from ratelimit.overrides"))
	}
}

// A call that waits for a bucket whose quota is dropped meanwhile is answered by the quota as it was.
func TestConcurrency_AQuotaIsDroppedDuringAWait(t *testing.T) {
	for name, call := range map[string]func(q kit.Querier) (kit.Decision, error){
		"acquire":        func(q kit.Querier) (kit.Decision, error) { return kit.Acquire(q, "p", "k", 3) },
		"acquire, keyed": func(q kit.Querier) (kit.Decision, error) { return kit.Acquire(q, "p", "k", 3, "first") },
		"enforce":        func(q kit.Querier) (kit.Decision, error) { return kit.Decide(q, "ratelimit_enforce('p', 'k', 3)") },
		"charge":         func(q kit.Querier) (kit.Decision, error) { return kit.Decide(q, "ratelimit_charge('p', 'k', 3)") },
		"up to": func(q kit.Querier) (kit.Decision, error) {
			return kit.Decide(q, "(select allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed from ratelimit_acquire_up_to('p', 'k', 3))")
		},
		"reserve": func(q kit.Querier) (kit.Decision, error) {
			return kit.Decide(q, "(select allowed, remaining, wait as retry_after, reset_after, capacity, replayed, shadowed from ratelimit_reserve('p', 'k', '1 day', 3))")
		},
	} {
		t.Run(name, func(t *testing.T) {
			kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
				var p kit.PolicyOptions
				kind(&p)
				db.SetClock(kit.T0)
				db.Execute("select ratelimit_define_policy('p', 10, period => '1 day', durable => $1::boolean)", p.Durable)
				db.Acquire("p", "k", 5)
				holder := db.Begin().Execute("select ratelimit_drop_policy('p')")
				pending := db.Session().Start(call).BlockedBy(holder)
				holder.Execute("commit")
				require.Equal(t, kit.Allowed(7, 12*time.Hour, 10), pending.Answer())
			})
		})
	}
}

// Two sessions create a quota. The second changes what it names, and an override that the key has by then counts.
func TestConcurrency_TwoSessionsCreateAQuota(t *testing.T) {
	db := kit.ParallelDB(t)
	holder := db.Begin().Execute("select ratelimit_define_policy('p', 10, period => '1 day', time_zone => 'Europe/Berlin', anchor => '2024-01-31')").Execute("select ratelimit_override('p', 'k', capacity => 0)")
	call := db.Session().StartExec("select ratelimit_define_policy('p', 20, period => '1 month')").BlockedBy(holder)
	holder.Execute("commit")
	require.NoError(t, kit.ErrorOf(call.Result()))
	require.False(t, db.Acquire("p", "k", 1).Allowed)
	require.EqualValues(t, 19, db.Acquire("p", "other", 1).Remaining)
	require.Equal(t, []string{"1 mon Europe/Berlin 2024-01-31 00:00:00"}, kit.Column(t, db.DB, "select format('%s %s %s', period, time_zone, anchor) from ratelimit_policies()"))
}

func TestConcurrency_DifferentBucketsNeverWaitOnEachOther(t *testing.T) {
	t.Parallel()
	db := kit.NewCrowdDB(t, 1).Policy("p", 10, 1, kit.ADay).Policy("q", 10, 1, kit.ADay)
	for i := range 8 {
		db.Acquire("p", fmt.Sprint("k", i), 1) // half of the buckets have a row
	}
	// Each holds its bucket and its idempotency key until the test ends.
	for i := range 16 {
		for _, policy := range []string{"p", "q"} {
			require.True(t, db.Hasty().Execute("begin").Acquire(policy, fmt.Sprint("k", i), 1, "the same").Allowed)
		}
	}
}

func TestConcurrency_AnAcquireWaitsForTheSameBucketOnly(t *testing.T) {
	kit.OnDBs(t, map[string]bool{"known bucket": true, "first use": false}, func(t *testing.T, db *kit.TestDB, existing bool) {
		db.DefinePolicy("p", 10, 1, kit.ADay)
		if existing {
			db.Take("p", "mine", 1).Take("p", "other", 1)
		}
		before := db.Left("p", "mine")
		holder := db.Begin().Take("p", "mine", 2)
		waiter := db.Session().StartAcquire("p", "mine", 3).BlockedBy(holder)
		require.True(t, db.Hasty().Acquire("p", "other", 1).Allowed)
		// What waits waits for the holder's transaction, and for nothing else.
		require.EqualValues(t, 1, db.Number(
			"select count(*) from pg_locks where not granted and pid in (select pid from pg_stat_activity where datname = current_database())"))
		holder.Execute("commit")
		require.Equal(t, before-5, waiter.Answer().Remaining)
	})
}

func TestConcurrency_APeekAndADenialWaitForNobody(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, kit.ADay).Take("p", "k", 8)
	db.Begin().Take("p", "k", 1)
	hasty := db.Hasty()
	require.False(t, hasty.Acquire("p", "k", 3).Allowed)
	require.EqualValues(t, 2, db.Must(kit.Peek(hasty, "p", "k", 1)).Remaining, "what is committed")
}

func TestGrant_IsAnsweredAsOfOneInstant(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, time.Second)
	db.AcquireAt(kit.T0, "p", "k", 1)
	holder, waiter := db.Begin(), db.Session()
	holder.Acquire("p", "k", 4)
	call := waiter.StartAcquire("p", "k", 3, "i").BlockedBy(holder)
	db.SetClock(kit.T0.Add(1500 * time.Millisecond))
	holder.Execute("commit")
	want := kit.Allowed(2, 8*time.Second, 10)
	require.Equal(t, want, call.Answer())
	require.Equal(t, kit.Replayed(want), db.Acquire("p", "k", 3, "i"))
	require.Equal(t, kit.Allowed(3, 6500*time.Millisecond, 10), db.PeekAt(kit.T0.Add(1500*time.Millisecond), "p", "k", 3))
}

// A bucket that fits at every look and at no update, as others' calls could have it in theory, ends in an error and not in a backend that spins.
func TestGrant_GivesUpAfterManyRounds(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, time.Second, kit.Stepped)
	db.AcquireAt(kit.T0, "p", "k", 3)
	db.Mutate(kit.Mutation{Pattern: `greatest\(refilled_at, now\)`, Replacement: "now"}, "ratelimit.refilled_until")
	db.SetClock(kit.T0.Add(-100 * time.Second)) // update and look disagree
	s := db.Session().Execute("set statement_timeout = '5min'")
	_, err := kit.Acquire(s, "p", "k", 7)
	require.Equal(t, "40001", kit.SQLState(err), err)
	// A batch repeats its round when it wants a bucket that it has not locked.
	db.Mutate(kit.Mutation{Pattern: `(unnest\(v_verdict\.wanted, v_look\.has_row\) [^;]*? where u\.wanted) and u\.has_row\)`, Replacement: "$1)"}, "ratelimit.decide_in_order")
	db.Mutate(kit.Mutation{Pattern: `(elsif exists \(select from unnest\(v_verdict\.wanted, v_lock\) [^;]*? where u\.wanted) and not u\.locked\)`, Replacement: "$1)"}, "ratelimit.decide_in_order")
	_, err = kit.AcquireMany(s, []kit.NullableRequest{kit.RequestOf("p", "new", 7)})
	require.Equal(t, "40001", kit.SQLState(err), err)
	require.Nil(t, db.Bucket("p", "new"))
}

func TestMain(m *testing.M) { pgtest.Main(m) }
