// Package security tests what a role may do, what hostile sessions and schema owners can change, and whose code runs.
package security

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
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

func TestMain(m *testing.M) { pgtest.Main(m) }

// A caller plants a twin of each PostgreSQL function that the package's code names, of each private function, of each operator on
// its types, of its types and of its tables. All twins are first on the caller's path, and some are in pg_temp.
func TestSecurity_PlantedTwinsAreNotFound(t *testing.T) {
	t.Parallel()
	caller := kit.NewRole(t)
	db := kit.NewDB(t)
	db.SetClock(kit.T0)
	db.Execute("create schema twins authorization " + caller + `;
		grant temporary on database ` + pgx.Identifier{db.Name}.Sanitize() + ` to ` + caller)
	grantTranscript(db, caller)
	want := hostileTranscript(t, db, kit.ConnectAs(t, db.DB, caller), "like any other")

	functions := kit.Column(t, db.DB, "with words as (select distinct word from "+kit.PackageFunctions+` as p, regexp_split_to_table(p.prosrc, '\W+') as word)
		select format('create function twins.%I(%s) returns %s language plpgsql as $$ begin raise exception ''a twin was called''; end $$',
		              p.proname, pg_get_function_identity_arguments(p.oid), coalesce(pg_get_function_result(p.oid), 'void'))
		  from pg_proc as p join words on word = p.proname
		 where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind <> 'p'
		 union all
		select format('create function twins.%I(%s) returns integer language plpgsql as $$ begin raise exception ''a twin was called''; end $$', p.proname, (
		         select string_agg(case when t.typnamespace = 'ratelimit'::regnamespace then 'anyelement' else format_type(t.oid, null) end, ', ' order by a.place)
		           from unnest(p.proargtypes::oid[]) with ordinality as a (type, place) join pg_type as t on t.oid = a.type))
		  from pg_proc as p where p.pronamespace = 'ratelimit'::regnamespace and p.prokind = 'f'`)
	operators := kit.Column(t, db.DB, `
		select format('create function twins.operator_%s(%s, %s) returns %s language plpgsql as $$ begin raise exception ''a twin was called''; end $$; ', oid, l, r, oprresult::regtype)
		       || format('create operator twins.%s (leftarg = %s, rightarg = %s, function = twins.operator_%s)', oprname, l, r, oid)
		  from pg_operator, format_type(oprleft, null) as l, format_type(oprright, null) as r
		 where oprname in ('+', '-', '*', '/', '%', '=', '<>', '<', '>', '<=', '>=', '||')
		   and l = any ($1) and r = any ($1)`, []string{"bigint", "integer", "smallint", "numeric", "double precision", "text", "boolean", "timestamp with time zone",
		"interval", "tid", "oid", "name", "anyarray", "anycompatiblearray", "anycompatible", "record"})
	types := []string{
		"create domain twins.int8 as pg_catalog.int8 check (false)", "create domain twins.int4 as pg_catalog.int4 check (false)",
		"create domain twins.text as pg_catalog.text check (false)", "create domain twins.interval as pg_catalog.interval check (false)",
		"create domain twins.timestamptz as pg_catalog.timestamptz check (false)", "create domain twins.bool as pg_catalog.bool check (false)",
		"create domain twins.numeric as pg_catalog.numeric check (false)", "create type twins.decision as (nothing pg_catalog.int4)",
	}
	for _, table := range slices.Concat([]string{"policies", "overrides"}, kit.BucketTables, kit.SlotTables) {
		types = append(types, "create table twins."+table+" (nothing pg_catalog.int4)")
	}

	conn := kit.ConnectAs(t, db.DB, caller)
	planted := 0
	for _, sql := range slices.Concat(functions, operators, types) {
		switch _, err := conn.Exec(context.Background(), sql, pgx.QueryExecModeSimpleProtocol); kit.SQLState(err) {
		case "":
			planted++
		case "42P13", "42P16", "0A000", "42601": // of a kind that only C can write
		default:
			require.NoError(t, err, sql)
		}
	}
	t.Logf("%d of %d functions, operators, types and tables planted", planted, len(functions)+len(operators)+len(types))
	require.Greater(t, planted, 400)
	for _, table := range slices.Concat([]string{"policies", "overrides", "decision", "text", "timestamptz"}, kit.BucketTables, kit.SlotTables) {
		kit.Execute(t, conn, "create temporary table "+table+" (nothing pg_catalog.int4)")
	}
	kit.Execute(t, conn, "set search_path = twins, pg_temp, pg_catalog, public")
	require.ErrorContains(t, kit.ErrorOf(conn.Exec(context.Background(), "select 1::bigint + 1::bigint")), "a twin was called")
	require.ErrorContains(t, kit.ErrorOf(conn.Exec(context.Background(), "select clock_timestamp()")), "a twin was called")

	got := hostileTranscript(t, db, conn, "beside twins")
	require.Len(t, got, len(want))
	for i := range want {
		require.Equal(t, want[i], got[i])
	}

	// The caller's own statements do find the twins. 42804: the twin of a function that answers yes or no returns a number.
	db.Execute("alter function ratelimit_peek reset search_path; grant usage on schema ratelimit to " + caller)
	_, err := conn.Exec(context.Background(), "select public.ratelimit_peek('odd beside twins', 'k')")
	require.Contains(t, []string{"P0001", "23514", "42804"}, kit.SQLState(err), "%v", err)
}

