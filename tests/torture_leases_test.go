package tests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// Four processes want more of a bucket than it gains. Then one is killed, and one is idle. By the server's books and by their own
// counts they get nothing that is not there; the killed one has lost its lease at most, and the idle one gives back to the token
// what it held. What they get of all that there is depends on the machine, and is a figure: so in make test the bucket gains
// nothing, or what is given back to a full bucket would be lost.
func TestTorture_LeasesOfProcesses(t *testing.T) {
	const callers, capacity = 16, 10_000
	run := torture(t, 1000) // tokens in each half
	refill := int64(0)
	if run.budget > 0 {
		refill = 10_000
	}
	db := newDB(t)
	db.definePolicy("api", capacity, refill, second)
	keepBooks(db)
	var processes []*leaserProcess
	for n := range 4 {
		p := &leaserProcess{Name: fmt.Sprint("leaser ", n), Policy: "api", Leases: true, Callers: callers, Every: time.Millisecond, Idle: 250 * ms}
		processes = append(processes, p.start(t, db))
	}
	granted := func() (sum int64) {
		for _, p := range processes {
			sum += p.granted.Load()
		}
		return sum
	}
	half := func() {
		time.Sleep(run.budget / 2)
		enough := granted() + run.steps
		require.Eventually(t, func() bool { return granted() >= enough }, patience, 5*ms)
	}
	db.Await(t, patience, "select count(*) > 0 from public.books")
	began := db.instant("min(refilled_at)")
	gained := func(since, until time.Time) float64 { return float64(refill) * until.Sub(since).Seconds() }
	half()
	toFour := granted()
	four := float64(toFour) / (capacity + gained(began, db.now()))

	killed, idling := processes[0], processes[1]
	killedAt := db.now()
	killed.kill(t)
	idling.idle(t)
	idleSince := db.now()
	require.Eventually(t, func() bool { return charged(db, idling.Name) == idling.granted.Load() }, patience, 5*ms, "what is idle is given back")
	half()
	two := float64(granted()-toFour) / gained(killedAt, db.now())
	for _, p := range processes[1:] {
		p.close(t)
	}

	for _, p := range processes {
		lost := charged(db, p.Name) - p.granted.Load()
		if p != killed {
			require.Zero(t, lost, "charged to %s, neither granted nor given back", p.Name)
			continue
		}
		run.figure(fmt.Sprintf("tokens lost with a killed process, of %d at most", capacity/10), lost, "")
		require.GreaterOrEqual(t, lost, int64(0), "granted and not charged")
		require.LessOrEqual(t, lost, int64(capacity/10+callers), "its lease, and what its callers had not counted yet")
	}
	require.Zero(t, db.number(`
		select count(*)
		  from (select sum(charged) over (order by n) as charged, at from public.books) as book
		 where charged > $1 + $2 * extract(epoch from at - $3)`, capacity, refill, began), "more than there was")
	require.LessOrEqual(t, float64(granted()), capacity+gained(began, db.instant("max(at)")))
	back := db.instant("max(at) filter (where who = $1)", idling.Name).Sub(idleSince)
	run.figure("ms until the idle one had given back", max(0, back).Milliseconds(), "")
	if run.budget > 0 {
		run.figure("granted to four processes, of all that there was", fmt.Sprintf("%.1f", 100*four), "%")
		run.figure("granted to two, after one was killed and one idle", fmt.Sprintf("%.1f", 100*two), "%")
	}
}

// Where a bucket has plenty, leases are as large as they may be. Then a killed process has lost its lease at most, and an idle one
// gives back all of it.
func TestLeases_AKilledProcessLosesItsLeaseAtMost(t *testing.T) {
	t.Parallel()
	const capacity, callers = 100_000, 8
	db := newDB(t)
	db.definePolicy("api", capacity, 1, aDay)
	keepBooks(db)
	var killed, idling *leaserProcess
	for name, p := range map[string]**leaserProcess{"killed": &killed, "idling": &idling} {
		*p = (&leaserProcess{Name: name, Policy: "api", Leases: true, Callers: callers, Every: 2 * time.Millisecond}).start(t, db)
	}
	lost := func(p *leaserProcess) int64 { return charged(db, p.Name) - p.granted.Load() }
	require.Eventually(t, func() bool { return lost(idling) > 0 }, patience, 5*ms)
	idling.idle(t)
	require.Eventually(t, func() bool { return killed.holds(t, lost) }, patience, 5*ms)
	killed.kill(t)
	require.Eventually(t, func() bool { return lost(idling) == 0 }, patience, 5*ms)
	idling.close(t)
	require.Zero(t, lost(idling))
	t.Logf("%d tokens were lost with the killed one", lost(killed))
	require.Positive(t, lost(killed))
	require.LessOrEqual(t, lost(killed), int64(capacity/10+callers), "its lease, and what its callers had not counted yet")
}

