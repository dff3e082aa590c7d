package torture

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Random requests of several charges that are denied are promised their retry_after to the microsecond: a denial takes nothing, the same
// request is allowed exactly then, and one microsecond earlier it is not. What is denied for ever is denied thousands of years later too.
func TestTorture_WholesKeepTheirPromises(t *testing.T) {
	run := kit.Torture(t, 10)
	random := rand.New(rand.NewPCG(kit.TestSeed(t), 0))
	p := newWholePromises(t)

	met := map[string]int{}
	for run.GoesOn() {
		cases := randomWholePromises(random, kit.MaxSpan)
		for i, verdict := range kit.Verdicts(p, cases) {
			if !slices.Contains(goodVerdicts, verdict) {
				t.Fatalf("%+v: %s\n%s", cases[i], verdict, kit.SimplestBroken(p, random, randomWholePromises, goodVerdicts))
			}
			met[verdict]++
		}
		run.Progress("%v", met)
	}
	for _, verdict := range goodVerdicts {
		require.NotZero(t, met[verdict], verdict)
	}
	for _, verdict := range slices.Sorted(maps.Keys(met)) {
		run.Figure("promises: "+verdict, met[verdict], "")
	}
}

// Each of these bugs breaks a promise soon.
func TestWholePromises_FindPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	promised := func(retryAfter string) func(*kit.TestDB) {
		return func(db *kit.TestDB) {
			db.Execute(`
				create or replace function asked(policies text[], keys text[], costs bigint[], out allowed boolean, out retry_after interval)
				  language sql
				as $$ select allowed, ` + retryAfter + ` from ratelimit_acquire_all(policies, keys, costs) $$`)
		}
	}
	kit.InParallel(t, map[string]func(*kit.TestDB){
		"a microsecond short": promised("retry_after - interval '1 microsecond'"),
		"a microsecond long":  promised("retry_after + interval '1 microsecond'"),
		"the shortest wait":   promised("(select min(d.retry_after) from unnest(decisions) as d where not d.allowed)"),
		"an end to for ever":  promised("coalesce(retry_after, '1 day')"),
		"the first longest wait": func(db *kit.TestDB) {
			db.Mutate(kit.Mutation{Pattern: "exit when not v_over", Replacement: "exit"}, "ratelimit.waits_of_all")
		},
	}, func(t *testing.T, plant func(*kit.TestDB)) {
		random := rand.New(rand.NewPCG(kit.TestSeed(t), 0))
		p := newWholePromises(t)
		plant(p)
		for n := range 100 {
			cases := randomWholePromises(random, kit.MaxSpan)
			if n == 0 {
				cases[0] = anEndBeforeTheLongestWait
			}
			for _, verdict := range kit.Verdicts(p, cases) {
				if !slices.Contains(goodVerdicts, verdict) {
					t.Log(verdict)
					return
				}
			}
		}
		t.Error("it is not found among 10,000 promises")
	})
}

// What a verdict may be: kept to the microsecond; denied for ever; or there was nothing to wait for.
var goodVerdicts = []string{"kept", "kept for ever", "allowed"}

// A wholePromise is a request of several charges at t0.
type wholePromise struct {
	Buckets []promisedBucket `json:"buckets"`
	Charges []promisedCharge `json:"charges"`
}

// A promisedBucket is as in its promise; a Refill of 0 refills nothing.
type promisedBucket struct {
	kit.Promise
	Durable    bool        `json:"durable"`
	Shadow     bool        `json:"shadow"`
	Overridden bool        `json:"overridden"` // the numbers are an override's,
	Ends       int64       `json:"ends"`       // so many microseconds from now, 0 for never,
	Own        kit.Promise `json:"own"`        // and the policy has these
}

type promisedCharge struct {
	Bucket int   `json:"bucket"` // counted from 0
	Cost   int64 `json:"cost"`
}

// In this promise, which random ones seldom are, the last bucket fits after 100 s. The override of the first ends before, and its policy
// fits after 200 s. The override of the second ends between, and its policy fits after 400 s.
var anEndBeforeTheLongestWait = wholePromise{
	Buckets: []promisedBucket{
		{Promise: oneTokenEvery(10), Overridden: true, Ends: 50_000_000, Own: oneTokenEvery(200)},
		{Promise: oneTokenEvery(10), Overridden: true, Ends: 150_000_000, Own: oneTokenEvery(400)},
		{Promise: oneTokenEvery(100), Own: oneTokenEvery(1)},
	},
	Charges: []promisedCharge{{0, 1}, {1, 1}, {2, 1}},
}

