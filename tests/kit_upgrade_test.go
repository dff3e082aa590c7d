package tests

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/tern/v2/migrate"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// nextVersion is the migrations with one more, of the kind that releases bring: a change of tables with its
// way back, changed functions, and a new one.
func nextVersion(t *testing.T, up, down string, edits ...edit) fs.FS {
	dir, newest := t.TempDir(), newestMigration(t)
	frozen, snapshot := fmt.Sprintf("%03d", newest), fmt.Sprintf("%03d", newest+1)
	require.NoError(t, os.CopyFS(dir, os.DirFS("../migrations")))
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "snapshots", frozen)))
	for _, name := range []string{frozen, snapshot} { // as make release-schema freezes the newest one
		require.NoError(t, os.CopyFS(filepath.Join(dir, "snapshots", name), os.DirFS("../sql")))
	}
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	for _, e := range append(edits, edit{"version.sql", "create or", `
create or replace function ratelimit_next() returns integer language sql immutable as 'select 1';
comment on function ratelimit_next() is 'New.';
create or`}) {
		name := filepath.Join("snapshots", snapshot, e.file)
		text, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(string(text), e.old), "%s in %s", e.old, e.file)
		write(name, strings.Replace(string(text), e.old, e.new, 1))
	}
	write(snapshot+"_next.sql", fmt.Sprintf(`%s
		{{ install_snapshot "%s" }}
		---- create above / drop below ----
		%s
		{{ install_snapshot "%s" }}
		drop function ratelimit_next();`, up, snapshot, down, frozen))
	return os.DirFS(dir)
}

// An edit changes the one place in a file where the old text is.
type edit struct{ file, old, new string }

// edits change a function that callers are in the middle of, and one that it is yet to call.
var edits = []edit{
	{"acquire.sql", "b.level + v_wanted", "v_wanted + b.level"},
	{"answer.sql", "coalesce(retry_us = 0, false)", "coalesce(retry_us = 0, false) is true"},
}

// nextColumn goes with a migration that adds the column next to ratelimit.policies: overridden makes whole rows of it.
var nextColumn = edit{"overridden.sql", "policy.shadow)", "policy.shadow, policy.next)"}

func installedAt(t *testing.T, files fs.FS, version int32) *testDB {
	db := &testDB{DB: pgtest.Empty(t), t: t}
	migrateTo(t, db.DB, files, version)
	return db
}

// migrateTo brings a database to a version, up or down.
func migrateTo(t *testing.T, db *pgtest.DB, files fs.FS, version int32) {
	conn := db.Connect(t)
	execute(t, conn, "create schema if not exists ratelimit")
	migrator, err := migrate.NewMigrator(context.Background(), conn, migrations.VersionTable)
	require.NoError(t, err)
	require.NoError(t, migrator.LoadMigrations(files))
	require.NoError(t, migrator.MigrateTo(context.Background(), version))
	require.NoError(t, conn.Close(context.Background()))
}

// data is policies, buckets and grants of every kind, which an upgrade must keep.
type data struct {
	db       *testDB
	policies []string
	buckets  map[string]*bucket
	granted  map[string]decision
}

func (db *testDB) putData() *data {
	d := &data{db, nil, map[string]*bucket{}, map[string]decision{}}
	for name, kind := range map[string][]policyOption{
		"kept": {durable}, "kept stepped": {durable, stepped}, "kept ephemeral": {ephemeral, remember(aDay)},
	} {
		db.definePolicy(name, 10, 1, aDay, kind...)
		db.acquire(name, "k", 2)
		d.granted[name] = db.acquire(name, "k", 3, "first")
		d.buckets[name] = db.bucket(name, "k")
	}
	db.putBucket("kept", "in debt", bucket{Level: -5_000_000, RefilledAt: time.Now()})
	d.policies = d.definitions()
	return d
}

func (d *data) definitions() []string {
	// Version 1 of the schema has no shadow.
	return column(d.db.t, d.db.DB, `
		select (jsonb_build_object('shadow', false) || to_jsonb(p))::text from ratelimit_policies() as p where p.policy like 'kept%'`)
}

func (d *data) check() {
	require.Equal(d.db.t, d.policies, d.definitions())
	for name, first := range d.granted {
		require.Equal(d.db.t, d.buckets[name], d.db.bucket(name, "k"))
		require.Equal(d.db.t, replayed(first), d.db.acquire(name, "k", 3, "first"))
	}
	require.EqualValues(d.db.t, -5_000_000, d.db.bucket("kept", "in debt").Level)
}

// An upgradeLoad calls the functions in every way while the schema changes. No call may fail, and the client
// repeats none. Each way has a key of its own in both policies, and takes one token from it per call.
type upgradeLoad struct {
	*load
	db   *testDB
	ways map[string]*atomic.Int64 // rounds
}

