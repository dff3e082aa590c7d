package kit

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/stretchr/testify/require"
)

// A Querier is a pool, a connection or a transaction.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func Acquire(q Querier, policy, key string, cost int64, idempotencyKey ...string) (Decision, error) {
	return RequestOf(policy, key, cost, idempotencyKey...).Acquire(q)
}

func RequestOf(policy, key string, cost int64, idempotencyKey ...string) NullableRequest {
	r := NullableRequest{Policy: &policy, Key: &key, Cost: &cost}
	if len(idempotencyKey) > 0 {
		r.IdempotencyKey = &idempotencyKey[0]
	}
	return r
}

// Refused fails the test unless a statement fails with this SQLSTATE, and returns the error.
func (db *TestDB) Refused(code, sql string, args ...any) *pgconn.PgError {
	_, err := db.Pool.Exec(context.Background(), sql, args...)
	require.Equal(db.T, code, SQLState(err), "%s %v: %v", sql, args, err)
	return PgError(err)
}

func (s *Session) Take(policy, key string, cost int64, idempotencyKey ...string) *Session {
	s.Acquire(policy, key, cost, idempotencyKey...)
	return s
}

// StartExec executes a statement that may wait for other sessions.
func (s *Session) StartExec(sql string) *Pending {
	return s.Start(func(Querier) (Decision, error) {
		_, err := s.Exec(context.Background(), sql)
		return Decision{}, err
	})
}

func (db *TestDB) Policy(name string, capacity, refill int64, every time.Duration, opts ...PolicyOption) *TestDB {
	db.DefinePolicy(name, capacity, refill, every, opts...)
	return db
}

func (db *TestDB) Take(policy, key string, cost int64, idempotencyKey ...string) *TestDB {
	db.Acquire(policy, key, cost, idempotencyKey...)
	return db
}

func (db *TestDB) At(now time.Time) *TestDB { db.SetClock(now); return db }

// SendBatch sends requests in one call, and fails the test if the call fails.
func SendBatch[R, A any](t testing.TB, q Querier, send func(Querier, []R) ([]A, error), requests ...R) []A {
	answers := NoError(send(q, requests))(t)
	require.Len(t, answers, len(requests))
	return answers
}

func Peek(q Querier, policy, key string, cost int64) (Decision, error) {
	return Decide(q, "ratelimit_peek($1, $2, $3)", policy, key, cost)
}

func Refund(q Querier, policy, key string, amount int64) (Decision, error) {
	return Decide(q, "ratelimit_refund($1, $2, $3)", policy, key, amount)
}

func Decide(q Querier, call string, args ...any) (Decision, error) {
	rows, err := tableRows(q, "select "+Functions["peek"].Reads+" from "+call+" as d", args)
	if err != nil {
		return Decision{}, err
	}
	if len(rows) > 0 && rows[0][0] != "" {
		return *decisionOf(rows[0]), nil
	}
	return Decision{}, errors.New("no decision")
}

type Decision = model.Decision

func Allowed(remaining int64, resetAfter time.Duration, capacity int64) Decision {
	return Decision{Allowed: true, Remaining: remaining, ResetAfter: Micros(resetAfter), Capacity: capacity}
}

func Denied(remaining int64, retryAfter, resetAfter time.Duration, capacity int64) Decision {
	return Decision{Remaining: remaining, RetryAfter: Micros(retryAfter), ResetAfter: Micros(resetAfter), Capacity: capacity}
}

// Never is the answer to a cost above the capacity.
func Never(remaining int64, resetAfter time.Duration, capacity int64) Decision {
	return Decision{Remaining: remaining, RetryAfter: model.Never, ResetAfter: Micros(resetAfter), Capacity: capacity}
}

// Replayed is d given again under its idempotency key.
func Replayed(d Decision) Decision {
	d.Replayed = true
	return d
}

func Micros(d time.Duration) model.Micros { return model.Micros(d.Microseconds()) }

