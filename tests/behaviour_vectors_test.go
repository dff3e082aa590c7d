package tests

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// Cases from the test suites and bug reports of other limiters. The number identifies a case; after it
// stands the project that it came from. Cases with concurrent calls (24, 30, 49 and one of 59) are in
// behaviour_concurrency_test.go, and the idempotency case (58) is in behaviour_idempotency_test.go.

// A vector is a bucket and the calls on it. The bucket starts full, less the tokens taken at the start.
type vector struct {
	origin           string
	capacity, refill int64
	every            time.Duration
	stepped          bool
	taken            int64
	steps            []step
}

// A step is a call at a time after the start, and the decision it gets.
type step struct {
	at   time.Duration
	op   op
	want want
}

// An op is a call on the vector's bucket.
type op struct {
	name string
	n    int64
}

func take(n int64) op { return op{"acquire", n} }
func look(n int64) op { return op{"peek", n} }
func give(n int64) op { return op{"refund", n} }

// debit takes n tokens whatever there is.
func debit(n int64) op { return op{"charge", n} }

// renew resets the bucket, and then peeks.
var renew = op{"reset", 0}

// A want is the part of a decision that a vector speaks of.
type want struct {
	allowed                bool
	remaining              *int64
	retryAfter, resetAfter *model.Micros
}

var grant, deny = want{allowed: true}, want{}

func (w want) rem(n int64) want           { w.remaining = &n; return w }
func (w want) wait(d time.Duration) want  { return w.retry(micros(d)) }
func (w want) never() want                { return w.retry(model.Never) }
func (w want) retry(m model.Micros) want  { w.retryAfter = &m; return w }
func (w want) full(in time.Duration) want { m := micros(in); w.resetAfter = &m; return w }

