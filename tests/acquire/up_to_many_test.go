package acquire

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Policies of every kind, with buckets that have a row and others, in calls that one update answers, and in calls that one odd request
// leaves to the other way.
func TestAcquireUpToMany_EqualsOneByOne(t *testing.T) {
	run := kit.Torture(t, 20)
	db := kit.NewDB(t)
	ctx := context.Background()
	conn := db.Connect(t)
	kinds := []string{"a", "b", "c", "d", "overrides", "shadow", "large", "quota", "never", "jobs", "nobody"}
	requestsOf := func(kinds, keys []string, costs ...int64) *rapid.Generator[kit.NullableRequest] {
		return rapid.Custom(func(t *rapid.T) kit.NullableRequest {
			return kit.RequestOf(rapid.SampledFrom(kinds).Draw(t, "policy"), rapid.SampledFrom(keys).Draw(t, "key"), rapid.SampledFrom(costs).Draw(t, "cost"))
		})
	}
	some := []int64{1, 2, 3, 4, 20, 3_000_000_000, 9_223_372_036_854_775_807}
	odd := requestsOf(kinds, []string{"x", "y", "z", ""}, append(some, 0, -1)...)
	run.Check(func(t *rapid.T) {
		for _, table := range append([]string{"ratelimit.policies"}, kit.StateTables...) {
			db.Execute("delete from " + table)
		}
		now := kit.T0
		db.SetClock(now)
		db.Policy("a", 10, 3, time.Second).Policy("b", 7, 2, 7*time.Second, kit.Stepped).Policy("c", 10, 10, time.Second, kit.Ephemeral)
		db.Policy("d", 5, 1, time.Minute, kit.Stepped, kit.Ephemeral).Policy("overrides", 10, 3, time.Second).Policy("shadow", 4, 1, time.Second)
		db.Policy("large", 9_000_000_000_000, 7_000_000_000_000, time.Second).Policy("never", 9, 0, time.Second)
		db.Execute(`select ratelimit_override('overrides', 'x', 3), ratelimit_override('overrides', 'y', 20, expires_at => $1),
			ratelimit_override('overrides', 'z', 0), ratelimit_define_policy('shadow', shadow => true), ratelimit_define_policy('jobs', 5, lease => '1 day'),
			ratelimit_define_policy('quota', 6, period => '1 day'), ratelimit_override('quota', 'x', 3, time_zone => 'Asia/Tokyo')`, kit.T0.Add(8*time.Second))
		for range rapid.IntRange(2, 6).Draw(t, "batches") {
			one := rapid.SampledFrom(kinds[:9]).Draw(t, "a kind")
			requests := rapid.OneOf(
				rapid.SliceOfNDistinct(requestsOf([]string{one}, []string{"x", "y", "z", "u", "v"}, some[:5]...), 1, 5, func(r kit.NullableRequest) string { return *r.Key }),
				rapid.SliceOfN(requestsOf([]string{one}, []string{"x", "y"}, some[:5]...), 1, 8),
				rapid.SliceOfNDistinct(requestsOf(kinds[:7], []string{"x", "y"}, some[:5]...), 1, 8, func(r kit.NullableRequest) string { return *r.Policy + *r.Key }),
				rapid.SliceOfN(odd, 1, 12)).Draw(t, "requests")
			if rapid.IntRange(0, 9).Draw(t, "a null") == 0 {
				requests[0].Cost = nil
			}
			now = now.Add(time.Duration(rapid.Int64Range(0, 5_000_000).Draw(t, "wait")) * time.Microsecond)
			db.SetClock(now)
			tx := kit.NoError(conn.Begin(ctx))(t)
			want := kit.NoError(acquireUpToEach(tx, requests))(t)
			wantState := kit.State(t, tx)
			require.NoError(t, tx.Rollback(ctx))
			require.Equal(t, want, kit.NoError(kit.AcquireUpToMany(conn, requests))(t))
			require.Equal(t, wantState, kit.State(t, conn))
		}
	})
}

