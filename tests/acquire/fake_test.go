package acquire

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Random calls, most of them wrong in one argument or two, are refused by both for the same reason, or change both alike.
func TestFake_RefusesWhatTheServerRefuses(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	db, fake, ctx := kit.NewDB(t), kit.NewFake(t), t.Context()
	limiters := []*client.Limiter{client.New(db.Pool), fake.Fake.Limiter}
	for i, s := range []kit.Subject{db, fake} {
		s.SetClock(kit.T0)
		s.DefinePolicy("p", 10, 1, kit.Second)
		s.DefinePolicy("q", 10, 1, kit.Second, kit.Ephemeral)
		s.Acquire("p", "p", 2, "p")
		require.NoError(t, limiters[i].DefinePolicy(ctx, client.Policy{Name: "quota", Capacity: 10, Period: client.Period{Months: 1}}))
		require.NoError(t, limiters[i].DefinePolicy(ctx, client.Policy{Name: "slots", Capacity: 10, Lease: time.Hour}))
	}
	random := rand.New(rand.NewPCG(kit.TestSeed(t), 0))
	refused := map[string]int{}
	const each = 60
	for range each {
		calls := fakeCalls(ctx, random)
		for _, name := range slices.Sorted(maps.Keys(calls)) {
			want, got := calls[name](limiters[0]), calls[name](limiters[1])
			require.Equal(t, want == nil, got == nil, "%s: %v, %v", name, want, got)
			if want == nil {
				continue
			}
			kind, _, _ := strings.Cut(name, " ")
			refused[kind]++
			for _, kind := range []error{client.ErrUnknownPolicy, client.ErrIdempotencyMismatch, client.ErrInvalidArgument} {
				require.Equal(t, errors.Is(want, kind), errors.Is(got, kind), "%s: %v, %v", name, want, got)
			}
			require.Equal(t, kit.SQLState(want), kit.SQLState(got), "%s: %v, %v", name, want, got)
			var wantErr, gotErr *pgconn.PgError
			if errors.As(want, &wantErr) && errors.As(got, &gotErr) && wantErr.Code != "22021" && // whose message shows the bytes
				gotErr.Message != "invalid argument" { // of a definition: the server names the argument
				require.Equal(t, wantErr.Message, gotErr.Message, name)
			}
		}
	}
	for name := range fakeCalls(ctx, random) {
		kind, _, _ := strings.Cut(name, " ")
		require.Greater(t, refused[kind], each/10, kind)
	}
	require.Equal(t, kit.NoError(limiters[0].Policies(ctx))(t), kit.NoError(fake.Fake.Policies(ctx))(t))
	require.Equal(t, kit.NoError(limiters[0].Overrides(ctx))(t), kit.NoError(fake.Fake.Overrides(ctx))(t))
}

