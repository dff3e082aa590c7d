package torture

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

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
