package tests

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/tests/model"
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
	var k *string
	if len(idempotencyKey) > 0 {
		k = &idempotencyKey[0]
	}
	return decide(q, "ratelimit_acquire($1, $2, $3, $4)", policy, key, cost, k)
}

func peek(q querier, policy, key string, cost int64) (decision, error) {
	return decide(q, "ratelimit_peek($1, $2, $3)", policy, key, cost)
}

func refund(q querier, policy, key string, amount int64) (decision, error) {
	return decide(q, "ratelimit_refund($1, $2, $3)", policy, key, amount)
}

// decide reads the decision that a call answers, intervals as exact microseconds.
func decide(q querier, call string, args ...any) (d decision, err error) {
	var retryAfter *int64
	err = q.QueryRow(context.Background(), `
		select allowed, remaining, (extract(epoch from retry_after) * 1000000)::bigint,
		       (extract(epoch from reset_after) * 1000000)::bigint, capacity, replayed
		  from `+call, args...).
		Scan(&d.Allowed, &d.Remaining, &retryAfter, &d.ResetAfter, &d.Capacity, &d.Replayed)
	d.RetryAfter = model.Never
	if retryAfter != nil {
		d.RetryAfter = model.Micros(*retryAfter)
	}
	return d, err
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

func micros(d time.Duration) model.Micros {
	return model.Micros(d.Microseconds())
}

// sqlState returns the SQLSTATE of an error, "" when it has none.
func sqlState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// A wish is one request of a batch; nil is null.
type wish struct {
	Policy, Key    *string
	Cost           *int64
	IdempotencyKey *string
}

// An reply is a decision, or the error that stands in its place.
type reply struct {
	Decision *decision
	Error    string // SQLSTATE, message, detail and hint
}

type rowsQuerier interface {
	querier
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// acquireMany sends the wishes in one call; arrays that hold nothing but the default are left out.
func acquireMany(q rowsQuerier, wishes []wish) ([]reply, error) {
	var (
		policies, keys, idempotencyKeys []*string
		costs                           []*int64
		cost, keyed                     bool
	)
	for _, w := range wishes {
		policies = append(policies, w.Policy)
		keys = append(keys, w.Key)
		costs = append(costs, w.Cost)
		idempotencyKeys = append(idempotencyKeys, w.IdempotencyKey)
		cost = cost || w.Cost == nil || *w.Cost != 1
		keyed = keyed || w.IdempotencyKey != nil
	}
	if !cost {
		costs = nil
	}
	if !keyed {
		idempotencyKeys = nil
	}
	rows, err := q.Query(context.Background(), `
		select request, allowed, remaining, (extract(epoch from retry_after) * 1000000)::bigint,
		       (extract(epoch from reset_after) * 1000000)::bigint, capacity, replayed,
		       concat_ws(': ', error_code, error_message, error_detail, error_hint)
		  from ratelimit_acquire_many($1, $2, $3, $4)`, policies, keys, costs, idempotencyKeys)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (o reply, err error) {
		var (
			request                                       int64
			isAllowed, isReplayed                         *bool
			remaining, retryAfter, resetAfter, capacityOf *int64
		)
		err = row.Scan(&request, &isAllowed, &remaining, &retryAfter, &resetAfter, &capacityOf, &isReplayed, &o.Error)
		if err == nil && isAllowed != nil {
			o.Decision = &decision{Allowed: *isAllowed, Remaining: *remaining, RetryAfter: model.Never,
				ResetAfter: model.Micros(*resetAfter), Capacity: *capacityOf, Replayed: *isReplayed}
			if retryAfter != nil {
				o.Decision.RetryAfter = model.Micros(*retryAfter)
			}
		}
		return o, err
	})
}

// acquireEach sends the wishes one by one.
func acquireEach(tx pgx.Tx, wishes []wish) (replies []reply, err error) {
	for _, w := range wishes {
		var o reply
		err := pgx.BeginFunc(context.Background(), tx, func(tx pgx.Tx) error {
			d, err := decide(tx, "ratelimit_acquire($1, $2, $3, $4)", w.Policy, w.Key, w.Cost, w.IdempotencyKey)
			o.Decision = &d
			return err
		})
		if e := pgError(err); e != nil {
			o = reply{Error: fmt.Sprintf("%s: %s: %s: %s", e.Code, e.Message, e.Detail, e.Hint)}
		} else if err != nil {
			return nil, err
		}
		replies = append(replies, o)
	}
	return replies, nil
}

// pgError returns the server's error, nil when there is none.
func pgError(err error) (e *pgconn.PgError) {
	errors.As(err, &e)
	return e
}
