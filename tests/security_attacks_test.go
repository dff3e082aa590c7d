package tests

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Every parameter that a plain role may set, as the server lists them, at each of its values or at both
// ends of its range: the decisions are those of a session like any other, and the parameter is as it was
// set. First all parameters at once, as often as it takes to try each value; then, for as long as there
// is time, one value at a time and all at random.
func TestTorture_Settings(t *testing.T) {
	run := torture(t, 6*time.Second)
	caller := newRole(t)
	first := newSettingsDB(t, caller)
	want := first.decisions(first.connect())
	require.Contains(t, strings.Join(want, "\n"), "RL002")
	require.Greater(t, len(slices.Compact(slices.Sorted(slices.Values(want)))), 20, "answers that differ tell more")

	settings := first.settable()
	names := slices.Sorted(maps.Keys(settings))
	require.Greater(t, len(names), 100)
	together := func(choose func(values []string) string) (all []setting) {
		for _, name := range names {
			if !strings.HasPrefix(name, "geqo") { // gives up, XX000, where costs are not finite
				all = append(all, setting{name, choose(settings[name])})
			}
		}
		return all
	}
	assignments := make(chan []setting)
	go func() {
		defer close(assignments)
		most := 0
		for _, values := range settings {
			most = max(most, len(values))
		}
		for i := range most {
			assignments <- together(func(values []string) string { return values[i%len(values)] })
		}
		for _, i := range rand.Perm(len(names)) {
			for _, value := range settings[names[i]] {
				if !run.goesOn() {
					return
				}
				assignments <- []setting{{names[i], value}}
			}
		}
		for run.goesOn() {
			assignments <- together(func(values []string) string { return values[rand.IntN(len(values))] })
		}
	}()

	values, refused := map[setting]bool{}, map[setting]bool{}
	sessions := 0
	var mu sync.Mutex
	var workers sync.WaitGroup
	for _, db := range []*settingsDB{first, newSettingsDB(t, caller), newSettingsDB(t, caller)} {
		workers.Go(func() {
			for assignment := range assignments {
				made, failure := db.compare(assignment, want)
				mu.Lock()
				for _, s := range assignment {
					values[s] = true
					refused[s] = !slices.Contains(made, s)
				}
				sessions++
				run.progress("%d sessions, %d values of %d parameters", sessions, len(values), len(names))
				mu.Unlock()
				if failure != nil {
					t.Errorf("with %v: %v", made, failure)
				}
			}
		})
	}
	workers.Wait()
	for s, isRefused := range refused {
		if isRefused {
			t.Logf("the server refuses %s", s)
			delete(values, s)
		}
	}
	require.Greater(t, len(values), 2*len(names))
	run.figure("parameters", len(names), "")
	run.figure("values of them", len(values), "")
	run.figure("sessions", sessions, "")
}

// compare makes settings in a session of its own, as far as the server lets it, and returns which, and
// what was not as in any other.
func (db *settingsDB) compare(assignment []setting, want []string) (made []setting, err error) {
	conn := db.connect()
	defer conn.Close(context.Background())
	var written []string
	for _, s := range assignment {
		if value, err := s.set(conn); err == nil {
			made, written = append(made, s), append(written, value)
		}
	}
	for i, got := range db.decisions(conn) {
		if got != want[i] {
			return made, fmt.Errorf("%s instead of %s", got, want[i])
		}
	}
	for i, s := range made {
		var value string
		if err := conn.QueryRow(context.Background(), "select pg_catalog.current_setting($1)", s.name).Scan(&value); err != nil {
			return made, err
		}
		if value != written[i] && !strings.HasPrefix(s.name, "tcp_") { // the operating system bounds those of a TCP connection
			return made, fmt.Errorf("%s became %q", s, value)
		}
	}
	return made, nil
}

