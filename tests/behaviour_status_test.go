package tests

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

const statusColumns = `select concat_ws('|', policy, key, remaining, coalesce(extract(epoch from retry_after)::real::text, 'never'),
	coalesce(extract(epoch from reset_after)::real::text, 'never'), capacity, overridden) from `

func TestStatus_EmptiestFirst(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, 2*second).policy("stepped", 100, 50, time.Minute, stepped, ephemeral).policy("budget", 4, 0, second)
	db.definePolicy("gone", 10, 1, aDay)
	db.setClock(t0)
	for _, take := range []struct {
		policy, key string
		cost        int64
	}{{"p", "half", 5}, {"p", "empty", 10}, {"p", "plan", 2}, {"p", "blocked", 1}, {"stepped", "k", 99}, {"budget", "k", 4}, {"p", "later", 9}, {"gone", "k", 10}} {
		db.acquire(take.policy, take.key, take.cost)
	}
	db.exec("select ratelimit_override('p', 'plan', 20), ratelimit_override('p', 'blocked', 0), ratelimit_override('p', 'half', 1, expires_at => $1)", t0.Add(second))
	db.putBucket("p", "in debt", bucket{Level: -2_500_000, RefilledAt: t0})
	db.exec("delete from ratelimit.policies where name = 'gone'") // and not yet its rows
	db.setClock(t0.Add(3 * second))
	want := []string{
		"p|in debt|-1|4|22|10|f", "budget|k|0|never|never|4|f", "p|blocked|0|never|0|0|t", "stepped|k|1|0|117|100|f", "p|empty|1|0|17|10|f",
		"p|later|2|0|15|10|f", "p|plan|9|0|21|20|t", "p|half|6|0|7|10|f",
	}
	require.Equal(t, want, column(t, db.DB, statusColumns+"ratelimit_status()"))
	require.Equal(t, want[:3], column(t, db.DB, statusColumns+"ratelimit_status(max_rows => 3)"))
	require.Equal(t, want[3:4], column(t, db.DB, statusColumns+"ratelimit_status('stepped')"))
	require.Equal(t, []string{want[1], want[3]}, column(t, db.DB, statusColumns+"ratelimit_status(key => 'k')"))
	require.Equal(t, want[6:7], column(t, db.DB, statusColumns+"ratelimit_status('p', 100, 'plan')"))
	require.Empty(t, column(t, db.DB, statusColumns+"ratelimit_status('p', key => 'k')"))
	// Its numbers are those of peek.
	rows := column(t, db.DB, "select policy || '|' || key from ratelimit_status()")
	for _, row := range rows {
		policy, key, _ := strings.Cut(row, "|")
		d := db.must(peek(db.Pool, policy, key, 1))
		require.Equal(t, []string{fmt.Sprintf("%d %d %d", d.Remaining, d.ResetAfter, d.Capacity)}, column(t, db.DB, `
			select concat_ws(' ', remaining, coalesce((extract(epoch from reset_after) * 1000000)::bigint, $3), capacity) from ratelimit_status($1) where key = $2`,
			policy, key, orNever(nil)))
	}
	for call, code := range map[string]string{
		"(key => '')": "22023", "('none', key => 'k')": "RL001", "('none')": "RL001", "('')": "22023", "(repeat('x', 513))": "22023", "(max_rows => 0)": "22023", "(max_rows => null)": "22023", "('p', -1)": "22023",
	} {
		db.refused(code, "select * from ratelimit_status"+call)
	}
	before := db.rows()
	db.exec("select * from ratelimit_status()")
	require.Equal(t, before, db.rows())
}

// findings are those of the doctor, each with its severity.
func (db *testDB) findings() []string {
	db.t.Helper()
	return column(db.t, db.DB, "select severity || ': ' || finding from ratelimit_doctor()")
}

// requireFinding fails unless the doctor finds just this, and returns what helps.
func (db *testDB) requireFinding(severity string, parts ...string) (remedy string) {
	db.t.Helper()
	findings := db.findings()
	require.Len(db.t, findings, 1)
	for _, part := range append(parts, severity+": ") {
		require.Contains(db.t, findings[0], part)
	}
	return column(db.t, db.DB, "select remedy from ratelimit_doctor()")[0]
}

