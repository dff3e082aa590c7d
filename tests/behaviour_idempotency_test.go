package tests

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

func TestIdempotency_Vector58(t *testing.T) {
	onEach(t, func(t *testing.T, db subject) {
		db.setClock(t0)
		db.definePolicy("p", 10, 1, time.Second)
		first := db.acquire("p", "k", 2, "X")
		require.Equal(t, allowed(8, 2*time.Second, 10), first)
		require.Equal(t, replayed(first), db.acquire("p", "k", 2, "X"))
		require.EqualValues(t, 8, db.peekAt(t0, "p", "k", 0).Remaining)
		_, err := db.tryAcquire("p", "k", 3, "X")
		require.Equal(t, "RL002", sqlState(err))
		require.EqualValues(t, 8, db.peekAt(t0, "p", "k", 0).Remaining)
		require.Equal(t, first, db.acquire("p", "other", 2, "X"), "keys belong to their bucket")
		require.Equal(t, allowed(0, 10*time.Second, 10), db.acquire("p", "k", 8))
		refused := db.acquire("p", "k", 1, "Y")
		require.Equal(t, denied(0, time.Second, 10*time.Second, 10), refused)
		require.Equal(t, refused, db.acquire("p", "k", 1, "Y"), "a denial is not remembered")
		require.Equal(t, allowed(0, 10*time.Second, 10), db.acquireAt(t0.Add(time.Second), "p", "k", 1, "Y"))
	})
}

func TestIdempotency_AReplayIsTheFirstAnswerWhateverHappenedSince(t *testing.T) {
	onDBs(t, map[string]func(db *testDB){
		"nothing":                          func(*testDB) {},
		"the bucket was emptied":           func(db *testDB) { db.acquire("p", "k", 6) },
		"the bucket was reset":             func(db *testDB) { db.reset("p", "k") },
		"tokens were given back":           func(db *testDB) { db.refundAt(t0, "p", "k", 3) },
		"time passed":                      func(db *testDB) { db.setClock(t0.Add(59 * time.Minute)) },
		"the bucket was cleaned up":        func(db *testDB) { db.setClock(t0.Add(59 * time.Minute)); db.cleanup() },
		"the capacity fell below the cost": func(db *testDB) { db.definePolicy("p", 3, 1, time.Second) },
		"the policy forgets sooner by now": func(db *testDB) {
			db.definePolicy("p", 10, 1, time.Second, remember(time.Second))
			db.setClock(t0.Add(59 * time.Minute))
		},
	}, func(t *testing.T, db *testDB, since func(db *testDB)) {
		for _, kind := range []policyOption{durable, ephemeral} {
			db.at(t0).policy("p", 10, 1, time.Second, kind, remember(time.Hour))
			first := db.acquire("p", "k", 4, "X")
			require.Equal(t, allowed(6, 4*time.Second, 10), first)
			since(db)
			before := db.rows()
			require.Equal(t, replayed(first), db.acquire("p", "k", 4, "X"))
			_, err := acquire(db.Pool, "p", "k", 3, "X")
			require.Equal(t, "RL002", sqlState(err))
			require.Equal(t, before, db.rows(), "neither wrote anything")
			db.dropPolicy("p")
		}
	})
}

func TestIdempotency_AnExpiredKeyChargesAgain(t *testing.T) {
	onDBs(t, map[string]bool{"cleaned up": true, "there still": false}, func(t *testing.T, db *testDB, cleaned bool) {
		db.cleanUpAtOnce()
		for _, kind := range []policyOption{durable, ephemeral} {
			db.definePolicy("p", 10, 1, 24*time.Hour, kind, remember(time.Hour))
			first := db.acquireAt(t0, "p", "k", 2, "X")
			expired := t0.Add(time.Hour + time.Microsecond)
			require.Equal(t, replayed(first), db.acquireAt(t0.Add(time.Hour-time.Microsecond), "p", "k", 2, "X"))
			db.setClock(expired)
			if cleaned {
				_, keys := db.cleanup()
				require.EqualValues(t, 1, keys)
			}
			again := db.acquire("p", "k", 3, "X") // another cost: the old one is forgotten
			require.Equal(t, []any{true, false, int64(5)}, []any{again.Allowed, again.Replayed, again.Remaining})
			require.Equal(t, replayed(again), db.acquireAt(expired.Add(59*time.Minute), "p", "k", 3, "X"))
			db.dropPolicy("p")
		}
	})
}

