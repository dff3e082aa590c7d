package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// PostgreSQL is killed with SIGKILL over and over, as a whole or one backend of it, while connections are ended, and sessions die in
// the middle of a transaction or at its commit. The calls on buckets have an order all the same: no grant that was answered is lost, and
// no idempotency key is charged twice. Of a commit without an answer either may be true. A crash empties the tables of ephemeral
// policies, and no others.
//
// The machine survives, and so does everything that PostgreSQL wrote to the kernel. This test does not see what fsync does when the
// power fails.
func TestTorture_CrashLosesNoGrant(t *testing.T) {
	run := kit.Torture(t, 3)
	acrossCrashes(t, newWorkload, tokensAcrossCrashes).judgeAll(run, metAcrossCrashes...)
}

var (
	tokensAcrossCrashes = []string{"plain durable", "continuous durable", "quota durable", "plain ephemeral"}
	metAcrossCrashes    = []string{
		"acquire, replayed", "charge, replayed", "settle, replayed", "settlements without a grant", "reserve", "acquire_up_to, granted",
		"commits without an answer", "rolled back", "crash",
	}
)

// The same of holders of slots, of which there are never more than the capacity.
func TestTorture_SlotsNeverExceedTheCapacity(t *testing.T) {
	run := kit.Torture(t, 3)
	acrossCrashes(t, newSlotsWorkload, []string{"slots durable", "slots ephemeral"}).
		judgeAll(run, slices.Concat(metBySlots, []string{"commits without an answer", "crash"})...)
}

// A standby is promoted under load, over and over, and the primary killed just before or just after. Synchronous replication loses no
// grant that a caller was told of. The clocks of the two nodes differ by up to an hour: the new primary grants what its own clock refills,
// and nothing before it has caught up.
func TestTorture_CrashFailoverLosesNoGrantOfASynchronousStandby(t *testing.T) {
	run := kit.Torture(t, 2)
	w := acrossCrashes(t, newWorkload, tokensAcrossCrashes)
	w.db.Mutate(kit.Mutation{
		Pattern:     `v_ahead_us( \* interval)`,
		Replacement: "(v_ahead_us + coalesce(current_setting('test.skew_us', true), '0')::bigint)$1",
	}, "ratelimit.clock")
	var standby *pgtest.Server
	w.faults.prepare = func(t *testing.T, f *faults) {
		standby = pgtest.Standby(t, f.server, fmt.Sprintf("test.skew_us=%d", (time.Hour-rand.N(2*time.Hour)).Microseconds()))
		f.db.Execute("alter system set synchronous_standby_names = '*'")
		f.db.Execute("alter system set synchronous_commit = " + []string{"'on'", "'remote_apply'"}[rand.N(2)])
		f.db.Execute("select pg_reload_conf()")
		f.db.Await(t, kit.Patience, "select sync_state = 'sync' from pg_stat_replication")
	}
	w.faults.crash = func(t *testing.T, f *faults) int {
		primary, promoted := f.server, kit.Reopen(t, standby)
		steps := []func(){
			func() { kill(t, primary) },
			func() {
				promoted.Execute("select pg_promote(wait => false)") // a snapshot that waits may be what recovery waits for
				promoted.Await(t, kit.Patience, "select not pg_is_in_recovery()")
			},
		}
		first := rand.N(2)
		steps[first]()
		steps[1-first]()
		require.NoError(t, primary.Close())
		f.server = standby
		promoted.Pool.Close()
		return 1
	}
	w.judgeAll(run, metAcrossCrashes...)
}

// A server that does not flush loses the grants on its last page of WAL. That page may have been filled and written just before the
// crash, but not every time.
func TestCrash_AHistoryFindsWhatIsLost(t *testing.T) {
	t.Parallel()
	acrossCrashes(t, newWorkload, []string{"continuous durable"}, "synchronous_commit=off", "autovacuum=off", "cron.launch_active_jobs=off",
		"bgwriter_lru_maxpages=0", "wal_writer_delay=10s", "wal_writer_flush_after=1GB").requireNoOrder(t)
}

