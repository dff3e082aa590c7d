package kit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/tern/v2/migrate"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Grants lists what roles other than the owner may do with the package: "object to role, grantable".
func (db *TestDB) Grants() []string {
	return Column(db.T, db.DB, `
		select format('%s to %s %s', object, grantee::regrole, bool_or(is_grantable))
		  from (select p.proname::text, coalesce(proacl, acldefault('f', proowner)), proowner from `+PackageFunctions+` as p
		        union all
		        select c.relname, relacl, relowner from pg_class as c where relnamespace = 'ratelimit'::regnamespace
		        union all
		        select a.attname, attacl, relowner from pg_attribute as a join pg_class as c on c.oid = attrelid where relnamespace = 'ratelimit'::regnamespace
		        union all
		        select 'schema', nspacl, nspowner from pg_namespace where nspname = 'ratelimit') as o (object, acl, owner)
		 cross join aclexplode(acl)
		 where grantee <> owner
		 group by object, grantee`)
}

// Overtake runs do while a call waits for a lock in the middle.
func (db *TestDB) Overtake(call func(q Querier) (Decision, error), do func()) error {
	db.Execute("select ratelimit_define_policy('p', 100, 1, '1 day')")
	holder := db.Begin()
	holder.Acquire("p", "k", 1)
	waiter := db.Session().Start(call).BlockedBy(holder)
	do()
	holder.Execute("commit")
	d, err := waiter.Result()
	if err == nil {
		require.True(db.T, d.Allowed)
	}
	return err
}

// NextVersion is the migrations with one more, of the kind that releases bring: a change of tables with its way back, changed
// functions, one that is new, one with another column and one less.
func NextVersion(t *testing.T, up, down string, edits ...Edit) fs.FS {
	return os.DirFS(filepath.Join(NextRepository(t, up, down, edits...), "migrations"))
}

// NextRepository has that next version as make migration begins it after a release.
func NextRepository(t *testing.T, up, down string, edits ...Edit) (root string) {
	root, newest := t.TempDir(), NewestMigration(t)
	for _, dir := range []string{"sql", "migrations"} {
		require.NoError(t, os.CopyFS(filepath.Join(root, dir), os.DirFS("../../"+dir)))
	}
	for _, file := range []string{"Makefile", "LICENSE", "README.md", "CHANGELOG.md"} {
		require.NoError(t, os.WriteFile(filepath.Join(root, file), NoError(os.ReadFile("../../"+file))(t), 0o600))
	}
	Run(t, root, nil, "make", "release-schema")
	Run(t, root, nil, "make", "migration", "NAME=next")

	name := fmt.Sprintf("%03d_next.sql", newest+1)
	for _, e := range slices.Concat(edits, []Edit{
		{"sql/version.sql", "create or", `
create or replace function ratelimit_next() returns integer language sql immutable as 'select 1';
comment on function ratelimit_next() is 'New.';
create or`},
		{"sql/version.sql", "'" + Releases[newest] + "'", "'" + Releases[newest+1] + "'"},
		{"migrations/migrations.go", Releases[newest], Releases[newest+1]},
		{"sql/shard.sql", "table (shard integer, of integer)", "table (shard integer, of integer, next integer)"},
		{"sql/shard.sql", "select s.shard, s.of from", "select s.shard, s.of, 1 from"},
		{"sql/holders.sql", "function ratelimit.leases_of(in", "function ratelimit.held_of(in"},
		{"sql/holders.sql", "comment on function ratelimit.leases_of", "comment on function ratelimit.held_of"},
		{"sql/holders.sql", "from leases_of(", "from held_of("},
		{"migrations/include/" + name, "ratelimit.dropped = ''", "ratelimit.dropped = 'ratelimit_shard leases_of'; " + up},
		{"migrations/" + name, "ratelimit.dropped = ''", "ratelimit.dropped = 'ratelimit_shard held_of ratelimit_next'; " + down},
	}) {
		path := filepath.Join(root, e.File)
		text := string(NoError(os.ReadFile(path))(t))
		require.Equal(t, 1, strings.Count(text, e.Old), "%s in %s", e.Old, e.File)
		require.NoError(t, os.WriteFile(path, []byte(strings.Replace(text, e.Old, e.New, 1)), 0o600))
	}
	return root
}