// What the comparison is for: code that depends on a setting does not get past it.
func TestSettings_ADependenceOnOneIsFound(t *testing.T) {
	t.Parallel()
	caller := newRole(t)
	for name, bug := range map[string]struct {
		code string
		by   setting
	}{
		"days that are not 24 hours": {
			strings.Join([]string{`do $$ begin execute replace(pg_get_functiondef('ratelimit_acquire'::regproc),`,
				`'duration(v_policy.remember_us)', 'justify_hours(duration(v_policy.remember_us))'); end $$`}, " "),
			setting{"TimeZone", "Europe/Berlin"},
		},
		"a path that is not pinned": {"alter function ratelimit_peek reset search_path", setting{"search_path", "nowhere"}},
		"an interval read from text": {
			`create or replace function ratelimit.microseconds(span interval) returns numeric language sql stable as
			 $$ select extract(epoch from replace(span::text, ' ', ' ')::interval) * case when span::text like 'P%' then 1000000 else 1000001 end $$`,
			setting{"IntervalStyle", "iso_8601"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			db := newSettingsDB(t, caller)
			db.exec(bug.code)
			db.exec("grant usage on schema ratelimit to " + caller + "; alter database " + pgx.Identifier{db.Name}.Sanitize() + " set search_path = ratelimit, public")
			want := db.decisions(db.connect())
			_, err := db.compare(nil, want)
			require.NoError(t, err)
			_, err = db.compare([]setting{bug.by}, want)
			require.Error(t, err)
		})
	}
}

// A setting is a value for a parameter.
type setting struct{ name, value string }

func (s setting) String() string { return fmt.Sprintf("%s = %q", s.name, s.value) }

// set returns the value as the server writes it.
func (s setting) set(conn *pgx.Conn) (written string, err error) {
	err = conn.QueryRow(context.Background(), "select pg_catalog.set_config($1, $2, false)", s.name, s.value).Scan(&written)
	return written, err
}

// Parameters whose values are a list of the server's, or free text.
var settingTexts = map[string][]string{
	"DateStyle":        {"ISO, DMY", "ISO, YMD", "SQL, DMY", "SQL, MDY", "Postgres, DMY", "Postgres, YMD", "German"},
	"TimeZone":         {"UTC", "Europe/Berlin", "Australia/Lord_Howe", "Pacific/Kiritimati", "America/St_Johns", "Antarctica/Troll"},
	"client_encoding":  {"SQL_ASCII", "LATIN1", "SJIS", "GB18030", "EUC_JP", "WIN1251", "UTF8"},
	"lc_monetary":      {"C", "POSIX"},
	"lc_numeric":       {"C", "POSIX"},
	"lc_time":          {"C", "POSIX"},
	"search_path":      {"", "pg_temp", "ratelimit", "pg_temp, pg_catalog", "nowhere"},
	"application_name": {"", "'; drop schema ratelimit cascade; --"},

	"createrole_self_grant":            {"", "set, inherit"},
	"default_table_access_method":      {"heap"},
	"default_tablespace":               {"", "pg_default"},
	"default_text_search_config":       {"pg_catalog.simple", "pg_catalog.turkish"},
	"plpgsql.extra_errors":             {"all", "none"},
	"plpgsql.extra_warnings":           {"all", "none"},
	"restrict_nonsystem_relation_kind": {"", "view, foreign-table"},
	"temp_tablespaces":                 {"", "pg_default"},
	"timezone_abbreviations":           {"Default", "Australia", "India"},
	"ratelimit.preexisting":            {"", "1,2,3"}, // which installation uses
	"ratelimit.clock":                  {"epoch"},     // which nobody does
}

// What a parameter does that makes it unfit here.
var unfit = map[string]string{
	"default_transaction_read_only": "makes every acquire 25006, as TestReadOnlyTransaction shows",
	"exit_on_error":                 "ends the session at the first error, of which the test wants some",
	"transaction_deferrable":        "lasts as long as a transaction: default_transaction_deferrable is tried",
	"transaction_isolation":         "lasts as long as a transaction: default_transaction_isolation is tried",
	"transaction_read_only":         "lasts as long as a transaction",
}

// A settingsDB has policies, and a role that may use them, and each session sets its own clock.
type settingsDB struct {
	*testDB
	caller string
	count  int
}

func newSettingsDB(t *testing.T, caller string) *settingsDB {
	t.Helper()
	db := &settingsDB{testDB: newDB(t), caller: caller}
	db.clockPerSession()
	db.exec("select ratelimit_define_policy('odd', 7, 3, '1 day 00:00:07.654321', remember => '2 days')")
	db.exec("select ratelimit_define_policy('stepped', 5000000, 1, '3 hours', stepped => true, durable => false)")
	db.exec("grant execute on function ratelimit_acquire, ratelimit_acquire_many, ratelimit_peek, ratelimit_refund, ratelimit_reset to " + caller)
	return db
}