var vectors = []vector{
	{"1 bucket4j: fractions add up", 10, 10, 100 * ms, false, 10, []step{
		{97 * ms, take(9), grant}, {97 * ms, take(1), deny}, {100 * ms, take(1), grant.rem(0)}, {100 * ms, take(1), deny}}},
	{"2 bucket4j: a full bucket drops its fraction", 10, 10, 100 * ms, false, 10, []step{
		{97 * ms, take(9), grant}, {97 * ms, take(1), deny}, {97 * ms, give(10), grant.rem(10).full(0)}, {97 * ms, take(10), grant.rem(0)},
		{100 * ms, take(1), deny}}},
	{"4 bucket4j: from 100 take 49", 100, 100, 100 * ms, false, 0, []step{{0, take(49), grant.rem(51).wait(0)}}},
	{"4 bucket4j: from 1 take 1", 100, 100, 100 * ms, false, 99, []step{{0, take(1), grant.rem(0).wait(0)}}},
	{"4 bucket4j: from 70 take 80", 100, 100, 100 * ms, false, 30, []step{{0, take(80), deny.rem(70).wait(10 * ms)}}},
	{"4 bucket4j: from 0 take 10", 100, 100, 100 * ms, false, 100, []step{{0, take(10), deny.rem(0).wait(10 * ms)}}},
	{"4 bucket4j: from 10 take 120", 100, 100, 100 * ms, false, 90, []step{{0, take(120), deny.rem(10).never()}}},
	{"6 bucket4j: 50 and 49 given", 100, 100, 100 * ms, false, 100, []step{{50 * ms, give(49), grant.rem(99)}}},
	{"6 bucket4j: 50 and 50 given", 100, 100, 100 * ms, false, 100, []step{{50 * ms, give(50), grant.rem(100)}}},
	{"6 bucket4j: 0 and 50 given", 100, 100, 100 * ms, false, 100, []step{{0, give(50), grant.rem(50)}}},
	{"6 bucket4j: 0 and 120 given", 100, 100, 100 * ms, false, 100, []step{{0, give(120), grant.rem(100)}}},
	{"6 bucket4j: 100 and 120 given", 100, 100, 100 * ms, false, 100, []step{{110 * ms, give(120), grant.rem(100)}}},
	{"8 bucket4j: 2 owed", 100, 100, 100 * ms, false, 100, []step{
		{50 * ms, debit(52), grant.rem(-2).full(102 * ms)}, {50 * ms, look(1), deny.rem(-2).wait(3 * ms)}, {51 * ms, look(0), grant.rem(-1)},
		{52 * ms, look(0), grant.rem(0)}, {52 * ms, take(1), deny.rem(0).wait(1 * ms)}, {53 * ms, take(1), grant.rem(0)}}},
	{"8 bucket4j: 50 owed", 100, 100, 100 * ms, false, 100, []step{
		{0, debit(50), grant.rem(-50)}, {49 * ms, look(0), grant.rem(-1)}, {50 * ms, look(0), grant.rem(0)}}},
	{"8 bucket4j: 51 owed", 100, 100, 100 * ms, false, 100, []step{{120 * ms, debit(151), grant.rem(-51)}, {171 * ms, look(0), grant.rem(0)}}},
	{"8 bucket4j: 300 owed", 100, 100, 100 * ms, false, 100, []step{
		{201 * ms, debit(400), grant.rem(-300)}, {500 * ms, take(1), deny.rem(-1).wait(2 * ms)}, {501 * ms, look(0), grant.rem(0)},
		{602 * ms, look(0), grant.rem(100).full(0)}}},
	{"8 bucket4j: 49 of 50", 100, 100, 100 * ms, false, 100, []step{{50 * ms, take(49), grant.rem(1)}}},
	{"8 bucket4j: 50 of 50", 100, 100, 100 * ms, false, 100, []step{{50 * ms, take(50), grant.rem(0)}}},
	{"8 bucket4j: 51 of 100", 100, 100, 100 * ms, false, 100, []step{{120 * ms, take(51), grant.rem(49)}}},
	{"8 bucket4j: 100 of 100", 100, 100, 100 * ms, false, 100, []step{{101 * ms, take(100), grant.rem(0)}}},
	{"12 bucket4j: 0 and 40 ms", 1000, 1000, second, false, 1000, []step{{40 * ms, look(0), grant.rem(40)}}},
	{"12 bucket4j: 50 and 1 ms", 1000, 1000, second, false, 950, []step{{1 * ms, look(0), grant.rem(51)}}},
	{"12 bucket4j: 55 and the clock back", 1000, 1000, second, false, 945, []step{{-1 * ms, look(0), grant.rem(55)}}},
	{"12 bucket4j: 200 and 10 s", 1000, 1000, second, false, 800, []step{{10 * second, look(0), grant.rem(1000)}}},
	{"12 bucket4j: a fraction is kept", 100, 100, second, false, 100, []step{{3 * ms, look(0), grant.rem(0)}, {10 * ms, take(1), grant.rem(0)}}},
	{"12 bucket4j: a fraction is kept by a take", 100, 100, second, false, 10, []step{
		{17 * ms, look(0), grant.rem(91)},
		{17 * ms, take(1), grant.rem(90)}, // and 0.7
		{19 * ms, look(0), grant.rem(90)},
		{20 * ms, look(0), grant.rem(91)}}},
	{"12 bucket4j: a fraction is dropped when full", 100, 100, second, false, 100, []step{
		{18888 * ms, take(100), grant.rem(0)}, {18897 * ms, take(1), deny.rem(0).wait(1 * ms)}}},
	{"13 bucket4j: full in 90 ms", 10, 10, 100 * ms, false, 9, []step{{0, look(0), grant.full(90 * ms)}}},
	{"13 bucket4j: full in 60 ms", 10, 10, 100 * ms, false, 6, []step{{0, look(0), grant.full(60 * ms)}}},
	{"13 bucket4j: full in 1650 ms", 10, 2, 100 * ms, false, 10, []step{{0, debit(23), grant.full(1650 * ms)}}},
	{"17 bucket4j: fixed interval", 9, 9, 10 * second, true, 9, []step{
		{4 * second, look(0), grant.rem(0)}, {10 * second, look(0), grant.rem(9)}, {11 * second, look(0), grant.rem(9)}}},
	{"19 bucket4j 71: wait for the interval", 10, 10, time.Minute, true, 10, []step{
		{0, take(1), deny.wait(60 * second)}, {0, take(10), deny.wait(60 * second)}, {15 * second, take(1), deny.wait(45 * second)},
		{15 * second, take(15), deny.never()}}},
	{"26 golang/time: burst 1", 1, 10, second, false, 0, []step{
		{0, take(1), grant}, {0, take(1), deny}, {0, take(1), deny}, {100 * ms, take(1), grant}, {100 * ms, take(1), deny}, {100 * ms, take(1), deny},
		{200 * ms, take(2), deny.never()}, {200 * ms, take(1), grant}, {200 * ms, take(1), deny}}},
	{"27 golang/time: burst 3", 3, 10, second, false, 0, []step{
		{0, take(2), grant}, {0, take(2), deny}, {0, take(1), grant}, {0, take(1), deny}, {100 * ms, take(4), deny.never()},
		{200 * ms, take(1), grant.rem(1)}, {300 * ms, take(1), grant.rem(1)}, {400 * ms, take(1), grant.rem(1)}, {400 * ms, take(1), grant.rem(0)},
		{400 * ms, take(1), deny}, {400 * ms, take(1), deny}, {900 * ms, take(3), grant.rem(0)}, {900 * ms, take(0), grant.rem(0)}}},
	// The original grants one at 100 ms again; no time has passed since the first call there.
	{"28 golang/time: the clock jumps back", 3, 10, second, false, 0, []step{
		{100 * ms, take(1), grant}, {0, take(1), grant}, {0, take(1), grant}, {0, take(1), deny.wait(200 * ms)}, {0, take(1), deny},
		{100 * ms, take(1), deny.wait(100 * ms)}, {200 * ms, take(1), grant}, {200 * ms, take(1), deny}}},
	{"34 throttled", 5, 1, second, false, 0, []step{
		{0, take(6), deny.rem(5).full(0).never()}, {0, take(1), grant.rem(4).full(1 * second)}, {0, take(1), grant.rem(3).full(2 * second)},
		{0, take(1), grant.rem(2).full(3 * second)}, {0, take(1), grant.rem(1).full(4 * second)}, {0, take(1), grant.rem(0).full(5 * second)},
		{0, take(1), deny.rem(0).full(5 * second).wait(1 * second)}, {3000 * ms, take(1), grant.rem(2).full(3 * second)},
		{3100 * ms, take(1), grant.rem(1).full(3900 * ms)}, {4000 * ms, take(1), grant.rem(1).full(4 * second)},
		{8000 * ms, take(1), grant.rem(4).full(1 * second)}, {9500 * ms, take(1), grant.rem(4).full(1 * second)},
		{9500 * ms, take(0), grant.rem(4).full(1 * second)}, {9500 * ms, take(2), grant.rem(2).full(3 * second)},
		{9500 * ms, take(5), deny.rem(2).full(3 * second).wait(3 * second)}, {15000 * ms, take(6), deny.rem(5).full(0).never()}}},
	{"36 redis_rate: cost 0", 10, 10, second, false, 0, []step{
		{0, take(0), grant.rem(10).full(0)}, {0, take(1), grant.rem(9)}, {0, take(0), grant.rem(9)}}},
	{"39 mennanov/limiters: overflow", 2, 1, 100 * ms, false, 0, []step{
		{0, take(1), grant}, {0, take(1), grant}, {0, take(1), deny.wait(100 * ms)}, {100 * ms, take(1), grant}}},
	{"39 mennanov/limiters: reset", 2, 1, 100 * ms, false, 0, []step{
		{0, take(2), grant}, {0, take(1), deny}, {0, renew, grant.rem(2).full(0)}, {0, take(1), grant.rem(1)}}},
	{"41 mennanov/limiters: refill carries over", 4, 1, 100 * ms, false, 0, []step{
		{0, take(1), grant}, {150 * ms, take(1), grant.rem(3)}, {240 * ms, take(1), grant.rem(2)}, {290 * ms, take(1), grant.rem(2)},
		{360 * ms, take(1), grant.rem(2)}}},
	{"43 gubernator: more than available", 2000, 2000, time.Hour, false, 0, []step{
		{0, take(1000), grant.rem(1000)}, {0, take(1500), deny.rem(1000)}, {0, take(500), grant.rem(500)}, {0, take(400), grant.rem(100)},
		{0, take(100), grant.rem(0)}, {0, take(1), deny.rem(0)}}},
	// The original's token variant lets a negative hit raise a fresh bucket above its limit.
	{"45 gubernator: giving back", 10, 10, 30 * second, false, 0, []step{
		{0, take(1), grant.rem(9)}, {0, give(1), grant.rem(10)}, {0, take(10), grant.rem(0)}, {0, give(1), grant.rem(1)}}},
	{"50 TensorZero: lifecycle", 100, 10, time.Minute, true, 0, []step{
		{0, take(60), grant.rem(40)}, {0, give(20), grant.rem(60)}, {0, take(60), grant.rem(0)}, {0, take(1), deny.rem(0)}}},
	{"51 TensorZero: 0 of 50", 50, 10, time.Minute, true, 0, []step{{0, take(0), grant.rem(50)}}},
	{"51 TensorZero: 75 of 75", 75, 10, time.Minute, true, 0, []step{{0, take(75), grant.rem(0)}}},
	{"51 TensorZero: 101 of 100", 100, 10, time.Minute, true, 0, []step{{0, take(101), deny.rem(100).never()}}},
	{"51 TensorZero: 150 given to a full bucket", 100, 10, time.Minute, true, 0, []step{{0, give(150), grant.rem(100)}}},
	{"54 Convex: a denial changes nothing", 10, 10, time.Minute, false, 0, []step{
		{0, take(5), grant}, {6 * second, take(6), grant.rem(0)}, {6 * second, take(10), deny.wait(60 * second)}}},
	{"59 pg-ratelimit: one interval", 20, 5, 10 * second, true, 15, []step{{10 * second, take(1), grant.rem(9)}}},
	// The original moves the anchor to 15 s and answers 8 at 20 s.
	{"59 pg-ratelimit: the anchor stays", 20, 5, 10 * second, true, 15, []step{
		{15 * second, take(1), grant.rem(9)}, {20 * second, take(1), grant.rem(13)}}},
	{"59 pg-ratelimit: an hour later", 20, 5, 10 * second, true, 2, []step{{time.Hour, take(1), grant.rem(19)}}},
	{"59 pg-ratelimit: denials cost nothing", 20, 5, 10 * second, true, 20, []step{
		{0, take(1), deny}, {0, take(1), deny}, {0, take(1), deny}, {0, take(1), deny}, {0, take(1), deny}, {10 * second, take(1), grant.rem(4)}}},
	{"59 pg-ratelimit: drained, stepped", 20, 5, 10 * second, true, 20, []step{{0, take(1), deny.wait(10 * second)}}},
	{"59 pg-ratelimit: drained, continuous", 20, 5, 10 * second, false, 20, []step{{0, take(1), deny.wait(2 * second)}}},
	{"61 upstash: 4 taken, 2 given", 10, 10, time.Minute, false, 0, []step{{0, take(4), grant}, {0, give(2), grant.rem(8)}}},
	{"61 upstash: 10 taken, 3 given", 10, 10, time.Minute, false, 0, []step{
		{0, take(10), grant}, {0, give(3), grant.rem(3)}, {0, take(0), grant.rem(3)}}},
	{"61 upstash: denied at 0", 10, 10, time.Minute, false, 10, []step{{0, take(3), deny.rem(0)}, {0, look(0), grant.rem(0)}}},
	{"61 upstash: denied again and again", 10, 10, time.Minute, false, 8, []step{
		{0, take(5), deny.rem(2)}, {0, take(5), deny.rem(2)}, {0, take(5), deny.rem(2)}, {0, look(0), grant.rem(2)}}},
	{"63 go-zero 4072: a late call", 5, 5, second, false, 0, []step{
		{second, take(1), grant}, {second, take(1), grant}, {second, take(1), grant}, {second, take(1), grant.rem(1)}, {0, take(1), grant.rem(0)},
		{second, take(1), deny.rem(0).wait(200 * ms)}}},
	{"64 symfony 47676: full again", 10, 2, second, false, 0, []step{{0, take(1), grant.rem(9)}, {600 * ms, take(10), grant.rem(0)}}},
	{"65 S004: a poll each 100 ms", 100, 1, second, false, 100, []step{
		{100 * ms, take(1), deny.wait(900 * ms)}, {200 * ms, take(1), deny}, {300 * ms, take(1), deny},
		{400 * ms, take(1), deny}, {500 * ms, take(1), deny}, {600 * ms, take(1), deny},
		{700 * ms, take(1), deny}, {800 * ms, take(1), deny}, {900 * ms, take(1), deny.wait(100 * ms)}, {1000 * ms, take(1), grant.rem(0)}}},
}

