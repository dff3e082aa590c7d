package tests

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/client"
)

// An entry is a request, and the answer if there was one.
type entry struct {
	policy, key    string
	idempotencyKey string // may be empty
	cost           int64
	client.Decision
	at time.Time // when the answer came, or none
}

func (e entry) ask(limiter client.Acquirer) (entry, error) {
	opts := []client.AcquireOption{client.Cost(e.cost)}
	if e.idempotencyKey != "" {
		opts = append(opts, client.IdempotencyKey(e.idempotencyKey))
	}
	var err error
	e.Decision, err = limiter.Acquire(context.Background(), e.policy, e.key, opts...)
	e.at = time.Now()
	return e, err
}

// A crashLoad is callers of all kinds, each of whom goes on until a request of his gets no answer, and
// all that they know of a server that may be gone at any moment: the grants they were told of, and the
// requests without an answer.
type crashLoad struct {
	prefix  string
	stop    chan struct{}
	callers sync.WaitGroup
	end     func() // lets callers finish their requests

	mu         sync.Mutex
	grants     []entry
	unanswered []entry
	denials    []entry       // of which there should be none
	busy       chan struct{} // closed when there are some grants
}

// startCrashLoad has callers take tokens of some policies, with pauses that are random up to the one given.
// The keys of their buckets begin with the prefix; requests with an idempotency key have buckets of
// their own.
func startCrashLoad(t testing.TB, url, prefix string, policies []string, pause time.Duration, opts ...client.LimiterOption) *crashLoad {
	t.Helper()
	pool, err := pgxpool.New(context.Background(), url+"&pool_max_conns=12")
	require.NoError(t, err)
	var combinerOpts []client.CombinerOption
	for _, opt := range opts {
		combinerOpts = append(combinerOpts, opt)
	}
	combiner := client.NewCombiner(pool, combinerOpts...)
	limiter := client.New(pool, opts...)

	l := &crashLoad{prefix: prefix, stop: make(chan struct{}), busy: make(chan struct{})}
	for i := range 30 * len(policies) {
		l.callers.Go(func() {
			by := client.Acquirer(combiner)
			if i/len(policies)%10 == 0 {
				by = limiter
			}
			request := entry{policy: policies[i%len(policies)]}
			for n := 0; ; n++ {
				request.key, request.cost = fmt.Sprint(prefix, " plain ", rand.N(3)), 1+rand.Int64N(3)
				if i < 15*len(policies) {
					request.key, request.idempotencyKey = fmt.Sprint(prefix, " keyed ", rand.N(3)), fmt.Sprint(i, " ", n)
				}
				select {
				case <-l.stop:
					return
				case <-time.After(rand.N(pause + 1)):
				}
				e, err := request.ask(by)
				if l.write(e, err); err != nil {
					return
				}
			}
		})
	}
	l.end = sync.OnceFunc(func() {
		close(l.stop)
		l.callers.Wait()
		combiner.Close()
		pool.Close()
	})
	t.Cleanup(l.end)
	return l
}

// busyness is how many grants a load has to show before a server is taken from it.
const busyness = 50

func (l *crashLoad) write(e entry, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err != nil:
		l.unanswered = append(l.unanswered, e)
	case !e.Allowed:
		l.denials = append(l.denials, e)
	default:
		if l.grants = append(l.grants, e); len(l.grants) == busyness {
			close(l.busy)
		}
	}
}

// runFor returns at a random moment when the load is in full swing.
func (l *crashLoad) runFor(t testing.TB, atMost time.Duration) {
	t.Helper()
	select {
	case <-l.busy:
	case <-time.After(patience):
		require.FailNow(t, "there is hardly any load")
	}
	time.Sleep(rand.N(atMost)) // the moment is what is random
}

// A bucketName names a bucket.
type bucketName struct{ policy, key string }

func byBucket(entries []entry) map[bucketName][]entry {
	buckets := map[bucketName][]entry{}
	for _, e := range entries {
		name := bucketName{e.policy, e.key}
		buckets[name] = append(buckets[name], e)
	}
	return buckets
}

