package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each of many random denials, half of them stepped, is kept to the microsecond: after exactly retry_after the same acquire is allowed and one
// microsecond earlier it is not; after exactly reset_after the whole capacity is there and one microsecond earlier it is not.
func TestTorture_PromisesAreExact(t *testing.T) {
	const each = 4_000
	run := torture(t, 0)
	random := rand.New(rand.NewPCG(testSeed(t), 0))
	p := newPromises(t)
	kept := map[bool]int{} // denials, by whether they were stepped
	for kept[false] < each || kept[true] < each || run.goesOn() {
		cases := randomPromises(random, maxSpan)
		for i, verdict := range p.check(cases) {
			switch verdict {
			case "kept":
				kept[cases[i].Stepped]++
			case "allowed": // there was nothing to wait for, and reset_after was exact
			default:
				t.Fatalf("%+v: %s\n%s", cases[i], verdict, p.simplest(random))
			}
		}
	}
}

// A promise is an acquire of Cost at t0 from a bucket that held Level microtokens Age microseconds
// earlier, or is said to hold them later when Age is below zero.
type promise struct {
	Capacity int64 `json:"capacity"`
	Refill   int64 `json:"refill"`
	Every    int64 `json:"every"`
	Stepped  bool  `json:"stepped"`
	Level    int64 `json:"level"`
	Age      int64 `json:"age"`
	Cost     int64 `json:"cost"`
}

const (
	maxTokens = 9_000_000_000_000
	maxSpan   = 365_250 * day // 1000 years
)

func (c promise) valid() bool {
	return 1 <= c.Capacity && c.Capacity <= maxTokens &&
		1 <= c.Refill && c.Refill <= maxTokens &&
		1 <= c.Every && c.Every <= maxSpan &&
		float64(c.Capacity)*float64(c.Every) < float64(c.Refill)*10*maxSpan &&
		1 <= c.Cost && c.Cost <= c.Capacity &&
		-c.Capacity*1_000_000 <= c.Level && c.Level <= c.Capacity*1_000_000 &&
		-5*maxSpan <= c.Age && c.Age <= 5*maxSpan // PostgreSQL's calendar begins in 4713 BC
}

// randomPromises have numbers up to most, but for levels.
func randomPromises(random *rand.Rand, most int64) []promise {
	promises := make([]promise, 2000)
	for i := range promises {
		promises[i] = randomPromise(random, most)
	}
	return promises
}

func randomPromise(random *rand.Rand, most int64) promise {
	upTo := func(limit int64) int64 { // every magnitude is as likely as any other
		limit = min(limit, most)
		return min(limit, 1+random.Int64N(1<<(1+random.IntN(bits.Len64(uint64(limit))))))
	}
	var c promise
	for !c.valid() {
		c = promise{Capacity: upTo(maxTokens), Refill: upTo(maxTokens), Every: upTo(maxSpan), Stepped: random.IntN(2) == 0}
		switch random.IntN(2) {
		case 0:
			c.Cost = upTo(c.Capacity)
		case 1:
			c.Cost = 1 + random.Int64N(c.Capacity)
		}
		switch wanted := c.Cost * 1_000_000; random.IntN(8) {
		case 0, 1:
			c.Level = random.Int64N(wanted)
		case 2, 3:
			c.Level = wanted - upTo(wanted)
		case 4, 5:
			c.Level = -upTo(c.Capacity * 1_000_000)
		case 6:
			c.Level = c.Capacity * 1_000_000
		}
		switch random.IntN(8) {
		case 0, 1, 2: // within the time it takes
			wait := float64(c.Cost*1_000_000-c.Level) / 1e6 / float64(c.Refill) * float64(c.Every)
			c.Age = int64(random.Float64() * wait)
		case 3, 4: // around whole intervals
			c.Age = c.Every*random.Int64N(4) + random.Int64N(3) - 1
		case 5:
			c.Age = upTo(maxSpan)
		case 6:
			c.Age = -upTo(maxSpan)
		}
	}
	return c
}

// promises is a database that makes promises and tries them, many in one call.
type promises struct{ *testDB }

// clockInASetting lets SQL move the clock: a table would collect a row version for each move of it.
func (db *testDB) clockInASetting() {
	db.t.Helper()
	db.exec(`
		create or replace function ratelimit.clock() returns timestamptz language sql volatile as $$ select current_setting('test.now')::timestamptz $$;
		create function set_clock(now timestamptz) returns void language plpgsql as $$ begin perform set_config('test.now', now::text, true); end $$`)
}

