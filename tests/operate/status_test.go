package operate

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

const statusColumns = `select concat_ws('|', policy, key, remaining, coalesce(extract(epoch from retry_after)::real::text, 'never'),
	coalesce(extract(epoch from reset_after)::real::text, 'never'), capacity, overridden) from `

// Clean-up has ten minutes for a row that is due. After that the doctor warns, with the call that removes it.
func TestDoctor_OverdueRows(t *testing.T) {
	acquire := "select ratelimit_acquire('p', n::text, 5) from generate_series(1, 3) as n"
	remember := "select ratelimit_acquire('p', n::text, 5, 'i') from generate_series(1, 3) as n"
	override := "select ratelimit_override('p', 'k', 5, expires_at => '2024-03-30 12:00:05+00')"
	type testCase struct {
		kind    kit.PolicyOption
		every   time.Duration
		create  string // rows that are due at 12:00:05
		overdue string
	}
	kit.InParallel(t, map[string]testCase{
		"buckets":                    {kit.Durable, kit.Second, acquire, "buckets has 3 rows overdue"},
		"ephemeral buckets":          {kit.Ephemeral, kit.Second, acquire, "ephemeral_buckets has 3 rows overdue"},
		"idempotency keys":           {kit.Durable, 10 * time.Hour, remember, "idempotency_keys has 3 rows overdue"},
		"ephemeral idempotency keys": {kit.Ephemeral, 10 * time.Hour, remember, "ephemeral_idempotency_keys has 3 rows overdue"},
		"overrides":                  {kit.Durable, kit.Second, override, "overrides has 1 row overdue"},
	}, func(t *testing.T, test testCase) {
		db := kit.NewDB(t).GiveAway()
		db.At(kit.T0).Policy("p", 10, 1, test.every, test.kind, kit.Remember(5*kit.Second))
		db.Execute(test.create)
		db.SetClock(kit.T0.Add(10*time.Minute + 5*kit.Second))
		require.Empty(t, db.Findings())
		db.SetClock(kit.T0.Add(10*time.Minute + 6*kit.Second))
		remedy := db.RequireFinding("warning", "ratelimit."+test.overdue, "2024-03-30 12:00:05")
		require.Contains(t, remedy, "call ratelimit_cleanup_all();")
		db.Execute("call ratelimit_cleanup_all()")
		require.Empty(t, db.Findings())
	})
}

// Clean-up skips a bucket that is locked, so a bucket that is often used may stay overdue. It is no finding within ten minutes of its use.
func TestDoctor_OverdueAndInUse(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.GiveAway().DefinePolicy("p", 10, 1, kit.Second, durability)
		db.AcquireAt(kit.T0, "p", "k", 5)
		db.AcquireAt(kit.T0.Add(time.Hour), "p", "k", 5)
		require.Empty(t, db.Findings())
		db.SetClock(kit.T0.Add(time.Hour + 10*time.Minute + kit.Us))
		db.RequireFinding("warning", "buckets has 1 row overdue")
	})
}

func TestDoctor_CountsTenThousandOverdueRowsAtMost(t *testing.T) {
	db := kit.ParallelDB(t).GiveAway().Policy("p", 10, 1, kit.Second)
	db.FillTables("", "p", 10_001)
	db.Execute("delete from ratelimit.idempotency_keys where key in ('k1', 'k2')")
	findings := db.Findings()
	require.Len(t, findings, 2)
	require.Contains(t, findings[0], "buckets has 10000 or more rows overdue")
	require.Contains(t, findings[1], "idempotency_keys has 9999 rows overdue")
}

func TestDoctor_SessionsThatStayOpen(t *testing.T) {
	db := kit.ParallelDB(t).GiveAway().Policy("p", 10, 1, kit.ADay)
	kit.NewDB(t).Begin().Execute("create temporary table t ()") // in another database
	for name, begin := range map[string]string{
		"tokens taken":  "begin; select ratelimit_acquire('p', 'k')",
		"an old view":   "begin isolation level repeatable read; select 1",
		"other changes": "begin; create temporary table t ()",
	} {
		s := db.Session()
		kit.Execute(t, s.Conn, begin, pgx.QueryExecModeSimpleProtocol)
		pid := fmt.Sprint(s.PgConn().PID())
		aMinute := db.AMinuteAfter("select xact_start from pg_stat_activity where pid = $1", s.PgConn().PID())
		db.SetClock(aMinute)
		require.Empty(t, db.Findings(), name)
		db.SetClock(aMinute.Add(kit.Us))
		remedy := db.RequireFinding("warning", "Session "+pid+" of role ", "(idle in transaction)")
		require.Contains(t, remedy, "select pg_terminate_backend("+pid+");")
		s.Execute("rollback")
		require.Empty(t, db.Findings(), name)
	}
	// A transaction that has neither a snapshot nor a lock harms nobody.
	db.SetClock(time.Now().Add(2 * time.Minute))
	idle := db.Begin().Execute("show timezone")
	require.Empty(t, db.Findings())
	idle.Execute("rollback")
	db.Begin().Execute("select ratelimit_acquire('p', 'k')")
	_, statement, _ := strings.Cut(db.RequireFinding("warning", "idle in transaction"), "stuck: ")
	statement, _, _ = strings.Cut(statement, ";")
	db.Execute(statement)
	db.Await(t, kit.Patience, "select not exists (select from ratelimit_doctor())")
}

