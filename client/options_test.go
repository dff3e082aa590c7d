package client_test

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// callOptions are all of them, by their names in errors.
var callOptions = map[string]client.CallOption{
	"Cost": client.Cost(300), "IdempotencyKey": client.IdempotencyKey("x"), "AtLeast": client.AtLeast(1), "MaxRows": client.MaxRows(1),
	"OfPolicy": client.OfPolicy("p"), "OfKey": client.OfKey("k"), "OnError": client.OnError(func(error) {}),
	"a CallOption that is nil, or of another package,": struct{ client.CallOption }{client.Cost(1)},
}

// A method refuses an option that it does not take before anything is sent, and names itself, the option, and those that it takes.
func TestCallOptions_AreForTheirMethods(t *testing.T) {
	t.Parallel()
	ctx, sent := t.Context(), error(&pgconn.PgError{Severity: "ERROR", Code: "57014"}) // with which nothing is left to undo
	for _, test := range []struct {
		method string
		args   []any
		takes  string
	}{
		{"Acquire", []any{ctx, "p", "k"}, "Cost, IdempotencyKey"},
		{"AcquireAll", []any{ctx, []client.Charge{{Policy: "p", Key: "k"}}}, "IdempotencyKey"},
		{"Peek", []any{ctx, "p", "k"}, "Cost"},
		{"Charge", []any{ctx, "p", "k", int64(1)}, "IdempotencyKey"},
		{"Reserve", []any{ctx, "p", "k", time.Second}, "Cost, IdempotencyKey"},
		{"AcquireUpTo", []any{ctx, "p", "k", int64(1)}, "AtLeast, IdempotencyKey"},
		{"Wait", []any{ctx, "p", "k"}, "Cost"},
		{"HoldAs", []any{ctx, "p", "k", "h"}, "Cost"},
		{"Overrides", []any{ctx}, "OfPolicy, OfKey, MaxRows"},
		{"Cleanup", []any{ctx}, "MaxRows"},
	} {
		for name, opt := range callOptions {
			refusal := fmt.Sprintf("pgratelimit: %s: invalid argument: %s is no option of %s, which takes %s", test.method, name, test.method, test.takes)
			pool := &fakePool{fakeDB{answers: []any{sent}}}
			combiner, prefetcher := client.NewCombiner(pool), client.NewPrefetcher(pool, client.Prefetch{Policy: "p"})
			defer combiner.Close()
			defer prefetcher.Close()
			for _, limiter := range []any{client.New(pool, client.DenialCache()), combiner, prefetcher} {
				in := []reflect.Value{}
				for _, arg := range append(test.args, opt) {
					in = append(in, reflect.ValueOf(arg))
				}
				out := reflect.ValueOf(limiter).MethodByName(test.method).Call(in)
				err := out[len(out)-1].Interface().(error)
				if slices.Contains(strings.Split(test.takes, ", "), name) {
					require.ErrorIs(t, err, sent, "%T, %s, %s", limiter, test.method, name)
					pool.queries = nil
					continue
				}
				require.EqualError(t, err, refusal)
				require.ErrorIs(t, err, client.ErrInvalidArgument)
				require.Empty(t, pool.sent(), refusal)
			}
		}
	}
	_, err := client.New(nil).Peek(ctx, "p", "k", nil)
	require.ErrorContains(t, err, "a CallOption that is nil")
	require.Panics(t, func() { client.New(nil).RunCleanup(ctx, time.Second, client.MaxRows(1)) }, "it returns nothing")
}

// A wrong option is refused while other requests wait for a call, and where a denial would come from memory.
func TestCallOptions_AreCheckedBeforeARequestWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, limiter := gated(t, client.CallsInFlight(1), client.DenialCache())
		first := ask(t.Context(), limiter, "k1")
		require.ErrorIs(t, (<-ask(t.Context(), limiter, "k2", client.AtLeast(1))).err, client.ErrInvalidArgument)
		require.ErrorIs(t, (<-askAll(t.Context(), limiter, []string{"k2"}, client.Cost(1))).err, client.ErrInvalidArgument)
		db.only(t).deny(time.Second)
		require.NoError(t, (<-first).err)
		require.ErrorIs(t, (<-ask(t.Context(), limiter, "k1", client.AtLeast(1))).err, client.ErrInvalidArgument)
	})
}

// A constructor panics at an option that it has no use for.
func TestOptions_AreForTheirConstructors(t *testing.T) {
	t.Parallel()
	options := map[string]client.Option{
		"Schema": client.Schema("s"), "NoFlush": client.NoFlush(), "DenialCache": client.DenialCache(), "Observe": client.Observe(client.Hooks{}),
		"Alone": client.Alone(), "CallsInFlight": client.CallsInFlight(1), "MaxWaiting": client.MaxWaiting(1), "a Prefetch": client.Prefetch{Policy: "p"},
	}
	ofLimiter := []string{"Schema", "NoFlush", "DenialCache", "Observe", "Alone"}
	ofCombiner := append(slices.Clone(ofLimiter), "CallsInFlight", "MaxWaiting")
	for constructor, test := range map[string]struct {
		takes []string
		make  func(client.Option)
	}{
		"New":           {ofLimiter, func(o client.Option) { client.New(nil, o) }},
		"CheckShard":    {ofLimiter, func(o client.Option) { client.CheckShard(0, 1, o) }},
		"CheckAlone":    {ofLimiter, func(o client.Option) { client.CheckAlone(o) }},
		"NewCombiner":   {ofCombiner, func(o client.Option) { client.NewCombiner(&fakePool{}, o).Close() }},
		"NewPrefetcher": {slices.Collect(maps.Keys(options)), func(o client.Option) { client.NewPrefetcher(&fakePool{}, o).Close() }},
	} {
		for name, option := range options {
			if slices.Contains(test.takes, name) {
				require.NotPanics(t, func() { test.make(option) }, "%s %s", constructor, name)
				continue
			}
			require.PanicsWithValue(t, "client: "+constructor+" has no use for "+name, func() { test.make(option) })
		}
	}
}

