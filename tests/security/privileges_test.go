package security

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// requireCalls calls these functions as the call table has it, about policies that newUsedDB has. Administration is granted apart.
func requireCalls(t *testing.T, conn *pgx.Conn, functions ...string) {
	for _, function := range functions {
		name := strings.TrimPrefix(function, "ratelimit_")
		f := kit.Functions[name]
		for _, policy := range map[bool][]string{true: {"jobs"}, false: {"p", "q"}}[f.Writes == "slots"] {
			for _, call := range f.Samples(name) {
				call = strings.NewReplacer("'p'", "'"+policy+"'", "{p,p}", "{"+policy+","+policy+"}").Replace(call)
				if state := kit.SQLState(kit.ErrorOf(conn.Exec(t.Context(), call))); !strings.HasPrefix(state, "RL") {
					require.Empty(t, state, call)
				}
			}
		}
	}
}

func newUsedDB(t *testing.T) *kit.TestDB {
	db := kit.NewDB(t)
	db.DefinePolicy("p", 20, 1, time.Hour)
	db.DefinePolicy("q", 10, 1, time.Hour, kit.Ephemeral)
	db.Execute("select from ratelimit_override('p', 'KEY', 20), ratelimit_acquire('p', 'KEY', 1, 'i1') as p, ratelimit_acquire('q', 'KEY', 1, 'i1') as q")
	db.Lend("jobs", 5, time.Hour)
	db.Execute("select ratelimit_hold('jobs', 'KEY', 'h')")
	return db
}

// Each function of use is a grant of its own, and needs no other.
func TestPrivileges_EachFunctionOfUse(t *testing.T) {
	t.Parallel()
	for _, function := range kit.ApplicationFunctions(t, pgtest.New(t)) {
		t.Run(function, func(t *testing.T) {
			t.Parallel()
			caller := kit.NewRole(t)
			db := newUsedDB(t)
			db.Execute("grant execute on function " + function + " to " + caller)
			requireCalls(t, kit.ConnectAs(t, db.DB, caller), function)
			requireRefused(t, db.DB, caller, function)
		})
	}
}

// The role that the image makes for the application can use all there is, and administer nothing.
func TestPrivileges_TheApplicationOfTheImage(t *testing.T) {
	t.Parallel()
	app := kit.NewRole(t)
	db := newUsedDB(t)
	db.Execute(strings.ReplaceAll(kit.ImageGrants(t), "ratelimit_app", app))
	functions := kit.ApplicationFunctions(t, db.DB)
	requireCalls(t, kit.ConnectAs(t, db.DB, app), functions...)
	requireRefused(t, db.DB, app, functions...)
}

// Neither to PUBLIC nor to a role.
func TestPrivileges_DefaultPrivilegesGiveNothingAway(t *testing.T) {
	kit.InParallel(t, map[string]string{"everywhere": "", "in the schema": "in schema public"}, func(t *testing.T, scope string) {
		favourite, stranger := kit.NewRole(t), kit.NewRole(t)
		db := pgtest.Empty(t)
		for _, grantee := range []string{favourite, "public"} {
			for _, objects := range []string{"functions", "tables", "sequences", "types", "schemas"} {
				if objects != "schemas" || scope == "" {
					db.Exec(t, fmt.Sprintf("alter default privileges %s grant all on %s to %s", scope, objects, grantee))
				}
			}
		}
		require.NoError(t, migrations.Up(context.Background(), db.Connect(t)))
		requireRefused(t, db, favourite)
		requireRefused(t, db, stranger)
	})
}

// ratelimit_reset_all and ratelimit_cleanup_all are not SECURITY DEFINER, because they commit: each takes three grants, which give nothing else.
func TestPrivileges_ProceduresTakeThreeGrants(t *testing.T) {
	t.Parallel()
	for call, helper := range map[string]string{"ratelimit_reset_all('p')": "reset_batch", "ratelimit_cleanup_all()": "cleanup_batch"} {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			janitor := kit.NewRole(t)
			db := kit.NewDB(t)
			db.DefinePolicy("p", 10, 10, time.Second, kit.Remember(time.Second))
			db.DefinePolicy("q", 10, 10, time.Second)
			db.AcquireAt(kit.T0, "p", "due", 3, "first")
			db.AcquireAt(kit.T0.Add(time.Hour), "q", "in use", 3, "first")
			conn := kit.ConnectAs(t, db.DB, janitor)
			procedure, _, _ := strings.Cut(call, "(")
			for _, grant := range []string{"execute on procedure " + procedure, "usage on schema ratelimit", "execute on function ratelimit." + helper} {
				err := kit.ErrorOf(conn.Exec(t.Context(), "call "+call))
				kit.RequireState(t, "42501", err, "not without %s", grant)
				if !strings.HasPrefix(grant, "execute on procedure") { // which PostgreSQL itself looks for
					require.Contains(t, kit.PgError(err).Hint, "grant "+grant+" to "+janitor)
				}
				db.Execute("grant " + grant + " to " + janitor)
			}
			kit.Execute(t, conn, "call "+call)
			require.Nil(t, db.Bucket("p", "due"))
			require.NotNil(t, db.Bucket("q", "in use"))
			remembered := kit.Column(t, db.DB, "select key from ratelimit.idempotency_keys")
			require.Contains(t, remembered, "in use")
			require.Equal(t, helper == "reset_batch", slices.Contains(remembered, "due"), "clean-up forgets an idempotency key, and a reset keeps it")
			for _, table := range slices.Concat([]string{"policies", "overrides"}, kit.BucketTables, kit.SlotTables) {
				kit.RequireState(t, "42501", kit.ErrorOf(conn.Exec(t.Context(), "select from ratelimit."+table)), "%s", table)
			}
			kit.RequireState(t, "42501", kit.ErrorOf(conn.Exec(t.Context(), "select ratelimit.clock()")))
		})
	}
}