// connect returns a session of the role; no test fails in it, because it serves goroutines.
func (db *settingsDB) connect() *pgx.Conn {
	conn, err := pgx.Connect(context.Background(), db.URL)
	if err == nil {
		_, err = conn.Exec(context.Background(), "do $$ begin end $$; set role "+db.caller) // loads PL/pgSQL and its parameters
	}
	if err != nil {
		panic(err)
	}
	return conn
}

// settable returns the parameters that the role may set, and the values to try.
func (db *settingsDB) settable() map[string][]string {
	db.t.Helper()
	conn := db.connect()
	defer conn.Close(context.Background())
	rows, err := conn.Query(context.Background(), `
		select name, vartype, coalesce(min_val, ''), coalesce(max_val, ''), coalesce(enumvals, '{}') from pg_settings where context = 'user'`)
	require.NoError(db.t, err)
	settings := map[string][]string{"ratelimit.preexisting": settingTexts["ratelimit.preexisting"], "ratelimit.clock": settingTexts["ratelimit.clock"]}
	var name, kind, least, most string
	var values []string
	_, err = pgx.ForEachRow(rows, []any{&name, &kind, &least, &most, &values}, func() error {
		switch {
		case unfit[name] != "":
			db.t.Logf("%s is not tried: it %s", name, unfit[name])
		case kind == "bool":
			settings[name] = []string{"on", "off"}
		case kind == "enum":
			settings[name] = slices.Clone(values)
		case kind == "string" && settingTexts[name] == nil:
			settings[name] = []string{"", "x"}
			db.t.Logf("%s: nobody has said what could be tried, so it is \"\" and \"x\"", name)
		case kind == "string":
			settings[name] = settingTexts[name]
		default:
			settings[name] = []string{least, most}
		}
		return nil
	})
	require.NoError(db.t, err)
	return settings
}

// decisions asks the same of two buckets of its own, and returns what was answered and stored.
func (db *settingsDB) decisions(conn *pgx.Conn) (answers []string) {
	ctx := context.Background()
	db.count++
	key := fmt.Sprintf("k%d", db.count)
	for _, policy := range []string{"odd", "stepped"} {
		for _, now := range []time.Time{t0, t0.Add(25*time.Hour + 7*time.Microsecond)} {
			if _, err := conn.Exec(ctx, "select pg_catalog.set_config('test.now', $1, false)", fmt.Sprint(now.UnixMicro())); err != nil {
				return []string{err.Error()}
			}
			for _, call := range []struct {
				sql  string
				args []any
			}{
				{"ratelimit_acquire($1, $2, $3, $4)", []any{policy, key, 2, "first"}},
				{"ratelimit_acquire($1, $2, $3)", []any{policy, key, 4}},
				{"ratelimit_acquire($1, $2, $3)", []any{policy, key, 6}},
				{"ratelimit_acquire($1, $2, $3, $4)", []any{policy, key, 1, "first"}},
				{"ratelimit_acquire($1, $2, $3)", []any{policy, key, int64(10_000_000_000_000)}},
				{"ratelimit_acquire_many($1, $2, $3)", []any{[]string{policy}, []string{key}, []int64{1}}},
				{"ratelimit_acquire_many($1, $2, $3, $4)", []any{[]string{policy}, []string{key}, []int64{1}, []string{"many"}}},
				{"ratelimit_refund($1, $2, $3)", []any{policy, key, 1}},
				{"ratelimit_peek($1, $2, $3)", []any{policy, key, 5}},
				{"ratelimit_peek($1, $2)", []any{policy, ""}},
			} {
				answers = append(answers, fmt.Sprintf("%s of %s: %s", call.sql, policy, rawDecision(conn, call.sql, call.args...)))
			}
		}
	}
	rows, err := db.Pool.Query(ctx, `
		select format('%s %s due %s', level, refilled_at, due_at)
		  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b where key = $1
		union all
		select format('%s %s %s %s until %s', idempotency_key, cost, remaining, reset_after, expires_at)
		  from (table ratelimit.idempotency_keys union all table ratelimit.ephemeral_idempotency_keys) as k where key = $1
		order by 1`, key)
	if err == nil {
		var stored []string
		stored, err = pgx.CollectRows(rows, pgx.RowTo[string])
		answers = append(answers, stored...)
	}
	if err != nil {
		answers = append(answers, err.Error())
	}
	return answers
}

