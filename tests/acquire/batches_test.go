package acquire

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// A batch works out small numbers in another way than large ones. The largest small ones and the smallest large ones are
// among those here, and buckets in debt, overfull, or not asked for a long time.
func TestAcquireMany_EqualsOneByOneForNumbersOfEverySize(t *testing.T) {
	db := kit.ParallelDB(t)
	inside := db.Session().Execute("set search_path = ratelimit; set track_functions = pl")
	magnitude := func(most float64) int64 { return int64(math.Exp(rand.Float64() * math.Log(most))) }
	met := map[string]int{}
	for i := 0; len(met) < 4 || met["small, granted"] < 30 || met["large, granted"] < 30; i++ {
		capacity, refill, every := magnitude(9e12), magnitude(9e12), magnitude(1e15)
		if i < 10 { // the product of two ticks is no bigint; one fills the bucket
			capacity, refill, every = 1_300_000_000_000, 5_000_000_000_000, 1
		}
		if float64(capacity)*float64(every) > float64(refill)*3e17 { // longer than 10,000 years to fill
			continue
		}
		kind := []kit.PolicyOption{kit.Continuous, kit.Stepped}[rand.IntN(2)]
		db.DefinePolicy("p", capacity, refill, time.Microsecond, kind)
		db.Execute("select ratelimit_define_policy('p', every => $1 * interval '1 microsecond')", every)
		db.Execute("delete from ratelimit.buckets")
		b := kit.Bucket{RefilledAt: kit.T0.Add(-time.Duration(magnitude(9e14)) * time.Microsecond)}
		switch rand.IntN(4) {
		case 0:
			b.Level = -rand.Int64N(1_000_000 * min(3*capacity, 9e12))
		case 1:
			b.Level = magnitude(9e18)
		default:
			b.Level = rand.Int64N(1_000_000 * capacity)
		}
		db.SetClock(kit.T0)
		for _, key := range []string{"one", "batch", "another"} {
			db.PutBucket("p", key, b)
		}
		cost := min(capacity, magnitude(2e9))
		want := db.Acquire("p", "one", cost)
		answers := kit.SendBatch(t, db.Pool, kit.AcquireMany, kit.RequestOf("p", "batch", cost), kit.RequestOf("p", "another", cost))
		for i, key := range []string{"batch", "another"} {
			require.Equal(t, kit.Answer{Decision: &want}, answers[i], "%d of %d and %d every %d us: %+v", cost, capacity, refill, every, b)
			require.Equal(t, db.Bucket("p", "one"), db.Bucket("p", key), "%d of %d and %d every %d us: %+v", cost, capacity, refill, every, b)
		}
		size, result := "small", "denied"
		inside.Execute("select pg_stat_force_next_flush()") // counts from zero
		if len(kit.ColumnOf(t, inside, `
			select 'large' from (select t.places is null and pg_stat_get_xact_function_calls('take_any_from_buckets'::regproc) > 0 as taken_over
			 from policies as p, take_from_buckets(p, array['none'], array[1], null, null, clock()) as t offset 0) as s where s.taken_over`)) > 0 {
			size = "large"
		}
		if want.Allowed {
			result = "granted"
		}
		met[size+", "+result]++
	}
	t.Log(met)
}

func TestAcquireMany_WaitsAndDecidesAfresh(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, 1000*time.Hour).Take("p", "k", 2) // the bucket has a row: 8 left
	holder := db.Begin().Take("p", "k", 5)                                       // 3 left, when it commits
	call, answers := kit.StartBatch(db.Session(), kit.AcquireMany, slices.Repeat([]kit.NullableRequest{kit.RequestOf("p", "k", 2)}, 4)...)
	call.BlockedBy(holder)
	holder.Execute("commit")
	call.Answer()
	for i, a := range *answers {
		require.Equal(t, i == 0, a.Decision.Allowed)
	}
	require.EqualValues(t, 1, db.Left("p", "k"))
}

