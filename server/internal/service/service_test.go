package service_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

var roomy = service.Limits{Calls: 100, OwnConnections: 10, Time: time.Minute}

type recorder struct {
	mu    sync.Mutex
	calls []service.Call
}

func (r *recorder) observe(c service.Call) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, c)
}

func (r *recorder) last() service.Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls[len(r.calls)-1]
}

func newFake(t *testing.T) *clienttest.Fake {
	fake := clienttest.New(func() time.Time { return time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC) })
	for _, name := range []string{"api", service.DefaultPolicy} {
		require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: name, Capacity: 10, Refill: 1, Every: time.Second}))
	}
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "jobs", Capacity: 2, Lease: time.Minute}))
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "watched", Capacity: 10, Refill: 1, Every: time.Second, Shadow: client.Yes}))
	return fake
}

// Each kind of error has a code in each protocol.
func TestKinds_HaveCodes(t *testing.T) {
	t.Parallel()
	var codes string
	for _, kind := range service.Kinds {
		codes += fmt.Sprintln(kind.Reason, kind.Code, kind.Status)
	}
	require.Equal(t, `UNKNOWN_POLICY NotFound 404
IDEMPOTENCY_MISMATCH AlreadyExists 409
NO_GRANT FailedPrecondition 404
SETTLED FailedPrecondition 409
INVALID_ARGUMENT InvalidArgument 422
CONTENDED Aborted 503
DEADLINE_EXCEEDED DeadlineExceeded 504
CANCELED Canceled 499
OVERLOADED ResourceExhausted 503
UNAVAILABLE Unavailable 503
INTERNAL Internal 500
UNREADABLE Internal 400
UNAUTHENTICATED Unauthenticated 401
FORBIDDEN PermissionDenied 403
`, codes)
}

// The table of middlewares holds for the server, too: an error is an error. The request's fault is told to its caller, set-up to the
// log, with its sqlstate to the caller, and a database that is away may be asked again.
func TestErrors_OfTheTableOfMiddlewares(t *testing.T) {
	t.Parallel()
	text := kit.NoError(os.ReadFile("../../../client/testdata/failures.json"))(t)
	var rows []struct{ Error, Kind string }
	require.NoError(t, json.Unmarshal(text, &rows))
	require.Greater(t, len(rows), 40)
	named := map[string]error{
		"program": errors.New("made up"), "wrong shard": client.ErrWrongShard, "timeout": context.DeadlineExceeded, "refused": syscall.ECONNREFUSED,
		"lost": io.ErrUnexpectedEOF, "overloaded": client.ErrOverloaded, "closed": client.ErrClosed,
	}
	kinds := map[string]*service.Kind{ // of those that the table does not tell apart
		"RL001": service.UnknownPolicy, "RL002": service.IdempotencyMismatch, "RL003": service.NoGrant, "RL004": service.Settled, "22023": service.InvalidArgument,
		"55P03": service.Contended, "40001": service.Contended, "40P01": service.Contended, "57014": service.DeadlineExceeded, "57P01": service.Unavailable,
		"53300": service.Unavailable, "28P01": service.Unavailable, "25006": service.Unavailable, "lost": service.Unavailable, "overloaded": service.Overloaded,
		"closed": service.Unavailable, "42501": service.Internal,
	}
	for _, row := range rows {
		cause, isNamed := named[row.Error]
		if !isNamed {
			require.Len(t, row.Error, 5)
			cause = &pgconn.PgError{Code: row.Error, Message: "made up", Detail: "a fact"}
		}
		fake, seen := newFake(t), &recorder{}
		fake.FailAll(cause)
		s := service.New([]service.Limiter{fake}, roomy, seen.observe)
		for name, ask := range map[string]func() error{
			"acquire": func() error {
				return kit.ErrorOf(s.Do(t.Context(), service.Acquire, service.Request{Policy: "api", Key: "k"}))
			},
			"gate": func() error {
				return kit.ErrorOf(s.Admit(t.Context(), []service.GateCharge{{Policy: "api", Key: "k", Cost: 1}}, false))
			},
		} {
			var e *service.Error
			require.ErrorAs(t, ask(), &e, "%s: %s", row.Error, name)
			require.Equal(t, client.ResultError, seen.last().Result)
			require.ErrorIs(t, e, cause, "for the log")
			require.NotContains(t, e.Error(), "EOF", "only the log is told")
			if kind, isKnown := kinds[row.Error]; isKnown {
				require.Equal(t, kind.Reason, e.Kind.Reason, row.Error)
			}
			isRefusal := row.Kind == "fault" && !isNamed
			require.Equal(t, isRefusal, e.Kind.IsRefusal(), row.Error)
			require.Equal(t, isRefusal, e.Detail == "a fact", "what the database said is told of refusals only: %s", row.Error)
			switch row.Kind {
			case "setup":
				require.Equal(t, service.Internal, e.Kind, row.Error)
				require.Equal(t, row.Error, e.SQLState)
			case "away":
				require.NotEqual(t, service.Internal, e.Kind, row.Error)
			}
		}
	}
	for known := range kinds {
		require.True(t, slices.ContainsFunc(rows, func(row struct{ Error, Kind string }) bool { return row.Error == known }), known)
	}
}

