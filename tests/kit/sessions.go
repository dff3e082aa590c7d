package kit

import (
	"context"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// Patience bounds every wait for an event that comes, sooner or later; only a broken test takes as long.
const Patience = time.Minute

// A Session is a connection of its own, with transactions of its own.
type Session struct {
	*pgx.Conn
	Db *TestDB
}

func (db *TestDB) Session() *Session { return &Session{Conn: db.Connect(db.T), Db: db} }

func (db *TestDB) Begin() *Session {
	return db.Session().Execute("begin")
}

// Hasty returns a session that fails with 55P03 instead of waiting for a lock that others keep.
func (db *TestDB) Hasty() *Session {
	return db.Session().Execute("set lock_timeout = '50ms'")
}

func (s *Session) Execute(sql string, args ...any) *Session {
	require.NoError(s.Db.T, ErrorOf(s.Exec(context.Background(), sql, args...)), sql)
	return s
}

func (s *Session) Acquire(policy, key string, cost int64, idempotencyKey ...string) Decision {
	return s.Db.Must(Acquire(s, policy, key, cost, idempotencyKey...))
}

// Start makes a call that may wait for other sessions.
func (s *Session) Start(call func(q Querier) (Decision, error)) *Pending {
	p := &Pending{Session: s, Done: make(chan struct{})}
	go func() {
		defer close(p.Done)
		p.Decision, p.Err = call(s)
	}()
	return p
}

func (s *Session) StartAcquire(policy, key string, cost int64, idempotencyKey ...string) *Pending {
	return s.Start(func(q Querier) (Decision, error) { return Acquire(q, policy, key, cost, idempotencyKey...) })
}

// A Pending call is under way in another goroutine.
type Pending struct {
	Session  *Session
	Done     chan struct{}
	Decision Decision
	Err      error
}

// BlockedBy returns the call when it waits for a lock that the holder has.
func (p *Pending) BlockedBy(holder *Session) *Pending {
	require.True(p.Session.Db.T, p.waits("select count(*) from pg_stat_activity where pid = $1 and wait_event_type = 'Lock' and $2 = any (pg_blocking_pids(pid))",
		p.Session.PgConn().PID(), holder.PgConn().PID()), "the call ended, and did not wait for the holder")
	return p
}

// AwaitLockOrEnd returns when the call waits for a lock or is over.
func (p *Pending) AwaitLockOrEnd() (over bool) {
	return !p.waits("select count(*) from pg_locks where pid = $1 and not granted", p.Session.PgConn().PID())
}

// waits returns true when a query counts something, and false when the call is over and it still counts nothing.
func (p *Pending) waits(sql string, args ...any) bool {
	for began, over := time.Now(), false; ; time.Sleep(Ms) {
		if p.Session.Db.Number(sql, args...) > 0 {
			return true
		}
		if over {
			return false
		}
		require.Less(p.Session.Db.T, time.Since(began), Patience, "the call neither waits nor ends")
		select {
		case <-p.Done:
			over = true
		default:
		}
	}
}

func (p *Pending) Result() (Decision, error) {
	select {
	case <-p.Done:
	case <-time.After(Patience):
		require.FailNow(p.Session.Db.T, "the call still waits")
	}
	return p.Decision, p.Err
}

func (p *Pending) Answer() Decision { return p.Session.Db.Must(p.Result()) }

// Crowd runs callers at the same time, and fails the test with the first error.
func Crowd(t testing.TB, callers int, call func(caller int) error) {
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

// NewCrowdDB is NewDB for one of them.
func NewCrowdDB(t testing.TB, connections int) *TestDB {
	crowds <- struct{}{}
	t.Cleanup(func() { <-crowds })
	db := NewDB(t)
	db.Warm(connections)
	return db
}

// Warm opens connections, so that calls made together do not come one by one for connecting.
func (db *TestDB) Warm(connections int) {
	for range min(connections, int(db.Pool.Config().MaxConns)) {
		conn := NoError(db.Pool.Acquire(context.Background()))(db.T)
		defer conn.Release()
	}
}

// A Mutation changes the one place in a function that its pattern matches, in the private database
// of one test: a branch is removed, to see its test fail.
type Mutation struct {
	Pattern     string // a regexp in which a space is any white space
	Replacement string
}

// Mutate changes ratelimit_acquire, or another function, and returns the way back.
func (db *TestDB) Mutate(m Mutation, function ...string) (undo func()) {
	name := append(function, "ratelimit_acquire")[0]
	source := One[string](db.T, db.Pool, "select pg_get_functiondef($1::regproc)", name)
	pattern := regexp.MustCompile(strings.ReplaceAll(m.Pattern, " ", `\s+`))
	require.Len(db.T, pattern.FindAllString(source, -1), 1, "places in %s that match\n%s", name, m.Pattern)
	db.Execute(pattern.ReplaceAllString(source, m.Replacement))
	return func() { db.Execute(source) }
}

// A Gate stops its own sessions at one place in a function, so that others can overtake them.
type Gate struct {
	Db     *TestDB
	Keeper *Session
	Remove func()
}

// GateBefore puts a gate before the place in ratelimit_acquire, or another function, that the pattern, as of a mutation, matches.
func (db *TestDB) GateBefore(pattern string, function ...string) *Gate {
	remove := db.Mutate(Mutation{pattern, `
		perform pg_advisory_xact_lock_shared(1) where current_setting('application_name') = 'gated';
		$0`}, function...)
	return &Gate{db, db.Session().Execute("select pg_advisory_lock(1)"), remove}
}

func (g *Gate) Session() *Session {
	return g.Db.Session().Execute("set application_name = 'gated'")
}

func (g *Gate) Open() { g.Keeper.Execute("select pg_advisory_unlock(1)") }

func PoolAs(t *testing.T, db *pgtest.DB, role string) *pgxpool.Pool {
	return Pool(t, db.URL, func(config *pgxpool.Config) {
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return ErrorOf(conn.Exec(ctx, "set role "+role)) }
	})
}
