package acquire

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Turns agree with the model, which finds them by a search over the time package's rules, in all zones that both know. They are of the
// past: servers and machines have releases of the time zone data that foresee different things.
func TestQuota_TurnsAgreeWithTheModel(t *testing.T) {
	pgtest.OncePerServer(t)
	db := kit.ParallelDB(t)
	random := rand.New(rand.NewPCG(kit.TestSeed(t), 0))
	zones := kit.Column(t, db.DB, `
		select name from pg_timezone_names where name = 'UTC' or name ~ '/' and name !~ '^(posix|right)/' order by 1`)
	require.Greater(t, len(zones), 300)
	type instant struct{ At, Turned, Turns time.Time }
	const each = 4
	var cases [][]any
	var want []instant
	for _, zone := range zones {
		if !model.IsZone(zone) {
			continue
		}
		for range each {
			p := model.Period{Days: 1 + random.IntN(400)}
			if random.IntN(2) == 0 {
				p = model.Period{Months: 1 + random.IntN(40)}
			}
			past := func() time.Time {
				return time.Date(1995, 1, 1, 0, 0, 0, int(random.Int64N(1e9)), time.UTC).AddDate(0, 0, random.IntN(7000)).Truncate(kit.Us)
			}
			c := model.Calendar{Period: p, Zone: zone, Anchor: past()}
			turn := c.Next(past())
			at := turn.Add([]time.Duration{-time.Microsecond, 0, time.Microsecond, time.Duration(random.Int64N(int64(400 * 24 * time.Hour))).Truncate(kit.Us)}[random.IntN(4)])
			cases = append(cases, []any{p.Months, p.Days, zone, c.Anchor, at})
			want = append(want, instant{at, time.Time{}, c.Next(at)})
		}
	}
	for i, c := range cases {
		var got instant
		require.NoError(t, db.Pool.QueryRow(t.Context(), `
			select $5::timestamptz, t.turned_at, t.turns_at
			  from ratelimit.turning(make_interval(months => $1, days => $2), $1, $3, $4::timestamp, $5) as t`, c...).
			Scan(&got.At, &got.Turned, &got.Turns))
		require.True(t, got.Turns.Equal(want[i].Turns), "%v: %v instead of %v", c, got.Turns.UTC(), want[i].Turns)
		require.False(t, got.Turned.After(got.At), "%v: the last turn is at %v", c, got.Turned.UTC())
	}
}

// 32 sessions and a Combiner ask without end while a turn comes: as many are granted before it as fit, and as many after it.
func TestTorture_QuotaGrantsItsCapacityBeforeATurnAndAfterIt(t *testing.T) {
	const sessions, callers, capacity = 32, 8, 50
	run := kit.Torture(t, 4)
	turns := 0
	db := kit.NewCrowdDB(t, sessions)
	combiner := client.NewCombiner(db.Pool)
	defer combiner.Close()
	ctx := context.Background()
	db.Execute(`
		create table public.clocks (ahead interval primary key); -- without an index, enable_seqscan = off has each call compiled
		insert into public.clocks values ('0');
		create or replace function ratelimit.clock() returns timestamptz language sql volatile as $$ select clock_timestamp() + ahead from public.clocks $$`)
	for ; run.GoesOn(); turns++ {
		policy := fmt.Sprint("quota ", turns)
		// It turns in an hour. When each caller has found it empty, the clock goes forward to a moment before.
		db.Execute(`
			select ratelimit_define_policy($1, $2, durable => $3, period => '1 day', anchor => (ratelimit.clock() at time zone 'UTC') + interval '1 hour')`,
			policy, capacity, turns%2 == 0)
		var mu sync.Mutex
		granted := map[bool]int{} // by whether the day after had begun
		var empty sync.WaitGroup
		empty.Add(sessions + callers)
		go func() {
			empty.Wait()
			db.Execute(`
				update public.clocks set ahead = ahead + (p.anchor at time zone 'UTC' - ratelimit.clock()) - interval '5 ms'
				  from ratelimit_policies() as p where p.policy = $1`, policy)
		}()
		kit.Crowd(t, sessions+callers, func(caller int) error {
			for told := false; ; {
				var d client.Decision
				var err error
				if caller < sessions {
					d, err = client.New(db.Pool).Acquire(ctx, policy, "k")
				} else {
					d, err = combiner.Acquire(ctx, policy, "k")
				}
				after := d.ResetAfter > 12*time.Hour
				switch {
				case err != nil:
					return err
				case d.Allowed:
					mu.Lock()
					granted[after]++
					mu.Unlock()
				case after:
					return nil
				case !told:
					told = true
					empty.Done()
				}
			}
		})
		require.Equal(t, map[bool]int{false: capacity, true: capacity}, granted)
		run.Progress("%d turns", turns)
	}
	run.Figure("turns around which exactly the capacity was granted", turns, "")
}