// A role that may clean up cannot tell clean-up the time.
func TestSecurity_CleanupTakesNobodysWordForTheTime(t *testing.T) {
	t.Parallel()
	janitor := kit.NewRole(t)
	db := kit.NewDB(t)
	for name, durability := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		db.DefinePolicy(name, 10, 1, time.Hour, durability)
		db.AcquireAt(kit.T0, name, "k", 3, "first")
	}
	db.Execute("grant usage on schema ratelimit to " + janitor + "; grant execute on function ratelimit.cleanup_batch, ratelimit_cleanup to " + janitor)
	before := kit.RowsOf(t, db.DB)

	conn := kit.ConnectAs(t, db.DB, janitor)
	for _, dueBefore := range []string{"infinity", "294276-12-31", "2024-04-30"} {
		kit.Execute(t, conn, "select ratelimit.cleanup_batch(1000, '1 minute', $1::text::timestamptz, $1::text::timestamptz)", dueBefore)
		require.Equal(t, before, kit.RowsOf(t, db.DB), dueBefore)
	}
	require.True(t, db.Acquire("durable", "k", 3, "first").Replayed)
}

// The one public routine that runs with its caller's rights finds its caller's functions and operators
// too: what somebody else has put on the path must not get those rights.
func TestSecurity_CleanupAllRunsNobodysCode(t *testing.T) {
	t.Parallel()
	planter := kit.NewRole(t)
	db := kit.NewDB(t)
	db.Execute("grant create on schema public to " + planter)
	kit.Execute(t, kit.ConnectAs(t, db.DB, planter), `
		create function public.planted() returns void language plpgsql as $$ begin raise exception 'planted code runs as %', current_user; end $$;
		create function public.format(text, text) returns text language sql as $$ select public.planted(); select $2 $$;
		create function public.coalesce(text, text) returns text language sql as $$ select public.planted(); select $2 $$;
		create function public.clock_timestamp(variadic text[]) returns timestamptz language sql as $$ select public.planted(); select now() $$;
		create function public.wrong(timestamptz, interval) returns timestamptz language sql as $$ select public.planted(); select $1 $$;
		create function public.untrue(anyelement, anyelement) returns boolean language sql as $$ select public.planted(); select true $$;
		create function public.untrue(bigint, integer) returns boolean language sql as $$ select public.planted(); select true $$;
		create function public.joined(text, text) returns text language sql as $$ select public.planted(); select $1 $$;
		create operator public.+ (leftarg = timestamptz, rightarg = interval, function = public.wrong);
		create operator public.> (leftarg = anyelement, rightarg = anyelement, function = public.untrue);
		create operator public.>= (leftarg = anyelement, rightarg = anyelement, function = public.untrue);
		create operator public.= (leftarg = bigint, rightarg = integer, function = public.untrue);
		create function public.untrue(timestamptz, timestamptz) returns boolean language sql as $$ select public.planted(); select true $$;
		create operator public.>= (leftarg = timestamptz, rightarg = timestamptz, function = public.untrue);
		create operator public.|| (leftarg = text, rightarg = text, function = public.joined)`)
	for _, path := range []string{"pg_catalog, public", "public, pg_catalog"} { // of the second, what is planted comes first
		conn := db.Connect(t)
		kit.Execute(t, conn, "set search_path = "+path)
		require.NoError(t, kit.ErrorOf(conn.Exec(context.Background(), "call ratelimit_cleanup_all()")), path)
		for _, budget := range []string{"0", "-1 second", "-178000000 years"} {
			_, err := conn.Exec(context.Background(), "call ratelimit_cleanup_all($1::text::interval)", budget)
			require.Equal(t, "22023", kit.SQLState(err), "%s, %s: %v", path, budget, err)
		}
		require.NoError(t, kit.ErrorOf(conn.Exec(context.Background(), "call ratelimit_cleanup_all('178000000 years')")), path)
	}
}

