package client_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// seen is what hooks were told.
type seen struct {
	mu      sync.Mutex
	answers []client.Answer
	calls   []int
}

func (s *seen) hooks() client.Hooks {
	return client.Hooks{
		Answered: func(_ context.Context, a client.Answer) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.answers = append(s.answers, a)
		},
		Combined: func(requests int) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.calls = append(s.calls, requests)
		},
	}
}

// Each request that is sent is in one call.
func TestObserve_SeesTheSizeOfCalls(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 1000, 1, '1 second')")
	var s seen
	limiter := client.NewCombiner(db.Pool, client.Observe(s.hooks()))
	defer limiter.Close()
	blocker := db.Connect(t)
	kit.NoError(blocker.Exec(t.Context(), "begin; lock table ratelimit.policies in access exclusive mode"))(t)

	const callers = 20
	errs := make(chan error, callers)
	for i := range callers {
		go func() {
			key := fmt.Sprint("user:", i)
			if i%2 == 0 {
				errs <- kit.ErrorOf(limiter.Acquire(t.Context(), "api", key))
				return
			}
			errs <- kit.ErrorOf(limiter.AcquireAll(t.Context(), []client.Charge{{Policy: "api", Key: key}, {Policy: "api", Key: key + "a"}}))
		}()
	}
	require.Eventually(t, func() bool { // two calls are under way
		s.mu.Lock()
		defer s.mu.Unlock()
		sent := 0
		for _, n := range s.calls {
			sent += n
		}
		return sent+limiter.Waiting() == callers && len(s.calls) == 2
	}, 20*time.Second, time.Millisecond)
	kit.NoError(blocker.Exec(t.Context(), "rollback"))(t)
	for range callers {
		require.NoError(t, <-errs)
	}
	sum, most := 0, 0
	for _, n := range s.calls {
		sum, most = sum+n, max(most, n)
	}
	require.Equal(t, callers, sum)
	require.Greater(t, most, 1)
	require.Len(t, s.answers, callers)
}

func TestObserve_InATransaction(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 1000, 1, '1 second')")
	var s seen
	limiter := client.New(db.Pool, client.Observe(s.hooks()))
	back := errors.New("back")
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		kit.NoError(limiter.WithTx(tx).Acquire(t.Context(), "api", "k"))(t)
		return back
	})
	require.ErrorIs(t, err, back)
	require.Len(t, s.answers, 1)
	require.Equal(t, client.ResultAllowed, s.answers[0].Result())
}