func TestDoctor_PreparedTransactions(t *testing.T) {
	t.Parallel()
	db, server := kit.NewPrivateDB(t, "max_prepared_transactions=2")
	for _, db := range []*kit.TestDB{kit.CreateDB(t, server, "another"), db.GiveAway()} {
		db.DefinePolicy("p", 10, 1, kit.ADay)
		db.Begin().Execute("select ratelimit_acquire('p', 'k')").Execute("prepare transaction 'it''s forgotten in " + db.Name + "'")
	}
	aMinute := db.AMinuteAfter("select prepared from pg_prepared_xacts where database = current_database()")
	db.SetClock(aMinute)
	require.Empty(t, db.Findings())
	db.SetClock(aMinute.Add(kit.Us))
	_, statement, _ := strings.Cut(db.RequireFinding("warning", "Prepared transaction 'it''s forgotten in "+db.Name+"'"), "or ")
	db.Execute(statement)
	require.Empty(t, db.Findings())
}

// If the owner cannot see other sessions, the doctor returns a notice with the grant that helps.
func TestDoctor_OwnerCannotSeeSessions(t *testing.T) {
	t.Parallel()
	owner, caller := kit.NewRole(t), kit.NewRole(t)
	db := &kit.TestDB{DB: pgtest.Empty(t), T: t}
	db.Execute(fmt.Sprintf("grant create on database %s to %s; grant create, usage on schema public to %[2]s", pgx.Identifier{db.Name}.Sanitize(), owner), pgx.QueryExecModeSimpleProtocol)
	conn := kit.ConnectAs(t, db.DB, owner)
	require.NoError(t, migrations.Up(t.Context(), conn))
	kit.Execute(t, conn, "grant execute on function ratelimit_doctor to "+caller)
	kit.Execute(t, conn, `create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe as $$ select clock_timestamp() + interval '2 minutes' $$`)
	open := db.Begin().Execute("create temporary table t ()")
	asCaller := kit.ConnectAs(t, db.DB, caller)
	find := func() []string {
		return kit.ColumnOf(t, asCaller, "select severity || ': ' || finding || ' ' || remedy from ratelimit_doctor()")
	}
	found := find()
	require.Len(t, found, 1)
	require.Contains(t, found[0], "notice: The owner of the package, "+owner+", cannot see")
	_, grant, _ := strings.Cut(found[0], "admin option: ")
	db.Execute(grant)
	found = find()
	require.Len(t, found, 1)
	require.Contains(t, found[0], fmt.Sprintf("warning: Session %d ", open.PgConn().PID()))
	open.Execute("rollback")
	require.Empty(t, find())
}

// An object of another role is a warning with the statements that mend it. A function of a superuser is a notice, too.
func TestDoctor_Owners(t *testing.T) {
	t.Parallel()
	other := kit.NewRole(t)
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
				db := kit.NewDB(t).GiveAway()
				db.Execute("grant create on schema public, ratelimit to " + other)
				before := kit.FingerprintOf(t, db.DB)
				if owner != other {
					owner = kit.Column(t, db.DB, "select quote_ident(current_user)")[0]
				}
				kit.Execute(t, db.Connect(t), strings.ReplaceAll(test.change, "%s", owner), pgx.QueryExecModeSimpleProtocol)
				findings, remedies := db.Findings(), kit.Column(t, db.DB, "select remedy from ratelimit_doctor()")
				if owner != other && test.super {
					require.Len(t, findings, 2)
					require.Equal(t, remedies[0], remedies[1])
					require.Equal(t, "notice: The owner of the package, "+owner+", is a superuser: its functions run with all rights, whoever calls them.", findings[0])
					findings = findings[1:]
				}
				require.Equal(t, []string{fmt.Sprintf("warning: %d objects of the package belong to %s, and others to pg_monitor: calls can fail, and no role can upgrade it.",
					test.objects, owner)}, findings)
				db.Follow(remedies[0], "nobody")
				require.Empty(t, db.Findings())
				if !strings.Contains(test.change, "create") {
					require.Equal(t, before, kit.FingerprintOf(t, db.DB))
				}
			}
		})
	}
}