func TestVectors(t *testing.T) {
	onEachDurability(t, func(t *testing.T, db subject, durability policyOption) {
		for _, v := range vectors {
			t.Run(v.origin, func(t *testing.T) { v.replay(t, db.of(t), durability) })
		}
	})
}

// replay makes the calls and compares the decisions. A call that takes and gives nothing must leave the bucket's row as it is, or absent.
func (v vector) replay(t *testing.T, db subject, durability policyOption) {
	t.Helper()
	rowOf := func(string, string) *bucket { return nil } // the fake shows none
	if db, ok := db.(*testDB); ok {
		rowOf = db.bucket
	}
	refill := continuous
	if v.stepped {
		refill = stepped
	}
	policy, key := v.origin, "k"
	db.definePolicy(policy, v.capacity, v.refill, v.every, refill, durability)
	if v.taken > 0 {
		require.Equal(t, v.capacity-v.taken, db.acquireAt(t0, policy, key, v.taken).Remaining)
	}
	for i, s := range v.steps {
		at, before := t0.Add(s.at), rowOf(policy, key)
		var got decision
		switch s.op.name {
		case "acquire":
			got = db.acquireAt(at, policy, key, s.op.n)
		case "peek":
			got = db.peekAt(at, policy, key, s.op.n)
		case "refund":
			got = db.refundAt(at, policy, key, s.op.n)
		case "charge":
			db.setClock(at)
			charged, err := db.spend(spending{function: "charge", BucketID: model.BucketID{Policy: policy, Key: key}, cost: s.op.n})
			require.NoError(t, err)
			got = charged.decision
		case "reset":
			db.reset(policy, key)
			got = db.peekAt(at, policy, key, 0)
		}
		call := fmt.Sprintf("step %d at %v: %s(%d) answered %+v", i, s.at, s.op.name, s.op.n, got)
		s.want.check(t, got, call)
		require.Equal(t, v.capacity, got.Capacity, call)
		if s.op.name == "peek" || s.op.name == "acquire" && (!got.Allowed || s.op.n == 0) {
			require.Equal(t, before, rowOf(policy, key), call)
		}
	}
}

