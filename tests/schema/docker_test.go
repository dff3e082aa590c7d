package schema

import (
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

const imageOwner = "pgratelimit"

func newContainer(t *testing.T) *pgtest.Server {
	t.Helper()
	if pgtest.Shared(t).Rung != "docker" {
		t.Skip("the tests do not run on Docker")
	}
	return pgtest.Private(t)
}

// The image has installed the package and scheduled clean-up when it answers for the first time.
func TestDocker_ImageIsReadyToUse(t *testing.T) {
	t.Parallel()
	server := newContainer(t)
	require.True(t, server.HasCron)
	requireUpToDate(t, server)
}

// The image starts on a volume that an older image left.
func TestDocker_ImageBringsAnExistingVolumeUpToDate(t *testing.T) {
	t.Parallel()
	server := newContainer(t)
	conn := kit.NoError(pgx.Connect(t.Context(), kit.WithSettings(server.URL("postgres"), "role", imageOwner)))(t)
	require.NoError(t, migrations.Down(t.Context(), conn))
	for _, sql := range []string{"create schema ratelimit", "create table ratelimit.version as select 0 as version"} {
		kit.Execute(t, conn, sql)
	}
	kit.Execute(t, conn, "alter table ratelimit.version alter column version set not null")
	require.NoError(t, conn.Close(t.Context()))

	kit.Restart(t, server)
	requireUpToDate(t, server)
	require.NotContains(t, kit.NoError(server.Log(t.Context()))(t), "NOT BROUGHT UP TO DATE")

	require.NoError(t, server.Kill(t.Context()))
	require.NoError(t, server.Start(t.Context()))
	requireUpToDate(t, server)
}

func TestDocker_ImageSaysThatItDidNotBringAVolumeUpToDate(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ change, message string }{
		"a newer schema": {"update ratelimit.version set version = version + 1", "a newer schema is installed"},
		"another owner":  {"drop schema ratelimit cascade; create schema ratelimit", "schema ratelimit belongs to another role"},
	} {
		t.Run(name, func(t *testing.T) {
			server := newContainer(t)
			conn := kit.NoError(pgx.Connect(t.Context(), server.URL("postgres")))(t)
			kit.Execute(t, conn, test.change, pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, conn.Close(t.Context()))

			kit.Restart(t, server)
			conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
			require.NoError(t, err, "the server is there all the same")
			require.NoError(t, conn.Close(t.Context()))
			log := kit.NoError(server.Log(t.Context()))(t)
			require.Contains(t, log, test.message)
			require.Contains(t, log, "NOT BROUGHT UP TO DATE")
		})
	}
}

// requireUpToDate compares the image's database with one on the same server that was installed by Up.
func requireUpToDate(t *testing.T, server *pgtest.Server) {
	db := kit.InstalledDB(t, server, "postgres")
	db.Execute("drop database if exists reference")
	db.Execute("create database reference template template0")
	conn := kit.NoError(pgx.Connect(t.Context(), server.URL("reference")))(t)
	for _, sql := range []string{
		"grant create on database reference to " + imageOwner, "grant create on schema public to " + imageOwner, "set role " + imageOwner,
	} {
		kit.Execute(t, conn, sql)
	}
	require.NoError(t, migrations.Up(t.Context(), conn))
	kit.Execute(t, conn, kit.ImageGrants(t))
	require.NoError(t, conn.Close(t.Context()))
	reference := kit.InstalledDB(t, server, "reference")
	require.Equal(t, ownLines(t, reference), ownLines(t, db))
	reference.Pool.Close()
	require.Equal(t, []string{"false"}, kit.Column(t, db.DB, "select rolsuper::text from pg_roles where rolname = '"+imageOwner+"'"))
	require.Equal(t, []string{imageOwner}, kit.Column(t, db.DB, "select nspowner::regrole::text from pg_namespace where nspname = 'ratelimit'"))

	scheduled := kit.Jobs(db)
	require.Len(t, scheduled, 2)
	require.Equal(t, imageOwner, scheduled[0].Username)

	db.DefinePolicy("p", 10, 1, kit.ADay)
	u := kit.NoError(url.Parse(server.URL("postgres")))(t)
	password, _ := u.User.Password()
	u.User = url.UserPassword("ratelimit_app", password)
	app := kit.NoError(pgx.Connect(t.Context(), u.String()))(t)
	defer app.Close(t.Context())
	require.True(t, kit.NoError(kit.Acquire(app, "p", "k", 1))(t).Allowed)
	kit.RequireState(t, "42501", kit.ErrorOf(app.Exec(t.Context(), "select ratelimit_drop_policy('p')")))
}

// ownLines returns the lines of a fingerprint that belong to the package; pg_cron is in only one database.
func ownLines(t *testing.T, db *kit.TestDB) (lines []string) {
	for _, line := range strings.Split(kit.FingerprintOf(t, db.DB), "\n") {
		if strings.Contains(line, "ratelimit") && !strings.HasPrefix(line, "schema cron ") {
			lines = append(lines, line)
		}
	}
	require.Greater(t, len(lines), 100)
	return lines
}
