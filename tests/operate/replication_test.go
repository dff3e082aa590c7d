package operate

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// published are the tables of a copy. The schema version stays out: its table has no key, so an upgrade of the publisher would fail.
const published = "ratelimit.policies, ratelimit.overrides, ratelimit.buckets, ratelimit.idempotency_keys, ratelimit.slots, ratelimit.leases"

// A database that subscribes to the tables answers as the publisher does, and goes on in its place.
func TestReplication_ALogicalCopyTakesOver(t *testing.T) {
	t.Parallel()
	origin, server := kit.NewPrivateDB(t, "wal_level=logical")
	origin.DefinePolicy("api", 10, 1, time.Hour)
	origin.Execute("select ratelimit_define_policy('jobs', 3, lease => '1 hour'), ratelimit_override('api', 'vip', 50)")
	origin.Execute("select ratelimit_acquire('api', 'before', 3, 'id')")
	origin.Execute("create publication ratelimit for table " + published)
	origin.Execute("select pg_create_logical_replication_slot('copy', 'pgoutput')")

	replica := kit.CreateDB(t, server, "copy")
	socket := kit.One[string](t, origin.Pool, `select format('host=%s port=%s dbname=%s user=%s', split_part(current_setting('unix_socket_directories'), ',', 1),
		current_setting('port'), current_database(), current_user)`)
	replica.Execute(fmt.Sprintf("create subscription copy connection '%s' publication ratelimit with (create_slot = false, slot_name = 'copy')",
		strings.ReplaceAll(socket, "'", "''")))
	t.Cleanup(func() {
		replica.Execute("alter subscription copy disable")
		replica.Execute("alter subscription copy set (slot_name = none)")
		replica.Execute("drop subscription copy")
	})
	origin.Execute("select ratelimit_acquire('api', 'after', 4), ratelimit_acquire('api', 'vip', 20), ratelimit_hold('jobs', 'k', 'a', 2)")
	origin.Execute("select ratelimit_acquire('api', 'last')")
	replica.Await(t, kit.Patience, "select every(srsubstate = 'r') from pg_subscription_rel")
	replica.Await(t, kit.Patience, "select exists (select from ratelimit.buckets where key = 'last')")
	for bucket, left := range map[model.BucketID]int64{
		{Policy: "api", Key: "before"}: 7, {Policy: "api", Key: "after"}: 6, {Policy: "api", Key: "vip"}: 30, {Policy: "jobs", Key: "k"}: 1,
	} {
		require.Equal(t, left, replica.Left(bucket.Policy, bucket.Key), bucket)
	}

	require.True(t, kit.One[bool](t, replica.Pool, "select replayed from ratelimit_acquire('api', 'before', 3, 'id')"))
	require.False(t, kit.One[bool](t, replica.Pool, "select allowed from ratelimit_hold('jobs', 'k', 'b', 2)"))
	replica.DefinePolicy("new", 1, 1, time.Hour)
	require.True(t, replica.Acquire("new", "k", 1).Allowed)
}

// A server recovered to a point in time knows the grants before it, none after it, and has all buckets of ephemeral policies full.
func TestPointInTimeRecovery(t *testing.T) {
	t.Parallel()
	db, primary := kit.NewPrivateDB(t)
	db.Policy("durable", 10, 1, kit.ADay).Policy("ephemeral", 10, 1, kit.ADay, kit.Ephemeral)
	recovered := pgtest.Standby(t, primary, "recovery_target_name=before", "recovery_target_action=promote")
	db.Take("durable", "k", 3, "early").Take("ephemeral", "k", 3)
	db.Execute("select pg_create_restore_point('before')")
	db.Take("durable", "k", 2, "late")

	db = kit.Reopen(t, recovered)
	db.Await(t, kit.Patience, "select not pg_is_in_recovery()")
	db = kit.Reopen(t, recovered)
	require.EqualValues(t, 7, db.Left("durable", "k"))
	require.True(t, db.Acquire("durable", "k", 3, "early").Replayed)
	require.False(t, db.Acquire("durable", "k", 2, "late").Replayed)
	require.EqualValues(t, 10, db.Left("ephemeral", "k"))
}
