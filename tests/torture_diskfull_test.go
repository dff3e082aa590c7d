package tests

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// The disk fills up under load, again and again. Either the tables cannot grow, which is an error, or the WAL cannot, which crashes the
// server. With space again, calls succeed. Every decision was true, and no bucket has more or fewer tokens than the ledger explains.
func TestTorture_DiskFull(t *testing.T) {
	run := torture(t, 2)
	server, dir := pgtest.PrivateOnDisk(t, 192, "synchronous_commit=on", "min_wal_size=32MB", "max_wal_size=48MB")
	db := createDB(t, server, privateName)
	l := newLedger(db, "p", 300, 5*time.Second)

	fills, crashes, stops := 0, 0, 0
	for ; run.goesOn(); fills++ {
		pool, err := pgxpool.New(t.Context(), db.URL)
		require.NoError(t, err)
		combiner := client.NewCombiner(pool)
		callers := l.load(t, client.New(pool), combiner)

		l.awaitAnswers(t, 500)
		remove := fill(t, dir)
		if fills%2 > 0 {
			breakLog(t, db)
			crashes++
		}
		l.awaitFailures(t, 10)
		remove()
		if startAgain(t, server) {
			stops++
		}
		l.awaitAnswers(t, 500)
		require.NoError(t, callers.end())
		combiner.Close()
		pool.Close()

		db.Pool.Reset() // a crash ended its connections
		require.NoError(t, l.check(db))
		db.exec("vacuum ratelimit.buckets, ratelimit.idempotency_keys")
		run.progress("%d times full, %d crashes, %d grants", fills, crashes, l.granted)
	}

	require.NotZero(t, l.failed["53100"])
	run.figures("times the disk was full", fills, "of these, the server crashed for its log", crashes,
		"of these, it stayed down until it was started", stops, "refused for want of space", l.failed["53100"], "granted", l.granted,
		"denied", l.denied, "answers lost, and replayed", l.replayed, "unknown, without an idempotency key", l.unknown)
}

// fill leaves no space on a disk.
func fill(t *testing.T, dir string) (remove func()) {
	name := filepath.Join(dir, "ballast")
	file, err := os.Create(name)
	require.NoError(t, err)
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
func breakLog(t *testing.T, db *testDB) {
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
		stopped = sqlState(err) == "" && server.Start(context.Background()) == nil
		return stopped
	}, time.Minute, 100*time.Millisecond)
	return stopped
}