// An Edit changes the one place in a file where the old text is.
type Edit struct{ File, Old, New string }

// Edits change a function that callers are in the middle of, and one that it is yet to call.
var Edits = []Edit{
	{"sql/acquire.sql", "b.level + microtokens(v_cost)", "microtokens(v_cost) + b.level"},
	{"sql/answer.sql", "coalesce(retry_us = 0, false)", "coalesce(retry_us = 0, false) is true"},
}

func InstalledAt(t *testing.T, files fs.FS, version int32) *TestDB {
	db := &TestDB{DB: pgtest.Empty(t), T: t}
	MigrateTo(t, db.DB, files, version)
	return db
}

// MigrateTo brings a database to a version, up or down.
func MigrateTo(t *testing.T, db *pgtest.DB, files fs.FS, version int32) {
	require.NoError(t, Migrate(t, db, files, version))
}

// Migrate returns what tern says.
func Migrate(t *testing.T, db *pgtest.DB, files fs.FS, version int32) error {
	conn := db.Connect(t)
	defer conn.Close(context.Background())
	Execute(t, conn, "create schema if not exists ratelimit")
	migrator := NoError(migrate.NewMigrator(context.Background(), conn, migrations.VersionTable))(t)
	require.NoError(t, migrator.LoadMigrations(files))
	return migrator.MigrateTo(context.Background(), version)
}

// Data is policies, buckets and grants of every kind, which an upgrade must keep.
type Data struct {
	Db       *TestDB
	policies []string
	Buckets  map[string]*Bucket
	Granted  map[string]Decision
}

func (db *TestDB) PutData() *Data {
	d := &Data{db, nil, map[string]*Bucket{}, map[string]Decision{}}
	for name, kind := range map[string][]PolicyOption{
		"kept": {Durable}, "kept stepped": {Durable, Stepped}, "kept ephemeral": {Ephemeral, Remember(ADay)},
	} {
		db.DefinePolicy(name, 10, 1, ADay, kind...)
		db.Acquire(name, "k", 2)
		d.Granted[name] = db.Acquire(name, "k", 3, "first")
		d.Buckets[name] = db.Bucket(name, "k")
	}
	db.PutBucket("kept", "in debt", Bucket{Level: -5_000_000, RefilledAt: time.Now()})
	db.Execute("select ratelimit_define_policy('kept quota', 10, period => '1 month', history => '9 years')")
	db.Execute("select from ratelimit_override('kept quota', 'k', 20, time_zone => 'Europe/Berlin') as k, ratelimit_override('kept quota', 'l', 30, expires_at => '2100-01-01Z') as l")
	db.Execute("insert into ratelimit.usage select id, '2024-01-01Z', '2024-02-01Z', '2100-01-01Z', 7, 'k' from ratelimit.policies where name = 'kept quota'")
	d.policies = d.definitions()
	return d
}

// In is the same data, as another database has to have it.
func (d Data) In(db *TestDB) *Data { d.Db = db; return &d }

func (d *Data) definitions() []string {
	return Column(d.Db.T, d.Db.DB, `
		select to_jsonb(p)::text from ratelimit_policies() as p where p.policy like 'kept%'
		union all select to_jsonb(o)::text from ratelimit_overrides('kept quota') as o
		union all select to_jsonb(u)::text from ratelimit_usage('kept quota') as u`)
}

