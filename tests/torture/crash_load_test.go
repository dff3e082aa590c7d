package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// A crashLoad is a load on a server that may be gone at any moment. Each caller goes on until one of its
// requests gets no answer. The ledger has the grants and the requests without an answer, of all policies.
type crashLoad struct {
	*kit.Ledger
	t      testing.TB
	prefix string
	end    func() // lets callers finish their requests
}

// startCrashLoad starts callers on one database: see startCrashLoadOn.
func startCrashLoad(t testing.TB, url, prefix string, policies []string, pause time.Duration, opts ...client.Option) *crashLoad {
	pool := kit.NoError(pgxpool.New(context.Background(), url+"&pool_max_conns=12"))(t)
	combiner := client.NewCombiner(pool, opts...)
	l := startCrashLoadOn(t, crashTarget{combiner: combiner, limiter: client.New(pool, opts...)}, prefix, policies, pause)
	end := l.end
	l.end = sync.OnceFunc(func() {
		end()
		combiner.Close()
		pool.Close()
	})
	t.Cleanup(l.end)
	return l
}

// A crashTarget is what the callers of a load ask: most of them the combiner.
type crashTarget struct {
	combiner, limiter client.Acquirer
	spread            func(caller int, key string) string // the key that a caller has in place of this one; nil for the same
}

// startCrashLoadOn starts callers of some policies, who pause between requests for a random time up to the one given. The keys of
// their buckets begin with the prefix. Requests with an idempotency key have buckets of their own.
func startCrashLoadOn(t testing.TB, target crashTarget, prefix string, policies []string, pause time.Duration) *crashLoad {
	if target.spread == nil {
		target.spread = func(_ int, key string) string { return key }
	}
	l := &crashLoad{Ledger: &kit.Ledger{}, t: t, prefix: prefix}
	all := kit.NewLoad(t)
	for i := range 30 * len(policies) {
		all.Callers.Go(func() error {
			by := target.combiner
			if i/len(policies)%10 == 0 {
				by = target.limiter
			}
			key := func(kind string, n int) string {
				return target.spread(i/len(policies), fmt.Sprint(prefix, " ", kind, " ", n))
			}
			r := kit.Request{BucketID: model.BucketID{Policy: policies[i%len(policies)]}}
			if i%5 == 0 && i < 15*len(policies) {
				return l.acquireAll(all, by, r.Policy, key, fmt.Sprint(i), pause)
			}
			for n := 0; ; n++ {
				r.Key, r.Cost = key("plain", rand.N(3)), 1+rand.Int64N(3)
				if i < 15*len(policies) {
					r.Key, r.IdempotencyKey = key("keyed", rand.N(3)), fmt.Sprint(i, " ", n)
				}
				select {
				case <-all.Ctx.Done():
					return nil
				case <-time.After(rand.N(pause + 1)):
				}
				d, err := r.By(context.Background(), by)
				if l.write(r, d, err); err != nil {
					return nil //nolint:nilerr // the other callers go on
				}
			}
		})
	}
	l.end = func() { _ = all.End() } // no caller returns an error
	return l
}

// of is what a load has on the buckets of one shard.
func (l *crashLoad) of(shard, of int) *crashLoad {
	return &crashLoad{Ledger: l.Ledger.Of(shard, of), t: l.t, prefix: l.prefix}
}

// acquireAll makes requests for two buckets at a time. Each bucket's share is a request with an idempotency key.
func (l *crashLoad) acquireAll(all *kit.Load, by client.Acquirer, policy string, key func(kind string, n int) string, caller string, pause time.Duration) error {
	for n := 0; ; n++ {
		idempotencyKey := fmt.Sprint(caller, " ", n)
		var charges []client.Charge
		for n := range 2 {
			charges = append(charges, client.Charge{Policy: policy, Key: key("keyed", n+rand.N(2)*n), Cost: client.Cost(1 + rand.Int64N(3))})
		}
		select {
		case <-all.Ctx.Done():
			return nil
		case <-time.After(rand.N(pause + 1)):
		}
		got, err := by.AcquireAll(context.Background(), charges, client.IdempotencyKey(idempotencyKey))
		for i, c := range charges {
			var d client.Decision
			if err == nil {
				d = got.Decisions[i]
			}
			l.write(kit.Request{BucketID: model.BucketID{Policy: c.Policy, Key: c.Key}, Cost: c.Cost.Tokens(), IdempotencyKey: idempotencyKey}, d, err)
		}
		if err != nil {
			return nil //nolint:nilerr // the other callers go on
		}
	}
}

