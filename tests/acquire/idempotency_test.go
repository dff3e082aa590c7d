package acquire

import (
	"cmp"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// twoOfEach is a request of two tokens of each bucket.
func twoOfEach(idempotencyKey string, keys ...string) kit.WholeRequest {
	r := kit.WholeRequest{IdempotencyKey: idempotencyKey}
	for _, key := range keys {
		r.Charges = append(r.Charges, kit.ChargeOf("p", key, 2))
	}
	return r
}

// Every branch of the protocol in sql/acquire.sql, in the one order of events that needs it: locks and gates hold the calls where they have to
// be. Each race is also run without its branch, and must then come out wrong, and in the way that is expected.

// An outcome is the result of a race.
type outcome struct {
	answer kit.Decision // of the last caller
	state  string       // or its SQLSTATE
	left   int64        // in the bucket
}

type race struct {
	name     string
	capacity int64
	gate     string // a pattern: the caller stops before it until the others are done
	function string // that the gate and the mutations are in; empty for ratelimit_acquire
	play     func(db *kit.TestDB, g *kit.Gate) *kit.Pending
	want     outcome
	without  []removal
}

// A removal is a branch taken away, and the outcome without it.
type removal struct {
	kit.Mutation
	want outcome
}

var (
	withoutFirstLook    = kit.Mutation{Pattern: kit.FirstLook, Replacement: "exit plain"}
	withoutReadAgain    = kit.Mutation{Pattern: kit.ReadAgain, Replacement: "end if; end if; return denied_by_rate"}
	withoutLastRead     = kit.Mutation{Pattern: kit.FindKey + ` end if; if v_policy\.shadow and`, Replacement: "end if; if v_policy.shadow and"}
	withoutGiveBack     = kit.Mutation{Pattern: kit.GiveBack, Replacement: ""}
	withoutCondition    = kit.Mutation{Pattern: kit.StillFits, Replacement: "$1 returning"}
	withoutFirstUse     = kit.Mutation{Pattern: kit.WhenGone, Replacement: "$1"}
	withoutExpiry       = kit.Mutation{Pattern: `(` + kit.ReadKey + ` if )v_first\.expires_at > v_now( then if )`, Replacement: "${1}v_first.cost > 0$2"}
	overwritingLiveKeys = kit.Mutation{Pattern: kit.Overwrite, Replacement: "if false$1;"}
	overwritingNoKeys   = kit.Mutation{Pattern: kit.Overwrite, Replacement: "if true$1 and false;"}
	keyReadBeforeBucket = kit.Mutation{
		Pattern:     `(` + kit.NotFitted + `(?s:.*?))(` + kit.FindAgain + `)(` + kit.Denies + `)`,
		Replacement: "if v_idempotency_key is not null then $2 end if; $1 end if; if false then null; $3"}
)

// overtaken runs the events while the caller waits at the gate.
func overtaken(events func(db *kit.TestDB)) func(db *kit.TestDB, g *kit.Gate) *kit.Pending {
	return func(db *kit.TestDB, g *kit.Gate) *kit.Pending {
		caller := g.Session().StartAcquire("p", "k", 2, "X").BlockedBy(g.Keeper)
		events(db)
		g.Open()
		return caller
	}
}

// behind starts the caller while a transaction that has acquired is open, and then ends that.
func behind(end string, cost int64, before func(db *kit.TestDB)) func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
	return func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
		before(db)
		holder := db.Begin().Take("p", "k", cost, "X")
		caller := db.Session().StartAcquire("p", "k", 2, "X").BlockedBy(holder)
		holder.Execute(end)
		return caller
	}
}

func unused(*kit.TestDB) {}

func known(db *kit.TestDB) { giveRow(db, "k") }

// The bucket has a row and is full, as good as unused otherwise.
func giveRow(db *kit.TestDB, key string) {
	db.Acquire("p", key, 2)
	db.RefundAt(kit.T0, "p", key, 2)
}

