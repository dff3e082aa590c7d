package tests

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

func count(decisions []decision, which func(decision) bool) (n int) {
	for _, d := range decisions {
		if which(d) {
			n++
		}
	}
	return n
}

func isAllowed(d decision) bool { return d.Allowed }

func isReplayed(d decision) bool { return d.Replayed }

// A querier is a pool, a connection or a transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func acquire(q querier, policy, key string, cost int64, idempotencyKey ...string) (decision, error) {
	return requestOf(policy, key, cost, idempotencyKey...).acquire(q)
}

func requestOf(policy, key string, cost int64, idempotencyKey ...string) nullableRequest {
	r := nullableRequest{Policy: &policy, Key: &key, Cost: &cost}
	if len(idempotencyKey) > 0 {
		r.IdempotencyKey = &idempotencyKey[0]
	}
	return r
}

// refused fails the test unless a statement fails with this SQLSTATE, and returns the error.
func (db *testDB) refused(code, sql string, args ...any) *pgconn.PgError {
	db.t.Helper()
	_, err := db.Pool.Exec(context.Background(), sql, args...)
	require.Equal(db.t, code, sqlState(err), "%s %v: %v", sql, args, err)
	return pgError(err)
}

// run is exec in a chain.
func (s *session) run(sql string, args ...any) *session {
	s.db.t.Helper()
	s.exec(sql, args...)
	return s
}

// take is acquire in a chain.
func (s *session) take(policy, key string, cost int64, idempotencyKey ...string) *session {
	s.db.t.Helper()
	s.acquire(policy, key, cost, idempotencyKey...)
	return s
}

// startExec executes a statement that may wait for other sessions.
func (s *session) startExec(sql string) *pending {
	return s.start(func(querier) (decision, error) {
		_, err := s.Exec(context.Background(), sql)
		return decision{}, err
	})
}

// blockedBy returns the call when it waits for a lock that the holder has.
func (p *pending) blockedBy(holder *session) *pending {
	p.session.db.t.Helper()
	p.awaitBlockedBy(holder)
	return p
}

// policy is definePolicy in a chain.
func (db *testDB) policy(name string, capacity, refill int64, every time.Duration, opts ...policyOption) *testDB {
	db.t.Helper()
	db.definePolicy(name, capacity, refill, every, opts...)
	return db
}

// take is acquire in a chain.
func (db *testDB) take(policy, key string, cost int64, idempotencyKey ...string) *testDB {
	db.t.Helper()
	db.acquire(policy, key, cost, idempotencyKey...)
	return db
}

// at is setClock in a chain.
func (db *testDB) at(now time.Time) *testDB {
	db.t.Helper()
	db.setClock(now)
	return db
}

// sendBatch sends requests in one call, and fails the test if the call fails.
func sendBatch[R, A any](t testing.TB, q rowsQuerier, send func(rowsQuerier, []R) ([]A, error), requests ...R) []A {
	t.Helper()
	answers, err := send(q, requests)
	require.NoError(t, err)
	require.Len(t, answers, len(requests))
	return answers
}

// startBatch sends requests in one call that may wait for other sessions. The answers are there when the call is over.
func startBatch[R, A any](s *session, send func(rowsQuerier, []R) ([]A, error), requests ...R) (call *pending, answers *[]A) {
	answers = new([]A)
	return s.start(func(querier) (_ decision, err error) {
		if *answers, err = send(s, requests); err == nil && len(*answers) != len(requests) {
			err = fmt.Errorf("%d requests have %d answers", len(requests), len(*answers))
		}
		return decision{}, err
	}), answers
}

func peek(q querier, policy, key string, cost int64) (decision, error) {
	return decide(q, "ratelimit_peek($1, $2, $3)", policy, key, cost)
}

func refund(q querier, policy, key string, amount int64) (decision, error) {
	return decide(q, "ratelimit_refund($1, $2, $3)", policy, key, amount)
}

// decide reads the decision of a call.
func decide(q querier, call string, args ...any) (decision, error) {
	var row decisionRow
	if err := q.QueryRow(context.Background(), "select "+decisionColumns+" from "+call+" as d", args...).Scan(row.fields()...); err != nil {
		return decision{}, err
	}
	d := row.decision()
	if d == nil {
		return decision{}, errors.New("no decision")
	}
	return *d, nil
}

// decisionColumns are those of a decision d, with intervals as exact microseconds. Version 1 of the schema has no shadowed.
const decisionColumns = `
	d.allowed, d.remaining, (extract(epoch from d.retry_after) * 1000000)::bigint,
	(extract(epoch from d.reset_after) * 1000000)::bigint, d.capacity, d.replayed,
	coalesce((to_jsonb(d) ->> 'shadowed')::boolean, false)`

// A decisionRow is scanned from decisionColumns, which are null where there is an error.
type decisionRow struct {
	Allowed                                     *bool
	Remaining, RetryAfter, ResetAfter, Capacity *int64
	Replayed, Shadowed                          *bool
}

func (r *decisionRow) fields() []any {
	return []any{&r.Allowed, &r.Remaining, &r.RetryAfter, &r.ResetAfter, &r.Capacity, &r.Replayed, &r.Shadowed}
}

func (r *decisionRow) decision() *decision {
	if r.Allowed == nil {
		return nil
	}
	return &decision{
		Allowed: *r.Allowed, Remaining: *r.Remaining, RetryAfter: orNever(r.RetryAfter), ResetAfter: orNever(r.ResetAfter),
		Capacity: *r.Capacity, Replayed: *r.Replayed, Shadowed: *r.Shadowed,
	}
}

