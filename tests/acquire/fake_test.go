package acquire

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
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

func TestFake_RefusesWhatTheServerRefuses(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	db, fake := kit.NewDB(t), kit.NewFake(t)
	names := []string{"", strings.Repeat("é", 257), "\xff", "a\x00", "nobody", "p", "q"}
	costs := []int64{-1, 0, 1, math.MaxInt64}
	for _, s := range []kit.Subject{db, fake} {
		s.SetClock(kit.T0)
		s.DefinePolicy("p", 10, 1, kit.Second)
		s.DefinePolicy("q", 10, 1, kit.Second, kit.Ephemeral)
		s.Acquire("p", "p", 2, "p")
	}
	for _, l := range []*client.Limiter{client.New(db.Pool), fake.Fake.Limiter} {
		require.NoError(t, l.DefinePolicy(t.Context(), client.Policy{Name: "quota", Capacity: 10, Period: client.Period{Months: 1}}))
		require.NoError(t, l.DefinePolicy(t.Context(), client.Policy{Name: "slots", Capacity: 10, Lease: time.Hour}))
	}
	calls := map[string]func(l *client.Limiter) error{}
	add := func(name string, call func(l *client.Limiter) error) { calls[name] = call }
	ctx := t.Context()
	for _, policy := range names {
		add(fmt.Sprintf("drop %q", policy), func(l *client.Limiter) error {
			if policy == "p" || policy == "q" {
				return nil
			}
			return l.DropPolicy(ctx, policy)
		})
		for _, key := range names {
			add(fmt.Sprintf("reset %q %q", policy, key), func(l *client.Limiter) error { return l.Reset(ctx, policy, key) })
			for _, cost := range costs {
				add(fmt.Sprintf("peek %q %q %d", policy, key, cost), func(l *client.Limiter) error { return kit.ErrorOf(l.Peek(ctx, policy, key, client.Cost(cost))) })
				add(fmt.Sprintf("refund %q %q %d", policy, key, cost), func(l *client.Limiter) error { return kit.ErrorOf(l.Refund(ctx, policy, key, cost)) })
				for _, idempotencyKey := range names {
					if cost != -1 && cost != 1 { // a bad one and a good one
						continue
					}
					add(fmt.Sprintf("acquire %q %q %d %q", policy, key, cost, idempotencyKey), func(l *client.Limiter) error {
						return kit.ErrorOf(l.Acquire(ctx, policy, key, client.Cost(cost), client.IdempotencyKey(idempotencyKey)))
					})
				}
			}
		}
	}
	numbers := []int64{-1, 0, 1, 9_000_000_000_000, 9_000_000_000_001}   // 0 keeps what is there
	spans := []time.Duration{-kit.Us, 0, kit.Us, time.Hour, 1<<63 - 808} // up to 292 years
	for _, name := range names {
		for i, n := range numbers {
			for j, every := range spans {
				for k, choice := range []client.Choice{client.Keep, client.Yes, client.No, 7} {
					p := client.Policy{
						Name: name, Capacity: n, Refill: numbers[(i+j+k)%5], Every: every, Durable: choice, Stepped: client.Choice((i + k) % 3),
						Remember: spans[(j+k)%5],
					}
					add(fmt.Sprintf("define %+v", p), func(l *client.Limiter) error { return l.DefinePolicy(ctx, p) })
				}
			}
		}
	}
	periods := []client.Period{{}, {Days: 1}, {Days: 365_250}, {Days: 365_251}, {Months: 1}, {Months: 12_000}, {Months: 12_001}, {Months: 1, Days: 1}, {Months: -1}}
	zones := []string{"", "", "UTC", "Europe/Berlin", "CET", "posix/Europe/Berlin", "europe/berlin", "Nowhere/Land", "a\x00/b"}
	anchors := []time.Time{{}, kit.T0, time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC), time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC)}
	for _, name := range append(names, "quota", "other") {
		for i, period := range periods {
			for j, zone := range zones {
				p := client.Policy{
					Name: name, Capacity: numbers[(i+j)%5], Period: period, TimeZone: zone, Anchor: anchors[(i+j)%7%5], Durable: client.Choice(i % 2),
					Refill: []int64{0, 0, 0, 1}[(i+j)%4], Every: []time.Duration{0, 0, 0, 0, kit.Us}[(i+j)%5], Stepped: client.Choice((i + j) / 7 % 3),
				}
				add(fmt.Sprintf("define %+v", p), func(l *client.Limiter) error { return l.DefinePolicy(ctx, p) })
				o := client.Override{Policy: name, Key: "p", Capacity: p.Capacity, Refill: p.Refill, Every: p.Every, TimeZone: zone, Anchor: p.Anchor}
				add(fmt.Sprintf("override %+v", o), func(l *client.Limiter) error { return l.Override(ctx, o) })
			}
		}
	}
	addSlots(ctx, names, add)
	for i, policy := range names {
		for j, key := range names {
			add(fmt.Sprintf("remove override %q %q", policy, key), func(l *client.Limiter) error { return kit.ErrorOf(l.RemoveOverride(ctx, policy, key)) })
			for k, every := range spans {
				o := client.Override{
					Policy: policy, Key: key, Every: every,
					Capacity: numbers[(i+j+k)%5], Refill: numbers[(i+k)%5], ExpiresAt: kit.T0.Add(spans[(j+k)%5]),
				}
				add(fmt.Sprintf("override %+v", o), func(l *client.Limiter) error { return l.Override(ctx, o) })
			}
			for _, cost := range costs {
				charges := []client.Charge{{Policy: "p", Key: "p"}, {Policy: policy, Key: key, Cost: client.Cost(cost)}}
				add(fmt.Sprintf("acquire all %+v", charges), func(l *client.Limiter) error {
					return kit.ErrorOf(l.AcquireAll(ctx, charges, client.IdempotencyKey(names[(i+j)%7])))
				})
			}
		}
	}
	for _, n := range []int{0, 1000, 1001} {
		add(fmt.Sprintf("acquire all of %d", n), func(l *client.Limiter) error {
			return kit.ErrorOf(l.AcquireAll(ctx, slices.Repeat([]client.Charge{{Policy: "p", Key: "p"}}, n)))
		})
	}
	for _, name := range names {
		for _, n := range []int32{-1, 0, 1} {
			add(fmt.Sprintf("overrides %q %d", name, n), func(l *client.Limiter) error {
				_, ofPolicy := l.Overrides(ctx, client.OfPolicy(name), client.MaxRows(n))
				_, ofKey := l.Overrides(ctx, client.OfKey(name), client.MaxRows(n))
				return cmp.Or(ofPolicy, ofKey)
			})
		}
	}
	onServer := client.New(db.Pool)
	refused := 0
	for name, call := range calls {
		want, got := call(onServer), call(fake.Fake.Limiter)
		require.Equal(t, want == nil, got == nil, "%s: %v, %v", name, want, got)
		if want == nil {
			continue
		}
		refused++
		for _, kind := range []error{client.ErrUnknownPolicy, client.ErrIdempotencyMismatch, client.ErrInvalidArgument} {
			require.Equal(t, errors.Is(want, kind), errors.Is(got, kind), "%s: %v, %v", name, want, got)
		}
		require.Equal(t, kit.SQLState(want), kit.SQLState(got), "%s: %v, %v", name, want, got)
		var wantErr, gotErr *pgconn.PgError
		if errors.As(want, &wantErr) && errors.As(got, &gotErr) && wantErr.Code != "22021" { // whose message shows the bytes
			require.Equal(t, wantErr.Message, gotErr.Message, name)
		}
	}
	require.Greater(t, refused, 500)
	require.Equal(t, kit.NoError(onServer.Policies(ctx))(t), kit.NoError(fake.Fake.Policies(ctx))(t))
	require.Equal(t, kit.NoError(onServer.Overrides(ctx))(t), kit.NoError(fake.Fake.Overrides(ctx))(t))
}