func TestIdempotency_Races(t *testing.T) {
	t.Parallel()
	charged := kit.Allowed(8, 2*kit.Second, 10)
	for _, r := range []race{
		{name: "a known key is replayed though another holds the bucket", capacity: 10,
			play: func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
				db.Acquire("p", "k", 2, "X")
				db.Begin().Take("p", "k", 1)
				return db.Hasty().StartAcquire("p", "k", 2, "X")
			},
			want: outcome{answer: kit.Replayed(charged), left: 8}, without: []removal{{withoutFirstLook, outcome{state: "55P03", left: 8}}}},
		{name: "another took what was left, under no key or another", capacity: 3,
			play: func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
				known(db)
				holder := db.Begin().Take("p", "k", 2, "Y")
				caller := db.Session().StartAcquire("p", "k", 2, "X").BlockedBy(holder)
				holder.Execute("commit")
				return caller
			},
			want:    outcome{answer: kit.Denied(1, kit.Second, 2*kit.Second, 3), left: 1},
			without: []removal{{withoutCondition, outcome{answer: kit.Allowed(-1, 4*kit.Second, 3), left: -1}}}},
		{name: "the same request came first, and there is enough for both", capacity: 10, play: behind("commit", 2, known),
			want: outcome{answer: kit.Replayed(charged), left: 8},
			without: []removal{{withoutGiveBack, outcome{answer: kit.Replayed(charged), left: 6}},
				{overwritingLiveKeys, outcome{answer: kit.Allowed(6, 4*kit.Second, 10), left: 6}}}},
		{name: "the same request came first and took all there was", capacity: 2, play: behind("commit", 2, known),
			want:    outcome{answer: kit.Replayed(kit.Allowed(0, 2*kit.Second, 2)), left: 0},
			without: []removal{{withoutReadAgain, outcome{answer: kit.Denied(0, 2*kit.Second, 2*kit.Second, 2), left: 0}}}},
		{name: "the same request came first and was rolled back", capacity: 2, play: behind("rollback", 2, known),
			want: outcome{answer: kit.Allowed(0, 2*kit.Second, 2), left: 0}},
		{name: "the same request with another cost came first, and there is enough for both", capacity: 10, play: behind("commit", 3, known),
			want: outcome{state: "RL002", left: 7}, without: []removal{{overwritingLiveKeys, outcome{answer: kit.Allowed(5, 5*kit.Second, 10), left: 5}}}},
		{name: "the same request with another cost came first and took all there was", capacity: 3, play: behind("commit", 3, known),
			want:    outcome{state: "RL002", left: 0},
			without: []removal{{withoutReadAgain, outcome{answer: kit.Denied(0, 2*kit.Second, 3*kit.Second, 3), left: 0}}}},
		{name: "the same request was the bucket's first use, and there is enough for both", capacity: 10, play: behind("commit", 2, unused),
			want:    outcome{answer: kit.Replayed(charged), left: 8},
			without: []removal{{withoutFirstUse, outcome{state: "23505", left: 8}}, {withoutGiveBack, outcome{answer: kit.Replayed(charged), left: 6}}}},
		{name: "the same request was the bucket's first use and took all there was", capacity: 2, play: behind("commit", 2, unused),
			want: outcome{answer: kit.Replayed(kit.Allowed(0, 2*kit.Second, 2)), left: 0},
			without: []removal{{withoutFirstUse, outcome{state: "23505", left: 0}},
				{withoutLastRead, outcome{answer: kit.Denied(0, 2*kit.Second, 2*kit.Second, 2), left: 0}}}},
		{name: "the same request was the bucket's first use and was rolled back", capacity: 2, play: behind("rollback", 2, unused),
			want: outcome{answer: kit.Allowed(0, 2*kit.Second, 2), left: 0}},
		{name: "the same request came after the first look, and nobody waited", capacity: 2, gate: kit.AfterLook,
			play: overtaken(func(db *kit.TestDB) { db.Acquire("p", "k", 2, "X") }), want: outcome{answer: kit.Replayed(kit.Allowed(0, 2*kit.Second, 2)), left: 0},
			without: []removal{{withoutReadAgain, outcome{answer: kit.Denied(0, 2*kit.Second, 2*kit.Second, 2), left: 0}}}},
		// Read the other way around, the bucket would show a grant of the key, and the key not.
		{name: "the same request was granted between update and look", capacity: 10, gate: kit.NotFitted,
			play: func(db *kit.TestDB, g *kit.Gate) *kit.Pending {
				db.Acquire("p", "k", 10)
				return overtaken(func(db *kit.TestDB) {
					db.RefundAt(kit.T0, "p", "k", 3)
					db.Acquire("p", "k", 2, "X")
				})(db, g)
			},
			want:    outcome{answer: kit.Replayed(kit.Allowed(1, 9*kit.Second, 10)), left: 1},
			without: []removal{{keyReadBeforeBucket, outcome{answer: kit.Denied(1, kit.Second, 9*kit.Second, 10), left: 1}}}},
		{name: "the same request came after the first look, and the bucket was reset since", capacity: 2, gate: kit.AfterLook,
			play: overtaken(func(db *kit.TestDB) {
				db.Acquire("p", "k", 2, "X")
				db.Reset("p", "k")
			}),
			want:    outcome{answer: kit.Replayed(kit.Allowed(0, 2*kit.Second, 2)), left: 2},
			without: []removal{{withoutGiveBack, outcome{answer: kit.Replayed(kit.Allowed(0, 2*kit.Second, 2)), left: 0}}}},
		{name: "the same request came after the first look, and the bucket was cleaned up since", capacity: 2, gate: kit.AfterLook,
			play: overtaken(func(db *kit.TestDB) {
				db.Acquire("p", "k", 2, "X")
				db.SetClock(kit.T0.Add(time.Minute))
				require.Equal(db.T, kit.Deleted{Buckets: 1}, db.Cleanup())
			}),
			want: outcome{answer: kit.Replayed(kit.Allowed(0, 2*kit.Second, 2)), left: 2},
			without: []removal{{withoutGiveBack, outcome{answer: kit.Replayed(kit.Allowed(0, 2*kit.Second, 2)), left: 0}},
				{overwritingLiveKeys, outcome{answer: kit.Allowed(0, 2*kit.Second, 2), left: 0}}}},
		{name: "the bucket is reset by a transaction the caller waits for", capacity: 10,
			play: func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
				db.Acquire("p", "k", 4, "Y")
				holder := db.Begin().Execute("select ratelimit_reset('p', 'k')")
				caller := db.Session().StartAcquire("p", "k", 2, "X").BlockedBy(holder)
				holder.Execute("commit")
				return caller
			},
			want: outcome{answer: charged, left: 8}},
		{name: "the key has expired, whether or not the bucket has what it takes", capacity: 10,
			play: func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
				db.Acquire("p", "k", 2, "X")
				db.SetClock(kit.T0.Add(time.Hour))
				return db.Hasty().StartAcquire("p", "k", 2, "X")
			},
			want: outcome{answer: charged, left: 8},
			without: []removal{
				{withoutExpiry, outcome{answer: kit.Replayed(charged), left: 10}},
				{overwritingNoKeys, outcome{answer: kit.Replayed(charged), left: 10}}, // granted, and not charged
			}},
		{name: "the key has expired, and the same request came first", capacity: 10,
			play: behind("commit", 2, func(db *kit.TestDB) {
				db.Acquire("p", "k", 2, "X")
				db.SetClock(kit.T0.Add(time.Hour))
			}),
			want: outcome{answer: kit.Replayed(charged), left: 8},
			without: []removal{{overwritingLiveKeys, outcome{answer: kit.Allowed(6, 4*kit.Second, 10), left: 6}},
				{withoutGiveBack, outcome{answer: kit.Replayed(charged), left: 6}}}},
		{name: "the expired key is being cleaned up", capacity: 10, play: behindCleanup("commit"),
			want: outcome{answer: kit.Allowed(5, 5*kit.Second, 10), left: 5}},
		{name: "the expired key is not cleaned up after all", capacity: 10, play: behindCleanup("rollback"),
			want:    outcome{answer: kit.Allowed(5, 5*kit.Second, 10), left: 5},
			without: []removal{{overwritingNoKeys, outcome{answer: kit.Replayed(kit.Allowed(8, 2*kit.Second, 10)), left: 7}}}},
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
	withoutAgain := kit.Mutation{Pattern: again, Replacement: ""}
	rows := func(db *kit.TestDB) {
		giveRow(db, "k")
		giveRow(db, "l")
	}
	behind := func(end string) func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
		return func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
			rows(db)
			holder := db.Begin()
			require.NoError(db.T, kit.ErrorOf(twoOfEach("X", "k", "l").AcquireAll(holder)))
			caller := db.Session().StartAll(twoOfEach("X", "l", "k")).BlockedBy(holder)
			holder.Execute(end)
			return caller
		}
	}
	for _, r := range []race{
		{name: "the same request came first, and there is enough for both", capacity: 10, play: behind("commit"),
			want:    outcome{answer: kit.Replayed(kit.Allowed(8, 2*kit.Second, 10)), left: 8},
			without: []removal{{kit.Mutation{Pattern: `'RL00T' or unique_violation then v_now`, Replacement: "'RL00T' then v_now"}, outcome{state: "23505", left: 8}}}},
		{name: "the same request came first and took all there was", capacity: 2, play: behind("commit"),
			want:    outcome{answer: kit.Replayed(kit.Allowed(0, 2*kit.Second, 2)), left: 0},
			without: []removal{{withoutAgain, outcome{answer: kit.Denied(0, 2*kit.Second, 2*kit.Second, 2), left: 0}}}},
		{name: "the same request came first and was rolled back", capacity: 2, play: behind("rollback"),
			want: outcome{answer: kit.Allowed(0, 2*kit.Second, 2), left: 0}},
		// Read the other way around, the bucket would show a grant of the key, and the key not.
		{name: "the same request was granted before the look", capacity: 10, gate: look,
			play: func(db *kit.TestDB, g *kit.Gate) *kit.Pending {
				db.Acquire("p", "k", 10)
				caller := g.Session().StartAll(twoOfEach("X", "k")).BlockedBy(g.Keeper)
				db.RefundAt(kit.T0, "p", "k", 3)
				db.Acquire("p", "k", 2, "X")
				g.Open()
				return caller
			},
			want:    outcome{answer: kit.Replayed(kit.Allowed(1, 9*kit.Second, 10)), left: 1},
			without: []removal{{kit.Mutation{Pattern: `(` + look + `(?s:.*?))(` + again + `)`, Replacement: "$2 $1"}, outcome{answer: kit.Denied(1, kit.Second, 9*kit.Second, 10), left: 1}}}},
		{name: "the second bucket alone knows the key", capacity: 10,
			play: func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
				rows(db)
				db.Acquire("p", "l", 2, "X")
				return db.Session().StartAll(twoOfEach("X", "k", "l"))
			},
			want:    outcome{answer: kit.Allowed(8, 2*kit.Second, 10), left: 8},
			without: []removal{{kit.Mutation{Pattern: `'RL00T' or unique_violation then v_now`, Replacement: "'RL00T' then v_now"}, outcome{state: "23505", left: 10}}}},
	} {
		r.function = "ratelimit_acquire_all"
		r.test(t)
	}
}