func orNever(micros *int64) model.Micros {
	if micros == nil {
		return model.Never
	}
	return model.Micros(*micros)
}

type decision = model.Decision

func allowed(remaining int64, resetAfter time.Duration, capacity int64) decision {
	return decision{Allowed: true, Remaining: remaining, ResetAfter: micros(resetAfter), Capacity: capacity}
}

func denied(remaining int64, retryAfter, resetAfter time.Duration, capacity int64) decision {
	return decision{Remaining: remaining, RetryAfter: micros(retryAfter), ResetAfter: micros(resetAfter), Capacity: capacity}
}

// never is the answer to a cost above the capacity.
func never(remaining int64, resetAfter time.Duration, capacity int64) decision {
	return decision{Remaining: remaining, RetryAfter: model.Never, ResetAfter: micros(resetAfter), Capacity: capacity}
}

// replayed is d given again under its idempotency key.
func replayed(d decision) decision {
	d.Replayed = true
	return d
}

func micros(d time.Duration) model.Micros { return model.Micros(d.Microseconds()) }

// sqlState returns the SQLSTATE of an error, "" when it has none.
func sqlState(err error) string {
	if e := pgError(err); e != nil {
		return e.Code
	}
	return ""
}

// pgError returns the server's error, nil when there is none.
func pgError(err error) (e *pgconn.PgError) {
	errors.As(err, &e)
	return e
}

// A request asks for tokens of one bucket.
type request struct {
	model.BucketID
	cost           int64
	idempotencyKey string // empty for none
}

// acquire sends the request in SQL.
func (r request) acquire(q querier) (decision, error) { return r.nullable().acquire(q) }

// by sends the request through a limiter of the client.
func (r request) by(ctx context.Context, limiter client.Acquirer) (client.Decision, error) {
	opts := []client.CallOption{client.Cost(r.cost)}
	if r.idempotencyKey != "" {
		opts = append(opts, client.IdempotencyKey(r.idempotencyKey))
	}
	return limiter.Acquire(ctx, r.Policy, r.Key, opts...)
}

func (r request) nullable() nullableRequest {
	if r.idempotencyKey == "" {
		return requestOf(r.Policy, r.Key, r.cost)
	}
	return requestOf(r.Policy, r.Key, r.cost, r.idempotencyKey)
}

// A nullableRequest is a request that may be a bad one; nil is null.
type nullableRequest struct {
	Policy, Key    *string
	Cost           *int64
	IdempotencyKey *string
}

func (r nullableRequest) acquire(q querier) (decision, error) {
	return decide(q, "ratelimit_acquire($1, $2, $3, $4)", r.Policy, r.Key, r.Cost, r.IdempotencyKey)
}

// enforce sends the request to ratelimit_enforce, through a function that makes a denial of its error: see
// catchDenials. The error does not tell reset_after, so a denial has none.
func (r request) enforce(q querier) (decision, error) {
	n := r.nullable()
	return decide(q, "enforced($1, $2, $3, $4)", n.Policy, n.Key, n.Cost, n.IdempotencyKey)
}

// catchDenials creates the function that request.enforce calls.
func (db *testDB) catchDenials() {
	db.t.Helper()
	db.exec(`
		create function public.enforced(policy text, key text, cost bigint, idempotency_key text) returns ratelimit.decision language plpgsql as $$
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

// An answer is a decision, or the error in its place.
type answer struct {
	Decision *decision
	Taken    int64  // by acquire_up_to
	Error    string // SQLSTATE, message, detail and hint
}

type rowsQuerier interface {
	querier
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// acquireMany sends requests in one call, and leaves out arrays that hold nothing but the default.
func acquireMany(q rowsQuerier, requests []nullableRequest) ([]answer, error) {
	var (
		policies, keys, idempotencyKeys []*string
		costs                           []*int64
		cost, keyed                     bool
	)
	for _, r := range requests {
		policies = append(policies, r.Policy)
		keys = append(keys, r.Key)
		costs = append(costs, r.Cost)
		idempotencyKeys = append(idempotencyKeys, r.IdempotencyKey)
		cost = cost || r.Cost == nil || *r.Cost != 1
		keyed = keyed || r.IdempotencyKey != nil
	}
	if !cost {
		costs = nil
	}
	if !keyed {
		idempotencyKeys = nil
	}
	rows, err := q.Query(context.Background(), "select "+decisionColumns+`,
		       concat_ws(': ', d.error_code, d.error_message, d.error_detail, d.error_hint)
		  from ratelimit_acquire_many($1, $2, $3, $4) as d`, policies, keys, costs, idempotencyKeys)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (a answer, err error) {
		var d decisionRow
		err = row.Scan(append(d.fields(), &a.Error)...)
		a.Decision = d.decision()
		return a, err
	})
}

// acquireEach sends requests one by one, in a savepoint each.
func acquireEach(tx pgx.Tx, requests []nullableRequest) (answers []answer, err error) {
	for _, r := range requests {
		var a answer
		err := pgx.BeginFunc(context.Background(), tx, func(tx pgx.Tx) error {
			d, err := r.acquire(tx)
			a.Decision = &d
			return err
		})
		if e := pgError(err); e != nil {
			a = answer{Error: fmt.Sprintf("%s: %s: %s: %s", e.Code, e.Message, e.Detail, e.Hint)}
		} else if err != nil {
			return nil, err
		}
		answers = append(answers, a)
	}
	return answers, nil
}