// giveAway makes a role that is no superuser the owner of the package, so that the doctor has nothing to say of the owner.
func (db *testDB) giveAway() *testDB {
	db.t.Helper()
	db.follow(db.requireFinding("notice", "The owner of the package, ", " is a superuser"), "pg_monitor")
	require.Empty(db.t, db.findings())
	return db
}

// follow executes the statements of a remedy, for a new owner where the remedy leaves it open.
func (db *testDB) follow(remedy, owner string) {
	db.t.Helper()
	_, sql, found := strings.Cut(remedy, "\n")
	require.True(db.t, found, remedy)
	conn := db.Connect(db.t)
	execute(db.t, conn, strings.ReplaceAll(sql, "'new_owner'", "'"+owner+"'"), pgx.QueryExecModeSimpleProtocol)
	require.NoError(db.t, conn.Close(context.Background()))
}

func TestDoctor_OverdueRows(t *testing.T) {
	type testCase struct {
		table string
		kind  policyOption
		key   []string
		rows  int // of buckets: clean-up sees to them
	}
	inParallel(t, map[string]testCase{
		"buckets":                    {"buckets", durable, nil, 3},
		"ephemeral buckets":          {"ephemeral_buckets", ephemeral, nil, 3},
		"idempotency keys":           {"idempotency_keys", durable, []string{"i"}, 3},
		"ephemeral idempotency keys": {"ephemeral_idempotency_keys", ephemeral, []string{"i"}, 3},
		"overrides":                  {"overrides", durable, nil, 1},
	}, func(t *testing.T, test testCase) {
		db := newDB(t).giveAway()
		db.at(t0).policy("p", 10, 1, second, test.kind, remember(5*second))
		switch {
		case test.table == "overrides":
			db.exec("select ratelimit_override('p', 'k', 5, expires_at => $1)", t0.Add(5*second))
		case test.key != nil:
			db.definePolicy("p", 10, 1, 10*time.Hour, test.kind)
			fallthrough
		default:
			for i := range 3 {
				db.acquire("p", fmt.Sprint(i), 5, test.key...)
			}
		}
		db.setClock(t0.Add(10*time.Minute + 5*second))
		require.Empty(t, db.findings(), "clean-up has had no time for them")
		db.setClock(t0.Add(10*time.Minute + 6*second))
		remedy := db.requireFinding("warning", strings.Replace(fmt.Sprintf("ratelimit.%s has %d rows overdue", test.table, test.rows), "has 1 rows", "has 1 row", 1), "2024-03-30 12:00:05")
		require.Contains(t, remedy, "call ratelimit_cleanup_all();")
		db.exec("call ratelimit_cleanup_all()")
		require.Empty(t, db.findings())
	})
}

// A bucket in use is locked whenever clean-up looks, and that is no fault.
func TestDoctor_OverdueAndInUse(t *testing.T) {
	eachDurability(t, func(t *testing.T, db *testDB, durability policyOption) {
		db.giveAway().definePolicy("p", 10, 1, second, durability)
		db.acquireAt(t0, "p", "k", 5)
		db.acquireAt(t0.Add(time.Hour), "p", "k", 5)
		require.Empty(t, db.findings())
		db.setClock(t0.Add(time.Hour + 10*time.Minute + us))
		db.requireFinding("warning", "buckets has 1 row overdue")
	})
}

func TestDoctor_CountsTenThousandOverdueRowsAtMost(t *testing.T) {
	db := parallelDB(t).giveAway().policy("p", 10, 1, second)
	db.fillTables("", "p", 10_001)
	db.exec("delete from ratelimit.idempotency_keys where key in ('k1', 'k2')")
	findings := db.findings()
	require.Len(t, findings, 2)
	require.Contains(t, findings[0], "buckets has 10000 or more rows overdue")
	require.Contains(t, findings[1], "idempotency_keys has 9999 rows overdue")
}

// aMinuteAfter is a minute after the instant that a query finds.
func (db *testDB) aMinuteAfter(sql string, args ...any) time.Time {
	db.t.Helper()
	var began time.Time
	require.NoError(db.t, db.Pool.QueryRow(db.t.Context(), sql, args...).Scan(&began))
	return began.Add(time.Minute)
}

