// Package kit has what tests of several subjects use: a database with a clock that the test sets, calls and their answers,
// sessions, servers, roles, the books of what was granted, and functions without one of their branches.
package kit

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// T0 is where fixed clocks start: a day before summer time begins in Europe, so that an answer that
// counts calendar days instead of hours comes out wrong.
var T0 = time.Date(2024, 3, 30, 12, 0, 0, 0, time.UTC)

const (
	Us     = time.Microsecond
	Ms     = time.Millisecond
	Second = time.Second
	ADay   = 24 * time.Hour // too long to refill a token during a test

	Day = 24 * 60 * 60 * 1_000_000 // in microseconds
)

// A TestDB is the private database of one test. Its clock is the server's until the test first sets
// it; from then on it stands still between calls.
//
// Its methods fail the test from the test's own goroutine; other goroutines, and tests of errors
// and transactions, call the functions Acquire, Peek and Refund, which return the error.
type TestDB struct {
	*pgtest.DB
	T     testing.TB
	fixed sync.Once
}

func NewDB(t testing.TB) *TestDB { return &TestDB{DB: pgtest.New(t), T: t} }

// In is the same database for a subtest.
func (db *TestDB) In(t testing.TB) *TestDB { return &TestDB{DB: db.DB, T: t} }

func (db *TestDB) Execute(sql string, args ...any) { db.Exec(db.T, sql, args...) }

// SetClock stops the clock of every decision at an instant, to the microsecond.
func (db *TestDB) SetClock(now time.Time) {
	db.fixed.Do(func() {
		db.Execute(`
			create table if not exists public.test_clock (now timestamptz not null, row integer primary key);
			insert into public.test_clock values ('epoch', 1) on conflict do nothing;
			grant select on public.test_clock to public;
			create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe
			as $$ select now from public.test_clock where row = 1 $$`)
	})
	db.Execute("update public.test_clock set now = $1", now)
}

// ClockPerSession lets a test set the clock of one session, test.now, which leaves no row versions.
func (db *TestDB) ClockPerSession() {
	db.Execute(`
		create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe
		as $$ select pg_catalog.current_setting('test.now')::timestamptz $$`)
}

// SetTimeZone changes the time zone of the database, for tests of what must not depend on it.
func (db *TestDB) SetTimeZone(name string) {
	db.Execute("alter database " + pgx.Identifier{db.Name}.Sanitize() + " set timezone = '" + name + "'")
	db.Pool.Reset() // the connections there are have the old one
}

// DefinePolicy defines or changes a policy; what no option names is left to its default or as it is.
func (db *TestDB) DefinePolicy(name string, capacity, refill int64, every time.Duration, opts ...PolicyOption) {
	p := optionsOf(opts)
	db.Execute("select ratelimit_define_policy($1, $2, $3, $4, $5, $6, $7)", name, capacity, refill, Interval(every), p.stepped, p.Durable, p.remember)
}

type PolicyOptions struct {
	stepped, Durable *bool
	remember         pgtype.Interval
}

type PolicyOption func(*PolicyOptions)

func optionsOf(opts []PolicyOption) (p PolicyOptions) {
	for _, opt := range opts {
		opt(&p)
	}
	return p
}

var (
	Stepped    PolicyOption = func(p *PolicyOptions) { p.stepped = new(true) }
	Continuous PolicyOption = func(p *PolicyOptions) { p.stepped = new(false) }
	Durable    PolicyOption = func(p *PolicyOptions) { p.Durable = new(true) }
	Ephemeral  PolicyOption = func(p *PolicyOptions) { p.Durable = new(false) }
)

func Remember(d time.Duration) PolicyOption {
	return func(p *PolicyOptions) { p.remember = Interval(d) }
}

// Interval has hours and no days, as time.Duration does.
func Interval(d time.Duration) pgtype.Interval {
	return pgtype.Interval{Microseconds: d.Microseconds(), Valid: true}
}

func (db *TestDB) AcquireAt(at time.Time, policy, key string, cost int64, idempotencyKey ...string) Decision {
	db.SetClock(at)
	return db.Acquire(policy, key, cost, idempotencyKey...)
}

func (db *TestDB) Acquire(policy, key string, cost int64, idempotencyKey ...string) Decision {
	return db.Must(Acquire(db.Pool, policy, key, cost, idempotencyKey...))
}

func (db *TestDB) PeekAt(at time.Time, policy, key string, cost int64) Decision {
	db.SetClock(at)
	return db.Must(Peek(db.Pool, policy, key, cost))
}

