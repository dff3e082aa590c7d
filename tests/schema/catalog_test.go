package schema

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Calls that take the branches of these functions; POLICY is a policy.
var hotCalls = []string{
	"select ratelimit_acquire('POLICY', 'k'), ratelimit_acquire('POLICY', 'k', 2, 'i'), ratelimit_acquire('POLICY', 'k', 2, 'i')",
	"select ratelimit_acquire('POLICY', 'k', 999), ratelimit_acquire('POLICY', 'k', 5000)",
	"select ratelimit_peek('POLICY', 'k'), ratelimit_peek('POLICY', 'new')",
	"select ratelimit_refund('POLICY', 'k', 1), ratelimit_settle('POLICY', 'k', 'i', 1), ratelimit_settle('POLICY', 'k', 'i', 1)",
	"select ratelimit_charge('POLICY', 'c', 5000, 'i'), ratelimit_charge('POLICY', 'c', 5000, 'i'), ratelimit_charge('POLICY', 'c', 1)",
	"select ratelimit_acquire_up_to('POLICY', 'k', 5000, 1, 'u'), ratelimit_acquire_up_to('POLICY', 'k', 5000, 1, 'u')",
	"select ratelimit_reserve('POLICY', 'k', '300 days', 10, 'r'), ratelimit_reserve('POLICY', 'k', '300 days', 10, 'r')",
	"select ratelimit_reserve('POLICY', 'k', '1 second', 10), ratelimit_reserve('POLICY', 'new', '1 second', 10), ratelimit_acquire('POLICY', 'k')",
	"select ratelimit_reset('POLICY', 'k')",
	"select ratelimit_hold('POLICY slots', 'k', 'h'), ratelimit_hold('POLICY slots', 'k', 'h'), ratelimit_hold('POLICY slots', 'k', 'i', 9), ratelimit_peek('POLICY slots', 'k')",
	"select ratelimit_renew('POLICY slots', 'k', 'h'), ratelimit_release('POLICY slots', 'k', 'h'), ratelimit_reset('POLICY slots', 'k')",
	"select from ratelimit_acquire_many('{POLICY,POLICY}', '{k,l}')",
	"select from ratelimit_acquire_many('{POLICY,POLICY,POLICY}', '{k,l,l}', '{1,1,5000}', '{m,n,o}')",
	"select from ratelimit_acquire_many('{POLICY,POLICY}', '{k,l}', null, '{p,q}')",
	"select from ratelimit_acquire_many('{POLICY,POLICY}', '{k,l}', '{1,1}', '{r}', '{2}')",
	"select from ratelimit_acquire_all('{POLICY,POLICY}', '{k,l}', '{1,1}', 's'), ratelimit_settle_all('{POLICY,POLICY}', '{k,l}', 's', '{2,0}')",
}

// The arguments and the columns of a function are those of docs/reference.md, which tests/docs compares.
func TestCatalog_FunctionsThatOnlyReadAreStable(t *testing.T) {
	t.Parallel()
	reading := []string{"doctor s", "grants s", "holders s", "http_fields s", "overrides s", "peek s", "policies s", "shard s", "status s", "usage s", "version i"}
	require.Equal(t, reading, kit.Column(t, pgtest.New(t),
		"select substr(proname, 11) || ' ' || provolatile::text from "+kit.PackageFunctions+" as p where not private and provolatile <> 'v' order by 1"))
}

func TestCatalog_SecurityDefinerWithPinnedPath(t *testing.T) {
	db := pgtest.Parallel(t)
	// They commit, which SECURITY DEFINER and SET forbid.
	require.Equal(t, []string{"ratelimit_cleanup_all", "ratelimit_reset_all"}, kit.Column(t, db, "select proname::text from "+kit.PackageFunctions+` as p
		 where not private
		   and not (prosecdef and 'search_path=ratelimit, pg_temp' = any (proconfig))
		 order by 1`))
	require.Empty(t, kit.Column(t, db, "select proname::text from "+kit.PackageFunctions+` as p
		 where private
		   and prosecdef and ('search_path=ratelimit, pg_temp' = any (proconfig)) is not true`))
	require.Empty(t, kit.Column(t, db, "select proname::text from "+kit.PackageFunctions+` as p
		 where not private and proisstrict`), "null is an error and not a null answer")
}

