package tests

import (
	"context"
	"fmt"
	"maps"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/model"
)

// ratelimit.decide, which reads no table, decides random batches as the model does, in every field: plain requests and of several
// buckets, buckets in debt or overfull, idempotency keys that are known, and such that come twice, shadows and refusals.
func TestTorture_DecideAlone(t *testing.T) {
	run := torture(t, 4000)
	met := map[string]int{}
	batches := 0
	difference := decidesLikeTheModel(newDB(t), testSeed(t), met, func() bool {
		run.progress("%d batches", batches)
		batches++
		return run.goesOn()
	})
	require.Empty(t, difference)
	for _, what := range []string{"granted", "denied", "replayed", "shadowed", "refused", "of several"} {
		require.NotZero(t, met[what], what)
		run.figure(what, met[what], "")
	}
	run.figure("batches", batches-1, "")
}

func TestDecideAlone_FindsPlantedBugs(t *testing.T) {
	t.Parallel()
	for name, bug := range map[string]mutation{
		"a bucket that is named twice is charged twice": {`if same\[v_i\] = v_i then`, "if true then"},
		"a denial keeps what fits":                      {`if v_granted and fits\[v_i\]`, "if fits[v_i]"},
		"a repeat in the call is charged":               {`and fits\[v_i\] and not replayed\[v_i\]`, "and fits[v_i]"},
		"a repeat with another cost is a repeat":        {`if known\[v_i\]\.cost <> charges\[v_i\] then`, "if false then"},
		"a shadow denies":                               {`\(fits\[v_i\] or numbers\[v_b\]\.shadow\)`, "fits[v_i]"},
		"an answer is of after the batch":               {`v_then_level\[v_i\] := levels\[v_b\];`, "v_then_level[v_i] := null;"},
		"a cost of 0 waits for debt to be paid":         {`fits\[v_i\] := charges\[v_i\] = 0 or`, "fits[v_i] :="},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			db.mutate(bug, "ratelimit.decide")
			left := 4000
			require.NotEmpty(t, decidesLikeTheModel(db, testSeed(t), map[string]int{}, func() bool { left--; return left > 0 }))
		})
	}
}

// decidesLikeTheModel returns the first batch that SQL decides in another way, if there is one.
func decidesLikeTheModel(db *testDB, seed uint64, met map[string]int, goesOn func() bool) (difference string) {
	db.t.Helper()
	random := rand.New(rand.NewPCG(seed, 0))
	policies := model.New()
	for name, p := range map[string]model.Definition{
		"a": decidedBy(10, 3, 1_000_000, false, false), "b": decidedBy(7, 2, 7_000_000, true, false),
		"c": decidedBy(9_000_000_000_000, 1, 3, false, false), "d": decidedBy(5, 0, 1, false, false),
		"e": decidedBy(4, 1, 60_000_000, false, true),
	} {
		require.NoError(db.t, policies.Define(name, p))
		db.exec("select ratelimit_define_policy($1, $2, $3, $4::bigint * interval '1 microsecond', $5, shadow => $6)",
			name, *p.Capacity, *p.Refill, int64(*p.Every), *p.Stepped, *p.Shadow)
	}
	session := db.session()
	session.exec("set search_path = ratelimit, public")
	for goesOn() {
		c := newDecideCase(random, policies)
		got, err := c.ask(session.Conn)
		if want := c.want(met); err != nil || got != want {
			return fmt.Sprintf("%+v: %v\n%s\ninstead of\n%s", c, err, got, want)
		}
	}
	return ""
}

func decidedBy(capacity, refill int64, every model.Micros, stepped, shadow bool) model.Definition {
	d := model.Definition{Stepped: &stepped, Shadow: &shadow}
	d.Capacity, d.Refill, d.Every = &capacity, &refill, &every
	return d
}

// A decideCase is a batch, and what it is decided by.
type decideCase struct {
	m                      *model.Model
	policies, keys         []string // parallel to the elements, as are these:
	costs                  []int64
	requests               []int64
	idempotencyKeys        []*string
	of                     []string // parallel to the buckets, in order: the policy, and what is stored
	levels                 []int64
	refilledAt             []time.Time
	knownBy, knownKeys     []string // grants that are remembered: by bucket and idempotency key
	knownCosts, knownLeft  []int64
	knownReset, knownTotal []int64
}

