package operate

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// becomeStandby has a server go on as a standby that waits for a primary to follow.
func becomeStandby(t *testing.T, db *kit.TestDB, server *pgtest.Server) *kit.TestDB {
	db.Pool.Close()
	kit.BecomeStandby(t, server)
	db = kit.Reopen(t, server)
	require.Equal(t, int64(1), db.Number("select 1 where pg_is_in_recovery()"))
	return db
}

// On a standby, peek answers for durable policies. A call that would write, or would read an unlogged table, is an error that says so.
func TestStandby_PeeksAndRefusesWhatWrites(t *testing.T) {
	t.Parallel()
	db, server := kit.NewPrivateDB(t)
	db.ForReadOnly("durable", kit.Durable)
	db.ForReadOnly("ephemeral", kit.Ephemeral)
	first := db.Acquire("durable", "k", 3, "first")
	db.Take("ephemeral", "k", 3, "first")
	db = becomeStandby(t, db, server)
	for _, key := range []string{"k", "new"} {
		require.True(t, db.Must(kit.Acquire(db.Pool, "durable", key, 0)).Allowed, "cost 0 writes nothing")
	}
	for policy, unreadable := range map[string]bool{"durable": false, "ephemeral": true} {
		kit.RequireReadOnly(t, db.Connect(t), policy, "This server is a standby.", unreadable)
	}
	require.Equal(t, []int64{7, 10}, []int64{db.Left("durable", "k"), db.Left("durable", "new")})
	_, err := kit.Peek(db.Pool, "none", "k", 1)
	require.Equal(t, "RL001", kit.SQLState(err))
	require.Len(t, kit.Column(t, db.DB, "select policy from ratelimit_policies()"), 6)
	require.Equal(t, kit.Replayed(first), db.Acquire("durable", "k", 3, "first"), "a replay writes nothing either")
	limiter, combiner := client.New(db.Pool), client.NewCombiner(db.Pool, client.NoFlush())
	defer combiner.Close()
	require.False(t, kit.NoError(limiter.Peek(t.Context(), "durable", "k", client.Cost(8)))(t).Allowed)
	for _, limiter := range []client.Acquirer{limiter, combiner} {
		_, err = limiter.Acquire(t.Context(), "durable", "k")
		require.Equal(t, "25006", kit.SQLState(err), "%v", err)
		require.ErrorContains(t, err, "This server is a standby.")
	}
	// After promotion, durable buckets go on where the primary was, and ephemeral ones are full.
	db.Execute("select pg_promote()")
	db.Await(t, kit.Patience, "select not pg_is_in_recovery()")
	db = kit.Reopen(t, server) // sessions that began on the standby stay read-only no longer, but their plans may be old
	require.Equal(t, kit.Replayed(first), db.Acquire("durable", "k", 3, "first"))
	require.EqualValues(t, 5, db.Acquire("durable", "k", 2).Remaining)
	require.EqualValues(t, 8, db.Acquire("ephemeral", "k", 2, "first").Remaining)
}

// On a standby, status lists the buckets of durable policies, and says so if it is asked for others. acquire_all denies what several of
// them do not cover, and grants nothing.
func TestStandby_StatusAndAcquireAll(t *testing.T) {
	t.Parallel()
	db, server := kit.NewPrivateDB(t)
	db.At(kit.T0).Policy("durable", 10, 1, 2*kit.Second).Policy("ephemeral", 10, 1, 2*kit.Second, kit.Ephemeral)
	for _, policy := range []string{"durable", "ephemeral"} {
		db.Take(policy, "a", 3).Take(policy, "b", 4)
	}
	db.Execute("select ratelimit_override('durable', 'a', 4)")
	const a, b = "durable|a|4|0|0|4|t", "durable|b|6|0|8|10|f"
	require.Equal(t, []string{b, "ephemeral|b|6|0|8|10|f", "ephemeral|a|7|0|6|10|f", a}, kit.Column(t, db.DB, statusColumns+"ratelimit_status()"))
	db = becomeStandby(t, db, server)
	require.Equal(t, []string{b, a}, kit.Column(t, db.DB, statusColumns+"ratelimit_status()"))
	require.Equal(t, []string{b}, kit.Column(t, db.DB, statusColumns+"ratelimit_status('durable', 1)"))
	e := db.Refused("0A000", "select * from ratelimit_status('ephemeral')")
	require.Equal(t, []string{"ephemeral buckets cannot be read on a standby", "Policy 'ephemeral' is ephemeral. This server is a standby.", "Ask the primary."},
		[]string{e.Message, e.Detail, e.Hint})
	_ = db.Refused("RL001", "select * from ratelimit_status('none')")
	const all = "select allowed::text || ' ' || coalesce(retry_after::text, 'never') from ratelimit_acquire_all('{durable,durable}', '{b,c}', $1)"
	for want, costs := range map[string][]int64{"false 00:00:02": {7, 1}, "false never": {11, 1}, "true 00:00:00": {0, 0}} {
		require.Equal(t, []string{want}, kit.Column(t, db.DB, all, costs))
	}
	_ = db.Refused("25006", all, []int64{1, 1})
}