func oneTokenEvery(seconds int64) kit.Promise {
	return kit.Promise{Capacity: 10, Refill: 1, Every: seconds * 1_000_000, Cost: 1}
}

func randomWholePromises(random *rand.Rand, most int64) []wholePromise {
	promises := make([]wholePromise, 100) // one statement tries them all
	for i := range promises {
		promises[i] = randomWholePromise(random, most)
	}
	return promises
}

func randomWholePromise(random *rand.Rand, most int64) (p wholePromise) {
	oneIn := func(n int) bool { return random.IntN(n) == 0 }
	first := kit.RandomPromise(random, most)
	for bucket := range 1 + random.IntN(4) {
		b := promisedBucket{Promise: first, Durable: oneIn(2), Shadow: oneIn(6), Overridden: oneIn(2), Own: kit.RandomPromise(random, most)}
		switch {
		case bucket == 0:
		case oneIn(2):
			b.Promise = kit.RandomPromise(random, most)
		default: // which one is longest should be a close thing
			b.Promise = beside(random, first)
		}
		if oneIn(3) {
			b.Own = beside(random, b.Promise)
		}
		switch wait := float64(b.Cost*1_000_000-b.Level) / 1e6 / float64(b.Refill) * float64(b.Every); random.IntN(4) {
		case 0:
			b.Ends = kit.RandomPromise(random, most).Every
		case 1, 2: // about when it has enough
			b.Ends = 1 + int64(random.Float64()*2*max(0, wait))
		}
		if oneIn(12) {
			b.Refill = 0
		}
		if oneIn(12) {
			b.Own.Refill = 0
		}
		if b.Overridden && oneIn(6) {
			b.Capacity = 0 // a block
		}
		if oneIn(3) {
			period := kit.RandomPeriod(random)
			b.Promise, b.Own = b.AsQuota(random, period), b.Own.AsQuota(random, period)
		}
		p.Buckets = append(p.Buckets, b)

		cost := b.Cost
		for cost > 0 && oneIn(3) && len(p.Charges) < 6 {
			part := random.Int64N(cost + 1)
			p.Charges = append(p.Charges, promisedCharge{bucket, part})
			cost -= part
		}
		p.Charges = append(p.Charges, promisedCharge{bucket, cost})
	}
	random.Shuffle(len(p.Charges), func(i, j int) { p.Charges[i], p.Charges[j] = p.Charges[j], p.Charges[i] })
	return p
}

// beside is a promise that differs from another by one or nothing.
func beside(random *rand.Rand, p kit.Promise) kit.Promise {
	for {
		by := func() int64 { return random.Int64N(3) - 1 }
		c := p
		c.Level += by()
		c.Age += by()
		c.Cost += by()
		c.Stepped = c.Stepped != (by() == 0)
		if c.Valid() {
			return c
		}
	}
}