// requireRefused calls every function and reads every table as a role. All but the functions named are 42501.
func requireRefused(t *testing.T, db *pgtest.DB, role string, but ...string) {
	ctx := context.Background()
	conn := kit.ConnectAs(t, db, role)
	calls := kit.Column(t, db, `
		select format('%s %s(%s)', case prokind when 'p' then 'call' else 'select' end, p.oid::regproc,
		              (select string_agg('null::' || format_type(t, null), ', ' order by n)
		                 from unnest(proargtypes::oid[]) with ordinality as u (t, n)))
		  from `+kit.PackageFunctions+" as p where proname <> all (coalesce($1::text[], '{}'))", but)
	require.Greater(t, len(calls), 20)
	for _, table := range kit.Column(t, db, `
		select c.oid::regclass::text from pg_class as c
		 where relkind = 'r' and (relnamespace = 'ratelimit'::regnamespace or relname like 'ratelimit\_%')`) {
		calls = append(calls, "table "+table, "insert into "+table+" default values", "delete from "+table,
			"truncate "+table, "lock table "+table+" in access exclusive mode", "drop table "+table,
			"alter table "+table+" owner to current_user", "create index on "+table+" ((1))")
	}
	calls = append(calls,
		"select null::ratelimit.decision",
		"update ratelimit.buckets set level = 0",
		"update ratelimit.policies set capacity = 1",
		"update ratelimit.overrides set capacity = 1",
		"update ratelimit.version set version = 0",
		"create table ratelimit.mine ()",
		"create or replace function ratelimit.clock() returns timestamptz language sql as 'select now()'",
		"alter function ratelimit.clock() rename to mine",
		"create function ratelimit.refilled_level() returns integer language sql as 'select 1'",
		"alter function ratelimit_acquire reset all",
		"drop function ratelimit_acquire",
		"grant execute on function ratelimit.clock() to current_user",
		"alter schema ratelimit owner to current_user",
		"drop schema ratelimit cascade",
	)
	for _, call := range calls {
		kit.RequireState(t, "42501", kit.ErrorOf(conn.Exec(ctx, "begin; "+call+"; rollback")), "%s", call)
		kit.Execute(t, conn, "rollback")
	}
}

// The grant that an error of the client names is the one that helps. The client makes it of the statement that it has sent.
func TestPrivileges_TheClientNamesTheGrant(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	role := kit.NewRole(t)
	db := kit.NewDB(t)
	db.DefinePolicy("p", 1000, 1, kit.ADay)
	pool := kit.PoolAs(t, db.DB, role)
	limiter := client.New(pool)

	grant := regexp.MustCompile(`grant [^;]+ to <role>;`)
	remedy := func(err error, want string) {
		kit.RequireState(t, "42501", err)
		statements := strings.Join(grant.FindAllString(err.Error(), -1), " ")
		require.Contains(t, statements, want)
		db.Execute(strings.ReplaceAll(statements, "<role>", role))
	}
	for function, call := range map[string]func() error{
		"ratelimit_acquire(text, text, bigint, text)": func() error { return kit.ErrorOf(limiter.Acquire(ctx, "p", "k")) },
		"ratelimit_acquire_all(text[], text[], bigint[], text)": func() error {
			return kit.ErrorOf(limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}}))
		},
		"ratelimit_override(text, text, bigint, bigint, interval, timestamptz, text, timestamp, interval)": func() error {
			return limiter.Override(ctx, client.Override{Policy: "p", Key: "k", Capacity: 1})
		},
		"ratelimit_define_policy(text, bigint, bigint, interval, boolean, boolean, interval, boolean, interval, text, timestamp, interval, interval)": func() error {
			return limiter.DefinePolicy(ctx, client.Policy{Name: "q", Capacity: 1, Refill: 1, Every: time.Second})
		},
	} {
		remedy(call(), "grant execute on function "+function+" to <role>;")
		err := call()
		require.NotEqual(t, "42501", kit.SQLState(err), "%v", err)
	}

	running, stop := context.WithCancel(ctx)
	defer stop()
	var refused error
	limiter.RunCleanup(running, time.Hour, client.OnError(func(err error) { refused = err; stop() }))
	remedy(refused, "grant execute on procedure ratelimit_cleanup_all(interval) to <role>;")
	require.NoError(t, kit.ErrorOf(pool.Exec(ctx, "call ratelimit_cleanup_all()")))
}