// The transaction that the batch waited for leaves no trace, but time has passed: a bucket that was empty
// when the batch began has refilled, and a single acquire would be granted.
func TestAcquireMany_AWaitThatEndsInARollbackIsDecidedAfresh(t *testing.T) {
	db := kit.ParallelDB(t)
	for name, kind := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		for _, keyed := range []bool{false, true} {
			policy := fmt.Sprint(name, keyed)
			db.Policy(policy, 10, 10, time.Second, kind).Take(policy, "a", 1)
			holder, first := db.Begin(), kit.RequestOf(policy, "a", 1)
			holder.Acquire(policy, "a", 1)
			if keyed {
				first.IdempotencyKey = new("i")
			}
			db.Acquire(policy, "b", 10)
			call, answers := kit.StartBatch(db.Session(), kit.AcquireMany, first, kit.RequestOf(policy, "b", 5))
			call.BlockedBy(holder)
			db.Await(t, kit.Patience, "select allowed from ratelimit_peek($1, $2, 5)", policy, "b")
			holder.Execute("rollback")
			call.Answer()
			require.True(t, (*answers)[0].Decision.Allowed)
			require.True(t, (*answers)[1].Decision.Allowed, "peek allowed it: %+v", (*answers)[1].Decision)
		}
	}
}

// Two batches over two policies in opposite orders would wait for each other if the order of their requests were the order of their locks.
func TestAcquireMany_TakesPoliciesInOneOrder(t *testing.T) {
	db := kit.ParallelDB(t)
	for _, policy := range []string{"p", "q"} {
		db.Policy(policy, 10, 1, kit.ADay).Take(policy, "k", 1)
	}
	holder := db.Begin().Take("p", "k", 1)
	pq, _ := kit.StartBatch(db.Session(), kit.AcquireMany, kit.RequestOf("p", "k", 1), kit.RequestOf("q", "k", 1))
	pq.BlockedBy(holder)
	qp, _ := kit.StartBatch(db.Session(), kit.AcquireMany, kit.RequestOf("q", "k", 1), kit.RequestOf("p", "k", 1))
	qp.BlockedBy(pq.Session) // for p; it would have q by now
	holder.Execute("rollback")
	pq.Answer()
	qp.Answer()
	require.Equal(t, []int64{7, 7}, []int64{db.Left("p", "k"), db.Left("q", "k")})
}

// A client that reads by position would give callers each other's answers. What is asked again finds its buckets there, which is the fast path.
func TestAcquireMany_ARequestWithoutElementsHasARowOfItsOwn(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.DefinePolicy("p", 100, 1, time.Hour, durability)
		for _, sizes := range [][]int{{1, 0, 1}, {0, 1, 1}, {2, 0}, {0, 2, 0, 0, 1, 0}} { // in the middle, first, last, several
			var requests []kit.WholeRequest
			for i, size := range sizes {
				requests = append(requests, kit.All("p", []string{fmt.Sprint(sizes, i, 0), fmt.Sprint(sizes, i, 1)}[:size]...))
			}
			for n := range 4 {
				answers, err := kit.AcquireManyWithSizes(db.Pool, requests)
				if n%2 == 1 {
					answers, err = kit.AcquirePacked(db.Pool, requests, true)
				}
				require.NoError(t, err)
				require.Len(t, answers, len(sizes))
				for i, a := range answers {
					if sizes[i] > 0 {
						require.True(t, a.Whole.Allowed)
						require.Len(t, a.Whole.Decisions, sizes[i])
						continue
					}
					require.Nil(t, a.Whole)
					require.Equal(t, fmt.Sprintf("22023: invalid sizes: Request %d has 0 elements.: Pass 1 to 1000 elements for each request.", i+1), a.Error)
				}
			}
		}
	})
}

// A batch that waits for a bucket that is being removed takes its buckets in the order of all others
// still, when somebody else has made the bucket anew.
func TestAcquireMany_ABucketRemovedMeanwhileIsTakenInOrder(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, kit.ADay).Take("p", "a", 1).Take("p", "b", 1)
	remover, maker, keeper := db.Begin(), db.Begin(), db.Begin()
	remover.Execute("select ratelimit_reset('p', 'a')")
	keeper.Acquire("p", "b", 1)
	batch, _ := kit.StartBatch(db.Session(), kit.AcquireMany, kit.RequestOf("p", "a", 1), kit.RequestOf("p", "b", 1))
	batch.BlockedBy(remover)
	remover.Execute("commit") // the batch goes on to b
	batch.BlockedBy(keeper)
	maker.Acquire("p", "a", 1)
	other := maker.StartAcquire("p", "b", 1)
	db.Await(t, kit.Patience, "select cardinality(pg_blocking_pids($1)) > 0", maker.PgConn().PID())
	keeper.Execute("commit")
	other.Answer()
	maker.Execute("commit")
	batch.Answer()
}