func TestIdempotency_KeysBelongToTheirBucket(t *testing.T) {
	db := parallelDB(t, t0).policy("p", 10, 1, time.Second).policy("q", 10, 1, time.Second).policy("e", 10, 1, time.Second, ephemeral)
	require.Equal(t, allowed(8, 2*time.Second, 10), db.acquire("p", "tenant 1", 2, "X"))
	for _, other := range [][2]string{{"p", "tenant 2"}, {"q", "tenant 1"}, {"e", "tenant 1"}} {
		require.Equal(t, allowed(7, 3*time.Second, 10), db.acquire(other[0], other[1], 3, "X"), other)
	}
}

func TestIdempotency_CostZeroNeitherLooksNorRemembers(t *testing.T) {
	db := parallelDB(t, t0).policy("p", 10, 1, time.Second)
	require.Equal(t, allowed(10, 0, 10), db.acquire("p", "k", 0, "X"))
	require.Equal(t, allowed(8, 2*time.Second, 10), db.acquire("p", "k", 2, "X"))
	require.Equal(t, allowed(8, 2*time.Second, 10), db.acquire("p", "k", 0, "X"), "not replayed, not RL002")
}

func TestIdempotency_ARollbackForgetsTheKeyWithTheTokens(t *testing.T) {
	db := parallelDB(t, t0).policy("p", 10, 1, time.Second)
	first := allowed(8, 2*time.Second, 10)
	s := db.begin()
	require.Equal(t, first, s.acquire("p", "k", 2, "X"))
	require.Equal(t, replayed(first), s.acquire("p", "k", 2, "X"))
	s.exec("rollback")
	s.exec("begin; savepoint s")
	require.Equal(t, first, s.acquire("p", "k", 2, "X"))
	s.exec("rollback to s")
	require.Equal(t, first, s.acquire("p", "k", 2, "X"))
	s.exec("commit")
	require.Equal(t, replayed(first), db.acquire("p", "k", 2, "X"))
}

func TestIdempotency_DropRemovesKeys(t *testing.T) {
	db := parallelDB(t, t0)
	for _, kind := range []policyOption{durable, ephemeral} {
		db.definePolicy("p", 10, 1, time.Second, kind)
		first := db.acquire("p", "k", 2, "X")
		db.dropPolicy("p")
		require.Empty(t, db.rows())
		db.definePolicy("p", 10, 1, time.Second, kind)
		require.Equal(t, first, db.acquire("p", "k", 2, "X"))
		db.dropPolicy("p")
	}
}

func TestIdempotency_TwentyCallersWithOneKeyAreChargedOnce(t *testing.T) {
	t.Parallel()
	for name, buckets := range map[string]int{"of one bucket": 1, "of several": 3} {
		for _, rows := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", with rows: ", rows), func(t *testing.T) {
				t.Parallel()
				db := newCrowdDB(t, 20)
				db.setClock(t0)
				for _, capacity := range []int64{10, 2} { // what five grants would take, or one
					for _, kind := range []policyOption{durable, ephemeral} {
						db.definePolicy("p", capacity, 1, time.Second, kind)
						for i := range 25 {
							keys := []string{fmt.Sprint("k", i), fmt.Sprint("l", i), fmt.Sprint("m", i)}[:buckets]
							for _, key := range keys {
								if rows {
									giveRow(db, key)
								}
							}
							answers := db.together(20, func(caller int, q querier) (decision, error) {
								if buckets == 1 {
									return acquire(q, "p", keys[0], 2, "X")
								}
								first := caller % buckets
								w, err := twoOfEach("X", slices.Concat(keys[first:], keys[:first])...).acquireAll(q)
								return w.Decision, err
							})
							require.Equal(t, 19, count(answers, isReplayed))
							for _, d := range answers {
								require.Equal(t, replayed(allowed(capacity-2, 2*time.Second, capacity)), replayed(d))
							}
							for _, key := range keys {
								require.Equal(t, capacity-2, db.left("p", key))
							}
						}
						db.dropPolicy("p")
					}
				}
			})
		}
	}
}

