package service_test

import (
	"context"
	"errors"
	"io"
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

// However many steps it takes, a request is one call, whose result is that of the whole.
func TestPass_IsOneCall(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	r := &recorder{}
	s := service.New(fake, roomy, r.observe)
	for _, test := range []struct {
		tolls  []service.Toll
		closed bool
		policy string
		result client.Result
	}{
		{[]service.Toll{{Policy: "api", Key: "k", Tokens: 2}}, false, "api", client.ResultAllowed},
		{[]service.Toll{{Policy: "default", Key: "k"}, {Policy: "api", Key: "k", Tokens: 2}, {Policy: "default", Key: "o", Tokens: 20, Overdraws: true}}, false, "api", client.ResultAllowed},
		{[]service.Toll{{Policy: "api", Key: "k"}, {Policy: "default", Key: "o"}}, false, "default", client.ResultDenied},
		{[]service.Toll{{Policy: "api", Key: "k", Tokens: 7}, {Policy: "default", Key: "k", Tokens: 1}}, false, "api", client.ResultDenied},
		{[]service.Toll{{Policy: "api", Key: "k", Tokens: 1}}, true, "api", client.ResultDenied},
		{nil, true, "", client.ResultDenied},
		{[]service.Toll{{Policy: "watched", Key: "k", Tokens: 11, Watches: true}}, false, "watched", client.ResultShadowed},
		{[]service.Toll{{Policy: "default", Key: "k", Tokens: 10, Overdraws: true}}, false, "default", client.ResultAllowed},
	} {
		before := len(r.calls)
		p, err := s.Pass(t.Context(), test.tolls, test.closed)
		require.NoError(t, err)
		require.Len(t, p.Decisions, len(test.tolls))
		require.Len(t, r.calls, before+1)
		call := r.last()
		require.Equal(t, []any{service.Gate, test.policy, test.result}, []any{call.Operation, call.Policy, call.Result}, "%v", test)
		require.Equal(t, test.result != client.ResultDenied, p.Allowed)
	}
	require.EqualValues(t, 6, left(t, fake, "api", "k"))
}

// An error is no passage, also after tokens were taken.
func TestPass_AnErrorIsNoPassage(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	s := service.New(fake, roomy, func(service.Call) {})
	tolls := []service.Toll{{Policy: "api", Key: "k"}, {Policy: "api", Key: "k", Tokens: 2}, {Policy: "default", Key: "o", Tokens: 20, Overdraws: true}}
	for steps := range 3 {
		fake.FailNext(append(make([]error, steps), io.ErrUnexpectedEOF)...)
		p, err := s.Pass(t.Context(), tolls, false)
		var e *service.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, service.Unavailable, e.Kind)
		require.Equal(t, service.Passage{}, p)
	}
	require.EqualValues(t, 8, left(t, fake, "api", "k"), "the last one had taken them")
	require.EqualValues(t, 10, left(t, fake, "default", "o"))
}

// Steps that cannot share a connection wait for one, but no longer than the call may take.
func TestPass_WaitsForAConnection(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	s := service.New(slowRefund{fake, entered, leave}, service.Limits{Calls: 10, OwnConnections: 1, Time: time.Minute}, func(service.Call) {})
	done := make(chan error)
	go func() {
		_, err := s.GiveBack(t.Context(), []service.Toll{{Policy: "api", Key: "k", Tokens: 1}})
		done <- err
	}()
	<-entered
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	p, err := s.Pass(ctx, []service.Toll{{Policy: "default", Key: "k", Tokens: 20, Overdraws: true}}, false)
	require.Equal(t, service.Passage{}, p)
	var e *service.Error
	require.True(t, errors.As(err, &e))
	require.Equal(t, service.DeadlineExceeded, e.Kind)
	p, err = s.Pass(t.Context(), []service.Toll{{Policy: "api", Key: "j", Tokens: 1}}, false)
	require.NoError(t, err)
	require.True(t, p.Allowed, "this shares")
	close(leave)
	require.NoError(t, <-done)
}

// slowRefund holds a refund until it may leave.
type slowRefund struct {
	*clienttest.Fake
	entered, leave chan struct{}
}

func (s slowRefund) Refund(ctx context.Context, policy, key string, amount int64) (client.Decision, error) {
	s.entered <- struct{}{}
	<-s.leave
	return s.Fake.Refund(ctx, policy, key, amount)
}