// The statements for the objects of a superuser give away nothing that another role may have planted.
func TestDoctor_OwnersDoNotTakeOverWhatIsPlanted(t *testing.T) {
	t.Parallel()
	planter := kit.NewRole(t)
	db := kit.NewDB(t)
	db.Execute("grant create on schema public to " + planter)
	kit.Execute(t, kit.ConnectAs(t, db.DB, planter), "create function ratelimit_planted() returns integer language sql security definer as 'select 1'")
	require.Len(t, db.Findings(), 2)
	db.Follow(kit.Column(t, db.DB, "select remedy from ratelimit_doctor() where severity = 'notice'")[0], "pg_monitor")
	remedy := db.RequireFinding("warning", "1 objects of the package belong to "+planter+", and others to pg_monitor")
	require.Contains(t, remedy, "What may have been planted, drop.")
	require.Equal(t, []string{planter}, kit.Column(t, db.DB, "select proowner::regrole::text from pg_proc where proname = 'ratelimit_planted'"))
	db.Execute("drop function ratelimit_planted")
	require.Empty(t, db.Findings())
}

// A name in ratelimit.pre_request that no role or policy has limits nobody, or fails every request.
func TestDoctor_PreRequest(t *testing.T) {
	db := kit.ParallelDB(t)
	kit.InstallPreRequest(t, db.DB)
	db.GiveAway().Policy("api", 10, 1, kit.Second).Execute("select ratelimit_define_policy('jobs', 5, lease => '5 minutes')")
	db.Execute("insert into ratelimit.pre_request (role, policy) values ('*', 'api'), ('pg_monitor', 'api')")
	require.Empty(t, db.Findings())
	for statement, finding := range map[string]string{
		"insert into ratelimit.pre_request (role, policy) values ('anno', 'api')":                 "limits role 'anno', and no role has that name",
		"update ratelimit.pre_request set policy = 'apy' where role = '*'":                        "names policy 'apy' for role '*'. No policy has that name",
		"update ratelimit.pre_request set policy = 'jobs' where role = 'pg_monitor'":              "names policy 'jobs' for role 'pg_monitor'. It lends slots",
		"select ratelimit_drop_policy('api'); delete from ratelimit.pre_request where role = '*'": "names policy 'api' for role 'pg_monitor'. No policy has that name",
	} {
		session := db.Begin()
		kit.Execute(t, session.Conn, statement, pgx.QueryExecModeSimpleProtocol)
		found := kit.ColumnOf(t, session, "select severity || ': ' || finding || ' ' || remedy from ratelimit_doctor()")
		require.Len(t, found, 1, statement)
		require.Contains(t, found[0], "warning: ratelimit.pre_request "+finding)
		require.Contains(t, found[0], "update ratelimit.pre_request set ")
		session.Execute("rollback")
	}
}

func TestDoctor_Vacuum(t *testing.T) {
	t.Parallel()
	db, _ := kit.NewPrivateDB(t, "autovacuum_naptime=1h")
	db.GiveAway()
	for _, table := range kit.BucketTables {
		db.Execute("alter table ratelimit." + table + " set (autovacuum_enabled = on)")
		require.Empty(t, db.Findings())
		db.Execute("alter table ratelimit." + table + " set (autovacuum_enabled = off)")
		db.Execute(db.RequireFinding("warning", "Autovacuum is off for ratelimit."+table))
		require.Empty(t, db.Findings())
	}
	for _, name := range []string{"autovacuum", "track_counts"} {
		db.Execute("alter system set " + name + " = off")
		db.Execute("select pg_reload_conf()")
		db.Await(t, kit.Patience, "select exists (select from ratelimit_doctor())")
		remedy := db.RequireFinding("warning", "The setting "+name+" of the server is off")
		for statement := range strings.SplitSeq(strings.TrimSuffix(remedy, ";"), ";") {
			db.Execute(statement)
		}
		db.Await(t, kit.Patience, "select not exists (select from ratelimit_doctor())")
	}
}