// A day of the billing month of a key, and nothing else, decides when clean-up closes its period: at its turn and the margin, although the
// policy's turn is later. Until then the doctor has ten minutes of patience.
func TestUsage_CleanUpClosesAtTheTurnOfTheKey(t *testing.T) {
	db := kit.ParallelDB(t)
	begin, turn := time.Date(2024, 4, 2, 0, 0, 0, 0, time.UTC), time.Date(2024, 4, 15, 0, 0, 0, 0, time.UTC) // the policy turns in May
	db.At(begin).Execute("select ratelimit_define_policy('q', 10, period => '1 month', history => '1 year')")
	db.Execute("select from ratelimit_acquire('q', 'early', 1), ratelimit_override('q', 'early', anchor => '2024-01-15')") // whose row is due at the policy's turn
	db.Execute("select from ratelimit_override('q', 'late', anchor => '2024-01-15'), ratelimit_acquire('q', 'late', 2)")
	closed := func(at time.Time) []string {
		db.SetClock(at)
		db.Execute("call ratelimit_cleanup_all()")
		return kit.Column(t, db.DB, "select format('%s %s %s', key, used, began::date) from ratelimit_usage('q') where closed order by 1")
	}
	require.Empty(t, closed(begin.Add(model.CleanUpMargin)), "both are looked at, and postponed")
	require.Empty(t, closed(turn.Add(model.CleanUpMargin-kit.Us)))
	require.Equal(t, []string{"early 1 2024-04-01", "late 2 2024-04-01"}, closed(turn.Add(model.CleanUpMargin)))

	db.Execute("select ratelimit_acquire('q', 'late', 3)")
	db.SetClock(turn.AddDate(0, 1, 0).Add(10*time.Minute + kit.Us))
	require.Contains(t, fmt.Sprint(db.Findings()), "warning: Policy 'q' has periods that are over and not closed, the oldest since 2024-05-15 00:00:00+00.")
}

