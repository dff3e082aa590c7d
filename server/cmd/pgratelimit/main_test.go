package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// asProgram in the environment makes the test binary the program.
const asProgram = "PGRATELIMIT_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	pgtest.Main(m)
}

type ran struct {
	code        int
	out, errors string
}

func on(t *testing.T, db *pgtest.DB, args ...string) ran {
	return command(t, append(args, "--database-url", db.URL)...)
}

func command(t *testing.T, args ...string) ran {
	var out, errors bytes.Buffer
	code := run(t.Context(), append([]string{}, args...), nil, &out, &errors) // without any, nil would be those of the test
	return ran{code, out.String(), errors.String()}
}

var newYear = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func TestInstallAndUninstall(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	for range 2 {
		require.Equal(t, ran{code: 0, out: "pgratelimit 0.3.0 is installed in schema public; its schema version is 1.\n"}, on(t, db, "install"))
	}
	require.Equal(t, ran{code: 0, out: "{\"release\":\"0.3.0\",\"schema\":\"public\",\"schema_version\":1}\n"}, on(t, db, "install", "--json"))
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 day')")
	db.Exec(t, "alter function ratelimit_version() rename to other")
	require.Contains(t, on(t, db, "install").out, "in schema none (the functions are missing)")
	db.Exec(t, "alter function other() rename to ratelimit_version")
	db.Exec(t, "update ratelimit.version set version = 99")
	r := on(t, db, "install")
	require.Equal(t, exitError, r.code)
	require.Contains(t, r.errors, "upgrade the program")
	db.Exec(t, "update ratelimit.version set version = 1")
	r = on(t, db, "uninstall")
	require.Equal(t, "pgratelimit is removed.\n", r.out)
	require.NotContains(t, r.errors, "NOTICE", "only warnings, such as one about a schedule that may remain")
	require.Equal(t, ran{code: 0, out: "{}\n"}, on(t, db, "uninstall", "--json"))
	db.Exec(t, "create schema ratelimit") // it is gone
}

func TestAcquireAndPeek(t *testing.T) {
	db := kit.ParallelDB(t, newYear).DB
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 second'), ratelimit_define_policy('budget', 10, 0, '1 day'), ratelimit_define_policy('watched', 10, 1, '1 second', shadow => true)")
	for _, test := range []struct {
		args string
		code int
		out  string
	}{
		{"acquire api k", exitDone, "allowed: 9 of 10 tokens left, full in 1s"},
		{"acquire api k --cost 8 --idempotency-key i", exitDone, "allowed: 1 of 10 tokens left, full in 9s"},
		{"acquire api k --cost 8 --idempotency-key i", exitDone, "allowed: 1 of 10 tokens left (replayed: nothing was taken)"},
		{"acquire api k --cost 3", exitNo, "denied: 1 of 10 tokens left, enough in 2s"},
		{"acquire api k --cost 11", exitNo, "denied: 1 of 10 tokens left, and no wait would help"},
		{"acquire api k --cost 0", exitDone, "allowed: 1 of 10 tokens left, full in 9s"},
		{"acquire api k --json", exitDone, `{"allowed":true,"remaining":0,"retry_after":0,"reset_after":10,"capacity":10,"replayed":false,"shadowed":false}`},
		{"peek api k --json", exitNo, `{"allowed":false,"remaining":0,"retry_after":1,"reset_after":10,"capacity":10,"replayed":false,"shadowed":false}`},
		{"peek api other", exitDone, "allowed: 10 of 10 tokens left"},
		{"acquire budget k", exitDone, "allowed: 9 of 10 tokens left, does not refill"},
		{"peek budget k --cost 10", exitNo, "denied: 9 of 10 tokens left, and no wait would help"},
		{"acquire watched k --cost 11", exitDone, "allowed: 10 of 10 tokens left (shadowed: enforcing would deny)"},
	} {
		require.Equal(t, ran{code: test.code, out: test.out + "\n"}, on(t, db, strings.Fields(test.args)...), test.args)
	}
}

