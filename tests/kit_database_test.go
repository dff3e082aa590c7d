package tests

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// t0 is where fixed clocks start: a day before summer time begins in Europe, so that an answer that
// counts calendar days instead of hours comes out wrong.
var t0 = time.Date(2024, 3, 30, 12, 0, 0, 0, time.UTC)

const (
	us     = time.Microsecond
	ms     = time.Millisecond
	second = time.Second
	aDay   = 24 * time.Hour // too long to refill a token during a test

	day = 24 * 60 * 60 * 1_000_000 // in microseconds
)

// A testDB is the private database of one test. Its clock is the server's until the test first sets
// it; from then on it stands still between calls.
//
//	db := newDB(t)
//	db.definePolicy("p", 3, 10, time.Second) // capacity, refill, every
//	require.Equal(t, allowed(1, 200*time.Millisecond, 3), db.acquireAt(t0, "p", "k", 2))
//
// Its methods fail the test from the test's own goroutine; other goroutines, and tests of errors
// and transactions, call the functions acquire, peek and refund, which return the error.
type testDB struct {
	*pgtest.DB
	t     testing.TB
	fixed sync.Once
}

func newDB(t testing.TB) *testDB { return &testDB{DB: pgtest.New(t), t: t} }

// in is the same database for a subtest.
func (db *testDB) in(t testing.TB) *testDB { return &testDB{DB: db.DB, t: t} }

// exec runs SQL and fails the test when it cannot.
func (db *testDB) exec(sql string, args ...any) { db.Exec(db.t, sql, args...) }

// setClock stops the clock of every decision at an instant, to the microsecond.
func (db *testDB) setClock(now time.Time) {
	db.fixed.Do(func() {
		db.exec(`
			create table if not exists public.test_clock (now timestamptz not null, row integer primary key);
			insert into public.test_clock values ('epoch', 1) on conflict do nothing;
			grant select on public.test_clock to public;
			create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe
			as $$ select now from public.test_clock where row = 1 $$`)
	})
	db.exec("update public.test_clock set now = $1", now)
}

// setTimeZone changes the time zone of the database, for tests of what must not depend on it.
func (db *testDB) setTimeZone(name string) {
	db.exec("alter database " + pgx.Identifier{db.Name}.Sanitize() + " set timezone = '" + name + "'")
	db.Pool.Reset() // the connections there are have the old one
}

// definePolicy defines or changes a policy; what no option names is left to its default or as it is.
func (db *testDB) definePolicy(name string, capacity, refill int64, every time.Duration, opts ...policyOption) {
	var p policyOptions
	for _, opt := range opts {
		opt(&p)
	}
	db.exec("select ratelimit_define_policy($1, $2, $3, $4, $5, $6, $7)", name, capacity, refill, interval(every), p.stepped, p.durable, p.remember)
}

type policyOptions struct {
	stepped, durable *bool
	remember         pgtype.Interval
}

type policyOption func(*policyOptions)

var (
	yes, no = true, false

	stepped    policyOption = func(p *policyOptions) { p.stepped = &yes }
	continuous policyOption = func(p *policyOptions) { p.stepped = &no }
	durable    policyOption = func(p *policyOptions) { p.durable = &yes }
	ephemeral  policyOption = func(p *policyOptions) { p.durable = &no }
)

func remember(d time.Duration) policyOption {
	return func(p *policyOptions) { p.remember = interval(d) }
}

// interval has hours and no days, as time.Duration does.
func interval(d time.Duration) pgtype.Interval {
	return pgtype.Interval{Microseconds: d.Microseconds(), Valid: true}
}

func (db *testDB) acquireAt(at time.Time, policy, key string, cost int64, idempotencyKey ...string) decision {
	db.setClock(at)
	return db.acquire(policy, key, cost, idempotencyKey...)
}

func (db *testDB) acquire(policy, key string, cost int64, idempotencyKey ...string) decision {
	return db.must(acquire(db.Pool, policy, key, cost, idempotencyKey...))
}

func (db *testDB) peekAt(at time.Time, policy, key string, cost int64) decision {
	db.setClock(at)
	return db.must(peek(db.Pool, policy, key, cost))
}

func (db *testDB) refundAt(at time.Time, policy, key string, amount int64) decision {
	db.setClock(at)
	return db.must(refund(db.Pool, policy, key, amount))
}