// addSlots adds calls that concern slots, or would.
func addSlots(ctx context.Context, names []string, add func(name string, call func(l *client.Limiter) error)) {
	leases := []time.Duration{0, 0, kit.Us, 999 * kit.Us, 1000 * kit.Us, time.Hour, -time.Hour, 1<<63 - 808}
	capacities := []int64{0, client.Zero, 1, 10_000, 10_001, 9_000_000_000_000}
	for i, name := range append(names, "quota", "slots", "lends") {
		for j, lease := range leases {
			for k, capacity := range capacities {
				p := client.Policy{Name: name, Capacity: capacity, Lease: lease, Durable: client.Choice((i + j) % 3)}
				if p.Durable == client.No && name == "slots" {
					p.Durable = client.Keep
				}
				o := client.Override{Policy: name, Key: "p", Capacity: capacity, Lease: lease}
				switch (i + j + k) % 11 {
				case 0:
					p.Refill, o.Refill = 1, client.Zero
				case 1:
					p.Every, o.Every = kit.Us, kit.Us
				case 2:
					p.Stepped, p.Remember = client.No, kit.Us
				case 3:
					p.Remember, o.ExpiresAt = kit.Us, kit.T0
				case 4:
					p.Period, o.TimeZone = client.Period{Days: 1}, "UTC"
				case 5:
					p.TimeZone, o.TimeZone = "UTC", "UTC"
				case 6:
					p.Anchor, o.Anchor = kit.T0, kit.T0
				}
				add(fmt.Sprintf("define %+v", p), func(l *client.Limiter) error { return l.DefinePolicy(ctx, p) })
				add(fmt.Sprintf("override %+v", o), func(l *client.Limiter) error { return l.Override(ctx, o) })
			}
		}
	}
	charges := []client.Charge{{Policy: "p", Key: "p"}, {Policy: "slots", Key: "p"}}
	for name, call := range map[string]func(l *client.Limiter) error{
		"acquire": func(l *client.Limiter) error { return kit.ErrorOf(l.Acquire(ctx, "slots", "k")) },
		"acquire, keyed": func(l *client.Limiter) error {
			return kit.ErrorOf(l.Acquire(ctx, "slots", "k", client.IdempotencyKey("i")))
		},
		"acquire nothing": func(l *client.Limiter) error { return kit.ErrorOf(l.Acquire(ctx, "slots", "k", client.Cost(0))) },
		"acquire all":     func(l *client.Limiter) error { return kit.ErrorOf(l.AcquireAll(ctx, charges)) },
		"acquire more": func(l *client.Limiter) error {
			return kit.ErrorOf(l.AcquireAll(ctx, append(charges, client.Charge{Policy: "no", Key: "k"})))
		},
		"acquire less": func(l *client.Limiter) error {
			return kit.ErrorOf(l.AcquireAll(ctx, append([]client.Charge{{Policy: "no", Key: "k"}}, charges...)))
		},
		"up to":           func(l *client.Limiter) error { return kit.ErrorOf(l.AcquireUpTo(ctx, "slots", "k", 1)) },
		"refund":          func(l *client.Limiter) error { return kit.ErrorOf(l.Refund(ctx, "slots", "k", 1)) },
		"charge":          func(l *client.Limiter) error { return kit.ErrorOf(l.Charge(ctx, "slots", "k", 1)) },
		"settle":          func(l *client.Limiter) error { return kit.ErrorOf(l.Settle(ctx, "slots", "k", "i", 1)) },
		"reserve":         func(l *client.Limiter) error { return kit.ErrorOf(l.Reserve(ctx, "slots", "k", 0)) },
		"peek":            func(l *client.Limiter) error { return kit.ErrorOf(l.Peek(ctx, "slots", "k")) },
		"peek at nothing": func(l *client.Limiter) error { return kit.ErrorOf(l.Peek(ctx, "slots", "k", client.Cost(0))) },
		"reset":           func(l *client.Limiter) error { return l.Reset(ctx, "slots", "k") },
	} {
		add(name+" of slots", call)
	}
	for _, policy := range append(names, "slots") {
		for _, key := range names {
			for _, cost := range []int64{-1, 0, 1, 11} {
				add(fmt.Sprintf("hold %q %q %d", policy, key, cost), func(l *client.Limiter) error {
					h, _, err := l.Hold(ctx, policy, key, client.Cost(cost))
					return cmp.Or(err, h.Release(ctx))
				})
			}
		}
		add(fmt.Sprintf("holders %q", policy), func(l *client.Limiter) error { return kit.ErrorOf(l.Holders(ctx, client.OfPolicy(policy))) })
	}
}

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
