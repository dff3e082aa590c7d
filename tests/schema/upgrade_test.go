package schema

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Every version of the schema is upgraded to the newest, with data and under load.
func TestUpgrade_FromEveryVersion(t *testing.T) {
	t.Parallel()
	for version := range kit.NewestMigration(t) {
		version++
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			t.Parallel()
			db := kit.InstalledAt(t, os.DirFS("../../migrations"), version)
			data, load := db.PutData(), db.StartLoad(version)

			require.NoError(t, migrations.Up(t.Context(), db.Connect(t)))
			load.GoOn()
			if version < kit.NewestMigration(t) {
				load.AddCombiner()
				load.GoOn()
			}
			load.End()
			data.Check()
			kit.SameSchema(t, pgtest.New(t), db.DB)
		})
	}
}

// A call that began before the new version goes on after it.
func TestUpgrade_ACallUnderWay(t *testing.T) {
	files, newest := kit.NextVersion(t, "", "", kit.Edits...), kit.NewestMigration(t)
	kit.InParallel(t, underWay, func(t *testing.T, call func(q kit.Querier) (kit.Decision, error)) {
		db := kit.InstalledAt(t, files, newest)
		for i, version := range []int32{newest + 1, newest} {
			require.NoError(t, db.Overtake(call, func() { kit.MigrateTo(t, db.DB, files, version) }))
			require.EqualValues(t, 100-3*(i+1), db.Left("p", "k"))
		}
	})
}

// Version 2 adds a column to a decision. A prepared statement that names its columns goes on, with a generic plan and with
// its own. With select * it fails, and takes nothing, until it is prepared again: pgx does so after one error.
func TestUpgrade_PreparedStatements(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := kit.InstalledAt(t, os.DirFS("../../migrations"), 1)
	db.DefinePolicy("p", kit.LoadCapacity, 1, kit.ADay)
	const named, star = "select allowed, remaining, retry_after from ratelimit_acquire('p', $1)", "select * from ratelimit_acquire('p', $1)"
	modes := []string{"force_generic_plan", "force_custom_plan"}
	var calls [2]atomic.Int64
	load, sessions := kit.NewLoad(t), make([]*kit.Session, len(modes))
	for i, mode := range modes {
		sessions[i] = db.Session()
		for name, sql := range map[string]string{"named": named, "star": star} {
			require.NoError(t, kit.ErrorOf(sessions[i].Prepare(ctx, name, sql)))
		}
		sessions[i].Execute("set plan_cache_mode = " + mode)
		sessions[i].Execute("star", "star")
		sessions[i].Execute(star, "implicit")
	}
	load.Start(len(sessions), func(i int) error {
		_, err := sessions[i].Exec(ctx, "named", modes[i])
		calls[i].Add(1)
		return err
	})
	more := func() {
		for i := range calls {
			before := calls[i].Load()
			require.Eventually(t, func() bool { return load.Ctx.Err() != nil || calls[i].Load() > before+5 }, kit.Patience, kit.Ms)
		}
	}
	more()
	require.NoError(t, migrations.Up(ctx, db.Connect(t)))
	more()
	require.NoError(t, load.End())

	before := db.Rows()
	for i, s := range sessions {
		require.EqualValues(t, kit.LoadCapacity-calls[i].Load(), db.Left("p", modes[i]))
		for range 2 {
			_, err := s.Exec(ctx, "star", "star")
			kit.RequireState(t, "0A000", err)
			require.ErrorContains(t, err, "cached plan must not change result type")
		}
		kit.RequireState(t, "0A000", kit.ErrorOf(s.Exec(ctx, star, "implicit")))
	}
	require.Equal(t, before, db.Rows())
	for _, s := range sessions {
		require.NoError(t, s.Deallocate(ctx, "star"))
		require.NoError(t, kit.ErrorOf(s.Prepare(ctx, "star", star)))
		s.Execute("star", "star")
		s.Execute(star, "implicit")
	}
	require.EqualValues(t, kit.LoadCapacity-4, db.Left("p", "star"))
	require.EqualValues(t, kit.LoadCapacity-4, db.Left("p", "implicit"))
}

