package client_test

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

func TestAcquireAll_SendsArraysAndReadsNumbers(t *testing.T) {
	t.Parallel()
	numbers := func(numbers ...int64) (array []pgtype.Int8) {
		for _, n := range numbers {
			array = append(array, pgtype.Int8{Int64: n, Valid: n >= 0})
		}
		return array
	}
	db := &fakeDB{answers: []any{
		row{false, int64(5), nil, nil, int64(6), false, false, int64(2), numbers(1, 2, 0, 3, 4, 1, 0, 0, 5, -1, -1, 6, 0, 0)},
		row{true, int64(2), int64(0), int64(3), int64(4), true, true, int64(1), numbers(1, 2, 0, 3, 4, 0, 1)},
	}}
	limiter := client.New(db)
	charges := []client.Charge{{Policy: "p", Key: "k"}, {Policy: "q", Key: "l", Cost: client.Cost(0)}}
	got := noError(limiter.AcquireAll(t.Context(), charges, client.IdempotencyKey("once")))(t)
	binding := client.Decision{Remaining: 5, RetryAfter: math.MaxInt64, ResetAfter: math.MaxInt64, Capacity: 6}
	require.Equal(t, client.JointDecision{
		Decision: binding, Binding: 1,
		Decisions: []client.Decision{{Allowed: true, Remaining: 2, ResetAfter: 3 * time.Microsecond, Capacity: 4, Replayed: true}, binding},
	}, got)
	require.True(t, got.Never() && got.NeverFull())
	require.Equal(t, []any{[]string{"p", "q"}, []string{"k", "l"}, []int64{1, 0}, "once"}, db.sent()[0].args)

	got = noError(limiter.AcquireAll(t.Context(), charges[:1]))(t)
	require.True(t, got.Replayed && got.Shadowed)
	require.Equal(t, []client.Decision{{Allowed: true, Remaining: 2, ResetAfter: 3 * time.Microsecond, Capacity: 4, Shadowed: true}}, got.Decisions)
	require.Equal(t, []any{[]string{"p"}, []string{"k"}, []int64{1}, nil}, db.sent()[1].args)
	_, err := limiter.AcquireAll(t.Context(), charges)
	require.EqualError(t, err, "pgratelimit: acquire all: 7 numbers about 2 charges, of which 1 is the binding one")
}

func TestAcquireAll_IsRepeatedAsAcquireIs(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		db    interface{ sent() []query }
		opts  []client.CallOption
		err   error
		calls int
	}{
		"a conflict on a pool":        {&fakePool{}, nil, pgError("40001"), 3},
		"a conflict in a transaction": {&fakeDB{}, nil, pgError("40001"), 1},
		"a lost connection":           {&fakePool{}, nil, errors.New("reset"), 1},
		"that, with idempotency key":  {&fakePool{}, []client.CallOption{client.IdempotencyKey("i")}, errors.New("reset"), 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			switch db := test.db.(type) {
			case *fakePool:
				db.answers = []any{test.err}
			case *fakeDB:
				db.answers = []any{test.err}
			}
			_, err := client.New(test.db.(client.Querier)).AcquireAll(t.Context(), []client.Charge{{Policy: "p", Key: "k"}}, test.opts...)
			require.ErrorIs(t, err, test.err)
			require.Len(t, test.db.sent(), test.calls)
		})
	}
}

// Neither is AcquireAll answered from memory, nor is what it says remembered.
func TestDenialCache_IsNotForAcquireAll(t *testing.T) {
	t.Parallel()
	denial := append(denied(time.Hour), int64(1), []pgtype.Int8{{Valid: true}, {Valid: true}, {Int64: 1, Valid: true}, {Valid: true}, {Valid: true}, {Valid: true}, {Valid: true}})
	db := &fakePool{fakeDB{answers: []any{denial, denied(time.Hour), denial}}}
	limiter := client.New(db, client.DenialCache())
	charges := []client.Charge{{Policy: "p", Key: "k"}}
	for calls, ask := range []func() error{
		func() error { return errOf(limiter.AcquireAll(t.Context(), charges)) },
		func() error { return errOf(limiter.Acquire(t.Context(), "p", "k")) },
		func() error { return errOf(limiter.AcquireAll(t.Context(), charges)) },
	} {
		require.NoError(t, ask())
		require.Len(t, db.sent(), calls+1)
	}
	noError(limiter.Acquire(t.Context(), "p", "k"))(t)
	require.Len(t, db.sent(), 3, "that denial is remembered")
}