func TestAdministration(t *testing.T) {
	db := kit.ParallelDB(t, newYear).DB
	require.Equal(t, ran{out: "There is no policy yet.\n"}, on(t, db, "policies"))
	require.Equal(t, ran{out: "[]\n"}, on(t, db, "policies", "--json"))
	require.Equal(t, ran{out: "policies: {}\n"}, on(t, db, "export"))
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 second'), ratelimit_define_policy('budget', 100, 0, '30 days', durable => false, shadow => true)")
	db.Exec(t, "select ratelimit_define_policy('plan', 1000, period => '1 month', time_zone => 'Europe/Berlin', anchor => '2029-03-31')")
	db.Exec(t, "select ratelimit_define_policy('jobs', 5, lease => '5 minutes')")
	for _, test := range []struct {
		args, out string
		code      int
	}{
		{"acquire api k --cost 10 --json", "", exitDone},
		{"acquire api l --cost 10 --json", "", exitDone},
		{"reset api k", `bucket "k" of "api" is full`, exitDone},
		{"peek api k", "allowed: 10 of 10 tokens left", exitDone},
		{"peek api l", "denied: 0 of 10 tokens left, enough in 1s", exitNo},
		{"reset api --all --json", "{}", exitDone},
		{"peek api l", "allowed: 10 of 10 tokens left", exitDone},
		{"override api vip --capacity 50 --every 1h30m --expires-at 2030-06-01T00:00:00Z", `override "vip" of "api": capacity 50, refill 1, every 1h30m, expires_at 2030-06-01T00:00:00Z`, exitDone},
		{"override api vip --expires-at 2031-01-01T00:00:00Z", `override "vip" of "api": capacity 50, refill 1, every 1h30m, expires_at 2031-01-01T00:00:00Z`, exitDone},
		{"peek api vip --cost 50", "allowed: 50 of 50 tokens left", exitDone},
		{"override api blocked --capacity 0", `override "blocked" of "api": capacity 0`, exitDone},
		{"peek api blocked", "denied: 0 of 0 tokens left, and no wait would help", exitNo},
		{"override plan vip --time-zone Asia/Kathmandu --anchor 2029-12-31T09:30:00", `override "vip" of "plan": time_zone Asia/Kathmandu, anchor 2029-12-31T09:30:00`, exitDone},
		{"override plan vip --capacity 5000 --expires-at 2031-01-01T00:00:00Z", `override "vip" of "plan": time_zone Asia/Kathmandu, anchor 2029-12-31T09:30:00` + "\n" +
			`override "vip" of "plan": capacity 5000, expires_at 2031-01-01T00:00:00Z`, exitDone},
		{"acquire plan vip --cost 5000", "allowed: 0 of 5000 tokens left, full in 723h45m0s", exitDone},
		{"override jobs vip --lease 1h --json", `[{"key":"vip","lease":"1h","policy":"jobs"}]`, exitDone},
		{"export", "policies:\n  \"api\": {capacity: 10, refill: 1, every: 1s}\n" +
			"  \"budget\": {capacity: 100, refill: 0, every: 30d, durable: false, shadow: true}\n" +
			"  \"jobs\": {capacity: 5, lease: 5m}\n" +
			"  \"plan\": {capacity: 1000, period: 1 month, time_zone: Europe/Berlin, anchor: 2029-03-31}\n\n" +
			"overrides:\n  \"api\":\n    \"blocked\": {capacity: 0}\n" +
			"    \"vip\": {capacity: 50, refill: 1, every: 1h30m, expires_at: 2031-01-01T00:00:00Z}\n" +
			"  \"jobs\":\n    \"vip\": {lease: 1h}\n" +
			"  \"plan\":\n    \"vip\": [{time_zone: Asia/Kathmandu, anchor: 2029-12-31T09:30:00}, {capacity: 5000, expires_at: 2031-01-01T00:00:00Z}]", exitDone},
		{"override api blocked --remove", `override "blocked" of "api" is removed`, exitDone},
		{"override api blocked --remove", `there was no override "blocked" of "api"`, exitDone},
		{"override api blocked --remove --json", `{"removed":false}`, exitDone},
		{"policies", "POLICY  CAPACITY  REFILL  EVERY  STEPPED  DURABLE  REMEMBER  SHADOW  PERIOD   TIME_ZONE      ANCHOR      LEASE\n" +
			"api     10        1       1s     false    true     1d        false   -        -              -           -\n" +
			"budget  100       0       30d    false    false    1d        true    -        -              -           -\n" +
			"jobs    5         -       -      -        true     -         false   -        -              -           5m\n" +
			"plan    1000      -       -      -        true     1d        false   1 month  Europe/Berlin  2029-03-31  -", exitDone},
		{"policies --json", `[{"capacity":10,"durable":true,"every":"1s","policy":"api","refill":1,"remember":"1d","shadow":false,"stepped":false},` +
			`{"capacity":100,"durable":false,"every":"30d","policy":"budget","refill":0,"remember":"1d","shadow":true,"stepped":false},` +
			`{"capacity":5,"durable":true,"every":null,"lease":"5m","policy":"jobs","refill":null,"remember":null,"shadow":false,"stepped":null},` +
			`{"anchor":"2029-03-31","capacity":1000,"durable":true,"every":null,"period":"1 month","policy":"plan","refill":null,"remember":"1d","shadow":false,"stepped":null,"time_zone":"Europe/Berlin"}]`, exitDone},
	} {
		r := on(t, db, strings.Fields(test.args)...)
		require.Empty(t, r.errors, test.args)
		require.Equal(t, test.code, r.code, test.args)
		if test.out != "" {
			require.Equal(t, test.out+"\n", r.out, test.args)
		}
	}
	requireRefusals(t, db, exitUsage, map[string]string{
		"reset api":                            "which buckets? Write the KEY of one, or --all",
		"reset api k --all":                    "which buckets?",
		"override api k":                       "which numbers? Write --capacity, --refill, --every, --time-zone, --anchor or --lease, or --expires-at alone, or --remove",
		"override api k --remove --capacity 1": "--remove takes no numbers",
	})
	requireRefusals(t, db, exitError, map[string]string{
		"reset nobody k":                                           "unknown policy",
		"reset nobody --all":                                       "unknown policy",
		"override nobody k --capacity 1":                           "unknown policy",
		"override api k --capacity -1":                             "invalid capacity",
		"override api k --lease 5m":                                "invalid lease",
		"override jobs k --refill 1":                               "invalid refill",
		"override api k --expires-at 2031-01-01":                   "invalid expires_at",
		"override api k --every never":                             "invalid input syntax for type interval",
		"override api k --every 1s --expires-at 2029-01-01T00:00Z": "invalid expires_at",
	})
}