// Version 2 replaces the functions themselves. A call that had found the old one waits for the migration, and goes on with it.
func TestUpgrade_ACallThatFoundTheOldFunction(t *testing.T) {
	kit.InParallel(t, map[string]func(s *kit.Session) error{
		"acquire":         oldCall("select allowed from ratelimit_acquire('p', 'k', 2)"),
		"first use":       oldCall("select allowed from ratelimit_acquire('p', 'new', 2)"),
		"denied":          oldCall("select not allowed from ratelimit_acquire('p', 'k', 99)"),
		"never":           oldCall("select not allowed and retry_after is null from ratelimit_acquire('p', 'k', 101)"),
		"keyed":           oldCall("select allowed and not replayed from ratelimit_acquire('p', 'k', 2, 'i')"),
		"replayed":        oldCall("select replayed from ratelimit_acquire('p', 'k', 3, 'first')"),
		"many":            oldCall("select bool_and(allowed) from ratelimit_acquire_many('{p,p,p}', '{k,k,new}')"),
		"many, keyed":     oldCall("select bool_and(allowed) from ratelimit_acquire_many('{p,p,p}', '{k,k,new}', '{1,3,1}', '{i,first,j}')"),
		"many, denied":    oldCall("select not bool_or(allowed) from ratelimit_acquire_many('{p,p}', '{k,new}', '{98,101}')"),
		"many policies":   oldCall("select bool_and(allowed) from ratelimit_acquire_many('{p,q}', '{k,k}')"),
		"many, refused":   oldCall("select bool_and(error_code = 'RL002') from ratelimit_acquire_many('{p}', '{k}', '{4}', '{first}')"),
		"peek":            oldCall("select allowed from ratelimit_peek('p', 'k', 97)"),
		"refund":          oldCall("select allowed from ratelimit_refund('p', 'k', 1)"),
		"reset":           oldCall("select ratelimit_reset('p', 'k') is not null"),
		"policies":        oldCall("select count(*) = 2 from ratelimit_policies()"),
		"define a policy": oldCall("select ratelimit_define_policy('r', 10, 1, '1 day') is not null"),
		"change a policy": oldCall("select ratelimit_define_policy('p', 200) is not null"),
		"drop a policy":   oldCall("select ratelimit_drop_policy('p') is not null"),
	}, func(t *testing.T, call func(s *kit.Session) error) {
		for began := time.Now(); !callDuringUpgrade(t, call); {
			require.Less(t, time.Since(began), 3*kit.Patience, "the call waits for something else each time")
		}
	})
}

// callDuringUpgrade makes a call that has found the old function, and reports whether it had: PostgreSQL resets the caches of a
// session that lags behind the changes of other databases. Such a session waits for ratelimit.decision, which the migration
// renames, before its function begins, and then finds that the function is gone (XX000).
func callDuringUpgrade(t *testing.T, call func(*kit.Session) error) bool {
	db := kit.InstalledAt(t, os.DirFS("../../migrations"), 1)
	db.Execute("select ratelimit_define_policy(p, 100, 1, '1 day') from unnest('{p,q}'::text[]) as p; select ratelimit_acquire('p', 'k', 3, 'first')")
	keeper, caller := db.Begin(), db.Session()
	caller.Execute("select from ratelimit_acquire('q', 'k')")                    // loads ratelimit.decision into the session's caches
	keeper.Execute("lock table ratelimit.idempotency_keys in access share mode") // which the migration alters
	migrator := db.Connect(t)
	migrated := make(chan error, 1)
	go func() { migrated <- migrations.Up(context.Background(), migrator) }()
	db.Await(t, kit.Patience, `select exists (select from pg_locks where relation = 'ratelimit.policies'::regclass and mode = 'AccessExclusiveLock' and granted)`)

	pending := caller.Start(func(kit.Querier) (kit.Decision, error) { return kit.Decision{}, call(caller) })
	db.Await(t, kit.Patience, "select exists (select from pg_locks where pid = $1 and not granted)", caller.PgConn().PID())
	hadFound := kit.Column(t, db.DB, "select (relation = 'ratelimit.policies'::regclass)::text from pg_locks where pid = $1 and not granted", caller.PgConn().PID())
	keeper.Execute("commit")
	require.NoError(t, <-migrated)
	err := kit.ErrorOf(pending.Result())
	if !slices.Equal(hadFound, []string{"true"}) {
		t.Logf("the caches of the session were reset: %v", err)
		return false
	}
	require.NoError(t, err)
	return true
}

