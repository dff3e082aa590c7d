package tests

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// One story on one server, since pg_cron starts jobs at full minutes: everything is scheduled, one
// minute is waited for, and everything must have run.
func TestPgCron(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	if !server.HasCron {
		t.Skip("pg_cron is not installed for this PostgreSQL")
	}
	here := installedDB(t, server, "postgres") // where pg_cron is
	elsewhere := createDB(t, server, `Bob's "app"`, `create schema "the limits"; alter database %s set search_path = "the limits"`)
	// A role that may clean up and nothing else. PUBLIC may not.
	here.exec(`
		create role cleaner login;
		grant usage on schema ratelimit to cleaner;
		grant execute on procedure ratelimit_cleanup_all(interval) to cleaner;
		grant execute on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) to cleaner`)
	t.Run("a superuser schedules once, however often and concurrently", func(t *testing.T) {
		require.NoError(t, runScript(here, "schedule.sql")) // creates the extension
		here.exec("grant usage on schema cron to cleaner")
		asCleaner := here.Connect(t)
		_, err := asCleaner.Exec(t.Context(), "set role cleaner")
		require.NoError(t, err)
		_, err = asCleaner.Exec(t.Context(), script(t, "schedule.sql"))
		require.NoError(t, err)
		require.Len(t, jobs(here), 4, "a role sees its own jobs only, so these are in addition")
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if err := runScript(here, "schedule.sql"); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Equal(t, []job{
			{"ratelimit-cleanup", "* * * * *", "call public.ratelimit_cleanup_all()", "postgres", "postgres"},
			{"ratelimit-cleanup-history", "17 3 * * *", jobs(here)[1].Command, "postgres", "postgres"},
		}, jobs(here))
	})
	t.Run("another database schedules once", func(t *testing.T) {
		for range 2 {
			psql(t, elsewhere, "schedule_elsewhere.sql")
		}
		require.Equal(t, []job{
			{`ratelimit-cleanup:Bob's "app"`, "* * * * *", `call "the limits".ratelimit_cleanup_all()`, elsewhere.Name, "postgres"},
			{`ratelimit-cleanup-history:Bob's "app"`, "17 3 * * *", jobs(here)[3].Command, "postgres", "postgres"},
		}, jobs(here)[2:])
	})
	here.exec("set role cleaner; select cron.schedule('cleaner', '* * * * *', 'call ratelimit_cleanup_all()'); reset role")
	for _, db := range []*testDB{here, elsewhere} {
		plant(db)
	}
	var planted time.Time
	require.NoError(t, here.Pool.QueryRow(t.Context(), "select clock_timestamp()").Scan(&planted))
	t.Run("the jobs run and clean up", func(t *testing.T) {
		here.Await(t, 2*time.Minute, `
			select count(*) = 3 from cron.job as j where j.jobname in ('ratelimit-cleanup', 'ratelimit-cleanup:Bob''s "app"', 'cleaner')
			 and exists (select from cron.job_run_details as d where d.jobid = j.jobid and d.start_time > $1 and d.status = 'succeeded')`, planted)
		require.Empty(t, column(t, here.DB, "select return_message from cron.job_run_details where status = 'failed'"))
		for _, db := range []*testDB{here, elsewhere} {
			require.Equal(t, inUse, remaining(db), db.Name)
		}
	})
	t.Run("status shows it", func(t *testing.T) {
		results, err := here.Connect(t).PgConn().Exec(t.Context(), script(t, "status.sql")).ReadAll()
		require.NoError(t, err)
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
		here.exec(`
			insert into cron.job_run_details (jobid, runid, username, start_time, end_time)
			 select j.jobid, 1000000 + j.jobid * 10 + days, 'postgres', now() - make_interval(days => days), now() - make_interval(days => days)
			 from cron.job as j, unnest(array[6, 8]) as days where j.jobname in ('ratelimit-cleanup', 'ratelimit-cleanup:Bob''s "app"', 'cleaner')`)
		for _, j := range jobs(here) {
			if strings.HasPrefix(j.Name, "ratelimit-cleanup-history") {
				here.exec(j.Command)
			}
		}
		require.Equal(t, []string{"cleaner 6", "cleaner 8", "ratelimit-cleanup 6", `ratelimit-cleanup:Bob's "app" 6`}, column(t, here.DB, `
			select j.jobname || ' ' || extract(day from now() - d.start_time) from cron.job_run_details as d join cron.job as j using (jobid)
			 where d.runid > 1000000 order by 1`))
	})
	t.Run("unscheduling leaves nothing", func(t *testing.T) {
		for range 2 {
			psql(t, elsewhere, "unschedule_elsewhere.sql")
		}
		require.Len(t, jobs(here), 2, "those of this database stay")
		for range 2 {
			require.NoError(t, runScript(here, "unschedule.sql"))
		}
		require.Empty(t, jobs(here))
		require.Empty(t, column(t, here.DB, "select d.command from cron.job_run_details as d where d.jobid not in (select jobid from cron.job)"))
	})
}