// A renewal is allowed if the holder held, and only then.
func TestObserve_ARenewalOfNobodyIsNotAllowed(t *testing.T) {
	t.Parallel()
	var seen recorder
	s := service.New([]service.Limiter{newFake(t)}, roomy, seen.observe)
	for _, operation := range []service.Operation{service.Renew, service.Release} {
		request := service.Request{Policy: "jobs", Key: string(operation), Holder: "h"}
		ask := func() error { return kit.ErrorOf(s.Do(t.Context(), operation, request)) }
		require.NoError(t, ask())
		require.Equal(t, client.ResultDenied, seen.last().Result, seen.last().Operation)
		require.NoError(t, kit.ErrorOf(s.Do(t.Context(), service.Hold, request)))
		require.NoError(t, ask())
		require.Equal(t, client.ResultAllowed, seen.last().Result, seen.last().Operation)
	}
}

// An error names the request by its number in the call, and not by that among the requests of its shard.
func TestAcquireMany_AnErrorNamesTheRequestOfTheCall(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	s := service.New([]service.Limiter{fake, fake}, roomy, func(service.Call) {})
	var requests []service.Request
	for i := range 20 {
		requests = append(requests, service.Request{Policy: "api", Key: fmt.Sprint(i), Cost: new(int64(-1))})
	}
	for i, a := range kit.NoError(s.Do(t.Context(), service.AcquireMany, service.Request{List: requests}))(t).Answers {
		requireKind(t, service.InvalidArgument, a.Err)
		require.ErrorContains(t, a.Err, fmt.Sprintf("requests[%d]", i))
	}
}

func TestErrors_TheEndOfAContext(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	s := service.New([]service.Limiter{fake}, roomy, func(service.Call) {})
	late, cancel := context.WithTimeout(t.Context(), -time.Second)
	defer cancel()
	gone, leave := context.WithCancel(t.Context())
	leave()
	for ctx, kind := range map[context.Context]*service.Kind{late: service.DeadlineExceeded, gone: service.Canceled} {
		requireKind(t, kind, kit.ErrorOf(s.Do(ctx, service.Acquire, service.Request{Policy: "nobody", Key: "k"})))
	}
}

// prefetched is a limiter that grants in advance.
type prefetched struct{ *clienttest.Fake }

func (l prefetched) Acquire(ctx context.Context, policy, key string, opts ...client.CallOption) (client.Decision, error) {
	d, err := l.Fake.Acquire(ctx, policy, key, opts...)
	d.Estimated = d.Allowed
	return d, err
}

func TestObserve_TellsGrantsInAdvance(t *testing.T) {
	t.Parallel()
	var seen recorder
	s := service.New([]service.Limiter{prefetched{newFake(t)}}, roomy, seen.observe)
	d := kit.NoError(s.Do(t.Context(), service.Acquire, service.Request{Policy: "api", Key: "k"}))(t)
	require.True(t, d.Estimated && seen.last().Prefetched)
	require.NoError(t, kit.ErrorOf(s.Admit(t.Context(), []service.GateCharge{{Policy: "api", Key: "k", Cost: 1}}, false)))
	require.True(t, seen.last().Prefetched)
	require.NoError(t, kit.ErrorOf(s.Do(t.Context(), service.Acquire, service.Request{Policy: "api", Key: "k", Cost: new(int64(10))})))
	require.False(t, seen.last().Prefetched, "a denial")
	require.NoError(t, kit.ErrorOf(s.Do(t.Context(), service.Peek, service.Request{Policy: "api", Key: "k"})))
	require.False(t, seen.last().Prefetched)
}

// A stuck limiter answers when it is let go, or when its caller has no more time.
type stuck struct {
	*clienttest.Fake
	asked chan struct{} // gets one for each call
	let   chan struct{}
}

func newStuck(t *testing.T) stuck {
	return stuck{newFake(t), make(chan struct{}, 100), make(chan struct{})}
}

