package kit

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/stretchr/testify/require"
)

// A vector is a bucket and the calls on it. The bucket starts full, less the tokens taken at the start.
type vector struct {
	Origin           string
	Capacity, refill int64
	every            time.Duration
	stepped          bool
	taken            int64
	Steps            []step
}

// A step is a call at a time after the start, and the decision it gets.
type step struct {
	At   time.Duration
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
func (w want) wait(d time.Duration) want  { return w.retry(Micros(d)) }
func (w want) never() want                { return w.retry(model.Never) }
func (w want) retry(m model.Micros) want  { w.retryAfter = &m; return w }
func (w want) full(in time.Duration) want { m := Micros(in); w.resetAfter = &m; return w }

var Vectors = []vector{
	{"1 bucket4j: fractions add up", 10, 10, 100 * Ms, false, 10, []step{
		{97 * Ms, take(9), grant}, {97 * Ms, take(1), deny}, {100 * Ms, take(1), grant.rem(0)}, {100 * Ms, take(1), deny}}},
	{"2 bucket4j: a full bucket drops its fraction", 10, 10, 100 * Ms, false, 10, []step{
		{97 * Ms, take(9), grant}, {97 * Ms, take(1), deny}, {97 * Ms, give(10), grant.rem(10).full(0)}, {97 * Ms, take(10), grant.rem(0)},
		{100 * Ms, take(1), deny}}},
	{"4 bucket4j: from 100 take 49", 100, 100, 100 * Ms, false, 0, []step{{0, take(49), grant.rem(51).wait(0)}}},
	{"4 bucket4j: from 1 take 1", 100, 100, 100 * Ms, false, 99, []step{{0, take(1), grant.rem(0).wait(0)}}},
	{"4 bucket4j: from 70 take 80", 100, 100, 100 * Ms, false, 30, []step{{0, take(80), deny.rem(70).wait(10 * Ms)}}},
	{"4 bucket4j: from 0 take 10", 100, 100, 100 * Ms, false, 100, []step{{0, take(10), deny.rem(0).wait(10 * Ms)}}},
	{"4 bucket4j: from 10 take 120", 100, 100, 100 * Ms, false, 90, []step{{0, take(120), deny.rem(10).never()}}},
	{"6 bucket4j: 50 and 49 given", 100, 100, 100 * Ms, false, 100, []step{{50 * Ms, give(49), grant.rem(99)}}},
	{"6 bucket4j: 50 and 50 given", 100, 100, 100 * Ms, false, 100, []step{{50 * Ms, give(50), grant.rem(100)}}},
	{"6 bucket4j: 0 and 50 given", 100, 100, 100 * Ms, false, 100, []step{{0, give(50), grant.rem(50)}}},
	{"6 bucket4j: 0 and 120 given", 100, 100, 100 * Ms, false, 100, []step{{0, give(120), grant.rem(100)}}},
	{"6 bucket4j: 100 and 120 given", 100, 100, 100 * Ms, false, 100, []step{{110 * Ms, give(120), grant.rem(100)}}},
	{"8 bucket4j: 2 owed", 100, 100, 100 * Ms, false, 100, []step{
		{50 * Ms, debit(52), grant.rem(-2).full(102 * Ms)}, {50 * Ms, look(1), deny.rem(-2).wait(3 * Ms)}, {51 * Ms, look(0), grant.rem(-1)},
		{52 * Ms, look(0), grant.rem(0)}, {52 * Ms, take(1), deny.rem(0).wait(1 * Ms)}, {53 * Ms, take(1), grant.rem(0)}}},
	{"8 bucket4j: 50 owed", 100, 100, 100 * Ms, false, 100, []step{
		{0, debit(50), grant.rem(-50)}, {49 * Ms, look(0), grant.rem(-1)}, {50 * Ms, look(0), grant.rem(0)}}},
	{"8 bucket4j: 51 owed", 100, 100, 100 * Ms, false, 100, []step{{120 * Ms, debit(151), grant.rem(-51)}, {171 * Ms, look(0), grant.rem(0)}}},
	{"8 bucket4j: 300 owed", 100, 100, 100 * Ms, false, 100, []step{
		{201 * Ms, debit(400), grant.rem(-300)}, {500 * Ms, take(1), deny.rem(-1).wait(2 * Ms)}, {501 * Ms, look(0), grant.rem(0)},
		{602 * Ms, look(0), grant.rem(100).full(0)}}},
	{"8 bucket4j: 49 of 50", 100, 100, 100 * Ms, false, 100, []step{{50 * Ms, take(49), grant.rem(1)}}},
	{"8 bucket4j: 50 of 50", 100, 100, 100 * Ms, false, 100, []step{{50 * Ms, take(50), grant.rem(0)}}},
	{"8 bucket4j: 51 of 100", 100, 100, 100 * Ms, false, 100, []step{{120 * Ms, take(51), grant.rem(49)}}},
	{"8 bucket4j: 100 of 100", 100, 100, 100 * Ms, false, 100, []step{{101 * Ms, take(100), grant.rem(0)}}},
	{"12 bucket4j: 0 and 40 ms", 1000, 1000, Second, false, 1000, []step{{40 * Ms, look(0), grant.rem(40)}}},
	{"12 bucket4j: 50 and 1 ms", 1000, 1000, Second, false, 950, []step{{1 * Ms, look(0), grant.rem(51)}}},
	{"12 bucket4j: 55 and the clock back", 1000, 1000, Second, false, 945, []step{{-1 * Ms, look(0), grant.rem(55)}}},
	{"12 bucket4j: 200 and 10 s", 1000, 1000, Second, false, 800, []step{{10 * Second, look(0), grant.rem(1000)}}},
	{"12 bucket4j: a fraction is kept", 100, 100, Second, false, 100, []step{{3 * Ms, look(0), grant.rem(0)}, {10 * Ms, take(1), grant.rem(0)}}},
	{"12 bucket4j: a fraction is kept by a take", 100, 100, Second, false, 10, []step{
		{17 * Ms, look(0), grant.rem(91)},
		{17 * Ms, take(1), grant.rem(90)}, // and 0.7
		{19 * Ms, look(0), grant.rem(90)},
		{20 * Ms, look(0), grant.rem(91)}}},
	{"12 bucket4j: a fraction is dropped when full", 100, 100, Second, false, 100, []step{
		{18888 * Ms, take(100), grant.rem(0)}, {18897 * Ms, take(1), deny.rem(0).wait(1 * Ms)}}},
	{"13 bucket4j: full in 90 ms", 10, 10, 100 * Ms, false, 9, []step{{0, look(0), grant.full(90 * Ms)}}},
	{"13 bucket4j: full in 60 ms", 10, 10, 100 * Ms, false, 6, []step{{0, look(0), grant.full(60 * Ms)}}},
	{"13 bucket4j: full in 1650 ms", 10, 2, 100 * Ms, false, 10, []step{{0, debit(23), grant.full(1650 * Ms)}}},
	{"17 bucket4j: fixed interval", 9, 9, 10 * Second, true, 9, []step{
		{4 * Second, look(0), grant.rem(0)}, {10 * Second, look(0), grant.rem(9)}, {11 * Second, look(0), grant.rem(9)}}},
	{"19 bucket4j 71: wait for the interval", 10, 10, time.Minute, true, 10, []step{
		{0, take(1), deny.wait(60 * Second)}, {0, take(10), deny.wait(60 * Second)}, {15 * Second, take(1), deny.wait(45 * Second)},
		{15 * Second, take(15), deny.never()}}},
	{"26 golang/time: burst 1", 1, 10, Second, false, 0, []step{
		{0, take(1), grant}, {0, take(1), deny}, {0, take(1), deny}, {100 * Ms, take(1), grant}, {100 * Ms, take(1), deny}, {100 * Ms, take(1), deny},
		{200 * Ms, take(2), deny.never()}, {200 * Ms, take(1), grant}, {200 * Ms, take(1), deny}}},
	{"27 golang/time: burst 3", 3, 10, Second, false, 0, []step{
		{0, take(2), grant}, {0, take(2), deny}, {0, take(1), grant}, {0, take(1), deny}, {100 * Ms, take(4), deny.never()},
		{200 * Ms, take(1), grant.rem(1)}, {300 * Ms, take(1), grant.rem(1)}, {400 * Ms, take(1), grant.rem(1)}, {400 * Ms, take(1), grant.rem(0)},
		{400 * Ms, take(1), deny}, {400 * Ms, take(1), deny}, {900 * Ms, take(3), grant.rem(0)}, {900 * Ms, take(0), grant.rem(0)}}},
	// The original grants one at 100 ms again; no time has passed since the first call there.
	{"28 golang/time: the clock jumps back", 3, 10, Second, false, 0, []step{
		{100 * Ms, take(1), grant}, {0, take(1), grant}, {0, take(1), grant}, {0, take(1), deny.wait(200 * Ms)}, {0, take(1), deny},
		{100 * Ms, take(1), deny.wait(100 * Ms)}, {200 * Ms, take(1), grant}, {200 * Ms, take(1), deny}}},
	{"34 throttled", 5, 1, Second, false, 0, []step{
		{0, take(6), deny.rem(5).full(0).never()}, {0, take(1), grant.rem(4).full(1 * Second)}, {0, take(1), grant.rem(3).full(2 * Second)},
		{0, take(1), grant.rem(2).full(3 * Second)}, {0, take(1), grant.rem(1).full(4 * Second)}, {0, take(1), grant.rem(0).full(5 * Second)},
		{0, take(1), deny.rem(0).full(5 * Second).wait(1 * Second)}, {3000 * Ms, take(1), grant.rem(2).full(3 * Second)},
		{3100 * Ms, take(1), grant.rem(1).full(3900 * Ms)}, {4000 * Ms, take(1), grant.rem(1).full(4 * Second)},
		{8000 * Ms, take(1), grant.rem(4).full(1 * Second)}, {9500 * Ms, take(1), grant.rem(4).full(1 * Second)},
		{9500 * Ms, take(0), grant.rem(4).full(1 * Second)}, {9500 * Ms, take(2), grant.rem(2).full(3 * Second)},
		{9500 * Ms, take(5), deny.rem(2).full(3 * Second).wait(3 * Second)}, {15000 * Ms, take(6), deny.rem(5).full(0).never()}}},
	{"36 redis_rate: cost 0", 10, 10, Second, false, 0, []step{
		{0, take(0), grant.rem(10).full(0)}, {0, take(1), grant.rem(9)}, {0, take(0), grant.rem(9)}}},
	{"39 mennanov/limiters: overflow", 2, 1, 100 * Ms, false, 0, []step{
		{0, take(1), grant}, {0, take(1), grant}, {0, take(1), deny.wait(100 * Ms)}, {100 * Ms, take(1), grant}}},
	{"39 mennanov/limiters: reset", 2, 1, 100 * Ms, false, 0, []step{
		{0, take(2), grant}, {0, take(1), deny}, {0, renew, grant.rem(2).full(0)}, {0, take(1), grant.rem(1)}}},
	{"41 mennanov/limiters: refill carries over", 4, 1, 100 * Ms, false, 0, []step{
		{0, take(1), grant}, {150 * Ms, take(1), grant.rem(3)}, {240 * Ms, take(1), grant.rem(2)}, {290 * Ms, take(1), grant.rem(2)},
		{360 * Ms, take(1), grant.rem(2)}}},
	{"43 gubernator: more than available", 2000, 2000, time.Hour, false, 0, []step{
		{0, take(1000), grant.rem(1000)}, {0, take(1500), deny.rem(1000)}, {0, take(500), grant.rem(500)}, {0, take(400), grant.rem(100)},
		{0, take(100), grant.rem(0)}, {0, take(1), deny.rem(0)}}},
	// The original's token variant lets a negative hit raise a fresh bucket above its limit.
	{"45 gubernator: giving back", 10, 10, 30 * Second, false, 0, []step{
		{0, take(1), grant.rem(9)}, {0, give(1), grant.rem(10)}, {0, take(10), grant.rem(0)}, {0, give(1), grant.rem(1)}}},
	{"50 TensorZero: lifecycle", 100, 10, time.Minute, true, 0, []step{
		{0, take(60), grant.rem(40)}, {0, give(20), grant.rem(60)}, {0, take(60), grant.rem(0)}, {0, take(1), deny.rem(0)}}},
	{"51 TensorZero: 0 of 50", 50, 10, time.Minute, true, 0, []step{{0, take(0), grant.rem(50)}}},
	{"51 TensorZero: 75 of 75", 75, 10, time.Minute, true, 0, []step{{0, take(75), grant.rem(0)}}},
	{"51 TensorZero: 101 of 100", 100, 10, time.Minute, true, 0, []step{{0, take(101), deny.rem(100).never()}}},
	{"51 TensorZero: 150 given to a full bucket", 100, 10, time.Minute, true, 0, []step{{0, give(150), grant.rem(100)}}},
	{"54 Convex: a denial changes nothing", 10, 10, time.Minute, false, 0, []step{
		{0, take(5), grant}, {6 * Second, take(6), grant.rem(0)}, {6 * Second, take(10), deny.wait(60 * Second)}}},
	{"59 pg-ratelimit: one interval", 20, 5, 10 * Second, true, 15, []step{{10 * Second, take(1), grant.rem(9)}}},
	// The original moves the anchor to 15 s and answers 8 at 20 s.
	{"59 pg-ratelimit: the anchor stays", 20, 5, 10 * Second, true, 15, []step{
		{15 * Second, take(1), grant.rem(9)}, {20 * Second, take(1), grant.rem(13)}}},
	{"59 pg-ratelimit: an hour later", 20, 5, 10 * Second, true, 2, []step{{time.Hour, take(1), grant.rem(19)}}},
	{"59 pg-ratelimit: denials cost nothing", 20, 5, 10 * Second, true, 20, []step{
		{0, take(1), deny}, {0, take(1), deny}, {0, take(1), deny}, {0, take(1), deny}, {0, take(1), deny}, {10 * Second, take(1), grant.rem(4)}}},
	{"59 pg-ratelimit: drained, stepped", 20, 5, 10 * Second, true, 20, []step{{0, take(1), deny.wait(10 * Second)}}},
	{"59 pg-ratelimit: drained, continuous", 20, 5, 10 * Second, false, 20, []step{{0, take(1), deny.wait(2 * Second)}}},
	{"61 upstash: 4 taken, 2 given", 10, 10, time.Minute, false, 0, []step{{0, take(4), grant}, {0, give(2), grant.rem(8)}}},
	{"61 upstash: 10 taken, 3 given", 10, 10, time.Minute, false, 0, []step{
		{0, take(10), grant}, {0, give(3), grant.rem(3)}, {0, take(0), grant.rem(3)}}},
	{"61 upstash: denied at 0", 10, 10, time.Minute, false, 10, []step{{0, take(3), deny.rem(0)}, {0, look(0), grant.rem(0)}}},
	{"61 upstash: denied again and again", 10, 10, time.Minute, false, 8, []step{
		{0, take(5), deny.rem(2)}, {0, take(5), deny.rem(2)}, {0, take(5), deny.rem(2)}, {0, look(0), grant.rem(2)}}},
	{"63 go-zero 4072: a late call", 5, 5, Second, false, 0, []step{
		{Second, take(1), grant}, {Second, take(1), grant}, {Second, take(1), grant}, {Second, take(1), grant.rem(1)}, {0, take(1), grant.rem(0)},
		{Second, take(1), deny.rem(0).wait(200 * Ms)}}},
	{"64 symfony 47676: full again", 10, 2, Second, false, 0, []step{{0, take(1), grant.rem(9)}, {600 * Ms, take(10), grant.rem(0)}}},
	{"65 S004: a poll each 100 ms", 100, 1, Second, false, 100, []step{
		{100 * Ms, take(1), deny.wait(900 * Ms)}, {200 * Ms, take(1), deny}, {300 * Ms, take(1), deny},
		{400 * Ms, take(1), deny}, {500 * Ms, take(1), deny}, {600 * Ms, take(1), deny},
		{700 * Ms, take(1), deny}, {800 * Ms, take(1), deny}, {900 * Ms, take(1), deny.wait(100 * Ms)}, {1000 * Ms, take(1), grant.rem(0)}}},
}

// Replay makes the calls and compares the decisions. A call that takes and gives nothing must leave the bucket's row as it is, or absent.
func (v vector) Replay(t *testing.T, db Subject, durability PolicyOption) {
	t.Helper()
	rowOf := func(string, string) *Bucket { return nil } // the fake shows none
	if db, ok := db.(*TestDB); ok {
		rowOf = db.Bucket
	}
	refill := Continuous
	if v.stepped {
		refill = Stepped
	}
	policy, key := v.Origin, "k"
	db.DefinePolicy(policy, v.Capacity, v.refill, v.every, refill, durability)
	if v.taken > 0 {
		require.Equal(t, v.Capacity-v.taken, db.AcquireAt(T0, policy, key, v.taken).Remaining)
	}
	for i, s := range v.Steps {
		at, before := T0.Add(s.At), rowOf(policy, key)
		var got Decision
		switch s.op.name {
		case "acquire":
			got = db.AcquireAt(at, policy, key, s.op.n)
		case "peek":
			got = db.PeekAt(at, policy, key, s.op.n)
		case "refund":
			got = db.RefundAt(at, policy, key, s.op.n)
		case "charge":
			db.SetClock(at)
			charged, err := db.Spend(Spending{Function: "charge", BucketID: model.BucketID{Policy: policy, Key: key}, Cost: s.op.n})
			require.NoError(t, err)
			got = charged.Decision
		case "reset":
			db.Reset(policy, key)
			got = db.PeekAt(at, policy, key, 0)
		}
		call := fmt.Sprintf("step %d at %v: %s(%d) answered %+v", i, s.At, s.op.name, s.op.n, got)
		s.want.Check(t, got, call)
		require.Equal(t, v.Capacity, got.Capacity, call)
		if s.op.name == "peek" || s.op.name == "acquire" && (!got.Allowed || s.op.n == 0) {
			require.Equal(t, before, rowOf(policy, key), call)
		}
	}
}

func (w want) Check(t testing.TB, got Decision, call string) {
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
