package clienttest

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

const maxTokens = 9_000_000_000_000

// spend answers the functions that take more tokens than there are, or as many as there are.
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
	var repeat repeated
	var more []any
	var call func() error
	switch function {
	case "ratelimit_charge":
		cost := number(2)
		err = cmp.Or(err, checkTokens("cost", cost))
		keyed(3)
		err = cmp.Or(err, checkCharge(cost))
		repeat = withCost(cost)
		call = func() (err error) { d, err = db.model.Charge(now, id, cost, key); return err }
	case "ratelimit_settle":
		cost := number(3)
		err = cmp.Or(err, checkTokens("cost", cost))
		keyed(2)
		err = cmp.Or(err, checkCharge(cost))
		repeat = func(_, settled int64) string {
			return fmt.Sprintf("settled with cost %d and is settled again with cost %d", settled, cost)
		}
		call = func() (err error) { d, err = db.model.Settle(now, id, key, cost); return err }
	case "ratelimit_reserve":
		longest, cost := *micros(args[2]), number(3)
		err = cmp.Or(err, checkTokens("cost", cost))
		keyed(4)
		if longest < 0 || longest > 365*day {
			err = cmp.Or(err, invalid("max_wait", longest))
		}
		repeat = withCost(cost)
		call = func() (err error) { d, err = db.model.Reserve(now, id, longest, cost, key); return err }
	case "ratelimit_acquire_up_to":
		atMost, atLeast := number(2), number(3)
		keyed(4)
		if err = cmp.Or(err, checkPositive("at_most", atMost)); err == nil && (atLeast < 1 || atLeast > atMost) {
			err = invalid("at_least", atLeast)
		}
		repeat = func(cost, _ int64) string {
			return fmt.Sprintf("granted with cost %d and is requested again for %d to %d", cost, atLeast, atMost)
		}
		call = func() (err error) {
			var taken int64
			d, taken, err = db.model.AcquireUpTo(now, id, atMost, atLeast, key)
			more = []any{taken}
			return err
		}
	}
	if err = cmp.Or(err, db.checkHasBuckets(id.Policy)); err != nil {
		return nil, err
	}
	err = db.refused(now, id, key, call(), repeat)
	return append(columns(d), more...), err
}

// A repeated returns how a request differs from the grant under its idempotency key, given the costs of the grant.
type repeated func(granted, settled int64) string

func withCost(cost int64) repeated {
	return func(granted, _ int64) string {
		return fmt.Sprintf("granted with cost %d and is requested again with cost %d", granted, cost)
	}
}

// refused is the server's error for a request that the model refuses because of an idempotency key.
func (db *database) refused(now time.Time, id model.BucketID, idempotencyKey string, err error, repeat repeated) error {
	cost, settled := db.model.Remembered(now, id, idempotencyKey)
	key := quoted(idempotencyKey)
	switch {
	case errors.Is(err, model.IdempotencyMismatch):
		return failure(err.Error(), "idempotency key used before with another cost", key+" was "+repeat(cost, settled)+".")
	case errors.Is(err, model.Settled):
		return failure(err.Error(), "the grant under this idempotency key was settled",
			fmt.Sprintf("%s was granted with cost %d and settled with cost %d.", key, cost, settled))
	case errors.Is(err, model.NoGrant):
		return failure(err.Error(), "no live grant under this idempotency key",
			fmt.Sprintf("Policy %s does not remember %s for this bucket. Nothing was charged.", quoted(id.Policy), key))
	}
	return err
}

func checkCharge(cost int64) error {
	if cost > maxTokens {
		return invalid("cost", cost)
	}
	return nil
}