func requireRefusals(t *testing.T, db *pgtest.DB, code int, says map[string]string) {
	for args, want := range says {
		r := on(t, db, strings.Fields(args)...)
		require.Equal(t, code, r.code, args)
		require.Contains(t, r.errors, want, args)
	}
}

func TestErrors_HaveExitCodes(t *testing.T) {
	db := kit.ParallelDB(t).DB
	for _, test := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"acquire", "nobody", "k", "--database-url", db.URL}, exitError, "unknown policy"},
		{[]string{"acquire", "nobody", "k", "--database-url", "postgres://127.0.0.1:1/none"}, exitUnavailable, "127.0.0.1"},
		{[]string{"status", "--database-url", pgtest.Empty(t).URL}, exitError, "(SQLSTATE 42883). Run pgratelimit install"},
		{[]string{"acquire", "api"}, exitUsage, "the argument KEY is missing\nusage: pgratelimit acquire POLICY KEY"},
		{[]string{"holders", "api", "a", "key"}, exitUsage, `"key" is an argument too many` + "\nusage: pgratelimit holders [POLICY] [KEY]"},
		{[]string{"apply", "--prune", "overrides", "limits.yaml"}, exitUsage, "what --prune drops follows =, such as --prune=overrides\nusage: pgratelimit apply FILE"},
		{[]string{"apply", "no such file"}, exitError, "the policy file: open no such file: "},
		{[]string{"acquire", "api", "k", "--cost", "many"}, exitUsage, `invalid argument "many" for "--cost" flag`},
		{[]string{"apply", "f", "--prune=all"}, exitUsage, "policies, overrides, or policies,overrides"},
		{[]string{"acquire", "api", "k", "--cots", "1"}, exitUsage, "unknown flag: --cots\nusage: pgratelimit acquire"},
		{[]string{"peek", "api", "k", "--database-url", "postgres://127.0.0.1:port/x"}, exitUsage, "--database-url, DATABASE_URL or SHARD_URLS: "},
		{[]string{"obtain"}, exitUsage, `no command is called "obtain": see pgratelimit --help`},
		{[]string{"pek", "api", "k"}, exitUsage, `no command is called "pek": did you mean peek?`},
		{[]string{"serve", "--config", "no such file"}, exitUsage, "the file of settings: open no such file: "},
		{[]string{"serve", "--config", settingsFile(t), "--database-url", "postgres://127.0.0.1:1/none"}, exitUnavailable, "the database does not answer"},
		{[]string{"serve", "--config", settingsFile(t), "--database-url", pgtest.Empty(t).URL}, exitError, "pgratelimit is not installed"},
	} {
		r := command(t, test.args...)
		require.Equal(t, test.code, r.code, "%v: %s", test.args, r.errors)
		require.Contains(t, r.errors, test.says)
		require.Empty(t, r.out)
		require.LessOrEqual(t, strings.Count(r.errors, "connection refused"), 1, "pgx reports an attempt with TLS and one without")

		r = command(t, append(test.args, "--json")...)
		require.Equal(t, test.code, r.code)
		var complaint struct{ Error, SQLState string }
		require.NoError(t, json.Unmarshal([]byte(r.errors), &complaint), r.errors)
		require.Contains(t, complaint.Error, test.says)
		if test.says == "unknown policy" {
			require.Equal(t, "RL001", complaint.SQLState)
			require.Contains(t, r.errors, "capacity => 10", "it can be copied")
		}
	}
}

