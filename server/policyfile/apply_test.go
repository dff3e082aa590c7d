package policyfile_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Any file becomes the state of any database, and its export is that file. The second time nothing changes.
func TestApply_AnyFileAndItsExport(t *testing.T) {
	t.Parallel()
	db, other := pgtest.New(t), pgtest.New(t)
	rapid.Check(t, func(t *rapid.T) {
		all := policyfile.Options{Prune: true, PruneOverrides: true}
		text := someFile(t)
		apply(t, db.Pool, text, all)
		require.Empty(t, apply(t, db.Pool, text, all).Changes)
		export := string(kit.NoError(policyfile.Export(context.Background(), db.Pool))(t))
		require.Equal(t, everything(t, text), everything(t, export))
		apply(t, other.Pool, export, all)
		require.Equal(t, policiesIn(t, db), policiesIn(t, other))
		require.Equal(t, overridesIn(t, db), overridesIn(t, other))
	})
}

// File and database agree on the smallest and largest numbers.
func TestApply_Extremes(t *testing.T) {
	db := kit.ParallelDB(t).DB
	apply(t, db.Pool, `
policies:
  large: {capacity: 9000000000000, refill: 9000000000000, every: 1us, remember: 365250d}
  slow: {capacity: 10, refill: 1, every: 365250d, remember: 1us}
  budget: {capacity: 9000000000000, refill: 0, every: 365250d}
  closed: {capacity: 0, refill: 9000000000000, every: 1us}
  short: {capacity: 1, lease: 1ms}
  long: {capacity: 10000, lease: 365250d}
overrides:
  long: {blocked: {capacity: 0, lease: 1ms}}
  budget: {blocked: {capacity: 0}, large: {refill: 9000000000000, expires_at: 9999-12-31T23:59:59.999999-23:59}}
`)
	require.Equal(t, []string{
		"budget 9000000000000 0 31557600000000000 f t 86400000000 f",
		"closed 0 9000000000000 1 f t 86400000000 f",
		"large 9000000000000 9000000000000 1 f t 31557600000000000 f",
		"long 10000 t f 31557600000000000",
		"short 1 t f 1000",
		"slow 10 1 31557600000000000 f t 1 f",
	}, policiesIn(t, db))
}

const twoPolicies = `
policies:
  api: {capacity: 100, refill: 10, every: 1s}
  llm: {capacity: 1000, refill: 0, every: 30d, durable: false}
overrides:
  api:
    "user:42": {capacity: 500}
    gone: {capacity: 1, expires_at: 2001-01-01T00:00:00Z}
`

const slots = `
policies: {jobs: {capacity: 5, lease: 5m}}
overrides: {jobs: {vip: {capacity: 50}, slow: [{lease: 1h, expires_at: 2999-01-01T00:00:00Z}, {capacity: 7}]}}
`

// A step applies a file, perhaps to a database that something else has changed.
type step struct {
	sql, file string
	options   policyfile.Options
	shows     string
}

const ofEnvoy = `
policies: {new: {capacity: 1, refill: 1, every: 1s}}
envoy:
  - domain: edge
    descriptors:
      - {key: address, rate_limit: {unit: minute, requests_per_unit: 60}}
      - {key: watched, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 5, name: w}}
      - {key: none, rate_limit: {unit: second, requests_per_unit: 0}}
      - {key: new, rate_limit: {policy: new}}
`