// fakeCalls is one call of each method, by its name and its arguments. A choice that repeats a value is likelier.
func fakeCalls(ctx context.Context, random *rand.Rand) map[string]func(l *client.Limiter) error {
	name := func() string {
		return oneOf(random, "", strings.Repeat("é", 257), "\xff", "a\x00", "nobody", "p", "p", "p", "q", "q", "quota", "quota", "slots", "slots")
	}
	tokens := func() int64 {
		return oneOf[int64](random, -1, 0, 0, 0, 1, 10, 10_000, 10_001, 9_000_000_000_000, 9_000_000_000_001, math.MaxInt64, client.Zero)
	}
	span := func() time.Duration {
		return oneOf[time.Duration](random, 0, 0, 0, 0, -kit.Us, kit.Us, 999*kit.Us, 1000*kit.Us, time.Hour, 1<<63-808) // up to 292 years
	}
	zone := func() string {
		return oneOf(random, "", "", "", "UTC", "Europe/Berlin", "CET", "posix/Europe/Berlin", "europe/berlin", "Nowhere/Land", "a\x00/b")
	}
	anchor := func() time.Time {
		return oneOf(random, time.Time{}, time.Time{}, kit.T0, time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC),
			time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC))
	}
	period := func() client.Period {
		return client.Period{Days: oneOf(random, 0, 0, 0, 1, 365_250, 365_251), Months: oneOf(random, 0, 0, 0, 1, 12_000, 12_001, -1)}
	}
	choice := func() client.Choice { return oneOf(random, client.Keep, client.Keep, client.Yes, client.No, 7) }
	policy, key, cost, id := name(), name(), client.Cost(tokens()), client.IdempotencyKey(name())
	charges := []client.Charge{{Policy: "p", Key: "p"}, {Policy: policy, Key: key, Cost: cost}}
	many := slices.Repeat([]client.Charge{{Policy: "p", Key: "p"}}, oneOf(random, 0, 1000, 1001))
	p := client.Policy{
		Name: oneOf(random, policy, "other"), Capacity: tokens(), Refill: tokens(), Every: span(), Remember: span(), Durable: choice(), Stepped: choice(),
		Period: period(), TimeZone: zone(), Anchor: anchor(), Lease: span(),
	}
	// Each kind of policy with what it takes alone, so that one wrong field is met, too.
	bucket := client.Policy{
		Name: p.Name, Capacity: p.Capacity, Refill: p.Refill, Every: p.Every, Remember: p.Remember, Durable: p.Durable, Stepped: p.Stepped,
	}
	quota := client.Policy{Name: p.Name, Capacity: p.Capacity, Period: p.Period, TimeZone: p.TimeZone, Anchor: p.Anchor, Durable: p.Durable}
	slots := client.Policy{Name: p.Name, Capacity: p.Capacity, Lease: p.Lease}
	o := client.Override{
		Policy: policy, Key: key, Capacity: tokens(), Refill: oneOf(random, 0, tokens()), Every: oneOf(random, 0, span()),
		TimeZone: zone(), Anchor: anchor(), Lease: oneOf(random, 0, span()), ExpiresAt: kit.T0.Add(span()),
	}
	rows := oneOf(random, client.MaxRows(-1), client.MaxRows(0), client.MaxRows(1))
	about := fmt.Sprintf(" %q %q %v", policy, key, charges[1].Cost)
	return map[string]func(l *client.Limiter) error{
		"acquire" + about: func(l *client.Limiter) error { return kit.ErrorOf(l.Acquire(ctx, policy, key, cost, id)) },
		"plain" + about:   func(l *client.Limiter) error { return kit.ErrorOf(l.Acquire(ctx, policy, key, cost)) },
		"all" + about:     func(l *client.Limiter) error { return kit.ErrorOf(l.AcquireAll(ctx, charges, id)) },
		"reverse" + about: func(l *client.Limiter) error {
			return kit.ErrorOf(l.AcquireAll(ctx, []client.Charge{charges[1], charges[0]}))
		},
		"many" + about:     func(l *client.Limiter) error { return kit.ErrorOf(l.AcquireAll(ctx, many)) },
		"up-to" + about:    func(l *client.Limiter) error { return kit.ErrorOf(l.AcquireUpTo(ctx, policy, key, 1)) },
		"peek" + about:     func(l *client.Limiter) error { return kit.ErrorOf(l.Peek(ctx, policy, key, cost)) },
		"refund" + about:   func(l *client.Limiter) error { return kit.ErrorOf(l.Refund(ctx, policy, key, p.Capacity)) },
		"charge" + about:   func(l *client.Limiter) error { return kit.ErrorOf(l.Charge(ctx, policy, key, p.Refill)) },
		"settle" + about:   func(l *client.Limiter) error { return kit.ErrorOf(l.Settle(ctx, policy, key, "p", 1)) },
		"reserve" + about:  func(l *client.Limiter) error { return kit.ErrorOf(l.Reserve(ctx, policy, key, 0)) },
		"reset" + about:    func(l *client.Limiter) error { return l.Reset(ctx, policy, key) },
		"holders" + about:  func(l *client.Limiter) error { return kit.ErrorOf(l.Holders(ctx, client.OfPolicy(policy))) },
		"listed" + about:   func(l *client.Limiter) error { return kit.ErrorOf(l.Overrides(ctx, client.OfPolicy(policy), rows)) },
		"of-a-key" + about: func(l *client.Limiter) error { return kit.ErrorOf(l.Overrides(ctx, client.OfKey(key), rows)) },
		"remove" + about:   func(l *client.Limiter) error { return kit.ErrorOf(l.RemoveOverride(ctx, policy, key)) },
		"hold" + about: func(l *client.Limiter) error {
			h, _, err := l.Hold(ctx, policy, key, cost)
			return cmp.Or(err, h.Release(ctx))
		},
		"drop" + about: func(l *client.Limiter) error {
			if slices.Contains([]string{"p", "q", "quota", "slots"}, policy) {
				return l.DropPolicy(ctx, "nobody")
			}
			return l.DropPolicy(ctx, policy)
		},
		fmt.Sprintf("define %+v", p):      func(l *client.Limiter) error { return l.DefinePolicy(ctx, p) },
		fmt.Sprintf("bucket %+v", bucket): func(l *client.Limiter) error { return l.DefinePolicy(ctx, bucket) },
		fmt.Sprintf("quota %+v", quota):   func(l *client.Limiter) error { return l.DefinePolicy(ctx, quota) },
		fmt.Sprintf("slots %+v", slots):   func(l *client.Limiter) error { return l.DefinePolicy(ctx, slots) },
		fmt.Sprintf("override %+v", o):    func(l *client.Limiter) error { return l.Override(ctx, o) },
	}
}

