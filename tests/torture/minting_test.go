package torture

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// No sequence of calls without refund and reset gains tokens but by refill. Random calls of all functions, while the clock stands still:
// what buckets hold and what callers have in hand, of grants less what settlements gave back, adds up to the capacity, to the microtoken.
func TestTorture_NoTokenIsMinted(t *testing.T) {
	run := kit.Torture(t, 0)
	f := newMint(t)
	for f.calls.Load() < 4000 || run.GoesOn() {
		require.NoError(t, f.rounds())
		run.Progress("%d calls", f.calls.Load())
	}
	run.Figures("calls", f.calls.Load(), "requests granted", f.grants.Load(), "charges cut at the floor", f.cuts.Load(),
		"settlements", f.settlements.Load(), "tokens minted", 0)
	for _, n := range []*atomic.Int64{&f.grants, &f.cuts, &f.settlements, &f.refused} {
		require.NotZero(t, n.Load())
	}
}

func TestMinting_FindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	for name, bug := range map[string]struct {
		kit.Mutation
		function string
	}{
		"a charge that remembers what it did not take": {kit.Mutation{
			Pattern: `(insert into idempotency_keys [^;]*?)nullif\(v_held - v_level, microtokens\(v_cost\)\)`, Replacement: "${1}null",
		}, "ratelimit_charge"},
		"a partial grant of more than was taken": {kit.Mutation{Pattern: `then taken else 0`, Replacement: `then taken + 1 else 0`}, "ratelimit.partial_of"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newMint(t)
			f.db.Mutate(bug.Mutation, bug.function)
			for range 50 {
				if err := f.rounds(); err != nil {
					t.Log(err)
					return
				}
			}
			t.Error("not found in 50 rounds")
		})
	}
}

// A mint has a database whose clock stands still.
type mint struct {
	db   *kit.TestDB
	seed atomic.Uint64 // of the next round

	rows, calls, grants, cuts, settlements, refused atomic.Int64
}

// The floors are 315,576,000,000 tokens, 9 * 10^12 and, of the shallow, not a whole number.
var minted = map[string]struct {
	capacity int64
	rest     string
	floor    int64 // microtokens
}{
	"plain":   {20, "1, '1 second'", -315_576_000_000_000_000},
	"shallow": {20, "1, '105120 days', durable => false", -34_746_004},
	"budget":  {1000, "0, '1 second', stepped => true", -kit.MaxTokens * 1_000_000},
	"shadow":  {20, "1, '1 second', shadow => true", -315_576_000_000_000_000},
}

func newMint(t *testing.T) *mint {
	f := &mint{db: kit.NewDB(t)}
	f.seed.Store(kit.FirstSeed(t))
	f.db.SetClock(kit.T0)
	f.db.CatchDenials()
	for name, p := range minted {
		f.db.Execute(fmt.Sprintf("select ratelimit_define_policy('%s', %d, %s)", name, p.capacity, p.rest))
	}
	return f
}

// rounds makes some hundred calls on new buckets, four times at the same moment.
func (f *mint) rounds() error {
	errs := make([]error, 4)
	var done sync.WaitGroup
	for i := range errs {
		done.Go(func() {
			seed := f.seed.Add(1) - 1
			r := &mintRound{
				mint: f, random: rand.New(rand.NewPCG(seed, 0)), prefix: fmt.Sprint(f.rows.Add(1), " "),
				inHand: map[model.BucketID]int64{}, of: map[mintedKey]*inHand{},
			}
			if err := r.run(); err != nil {
				errs[i] = fmt.Errorf("RATELIMIT_TEST_SEED=%d: %w, after\n%s", seed, err, strings.Join(r.last, "\n"))
			}
		})
	}
	done.Wait()
	return cmp.Or(errs...)
}

// A mintRound knows what callers have of each bucket, in microtokens.
type mintRound struct {
	*mint
	random *rand.Rand
	prefix string
	inHand map[model.BucketID]int64
	of     map[mintedKey]*inHand
	last   []string // the calls since the buckets were looked at
}