func (r race) test(t *testing.T) {
	t.Run(r.name, func(t *testing.T) {
		db := kit.ParallelDB(t).CleanUpAtOnce()
		require.Equal(t, r.want, r.run(db, kit.Durable))
		if r.gate == "" {
			require.Equal(t, r.want, r.run(db, kit.Ephemeral))
		}
		for _, removal := range r.without {
			require.NotEqual(t, r.want, removal.want)
			require.Equal(t, removal.want, r.run(db, kit.Durable, removal.Mutation), "without %s", removal.Pattern)
		}
	})
}

// What a request leaves behind does not depend on who decides it: the steps of ratelimit_acquire_all, or acquire_batch.
func TestIdempotency_ARequestOfSeveralIsRememberedAlikeOnEveryWay(t *testing.T) {
	t.Parallel()
	const rows = `select json_agg(to_jsonb(r) order by r.tableoid, r.policy_id) from (
		select k.tableoid::regclass::text, k.* from ratelimit.idempotency_keys as k union all
		select k.tableoid::regclass::text, k.* from ratelimit.ephemeral_idempotency_keys as k) as r`
	for name, before := range map[string]func(db *kit.TestDB, charges []model.Charge){
		"by the stored levels": func(*kit.TestDB, []model.Charge) {},
		"by the refill": func(db *kit.TestDB, charges []model.Charge) {
			charges[0].Cost = 10
			db.SetClock(kit.T0.Add(5 * time.Second))
		},
		"by an override": func(db *kit.TestDB, _ []model.Charge) {
			db.Execute("select ratelimit_override('p', 'k', 30, 7, '3 seconds')")
		},
		"and a shadow policy does not cover": func(_ *kit.TestDB, charges []model.Charge) { charges[3].Cost = 20 },
	} {
		t.Run(name, func(t *testing.T) {
			db := kit.ParallelDB(t, kit.T0).Policy("p", 10, 1, time.Second, kit.Remember(time.Hour))
			db.DefinePolicy("ephemeral", 10, 2, time.Second, kit.Ephemeral, kit.Remember(time.Minute))
			db.DefinePolicy("filled by hand", 10, 0, time.Second)
			db.Execute("select ratelimit_define_policy('shadow', 10, 1, '1 second', shadow => true)")
			r := kit.WholeRequest{IdempotencyKey: "X"}
			for _, policy := range []string{"p", "ephemeral", "filled by hand", "shadow"} {
				db.Acquire(policy, "k", 3)
				r.Charges = append(r.Charges, kit.ChargeOf(policy, "k", 2))
			}
			before(db, r.Charges)
			left := func(ask func(s *kit.Session) (kit.Whole, error)) string {
				s := db.Begin()
				require.True(t, kit.NoError(ask(s))(t).Allowed)
				defer s.Execute("rollback")
				return kit.One[string](t, s, rows)
			}
			want := left(func(s *kit.Session) (kit.Whole, error) {
				answers, err := kit.AcquirePacked(s, []kit.WholeRequest{r}, true)
				if err != nil {
					return kit.Whole{}, err
				}
				return *answers[0].Whole, nil
			})
			require.JSONEq(t, want, left(func(s *kit.Session) (kit.Whole, error) {
				s.Execute("alter function ratelimit.acquire_batch rename to nobody_calls_it")
				return r.AcquireAll(s)
			}))
		})
	}
}