// oldCall makes a call that must answer true.
func oldCall(sql string) func(s *kit.Session) error {
	return func(s *kit.Session) error {
		var right bool
		if err := s.QueryRow(context.Background(), sql).Scan(&right); err != nil {
			return err
		}
		if !right {
			return fmt.Errorf("not so: %s", sql)
		}
		return nil
	}
}

// Roles keep exactly the functions that they had before, also those that were dropped and created. Who had
// ratelimit_acquire_many has ratelimit_acquire_packed, and nobody has anything else that is new.
func TestUpgrade_KeepsGrants(t *testing.T) {
	t.Parallel()
	app, batcher, delegate, favourite := kit.NewRole(t), kit.NewRole(t), kit.NewRole(t), kit.NewRole(t)
	db := kit.InstalledAt(t, os.DirFS("../../migrations"), 1)
	kit.Execute(t, db.Connect(t), fmt.Sprintf(`
		grant execute on function ratelimit_acquire, ratelimit_peek to %[1]s;
		grant execute on function ratelimit_acquire_many, ratelimit_refund to %[2]s;
		grant execute on function ratelimit_acquire, ratelimit_acquire_many, ratelimit_define_policy, ratelimit_version to %[3]s with grant option;
		grant execute on procedure ratelimit_cleanup_all to %[1]s;
		grant usage on schema ratelimit to %[1]s;
		grant execute on function ratelimit.cleanup_batch to %[1]s;
		grant execute on function ratelimit_policies to public;
		alter default privileges grant all on functions to %[4]s with grant option;
		alter default privileges grant all on tables to %[4]s;
		alter default privileges grant all on schemas to %[4]s;
		alter default privileges in schema ratelimit grant all on tables to public;
		alter default privileges in schema public grant all on functions to public`, app, batcher, delegate, favourite), pgx.QueryExecModeSimpleProtocol)
	as := db.Connect(t)
	kit.Execute(t, as, "set role "+delegate)
	kit.Execute(t, as, "grant execute on function ratelimit_acquire to "+batcher)
	kit.Execute(t, as, "grant execute on function ratelimit_acquire_many to "+app)

	before := db.Grants()
	require.Contains(t, before, "ratelimit_acquire to "+delegate+" t")
	require.Contains(t, before, "ratelimit_policies to - f")
	after := slices.Clone(before)
	for _, grant := range before {
		if role, ok := strings.CutPrefix(grant, "ratelimit_acquire_many"); ok {
			after = append(after, "ratelimit_acquire_packed"+role)
		}
	}
	require.Len(t, after, len(before)+3)

	require.NoError(t, migrations.Up(t.Context(), db.Connect(t)))
	require.ElementsMatch(t, after, db.Grants())
	db.DefinePolicy("p", 10, 1, kit.ADay)
	conn := kit.ConnectAs(t, db.DB, app)
	kit.Execute(t, conn, "select * from ratelimit_acquire('p', 'k')")
	kit.Execute(t, conn, "select * from ratelimit_acquire_packed('{p}', '{k}')")
	kit.Execute(t, kit.ConnectAs(t, db.DB, favourite), "select * from ratelimit_policies()")

	kit.MigrateTo(t, db.DB, os.DirFS("../../migrations"), 1)
	require.ElementsMatch(t, before, db.Grants())
}