func newDecideCase(random *rand.Rand, policies *model.Model) *decideCase {
	c := &decideCase{m: policies.Clone()}
	pick := func(from ...string) string { return from[random.IntN(len(from))] }
	for request := range 1 + random.IntN(6) {
		var key *string
		if random.IntN(3) == 0 {
			k := pick("i", "j")
			key = &k
		}
		for range 1 + random.IntN(3)*random.IntN(2) {
			c.policies = append(c.policies, pick("a", "a", "b", "c", "d", "e", "e", "z"))
			c.keys = append(c.keys, pick("x", "x", "y"))
			c.costs = append(c.costs, []int64{0, 1, 1, 2, 3, 6, 11, -1, 9_223_372_036_854_775_807}[min(random.IntN(40), 8)%[]int{9, 8, 7}[random.IntN(3)]])
			c.requests = append(c.requests, int64(request+1))
			c.idempotencyKeys = append(c.idempotencyKeys, key)
		}
	}
	ids := map[string]model.BucketID{}
	for i := range c.policies {
		ids[c.policies[i]+"\x00"+c.keys[i]] = model.BucketID{Policy: c.policies[i], Key: c.keys[i]}
	}
	for _, name := range slices.Sorted(maps.Keys(ids)) {
		id := ids[name]
		p, known := c.m.Policy(id.Policy)
		level, at := p.Capacity*1_000_000, t0
		if known && random.IntN(4) == 0 {
			cost := 1 + random.Int64N(3)
			if d, err := c.m.Acquire(t0, id, cost, "i"); err == nil && d.Allowed && !d.Shadowed {
				c.knownBy, c.knownKeys = append(c.knownBy, name), append(c.knownKeys, "i")
				c.knownCosts, c.knownLeft = append(c.knownCosts, cost), append(c.knownLeft, d.Remaining)
				c.knownReset, c.knownTotal = append(c.knownReset, int64(d.ResetAfter)), append(c.knownTotal, d.Capacity)
			}
		}
		switch random.IntN(4) {
		case 0: // debt, or more than the capacity
			level = random.Int64N(40_000_000) - 20_000_000
		case 1, 2:
			level = random.Int64N(min(p.Capacity, 20)*1_000_000 + 1)
			at = t0.Add(time.Duration(random.Int64N(10_000_000)-2_000_000) * -time.Microsecond)
		}
		if known {
			c.m.Put(id, model.Bucket{Level: big.NewInt(level), RefilledAt: at})
		}
		c.of, c.levels, c.refilledAt = append(c.of, id.Policy), append(c.levels, level), append(c.refilledAt, at)
	}
	return c
}

// want asks the model, and describes its answers.
func (c *decideCase) want(met map[string]int) string {
	var text strings.Builder
	refused := []int64{}
	for end := 0; end < len(c.requests); {
		var charges []model.Charge
		bad, i := false, end
		for ; end < len(c.requests) && c.requests[end] == c.requests[i]; end++ {
			charges = append(charges, model.Charge{BucketID: model.BucketID{Policy: c.policies[end], Key: c.keys[end]}, Cost: c.costs[end]})
			bad = bad || c.costs[end] < 0
		}
		whole, err := model.Whole{}, error(model.InvalidArgument)
		if !bad {
			key := ""
			if c.idempotencyKeys[i] != nil {
				key = *c.idempotencyKeys[i]
			}
			whole, err = c.m.AcquireAll(t0, charges, key)
		}
		switch {
		case err != nil:
			refused = append(refused, c.requests[i])
			met["refused"]++
			continue
		case whole.Replayed:
			met["replayed"]++
		case whole.Shadowed:
			met["shadowed"]++
		case whole.Allowed:
			met["granted"]++
		default:
			met["denied"]++
		}
		if end > i+1 {
			met["of several"]++
		}
		for n, d := range whole.Decisions {
			fmt.Fprintf(&text, "%d: %v %d %d %d %d %v %v\n", i+n+1, whole.Allowed, d.Remaining, d.RetryAfter, d.ResetAfter, d.Capacity, d.Replayed, d.Shadowed)
		}
	}
	fmt.Fprintln(&text, "refused", refused)
	seen := map[string]bool{}
	var names []string
	for i := range c.policies {
		if name := c.policies[i] + "\x00" + c.keys[i]; !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		policy, key, _ := strings.Cut(name, "\x00")
		if _, known := c.m.Policy(policy); known {
			level, _ := c.m.Level(t0, model.BucketID{Policy: policy, Key: key})
			fmt.Fprintln(&text, policy, key, level)
		}
	}
	return text.String()
}

