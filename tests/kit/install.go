package kit

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// The ways to install. Each is given a database that is empty or has the package already.
var Installers = map[string]func(t *testing.T, url string){
	"Up": func(t *testing.T, url string) {
		conn := NoError(pgx.Connect(context.Background(), url))(t)
		defer conn.Close(context.Background())
		require.NoError(t, migrations.Up(context.Background(), conn))
	},
	"psql": func(t *testing.T, url string) { PsqlFile(t, url, "install.sql") },
	"tern --conn-string": func(t *testing.T, url string) {
		createSchema(t, url)
		Run(t, "../..", nil, Tern(), TernMigrate(url)...)
	},
	"tern with PG variables": func(t *testing.T, url string) {
		createSchema(t, url)
		Run(t, "../../migrations", PgVariables(t, url), Tern(), "migrate")
	},
}

// The functions that decide about one bucket, and so run on any node that has the key.
var HotFunctions = []string{
	"ratelimit_acquire", "ratelimit_acquire_up_to", "ratelimit_charge", "ratelimit_peek", "ratelimit_refund", "ratelimit_reserve",
	"ratelimit_reset", "ratelimit_settle", "ratelimit_hold", "ratelimit_renew", "ratelimit_release",
}

var (
	BucketTables = []string{"buckets", "ephemeral_buckets", "idempotency_keys", "ephemeral_idempotency_keys"}
	SlotTables   = []string{"slots", "ephemeral_slots", "leases", "ephemeral_leases"}
)

const PackageFunctions = `(
	select p.*, n.nspname, n.nspname = 'ratelimit' as private
	  from pg_proc as p
	  join pg_namespace as n on n.oid = p.pronamespace
	 where n.nspname = 'ratelimit' or p.proname like 'ratelimit\_%')`

// ApplicationFunctions are those that an application calls, by their comments.
func ApplicationFunctions(t testing.TB, db *pgtest.DB) []string {
	return Column(t, db, "select p.oid::regproc::text from "+PackageFunctions+" as p where not private and obj_description(p.oid, 'pg_proc') ~ '\nRole: application'")
}

// ImageGrants is the statement by which the image lets role ratelimit_app use the package.
func ImageGrants(t *testing.T) string {
	script := NoError(os.ReadFile("../../docker/update.sh"))(t)
	statement := regexp.MustCompile(`(?s)do \$\$ begin.*?end \$\$;`).FindString(string(script))
	require.NotEmpty(t, statement)
	return statement
}

type Job struct{ Name, Schedule, Command, Database, Username string }

// Jobs returns what is scheduled for clean-up: the jobs of pg_cron's own database first.
func Jobs(db *TestDB) []Job {
	rows := NoError(db.Pool.Query(context.Background(), `
		select jobname::text, schedule, command, database, username from cron.job where jobname like 'ratelimit-cleanup%'
		 order by jobname like '%:%', jobname like '%-history%', username`))(db.T)
	return NoError(pgx.CollectRows(rows, pgx.RowToStructByPos[Job]))(db.T)
}

func PreRequestScript(t *testing.T, name string) string {
	return strings.ReplaceAll(string(NoError(os.ReadFile("../../docs/postgrest/"+name))(t)), `\set ON_ERROR_STOP on`, "")
}

func InstallPreRequest(t *testing.T, db *pgtest.DB) {
	conn := db.Connect(t)
	Execute(t, conn, PreRequestScript(t, "install.sql"), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, conn.Close(t.Context()))
}

// File is a file of the test with this text.
func File(t testing.TB, name, text string) (path string) {
	path = filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// Statements cuts SQL at the semicolons that end a statement.
func Statements(sql string) (cut []string) {
	token := regexp.MustCompile(`(?s)--[^\n]*|'[^']*'|"[^"]*"|\$[A-Za-z_]*\$|;`)
	begin := 0
	for at := 0; ; {
		found := token.FindStringIndex(sql[at:])
		if found == nil {
			return cut
		}
		text := sql[at+found[0] : at+found[1]]
		at += found[1]
		switch text[0] {
		case '$':
			at += strings.Index(sql[at:], text) + len(text)
		case ';':
			cut = append(cut, sql[begin:at])
			begin = at
		}
	}
}

func Quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

func ReadTree(t testing.TB, dir string) map[string]string {
	files := map[string]string{}
	require.NoError(t, fs.WalkDir(os.DirFS(dir), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(filepath.Join(dir, path))
		files[path] = string(text)
		return err
	}))
	require.NotEmpty(t, files)
	return files
}