// A finding is what became of the grants of one bucket.
type finding struct {
	kept, lost []entry
	unclaimed  int64 // tokens taken for requests that got no answer
}

// audit compares what callers were told about a bucket that was full, and that refilled nothing, with
// how many tokens are left in it. Each grant told how many tokens it left; so it is lost if now there
// are more.
func audit(capacity, left int64, grants, unanswered []entry) (f finding, err error) {
	grants = slices.Clone(grants)
	slices.SortFunc(grants, func(a, b entry) int { return cmp.Compare(b.Remaining, a.Remaining) })
	level := capacity // after the grants so far
	for _, g := range grants {
		before := g.Remaining + g.cost
		switch {
		case before > level:
			return f, fmt.Errorf("tokens were granted twice: the bucket held %d before %+v", level, g)
		case g.Remaining >= left:
			f.kept = append(f.kept, g)
			f.unclaimed += level - before
		case before > left:
			return f, fmt.Errorf("a grant was lost in part: %d are left after %+v", left, g)
		default:
			if len(f.lost) == 0 {
				f.unclaimed += level - left
			}
			f.lost = append(f.lost, g)
		}
		level = g.Remaining
	}
	if len(f.lost) == 0 {
		f.unclaimed += level - left
	}
	if f.unclaimed < 0 || f.unclaimed > costs(unanswered) {
		return f, fmt.Errorf("%d tokens are gone that were granted to nobody; requests without an answer wanted %d", f.unclaimed, costs(unanswered))
	}
	return f, nil
}

func costs(entries []entry) (sum int64) {
	for _, e := range entries {
		sum += e.cost
	}
	return sum
}

// exactCapacity is that of policies that gain one token a day: what a bucket holds tells how many were
// taken.
const exactCapacity = 3_000_000

func (db *testDB) defineExact() {
	db.t.Helper()
	db.definePolicy("durable", exactCapacity, 1, aDay)
	db.definePolicy("ephemeral", exactCapacity, 1, aDay, ephemeral)
}

// A settlement counts what became of a load, or of several.
type settlement struct {
	grants, lost, mostLost int
	unanswered             int
	again                  int             // requests with an idempotency key that were made again
	forgotten              int             // ephemeral grants
	lostFor                []time.Duration // of each load that lost something: from its oldest lost answer to its last
}

func (s *settlement) add(other settlement) {
	s.grants += other.grants
	s.lost += other.lost
	s.mostLost = max(s.mostLost, other.lost)
	s.unanswered += other.unanswered
	s.again += other.again
	s.forgotten += other.forgotten
	s.lostFor = append(s.lostFor, other.lostFor...)
}

// settle compares what the callers of a load were told with a database that was recovered, and then
// makes all requests that have an idempotency key again, so that each is charged once. It notes what
// is left in the buckets.
func (l *crashLoad) settle(db *testDB, left map[bucketName]int64) (s settlement) {
	t := db.t
	t.Helper()
	require.Empty(t, l.denials)
	grants, unanswered := byBucket(l.grants), byBucket(l.unanswered)
	names := byBucket(slices.Concat(l.grants, l.unanswered))
	var kept, lost, forgotten []entry
	for name := range names {
		now := db.left(name.policy, name.key)
		if name.policy == "ephemeral" {
			require.EqualValues(t, exactCapacity, now, "%v is full again", name)
			forgotten = append(forgotten, grants[name]...)
			continue
		}
		found, err := audit(exactCapacity, now, grants[name], unanswered[name])
		require.NoError(t, err, "%v", name)
		kept, lost = append(kept, found.kept...), append(lost, found.lost...)
	}
	require.Zero(t, db.number(`
		select count(*)
		  from (select policy_id, key, $1 - level / 1000000 from ratelimit.buckets where key like $2) as b (policy_id, key, taken)
		  full join (select policy_id, key, sum(cost) from ratelimit.idempotency_keys where key like $2 group by 1, 2)
		            as k (policy_id, key, taken) using (policy_id, key)
		 where b.taken is distinct from k.taken`, exactCapacity, l.prefix+" keyed %"),
		"buckets whose tokens and idempotency keys do not agree")

	s.grants, s.lost, s.forgotten, s.unanswered = len(kept)+len(lost), len(lost), len(forgotten), len(l.unanswered)
	if len(lost) > 0 {
		s.lostFor = []time.Duration{newest(l.grants).at.Sub(oldest(lost).at)}
	}
	s.again += askAgain(db, kept, func(before, now entry) bool { return now.Replayed && now.Remaining == before.Remaining })
	s.again += askAgain(db, slices.Concat(lost, forgotten), func(_, now entry) bool { return now.Allowed && !now.Replayed })
	s.again += askAgain(db, l.unanswered, func(_, now entry) bool { return now.Allowed })
	for name, requests := range names {
		if requests[0].idempotencyKey != "" {
			require.EqualValues(t, exactCapacity-costs(requests), db.left(name.policy, name.key), "%v: each is charged once", name)
		}
		if name.policy == "durable" {
			left[name] = db.left(name.policy, name.key)
		}
	}
	return s
}

