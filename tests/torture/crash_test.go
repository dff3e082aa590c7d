package torture

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// PostgreSQL is killed with SIGKILL at random moments, over and over, under load. The decisions of the callers are then compared
// with the recovered database.
//
// The machine survives, and so does everything that PostgreSQL wrote to the kernel. Without a flush, a grant is lost if its WAL
// was still in PostgreSQL's own buffers. Under load these are few up to PostgreSQL 16, because full pages are written at once.
// When grants come slowly, the last page waits for the WAL writer. This test does not see what fsync does when the power fails.
func TestTorture_CrashLosesNoFlushedGrant(t *testing.T) {
	run := kit.Torture(t, int64(len(crashes)))
	const walWriterDelay = 200 * time.Millisecond // PostgreSQL's default
	db, server := kit.NewPrivateDB(t, "synchronous_commit=on", fmt.Sprintf("wal_writer_delay=%dms", walWriterDelay.Milliseconds()))
	db.DefineExact()

	var flushed, unflushed settlement
	var recoveries []time.Duration
	left := map[model.BucketID]int64{}
	for n := 0; run.GoesOn(); n++ {
		crash, total := crashes[n%len(crashes)], &flushed
		var opts []client.Option
		if crash.noFlush {
			total, opts = &unflushed, append(opts, client.NoFlush())
		}
		l := startCrashLoad(t, db.URL, fmt.Sprint("crash ", n), crash.policies, crash.pause, opts...)
		l.runAWhile(t)
		recoveries = append(recoveries, crash.kill(t, server, l))
		l.end()
		db.Pool.Close()
		db = kit.Reopen(t, server)
		total.add(l.settle(db, left))
		require.Zero(t, flushed.lost, "grants that were flushed")
		run.Progress("%d crashes; of %d grants flushed %d are lost, of %d others %d", n+1,
			flushed.grants, flushed.lost, unflushed.grants, unflushed.lost)
	}
	for name, left := range left {
		require.Equal(t, left, db.Left(name.Policy, name.Key), "undone by a later crash: %v", name)
	}

	require.NotZero(t, flushed.unanswered)
	require.NotZero(t, flushed.forgotten)
	if run.Budget >= time.Minute { // enough crashes for one to come too early, and the machine to itself
		require.NotEmpty(t, unflushed.lostFor)
		require.Less(t, slices.Max(unflushed.lostFor), 3*walWriterDelay)
	}
	slices.Sort(recoveries)
	run.Figure("crashes", len(recoveries), "")
	run.Figure("recovery, median", recoveries[len(recoveries)/2].Milliseconds(), "ms")
	run.Figure("recovery, longest", recoveries[len(recoveries)-1].Milliseconds(), "ms")
	run.Figures("grants told, flushed", flushed.grants, "of these lost", flushed.lost,
		"requests without an answer", flushed.unanswered+unflushed.unanswered,
		"asked again by idempotency key, each charged once", flushed.again+unflushed.again,
		"ephemeral grants told, all forgotten", flushed.forgotten, "grants told, not flushed", unflushed.grants,
		"of these lost", unflushed.lost, "of these lost in one crash, most", unflushed.mostLost)
	run.Figure("how long before the crash the oldest of these was told", slices.Max(append(unflushed.lostFor, 0)).Milliseconds(), "ms")
}

// The ways to crash, and the load at that time. One backend that dies takes the others with it, and the
// server recovers by itself while callers go on asking: no time to look at what is ephemeral.
var crashes = []struct {
	policies []string
	pause    time.Duration
	noFlush  bool
	kill     func(t *testing.T, server *pgtest.Server, l *crashLoad) (recovery time.Duration)
}{
	{[]string{"durable", "ephemeral"}, 0, false, killServer},
	{[]string{"durable"}, 0, true, killServer},
	{[]string{"durable"}, 0, false, killBackend},
	{[]string{"durable"}, time.Second, true, killServer},
}

func killServer(t *testing.T, server *pgtest.Server, l *crashLoad) (recovery time.Duration) {
	kill(t, server)
	l.end()
	for rand.N(4) == 0 { // and again, while it recovers
		started := make(chan struct{})
		go func() {
			defer close(started)
			_ = server.Start(t.Context())
		}()
		time.Sleep(rand.N(300 * time.Millisecond))
		kill(t, server)
		<-started
		kill(t, server) // it had not begun
	}
	start := time.Now()
	require.NoError(t, server.Start(t.Context()))
	return time.Since(start)
}

