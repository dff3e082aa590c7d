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
)

// A ledger is what the callers of one policy know, whose buckets start full and gain nothing: what each
// was granted, and which tokens nobody knows about. check holds it against the server.
type ledger struct {
	policy   string
	capacity int64
	timeout  time.Duration // of one try

	mu       sync.Mutex
	accounts map[string]*account // by bucket
	granted  int
	replayed int // of these, because an earlier try had been granted
	denied   int
	unknown  int            // requests without an idempotency key that got no answer
	failed   map[string]int // tries without an answer, by SQLSTATE
	slowest  time.Duration  // of all tries
}

type account struct {
	grants  []receipt
	unknown int64 // tokens taken or not
}

type receipt struct {
	claim
	remaining int64
}

type claim struct {
	key            string
	cost           int64
	idempotencyKey string // empty for none
}

// newLedger defines the policy.
func newLedger(db *testDB, policy string, capacity int64, timeout time.Duration) *ledger {
	db.definePolicy(policy, capacity, 1, aDay)
	return &ledger{
		policy:   policy,
		capacity: capacity,
		timeout:  timeout,
		accounts: make(map[string]*account),
		failed:   make(map[string]int),
	}
}

// load starts callers of these limiters, three of four with idempotency keys and at buckets of their own.
// For three of four requests a bucket has enough.
func (l *ledger) load(ctx context.Context, t *testing.T, limiters ...client.Acquirer) *sync.WaitGroup {
	const callers, requests = 32, 200
	var done sync.WaitGroup
	var keyed, bare atomic.Int64
	for caller := range callers {
		by := limiters[caller%len(limiters)]
		done.Go(func() {
			for ctx.Err() == nil {
				c := claim{cost: 1 + rand.Int64N(3)}
				if caller < callers/4 {
					c.key = fmt.Sprint("bare/", bare.Add(1)/requests)
				} else {
					n := keyed.Add(1)
					c.key, c.idempotencyKey = fmt.Sprint("keyed/", n/requests), fmt.Sprint(n)
				}
				if err := l.settle(by, c); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	return &done
}

// settle makes a request and enters what came of it. With an idempotency key it asks until there is an
// answer, for as long as patience.
func (l *ledger) settle(by client.Acquirer, c claim) error {
	for giveUp := time.Now().Add(patience); ; {
		d, err := l.try(by, c)
		switch {
		case err == nil:
			l.enter(c, d)
			return nil
		case c.idempotencyKey == "":
			if !isRefusal(err) {
				l.lose(c)
			}
			return nil
		case time.Now().After(giveUp):
			return fmt.Errorf("no answer to %+v within %v: %w", c, patience, err)
		}
		time.Sleep(5 * time.Millisecond) // where there is no server, errors come fast
	}
}

func (l *ledger) try(by client.Acquirer, c claim) (client.Decision, error) {
	opts := []client.AcquireOption{client.Cost(c.cost)}
	if c.idempotencyKey != "" {
		opts = append(opts, client.IdempotencyKey(c.idempotencyKey))
	}
	ctx, cancel := context.WithTimeout(context.Background(), l.timeout)
	defer cancel()
	start := time.Now()
	d, err := by.Acquire(ctx, l.policy, c.key, opts...)

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

func (l *ledger) enter(c claim, d client.Decision) {
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
	a := l.account(c.key)
	a.grants = append(a.grants, receipt{c, d.Remaining})
}

func (l *ledger) lose(c claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unknown++
	l.account(c.key).unknown += c.cost
}

func (l *ledger) account(key string) *account {
	a := l.accounts[key]
	if a == nil {
		a = new(account)
		l.accounts[key] = a
	}
	return a
}

// awaitAnswers returns when there are so many more, and awaitFailures when so many more tries got none.
func (l *ledger) awaitAnswers(t *testing.T, more int) {
	t.Helper()
	l.await(t, more, func() int { return l.granted + l.denied })
}

func (l *ledger) awaitFailures(t *testing.T, more int) {
	t.Helper()
	l.await(t, more, func() (n int) {
		for _, failed := range l.failed {
			n += failed
		}
		return n
	})
}

func (l *ledger) await(t *testing.T, more int, number func() int) {
	t.Helper()
	now := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return number()
	}
	before := now()
	require.Eventually(t, func() bool { return now() >= before+more }, time.Minute, 5*time.Millisecond)
}

// check asks the server, when no call is under way: no token was granted twice; what a bucket lacks was
// granted, or may have been lost; each idempotency key replays the answer that its caller ended with, and
// none is remembered of a caller who was denied. If all of it is right it closes the accounts, and the
// policy begins afresh.
func (l *ledger) check(db *testDB) error {
	var keyed int64
	for key, a := range l.accounts {
		slices.SortFunc(a.grants, func(a, b receipt) int { return int(b.remaining - a.remaining) })
		left, lost := l.capacity, int64(0)
		for _, g := range a.grants {
			before := g.remaining + g.cost
			if before > left {
				return fmt.Errorf("bucket %s: %+v took tokens that others were granted", key, g)
			}
			lost += left - before
			left = g.remaining
		}
		held := db.left(l.policy, key)
		lost += left - held
		switch {
		case held > left:
			return fmt.Errorf("bucket %s holds %d tokens, and a grant left %d", key, held, left)
		case lost > a.unknown:
			return fmt.Errorf("bucket %s lacks %d tokens, of which %d may have been lost", key, lost, a.unknown)
		}
		for _, g := range a.grants {
			if g.idempotencyKey == "" {
				continue
			}
			keyed++
			if d := db.acquire(l.policy, key, g.cost, g.idempotencyKey); !d.Replayed || d.Remaining != g.remaining {
				return fmt.Errorf("bucket %s: %+v is replayed as %+v", key, g, d)
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
	clear(l.accounts)
	db.dropPolicy(l.policy)
	db.definePolicy(l.policy, l.capacity, 1, aDay)
	return nil
}

func TestLedger_SeesWhatDoesNotAddUp(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	by := client.New(db.Pool)
	granted := func(remaining int64) client.Decision {
		return client.Decision{Allowed: true, Remaining: remaining}
	}
	for wrong, happen := range map[string]func(l *ledger){
		"": func(l *ledger) {
			l.lose(claim{"k", 2, ""})
			db.acquire(l.policy, "k", 2)
		},
		"lacks 2 tokens, of which 0":           func(l *ledger) { db.acquire(l.policy, "k", 2) },
		"took tokens that others were granted": func(l *ledger) { l.enter(claim{"k", 2, ""}, granted(6)) },
		"holds 7 tokens, and a grant left 5":   func(l *ledger) { l.enter(claim{"k", 2, ""}, granted(5)) },
		"is replayed as": func(l *ledger) {
			l.enter(claim{"k", 2, "j"}, granted(5))
			db.acquire(l.policy, "k", 2)
		},
		"2 idempotency keys are remembered of 1": func(l *ledger) {
			l.lose(claim{"k", 2, ""})
			db.acquire(l.policy, "k", 2, "j")
		},
	} {
		l := newLedger(db, "policy: "+wrong, 10, time.Minute)
		require.NoError(t, l.settle(by, claim{"k", 3, "i"}))
		happen(l)
		if err := l.check(db); wrong == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, wrong)
		}
	}
}

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
