package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Jobs take an estimate, under an idempotency key and by every function there is, and settle what they really cost. Each
// call is sent several times, in any order, at the same moment as others, and again when PostgreSQL was killed under it. In
// the end each bucket has lost the sum of the real costs, to the token.
func TestTorture_SpendingIsTheSumOfTheRealCosts(t *testing.T) {
	run := kit.Torture(t, 1)
	db, server := kit.NewPrivateDB(t, "synchronous_commit=on")
	b := newBooks(t, db)
	stop := b.load(t, 6)
	crashes := 0
	for run.GoesOn() {
		more := b.calls.Load() + 100
		require.Eventually(t, func() bool { return b.calls.Load() >= more }, kit.Patience, 5*kit.Ms)
		time.Sleep(rand.N(time.Second)) // the moment is what is random
		kill(t, server)
		require.NoError(t, server.Start(t.Context()))
		b.at.MoveTo(server.URL(db.Name))
		crashes++
		run.Progress("%d calls, %d jobs, %d crashes", b.calls.Load(), b.jobs.Load(), crashes)
	}
	events := []*atomic.Int64{&b.calls, &b.jobs, &b.settled, &b.early, &b.repeats}
	require.Eventually(t, func() bool { return !slices.ContainsFunc(events, func(n *atomic.Int64) bool { return n.Load() == 0 }) }, kit.Patience, 5*kit.Ms)
	stop()
	took := time.Since(run.Started)
	db.Pool.Close()
	db = kit.Reopen(t, server)
	b.check(db)
	run.Figures("calls answered", b.calls.Load(), "calls answered per second, with crashes", int64(float64(b.calls.Load())/took.Seconds()),
		"jobs", b.jobs.Load(), "of these settled", b.settled.Load(), "answers to repeats", b.repeats.Load(),
		"settlements that came before the grant", b.early.Load(), "calls without an answer, sent again", b.unanswered.Load(),
		"crashes", crashes)
	lost, booked := b.sums(db)
	run.Figures("tokens that the buckets have lost", lost, "tokens of the real costs", booked)
}

// The books find what a bug does to them.
func TestSpending_TheBooksFindPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	type testCase struct {
		plantedBug
		meet string // where the sessions have to meet
	}
	kit.OnDBs(t, map[string]testCase{
		"a settlement counts twice": {settleTwice, `update idempotency_keys as k set settled =`},
		"a charge counts twice": {plantedBug{"ratelimit_charge",
			`(insert into idempotency_keys [^;]*?) where k.expires_at <= v_now; exit when found;`, "$1; exit when found;"}, `insert into idempotency_keys as k`},
	}, func(t *testing.T, db *kit.TestDB, bug testCase) {
		bug.plant(db)
		pauseBefore(bug.function, bug.meet).plant(db)
		b := newBooks(t, db)
		limiter, combiner := client.New(db.Pool), client.NewCombiner(db.Pool)
		defer combiner.Close()
		for n := 0; len(b.differences(db)) == 0; n++ {
			require.Less(t, n, 500, "it is not found in 2,000 jobs")
			require.NoError(t, b.work(limiter, combiner))
		}
	})
}

// Books are what jobs have really cost. The buckets do not refill, and are never full: so nothing is cut.
type books struct {
	t    testing.TB
	mu   sync.Mutex
	cost map[model.BucketID]int64
	at   kit.Address

	calls, jobs, settled, early, repeats, unanswered, serial atomic.Int64
}

// The rich have more than anybody asks for. The poor are in debt from the beginning, and only charges take from them.
const (
	richCapacity = kit.MaxTokens
	poorCapacity = 100
	bookedFirst  = 1_000_000_000
)