func TestDoctor_SessionsThatStayOpen(t *testing.T) {
	db := parallelDB(t).giveAway().policy("p", 10, 1, aDay)
	newDB(t).begin().exec("create temporary table t ()") // in another database
	for name, begin := range map[string]string{
		"tokens taken":  "begin; select ratelimit_acquire('p', 'k')",
		"an old view":   "begin isolation level repeatable read; select 1",
		"other changes": "begin; create temporary table t ()",
	} {
		s := db.session()
		execute(t, s.Conn, begin, pgx.QueryExecModeSimpleProtocol)
		pid := fmt.Sprint(s.PgConn().PID())
		aMinute := db.aMinuteAfter("select xact_start from pg_stat_activity where pid = $1", s.PgConn().PID())
		db.setClock(aMinute)
		require.Empty(t, db.findings(), name)
		db.setClock(aMinute.Add(us))
		remedy := db.requireFinding("warning", "Session "+pid+" of role ", "(idle in transaction)")
		require.Contains(t, remedy, "select pg_terminate_backend("+pid+");")
		s.exec("rollback")
		require.Empty(t, db.findings(), name)
	}
	// A transaction that has neither a snapshot nor a lock harms nobody.
	db.setClock(time.Now().Add(2 * time.Minute))
	idle := db.begin().run("show timezone")
	require.Empty(t, db.findings())
	idle.exec("rollback")
	db.begin().exec("select ratelimit_acquire('p', 'k')")
	_, statement, _ := strings.Cut(db.requireFinding("warning", "idle in transaction"), "stuck: ")
	statement, _, _ = strings.Cut(statement, ";")
	db.exec(statement)
	db.Await(t, patience, "select not exists (select from ratelimit_doctor())")
}

func TestDoctor_PreparedTransactions(t *testing.T) {
	t.Parallel()
	db, server := newPrivateDB(t, "max_prepared_transactions=2")
	for _, db := range []*testDB{createDB(t, server, "another"), db.giveAway()} {
		db.definePolicy("p", 10, 1, aDay)
		db.begin().run("select ratelimit_acquire('p', 'k')").run("prepare transaction 'it''s forgotten in " + db.Name + "'")
	}
	aMinute := db.aMinuteAfter("select prepared from pg_prepared_xacts where database = current_database()")
	db.setClock(aMinute)
	require.Empty(t, db.findings())
	db.setClock(aMinute.Add(us))
	_, statement, _ := strings.Cut(db.requireFinding("warning", "Prepared transaction 'it''s forgotten in "+db.Name+"'"), "or ")
	db.exec(statement)
	require.Empty(t, db.findings())
}

// What the owner cannot see is a finding, with the grant that helps.
func TestDoctor_OwnerWithoutASight(t *testing.T) {
	t.Parallel()
	owner, caller := newRole(t), newRole(t)
	db := &testDB{DB: pgtest.Empty(t), t: t}
	db.exec(fmt.Sprintf("grant create on database %s to %s; grant create, usage on schema public to %[2]s", pgx.Identifier{db.Name}.Sanitize(), owner), pgx.QueryExecModeSimpleProtocol)
	conn := connectAs(t, db.DB, owner)
	require.NoError(t, migrations.Up(t.Context(), conn))
	execute(t, conn, "grant execute on function ratelimit_doctor to "+caller)
	execute(t, conn, `create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe as $$ select clock_timestamp() + interval '2 minutes' $$`)
	open := db.begin().run("create temporary table t ()")
	asCaller := connectAs(t, db.DB, caller)
	find := func() []string {
		return columnOf(t, asCaller, "select severity || ': ' || finding || ' ' || remedy from ratelimit_doctor()")
	}
	found := find()
	require.Len(t, found, 1)
	require.Contains(t, found[0], "notice: The owner of the package, "+owner+", cannot see")
	_, grant, _ := strings.Cut(found[0], "admin option: ")
	db.exec(grant)
	found = find()
	require.Len(t, found, 1)
	require.Contains(t, found[0], fmt.Sprintf("warning: Session %d ", open.PgConn().PID()))
	open.exec("rollback")
	require.Empty(t, find())
}

