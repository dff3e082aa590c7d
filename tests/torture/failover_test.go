package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// A standby is promoted under load, over and over, and the primary killed just before or just after. Synchronous replication loses no grant
// that a caller was told of. The loss of asynchronous replication is measured. The clocks of the two nodes differ by up to an hour.
func TestTorture_CrashFailoverLosesNoGrantOfASynchronousStandby(t *testing.T) {
	run := kit.Torture(t, 2)
	db, primary := kit.NewPrivateDB(t, "synchronous_commit=on", "cluster_name=node 0")
	db.DefineExact()
	db.DefinePolicy("paced", pacedCapacity, pacedPerSecond, time.Second)
	db.Execute(`
		create table public.test_skews (node text primary key, skew interval not null);
		insert into public.test_skews values ('node 0', '0');
		create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe
		as $$ select clock_timestamp() + (select skew from public.test_skews where node = current_setting('cluster_name')) $$`)

	var synchronous settlement
	var asynchronous [2]settlement // by when the promotion came: before the primary's end, or after it
	var promotions []time.Duration
	var pace float64
	left := map[model.BucketID]int64{}
	for n := 0; run.GoesOn(); n++ {
		prefix, node := fmt.Sprint("failover ", n), fmt.Sprint("node ", n+1)
		waits, promotion := n%2 == 0, rand.N(2)
		total := &asynchronous[promotion]
		standby := pgtest.Standby(t, primary, "cluster_name="+node)
		ahead := time.Hour - rand.N(2*time.Hour)
		db.Execute("insert into test_skews values ($1, $2)", node, kit.Interval(ahead))
		if waits {
			total = &synchronous
			db.Execute("alter system set synchronous_standby_names = '*'")
			db.Execute("alter system set synchronous_commit = " + []string{"'on'", "'remote_apply'"}[rand.N(2)])
			db.Execute("select pg_reload_conf()")
			db.Await(t, kit.Patience, "select sync_state = 'sync' from pg_stat_replication")
		}

		paced := startPaced(db, prefix)
		l := startCrashLoad(t, db.URL, prefix, []string{"durable"}, 0)
		l.runAWhile(t)
		promoted := kit.Reopen(t, standby)
		for step := range 2 {
			if step != promotion {
				kill(t, primary)
				continue
			}
			start := time.Now()
			promoted.Execute("select pg_promote(wait => false)") // a snapshot that waits may be what recovery waits for
			promoted.Await(t, kit.Patience, "select not pg_is_in_recovery()")
			promotions = append(promotions, time.Since(start))
		}
		l.end()
		paced.end()
		db.Pool.Close()
		require.NoError(t, primary.Close())

		db, primary = promoted, standby
		total.add(l.settle(db, left))
		require.Zero(t, synchronous.lost, "grants that the standby had confirmed")
		require.EqualValues(t, kit.ExactCapacity, db.Left("ephemeral", "used"))
		db.Acquire("ephemeral", "used", 1)
		if waits {
			pace = max(pace, paced.check(db, ahead))
		}
		db.Execute("update test_skews set skew = '0'")
		run.Progress("%d failovers; of %d grants replicated synchronously %d are lost, of %d others %d", n+1,
			synchronous.grants, synchronous.lost,
			asynchronous[0].grants+asynchronous[1].grants, asynchronous[0].lost+asynchronous[1].lost)
	}
	for name, left := range left {
		require.Equal(t, left, db.Left(name.Policy, name.Key), "undone by a later failover: %v", name)
	}

	require.NotZero(t, synchronous.unanswered)
	if run.Budget >= time.Minute {
		require.NotZero(t, asynchronous[0].lost, "asynchronous replication shows no loss: were the grants under way at all?")
	}
	slices.Sort(promotions)
	run.Figure("promotions", len(promotions), "")
	run.Figure("promotion, median", promotions[len(promotions)/2].Milliseconds(), "ms")
	run.Figures("grants told, replicated synchronously", synchronous.grants, "of these lost", synchronous.lost,
		"requests without an answer", synchronous.unanswered, "asked again by idempotency key, each charged once", synchronous.again)
	for i, first := range []string{"promoted, then killed", "killed, then promoted"} {
		run.Figures("asynchronously, "+first+": grants told", asynchronous[i].grants, "asynchronously, "+first+": lost", asynchronous[i].lost,
			"asynchronously, "+first+": lost at once, most", asynchronous[i].mostLost)
		run.Figure("asynchronously, "+first+": how long before the end the oldest of these was told", slices.Max(append(asynchronous[i].lostFor, 0)).Milliseconds(), "ms")
	}
	run.Figure("tokens granted by both nodes, of what time and skew refill, most", fmt.Sprintf("%.4f", pace), "")
}

const (
	pacedCapacity  = 1_000_000_000
	pacedPerSecond = 1000
)

// paced is an emptied bucket, and one caller who takes its refill until the primary is gone.
type paced struct {
	key     string
	began   time.Time
	granted int64 // without what was there at first
	done    chan struct{}
}

func startPaced(db *kit.TestDB, key string) *paced {
	t := db.T
	p := &paced{key: key, began: time.Now(), done: make(chan struct{})}
	require.True(t, db.Acquire("paced", key, pacedCapacity).Allowed)
	busy := make(chan struct{})
	go func() {
		defer close(p.done)
		limiter := client.New(db.Pool)
		for {
			d, err := limiter.Acquire(context.Background(), "paced", key)
			if err != nil {
				return
			}
			if d.Allowed {
				if p.granted++; p.granted == 1 {
					close(busy)
				}
			}
		}
	}()
	select {
	case <-busy:
	case <-time.After(kit.Patience):
		require.FailNow(t, "nothing is granted of what an empty bucket gains")
	}
	return p
}

func (p *paced) end() { <-p.done }

// check asks a new primary. Its clock is ahead of the old primary's, or behind it if ahead is below zero. Both
// primaries together grant no more tokens than the elapsed time and the advance of the clock refill, also
// after the clock is corrected. check returns the largest share of these tokens that was granted.
func (p *paced) check(db *kit.TestDB, ahead time.Duration) (pace float64) {
	t := db.T
	for _, skew := range []time.Duration{ahead, 0} {
		db.Execute("update test_skews set skew = $1 where node = current_setting('cluster_name')", kit.Interval(skew))
		db.Must(kit.Refund(db.Pool, "paced", p.key, 1)) // so that there is one to take, and the bucket is written
		p.granted--
		stored := db.Bucket("paced", p.key)
		gain := db.Left("paced", p.key)
		if kit.One[time.Time](t, db.Pool, "select ratelimit.clock()").Before(stored.RefilledAt) {
			require.Equal(t, stored.Level/1_000_000, gain, "nothing is gained before the clock has caught up")
		}
		require.True(t, db.Acquire("paced", p.key, gain).Allowed)
		p.granted += gain
		due := pacedPerSecond * (time.Since(p.began) + max(0, ahead)).Seconds()
		require.LessOrEqual(t, float64(p.granted), due)
		pace = max(pace, float64(p.granted)/due)
	}
	return pace
}
