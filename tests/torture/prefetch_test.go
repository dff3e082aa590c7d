package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Four processes want more of a bucket than it gains. Then one is killed, and one is idle. By the server's books and by their own
// counts they get nothing that is not there; the killed one has lost its stock at most, and the idle one gives back to the token
// what it held. What they get of all that there is depends on the machine, and is a figure: so in make test the bucket gains
// nothing, or what is given back to a full bucket would be lost, and has more than they can take.
func TestTorture_PrefetchersOfProcesses(t *testing.T) {
	pgtest.OncePerServer(t)
	const callers = 16
	run := kit.Torture(t, 1000)                               // tokens in each half
	capacity, refill, stock := int64(1e9), int64(0), int64(0) // there are no stocks of what gains nothing
	if run.Budget > 0 {
		capacity, refill, stock = 10_000, 10_000, 1000
	}
	db := kit.NewDB(t)
	db.DefinePolicy("api", capacity, refill, kit.Second)
	keepBooks(db)
	var processes []*kit.PrefetcherProcess
	for n := range 4 {
		p := &kit.PrefetcherProcess{Name: fmt.Sprint("prefetcher ", n), Policy: "api", Callers: callers, Every: time.Millisecond, Idle: 250 * kit.Ms}
		processes = append(processes, p.Start(t, db))
	}
	granted := func() (sum int64) {
		for _, p := range processes {
			sum += p.Granted.Load()
		}
		return sum
	}
	half := func() {
		time.Sleep(run.Budget / 2)
		enough := granted() + run.Steps
		require.Eventually(t, func() bool { return granted() >= enough }, kit.Patience, 5*kit.Ms)
	}
	db.Await(t, kit.Patience, "select count(*) > 0 from public.books")
	began := db.Instant("min(refilled_at)")
	gained := func(since, until time.Time) float64 { return float64(refill) * until.Sub(since).Seconds() }
	half()
	toFour := granted()
	four := float64(toFour) / (float64(capacity) + gained(began, db.Now()))

	killed, idling := processes[0], processes[1]
	killedAt := db.Now()
	killed.Kill(t)
	idling.StopAsking(t)
	idleSince := db.Now()
	require.Eventually(t, func() bool { return charged(db, idling.Name) == idling.Granted.Load() }, kit.Patience, 5*kit.Ms, "what is idle is given back")
	half()
	two := float64(granted()-toFour) / gained(killedAt, db.Now())
	for _, p := range processes[1:] {
		p.Close(t)
	}

	for _, p := range processes {
		lost := charged(db, p.Name) - p.Granted.Load()
		if p != killed {
			require.Zero(t, lost, "charged to %s, neither granted nor given back", p.Name)
			continue
		}
		run.Figure(fmt.Sprintf("tokens lost with a killed process, of %d at most", stock), lost, "")
		require.GreaterOrEqual(t, lost, int64(0), "granted and not charged")
		require.LessOrEqual(t, lost, stock+callers, "its stock, and what its callers had not counted yet")
	}
	require.Zero(t, db.Number(`
		select count(*)
		  from (select sum(charged) over (order by n) as charged, at from public.books) as book
		 where charged > $1 + $2 * extract(epoch from at - $3)`, capacity, refill, began), "more than there was")
	require.LessOrEqual(t, float64(granted()), float64(capacity)+gained(began, db.Instant("max(at)")))
	back := db.Instant("max(at) filter (where who = $1)", idling.Name).Sub(idleSince)
	run.Figure("ms until the idle one had given back", max(0, back).Milliseconds(), "")
	if run.Budget > 0 {
		run.Figure("granted to four processes, of all that there was", fmt.Sprintf("%.1f", 100*four), "%")
		run.Figure("granted to two, after one was killed and one idle", fmt.Sprintf("%.1f", 100*two), "%")
	}
}