func TestCatalog_NoOverloads(t *testing.T) {
	t.Parallel()
	var defined []string
	for _, code := range kit.ReadTree(t, "../../sql") {
		for _, match := range regexp.MustCompile(`(?m)^create or replace (?:function|procedure) (?:ratelimit\.)?(\w+)`).FindAllStringSubmatch(code, -1) {
			defined = append(defined, match[1])
		}
	}
	require.Greater(t, len(defined), 30)
	slices.Sort(defined)
	require.Equal(t, slices.Compact(slices.Clone(defined)), defined)

	installed := kit.Column(t, pgtest.New(t), "select proname::text from "+kit.PackageFunctions+" as p")
	require.Subset(t, installed, defined)
	for _, name := range installed { // the others are made by sql/twins.sql
		of := strings.Replace(strings.TrimSuffix(name, "_ephemeral"), "_ephemeral_", "_", 1)
		require.True(t, slices.Contains(defined, name) || slices.Contains(defined, of) || slices.Contains(defined, "ratelimit_"+of), name)
	}
	slices.Sort(installed)
	require.Equal(t, slices.Compact(slices.Clone(installed)), installed)
}

// docs/reference.md is made of the comments of the public functions.
func TestCatalog_CommentsAreOneSentenceAndThePublicOnesSayErrorsLocksAndWrites(t *testing.T) {
	db := pgtest.Parallel(t)
	comments := func(form, query string) {
		rows := kit.NoError(db.Pool.Query(context.Background(), query))(t)
		var object string
		var comment *string
		_, err := pgx.ForEachRow(rows, []any{&object, &comment}, func() error {
			if assert.NotNil(t, comment, "%s has no comment", object) {
				assert.Regexp(t, form, *comment, object)
			}
			return nil
		})
		require.NoError(t, err)
		require.Positive(t, rows.CommandTag().RowsAffected())
	}
	const sentence, functions = `^[A-Z][^.!?\n]*\.$`, "select p.oid::regprocedure::text, obj_description(p.oid, 'pg_proc') from " + kit.PackageFunctions + " as p where "
	comments(sentence, functions+"private")
	comments(`^[A-Z][^\n]*(\n[^\n]+)*\nErrors: [^\n]+(\n  [^\n]+)*\nLocks: [^\n]+(\n  [^\n]+)*\nWrites: [^\n]+(\n  [^\n]+)*\nRole: [^\n]+(\n  [^\n]+)*\.$`, functions+"not private")
	comments(sentence, "select oid::regclass::text, obj_description(oid, 'pg_class') from pg_class where relnamespace = 'ratelimit'::regnamespace and relkind = 'r'")
}

func TestCatalog_NobodyButTheOwnerHasRights(t *testing.T) {
	t.Parallel()
	require.Empty(t, kit.Column(t, pgtest.New(t), `
		select format('%s: %s to %s', object, privilege_type, case grantee when 0 then 'PUBLIC' else grantee::regrole::text end)
		  from (select p.oid::regprocedure::text, coalesce(proacl, acldefault('f', proowner)), proowner
		          from `+kit.PackageFunctions+` as p
		        union all
		        select c.oid::regclass::text, coalesce(relacl, acldefault('r', relowner)), relowner
		          from pg_class as c where relnamespace = 'ratelimit'::regnamespace or relname like 'ratelimit\_%'
		        union all
		        select attrelid::regclass || '.' || attname, attacl, relowner
		          from pg_attribute join pg_class as c on c.oid = attrelid where relnamespace = 'ratelimit'::regnamespace
		        union all
		        select 'schema ' || nspname, coalesce(nspacl, acldefault('n', nspowner)), nspowner
		          from pg_namespace where nspname = 'ratelimit') as o (object, acl, owner)
		 cross join aclexplode(acl)
		 where grantee <> owner`))
}

