package client_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/stretchr/testify/require"
)

// requests are for one token each of the buckets of keys.
func requests(keys ...string) (list []client.Request) {
	for _, key := range keys {
		list = append(list, client.Request{Policy: "p", Key: key})
	}
	return list
}

type manyAcquirer interface {
	AcquireMany(ctx context.Context, requests []client.Request) []client.Answer
}

// askMany asks for all in one call, beside the test.
func askMany(ctx context.Context, limiter manyAcquirer, list []client.Request) <-chan []client.Answer {
	got := make(chan []client.Answer, 1)
	go func() { got <- limiter.AcquireMany(ctx, list) }()
	synctest.Wait() // until they wait
	return got
}

func TestAcquireMany_RequestsShareOneCallAndAreAnsweredInOrder(t *testing.T) {
	var seen []client.Answer
	hooks := client.Hooks{Answered: func(_ context.Context, a client.Answer) { seen = append(seen, a) }}
	atGate(t, 2, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		list := requests("k3", "k1", strings.Repeat("k", 513), "k3", "k2", "a\x00b")
		list[1].Cost = client.Cost(20)
		got := askMany(t.Context(), limiter, list)
		require.Len(t, db.underWay(), 2, "a text that would fail the call travels alone")
		call := db.underWay()[0]
		if !call.batch {
			call = db.underWay()[1]
		}
		require.Equal(t, []string{"k3", "k1", "k3", "k2"}, call.keys)
		require.Equal(t, []int64{1, 20, 1, 1}, call.costs)
		db.grantAll()
		answers := <-got
		for i, remaining := range []int64{3, 1, 0, 3, 2} {
			require.NoError(t, answers[i].Err)
			require.Equal(t, remaining, answers[i].Decision.Remaining)
		}
		require.ErrorIs(t, answers[5].Err, client.ErrInvalidArgument)
		require.Equal(t, answers, seen)
		require.Equal(t, "acquire", seen[0].Operation)
	}, client.Observe(hooks))
}

func TestAcquireMany_TheEndOfContextEndsTheWait(t *testing.T) {
	behindK1(t, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		ctx, leave := context.WithCancel(t.Context())
		got := askMany(ctx, limiter, requests("k2", "k3"))
		leave()
		for _, a := range <-got {
			require.ErrorIs(t, a.Err, context.Canceled)
		}
		require.Zero(t, limiter.Waiting())
		db.only(t).grant()
	})
}

func TestAcquireMany_MaxWaitingRefusesTheRequestsBeyondIt(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db, limiter := gated(t, client.CallsInFlight(1), client.MaxWaiting(2))
		_ = ask(t.Context(), limiter, "k1")
		got := askMany(t.Context(), limiter, requests("k2", "k3", "k4"))
		db.grantAll()
		answers := <-got
		require.NoError(t, errors.Join(answers[0].Err, answers[1].Err))
		require.ErrorIs(t, answers[2].Err, client.ErrOverloaded)
		limiter.Close()
		require.ErrorIs(t, limiter.AcquireMany(t.Context(), requests("k1"))[0].Err, client.ErrClosed)
	})
}

// The rules of a DenialCache are those of Acquire: the cost counts, and a refund ends the denial.
func TestAcquireMany_RepeatsDenialsFromMemory(t *testing.T) {
	atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		list := requests("k1", "k2")
		list[0].Cost = client.Cost(5)
		got := askMany(t.Context(), limiter, list)
		db.only(t).deny(time.Minute)
		first := <-got
		again := limiter.AcquireMany(t.Context(), list) // without a call
		require.False(t, again[0].Decision.Allowed || again[1].Decision.Allowed)
		require.Equal(t, first[0].Decision, again[0].Decision)

		less := requests("k1", "k2", "k2")
		less[0].Cost = client.Cost(4)
		less[1].IdempotencyKey = &[]string{"i"}[0]
		got = askMany(t.Context(), limiter, less)
		call := db.only(t)
		require.Equal(t, []string{"k1"}, call.keys, "a smaller cost was not denied")
		call.grant()
		db.only(t).grant() // nor is a request with an idempotency key
		answers := <-got
		require.True(t, answers[0].Decision.Allowed && answers[1].Decision.Allowed && !answers[2].Decision.Allowed)

		go limiter.Refund(t.Context(), "p", "k2", 1) //nolint:errcheck // the calls below see it
		db.only(t).grant()
		synctest.Wait() // until the refund has its answer
		got = askMany(t.Context(), limiter, requests("k2"))
		db.only(t).grant()
		require.True(t, (<-got)[0].Decision.Allowed)
	}, client.DenialCache())
}

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
