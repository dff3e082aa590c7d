package tests

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Every version of the schema is upgraded to the newest, with data and under load.
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

// A helper that the new version no longer calls has to stay for one version, or calls under way fail.
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

// overtake runs do while a call waits for a lock in the middle.
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