// twoOfEach is a request of two tokens of each bucket.
func twoOfEach(idempotencyKey string, keys ...string) wholeRequest {
	r := wholeRequest{idempotencyKey: idempotencyKey}
	for _, key := range keys {
		r.charges = append(r.charges, chargeOf("p", key, 2))
	}
	return r
}

func TestIdempotency_OneChargeWhileTheBucketFills(t *testing.T) {
	inParallel(t, map[string]func(db *testDB, key string) error{
		"by a refund": func(db *testDB, key string) error { return failure(refund(db.Pool, "p", key, 10)) },
		"by the clock": func(db *testDB, _ string) error {
			_, err := db.Pool.Exec(context.Background(), "update public.test_clock set now = $1", t0.Add(10*time.Second))
			return err
		},
	}, func(t *testing.T, fill func(db *testDB, key string) error) {
		db := newCrowdDB(t, 21).policy("p", 10, 1, time.Second)
		for i := range 20 {
			key := fmt.Sprint("k", i)
			db.acquireAt(t0, "p", key, 10)
			// Five requests come before the tokens, and are repeated among twenty that come meanwhile.
			early := db.together(5, func(_ int, q querier) (decision, error) { return acquire(q, "p", key, 7, "X") })
			require.Zero(t, count(early, isAllowed))
			filled := make(chan error)
			go func() { filled <- fill(db, key) }()
			meanwhile := db.together(20, func(_ int, q querier) (decision, error) { return acquire(q, "p", key, 7, "X") })
			require.NoError(t, <-filled)
			late := db.together(5, func(_ int, q querier) (decision, error) { return acquire(q, "p", key, 7, "X") })
			require.Equal(t, 5, count(late, isAllowed))
			granted := slices.DeleteFunc(append(meanwhile, late...), func(d decision) bool { return !d.Allowed })
			for _, d := range granted {
				require.Equal(t, replayed(allowed(3, 7*time.Second, 10)), replayed(d))
			}
			require.Equal(t, len(granted)-1, count(granted, isReplayed), "one is charged")
			require.EqualValues(t, 3, db.left("p", key))
		}
	})
}

// Every branch of the protocol in sql/acquire.sql, in the one order of events that needs it: locks and gates hold the calls where they have to
// be. Each race is also run without its branch, and must then come out wrong, and in the way that is expected.

// An outcome is the result of a race.
type outcome struct {
	answer decision // of the last caller
	state  string   // or its SQLSTATE
	left   int64    // in the bucket
}

type race struct {
	name     string
	capacity int64
	gate     string // a pattern: the caller stops before it until the others are done
	function string // that the gate and the mutations are in; empty for ratelimit_acquire
	play     func(db *testDB, g *gate) *pending
	want     outcome
	without  []removal
}

// A removal is a branch taken away, and the outcome without it.
type removal struct {
	mutation
	want outcome
}

// The places of the durable twin that mutations change.
const (
	readKey   = `select k\.\* into v_first from idempotency_keys as k [^;]*;`
	replay    = ` then return answer_again\(v_first, v_cost, v_now, v_policy\.shadow\); end if;`
	findKey   = readKey + ` if v_first\.expires_at > v_now` + replay
	firstLook = findKey + ` end if; loop`
	afterLook = `if v_wanted > 0 then update buckets`
	readAgain = findKey + ` end if; if v_policy\.shadow and`
	giveBack  = `update buckets as b set level = b\.level \+ v_wanted [^;]*;`
	stillFits = `(update buckets as b [^;]* b\.key = v_key) and [^;]* >= v_wanted returning`
	whenGone  = `(insert into buckets [^;]*) on conflict on constraint buckets_pkey do nothing`
	overwrite = `(insert into idempotency_keys as k [^;]*) where k\.expires_at <= v_now`
	notFitted = `v_now := clock\(\);(?: [^;]*;)*? select [^;]* from buckets as b`
)

