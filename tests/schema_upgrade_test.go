package tests

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/tern/v2/migrate"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// From every version of the schema that there has been, with data and under load, to the newest.
func TestUpgrade_FromEveryVersion(t *testing.T) {
	t.Parallel()
	for version := range newestMigration(t) {
		version++
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			t.Parallel()
			db := installedAt(t, os.DirFS("../migrations"), version)
			data, load := db.putData(), db.startLoad()

			require.NoError(t, migrations.Up(t.Context(), db.Connect(t)))
			load.goOn()
			load.end()
			data.check()
			sameSchema(t, pgtest.New(t), db.DB)
		})
	}
}

// To versions that are not written yet, again and again: what may fail is shown before there is a release
// that does.
func TestTorture_UpgradeUnderLoad(t *testing.T) {
	run := torture(t, 5*time.Second)
	newest := newestMigration(t)
	functions := nextVersion(t, "", "", edits...)
	tables := nextVersion(t, `
		alter table ratelimit.policies add column shadow boolean not null default false;
		alter table ratelimit.buckets add column override bigint;
		alter table ratelimit.ephemeral_buckets add column override bigint;`, `
		alter table ratelimit.policies drop column shadow;
		alter table ratelimit.buckets drop column override;
		alter table ratelimit.ephemeral_buckets drop column override;`,
		edit{"acquire.sql", "if v_cost = 0 then", "if v_cost = 0 or v_policy.shadow then"})
	db := installedAt(t, functions, newest)
	data, conn := db.putData(), db.Connect(t)

	rounds, acquires := 0, int64(0)
	for ; rounds == 0 || run.goesOn() && rounds < 1500; rounds++ { // a table can have had 1,600 columns
		load := db.startLoad()
		migrateTo(t, db.DB, functions, newest+1)
		load.goOn()
		migrateTo(t, db.DB, functions, newest)
		load.goOn()
		reinstallCode(t, conn)
		load.goOn()
		migrateTo(t, db.DB, tables, newest+1)
		load.goOn()
		if rounds == 0 {
			sameSchema(t, installedAt(t, tables, newest+1).DB, db.DB)
			var newer *migrations.NewerSchemaError
			require.ErrorAs(t, migrations.Up(t.Context(), db.Connect(t)), &newer, "an older program leaves it alone")
		}
		data.check()
		acquires += load.end() * int64(len(loadPolicies))

		// A column goes away under nobody: a call under way may be about to read it.
		migrateTo(t, db.DB, tables, newest)
		data.check()
		run.progress("%d upgrades, %d acquires meanwhile", 2*(rounds+1), acquires)
	}
	sameSchema(t, pgtest.New(t), db.DB)
	run.figure("upgrades under load", 2*rounds, "")
	run.figure("acquires meanwhile, of which none failed", acquires, "")
}

// A call that began before the new version goes on after it.
func TestUpgrade_ACallUnderWay(t *testing.T) {
	t.Parallel()
	files, newest := nextVersion(t, "", "", edits...), newestMigration(t)
	for name, call := range underWay {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := installedAt(t, files, newest)
			for i, version := range []int32{newest + 1, newest} {
				require.NoError(t, db.overtake(call, func() { migrateTo(t, db.DB, files, version) }))
				require.EqualValues(t, 100-3*(i+1), db.left("p", "k"))
			}
		})
	}
}

// Why a helper that is no longer called stays for one more version.
func TestUpgrade_ADroppedHelperFailsCallsUnderWay(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	err := db.overtake(underWay["acquire"], func() { db.exec("drop function ratelimit.granted") })
	require.Equal(t, "42883", sqlState(err), "%v", err)
}

var underWay = map[string]func(q querier) (decision, error){
	"acquire":        func(q querier) (decision, error) { return acquire(q, "p", "k", 2) },
	"acquire, keyed": func(q querier) (decision, error) { return acquire(q, "p", "k", 2, fmt.Sprint(time.Now())) },
	"acquire many": func(q querier) (decision, error) {
		return decide(q, "ratelimit_acquire_many(array['p'], array['k'], array[2::bigint])")
	},
}

