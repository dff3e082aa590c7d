package client_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// Package clienttest compares what is read of answers that fit.
func TestAcquireAll_RefusesAMisshapenAnswer(t *testing.T) {
	t.Parallel()
	charges := []client.Charge{{Policy: "p", Key: "k"}, {Policy: "q", Key: "l"}}
	fields := len(granted(1))
	for binding, numbers := range map[int64]int{1: fields, 0: 2 * fields, 3: 2 * fields} {
		db := &fakeDB{answers: []any{append(granted(1), binding, make([]pgtype.Int8, numbers))}}
		_, err := client.New(db).AcquireAll(t.Context(), charges)
		require.EqualError(t, err, fmt.Sprintf("pgratelimit: acquire all: %d numbers about 2 charges, of which %d is the binding one", numbers, binding))
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