type mintedKey struct {
	model.BucketID
	idempotencyKey string
}

// inHand is what is left of the grant under an idempotency key.
type inHand struct {
	tokens    int64 // microtokens
	isSettled bool
}

func (r *mintRound) run() error {
	for n := range 500 {
		if err := r.call(); err != nil {
			return err
		}
		r.calls.Add(1)
		if n%25 < 24 {
			continue
		}
		if err := r.addUp(); err != nil {
			return err
		}
		r.last = nil
	}
	return nil
}

// addUp compares what the buckets of the round hold with what they must.
func (r *mintRound) addUp() error {
	rows, err := r.db.Pool.Query(context.Background(), `
		select p.name, b.key, b.level
		  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b
		  join ratelimit.policies as p on p.id = b.policy_id
		 where starts_with(b.key, $1)`, r.prefix)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var id model.BucketID
		var level int64
		if err := rows.Scan(&id.Policy, &id.Key, &level); err != nil {
			return err
		}
		if want := r.level(id); level != want {
			return fmt.Errorf("%v holds %d microtokens and callers have %d, which is %d too many", id, level, r.inHand[id], level-want)
		}
	}
	return rows.Err()
}

func (r *mintRound) level(id model.BucketID) int64 {
	return minted[id.Policy].capacity*1_000_000 - r.inHand[id]
}

// move has callers take so many microtokens of a bucket, or give them back, and no more than there are above its floor.
func (r *mintRound) move(id model.BucketID, microtokens int64) (moved int64) {
	moved = min(microtokens, r.level(id)-minted[id.Policy].floor)
	r.inHand[id] += moved
	return moved
}

// grant is one that the server has answered. It takes nothing if the idempotency key is known.
func (r *mintRound) grant(id model.BucketID, tokens int64, idempotencyKey string) {
	key := mintedKey{id, idempotencyKey}
	if tokens == 0 || idempotencyKey != "" && r.of[key] != nil {
		return
	}
	r.grants.Add(1)
	moved := r.move(id, tokens*1_000_000)
	if moved < tokens*1_000_000 {
		r.cuts.Add(1)
	}
	if idempotencyKey != "" {
		r.of[key] = &inHand{tokens: moved}
	}
}

func (r *mintRound) bucket() model.BucketID {
	policies := []string{"plain", "shallow", "budget", "shadow"}
	return model.BucketID{Policy: policies[r.random.IntN(4)], Key: fmt.Sprint(r.prefix, r.random.IntN(2))}
}

func (r *mintRound) cost() int64 { return r.random.Int64N(1 << r.random.IntN(5)) }

func (r *mintRound) idempotencyKey() string {
	if r.random.IntN(4) == 0 {
		return ""
	}
	return fmt.Sprint(r.random.IntN(60))
}