// A plan shows what apply then does, and nothing is left to change.
func TestApply_ShowsWhatItChanges(t *testing.T) {
	const (
		expired = "  override \"gone\" of \"api\" has expired at 2001-01-01T00:00:00Z and is not set\n"
		created = `+ policy "api": capacity 100, refill 10, every 1s, stepped false, durable true, remember 1d, shadow false
+ policy "llm": capacity 1000, refill 0, every 30d, stepped false, durable false, remember 1d, shadow false
+ override "user:42" of "api": capacity 500
` + expired
		newPolicy  = `+ policy "new": capacity 1, refill 1, every 1s, stepped false, durable true, remember 1d, shadow false` + "\n"
		another    = "policies: {new: {capacity: 1, refill: 1, every: 1s}}"
		onlyPolicy = "policies: {api: {capacity: 1, refill: 1, every: 1s}}\n"
		apiCreated = `+ policy "api": capacity 1, refill 1, every 1s, stepped false, durable true, remember 1d, shadow false` + "\n"
		stays      = "  override \"user:42\" of \"api\" is not in the file, and stays\n"
	)
	prune, pruneOverrides := policyfile.Options{Prune: true}, policyfile.Options{PruneOverrides: true}
	aMinuteAgo := time.Now().Add(-time.Minute).UTC().Format("2006-01-02T15:04:05Z")
	ends := func(at string) string {
		return onlyPolicy + "overrides: {api: {k: {capacity: 1, expires_at: " + at + "}}}"
	}
	kit.OnDBs(t, map[string][]step{
		"fields that change": {{file: twoPolicies, shows: created}, {
			file: strings.NewReplacer("capacity: 100,", "capacity: 200,", "every: 1s", "every: 1m", "{capacity: 500}",
				"{capacity: 500, expires_at: 2999-01-01T00:00:00Z}", "durable: false", "durable: false, shadow: true").Replace(twoPolicies),
			shows: `~ policy "api": capacity 100 -> 200, every 1s -> 1m
~ policy "llm": shadow false -> true
- override "user:42" of "api": capacity 500
+ override "user:42" of "api": capacity 500, expires_at 2999-01-01T00:00:00Z
` + expired,
		}},
		"a history": {
			{file: "policies: {plan: {capacity: 1000, period: 1 day, history: 24 months}}", shows: `+ policy "plan": capacity 1000, period 1 day, time_zone UTC, anchor 2001-01-01, durable true, remember 1d, shadow false, history 2 years
`},
			{file: "policies: {plan: {capacity: 1000, period: 1 day, history: 2 years}}"},
			{file: "policies: {plan: {capacity: 1000, period: 1 day}}"},
			{file: "policies: {plan: {capacity: 1000, period: 1 day, history: 0 days}}", shows: "~ policy \"plan\": history 2 years -> 0 days\n"},
			{file: "policies: {plan: {capacity: 1000, period: 1 day, history: 0 days}}"},
			{
				sql:  `insert into ratelimit.usage select id, '2024-01-01', '2024-01-02', '2999-01-01', 1, 'k' from ratelimit.policies where name = 'plan'`,
				file: another, options: prune,
				shows: newPolicy + "- policy \"plan\": dropped with 0 buckets, 0 overrides, 0 idempotency keys and 1 closed period\n",
			},
		},
		"slots": {
			{file: slots, shows: `+ policy "jobs": capacity 5, lease 5m, durable true, shadow false
+ override "vip" of "jobs": capacity 50
+ override "slow" of "jobs": capacity 7
+ override "slow" of "jobs": lease 1h, expires_at 2999-01-01T00:00:00Z
`},
			{file: strings.NewReplacer("lease: 5m", "lease: 10m, shadow: true", "capacity: 50", "lease: 5m").Replace(slots), shows: `~ policy "jobs": lease 5m -> 10m, shadow false -> true
~ override "vip" of "jobs": lease unset -> 5m, capacity 50 -> unset
`},
			{
				sql: `select ratelimit_hold('jobs', 'k', h) from unnest(array['a', 'b']) as h`, file: another, options: prune,
				shows: newPolicy + `- policy "jobs": dropped with 0 buckets, 2 overrides, 0 idempotency keys and 2 holders
`,
			},
		},
		"the end of an override is compared to the microsecond": {
			{file: ends("2999-01-01T00:00:00Z"), shows: apiCreated + "+ override \"k\" of \"api\": capacity 1, expires_at 2999-01-01T00:00:00Z\n"},
			{file: ends("2999-01-01T00:00:00.000001Z"), shows: "~ override \"k\" of \"api\": expires_at 2999-01-01T00:00:00Z -> 2999-01-01T00:00:00.000001Z\n"},
			{file: ends("2999-01-01T01:00:00.000001+01:00")},
		},
		"an override that has just expired is not set": {{file: ends(aMinuteAgo), shows: apiCreated + "  override \"k\" of \"api\" has expired at " + aMinuteAgo + " and is not set\n"}},
		"prune drops policies, and counts what goes with them": {
			{file: twoPolicies, shows: created},
			{
				sql: `select ratelimit_acquire('api', 'user:' || n, 1, 'order:' || n) from generate_series(1, 3) as n;
					select ratelimit_acquire('llm', 'user:1', 1, 'order:1')`,
				file: another, shows: newPolicy + stays,
			},
			{file: another, options: prune, shows: `- policy "api": dropped with 3 buckets, 1 override and 3 idempotency keys
- policy "llm": dropped with 1 bucket, 0 overrides and 1 idempotency key
`},
		},
		"prune counts the policies of the environment": {{file: twoPolicies, shows: created}, {
			file:    "environments: {staging: {policies: {api: {capacity: 100, refill: 10, every: 1s}}}}",
			options: policyfile.Options{Environment: "staging", Prune: true},
			shows:   "- policy \"llm\": dropped with 0 buckets, 0 overrides and 0 idempotency keys\n" + stays,
		}},
		"prune spares policies that a server has defined for the file's rules": {{
			sql: `select ratelimit_define_policy(p, 60, 60, '1 minute') from unnest(array['edge.address', 'edge.a_b.c*', 'named', 'edge.named', 'edge.none', 'left over']) as p`,
			file: another + `
envoy:
  - domain: edge
    descriptors:
      - {key: address, rate_limit: {unit: minute, requests_per_unit: 60}}
      - {key: a, value: b, descriptors: [{key: c*, rate_limit: {unit: minute, requests_per_unit: 60}}]}
      - {key: named, rate_limit: {unit: minute, requests_per_unit: 60, name: named}}
      - {key: none, rate_limit: {unlimited: true}}
`,
			options: prune,
			shows: newPolicy + `- policy "edge.named": dropped with 0 buckets, 0 overrides and 0 idempotency keys
- policy "edge.none": dropped with 0 buckets, 0 overrides and 0 idempotency keys
- policy "left over": dropped with 0 buckets, 0 overrides and 0 idempotency keys
`,
		}},
		"what a rule of Envoy's describes is defined, and what no rule says stays": {
			{file: ofEnvoy, shows: newPolicy + `+ policy "edge.address": capacity 60, refill 60, every 1m, stepped false, durable true, remember 1d, shadow false
+ policy "w": capacity 5, refill 5, every 1h, stepped false, durable true, remember 1d, shadow true
`},
			{
				sql: `select ratelimit_define_policy('edge.address', capacity => 61, remember => '7 days');
					select ratelimit_drop_policy('w'); select ratelimit_define_policy('w', 5, 5, '1 hour', shadow => true, durable => false)`,
				file: ofEnvoy, shows: "~ policy \"edge.address\": capacity 61 -> 60\n",
			},
			{file: ofEnvoy, options: prune},
		},
		"overrides that the file does not have are listed, and removed if that is asked for": {
			{file: twoPolicies, shows: created},
			{
				sql: `select ratelimit_override('api', 'vip', capacity => 900, expires_at => '2999-01-01Z'), ratelimit_override('llm', 'user:42', capacity => 0);
					select ratelimit_override('api', 'gone', capacity => 7)`,
				file: twoPolicies, options: prune, shows: expired + `  override "gone" of "api" is not in the file, and stays
  override "vip" of "api" is not in the file, and stays
  override "user:42" of "llm" is not in the file, and stays
`,
			},
			{file: twoPolicies, options: pruneOverrides, shows: `- override "gone" of "api": capacity 7
- override "vip" of "api": capacity 900, expires_at 2999-01-01T00:00:00Z
- override "user:42" of "llm": capacity 0
` + expired},
			{file: twoPolicies, options: pruneOverrides, shows: expired},
		},
		"overrides of a policy that is dropped are counted there": {{file: twoPolicies, shows: created}, {
			sql:     `select ratelimit_define_policy('old', 1, 1, '1 second'); select ratelimit_override('old', 'k', capacity => 2), ratelimit_override('api', 'k', capacity => 2)`,
			file:    twoPolicies,
			options: policyfile.Options{Prune: true, PruneOverrides: true},
			shows: `- policy "old": dropped with 0 buckets, 1 override and 0 idempotency keys
- override "k" of "api": capacity 2
` + expired,
		}},
	}, func(t *testing.T, of *kit.TestDB, steps []step) {
		db := of.DB
		for _, step := range steps {
			db.Exec(t, step.sql)
			before := policiesIn(t, db)
			plan := func() *policyfile.Difference {
				return kit.NoError(policyfile.Plan(t.Context(), db.Pool, parse(t, step.file), step.options))(t)
			}
			require.Equal(t, step.shows, plan().String())
			require.Equal(t, before, policiesIn(t, db), "a plan writes nothing")
			require.Equal(t, step.shows, apply(t, db.Pool, step.file, step.options).String())
			require.True(t, plan().Empty())
		}
	})
}