// What is taken is worked out from the bucket as the call found it. If another session takes meanwhile, it is worked out anew.
func TestAcquireUpToMany_TakesWhatOthersLeave(t *testing.T) {
	kit.OnDBs(t, map[string]kit.PolicyOption{"buckets": kit.Durable, "ephemeral_buckets": kit.Ephemeral}, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		race := func(policy string) (taken []int64, left int64) {
			db.Policy(policy, 10, 1, 1000*time.Hour, kind).Take(policy, "a", 1).Take(policy, "b", 1).Take(policy, "c", 1)
			holder := db.Begin().Take(policy, "b", 5)
			call, answers := kit.StartBatch(db.Session(), kit.AcquireUpToMany, kit.RequestOf(policy, "c", 2), kit.RequestOf(policy, "b", 9), kit.RequestOf(policy, "a", 20))
			call.BlockedBy(holder)
			holder.Execute("commit")
			call.Answer()
			for _, a := range *answers {
				taken = append(taken, a.Taken)
			}
			return taken, db.Left(policy, "b")
		}
		taken, left := race("p")
		require.Equal(t, []int64{2, 4, 9}, taken)
		require.Zero(t, left)

		defer db.Mutate(kit.Mutation{Pattern: `b.ctid = u.row_id and b.level = u.level and b.refilled_at = u.refilled_at`, Replacement: "b.policy_id = v_policy.id and b.key = u.key"}, "ratelimit.take_up_to_from_"+path.Base(t.Name()))()
		taken, _ = race("planted")
		require.Equal(t, []int64{2, 9, 9}, taken, "more than there was")
	})
}

// Callers take the same buckets in opposite orders, beside calls that take all of several: nobody deadlocks, and what was taken is what is gone.
func TestAcquireUpToMany_NeverDeadlocksAndNeverTakesMore(t *testing.T) {
	const callers, batches, buckets, capacity = 8, 25, 20, 600
	db := kit.ParallelDB(t)
	for _, policy := range []string{"p", "q"} {
		db.DefinePolicy(policy, capacity, 1, 1000*time.Hour)
	}
	db.Warm(callers)
	taken := make([]int64, callers)
	kit.Crowd(t, callers, func(caller int) error {
		for batch := range batches {
			var requests []kit.NullableRequest
			var whole []string
			for i := range buckets {
				requests = append(requests, kit.RequestOf([]string{"p", "q"}[i%2], fmt.Sprint(batch/20, "/", i), int64(1+rand.IntN(20))))
				whole = append(whole, *requests[i].Policy+" "+*requests[i].Key)
			}
			if rand.IntN(4) == 0 {
				requests = append(requests, requests[0])
			}
			rand.Shuffle(len(requests), func(i, j int) { requests[i], requests[j] = requests[j], requests[i] })
			rand.Shuffle(len(whole), func(i, j int) { whole[i], whole[j] = whole[j], whole[i] })
			if caller%3 == 0 {
				d, err := kit.Decide(db.Pool, `(select d.* from (select array_agg(split_part(u, ' ', 1)) as p, array_agg(split_part(u, ' ', 2)) as k from unnest($1::text[]) as u) as a, ratelimit_acquire_all(a.p, a.k) as d)`, whole)
				if err != nil {
					return err
				} else if d.Allowed {
					taken[caller] += buckets
				}
				continue
			}
			answers, err := kit.AcquireUpToMany(db.Pool, requests)
			if err != nil {
				return err
			}
			for _, a := range answers {
				taken[caller] += a.Taken
			}
		}
		return nil
	})
	var sum int64
	for _, n := range taken {
		sum += n
	}
	require.Equal(t, sum, db.Number("select sum($1 - level / 1000000) from ratelimit.buckets", capacity))
	require.Zero(t, db.Number("select count(*) from ratelimit.buckets where level < 0"))
}