// What was used in each period, worked out by hand. T0 is the 30th of March, so a month turns 36 hours later by UTC.
func TestUsage_Rules(t *testing.T) {
	const (
		quota  = "select ratelimit_define_policy('q', 10, period => '1 month', history => '1 year', remember => '90 days')"
		listed = `select coalesce(string_agg(format('%s %s to %s: %s%s', key, to_char(began at time zone 'UTC', 'MM-DD HH24'), to_char(ended at time zone 'UTC', 'MM-DD HH24'),
		                                           used, case when closed then ' closed' else '' end), '; '), '') from ratelimit_usage('q')`
		april, may = 36 * time.Hour, (36 + 30*24) * time.Hour
		june, july = may + 31*24*time.Hour, may + 61*24*time.Hour
	)
	kit.OnDBs(t, map[string][]kit.Step{
		"three zones": {
			{0, quota, ""},
			{0, "select count(*) from (values ('be', 'Europe/Berlin'), ('ny', 'America/New_York'), ('to', 'Asia/Tokyo')) as z (k, zone), ratelimit_override('q', k, time_zone => zone)", "3"},
			{0, "select string_agg(d.remaining::text, ' ') from unnest('{be,ny,to}'::text[], '{3,1,2}'::bigint[]) as u (k, n), ratelimit_acquire('q', k, n) as d", "7 9 8"},
			{april, "select string_agg(d.remaining::text, ' ') from unnest('{be,ny,to}'::text[]) as k, ratelimit_acquire('q', k, 4) as d", "6 5 6"},
			{april, listed, "be 02-29 23 to 03-31 22: 3 closed; be 03-31 22 to 04-30 22: 4; ny 03-01 05 to 04-01 04: 5; to 02-29 15 to 03-31 15: 2 closed; to 03-31 15 to 04-30 15: 4"},
		},
		"a settlement and a refund over a turn, and a charge beyond the capacity": {
			{0, quota, ""},
			{0, "select a.remaining, b.remaining as b from ratelimit_acquire('q', 'less', 6, 'i') as a, ratelimit_acquire('q', 'more', 6, 'i') as b", "4,4"},
			{0, "select remaining from ratelimit_charge('q', 'over', 25)", "-15"},
			{april, "select a.remaining, b.remaining as b from ratelimit_settle('q', 'less', 'i', 2) as a, ratelimit_settle('q', 'more', 'i', 9) as b", "10,7"},
			{april, "select remaining from ratelimit_refund('q', 'more', 2)", "9"},
			{april, listed, "less 03-01 00 to 04-01 00: 6 closed; more 03-01 00 to 04-01 00: 6 closed; more 04-01 00 to 05-01 00: 1; over 03-01 00 to 04-01 00: 25"},
		},
		"a reset before and after an anchor is moved": {
			{0, quota, ""},
			{0, "select a.remaining, b.remaining as b from ratelimit_acquire('q', 'anchor', 7) as a, ratelimit_acquire('q', 'reset', 7) as b", "3,3"},
			{12 * time.Hour, "select ratelimit_reset('q', 'reset')", ""},
			{12 * time.Hour, "select count(*) from unnest('{anchor,reset}'::text[]) as k, ratelimit_override('q', k, anchor => '2024-03-31')", "2"},
			{12 * time.Hour, "select ratelimit_reset('q', 'anchor')", ""},
			{12 * time.Hour, "select a.remaining, b.remaining as b from ratelimit_acquire('q', 'anchor', 1) as a, ratelimit_acquire('q', 'reset', 2) as b", "9,8"},
			{12 * time.Hour, listed, "anchor 03-01 00 to 03-31 00: 7 closed; anchor 03-31 00 to 04-30 00: 1; reset 03-31 00 to 04-30 00: 2"},
		},
		"a calendar that is changed in mid-period, and changed back": {
			{0, quota, ""},
			{0, "select remaining from ratelimit_acquire('q', 'k', 4)", "6"},
			{time.Hour, "select anchor::date from ratelimit_override('q', 'k', anchor => '2024-01-15')", "2024-01-15"},
			{time.Hour, "select remaining from ratelimit_acquire('q', 'k', 2)", "4"},
			{2 * time.Hour, "select anchor::date from ratelimit_override('q', 'k', anchor => '2001-01-01')", "2001-01-01"},
			{april, "select remaining from ratelimit_acquire('q', 'k', 1)", "9"},
			{april, listed, "k 03-01 00 to 04-01 00: 6 closed; k 04-01 00 to 05-01 00: 1"},
		},
		"a clock that was ahead": {
			{0, quota, ""},
			{june, "select remaining from ratelimit_acquire('q', 'k', 2)", "8"},
			{may, "select remaining from ratelimit_acquire('q', 'k', 4)", "4"},
			{july, "select remaining from ratelimit_acquire('q', 'k', 1)", "9"},
			{july, listed, "k 06-01 00 to 07-01 00: 6 closed; k 07-01 00 to 08-01 00: 1"},
			{july, "select ratelimit_reset('q', 'k')", ""},
			{june, "select remaining from ratelimit_acquire('q', 'k', 5)", "5"},
			{july, "select remaining from ratelimit_acquire('q', 'k', 3)", "7"},
			{july, listed, "k 06-01 00 to 07-01 00: 11 closed; k 07-01 00 to 08-01 00: 3"},
		},
	}, func(_ *testing.T, db *kit.TestDB, steps []kit.Step) { db.CleanUpAtOnce().RunSteps(steps) })
}

