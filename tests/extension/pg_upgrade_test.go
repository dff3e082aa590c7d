package extension

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// A server of another version takes other programs: this one goes from its version to the same, by the same steps.
func TestPgUpgrade_KeepsAllBuckets(t *testing.T) {
	t.Parallel()
	s := newExtensionServer(t, "../..")
	installed := map[string]string{"plain": "", "extension": "create extension pgratelimit"}
	for name, create := range installed {
		kit.OnServer(t, s.Server, "", "create database "+name+" template template0")
		db := kit.OpenDB(t, s.Server, name)
		if create != "" {
			db.Execute(create)
		} else {
			db = kit.InstalledDB(t, s.Server, name)
		}
		db.Policy("durable", 10, 1, kit.ADay).Policy("ephemeral", 10, 1, kit.ADay, kit.Ephemeral).Lend("slots", 3, kit.ADay)
		db.Take("durable", "k", 3, "id").Take("ephemeral", "k", 4)
		require.True(t, kit.NoError(kit.Hold(db.Pool, "slots", "k", "holder", 2))(t).Allowed)
		db.Pool.Close()
	}
	upgraded := pgtest.Upgrade(t, s.Server)
	for name, create := range installed {
		db := kit.OpenDB(t, upgraded, name)
		require.Equal(t, []int64{7, 6, 1}, []int64{db.Left("durable", "k"), db.Left("ephemeral", "k"), db.Left("slots", "k")}, name)
		require.True(t, db.Acquire("durable", "k", 3, "id").Replayed, name)
		require.EqualValues(t, 5, db.Acquire("durable", "k", 2).Remaining, name)
		require.Equal(t, create != "", db.Number("select count(*) from pg_extension where extname = 'pgratelimit'") == 1, name)
	}
}