func oneOf[T any](random *rand.Rand, values ...T) T { return values[random.IntN(len(values))] }

// An error about one element of a request says which. The only element of a request has no number: a Combiner may send it beside
// requests of several.
func TestErrors_NameTheElementOfARequest(t *testing.T) {
	t.Parallel()
	charge := func(policy, key string, cost int64) client.Charge {
		return client.Charge{Policy: policy, Key: key, Cost: client.Cost(cost)}
	}
	one, opts := charge("p", "new", 1), client.IdempotencyKey("i")
	calls := map[string]func(l client.Acquirer) error{}
	for want, charges := range map[string][]client.Charge{
		"Element 2 of the request: policy is empty.":                                                {one, charge("", "k", 1)},
		"Element 2 of the request: key is empty.":                                                   {one, charge("p", "", 1), charge("nobody", "k", 1)},
		"Element 3 of the request: cost is -1.":                                                     {one, charge("nobody", "k", 1), charge("p", "k", -1)},
		"Element 1 of the request: No policy is named 'nobody'.":                                    {charge("nobody", "k", 1), charge("p", "granted", 3)},
		"Element 2 of the request: 'i' was granted with cost 2 and is requested again with cost 3.": {one, charge("p", "granted", 1), charge("p", "granted", 2)},
		"Element 2 of the request: 'i' was granted with cost 2 and settled with cost 1.":            {one, charge("p", "settled", 2)},
		"key is empty.":                {charge("p", "", 1)},
		"No policy is named 'nobody'.": {charge("nobody", "k", 1)},
	} {
		calls[want] = func(l client.Acquirer) error { return kit.ErrorOf(l.AcquireAll(t.Context(), charges, opts)) }
	}
	calls["idempotency_key is empty."] = func(l client.Acquirer) error {
		return kit.ErrorOf(l.AcquireAll(t.Context(), []client.Charge{one, one}, client.IdempotencyKey("")))
	}
	requireDetails(t, calls)
}

// The cost of a request is compared with that of its grant, and the cost of a settlement with that of the first. The error says which.
func TestErrors_TellARepeatedRequestFromARepeatedSettlement(t *testing.T) {
	t.Parallel()
	calls := map[string]func(l *client.Limiter) error{}
	for want, s := range map[string]kit.Spending{
		"'i' was granted with cost 2 and is requested again with cost 1.":        {Function: "charge", Cost: 1},
		"'i' was granted with cost 2 and is requested again with cost 4.":        {Function: "reserve", Cost: 4},
		"'i' was granted with cost 2 and is requested again for 3 to 5.":         {Function: "acquire_up_to", Cost: 5, AtLeast: 3},
		"'i' was settled with cost 1 and is settled again with cost 2.":          {Function: "settle", Cost: 2},
		"'i' was granted with cost 2 and settled with cost 1.":                   {Function: "reserve", Cost: 2},
		"Policy 'p' does not remember 'j' for this bucket. Nothing was charged.": {Function: "settle", Cost: 2, IdempotencyKey: "j"},
	} {
		s.BucketID, s.IdempotencyKey = model.BucketID{Policy: "p", Key: "settled"}, cmp.Or(s.IdempotencyKey, "i")
		calls[want] = func(l *client.Limiter) error { return kit.ErrorOf(s.With(t.Context(), l)) }
	}
	calls["'i' was granted with cost 2 and is requested again with cost 3."] = func(l *client.Limiter) error {
		return kit.ErrorOf(l.Acquire(t.Context(), "p", "granted", client.Cost(3), client.IdempotencyKey("i")))
	}
	requireDetails(t, calls)
}

// requireDetails makes calls that are refused, on a server and on the fake, and compares the DETAIL.
func requireDetails[L client.Acquirer](t *testing.T, calls map[string]func(l L) error) {
	db, fake := kit.NewDB(t), kit.NewFake(t)
	combiner := client.NewCombiner(db.Pool)
	defer combiner.Close()
	for _, s := range []kit.Subject{db, fake} {
		s.SetClock(kit.T0)
		s.DefinePolicy("p", 10, 1, kit.Second)
		for _, key := range []string{"granted", "settled"} {
			s.Acquire("p", key, 2, "i")
		}
		_, err := s.Spend(kit.Spending{Function: "settle", BucketID: model.BucketID{Policy: "p", Key: "settled"}, Cost: 1, IdempotencyKey: "i"})
		require.NoError(t, err)
	}
	for want, call := range calls {
		for name, limiter := range map[string]client.Acquirer{"server": client.New(db.Pool), "server, combined": combiner, "fake": fake.Fake.Limiter} {
			if l, ok := limiter.(L); ok {
				e := kit.PgError(call(l))
				require.NotNil(t, e, "%s: %s", name, want)
				require.Equal(t, want, e.Detail, name)
			}
		}
	}
}