// askAgain makes those requests that have an idempotency key once more, and returns how many have.
func askAgain(db *testDB, requests []entry, right func(before, now entry) bool) (n int) {
	limiter := client.NewCombiner(db.Pool)
	defer limiter.Close()
	var askers errgroup.Group
	askers.SetLimit(64)
	for _, before := range requests {
		if before.idempotencyKey == "" {
			continue
		}
		n++
		askers.Go(func() error {
			now, err := before.ask(limiter)
			if err == nil && !right(before, now) {
				err = fmt.Errorf("first %+v, then %+v", before, now)
			}
			return err
		})
	}
	require.NoError(db.t, askers.Wait())
	return n
}

func oldest(entries []entry) entry {
	return slices.MinFunc(entries, func(a, b entry) int { return a.at.Compare(b.at) })
}

func newest(entries []entry) entry {
	return slices.MaxFunc(entries, func(a, b entry) int { return a.at.Compare(b.at) })
}

func TestAudit_FindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	grant := func(cost, remaining int64) entry {
		return entry{cost: cost, Decision: client.Decision{Allowed: true, Remaining: remaining}}
	}
	grants := []entry{grant(1, 4), grant(2, 8), grant(3, 5)} // of ten tokens
	inFlight := []entry{{cost: 2}}
	for _, c := range []struct {
		name       string
		left       int64
		grants     []entry
		unanswered []entry
		lost       int
		unclaimed  int64
		err        string
	}{
		{"nothing", 4, grants, nil, 0, 0, ""},
		{"a request without an answer was granted", 2, grants, inFlight, 0, 2, ""},
		{"it was granted before others", 4, grants[:2], []entry{{cost: 3}}, 0, 3, ""},
		{"the newest is lost", 5, grants, nil, 1, 0, ""},
		{"two are lost", 8, grants, nil, 2, 0, ""},
		{"all are lost", 10, grants, inFlight, 3, 0, ""},
		{"a token is gone", 3, grants, nil, 0, 0, "granted to nobody"},
		{"more are gone than were asked for", 1, grants, inFlight, 0, 0, "granted to nobody"},
		{"tokens are there that never were", 11, nil, nil, 0, 0, "granted to nobody"},
		{"two callers got the same tokens", 4, append(grants, grant(1, 8)), inFlight, 0, 0, "granted twice"},
		{"a grant is lost in part", 9, grants, nil, 0, 0, "in part"},
	} {
		f, err := audit(10, c.left, c.grants, c.unanswered)
		if c.err != "" {
			require.ErrorContains(t, err, c.err, c.name)
			continue
		}
		require.NoError(t, err, c.name)
		require.Len(t, f.lost, c.lost, c.name)
		require.Len(t, f.kept, len(c.grants)-c.lost, c.name)
		require.Equal(t, c.unclaimed, f.unclaimed, c.name)
	}
}