// sqlState returns the SQLSTATE of an error, "" when it has none.
func SQLState(err error) string {
	if e := PgError(err); e != nil {
		return e.Code
	}
	return ""
}

// PgError returns the server's error, nil when there is none.
func PgError(err error) (e *pgconn.PgError) {
	errors.As(err, &e)
	return e
}

type Request struct {
	model.BucketID
	Cost           int64
	IdempotencyKey string // empty for none
}

func (r Request) Acquire(q Querier) (Decision, error) { return r.Nullable().Acquire(q) }

func (r Request) By(ctx context.Context, limiter client.Acquirer) (client.Decision, error) {
	opts := []client.CallOption{client.Cost(r.Cost)}
	if r.IdempotencyKey != "" {
		opts = append(opts, client.IdempotencyKey(r.IdempotencyKey))
	}
	return limiter.Acquire(ctx, r.Policy, r.Key, opts...)
}

func (r Request) Nullable() NullableRequest {
	return NullableRequest{&r.Policy, &r.Key, &r.Cost, nullable(r.IdempotencyKey)}
}

func nullable(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// A NullableRequest is a request that may be a bad one; nil is null.
type NullableRequest struct {
	Policy, Key    *string
	Cost           *int64
	IdempotencyKey *string
}

func (r NullableRequest) Acquire(q Querier) (Decision, error) {
	return Decide(q, "ratelimit_acquire($1, $2, $3, $4)", r.Policy, r.Key, r.Cost, r.IdempotencyKey)
}

// CatchDenials creates a function that makes a denial of the error of ratelimit_enforce, which does not tell reset_after.
func (db *TestDB) CatchDenials() {
	db.Execute(`
		create or replace function public.enforced(policy text, key text, cost bigint, idempotency_key text) returns ratelimit.decision language plpgsql as $$
		declare
		  v_detail text;
		  v_told   jsonb;
		begin
		  return ratelimit_enforce(policy, key, cost, idempotency_key);
		exception when sqlstate 'RL429' then
		  get stacked diagnostics v_detail = pg_exception_detail;
		  v_told := v_detail;
		  return (false, v_told['remaining'], ratelimit.duration(((v_told ->> 'retry_after')::numeric * 1000000)::bigint), null, v_told['capacity'], false, false)::ratelimit.decision;
		end $$`)
}

// An Answer is a decision, or the error in its place.
type Answer struct {
	Decision *Decision
	Taken    int64    // by acquire_up_to
	Error    string   // SQLSTATE, message, detail and hint
	Rows     []string // of Ask
}

// Ask makes a call of the call table. Its answer is the rows, as Call.Answer has them, and the decision if they begin with one. By
// another name than the function's it calls what stands for it.
func Ask(q Querier, function, name string, args []any) (a Answer, err error) {
	rows, err := tableRows(q, strings.Replace(Functions[function].Statement(function), "ratelimit_"+function+"(", name+"(", 1), args)
	var texts []string
	for _, columns := range rows {
		texts = append(texts, strings.Join(columns, "|"))
	}
	return AnswerOf(texts), err
}

// ArgsOf are the arguments of a function by their names; those without a value are null.
func ArgsOf(function string, values map[string]any) (args []any) {
	for _, a := range Functions[function].List() {
		args = append(args, values[a.Name])
	}
	return args
}

func tableRows(q Querier, statement string, args []any) (all [][]string, err error) {
	sent := []any{pgx.QueryResultFormats{pgx.TextFormatCode}}
	for _, arg := range args {
		if s, ok := arg.(Span); ok {
			arg = pgtype.Interval{Months: s.Months, Days: s.Days, Microseconds: s.Us, Valid: true}
		}
		sent = append(sent, arg)
	}
	rows, err := q.Query(context.Background(), statement, sent...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var columns []string
		for _, value := range rows.RawValues() {
			columns = append(columns, string(value))
		}
		all = append(all, columns)
	}
	return all, rows.Err()
}

// AnswerOf reads the decision that rows begin with, if they do. Of a hold ResetAfter is HeldFor, as in Call.Told.
func AnswerOf(rows []string) Answer {
	a := Answer{Rows: rows}
	if len(rows) == 0 || strings.Count(rows[0], "|") < 6 {
		return a
	}
	columns := append(strings.Split(rows[0], "|"), "0")
	a.Decision = decisionOf(columns)
	a.Taken, _ = strconv.ParseInt(columns[7], 10, 64) // no number of a request of several charges
	return a
}

// decisionOf reads the columns of a decision; nil where there is none.
func decisionOf(columns []string) *Decision {
	if columns[0] == "" {
		return nil
	}
	number := func(i int) int64 {
		if columns[i] == "" {
			return int64(model.Never)
		}
		n, _ := strconv.ParseInt(columns[i], 10, 64) // of what SQL has cast to bigint
		return n
	}
	return &Decision{
		Allowed: columns[0] == "t", Remaining: number(1), RetryAfter: model.Micros(number(2)), ResetAfter: model.Micros(number(3)), Capacity: number(4),
		Replayed: columns[5] == "t", Shadowed: columns[6] == "t",
	}
}

// Is reports whether the answer is this error.
func (a *Answer) Is(code model.Error) bool {
	return a != nil && strings.Contains(a.Error, string(code))
}

// AcquireMany sends requests in one call, and leaves out arrays that hold nothing but the default.
func AcquireMany(q Querier, requests []NullableRequest) (answers []Answer, err error) {
	policies, keys, costs, idempotencyKeys := []*string{}, []*string{}, []*int64{}, []*string{}
	for _, r := range requests {
		policies, keys, costs = append(policies, r.Policy), append(keys, r.Key), append(costs, r.Cost)
		idempotencyKeys = append(idempotencyKeys, r.IdempotencyKey)
	}
	a := map[string]any{"policies": policies, "keys": keys, "costs": costs, "idempotency_keys": idempotencyKeys}
	dropDefaults(a)
	rows, err := manyRows(q, ArgsOf("acquire_many", a))
	for _, columns := range rows {
		answers = append(answers, Answer{Decision: decisionOf(columns[1:]), Error: columns[0]})
	}
	return answers, err
}

// Every way of sending arguments: typed by the server, and written into the text.
var Protocols = []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeSimpleProtocol}