// What belongs to another role is a warning with the statements that mend it, and those of a superuser are a notice, too.
func TestDoctor_Owners(t *testing.T) {
	t.Parallel()
	other := newRole(t)
	for name, test := range map[string]struct {
		change  string
		objects int
		super   bool // a superuser owns functions then
	}{
		"a function":               {"alter function ratelimit_acquire owner to %s", 1, true},
		"a helper without rights":  {"alter function ratelimit.clock owner to %s", 1, false},
		"a procedure":              {"alter procedure ratelimit_cleanup_all owner to %s", 1, false},
		"a table and a type":       {"alter table ratelimit.buckets owner to %s; alter type ratelimit.decision owner to %s", 2, false},
		"the schema":               {"alter schema ratelimit owner to %s", 1, false},
		"the doctor":               {"alter function ratelimit_doctor owner to %s", 1, true},
		"another function, a view": {"set role %s; create function ratelimit_more() returns integer language sql as 'select 1'; create view ratelimit.more as select 1", 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, owner := range []string{other, "current_user"} {
				if owner == other && (name == "the schema" || name == "the doctor") {
					continue // then which of the two is the other?
				}
				db := newDB(t).giveAway()
				db.exec("grant create on schema public, ratelimit to " + other)
				before := fingerprintOf(t, db.DB)
				if owner != other {
					owner = column(t, db.DB, "select quote_ident(current_user)")[0]
				}
				execute(t, db.Connect(t), strings.ReplaceAll(test.change, "%s", owner), pgx.QueryExecModeSimpleProtocol)
				findings, remedies := db.findings(), column(t, db.DB, "select remedy from ratelimit_doctor()")
				if owner != other && test.super {
					require.Len(t, findings, 2)
					require.Equal(t, remedies[0], remedies[1])
					require.Equal(t, "notice: The owner of the package, "+owner+", is a superuser: its functions run with all rights, whoever calls them.", findings[0])
					findings = findings[1:]
				}
				require.Equal(t, []string{fmt.Sprintf("warning: %d objects of the package belong to %s, and others to pg_monitor: calls can fail, and no role can upgrade it.",
					test.objects, owner)}, findings)
				db.follow(remedies[0], "nobody")
				require.Empty(t, db.findings())
				if !strings.Contains(test.change, "create") {
					require.Equal(t, before, fingerprintOf(t, db.DB))
				}
			}
		})
	}
}

// The statements for the objects of a superuser give away nothing that another role may have planted.
func TestDoctor_OwnersDoNotTakeOverWhatIsPlanted(t *testing.T) {
	t.Parallel()
	planter := newRole(t)
	db := newDB(t)
	db.exec("grant create on schema public to " + planter)
	execute(t, connectAs(t, db.DB, planter), "create function ratelimit_planted() returns integer language sql security definer as 'select 1'")
	require.Len(t, db.findings(), 2)
	db.follow(column(t, db.DB, "select remedy from ratelimit_doctor() where severity = 'notice'")[0], "pg_monitor")
	remedy := db.requireFinding("warning", "1 objects of the package belong to "+planter+", and others to pg_monitor")
	require.Contains(t, remedy, "What may have been planted, drop.")
	require.Equal(t, []string{planter}, column(t, db.DB, "select proowner::regrole::text from pg_proc where proname = 'ratelimit_planted'"))
	db.exec("drop function ratelimit_planted")
	require.Empty(t, db.findings())
}

func TestDoctor_Vacuum(t *testing.T) {
	t.Parallel()
	db, _ := newPrivateDB(t, "autovacuum_naptime=1h")
	db.giveAway()
	for _, table := range bucketTables {
		db.exec("alter table ratelimit." + table + " set (autovacuum_enabled = on)")
		require.Empty(t, db.findings())
		db.exec("alter table ratelimit." + table + " set (autovacuum_enabled = off)")
		remedy := db.requireFinding("warning", "Autovacuum is off for ratelimit."+table)
		db.exec(remedy)
		require.Empty(t, db.findings())
	}
	for _, name := range []string{"autovacuum", "track_counts"} {
		db.exec("alter system set " + name + " = off")
		db.exec("select pg_reload_conf()")
		db.Await(t, patience, "select exists (select from ratelimit_doctor())")
		remedy := db.requireFinding("warning", "The setting "+name+" of the server is off")
		for statement := range strings.SplitSeq(strings.TrimSuffix(remedy, ";"), ";") {
			db.exec(statement)
		}
		db.Await(t, patience, "select not exists (select from ratelimit_doctor())")
	}
}

