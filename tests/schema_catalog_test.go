package tests

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// What the package is held to, read from the catalogs of a database where it is installed.

// The functions that decide about one bucket, and so run on any node that has the key.
var hotFunctions = []string{
	"ratelimit_acquire", "ratelimit_acquire_up_to", "ratelimit_charge", "ratelimit_peek", "ratelimit_refund", "ratelimit_reserve",
	"ratelimit_reset", "ratelimit_settle",
}

// What acquire_batch and the guards are made of. These functions find the search_path of those that call them.
var batchFunctions = []string{
	"ratelimit.acquire", "ratelimit.decide_in_order", "ratelimit.lock_buckets", "ratelimit.look", "ratelimit.look_at_buckets", "ratelimit.peek",
	"ratelimit.remember", "ratelimit.take", "ratelimit.take_any",
}

var bucketTables = []string{"buckets", "ephemeral_buckets", "idempotency_keys", "ephemeral_idempotency_keys"}

const packageFunctions = `(
	select p.*, n.nspname, n.nspname = 'ratelimit' as private
	  from pg_proc as p
	  join pg_namespace as n on n.oid = p.pronamespace
	 where n.nspname = 'ratelimit' or p.proname like 'ratelimit\_%')`

func TestCatalog_PublicFunctions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	require.Equal(t, []string{
		"FUNCTION ratelimit_acquire(policy text, key text, cost bigint DEFAULT 1, idempotency_key text DEFAULT NULL::text) ratelimit.decision",
		"FUNCTION ratelimit_acquire_all(policies text[], keys text[], costs bigint[] DEFAULT NULL::bigint[], idempotency_key text DEFAULT NULL::text, OUT allowed boolean, OUT remaining bigint, OUT retry_after interval, OUT reset_after interval, OUT capacity bigint, OUT replayed boolean, OUT shadowed boolean, OUT binding integer, OUT decisions ratelimit.decision[]) record",
		"FUNCTION ratelimit_acquire_all_many(policies text[], keys text[], costs bigint[], sizes integer[], idempotency_keys text[] DEFAULT NULL::text[]) TABLE(request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval, capacity bigint, replayed boolean, shadowed boolean, binding integer, decisions ratelimit.decision[], error_code text, error_message text, error_detail text, error_hint text)",
		"FUNCTION ratelimit_acquire_many(policies text[], keys text[], costs bigint[] DEFAULT NULL::bigint[], idempotency_keys text[] DEFAULT NULL::text[]) TABLE(request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval, capacity bigint, replayed boolean, shadowed boolean, error_code text, error_message text, error_detail text, error_hint text)",
		"FUNCTION ratelimit_acquire_packed(policies text[], keys text[], costs bigint[] DEFAULT NULL::bigint[], sizes integer[] DEFAULT NULL::integer[], idempotency_keys text[] DEFAULT NULL::text[]) ratelimit.packed",
		"FUNCTION ratelimit_acquire_up_to(policy text, key text, at_most bigint, at_least bigint DEFAULT 1, idempotency_key text DEFAULT NULL::text) ratelimit.partial_decision",
		"FUNCTION ratelimit_charge(policy text, key text, cost bigint, idempotency_key text DEFAULT NULL::text) ratelimit.decision",
		"FUNCTION ratelimit_cleanup(max_rows integer DEFAULT 10000, OUT buckets_deleted bigint, OUT idempotency_keys_deleted bigint) record",
		"FUNCTION ratelimit_define_policy(policy text, capacity bigint DEFAULT NULL::bigint, refill bigint DEFAULT NULL::bigint, every interval DEFAULT NULL::interval, stepped boolean DEFAULT NULL::boolean, durable boolean DEFAULT NULL::boolean, remember interval DEFAULT NULL::interval, shadow boolean DEFAULT NULL::boolean) void",
		"FUNCTION ratelimit_define_shard(shard integer, of integer) void",
		"FUNCTION ratelimit_doctor() TABLE(severity text, finding text, remedy text) STABLE",
		"FUNCTION ratelimit_drop_policy(policy text) void",
		"FUNCTION ratelimit_enforce(policy text, key text, cost bigint DEFAULT 1, idempotency_key text DEFAULT NULL::text) ratelimit.decision",
		"FUNCTION ratelimit_guard() trigger",
		"FUNCTION ratelimit_override(policy text, key text, capacity bigint DEFAULT NULL::bigint, refill bigint DEFAULT NULL::bigint, every interval DEFAULT NULL::interval, expires_at timestamp with time zone DEFAULT NULL::timestamp with time zone) void",
		"FUNCTION ratelimit_overrides(policy text DEFAULT NULL::text, key text DEFAULT NULL::text, max_rows integer DEFAULT 1000) TABLE(policy text, key text, capacity bigint, refill bigint, every interval, expires_at timestamp with time zone) STABLE",
		"FUNCTION ratelimit_peek(policy text, key text, cost bigint DEFAULT 1) ratelimit.decision STABLE",
		"FUNCTION ratelimit_policies() TABLE(policy text, capacity bigint, refill bigint, every interval, stepped boolean, durable boolean, remember interval, shadow boolean) STABLE",
		"FUNCTION ratelimit_refund(policy text, key text, amount bigint) ratelimit.decision",
		"FUNCTION ratelimit_remove_override(policy text, key text) boolean",
		"FUNCTION ratelimit_reserve(policy text, key text, max_wait interval, cost bigint DEFAULT 1, idempotency_key text DEFAULT NULL::text) ratelimit.reservation",
		"FUNCTION ratelimit_reset(policy text, key text) void",
		"FUNCTION ratelimit_settle(policy text, key text, idempotency_key text, cost bigint) ratelimit.decision",
		"FUNCTION ratelimit_shard() TABLE(shard integer, of integer) STABLE",
		"FUNCTION ratelimit_status(policy text DEFAULT NULL::text, max_rows integer DEFAULT 100, key text DEFAULT NULL::text) TABLE(policy text, key text, remaining bigint, retry_after interval, reset_after interval, capacity bigint, overridden boolean) STABLE",
		"FUNCTION ratelimit_version() text IMMUTABLE",
		"PROCEDURE ratelimit_cleanup_all(IN budget interval DEFAULT '00:00:50'::interval)",
		"PROCEDURE ratelimit_reset_all(IN policy text)",
	}, column(t, db, `
		select format('%s %s(%s)', case prokind when 'p' then 'PROCEDURE' else 'FUNCTION' end, proname, pg_get_function_arguments(p.oid))
		       || coalesce(' ' || pg_get_function_result(p.oid), '')
		       || case provolatile when 's' then ' STABLE' when 'i' then ' IMMUTABLE' else '' end
		  from `+packageFunctions+` as p
		 where not private
		 order by 1`))
	require.Equal(t, []string{"allowed boolean, remaining bigint, retry_after interval, reset_after interval, capacity bigint, replayed boolean, shadowed boolean"},
		column(t, db, `
			select string_agg(format('%s %s', attname, format_type(atttypid, atttypmod)), ', ' order by attnum)
			  from pg_attribute where attrelid = 'ratelimit.decision'::regclass`))
}

