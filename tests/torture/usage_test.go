package torture

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// daysOf100ms makes each day of the database's clock last 100 ms.
const daysOf100ms = `
	create or replace function ratelimit.clock() returns timestamptz language sql volatile
	as $$ select timestamptz '2024-01-01 00:00:00+00' + (clock_timestamp() - timestamptz '%s') * 864000 $$`

// ledger writes what a random call has counted, in the transaction of the call. What acquire_all has granted a later call settles.
const ledger = `
	create table public.ledger (policy text, key text, counted bigint);
	create table public.unsettled (id text, key text, cost bigint);
	create function public.work() returns void language plpgsql as $$
	declare
	  k  text   := (array['a', 'b', 'c'])[1 + floor(random() * 3)::integer];
	  n  bigint := 1 + floor(random() * 9)::bigint;
	  id text   := gen_random_uuid()::text;
	  d  ratelimit.decision;
	  l  bigint;
	  o  public.unsettled;
	begin
	  case floor(random() * 9)::integer
	    when 0 then insert into public.ledger select 'q', k, n from ratelimit_acquire('q', k, n) as d where d.allowed;
	    when 1 then insert into public.ledger select 'q', k, n from ratelimit_charge('q', k, n, id) as d;
	    when 2 then insert into public.ledger select p, k, n from ratelimit_acquire_all('{r,q}', array[k, k], array[n, n]) as d, unnest('{q,r}'::text[]) as p where d.allowed;
	    when 3 then insert into public.ledger select 'q', (array['a', 'b', 'c'])[d.request], d.request from ratelimit_acquire_many('{q,q,q}', '{a,b,c}', '{1,2,3}') as d where d.allowed;
	    when 4 then insert into public.ledger select 'r', k, d.taken from ratelimit_acquire_up_to('r', k, n) as d;
	    when 5 then
	      perform ratelimit_reserve('r', k, '1 day', n, id);
	      insert into public.ledger select 'r', k, n + 3 from ratelimit_settle('r', k, id, n + 3);
	    when 6 then
	      l := remaining from ratelimit_charge('q', k, n + 1);
	      d := ratelimit_refund('q', k, n);
	      insert into public.ledger values ('q', k, n + 1 - case when d.remaining = l + n then n else 0 end);  -- 0: its day was over
	    when 7 then
	      perform ratelimit_acquire_all('{q,r}', array[k, k], array[n, n], id);
	      insert into public.ledger values ('q', k, n), ('r', k, n);
	      insert into public.unsettled values (id, k, n);
	    else
	      delete from public.unsettled where ctid = (select ctid from public.unsettled limit 1 for update skip locked) returning * into o;
	      if found then
	        perform ratelimit_settle_all('{r,q}', array[o.key, o.key], o.id, array[o.cost + 2, o.cost + 2]);
	        insert into public.ledger values ('q', o.key, 2), ('r', o.key, 2);
	      end if;
	  end case;
	end $$`

// unaccounted are keys of which the usage of all periods is not what the ledger has.
const unaccounted = `
	select format('%s of %s: %s used, %s counted', u.key, u.policy, u.used, l.counted)
	  from (select policy, key, sum(counted) as counted from public.ledger group by policy, key) as l
	  full join (select policy, key, sum(used) as used
	               from (select * from ratelimit_usage('q', max_rows => 1000000) union all select * from ratelimit_usage('r', max_rows => 1000000)) as u
	              group by policy, key) as u using (policy, key)
	 where u.used is distinct from l.counted`

// keepLedger has sessions work for so many turns, and until they have made as many calls, so that most turns have something to close. It ends
// early at a deadlock or a difference. Beside them clean-up runs, and sessions are killed.
func keepLedger(t *testing.T, db *kit.TestDB, sessions, turns int) (calls int64, differences []string) {
	db.Execute(fmt.Sprintf(daysOf100ms, time.Now().UTC().Format(time.RFC3339Nano)))
	db.Execute("select ratelimit_define_policy(p, 1000000, period => '1 day', history => '100 years', remember => '1000 days') from unnest('{q,r}'::text[]) as p")
	db.Execute(ledger)
	load := kit.NewLoad(t)
	var done, deadlocks atomic.Int64
	load.Start(sessions, func(int) error {
		if _, err := db.Pool.Exec(load.Ctx, "select public.work()"); err == nil {
			done.Add(1)
		} else if kit.SQLState(err) == "40P01" {
			deadlocks.Add(1)
		}
		return nil
	})
	load.Start(1, func(int) error {
		_, _ = db.Pool.Exec(load.Ctx, "call ratelimit_cleanup_all()")
		return nil
	})
	conn, killed, begin := db.Connect(t), 0, time.Now()
	for turn := 0; (turn < turns || done.Load() < int64(turns)) && len(differences) == 0; turn += 10 {
		require.Less(t, time.Since(begin), time.Duration(turns)*time.Second, "so few calls succeed: %d of %d", done.Load(), turns)
		more := time.Now().Add(time.Second)
		for time.Now().Before(more) {
			killed += len(kit.ColumnOf(t, conn, `
				select pg_terminate_backend(pid)::text from pg_stat_activity
				 where datname = current_database() and state = 'active' and query = 'select public.work()'
				 order by random() limit 1`))
			kit.Execute(t, conn, "select pg_sleep(0.2)")
		}
		kit.Execute(t, conn, "begin isolation level repeatable read")
		differences = kit.ColumnOf(t, conn, unaccounted)
		kit.Execute(t, conn, "commit")
		if n := deadlocks.Load(); n > 0 {
			differences = append(differences, fmt.Sprint(n, " deadlocks"))
		}
	}
	require.NoError(t, load.End())
	require.Positive(t, killed)
	require.NotEmpty(t, kit.Column(t, db.DB, "select 1 from ratelimit_usage('q') where closed"))
	return done.Load(), differences
}

// Whatever takes from a quota, and whoever closes its periods: over all of them, what was used is what was counted.
func TestTorture_UsageIsTheSumOfWhatWasCounted(t *testing.T) {
	run := kit.Torture(t, 1)
	turns := 200
	if run.Budget > 0 {
		turns = int(run.Budget.Seconds()) * 10
	}
	calls, differences := keepLedger(t, kit.NewDB(t), 32, turns)
	require.Empty(t, differences)
	run.Figures("calls", calls, "turns", int64(turns))
}

func TestUsage_TheLedgerFindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	kit.OnDBs(t, map[string][]plantedBug{
		"a period is closed by two": {
			{"ratelimit.close_period", `b\.key = v_key for update`, "b.key = v_key"},
			pauseBefore("ratelimit.close_period", `update buckets as b set level = 0`),
		},
		"settle_all locks in another order":     {{"ratelimit_settle_all", `order by \(v_policies\[u\.n\]\)\.durable desc, u\.policy, u\.key`, "order by u.n"}},
		"clean-up removes what it did not keep": {{"ratelimit.cleanup_buckets", `where r\.level < 0 and`, "where false and"}},
	}, func(t *testing.T, db *kit.TestDB, bugs []plantedBug) {
		for _, bug := range bugs {
			bug.plant(db)
		}
		_, differences := keepLedger(t, db, 16, 300)
		require.NotEmpty(t, differences)
	})
}