// A write that is rolled back closes nothing, and the next closes.
func TestUsage_AClosingWriteIsRolledBack(t *testing.T) {
	db := kit.ParallelDB(t)
	db.At(kit.T0).Execute("select ratelimit_define_policy('q', 10, period => '1 month', history => '1 year', time_zone => 'Europe/Berlin')")
	db.Execute("select ratelimit_acquire('q', 'k', 4)")
	db.SetClock(kit.T0.AddDate(0, 3, 0))
	conn := db.Connect(t)
	kit.Execute(t, conn, "begin")
	kit.Execute(t, conn, "select ratelimit_acquire('q', 'k', 5)")
	kit.Execute(t, conn, "rollback")
	usage := "select format('%s to %s: %s %s', began at time zone 'UTC', ended at time zone 'UTC', used, closed) from ratelimit_usage('q') order by 1"
	require.Equal(t, []string{"2024-02-29 23:00:00 to 2024-03-31 22:00:00: 4 f"}, kit.Column(t, db.DB, usage), "which the rolled back write did not close")
	db.Execute("select ratelimit_acquire('q', 'k', 1)")
	require.Equal(t, []string{"2024-02-29 23:00:00 to 2024-03-31 22:00:00: 4 t", "2024-05-31 22:00:00 to 2024-06-30 22:00:00: 1 f"}, kit.Column(t, db.DB, usage))
}

// The last grant of a period commits after the turn. A call that waited for it closes the period with it, or leaves it open.
func TestUsage_HasTheGrantThatCommitsAfterTheTurn(t *testing.T) {
	turn := time.Date(2024, 4, 2, 0, 0, 0, 0, time.UTC)
	for _, call := range []string{
		"select ratelimit_refund('q', 'k', 1)", "select ratelimit_reset('q', 'k')", "select ratelimit_remove_override('q', 'k')",
		"select ratelimit_override('q', 'k', anchor => '2024-01-01 12:00')", "select ratelimit_charge('q', 'k', 1)",
		"select ratelimit_acquire('q', 'k', 1)", "select ratelimit_acquire_many('{q}', '{k}', '{1}')", "call ratelimit_cleanup_all()",
	} {
		t.Run(call, func(t *testing.T) {
			db := kit.ParallelDB(t)
			db.At(turn.Add(-time.Hour)).Execute("select ratelimit_define_policy('q', 10, period => '1 day', history => '1 year')")
			db.Execute("select from ratelimit_override('q', 'k', anchor => '2024-01-01'), ratelimit_acquire('q', 'k', 5)")
			last := db.Begin().Execute("select ratelimit_acquire('q', 'k', 3)")
			db.SetClock(turn.Add(time.Minute))
			late := db.Session().Start(func(q kit.Querier) (kit.Decision, error) {
				return kit.Decision{}, kit.ErrorOf(q.(*kit.Session).Exec(t.Context(), call))
			})
			late.AwaitLockOrEnd()
			last.Execute("commit")
			_, err := late.Result()
			require.NoError(t, err)
			require.Equal(t, []string{"8"}, kit.Column(t, db.DB, "select used::text from ratelimit_usage('q', 'k', until => $1)", turn))
		})
	}
}
