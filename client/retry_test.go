package client_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// A request of any kind is sent again where that can do no harm. The answer to the last try is that of the request.
func TestRetry_WhereItDoesNoHarm(t *testing.T) {
	t.Parallel()
	conflict, deadlock, refused, broken := pgError("40001"), pgError("40P01"), pgError("57014"), errors.New("connection reset")
	fatal, panicked, internal, replaced := pgError("57P01"), pgError("XX000"), pgError("XX000"), pgError("XX000")
	fatal.SeverityUnlocalized, panicked.SeverityUnlocalized = "FATAL", "PANIC"
	replaced.Message = "cache lookup failed for function 16999"
	sends := map[string]func(*testing.T, *gatedPool, *client.Combiner, ...client.CallOption) []<-chan answer{
		"acquire": func(t *testing.T, db *gatedPool, _ *client.Combiner, opts ...client.CallOption) []<-chan answer {
			return []<-chan answer{ask(t.Context(), client.New(db), "k1", opts...)}
		},
		"acquire all": func(t *testing.T, db *gatedPool, _ *client.Combiner, opts ...client.CallOption) []<-chan answer {
			return []<-chan answer{askAll(t.Context(), client.New(db), []string{"k1"}, opts...)}
		},
		"acquire, alone in a Combiner": func(t *testing.T, _ *gatedPool, limiter *client.Combiner, opts ...client.CallOption) []<-chan answer {
			return []<-chan answer{ask(t.Context(), limiter, "k1", opts...)}
		},
		"acquire, in a shared call": func(t *testing.T, db *gatedPool, limiter *client.Combiner, opts ...client.CallOption) []<-chan answer {
			_ = ask(t.Context(), limiter, "k1")
			answers := []<-chan answer{ask(t.Context(), limiter, "k2", opts...), ask(t.Context(), limiter, "k3", opts...)}
			db.only(t).grant()
			return answers
		},
	}
	for name, test := range map[string]struct {
		opts     []client.CallOption
		failures []error // of the tries; a request that succeeds is granted after them
		err      error
	}{
		"a grant":                           {nil, nil, nil},
		"a conflict":                        {nil, []error{conflict}, nil},
		"a conflict, with idempotency key":  {once, []error{conflict}, nil},
		"both":                              {nil, []error{deadlock, conflict}, nil},
		"three are enough":                  {nil, []error{conflict, conflict, deadlock}, deadlock},
		"a function that was replaced":      {nil, []error{replaced}, nil},
		"another error":                     {nil, []error{refused}, refused},
		"an internal error":                 {nil, []error{internal}, internal},
		"that again, with idempotency key":  {once, []error{refused}, refused},
		"another error, later":              {nil, []error{conflict, refused}, refused},
		"a conflict, then an unknown end":   {nil, []error{conflict, broken}, broken},
		"an unknown outcome":                {nil, []error{broken}, broken},
		"the end of the session":            {nil, []error{fatal}, fatal},
		"an unknown outcome, settled":       {once, []error{broken}, nil},
		"the end of the session, settled":   {once, []error{fatal}, nil},
		"the end of the server, settled":    {once, []error{panicked}, nil},
		"an unknown outcome, and two again": {once, []error{broken, fatal, broken}, broken},
	} {
		for way, send := range sends {
			t.Run(name+"/"+way, func(t *testing.T) {
				atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
					answers := send(t, db, limiter, test.opts...)
					first := db.only(t)
					require.Len(t, first.keys, len(answers))
					for _, failure := range test.failures {
						call := db.only(t)
						require.Equal(t, []any{first.sql, first.keys, first.once}, []any{call.sql, call.keys, call.once})
						call.answer <- failure
						time.Sleep(100 * time.Millisecond) // the longest pause before another try
					}
					if test.err == nil {
						db.only(t).grant()
					}
					require.Empty(t, db.underWay())
					verb, _, _ := strings.Cut(way, ",")
					for _, got := range answers {
						got := <-got
						require.ErrorIs(t, got.err, test.err)
						if test.err != nil {
							require.EqualError(t, got.err, "pgratelimit: "+verb+": "+test.err.Error())
							require.Zero(t, got.JointDecision)
						}
					}
				})
			})
		}
	}
}

// After the loss of a connection nobody knows: a request that can be sent twice is, but only where there are other connections, and a
// caller that waits.
func TestRetry_AnUnknownOutcomeIsOfNoUse(t *testing.T) {
	t.Parallel()
	lost := errors.New("connection reset")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	db, pool := &fakeDB{answers: []any{lost}}, &fakePool{fakeDB{answers: []any{lost}}}
	for n, err := range []error{
		errOf(client.New(db).Acquire(t.Context(), "p", "k", once...)), // it may be a connection
		errOf(client.New(pool).Acquire(ended, "p", "k", once...)),
		errOf(client.New(pool).Refund(t.Context(), "p", "k", 1)),
	} {
		require.EqualError(t, err, []string{"pgratelimit: acquire: ", "pgratelimit: acquire: ", "pgratelimit: refund: "}[n]+lost.Error())
	}
	require.Len(t, db.sent(), 1)
	require.Len(t, pool.sent(), 2)
}

func TestRetry_BackoffIsRandomAndBounded(t *testing.T) {
	t.Parallel()
	for n, limit := range map[int]time.Duration{
		1: 50 * time.Millisecond,
		2: 100 * time.Millisecond,
		4: 400 * time.Millisecond,
		5: 500 * time.Millisecond,
		9: 500 * time.Millisecond,
	} {
		var low, high bool
		for range 200 {
			pause := client.Backoff(n)
			require.GreaterOrEqual(t, pause, time.Duration(0))
			require.Less(t, pause, limit)
			low = low || pause < limit/4
			high = high || pause > limit*3/4
		}
		require.True(t, low && high, "200 pauses after try %d fill the range up to %v", n, limit)
	}
}

func TestRetry_EndsWithItsContext(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		db := &fakePool{fakeDB{answers: []any{pgError("40001")}}}
		cancel()
		start := time.Now()
		_, err := client.New(db).Acquire(ctx, "p", "k")
		require.Len(t, db.sent(), 1)
		require.Zero(t, time.Since(start))
		require.ErrorIs(t, err, context.Canceled)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr, "the reason for a retry is not lost")
	})
}
