// Package cron tests clean-up on a schedule of pg_cron, which starts jobs at full minutes.
package cron

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// One story on one server, since pg_cron starts jobs at full minutes: everything is scheduled, one
// minute is waited for, and everything must have run.
func TestPgCron(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	if !server.HasCron {
		t.Skip("pg_cron is not installed for this PostgreSQL")
	}
	here := kit.InstalledDB(t, server, "postgres") // where pg_cron is
	elsewhere := kit.CreateDB(t, server, `Bob's "app"`, `create schema "the limits"; alter database %s set search_path = "the limits"`)
	// A role that may clean up and nothing else. PUBLIC may not.
	here.Execute(`
		create role cleaner login;
		grant usage on schema ratelimit to cleaner;
		grant execute on procedure ratelimit_cleanup_all(interval) to cleaner;
		grant execute on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) to cleaner`)
	t.Run("a superuser schedules once, however often and concurrently", func(t *testing.T) {
		require.NoError(t, kit.RunScript(here, "schedule.sql")) // creates the extension
		here.Execute("grant usage on schema cron to cleaner")
		asCleaner := here.Connect(t)
		require.NoError(t, kit.ErrorOf(asCleaner.Exec(t.Context(), "set role cleaner")))
		require.NoError(t, kit.ErrorOf(asCleaner.Exec(t.Context(), kit.Script(t, "schedule.sql"))))
		require.Len(t, kit.Jobs(here), 4, "a role sees its own jobs only, so these are in addition")
		here.Execute("insert into cron.job_run_details (jobid, runid, username) select jobid, 2000000 + jobid, username from cron.job where username = 'cleaner'")
		kit.Crowd(t, 20, func(int) error { return kit.RunScript(here, "schedule.sql") })
		require.Empty(t, kit.Column(t, here.DB, "select runid::text from cron.job_run_details where runid > 2000000"), "replaced jobs leave no history")
		require.Equal(t, []kit.Job{
			{Name: "ratelimit-cleanup", Schedule: "* * * * *", Command: "call public.ratelimit_cleanup_all()", Database: "postgres", Username: ownerOf(here)},
			{Name: "ratelimit-cleanup-history", Schedule: "17 3 * * *", Command: kit.Jobs(here)[1].Command, Database: "postgres", Username: "postgres"},
		}, kit.Jobs(here))
	})
	t.Run("another database schedules once", func(t *testing.T) {
		for range 2 {
			psql(t, elsewhere, "schedule_elsewhere.sql")
		}
		require.Equal(t, []kit.Job{
			{Name: `ratelimit-cleanup:Bob's "app"`, Schedule: "* * * * *", Command: `call "the limits".ratelimit_cleanup_all()`, Database: elsewhere.Name, Username: "postgres"},
			{Name: `ratelimit-cleanup-history:Bob's "app"`, Schedule: "17 3 * * *", Command: kit.Jobs(here)[3].Command, Database: "postgres", Username: "postgres"},
		}, kit.Jobs(here)[2:])
	})
	here.Execute("set role cleaner; select cron.schedule('cleaner', '* * * * *', 'call ratelimit_cleanup_all()'); reset role")
	for _, db := range []*kit.TestDB{here, elsewhere} {
		plant(db)
	}
	planted := kit.One[time.Time](t, here.Pool, "select clock_timestamp()")
	t.Run("the jobs run and clean up", func(t *testing.T) {
		here.Await(t, 2*time.Minute, `
			select count(*) = 3 from cron.job as j where j.jobname in ('ratelimit-cleanup', 'ratelimit-cleanup:Bob''s "app"', 'cleaner')
			 and exists (select from cron.job_run_details as d where d.jobid = j.jobid and d.start_time > $1 and d.status = 'succeeded')`, planted)
		require.Empty(t, kit.Column(t, here.DB, "select return_message from cron.job_run_details where status = 'failed'"))
		for _, db := range []*kit.TestDB{here, elsewhere} {
			require.Equal(t, []string{
				"durable due, but not full", "durable used", "durable used remembered", "durable, forgetful used", "ephemeral due, but not full",
				"ephemeral used", "ephemeral used remembered", "ephemeral, forgetful used",
			}, kit.Column(t, db.DB, `
				select p.name || ' ' || r.what from ratelimit.policies as p join (select policy_id, key from ratelimit.buckets union all
				 select policy_id, key from ratelimit.ephemeral_buckets union all
				 select policy_id, key || ' ' || idempotency_key from ratelimit.idempotency_keys union all
				 select policy_id, key || ' ' || idempotency_key from ratelimit.ephemeral_idempotency_keys) as r (policy_id, what) on r.policy_id = p.id
				 order by p.name || ' ' || r.what collate "C"`), db.Name)
		}
	})
	t.Run("status shows it", func(t *testing.T) {
		results := kit.NoError(here.Connect(t).PgConn().Exec(t.Context(), kit.Script(t, "status.sql")).ReadAll())(t)
		require.Len(t, results, 3)
		require.Len(t, results[0].Rows, 4)
		require.Equal(t, "ratelimit-cleanup", string(results[0].Rows[0][0]))
		require.Equal(t, "succeeded", string(results[0].Rows[0][5]))
		for _, row := range results[1].Rows {
			require.NotContains(t, string(row[1]), "overdue")
		}
		require.Len(t, results[2].FieldDescriptions, 7)
		require.NotEmpty(t, results[2].Rows)
	})
	t.Run("the history is trimmed to 7 days", func(t *testing.T) {
		here.Execute(`
			insert into cron.job_run_details (jobid, runid, username, start_time, end_time)
			 select j.jobid, 1000000 + j.jobid * 10 + days, 'postgres', now() - make_interval(days => days), now() - make_interval(days => days)
			 from cron.job as j, unnest(array[6, 8]) as days where j.jobname in ('ratelimit-cleanup', 'ratelimit-cleanup:Bob''s "app"', 'cleaner')`)
		for _, j := range kit.Jobs(here) {
			if strings.HasPrefix(j.Name, "ratelimit-cleanup-history") {
				here.Execute(j.Command)
			}
		}
		require.Equal(t, []string{"cleaner 6", "cleaner 8", "ratelimit-cleanup 6", `ratelimit-cleanup:Bob's "app" 6`}, kit.Column(t, here.DB, `
			select j.jobname || ' ' || extract(day from now() - d.start_time) from cron.job_run_details as d join cron.job as j using (jobid)
			 where d.runid > 1000000 order by 1`))
	})
	t.Run("unscheduling leaves nothing", func(t *testing.T) {
		// pg_cron may begin a run at the full minute whose job it saw before: its row comes later.
		runs := kit.One[[]int64](t, here.Pool, "select array_agg(runid) from cron.job_run_details join cron.job using (jobid)")
		require.NotEmpty(t, runs)
		for range 2 {
			psql(t, elsewhere, "unschedule_elsewhere.sql")
		}
		require.Len(t, kit.Jobs(here), 2, "those of this database stay")
		for range 2 {
			require.NoError(t, kit.RunScript(here, "unschedule.sql"))
		}
		require.Empty(t, kit.Jobs(here))
		require.Empty(t, kit.Column(t, here.DB, "select command from cron.job_run_details where runid = any($1) and jobid not in (select jobid from cron.job)", runs))
	})
}