func newBooks(t testing.TB, db *kit.TestDB) *books {
	b := &books{t: t, cost: map[model.BucketID]int64{}}
	b.at.MoveTo(db.URL)
	for policy, capacity := range map[string]int64{"rich": richCapacity, "poor": poorCapacity} {
		db.Execute("select ratelimit_define_policy($1, $2, 0, '1 second')", policy, capacity)
		for key := range 3 {
			id := model.BucketID{Policy: policy, Key: fmt.Sprint(key)}
			db.Execute("select ratelimit_charge($1, $2, $3)", id.Policy, id.Key, bookedFirst)
			b.cost[id] = bookedFirst
		}
	}
	return b
}

// lost is what a bucket has lost, in tokens.
func (b *books) lost(db *kit.TestDB, id model.BucketID) int64 {
	if id.Policy == "poor" {
		return poorCapacity - db.Left(id.Policy, id.Key)
	}
	return richCapacity - db.Left(id.Policy, id.Key)
}

// differences are what the buckets have lost and the books do not know.
func (b *books) differences(db *kit.TestDB) (all []string) {
	for id, cost := range b.cost {
		if lost := b.lost(db, id); lost != cost {
			all = append(all, fmt.Sprintf("%v: %d lost, %d in the books", id, lost, cost))
		}
	}
	return all
}

// sums are those of all buckets and of all books, without what was charged first.
func (b *books) sums(db *kit.TestDB) (lost, booked int64) {
	for id, cost := range b.cost {
		lost += b.lost(db, id) - bookedFirst
		booked += cost - bookedFirst
	}
	return lost, booked
}

func (b *books) check(db *kit.TestDB) { require.Empty(b.t, b.differences(db)) }

// load has workers do jobs until stop, which lets them finish.
func (b *books) load(t testing.TB, workers int) (stop func()) {
	config := b.at.Config(t)
	config.MaxConns = 12
	pool := kit.NoError(pgxpool.NewWithConfig(context.Background(), config))(t)
	combiner := client.NewCombiner(pool)
	all := kit.NewLoad(t)
	all.Start(workers, func(int) error { return b.work(client.New(pool), combiner) })
	return func() {
		require.NoError(t, all.End())
		combiner.Close()
		pool.Close()
	}
}

// A bookedJob charges buckets by one function, and settles each or leaves it.
type bookedJob struct {
	function string
	key      string
	charges  []client.Charge
	real     []int64 // what each costs in the end; -1 leaves the estimate
}

func (b *books) newJob() bookedJob {
	j := bookedJob{function: []string{"acquire", "acquire all", "charge", "reserve", "up to", "poor"}[rand.N(6)], key: fmt.Sprint(b.serial.Add(1))}
	policy, buckets := "rich", 1
	switch j.function {
	case "poor":
		policy = "poor"
	case "acquire all":
		buckets = 2
	}
	for key := range buckets {
		j.charges = append(j.charges, client.Charge{Policy: policy, Key: fmt.Sprint(key + rand.N(2)), Cost: client.Cost(1 + rand.Int64N(9))})
	}
	if buckets == 2 && j.charges[0].Key == j.charges[1].Key {
		j.charges = j.charges[:1] // an element's charge is what is settled, and so must be all of the bucket's
	}
	for range j.charges {
		j.real = append(j.real, rand.Int64N(20)-1)
	}
	return j
}