// The way back, with what version 1 does not know: it keeps what it can, and is version 1 as installed.
func TestUpgrade_AndBack(t *testing.T) {
	t.Parallel()
	files := os.DirFS("../../migrations")
	db := kit.NewDB(t)
	data := db.PutData()
	for name, kind := range map[string]string{"durable": "true", "ephemeral": "false"} {
		db.Execute("select ratelimit_define_policy($1, 1000, 0, '1 second', durable => $2::boolean)", name, kind)
		db.Execute("select ratelimit_define_policy($1 || ' most', 9000000000000, 0, '365250 days', true, $2::boolean, shadow => true)", name, kind)
		db.Execute("select ratelimit_override($1, 'blocked', capacity => 0), ratelimit_override($1, 'k', 50, 5, '1 hour', now() + interval '1 day')", name)
		db.Execute("select ratelimit_define_policy($1 || ' quota', 10, durable => $2::boolean, period => '1 year')", name, kind)
		db.Execute("select ratelimit_override($1 || ' quota', 'other', time_zone => 'Asia/Kathmandu')", name)
		db.Execute("select ratelimit_define_policy($1 || ' slots', 10, durable => $2::boolean, lease => '1 hour')", name, kind)
		db.Execute("select ratelimit_override($1 || ' slots', 'other', 2, lease => '2 hours')", name)
		db.Execute("select ratelimit_hold($1 || ' slots', 'k', 'a', 3), ratelimit_hold($1 || ' slots', 'k', 'b')", name)
		for _, policy := range []string{name, name + " most", name + " quota"} {
			require.False(t, db.Acquire(policy, "k", 3, "first").Replayed)
			require.False(t, db.Acquire(policy, "other", 3, "first").Replayed)
		}
		db.Acquire(name+" quota", "of a year that is over", 3)
	}
	require.NotZero(t, db.Number(`
		select count(*) from (table ratelimit.idempotency_keys union all table ratelimit.ephemeral_idempotency_keys) as k where reset_after is null`))

	for _, table := range []string{"buckets", "ephemeral_buckets"} {
		db.Execute("update ratelimit." + table + " set refilled_at = refilled_at - interval '1 year' where key = 'of a year that is over'")
	}
	kit.MigrateTo(t, db.DB, files, 1)
	kit.SameSchema(t, kit.InstalledAt(t, files, 1).DB, db.DB)
	data.Check()
	for _, quota := range []string{"durable quota", "ephemeral quota"} {
		for _, key := range []string{"k", "other"} {
			require.EqualValues(t, 7_000_000, db.Bucket(quota, key).Level, "what was left")
			require.True(t, db.Acquire(quota, key, 3, "first").Replayed)
			require.False(t, db.Acquire(quota, key, 8).Allowed)
		}
		require.True(t, db.Acquire(quota, "of a year that is over", 10).Allowed)
		db.DropPolicy(quota)
	}
	for _, slots := range []string{"durable slots", "ephemeral slots"} {
		require.EqualValues(t, 6_000_000, db.Bucket(slots, "k").Level, "what was free")
		require.False(t, db.Acquire(slots, "k", 7).Allowed)
		require.True(t, db.Acquire(slots, "other", 10).Allowed)
		require.Equal(t, []string{"10 01:00:00"}, kit.Column(t, db.DB, "select refill || ' ' || every from ratelimit_policies() where policy = $1", slots))
		db.DropPolicy(slots)
	}
	for _, policy := range []string{"durable", "durable most", "ephemeral", "ephemeral most"} {
		for _, key := range []string{"k", "other"} {
			require.True(t, db.Acquire(policy, key, 3, "first").Replayed)
			next := db.Acquire(policy, key, 7)
			require.True(t, next.Allowed)
			require.Positive(t, next.ResetAfter)
		}
		require.True(t, db.Acquire(policy, "blocked", 1).Allowed)
		db.Execute("select ratelimit_define_policy($1, remember => '1 hour')", policy) // its numbers are within the bounds
		db.DropPolicy(policy)
	}

	require.NoError(t, migrations.Up(t.Context(), db.Connect(t)))
	kit.SameSchema(t, pgtest.New(t), db.DB)
	data.Check()
}

// A helper that the new version no longer calls has to stay for one version, or calls under way fail.
func TestUpgrade_ADroppedHelperFailsCallsUnderWay(t *testing.T) {
	db := kit.ParallelDB(t)
	kit.RequireState(t, "42883", db.Overtake(underWay["acquire"], func() { db.Execute("drop function ratelimit.grant_of") }))
}

var underWay = map[string]func(q kit.Querier) (kit.Decision, error){
	"acquire":        func(q kit.Querier) (kit.Decision, error) { return kit.Acquire(q, "p", "k", 2) },
	"acquire, keyed": func(q kit.Querier) (kit.Decision, error) { return kit.Acquire(q, "p", "k", 2, fmt.Sprint(time.Now())) },
	"acquire many": func(q kit.Querier) (kit.Decision, error) {
		return kit.Decide(q, "ratelimit_acquire_many(array['p'], array['k'], array[2::bigint])")
	},
}