func (w want) check(t testing.TB, got decision, call string) {
	t.Helper()
	require.Equal(t, w.allowed, got.Allowed, call)
	require.Equal(t, got.Allowed, got.RetryAfter == 0, call)
	require.False(t, got.Replayed, call)
	if w.remaining != nil {
		require.Equal(t, *w.remaining, got.Remaining, call)
	}
	if w.retryAfter != nil {
		require.Equal(t, *w.retryAfter, got.RetryAfter, call)
	}
	if w.resetAfter != nil {
		require.Equal(t, *w.resetAfter, got.ResetAfter, call)
	}
}

func TestVectors_29_LongRunningRate(t *testing.T) {
	onEachDurability(t, func(t *testing.T, db subject, durability policyOption) {
		db.definePolicy("29 golang/time", 100, 100, second, durability)
		granted := 0
		for at := time.Duration(0); at < 5*second; at += 2 * ms {
			if db.acquireAt(t0.Add(at), "29 golang/time", "k", 1).Allowed {
				granted++
			}
		}
		require.InDelta(t, 600, granted, 1)
	})
}

// A bucket that every call drains grants tokens at its rate, whatever the time between the calls, unless it fills up between them.
func TestVectors_64_DeliveredRate(t *testing.T) {
	onEachDurability(t, func(t *testing.T, db subject, durability policyOption) {
		const p = "64 envoy 16407, svix 115"
		db.definePolicy(p, 10, 2, second, durability)
		for _, spacing := range []time.Duration{333 * ms, 700 * ms, 777_777 * time.Microsecond, 1100 * ms, 4400 * ms} {
			key := spacing.String()
			db.acquireAt(t0, p, key, 10)
			delivered, last := 0, time.Duration(0)
			for at := spacing; at <= 300*second; at += spacing {
				for db.acquireAt(t0.Add(at), p, key, 1).Allowed {
					delivered++
				}
				last = at
			}
			require.Equal(t, int(2*last.Seconds()), delivered, "whole tokens in %v, each %v", last, spacing)
		}
	})
}
