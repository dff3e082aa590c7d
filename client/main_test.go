package client_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"reflect"
	"regexp"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/stretchr/testify/require"
)

// fakeDB answers each query with the next of its answers: an error, a row, or a function that returns one of them. The last one stays.
type fakeDB struct {
	mu            sync.Mutex
	answers       []any
	queries       []query
	before, after func() // around each call, unless they are nil
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

// What makes a call work through any pooler and in any mode, whatever functions a database adds.
func TestStatements_HaveTypedParametersAndNamedColumns(t *testing.T) {
	t.Parallel()
	db := &fakeDB{answers: []any{errors.New("not asked for an answer")}}
	limiter, ctx := client.New(db), t.Context()
	_, _ = limiter.Acquire(ctx, "p", "k")
	_, _ = limiter.Acquire(ctx, "p", "k", client.Cost(2), client.IdempotencyKey("i"))
	_, _ = limiter.Peek(ctx, "p", "k")
	_, _ = limiter.Refund(ctx, "p", "k", 1)
	_ = limiter.Reset(ctx, "p", "k")
	_ = limiter.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 1, Refill: 1, Every: time.Second})
	_ = limiter.DefinePolicy(ctx, client.Policy{Stepped: client.Yes, Durable: client.No, Remember: time.Second})
	_ = limiter.DropPolicy(ctx, "p")
	_, _ = limiter.Policies(ctx)
	_, _ = limiter.Cleanup(ctx)
	_, _ = limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}}, client.IdempotencyKey("i"))
	_ = limiter.Override(ctx, client.Override{})
	_ = limiter.Override(ctx, client.Override{Policy: "p", Key: "k", Capacity: 1, Refill: client.Zero, Every: time.Second, ExpiresAt: time.Now()})
	_, _ = limiter.RemoveOverride(ctx, "p", "k")
	_, _ = limiter.Overrides(ctx)
	_, _ = limiter.Overrides(ctx, client.OfPolicy("p"), client.OfKey("k"), client.MaxRows(1))
	_, _, _ = limiter.Hold(ctx, "p", "k", client.Cost(2))
	_, _ = limiter.Holders(ctx)

	require.Len(t, db.sent(), 18)
	parameter := regexp.MustCompile(`\$\d+(::\w+(?:\[\])?)?`)
	for _, query := range db.sent() {
		require.NotRegexp(t, `;|select \*|\.\*`, query.sql)
		parameters := parameter.FindAllStringSubmatch(query.sql, -1)
		require.Len(t, parameters, len(query.args), query.sql)
		for i, arg := range query.args {
			switch arg.(type) {
			case int64:
				require.Equal(t, "::bigint", parameters[i][1], query.sql)
			case string:
				require.Equal(t, "::text", parameters[i][1], query.sql)
			case []int64:
				require.Equal(t, "::bigint[]", parameters[i][1], query.sql)
			case []string:
				require.Equal(t, "::text[]", parameters[i][1], query.sql)
			case nil:
				require.NotEmpty(t, parameters[i][1], query.sql)
			default:
				t.Errorf("%s is passed a %T", query.sql, arg)
			}
		}
	}
}