func TestErrors_HaveTheRemedy(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]*pgconn.PgError{
		": permission denied for function ratelimit_status (SQLSTATE 42501). Its owner can run: grant execute on function ratelimit_status to <role>;": {Code: "42501", Message: "permission denied for function ratelimit_status"},
		": permission denied for database app (SQLSTATE 42501). Its owner can run: grant create on database \"app\" to <role>;":                        {Code: "42501", Message: "permission denied for database app"},
		": permission denied for schema a (SQLSTATE 42501). Grant it to the role, or connect as the owner of the functions.":                           {Code: "42501", Message: "permission denied for schema a"},
		": unknown policy (SQLSTATE RL001). It is not here. Define it.":                                                                                {Code: "RL001", Message: "unknown policy", Detail: "It is not here.", Hint: "Define it."},
	} {
		require.EqualError(t, inspect.Described(err), want)
	}
}

func TestDatabaseURL_IsObligatory(t *testing.T) {
	t.Setenv("DATABASE_URL", "")
	r := command(t, "status")
	require.Equal(t, exitUsage, r.code)
	require.Equal(t, "DATABASE_URL: it is not set, and neither is SHARD_URLS; set it to the database, such as postgres://app@db/app; --database-url would do, too\n", r.errors)
	t.Setenv("DATABASE_URL", "postgres://127.0.0.1:1/none")
	require.Equal(t, exitUnavailable, command(t, "status").code)
	require.Equal(t, exitUnavailable, command(t, "serve").code)
	t.Setenv("TOKEN", "secret")
	require.Equal(t, exitUsage, command(t, "serve").code, "a misspelled setting")
}