// overtake does something while a call waits in the middle.
func (db *testDB) overtake(call func(q querier) (decision, error), do func()) error {
	db.t.Helper()
	db.exec("select ratelimit_define_policy('p', 100, 1, '1 day')")
	holder := db.begin()
	holder.acquire("p", "k", 1)
	waiter := db.session().start(call)
	waiter.awaitBlockedBy(holder)
	do()
	holder.exec("commit")
	d, err := waiter.result()
	if err == nil {
		require.True(db.t, d.Allowed)
	}
	return err
}

// nextVersion is the migrations with one more, of the kind that releases bring: a change of tables with its
// way back, changed functions, and a new one.
func nextVersion(t *testing.T, up, down string, edits ...edit) fs.FS {
	t.Helper()
	dir, newest := t.TempDir(), newestMigration(t)
	snapshot := fmt.Sprintf("%03d", newest+1)
	require.NoError(t, os.CopyFS(dir, os.DirFS("../migrations")))
	require.NoError(t, os.CopyFS(filepath.Join(dir, "snapshots", snapshot), os.DirFS("../sql")))
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
		{{ install_snapshot "%03d" }}
		drop function ratelimit_next();
		%s`, up, snapshot, newest, down))
	return os.DirFS(dir)
}

// An edit changes the one place in a file where the old text is.
type edit struct{ file, old, new string }

// edits change a function that callers are in the middle of, and one that it is yet to call.
var edits = []edit{
	{"decide.sql", "v_take := 0;", "v_take := 0 + 0;"},
	{"answer.sql", "coalesce(retry_us = 0, false)", "coalesce(retry_us = 0, false) is true"},
}

func installedAt(t *testing.T, files fs.FS, version int32) *testDB {
	t.Helper()
	db := &testDB{DB: pgtest.Empty(t), t: t}
	migrateTo(t, db.DB, files, version)
	return db
}

// migrateTo brings a database to a version, up or down.
func migrateTo(t *testing.T, db *pgtest.DB, files fs.FS, version int32) {
	t.Helper()
	conn := db.Connect(t)
	execute(t, conn, "create schema if not exists ratelimit")
	migrator, err := migrate.NewMigrator(context.Background(), conn, migrations.VersionTable)
	require.NoError(t, err)
	require.NoError(t, migrator.LoadMigrations(files))
	require.NoError(t, migrator.MigrateTo(context.Background(), version))
	require.NoError(t, conn.Close(context.Background()))
}

// Data of every kind, which has to be there afterwards.
type data struct {
	db       *testDB
	policies []string
	buckets  map[string]*bucket
	granted  map[string]decision
}

func (db *testDB) putData() *data {
	db.t.Helper()
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
	return column(d.db.t, d.db.DB, "select p::text from ratelimit_policies() as p where p.policy like 'kept%'")
}

func (d *data) check() {
	d.db.t.Helper()
	require.Equal(d.db.t, d.policies, d.definitions())
	for name, first := range d.granted {
		require.Equal(d.db.t, d.buckets[name], d.db.bucket(name, "k"))
		require.Equal(d.db.t, replayed(first), d.db.acquire(name, "k", 3, "first"))
	}
	require.EqualValues(d.db.t, -5_000_000, d.db.bucket("kept", "in debt").Level)
}

// A load calls the functions in every way while the schema changes below it. No call may fail, and none
// is tried again by the client. Each way has a key of its own in both policies, and takes a token from it
// with every round.
type load struct {
	db     *testDB
	ways   map[string]*atomic.Int64 // rounds
	failed chan error
	stop   chan struct{}
	done   sync.WaitGroup
}

var loadPolicies = map[string]policyOption{"load durable": durable, "load ephemeral": ephemeral}

const loadCapacity = 3_000_000

func (db *testDB) startLoad() *load {
	db.t.Helper()
	for name, kind := range loadPolicies {
		db.definePolicy(name, loadCapacity, 1, aDay, kind)
	}
	l := &load{db: db, ways: map[string]*atomic.Int64{}, failed: make(chan error, 1), stop: make(chan struct{})}
	combiner := client.NewCombiner(db.Pool)
	db.t.Cleanup(combiner.Close)
	ctx := context.Background()

	l.start("acquire", 1, func(policy, key string, _ int64) error {
		_, err := granted(acquire(db.Pool, policy, key, 1))
		return err
	})
	l.start("keyed", 1, func(policy, key string, n int64) error {
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
	l.start("many", 1, func(policy, key string, _ int64) error {
		_, err := granted(decide(db.Pool, "ratelimit_acquire_many(array[$1], array[$2])", policy, key))
		return err
	})
	l.start("transaction", 1, func(policy, key string, _ int64) error {
		return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			if _, err := granted(acquire(tx, policy, key, 3)); err != nil {
				return err
			}
			_, err := refund(tx, policy, key, 2)
			return err
		})
	})
	l.start("denied", 1, func(policy, key string, _ int64) error {
		if _, err := granted(acquire(db.Pool, policy, key, 1)); err != nil {
			return err
		}
		d, err := acquire(db.Pool, policy, key, loadCapacity)
		if err == nil && d.Allowed {
			err = fmt.Errorf("granted: %+v", d)
		}
		return err
	})
	l.start("combined", 6, func(policy, key string, _ int64) error {
		d, err := combiner.Acquire(ctx, policy, key)
		if err == nil && !d.Allowed {
			err = fmt.Errorf("denied: %+v", d)
		}
		return err
	})
	l.start("upkeep", 1, func(policy, key string, _ int64) error {
		if _, err := granted(acquire(db.Pool, policy, key, 1)); err != nil {
			return err
		}
		_, err := db.Pool.Exec(ctx, "select ratelimit_cleanup(), ratelimit_version(), count(*) from ratelimit_policies()")
		return err
	})
	l.goOn()
	return l
}

func granted(d decision, err error) (decision, error) {
	if err == nil && !d.Allowed {
		err = fmt.Errorf("denied: %+v", d)
	}
	return d, err
}

// start lets callers go round until the load ends.
func (l *load) start(way string, callers int, call func(policy, key string, n int64) error) {
	rounds := new(atomic.Int64)
	l.ways[way] = rounds
	round := func() error {
		n := rounds.Add(1)
		for policy := range loadPolicies {
			if err := call(policy, way, n); err != nil {
				return fmt.Errorf("%s: %s: %w", policy, way, err)
			}
		}
		return nil
	}
	for range callers {
		l.done.Go(func() {
			for {
				select {
				case <-l.stop:
					return
				default:
				}
				if err := round(); err != nil {
					select {
					case l.failed <- err:
					default: // one is enough
					}
					return
				}
			}
		})
	}
}

// goOn returns when each way has gone round some more.
func (l *load) goOn() {
	l.db.t.Helper()
	deadline := time.After(patience)
	for way, rounds := range l.ways {
		for until := rounds.Load() + 5; rounds.Load() < until; {
			select {
			case err := <-l.failed:
				l.quit()
				require.NoError(l.db.t, err)
			case <-deadline:
				l.quit()
				require.FailNow(l.db.t, "nothing happens", way)
			case <-time.After(time.Millisecond):
			}
		}
	}
}

func (l *load) quit() {
	close(l.stop)
	l.done.Wait()
}

// end stops the load and counts its rounds. Each key has then lost exactly what its callers took.
func (l *load) end() (rounds int64) {
	t := l.db.t
	t.Helper()
	l.quit()
	select {
	case err := <-l.failed:
		require.NoError(t, err)
	default:
	}
	for way, n := range l.ways {
		for policy := range loadPolicies {
			require.EqualValues(t, loadCapacity-n.Load(), l.db.left(policy, way), "%s: %s", policy, way)
		}
		rounds += n.Load()
	}
	for policy := range loadPolicies {
		l.db.dropPolicy(policy)
	}
	return rounds
}