func TestCatalog_SecurityDefinerWithPinnedPath(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	// They commit, which SECURITY DEFINER and SET forbid.
	require.Equal(t, []string{"ratelimit_cleanup_all", "ratelimit_reset_all"}, column(t, db, `
		select proname::text from `+packageFunctions+` as p
		 where not private
		   and not (prosecdef and 'search_path=ratelimit, pg_temp' = any (proconfig))
		 order by 1`))
	require.Empty(t, column(t, db, `
		select proname::text from `+packageFunctions+` as p
		 where private
		   and prosecdef and ('search_path=ratelimit, pg_temp' = any (proconfig)) is not true`))
	require.Empty(t, column(t, db, `
		select proname::text from `+packageFunctions+` as p
		 where not private and proisstrict`), "null is an error and not a null answer")
}

// What the last version has and the newest has not is left for calls that are under way during the upgrade, until
// the next version drops it.
func TestCatalog_NoOverloads(t *testing.T) {
	t.Parallel()
	var defined []string
	for _, code := range readTree(t, "../sql") {
		for _, match := range regexp.MustCompile(`(?m)^create or replace (?:function|procedure) (?:ratelimit\.)?(\w+)`).FindAllStringSubmatch(code, -1) {
			defined = append(defined, match[1])
		}
	}
	require.Greater(t, len(defined), 30)
	slices.Sort(defined)
	require.Equal(t, slices.Compact(slices.Clone(defined)), defined)

	retired := []string{"acquire_in_order", "answer", "granted", "replay"}
	require.ElementsMatch(t, slices.Concat(defined, retired), column(t, pgtest.New(t), "select proname::text from "+packageFunctions+" as p"))
}