func TestStatusAndDoctor(t *testing.T) {
	clocked := kit.ParallelDB(t, newYear)
	db := clocked.DB
	require.Equal(t, ran{out: "Every bucket is full.\n"}, on(t, db, "status"))
	require.Equal(t, ran{out: "[]\n"}, on(t, db, "status", "--json"))
	r := on(t, db, "doctor")
	require.Equal(t, r.code == exitDone, r == ran{out: "All is well.\n"}, "%v", r) // a role may be told that it does not see all

	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 second'), ratelimit_define_policy('budget', 10, 0, '1 day')")
	db.Exec(t, "select ratelimit_override('api', E'red \\x1b[31m', capacity => 20)")
	db.Exec(t, "select ratelimit_acquire('api', 'k', 10), ratelimit_acquire('api', E'red \\x1b[31m', 5), ratelimit_charge('budget', 'k', 12)")
	r = on(t, db, "status")
	require.Equal(t, ran{out: "" +
		"POLICY  KEY             REMAINING  RETRY_AFTER  RESET_AFTER  CAPACITY  OVERRIDDEN\n" +
		"budget  k               -2         never        never        10        false\n" +
		"api     k               0          1s           10s          10        false\n" +
		"api     \"red \\x1b[31m\"  15         0s           5s           20        true\n"}, r)
	r = on(t, db, "status", "api", "--max-rows", "1", "--json")
	require.Equal(t, ran{out: `[{"capacity":10,"key":"k","overridden":false,"policy":"api","remaining":0,"reset_after":10,"retry_after":1}]` + "\n"}, r)

	db.Exec(t, `drop function ratelimit_status; create function ratelimit_status(policy text, max_rows integer, key text)
		returns table (policy text, key text, newer text, idle interval) language sql as $$ select 'p', 'k', 'x', interval '110000 days' $$`)
	require.Equal(t, ran{out: `[{"idle":9223286400,"key":"k","newer":"x","policy":"p"}]` + "\n"}, on(t, db, "status", "--json"), "columns of a newer version")

	require.Equal(t, ran{out: "Nobody holds slots.\n"}, on(t, db, "holders"))
	require.Equal(t, ran{out: "[]\n"}, on(t, db, "holders", "--json"))
	db.Exec(t, "select ratelimit_define_policy('jobs', 5, lease => '90 seconds'), ratelimit_define_policy('streams', 5, lease => '1 minute')")
	db.Exec(t, "select ratelimit_hold('jobs', 'k', 'job:1/2', 2), ratelimit_hold('jobs', E'l\n', 'job:2/1'), ratelimit_hold('streams', 'k', 'a')")
	require.Equal(t, ran{out: "" +
		"POLICY   KEY    HOLDER   COST  HELD_FOR\n" +
		"jobs     k      job:1/2  2     1m30s\n" +
		"jobs     \"l\\n\"  job:2/1  1     1m30s\n" +
		"streams  k      a        1     1m0s\n"}, on(t, db, "holders"))
	require.Equal(t, ran{out: `[{"cost":2,"held_for":90,"holder":"job:1/2","key":"k","policy":"jobs"}]` + "\n"}, on(t, db, "holders", "jobs", "--max-rows", "1", "--json"))
	require.Equal(t, 3, strings.Count(on(t, db, "holders", "jobs").out, "\n"))
	require.Regexp(t, `^POLICY .*\nstreams  k .*\n$`, on(t, db, "holders", "streams", "k").out)
	requireRefusals(t, db, exitError, map[string]string{"holders nobody": "unknown policy", "holders jobs --max-rows 0": "invalid max_rows"})
	db.Exec(t, "select ratelimit_drop_policy('jobs'), ratelimit_drop_policy('streams')")

	require.Equal(t, ran{out: "No idempotency key is live.\n"}, on(t, db, "grants", "api"))
	db.Exec(t, "select ratelimit_define_policy('month', 100, period => '1 month', history => '1 year')")
	require.Equal(t, ran{out: "[]\n"}, on(t, db, "usage", "month", "--json"))
	db.Exec(t, "select ratelimit_acquire('month', 'a', 5, 'i'), ratelimit_acquire('month', 'b', 7, 'j'), ratelimit_settle('month', 'b', 'j', 3)")
	require.Equal(t, ran{out: "" +
		"POLICY  KEY  IDEMPOTENCY_KEY  COST  SETTLED  GRANTED_FOR  EXPIRES_IN\n" +
		"month   a    i                5     false    0s           24h0m0s\n" +
		"month   b    j                3     true     0s           24h0m0s\n"}, on(t, db, "grants", "month"))
	require.Equal(t, ran{out: `[{"cost":5,"expires_in":86400,"granted_for":0,"idempotency_key":"i","key":"a","policy":"month","settled":false}]` + "\n"},
		on(t, db, "grants", "month", "--unsettled", "--json"))
	require.Regexp(t, `^POLICY .*\nmonth   b .*\n$`, on(t, db, "grants", "month", "--settled").out)
	clocked.SetClock(newYear.AddDate(0, 1, 0))
	db.Exec(t, "select ratelimit_charge('month', 'a', 200)")
	require.Equal(t, ran{out: "" +
		"POLICY  KEY  BEGAN                 ENDED                 USED  CLOSED\n" +
		"month   a    2030-01-01T00:00:00Z  2030-02-01T00:00:00Z  5     true\n" +
		"month   a    2030-02-01T00:00:00Z  2030-03-01T00:00:00Z  200   false\n" +
		"month   b    2030-01-01T00:00:00Z  2030-02-01T00:00:00Z  3     false\n"}, on(t, db, "usage", "month"))
	require.Equal(t, ran{out: `[{"began":"2030-02-01T00:00:00Z","closed":false,"ended":"2030-03-01T00:00:00Z","key":"a","policy":"month","used":200}]` + "\n"},
		on(t, db, "usage", "month", "a", "--since", "2030-02-01T00:00:00Z", "--json"))
	require.Contains(t, on(t, db, "usage", "api").errors, "Policy 'api' is not a durable quota")
	db.Exec(t, "select ratelimit_drop_policy('month')")

	clocked.SetClock(newYear.AddDate(1, 0, 0))
	r = on(t, db, "doctor")
	require.Equal(t, exitNo, r.code)
	require.Contains(t, r.out, "warning: ratelimit.buckets has 3 rows overdue for clean-up")
	r = on(t, db, "doctor", "--json")
	require.Equal(t, exitNo, r.code)
	var findings []inspect.Finding
	require.NoError(t, json.Unmarshal([]byte(r.out), &findings))
	require.True(t, slices.ContainsFunc(findings, func(f inspect.Finding) bool { return f.Severity == "warning" && f.Remedy != "" }))
	require.Empty(t, r.errors)
}

