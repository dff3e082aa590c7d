package client_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
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
	_, err := client.New(&fakePool{}).Peek(ctx, "p", "k", nil)
	require.ErrorContains(t, err, "a CallOption that is nil")
	require.Panics(t, func() { client.New(&fakePool{}).RunCleanup(ctx, time.Second, client.MaxRows(1)) }, "it returns nothing")
	require.PanicsWithValue(t, "client: RunCleanup: every must be positive", func() { client.New(&fakePool{}).RunCleanup(ctx, 0) })
}

// The pool of a program whose := has hidden the variable is nil: that is told where the limiter is made, and not by the first request.
func TestNew_ANilDatabaseIsTold(t *testing.T) {
	t.Parallel()
	var pool *pgxpool.Pool
	for name, call := range map[string]func(){
		"New": func() { client.New(pool) }, "NewCombiner": func() { client.NewCombiner(pool) }, "NewPrefetcher": func() { client.NewPrefetcher(pool) },
	} {
		require.PanicsWithValue(t, "client: the database is a nil *pgxpool.Pool: pass the pool that pgxpool.New has returned", call, name)
	}
	require.Panics(t, func() { client.New(struct{ pgx.Tx }{}).WithTx(nil) })
	require.PanicsWithValue(t, "client: the database is a nil <nil>: pass the pool that pgxpool.New has returned", func() { client.New(nil) })
}

// A constructor panics at an option that it has no use for.
func TestOptions_AreForTheirConstructors(t *testing.T) {
	t.Parallel()
	options := map[string]client.Option{
		"Schema": client.Schema("s"), "NoFlush": client.NoFlush(), "DenialCache": client.DenialCache(), "Observe": client.Observe(client.Hooks{}),
		"CallsInFlight": client.CallsInFlight(1), "MaxWaiting": client.MaxWaiting(1), "a Prefetch": client.Prefetch{Policy: "p"},
	}
	ofLimiter := []string{"Schema", "NoFlush", "DenialCache", "Observe"}
	ofCombiner := append(slices.Clone(ofLimiter), "CallsInFlight", "MaxWaiting")
	for constructor, test := range map[string]struct {
		takes []string
		make  func(client.Option)
	}{
		"New":           {ofLimiter, func(o client.Option) { client.New(&fakePool{}, o) }},
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
	require.Panics(t, func() { client.NewCombiner(&fakePool{}, client.CallsInFlight(0)) })
	require.Panics(t, func() { client.NewCombiner(&fakePool{}, client.MaxWaiting(0)) })
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

// seen is what the hooks were told.
type seen struct {
	mu      sync.Mutex // of answers: a Hold renews in the background
	answers []client.Answer
	waits   []wait
	calls   []int
}

type wait struct {
	policy string
	slept  time.Duration
	err    error
}

func (s *seen) hooks() client.Hooks {
	return client.Hooks{
		Answered: func(_ context.Context, a client.Answer) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.answers = append(s.answers, a)
		},
		Waited: func(_ context.Context, policy string, slept time.Duration, err error) {
			s.waits = append(s.waits, wait{policy, slept, err})
		},
		Combined: func(requests int) { s.calls = append(s.calls, requests) },
	}
}

func TestObserve_SeesEachAnswer(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	var s seen
	now := time.Now()
	fake := clienttest.New(func() time.Time { return now }, client.Observe(s.hooks()))
	for _, p := range []client.Policy{
		{Name: "api", Capacity: 10, Refill: 1, Every: time.Second},
		{Name: "org", Capacity: 3, Refill: 1, Every: time.Second},
		{Name: "trial", Capacity: 1, Refill: 1, Every: time.Second, Shadow: client.Yes},
	} {
		require.NoError(t, fake.DefinePolicy(ctx, p))
	}
	for _, ask := range []struct {
		operation, policy string
		result            client.Result
		takes             bool
		call              func() error
	}{
		{"acquire", "api", client.ResultAllowed, true, func() error { return errOf(fake.Acquire(ctx, "api", "k", client.Cost(2), client.IdempotencyKey("i"))) }},
		{"acquire", "api", client.ResultReplayed, true, func() error { return errOf(fake.Acquire(ctx, "api", "k", client.Cost(2), client.IdempotencyKey("i"))) }},
		{"acquire", "api", client.ResultDenied, true, func() error { return errOf(fake.Acquire(ctx, "api", "k", client.Cost(9))) }},
		{"acquire", "trial", client.ResultShadowed, true, func() error { return errOf(fake.Acquire(ctx, "trial", "k", client.Cost(2))) }},
		{"acquire", "nobody", client.ResultError, true, func() error { return errOf(fake.Acquire(ctx, "nobody", "k")) }},
		{"acquire all", "org", client.ResultAllowed, true, func() error {
			return errOf(fake.AcquireAll(ctx, []client.Charge{{Policy: "api", Key: "k"}, {Policy: "org", Key: "k"}}))
		}},
		{"acquire all", "", client.ResultError, true, func() error {
			return errOf(fake.AcquireAll(ctx, []client.Charge{{Policy: "api", Key: "k"}, {Policy: "nobody", Key: "k"}}))
		}},
		{"acquire up to", "api", client.ResultAllowed, true, func() error { return errOf(fake.AcquireUpTo(ctx, "api", "k", 2)) }},
		{"acquire up to", "nobody", client.ResultError, true, func() error { return errOf(fake.AcquireUpTo(ctx, "nobody", "k", 2)) }},
		{"charge", "api", client.ResultAllowed, true, func() error { return errOf(fake.Charge(ctx, "api", "k", 100)) }},
		{"settle", "api", client.ResultAllowed, false, func() error { return errOf(fake.Settle(ctx, "api", "k", "i", 1)) }},
		{"reserve", "api", client.ResultDenied, true, func() error { return errOf(fake.Reserve(ctx, "api", "k", time.Second)) }},
		{"reserve", "api", client.ResultError, true, func() error { return errOf(fake.Reserve(ctx, "api", "k", time.Nanosecond)) }},
		{"peek", "api", client.ResultDenied, false, func() error { return errOf(fake.Peek(ctx, "api", "k")) }},
		{"refund", "api", client.ResultAllowed, false, func() error { return errOf(fake.Refund(ctx, "api", "k", 1)) }},
	} {
		s.answers = nil
		err := ask.call()
		require.Len(t, s.answers, 1, ask.operation)
		a := s.answers[0]
		require.Equal(t, ask.operation, a.Operation)
		require.Equal(t, ask.policy, a.Policy, ask.operation)
		require.Equal(t, ask.result, a.Result(), ask.operation)
		require.Equal(t, ask.takes, a.Takes(), ask.operation)
		require.Equal(t, err, a.Err, "the caller's")
		require.GreaterOrEqual(t, a.Duration, time.Duration(0))
	}
	require.Empty(t, s.calls, "a Limiter combines nothing")
}

func TestObserve_SeesWaits(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var s seen
		fake := newFake(t, line, client.Observe(s.hooks()))
		require.NoError(t, fake.SetLevel("line", "k", 1))
		for range 2 {
			noError(fake.Wait(t.Context(), "line", "k"))(t)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second-time.Microsecond)
		defer cancel()
		require.ErrorIs(t, errOf(fake.Wait(ctx, "line", "k")), client.ErrTooLate)
		ctx, cancel = context.WithCancel(t.Context())
		time.AfterFunc(time.Second/4, cancel)
		require.ErrorIs(t, errOf(fake.Wait(ctx, "line", "k")), context.Canceled)
		require.Equal(t, []wait{{"line", 0, nil}, {"line", time.Second, nil}, {"line", time.Second / 4, context.Canceled}}, s.waits)

		var operations []string
		for _, a := range s.answers {
			operations = append(operations, a.Operation+" "+string(a.Result()))
		}
		require.Equal(t, []string{"reserve allowed", "reserve allowed", "reserve denied", "reserve allowed", "settle allowed"}, operations)
	})
}