// acrossCrashes has a server of its own.
func acrossCrashes(t *testing.T, open func(db *kit.TestDB, policies ...string) *workload, policies []string, settings ...string) *workload {
	db, server := kit.NewPrivateDB(t, append([]string{"synchronous_commit=on"}, settings...)...)
	w := open(db, policies...)
	w.oneIn, w.calls = 0, 25
	w.faults = &faults{server: server, db: db, crash: func(t *testing.T, f *faults) int {
		return []func(*testing.T, *pgtest.Server) int{killServer, killServer, killBackend}[rand.N(3)](t, f.server)
	}}
	w.faults.at.MoveTo(db.URL)
	return w
}

// Faults end connections, and crash PostgreSQL.
type faults struct {
	server  *pgtest.Server
	db      *kit.TestDB // as it is after the last crash
	at      kit.Address
	prepare func(t *testing.T, f *faults)     // nil, or before each history
	crash   func(t *testing.T, f *faults) int // leaves a server that runs, and tells how often one was killed
}

// happen ends two connections and then crashes, each when some more calls are over.
func (h *draft) happen(f *faults) {
	t := h.db.T.(*testing.T)
	for n := range 3 {
		for begin := time.Now(); time.Since(begin) < kit.Second; time.Sleep(kit.Ms) { // calls may all be over
			h.mu.Lock()
			over := len(h.operations)
			h.mu.Unlock()
			if over > h.calls*(n+1) {
				break
			}
		}
		if n < 2 {
			f.db.Execute(`select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'history %' order by random() limit 1`)
			continue
		}
		crashed := h.now()
		kills := f.crash(t, f)
		f.db.Pool.Close()
		f.db = kit.Reopen(t, f.server)
		f.at.MoveTo(f.db.URL)
		for _, b := range h.buckets {
			for range kills {
				if isDurable(b.Policy) {
					continue
				}
				h.add(&operation{Spending: kit.Spending{Function: "crash", BucketID: b}, client: -1, called: crashed, returned: h.now()})
			}
		}
	}
}

// killServer kills it, and again while it recovers.
func killServer(t *testing.T, server *pgtest.Server) (kills int) {
	kill(t, server)
	kills = 1
	for rand.N(4) == 0 {
		started := make(chan struct{})
		go func() {
			defer close(started)
			_ = server.Start(t.Context())
		}()
		time.Sleep(rand.N(300 * time.Millisecond))
		kill(t, server)
		<-started
		kill(t, server) // it had not begun
		kills += 2
	}
	require.NoError(t, server.Start(t.Context()))
	return kills
}

// killBackend kills one, which takes the others with it. The server recovers by itself.
func killBackend(t *testing.T, server *pgtest.Server) int {
	victim, witness := kit.Connect(t, server), kit.Connect(t, server)
	require.Error(t, kit.ErrorOf(victim.Exec(t.Context(), "copy (select) to program 'kill -KILL $PPID'")))
	require.Error(t, kit.ErrorOf(witness.Exec(t.Context(), "select pg_sleep(60)"))) // all others are ended before it recovers
	require.Eventually(t, func() bool {
		conn, err := pgx.Connect(t.Context(), server.URL(""))
		return err == nil && conn.Close(t.Context()) == nil
	}, kit.Patience, 10*time.Millisecond)
	return 1
}

func kill(t *testing.T, server *pgtest.Server) {
	t.Helper()
	pgtest.OrSkip(t, server.Kill(t.Context()))
}

// reconnect returns when the server has ended the session that is lost, and there is another.
func (w *workload) reconnect(c *clockedConn) error {
	ended := c.Config().RuntimeParams["application_name"]
	_ = c.PgConn().Conn().Close()
	for begin := time.Now(); ; time.Sleep(5 * kit.Ms) {
		config := w.faults.at.Config(w.db.T).ConnConfig
		c.noteReadings(config)
		conn, err := pgx.ConnectConfig(context.Background(), config)
		for isThere := true; err == nil && isThere; {
			err = conn.QueryRow(context.Background(), "select exists (select from pg_stat_activity where application_name = $1)", ended).Scan(&isThere)
		}
		if err == nil {
			c.Conn = conn
			w.db.T.Cleanup(func() { _ = conn.Close(context.Background()) })
			return nil
		}
		if !isOutage(err) || time.Since(begin) > kit.Patience {
			return err
		}
	}
}

