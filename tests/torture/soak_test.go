package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
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

// soakRate is how many calls begin in a second: a fraction of what two cores can do, for latencies to mean something.
const soakRate = 2000

// soakRemembers is how long an idempotency key lives, for clean-up to have some to remove in a short run, too.
const soakRemembers = 2 * time.Second

// Mixed load runs beside clean-up, and the test measures what grows and what gets slower. A run of five minutes or more is judged, and
// cleaned up by pg_cron, which starts jobs at full minutes. Transaction ids are used up so far that autovacuum freezes again and again.
// With RATELIMIT_PROOF the samples are in soak.csv.
func TestTorture_SoakNeitherGrowsNorSlows(t *testing.T) {
	run := kit.Torture(t, 8)
	judged := run.Budget >= 5*time.Minute
	server := pgtest.Private(t, "fsync=on", "autovacuum_freeze_max_age=1000000")
	db := kit.InstalledDB(t, server, "postgres") // where pg_cron is
	db.CleanUpAtOnce()                           // or a short run would see nothing removed
	for prefix, kind := range map[string]kit.PolicyOption{"": kit.Durable, "ephemeral-": kit.Ephemeral} {
		db.DefinePolicy(prefix+"steady", 100, 100, time.Second, kind, kit.Remember(soakRemembers))
		db.DefinePolicy(prefix+"passing", 5, 10, time.Second, kind)
		db.DefinePolicy(prefix+"scarce", 1, 1, time.Minute, kind)
		db.DefinePolicy(prefix+"stepped", 20, 5, time.Second, kind, kit.Stepped)
		db.Lend(prefix+"slots", 4, time.Second, kind)
	}
	db.Execute("select ratelimit_define_policy('ephemeral-quota', 100000, period => '1 day', durable => false)")
	// The turn is in the run: the periods of two hundred keys are closed.
	turn := time.Now().UTC().Add(run.Budget / 3).Format(time.DateTime)
	db.Execute("select ratelimit_define_policy('quota', 100000, period => '1 day', anchor => $1::text::timestamp, history => '1 year')", turn)
	db.DefinePolicy("jobs", 1, 1, 10*time.Second)
	db.Execute("create table public.jobs (id bigint generated always as identity primary key, due timestamptz not null)")
	db.Execute("create index on public.jobs (due)")
	s := startSoak(t, db)
	s.local = server.Rung == "local"
	if cron := judged && server.HasCron; cron {
		require.NoError(t, kit.RunScript(db, "schedule.sql"))
		defer func() {
			require.Empty(t, kit.Column(t, db.DB, "select return_message from cron.job_run_details where status = 'failed'"))
			run.Figure("clean-ups by pg_cron", db.Number("select count(*) from cron.job_run_details where status = 'succeeded'"), "")
		}()
	} else {
		s.Callers.Go(func() (err error) {
			s.limiter.RunCleanup(s.Ctx, time.Second, client.OnError(func(e error) { err = e }))
			return err
		})
	}

	every := max(run.Budget/200, 250*time.Millisecond)
	for run.GoesOn() && s.Ctx.Err() == nil {
		s.RunFor(every)
		now := s.sample(time.Since(run.Started))
		run.Progress("%.0f answers a second, p99 %.2f ms, tables of %.1f MB, %.0f dead rows", now.rate, now.p99, now.tables, now.dead)
		if dir := os.Getenv("RATELIMIT_PROOF"); dir != "" {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "soak.csv"), s.csv(), 0o644))
		}
	}
	if s.Ctx.Err() != nil {
		require.NoError(t, s.End(), "a call failed")
	}
	db.Await(t, kit.Patience, `
		select count(*) = 6 and bool_and(n_tup_del > 0)
		  from pg_stat_user_tables where schemaname || '.' || relname = any ($1)`, append(kit.StateTables, "ratelimit.leases", "public.jobs"))
	require.NoError(t, s.End())
	require.NotZero(t, s.denied.Load())
	require.Equal(t, s.quotaGrants.Load(), db.Number("select sum(used)::bigint from ratelimit_usage('quota')"), "the ledger of the quota")

	last := s.samples[len(s.samples)-1]
	run.Figures("answers", s.answers.Load(), "of these denials", s.denied.Load(),
		"periods of the quota closed", db.Number("select count(*) from ratelimit_usage('quota') where closed"),
		"rows removed", db.Number("select sum(n_tup_del) from pg_stat_user_tables"),
		"vacuums", db.Number("select sum(autovacuum_count) from pg_stat_user_tables"),
		"transaction ids used", db.Number("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"))
	run.Figure("heap-only updates of buckets", fmt.Sprintf("%.3f", last.hot), "of all")
	for _, line := range soakLines {
		q := line.byQuarter(s.samples)
		if q[3].most == 0 {
			run.Figure(line.name, "not to be seen here", "")
			continue
		}
		run.Figure(line.name+", mean of each quarter", fmt.Sprintf("%.1f %.1f %.1f %.1f", q[0].mean, q[1].mean, q[2].mean, q[3].mean), line.unit)
		run.Figure(line.name+", highest in each quarter", fmt.Sprintf("%.1f %.1f %.1f %.1f", q[0].most, q[1].most, q[2].most, q[3].most), line.unit)
	}
	if judged {
		require.NoError(t, judgeSoak(s.samples))
	}
}

