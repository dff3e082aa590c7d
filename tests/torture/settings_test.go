package torture

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
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Every parameter that a plain role may set is tried at each of its values, or at both ends of its range. The decisions must be
// those of a default session, and the parameter must keep its value. First all parameters are set at once, as often as it takes
// to try each value. Then, while there is time, follow one value at a time and random values of all.
func TestTorture_SettingsChangeNoDecision(t *testing.T) {
	run := kit.Torture(t, 10)
	caller := kit.NewRole(t)
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
				if !run.GoesOn() {
					return
				}
				assignments <- []setting{{names[i], value}}
			}
		}
		for run.GoesOn() {
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
				run.Progress("%d sessions, %d values of %d parameters", sessions, len(values), len(names))
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
	run.Figures("parameters", len(names), "values of them", len(values), "sessions", sessions)
}

// compare makes settings in a session of its own. It returns the settings that the server accepted, and as an
// error the first difference to a default session.
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

// The comparison finds code that depends on a setting.
func TestSettings_ADependenceOnOneIsFound(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	caller := kit.NewRole(t)
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
			db.Execute(bug.code)
			db.Execute("grant usage on schema ratelimit to " + caller + "; alter database " + pgx.Identifier{db.Name}.Sanitize() + " set search_path = ratelimit, public")
			want := db.decisions(db.connect())
			require.NoError(t, kit.ErrorOf(db.compare(nil, want)))
			require.Error(t, kit.ErrorOf(db.compare([]setting{bug.by}, want)))
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

// settingTexts are the values to try of parameters that are text.
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

// unfit says why a parameter is not tried.
var unfit = map[string]string{
	"default_transaction_read_only": "makes every acquire 25006, as TestReadOnlyTransaction shows",
	"exit_on_error":                 "ends the session at the first error, of which the test wants some",
	"transaction_deferrable":        "lasts as long as a transaction: default_transaction_deferrable is tried",
	"transaction_isolation":         "lasts as long as a transaction: default_transaction_isolation is tried",
	"transaction_read_only":         "lasts as long as a transaction",
}

// A settingsDB has policies, and a role that may use them, and each session sets its own clock.
type settingsDB struct {
	*kit.TestDB
	caller string
	count  int
}

func newSettingsDB(t *testing.T, caller string) *settingsDB {
	db := &settingsDB{TestDB: kit.NewDB(t), caller: caller}
	db.ClockPerSession()
	db.Execute("select ratelimit_define_policy('odd', 7, 3, '1 day 00:00:07.654321', remember => '2 days')")
	db.Execute("select ratelimit_define_policy('stepped', 5000000, 1, '3 hours', stepped => true, durable => false)")
	db.Execute("grant execute on function ratelimit_acquire, ratelimit_acquire_many, ratelimit_acquire_all, ratelimit_override, " +
		"ratelimit_peek, ratelimit_refund, ratelimit_reset to " + caller)
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
	db.T.Helper()
	conn := db.connect()
	defer conn.Close(context.Background())
	rows := kit.NoError(conn.Query(context.Background(), `
		select name, vartype, coalesce(min_val, ''), coalesce(max_val, ''), coalesce(enumvals, '{}') from pg_settings where context = 'user'`))(db.T)
	settings := map[string][]string{"ratelimit.preexisting": settingTexts["ratelimit.preexisting"], "ratelimit.clock": settingTexts["ratelimit.clock"]}
	var name, kind, least, most string
	var values []string
	_, err := pgx.ForEachRow(rows, []any{&name, &kind, &least, &most, &values}, func() error {
		switch {
		case unfit[name] != "":
			db.T.Logf("%s is not tried: it %s", name, unfit[name])
		case kind == "bool":
			settings[name] = []string{"on", "off"}
		case kind == "enum":
			settings[name] = slices.Clone(values)
		case kind == "string" && settingTexts[name] == nil:
			settings[name] = []string{"", "x"}
			db.T.Logf("%s: nobody has said what could be tried, so it is \"\" and \"x\"", name)
		case kind == "string":
			settings[name] = settingTexts[name]
		default:
			settings[name] = []string{least, most}
		}
		return nil
	})
	require.NoError(db.T, err)
	return settings
}

// decisions makes the same calls on two buckets of its own, and returns the decisions and the stored rows.
func (db *settingsDB) decisions(conn *pgx.Conn) (answers []string) {
	ctx := context.Background()
	db.count++
	key := fmt.Sprintf("k%d", db.count)
	for _, policy := range []string{"odd", "stepped"} {
		for _, now := range []time.Time{kit.T0, kit.T0.Add(25*time.Hour + 7*time.Microsecond)} {
			if _, err := conn.Exec(ctx, "select pg_catalog.set_config('test.now', $1, false)", now.UTC().Format(time.RFC3339Nano)); err != nil {
				return []string{err.Error()}
			}
			if _, err := conn.Exec(ctx, "select public.ratelimit_override($1, $2, 3, 1, '1 day 00:00:01')", policy, key+" own"); err != nil {
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
				{"ratelimit_acquire_all($1, $2, $3, $4)", []any{[]string{policy, "odd"}, []string{key, key + " too"}, []int64{1, 2}, "all"}},
				{"ratelimit_acquire_all($1, $2, $3)", []any{[]string{policy, policy}, []string{key, key}, []int64{3, 4}}},
				{"ratelimit_acquire_many($1, $2, $3, sizes => $4)", []any{[]string{policy}, []string{key + " own"}, []int64{2}, []int32{1}}},
				{"ratelimit_refund($1, $2, $3)", []any{policy, key, 1}},
				{"ratelimit_peek($1, $2, $3)", []any{policy, key, 5}},
				{"ratelimit_peek($1, $2)", []any{policy, ""}},
			} {
				answers = append(answers, fmt.Sprintf("%s of %s: %s", call.sql, policy, kit.RawDecision(conn, call.sql, call.args...)))
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
