package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Of two Prefetchers of a bucket that has plenty, one is idle, and gives back all of its stock. The other is killed while it has a stock,
// and has lost that.
func TestPrefetcher_AKilledProcessLosesItsStockAtMost(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	db := newPrefetchDB(t)
	granted, loads := map[string]*atomic.Int64{}, map[string]*kit.Load{}
	lost := func(name string) int64 { return charged(db, name) - granted[name].Load() }
	killed := &mortalProcess{}
	start := func(name string, idle time.Duration) *client.Prefetcher {
		pool := &mortalPool{kit.PatientPool{Pool: kit.Pool(t, db.URL+"&application_name="+name)}, killed}
		if name != "killed" {
			pool.process = &mortalProcess{}
		}
		prefetcher := client.NewPrefetcher(pool, client.Prefetch{Policy: "api", Idle: idle})
		granted[name], loads[name] = new(atomic.Int64), kit.NewLoad(t)
		loads[name].Start(8, func(int) error {
			time.Sleep(2 * kit.Ms)
			return pool.process.do(func() error {
				d, err := prefetcher.Acquire(context.Background(), "api", "hot")
				if d.Allowed {
					granted[name].Add(1)
				}
				return err
			})
		})
		return prefetcher
	}
	defer start("killed", kit.ADay).Close()
	defer start("idle", 250*kit.Ms).Close()
	require.Eventually(t, func() bool { return killed.endIf(func() bool { return lost("killed") > 0 }) }, kit.Patience, 5*kit.Ms)
	require.Eventually(t, func() bool { return lost("idle") > 0 }, kit.Patience, 5*kit.Ms)
	for _, load := range loads {
		require.NoError(t, load.End())
	}
	require.Eventually(t, func() bool { return lost("idle") == 0 }, kit.Patience, 5*kit.Ms)
	t.Logf("%d tokens were lost with the killed one", lost("killed"))
	require.Positive(t, lost("killed"))
	require.LessOrEqual(t, lost("killed"), int64(prefetchCapacity/10))
}

// A mortalProcess does nothing any more once it has ended, and ends between any two things that it does.
type mortalProcess struct {
	mu    sync.RWMutex
	ended atomic.Bool
}

func (p *mortalProcess) do(what func() error) error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.ended.Load() {
		return nil
	}
	return what()
}

func (p *mortalProcess) endIf(condition func() bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if condition() {
		p.ended.Store(true)
	}
	return p.ended.Load()
}

// A mortalPool sends nothing once its process has ended.
type mortalPool struct {
	kit.PatientPool
	process *mortalProcess
}

func (p *mortalPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if p.process.ended.Load() {
		return unsent{}
	}
	return p.PatientPool.QueryRow(ctx, sql, args...)
}

type unsent struct{}

func (unsent) Scan(...any) error { return errors.New("the process has ended") }

