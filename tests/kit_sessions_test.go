package tests

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// patience bounds every wait for an event that comes, sooner or later; only a broken test takes as long.
const patience = time.Minute

// A session is a connection of its own, with transactions of its own.
type session struct {
	*pgx.Conn
	db *testDB
}

func (db *testDB) session() *session { return &session{Conn: db.Connect(db.t), db: db} }

// begin returns a session in an open transaction.
func (db *testDB) begin() *session {
	s := db.session()
	s.exec("begin")
	return s
}

// hasty returns a session that fails with 55P03 instead of waiting for a lock that others keep.
func (db *testDB) hasty() *session {
	s := db.session()
	s.exec("set lock_timeout = '50ms'")
	return s
}

func (s *session) exec(sql string, args ...any) {
	require.NoError(s.db.t, errorOf(s.Exec(context.Background(), sql, args...)), sql)
}

func (s *session) acquire(policy, key string, cost int64, idempotencyKey ...string) decision {
	return s.db.must(acquire(s, policy, key, cost, idempotencyKey...))
}

// start makes a call that may wait for other sessions.
func (s *session) start(call func(q querier) (decision, error)) *pending {
	p := &pending{session: s, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.decision, p.err = call(s)
	}()
	return p
}

func (s *session) startAcquire(policy, key string, cost int64, idempotencyKey ...string) *pending {
	return s.start(func(q querier) (decision, error) { return acquire(q, policy, key, cost, idempotencyKey...) })
}

// A pending call is under way in another goroutine.
type pending struct {
	session  *session
	done     chan struct{}
	decision decision
	err      error
}

// awaitBlockedBy returns when the call waits for a lock that the holder has.
func (p *pending) awaitBlockedBy(holder *session) {
	t := p.session.db.t
	p.session.db.Await(t, patience, `
		select exists (select from pg_stat_activity
		                where pid = $1 and wait_event_type = 'Lock' and $2 = any (pg_blocking_pids(pid)))`,
		p.session.PgConn().PID(), holder.PgConn().PID())
}

func (p *pending) result() (decision, error) {
	select {
	case <-p.done:
	case <-time.After(patience):
		require.FailNow(p.session.db.t, "the call still waits")
	}
	return p.decision, p.err
}

func (p *pending) answer() decision { return p.session.db.must(p.result()) }

// together makes n calls at the same time, on as many connections as the pool has.
func (db *testDB) together(n int, call func(i int, q querier) (decision, error)) []decision {
	decisions := make([]decision, n)
	crowd(db.t, n, func(i int) (err error) {
		decisions[i], err = call(i, db.Pool)
		return err
	})
	return decisions
}

// crowd runs callers at the same time, and fails the test with the first error.
func crowd(t testing.TB, callers int, call func(caller int) error) {
	var ready sync.WaitGroup
	ready.Add(callers)
	var calls errgroup.Group
	for caller := range callers {
		calls.Go(func() error {
			ready.Done()
			ready.Wait()
			return call(caller)
		})
	}
	require.NoError(t, calls.Wait())
}

// crowds bounds how many tests keep dozens of connections at once; servers take about a hundred.
var crowds = make(chan struct{}, 2)

// newCrowdDB is newDB for one of them.
func newCrowdDB(t testing.TB, connections int) *testDB {
	crowds <- struct{}{}
	t.Cleanup(func() { <-crowds })
	db := newDB(t)
	db.warm(connections)
	return db
}

// warm opens connections, so that calls made together do not come one by one for connecting.
func (db *testDB) warm(connections int) {
	for range min(connections, int(db.Pool.Config().MaxConns)) {
		conn, err := db.Pool.Acquire(context.Background())
		require.NoError(db.t, err)
		defer conn.Release()
	}
}