func TestPgCron_SaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	t.Run("the package", func(t *testing.T) {
		db := &testDB{DB: pgtest.Empty(t), t: t}
		requireMissing(t, runScript(db, "schedule.sql"), "pgratelimit is not installed in this database", "ratelimit_cleanup_all", "make install")
	})
	t.Run("pg_cron, which is in another database", func(t *testing.T) {
		if !pgtest.Shared(t).HasCron {
			t.Skip("pg_cron is not installed for this PostgreSQL")
		}
		db := newDB(t)
		requireMissing(t, runScript(db, "schedule.sql"), "pg_cron is not in this database", "It is in database postgres", "schedule_elsewhere.sql")
		require.NoError(t, runScript(db, "unschedule.sql"), "nothing to do")
	})
	t.Run("pg_cron, which is not loaded", func(t *testing.T) {
		server := pgtest.Private(t)
		// A setting may be left over from a library that is not loaded.
		installedDB(t, server, "postgres").exec("alter system set shared_preload_libraries = 'plpgsql'")
		require.NoError(t, server.Stop(t.Context(), false))
		require.NoError(t, server.Start(t.Context()))
		db := createDB(t, server, "app")
		requireMissing(t, runScript(db, "schedule.sql"), "pg_cron is not in this database", "has not loaded it", "pg_cron/README.md")
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
	home := installedDB(t, server, "postgres") // where pg_cron is
	require.NoError(t, migrations.Down(t.Context(), connectToPackage(t, home)))
	home.exec(`
		create extension if not exists pg_cron;
		create role stranger login;
		create role owner login;
		grant create on database postgres to owner;
		grant usage, create on schema public to owner;
		select cron.schedule('mine', '* * * * *', 'select 1')`)
	for name, uninstall := range map[string]func(url string) string{
		"psql": func(url string) string { return psqlFile(t, url, "uninstall.sql") },
		"make uninstall": func(url string) string {
			out, err := command("..", nil, "make", "uninstall", "DATABASE_URL="+url).CombinedOutput()
			require.NoError(t, err, "%s", out)
			return string(out)
		},
	} {
		t.Run(name, func(t *testing.T) {
			schedule := func(url string) {
				out, status := psqlStatus(t, url, "--file", "../pg_cron/schedule.sql")
				require.Equal(t, 0, status, out)
				require.Len(t, jobs(home), 2)
			}
			asOwner := withSettings(t, home.URL, "role", "owner")
			installers["Up"](t, home.URL)
			schedule(home.URL)
			require.NotContains(t, uninstall(home.URL), remain)
			require.Empty(t, jobs(home))
			installers["Up"](t, asOwner)
			schedule(home.URL) // by another role
			out := uninstall(asOwner)
			require.Contains(t, out, "WARNING:")
			require.Contains(t, out, remain)
			require.Contains(t, out, "permission denied for schema cron")
			require.Contains(t, out, "pg_cron/unschedule.sql")
			require.Len(t, jobs(home), 2)
			home.exec("grant usage on schema cron to owner")
			installers["Up"](t, asOwner)
			out = uninstall(asOwner)
			require.Contains(t, out, remain)
			require.Contains(t, out, "not visible to this role")
			require.NoError(t, runScript(home, "unschedule.sql"))
			installers["Up"](t, asOwner)
			schedule(asOwner)
			require.NotContains(t, uninstall(asOwner), remain)
			require.Empty(t, jobs(home))
			home.exec("revoke usage on schema cron from owner")
			elsewhere := createDB(t, server, "elsewhere_"+name[:4], "grant create on database %s to owner; grant create on schema public to owner")
			out = uninstall(elsewhere.URL)
			require.Contains(t, out, "pg_cron is in database postgres")
			require.Contains(t, out, "pg_cron/unschedule_elsewhere.sql")
			asOwner = withSettings(t, elsewhere.URL, "role", "owner")
			installers["Up"](t, asOwner)
			out = uninstall(asOwner)
			require.Contains(t, out, remain)
			require.Contains(t, out, "pg_cron/unschedule_elsewhere.sql")
		})
	}
	require.Equal(t, []string{"mine"}, column(t, home.DB, "select jobname from cron.job"))
}

// connectToPackage connects as the owner of the package, which is a role of its own in the image.
func connectToPackage(t *testing.T, db *testDB) *pgx.Conn {
	t.Helper()
	return connectAs(t, db.DB, column(t, db.DB, "select nspowner::regrole::text from pg_namespace where nspname = 'ratelimit'")[0])
}

// Without ON_ERROR_STOP, psql -f goes on after an error and exits with 0.
func TestPgCron_ScriptsFail(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"schedule.sql", "schedule_elsewhere.sql", "status.sql"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, status := psqlStatus(t, pgtest.Empty(t).URL, "--file", "../pg_cron/"+name)
			require.Equal(t, 3, status, out)
		})
	}
	for _, name := range []string{"unschedule.sql", "unschedule_elsewhere.sql"} {
		script, err := os.ReadFile("../pg_cron/" + name)
		require.NoError(t, err)
		require.Contains(t, string(script), "\n\\set ON_ERROR_STOP on\n")
	}
}