// The owner of the schema that has the public functions can put others beside them, and take them away.
// Calls with typed arguments, such as the client's, are not led astray; and nobody's rights are gained.
func TestSecurity_HostileOwnerOfTheSchema(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	owner, landlord, caller := kit.NewRole(t), kit.NewRole(t), kit.NewRole(t)
	db := pgtest.Empty(t)
	db.Exec(t, fmt.Sprintf(`
		create schema app authorization %[2]s;
		grant usage, create on schema app to %[1]s;
		grant usage on schema app to %[3]s;
		grant create on database %[4]s to %[1]s`, owner, landlord, caller, pgx.Identifier{db.Name}.Sanitize()))
	installer := kit.ConnectAs(t, db, owner)
	db.Exec(t, "create schema if not exists public; grant create on schema public to "+owner)
	kit.Execute(t, installer, "set search_path = app")
	require.NoError(t, migrations.Up(ctx, installer))
	kit.Execute(t, installer, fmt.Sprintf(`
		set search_path = app;
		select ratelimit_define_policy('p', 10, 1, '1 hour');
		grant execute on all functions in schema app to %s`, caller))

	hostile := kit.ConnectAs(t, db, landlord)
	kit.Execute(t, hostile, `
		set search_path = app;
		create function planted() returns void language plpgsql as $$ begin raise exception 'planted'; end $$;
		create function ratelimit_acquire(text, text, integer, text default null) returns text language sql as $$ select planted(); select null::text $$;
		create function ratelimit_acquire(anyelement, anyelement, bigint default 1) returns text language sql as $$ select planted(); select null::text $$;
		create function ratelimit_acquire(character varying, character varying, numeric, character varying) returns text language sql as $$ select planted(); select null::text $$;
		create function ratelimit_acquire_many(variadic text[]) returns text language sql as $$ select planted(); select null::text $$;
		create function ratelimit_peek(text, text, integer) returns text language sql as $$ select planted(); select null::text $$;
		create function ratelimit_peek(anyelement, text, bigint) returns text language sql as $$ select planted(); select null::text $$;
		create function ratelimit_refund(text, text, integer) returns text language sql as $$ select planted(); select null::text $$;
		create function ratelimit_reset(character varying, text) returns void language sql as $$ select planted() $$;
		create function ratelimit_define_policy(text, integer, integer, text) returns void language sql as $$ select planted() $$;
		create function ratelimit_cleanup(numeric) returns text language sql as $$ select planted(); select null::text $$`,
		pgx.QueryExecModeSimpleProtocol)

	for _, mode := range kit.Protocols {
		limiter := client.New(kit.InMode{Conn: kit.ConnectAs(t, db, caller), Mode: mode}, client.Schema("app"))
		d := kit.NoError(limiter.Acquire(ctx, "p", "k", client.Cost(2), client.IdempotencyKey("first "+mode.String())))(t)
		require.True(t, d.Allowed)
		d = kit.NoError(limiter.Peek(ctx, "p", "k", client.Cost(11)))(t)
		require.True(t, d.Never())
		require.NoError(t, kit.ErrorOf(limiter.Refund(ctx, "p", "k", 1)))
		require.NoError(t, limiter.Reset(ctx, "p", "k"))
		require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 10, Refill: 1, Every: time.Hour}))
		require.NoError(t, kit.ErrorOf(limiter.Cleanup(ctx)))
	}

	before := kit.RowsOf(t, db)
	for _, sql := range []string{
		"alter function app.ratelimit_acquire(text, text, bigint, text) security invoker",
		"alter function app.ratelimit_acquire(text, text, bigint, text) set search_path = app, ratelimit",
		"alter function app.ratelimit_acquire(text, text, bigint, text) owner to current_user",
		"alter function app.ratelimit_acquire(text, text, bigint, text) reset all",
		"grant execute on function app.ratelimit_peek(text, text, bigint) to current_user",
		"create or replace function app.ratelimit_version() returns text language sql as 'select 1'",
		"select app.ratelimit_peek('p', 'k', 1::bigint)",
		"table ratelimit.buckets",
	} {
		kit.RequireState(t, "42501", kit.ErrorOf(hostile.Exec(ctx, sql)), "%s", sql)
	}

	// What belongs to PostgreSQL's idea of a schema's owner. The state stays out of reach.
	kit.Execute(t, hostile, `
		drop function app.ratelimit_acquire(text, text, bigint, text);
		create function app.ratelimit_acquire(policy text, key text, cost bigint default 1, idempotency_key text default null)
		returns table (allowed boolean, remaining bigint, retry_after interval, reset_after interval, capacity bigint, replayed boolean, shadowed boolean)
		language plpgsql security definer as $$ begin delete from ratelimit.buckets; end $$`, pgx.QueryExecModeSimpleProtocol)
	kit.RequireState(t, "42501", kit.ErrorOf(client.New(kit.ConnectAs(t, db, caller), client.Schema("app")).Acquire(ctx, "p", "k")))
	require.Equal(t, before, kit.RowsOf(t, db))
}