func TestVersionHelpAndCompletion(t *testing.T) {
	t.Parallel()
	require.Regexp(t, `^pgratelimit 0\.3\.0, built with go1\.`, command(t, "version").out)
	require.Regexp(t, `^\{"version":"0\.3\.0","go":"go1\..*"\}\n$`, command(t, "version", "--json").out)
	require.Contains(t, command(t, "completion", "bash").out, "pgratelimit")
	help := command(t)
	require.Zero(t, help.code)
	require.Equal(t, help, command(t, "--help"))
	require.Contains(t, command(t, "serve", "--help").out, "MAX_CALLS")
}

func TestDocs_HaveEachSetting(t *testing.T) {
	t.Parallel()
	page := kit.NoError(os.ReadFile("../../../docs/server.md"))(t)
	rows := regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\| (.*) \\| (.*) \\|$").FindAllStringSubmatch(string(page), -1)
	help := regexp.MustCompile(`(?m)^  ([A-Z_]+) +(.*?)(?: \(default (.*)\))?$`).FindAllStringSubmatch(command(t, "serve", "--help").out, -1)
	require.Len(t, rows, len(help))
	require.NotEmpty(t, help)
	for i, setting := range help {
		require.Equal(t, setting[1], rows[i][1])
		require.Equal(t, setting[3], strings.Trim(rows[i][2], "`"), setting[1])
		require.Equal(t, setting[2], rows[i][3], setting[1])
	}
}

func settingsFile(t *testing.T) string {
	return kit.File(t, "settings", "GRPC_ADDR=off\nHTTP_ADDR=127.0.0.1:0\nCALL_TIMEOUT=1m\n")
}

// applied runs apply with a file, or with standard input where its argument is "-".
func applied(t *testing.T, url, text string, args ...string) ran {
	path := kit.File(t, "limits.yaml", text)
	if len(args) == 0 || args[0] != "-" {
		args = append([]string{path}, args...)
	}
	var out, errors bytes.Buffer
	code := run(t.Context(), append([]string{"apply", "--database-url", url}, args...), strings.NewReader(text), &out, &errors)
	return ran{code, strings.ReplaceAll(out.String(), path, "limits.yaml"), strings.ReplaceAll(errors.String(), path, "limits.yaml")}
}

const onePolicy = "policies: {api: {capacity: 1, refill: 1, every: 1s}}\n"

func TestApply_ShowsAndChanges(t *testing.T) {
	db := kit.ParallelDB(t).DB
	const file = onePolicy + "environments: {staging: {policies: {api: {capacity: 5}}}}"
	const created = `+ policy "api": capacity 5, refill 1, every 1s, stepped false, durable true, remember 1d, shadow false` + "\n"
	require.Equal(t, ran{code: exitNo, out: created + "1 change, not made: this is a dry run.\n"}, applied(t, db.URL, file, "--env", "staging", "--dry-run"))
	require.Equal(t, "There is no policy yet.\n", on(t, db, "policies").out)
	require.Equal(t, ran{out: created + "1 change made.\n"}, applied(t, db.URL, file, "--env", "staging"))
	require.Contains(t, on(t, db, "policies").out, "\napi     5         1       1s ")
	for _, args := range [][]string{{"--env", "staging"}, {"--env", "staging", "--dry-run"}, {"-", "--env", "staging", "--prune"}} {
		require.Equal(t, ran{out: "The database is as the file says.\n"}, applied(t, db.URL, file, args...))
	}
}

