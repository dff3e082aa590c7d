package client

import (
	"encoding/json"
	"errors"
	"math"
	"math/big"

	"github.com/jackc/pgx/v5/pgconn"
)

// A Denial is the refusal of a guard inside the database: ratelimit_enforce, or a trigger that calls
// ratelimit_guard. The statement failed with it, and tokens that the statement had taken are given back.
//
// Of the Decision, Remaining, RetryAfter and Capacity are set. RetryAfter is the same promise as in
// [Limiter.Acquire].
type Denial struct {
	Decision

	// Policy is the policy of the bucket that denied. The error does not have its key.
	Policy string

	// Cost is the number of tokens asked of that bucket.
	Cost int64
}

// Denied recognises the error of a guard inside the database (SQLSTATE RL429) and returns its numbers. The
// error may come from any statement, and may be wrapped:
//
//	_, err := pool.Exec(ctx, "insert into orders (customer) values ($1)", customer)
//	if d, ok := client.Denied(err); ok {
//		return tryAgainIn(d.RetryAfter)
//	}
func Denied(err error) (d Denial, ok bool) {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "RL429" {
		return Denial{}, false
	}
	var told struct {
		Policy     *string
		Cost       *int64
		Remaining  *int64
		RetryAfter *json.Number `json:"retry_after"`
		Capacity   *int64
	}
	if json.Unmarshal([]byte(pgErr.Detail), &told) != nil ||
		told.Policy == nil || told.Cost == nil || told.Remaining == nil || told.Capacity == nil {
		return Denial{}, false // raised by other code
	}
	d = Denial{Policy: *told.Policy, Cost: *told.Cost}
	d.Remaining, d.Capacity, d.RetryAfter = *told.Remaining, *told.Capacity, never
	if told.RetryAfter != nil {
		seconds, ok := new(big.Rat).SetString(told.RetryAfter.String())
		if !ok {
			return Denial{}, false
		}
		micros := seconds.Mul(seconds, big.NewRat(1_000_000, 1))
		if n := new(big.Int).Quo(micros.Num(), micros.Denom()); n.IsInt64() {
			d.RetryAfter = duration(n.Int64())
		} else {
			d.RetryAfter = duration(math.MaxInt64)
		}
	}
	return d, true
}
