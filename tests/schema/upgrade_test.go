package schema

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

const (
	nextUp   = "alter table ratelimit.policies add column next boolean not null default false;"
	nextDown = "alter table ratelimit.policies drop column next;"
)

// A program has the snapshot of a released version in it, and the newest files.
func TestUpgrade_ByTwoProgramsAtOnce(t *testing.T) {
	t.Parallel()
	root := kit.NextRepository(t, nextUp, nextDown, kit.Edits...)
	for name, text := range map[string]string{
		"go.mod": string(kit.NoError(os.ReadFile("../../go.mod"))(t)),
		"go.sum": string(kit.NoError(os.ReadFile("../../go.sum"))(t)),
		"migrations/cmd/up/main.go": `package main

import (
	"context"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/migrations"
)

func main() {
	conn, err := pgx.Connect(context.Background(), os.Args[1])
	if err == nil {
		err = migrations.Up(context.Background(), conn)
	}
	if err != nil {
		panic(err)
	}
}
`} {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(root, name), []byte(text), 0o600))
	}
	kit.Run(t, filepath.Join(root, "migrations"), []string{"GOWORK=off"}, "go", "build", "-o", "up", "./cmd/up")
	db := kit.NewDB(t)
	data := db.PutData()
	first := pgtest.Empty(t)
	urls := []string{db.URL, db.URL, first.URL, first.URL}
	kit.Crowd(t, len(urls), func(i int) error {
		out, err := kit.Command(root, nil, "migrations/up", urls[i]).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	data.Check()
	kit.SameSchema(t, first, db.DB)
	require.Equal(t, []string{"9.0.0"}, kit.Column(t, first, "select ratelimit_version()"))
}

// A call that began before the new version goes on after it.
func TestUpgrade_ACallUnderWay(t *testing.T) {
	files, newest := kit.NextVersion(t, "", "", kit.Edits...), kit.NewestMigration(t)
	kit.InParallel(t, underWay, func(t *testing.T, call func(q kit.Querier) (kit.Decision, error)) {
		db := kit.InstalledAt(t, files, newest)
		for i, version := range []int32{newest + 1, newest} {
			require.NoError(t, db.Overtake(call, func() { kit.MigrateTo(t, db.DB, files, version) }))
			require.EqualValues(t, 100-3*(i+1), db.Left("p", "k"))
		}
	})
}

// A function gets another column. A statement that names columns goes on; one with select * fails until it is prepared again, as by pgx.
func TestUpgrade_PreparedStatements(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	files, newest := kit.NextVersion(t, "", ""), kit.NewestMigration(t)
	db := kit.InstalledAt(t, files, newest)
	db.Execute("select ratelimit_define_shard(1, 2)")
	const named, star = "select shard, of from ratelimit_shard()", "select * from ratelimit_shard()"
	var sessions []*kit.Session
	for _, mode := range []string{"force_generic_plan", "force_custom_plan"} {
		s := db.Session()
		s.Execute("set plan_cache_mode = " + mode)
		require.NoError(t, kit.ErrorOf(s.Prepare(ctx, "named", named)))
		require.NoError(t, kit.ErrorOf(s.Prepare(ctx, "star", star)))
		s.Execute("named")
		s.Execute("star")
		sessions = append(sessions, s)
	}
	kit.MigrateTo(t, db.DB, files, newest+1)
	for _, s := range sessions {
		s.Execute("named")
		for range 2 {
			_, err := s.Exec(ctx, "star")
			kit.RequireState(t, "0A000", err)
			require.ErrorContains(t, err, "cached plan must not change result type")
		}
		require.NoError(t, s.Deallocate(ctx, "star"))
		require.NoError(t, kit.ErrorOf(s.Prepare(ctx, "star", star)))
		s.Execute("star")
	}
}

// Roles keep exactly the functions that they had before, also those that were dropped and created, and nobody has anything that is new.
func TestUpgrade_KeepsGrants(t *testing.T) {
	t.Parallel()
	app, batcher, delegate, favourite := kit.NewRole(t), kit.NewRole(t), kit.NewRole(t), kit.NewRole(t)
	files, newest := kit.NextVersion(t, nextUp, nextDown, kit.Edits...), kit.NewestMigration(t)
	db := kit.InstalledAt(t, files, newest)
	kit.Execute(t, db.Connect(t), fmt.Sprintf(`
		grant execute on function ratelimit_acquire, ratelimit_shard to %[1]s;
		grant execute on function ratelimit_acquire_many, ratelimit_refund to %[2]s;
		grant execute on function ratelimit_acquire, ratelimit_shard, ratelimit_define_policy, ratelimit_version to %[3]s with grant option;
		grant execute on procedure ratelimit_cleanup_all to %[1]s;
		grant usage on schema ratelimit to %[1]s;
		grant execute on function ratelimit.cleanup_batch to %[1]s;
		grant execute on function ratelimit_policies to public;
		alter default privileges grant all on functions to %[4]s with grant option;
		alter default privileges grant all on tables to %[4]s;
		alter default privileges grant all on schemas to %[4]s;
		alter default privileges in schema ratelimit grant all on tables to public;
		alter default privileges in schema public grant all on functions to public`, app, batcher, delegate, favourite), pgx.QueryExecModeSimpleProtocol)
	as := db.Connect(t)
	kit.Execute(t, as, "set role "+delegate)
	kit.Execute(t, as, "grant execute on function ratelimit_shard to "+batcher)
	kit.Execute(t, as, "grant execute on function ratelimit_shard to "+app)
	before := db.Grants()
	require.Contains(t, before, "ratelimit_shard to "+delegate+" t")
	require.Contains(t, before, "ratelimit_policies to - f")
	for _, version := range []int32{newest + 1, newest} {
		kit.MigrateTo(t, db.DB, files, version)
		require.ElementsMatch(t, before, db.Grants())
		kit.Execute(t, kit.ConnectAs(t, db.DB, app), "select * from ratelimit_shard()")
		kit.Execute(t, kit.ConnectAs(t, db.DB, favourite), "select * from ratelimit_policies()")
	}
}

// A helper that the new version no longer calls has to stay for one version, or calls under way fail.
func TestUpgrade_ADroppedHelperFailsCallsUnderWay(t *testing.T) {
	db := kit.ParallelDB(t)
	kit.RequireState(t, "42883", db.Overtake(underWay["acquire"], func() { db.Execute("drop function ratelimit.grant_of") }))
}

var underWay = map[string]func(q kit.Querier) (kit.Decision, error){
	"acquire":        func(q kit.Querier) (kit.Decision, error) { return kit.Acquire(q, "p", "k", 2) },
	"acquire, keyed": func(q kit.Querier) (kit.Decision, error) { return kit.Acquire(q, "p", "k", 2, fmt.Sprint(time.Now())) },
	"acquire many": func(q kit.Querier) (kit.Decision, error) {
		return kit.Decide(q, "ratelimit_acquire_many(array['p'], array['k'], array[2::bigint])")
	},
}