// behindCleanup starts the caller while a clean-up that removed its expired key is open.
func behindCleanup(end string) func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
	return func(db *kit.TestDB, _ *kit.Gate) *kit.Pending {
		db.Acquire("p", "k", 2, "X")
		db.SetClock(kit.T0.Add(time.Hour))
		db.Reset("p", "k")
		db.Acquire("p", "k", 3) // the bucket is in use, and not due
		holder := db.Begin().Execute("select ratelimit_cleanup()")
		caller := db.Session().StartAcquire("p", "k", 2, "X").BlockedBy(holder)
		holder.Execute(end)
		return caller
	}
}

func (r race) run(db *kit.TestDB, kind kit.PolicyOption, without ...kit.Mutation) (o outcome) {
	db.At(kit.T0).Policy("p", r.capacity, 1, time.Second, kind, kit.Remember(time.Hour))
	function := cmp.Or(r.function, "ratelimit_acquire")
	for _, m := range without {
		defer db.Mutate(m, function)()
	}
	var g *kit.Gate
	if r.gate != "" {
		g = db.GateBefore(r.gate, function)
		defer g.Remove()
	}
	answer, err := r.play(db, g).Result()
	if o.state = kit.SQLState(err); o.state == "" {
		o.answer = db.Must(answer, err)
	}
	o.left = db.Left("p", "k")
	db.DropPolicy("p")
	return o
}