// An override that the file does not have is a difference: the database is never called as the file says.
func TestApply_OverridesThatTheFileDoesNotHave(t *testing.T) {
	db := kit.ParallelDB(t).DB
	applied(t, db.URL, onePolicy)
	db.Exec(t, "select count(*) from generate_series(10, 34) as n, ratelimit_override('api', 'k' || n, capacity => 2)")
	for args, code := range map[string]int{"--dry-run": exitNo, "--prune": exitDone} {
		r := applied(t, db.URL, onePolicy, args)
		require.True(t, strings.HasPrefix(r.out, "  override \"k10\" of \"api\" is not in the file, and stays\n"), r.out)
		require.True(t, strings.HasSuffix(r.out, "  … and 5 more\nThe database has 25 overrides that the file does not have: --prune=overrides removes them.\n"), r.out)
		require.Equal(t, code, r.code)
	}
	var told struct{ Drift []policyfile.Bucket }
	require.NoError(t, json.Unmarshal([]byte(applied(t, db.URL, onePolicy, "--json").out), &told))
	require.Len(t, told.Drift, 25, "programs are told of all")
	r := applied(t, db.URL, onePolicy, "--prune=overrides", "--dry-run")
	require.Equal(t, exitNo, r.code)
	require.Contains(t, r.out, "25 changes, not made")
	require.Contains(t, applied(t, db.URL, onePolicy, "--prune=policies,overrides").out, "\n25 changes made.\n")
	require.Equal(t, ran{out: "The database is as the file says.\n"}, applied(t, db.URL, onePolicy, "--dry-run"))
}

func TestApply_JSON(t *testing.T) {
	db := kit.ParallelDB(t).DB
	const file = "policies: {<api>: {capacity: 1, refill: 1, every: 1s}}\noverrides: {<api>: {k: {capacity: 0}}}\n"
	r := applied(t, db.URL, file, "--dry-run", "--json")
	require.Equal(t, exitNo, r.code)
	require.JSONEq(t, `{"applied": false, "changes": [
		{"action": "create", "policy": "<api>", "fields": [
			{"field": "capacity", "old": null, "new": 1}, {"field": "refill", "old": null, "new": 1},
			{"field": "every", "old": null, "new": "1s"}, {"field": "stepped", "old": null, "new": false},
			{"field": "durable", "old": null, "new": true}, {"field": "remember", "old": null, "new": "1d"},
			{"field": "shadow", "old": null, "new": false}]},
		{"action": "create", "policy": "<api>", "key": "k", "fields": [
			{"field": "capacity", "old": null, "new": 0}]}]}`, r.out)
	require.Equal(t, exitDone, applied(t, db.URL, file, "--json").code)
	require.JSONEq(t, `{"applied": true, "changes": []}`, applied(t, db.URL, file, "--json").out)
	r = applied(t, db.URL, onePolicy, "--prune", "--json")
	require.Equal(t, exitDone, r.code)
	var pruned policyfile.Difference
	require.NoError(t, json.Unmarshal([]byte(r.out), &pruned))
	require.Equal(t, policyfile.Drop, pruned.Changes[1].Action)
	require.Equal(t, &policyfile.Lost{Overrides: 1}, pruned.Changes[1].Lost)
}

// The mistakes are found before apply connects.
func TestApply_Errors(t *testing.T) {
	t.Parallel()
	const nowhere, limits = "postgres://127.0.0.1:1/none", `unknown field "limits": the fields here are policies, overrides, envoy and environments`
	for _, test := range []struct {
		file, args, says string
	}{
		{"policies:\n  api: {capacity: -1}\nlimits: {}\n", "", `limits.yaml:2:3: api has no refill and no every: write refill: 10 and every: 1s
limits.yaml:2:19: capacity is -1: write a whole number from 0 to 9000000000000, in digits without quotes
limits.yaml:3:1: ` + limits},
		{"5", "-", "standard input:1:1: the file is 5: write policies, and below it the name of one"},
		{"environments: {staging: {}, production: {}}", "--env=prod", `limits.yaml has no environment "prod": it has staging and production`},
		{"policies: {}", "--env=prod", `limits.yaml has no environment "prod": it has none at all`},
	} {
		require.Equal(t, ran{code: exitError, errors: test.says + "\n"}, applied(t, nowhere, test.file, strings.Fields(test.args)...))
	}
	r := applied(t, nowhere, "limits: {}", "--json")
	require.Equal(t, exitError, r.code)
	require.Empty(t, r.errors, "the mistakes are in the answer, and there alone")
	var told struct{ Problems policyfile.Problems }
	require.NoError(t, json.Unmarshal([]byte(r.out), &told))
	require.Equal(t, policyfile.Problems{{Position: policyfile.Position{File: "limits.yaml", Line: 1, Column: 1}, Message: limits}}, told.Problems)
	require.Equal(t, exitUnavailable, applied(t, nowhere, onePolicy).code)
}