// Anything here would be a cost on each call, or would not work when tables are spread over nodes.
func TestCatalog_HasNothingThatDistributionForbids(t *testing.T) {
	db := pgtest.Parallel(t)
	require.Empty(t, kit.Column(t, db, `
		select tgname::text from pg_trigger where tgrelid in (select oid from pg_class where relnamespace = 'ratelimit'::regnamespace)
		union all
		select oid::regclass::text from pg_class where relnamespace = 'ratelimit'::regnamespace and relkind not in ('r', 'i', 'c')
		union all
		select oid::regclass::text from pg_class where relnamespace = 'ratelimit'::regnamespace and relrowsecurity
		union all
		select conname::text from pg_constraint where contype in ('f', 'x') and connamespace = 'ratelimit'::regnamespace
		union all
		select rulename::text from pg_rewrite where ev_class in (select oid from pg_class where relnamespace = 'ratelimit'::regnamespace)
		union all
		select proname::text from `+kit.PackageFunctions+` as p where prosrc ~* 'advisory|nextval|pg_notify'`))

	require.ElementsMatch(t, slices.Concat([]string{"overrides", "usage"}, kit.BucketTables, kit.SlotTables), kit.Column(t, db, `
		select c.relname::text
		  from pg_constraint as k
		  join pg_class as c on c.oid = k.conrelid
		  join pg_attribute as a on a.attrelid = c.oid and a.attnum = any (k.conkey)
		 where k.contype = 'p' and a.attname = 'key' and c.relnamespace = 'ratelimit'::regnamespace`),
		"the primary keys of what belongs to a key contain it")
}

func TestCatalog_TablesAreMadeForHotUpdates(t *testing.T) {
	db := pgtest.Parallel(t)
	require.Equal(t, []string{"due_at", "policy_id, key", "due_at", "policy_id, key"}, kit.Column(t, db, `
		select string_agg(a.attname, ', ' order by a.attnum)
		  from pg_index as i
		  join pg_attribute as a on a.attrelid = i.indexrelid
		 where indrelid in ('ratelimit.buckets'::regclass, 'ratelimit.ephemeral_buckets'::regclass)
		   and indpred is null and indexprs is null
		 group by indrelid::regclass::text, indexrelid
		 order by indrelid::regclass::text, 1`), "an index on a column that an acquire changes")

	for _, table := range append([]string{"buckets", "ephemeral_buckets"}, kit.SlotTables...) {
		require.Len(t, kit.Column(t, db, `
			select option_name from pg_class, pg_options_to_table(reloptions)
			 where oid = ('ratelimit.' || $1)::regclass and option_name = 'fillfactor' and option_value::integer between 50 and 90`, table), 1, table)
	}
	for _, table := range slices.Concat(kit.BucketTables, kit.SlotTables) {
		require.NotEmpty(t, kit.Column(t, db, `
			select option_name from pg_class, pg_options_to_table(reloptions)
			 where oid = ('ratelimit.' || $1)::regclass and option_name like 'autovacuum\_vacuum\_%'`, table), table)
	}
}

func TestCatalog_TextIsComparedByByte(t *testing.T) {
	db := pgtest.Parallel(t)
	const text = `
		select attrelid::regclass || '.' || attname
		  from pg_attribute join pg_class as c on c.oid = attrelid
		 where relnamespace = 'ratelimit'::regnamespace and relkind = 'r' and attnum > 0 and attcollation <> 0`
	require.NotEmpty(t, kit.Column(t, db, text))
	require.Empty(t, kit.Column(t, db, text+` and attcollation <> '"C"'::regcollation`))
}