// instant is one that the books know.
func (db *testDB) instant(expression string, args ...any) (at time.Time) {
	require.NoError(db.t, db.Pool.QueryRow(context.Background(), "select "+expression+" from public.books", args...).Scan(&at))
	return at
}

// A leaseRound is some callers of several Leasers that share buckets, which gain nothing while it lasts.
type leaseRound struct {
	db      *testDB
	bug     leaseBug
	killing bool // connections

	history leaseHistory
	leased  atomic.Int64 // requests
}

var leaseRounds atomic.Int64

// run has the callers ask until there are enough grants from leases, and connections were killed. Its error is what does not add up.
func (r *leaseRound) run(t *testing.T) error {
	const leasers, callers, enough, grantsOfAConnection = 3, 5, 1000, 50
	r.db.exec("truncate public.books")
	round := leaseRounds.Add(1)
	var granted [leasers]atomic.Int64
	all := newLoad(t)
	var closing, ends [leasers]func()
	for n := range leasers {
		config, err := pgxpool.ParseConfig(r.db.URL)
		require.NoError(t, err)
		config.ConnConfig.RuntimeParams["application_name"] = fmt.Sprint("leaser ", n)
		plain, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		pool := &recordingPool{patientPool: patientPool{plain}, leaser: fmt.Sprint("leaser ", n), history: &r.history, bug: r.bug, over: make(chan struct{})}
		leaser := client.NewLeaser(pool, client.Lease{Policy: "api", Idle: 50 * time.Millisecond})
		closing[n] = leaser.Close
		ends[n] = sync.OnceFunc(func() {
			leaser.Close()
			close(pool.over)
			pool.late.Wait()
			plain.Close()
		})
		t.Cleanup(ends[n])
		all.start(callers, func(int) error {
			key, cost := fmt.Sprint(round, "/", rand.IntN(3)), rand.Int64N(5)+1
			d, err := leaser.Acquire(context.Background(), "api", key, client.Cost(cost))
			switch {
			case err != nil && !r.killing && !errors.Is(err, client.ErrClosed):
				return err
			case !d.Allowed: // of a call without an answer the books tell what it took
				return nil
			}
			if d.Estimated {
				r.leased.Add(1)
				r.history.add(leaseEvent{pool.leaser, key, "grant", cost})
			}
			granted[n].Add(cost)
			switch {
			case rand.IntN(2000) == 0:
				time.Sleep(time.Duration(rand.IntN(150)) * time.Millisecond) // now and then all are idle
			case rand.IntN(20) == 0:
				time.Sleep(100 * time.Microsecond)
			}
			return nil
		})
	}
	last := int64(0)
	require.Eventually(t, func() bool {
		now := r.leased.Load()
		if r.killing && now >= last+grantsOfAConnection {
			last = now
			r.db.exec(`
				select pg_terminate_backend(pid) from pg_stat_activity
				 where datname = current_database() and application_name like 'leaser %' and query like '%ratelimit_%' order by random() limit 1`)
		}
		return all.ctx.Err() != nil || now >= enough
	}, 5*patience, ms)
	for _, closeLeaser := range closing { // while callers ask
		closeLeaser()
	}
	if err := all.end(); err != nil {
		return err
	}
	for _, end := range ends {
		end()
	}
	if err := r.history.audit(); err != nil {
		return err
	}
	for n := range leasers {
		lost := charged(r.db, fmt.Sprint("leaser ", n)) - granted[n].Load()
		if lost < 0 || lost > 0 && !r.killing {
			return fmt.Errorf("leaser %d was charged %d tokens more than it granted", n, lost)
		}
	}
	return nil
}