func (s stuck) wait(ctx context.Context) error {
	s.asked <- struct{}{}
	select {
	case <-s.let:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s stuck) Acquire(ctx context.Context, policy, key string, opts ...client.CallOption) (client.Decision, error) {
	if err := s.wait(ctx); err != nil {
		return client.Decision{}, err
	}
	return s.Fake.Acquire(ctx, policy, key, opts...)
}

func (s stuck) Peek(ctx context.Context, policy, key string, opts ...client.CallOption) (client.Decision, error) {
	if err := s.wait(ctx); err != nil {
		return client.Decision{}, err
	}
	return s.Fake.Peek(ctx, policy, key, opts...)
}

func requireKind(t *testing.T, kind *service.Kind, err error, about ...any) {
	var e *service.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, kind.Reason, e.Kind.Reason, about...)
}

// A shard that has too many calls refuses the requests of its keys, and not those of the others.
func TestLimits_OfOneShardRefuseItsOwnRequests(t *testing.T) {
	t.Parallel()
	limiter := newStuck(t)
	seen := &recorder{}
	s := service.New([]service.Limiter{limiter, limiter}, service.Limits{Calls: 1, OwnConnections: 1, Time: time.Minute}, seen.observe)
	keys := map[int]string{}
	for i := 0; len(keys) < 2; i++ {
		key := strings.Repeat("k", i)
		keys[client.ShardOf(key, 2)] = key
	}
	var caller sync.WaitGroup
	caller.Go(func() {
		assert.NoError(t, kit.ErrorOf(s.Do(t.Context(), service.Acquire, service.Request{Policy: "api", Key: keys[1]})))
	})
	<-limiter.asked
	answers := kit.NoError(s.Do(t.Context(), service.AcquireMany, service.Request{List: []service.Request{{Policy: "api", Key: keys[1]}, {Policy: "api", Key: keys[0]}}}))(t).Answers
	requireKind(t, service.Overloaded, answers[0].Err)
	require.Nil(t, answers[1].Err)
	require.EqualValues(t, 9, answers[1].Decision.Remaining)
	require.Len(t, seen.calls, 2)
	for _, call := range seen.calls {
		require.Equal(t, service.AcquireMany, call.Operation)
		require.Equal(t, call.Err != nil, call.Result == client.ResultError)
	}
	close(limiter.let)
	caller.Wait()
}

// Calls with their own connection leave connections for shared calls.
func TestLimits_CallsOfTheirOwnWaitForEachOther(t *testing.T) {
	t.Parallel()
	limiter := newStuck(t)
	s := service.New([]service.Limiter{limiter}, service.Limits{Calls: 100, OwnConnections: 1, Time: time.Minute}, func(service.Call) {})
	var callers sync.WaitGroup
	callers.Go(func() {
		assert.NoError(t, kit.ErrorOf(s.Do(t.Context(), service.Peek, service.Request{Policy: "api", Key: "k"})))
	})
	<-limiter.asked

	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	requireKind(t, service.DeadlineExceeded, kit.ErrorOf(s.Do(short, service.Peek, service.Request{Policy: "api", Key: "k"})))
	short, cancel = context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	requireKind(t, service.DeadlineExceeded, kit.ErrorOf(s.Do(short, service.Acquire, service.Request{Policy: "api", Key: strings.Repeat("k", 513)})), "nobody can share its call")
	require.Empty(t, limiter.asked, "neither has asked")

	callers.Go(func() {
		assert.NoError(t, kit.ErrorOf(s.Do(t.Context(), service.Acquire, service.Request{Policy: "api", Key: "k"})))
	})
	<-limiter.asked // beside the Peek that is stuck
	close(limiter.let)
	callers.Wait()
}

func left(t *testing.T, fake *clienttest.Fake, policy, key string) int64 {
	return kit.NoError(fake.Peek(t.Context(), policy, key))(t).Remaining
}