func (l *crashLoad) write(r kit.Request, d client.Decision, err error) {
	switch {
	case err != nil:
		l.Lose(r)
	case !d.Allowed:
		l.t.Errorf("denied: %+v, %+v", r, d)
	default:
		l.Enter(r, d)
	}
}

// runAWhile returns at a random moment when the load is in full swing.
func (l *crashLoad) runAWhile(t *testing.T) {
	l.AwaitAnswers(t, 50)
	time.Sleep(rand.N(400 * kit.Ms)) // the moment is what is random
}

// A settlement counts the grants of a load, or of several, by what a crash did to them.
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

// settle compares the decisions of a load with a recovered database. Then it repeats all requests that have
// an idempotency key, so that each is charged once, and notes the tokens left in the buckets.
func (l *crashLoad) settle(db *kit.TestDB, left map[model.BucketID]int64) (s settlement) {
	t := db.T
	grants, unanswered := kit.ByBucket(l.Grants), kit.ByBucket(l.Unanswered)
	names := kit.ByBucket(slices.Concat(l.Grants, l.Unanswered))
	var kept, lost, forgotten []kit.Entry
	for name := range names {
		now := db.Left(name.Policy, name.Key)
		if name.Policy == "ephemeral" {
			require.EqualValues(t, kit.ExactCapacity, now, "%v is full again", name)
			forgotten = append(forgotten, grants[name]...)
			continue
		}
		found, err := kit.Audit(kit.ExactCapacity, now, grants[name], unanswered[name])
		require.NoError(t, err, "%v", name)
		kept, lost = append(kept, found.Kept...), append(lost, found.Lost...)
	}
	require.Zero(t, db.Number(`
		select count(*)
		  from (select policy_id, key, $1 - level / 1000000 from ratelimit.buckets where key like $2) as b (policy_id, key, taken)
		  full join (select policy_id, key, sum(cost) from ratelimit.idempotency_keys where key like $2 group by 1, 2)
		            as k (policy_id, key, taken) using (policy_id, key)
		 where b.taken is distinct from k.taken`, kit.ExactCapacity, l.prefix+" keyed %"),
		"buckets whose tokens and idempotency keys do not agree")

	s.grants, s.lost, s.forgotten, s.unanswered = len(kept)+len(lost), len(lost), len(forgotten), len(l.Unanswered)
	if len(lost) > 0 {
		s.lostFor = []time.Duration{newest(l.Grants).At.Sub(oldest(lost).At)}
	}
	s.again += askAgain(db, kept, func(before, now kit.Entry) bool { return now.Replayed && now.Remaining == before.Remaining })
	s.again += askAgain(db, slices.Concat(lost, forgotten), func(_, now kit.Entry) bool { return now.Allowed && !now.Replayed })
	s.again += askAgain(db, l.Unanswered, func(_, now kit.Entry) bool { return now.Allowed })
	for name, requests := range names {
		if requests[0].IdempotencyKey != "" {
			require.EqualValues(t, kit.ExactCapacity-kit.Costs(requests), db.Left(name.Policy, name.Key), "%v: each is charged once", name)
		}
		if name.Policy == "durable" {
			left[name] = db.Left(name.Policy, name.Key)
		}
	}
	return s
}

// askAgain repeats those requests that have an idempotency key, and returns how many have.
func askAgain(db *kit.TestDB, entries []kit.Entry, right func(before, now kit.Entry) bool) (n int) {
	limiter := client.NewCombiner(db.Pool)
	defer limiter.Close()
	var askers errgroup.Group
	askers.SetLimit(64)
	for _, before := range entries {
		if before.IdempotencyKey == "" {
			continue
		}
		n++
		askers.Go(func() error {
			now, err := before.Try(limiter)
			if err == nil && !right(before, now) {
				err = fmt.Errorf("first %+v, then %+v", before, now)
			}
			return err
		})
	}
	require.NoError(db.T, askers.Wait())
	return n
}