func newLeaseDB(t *testing.T) *testDB {
	db := newDB(t)
	db.definePolicy("api", 3_000_000, 1, aDay)
	keepBooks(db)
	return db
}

// Each grant from a lease belongs to a charge that the server has answered before, whatever happens to connections. And what the
// server has charged is what was granted, but for what lost calls took.
func TestTorture_LeasesGrantWhatWasCharged(t *testing.T) {
	run := torture(t, 2)
	db := newLeaseDB(t)
	var leased, events int
	rounds := 0
	for ; run.goesOn(); rounds++ {
		r := &leaseRound{db: db, killing: rounds%2 == 1}
		require.NoError(t, r.run(t), "killing=%v", r.killing)
		leased, events = leased+int(r.leased.Load()), events+len(r.history.events)
		run.progress("%d grants from leases", leased)
	}
	run.figures("grants from leases, each charged before", leased, "charges and give-backs of leases", events-leased)
}

// Leasers that do what they must not are found out.
func TestLeases_PlantedBugsAreFound(t *testing.T) {
	t.Parallel()
	for bug, says := range map[leaseBug]string{
		grantsOneMore:  "that were not charged before",
		grantsTooEarly: "that were not charged before",
		givesBackTwice: "tokens more than it granted",
	} {
		t.Run(string(bug), func(t *testing.T) {
			t.Parallel()
			r := &leaseRound{db: newLeaseDB(t), bug: bug}
			require.ErrorContains(t, r.run(t), says, bug)
		})
	}
}

// One process asks a hundred times as often as another, which asks again until it has its token: what the other gets, and when,
// with leases and without.
func TestTorture_LeasesLeaveOthersTheirShare(t *testing.T) {
	const perSecond, rareEvery, requests = 1000, 30 * ms, 10
	run := torture(t, 2*requests) // half of them without leases
	db := newDB(t)
	var table bytes.Buffer
	columns := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "\tthe other asked, a second\tgranted\tthe rare one asked, a second\tgranted at once\tgranted\twaited, median\tp99\tmost")
	for _, leases := range []bool{false, true} {
		name := map[bool]string{false: "without leases", true: "with leases"}[leases]
		db.definePolicy(name, perSecond, perSecond, second)
		often := (&leaserProcess{Name: "often", Policy: name, Leases: leases, Callers: 64, Every: 64 * time.Second / 5000}).start(t, db)
		pool, err := pgxpool.New(t.Context(), db.URL)
		require.NoError(t, err)
		defer pool.Close()
		var opts []client.Option
		if leases {
			opts = append(opts, client.Lease{Policy: name})
		}
		rare := client.NewLeaser(pool, opts...)
		defer rare.Close()
		db.Await(t, patience, "select (ratelimit_peek($1, 'hot')).remaining < 100", name)

		var waited waitsUntilGranted
		granted := 0
		asked, others, begin := often.asked.Load(), often.granted.Load(), time.Now()
		for time.Since(begin) < run.budget/2 || len(waited) < requests {
			since := time.Now()
			d, err := rare.Acquire(t.Context(), name, "hot")
			require.NoError(t, err)
			if d.Allowed {
				granted++
			}
			for !d.Allowed {
				time.Sleep(max(time.Millisecond, d.RetryAfter))
				d, err = rare.Acquire(t.Context(), name, "hot")
				require.NoError(t, err)
			}
			waited = append(waited, time.Since(since))
			time.Sleep(rareEvery - time.Since(since))
		}
		took := time.Since(begin).Seconds()
		asked, others = often.asked.Load()-asked, often.granted.Load()-others
		often.close(t)
		fmt.Fprintf(columns, "%s\t%.0f\t%.0f\t%.1f\t%.0f %%\t%.1f\t%v\t%v\t%v\n", name, float64(asked)/took, float64(others)/took, float64(len(waited))/took,
			100*float64(granted)/float64(len(waited)), float64(len(waited))/took, waited.quantile(.5), waited.quantile(.99), waited.quantile(1))
	}
	require.NoError(t, columns.Flush())
	t.Logf("of a bucket that gains 1,000 tokens a second:\n%s", table.String())
}
