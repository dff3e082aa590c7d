// Package failuretest has the table of errors that the middleware of every language is tested with.
package failuretest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Row is an error, and what becomes of a request that meets it.
type Row struct {
	Error, Name, Kind string
	Status, Keyed     int  // of a fault, the latter with an idempotency key
	Remedy            bool // it is logged
}

// Read reads the table, from a package two folders below its folder's.
func Read(t *testing.T) (rows []Row) {
	text, err := os.ReadFile("../testdata/failures.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &rows))
	require.Greater(t, len(rows), 40)
	return rows
}

// Err is the error of the row, as a database or the library returns it.
func (r Row) Err(t *testing.T) error {
	switch r.Error {
	case "program":
		return fmt.Errorf("%w: key has a zero byte", client.ErrInvalidArgument)
	case "wrong shard":
		return client.ErrWrongShard
	case "timeout":
		return context.DeadlineExceeded
	case "refused":
		_, err := pgconn.Connect(t.Context(), "host=/nonexistent")
		require.Error(t, err)
		return err
	case "lost":
		return io.ErrUnexpectedEOF
	case "overloaded":
		return &client.OverloadedError{Waiting: 1}
	case "closed":
		return client.ErrClosed
	}
	require.Len(t, r.Error, 5, "a SQLSTATE")
	return &pgconn.PgError{Severity: "ERROR", Code: r.Error, Message: r.Name}
}

// Fails reports whether the request fails whatever was chosen.
func (r Row) Fails(hasDecided bool) bool {
	return r.Kind == "fault" || r.Kind == "setup" && !hasDecided
}

// RequireLog makes sure that lines has one line, which names the error, its policy api, and the remedy if there is one.
func (r Row) RequireLog(t *testing.T, lines string) {
	require.Equal(t, 1, strings.Count(lines, "rate limit not checked"), "%s: %s", r.Error, lines)
	require.Contains(t, lines, "passed=map[api:")
	if len(r.Error) == 5 && strings.ToUpper(r.Error) == r.Error {
		require.Contains(t, lines, r.Error)
	}
	if r.Remedy || r.Kind == "setup" && r.Error != "42501" { // of a privilege the message of the server names the function
		_, remedy, _ := strings.Cut(lines, "(SQLSTATE "+r.Error+"). ")
		require.Greater(t, len(remedy), 20, lines)
	}
}

// Log collects what is logged through the default logger until the test ends, which must not be parallel.
func Log(t *testing.T) *strings.Builder {
	var log strings.Builder
	previous := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	t.Cleanup(func() { slog.SetDefault(previous) })
	return &log
}