func (db *TestDB) RefundAt(at time.Time, policy, key string, amount int64) Decision {
	db.SetClock(at)
	return db.Must(Refund(db.Pool, policy, key, amount))
}

func (db *TestDB) Must(d Decision, err error) Decision {
	require.NoError(db.T, err)
	return d
}

func (db *TestDB) Reset(policy, key string) {
	db.Execute("select ratelimit_reset($1, $2)", policy, key)
}

func (db *TestDB) DropPolicy(name string) { db.Execute("select ratelimit_drop_policy($1)", name) }

// A Bucket is a row of ratelimit.buckets or ratelimit.ephemeral_buckets.
type Bucket struct {
	Level      int64 // microtokens
	RefilledAt time.Time
}

func (db *TestDB) Bucket(policy, key string) *Bucket {
	rows := NoError(db.Pool.Query(context.Background(), `
		select b.level, b.refilled_at
		  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b
		  join ratelimit.policies as p on p.id = b.policy_id
		 where p.name = $1 and b.key = $2`, policy, key))(db.T)
	found := NoError(pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[Bucket]))(db.T)
	if len(found) == 0 {
		return nil
	}
	require.Len(db.T, found, 1)
	found[0].RefilledAt = found[0].RefilledAt.UTC()
	return found[0]
}

// PutBucket writes the row of a bucket as if calls had brought it there; a level below zero is debt.
func (db *TestDB) PutBucket(policy, key string, b Bucket) {
	durable := One[bool](db.T, db.Pool, "select durable from ratelimit.policies where name = $1", policy)
	table := "ratelimit.ephemeral_buckets"
	if durable {
		table = "ratelimit.buckets"
	}
	db.Execute("insert into "+table+` (policy_id, key, level, refilled_at, due_at)
		select id, $2, $3, $4, $4 from ratelimit.policies where name = $1
		on conflict (policy_id, key) do update set level = excluded.level, refilled_at = excluded.refilled_at`,
		policy, key, b.Level, b.RefilledAt)
}

func Column(t testing.TB, db *pgtest.DB, sql string, args ...any) []string {
	return ColumnOf(t, db.Pool, sql, args...)
}

// ColumnOf is column in a session or a transaction.
func ColumnOf(t require.TestingT, q Querier, sql string, args ...any) []string {
	rows, err := q.Query(context.Background(), sql, args...)
	require.NoError(t, err, sql)
	values, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err, sql)
	return values
}

func (db *TestDB) Left(policy, key string) int64 {
	return db.Must(Peek(db.Pool, policy, key, 0)).Remaining
}

func (db *TestDB) Number(sql string, args ...any) int64 {
	return One[int64](db.T, db.Pool, sql, args...)
}

func One[T any](t testing.TB, q client.Querier, sql string, args ...any) (value T) {
	require.NoError(t, q.QueryRow(context.Background(), sql, args...).Scan(&value), sql)
	return value
}

var StateTables = []string{"ratelimit.buckets", "ratelimit.ephemeral_buckets", "ratelimit.idempotency_keys", "ratelimit.ephemeral_idempotency_keys"}

// Rows returns every row of the state tables with its physical address and the transactions that
// wrote and locked it: equal before and after, nothing was written or locked.
func (db *TestDB) Rows() []string {
	var selects []string
	for _, table := range StateTables {
		selects = append(selects, "select format('%s %s %s %s %s', tableoid::regclass, ctid, xmin, xmax, t) from "+table+" as t")
	}
	return Column(db.T, db.DB, strings.Join(selects, " union all ")+" order by 1")
}

// State returns everything of buckets and idempotency keys that a later call could see.
func State(t require.TestingT, q Querier) []string {
	return ColumnOf(t, q, `
		select format('%s %s %s %s', policy_id, key, level, refilled_at)
		  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b
		union all
		select k::text
		  from (table ratelimit.idempotency_keys union all table ratelimit.ephemeral_idempotency_keys) as k
		 order by 1`)
}

// NoError returns the value of a call that must not fail: NoError(call())(t).
func NoError[T any](value T, err error) func(require.TestingT) T {
	return func(t require.TestingT) T { require.NoError(t, err); return value }
}

// ErrorOf is the error of a call whose result nobody needs.
func ErrorOf[T any](_ T, err error) error { return err }

func RequireState(t require.TestingT, state string, err error, about ...any) {
	if SQLState(err) != state {
		require.FailNow(t, fmt.Sprintf("not %s but %v", state, err), about...)
	}
}

func (db *TestDB) Now() time.Time { return One[time.Time](db.T, db.Pool, "select clock_timestamp()") }