// A request of a Combiner shares calls, and one of its WithTx is part of the transaction: no other limiter is within reach.
func TestCombiner_HasNoWayPastIt(t *testing.T) {
	t.Parallel()
	for _, limiter := range []reflect.Type{reflect.TypeFor[client.Combiner](), reflect.TypeFor[client.Prefetcher](), reflect.TypeFor[client.Sharded]()} {
		for i := range limiter.NumField() {
			require.False(t, limiter.Field(i).IsExported(), limiter.Field(i).Name)
		}
	}
	_, closes := any(client.NewCombiner(&fakePool{}).WithTx(nil)).(interface{ Close() })
	require.False(t, closes)
}

// An option costs a caller no memory.
func TestCallOptions_AllocateNothing(t *testing.T) { // and not in parallel: others do
	denied := row{false, int64(0), int64(3600e6), int64(3600e6), int64(1000), false, false}
	limiter, ctx := client.New(&fakePool{fakeDB{answers: []any{denied}}}, client.DenialCache()), t.Context()
	_, _ = limiter.Acquire(ctx, "p", "k")
	without := testing.AllocsPerRun(100, func() { _, _ = limiter.Acquire(ctx, "p", "k") })
	require.Equal(t, without, testing.AllocsPerRun(100, func() { _, _ = limiter.Acquire(ctx, "p", "k", client.Cost(300)) }))
}

func TestCost_IsOneUnlessSaid(t *testing.T) {
	t.Parallel()
	require.EqualValues(t, 1, client.CostOption{}.Tokens())
	for _, n := range []int64{math.MinInt64, -1, 0, 1, 2, math.MaxInt64} {
		require.Equal(t, n, client.Cost(n).Tokens())
	}
}

func TestChoice_String(t *testing.T) {
	t.Parallel()
	require.Equal(t, "keep yes no Choice(3)", fmt.Sprint(client.Keep, client.Yes, client.No, client.Choice(3)))
}

func TestDefinePolicy_SendsNullForWhatIsLeftOpen(t *testing.T) {
	t.Parallel()
	db := &fakeDB{answers: []any{row{1}}}
	limiter := client.New(db)
	for _, p := range []client.Policy{{Name: "p"}, {
		Name: "p", Capacity: -2, Refill: client.Zero, Every: time.Second,
		Stepped: client.Yes, Durable: client.No, Remember: -time.Second, Shadow: client.Yes,
	}, {Name: "p", Period: client.Period{Months: 1}, TimeZone: "UTC", Anchor: anchor}, {Name: "p", Capacity: 5, Lease: 5 * time.Minute}} {
		require.NoError(t, limiter.DefinePolicy(t.Context(), p))
	}
	sent := db.sent()
	require.Equal(t, []any{"p", nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil}, sent[0].args)
	require.Equal(t, []any{"p", int64(-2), int64(0), "1000000 microseconds", "yes", "no", "-1000000 microseconds", "yes", nil, nil, nil, nil}, sent[1].args)
	require.Equal(t, []any{"p", nil, nil, nil, nil, nil, nil, nil, "1 month", "UTC", "2024-01-31T09:30:00.000001", nil}, sent[2].args)
	require.Equal(t, []any{"p", int64(5), nil, nil, nil, nil, nil, nil, nil, nil, nil, "300000000 microseconds"}, sent[3].args)
}

// anchor is a time of day with a fraction of a microsecond, in a zone that does not count.
var anchor = time.Date(2024, 1, 31, 9, 30, 0, 1999, time.FixedZone("", -3600))

func TestPeriod_Texts(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]client.Period{
		"1 day": {Days: 1}, "7 days": {Days: 7}, "365250 days": {Days: 365_250},
		"1 month": {Months: 1}, "13 months": {Months: 13}, "1 year": {Months: 12}, "1000 years": {Months: 12_000},
	} {
		require.Equal(t, want, noError(client.ParsePeriod(text))(t))
		require.Equal(t, text, want.String())
	}
	require.Equal(t, client.Period{Days: 14}, noError(client.ParsePeriod("2 weeks"))(t))
	require.Equal(t, client.Period{Months: 12}, noError(client.ParsePeriod("12 months"))(t))
	require.Empty(t, client.Period{}.String())
	require.Equal(t, "-1 months 1 day", client.Period{Months: -1, Days: 1}.String(), "which a server refuses")
	for _, text := range []string{"", "month", "0 days", "-1 day", "+1 day", "1 hour", "1month", "1  month", "1 month 1 day", "1.5 days", "365251 days", "1001 years", "1 Month", "99999999999999999999 days"} {
		err := errOf(client.ParsePeriod(text))
		require.ErrorIs(t, err, client.ErrInvalidArgument, text)
		require.ErrorContains(t, err, strconv.Quote(text))
	}
}
