package acquire

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

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
				t.Fatalf("%+v: %s\n%s", cases[i], verdict, simplestBroken(p, random, randomPromises, good))
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
			promises[i] = promises[i].AsQuota(random, randomPeriod(random))
		}
	}
	return promises
}

// newPromises is a database that makes promises and tries them, many in one call.
func newPromises(t *testing.T) *kit.TestDB {
	db := kit.NewDB(t)
	db.SetTimeZone("Europe/Berlin") // now + retry_after must not depend on it
	clockInASetting(db)
	db.Execute(`
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