// A request may take several steps, and is observed once.
func TestAdmit_IsOneCall(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	r := &recorder{}
	s := service.New([]service.Limiter{fake}, roomy, r.observe)
	for _, test := range []struct {
		charges []service.GateCharge
		blocked bool
		policy  string
		result  client.Result
	}{
		{[]service.GateCharge{{Policy: "api", Key: "k", Cost: 2}}, false, "api", client.ResultAllowed},
		{[]service.GateCharge{{Policy: "default", Key: "k"}, {Policy: "api", Key: "k", Cost: 2}, {Policy: "default", Key: "o", Cost: 20, Overdraw: true}}, false, "api", client.ResultAllowed},
		{[]service.GateCharge{{Policy: "api", Key: "k"}, {Policy: "default", Key: "o"}}, false, "default", client.ResultDenied},
		{[]service.GateCharge{{Policy: "api", Key: "k", Cost: 7}, {Policy: "default", Key: "k", Cost: 1}}, false, "api", client.ResultDenied},
		{[]service.GateCharge{{Policy: "api", Key: "k", Cost: 1}}, true, "api", client.ResultDenied},
		{nil, true, "", client.ResultDenied},
		{[]service.GateCharge{{Policy: "watched", Key: "k", Cost: 11, Shadow: true}}, false, "watched", client.ResultShadowed},
		{[]service.GateCharge{{Policy: "default", Key: "k", Cost: 10, Overdraw: true}}, false, "default", client.ResultAllowed},
		{[]service.GateCharge{{Policy: "watched", Key: "o", Cost: 11, Shadow: true}, {Policy: "api", Key: "o", Cost: 1}}, false, "watched", client.ResultShadowed},
	} {
		before := len(r.calls)
		p := kit.NoError(s.Admit(t.Context(), test.charges, test.blocked))(t)
		require.Len(t, p.Decisions, len(test.charges))
		require.Len(t, r.calls, before+1)
		call := r.last()
		require.Equal(t, []any{service.Gate, test.policy, test.result}, []any{call.Operation, call.Policy, call.Result}, "%v", test)
		require.Equal(t, test.result != client.ResultDenied, p.Allowed)
	}
	require.EqualValues(t, 6, left(t, fake, "api", "k"))
}

// A bucket that two charges name denies both if it holds less than their sum, with the retry_after of the sum.
func TestAdmit_BlockedRequestsNeedTheSumOfTheirCharges(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	s := service.New([]service.Limiter{fake}, roomy, func(service.Call) {})
	require.NoError(t, fake.SetLevel("api", "k", 8))
	twice := []service.GateCharge{{Policy: "api", Key: "k", Cost: 6}, {Policy: "api", Key: "k", Cost: 4}, {Policy: "api", Key: "o", Cost: 4}}
	p := kit.NoError(s.Admit(t.Context(), twice, true))(t)
	require.Equal(t, []bool{false, false, true}, []bool{p.Decisions[0].Allowed, p.Decisions[1].Allowed, p.Decisions[2].Allowed})
	require.Equal(t, 2*time.Second, p.Decisions[0].RetryAfter)
	require.Equal(t, p.Decisions[0], p.Decisions[1])
	require.EqualValues(t, 8, left(t, fake, "api", "k"))

	most := service.GateCharge{Policy: "api", Key: "k", Cost: math.MaxInt64}
	p = kit.NoError(s.Admit(t.Context(), []service.GateCharge{most, most}, true))(t)
	require.Equal(t, []bool{false, false}, []bool{p.Decisions[0].Allowed, p.Decisions[1].Allowed}, "the sum is the largest there is, and not below zero")
}

// A denial stays one if the bucket refills between two steps.
func TestAdmit_ARefusalStaysOne(t *testing.T) {
	t.Parallel()
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	fake := clienttest.New(func() time.Time { return now })
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Second}))
	require.NoError(t, fake.SetLevel("api", "k", 0))
	s := service.New([]service.Limiter{latePeek{fake, func() { now = now.Add(time.Hour) }}}, roomy, func(service.Call) {})
	p := kit.NoError(s.Admit(t.Context(), []service.GateCharge{{Policy: "api", Key: "k"}}, false))(t)
	require.False(t, p.Allowed)
	require.False(t, p.Decisions[0].Allowed)
}

// latePeek has time pass before each Peek.
type latePeek struct {
	*clienttest.Fake
	wait func()
}

func (l latePeek) Peek(ctx context.Context, policy, key string, opts ...client.CallOption) (client.Decision, error) {
	l.wait()
	return l.Fake.Peek(ctx, policy, key, opts...)
}

func TestAdmit_AnErrorDecidesNothing(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	s := service.New([]service.Limiter{fake}, roomy, func(service.Call) {})
	charges := []service.GateCharge{{Policy: "api", Key: "k"}, {Policy: "api", Key: "k", Cost: 2}, {Policy: "default", Key: "o", Cost: 20, Overdraw: true}}
	for steps := range 3 {
		fake.FailNext(append(make([]error, steps), io.ErrUnexpectedEOF)...)
		p, err := s.Admit(t.Context(), charges, false)
		requireKind(t, service.Unavailable, err)
		require.Zero(t, p)
	}
	require.EqualValues(t, 8, left(t, fake, "api", "k"), "the last one had taken them")
	require.EqualValues(t, 10, left(t, fake, "default", "o"))
}
