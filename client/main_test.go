package client_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// fakeDB answers each query with the next of its answers: an error, a row, or a function that returns one of them. The last one stays.
type fakeDB struct {
	mu            sync.Mutex
	answers       []any
	queries       []query
	before, after func() // around each call, unless they are nil
}

// set changes the answer to all further calls.
func (db *fakeDB) set(answer any) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.answers = []any{answer}
}

type query struct {
	sql  string
	args []any
}

type row []any

func (db *fakeDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if db.before != nil {
		db.before()
	}
	if db.after != nil {
		defer db.after()
	}
	db.mu.Lock()
	answer := db.answers[0]
	if len(db.answers) > 1 {
		db.answers = db.answers[1:]
	}
	db.queries = append(db.queries, query{sql, args})
	db.mu.Unlock()
	if wait, ok := answer.(func(context.Context) any); ok {
		answer = wait(ctx)
	}
	return scanner{answer}
}

// silent is an answer that never comes.
func silent(ctx context.Context) any { <-ctx.Done(); return ctx.Err() }

// after is an answer that comes late.
func after(d time.Duration, answer any) func(context.Context) any {
	return func(context.Context) any { time.Sleep(d); return answer }
}

func (db *fakeDB) sent() []query {
	db.mu.Lock()
	defer db.mu.Unlock()
	return slices.Clone(db.queries)
}

// fakePool is one for all that the client can see.
type fakePool struct{ fakeDB }

func (*fakePool) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) {
	return nil, errors.New("a fake has no transactions")
}
func (*fakePool) Close() {}

type scanner struct{ answer any }

func (s scanner) Scan(dest ...any) error {
	if err, ok := s.answer.(error); ok {
		return err
	}
	values := s.answer.(row)
	if len(values) != len(dest) {
		return fmt.Errorf("%d values for %d destinations", len(values), len(dest))
	}
	for i, value := range values {
		if dest[i] == nil {
			continue
		}
		if nullable, ok := dest[i].(sql.Scanner); ok {
			if err := nullable.Scan(value); err != nil {
				return err
			}
			continue
		}
		reflect.ValueOf(dest[i]).Elem().Set(reflect.ValueOf(value))
	}
	return nil
}

// The columns of a decision as the server sends them.
func granted(remaining int64) row {
	return row{true, remaining, int64(0), int64(0), int64(10), false, false}
}

func pgError(code string) *pgconn.PgError {
	return &pgconn.PgError{Severity: "ERROR", Code: code, Message: "made up"}
}

// refused is the error of a connection that a server refuses.
func refused(t *testing.T) error {
	listener := noError(net.Listen("tcp", "127.0.0.1:0"))(t)
	require.NoError(t, listener.Close())
	_, err := pgconn.Connect(t.Context(), "sslmode=prefer host=127.0.0.1 port="+fmt.Sprint(listener.Addr().(*net.TCPAddr).Port))
	require.Error(t, err)
	return err
}

// noError returns the value of a call that must not fail.
func noError[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T { require.NoError(t, err); return value }
}

// inBubble runs a parallel test in which time passes when all goroutines wait.
func inBubble(t *testing.T, test func(*testing.T)) { t.Parallel(); synctest.Test(t, test) }

// errOf returns the error of a call whose value does not matter.
func errOf[T any](_ T, err error) error { return err }