// An error has its remedy, or the place of what the database refuses, and nothing is changed.
func TestApply_Errors(t *testing.T) {
	type testCase struct{ sql, file, want string }
	kit.InParallel(t, map[string]testCase{
		"a constraint that is checked at commit": {`create function refuse() returns trigger language plpgsql as $$ begin raise 'not today'; end $$;
			create constraint trigger refuse after insert on ratelimit.policies initially deferred for each row execute function refuse()`,
			twoPolicies, "commit: ERROR: not today"},
		"no policies, which prune would take for none": {"", "envoy: []", "limits.yaml has no policies, and to prune would drop all there are"},
		"a refusal": {`create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe as $$ select '2900-01-01Z'::timestamptz $$`,
			"policies: {api: {capacity: 1, refill: 1, every: 1s}}\noverrides:\n  api:\n    \"user:42\": {capacity: 2, expires_at: 2800-01-01T00:00:00Z}\n",
			"limits.yaml:4:42: the database refuses this: invalid expires_at: expires_at is 2800-01-01 00:00:00+00. Pass an instant that lies ahead"},
		"a bucket that never fills": {"", "policies:\n  slow: {capacity: 11, refill: 1, every: 365250d}",
			"limits.yaml:2:32: the database refuses this: invalid refill: refill is 1 every 8766000:00:00. Refill faster or lower the capacity"},
		"a policy of the other durability": {"", "policies:\n  stays: {capacity: 1, refill: 1, every: 1s, durable: false}",
			"limits.yaml:2:55: the database refuses this: invalid durable: Policy 'stays' was created with durable => t. Drop the policy"},
		"policies of other kinds": {"select ratelimit_define_policy('plan', 1, period => '1 day'), ratelimit_define_policy('jobs', 1, lease => '5 minutes')",
			"policies:\n  stays: {capacity: 1, period: 1 day}\n  plan: {capacity: 1, lease: 5m}\n  jobs: {capacity: 1, refill: 1, every: 1s}",
			`limits.yaml:2:3: policy "stays" refills in the database, and cannot become one that is a quota: drop the policy first, with all its buckets
limits.yaml:3:3: policy "plan" is a quota in the database, and cannot become one that lends slots: drop the policy first, with all its buckets
limits.yaml:4:3: policy "jobs" lends slots in the database, and cannot become one that refills: drop the policy first, with all its buckets`},
		"a rule of Envoy's for a policy that refills": {"",
			"envoy: [{domain: d, descriptors: [{key: k, rate_limit: {name: stays, unit: day, requests_per_unit: 1, calendar: true}}]}]\n" +
				"policies: {p: {capacity: 1, period: 1 day}}",
			`limits.yaml:1:44: policy "stays" refills in the database, and cannot become one that is a quota`},
		"no function": {"alter function ratelimit_overrides rename to gone", twoPolicies,
			"(SQLSTATE 42883). Run pgratelimit install, or put the schema of the functions on search_path."},
	}, func(t *testing.T, test testCase) {
		db := pgtest.New(t)
		db.Exec(t, `select ratelimit_define_policy('stays', 1, 1, '1 second')`)
		db.Exec(t, test.sql)
		before := policiesIn(t, db)
		_, planned := policyfile.Plan(t.Context(), db.Pool, parse(t, test.file), policyfile.Options{Prune: true})
		_, err := policyfile.Apply(t.Context(), db.Pool, parse(t, test.file), policyfile.Options{Prune: true})
		require.ErrorContains(t, err, test.want)
		require.Equal(t, strings.HasPrefix(test.want, "limits.yaml:"), errors.As(err, new(policyfile.Problems)))
		require.EqualError(t, planned, err.Error(), "a dry run refuses what an apply refuses")
		require.Equal(t, before, policiesIn(t, db))
	})
}