// Where a bucket has plenty, stocks are as large as they may be. Then a killed process has lost its stock at most, and an idle one
// gives back all of it.
func TestPrefetcher_AKilledProcessLosesItsStockAtMost(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	const capacity, callers = 100_000, 8
	db := kit.NewDB(t)
	db.DefinePolicy("api", capacity, 1, kit.ADay)
	keepBooks(db)
	var killed, idling *kit.PrefetcherProcess
	for name, p := range map[string]**kit.PrefetcherProcess{"killed": &killed, "idling": &idling} {
		*p = (&kit.PrefetcherProcess{Name: name, Policy: "api", Callers: callers, Every: 2 * time.Millisecond}).Start(t, db)
	}
	lost := func(p *kit.PrefetcherProcess) int64 { return charged(db, p.Name) - p.Granted.Load() }
	require.Eventually(t, func() bool { return lost(idling) > 0 }, kit.Patience, 5*kit.Ms)
	idling.StopAsking(t)
	require.Eventually(t, func() bool { return killed.Holds(t, lost) }, kit.Patience, 5*kit.Ms)
	killed.Kill(t)
	require.Eventually(t, func() bool { return lost(idling) == 0 }, kit.Patience, 5*kit.Ms)
	idling.Close(t)
	require.Zero(t, lost(idling))
	t.Logf("%d tokens were lost with the killed one", lost(killed))
	require.Positive(t, lost(killed))
	require.LessOrEqual(t, lost(killed), int64(capacity/10+callers), "its stock, and what its callers had not counted yet")
}

// A prefetchRound is some callers of several Prefetchers that share buckets, which gain nothing while it lasts.
type prefetchRound struct {
	db      *kit.TestDB
	bug     kit.PrefetchBug
	killing bool // connections

	history    kit.PrefetchHistory
	prefetched atomic.Int64 // requests
}

var prefetchRounds atomic.Int64