// Texts that have broken other people's quoting, matching or indexing.
var OddTexts = []string{
	"it's", `"quoted"`, "''", `\`, `\'; drop table ratelimit.buckets; --`, "$$", "$1", "%s %I %L %", "{{ . }}", "null", "NULL",
	" ", "  ", "a", "A", "á", "a\u0301", "ä", "ß", "ss", "İ", "ı", "a ", " a", "a\t", "a\n", "a\r\n", "line\nbreak", "\u00a0", "\u200b", "\ufeff",
	"🚦", "👩‍👩‍👧‍👧", "\U0010ffff", strings.Repeat("語", 170) + "ab", strings.Repeat("🚦", 128), strings.Repeat("x", 512), "\x01\x7f",
}

type InMode struct {
	Conn *pgx.Conn
	Mode pgx.QueryExecMode
}

func (q InMode) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return q.Conn.Query(ctx, sql, append([]any{q.Mode}, args...)...)
}

func (q InMode) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return q.Conn.QueryRow(ctx, sql, append([]any{q.Mode}, args...)...)
}

// StartBatch sends requests in one call that may wait for other sessions. The answers are there when the call is over.
func StartBatch[R, A any](s *Session, send func(Querier, []R) ([]A, error), requests ...R) (call *Pending, answers *[]A) {
	answers = new([]A)
	return s.Start(func(Querier) (_ Decision, err error) {
		if *answers, err = send(s, requests); err == nil && len(*answers) != len(requests) {
			err = fmt.Errorf("%d requests have %d answers", len(requests), len(*answers))
		}
		return Decision{}, err
	}), answers
}