// A batch that is about to create the row of a bucket holds no later bucket. Otherwise it would meet a session that has
// created the row since, and waits for the later bucket.
func TestAcquireMany_ABucketCreatedMeanwhileIsTakenInOrder(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, kit.ADay).Take("p", "b", 1)
	both := []kit.NullableRequest{kit.RequestOf("p", "a", 1), kit.RequestOf("p", "b", 1)}
	g := db.GateBefore(`insert into buckets \(policy_id, key, level, refilled_at, due_at, counts_from\) values`, "ratelimit.lock_buckets")
	batch, _ := kit.StartBatch(g.Session(), kit.AcquireMany, both...)
	batch.BlockedBy(g.Keeper)
	db.Acquire("p", "a", 1)
	kit.SendBatch(t, db.Session(), kit.AcquireMany, both...)
	g.Open()
	batch.Answer()
	require.Equal(t, []int64{7, 7}, []int64{db.Left("p", "a"), db.Left("p", "b")})
}

// The batch has a grant, and waits for the bucket that denies.
func TestAcquireMany_ADenialIsAsOfAfterTheWait(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		meanwhile func(db *kit.TestDB, holder *kit.Session)
		want      kit.Decision
	}{
		"clock":  {func(db *kit.TestDB, _ *kit.Session) { db.SetClock(kit.T0.Add(kit.Second)) }, kit.Denied(3, 2*kit.Second, 7*kit.Second, 10)},
		"policy": {func(_ *kit.TestDB, holder *kit.Session) { holder.Execute("select ratelimit_define_policy('p', 4)") }, kit.Never(2, 2*kit.Second, 4)},
		"refund": {func(_ *kit.TestDB, holder *kit.Session) { holder.Execute("select ratelimit_refund('p', 'a', 3)") }, kit.Allowed(0, 10*kit.Second, 10)},
	} {
		t.Run(name, func(t *testing.T) {
			kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
				db.At(kit.T0).Policy("p", 10, 1, kit.Second, kind).Take("p", "a", 2).Take("p", "b", 2)
				holder := db.Begin().Take("p", "a", 6)
				call, answers := kit.StartBatch(db.Session(), kit.AcquireMany, kit.RequestOf("p", "b", 1), kit.RequestOf("p", "a", 5))
				call.BlockedBy(holder)
				test.meanwhile(db, holder)
				holder.Execute("commit")
				call.Answer()
				require.True(t, (*answers)[0].Decision.Allowed)
				require.Equal(t, test.want, *(*answers)[1].Decision)
			})
		})
	}
}

// Plain denials need no order. Whatever else is in their batch, they cost one look at the bucket.
func TestAcquireMany_PlainDenialsAreNotDecidedInOrder(t *testing.T) {
	kit.EachDurability(t, func(t *testing.T, db *kit.TestDB, kind kit.PolicyOption) {
		db.Policy("p", 5, 1, kit.ADay, kind).Policy("q", 5, 1, kit.ADay, kind).Take("p", "a", 3).Take("p", "b", 3).Take("q", "a", 3)
		db.Policy("s", 5, 1, kit.ADay, kind).Take("s", "a", 3).Execute("select ratelimit_define_policy('s', shadow => true)")
		s := db.Session()
		s.Execute("set track_functions = pl; begin") // statistics are of a transaction
		calls := 0                                   // of decide_in_order, by the session
		for _, test := range []struct {
			requests []kit.NullableRequest
			granted  int
			inOrder  int
		}{
			{[]kit.NullableRequest{kit.RequestOf("p", "a", 3), kit.RequestOf("p", "a", 3), kit.RequestOf("p", "a", 6)}, 0, 0},
			{[]kit.NullableRequest{kit.RequestOf("p", "a", 3), kit.RequestOf("q", "a", 4)}, 0, 0},
			{[]kit.NullableRequest{kit.RequestOf("p", "a", 3), kit.RequestOf("p", "b", 1)}, 1, 0},
			{[]kit.NullableRequest{kit.RequestOf("p", "a", 3), kit.RequestOf("p", "a", 1)}, 1, 1}, // which might fit after the other
			{[]kit.NullableRequest{kit.RequestOf("p", "b", 3), kit.RequestOf("p", "new", 1)}, 1, 1},
			{[]kit.NullableRequest{kit.RequestOf("p", "b", 3, "i")}, 0, 1},                        // which might be a repeat
			{[]kit.NullableRequest{kit.RequestOf("s", "a", 3), kit.RequestOf("p", "a", 3)}, 1, 1}, // a shadow denies nothing
		} {
			granted := 0
			for _, a := range kit.SendBatch(t, s, kit.AcquireMany, test.requests...) {
				if a.Decision.Allowed {
					granted++
				}
			}
			require.Equal(t, test.granted, granted)
			calls += test.inOrder
			require.Equal(t, []string{fmt.Sprint(calls)}, kit.ColumnOf(t, s, `
				select coalesce(sum(calls), 0)::text from pg_stat_xact_user_functions where funcname = 'decide_in_order'`), "%+v", test.requests)
		}
	})
}

