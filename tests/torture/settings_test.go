package torture

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Every parameter that a plain role may set is tried at each of its values, or at both ends of its range. The answers to scripts must be
// those of the model, and the parameter must keep its value. First all parameters are set at once, as often as it takes to try each
// value. Then, while there is time, follow one value at a time and random values of all.
func TestTorture_SettingsChangeNoDecision(t *testing.T) {
	run := kit.Torture(t, 10)
	role := kit.NewRole(t)
	first := newSettingsCaller(t, role)
	settings := settable(t, first.db, role)
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

	var mu sync.Mutex
	values, sessions := map[setting]bool{}, 0
	var workers sync.WaitGroup
	for _, c := range []*caller{first, newSettingsCaller(t, role), newSettingsCaller(t, role)} {
		workers.Go(func() {
			for assignment := range assignments {
				made, failure := c.playUnder(t, role, assignment)
				mu.Lock()
				for _, s := range made {
					values[s] = true
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
	require.Greater(t, len(values), 2*len(names))
	run.Figures("parameters", len(names), "values of them", len(values), "sessions", sessions)
}

// Code that depends on a setting is found.
func TestSettings_ADependenceOnOneIsFound(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	role := kit.NewRole(t)
	for name, bug := range map[string]struct {
		code string
		by   setting
	}{
		"days that are not 24 hours": {
			strings.Join([]string{`do $$ begin execute replace(pg_get_functiondef('ratelimit_acquire'::regproc),`,
				`'short_duration(v_policy.remember_us)', 'justify_hours(short_duration(v_policy.remember_us))'); end $$`}, " "),
			setting{"TimeZone", "Europe/Berlin"},
		},
		"a path that is not pinned": {"alter function ratelimit_peek reset search_path", setting{"search_path", "nowhere"}},
		"an interval read from text": {
			`create or replace function ratelimit.microseconds(span interval) returns numeric language sql stable as
			 $$ select extract(epoch from replace(span::text, ' ', ' ')::interval) * case when span::text like 'P%' then 1000001 else 1000000 end $$`,
			setting{"IntervalStyle", "iso_8601"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newSettingsCaller(t, role)
			c.db.SetTimeZone("UTC")
			c.db.Execute(bug.code)
			c.db.Execute("alter database " + pgx.Identifier{c.db.Name}.Sanitize() + " set search_path = ratelimit, public")
			require.NoError(t, kit.ErrorOf(c.playUnder(t, role, nil)))
			require.Error(t, kit.ErrorOf(c.playUnder(t, role, []setting{bug.by})))
		})
	}
}

// A setting is a value for a parameter.
type setting struct{ name, value string }

func (s setting) String() string { return fmt.Sprintf("%s = %q", s.name, s.value) }

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

// newSettingsCaller lets a role use the package, and look at its tables.
func newSettingsCaller(t *testing.T, role string) *caller {
	c := newCaller(t, newTally())
	c.db.Execute(fmt.Sprintf(`
		grant execute on all functions in schema public to %[1]s; grant execute on all procedures in schema public to %[1]s;
		grant usage on schema ratelimit to %[1]s; grant select on all tables in schema ratelimit to %[1]s;
		grant execute on function ratelimit.cleanup_batch, ratelimit.reset_batch to %[1]s`, role), pgx.QueryExecModeSimpleProtocol)
	return c
}

// playUnder plays scripts in a session of the role with settings. It returns those that the server accepted, and as an error the first
// answer that is not the model's.
func (c *caller) playUnder(t *testing.T, role string, assignment []setting) (made []setting, err error) {
	c.wire = c.db.Wire(t)
	defer c.wire.Conn.Close()
	c.pathless = true
	messages := []kit.Message{simple("do $$ begin end $$; set role " + role)} // loads PL/pgSQL and its parameters
	for _, s := range assignment {
		messages = append(messages, simple("select pg_catalog.set_config("+kit.Quoted(s.name)+", "+kit.Quoted(s.value)+", false)"))
	}
	responses, err := c.wire.Ask(messages)
	if err != nil || responses[0].Code != "" {
		return nil, errors.Join(err, fmt.Errorf("%v", responses))
	}
	var written []string
	for i, s := range assignment {
		if r := responses[i+1]; r.Code == "" {
			made, written = append(made, s), append(written, r.Rows[0])
		}
	}
	for _, script := range []string{"a day of 23 hours", "answers", "quotas", "slots", "usage", "settlements of several"} {
		if err := c.play(scripts[script]); err != nil {
			return made, err
		}
	}
	messages = nil
	for _, s := range made {
		messages = append(messages, simple("select pg_catalog.current_setting("+kit.Quoted(s.name)+")"))
	}
	responses, err = c.wire.Ask(messages)
	for i, r := range responses {
		if err == nil && r.Rows[0] != written[i] && !strings.HasPrefix(made[i].name, "tcp_") { // the operating system bounds those of a TCP connection
			err = fmt.Errorf("%s became %v", made[i], r)
		}
	}
	return made, err
}

// callOf finds the functions that a statement calls.
var callOf = regexp.MustCompile(`\bratelimit_[a-z_]+\(`)

// settable are the parameters that a role may set, and the values to try.
func settable(t *testing.T, db *kit.TestDB, role string) map[string][]string {
	conn := db.Connect(t)
	kit.Execute(t, conn, "do $$ begin end $$; set role "+role, pgx.QueryExecModeSimpleProtocol)
	rows := kit.NoError(conn.Query(t.Context(), `
		select name, vartype, coalesce(min_val, ''), coalesce(max_val, ''), coalesce(enumvals, '{}') from pg_settings where context = 'user'`))(t)
	settings := map[string][]string{"ratelimit.preexisting": settingTexts["ratelimit.preexisting"], "ratelimit.clock": settingTexts["ratelimit.clock"]}
	var name, kind, least, most string
	var values []string
	require.NoError(t, kit.ErrorOf(pgx.ForEachRow(rows, []any{&name, &kind, &least, &most, &values}, func() error {
		switch texts, known := settingTexts[name]; {
		case unfit[name] != "":
			t.Logf("%s is not tried: it %s", name, unfit[name])
		case kind == "bool":
			settings[name] = []string{"on", "off"}
		case kind == "enum":
			settings[name] = slices.Clone(values)
		case known:
			settings[name] = texts
		case kind == "string":
			settings[name] = []string{"", "x"}
			t.Logf("%s: nobody has said what could be tried, so it is \"\" and \"x\"", name)
		default:
			settings[name] = []string{least, most}
		}
		return nil
	})))
	return settings
}