func TestPgCron_SaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	t.Run("the package", func(t *testing.T) {
		db := &kit.TestDB{DB: pgtest.Empty(t), T: t}
		requireMissing(t, kit.RunScript(db, "schedule.sql"), "pgratelimit is not installed in this database", "ratelimit_cleanup_all", "make install")
	})
	t.Run("pg_cron, which is in another database", func(t *testing.T) {
		if !pgtest.Shared(t).HasCron {
			t.Skip("pg_cron is not installed for this PostgreSQL")
		}
		db := kit.NewDB(t)
		requireMissing(t, kit.RunScript(db, "schedule.sql"), "pg_cron is not in this database", "It is in database postgres", "schedule_elsewhere.sql")
		require.NoError(t, kit.RunScript(db, "unschedule.sql"), "nothing to do")
	})
	t.Run("pg_cron, which is not loaded", func(t *testing.T) {
		server := pgtest.Private(t)
		// A setting may be left over from a library that is not loaded.
		kit.InstalledDB(t, server, "postgres").Execute("alter system set shared_preload_libraries = 'plpgsql'")
		kit.Restart(t, server)
		db := kit.CreateDB(t, server, "app")
		requireMissing(t, kit.RunScript(db, "schedule.sql"), "pg_cron is not in this database", "has not loaded it", "pg_cron/README.md")
	})
	t.Run("a right, which a superuser gives", func(t *testing.T) {
		server := pgtest.Private(t)
		if !server.HasCron {
			t.Skip("pg_cron is not installed for this PostgreSQL")
		}
		db := kit.InstalledDB(t, server, "postgres")
		db.Execute(`
			drop extension if exists pg_cron;
			create role "the owner" login;
			grant usage on schema ratelimit to "the owner";
			grant execute on procedure ratelimit_cleanup_all to "the owner";
			grant execute on function ratelimit.cleanup_batch to "the owner"`)
		asOwner := db.Connect(t)
		require.NoError(t, kit.ErrorOf(asOwner.Exec(t.Context(), `set role "the owner"`)))
		schedule := func() error { return kit.ErrorOf(asOwner.Exec(t.Context(), kit.Script(t, "schedule.sql"))) }
		requireMissing(t, schedule(), "pg_cron is not in this database", "this role may not see where it is",
			`create extension pg_cron; grant usage on schema cron to "the owner";`)
		db.Execute("create extension pg_cron")
		pgErr := kit.PgError(schedule())
		require.Equal(t, []string{"42501", "the role may not use pg_cron", `Role "the owner" has no USAGE on schema cron.`},
			[]string{pgErr.Code, pgErr.Message, pgErr.Detail})
		const remedy = `grant usage on schema cron to "the owner";`
		require.Equal(t, "As a superuser: "+remedy, pgErr.Hint)
		db.Execute(remedy)
		require.NoError(t, schedule())
		// The jobs that a dump brings name the port and the database of the server that it was made of.
		for _, of := range []string{"nodeport = nodeport + 1", "database = 'template1'"} {
			db.Execute("update cron.job set " + of)
			require.NoError(t, schedule())
			require.Equal(t, []string{"ratelimit-cleanup", "ratelimit-cleanup-history"}, kit.Column(t, db.DB, `
				select jobname from cron.job where nodeport = current_setting('port')::int4 and database = current_database() order by 1`), of)
			require.Len(t, kit.Jobs(db), 2)
		}
	})
}