// A soakLine is one series of the samples.
type soakLine struct {
	name, unit string
	of         func(soakSample) float64
	bound      float64 // it should not grow to more than so many times what it was; 0: it should not sag; -1: it is not judged
}

var soakLines = []soakLine{
	{"answers", "a second", func(s soakSample) float64 { return s.rate }, 0},
	{"p99", "ms", func(s soakSample) float64 { return s.p99 }, -1},
	{"tables", "MB", func(s soakSample) float64 { return s.tables }, 1.5},
	{"indexes", "MB", func(s soakSample) float64 { return s.indexes }, 1.5},
	{"dead rows", "thousands", func(s soakSample) float64 { return s.dead / 1000 }, 1.5},
	{"age of transaction ids", "thousands", func(s soakSample) float64 { return s.xidAge / 1000 }, -1},
	{"memory of the backends", "MB", func(s soakSample) float64 { return s.backends }, 1.2},
	{"heap of the client", "MB", func(s soakSample) float64 { return s.heap }, 1.2},
}

type soakQuarter struct{ most, mean float64 }

func (l soakLine) byQuarter(samples []soakSample) (quarters [4]soakQuarter) {
	for i := range quarters {
		part := samples[i*len(samples)/4 : (i+1)*len(samples)/4]
		for _, s := range part {
			quarters[i].most = max(quarters[i].most, l.of(s))
			quarters[i].mean += l.of(s) / float64(len(part))
		}
	}
	return quarters
}

// judgeSoak compares the second half of a run with its second quarter; the first is for warming up.
func judgeSoak(samples []soakSample) (err error) {
	for _, line := range soakLines {
		q := line.byQuarter(samples)
		grows := line.bound > 0 && max(q[2].most, q[3].most) > line.bound*q[1].most+1
		sags := line.bound == 0 && q[3].mean < q[1].mean/2
		if grows || sags {
			err = errors.Join(err, fmt.Errorf("%s: %+v", line.name, q))
		}
	}
	if hot := samples[len(samples)-1].hot; hot < 0.9 {
		err = errors.Join(err, fmt.Errorf("heap-only updates: %.3f", hot))
	}
	return err
}

func TestSoak_IsJudgedByWhatGrowsOrSags(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(s *soakSample, minute float64){
		"":                       func(*soakSample, float64) {},
		"answers":                func(s *soakSample, minute float64) { s.rate -= 150 * minute },
		"tables":                 func(s *soakSample, minute float64) { s.tables += 20 * minute },
		"dead rows":              func(s *soakSample, minute float64) { s.dead += 60_000 * minute },
		"indexes":                func(s *soakSample, minute float64) { s.indexes += 10 * minute },
		"memory of the backends": func(s *soakSample, minute float64) { s.backends += 5 * minute },
		"heap of the client":     func(s *soakSample, minute float64) { s.heap += minute },
		"heap-only updates":      func(s *soakSample, minute float64) { s.hot -= minute / 100 },
	} {
		var samples []soakSample
		for i := range 120 {
			s := soakSample{rate: 2000, tables: 50, indexes: 20, dead: 30_000, backends: 80, heap: 4, hot: 0.99}
			change(&s, float64(i)/12)
			samples = append(samples, s)
		}
		err := judgeSoak(samples)
		if want == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, want)
	}
}