// Code in a caller's argument runs with the caller's rights, before any function of the package.
func TestSecurity_CallersCodeRunsAsTheCaller(t *testing.T) {
	t.Parallel()
	caller := kit.NewRole(t)
	db := kit.NewDB(t)
	db.DefinePolicy("p", 10, 1, time.Hour)
	db.Execute("create schema spies authorization " + caller + "; grant execute on function ratelimit_acquire, ratelimit_acquire_many, ratelimit_acquire_all, ratelimit_acquire_packed to " + caller)
	conn := kit.ConnectAs(t, db.DB, caller)
	kit.Execute(t, conn, `
		create table spies.log (who name);
		create function spies.spy() returns boolean language sql as $$ insert into spies.log values (current_user); select true $$;
		create domain spies.key as text check (spies.spy());
		create domain spies.cost as bigint check (spies.spy());
		create type spies.number as (n bigint);
		create function spies.to_bigint(spies.number) returns bigint language sql as $$ insert into spies.log values (current_user); select $1.n $$;
		create cast (spies.number as bigint) with function spies.to_bigint as implicit`, pgx.QueryExecModeSimpleProtocol)
	for _, sql := range []string{
		"select * from ratelimit_acquire('p', 'k'::spies.key, 1::spies.cost, 'first'::spies.key)",
		"select * from ratelimit_acquire('p', 'k', row(1)::spies.number)",
		"select * from ratelimit_acquire_many(array['p'], array['k']::spies.key[], array[1]::spies.cost[])",
		"select * from ratelimit_acquire_all(array['p'], array['k']::spies.key[], array[1]::spies.cost[], 'second'::spies.key)",
		"select * from ratelimit_acquire_packed(array['p'], array['k']::spies.key[], array[1]::spies.cost[])",
	} {
		kit.Execute(t, conn, sql)
	}
	require.Equal(t, []string{caller}, kit.Column(t, db.DB, "select distinct who::text from spies.log"))
	require.EqualValues(t, 5, db.Left("p", "k"))
}