func (db *testDB) must(d decision, err error) decision {
	require.NoError(db.t, err)
	return d
}

func (db *testDB) reset(policy, key string) { db.exec("select ratelimit_reset($1, $2)", policy, key) }

func (db *testDB) dropPolicy(name string) { db.exec("select ratelimit_drop_policy($1)", name) }

// cleanup runs one batch and returns how many buckets and idempotency keys it deleted.
func (db *testDB) cleanup() (buckets, keys int64) {
	d, err := cleanup(db.Pool, 10_000)
	require.NoError(db.t, err)
	return d.buckets, d.keys
}

// A bucket is a row of ratelimit.buckets or ratelimit.ephemeral_buckets.
type bucket struct {
	Level      int64 // microtokens
	RefilledAt time.Time
}

// bucket returns the row of a bucket, nil when it has none.
func (db *testDB) bucket(policy, key string) *bucket {
	rows, err := db.Pool.Query(context.Background(), `
		select b.level, b.refilled_at
		  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b
		  join ratelimit.policies as p on p.id = b.policy_id
		 where p.name = $1 and b.key = $2`, policy, key)
	require.NoError(db.t, err)
	found, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[bucket])
	require.NoError(db.t, err)
	if len(found) == 0 {
		return nil
	}
	require.Len(db.t, found, 1)
	found[0].RefilledAt = found[0].RefilledAt.UTC()
	return found[0]
}

// putBucket writes the row of a bucket as if calls had brought it there; a level below zero is debt.
func (db *testDB) putBucket(policy, key string, b bucket) {
	var durable bool
	require.NoError(db.t, db.Pool.QueryRow(context.Background(), "select durable from ratelimit.policies where name = $1", policy).Scan(&durable))
	table := "ratelimit.ephemeral_buckets"
	if durable {
		table = "ratelimit.buckets"
	}
	db.exec("insert into "+table+` (policy_id, key, level, refilled_at, due_at)
		select id, $2, $3, $4, $4 from ratelimit.policies where name = $1
		on conflict (policy_id, key) do update set level = excluded.level, refilled_at = excluded.refilled_at`,
		policy, key, b.Level, b.RefilledAt)
}

// column returns the texts that a query with one column finds.
func column(t testing.TB, db *pgtest.DB, sql string, args ...any) []string {
	return columnOf(t, db.Pool, sql, args...)
}

// columnOf is column in a session or a transaction.
func columnOf(t require.TestingT, q rowsQuerier, sql string, args ...any) []string {
	rows, err := q.Query(context.Background(), sql, args...)
	require.NoError(t, err, sql)
	values, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err, sql)
	return values
}

// left returns the tokens that a bucket holds now.
func (db *testDB) left(policy, key string) int64 {
	return db.must(peek(db.Pool, policy, key, 0)).Remaining
}

// number runs a query for one number.
func (db *testDB) number(sql string, args ...any) (n int64) {
	require.NoError(db.t, db.Pool.QueryRow(context.Background(), sql, args...).Scan(&n), sql)
	return n
}

var stateTables = []string{"ratelimit.buckets", "ratelimit.ephemeral_buckets", "ratelimit.idempotency_keys", "ratelimit.ephemeral_idempotency_keys"}

// rows returns every row of the state tables with its physical address and the transactions that
// wrote and locked it: equal before and after, nothing was written or locked.
func (db *testDB) rows() []string {
	var selects []string
	for _, table := range stateTables {
		selects = append(selects, "select format('%s %s %s %s %s', tableoid::regclass, ctid, xmin, xmax, t) from "+table+" as t")
	}
	return column(db.t, db.DB, strings.Join(selects, " union all ")+" order by 1")
}

// state returns everything of buckets and idempotency keys that a later call could see.
func state(t require.TestingT, q rowsQuerier) []string {
	return columnOf(t, q, `
		select format('%s %s %s %s', policy_id, key, level, refilled_at)
		  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b
		union all
		select k::text
		  from (table ratelimit.idempotency_keys union all table ratelimit.ephemeral_idempotency_keys) as k
		 order by 1`)
}

// errorOf is the error of a call whose result nobody needs.
func errorOf[T any](_ T, err error) error { return err }

// requireState requires the SQLSTATE of an error.
func requireState(t require.TestingT, state string, err error, about ...any) {
	if sqlState(err) != state {
		require.FailNow(t, fmt.Sprintf("not %s but %v", state, err), about...)
	}
}