var (
	withoutFirstLook    = mutation{firstLook, "end if; loop"}
	withoutReadAgain    = mutation{readAgain, "end if; if v_policy.shadow and"}
	withoutGiveBack     = mutation{giveBack, ""}
	withoutCondition    = mutation{stillFits, "$1 returning"}
	withoutFirstUse     = mutation{whenGone, "$1"}
	withoutExpiry       = mutation{`(` + readKey + ` if )v_first\.expires_at > v_now(` + replay + ` end if; loop)`, "${1}found$2"}
	overwritingLiveKeys = mutation{overwrite, "$1"}
	overwritingNoKeys   = mutation{overwrite, "$1 where false"}
	keyReadBeforeBucket = mutation{`(` + notFitted + `(?s:.*?))(` + findKey + `)( end if; if v_policy\.shadow and)`, "if v_idempotency_key is not null then $2 end if; $1$3"}
)

// overtaken runs the events while the caller waits at the gate.
func overtaken(events func(db *testDB)) func(db *testDB, g *gate) *pending {
	return func(db *testDB, g *gate) *pending {
		caller := g.session().startAcquire("p", "k", 2, "X").blockedBy(g.keeper)
		events(db)
		g.open()
		return caller
	}
}

// behind starts the caller while a transaction that has acquired is open, and then ends that.
func behind(end string, cost int64, before func(db *testDB)) func(db *testDB, _ *gate) *pending {
	return func(db *testDB, _ *gate) *pending {
		before(db)
		holder := db.begin().take("p", "k", cost, "X")
		caller := db.session().startAcquire("p", "k", 2, "X").blockedBy(holder)
		holder.exec(end)
		return caller
	}
}

func atOnce(before func(db *testDB)) func(db *testDB, _ *gate) *pending {
	return func(db *testDB, _ *gate) *pending {
		before(db)
		return db.hasty().startAcquire("p", "k", 2, "X")
	}
}

func unused(*testDB) {}

func known(db *testDB) { giveRow(db, "k") }

// The bucket has a row and is full, as good as unused otherwise.
func giveRow(db *testDB, key string) {
	db.acquire("p", key, 2)
	db.refundAt(t0, "p", key, 2)
}

