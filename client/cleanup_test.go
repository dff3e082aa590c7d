package client_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

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

// It replaces the program's logger, so it is not parallel.
func TestRunCleanup_LogsErrorsUnlessTold(t *testing.T) {
	var log strings.Builder
	previous := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(previous)

	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		go client.New(&fakeDB{answers: []any{errors.New("connection refused")}}).RunCleanup(ctx, time.Minute)
		synctest.Wait()
		cancel()
	})
	require.Contains(t, log.String(), `level=WARN msg="rate limit clean-up failed" error="pgratelimit: clean up: connection refused"`)
}