// newWholePromises is a database that tries them, many in one call.
func newWholePromises(t *testing.T) *kit.TestDB {
	db := kit.NewDB(t)
	db.SetTimeZone("Europe/Berlin") // now + retry_after must not depend on it
	db.ClockInASetting()
	db.Execute(`
		create function asked(policies text[], keys text[], costs bigint[], out allowed boolean, out retry_after interval)
		  language sql
		as $$ select allowed, retry_after from ratelimit_acquire_all(policies, keys, costs) $$;

		create function verdict(policies text[], keys text[], costs bigint[], now timestamptz)
		  returns text language plpgsql
		as $$
		declare
		  v_microsecond constant interval := '1 microsecond';
		  v_first record;
		  v_then  record;
		begin
		  perform set_clock(now);
		  v_first := asked(policies, keys, costs);
		  if v_first.allowed then
		    return case when v_first.retry_after = interval '0' then 'allowed' else 'allowed, and to wait' end;
		  end if;
		  v_then := asked(policies, keys, costs);
		  if v_then is distinct from v_first then
		    return format('%s, and again %s', v_first, v_then);
		  end if;

		  if v_first.retry_after is null then
		    perform set_clock(now + interval '4000 years');
		    v_then := asked(policies, keys, costs);
		    return case when v_then is distinct from v_first then format('for ever ends: %s', v_then) else 'kept for ever' end;
		  end if;
		  if v_first.retry_after = interval '876600000 hours' then  -- where times saturate: a debt of a faster refill
		    perform set_clock(now + interval '4000 years');
		    v_then := asked(policies, keys, costs);
		    return case when v_then.allowed then 'saturated, and allowed before' else 'kept for ever' end;
		  end if;
		  perform set_clock(now + v_first.retry_after - v_microsecond);
		  v_then := asked(policies, keys, costs);
		  if v_then.allowed or v_then.retry_after is distinct from v_microsecond then
		    return format('retry_after %s is too long', v_first.retry_after);
		  end if;
		  perform set_clock(now + v_first.retry_after);
		  v_then := asked(policies, keys, costs);
		  if not v_then.allowed or v_then.retry_after is distinct from interval '0' then
		    return format('retry_after %s is too short', v_first.retry_after);
		  end if;
		  return 'kept';
		exception when others then
		  return sqlerrm;
		end
		$$;

		create function verdicts(cases json) returns setof text language plpgsql
		as $$
		declare
		  v_now constant timestamptz := '2024-03-30 12:00:00+00';
		begin
		  perform set_clock(v_now);
		  create temporary table c on commit drop as
		    select e.i, e.c, b.*, format('case %s, bucket %s', e.i, b.j - 1) as policy
		      from json_array_elements(cases) with ordinality as e (c, i)
		     cross join rows from (json_to_recordset(e.c -> 'buckets')
		                             as (capacity bigint, refill bigint, every bigint, stepped boolean, level bigint, age bigint,
		                                 durable boolean, shadow boolean, overridden boolean, ends bigint, own json,
		                                 period interval, zone text, anchor bigint))
		           with ordinality as b (capacity, refill, every, stepped, level, age, durable, shadow, overridden, ends, own, period, zone, anchor, j);
		  update c set refill = null, every = null, stepped = null where period is not null;
		  update c set own = jsonb_set(jsonb_set(own::jsonb, '{refill}', 'null'), '{every}', 'null') where period is not null;
		  perform ratelimit_define_policy(c.policy, n.capacity, n.refill, (n.every || ' microseconds')::interval, c.stepped, c.durable, null, c.shadow,
		                                  c.period, null, timestamp '2024-03-30 12:00' + (n.anchor || ' microseconds')::interval)
		     from c
		    cross join lateral json_to_record(case when c.overridden then c.own else to_json(c.*) end)
		          as n (capacity bigint, refill bigint, every bigint, zone text, anchor bigint);
		  perform ratelimit_override(c.policy, 'k', c.capacity, c.refill, (c.every || ' microseconds')::interval,
		                             case when c.ends > 0 then v_now + (c.ends || ' microseconds')::interval end,
		                             null, timestamp '2024-03-30 12:00' + (c.anchor || ' microseconds')::interval)
		     from c where c.overridden;
		  update ratelimit.policies as p set calendar.time_zone = case when c.overridden then c.own ->> 'zone' else c.zone end  -- a call would check it for 25 ms
		    from c where c.policy = p.name and c.period is not null;
		  update ratelimit.overrides as o set calendar.time_zone = c.zone
		    from c join ratelimit.policies as p on c.policy = p.name where o.policy_id = p.id and c.period is not null;
		  insert into ratelimit.buckets (policy_id, key, level, refilled_at, due_at)
		  select p.id, 'k', c.level, v_now - (c.age || ' microseconds')::interval, v_now
		    from c join ratelimit.policies as p on p.name = c.policy where p.durable;
		  insert into ratelimit.ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
		  select p.id, 'k', c.level, v_now - (c.age || ' microseconds')::interval, v_now
		    from c join ratelimit.policies as p on p.name = c.policy where not p.durable;
		  return query
		    select verdict(r.policies, r.keys, r.costs, v_now)
		      from json_array_elements(cases) with ordinality as e (c, i)
		     cross join lateral (select array_agg(format('case %s, bucket %s', e.i, a.bucket)) as policies,
		                                array_agg('k'::text) as keys, array_agg(a.cost) as costs
		                           from json_to_recordset(e.c -> 'charges') as a (bucket integer, cost bigint)) as r
		     order by e.i;
		end
		$$`)
	return db
}
