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
	keyed := func(i int) (key string) {
		if text, ok := args[i].(string); ok {
			key = text
			err = cmp.Or(err, checkName("idempotency_key", text))
		}
		return key
	}
	var d model.Decision
	var more []any
	var call func() error
	switch function {
	case "ratelimit_charge":
		cost := number(2)
		err = cmp.Or(err, checkTokens("cost", cost))
		key := keyed(3)
		err = cmp.Or(err, checkCharge(cost))
		call = func() (err error) { d, err = db.model.Charge(now, id, cost, key); return err }
	case "ratelimit_settle":
		cost := number(3)
		err = cmp.Or(err, checkTokens("cost", cost))
		key := keyed(2)
		err = cmp.Or(err, checkCharge(cost))
		call = func() (err error) { d, err = db.model.Settle(now, id, key, cost); return err }
	case "ratelimit_reserve":
		longest, cost := *micros(args[2]), number(3)
		err = cmp.Or(err, checkTokens("cost", cost))
		key := keyed(4)
		if longest < 0 || longest > 365*day {
			err = cmp.Or(err, invalid("max_wait", longest))
		}
		call = func() (err error) { d, err = db.model.Reserve(now, id, longest, cost, key); return err }
	case "ratelimit_acquire_up_to":
		atMost, atLeast := number(2), number(3)
		key := keyed(4)
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
	switch err = call(); {
	case errors.Is(err, model.IdempotencyMismatch):
		err = failure(string(model.IdempotencyMismatch), "idempotency key used before with another cost", "It comes back with another cost.")
	case errors.Is(err, model.NoGrant):
		err = failure(string(model.NoGrant), "no live grant under this idempotency key",
			fmt.Sprintf("Policy %s does not remember it for this key. Nothing was charged.", quoted(id.Policy)))
	}
	return append(columns(d), more...), err
}

func checkCharge(cost int64) error {
	if cost > maxTokens {
		return invalid("cost", cost)
	}
	return nil
}