var loadPolicies = map[string]policyOption{"load durable": durable, "load ephemeral": ephemeral}

const loadCapacity = 3_000_000

// startLoad starts the load of the programs that come with a version of the schema.
func (db *testDB) startLoad(version int32) *upgradeLoad {
	for name, kind := range loadPolicies {
		db.definePolicy(name, loadCapacity, 1, aDay, kind)
	}
	l := &upgradeLoad{newLoad(db.t), db, map[string]*atomic.Int64{}}
	ctx := context.Background()

	// sql makes calls whose decisions must be grants. Their arguments are the policy, the key and the number of the round.
	sql := func(way string, callers int, calls ...string) {
		l.add(way, callers, func(policy, key string, n int64) error {
			for _, call := range calls {
				args := []any{policy, key, fmt.Sprint(n)}[:2+strings.Count(call, "$3")]
				if err := errorOf(granted(decide(db.Pool, call, args...))); err != nil {
					return err
				}
			}
			return nil
		})
	}
	// besides makes calls that are no decisions, and takes a token.
	besides := func(way, statement string) {
		l.add(way, 1, func(policy, key string, _ int64) error {
			args := []any{policy, key}[:strings.Count(statement, "$")]
			return errors.Join(errorOf(db.Pool.Exec(ctx, statement, args...)), errorOf(granted(acquire(db.Pool, policy, key, 1))))
		})
	}
	sql("acquire", 1, "ratelimit_acquire($1, $2)")
	sql("many", 1, "ratelimit_acquire_many(array[$1], array[$2])")
	besides("upkeep", "select ratelimit_cleanup(), ratelimit_version(), count(*) from ratelimit_policies()")
	l.add("keyed", 1, func(policy, key string, n int64) error {
		first, err := granted(acquire(db.Pool, policy, key, 1, fmt.Sprint(n)))
		if err != nil {
			return err
		}
		again, err := acquire(db.Pool, policy, key, 1, fmt.Sprint(n))
		if err == nil && again != replayed(first) {
			err = fmt.Errorf("the replay of %+v is %+v", first, again)
		}
		return err
	})
	l.add("transaction", 1, func(policy, key string, _ int64) error {
		return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			if err := errorOf(granted(acquire(tx, policy, key, 3))); err != nil {
				return err
			}
			return errorOf(refund(tx, policy, key, 2))
		})
	})
	l.add("denied", 1, func(policy, key string, _ int64) error {
		err := errorOf(granted(acquire(db.Pool, policy, key, 1)))
		d, denial := acquire(db.Pool, policy, key, loadCapacity)
		if denial == nil && d.Allowed {
			denial = fmt.Errorf("granted: %+v", d)
		}
		return errors.Join(err, denial)
	})
	if statement, older := combinerStatements[version]; older {
		l.add("combined by an older client", 3, func(policy, key string, n int64) error {
			return combined(db.Pool, statement, policy, key, fmt.Sprint(n))
		})
	} else {
		combiner := l.addCombiner()
		sql("all", 2, "ratelimit_acquire_all(array[$1, $1], array[$2, $2], array[1, 0], $3)")
		sql("charged and settled", 2, "ratelimit_charge($1, $2, 3, $3)", "ratelimit_settle($1, $2, $3, 1)")
		l.add("all combined", 4, func(policy, key string, _ int64) error {
			d, err := combiner.AcquireAll(ctx, []client.Charge{{Policy: policy, Key: key}, {Policy: policy, Key: key, Cost: client.Cost(0)}})
			if err == nil && !d.Allowed {
				err = fmt.Errorf("denied: %+v", d)
			}
			return err
		})
		l.add("reserved", 2, func(policy, key string, n int64) error {
			s := spending{function: "reserve", BucketID: model.BucketID{Policy: policy, Key: key}, cost: 1, maxWait: 1, idempotencyKey: fmt.Sprint(n)}
			got, err := s.by(db.Pool)
			return errorOf(granted(got.decision, err))
		})
		l.add("up to", 2, func(policy, key string, _ int64) error {
			got, err := acquireUpTo(db.Pool, model.BucketID{Policy: policy, Key: key}, 1, 1, nil)
			if err == nil && got.Taken != 1 {
				err = fmt.Errorf("took %+v", got)
			}
			return err
		})
		l.add("enforce", 1, func(policy, key string, n int64) error {
			return errorOf(enforce(db.Pool, policy, key, 1, fmt.Sprint(n)))
		})
		for policy := range loadPolicies {
			db.exec(fmt.Sprintf(`
				create table %[1]s (customer text);
				create trigger limited after insert on %[1]s referencing new table as inserted for each statement
				  execute function ratelimit_guard('%[2]s', 'customer')`, guardedTable(policy), policy), pgx.QueryExecModeSimpleProtocol)
		}
		l.add("guard", 1, func(policy, key string, _ int64) error {
			return errorOf(db.Pool.Exec(ctx, "insert into "+guardedTable(policy)+" values ($1), ('another')", key))
		})
		besides("status", "select count(*) from ratelimit_status($1), ratelimit_doctor()")
		besides("override", "select ratelimit_override($1, $2)")
	}
	l.goOn()
	return l
}