// run has the callers ask until there are enough grants from stocks, and connections were killed. Its error is what does not add up.
func (r *prefetchRound) run(t *testing.T) error {
	const prefetchers, callers, enough, grantsOfAConnection = 3, 5, 1000, 50
	r.db.Execute("truncate public.books")
	round := prefetchRounds.Add(1)
	var granted [prefetchers]atomic.Int64
	all := kit.NewLoad(t)
	var closing, ends [prefetchers]func()
	for n := range prefetchers {
		config := kit.NoError(pgxpool.ParseConfig(r.db.URL))(t)
		config.ConnConfig.RuntimeParams["application_name"] = fmt.Sprint("prefetcher ", n)
		plain := kit.NoError(pgxpool.NewWithConfig(t.Context(), config))(t)
		pool := &kit.RecordingPool{PatientPool: kit.PatientPool{Pool: plain}, Prefetcher: fmt.Sprint("prefetcher ", n), History: &r.history, Bug: r.bug, Over: make(chan struct{})}
		prefetcher := client.NewPrefetcher(pool, client.Prefetch{Policy: "api", Idle: 50 * time.Millisecond})
		closing[n] = prefetcher.Close
		ends[n] = sync.OnceFunc(func() {
			prefetcher.Close()
			close(pool.Over)
			pool.Late.Wait()
			plain.Close()
		})
		t.Cleanup(ends[n])
		all.Start(callers, func(int) error {
			key, cost := fmt.Sprint(round, "/", rand.IntN(3)), rand.Int64N(5)+1
			d, err := prefetcher.Acquire(context.Background(), "api", key, client.Cost(cost))
			switch {
			case err != nil && !r.killing && !errors.Is(err, client.ErrClosed):
				return err
			case !d.Allowed: // of a call without an answer the books tell what it took
				return nil
			}
			if d.Estimated {
				r.prefetched.Add(1)
				r.history.Add(kit.PrefetchEvent{Prefetcher: pool.Prefetcher, Key: key, Kind: "grant", Tokens: cost})
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
		now := r.prefetched.Load()
		if r.killing && now >= last+grantsOfAConnection {
			last = now
			r.db.Execute(`
				select pg_terminate_backend(pid) from pg_stat_activity
				 where datname = current_database() and application_name like 'prefetcher %' and query like '%ratelimit_%' order by random() limit 1`)
		}
		return all.Ctx.Err() != nil || now >= enough
	}, 5*kit.Patience, kit.Ms)
	for _, closePrefetcher := range closing { // while callers ask
		closePrefetcher()
	}
	if err := all.End(); err != nil {
		return err
	}
	for _, end := range ends {
		end()
	}
	if err := r.history.Audit(); err != nil {
		return err
	}
	for n := range prefetchers {
		lost := charged(r.db, fmt.Sprint("prefetcher ", n)) - granted[n].Load()
		if lost < 0 || lost > 0 && !r.killing {
			return fmt.Errorf("prefetcher %d was charged %d tokens more than it granted", n, lost)
		}
	}
	return nil
}

func newPrefetchDB(t *testing.T) *kit.TestDB {
	db := kit.NewDB(t)
	db.DefinePolicy("api", 3_000_000, 1, kit.ADay)
	keepBooks(db)
	return db
}

// Each grant from a stock belongs to a charge that the server has answered before, whatever happens to connections. And what the
// server has charged is what was granted, but for what lost calls took.
func TestTorture_PrefetchersGrantWhatWasCharged(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 2)
	db := newPrefetchDB(t)
	var prefetched, events int
	rounds := 0
	for ; run.GoesOn(); rounds++ {
		r := &prefetchRound{db: db, killing: rounds%2 == 1}
		require.NoError(t, r.run(t), "killing=%v", r.killing)
		prefetched, events = prefetched+int(r.prefetched.Load()), events+len(r.history.Events)
		run.Progress("%d grants from stocks", prefetched)
	}
	run.Figures("grants from stocks, each charged before", prefetched, "charges and give-backs of stocks", events-prefetched)
}

// Prefetchers that do what they must not are found out.
func TestPrefetcher_PlantedBugsAreFound(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	for bug, says := range map[kit.PrefetchBug]string{
		kit.GrantsOneMore:  "that were not charged before",
		kit.GrantsTooEarly: "that were not charged before",
		kit.GivesBackTwice: "tokens more than it granted",
	} {
		t.Run(string(bug), func(t *testing.T) {
			t.Parallel()
			r := &prefetchRound{db: newPrefetchDB(t), bug: bug}
			require.ErrorContains(t, r.run(t), says, bug)
		})
	}
}

// keepBooks has the server write down what each session takes from buckets and gives back, by its application_name: from the
// rows of buckets as they change, and not from what functions answer.
func keepBooks(db *kit.TestDB) {
	db.Execute(`
		create table public.books (n bigint generated always as identity, who text not null, at timestamptz not null, refilled_at timestamptz not null, charged numeric not null);
		create function public.keep_books() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
		declare
		  v_policy ratelimit.policies;
		  v_level  numeric;
		begin
		  select * into strict v_policy from ratelimit.policies where id = new.policy_id;
		  v_level := v_policy.full_level;
		  if tg_op = 'UPDATE' then
		    v_level := least(v_level, old.level + floor(
		      extract(epoch from new.refilled_at - old.refilled_at) * 1000000.0 * v_policy.refill * 1000000.0 / v_policy.every_us));
		  end if;
		  insert into public.books (who, at, refilled_at, charged)
		  values (current_setting('application_name'), clock_timestamp(), new.refilled_at, (v_level - new.level) / 1000000.0);
		  return null;
		end $$;
		create trigger keep_books after insert or update on ratelimit.buckets for each row execute function public.keep_books()`)
}

// charged is how many tokens the sessions of a name have taken, less what they gave back.
func charged(db *kit.TestDB, who string) (tokens int64) {
	return db.Number("select coalesce(sum(charged), 0)::bigint from public.books where who = $1", who)
}