// rawDecision asks without a function or operator of the session's own, and returns the bytes.
func rawDecision(conn *pgx.Conn, call string, args ...any) string {
	var d struct {
		allowed, replayed      bool
		remaining, capacity    int64
		retryAfter, resetAfter pgtype.Interval
	}
	err := conn.QueryRow(context.Background(), "select allowed, remaining, retry_after, reset_after, capacity, replayed from public."+call, args...).
		Scan(&d.allowed, &d.remaining, &d.retryAfter, &d.resetAfter, &d.capacity, &d.replayed)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%+v", d)
}

// False friends of everything: each function of PostgreSQL that the package's code names, each operator
// on its types, its types and its tables, all of them first on the caller's path and some in pg_temp.
func TestSecurity_PlantedTwinsAreNotFound(t *testing.T) {
	t.Parallel()
	caller := newRole(t)
	db := newDB(t)
	db.setClock(t0)
	db.exec(`
		create schema twins authorization ` + caller + `;
		grant temporary on database ` + pgx.Identifier{db.Name}.Sanitize() + ` to ` + caller + `;
		grant execute on function ratelimit_acquire, ratelimit_acquire_many, ratelimit_peek, ratelimit_refund, ratelimit_reset to ` + caller)
	want := hostileTranscript(t, db, connectAs(t, db.DB, caller), "like any other")

	functions := column(t, db.DB, `
		with words as (select distinct word from `+packageFunctions+` as p, regexp_split_to_table(p.prosrc, '\W+') as word)
		select format('create function twins.%I(%s) returns %s language plpgsql as $$ begin raise exception ''a twin was called''; end $$',
		              p.proname, pg_get_function_identity_arguments(p.oid), coalesce(pg_get_function_result(p.oid), 'void'))
		  from pg_proc as p join words on word = p.proname
		 where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind <> 'p'`)
	operators := column(t, db.DB, `
		select format('create function twins.operator_%s(%s, %s) returns %s language plpgsql as $$ begin raise exception ''a twin was called''; end $$; ', oid, l, r, oprresult::regtype)
		       || format('create operator twins.%s (leftarg = %s, rightarg = %s, function = twins.operator_%s)', oprname, l, r, oid)
		  from pg_operator, format_type(oprleft, null) as l, format_type(oprright, null) as r
		 where oprname in ('+', '-', '*', '/', '%', '=', '<>', '<', '>', '<=', '>=', '||')
		   and (oprleft::regtype::text, oprright::regtype::text) in (
		         select l, r from unnest(array['bigint', 'integer', 'smallint', 'numeric', 'double precision', 'text', 'boolean', 'timestamp with time zone',
		                                       'interval', 'tid', 'oid', 'name', 'anyarray', 'anycompatiblearray', 'anycompatible', 'record']) as l,
		                            unnest(array['bigint', 'integer', 'smallint', 'numeric', 'double precision', 'text', 'boolean', 'timestamp with time zone',
		                                       'interval', 'tid', 'oid', 'name', 'anyarray', 'anycompatiblearray', 'anycompatible', 'record']) as r)`)
	types := []string{
		"create domain twins.int8 as pg_catalog.int8 check (false)", "create domain twins.int4 as pg_catalog.int4 check (false)",
		"create domain twins.text as pg_catalog.text check (false)", "create domain twins.interval as pg_catalog.interval check (false)",
		"create domain twins.timestamptz as pg_catalog.timestamptz check (false)", "create domain twins.bool as pg_catalog.bool check (false)",
		"create domain twins.numeric as pg_catalog.numeric check (false)", "create type twins.decision as (nothing pg_catalog.int4)",
	}
	for _, table := range append([]string{"policies"}, bucketTables...) {
		types = append(types, "create table twins."+table+" (nothing pg_catalog.int4)")
	}

	conn := connectAs(t, db.DB, caller)
	planted := 0
	for _, sql := range slices.Concat(functions, operators, types) {
		switch _, err := conn.Exec(context.Background(), sql, pgx.QueryExecModeSimpleProtocol); sqlState(err) {
		case "":
			planted++
		case "42P13", "42P16", "0A000", "42601": // of a kind that only C can write
		default:
			require.NoError(t, err, sql)
		}
	}
	t.Logf("%d of %d functions, operators, types and tables planted", planted, len(functions)+len(operators)+len(types))
	require.Greater(t, planted, 250)
	for _, table := range append([]string{"policies", "decision", "text", "timestamptz"}, bucketTables...) {
		execute(t, conn, "create temporary table "+table+" (nothing pg_catalog.int4)")
	}
	execute(t, conn, "set search_path = twins, pg_temp, pg_catalog, public")
	_, err := conn.Exec(context.Background(), "select 1::bigint + 1::bigint")
	require.ErrorContains(t, err, "a twin was called")
	_, err = conn.Exec(context.Background(), "select clock_timestamp()")
	require.ErrorContains(t, err, "a twin was called")

	got := hostileTranscript(t, db, conn, "beside twins")
	require.Len(t, got, len(want))
	for i := range want {
		require.Equal(t, want[i], got[i])
	}

	// And they would have been found.
	db.exec("alter function ratelimit_peek reset search_path; grant usage on schema ratelimit to " + caller)
	_, err = conn.Exec(context.Background(), "select public.ratelimit_peek('odd beside twins', 'k')")
	require.Contains(t, []string{"P0001", "23514"}, sqlState(err), "%v", err)
}

