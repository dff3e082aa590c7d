package service_test

import (
	"context"
	"io"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

func left(t *testing.T, fake *clienttest.Fake, policy, key string) int64 {
	t.Helper()
	d, err := fake.Peek(t.Context(), policy, key)
	require.NoError(t, err)
	return d.Remaining
}

// A request may take several steps, and is observed once.
func TestAdmit_IsOneCall(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	r := &recorder{}
	s := service.New(fake, roomy, r.observe)
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
		p, err := s.Admit(t.Context(), test.charges, test.blocked)
		require.NoError(t, err)
		require.Len(t, p.Decisions, len(test.charges))
		require.Len(t, r.calls, before+1)
		call := r.last()
		require.Equal(t, []any{service.Gate, test.policy, test.result}, []any{call.Operation, call.Policy, call.Result}, "%v", test)
		require.Equal(t, test.result != client.ResultDenied, p.Allowed)
	}
	require.EqualValues(t, 6, left(t, fake, "api", "k"))
}

// A cost of 0 needs one whole token, and takes none.
func TestAdmit_ALookNeedsAToken(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	s := service.New(fake, roomy, func(service.Call) {})
	for level, isAllowed := range map[float64]bool{1: true, 0.999999: false, 0: false, -1: false} {
		require.NoError(t, fake.SetLevel("api", "k", level))
		for range 2 {
			p, err := s.Admit(t.Context(), []service.GateCharge{{Policy: "api", Key: "k"}}, false)
			require.NoError(t, err)
			require.Equal(t, isAllowed, p.Allowed, level)
			require.Equal(t, isAllowed, p.Decisions[0].Allowed, level)
		}
	}
}

// A bucket that two charges name denies both if it holds less than their sum, with the retry_after of the sum.
func TestAdmit_BlockedRequestsNeedTheSumOfTheirCharges(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	s := service.New(fake, roomy, func(service.Call) {})
	require.NoError(t, fake.SetLevel("api", "k", 8))
	twice := []service.GateCharge{{Policy: "api", Key: "k", Cost: 6}, {Policy: "api", Key: "k", Cost: 4}, {Policy: "api", Key: "o", Cost: 4}}
	p, err := s.Admit(t.Context(), twice, true)
	require.NoError(t, err)
	require.Equal(t, []bool{false, false, true}, []bool{p.Decisions[0].Allowed, p.Decisions[1].Allowed, p.Decisions[2].Allowed})
	require.Equal(t, 2*time.Second, p.Decisions[0].RetryAfter)
	require.Equal(t, p.Decisions[0], p.Decisions[1])
	require.EqualValues(t, 8, left(t, fake, "api", "k"))

	most := service.GateCharge{Policy: "api", Key: "k", Cost: math.MaxInt64}
	p, err = s.Admit(t.Context(), []service.GateCharge{most, most}, true)
	require.NoError(t, err)
	require.Equal(t, []bool{false, false}, []bool{p.Decisions[0].Allowed, p.Decisions[1].Allowed}, "the sum is the largest there is, and not below zero")
}

// A denial stays one if the bucket refills between two steps.
func TestAdmit_ARefusalStaysOne(t *testing.T) {
	t.Parallel()
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	fake := clienttest.New(func() time.Time { return now })
	require.NoError(t, fake.DefinePolicy(t.Context(), client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Second}))
	require.NoError(t, fake.SetLevel("api", "k", 0))
	s := service.New(latePeek{fake, func() { now = now.Add(time.Hour) }}, roomy, func(service.Call) {})
	p, err := s.Admit(t.Context(), []service.GateCharge{{Policy: "api", Key: "k"}}, false)
	require.NoError(t, err)
	require.False(t, p.Allowed)
	require.False(t, p.Decisions[0].Allowed)
}

// latePeek has time pass before each Peek.
type latePeek struct {
	*clienttest.Fake
	wait func()
}

func (l latePeek) Peek(ctx context.Context, policy, key string, opts ...client.PeekOption) (client.Decision, error) {
	l.wait()
	return l.Fake.Peek(ctx, policy, key, opts...)
}

func TestAdmit_AnErrorDecidesNothing(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	s := service.New(fake, roomy, func(service.Call) {})
	charges := []service.GateCharge{{Policy: "api", Key: "k"}, {Policy: "api", Key: "k", Cost: 2}, {Policy: "default", Key: "o", Cost: 20, Overdraw: true}}
	for steps := range 3 {
		fake.FailNext(append(make([]error, steps), io.ErrUnexpectedEOF)...)
		p, err := s.Admit(t.Context(), charges, false)
		require.Equal(t, service.Unavailable.Reason(), kindOf(t, err))
		require.Zero(t, p)
	}
	require.EqualValues(t, 8, left(t, fake, "api", "k"), "the last one had taken them")
	require.EqualValues(t, 10, left(t, fake, "default", "o"))
}

// A step with its own connection waits for one, until the deadline of the call.
func TestAdmit_WaitsForAConnection(t *testing.T) {
	t.Parallel()
	limiter := newStuck(t)
	s := service.New(limiter, service.Limits{Calls: 10, OwnConnections: 1, Time: time.Minute}, func(service.Call) {})
	var callers sync.WaitGroup
	callers.Go(func() {
		if _, err := s.RefundAll(t.Context(), []service.GateCharge{{Policy: "api", Key: "k", Cost: 1}}); err != nil {
			t.Error(err)
		}
	})
	<-limiter.asked
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	d, err := s.Admit(ctx, []service.GateCharge{{Policy: "default", Key: "k", Cost: 20, Overdraw: true}}, false)
	require.Zero(t, d)
	require.Equal(t, service.DeadlineExceeded.Reason(), kindOf(t, err))
	callers.Go(func() {
		if _, err := s.Admit(t.Context(), []service.GateCharge{{Policy: "api", Key: "j", Cost: 1}}, false); err != nil {
			t.Error(err)
		}
	})
	<-limiter.asked // this shares a connection
	close(limiter.let)
	callers.Wait()
}
