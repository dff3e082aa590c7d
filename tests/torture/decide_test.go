package torture

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// ratelimit.decide, which reads no table, decides random batches as the model does, in every field: plain requests and of several
// buckets, buckets in debt or overfull, idempotency keys that are known, and such that come twice, shadows and refusals.
func TestTorture_DecideAlone(t *testing.T) {
	run := kit.Torture(t, 4000)
	met := map[string]int{}
	batches := 0
	difference := decidesLikeTheModel(kit.NewDB(t), kit.TestSeed(t), met, func() bool {
		run.Progress("%d batches", batches)
		batches++
		return run.GoesOn()
	})
	require.Empty(t, difference)
	for _, what := range []string{"granted", "denied", "replayed", "shadowed", "refused", "of several"} {
		require.NotZero(t, met[what], what)
		run.Figure(what, met[what], "")
	}
	run.Figure("batches", batches-1, "")
}

func TestDecideAlone_FindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	for name, bug := range map[string]kit.Mutation{
		"a bucket that is named twice is charged twice": {Pattern: `if same\[v_i\] = v_i then`, Replacement: "if true then"},
		"a denial keeps what fits":                      {Pattern: `if v_granted and fits\[v_i\]`, Replacement: "if fits[v_i]"},
		"a repeat in the call is charged":               {Pattern: `and fits\[v_i\] and not replayed\[v_i\]`, Replacement: "and fits[v_i]"},
		"a repeat with another cost is a repeat":        {Pattern: `if known\[v_i\]\.cost <> charges\[v_i\] then`, Replacement: "if false then"},
		"a shadow denies":                               {Pattern: `\(fits\[v_i\] or numbers\[v_b\]\.shadow\)`, Replacement: "fits[v_i]"},
		"an answer is of after the batch":               {Pattern: `v_then_level\[v_i\] := levels\[v_b\];`, Replacement: "v_then_level[v_i] := null;"},
		"a cost of 0 waits for debt to be paid":         {Pattern: `fits\[v_i\] := charges\[v_i\] = 0 or`, Replacement: "fits[v_i] :="},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := kit.NewDB(t)
			db.Mutate(bug, "ratelimit.decide")
			left := 4000
			require.NotEmpty(t, decidesLikeTheModel(db, kit.TestSeed(t), map[string]int{}, func() bool { left--; return left > 0 }))
		})
	}
}

// decidesLikeTheModel returns the first batch that SQL decides in another way, if there is one.
func decidesLikeTheModel(db *kit.TestDB, seed uint64, met map[string]int, goesOn func() bool) (difference string) {
	random := rand.New(rand.NewPCG(seed, 0))
	policies := model.New()
	for name, p := range map[string]model.Definition{
		"a": decidedBy(10, 3, 1_000_000, false, false), "b": decidedBy(7, 2, 7_000_000, true, false),
		"c": decidedBy(9_000_000_000_000, 1, 3, false, false), "d": decidedBy(5, 0, 1, false, false),
		"e": decidedBy(4, 1, 60_000_000, false, true),
	} {
		require.NoError(db.T, policies.Define(name, p))
		db.Execute("select ratelimit_define_policy($1, $2, $3, $4::bigint * interval '1 microsecond', $5, shadow => $6)",
			name, *p.Capacity, *p.Refill, int64(*p.Every), *p.Stepped, *p.Shadow)
	}
	session := db.Session()
	session.Execute("set search_path = ratelimit, public")
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
	m               *model.Model
	policies, keys  []string // parallel to the elements, as are these:
	costs           []int64
	requests        []int64
	idempotencyKeys []*string
	buckets         []decidedBucket // in order
}

// A decidedBucket is a bucket as it is stored, and the grant that it remembers under "i", of cost 0 if there is none.
type decidedBucket struct {
	model.BucketID
	level int64
	at    time.Time
	cost  int64
	grant model.Decision
}

func newDecideCase(random *rand.Rand, policies *model.Model) *decideCase {
	c := &decideCase{m: policies.Clone()}
	pick := func(from ...string) string { return from[random.IntN(len(from))] }
	costs := []int64{0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 6, 11, -1, math.MaxInt64}
	ids := map[model.BucketID]bool{}
	for request := range 1 + random.IntN(6) {
		var key *string
		if random.IntN(3) == 0 {
			k := pick("i", "j")
			key = &k
		}
		for range 1 + random.IntN(3)*random.IntN(2) {
			id := model.BucketID{Policy: pick("a", "a", "b", "c", "d", "e", "e", "z"), Key: pick("x", "x", "y")}
			ids[id] = true
			c.policies, c.keys = append(c.policies, id.Policy), append(c.keys, id.Key)
			c.costs = append(c.costs, costs[random.IntN(len(costs))])
			c.requests = append(c.requests, int64(request+1))
			c.idempotencyKeys = append(c.idempotencyKeys, key)
		}
	}
	for _, id := range slices.SortedFunc(maps.Keys(ids), func(a, b model.BucketID) int {
		return cmp.Or(cmp.Compare(a.Policy, b.Policy), cmp.Compare(a.Key, b.Key))
	}) {
		p, known := c.m.Policy(id.Policy)
		b := decidedBucket{BucketID: id, level: p.Capacity * 1_000_000, at: kit.T0}
		if known && random.IntN(4) == 0 {
			cost := 1 + random.Int64N(3)
			if d, err := c.m.Acquire(kit.T0, id, cost, "i"); err == nil && d.Allowed && !d.Shadowed {
				b.cost, b.grant = cost, d
			}
		}
		switch random.IntN(4) {
		case 0: // debt, or more than the capacity
			b.level = random.Int64N(40_000_000) - 20_000_000
		case 1, 2:
			b.level = random.Int64N(min(p.Capacity, 20)*1_000_000 + 1)
			b.at = kit.T0.Add(time.Duration(random.Int64N(10_000_000)-2_000_000) * -time.Microsecond)
		}
		if known {
			c.m.Put(id, model.Bucket{Level: big.NewInt(b.level), RefilledAt: b.at})
		}
		c.buckets = append(c.buckets, b)
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
			whole, err = c.m.AcquireAll(kit.T0, charges, key)
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
	for _, b := range c.buckets {
		if _, known := c.m.Policy(b.Policy); known {
			level, _ := c.m.Level(kit.T0, b.BucketID)
			fmt.Fprintln(&text, b.Policy, b.Key, level)
		}
	}
	return text.String()
}

// ask has SQL decide, and describes its answers.
func (c *decideCase) ask(session *pgx.Conn) (string, error) {
	known := make([]*int32, len(c.policies)) // the number of the bucket that remembers its idempotency key
	var of []string
	var levels, costs, remaining, resets, capacities []int64
	var at []time.Time
	for n, b := range c.buckets {
		of, levels, at = append(of, b.Policy), append(levels, b.level), append(at, b.at)
		costs, remaining = append(costs, b.cost), append(remaining, b.grant.Remaining)
		resets, capacities = append(resets, int64(b.grant.ResetAfter)), append(capacities, b.grant.Capacity)
		number := int32(n + 1)
		for i, key := range c.idempotencyKeys {
			if b.cost > 0 && key != nil && *key == "i" && b.BucketID == (model.BucketID{Policy: c.policies[i], Key: c.keys[i]}) {
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
		c.policies, c.keys, c.costs, c.idempotencyKeys, c.requests, of, levels, at, known, costs, remaining, resets, capacities, kit.T0).Scan(&text)
	return text, err
}