// lateral is the statement of docs/spending.md that calls a function about one bucket for many. Its parameters are the keys and at_most.
func lateral(t testing.TB) string {
	page := string(kit.NoError(os.ReadFile("../../docs/spending.md"))(t))
	statement := regexp.MustCompile(`(?s)=> (select a\.key, u\.taken.*?);\n`).FindStringSubmatch(page)
	require.NotNil(t, statement)
	return regexp.MustCompile(`'\{[^}]*\}'`).ReplaceAllStringFunc(statement[1], func(string) string { return "$%d" })
}

func acquireLateral(t testing.TB, q kit.Querier, keys []string, atMost []int64) (map[string]int64, error) {
	rows, err := q.Query(context.Background(), fmt.Sprintf(lateral(t), 1, 2), keys, atMost)
	if err != nil {
		return nil, err
	}
	taken := map[string]int64{}
	var key string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&key, &n}, func() error { taken[key] += n; return nil })
	return taken, err
}

// Callers take the same buckets in other orders, beside calls that take all of several: nobody deadlocks, and what was taken is what is gone.
func TestLateral_NeverDeadlocksAndNeverTakesMore(t *testing.T) {
	const callers, batches, buckets, capacity = 8, 25, 20, 600
	db := kit.ParallelDB(t)
	db.DefinePolicy("batch", capacity, 1, 1000*time.Hour)
	db.Warm(callers)
	taken := make([]int64, callers)
	kit.Crowd(t, callers, func(caller int) error {
		for batch := range batches {
			var keys []string
			var atMost []int64
			for i := range buckets {
				keys, atMost = append(keys, fmt.Sprint(batch/20, "/", i)), append(atMost, int64(1+rand.IntN(20)))
			}
			rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
			if caller%3 == 0 {
				d, err := kit.Decide(db.Pool, "ratelimit_acquire_all(array_fill(text 'batch', array[cardinality($1::text[])]), $1)", keys)
				if err != nil {
					return err
				} else if d.Allowed {
					taken[caller] += buckets
				}
				continue
			}
			got, err := acquireLateral(t, db.Pool, keys, atMost)
			if err != nil {
				return err
			}
			for _, n := range got {
				taken[caller] += n
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

func TestLateral_AnErrorFailsTheStatementAndTakesNothing(t *testing.T) {
	db := kit.ParallelDB(t).Policy("batch", 10, 1, kit.ADay)
	keys := []string{"c", "b", "a"}
	for _, bad := range []string{"", strings.Repeat("x", 513)} {
		kit.RequireState(t, "22023", kit.ErrorOf(acquireLateral(t, db.Pool, append(keys, bad), []int64{1, 1, 1, 1})))
	}
	require.Zero(t, db.Number("select count(*) from ratelimit.buckets"))
	require.Equal(t, map[string]int64{"a": 3, "b": 10, "c": 1}, kit.NoError(acquireLateral(t, db.Pool, keys, []int64{1, 20, 3}))(t))
}