// The doctor of a standby looks at what that can read, names the rest, and sends to the primary what only a primary can do.
func TestStandby_Doctor(t *testing.T) {
	t.Parallel()
	const notOnAStandby = " This server is a standby: do it on the primary."
	db, server := kit.NewPrivateDB(t, "autovacuum=off")
	db.Follow(kit.Column(t, db.DB, "select remedy from ratelimit_doctor() where severity = 'notice'")[0], "pg_monitor")
	db.At(kit.T0).Policy("durable", 10, 1, kit.Second).Take("durable", "k", 3)
	db.Execute("select ratelimit_override('durable', 'k', 4, expires_at => $1)", kit.T0.Add(kit.Second))
	require.Len(t, db.Findings(), 1, "autovacuum is off")
	db = becomeStandby(t, db, server)
	require.Empty(t, db.Findings(), "a standby vacuums nothing")
	promote := func() {
		db.Execute("select pg_promote()")
		db.Await(t, kit.Patience, "select not pg_is_in_recovery()")
		db = kit.Reopen(t, server)
	}
	promote()
	db.Policy("ephemeral", 10, 1, kit.Second, kit.Ephemeral).Take("ephemeral", "k", 3)
	db.Execute("alter table ratelimit.buckets set (autovacuum_enabled = off)")
	db.SetClock(kit.T0.Add(time.Hour))
	require.Len(t, db.Findings(), 5)
	db = becomeStandby(t, db, server)
	findings, remedies := db.Findings(), kit.Column(t, db.DB, "select remedy from ratelimit_doctor()")
	require.Len(t, findings, 4)
	for i, want := range []string{
		"warning: ratelimit.buckets has 1 row overdue", "warning: ratelimit.overrides has 1 row overdue",
		"notice: This server is a standby, which cannot read the buckets, leases and idempotency keys of ephemeral policies",
		"warning: Autovacuum is off for ratelimit.buckets.",
	} {
		require.Contains(t, findings[i], want)
		require.Equal(t, !strings.HasPrefix(want, "notice"), strings.HasSuffix(remedies[i], notOnAStandby), remedies[i])
	}
	// They help there.
	promote()
	db.Execute("call ratelimit_cleanup_all()")
	db.Execute(strings.TrimSuffix(remedies[3], notOnAStandby))
	db = becomeStandby(t, db, server)
	require.Len(t, db.Findings(), 1, "but for what it cannot see")
}

func TestDurability_ACommittedGrantSurvivesACrash(t *testing.T) {
	t.Parallel()
	db, server := kit.NewPrivateDB(t, "synchronous_commit=on")
	db.Policy("d", 10, 1, kit.ADay).Policy("e", 10, 1, kit.ADay, kit.Ephemeral)
	first := db.Acquire("d", "k", 3, "X")
	db.Take("d", "k", 4).Take("e", "k", 3, "X").Take("e", "k", 4)
	before := db.Bucket("d", "k")
	open := db.Begin() // and never committed
	open.Acquire("d", "k", 1)
	require.NoError(t, server.Stop(context.Background(), true))
	require.NoError(t, server.Start(context.Background()))
	db = kit.Reopen(t, server)
	require.Equal(t, before, db.Bucket("d", "k"))
	require.EqualValues(t, 3, db.Left("d", "k"))
	require.Equal(t, kit.Replayed(first), db.Acquire("d", "k", 3, "X"))
	require.False(t, db.Acquire("d", "k", 4).Allowed)
	require.Nil(t, db.Bucket("e", "k"))
	again := db.Acquire("e", "k", 3, "X")
	require.False(t, again.Replayed)
	require.EqualValues(t, 7, again.Remaining, "charged again, from a full bucket")
}

// Every table that one call writes has the same durability, so an ephemeral grant has nothing to flush.
func TestDurability_AnEphemeralGrantWritesNoWAL(t *testing.T) {
	s := kit.ParallelDB(t).Policy("d", 10, 1, time.Second).Policy("e", 10, 1, time.Second, kit.Ephemeral).Session()
	for _, call := range []string{
		"acquire(%, k)", // creates the bucket
		"acquire(%, k, 2)",
		"acquire(%, k, 3, 'X')",
		"refund(%, k, 1)",
		"reset(%, k)",
	} {
		// Reading a catalog may prune it, so the smallest of several counts.
		least := map[string]int64{"'d'": math.MaxInt64, "'e'": math.MaxInt64}
		for i := range 5 {
			for policy := range least {
				call := strings.NewReplacer("%", policy, "k", fmt.Sprintf("'k%d'", i)).Replace(call)
				least[policy] = min(least[policy], s.WalRecords("select ratelimit_"+call))
			}
		}
		require.Zero(t, least["'e'"], call)
		require.NotZero(t, least["'d'"], call)
	}
}

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
