package torture

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// The schema is upgraded under load, again and again, to made-up next versions: one with changed functions and one with changed tables.
func TestTorture_UpgradeUnderLoad(t *testing.T) {
	run := kit.Torture(t, 1)
	newest := kit.NewestMigration(t)
	functions := kit.NextVersion(t, "", "", kit.Edits...)
	tables := kit.NextVersion(t, `
		alter table ratelimit.policies add column next boolean not null default false;
		alter table ratelimit.buckets add column next bigint;
		alter table ratelimit.ephemeral_buckets add column next bigint;`, `
		alter table ratelimit.policies drop column next;
		alter table ratelimit.buckets drop column next;
		alter table ratelimit.ephemeral_buckets drop column next;`,
		kit.NextColumn, kit.Edit{File: "acquire.sql", Old: "if v_wanted > 0 then", New: "if v_wanted > 0 or v_policy.next then"})
	db := kit.InstalledAt(t, functions, newest)
	data, conn := db.PutData(), db.Connect(t)

	rounds, acquires := 0, int64(0)
	for ; run.GoesOn() && rounds < 1500; rounds++ { // a table can have had 1,600 columns
		load := db.StartLoad(newest)
		kit.MigrateTo(t, db.DB, functions, newest+1)
		load.GoOn()
		kit.MigrateTo(t, db.DB, functions, newest)
		load.GoOn()
		kit.ReinstallCode(t, conn)
		load.GoOn()
		kit.MigrateTo(t, db.DB, tables, newest+1)
		load.GoOn()
		data.Check()
		acquires += load.End() * int64(len(kit.LoadPolicies))
		if rounds == 0 {
			kit.SameSchema(t, kit.InstalledAt(t, tables, newest+1).DB, db.DB)
			var newer *migrations.NewerSchemaError
			require.ErrorAs(t, migrations.Up(t.Context(), db.Connect(t)), &newer, "an older program leaves it alone")
		}

		// A column goes away under nobody: a call under way may be about to read it.
		kit.MigrateTo(t, db.DB, tables, newest)
		data.Check()
		run.Progress("%d upgrades, %d acquires meanwhile", 2*(rounds+1), acquires)
	}
	kit.SameSchema(t, pgtest.New(t), db.DB)
	run.Figures("upgrades under load", 2*rounds, "acquires meanwhile, of which none failed", acquires)
}