func TestIdempotency_Races(t *testing.T) {
	t.Parallel()
	charged := allowed(8, 2*second, 10)
	for _, r := range []race{
		{name: "a known key is replayed though another holds the bucket", capacity: 10,
			play: func(db *testDB, _ *gate) *pending {
				db.acquire("p", "k", 2, "X")
				db.begin().take("p", "k", 1)
				return db.hasty().startAcquire("p", "k", 2, "X")
			},
			want: outcome{answer: replayed(charged), left: 8}, without: []removal{{withoutFirstLook, outcome{state: "55P03", left: 8}}}},
		{name: "another took what was left, under no key or another", capacity: 3,
			play: func(db *testDB, _ *gate) *pending {
				known(db)
				holder := db.begin().take("p", "k", 2, "Y")
				caller := db.session().startAcquire("p", "k", 2, "X").blockedBy(holder)
				holder.exec("commit")
				return caller
			},
			want:    outcome{answer: denied(1, second, 2*second, 3), left: 1},
			without: []removal{{withoutCondition, outcome{answer: allowed(-1, 4*second, 3), left: -1}}}},
		{name: "the same request came first, and there is enough for both", capacity: 10, play: behind("commit", 2, known),
			want: outcome{answer: replayed(charged), left: 8},
			without: []removal{{withoutGiveBack, outcome{answer: replayed(charged), left: 6}},
				{overwritingLiveKeys, outcome{answer: allowed(6, 4*second, 10), left: 6}}}},
		{name: "the same request came first and took all there was", capacity: 2, play: behind("commit", 2, known),
			want:    outcome{answer: replayed(allowed(0, 2*second, 2)), left: 0},
			without: []removal{{withoutReadAgain, outcome{answer: denied(0, 2*second, 2*second, 2), left: 0}}}},
		{name: "the same request came first and was rolled back", capacity: 2, play: behind("rollback", 2, known),
			want: outcome{answer: allowed(0, 2*second, 2), left: 0}},
		{name: "the same request with another cost came first, and there is enough for both", capacity: 10, play: behind("commit", 3, known),
			want: outcome{state: "RL002", left: 7}, without: []removal{{overwritingLiveKeys, outcome{answer: allowed(5, 5*second, 10), left: 5}}}},
		{name: "the same request with another cost came first and took all there was", capacity: 3, play: behind("commit", 3, known),
			want:    outcome{state: "RL002", left: 0},
			without: []removal{{withoutReadAgain, outcome{answer: denied(0, 2*second, 3*second, 3), left: 0}}}},
		{name: "the same request was the bucket's first use, and there is enough for both", capacity: 10, play: behind("commit", 2, unused),
			want:    outcome{answer: replayed(charged), left: 8},
			without: []removal{{withoutFirstUse, outcome{state: "23505", left: 8}}, {withoutGiveBack, outcome{answer: replayed(charged), left: 6}}}},
		{name: "the same request was the bucket's first use and took all there was", capacity: 2, play: behind("commit", 2, unused),
			want: outcome{answer: replayed(allowed(0, 2*second, 2)), left: 0},
			without: []removal{{withoutFirstUse, outcome{state: "23505", left: 0}},
				{withoutReadAgain, outcome{answer: denied(0, 2*second, 2*second, 2), left: 0}}}},
		{name: "the same request was the bucket's first use and was rolled back", capacity: 2, play: behind("rollback", 2, unused),
			want: outcome{answer: allowed(0, 2*second, 2), left: 0}},
		{name: "the same request came after the first look, and nobody waited", capacity: 2, gate: afterLook,
			play: overtaken(func(db *testDB) { db.acquire("p", "k", 2, "X") }), want: outcome{answer: replayed(allowed(0, 2*second, 2)), left: 0},
			without: []removal{{withoutReadAgain, outcome{answer: denied(0, 2*second, 2*second, 2), left: 0}}}},
		// Read the other way around, the bucket would show a grant of the key, and the key not.
		{name: "the same request was granted between update and look", capacity: 10, gate: notFitted,
			play: func(db *testDB, g *gate) *pending {
				db.acquire("p", "k", 10)
				return overtaken(func(db *testDB) {
					db.refundAt(t0, "p", "k", 3)
					db.acquire("p", "k", 2, "X")
				})(db, g)
			},
			want:    outcome{answer: replayed(allowed(1, 9*second, 10)), left: 1},
			without: []removal{{keyReadBeforeBucket, outcome{answer: denied(1, second, 9*second, 10), left: 1}}}},
		{name: "the same request came after the first look, and the bucket was reset since", capacity: 2, gate: afterLook,
			play: overtaken(func(db *testDB) {
				db.acquire("p", "k", 2, "X")
				db.reset("p", "k")
			}),
			want:    outcome{answer: replayed(allowed(0, 2*second, 2)), left: 2},
			without: []removal{{withoutGiveBack, outcome{answer: replayed(allowed(0, 2*second, 2)), left: 0}}}},
		{name: "the same request came after the first look, and the bucket was cleaned up since", capacity: 2, gate: afterLook,
			play: overtaken(func(db *testDB) {
				db.acquire("p", "k", 2, "X")
				db.setClock(t0.Add(time.Minute))
				buckets, keys := db.cleanup()
				require.Equal(db.t, [2]int64{1, 0}, [2]int64{buckets, keys})
			}),
			want: outcome{answer: replayed(allowed(0, 2*second, 2)), left: 2},
			without: []removal{{withoutGiveBack, outcome{answer: replayed(allowed(0, 2*second, 2)), left: 0}},
				{overwritingLiveKeys, outcome{answer: allowed(0, 2*second, 2), left: 0}}}},
		{name: "the bucket is reset by a transaction the caller waits for", capacity: 10,
			play: func(db *testDB, _ *gate) *pending {
				db.acquire("p", "k", 4, "Y")
				holder := db.begin().run("select ratelimit_reset('p', 'k')")
				caller := db.session().startAcquire("p", "k", 2, "X").blockedBy(holder)
				holder.exec("commit")
				return caller
			},
			want: outcome{answer: charged, left: 8}},
		{name: "the key has expired, whether or not the bucket has what it takes", capacity: 10,
			play: atOnce(func(db *testDB) {
				db.acquire("p", "k", 2, "X")
				db.setClock(t0.Add(time.Hour))
			}),
			want: outcome{answer: charged, left: 8},
			without: []removal{
				{withoutExpiry, outcome{answer: replayed(charged), left: 10}},
				{overwritingNoKeys, outcome{answer: replayed(charged), left: 10}}, // granted, and not charged
			}},
		{name: "the key has expired, and the same request came first", capacity: 10,
			play: behind("commit", 2, func(db *testDB) {
				db.acquire("p", "k", 2, "X")
				db.setClock(t0.Add(time.Hour))
			}),
			want: outcome{answer: replayed(charged), left: 8},
			without: []removal{{overwritingLiveKeys, outcome{answer: allowed(6, 4*second, 10), left: 6}},
				{withoutGiveBack, outcome{answer: replayed(charged), left: 6}}}},
		{name: "the expired key is being cleaned up", capacity: 10, play: behindCleanup("commit"),
			want: outcome{answer: allowed(5, 5*second, 10), left: 5}},
		{name: "the expired key is not cleaned up after all", capacity: 10, play: behindCleanup("rollback"),
			want:    outcome{answer: allowed(5, 5*second, 10), left: 5},
			without: []removal{{overwritingNoKeys, outcome{answer: replayed(allowed(8, 2*second, 10)), left: 7}}}},
	} {
		r.test(t)
	}
}

