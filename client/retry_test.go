package client_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

func TestRetry_Policy(t *testing.T) {
	t.Parallel()
	conflict, deadlock, other := pgError("40001"), pgError("40P01"), pgError("57014")
	broken := errors.New("connection reset")
	for name, test := range map[string]struct {
		answers []any
		tries   int
		err     error
	}{
		"a grant":               {[]any{granted(9)}, 1, nil},
		"a conflict":            {[]any{conflict, granted(9)}, 2, nil},
		"a deadlock":            {[]any{deadlock, granted(9)}, 2, nil},
		"both":                  {[]any{deadlock, conflict, granted(9)}, 3, nil},
		"three are enough":      {[]any{conflict, conflict, deadlock, granted(9)}, 3, deadlock},
		"another error":         {[]any{other, granted(9)}, 1, other},
		"another error, later":  {[]any{conflict, other, granted(9)}, 2, other},
		"an unknown outcome":    {[]any{broken, granted(9)}, 1, broken},
		"a denial is an answer": {[]any{row{false, int64(0), int64(1), int64(1), int64(10), false, false}, granted(9)}, 1, nil},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				db := &fakePool{fakeDB{answers: test.answers}}
				start := time.Now()
				_, err := client.New(db).Acquire(t.Context(), "p", "k")
				require.Len(t, db.sent(), test.tries)
				for _, again := range db.sent()[1:] {
					require.Equal(t, db.sent()[0], again)
				}
				require.ErrorIs(t, err, test.err)
				require.LessOrEqual(t, time.Since(start), 150*time.Millisecond)
			})
		})
	}
}

// After the loss of a connection nobody knows: only a request that can be sent twice is, and only where
// there are other connections.
func TestRetry_AnUnknownOutcome(t *testing.T) {
	t.Parallel()
	broken, fatal, panicked := errors.New("connection reset"), pgError("57P01"), pgError("XX000")
	fatal.SeverityUnlocalized, panicked.SeverityUnlocalized = "FATAL", "PANIC"
	for _, lost := range []error{broken, fatal, panicked} {
		synctest.Test(t, func(t *testing.T) {
			for _, opts := range [][]client.CallOption{nil, once} {
				db := &fakePool{fakeDB{answers: []any{lost, granted(9)}}}
				_, err := client.New(db).Acquire(t.Context(), "p", "k", opts...)
				require.Len(t, db.sent(), 1+len(opts))
				if opts == nil {
					require.ErrorIs(t, err, lost)
				} else {
					require.NoError(t, err)
				}
			}
			db := &fakeDB{answers: []any{lost, granted(9)}}
			require.ErrorIs(t, errOf(client.New(db).Acquire(t.Context(), "p", "k", once...)), lost)
			require.Len(t, db.sent(), 1, "it may be a connection")

			pool := &fakePool{fakeDB{answers: []any{lost, granted(9)}}}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			require.EqualError(t, errOf(client.New(pool).Acquire(ctx, "p", "k", once...)), "pgratelimit: acquire: "+lost.Error())
			require.Len(t, pool.sent(), 1)

			pool = &fakePool{fakeDB{answers: []any{lost, granted(9)}}}
			require.ErrorIs(t, errOf(client.New(pool).Refund(t.Context(), "p", "k", 1)), lost)
			require.Len(t, pool.sent(), 1)
		})
	}
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