// Who may clean up may not say what time it is.
func TestSecurity_CleanupTakesNobodysWordForTheTime(t *testing.T) {
	t.Parallel()
	janitor := newRole(t)
	db := newDB(t)
	for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		db.definePolicy(name, 10, 1, time.Hour, durability)
		db.acquireAt(t0, name, "k", 3, "first")
	}
	db.exec("grant usage on schema ratelimit to " + janitor + "; grant execute on function ratelimit.cleanup_batch, ratelimit_cleanup to " + janitor)
	before := rowsOf(t, db.DB)

	conn := connectAs(t, db.DB, janitor)
	for _, dueBefore := range []string{"infinity", "294276-12-31", "2024-04-30"} {
		execute(t, conn, "select ratelimit.cleanup_batch(1000, '1 minute', $1::text::timestamptz, $1::text::timestamptz)", dueBefore)
		require.Equal(t, before, rowsOf(t, db.DB), dueBefore)
	}
	require.True(t, db.acquire("durable", "k", 3, "first").Replayed)
}

// The one public routine that runs with its caller's rights finds its caller's functions and operators
// too: what somebody else has put on the path must not get those rights.
func TestSecurity_CleanupAllRunsNobodysCode(t *testing.T) {
	t.Parallel()
	planter := newRole(t)
	db := newDB(t)
	db.exec("grant create on schema public to " + planter)
	execute(t, connectAs(t, db.DB, planter), `
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
		execute(t, conn, "set search_path = "+path)
		_, err := conn.Exec(context.Background(), "call ratelimit_cleanup_all()")
		require.NoError(t, err, path)
		for _, budget := range []string{"0", "-1 second", "-178000000 years"} {
			_, err := conn.Exec(context.Background(), "call ratelimit_cleanup_all($1::text::interval)", budget)
			require.Equal(t, "22023", sqlState(err), "%s, %s: %v", path, budget, err)
		}
		_, err = conn.Exec(context.Background(), "call ratelimit_cleanup_all('178000000 years')")
		require.NoError(t, err, path)
	}
}

// The owner of the schema that has the public functions can put others beside them, and take them away.
// Calls with typed arguments, such as the client's, are not led astray; and nobody's rights are gained.
func TestSecurity_HostileOwnerOfTheSchema(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	owner, landlord, caller := newRole(t), newRole(t), newRole(t)
	db := pgtest.Empty(t)
	db.Exec(t, fmt.Sprintf(`
		create schema app authorization %[2]s;
		grant usage, create on schema app to %[1]s;
		grant usage on schema app to %[3]s;
		grant create on database %[4]s to %[1]s`, owner, landlord, caller, pgx.Identifier{db.Name}.Sanitize()))
	installer := connectAs(t, db, owner)
	db.Exec(t, "create schema if not exists public; grant create on schema public to "+owner)
	execute(t, installer, "set search_path = app")
	require.NoError(t, migrations.Up(ctx, installer))
	execute(t, installer, fmt.Sprintf(`
		set search_path = app;
		select ratelimit_define_policy('p', 10, 1, '1 hour');
		grant execute on all functions in schema app to %s`, caller))

	hostile := connectAs(t, db, landlord)
	execute(t, hostile, `
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

	for _, mode := range protocols {
		limiter := client.New(inMode{connectAs(t, db, caller), mode}, client.Schema("app"))
		d, err := limiter.Acquire(ctx, "p", "k", client.Cost(2), client.IdempotencyKey("first "+mode.String()))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		d, err = limiter.Peek(ctx, "p", "k", client.Cost(11))
		require.NoError(t, err)
		require.True(t, d.Never())
		_, err = limiter.Refund(ctx, "p", "k", 1)
		require.NoError(t, err)
		require.NoError(t, limiter.Reset(ctx, "p", "k"))
		require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 10, Refill: 1, Every: time.Hour}))
		_, err = limiter.Cleanup(ctx)
		require.NoError(t, err)
	}

	before := rowsOf(t, db)
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
		_, err := hostile.Exec(ctx, sql)
		require.Equal(t, "42501", sqlState(err), "%s: %v", sql, err)
	}

	// What belongs to PostgreSQL's idea of a schema's owner. The state stays out of reach.
	execute(t, hostile, `
		drop function app.ratelimit_acquire(text, text, bigint, text);
		create function app.ratelimit_acquire(policy text, key text, cost bigint default 1, idempotency_key text default null)
		returns table (allowed boolean, remaining bigint, retry_after interval, reset_after interval, capacity bigint, replayed boolean)
		language plpgsql security definer as $$ begin delete from ratelimit.buckets; end $$`, pgx.QueryExecModeSimpleProtocol)
	_, err := client.New(connectAs(t, db, caller), client.Schema("app")).Acquire(ctx, "p", "k")
	require.Equal(t, "42501", sqlState(err), "%v", err)
	require.Equal(t, before, rowsOf(t, db))
}