func guardedTable(policy string) string { return "public." + strings.ReplaceAll(policy, " ", "_") }

// addCombiner lets callers of a Combiner join. They need the newest version of the schema.
func (l *upgradeLoad) addCombiner() *client.Combiner {
	combiner := client.NewCombiner(l.db.Pool)
	l.db.t.Cleanup(combiner.Close)
	l.add("combined", 6, func(policy, key string, _ int64) error {
		d, err := combiner.Acquire(context.Background(), policy, key)
		if err == nil && !d.Allowed {
			err = fmt.Errorf("denied: %+v", d)
		}
		return err
	})
	return combiner
}

// combinerStatements are what the Combiner of older clients sends, by the version of the schema that they came with.
var combinerStatements = map[int32]string{
	1: `select allowed, remaining, (extract(epoch from retry_after) * 1000000.0)::bigint, (extract(epoch from reset_after) * 1000000.0)::bigint, capacity, replayed,
		       error_code, error_message, error_detail, error_hint
		  from ratelimit_acquire_many($1::text[], $2::text[], $3::bigint[], $4::text[])`,
}

// combined sends two requests, of which the second repeats the first.
func combined(q rowsQuerier, statement, policy, key, idempotencyKey string) error {
	rows, err := q.Query(context.Background(), statement,
		[]string{policy, policy}, []string{key, key}, []int64{1, 1}, []string{idempotencyKey, idempotencyKey})
	if err != nil {
		return err
	}
	var n int
	allowed, replayed, code := new(bool), new(bool), new(string)
	_, err = pgx.ForEachRow(rows, []any{&allowed, nil, nil, nil, nil, &replayed, &code, nil, nil, nil}, func() error {
		if code != nil || !*allowed || *replayed != (n > 0) {
			return fmt.Errorf("answer %d: allowed %v, replayed %v, error %v", n, allowed, replayed, code)
		}
		n++
		return nil
	})
	if err == nil && n != 2 {
		err = fmt.Errorf("%d answers to 2 requests", n)
	}
	return err
}

func granted(d decision, err error) (decision, error) {
	if err == nil && !d.Allowed {
		err = fmt.Errorf("denied: %+v", d)
	}
	return d, err
}

// add lets callers go round in one way.
func (l *upgradeLoad) add(way string, callers int, call func(policy, key string, n int64) error) {
	rounds := new(atomic.Int64)
	l.ways[way] = rounds
	l.start(callers, func(int) error {
		n := rounds.Add(1)
		for policy := range loadPolicies {
			if err := call(policy, way, n); err != nil {
				return fmt.Errorf("%s: %s: %w", policy, way, err)
			}
		}
		return nil
	})
}

// goOn returns when each way has gone round some more.
func (l *upgradeLoad) goOn() {
	deadline := time.After(patience)
	for way, rounds := range l.ways {
		for until := rounds.Load() + 5; rounds.Load() < until; {
			select {
			case <-l.ctx.Done():
				require.NoError(l.db.t, l.load.end())
			case <-deadline:
				require.FailNow(l.db.t, "nothing happens", way)
			case <-time.After(time.Millisecond):
			}
		}
	}
}

// end stops the load and counts its rounds. Each key has then lost exactly what its callers took.
func (l *upgradeLoad) end() (rounds int64) {
	t := l.db.t
	require.NoError(t, l.load.end())
	for way, n := range l.ways {
		for policy := range loadPolicies {
			require.EqualValues(t, loadCapacity-n.Load(), l.db.left(policy, way), "%s: %s", policy, way)
		}
		rounds += n.Load()
	}
	for policy := range loadPolicies {
		l.db.dropPolicy(policy)
		l.db.exec("drop table if exists " + guardedTable(policy))
	}
	return rounds
}

func reinstallCode(t *testing.T, conn *pgx.Conn) {
	require.NoError(t, migrate.InstallCodePackage(context.Background(), conn, nil, codePackage(t)))
}

func codePackage(t *testing.T) *migrate.CodePackage {
	code, err := migrate.LoadCodePackage(os.DirFS("../sql"))
	require.NoError(t, err)
	return code
}

func newestMigration(t *testing.T) int32 {
	files, err := migrate.FindMigrations(os.DirFS("../migrations"))
	require.NoError(t, err)
	return int32(len(files))
}