// The same about the steps of ratelimit_acquire_all.
func TestIdempotency_RacesOfSeveral(t *testing.T) {
	t.Parallel()
	const (
		look  = `if v_policy\.durable then select b\.level, b\.refilled_at into`
		again = `if v_idempotency_key is not null then if v_policy(?s:.*?) exit when not v_simple; end if;`
	)
	withoutAgain := mutation{again, ""}
	rows := func(db *testDB) {
		giveRow(db, "k")
		giveRow(db, "l")
	}
	behind := func(end string) func(db *testDB, _ *gate) *pending {
		return func(db *testDB, _ *gate) *pending {
			rows(db)
			holder := db.begin()
			_, err := twoOfEach("X", "k", "l").acquireAll(holder)
			require.NoError(db.t, err)
			caller := db.session().startAll(twoOfEach("X", "l", "k")).blockedBy(holder)
			holder.exec(end)
			return caller
		}
	}
	for _, r := range []race{
		{name: "the same request came first, and there is enough for both", capacity: 10, play: behind("commit"),
			want:    outcome{answer: replayed(allowed(8, 2*second, 10)), left: 8},
			without: []removal{{mutation{`'RL00T' or unique_violation then v_now`, "'RL00T' then v_now"}, outcome{state: "23505", left: 8}}}},
		{name: "the same request came first and took all there was", capacity: 2, play: behind("commit"),
			want:    outcome{answer: replayed(allowed(0, 2*second, 2)), left: 0},
			without: []removal{{withoutAgain, outcome{answer: denied(0, 2*second, 2*second, 2), left: 0}}}},
		{name: "the same request came first and was rolled back", capacity: 2, play: behind("rollback"),
			want: outcome{answer: allowed(0, 2*second, 2), left: 0}},
		// Read the other way around, the bucket would show a grant of the key, and the key not.
		{name: "the same request was granted before the look", capacity: 10, gate: look,
			play: func(db *testDB, g *gate) *pending {
				db.acquire("p", "k", 10)
				caller := g.session().startAll(twoOfEach("X", "k")).blockedBy(g.keeper)
				db.refundAt(t0, "p", "k", 3)
				db.acquire("p", "k", 2, "X")
				g.open()
				return caller
			},
			want:    outcome{answer: replayed(allowed(1, 9*second, 10)), left: 1},
			without: []removal{{mutation{`(` + look + `(?s:.*?))(` + again + `)`, "$2 $1"}, outcome{answer: denied(1, second, 9*second, 10), left: 1}}}},
		{name: "the second bucket alone knows the key", capacity: 10,
			play: func(db *testDB, _ *gate) *pending {
				rows(db)
				db.acquire("p", "l", 2, "X")
				return db.session().startAll(twoOfEach("X", "k", "l"))
			},
			want:    outcome{answer: allowed(8, 2*second, 10), left: 8},
			without: []removal{{mutation{`'RL00T' or unique_violation then v_now`, "'RL00T' then v_now"}, outcome{state: "23505", left: 10}}}},
	} {
		r.function = "ratelimit_acquire_all"
		r.test(t)
	}
}