func TestCatalog_TwinsDifferInPersistenceOnly(t *testing.T) {
	db := pgtest.Parallel(t)
	describe := func(table string) []string {
		lines := kit.Column(t, db, `
			select format('%s %s', relkind, relpersistence) from pg_class where oid = $1::regclass
			union all
			select format('options %s owner %s acl %s', reloptions, relowner, relacl) from pg_class where oid = $1::regclass
			union all
			select format('%s %s %s %s %s %s %s %s: %s', attnum, attname, format_type(atttypid, atttypmod), attcollation, attnotnull,
			              attstorage, (select array_agg(o order by o) from unnest(attoptions) as o where o like 'n\_distinct%'), pg_get_expr(adbin, adrelid), col_description(attrelid, attnum))
			  from pg_attribute left join pg_attrdef on (adrelid, adnum) = (attrelid, attnum)
			 where attrelid = $1::regclass and attnum > 0
			union all
			select format('%s %s', conname, pg_get_constraintdef(oid)) from pg_constraint where conrelid = $1::regclass
			union all
			select format('%s %s', pg_get_indexdef(indexrelid), reloptions)
			  from pg_index join pg_class as c on c.oid = indexrelid where indrelid = $1::regclass`, "ratelimit."+table)
		for i := range lines {
			lines[i] = strings.ReplaceAll(lines[i], "ephemeral_", "")
		}
		slices.Sort(lines)
		return lines
	}
	for _, table := range []string{"buckets", "idempotency_keys", "slots", "leases"} {
		durable, ephemeral := describe(table), describe("ephemeral_"+table)
		i := slices.Index(durable, "r p")
		require.GreaterOrEqual(t, i, 0)
		durable[i] = "r u"
		require.Equal(t, durable, ephemeral)
	}
}

// sql/twins.sql takes the functions of the owner, fails rather than make half a twin, and drops what it would not make.
func TestCatalog_TwinsAreMadeOrRefused(t *testing.T) {
	t.Parallel()
	planter := kit.NewRole(t)
	twins := string(kit.NoError(os.ReadFile("../../sql/twins.sql"))(t))
	edit := func(function, old, changed string) string {
		return fmt.Sprintf("do $do$ begin execute overlay(pg_get_functiondef('ratelimit.%[1]s'::regproc) placing '%[3]s' from strpos(pg_get_functiondef('ratelimit.%[1]s'::regproc), '%[2]s') for length('%[2]s')); end $do$", function, old, changed)
	}
	for name, test := range map[string]struct{ change, code, message string }{
		"nothing has changed": {"select", "", ""},
		"a planted function":  {"create schema lair; create function lair.ratelimit_acquire(policy text, key text, cost bigint, idempotency_key text) returns ratelimit.decision language plpgsql as E'begin\\n  declare\\n  begin return null; end;\\nend;\\n'; alter function lair.ratelimit_acquire owner to " + planter, "", ""},
		"a planted overload":  {"create function ratelimit_acquire(policy text) returns ratelimit.decision language sql as 'select null::ratelimit.decision'; alter function ratelimit_acquire(text) owner to " + planter, "", ""},
		"an older twin":       {"create function ratelimit.gone_from_ephemeral_buckets() returns integer language sql return 1", "", ""},
		"older steps":         {"create function ratelimit.gone_ephemeral() returns integer language sql return 1; comment on function ratelimit.gone_ephemeral is 'The steps of ratelimit_gone for an ephemeral policy.'", "", ""},
		"another signature":   {"create function ratelimit.lock_ephemeral_buckets(text) returns integer language sql return 1", "", ""},
		"another result":      {"drop function ratelimit.hold_ephemeral; create function ratelimit.hold_ephemeral(v_policy ratelimit.policies, key text, holder text, cost bigint) returns integer language sql return 1", "", ""},
		"no function":         {"alter function ratelimit.lock_buckets rename to lock_the_buckets", "42883", "It is lock_buckets."},
		"no public function":  {"alter function ratelimit_peek rename to ratelimit_peep", "42883", "It is ratelimit_peek."},
		"another owner":       {"alter function ratelimit_hold owner to " + planter, "42883", "It is ratelimit_hold."},
		"no block":            {"create or replace function ratelimit_hold(policy text, key text, holder text, cost bigint default 1) returns ratelimit.hold language plpgsql as 'begin return null; end'", "42883", "It is ratelimit_hold."},
		"a statement":         {edit("write_buckets", "update buckets as b", "update only buckets as b"), "42P16", "It is write_ephemeral_buckets"},
		"a table after using": {edit("lock_buckets", "begin", "begin delete from policies using buckets as b where false;"), "42P16", "It is lock_ephemeral_buckets"},
		"a helper":            {edit("lock_buckets", "begin", "begin perform gone_through_buckets();"), "42P16", "It is lock_ephemeral_buckets"},
	} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.Parallel(t)
			want := kit.FingerprintOf(t, db)
			conn := db.Connect(t)
			kit.Execute(t, conn, test.change, pgx.QueryExecModeSimpleProtocol)
			kit.Execute(t, conn, "set search_path = public, pg_temp")
			before := kit.FingerprintOf(t, db)
			_, err := conn.Exec(t.Context(), twins)
			if test.code != "" {
				kit.RequireState(t, test.code, err)
				require.Contains(t, kit.PgError(err).Detail, test.message)
				require.Equal(t, before, kit.FingerprintOf(t, db))
				return
			}
			require.NoError(t, err)
			require.Equal(t, []string{"public, pg_temp"}, kit.ColumnOf(t, conn, "show search_path"))
			kit.Execute(t, conn, "revoke all on all functions in schema ratelimit from public") // as the epilogue does
			if strings.Contains(name, "planted") {
				want = before
			}
			require.Equal(t, want, kit.FingerprintOf(t, db))
		})
	}
}