func oldest(entries []kit.Entry) kit.Entry {
	return slices.MinFunc(entries, func(a, b kit.Entry) int { return a.At.Compare(b.At) })
}

func newest(entries []kit.Entry) kit.Entry {
	return slices.MaxFunc(entries, func(a, b kit.Entry) int { return a.At.Compare(b.At) })
}

func TestLedger_SeesWhatDoesNotAddUp(t *testing.T) {
	db := kit.ParallelDB(t)
	by := client.New(db.Pool)
	granted := func(remaining int64) client.Decision { return client.Decision{Allowed: true, Remaining: remaining} }
	for wrong, happen := range map[string]func(l *kit.Ledger){
		"": func(l *kit.Ledger) {
			l.Lose(l.Request("k", 2, ""))
			db.Acquire(l.Policy, "k", 2)
		},
		"2 tokens are gone that were granted to nobody; requests without an answer wanted 0": func(l *kit.Ledger) { db.Acquire(l.Policy, "k", 2) },
		"tokens were granted twice": func(l *kit.Ledger) { l.Enter(l.Request("k", 2, ""), granted(6)) },
		"lost: 7 are left":          func(l *kit.Ledger) { l.Enter(l.Request("k", 2, ""), granted(5)) },
		"is replayed as": func(l *kit.Ledger) {
			l.Enter(l.Request("k", 2, "j"), granted(5))
			db.Acquire(l.Policy, "k", 2)
		},
		"2 idempotency keys are remembered of 1": func(l *kit.Ledger) {
			l.Lose(l.Request("k", 2, ""))
			db.Acquire(l.Policy, "k", 2, "j")
		},
	} {
		l := kit.NewLedger(db, "policy: "+wrong, 10, time.Minute)
		require.NoError(t, l.Settle(by, l.Request("k", 3, "i")))
		happen(l)
		if err := l.Check(db); wrong == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, wrong)
		}
	}
}

func TestAudit_FindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	grant := func(cost, remaining int64) kit.Entry {
		return kit.Entry{Request: kit.Request{Cost: cost}, Decision: client.Decision{Allowed: true, Remaining: remaining}}
	}
	grants := []kit.Entry{grant(1, 4), grant(2, 8), grant(3, 5)} // of ten tokens
	inFlight := []kit.Entry{{Request: kit.Request{Cost: 2}}}
	for _, c := range []struct {
		name       string
		left       int64
		grants     []kit.Entry
		unanswered []kit.Entry
		lost       int
		unclaimed  int64
		err        string
	}{
		{"nothing", 4, grants, nil, 0, 0, ""},
		{"a request without an answer was granted", 2, grants, inFlight, 0, 2, ""},
		{"it was granted before others", 4, grants[:2], []kit.Entry{{Request: kit.Request{Cost: 3}}}, 0, 3, ""},
		{"the newest is lost", 5, grants, nil, 1, 0, ""},
		{"two are lost", 8, grants, nil, 2, 0, ""},
		{"all are lost", 10, grants, inFlight, 3, 0, ""},
		{"a token is gone", 3, grants, nil, 0, 0, "granted to nobody"},
		{"more are gone than were asked for", 1, grants, inFlight, 0, 0, "granted to nobody"},
		{"tokens are there that never were", 11, nil, nil, 0, 0, "granted to nobody"},
		{"two callers got the same tokens", 4, append(grants, grant(1, 8)), inFlight, 0, 0, "granted twice"},
		{"a grant is lost in part", 9, grants, nil, 0, 0, "in part"},
	} {
		f, err := kit.Audit(10, c.left, c.grants, c.unanswered)
		if c.err != "" {
			require.ErrorContains(t, err, c.err, c.name)
			continue
		}
		require.NoError(t, err, c.name)
		require.Len(t, f.Lost, c.lost, c.name)
		require.Len(t, f.Kept, len(c.grants)-c.lost, c.name)
		require.Equal(t, c.unclaimed, f.Unclaimed, c.name)
	}
}