func (r race) test(t *testing.T) {
	t.Run(r.name, func(t *testing.T) {
		db := parallelDB(t).cleanUpAtOnce()
		require.Equal(t, r.want, r.run(db, durable))
		if r.gate == "" {
			require.Equal(t, r.want, r.run(db, ephemeral))
		}
		for _, removal := range r.without {
			require.NotEqual(t, r.want, removal.want)
			require.Equal(t, removal.want, r.run(db, durable, removal.mutation), "without %s", removal.pattern)
		}
	})
}

// What a request leaves behind does not depend on who decides it: the steps of ratelimit_acquire_all, or acquire_batch.
func TestIdempotency_ARequestOfSeveralIsRememberedAlikeOnEveryWay(t *testing.T) {
	t.Parallel()
	const rows = `select json_agg(to_jsonb(r) order by r.tableoid, r.policy_id) from (
		select k.tableoid::regclass::text, k.* from ratelimit.idempotency_keys as k union all
		select k.tableoid::regclass::text, k.* from ratelimit.ephemeral_idempotency_keys as k) as r`
	for name, before := range map[string]func(db *testDB, charges []model.Charge){
		"by the stored levels": func(*testDB, []model.Charge) {},
		"by the refill": func(db *testDB, charges []model.Charge) {
			charges[0].Cost = 10
			db.setClock(t0.Add(5 * time.Second))
		},
		"by an override":                     func(db *testDB, _ []model.Charge) { db.exec("select ratelimit_override('p', 'k', 30, 7, '3 seconds')") },
		"and a shadow policy does not cover": func(_ *testDB, charges []model.Charge) { charges[3].Cost = 20 },
	} {
		t.Run(name, func(t *testing.T) {
			db := parallelDB(t, t0).policy("p", 10, 1, time.Second, remember(time.Hour))
			db.definePolicy("ephemeral", 10, 2, time.Second, ephemeral, remember(time.Minute))
			db.definePolicy("filled by hand", 10, 0, time.Second)
			db.exec("select ratelimit_define_policy('shadow', 10, 1, '1 second', shadow => true)")
			r := wholeRequest{idempotencyKey: "X"}
			for _, policy := range []string{"p", "ephemeral", "filled by hand", "shadow"} {
				db.acquire(policy, "k", 3)
				r.charges = append(r.charges, chargeOf(policy, "k", 2))
			}
			before(db, r.charges)
			left := func(ask func(s *session) (whole, error)) (left string) {
				s := db.begin()
				w, err := ask(s)
				require.NoError(t, err)
				require.True(t, w.Allowed)
				require.NoError(t, s.QueryRow(context.Background(), rows).Scan(&left))
				s.exec("rollback")
				return left
			}
			want := left(func(s *session) (whole, error) {
				answers, err := acquirePacked(s, []wholeRequest{r}, true)
				if err != nil {
					return whole{}, err
				}
				return *answers[0].Whole, nil
			})
			require.JSONEq(t, want, left(func(s *session) (whole, error) {
				s.exec("alter function ratelimit.acquire_batch rename to nobody_calls_it")
				return r.acquireAll(s)
			}))
		})
	}
}

// behindCleanup starts the caller while a clean-up that removed its expired key is open.
func behindCleanup(end string) func(db *testDB, _ *gate) *pending {
	return func(db *testDB, _ *gate) *pending {
		db.acquire("p", "k", 2, "X")
		db.setClock(t0.Add(time.Hour))
		db.reset("p", "k")
		db.acquire("p", "k", 3) // the bucket is in use, and not due
		holder := db.begin().run("select ratelimit_cleanup()")
		caller := db.session().startAcquire("p", "k", 2, "X").blockedBy(holder)
		holder.exec(end)
		return caller
	}
}

func (r race) run(db *testDB, kind policyOption, without ...mutation) (o outcome) {
	db.t.Helper()
	db.at(t0).policy("p", r.capacity, 1, time.Second, kind, remember(time.Hour))
	function := cmp.Or(r.function, "ratelimit_acquire")
	for _, m := range without {
		defer db.mutate(m, function)()
	}
	var g *gate
	if r.gate != "" {
		g = db.gateBefore(r.gate, function)
		defer g.remove()
	}
	answer, err := r.play(db, g).result()
	if o.state = sqlState(err); o.state == "" {
		o.answer = db.must(answer, err)
	}
	o.left = db.left("p", "k")
	db.dropPolicy("p")
	return o
}