func (d *Data) Check() {
	require.Equal(d.Db.T, d.policies, d.definitions())
	for name, first := range d.Granted {
		require.Equal(d.Db.T, d.Buckets[name], d.Db.Bucket(name, "k"))
		require.Equal(d.Db.T, Replayed(first), d.Db.Acquire(name, "k", 3, "first"))
	}
	require.EqualValues(d.Db.T, -5_000_000, d.Db.Bucket("kept", "in debt").Level)
}

// An upgradeLoad calls the functions in every way while the schema changes. A call that has found a function which the migration then
// drops is sent again, as docs/operating.md says. No other may fail, and the client repeats none. Each way has a key of its own in both
// policies, and takes one token from it per round.
type upgradeLoad struct {
	*Load
	Db   *TestDB
	ways map[string]*atomic.Int64 // rounds
}

var LoadPolicies = map[string]PolicyOption{"load durable": Durable, "load ephemeral": Ephemeral}

const LoadCapacity = 3_000_000

func (db *TestDB) StartLoad() *upgradeLoad {
	for name, kind := range LoadPolicies {
		db.DefinePolicy(name, LoadCapacity, 1, ADay, kind)
	}
	l := &upgradeLoad{NewLoad(db.T), db, map[string]*atomic.Int64{}}
	ctx := context.Background()

	for way, statements := range waysOfLoad {
		l.Add(way, 1, func(policy, key string, n int64) error {
			for _, statement := range statements {
				args := []any{policy, key, fmt.Sprint(n)}[:strings.Count(statement, "$")]
				var isSo bool
				if err := db.Pool.QueryRow(ctx, statement, args...).Scan(&isSo); err != nil || !isSo {
					return fmt.Errorf("%s: %w", statement, cmp.Or(err, errors.New("it is not so")))
				}
			}
			return nil
		})
	}
	l.Add("transaction", 1, func(policy, key string, _ int64) error {
		return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			if err := ErrorOf(granted(Acquire(tx, policy, key, 3))); err != nil {
				return err
			}
			return ErrorOf(Refund(tx, policy, key, 2))
		})
	})
	combiner := client.NewCombiner(db.Pool)
	db.T.Cleanup(combiner.Close)
	l.Add("combined", 6, func(policy, key string, _ int64) error {
		d, err := combiner.Acquire(ctx, policy, key)
		return ErrorOf(granted(DecisionOf(d), err))
	})
	l.Add("all combined", 4, func(policy, key string, _ int64) error {
		w, err := WholeRequest{Charges: []model.Charge{ChargeOf(policy, key, 1), ChargeOf(policy, key, 0)}}.By(ctx, combiner)
		return ErrorOf(granted(w.Decision, err))
	})
	for policy := range LoadPolicies {
		db.Execute(fmt.Sprintf(`
			create table %[1]s (customer text);
			create trigger limited after insert on %[1]s referencing new table as inserted for each statement
			  execute function ratelimit_guard('%[2]s', 'customer')`, guardedTable(policy), policy), pgx.QueryExecModeSimpleProtocol)
	}
	l.Add("guard", 1, func(policy, key string, _ int64) error {
		return ErrorOf(db.Pool.Exec(ctx, "insert into "+guardedTable(policy)+" values ($1), ('another')", key))
	})
	l.GoOn()
	return l
}

