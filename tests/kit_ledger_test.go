package tests

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// A ledger records the callers' view of one policy, whose buckets start full and refill nothing: the grants,
// and the requests that may have been granted. check compares it with the server.
type ledger struct {
	policy   string
	capacity int64
	timeout  time.Duration // of one try

	mu         sync.Mutex
	grants     []entry // since the last check
	unanswered []entry // requests without an idempotency key that may have taken tokens, since the last check

	granted  int
	replayed int // of these, because an earlier try had been granted
	denied   int
	unknown  int            // requests without an idempotency key that got no answer
	failed   map[string]int // tries without an answer, by SQLSTATE
	slowest  time.Duration  // of all tries
}

// request is one for a bucket of the ledger's policy; the empty idempotency key is none.
func (l *ledger) request(key string, cost int64, idempotencyKey string) request {
	return request{model.BucketID{Policy: l.policy, Key: key}, cost, idempotencyKey}
}

// newLedger defines the policy.
func newLedger(db *testDB, policy string, capacity int64, timeout time.Duration) *ledger {
	db.definePolicy(policy, capacity, 1, aDay)
	return &ledger{policy: policy, capacity: capacity, timeout: timeout, failed: make(map[string]int)}
}

// load starts callers of these limiters, three of four with idempotency keys and at buckets of their own.
// For three of four requests a bucket has enough.
func (l *ledger) load(t testing.TB, limiters ...client.Acquirer) *load {
	const callers, requests = 32, 200
	var keyed, bare atomic.Int64
	all := newLoad(t)
	all.start(callers, func(caller int) error {
		by, cost := limiters[caller%len(limiters)], 1+rand.Int64N(3)
		if caller < callers/4 {
			return l.settle(by, l.request(fmt.Sprint("bare/", bare.Add(1)/requests), cost, ""))
		}
		n := keyed.Add(1)
		return l.settle(by, l.request(fmt.Sprint("keyed/", n/requests), cost, fmt.Sprint(n)))
	})
	return all
}

// settle makes a request and records the decision. A request with an idempotency key is repeated until there
// is one, for as long as patience.
func (l *ledger) settle(by client.Acquirer, r request) error {
	for giveUp := time.Now().Add(patience); ; {
		d, err := l.try(by, r)
		switch {
		case err == nil:
			l.enter(r, d)
			return nil
		case r.idempotencyKey == "":
			if !isRefusal(err) {
				l.lose(r)
			}
			return nil
		case time.Now().After(giveUp):
			return fmt.Errorf("no answer to %+v within %v: %w", r, patience, err)
		}
		time.Sleep(5 * time.Millisecond) // where there is no server, errors come fast
	}
}

func (l *ledger) try(by client.Acquirer, r request) (client.Decision, error) {
	ctx, cancel := context.WithTimeout(context.Background(), l.timeout)
	defer cancel()
	start := time.Now()
	d, err := r.by(ctx, by)

	l.mu.Lock()
	defer l.mu.Unlock()
	l.slowest = max(l.slowest, time.Since(start))
	if err != nil {
		l.failed[sqlState(err)]++
	}
	return d, err
}

// isRefusal reports whether the call was surely not done: it was not sent, or the server said so.
func isRefusal(err error) bool {
	var connectErr *pgconn.ConnectError
	var pgErr *pgconn.PgError
	return errors.As(err, &connectErr) || errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR"
}

func (l *ledger) enter(r request, d client.Decision) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !d.Allowed {
		l.denied++
		return
	}
	l.granted++
	if d.Replayed {
		l.replayed++
	}
	l.grants = append(l.grants, entry{request: r, Decision: d})
}

func (l *ledger) lose(r request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unknown++
	l.unanswered = append(l.unanswered, entry{request: r})
}

// awaitAnswers waits for so many more decisions, and awaitFailures for so many more tries that fail.
func (l *ledger) awaitAnswers(t *testing.T, more int) {
	l.await(t, more, func() int { return l.granted + l.denied })
}

func (l *ledger) awaitFailures(t *testing.T, more int) {
	l.await(t, more, func() (n int) {
		for _, failed := range l.failed {
			n += failed
		}
		return n
	})
}

func (l *ledger) await(t *testing.T, more int, number func() int) {
	now := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return number()
	}
	before := now()
	require.Eventually(t, func() bool { return now() >= before+more }, time.Minute, 5*time.Millisecond)
}