func TestCatalog_ConflictsNameTheConstraint(t *testing.T) {
	db := pgtest.Parallel(t)
	conflicts := func(kind string) []string {
		return kit.Column(t, db, "select proname::text from "+kit.PackageFunctions+` as p
			 where regexp_replace(prosrc, '--[^\n]*', '', 'g') ~ $1`, `\mon\s+conflict\M`+kind)
	}
	require.NotEmpty(t, conflicts(`\s+on\s+constraint\s`))
	require.Equal(t, []string{"cleanup_buckets"}, conflicts(`(?!\s+on\s+constraint\s)`), "a statement that is about shards, too, and has no arguments of those names")
}

// An EXCEPTION block is a subtransaction, and a transaction id, on each call.
func TestCatalog_NoExceptionBlocks(t *testing.T) {
	require.Empty(t, kit.Column(t, pgtest.Parallel(t), `
		select proname::text from pg_proc where oid = any ($1::text[]::regproc[]) and prosrc ~* '\mexception\s+when\M'`, kit.HotFunctions))
}

func TestCatalog_HelpersAreInlined(t *testing.T) {
	t.Parallel()
	// On a server of its own: changes in other databases can fill the queue of invalidations, and then every statement is planned again.
	private, _ := kit.NewPrivateDB(t, "autovacuum=off")
	db := private.DB
	helpers := kit.Column(t, db, "select proname::text from "+kit.PackageFunctions+` as p join pg_language as l on l.oid = prolang
		 where private and lanname = 'sql'`)
	for _, name := range []string{
		"answer_of", "clock", "duration", "grant_of", "microseconds", "microtokens", "refilled", "refilled_until", "short_wait", "wait_for", "wait_until", "whole_tokens",
	} {
		require.Contains(t, helpers, name)
	}
	require.ElementsMatch(t, []string{"changed_by", "clock", "due_after", "numbers_now"}, kit.Column(t, db, `
		select proname::text from `+kit.PackageFunctions+` as p join pg_language as l on l.oid = prolang
		 where private and lanname = 'sql' and provolatile <> 'i' and not proretset`))

	require.Empty(t, calledHelpers(t, db))

	db.Exec(t, "alter function ratelimit.whole_tokens set work_mem = '4MB'") // a function with settings is not inlined
	require.Equal(t, []string{"ratelimit.whole_tokens"}, calledHelpers(t, db))
}