// The second time no row has a new version.
func TestApply_WritesOnlyChanges(t *testing.T) {
	db := kit.ParallelDB(t).DB
	apply(t, db.Pool, twoPolicies)
	const versions = `
		select concat(name, ' ', xmin, ' ', ctid) from ratelimit.policies
		 union all select concat(key, ' ', xmin, ' ', ctid) from ratelimit.overrides`
	before := lines(t, db, versions)
	require.Len(t, before, 3)
	require.True(t, apply(t, db.Pool, twoPolicies, policyfile.Options{Prune: true}).Empty())
	require.Equal(t, before, lines(t, db, versions))
}

// The role cannot read tables, and so sees only the names of what is dropped.
func TestApply_NeedsThePublicFunctionsOnly(t *testing.T) {
	t.Parallel()
	role := kit.NewRole(t)
	db := pgtest.New(t)
	conn := kit.ConnectAs(t, db, role)
	db.Exec(t, "grant execute on function ratelimit_define_policy, ratelimit_policies, ratelimit_override, ratelimit_overrides to "+role)

	apply(t, conn, twoPolicies)
	require.Len(t, policiesIn(t, db), 2)

	const one = "policies: {api: {capacity: 100, refill: 10, every: 1s}}"
	_, err := policyfile.Apply(t.Context(), conn, parse(t, one), policyfile.Options{Prune: true})
	require.ErrorContains(t, err, `- policy "llm": dropped with its buckets, overrides, idempotency keys, holders and usage, which this role may not count: `+
		"ERROR: permission denied for function ratelimit_drop_policy (SQLSTATE 42501). Its owner can run: grant execute on function ratelimit_drop_policy to <role>;")
	require.Len(t, policiesIn(t, db), 2)

	db.Exec(t, "grant execute on function ratelimit_drop_policy to "+role)
	apply(t, conn, one, policyfile.Options{Prune: true})
	require.Len(t, policiesIn(t, db), 1)
}