// A soak is a load without pauses, and the samples taken meanwhile.
type soak struct {
	db       *kit.TestDB
	local    bool // PostgreSQL's processes are this machine's
	limiter  *client.Limiter
	combiner *client.Combiner
	*kit.Load

	answers, denied, visitors, quotaGrants atomic.Int64
	samples                                []soakSample

	mu   sync.Mutex
	took []time.Duration // since the sample before, each from when its call was due
}

func startSoak(t *testing.T, db *kit.TestDB) *soak {
	// As many connections all the time, for their memory to be compared.
	pool := kit.NoError(pgxpool.New(t.Context(), db.URL+"&pool_max_conns=10&pool_min_conns=10&application_name=soak"))(t)
	s := &soak{db: db, limiter: client.New(pool), combiner: client.NewCombiner(pool, client.CallsInFlight(4))}
	t.Cleanup(func() { s.combiner.Close(); pool.Close() })
	s.Load = kit.NewLoad(t)
	const callers = 32
	due := make([]time.Time, callers)
	s.Start(callers, func(caller int) error {
		if time.Since(due[caller]) > time.Second { // at first, and where the machine stood still
			due[caller] = time.Now()
		}
		due[caller] = due[caller].Add(time.Duration(rand.ExpFloat64() * callers / soakRate * float64(time.Second)))
		s.RunFor(time.Until(due[caller]))
		by := client.Acquirer(s.combiner)
		if caller < 4 {
			by = s.limiter
		}
		allowed, err := s.call(by)
		if err != nil {
			return err
		}
		s.answers.Add(1)
		if !allowed {
			s.denied.Add(1)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.took = append(s.took, time.Since(due[caller]))
		return nil
	})
	return s
}

// call makes one of many calls: two hundred users who stay and visitors who come for four requests.
func (s *soak) call(by client.Acquirer) (allowed bool, err error) {
	ctx := context.Background()
	kind := []string{"", "ephemeral-"}[rand.N(2)]
	user := fmt.Sprint("user ", rand.N(200))
	number := s.visitors.Add(1)
	id := strconv.FormatInt(number, 10)
	cost := 1 + rand.Int64N(3)
	var d client.Decision
	switch n := rand.N(100); {
	case n < 30:
		d, err = by.Acquire(ctx, kind+"steady", user, client.Cost(cost))
	case n < 37:
		joint, err := by.AcquireAll(ctx, []client.Charge{{Policy: kind + "steady", Key: user}, {Policy: kind + "stepped", Key: user}})
		return joint.Allowed, err
	case n < 38:
		return true, s.limiter.Override(ctx, client.Override{Policy: kind + "steady", Key: user, Capacity: 100, ExpiresAt: time.Now().Add(10 * time.Second)})
	case n < 45:
		began := time.Now()
		if d, err = by.Acquire(ctx, kind+"steady", user, client.IdempotencyKey(id), client.Cost(3)); d.Allowed {
			d, err = s.limiter.Settle(ctx, kind+"steady", user, id, cost)
			if errors.Is(err, client.ErrNoGrant) && time.Since(began) > soakRemembers {
				return true, nil // the machine stood still for so long
			}
		}
	case n < 52:
		return s.hold(ctx, kind+"slots", user, id)
	case n < 59:
		d, err = by.Acquire(ctx, kind+"quota", user)
		if kind == "" && d.Allowed {
			s.quotaGrants.Add(1)
		}
	case n < 61:
		return s.job(ctx, user)
	case n < 78:
		d, err = by.Acquire(ctx, kind+"passing", fmt.Sprint("visitor ", number/16))
	case n < 85:
		d, err = by.Acquire(ctx, kind+"stepped", user)
	case n < 90:
		d, err = by.Acquire(ctx, kind+"scarce", "everybody")
	case n < 95:
		d, err = s.limiter.Refund(ctx, kind+"steady", user, cost)
	default:
		d, err = s.limiter.Peek(ctx, kind+"steady", user)
	}
	return d.Allowed, err
}

// hold holds a slot, renews every second lease, and releases all but some, which lapse.
func (s *soak) hold(ctx context.Context, policy, key, holder string) (allowed bool, err error) {
	d, err := s.limiter.HoldAs(ctx, policy, key, holder)
	if err != nil || !d.Allowed {
		return false, err
	}
	if rand.N(2) == 0 {
		_, err = s.limiter.Renew(ctx, policy, key, holder)
	}
	if err == nil && rand.N(10) > 0 {
		_, err = s.limiter.Release(ctx, policy, key, holder)
	}
	return true, err
}

// job puts a job into the queue for when its token is there, and takes out those that are due.
func (s *soak) job(ctx context.Context, tenant string) (allowed bool, err error) {
	err = s.db.Pool.QueryRow(ctx, `
		with turn as (select * from ratelimit_reserve('jobs', $1, '1 minute')),
		     put as (insert into public.jobs (due) select clock_timestamp() + wait from turn where allowed)
		select allowed from turn`, tenant).Scan(&allowed)
	if err == nil {
		_, err = s.db.Pool.Exec(ctx, `
			delete from public.jobs where id in (select id from public.jobs where due < now() order by due limit 10 for update skip locked)`)
	}
	return allowed, err
}

// A soakSample is the measurements of one moment.
type soakSample struct {
	at              time.Duration
	answers         int64
	rate, p99       float64 // of answers a second, and in ms, since the sample before
	tables, indexes float64 // MB
	backends, heap  float64 // MB
	hot             float64 // the share of updates of buckets so far
	dead, xidAge    float64
}

func (s *soak) sample(at time.Duration) soakSample {
	t := s.db.T
	now := soakSample{at: at, answers: s.answers.Load(), backends: s.backends()}
	var before soakSample
	if n := len(s.samples); n > 0 {
		before = s.samples[n-1]
	}
	now.rate = float64(now.answers-before.answers) / (at - before.at).Seconds()
	s.mu.Lock()
	took := s.took
	s.took = nil
	s.mu.Unlock()
	if slices.Sort(took); len(took) > 0 {
		now.p99 = float64(took[len(took)*99/100].Microseconds()) / 1000
	}
	require.NoError(t, s.db.Pool.QueryRow(context.Background(), `
		select sum(pg_table_size(relid)) / 1e6, sum(pg_indexes_size(relid)) / 1e6, sum(n_dead_tup),
		       coalesce(sum(n_tup_hot_upd) filter (where relname like '%buckets') /
		                nullif(sum(n_tup_upd) filter (where relname like '%buckets'), 0), 0),
		       (select age(datfrozenxid) from pg_database where datname = current_database())
		  from pg_stat_user_tables
		 where schemaname in ('ratelimit', 'public')`).Scan(&now.tables, &now.indexes, &now.dead, &now.hot, &now.xidAge))
	var memory runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&memory)
	now.heap = float64(memory.HeapAlloc) / 1e6
	s.samples = append(s.samples, now)
	return now
}

// csv has a line for each sample.
func (s *soak) csv() []byte {
	text := "minutes"
	for _, line := range soakLines {
		text += fmt.Sprintf(",%s in %s", line.name, line.unit)
	}
	for _, sample := range s.samples {
		text += fmt.Sprintf("\n%.2f", sample.at.Minutes())
		for _, line := range soakLines {
			text += fmt.Sprintf(",%.2f", line.of(sample))
		}
	}
	return []byte(text + "\n")
}

// backends tells how much memory of their own the callers' backends have, in MB; zero when it cannot be
// seen, because they run in a container or not on Linux.
func (s *soak) backends() (total float64) {
	if !s.local {
		return 0
	}
	rows := kit.NoError(s.db.Pool.Query(context.Background(), "select pid from pg_stat_activity where application_name = 'soak'"))(s.db.T)
	for _, pid := range kit.NoError(pgx.CollectRows(rows, pgx.RowTo[int]))(s.db.T) {
		memory, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return 0
		}
		_, line, _ := strings.Cut(string(memory), "Pss_Anon:")
		var kB float64
		_, _ = fmt.Sscan(line, &kB)
		total += kB / 1000
	}
	return total
}
