package kit

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
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// A Ledger records the callers' view of one policy, whose buckets start full and refill nothing: the grants,
// and the requests that may have been granted. check compares it with the server.
type Ledger struct {
	Policy   string
	Capacity int64
	timeout  time.Duration // of one try

	Mu         sync.Mutex
	Grants     []Entry // since the last check
	Unanswered []Entry // requests without an idempotency key that may have taken tokens, since the last check

	Granted  int
	Replayed int // of these, because an earlier try had been granted
	Denied   int
	Unknown  int            // requests without an idempotency key that got no answer
	Failed   map[string]int // tries without an answer, by SQLSTATE
	Slowest  time.Duration  // of all tries
}

// Request is one for a bucket of the ledger's policy; the empty idempotency key is none.
func (l *Ledger) Request(key string, cost int64, idempotencyKey string) Request {
	return Request{model.BucketID{Policy: l.Policy, Key: key}, cost, idempotencyKey}
}

func NewLedger(db *TestDB, policy string, capacity int64, timeout time.Duration) *Ledger {
	db.DefinePolicy(policy, capacity, 1, ADay)
	return &Ledger{Policy: policy, Capacity: capacity, timeout: timeout, Failed: make(map[string]int)}
}

// Load starts callers of these limiters, three of four with idempotency keys and at buckets of their own.
// For three of four requests a bucket has enough.
func (l *Ledger) Load(t testing.TB, limiters ...client.Acquirer) *Load {
	const callers = 32
	requests := min(200, max(1, l.Capacity*2/3))
	var keyed, bare atomic.Int64
	all := NewLoad(t)
	all.Start(callers, func(caller int) error {
		by, cost := limiters[caller%len(limiters)], 1+rand.Int64N(3)
		if caller < callers/4 {
			return l.Settle(by, l.Request(fmt.Sprint("bare/", bare.Add(1)/requests), cost, ""))
		}
		n := keyed.Add(1)
		return l.Settle(by, l.Request(fmt.Sprint("keyed/", n/requests), cost, fmt.Sprint(n)))
	})
	return all
}

// Settle makes a request and records the decision. One with an idempotency key is repeated until there is one, for as long as Patience.
func (l *Ledger) Settle(by client.Acquirer, r Request) error {
	for giveUp := time.Now().Add(Patience); ; {
		d, err := l.Try(by, r)
		switch {
		case err == nil:
			l.Enter(r, d)
			return nil
		case r.IdempotencyKey == "":
			if !isRefusal(err) {
				l.Lose(r)
			}
		case time.Now().After(giveUp):
			return fmt.Errorf("no answer to %+v within %v: %w", r, Patience, err)
		}
		// Where there is no server, or a Combiner refuses, errors come fast: callers without a pause would take the processors from the
		// server, whose calls then take longer than their callers wait, so that the Combiner goes on refusing.
		time.Sleep(5 * time.Millisecond)
		if r.IdempotencyKey == "" {
			return nil
		}
	}
}

func (l *Ledger) Try(by client.Acquirer, r Request) (client.Decision, error) {
	ctx, cancel := context.WithTimeout(context.Background(), l.timeout)
	defer cancel()
	start := time.Now()
	d, err := r.By(ctx, by)

	l.Mu.Lock()
	defer l.Mu.Unlock()
	l.Slowest = max(l.Slowest, time.Since(start))
	if err != nil {
		l.Failed[SQLState(err)]++
	}
	return d, err
}

// CitusBroken are the SQLSTATEs of a node of Citus that lost another, which may have committed.
var CitusBroken = []string{"08006", "XX000"}

// isRefusal reports whether the call was surely not done: it was not sent, or the server said so.
func isRefusal(err error) bool {
	var connectErr *pgconn.ConnectError
	var pgErr *pgconn.PgError
	return errors.Is(err, client.ErrOverloaded) || errors.As(err, &connectErr) ||
		errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && !slices.Contains(CitusBroken, pgErr.Code)
}

func (l *Ledger) Enter(r Request, d client.Decision) {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	if !d.Allowed {
		l.Denied++
		return
	}
	l.Granted++
	if d.Replayed {
		l.Replayed++
	}
	l.Grants = append(l.Grants, Entry{r, d})
}

func (l *Ledger) Lose(r Request) {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	l.Unknown++
	l.Unanswered = append(l.Unanswered, Entry{Request: r})
}

// AwaitAnswers waits for so many more decisions, and awaitFailures for so many more tries that fail.
func (l *Ledger) AwaitAnswers(t *testing.T, more int) {
	l.await(t, more, func() int { return l.Granted + l.Denied })
}

