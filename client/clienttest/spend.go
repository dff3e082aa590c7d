package clienttest

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/model"
)

const maxTokens = 9_000_000_000_000

// spend answers the functions that take more than there is, or what there is.
func (db *database) spend(function string, now time.Time, id model.BucketID, args []any) ([]any, error) {
	number := func(i int) int64 { n, _ := args[i].(int64); return n }
	err := checkBucket(id)
	var key string
	keyed := func(i int) {
		if text, ok := args[i].(string); ok {
			key = text
			err = cmp.Or(err, checkName("idempotency_key", text))
		}
	}
	var d model.Decision
	var more []any
	var call func() error
	switch function {
	case "ratelimit_charge":
		cost := number(2)
		err = cmp.Or(err, checkTokens("cost", cost))
		keyed(3)
		err = cmp.Or(err, checkCharge(cost))
		call = func() (err error) { d, err = db.model.Charge(now, id, cost, key); return err }
	case "ratelimit_settle":
		cost := number(3)
		err = cmp.Or(err, checkTokens("cost", cost))
		keyed(2)
		err = cmp.Or(err, checkCharge(cost))
		call = func() (err error) { d, err = db.model.Settle(now, id, key, cost); return err }
	case "ratelimit_reserve":
		longest, cost := *micros(args[2]), number(3)
		err = cmp.Or(err, checkTokens("cost", cost))
		keyed(4)
		if longest < 0 || longest > 365*day {
			err = cmp.Or(err, invalid("max_wait", longest))
		}
		call = func() (err error) { d, err = db.model.Reserve(now, id, longest, cost, key); return err }
	case "ratelimit_acquire_up_to":
		atMost, atLeast := number(2), number(3)
		keyed(4)
		if err = cmp.Or(err, checkPositive("at_most", atMost)); err == nil && (atLeast < 1 || atLeast > atMost) {
			err = invalid("at_least", atLeast)
		}
		call = func() (err error) {
			var taken int64
			d, taken, err = db.model.AcquireUpTo(now, id, atMost, atLeast, key)
			more = []any{taken}
			return err
		}
	}
	if err = cmp.Or(err, db.checkPolicy(id.Policy)); err != nil {
		return nil, err
	}
	err = refused(call(), key)
	return append(columns(d), more...), err
}

// refused is the server's error for what the model refuses because of an idempotency key.
func refused(err error, idempotencyKey string) error {
	var message, fact string
	switch {
	case errors.Is(err, model.IdempotencyMismatch):
		message, fact = "idempotency key used before with another cost", "comes back with another cost"
	case errors.Is(err, model.Settled):
		message, fact = "the grant under this idempotency key was settled", "was granted and settled"
	case errors.Is(err, model.NoGrant):
		message, fact = "no live grant under this idempotency key", "is not remembered for this key; nothing was charged"
	default:
		return err
	}
	return failure(err.Error(), message, fmt.Sprintf("%s %s.", quoted(idempotencyKey), fact))
}

func checkCharge(cost int64) error {
	if cost > maxTokens {
		return invalid("cost", cost)
	}
	return nil
}