// Uninstalling removes the package's jobs, or says why it may not. Every way to uninstall runs the same migration.
func TestPgCron_UninstallUnschedules(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	if !server.HasCron {
		t.Skip("pg_cron is not installed for this PostgreSQL")
	}
	const remain = "clean-up may still be scheduled with pg_cron"
	home := kit.InstalledDB(t, server, "postgres") // where pg_cron is
	require.NoError(t, migrations.Down(t.Context(), kit.ConnectAs(t, home.DB, ownerOf(home))))
	home.Execute(`
		create extension if not exists pg_cron;
		create role stranger login;
		create role owner login;
		grant create on database postgres to owner;
		grant usage, create on schema public to owner;
		select cron.schedule('mine', '* * * * *', 'select 1')`)
	for name, uninstall := range map[string]func(url string) string{
		"psql": func(url string) string { return kit.PsqlFile(t, url, "uninstall.sql") },
		"make uninstall": func(url string) string {
			out, err := kit.Command("../..", nil, "make", "uninstall", "DATABASE_URL="+url).CombinedOutput()
			require.NoError(t, err, "%s", out)
			return string(out)
		},
	} {
		t.Run(name, func(t *testing.T) {
			schedule := func(url string) {
				out, status := kit.PsqlStatus(t, url, "--file", "../../pg_cron/schedule.sql")
				require.Equal(t, 0, status, out)
				require.Len(t, kit.Jobs(home), 2)
			}
			asOwner := kit.WithSettings(home.URL, "role", "owner")
			kit.Installers["Up"](t, home.URL)
			schedule(home.URL)
			require.NotContains(t, uninstall(home.URL), remain)
			require.Empty(t, kit.Jobs(home))
			kit.Installers["Up"](t, asOwner)
			// A superuser's job would run with his rights what the owner puts into the procedure.
			runsAs := func() []string {
				return kit.Column(t, home.DB, "select username from cron.job where jobname ~ '^ratelimit-cleanup($|:)' and active order by 1")
			}
			home.Execute("alter role owner nologin; grant usage on schema cron to stranger")
			for _, url := range []string{home.URL, kit.WithSettings(home.URL, "role", "stranger")} {
				out, status := kit.PsqlStatus(t, url, "--file", "../../pg_cron/schedule.sql")
				require.Equal(t, 3, status)
				require.Contains(t, out, "the role may not clean up")
			}
			home.Execute("alter role owner login")
			schedule(home.URL)
			require.Equal(t, []string{"owner"}, runsAs())
			out := uninstall(asOwner)
			require.Contains(t, out, "WARNING:")
			require.Contains(t, out, remain)
			require.Contains(t, out, "permission denied for schema cron")
			require.Contains(t, out, "pg_cron/unschedule.sql")
			require.Len(t, kit.Jobs(home), 2)
			home.Execute("grant usage on schema cron to owner")
			kit.Installers["Up"](t, asOwner)
			out = uninstall(asOwner)
			require.Contains(t, out, remain)
			require.Contains(t, out, "not visible to this role")
			require.NotContains(t, uninstall(home.URL), remain) // as its hint says
			require.Empty(t, kit.Jobs(home))
			kit.Installers["Up"](t, asOwner)
			schedule(asOwner)
			require.NotContains(t, uninstall(asOwner), remain)
			require.Empty(t, kit.Jobs(home))
			home.Execute("revoke usage on schema cron from owner")
			elsewhere := kit.CreateDB(t, server, "elsewhere_"+name[:4], "grant create on database %s to owner; grant create on schema public to owner")
			out = uninstall(elsewhere.URL)
			require.Contains(t, out, "pg_cron is in database postgres")
			require.Contains(t, out, "pg_cron/unschedule_elsewhere.sql")
			asOwner = kit.WithSettings(elsewhere.URL, "role", "owner")
			kit.Installers["Up"](t, asOwner)
			home.Execute("select cron.schedule('ratelimit-cleanup:" + elsewhere.Name + "', '0 0 1 1 *', '')") // as it was once scheduled
			psql(t, elsewhere, "schedule_elsewhere.sql")
			require.Equal(t, []string{"owner"}, runsAs())
			out = uninstall(asOwner)
			require.Contains(t, out, remain)
			require.Contains(t, out, "pg_cron/unschedule_elsewhere.sql")
			psql(t, elsewhere, "unschedule_elsewhere.sql")
			require.Empty(t, runsAs())
		})
	}
	require.Equal(t, []string{"mine"}, kit.Column(t, home.DB, "select jobname from cron.job"))
}