// Dead rows that nothing removes, then a table that is much larger than its rows, then updates that touch indexes.
func TestDoctor_BloatAndHotUpdates(t *testing.T) {
	t.Parallel()
	db, _ := newPrivateDB(t, "autovacuum_naptime=1h")
	db.giveAway().definePolicy("p", 10, 1, aDay)
	const fill = "insert into ratelimit.buckets (policy_id, key, level, refilled_at, due_at) select 1, 'user:' || n, 0, now(), now() + interval '1 day' from generate_series(1, 450000) as n"
	conn := db.session()
	flush := func(sql string) {
		t.Helper()
		conn.exec(sql)
		conn.exec("select pg_stat_force_next_flush()")
		conn.exec("select 1")
	}
	flush(fill)
	require.Empty(t, db.findings(), "many rows are no fault")
	flush("delete from ratelimit.buckets where right(key, 1) < '4'")
	require.Empty(t, db.findings(), "there are fewer of them than rows")
	flush("delete from ratelimit.buckets where key <> 'user:4'")
	findings := db.findings()
	require.Len(t, findings, 2)
	require.Contains(t, findings[0], "warning: ratelimit.buckets holds 449999 dead row versions beside 1 row.")
	require.Contains(t, findings[1], "warning: ratelimit.buckets takes up ")
	for _, remedy := range column(t, db.DB, "select remedy from ratelimit_doctor()") {
		_, statement, _ := strings.Cut(remedy, ": vacuum")
		if strings.Contains(statement, ": vacuum") {
			_, statement, _ = strings.Cut(statement, ": vacuum")
		}
		flush("vacuum" + statement)
	}
	require.Empty(t, db.findings())
	for _, table := range bucketTables[:2] {
		flush("insert into ratelimit." + table + " (policy_id, key, level, refilled_at, due_at) select 1, n::text, 0, now(), now() + interval '1 day' from generate_series(1, 12000) as n")
		conn.exec("create index hinders on ratelimit." + table + " (level)")
		flush("update ratelimit." + table + " set level = level where right(key, 1) in ('0', '1')") // heap-only
		flush("update ratelimit." + table + " set level = level + 1 where right(key, 1) in ('2', '3', '4', '5')")
		require.Empty(t, db.findings(), "ten thousand updates tell nothing")
		flush("update ratelimit." + table + " set level = level + 1 where right(key, 1) > '5'")
		remedy := db.requireFinding("warning", "updates of ratelimit."+table+" only 0.200 were heap-only")
		require.Contains(t, remedy, "old snapshot")
		conn.exec("drop index ratelimit.hinders")
		conn.exec("select pg_stat_reset_single_table_counters($1::text::regclass)", "ratelimit."+table)
		flush("delete from ratelimit." + table)
		require.Empty(t, db.findings(), "ten thousand dead rows do no harm")
	}
}

func TestDoctor_SilentUnderLoad(t *testing.T) {
	t.Parallel()
	db := newCrowdDB(t, 8)
	db.giveAway().definePolicy("durable", 1000, 1000, second, remember(time.Second))
	db.definePolicy("ephemeral", 1000, 1000, second, ephemeral, remember(time.Second))
	load := newLoad(t)
	for _, policy := range []string{"durable", "ephemeral"} {
		load.start(4, func(caller int) error {
			for n := range 300 {
				if _, err := acquire(db.Pool, policy, fmt.Sprint(n*caller%50), 1); err != nil {
					return err
				}
				if _, err := acquire(db.Pool, policy, "hot", 1, fmt.Sprint(caller, n, time.Now().UnixNano())); err != nil {
					return err
				}
			}
			_, err := refund(db.Pool, policy, "hot", 3)
			return err
		})
	}
	for range 20 {
		require.Empty(t, db.findings())
		db.exec("call ratelimit_cleanup_all()")
	}
	require.NoError(t, load.end())
}