func TestApply_OnAStandbyNamesThePrimary(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	kit.BecomeStandby(t, server)
	_, err := policyfile.Apply(t.Context(), kit.Connect(t, server), parse(t, twoPolicies), policyfile.Options{})
	require.ErrorContains(t, err, "The database is read-only: connect to the primary.")
}

// A pooler in transaction mode may need another mode than pgx's default.
func TestApply_InEveryExecMode(t *testing.T) {
	t.Parallel()
	for mode := pgx.QueryExecModeCacheStatement; mode <= pgx.QueryExecModeSimpleProtocol; mode++ {
		t.Run(mode.String(), func(t *testing.T) {
			db := pgtest.Parallel(t)
			conn := db.Connect(t, func(config *pgx.ConnConfig) {
				config.DefaultQueryExecMode, config.RuntimeParams["datestyle"] = mode, "German"
			})

			require.Len(t, apply(t, conn, twoPolicies).Changes, 3)
			require.True(t, apply(t, conn, twoPolicies).Empty())
			require.Len(t, apply(t, conn, "policies: {new: {capacity: 1, refill: 1, every: 1s}}", policyfile.Options{Prune: true}).Changes, 3)
		})
	}
}

// The second waits, no longer than it is told, and compares with what the first has left.
func TestApply_OneAfterTheOther(t *testing.T) {
	db := kit.ParallelDB(t).DB
	policies := func(capacity int, names ...string) string {
		text := "policies:\n"
		for _, name := range names {
			text += fmt.Sprintf("  %s: {capacity: %d, refill: 1, every: 1s}\n", name, capacity)
		}
		return text
	}
	apply(t, db.Pool, policies(1, "a", "b"))
	holder := kit.NoError(db.Connect(t).Begin(t.Context()))(t)
	require.NoError(t, kit.ErrorOf(holder.Exec(t.Context(), "select from ratelimit.policies where name = 'b' for update")))
	type answer struct {
		*policyfile.Difference
		err error
	}
	start := func(text string, options policyfile.Options, waitsFor string) chan answer {
		conn, file, done := db.Connect(t), parse(t, text), make(chan answer, 1)
		go func() {
			d, err := policyfile.Apply(context.Background(), conn, file, options)
			done <- answer{d, err}
		}()
		db.Await(t, time.Minute, "select exists (select from pg_stat_activity where pid = $1 and wait_event_type = 'Lock' and wait_event = $2)",
			conn.PgConn().PID(), waitsFor)
		return done
	}
	first := start(policies(2, "a", "b", "c"), policyfile.Options{}, "transactionid") // has changed a
	second := start(policies(3, "a", "b"), policyfile.Options{Prune: true}, "advisory")
	impatient := db.Connect(t)
	require.NoError(t, kit.ErrorOf(impatient.Exec(t.Context(), "set lock_timeout = '10ms'")))
	_, err := policyfile.Apply(t.Context(), impatient, parse(t, policies(4, "a")), policyfile.Options{})
	require.ErrorContains(t, err, "Another session holds this: try again when it has ended.")

	require.NoError(t, holder.Rollback(t.Context()))
	require.NoError(t, (<-first).err)
	d := <-second
	require.NoError(t, d.err)
	require.Equal(t, `~ policy "a": capacity 2 -> 3
~ policy "b": capacity 2 -> 3
- policy "c": dropped with 0 buckets, 0 overrides and 0 idempotency keys
`, d.String())
	require.Equal(t, []string{"a 3 1 1000000 f t 86400000000 f", "b 3 1 1000000 f t 86400000000 f"}, policiesIn(t, db))
}