func requireMissing(t *testing.T, err error, message, detail, hint string) {
	t.Helper()
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "55000", pgErr.Code)
	require.Equal(t, message, pgErr.Message)
	require.Contains(t, pgErr.Detail, detail)
	require.Contains(t, pgErr.Hint, hint)
}

// plant leaves rows that clean-up removes, and rows that it must not.
func plant(db *testDB) {
	db.t.Helper()
	for _, kind := range []struct {
		name      string
		durable   policyOption
		forgetful string
	}{{"durable", durable, "durable, forgetful"}, {"ephemeral", ephemeral, "ephemeral, forgetful"}} {
		db.policy(kind.name, 10, 1, time.Hour, kind.durable).policy(kind.forgetful, 10, 1, time.Hour, kind.durable, remember(time.Microsecond))
		past := time.Now().Add(-time.Hour)
		db.putBucket(kind.name, "full", bucket{Level: 10e6, RefilledAt: past})
		db.putBucket(kind.name, "due, but not full", bucket{Level: 0, RefilledAt: past})
		db.acquire(kind.name, "used", 1, "remembered")
		db.acquire(kind.forgetful, "used", 1, "forgotten")
	}
	for _, table := range []string{"idempotency_keys", "ephemeral_idempotency_keys"} {
		db.exec("update ratelimit." + table + " set expires_at = now() - interval '1 hour' where idempotency_key = 'forgotten'")
	}
}

// The rows of plant that clean-up must not remove.
var inUse = []string{
	"durable due, but not full", "durable used", "durable used remembered", "durable, forgetful used", "ephemeral due, but not full",
	"ephemeral used", "ephemeral used remembered", "ephemeral, forgetful used",
}

func remaining(db *testDB) []string {
	db.t.Helper()
	return column(db.t, db.DB, `
		select p.name || ' ' || r.what from ratelimit.policies as p join (select policy_id, key from ratelimit.buckets union all
		 select policy_id, key from ratelimit.ephemeral_buckets union all
		 select policy_id, key || ' ' || idempotency_key from ratelimit.idempotency_keys union all
		 select policy_id, key || ' ' || idempotency_key from ratelimit.ephemeral_idempotency_keys) as r (policy_id, what) on r.policy_id = p.id
		 order by p.name || ' ' || r.what collate "C"`)
}

type job struct{ Name, Schedule, Command, Database, Username string }

// jobs returns what is scheduled for clean-up: the jobs of pg_cron's own database first.
func jobs(db *testDB) []job {
	db.t.Helper()
	rows, err := db.Pool.Query(context.Background(), `
		select jobname::text, schedule, command, database, username from cron.job where jobname like 'ratelimit-cleanup%'
		 order by jobname like '%:%', jobname like '%-history%', username`)
	require.NoError(db.t, err)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[job])
	require.NoError(db.t, err)
	return found
}