// A prefetchRound is some callers of several Prefetchers that share buckets, which gain nothing while it lasts.
type prefetchRound struct {
	db      *kit.TestDB
	bug     stockBug
	killing bool // connections

	history    stockHistory
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
		pool := &recordingPool{PatientPool: kit.PatientPool{Pool: plain}, prefetcher: fmt.Sprint("prefetcher ", n), history: &r.history, bug: r.bug, over: make(chan struct{})}
		prefetcher := client.NewPrefetcher(pool, client.Prefetch{Policy: "api", Idle: 50 * time.Millisecond})
		closing[n] = prefetcher.Close
		ends[n] = sync.OnceFunc(func() {
			prefetcher.Close()
			close(pool.over)
			pool.late.Wait()
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
				r.history.add(stockEvent{pool.prefetcher, key, "grant", cost})
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
	if err := r.history.audit(); err != nil {
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

const prefetchCapacity = 3_000_000

func newPrefetchDB(t *testing.T) *kit.TestDB {
	db := kit.NewDB(t)
	db.DefinePolicy("api", prefetchCapacity, 1, kit.ADay)
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
		prefetched, events = prefetched+int(r.prefetched.Load()), events+len(r.history.events)
		run.Progress("%d grants from stocks", prefetched)
	}
	run.Figures("grants from stocks, each charged before", prefetched, "charges and give-backs of stocks", events-prefetched)
}

// Prefetchers that do what they must not are found out.
func TestPrefetcher_PlantedBugsAreFound(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	for bug, says := range map[stockBug]string{
		grantsOneMore:  "that were not charged before",
		grantsTooEarly: "that were not charged before",
		givesBackTwice: "tokens more than it granted",
	} {
		t.Run(string(bug), func(t *testing.T) {
			t.Parallel()
			r := &prefetchRound{db: newPrefetchDB(t), bug: bug}
			require.ErrorContains(t, r.run(t), says, bug)
		})
	}
}

// Of stocks, a stockHistory has what is charged to them, granted from them and given back, in an order that is safe: a charge is
// written down before its Prefetcher hears of it, what is given back before the server does, and a grant after its caller has it.
type stockHistory struct {
	mu     sync.Mutex
	events []stockEvent
}

type stockEvent struct {
	prefetcher, key string
	kind            string // "charge", "grant" or "give back"
	tokens          int64
}

func (h *stockHistory) add(e stockEvent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, e)
}

// Audit finds the first token that was granted or given back without a charge before it.
func (h *stockHistory) audit() error {
	type stock struct{ prefetcher, key string }
	held := map[stock]int64{}
	for n, e := range h.events {
		of := stock{e.prefetcher, e.key}
		if e.kind == "charge" {
			held[of] += e.tokens
			continue
		}
		if held[of] -= e.tokens; held[of] < 0 {
			return fmt.Errorf("event %d of %d: %s has %d tokens of %s for a %s that were not charged before",
				n, len(h.events), e.prefetcher, -held[of], e.key, e.kind)
		}
	}
	return nil
}

// A recordingPool is the pool of a Prefetcher, and writes a history.
type recordingPool struct {
	kit.PatientPool
	prefetcher string
	history    *stockHistory
	bug        stockBug
	late       sync.WaitGroup // what a bug has put off
	over       chan struct{}  // until this is closed
}

// A stockBug is planted, for the audit to find. It makes the Prefetcher do what it must not.
type stockBug string

const (
	grantsOneMore  stockBug = "a stock grants one more than was charged"
	grantsTooEarly stockBug = "a stock grants before the charge was answered"
	givesBackTwice stockBug = "a stock gives back twice"
)

func (p *recordingPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	switch {
	case strings.Contains(sql, "ratelimit_acquire_up_to("):
		return &chargeRow{ctx: ctx, pool: p, sql: sql, args: args}
	case strings.Contains(sql, "ratelimit_refund("):
		p.history.add(stockEvent{p.prefetcher, args[1].(string), "give back", args[2].(int64)})
		if p.bug == givesBackTwice {
			_ = p.PatientPool.QueryRow(ctx, sql, args...).Scan(make([]any, 7)...)
		}
	}
	return p.PatientPool.QueryRow(ctx, sql, args...)
}

type chargeRow struct {
	ctx  context.Context
	pool *recordingPool
	sql  string
	args []any
}

// Scan makes the call. The last column is what was taken.
func (r *chargeRow) Scan(dest ...any) error {
	p, taken := r.pool, dest[len(dest)-1].(*int64)
	call := func(by client.Querier) error { return by.QueryRow(r.ctx, r.sql, r.args...).Scan(dest...) }
	write := func(tokens int64) { p.history.add(stockEvent{p.prefetcher, r.args[1].(string), "charge", tokens}) }
	if p.bug == grantsTooEarly { // the answer is that of a transaction which is not committed, and the charge follows
		tx, err := p.Begin(r.ctx)
		if err != nil {
			return err
		}
		err = errors.Join(call(tx), tx.Rollback(r.ctx))
		p.late.Go(func() {
			<-p.over
			var tokens int64
			late := make([]any, len(dest))
			late[len(late)-1] = &tokens
			if p.Pool.QueryRow(context.Background(), r.sql, r.args...).Scan(late...) == nil {
				write(tokens)
			}
		})
		return err
	}
	err := call(p.PatientPool)
	if err == nil {
		write(*taken)
		if p.bug == grantsOneMore {
			*taken++
		}
	}
	return err
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