// What callers bring along in an argument runs with their rights, before any function of the package.
func TestSecurity_CallersCodeRunsAsTheCaller(t *testing.T) {
	t.Parallel()
	caller := newRole(t)
	db := newDB(t)
	db.definePolicy("p", 10, 1, time.Hour)
	db.exec("create schema spies authorization " + caller + "; grant execute on function ratelimit_acquire, ratelimit_acquire_many to " + caller)
	conn := connectAs(t, db.DB, caller)
	execute(t, conn, `
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
	} {
		execute(t, conn, sql)
	}
	require.Equal(t, []string{caller}, column(t, db.DB, "select distinct who::text from spies.log"))
	require.EqualValues(t, 7, db.left("p", "k"))
}

// Neither statistics nor commands of the less usual kind show or change what the tables hold.
func TestSecurity_NoOtherWayToTheTables(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	caller := newRole(t)
	db := newDB(t)
	db.definePolicy("p", 1000, 1, time.Hour)
	for i := range 20 {
		db.acquire("p", fmt.Sprintf("secret %d", i%3), 1, fmt.Sprint(i))
	}
	db.exec("analyze ratelimit.buckets, ratelimit.idempotency_keys, ratelimit.policies")
	db.exec("grant execute on function ratelimit_acquire, ratelimit_peek to " + caller)
	conn := connectAs(t, db.DB, caller)

	const statistics = "select count(*)::text from pg_stats where schemaname = 'ratelimit'"
	require.NotEqual(t, []string{"0"}, column(t, db.DB, statistics))
	var seen string
	require.NoError(t, conn.QueryRow(ctx, statistics).Scan(&seen))
	require.Equal(t, "0", seen)

	before := rowsOf(t, db.DB)
	for _, table := range append([]string{"policies"}, bucketTables...) {
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
			_, err := conn.Exec(ctx, "begin; "+sql+"; rollback")
			require.Equal(t, "42501", sqlState(err), "%s: %v", sql, err)
			execute(t, conn, "rollback")
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
		_, err := conn.Exec(ctx, sql)
		require.Equal(t, "42501", sqlState(err), "%s: %v", sql, err)
	}
	require.Equal(t, before, rowsOf(t, db.DB))
}

// Of all pairs of texts that somebody might take for each other, joined or not, each bucket and each
// idempotency key is its own: no tenant is answered with another's grant.
func TestSecurity_NobodyReplaysAnothersIdempotencyKey(t *testing.T) {
	t.Parallel()
	texts := []string{"a", "b", "ab", "ba", "a:b", "a,b", "(a,b)", "a|b", "a\x1fb", "a\x01b", "a/b", "a b", "A", "á", "a\u0301", "a ", " a", "a\t", `a\`, `\a`, "a'", `"a"`, "a%", "a_", "null"}
	db := newDB(t)
	for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		db.definePolicy(name, 1_000_000, 1, time.Hour, durability)
		db.definePolicy(name+":a", 1_000_000, 1, time.Hour, durability)
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
		require.Equal(t, []string{again + " 2500"}, column(t, db.DB, `
			select format('%s %s', coalesce(error_code, replayed::text), count(*))
			  from ratelimit_acquire_many($1, $2, $3, $4) group by replayed, error_code`, policies, keys, costs, idempotencyKeys))
	}
	for i := 0; i < len(costs); i += 7 {
		require.True(t, db.acquire(policies[i], keys[i], costs[i], idempotencyKeys[i]).Replayed)
	}
}

// The hint of an error can be pasted: it defines the policy asked for, whatever its name is made of.
func TestSecurity_HintsAreQuoted(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := newDB(t)
	for _, conforming := range []string{"on", "off"} {
		conn := db.Connect(t)
		execute(t, conn, "set standard_conforming_strings = "+conforming)
		for _, name := range append(oddTexts, `\'); select ratelimit_drop_policy('keep'); --`, `'); drop schema ratelimit cascade; --`) {
			_, err := conn.Exec(ctx, "select ratelimit_acquire($1, 'k')", name)
			var unknown *pgconn.PgError
			require.ErrorAs(t, err, &unknown)
			require.Equal(t, "RL001", unknown.Code)
			sql, found := strings.CutPrefix(unknown.Hint, "Define it first: ")
			require.True(t, found, unknown.Hint)
			_, err = conn.PgConn().Exec(ctx, strings.TrimSuffix(sql, ".")).ReadAll()
			require.NoError(t, err, sql)
			require.Equal(t, []string{name}, column(t, db.DB, "select policy from ratelimit_policies()"))
			execute(t, conn, "select ratelimit_drop_policy($1)", name)
		}
	}
}

// What injects where quoting goes wrong: in sessions whose strings mean something else, by the protocol
// that writes arguments into the statement.
func TestSecurity_NothingIsInjectedThroughTheClient(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := newDB(t)
	db.definePolicy("p", 1000, 1, time.Hour)
	texts := append([]string{
		`\'; delete from ratelimit.policies; --`, `'; delete from ratelimit.policies; --`, "\xbf'; delete from ratelimit.policies; --",
		"\xbf\\'; delete from ratelimit.policies; --", "\x95'; delete from ratelimit.policies; --", "\x83\\'; delete from ratelimit.policies; --",
		"x\x00'; delete from ratelimit.policies; --", "$1'; delete from ratelimit.policies; --", "$1::text", "/*", "--", "表'", "ソ'; delete from ratelimit.policies; --",
	}, oddTexts...)
	sessions := []string{
		"", "set standard_conforming_strings = off", "set standard_conforming_strings = off; set backslash_quote = on",
		"set client_encoding = 'SJIS'", "set client_encoding = 'BIG5'", "set client_encoding = 'GB18030'", "set client_encoding = 'SQL_ASCII'", "set client_encoding = 'LATIN1'",
	}
	const policies = "select p::text from ratelimit.policies as p"
	before := column(t, db.DB, policies)
	answered := 0
	for _, session := range sessions {
		for _, mode := range protocols {
			conn := db.Connect(t)
			execute(t, conn, session)
			limiter := client.New(inMode{conn, mode})
			for _, text := range texts {
				if _, err := limiter.Acquire(ctx, "p", text, client.IdempotencyKey(text)); err == nil {
					answered++
				}
				_, err := limiter.Peek(ctx, text, "k")
				require.Error(t, err, "%s: there is no policy %q", session, text)
				require.Error(t, limiter.DropPolicy(ctx, text))
				require.False(t, conn.IsClosed(), "%s: %q", session, text)
			}
			require.Equal(t, before, column(t, db.DB, policies), "%s, %s", session, mode)
		}
	}
	require.Greater(t, answered, len(sessions)*len(texts))
}