// call makes one, and enters what it has moved.
func (r *mintRound) call() error {
	if r.random.IntN(3) == 0 {
		return r.spend()
	}
	var requests []kit.WholeRequest
	for range 1 + r.random.IntN(4) {
		q := kit.WholeRequest{IdempotencyKey: r.idempotencyKey()}
		for range 1 + r.random.IntN(3) {
			q.Charges = append(q.Charges, model.Charge{BucketID: r.bucket(), Cost: r.cost()})
		}
		requests = append(requests, q)
	}
	single := func() []kit.WholeRequest {
		for i := range requests {
			requests[i].Charges = requests[i].Charges[:1]
		}
		return requests
	}
	var answers []kit.WholeAnswer
	var err error
	function := r.random.IntN(7)
	switch function {
	case 0, 1, 2:
		requests = single()[:1]
		ask := []func(kit.WholeRequest) (kit.Whole, error){
			func(q kit.WholeRequest) (kit.Whole, error) { return q.AcquireAll(r.db.Pool) },
			func(q kit.WholeRequest) (kit.Whole, error) {
				d, err := q.Single().Acquire(r.db.Pool)
				return kit.WholeOf(d), err
			},
			func(q kit.WholeRequest) (kit.Whole, error) {
				d, err := q.Single().Enforce(r.db.Pool)
				return kit.WholeOf(d), err
			},
		}
		var w kit.Whole
		w, err = ask[function](requests[0])
		answers = []kit.WholeAnswer{{Whole: &w}}
	case 3:
		answers, err = kit.AcquireManyWholes(r.db.Pool, single())
	case 4:
		answers, err = kit.AcquirePacked(r.db.Pool, single(), false)
	case 5:
		answers, err = kit.AcquireAllMany(r.db.Pool, requests)
	case 6:
		answers, err = kit.AcquirePacked(r.db.Pool, requests, true)
	}
	r.last = append(r.last, fmt.Sprintf("function %d: %+v: %v", function, requests, err))
	if err != nil {
		return r.check(err)
	}
	for i, q := range requests {
		if answers[i].Whole == nil {
			r.refused.Add(1)
			continue
		}
		if err := r.granted(q, *answers[i].Whole); err != nil {
			return err
		}
	}
	return nil
}

// granted enters what a request has taken, if it has: of each bucket the sum.
func (r *mintRound) granted(q kit.WholeRequest, w kit.Whole) error {
	sums := map[model.BucketID]int64{}
	for i, c := range q.Charges {
		if w.Allowed && !w.Decisions[i].Shadowed {
			sums[c.BucketID] += c.Cost
		}
	}
	for id, sum := range sums {
		before := r.inHand[id]
		if r.grant(id, sum, q.IdempotencyKey); r.inHand[id] > before && r.level(id) < 0 {
			return fmt.Errorf("%v granted %d tokens and had less", id, sum)
		}
	}
	return nil
}

// spend makes a call of a function that does not only take what is there. Of a shadow, some do not say what they took.
func (r *mintRound) spend() error {
	s := kit.Spending{BucketID: r.bucket(), Cost: r.cost(), IdempotencyKey: r.idempotencyKey(), AtLeast: 1, MaxWait: kit.Micros(time.Hour)}
	s.Function = []string{"charge", "settle", "settle", "settle", "reserve", "acquire_up_to"}[r.random.IntN(6)]
	switch {
	case s.Policy == "shadow" && s.Function != "settle":
		s.Function = "charge"
	case s.Function == "acquire_up_to":
		s.Cost++
	case s.Function == "settle" && r.random.IntN(2) == 0:
		s.Cost = 0
	}
	if s.IdempotencyKey == "" && s.Function == "settle" {
		s.IdempotencyKey = "0"
	}
	if s.Function == "charge" && r.random.IntN(4) == 0 {
		s.Cost = 1 + r.random.Int64N(kit.MaxTokens)
	}
	got, err := s.By(r.db.Pool)
	r.last = append(r.last, fmt.Sprintf("%v: %+v %v", s, got, err))
	if err != nil {
		return r.check(err)
	}
	if !got.Allowed {
		return nil
	}
	switch s.Function {
	case "acquire_up_to":
		r.grant(s.BucketID, got.Taken, s.IdempotencyKey)
	case "settle":
		if hand := r.of[mintedKey{s.BucketID, s.IdempotencyKey}]; hand != nil && !hand.isSettled {
			r.settlements.Add(1)
			hand.tokens += r.move(s.BucketID, s.Cost*1_000_000-hand.tokens)
			hand.isSettled = true
		}
	default:
		r.grant(s.BucketID, s.Cost, s.IdempotencyKey)
	}
	return nil
}

// check passes over refusals, which change nothing.
func (r *mintRound) check(err error) error {
	if slices.Contains([]string{"RL002", "RL003", "RL004"}, kit.SQLState(err)) {
		r.refused.Add(1)
		return nil
	}
	return err
}
