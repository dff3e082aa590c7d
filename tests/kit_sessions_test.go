package tests

import (
	"context"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// patience bounds every wait for another session; only a broken test takes as long.
const patience = 20 * time.Second

// A session is a connection of its own, with transactions of its own.
type session struct {
	*pgx.Conn
	db *testDB
}

func (db *testDB) session() *session {
	db.t.Helper()
	return &session{Conn: db.Connect(db.t), db: db}
}

// begin returns a session in an open transaction.
func (db *testDB) begin() *session {
	db.t.Helper()
	s := db.session()
	s.exec("begin")
	return s
}

// hasty returns a session that fails with 55P03 instead of waiting for a lock that others keep.
func (db *testDB) hasty() *session {
	db.t.Helper()
	s := db.session()
	s.exec("set lock_timeout = '50ms'")
	return s
}

func (s *session) exec(sql string, args ...any) {
	s.db.t.Helper()
	_, err := s.Exec(context.Background(), sql, args...)
	require.NoError(s.db.t, err, sql)
}

func (s *session) acquire(policy, key string, cost int64, idempotencyKey ...string) decision {
	s.db.t.Helper()
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
	t.Helper()
	p.session.db.Await(t, patience, `
		select exists (select from pg_stat_activity
		                where pid = $1 and wait_event_type = 'Lock' and $2 = any (pg_blocking_pids(pid)))`,
		p.session.PgConn().PID(), holder.PgConn().PID())
}

func (p *pending) result() (decision, error) {
	p.session.db.t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		require.FailNow(p.session.db.t, "the call still waits")
	}
	return p.decision, p.err
}

func (p *pending) answer() decision {
	p.session.db.t.Helper()
	return p.session.db.must(p.result())
}

// together makes n calls at the same time, on as many connections as the pool has.
func (db *testDB) together(n int, call func(i int, q querier) (decision, error)) []decision {
	db.t.Helper()
	var (
		decisions = make([]decision, n)
		errs      = make([]error, n)
		ready     sync.WaitGroup
		done      sync.WaitGroup
		start     = make(chan struct{})
	)
	ready.Add(n)
	for i := range n {
		done.Go(func() {
			ready.Done()
			<-start
			decisions[i], errs[i] = call(i, db.Pool)
		})
	}
	ready.Wait()
	close(start)
	done.Wait()
	for _, err := range errs {
		require.NoError(db.t, err)
	}
	return decisions
}

// crowds bounds how many tests keep dozens of connections at once; servers take about a hundred.
var crowds = make(chan struct{}, 2)

// newCrowdDB is newDB for one of them.
func newCrowdDB(t testing.TB, connections int) *testDB {
	t.Helper()
	crowds <- struct{}{}
	t.Cleanup(func() { <-crowds })
	db := newDB(t)
	db.warm(connections)
	return db
}

// warm opens connections, so that calls made together do not come one by one for connecting.
func (db *testDB) warm(connections int) {
	db.t.Helper()
	for range min(connections, int(db.Pool.Config().MaxConns)) {
		conn, err := db.Pool.Acquire(context.Background())
		require.NoError(db.t, err)
		defer conn.Release()
	}
}

func count(decisions []decision, which func(decision) bool) (n int) {
	for _, d := range decisions {
		if which(d) {
			n++
		}
	}
	return n
}

func isAllowed(d decision) bool  { return d.Allowed }
func isReplayed(d decision) bool { return d.Replayed }

// left is what a bucket holds by now.
func (db *testDB) left(policy, key string) int64 {
	db.t.Helper()
	return db.must(peek(db.Pool, policy, key, 0)).Remaining
}

// number runs a query for one number.
func (db *testDB) number(sql string, args ...any) (n int64) {
	db.t.Helper()
	require.NoError(db.t, db.Pool.QueryRow(context.Background(), sql, args...).Scan(&n), sql)
	return n
}

// A mutation changes the one place in a function that its pattern matches, in the private database
// of one test: a branch is taken away, to see that its test fails without it.
type mutation struct {
	pattern     string // a regexp in which a space is any white space
	replacement string
}

// mutate changes ratelimit_acquire, or another function, and returns the way back.
func (db *testDB) mutate(m mutation, function ...string) (undo func()) {
	db.t.Helper()
	name := append(function, "ratelimit_acquire")[0]
	var source string
	require.NoError(db.t, db.Pool.QueryRow(context.Background(),
		"select pg_get_functiondef($1::regproc)", name).Scan(&source))
	pattern := regexp.MustCompile(strings.ReplaceAll(m.pattern, " ", `\s+`))
	require.Len(db.t, pattern.FindAllString(source, -1), 1, "places in %s that match\n%s", name, m.pattern)
	db.exec(pattern.ReplaceAllString(source, m.replacement))
	return func() { db.exec(source) }
}

// A gate stops its own sessions at one place in ratelimit_acquire, so that others can overtake them.
type gate struct {
	db     *testDB
	keeper *session
	remove func()
}

// gateBefore puts a gate before the place that the pattern, as of a mutation, matches.
func (db *testDB) gateBefore(pattern string) *gate {
	db.t.Helper()
	remove := db.mutate(mutation{pattern, `
		perform pg_advisory_xact_lock_shared(1) where current_setting('application_name') = 'gated';
		$0`})
	g := &gate{db, db.session(), remove}
	g.keeper.exec("select pg_advisory_lock(1)")
	return g
}

func (g *gate) session() *session {
	g.db.t.Helper()
	s := g.db.session()
	s.exec("set application_name = 'gated'")
	return s
}

func (g *gate) open() {
	g.db.t.Helper()
	g.keeper.exec("select pg_advisory_unlock(1)")
}

// newPrivateDB returns a database on a server of its own.
func newPrivateDB(t testing.TB, settings ...string) (*testDB, *pgtest.Server) {
	t.Helper()
	server := pgtest.Private(t, settings...)
	return newDBOn(t, server), server
}

// newDBOn returns the database of a private server.
func newDBOn(t testing.TB, server *pgtest.Server) *testDB {
	t.Helper()
	ctx := context.Background()
	admin, err := pgx.Connect(ctx, server.URL(""))
	require.NoError(t, err)
	_, err = admin.Exec(ctx, "create database ratelimit_test template template0")
	require.NoError(t, err)
	require.NoError(t, admin.Close(ctx))

	db := openDB(t, server)
	conn := db.Connect(t)
	require.NoError(t, migrations.Up(ctx, conn))
	return db
}

// openDB connects to the database of newPrivateDB, as one does again after a restart.
func openDB(t testing.TB, server *pgtest.Server) *testDB {
	t.Helper()
	const name = "ratelimit_test"
	pool, err := pgxpool.New(context.Background(), server.URL(name))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return &testDB{DB: &pgtest.DB{Pool: pool, URL: server.URL(name), Name: name}, t: t}
}

var stateTables = []string{
	"ratelimit.buckets", "ratelimit.ephemeral_buckets",
	"ratelimit.idempotency_keys", "ratelimit.ephemeral_idempotency_keys",
}

// rows returns every row of the state tables with its physical address and the transactions that
// wrote and locked it: equal before and after, nothing was written or locked.
func (db *testDB) rows() []string {
	db.t.Helper()
	var selects []string
	for _, table := range stateTables {
		selects = append(selects, "select format('%s %s %s %s %s', tableoid::regclass, ctid, xmin, xmax, t) from "+table+" as t")
	}
	rows, err := db.Pool.Query(context.Background(), strings.Join(selects, " union all ")+" order by 1")
	require.NoError(db.t, err)
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(db.t, err)
	return found
}