func TestExport_OfShards(t *testing.T) {
	t.Parallel()
	one, two := pgtest.New(t), pgtest.New(t)
	for i, db := range []*pgtest.DB{one, two} {
		db.Exec(t, `select ratelimit_define_policy('api', 100, 10, '1 second')`)
		db.Exec(t, `select ratelimit_override('api', $1, capacity => 5)`, []string{"b", "a"}[i])
	}
	text := kit.NoError(policyfile.Export(t.Context(), one.Pool, two.Pool))(t)
	require.Contains(t, string(text), "    \"a\": {capacity: 5}\n    \"b\": {")
	two.Exec(t, `select ratelimit_define_policy('api', 101)`)
	_, err := policyfile.Export(t.Context(), one.Pool, two.Pool)
	require.ErrorContains(t, err, "the policies of the shards are not the same")
}

func TestExport_RefusesWhatNoFileCanHave(t *testing.T) {
	db := kit.ParallelDB(t).DB
	db.Exec(t, `select ratelimit_define_policy('api', 100, 10, '1 second'); select ratelimit_override('api', 'k', capacity => 5, expires_at => '10001-01-01Z')`)
	_, err := policyfile.Export(t.Context(), db.Pool)
	require.ErrorContains(t, err, "the export:6:")
	require.ErrorContains(t, err, "write an instant")
}

func TestMain(m *testing.M) { pgtest.Main(m) }

func parse(t require.TestingT, text string) *policyfile.File {
	file, err := policyfile.Parse("limits.yaml", []byte(text))
	require.NoError(t, err, text)
	return file
}

func apply(t require.TestingT, db policyfile.Database, text string, options ...policyfile.Options) *policyfile.Difference {
	return kit.NoError(policyfile.Apply(context.Background(), db, parse(t, text), append(options, policyfile.Options{})[0]))(t)
}

// policiesIn and overridesIn list what a database has, a line each, with times in microseconds.
func policiesIn(t require.TestingT, db *pgtest.DB) []string {
	return lines(t, db, `
		select concat_ws(' ', policy, capacity, refill, (extract(epoch from every) * 1000000)::bigint, stepped, durable,
		                 (extract(epoch from remember) * 1000000)::bigint, shadow, period, time_zone, anchor,
		                 (extract(epoch from lease) * 1000000)::bigint)
		  from ratelimit_policies()`)
}

func overridesIn(t require.TestingT, db *pgtest.DB) []string {
	return lines(t, db, `
		select concat_ws(' ', policy, key, capacity, refill, (extract(epoch from every) * 1000000)::bigint,
		                 coalesce((extract(epoch from expires_at) * 1000000)::bigint, 0), time_zone, anchor,
		                 (extract(epoch from lease) * 1000000)::bigint)
		  from ratelimit_overrides(max_rows => 1000000)`)
}

func lines(t require.TestingT, db *pgtest.DB, query string) []string {
	return slices.Sorted(slices.Values(kit.ColumnOf(t, db.Pool, query)))
}

