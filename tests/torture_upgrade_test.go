package tests

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// The schema is upgraded under load, again and again, to made-up next versions: one with changed functions and one with changed tables.
func TestTorture_UpgradeUnderLoad(t *testing.T) {
	run := torture(t, 1)
	newest := newestMigration(t)
	functions := nextVersion(t, "", "", edits...)
	tables := nextVersion(t, `
		alter table ratelimit.policies add column next boolean not null default false;
		alter table ratelimit.buckets add column next bigint;
		alter table ratelimit.ephemeral_buckets add column next bigint;`, `
		alter table ratelimit.policies drop column next;
		alter table ratelimit.buckets drop column next;
		alter table ratelimit.ephemeral_buckets drop column next;`,
		nextColumn, edit{"acquire.sql", "if v_wanted > 0 then", "if v_wanted > 0 or v_policy.next then"})
	db := installedAt(t, functions, newest)
	data, conn := db.putData(), db.Connect(t)

	rounds, acquires := 0, int64(0)
	for ; run.goesOn() && rounds < 1500; rounds++ { // a table can have had 1,600 columns
		load := db.startLoad(newest)
		migrateTo(t, db.DB, functions, newest+1)
		load.goOn()
		migrateTo(t, db.DB, functions, newest)
		load.goOn()
		reinstallCode(t, conn)
		load.goOn()
		migrateTo(t, db.DB, tables, newest+1)
		load.goOn()
		data.check()
		acquires += load.end() * int64(len(loadPolicies))
		if rounds == 0 {
			sameSchema(t, installedAt(t, tables, newest+1).DB, db.DB)
			var newer *migrations.NewerSchemaError
			require.ErrorAs(t, migrations.Up(t.Context(), db.Connect(t)), &newer, "an older program leaves it alone")
		}

		// A column goes away under nobody: a call under way may be about to read it.
		migrateTo(t, db.DB, tables, newest)
		data.check()
		run.progress("%d upgrades, %d acquires meanwhile", 2*(rounds+1), acquires)
	}
	sameSchema(t, pgtest.New(t), db.DB)
	run.figures("upgrades under load", 2*rounds, "acquires meanwhile, of which none failed", acquires)
}