// check asks the server, when no call is under way. The audit of each bucket finds no fault and no lost
// grant; each idempotency key replays the answer that its caller ended with, and none is remembered of a
// caller who was denied. If all of it is right, the ledger and the policy begin afresh.
func (l *ledger) check(db *testDB) error {
	var keyed int64
	grants, unanswered := byBucket(l.grants), byBucket(l.unanswered)
	for bucket := range byBucket(slices.Concat(l.grants, l.unanswered)) {
		left := db.left(bucket.Policy, bucket.Key)
		found, err := audit(l.capacity, left, grants[bucket], unanswered[bucket])
		if err == nil && len(found.lost) > 0 {
			err = fmt.Errorf("a grant was lost: %d are left after %+v", left, found.lost[0])
		}
		if err != nil {
			return fmt.Errorf("bucket %s: %w", bucket.Key, err)
		}
		for _, g := range grants[bucket] {
			if g.idempotencyKey == "" {
				continue
			}
			keyed++
			if d := db.must(g.request.acquire(db.Pool)); !d.Replayed || d.Remaining != g.Remaining {
				return fmt.Errorf("bucket %s: %+v is replayed as %+v", bucket.Key, g, d)
			}
		}
	}
	if n := db.number(`
		select count(*)
		  from ratelimit.idempotency_keys as k
		  join ratelimit.policies as p on p.id = k.policy_id
		 where p.name = $1`, l.policy); n != keyed {
		return fmt.Errorf("%d idempotency keys are remembered of %d grants", n, keyed)
	}
	l.grants, l.unanswered = nil, nil
	db.dropPolicy(l.policy)
	db.definePolicy(l.policy, l.capacity, 1, aDay)
	return nil
}

func TestLedger_SeesWhatDoesNotAddUp(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	by := client.New(db.Pool)
	granted := func(remaining int64) client.Decision { return client.Decision{Allowed: true, Remaining: remaining} }
	for wrong, happen := range map[string]func(l *ledger){
		"": func(l *ledger) {
			l.lose(l.request("k", 2, ""))
			db.acquire(l.policy, "k", 2)
		},
		"2 tokens are gone that were granted to nobody; requests without an answer wanted 0": func(l *ledger) { db.acquire(l.policy, "k", 2) },
		"tokens were granted twice": func(l *ledger) { l.enter(l.request("k", 2, ""), granted(6)) },
		"lost: 7 are left":          func(l *ledger) { l.enter(l.request("k", 2, ""), granted(5)) },
		"is replayed as": func(l *ledger) {
			l.enter(l.request("k", 2, "j"), granted(5))
			db.acquire(l.policy, "k", 2)
		},
		"2 idempotency keys are remembered of 1": func(l *ledger) {
			l.lose(l.request("k", 2, ""))
			db.acquire(l.policy, "k", 2, "j")
		},
	} {
		l := newLedger(db, "policy: "+wrong, 10, time.Minute)
		require.NoError(t, l.settle(by, l.request("k", 3, "i")))
		happen(l)
		if err := l.check(db); wrong == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, wrong)
		}
	}
}

// An entry is a request, and the decision if there was one.
type entry struct {
	request
	client.Decision
	at time.Time // of the decision, or of the error
}

// try makes a request and returns its entry.
func (r request) try(limiter client.Acquirer) (entry, error) {
	d, err := r.by(context.Background(), limiter)
	return entry{r, d, time.Now()}, err
}

func byBucket(entries []entry) map[model.BucketID][]entry {
	buckets := map[model.BucketID][]entry{}
	for _, e := range entries {
		buckets[e.BucketID] = append(buckets[e.BucketID], e)
	}
	return buckets
}

// A finding sorts the grants of one bucket by whether the server still knows them.
type finding struct {
	kept, lost []entry
	unclaimed  int64 // tokens taken for requests that got no answer
}

// audit compares the decisions on one bucket, which began full and refilled nothing, with the tokens left in
// it. A grant is lost if more tokens are left now than its decision said.
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

func TestAudit_FindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	grant := func(cost, remaining int64) entry {
		return entry{request: request{cost: cost}, Decision: client.Decision{Allowed: true, Remaining: remaining}}
	}
	grants := []entry{grant(1, 4), grant(2, 8), grant(3, 5)} // of ten tokens
	inFlight := []entry{{request: request{cost: 2}}}
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
		{"it was granted before others", 4, grants[:2], []entry{{request: request{cost: 3}}}, 0, 3, ""},
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