// Without ON_ERROR_STOP, psql -f goes on after an error and exits with 0.
func TestPgCron_ScriptsFail(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"schedule.sql", "schedule_elsewhere.sql", "status.sql"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, status := kit.PsqlStatus(t, pgtest.Empty(t).URL, "--file", "../../pg_cron/"+name)
			require.Equal(t, 3, status, out)
		})
	}
	for _, name := range []string{"unschedule.sql", "unschedule_elsewhere.sql"} {
		require.Contains(t, string(kit.NoError(os.ReadFile("../../pg_cron/"+name))(t)), "\n\\set ON_ERROR_STOP on\n")
	}
}

// ownerOf is the owner of the package: on the image a role of its own.
func ownerOf(db *kit.TestDB) string {
	return kit.Column(db.T, db.DB, "select nspowner::regrole::text from pg_namespace where nspname = 'ratelimit'")[0]
}

// psql runs one of pg_cron's scripts with psql.
func psql(t *testing.T, db *kit.TestDB, name string) {
	out, err := kit.RunPsql(t, db.URL, "--file", filepath.Join("../../pg_cron", name))
	require.NoError(t, err, "%s", out)
	require.NotContains(t, out, "ERROR")
}

func requireMissing(t *testing.T, err error, message, detail, hint string) {
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "55000", pgErr.Code)
	require.Equal(t, message, pgErr.Message)
	require.Contains(t, pgErr.Detail, detail)
	require.Contains(t, pgErr.Hint, hint)
}

// plant leaves rows that clean-up removes, and rows that it must not.
func plant(db *kit.TestDB) {
	for _, kind := range []struct {
		name      string
		durable   kit.PolicyOption
		forgetful string
	}{{"durable", kit.Durable, "durable, forgetful"}, {"ephemeral", kit.Ephemeral, "ephemeral, forgetful"}} {
		db.Policy(kind.name, 10, 1, time.Hour, kind.durable).Policy(kind.forgetful, 10, 1, time.Hour, kind.durable, kit.Remember(time.Microsecond))
		past := time.Now().Add(-time.Hour)
		db.PutBucket(kind.name, "full", kit.Bucket{Level: 10e6, RefilledAt: past})
		db.PutBucket(kind.name, "due, but not full", kit.Bucket{Level: 0, RefilledAt: past})
		db.Acquire(kind.name, "used", 1, "remembered")
		db.Acquire(kind.forgetful, "used", 1, "forgotten")
	}
	for _, table := range []string{"idempotency_keys", "ephemeral_idempotency_keys"} {
		db.Execute("update ratelimit." + table + " set expires_at = now() - interval '1 hour' where idempotency_key = 'forgotten'")
	}
}