func (l *Ledger) AwaitFailures(t *testing.T, more int) {
	l.await(t, more, func() (n int) {
		for _, failed := range l.Failed {
			n += failed
		}
		return n
	})
}

func (l *Ledger) await(t *testing.T, more int, number func() int) {
	now := func() int {
		l.Mu.Lock()
		defer l.Mu.Unlock()
		return number()
	}
	before := now()
	require.Eventually(t, func() bool { return now() >= before+more }, time.Minute, 5*time.Millisecond)
}

// Check asks the server, when no call is under way. The audit of each bucket finds no fault and no lost
// grant; each idempotency key replays the answer that its caller ended with, and none is remembered of a
// caller who was denied. If all of it is right, the ledger and the policy begin afresh.
func (l *Ledger) Check(db *TestDB) error {
	var keyed int64
	grants, unanswered := ByBucket(l.Grants), ByBucket(l.Unanswered)
	for bucket := range ByBucket(slices.Concat(l.Grants, l.Unanswered)) {
		if err := Audit(l.Capacity, db.Left(bucket.Policy, bucket.Key), grants[bucket], unanswered[bucket]); err != nil {
			return fmt.Errorf("bucket %s: %w", bucket.Key, err)
		}
		for _, g := range grants[bucket] {
			if g.IdempotencyKey == "" {
				continue
			}
			keyed++
			if d := db.Must(g.Request.Acquire(db.Pool)); !d.Replayed || d.Remaining != g.Remaining {
				return fmt.Errorf("bucket %s: %+v is replayed as %+v", bucket.Key, g, d)
			}
		}
	}
	if n := db.Number(`
		select count(*)
		  from ratelimit.idempotency_keys as k
		  join ratelimit.policies as p on p.id = k.policy_id
		 where p.name = $1`, l.Policy); n != keyed {
		return fmt.Errorf("%d idempotency keys are remembered of %d grants", n, keyed)
	}
	l.Grants, l.Unanswered = nil, nil
	db.DropPolicy(l.Policy)
	db.DefinePolicy(l.Policy, l.Capacity, 1, ADay)
	return nil
}

// An Entry is a request, and the decision if there was one.
type Entry struct {
	Request
	client.Decision
}

func ByBucket(entries []Entry) map[model.BucketID][]Entry {
	buckets := map[model.BucketID][]Entry{}
	for _, e := range entries {
		buckets[e.BucketID] = append(buckets[e.BucketID], e)
	}
	return buckets
}

// Audit compares the decisions on one bucket, which began full and refilled nothing, with the tokens left in it.
func Audit(capacity, left int64, grants, unanswered []Entry) error {
	grants = slices.Clone(grants)
	slices.SortFunc(grants, func(a, b Entry) int { return cmp.Compare(b.Remaining, a.Remaining) })
	level, unclaimed, wanted := capacity, int64(0), int64(0) // unclaimed tokens were taken for requests that got no answer
	for _, g := range grants {
		switch before := g.Remaining + g.Cost; {
		case before > level:
			return fmt.Errorf("tokens were granted twice: the bucket held %d before %+v", level, g)
		case g.Remaining < left:
			return fmt.Errorf("a grant was lost: %d are left after %+v", left, g)
		default:
			unclaimed += level - before
		}
		level = g.Remaining
	}
	unclaimed += level - left
	for _, r := range unanswered {
		wanted += r.Cost
	}
	if unclaimed < 0 || unclaimed > wanted {
		return fmt.Errorf("%d tokens are gone that were granted to nobody; requests without an answer wanted %d", unclaimed, wanted)
	}
	return nil
}

// A Load is callers who make one call after the other, until the load ends or a call fails.
type Load struct {
	Callers *errgroup.Group
	Ctx     context.Context // done at the end of the load, and with the first call that fails
	cancel  context.CancelFunc
}

// NewLoad returns a load without callers. It ends with the test at the latest.
func NewLoad(t testing.TB) *Load {
	l := new(Load)
	var ctx context.Context
	ctx, l.cancel = context.WithCancel(context.Background())
	l.Callers, l.Ctx = errgroup.WithContext(ctx)
	t.Cleanup(func() { _ = l.End() })
	return l
}

func (l *Load) Start(callers int, call func(caller int) error) {
	for caller := range callers {
		l.Callers.Go(func() error {
			for l.Ctx.Err() == nil {
				if err := call(caller); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// RunFor returns after a while, or when a call fails.
func (l *Load) RunFor(d time.Duration) {
	select {
	case <-l.Ctx.Done():
	case <-time.After(d):
	}
}

// End lets the calls under way finish, and returns the first error.
func (l *Load) End() error {
	l.cancel()
	return l.Callers.Wait()
}