func newPromises(t *testing.T) *promises {
	t.Helper()
	db := newDB(t)
	db.setTimeZone("Europe/Berlin") // now + retry_after must not depend on it
	db.clockInASetting()
	db.exec(`
		create function verdict(policy text, cost bigint, capacity bigint, now timestamptz) returns text language plpgsql as $$
		declare
		  v_microsecond constant interval := '1 microsecond';
		  v_first ratelimit.decision;
		  v_then  ratelimit.decision;
		begin
		  perform set_clock(now);
		  v_first := ratelimit_acquire(policy, 'k', cost);
		  if v_first.reset_after > interval '0' then
		    perform set_clock(now + v_first.reset_after - v_microsecond);
		    if (ratelimit_peek(policy, 'k', capacity)).allowed then return 'too long: reset_after ' || v_first.reset_after; end if;
		  end if;
		  perform set_clock(now + v_first.reset_after);
		  v_then := ratelimit_peek(policy, 'k', capacity);
		  if not v_then.allowed or v_then.reset_after <> interval '0' then return 'too short: reset_after ' || v_first.reset_after; end if;
		  if v_first.allowed then return 'allowed'; end if;
		  perform set_clock(now + v_first.retry_after - v_microsecond);
		  v_then := ratelimit_acquire(policy, 'k', cost);
		  if v_then.allowed or v_then.retry_after <> v_microsecond then return 'too long: retry_after ' || v_first.retry_after; end if;
		  perform set_clock(now + v_first.retry_after);
		  v_then := ratelimit_acquire(policy, 'k', cost);
		  if not v_then.allowed or v_then.remaining < 0 then return 'too short: retry_after ' || v_first.retry_after; end if;
		  return 'kept';
		exception when others then return sqlerrm;
		end $$;
		create function verdicts(cases json) returns setof text language plpgsql as $$
		declare
		  v_now constant timestamptz := '2024-03-30 12:00:00+00';
		begin
		  create temporary table c on commit drop as
		    select *, 'policy ' || i as policy from rows from (json_to_recordset(cases) as (
		        capacity bigint, refill bigint, every bigint, stepped boolean, level bigint, age bigint, cost bigint))
		      with ordinality as r (capacity, refill, every, stepped, level, age, cost, i);
		  perform ratelimit_define_policy(c.policy, c.capacity, c.refill, (c.every || ' microseconds')::interval, c.stepped) from c;
		  insert into ratelimit.buckets (policy_id, key, level, refilled_at, due_at)
		  select p.id, 'k', c.level, v_now - (c.age || ' microseconds')::interval, v_now from c join ratelimit.policies as p on p.name = c.policy;
		  return query select verdict(c.policy, c.cost, c.capacity, v_now) from c order by c.i;
		end $$`)
	return &promises{db}
}

// check returns "kept", "allowed" when there was nothing to wait for, or else what was wrong.
func (p *promises) check(cases []promise) []string {
	p.t.Helper()
	return verdicts(p.testDB, cases)
}

// verdicts tries cases with the function of that name.
func verdicts[T any](db *testDB, cases []T) []string {
	db.t.Helper()
	ctx := context.Background()
	input, err := json.Marshal(cases)
	require.NoError(db.t, err)
	tx, err := db.Pool.Begin(ctx)
	require.NoError(db.t, err)
	defer tx.Rollback(ctx)
	// Were an acquire told to wait for nothing and yet find too little, it would try for ever.
	_, err = tx.Exec(ctx, "set local statement_timeout = '2min'")
	require.NoError(db.t, err)
	verdicts := columnOf(db.t, tx, "select * from verdicts($1)", input)
	require.Len(db.t, verdicts, len(cases))
	return verdicts
}

// simplest looks for a broken promise among ever larger numbers.
func (p *promises) simplest(random *rand.Rand) string {
	p.t.Helper()
	for most := int64(10); most < maxSpan; most *= 10 {
		cases := randomPromises(random, most)
		for i, verdict := range p.check(cases) {
			if verdict != "kept" && verdict != "allowed" {
				return fmt.Sprintf("%+v: %s", cases[i], verdict)
			}
		}
	}
	return "none simpler was found"
}