// Neither statistics nor rare commands show or change what the tables hold.
func TestSecurity_NoOtherWayToTheTables(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	caller := kit.NewRole(t)
	db := kit.NewDB(t)
	db.DefinePolicy("p", 1000, 1, time.Hour)
	for i := range 20 {
		db.Acquire("p", fmt.Sprintf("secret %d", i%3), 1, fmt.Sprint(i))
	}
	db.Execute("analyze ratelimit.buckets, ratelimit.idempotency_keys, ratelimit.policies")
	db.Execute("grant execute on function ratelimit_acquire, ratelimit_peek to " + caller)
	db.Execute("select ratelimit_override('p', 'secret 1', 5)")
	conn := kit.ConnectAs(t, db.DB, caller)

	const statistics = "select count(*)::text from pg_stats where schemaname = 'ratelimit'"
	require.NotEqual(t, []string{"0"}, kit.Column(t, db.DB, statistics))
	seen := kit.One[string](t, conn, statistics)
	require.Equal(t, "0", seen)

	before := kit.RowsOf(t, db.DB)
	for _, table := range slices.Concat([]string{"policies", "overrides"}, kit.BucketTables, kit.SlotTables) {
		for _, sql := range []string{
			"alter table ratelimit.%s enable row level security", "alter table ratelimit.%s force row level security",
			"create policy mine on ratelimit.%s using (false)", "create rule mine as on update to ratelimit.%s do instead nothing",
			"create trigger mine before update on ratelimit.%s execute function suppress_redundant_updates_trigger()",
			"copy ratelimit.%s to stdout", "copy ratelimit.%s from stdin", "create view pg_temp.mine as table ratelimit.%s",
			"create table pg_temp.mine (like ratelimit.%s)", "create statistics mine on ctid, key from ratelimit.%s",
			"create temporary table mine () inherits (ratelimit.%s)", "create publication mine for table ratelimit.%s",
			"grant select on ratelimit.%s to current_user", "comment on table ratelimit.%s is 'mine'", "reindex table ratelimit.%s",
			"cluster ratelimit.%s", "alter table ratelimit.%s set (autovacuum_enabled = off)", "alter table ratelimit.%s set schema pg_temp",
			"select pg_catalog.pg_table_is_visible('ratelimit.%s'::regclass)", "explain analyze delete from ratelimit.%s",
			"declare mine cursor for table ratelimit.%s for update", "merge into ratelimit.%s using (values (1)) as v (n) on true when matched then delete",
		} {
			sql = fmt.Sprintf(sql, table)
			kit.RequireState(t, "42501", kit.ErrorOf(conn.Exec(ctx, "begin; "+sql+"; rollback")), "%s", sql)
			kit.Execute(t, conn, "rollback")
		}
	}
	for _, sql := range []string{
		"create or replace function pg_catalog.clock_timestamp() returns timestamptz language sql as $$ select timestamptz 'epoch' $$",
		"alter function pg_catalog.clock_timestamp() rename to mine", "alter function ratelimit_acquire set search_path = evil",
		"alter function ratelimit_acquire security invoker", "alter function ratelimit_acquire depends on extension plpgsql",
		"alter type ratelimit.decision add attribute mine text", "create cast (ratelimit.decision as text) with inout as implicit",
		"set session_replication_role = replica", "alter system set timezone = 'UTC'",
		"create event trigger mine on ddl_command_end execute function pg_catalog.suppress_redundant_updates_trigger()",
	} {
		kit.RequireState(t, "42501", kit.ErrorOf(conn.Exec(ctx, sql)), "%s", sql)
	}
	require.Equal(t, before, kit.RowsOf(t, db.DB))
}