// Each request that is sent is in one call.
func TestObserve_SeesTheSizeOfCalls(t *testing.T) {
	var s seen
	atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		askKeys(t.Context(), limiter, 1, 4)
		_ = askAll(t.Context(), limiter, []string{"k5", "k6"})
		_ = askAll(t.Context(), limiter, []string{"k7", "k8"})
		_ = ask(t.Context(), limiter, strings.Repeat("k", 513))
		db.grantAll()
		require.ElementsMatch(t, []int{1, 1, 3, 2}, s.calls)
		require.Len(t, s.answers, 7)
	}, client.Observe(s.hooks()))
}

func TestRunCleanup_CallsAndPausesAlsoAfterAnError(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		broken := errors.New("connection refused")
		db := &fakePool{fakeDB{answers: []any{broken, pgx.ErrNoRows}}}
		ctx, cancel := context.WithCancel(t.Context())
		reported := make(chan error, 10)
		go client.New(db, client.Schema("app")).RunCleanup(ctx, time.Minute, client.OnError(func(err error) { reported <- err }))

		synctest.Wait()
		call := query{`call "app".ratelimit_cleanup_all($1::text::interval)`, []any{"60000000 microseconds"}}
		require.Equal(t, []query{call}, db.sent())
		err := <-reported
		require.ErrorIs(t, err, broken)
		require.EqualError(t, err, "pgratelimit: clean up: connection refused")
		time.Sleep(time.Minute - 1)
		synctest.Wait()
		require.Len(t, db.sent(), 1)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.Equal(t, []query{call, call}, db.sent())

		cancel()
		synctest.Wait()
		time.Sleep(time.Hour)
		require.Len(t, db.sent(), 2, "it ends with its context; synctest fails when the goroutine does not")
		require.Empty(t, reported)
	})
}

func TestRunCleanup_EndOfContextIsNoError(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	db := &fakePool{fakeDB{answers: []any{context.Canceled}, after: cancel}}
	client.New(db).RunCleanup(ctx, time.Minute, client.OnError(func(err error) { t.Error(err) }))
	require.Len(t, db.sent(), 1)
}