// anyName is any text that the database stores.
var anyName = rapid.Custom(func(t *rapid.T) string {
	return rapid.OneOf(
		rapid.SampledFrom([]string{"api", "web", "42", "null", "~", "yes", "<<", "*a", "a: b", " a", "\"", "'", "é", "\u2028", "😀", "\n", "a\tb"}),
		rapid.StringN(1, 20, 100),
	).Filter(func(s string) bool { return s != "" && !strings.ContainsRune(s, 0) }).Draw(t, "name")
})

// someFile has policies of each kind with any of their fields, and overrides. What cannot change, the kind and durable, follows
// from the name. Buckets of these numbers fill within 10,000 years.
func someFile(t *rapid.T) string {
	maybe := func(fields ...string) (some string) {
		for _, field := range fields {
			if rapid.Bool().Draw(t, field) {
				some += ", " + field
			}
		}
		return some
	}
	span := func() string {
		return fmt.Sprint(rapid.IntRange(1, 50).Draw(t, "n"), rapid.SampledFrom([]string{"us", "ms", "s", "m", "h", "d", "w"}).Draw(t, "unit"))
	}
	policies, overrides := "policies:\n", "overrides:\n"
	for _, name := range rapid.SliceOfNDistinct(anyName, 1, 5, rapid.ID[string]).Draw(t, "policies") {
		capacity := fmt.Sprint("capacity: ", rapid.IntRange(1, 2000).Draw(t, "capacity"))
		durable := fmt.Sprint(", durable: ", len(name)%2 == 0)
		switch len(name) % 3 {
		case 0:
			policies += fmt.Sprintf("  %q: {%s, refill: %d, every: 1h%s%s%s}\n", name, capacity, rapid.Int64Range(0, 9e12).Draw(t, "refill"),
				span(), durable, maybe("stepped: true", "shadow: true", "remember: "+span()))
			capacity += maybe("refill: 7", "every: "+span())
		case 1:
			period := rapid.SampledFrom([]string{"1 day", "2 weeks", "18 months", "1000 years"}).Draw(t, "period")
			policies += fmt.Sprintf("  %q: {%s, period: %s%s%s}\n", name, capacity, period, durable,
				maybe("time_zone: Etc/GMT+5", "anchor: 2024-03-31T02:30:00", "shadow: true", "remember: "+span()))
			if len(name)%2 == 0 { // durable
				policies = strings.TrimSuffix(policies, "}\n") + ", history: " + rapid.SampledFrom([]string{"90 days", "18 months"}).Draw(t, "history") + "}\n" // without, it stays
			}
			capacity += maybe("time_zone: Europe/Berlin", "anchor: 9999-12-31T23:59:59.999999")
		case 2:
			policies += fmt.Sprintf("  %q: {%s, lease: 1ms%s%s%s}\n", name, capacity, span(), durable, maybe("shadow: true"))
			capacity += maybe("lease: 1h" + span())
		}
		overrides += fmt.Sprintf("  %q: {}\n", name)
		if keys := rapid.SliceOfNDistinct(anyName, 0, 3, rapid.ID[string]).Draw(t, "keys"); len(keys) > 0 {
			overrides = strings.TrimSuffix(overrides, " {}\n") + "\n"
			for _, key := range keys {
				ends := "{capacity: 0, expires_at: 9999-12-31T23:59:59.999999-14:00}"
				stays := "{" + capacity + "}"
				overrides += fmt.Sprintf("    %q: %s\n", key, rapid.SampledFrom([]string{stays, ends, "[" + stays + ", " + ends + "]", "[" + ends + "]"}).Draw(t, "parts"))
			}
		}
	}
	return policies + overrides
}

// everything has the rules of a file, without places.
func everything(t require.TestingT, text string) string {
	return textOf(kit.NoError(parse(t, text).Rules(""))(t))
}

func textOf(rules *policyfile.Rules) string {
	var all []string
	for _, p := range rules.Policies {
		all = append(all, fmt.Sprint(p.Name, " ", p.Values))
	}
	for _, o := range slices.Concat(rules.Overrides...) {
		all = append(all, o.String())
	}
	return strings.Join(slices.Sorted(slices.Values(all)), "\n")
}