func killBackend(t *testing.T, server *pgtest.Server, _ *crashLoad) (recovery time.Duration) {
	victim, witness := kit.Connect(t, server), kit.Connect(t, server)
	start := time.Now()
	require.Error(t, kit.ErrorOf(victim.Exec(t.Context(), "copy (select) to program 'kill -KILL $PPID'")))
	_, err := witness.Exec(t.Context(), "select pg_sleep(60)") // all others are ended before it recovers
	require.Error(t, err)
	require.Eventually(t, func() bool {
		conn, err := pgx.Connect(t.Context(), server.URL(""))
		return err == nil && conn.Close(t.Context()) == nil
	}, kit.Patience, 10*time.Millisecond)
	return time.Since(start)
}

func kill(t *testing.T, server *pgtest.Server) {
	t.Helper()
	pgtest.OrSkip(t, server.Kill(t.Context()))
}

// The audit finds lost grants on a server that does not flush: those on its last page of WAL. That page may
// have been filled and written just before the crash, but not every time.
func TestCrash_TheAuditFindsWhatIsLost(t *testing.T) {
	t.Parallel()
	db, server := kit.NewPrivateDB(t, "synchronous_commit=on", "autovacuum=off", "cron.launch_active_jobs=off",
		"bgwriter_lru_maxpages=0", "wal_writer_delay=10s", "wal_writer_flush_after=1GB")
	db.DefineExact()
	lost := func(key string, opts ...client.Option) int {
		limiter := client.New(db.Pool, opts...)
		var grants []kit.Entry
		for i := range 20 {
			e := kit.NoError(kit.Request{BucketID: model.BucketID{Policy: "durable", Key: key}, Cost: 2, IdempotencyKey: fmt.Sprint(i)}.Try(limiter))(t)
			grants = append(grants, e)
		}
		kill(t, server)
		require.NoError(t, server.Start(t.Context()))
		db.Pool.Close()
		db = kit.Reopen(t, server)
		return len(kit.NoError(kit.Audit(kit.ExactCapacity, db.Left("durable", key), grants, nil))(t).Lost)
	}
	require.Zero(t, lost("flushed"))
	for try := 1; lost(fmt.Sprint("not flushed ", try), client.NoFlush()) == 0; try++ {
		require.Less(t, try, 5)
	}
}

// The schema is upgraded under load, again and again, to made-up next versions: one with changed functions and one with changed tables.
func TestTorture_UpgradeUnderLoadFailsNoCall(t *testing.T) {
	run := kit.Torture(t, 1)
	newest := kit.NewestMigration(t)
	functions := kit.NextVersion(t, "", "", kit.Edits...)
	tables := kit.NextVersion(t, `
		alter table ratelimit.policies add column next boolean not null default false;
		alter table ratelimit.buckets add column next bigint;
		alter table ratelimit.ephemeral_buckets add column next bigint;`, `
		alter table ratelimit.policies drop column next;
		alter table ratelimit.buckets drop column next;
		alter table ratelimit.ephemeral_buckets drop column next;`,
		kit.NextColumn, kit.Edit{File: "sql/acquire.sql", Old: "if v_wanted > 0 and", New: "if (v_wanted > 0 or v_policy.next) and"})
	db := kit.InstalledAt(t, functions, newest)
	data, conn := db.PutData(), db.Connect(t)

	rounds, acquires := 0, int64(0)
	for ; run.GoesOn() && rounds < 1500; rounds++ { // a table can have had 1,600 columns
		load := db.StartLoad()
		kit.MigrateTo(t, db.DB, functions, newest+1)
		load.GoOn()
		kit.MigrateTo(t, db.DB, functions, newest)
		load.GoOn()
		kit.ReinstallCode(t, conn)
		load.GoOn()
		kit.MigrateTo(t, db.DB, tables, newest+1)
		load.GoOn()
		data.Check()
		acquires += load.End() * int64(len(kit.LoadPolicies))
		if rounds == 0 {
			kit.SameSchema(t, kit.InstalledAt(t, tables, newest+1).DB, db.DB)
			var newer *migrations.NewerSchemaError
			require.ErrorAs(t, migrations.Up(t.Context(), db.Connect(t)), &newer, "an older program leaves it alone")
		}

		// A column goes away under nobody: a call under way may be about to read it.
		kit.MigrateTo(t, db.DB, tables, newest)
		data.Check()
		run.Progress("%d upgrades, %d acquires meanwhile", 2*(rounds+1), acquires)
	}
	kit.SameSchema(t, pgtest.New(t), db.DB)
	run.Figures("upgrades under load", 2*rounds, "acquires meanwhile, of which none failed", acquires)
}
