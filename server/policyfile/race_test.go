package policyfile_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

const (
	before = `
policies:
  a: {capacity: 1, refill: 1, every: 1s}
  b: {capacity: 1, refill: 1, every: 1s}
`
	after = `
policies:
  a: {capacity: 2, refill: 1, every: 1s}
  b: {capacity: 2, refill: 1, every: 1s}
  c: {capacity: 2, refill: 1, every: 1s}
`
	other = `
policies:
  a: {capacity: 3, refill: 1, every: 1s}
  b: {capacity: 3, refill: 1, every: 1s}
`
)

// A stuck is an apply that has changed policy a and waits for policy b.
type stuck struct {
	conn   *pgx.Conn
	holder pgx.Tx
	done   chan error
}

func startStuck(t *testing.T, db *pgtest.DB) *stuck {
	t.Helper()
	apply(t, db.Pool, before)
	holder, err := db.Connect(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), "select from ratelimit.policies where name = 'b' for update")
	require.NoError(t, err)
	s := &stuck{conn: db.Connect(t), holder: holder, done: make(chan error, 1)}
	file := parse(t, after)
	go func() {
		_, err := policyfile.Apply(context.Background(), s.conn, file, policyfile.Options{})
		s.done <- err
	}()
	awaitLock(t, db, s.conn, "transactionid")
	return s
}

// awaitLock returns when a connection waits for a lock of a kind.
func awaitLock(t *testing.T, db *pgtest.DB, conn *pgx.Conn, kind string) {
	t.Helper()
	db.Await(t, time.Minute, "select exists (select from pg_stat_activity where pid = $1 and wait_event_type = 'Lock' and wait_event = $2)",
		conn.PgConn().PID(), kind)
}

var (
	allBefore = []string{"a 1 1 1000000 f t 86400000000 f", "b 1 1 1000000 f t 86400000000 f"}
	allAfter  = []string{"a 2 1 1000000 f t 86400000000 f", "b 2 1 1000000 f t 86400000000 f", "c 2 1 1000000 f t 86400000000 f"}
)

// A crash in the middle leaves the old policies.
func TestApply_CrashInTheMiddle(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	s := startStuck(t, db)
	db.Exec(t, "select pg_terminate_backend($1)", s.conn.PgConn().PID())
	require.Error(t, <-s.done)
	require.NoError(t, s.holder.Rollback(t.Context()))

	require.Equal(t, allBefore, policiesIn(t, db))
	require.Len(t, apply(t, db.Pool, after).Changes, 3)
	require.Equal(t, allAfter, policiesIn(t, db))
}

// Of two that apply at once the second waits, and compares with what the first has left.
func TestApply_OneAfterTheOther(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	s := startStuck(t, db)
	conn := db.Connect(t)
	type answer struct {
		*policyfile.Difference
		err error
	}
	second := make(chan answer, 1)
	file := parse(t, other)
	go func() {
		d, err := policyfile.Apply(context.Background(), conn, file, policyfile.Options{Prune: true})
		second <- answer{d, err}
	}()
	awaitLock(t, db, conn, "advisory")
	require.NoError(t, s.holder.Rollback(t.Context()))
	require.NoError(t, <-s.done)
	d := <-second
	require.NoError(t, d.err)
	require.Equal(t, `~ policy "a": capacity 2 -> 3
~ policy "b": capacity 2 -> 3
- policy "c": dropped with 0 buckets, 0 overrides and 0 idempotency keys
`, d.String())
	require.Equal(t, []string{"a 3 1 1000000 f t 86400000000 f", "b 3 1 1000000 f t 86400000000 f"}, policiesIn(t, db))
}

// Whoever waits does so for as long as lock_timeout says, if it says anything.
func TestApply_WaitsNoLongerThanTold(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	s := startStuck(t, db)
	conn := db.Connect(t)
	_, err := conn.Exec(t.Context(), "set lock_timeout = '10ms'")
	require.NoError(t, err)
	_, err = policyfile.Apply(t.Context(), conn, parse(t, other), policyfile.Options{})
	require.ErrorContains(t, err, "another session holds this, so try again when it has ended")
	require.NoError(t, s.holder.Rollback(t.Context()))
	require.NoError(t, <-s.done)
	require.Equal(t, allAfter, policiesIn(t, db))
}