// waysOfLoad are statements of which each is to find true, and takes one token, or all together do. Their arguments are the policy, the
// key and an idempotency key, each named once.
var waysOfLoad = map[string][]string{
	"acquire":             {"select allowed from ratelimit_acquire($1, $2)"},
	"keyed":               {"select allowed from ratelimit_acquire($1, $2, 1, $3)", "select replayed from ratelimit_acquire($1, $2, 1, $3)"},
	"denied":              {"select allowed from ratelimit_acquire($1, $2)", "select not allowed from ratelimit_acquire($1, $2, 3000000)"},
	"many":                {"select allowed from ratelimit_acquire_many(array[$1], array[$2])"},
	"all":                 {"select allowed from ratelimit_acquire_all(array[$1, 'load durable'], array[$2, 'more'], array[1, 0], $3)"},
	"charged and settled": {"select allowed from ratelimit_charge($1, $2, 3, $3)", "select allowed from ratelimit_settle($1, $2, $3, 1)"},
	"reserved":            {"select allowed from ratelimit_reserve($1, $2, '1 us', 1, $3)"},
	"up to":               {"select taken = 1 from ratelimit_acquire_up_to($1, $2, 1)"},
	"enforce":             {"select allowed from ratelimit_enforce($1, $2, 1, $3)"},
	"upkeep": {"select allowed from ratelimit_acquire($1, $2)",
		"select count(*) > 0 from ratelimit_cleanup(), ratelimit_version(), ratelimit_policies()"},
	"status":   {"select allowed from ratelimit_acquire($1, $2)", "select count(*) >= 0 from ratelimit_status($1), ratelimit_doctor()"},
	"override": {"select allowed from ratelimit_acquire($1, $2)", fmt.Sprint("select true from ratelimit_override($1, $2, ", LoadCapacity, ")")},
}

func guardedTable(policy string) string { return "public." + strings.ReplaceAll(policy, " ", "_") }

func granted(d Decision, err error) (Decision, error) {
	if err == nil && !d.Allowed {
		err = fmt.Errorf("denied: %+v", d)
	}
	return d, err
}

// Add lets callers go round in one way.
func (l *upgradeLoad) Add(way string, callers int, call func(policy, key string, n int64) error) {
	rounds := new(atomic.Int64)
	l.ways[way] = rounds
	l.Start(callers, func(int) error {
		n := rounds.Add(1)
		for policy := range LoadPolicies {
			err := call(policy, way, n)
			for isOfDroppedFunction(err) {
				err = call(policy, way, n) // what has a grant already is under an idempotency key
			}
			if err != nil {
				return fmt.Errorf("%s: %s: %w", policy, way, err)
			}
		}
		return nil
	})
}

// isOfDroppedFunction reports whether a call had found a function that was dropped before it began: PostgreSQL locks no function it finds.
func isOfDroppedFunction(err error) bool {
	return SQLState(err) == "XX000" && strings.Contains(err.Error(), "cache lookup failed for function")
}

// GoOn returns when each way has gone round some more.
func (l *upgradeLoad) GoOn() {
	deadline := time.After(Patience)
	for way, rounds := range l.ways {
		for until := rounds.Load() + 5; rounds.Load() < until; {
			select {
			case <-l.Ctx.Done():
				require.NoError(l.Db.T, l.Load.End())
			case <-deadline:
				require.FailNow(l.Db.T, "nothing happens", way)
			case <-time.After(time.Millisecond):
			}
		}
	}
}

// End stops the load and counts its rounds. Each key has then lost exactly what its callers took.
func (l *upgradeLoad) End() (rounds int64) {
	t := l.Db.T
	require.NoError(t, l.Load.End())
	for way, n := range l.ways {
		for policy := range LoadPolicies {
			require.EqualValues(t, LoadCapacity-n.Load(), l.Db.Left(policy, way), "%s: %s", policy, way)
		}
		rounds += n.Load()
	}
	for policy := range LoadPolicies {
		l.Db.DropPolicy(policy)
		l.Db.Execute("drop table if exists " + guardedTable(policy))
	}
	return rounds
}

func ReinstallCode(t *testing.T, conn *pgx.Conn) {
	require.NoError(t, migrate.InstallCodePackage(context.Background(), conn, nil, CodePackage(t)))
}

func CodePackage(t *testing.T) *migrate.CodePackage {
	return NoError(migrate.LoadCodePackage(os.DirFS("../../sql")))(t)
}

func NewestMigration(t *testing.T) int32 {
	return int32(len(NoError(migrate.FindMigrations(os.DirFS("../../migrations")))(t)))
}