func TestCatalog_CommentsAreOneSentence(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	comments := func(query string) {
		t.Helper()
		rows, err := db.Pool.Query(context.Background(), query)
		require.NoError(t, err)
		var object string
		var comment *string
		_, err = pgx.ForEachRow(rows, []any{&object, &comment}, func() error {
			if assert.NotNil(t, comment, "%s has no comment", object) {
				assert.Regexp(t, `^[A-Z][^.!?\n]*\.$`, *comment, object)
			}
			return nil
		})
		require.NoError(t, err)
		require.Positive(t, rows.CommandTag().RowsAffected())
	}
	comments("select p.oid::regprocedure::text, obj_description(p.oid, 'pg_proc') from " + packageFunctions + " as p")
	comments("select oid::regclass::text, obj_description(oid, 'pg_class') from pg_class where relnamespace = 'ratelimit'::regnamespace and relkind = 'r'")
}

func TestCatalog_NobodyButTheOwnerHasRights(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	require.Empty(t, column(t, db, `
		select format('%s: %s to %s', object, privilege_type, case grantee when 0 then 'PUBLIC' else grantee::regrole::text end)
		  from (select p.oid::regprocedure::text, coalesce(proacl, acldefault('f', proowner)), proowner
		          from `+packageFunctions+` as p
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
	t.Parallel()
	db := pgtest.New(t)
	require.Empty(t, column(t, db, `
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
		select proname::text from `+packageFunctions+` as p where prosrc ~* 'advisory|nextval|pg_notify'`))

	require.ElementsMatch(t, append([]string{"overrides"}, bucketTables...), column(t, db, `
		select c.relname::text
		  from pg_constraint as k
		  join pg_class as c on c.oid = k.conrelid
		  join pg_attribute as a on a.attrelid = c.oid and a.attnum = any (k.conkey)
		 where k.contype = 'p' and a.attname = 'key' and c.relnamespace = 'ratelimit'::regnamespace`),
		"the primary keys of what belongs to a key contain it")
}

func TestCatalog_TablesAreMadeForHotUpdates(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	changed := map[string]bool{"level": true, "refilled_at": true}
	for _, f := range sourceOf(t, db, "ratelimit_acquire").fragments {
		if f.tokens[0] == "update" {
			for column := range f.set() {
				changed[column] = true
			}
		}
	}
	require.Equal(t, map[string]bool{"level": true, "refilled_at": true, "room": true}, changed)
	require.Empty(t, column(t, db, `
		select indexrelid::regclass::text
		  from pg_index
		 where indrelid in ('ratelimit.buckets'::regclass, 'ratelimit.ephemeral_buckets'::regclass)
		   and pg_get_indexdef(indexrelid) ~ $1`, `\m(`+strings.Join(slices.Collect(maps.Keys(changed)), "|")+`)\M`),
		"an index on a column that an acquire changes")

	for _, table := range []string{"buckets", "ephemeral_buckets"} {
		require.Len(t, column(t, db, `
			select option_name from pg_class, pg_options_to_table(reloptions)
			 where oid = ('ratelimit.' || $1)::regclass and option_name = 'fillfactor' and option_value::integer between 50 and 90`, table), 1, table)
	}
	for _, table := range bucketTables {
		require.NotEmpty(t, column(t, db, `
			select option_name from pg_class, pg_options_to_table(reloptions)
			 where oid = ('ratelimit.' || $1)::regclass and option_name like 'autovacuum\_vacuum\_%'`, table), table)
	}
}

func TestCatalog_TextIsComparedByByte(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const text = `
		select attrelid::regclass || '.' || attname
		  from pg_attribute join pg_class as c on c.oid = attrelid
		 where relnamespace = 'ratelimit'::regnamespace and relkind = 'r' and attnum > 0 and attcollation <> 0`
	require.NotEmpty(t, column(t, db, text))
	require.Empty(t, column(t, db, text+` and attcollation <> '"C"'::regcollation`))
}

func TestCatalog_TwinsDifferInPersistenceOnly(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	describe := func(table string) []string {
		lines := column(t, db, `
			select format('%s %s', relkind, relpersistence) from pg_class where oid = $1::regclass
			union all
			select format('options %s owner %s acl %s', reloptions, relowner, relacl) from pg_class where oid = $1::regclass
			union all
			select format('%s %s %s %s %s %s %s %s: %s', attnum, attname, format_type(atttypid, atttypmod), attcollation, attnotnull,
			              attstorage, attoptions, pg_get_expr(adbin, adrelid), col_description(attrelid, attnum))
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
	for _, table := range []string{"buckets", "idempotency_keys"} {
		durable, ephemeral := describe(table), describe("ephemeral_"+table)
		i := slices.Index(durable, "r p")
		require.GreaterOrEqual(t, i, 0)
		durable[i] = "r u"
		require.Equal(t, durable, ephemeral)
	}

	// And so does the code: each branch is the other with the other names.
	twin := strings.NewReplacer("ephemeral_", "", "not u.durable", "u.durable", "not p.durable", "p.durable",
		" as d ", " as b ", " as e ", " as b ", " e.", " b.")
	for _, function := range slices.Concat(batchFunctions, hotFunctions, []string{"ratelimit_acquire_all", "ratelimit_drop_policy"}) {
		var durable, ephemeral []string
		for _, f := range sourceOf(t, db, function).fragments {
			branches := []fragment{f}
			if tables := f.bucketTables(); len(tables) == 0 {
				continue
			} else if slices.Contains(tables, "buckets") && slices.Contains(tables, "ephemeral_buckets") {
				branches = f.joinsOfBuckets()
			}
			for _, branch := range branches {
				if statement := branch.String(); strings.Contains(statement, "ephemeral_") {
					ephemeral = append(ephemeral, twin.Replace(statement))
				} else {
					durable = append(durable, twin.Replace(statement))
				}
			}
		}
		require.NotEmpty(t, durable, function)
		require.Equal(t, durable, ephemeral, function)
	}
}

func TestCatalog_StatementsNameTheKey(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, function := range hotFunctions {
		s := sourceOf(t, db, function)
		statements := 0
		for _, f := range s.fragments {
			if len(f.bucketTables()) == 0 {
				continue
			}
			statements++
			require.True(t, f.statement, "%s: %s", function, f)
			require.Len(t, f.bucketTables(), 1, "one table and no subquery on it, in %s: %s", function, f)

			if f.tokens[0] == "insert" {
				open, end := slices.Index(f.tokens, "("), slices.Index(f.tokens, ")")
				require.Contains(t, f.tokens[open:end], "key", "%s: %s", function, f)
				continue
			}
			named := false
			for _, term := range split(clauses(f.tokens, "where", "returning", "order", "limit", "for", "group")["where"], "and") {
				require.NotContains(t, term, "or", "%s: %s", function, f)
				named = named || len(term) == 3 && regexp.MustCompile(`^(\w+\.)?key$`).MatchString(term[0]) && term[1] == "="
			}
			require.True(t, named, "%s has no key = … in: %s", function, f)
			require.NotContains(t, f.set(), "key", "%s: %s", function, f)
		}
		require.Positive(t, statements, function)
	}
}

func TestCatalog_UpdatesAreMadeOfImmutableExpressions(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := pgtest.New(t)
	conn := db.Connect(t)
	execute(t, conn, "set search_path = ratelimit")
	examined := 0

	// PostgreSQL itself refuses an index on anything else, functions as well as operators. So the
	// expression is put on a table of the statement's alias that has the variables for columns.
	immutable := func(s *source, alias, table string, expression []string, as string) {
		t.Helper()
		examined++
		columns := map[string]string{}
		for name, typ := range s.fields {
			if of, column, ok := strings.Cut(name, "."); ok && of == table {
				columns[column] = typ
				columns["excluded_"+column] = typ
			}
		}
		tokens := s.rewrite(expression, func(name, typ string) string {
			name = strings.ReplaceAll(name, ".", "_")
			columns[name] = typ
			return name
		})
		for i, token := range tokens {
			if column, ok := strings.CutPrefix(token, "excluded."); ok {
				tokens[i] = "excluded_" + column
			}
		}
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		defer tx.Rollback(ctx)
		var list []string
		for name, typ := range columns {
			list = append(list, name+" "+typ)
		}
		_, err = tx.Exec(ctx, fmt.Sprintf("create temp table %s (%s)", alias, strings.Join(list, ", ")))
		require.NoError(t, err)
		_, err = tx.Exec(ctx, fmt.Sprintf("create index on pg_temp.%s "+as, alias, strings.Join(tokens, " ")))
		require.NoError(t, err, "%s: %s", s.name, strings.Join(expression, " "))
	}

	for _, function := range hotFunctions {
		s := sourceOf(t, db, function)
		for _, f := range s.fragments {
			if len(f.bucketTables()) == 0 {
				continue
			}
			table := f.bucketTables()[0]
			alias := table
			if i := slices.Index(f.tokens, "as"); i >= 0 && f.tokens[i-1] == table {
				alias = f.tokens[i+1]
			}
			for _, expression := range f.set() {
				immutable(s, alias, table, expression, "(((%s) is null))") // whatever its type
			}
			if f.tokens[0] == "update" || f.tokens[0] == "delete" || slices.Contains(f.tokens, "conflict") {
				if where := clauses(f.tokens, "where", "returning")["where"]; len(where) > 0 {
					immutable(s, alias, table, where, "((1)) where %s")
				}
			}
		}
	}
	require.Greater(t, examined, 10)
}

func TestCatalog_ConflictsNameTheConstraint(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	conflicts := 0
	for _, code := range column(t, db, "select prosrc from "+packageFunctions+" as p") {
		tokens := tokenize(code)
		for i, token := range tokens {
			if token == "conflict" {
				conflicts++
				require.Equal(t, []string{"on", "constraint"}, tokens[i+1:i+3])
			}
		}
	}
	require.Positive(t, conflicts)
}

// An EXCEPTION block is a subtransaction, and a transaction id, on each call.
func TestCatalog_NoExceptionBlocks(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, function := range hotFunctions {
		require.Empty(t, column(t, db, `
			select proname::text from pg_proc where oid = $1::regproc and prosrc ~* '\mexception\s+when\M'`, function))
	}
}

func TestCatalog_HelpersAreInlined(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	helpers := column(t, db, `
		select proname::text from `+packageFunctions+` as p join pg_language as l on l.oid = prolang
		 where private and lanname = 'sql'`)
	for _, name := range []string{
		"answer_of", "clock", "duration", "grant_of", "microseconds", "microtokens", "refilled_level", "refilled_until", "wait_below", "wait_for", "whole_tokens",
	} {
		require.Contains(t, helpers, name)
	}
	require.Equal(t, []string{"clock"}, column(t, db, `
		select proname::text from `+packageFunctions+` as p join pg_language as l on l.oid = prolang
		 where private and lanname = 'sql' and provolatile <> 'i'`))
	conn := db.Connect(t)
	execute(t, conn, "set search_path = ratelimit, pg_temp")
	call := regexp.MustCompile(`\b(` + strings.Join(helpers, "|") + `)\(`)

	examined := 0
	for _, function := range slices.Concat(batchFunctions, hotFunctions, []string{"ratelimit.cleanup_batch"}) {
		s := sourceOf(t, db, function)
		for _, f := range s.fragments {
			if !slices.ContainsFunc(f.tokens, func(token string) bool {
				return slices.Contains(helpers, strings.TrimPrefix(token, "ratelimit."))
			}) {
				continue
			}
			examined++
			calls := call.FindAllString(s.explain(conn, f), -1)
			if function == "ratelimit.cleanup_batch" { // once for a row that is put off: not hot
				calls = slices.DeleteFunc(calls, func(name string) bool { return name == "duration(" })
			}
			assert.Empty(t, calls, "%s still calls helpers in: %s", function, f)
		}
	}
	require.Greater(t, examined, 20)
}

func TestCatalog_PlpgsqlCheckHasNothingToSay(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if len(column(t, db, "select name::text from pg_available_extensions where name = 'plpgsql_check'")) == 0 {
		t.Skip("the server has no extension plpgsql_check")
	}
	db.Exec(t, "create schema plpgsql_check; create extension plpgsql_check schema plpgsql_check")
	db.Exec(t, "create table public.orders (customer text)")
	const functions = packageFunctions + " as p join pg_language as l on l.oid = prolang and lanname = 'plpgsql'"
	conn := db.Connect(t)
	for path, where := range map[string]string{
		"public":             " where p.oid <> all ($1::regproc[])",
		"ratelimit, pg_temp": " where p.oid = any ($1::regproc[])", // they find the path of acquire_batch
	} {
		execute(t, conn, "set search_path = "+path)
		require.NotEmpty(t, columnOf(t, conn, "select proname::text from "+functions+where, batchFunctions))
		require.Empty(t, columnOf(t, conn, `
			select format('%s line %s: %s', p.oid::regprocedure, c.lineno, concat_ws(', ', c.level, c.message, c.detail, c.context))
			  from `+functions+`
			 cross join plpgsql_check.plpgsql_check_function_tb(p.oid,
			         case p.prorettype when 'trigger'::regtype then 'public.orders'::regclass else 0::regclass end, other_warnings => true, extra_warnings => true,
			         performance_warnings => true, security_warnings => true, compatibility_warnings => true) as c`+where+`
			   and not (p.proname = 'lock_buckets' and c.message like '%VOLATILE%') -- it overlooks FOR UPDATE in a subquery`, batchFunctions))
	}
}

// bucketTables returns the tables of buckets and idempotency keys that a fragment reads or writes.
func (f fragment) bucketTables() []string {
	var tables []string
	for i, token := range f.tokens {
		if slices.Contains(bucketTables, token) && namesTable(f.tokens, i) {
			tables = append(tables, token)
		}
	}
	return tables
}

// joinsOfBuckets returns the left joins with the tables of buckets, for a statement that reads both.
func (f fragment) joinsOfBuckets() []fragment {
	var joins []fragment
	for i := range f.tokens {
		if f.tokens[i] != "left" {
			continue
		}
		depth, end := 0, i+1
		for ; end < len(f.tokens) && depth >= 0; end++ {
			switch f.tokens[end] {
			case "(":
				depth++
			case ")":
				depth--
			}
			if depth < 0 || depth == 0 && slices.Contains([]string{"left", "where", "window", "order"}, f.tokens[end]) {
				break
			}
		}
		if join := (fragment{tokens: f.tokens[i:end]}); len(join.bucketTables()) > 0 {
			joins = append(joins, join)
		}
	}
	return joins
}

// set returns what an UPDATE or ON CONFLICT DO UPDATE assigns to which column.
func (f fragment) set() map[string][]string {
	assignments := map[string][]string{}
	for _, assignment := range split(clauses(f.tokens, "set", "from", "where", "returning")["set"], ",") {
		if len(assignment) > 2 && assignment[1] == "=" {
			assignments[assignment[0]] = assignment[2:]
		}
	}
	return assignments
}