// isOutage reports whether a connection was refused, lost, or ended by the server.
func isOutage(err error) bool {
	answer := kit.PgError(err)
	return err != nil && (answer == nil || strings.HasPrefix(answer.Code, "57P") || answer.SeverityUnlocalized == "FATAL")
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
		kit.Edit{File: "sql/acquire.sql", Old: "if not v_policy.plain or", New: "if not v_policy.plain or v_policy.next or"})
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

// The disk fills up under load, again and again. Either the tables cannot grow, which is an error, or the WAL cannot, which crashes the
// server. With space again, calls succeed. Every decision was true, and no bucket has more or fewer tokens than the ledger explains.
func TestTorture_DiskFullLeavesEveryDecisionTrue(t *testing.T) {
	run := kit.Torture(t, 2)
	server, dir := pgtest.PrivateOnDisk(t, 192, "synchronous_commit=on", "min_wal_size=32MB", "max_wal_size=48MB")
	db := kit.CreateDB(t, server, kit.PrivateName)
	l := kit.NewLedger(db, "p", 300, 5*time.Second)

	fills, crashes, stops := 0, 0, 0
	for ; run.GoesOn() || l.Failed["53100"] == 0 && fills < 20; fills++ {
		pool := kit.NoError(pgxpool.New(t.Context(), db.URL))(t)
		combiner := client.NewCombiner(pool)
		callers := l.Load(t, client.New(pool), combiner)

		l.AwaitAnswers(t, 500)
		remove := fill(t, dir)
		if fills%2 > 0 {
			breakLog(t, db)
			crashes++
		}
		l.AwaitFailures(t, 10)
		remove()
		if startAgain(t, server) {
			stops++
		}
		l.AwaitAnswers(t, 500)
		require.NoError(t, callers.End())
		combiner.Close()
		pool.Close()

		db.Pool.Reset() // a crash ended its connections
		require.NoError(t, l.Check(db))
		db.Execute("vacuum ratelimit.buckets, ratelimit.idempotency_keys")
		run.Progress("%d times full, %d crashes, %d grants", fills, crashes, l.Granted)
	}

	require.NotZero(t, l.Failed["53100"], "the tables never lacked space")
	run.Figures("times the disk was full", fills, "of these, the server crashed for its log", crashes,
		"of these, it stayed down until it was started", stops, "refused for want of space", l.Failed["53100"], "granted", l.Granted,
		"denied", l.Denied, "answers lost, and replayed", l.Replayed, "unknown, without an idempotency key", l.Unknown)
}

// fill leaves no space on a disk.
func fill(t *testing.T, dir string) (remove func()) {
	name := filepath.Join(dir, "ballast")
	file := kit.NoError(os.Create(name))(t)
	for size := 1 << 20; size > 0; {
		if _, err := file.Write(make([]byte, size)); err != nil {
			require.ErrorIs(t, err, syscall.ENOSPC)
			size /= 2
		}
	}
	require.NoError(t, file.Close())
	return func() { require.NoError(t, os.Remove(name)) }
}

// breakLog writes WAL segments until the disk has no space for another.
func breakLog(t *testing.T, db *kit.TestDB) {
	conn, err := pgx.Connect(context.Background(), db.URL)
	for n := 0; err == nil; n++ {
		require.Less(t, n, 20)
		_, err = conn.Exec(context.Background(), "select pg_logical_emit_message(false, '', ''), pg_switch_wal()")
	}
}

// startAgain starts a server that has stopped for good.
func startAgain(t *testing.T, server *pgtest.Server) (stopped bool) {
	require.Eventually(t, func() bool {
		conn, err := pgx.Connect(context.Background(), server.URL(""))
		if err == nil {
			conn.Close(context.Background())
			return true
		}
		stopped = kit.SQLState(err) == "" && server.Start(context.Background()) == nil
		return stopped
	}, time.Minute, 100*time.Millisecond)
	return stopped
}