// work does some jobs, all of whose calls are under way at the same time.
func (b *books) work(limiter *client.Limiter, combiner *client.Combiner) error {
	var calls []func() error
	var jobs []bookedJob
	for range 4 {
		j := b.newJob()
		jobs = append(jobs, j)
		for range 1 + rand.N(3) {
			calls = append(calls, func() error { return b.grant(j, limiter, combiner) })
		}
		for i := range j.charges {
			for range 1 + rand.N(2) {
				if j.real[i] >= 0 {
					calls = append(calls, func() error { return b.settle(j, i, limiter) })
				}
			}
		}
	}
	rand.Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
	errs := make(chan error, len(calls))
	for _, call := range calls {
		go func() { errs <- call() }()
	}
	var err error
	for range calls {
		err = errors.Join(err, <-errs)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, j := range jobs {
		b.jobs.Add(1)
		for i, c := range j.charges {
			cost := j.real[i]
			if cost < 0 {
				cost = c.Cost.Tokens()
			} else {
				b.settled.Add(1)
			}
			b.cost[model.BucketID{Policy: c.Policy, Key: c.Key}] += cost
		}
	}
	return err
}

// untilAnswered repeats a call that gets no answer, or finds no grant yet.
func (b *books) untilAnswered(call func(ctx context.Context) (replayed bool, err error)) error {
	for giveUp := time.Now().Add(2 * kit.Patience); ; {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		replayed, err := call(ctx)
		cancel()
		switch {
		case err == nil:
			b.calls.Add(1)
			if replayed {
				b.repeats.Add(1)
			}
			return nil
		case errors.Is(err, client.ErrNoGrant):
			b.calls.Add(1)
			b.early.Add(1)
		case errors.Is(err, client.ErrSettled): // the grant comes again after its settlement
			b.calls.Add(1)
			b.repeats.Add(1)
			return nil
		case slices.ContainsFunc([]error{client.ErrInvalidArgument, client.ErrIdempotencyMismatch, client.ErrUnknownPolicy}, func(e error) bool { return errors.Is(err, e) }):
			return err
		default:
			b.unanswered.Add(1)
		}
		if time.Now().After(giveUp) {
			return err
		}
		time.Sleep(time.Duration(rand.N(5)) * time.Millisecond) // where there is no server, errors come fast
	}
}

func (b *books) grant(j bookedJob, limiter *client.Limiter, combiner *client.Combiner) error {
	key, c := client.IdempotencyKey(j.key), j.charges[0]
	by := client.Acquirer(limiter)
	if rand.N(2) == 0 {
		by = combiner
	}
	return b.untilAnswered(func(ctx context.Context) (bool, error) {
		var d client.Decision
		var err error
		switch j.function {
		case "acquire":
			d, err = by.Acquire(ctx, c.Policy, c.Key, c.Cost, key)
		case "acquire all":
			var all client.JointDecision
			all, err = by.AcquireAll(ctx, j.charges, key)
			d = all.Decision
		case "charge", "poor":
			d, err = limiter.Charge(ctx, c.Policy, c.Key, c.Cost.Tokens(), key)
		case "reserve":
			var r client.Reservation
			r, err = limiter.Reserve(ctx, c.Policy, c.Key, time.Second, c.Cost, key)
			d = client.Decision{Allowed: r.Allowed, Replayed: r.Replayed}
		case "up to":
			var p client.PartialDecision
			p, err = limiter.AcquireUpTo(ctx, c.Policy, c.Key, c.Cost.Tokens(), key)
			d = p.Decision
			if err == nil && p.Taken != c.Cost.Tokens() {
				err = fmt.Errorf("%w: %+v", client.ErrInvalidArgument, p)
			}
		}
		if err == nil && !d.Allowed {
			err = fmt.Errorf("%w: denied %+v", client.ErrInvalidArgument, d)
		}
		return d.Replayed, err
	})
}

func (b *books) settle(j bookedJob, i int, limiter *client.Limiter) error {
	return b.untilAnswered(func(ctx context.Context) (bool, error) {
		d, err := limiter.Settle(ctx, j.charges[i].Policy, j.charges[i].Key, j.key, j.real[i])
		return d.Replayed, err
	})
}

// settleTwice has ratelimit_settle count a settlement that was made already.
var settleTwice = plantedBug{"ratelimit_settle", `(update idempotency_keys as k set settled = [^;]*?)and k.settled is null`, "$1"}

// pauseBefore has other sessions come to the same place, where they would seldom meet by chance.
func pauseBefore(function, pattern string) plantedBug {
	return plantedBug{function, pattern, "perform pg_sleep(0.002); $0"}
}