// Dead rows that nothing removes, then a table that is much larger than its rows, then updates that touch indexes.
func TestDoctor_BloatAndHotUpdates(t *testing.T) {
	t.Parallel()
	db, _ := kit.NewPrivateDB(t, "autovacuum_naptime=1h")
	db.GiveAway().DefinePolicy("p", 10, 1, kit.ADay)
	const fill = "insert into ratelimit.buckets (policy_id, key, level, refilled_at, due_at) select 1, 'user:' || n, 0, now(), now() + interval '1 day' from generate_series(1, 450000) as n"
	conn := db.Session()
	flush := func(sql string) {
		conn.Execute(sql)
		conn.Execute("select pg_stat_force_next_flush()")
		conn.Execute("select 1")
	}
	flush(fill)
	require.Empty(t, db.Findings(), "many rows are no fault")
	flush("delete from ratelimit.buckets where right(key, 1) < '4'")
	require.Empty(t, db.Findings(), "there are fewer of them than rows")
	flush("delete from ratelimit.buckets where key <> 'user:4'")
	findings := db.Findings()
	require.Len(t, findings, 2)
	require.Contains(t, findings[0], "warning: ratelimit.buckets holds 449999 dead row versions beside 1 row.")
	require.Contains(t, findings[1], "warning: ratelimit.buckets takes up ")
	for _, remedy := range kit.Column(t, db.DB, "select remedy from ratelimit_doctor()") {
		_, statement, _ := strings.Cut(remedy, ": vacuum")
		if strings.Contains(statement, ": vacuum") {
			_, statement, _ = strings.Cut(statement, ": vacuum")
		}
		flush("vacuum" + statement)
	}
	require.Empty(t, db.Findings())
	for _, table := range kit.BucketTables[:2] {
		flush("insert into ratelimit." + table + " (policy_id, key, level, refilled_at, due_at) select 1, n::text, 0, now(), now() + interval '1 day' from generate_series(1, 12000) as n")
		conn.Execute("create index hinders on ratelimit." + table + " (level)")
		flush("update ratelimit." + table + " set level = level where right(key, 1) in ('0', '1')") // heap-only
		flush("update ratelimit." + table + " set level = level + 1 where right(key, 1) in ('2', '3', '4', '5')")
		require.Empty(t, db.Findings(), "ten thousand updates tell nothing")
		flush("update ratelimit." + table + " set level = level + 1 where right(key, 1) > '5'")
		require.Contains(t, db.RequireFinding("warning", "updates of ratelimit."+table+" only 0.200 were heap-only"), "old snapshot")
		conn.Execute("drop index ratelimit.hinders")
		conn.Execute("select pg_stat_reset_single_table_counters($1::text::regclass)", "ratelimit."+table)
		flush("delete from ratelimit." + table)
		require.Empty(t, db.Findings(), "ten thousand dead rows do no harm")
	}
}

func TestDoctor_SilentUnderLoad(t *testing.T) {
	t.Parallel()
	db := kit.NewCrowdDB(t, 8)
	db.GiveAway().DefinePolicy("durable", 1000, 1000, kit.Second, kit.Remember(time.Second))
	db.DefinePolicy("ephemeral", 1000, 1000, kit.Second, kit.Ephemeral, kit.Remember(time.Second))
	load := kit.NewLoad(t)
	for _, policy := range []string{"durable", "ephemeral"} {
		load.Start(4, func(caller int) error {
			for n := range 300 {
				if _, err := kit.Acquire(db.Pool, policy, fmt.Sprint(n*caller%50), 1); err != nil {
					return err
				}
				if _, err := kit.Acquire(db.Pool, policy, "hot", 1, fmt.Sprint(caller, n, time.Now().UnixNano())); err != nil {
					return err
				}
			}
			_, err := kit.Refund(db.Pool, policy, "hot", 3)
			return err
		})
	}
	for range 20 {
		require.Empty(t, db.Findings())
		db.Execute("call ratelimit_cleanup_all()")
	}
	require.NoError(t, load.End())
}

// Each plain grant is a transaction id, and after autovacuum_freeze_max_age of them the server vacuums every table.
func TestDoctor_FindsThatTransactionIDsAreBurnt(t *testing.T) {
	t.Parallel()
	db, _ := kit.NewPrivateDB(t, "autovacuum=off", "autovacuum_freeze_max_age=100000")
	find := func() []string {
		return kit.Column(t, db.DB, "select finding || ' ' || remedy from ratelimit_doctor() where finding like '%transaction ids%'")
	}
	db.SetClock(kit.T0)
	db.DefinePolicy("p", 1000, 1, kit.Second)
	db.Execute("checkpoint")
	db.Execute("update test_clock set now = (select checkpoint_time + interval '100 seconds' from pg_control_checkpoint())")
	require.Empty(t, find())
	for range 200 {
		db.Take("p", "k", 1)
	}
	found := find()
	require.Len(t, found, 1)
	require.Regexp(t, `^The server uses 2 transaction ids a second since the last checkpoint: at this rate autovacuum freezes all tables every 13\.\d hours\. Share calls:`, found[0])
	db.Execute("update test_clock set now = now - interval '71 seconds'")
	require.Empty(t, find(), "29 s are too few to tell")
}