// Shards from nothing, by the commands that a user runs.
func TestShards(t *testing.T) { // not parallel: it sets the environment
	db := pgtest.Empty(t)
	ends := func(code int, args ...string) string {
		r := command(t, args...)
		require.Equal(t, code, r.code, "%s: %s", args, r.errors)
		return r.out + r.errors
	}
	done := func(args ...string) string { return ends(exitDone, args...) }
	t.Setenv("DATABASE_URL", db.URL)
	installed := done("install", "--shards", "4")
	t.Cleanup(func() {
		for n := range 4 {
			db.Exec(t, fmt.Sprintf("drop database if exists %s with (force)", pgx.Identifier{fmt.Sprintf("%s_%d", db.Name, n)}.Sanitize()))
		}
	})
	require.Contains(t, installed, "shard 3 of 4: pgratelimit 0.3.0 is installed in schema public; its schema version is 1.\n")
	list := regexp.MustCompile(`SHARD_URLS="(.*)"`).FindStringSubmatch(installed)
	require.NotNil(t, list, installed)
	require.Equal(t, installed, done("install", "--shards", "4"), "once more")

	t.Setenv("DATABASE_URL", "")
	t.Setenv("SHARD_URLS", list[1])
	done("install")
	urls := strings.Fields(list[1])
	keys := make([]string, 4)
	for n := range keys {
		keys[n] = kit.KeyOf(n, 4, "user:")
	}

	limits := fmt.Sprintf("policies: {api: {capacity: 10, refill: 0, every: 1d}}\noverrides: {api: {%q: {capacity: 20}}}\n", keys[2])
	file := kit.File(t, "limits.yaml", limits)
	says := ends(exitNo, "apply", file, "--dry-run")
	require.Equal(t, 4, strings.Count(says, `+ policy "api"`))
	require.Equal(t, 1, strings.Count(says, "+ override"), says)
	require.Regexp(t, `(?s)shard 2 of 4: \n\+ policy[^\n]*\n\+ override`, says)
	done("apply", file)
	require.Equal(t, 4, strings.Count(done("apply", file), "The database is as the file says."))
	done("override", "api", keys[0], "--capacity", "7")
	says = ends(exitNo, "apply", file, "--dry-run") // a difference of any shard is one, also if those after it have none
	require.Equal(t, 3, strings.Count(says, "The database is as the file says."))
	done("override", "api", keys[0], "--remove")

	for n, key := range keys {
		left := map[bool]int{false: 9, true: 19}[n == 2]
		done("acquire", "api", key)
		require.Contains(t, done("peek", "api", key), fmt.Sprintf("allowed: %d of ", left))
		for _, args := range [][]string{{"peek", "api", key}, {"status"}, {"doctor"}, {"apply", file}} {
			says = ends(exitError, append(args, "--database-url", urls[n])...)
			require.Contains(t, says, fmt.Sprintf("is shard %d of 4", n), args)
			require.Contains(t, says, "List all 4 databases, in SHARD_URLS", args)
		}
	}
	done("acquire", "api", keys[1], "--cost", "5")
	require.Regexp(t, `^POLICY .*\napi +`+keys[1]+` +4 .*\napi +user:\d+ +9 .*\n$`, done("status", "--max-rows", "2"))
	done("override", "api", keys[3], "--capacity", "7")
	done("reset", "api", "--all")
	require.Contains(t, done("peek", "api", keys[3]), "allowed: 7 of 7 ")
	require.Contains(t, done("peek", "api", keys[0]), "allowed: 10 of 10 ")
	require.Equal(t, 2, strings.Count(done("policies"), "\n"), "the policies of all shards, once")
	says = done("export")
	require.Contains(t, says, fmt.Sprintf("%q: {capacity: 20}", keys[2]))
	require.Contains(t, says, fmt.Sprintf("%q: {capacity: 7}", keys[3]))
	r := command(t, "doctor")
	require.Equal(t, r.code == exitDone, r.out == "All is well.\n", r.out)

	t.Setenv("SHARD_URLS", strings.Join([]string{urls[0], urls[2], urls[1], urls[3]}, " "))
	for _, args := range [][]string{{"status"}, {"doctor"}, {"apply", file}, {"acquire", "api", keys[1]}, {"install"}} {
		says = ends(exitError, args...)
		require.Contains(t, says, "shard 1 of 4", args)
		require.Contains(t, says, "shard 2 of 4", args)
	}
	t.Setenv("SHARD_URLS", list[1])
	require.Equal(t, 4, strings.Count(command(t, "uninstall").out, "pgratelimit is removed."))
	t.Setenv("DATABASE_URL", db.URL)
	require.Equal(t, exitUsage, command(t, "status").code, "both are set")
	require.Equal(t, exitUsage, on(t, db, "install", "--shards", "3").code)
}