// ask has SQL decide, and describes its answers.
func (c *decideCase) ask(session *pgx.Conn) (string, error) {
	buckets := make([]string, len(c.policies))
	for i := range c.policies {
		buckets[i] = c.policies[i] + "\x00" + c.keys[i]
	}
	known := make([]*int32, len(c.policies)) // the number of the grant
	for i := range buckets {
		for n := range c.knownBy {
			if c.knownBy[n] == buckets[i] && c.idempotencyKeys[i] != nil && *c.idempotencyKeys[i] == c.knownKeys[n] {
				number := int32(n + 1)
				known[i] = &number
			}
		}
	}
	var text string
	err := session.QueryRow(context.Background(), `
		with given as materialized (
		  select n.*, array(select p from unnest($6::text[]) with ordinality as u (name, n) left join policies as p on p.name = u.name order by u.n) as numbers,
		         array(select case when u.known is not null and n.charges[u.place] > 0 then
		                        row(null, ($10::bigint[])[u.known], ($11::bigint[])[u.known], ($13::bigint[])[u.known], null,
		                            case when ($12::bigint[])[u.known] >= 0 then duration(($12::bigint[])[u.known]) end,
		                            null, null, null, null, null)::idempotency_keys
		                      end
		                 from unnest($9::integer[]) with ordinality as u (known, place) order by u.place) as known
		    from numbered($1, $2, $3, $4, $5) as n
		), decided as materialized (
		  select g.bucket_numbers, g.bucket_keys, g.numbers, d.*
		    from given as g,
		         decide($5, $4, g.charges, g.bucket_numbers, g.same, g.twins, g.bad, g.known, g.numbers, $7::bigint[], $8::timestamptz[],
		                array(select refilled(u.level, u.at, $14, g.numbers[u.n])
		                        from unnest($7::bigint[], $8::timestamptz[]) with ordinality as u (level, at, n) order by u.n), $14) as d
		)
		select coalesce((select string_agg(format('%s: %s %s %s %s %s %s %s', e.place, e.granted::text, e.remaining, coalesce(e.retry_us, -1), coalesce(e.reset_us, -1),
		                                          e.capacity, coalesce(e.replayed, false)::text, e.shadowed::text), E'\n' order by e.place) || E'\n'
		                   from unnest(d.granted, d.remaining, d.retry_us, d.reset_us, d.capacities, d.replayed, d.shadowed)
		                        with ordinality as e (granted, remaining, retry_us, reset_us, capacity, replayed, shadowed, place)
		                  where e.granted is not null), '')
		       || 'refused [' || coalesce((select string_agg(($5::bigint[])[r.place]::text, ' ' order by r.place) from unnest(d.refused) as r (place)), '') || E']\n'
		       || coalesce((select string_agg(format('%s %s %s', (d.numbers[u.n]).name, d.bucket_keys[u.n], refilled(u.level, u.at, $14, d.numbers[u.n])),
		                                      E'\n' order by u.n) || E'\n'
		                      from unnest(d.levels, d.refilled_at) with ordinality as u (level, at, n)
		                     where (d.numbers[u.n]).id is not null), '')
		  from decided as d`,
		c.policies, c.keys, c.costs, c.idempotencyKeys, c.requests, c.of, c.levels, c.refilledAt, known,
		c.knownCosts, c.knownLeft, c.knownReset, c.knownTotal, t0).Scan(&text)
	return text, err
}