// calledHelpers lists the SQL functions that hot functions call: PostgreSQL counts the calls of those that it does not inline.
// Planning calls those whose arguments are known, so it looks at what a second time adds.
func calledHelpers(t *testing.T, db *pgtest.DB) (helpers []string) {
	policies := []string{"p", "ephemeral", "stepped", "ephemeral stepped", "shadow", "ephemeral shadow"}
	db.Exec(t, `
		select ratelimit_define_policy(p, 1000, 1, '1 day', p ~ 'stepped', p !~ 'ephemeral', shadow => p ~ 'shadow') from unnest($1::text[]) as p`, policies)
	db.Exec(t, "select ratelimit_define_policy(p || ' slots', 9, lease => '1 day', durable => p !~ 'ephemeral') from unnest($1::text[]) as p", policies)
	db.Exec(t, "select ratelimit_override(p, 'k', 900) from unnest($1::text[]) as p where p ~ 'stepped'", policies)
	conn := db.Connect(t)
	kit.Execute(t, conn, "set track_functions = 'all'; set plan_cache_mode = force_generic_plan", pgx.QueryExecModeSimpleProtocol)
	for _, policy := range policies {
		counted := func(language string) []string {
			return kit.ColumnOf(t, conn, `
				select format('%s %s', p.oid::regproc, f.calls)
				  from pg_stat_xact_user_functions as f join pg_proc as p on p.oid = f.funcid join pg_language as l on l.oid = p.prolang
				 where l.lanname = $1`, language)
		}
		calls := strings.ReplaceAll(strings.Join(hotCalls, "; "), "POLICY", policy) + "; rollback to savepoint before"
		kit.Execute(t, conn, "begin; savepoint before; "+calls, pgx.QueryExecModeSimpleProtocol)
		planned := counted("sql")
		kit.Execute(t, conn, calls, pgx.QueryExecModeSimpleProtocol)
		for _, count := range counted("sql") {
			if !slices.Contains(planned, count) {
				helpers = append(helpers, strings.Fields(count)[0])
			}
		}
		reached := strings.Join(counted("plpgsql"), "\n")
		ephemeral := ""
		if strings.Contains(policy, "ephemeral") {
			ephemeral = "ephemeral_"
		}
		for _, function := range append(slices.Clone(kit.HotFunctions), "ratelimit.decide_in_order", "ratelimit.decide", "ratelimit.look_at_buckets",
			"ratelimit.rows_of_"+ephemeral+"buckets", "ratelimit.covered_in_"+ephemeral+"buckets", "ratelimit.take_from_"+ephemeral+"buckets",
			"ratelimit.remember_"+ephemeral+"idempotency_keys") {
			require.Contains(t, reached, function+" ")
		}
		kit.Execute(t, conn, "rollback")
	}
	slices.Sort(helpers)
	return slices.Compact(helpers)
}

func TestCatalog_PlpgsqlCheckHasNothingToSay(t *testing.T) {
	db := pgtest.Parallel(t)
	if len(kit.Column(t, db, "select name::text from pg_available_extensions where name = 'plpgsql_check'")) == 0 {
		t.Skip("the server has no extension plpgsql_check")
	}
	db.Exec(t, "create schema plpgsql_check; create extension plpgsql_check schema plpgsql_check")
	db.Exec(t, "create table public.orders (customer text)")
	const functions = kit.PackageFunctions + " as p join pg_language as l on l.oid = prolang and lanname = 'plpgsql'"
	conn := db.Connect(t)
	for path, where := range map[string]string{
		"public":             " where (p.proconfig is not null or not private)",
		"ratelimit, pg_temp": " where p.proconfig is null and private", // they find the path of their caller
	} {
		kit.Execute(t, conn, "set search_path = "+path)
		require.NotEmpty(t, kit.ColumnOf(t, conn, "select proname::text from "+functions+where))
		require.Empty(t, kit.ColumnOf(t, conn, `
			select format('%s line %s: %s', p.oid::regprocedure, c.lineno, concat_ws(', ', c.level, c.message, c.detail, c.context))
			  from `+functions+`
			 cross join plpgsql_check.plpgsql_check_function_tb(p.oid,
			         case p.prorettype when 'trigger'::regtype then 'public.orders'::regclass else 0::regclass end, other_warnings => true, extra_warnings => true,
			         performance_warnings => true, security_warnings => true, compatibility_warnings => true) as c`+where+`
			   and not (p.proname ~ '^lock_demanded_|^cleanup_(slots|buckets|expired|orphans)$' and c.message like '%VOLATILE%') -- it overlooks FOR UPDATE in a subquery, and EXECUTE
			   and c.detail is distinct from 'cannot to determine result of dynamic SQL'`))
	}
}
