package acquire

import (
	"context"
	"encoding/json"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// A promise is an acquire of Cost at t0 from a bucket that held Level microtokens Age microseconds
// earlier, or is said to hold them later when Age is below zero. A quota has a Period in place of Refill and Every, and the Level
// of its row.
type promise struct {
	Capacity int64 `json:"capacity"`
	Refill   int64 `json:"refill"`
	Every    int64 `json:"every"`
	Stepped  bool  `json:"stepped"`
	Level    int64 `json:"level"`
	Age      int64 `json:"age"`
	Cost     int64 `json:"cost"`

	Period *string `json:"period"`
	Zone   *string `json:"zone"`
	Anchor *int64  `json:"anchor"` // microseconds after noon of 30 March 2024, the eve of a change of clocks in Europe
}

func (c promise) Valid() bool {
	return 1 <= c.Capacity && c.Capacity <= kit.MaxTokens &&
		1 <= c.Refill && c.Refill <= kit.MaxTokens &&
		1 <= c.Every && c.Every <= kit.MaxSpan &&
		float64(c.Capacity)*float64(c.Every) < float64(c.Refill)*10*kit.MaxSpan &&
		1 <= c.Cost && c.Cost <= c.Capacity &&
		-c.Capacity*1_000_000 <= c.Level && c.Level <= c.Capacity*1_000_000 &&
		-5*kit.MaxSpan <= c.Age && c.Age <= 5*kit.MaxSpan // PostgreSQL's calendar begins in 4713 BC
}

func randomPromise(random *rand.Rand, most int64) promise {
	upTo := func(limit int64) int64 { // every magnitude is as likely as any other
		limit = min(limit, most)
		return min(limit, 1+random.Int64N(1<<(1+random.IntN(bits.Len64(uint64(limit))))))
	}
	var c promise
	for !c.Valid() {
		c = promise{Capacity: upTo(kit.MaxTokens), Refill: upTo(kit.MaxTokens), Every: upTo(kit.MaxSpan), Stepped: random.IntN(2) == 0}
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
			c.Age = upTo(kit.MaxSpan)
		case 6:
			c.Age = -upTo(kit.MaxSpan)
		}
	}
	return c
}

// AsQuota is the promise of a quota with the same numbers, in whole tokens.
func (c promise) AsQuota(random *rand.Rand) promise {
	periods := []string{"1 day", "1 day", "7 days", "30 days", "1 month", "1 month", "3 months", "1 year", "1000 years", "365250 days"}
	zones := []string{"UTC", "Europe/Berlin", "America/New_York", "America/Sao_Paulo", "Pacific/Auckland", "Asia/Kathmandu"}
	anchor := random.Int64N(1<<(1+random.IntN(54))) - random.Int64N(1<<(1+random.IntN(54)))
	c.Refill, c.Every, c.Stepped = 0, 0, false
	c.Level = min(0, max(-9_000_000_000_000, c.Level/1_000_000-c.Capacity)) * 1_000_000 // what is used
	c.Period, c.Zone, c.Anchor = &periods[random.IntN(len(periods))], &zones[random.IntN(len(zones))], &anchor
	return c
}

// verdicts tries cases with the function of that name.
func verdicts(db *kit.TestDB, cases []promise) []string {
	ctx := context.Background()
	input := kit.NoError(json.Marshal(cases))(db.T)
	tx := kit.NoError(db.Pool.Begin(ctx))(db.T)
	defer tx.Rollback(ctx)
	// Were an acquire told to wait for nothing and yet find too little, it would try for ever.
	require.NoError(db.T, kit.ErrorOf(tx.Exec(ctx, "set local statement_timeout = '2min'; set local test.now = '2024-03-30 12:00Z'")))
	verdicts := kit.ColumnOf(db.T, tx, "select * from verdicts($1)", input)
	require.Len(db.T, verdicts, len(cases))
	return verdicts
}

// simplestBroken looks for a verdict that is not good among promises of ever larger numbers.
func simplestBroken(db *kit.TestDB, random *rand.Rand, good []string) string {
	for most := int64(10); most < kit.MaxSpan; most *= 10 {
		cases := randomPromises(random, most)
		for i, verdict := range verdicts(db, cases) {
			if !slices.Contains(good, verdict) {
				return fmt.Sprintf("%+v: %s", cases[i], verdict)
			}
		}
	}
	return "none simpler was found"
}

// Each of many random denials, of policies that refill continuously or stepped and of quotas, is kept to the microsecond: after exactly retry_after the same acquire is allowed and one
// microsecond earlier it is not; after exactly reset_after the whole capacity is there and one microsecond earlier it is not.
func TestTorture_PromisesAreExact(t *testing.T) {
	run := kit.Torture(t, 2)
	random := rand.New(rand.NewPCG(kit.TestSeed(t), 0))
	p := newPromises(t)
	good := []string{"kept", "allowed"} // of the second there was nothing to wait for, and its reset_after was exact
	kept := map[string]int{}            // denials
	for run.GoesOn() {
		cases := randomPromises(random, kit.MaxSpan)
		for i, verdict := range verdicts(p, cases) {
			if !slices.Contains(good, verdict) {
				t.Fatalf("%+v: %s\n%s", cases[i], verdict, simplestBroken(p, random, good))
			}
			switch {
			case verdict != "kept":
			case cases[i].Period != nil:
				kept["quota"]++
			case cases[i].Stepped:
				kept["stepped"]++
			default:
				kept["continuous"]++
			}
		}
	}
	for _, kind := range []string{"continuous", "quota", "stepped"} {
		require.Greater(t, kept[kind], 300)
		run.Figure("promises kept, "+kind, kept[kind], "")
	}
}

// randomPromises have numbers up to most, but for levels.
func randomPromises(random *rand.Rand, most int64) []promise {
	promises := make([]promise, 2000)
	for i := range promises {
		if promises[i] = randomPromise(random, most); i%3 == 0 {
			promises[i] = promises[i].AsQuota(random)
		}
	}
	return promises
}

// newPromises is a database that makes promises and tries them, many in one call.
func newPromises(t *testing.T) *kit.TestDB {
	db := kit.NewDB(t)
	db.SetTimeZone("Europe/Berlin") // now + retry_after must not depend on it
	db.ClockPerSession()
	db.Execute(`
		create function set_clock(now timestamptz) returns void language plpgsql as $$ begin perform set_config('test.now', now::text, true); end $$;
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
		        capacity bigint, refill bigint, every bigint, stepped boolean, level bigint, age bigint, cost bigint, period interval, zone text, anchor bigint))
		      with ordinality as r (capacity, refill, every, stepped, level, age, cost, period, zone, anchor, i);
		  perform ratelimit_define_policy(c.policy, c.capacity, c.refill, (c.every || ' microseconds')::interval, c.stepped) from c where c.period is null;
		  perform ratelimit_define_policy(c.policy, c.capacity, period => c.period,
		                                  anchor => timestamp '2024-03-30 12:00' + (c.anchor || ' microseconds')::interval)
		     from c where c.period is not null;
		  update ratelimit.policies as p set time_zone = c.zone from c where c.policy = p.name and c.period is not null;  -- a call would check it for 25 ms
		  insert into ratelimit.buckets (policy_id, key, level, refilled_at, due_at)
		  select p.id, 'k', c.level, v_now - (c.age || ' microseconds')::interval, v_now from c join ratelimit.policies as p on p.name = c.policy;
		  return query select verdict(c.policy, c.cost, c.capacity, v_now) from c order by c.i;
		end $$`)
	return db
}