// Of all pairs of texts that somebody might take for each other, joined or not, each bucket and each
// idempotency key is its own: no tenant is answered with another's grant.
func TestSecurity_NobodyReplaysAnothersIdempotencyKey(t *testing.T) {
	t.Parallel()
	texts := []string{"a", "b", "ab", "ba", "a:b", "a,b", "(a,b)", "a|b", "a\x1fb", "a\x01b", "a/b", "a b", "A", "á", "a\u0301", "a ", " a", "a\t", `a\`, `\a`, "a'", `"a"`, "a%", "a_", "null"}
	db := kit.NewDB(t)
	for name, durability := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		db.DefinePolicy(name, 1_000_000, 1, time.Hour, durability)
		db.DefinePolicy(name+":a", 1_000_000, 1, time.Hour, durability)
	}
	var policies, keys, idempotencyKeys []string
	var costs []int64
	for _, policy := range []string{"durable", "durable:a", "ephemeral", "ephemeral:a"} {
		for _, key := range texts {
			for _, idempotencyKey := range texts {
				policies, keys, idempotencyKeys = append(policies, policy), append(keys, key), append(idempotencyKeys, idempotencyKey)
				costs = append(costs, int64(len(costs)+1)) // another's would be RL002
			}
		}
	}
	require.Len(t, costs, 2500)
	for _, again := range []string{"false", "true"} {
		require.Equal(t, []string{again + " 2500"}, kit.Column(t, db.DB, `
			select format('%s %s', coalesce(error_code, replayed::text), count(*))
			  from ratelimit_acquire_many($1, $2, $3, $4) group by replayed, error_code`, policies, keys, costs, idempotencyKeys))
	}
	for i := 0; i < len(costs); i += 7 {
		require.True(t, db.Acquire(policies[i], keys[i], costs[i], idempotencyKeys[i]).Replayed)
	}
}

// The hint of an error can be pasted: it defines the policy asked for, whatever its name is made of.
func TestSecurity_HintsAreQuoted(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := kit.NewDB(t)
	for _, conforming := range []string{"on", "off"} {
		conn := db.Connect(t)
		kit.Execute(t, conn, "set standard_conforming_strings = "+conforming)
		for _, name := range append(kit.OddTexts, `\'); select ratelimit_drop_policy('keep'); --`, `'); drop schema ratelimit cascade; --`) {
			_, err := conn.Exec(ctx, "select ratelimit_acquire($1, 'k')", name)
			kit.RequireState(t, "RL001", err)
			sql, found := strings.CutPrefix(kit.PgError(err).Hint, "Names are case-sensitive, and ratelimit_policies() lists them. Define a new one first: ")
			require.True(t, found, kit.PgError(err).Hint)
			require.NoError(t, kit.ErrorOf(conn.PgConn().Exec(ctx, strings.TrimSuffix(sql, ".")).ReadAll()), sql)
			require.Equal(t, []string{name}, kit.Column(t, db.DB, "select policy from ratelimit_policies()"))
			kit.Execute(t, conn, "select ratelimit_drop_policy($1)", name)
		}
	}
}

// Texts that inject where quoting goes wrong are sent through the client: in sessions that read string
// constants differently, and by the protocol that writes arguments into the statement.
func TestSecurity_NothingIsInjectedThroughTheClient(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := kit.NewDB(t)
	db.DefinePolicy("p", 1000, 1, time.Hour)
	texts := append([]string{
		`\'; delete from ratelimit.policies; --`, `'; delete from ratelimit.policies; --`, "\xbf'; delete from ratelimit.policies; --",
		"\xbf\\'; delete from ratelimit.policies; --", "\x95'; delete from ratelimit.policies; --", "\x83\\'; delete from ratelimit.policies; --",
		"x\x00'; delete from ratelimit.policies; --", "$1'; delete from ratelimit.policies; --", "$1::text", "/*", "--", "表'", "ソ'; delete from ratelimit.policies; --",
	}, kit.OddTexts...)
	sessions := []string{
		"", "set standard_conforming_strings = off", "set standard_conforming_strings = off; set backslash_quote = on",
		"set client_encoding = 'SJIS'", "set client_encoding = 'BIG5'", "set client_encoding = 'GB18030'", "set client_encoding = 'SQL_ASCII'", "set client_encoding = 'LATIN1'",
	}
	const policies = "select p::text from ratelimit.policies as p"
	before := kit.Column(t, db.DB, policies)
	answered := 0
	for _, session := range sessions {
		for _, mode := range kit.Protocols {
			conn := db.Connect(t)
			kit.Execute(t, conn, session)
			limiter := client.New(kit.InMode{Conn: conn, Mode: mode})
			for _, text := range texts {
				if _, err := limiter.Acquire(ctx, "p", text, client.IdempotencyKey(text)); err == nil {
					answered++
				}
				require.Error(t, kit.ErrorOf(limiter.Peek(ctx, text, "k")), "%s: there is no policy %q", session, text)
				require.Error(t, limiter.DropPolicy(ctx, text))
				require.False(t, conn.IsClosed(), "%s: %q", session, text)
			}
			require.Equal(t, before, kit.Column(t, db.DB, policies), "%s, %s", session, mode)
		}
	}
	require.Greater(t, answered, len(sessions)*len(texts))
}

// grantTranscript lets a role make the calls of hostileTranscript.
func grantTranscript(db *kit.TestDB, role string) {
	for name := range kit.Functions {
		if strings.Contains(kit.Functions[name].Arguments, "key") || name == "guard" || name == "doctor" {
			db.Execute("grant execute on function ratelimit_" + name + " to " + role)
		}
	}
}

// hostileTranscript makes the calls of the call table about buckets of its own, and returns the answers and the stored rows. Answers are in
// binary, because settings change texts, and the statements have no operator, because there are twins.
func hostileTranscript(t *testing.T, db *kit.TestDB, conn *pgx.Conn, name string) []string {
	ctx := context.Background()
	name = fmt.Sprintf("%x", sha256.Sum256([]byte(name)))[:8] // binary answers have the lengths of names
	var answers []string
	ask := func(sql string) {
		require.False(t, conn.IsClosed())
		rows, err := conn.Query(ctx, sql, pgx.QueryResultFormats{pgx.BinaryFormatCode})
		answer := sql
		for err == nil && rows.Next() {
			answer += fmt.Sprintf("\n%q", rows.RawValues())
		}
		if err == nil {
			err = rows.Err()
		}
		require.NotEqual(t, "42501", kit.SQLState(err), sql)
		if e := kit.PgError(err); e != nil {
			answer += "\n" + e.Code + " " + e.Message
		} else {
			require.NoError(t, err)
		}
		answers = append(answers, strings.ReplaceAll(answer, name, ""))
	}
	policies := map[string]string{
		"odd":        "7, 3, '1 day 00:00:07.654321', false, true, '1 day'",
		"ephemeral":  "1000, 7, '13 seconds', false, false, '9 days 1 microsecond'",
		"fast steps": "9000000000000, 1, '3 microseconds', true, false, '1 hour'",
		"month":      "7, period => '1 month'",
		"jobs":       "3, lease => '61 seconds', durable => false",
	}
	for _, policy := range slices.Sorted(maps.Keys(policies)) {
		full := policy + " " + name
		db.SetClock(kit.T0)
		db.Execute("select ratelimit_define_policy($1, "+policies[policy]+")", full)
		table := `"guarded by ` + policy + `"`
		kit.Execute(t, conn, "create temporary table "+table+" (customer pg_catalog.text); create trigger limited after insert on pg_temp."+table+
			" referencing new table as inserted for each statement execute function public.ratelimit_guard("+kit.Quoted(full)+", 'customer')",
			pgx.QueryExecModeSimpleProtocol)
		for _, at := range []time.Duration{7 * time.Microsecond, 25 * time.Hour} {
			db.SetClock(kit.T0.Add(at))
			for _, function := range slices.Sorted(maps.Keys(kit.Functions)) {
				if f := kit.Functions[function]; strings.Contains(f.Arguments, " key") {
					for _, call := range f.Samples(function) {
						ask(strings.NewReplacer("select from ", "select * from public.", "(null", "("+kit.Quoted(full), "'p'", kit.Quoted(full), "{p,p}",
							`{"`+full+`","`+full+`"}`, "KEY", "k").Replace(call))
					}
				}
			}
			ask("insert into pg_temp." + table + " values ('guarded'), ('guarded'), ('special')")
		}
		answers = append(answers, kit.Column(t, db.DB, `
			select format('%s %s %s due %s', key, level, refilled_at, due_at)
			  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b
			  join ratelimit.policies as p on p.id = b.policy_id where p.name = $1
			union all
			select format('%s %s %s %s %s until %s', key, idempotency_key, cost, remaining, reset_after, expires_at)
			  from (table ratelimit.idempotency_keys union all table ratelimit.ephemeral_idempotency_keys) as b
			  join ratelimit.policies as p on p.id = b.policy_id where p.name = $1
			order by 1`, full)...)
	}
	kit.Execute(t, conn, "select severity, finding, remedy from public.ratelimit_doctor()") // takes seconds without indexes
	return answers
}

// Code that runs with the search_path of whoever runs it finds, in schema public, what others put there. PostgreSQL's own functions and
// operators come first only where their argument types match exactly; where they would take a conversion, a planted one for just these
// types wins, and runs with the rights of the installer. traps plants all of those for the types that the code deals in.
const traps = `
	do $plant$
	declare
	  v_types constant text[] := array['oid', 'regnamespace', 'regclass', 'regproc', 'regprocedure', 'regrole', 'regtype', 'name', 'text',
	                                   '"char"', 'integer', 'bigint', 'smallint', 'numeric', 'double precision', 'boolean',
	                                   'interval', 'timestamptz', 'json', 'oid[]', 'text[]', 'name[]', 'bigint[]'];
	  v record;
	begin
	  for v in select l, r, result, symbols, 'trap_' || row_number() over () as trap
	             from unnest(v_types) as l, unnest(v_types) as r,
	                  (values ('boolean', array['=', '<>', '<', '>', '<=', '>=']), ('text', array['||']), ('numeric', array['+', '-', '*', '/', '%'])) as k (result, symbols)
	  loop
	    execute pg_catalog.format('create function public.%s(%s, %s) returns %s language plpgsql as $f$ begin raise exception ''a trap for %% and %%'', %L, %L; end $f$',
	                   v.trap, v.l, v.r, v.result, v.l, v.r);
	    for i in 1 .. cardinality(v.symbols) loop
	      if not exists (select from pg_operator where oprname = v.symbols[i] and oprleft = v.l::regtype::oid and oprright = v.r::regtype::oid) then
	        execute pg_catalog.format('create operator public.%s (leftarg = %s, rightarg = %s, function = public.%s)', v.symbols[i], v.l, v.r, v.trap);
	      end if;
	    end loop;
	  end loop;
	  for v in select pg_catalog.format('%s(text, %s)', name, types) as signature
	             from (values ('format', 'text'), ('format', 'name'), ('format', 'name, name'), ('format', 'text, text'), ('format', 'regproc'),
	                          ('format', 'oid'), ('format', 'integer'), ('format', 'bigint'), ('format', 'bigint, bigint'), ('format', 'text, bigint, bigint'),
	                          ('format', 'text, boolean'), ('json_build_object', 'text, text, bigint, text, bigint, text, bigint, text, boolean, text, boolean, text, bigint')) as f (name, types)
	           union all values ('pg_advisory_xact_lock(integer)'), ('json_agg(json)'), ('hashtext(name)'), ('set_config(text, text, integer)')
	  loop
	    execute pg_catalog.format('create function public.%s returns text language plpgsql as $f$ begin raise exception ''a trap for %%'', %L; end $f$', v.signature, v.signature);
	  end loop;
	end
	$plant$`

func trapped(t *testing.T) *pgtest.DB {
	planter := kit.NewRole(t)
	db := pgtest.Empty(t)
	db.Exec(t, "grant create on schema public to "+planter)
	kit.Execute(t, kit.ConnectAs(t, db, planter), traps)
	for _, sql := range []string{"select 1::oid = 'public'::regnamespace", "select 1.0 * 1", "select format('%s', 'x'::name)"} {
		require.ErrorContains(t, kit.ErrorOf(db.Pool.Exec(context.Background(), sql)), "a trap for", sql)
	}
	return db
}

func TestSecurity_InstallingRunsNobodysCode(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := trapped(t)
	require.NoError(t, migrations.Up(ctx, db.Connect(t)))
	db.Exec(t, "update ratelimit.version set version = 0")
	again := migrations.Up(ctx, db.Connect(t))
	require.Equal(t, "42P06", kit.SQLState(again), "%v", again)
	db.Exec(t, "update ratelimit.version set version = $1", kit.NewestMigration(t))
	_, err := db.Pool.Exec(ctx, kit.Script(t, "schedule.sql"))
	require.NotEqual(t, "P0001", kit.SQLState(err), "%v", err)
	for range 2 {
		kit.InstallPreRequest(t, db)
	}
	kit.Execute(t, db.Connect(t), kit.PreRequestScript(t, "uninstall.sql"), pgx.QueryExecModeSimpleProtocol)
	kit.InstallPreRequest(t, db)
	require.NoError(t, migrations.Down(ctx, db.Connect(t)))

	for range 2 { // first to install or remove, then to find that it is done
		kit.PsqlFile(t, db.URL, "install.sql")
	}
	for range 2 {
		kit.PsqlFile(t, db.URL, "uninstall.sql")
	}
}

func TestSecurity_TheClientRunsNobodysCode(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.New(t)
	db.Exec(t, traps)
	limiter := client.New(db.Pool)
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 10, Refill: 1, Every: 1e9, Remember: 1e9}))
	require.NoError(t, kit.ErrorOf(limiter.Acquire(ctx, "p", "k", client.Cost(2), client.IdempotencyKey("first"))))
	require.NoError(t, kit.ErrorOf(limiter.Peek(ctx, "p", "k", client.Cost(2))))
	require.NoError(t, kit.ErrorOf(limiter.Refund(ctx, "p", "k", 1)))
	_, err := limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}, {Policy: "p", Key: "l"}}, client.IdempotencyKey("second"))
	require.NoError(t, err)
	require.NoError(t, limiter.Override(ctx, client.Override{Policy: "p", Key: "k", Capacity: 1}))
	require.NoError(t, kit.ErrorOf(limiter.Overrides(ctx)))
	require.NoError(t, kit.ErrorOf(limiter.RemoveOverride(ctx, "p", "k")))
	require.NoError(t, kit.ErrorOf(limiter.Policies(ctx)))
	require.NoError(t, limiter.Reset(ctx, "p", "k"))
	require.NoError(t, kit.ErrorOf(limiter.Cleanup(ctx)))
	require.NoError(t, limiter.DropPolicy(ctx, "p"))
}
