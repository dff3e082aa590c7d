package clienttest

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

const maxCharges = 1000

// charges are the first three arguments.
func charges(args []any) []model.Charge {
	policies, keys, costs := args[0].([]string), args[1].([]string), args[2].([]int64)
	charges := make([]model.Charge, len(policies))
	for i := range charges {
		charges[i] = model.Charge{BucketID: model.BucketID{Policy: policies[i], Key: keys[i]}, Cost: costs[i]}
	}
	return charges
}

// acquire answers one request. An idempotency key that is nil is none.
func (db *database) acquire(now time.Time, charges []model.Charge, idempotencyKey any) (model.Whole, error) {
	if len(charges) == 0 || len(charges) > maxCharges {
		return model.Whole{}, invalid("policies", fmt.Sprintf("%d elements long", len(charges)))
	}
	var err error
	key, isKeyed := idempotencyKey.(string)
	sums := map[model.BucketID]int64{}
	for i, c := range charges {
		err = cmp.Or(err, ofElement(charges, i, cmp.Or(checkBucket(c.BucketID), checkRange("cost", c.Cost, 0, math.MaxInt64))))
		if isKeyed {
			err = cmp.Or(err, checkName("idempotency_key", key))
		}
		sums[c.BucketID] += min(c.Cost, math.MaxInt64-sums[c.BucketID])
	}
	for _, check := range []func(string) error{db.checkTokensOf, db.checkPolicy} {
		for i, c := range charges {
			err = cmp.Or(err, ofElement(charges, i, check(c.Policy)))
		}
	}
	if err != nil {
		return model.Whole{}, err
	}
	whole, err := db.model.AcquireAll(now, charges, key)
	if err == nil {
		return whole, nil
	}
	for i, c := range charges { // which is refused like all?
		if _, one := db.model.Clone().Acquire(now, c.BucketID, sums[c.BucketID], key); errors.Is(err, one) {
			return whole, ofElement(charges, i, db.refused(now, c.BucketID, key, err, withCost(sums[c.BucketID])))
		}
	}
	return whole, err
}

// ofElement adds to an error the number of its element, if there are several.
func ofElement(charges []model.Charge, i int, err error) error {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && len(charges) > 1 {
		e.Detail = fmt.Sprintf("Element %d of the request: %s", i+1, e.Detail)
	}
	return err
}

// joint has the columns of a decision of several charges, in the order of the client's statement.
func joint(whole model.Whole) []any {
	return append(columns(whole.Decision), int64(whole.Binding), numbersOf(whole.Decisions))
}

// numbersOf are the columns of decisions as numbers.
func numbersOf(decisions []model.Decision) (numbers []pgtype.Int8) {
	for _, d := range decisions {
		for _, column := range columns(d) {
			var number pgtype.Int8
			switch column := column.(type) {
			case bool:
				number = pgtype.Int8{Int64: map[bool]int64{true: 1}[column], Valid: true}
			case int64:
				number = pgtype.Int8{Int64: column, Valid: true}
			}
			numbers = append(numbers, number)
		}
	}
	return numbers
}

// packed answers many requests. Without sizes each has one charge.
func (db *database) packed(now time.Time, charges []model.Charge, sizes, idempotencyKeys any) []any {
	var (
		elements, remaining, capacity   []int64
		retryAfter, resetAfter          []pgtype.Int8
		replayed, shadowed              []bool
		requests, refused               []int64
		allowed, replays, shadows       []bool
		bindings                        []int32
		codes, messages, details, hints []pgtype.Text
	)
	perRequest, isJoint := sizes.([]int64)
	keys, isKeyed := idempotencyKeys.([]string)
	element := int64(0)
	for request := int64(1); element < int64(len(charges)); request++ {
		size := int64(1)
		if isJoint {
			size = perRequest[request-1]
		}
		var key any
		if isKeyed {
			key = keys[request-1]
		}
		whole, err := db.acquire(now, charges[element:element+size], key)
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
			refused = append(refused, request)
			codes, messages = append(codes, known(pgErr.Code)), append(messages, known(pgErr.Message))
			details, hints = append(details, known(pgErr.Detail)), append(hints, pgtype.Text{})
			element += size
			continue
		}
		for _, d := range whole.Decisions {
			element++
			elements, remaining, capacity = append(elements, element), append(remaining, d.Remaining), append(capacity, d.Capacity)
			retryAfter, resetAfter = append(retryAfter, waitInt8(d.RetryAfter)), append(resetAfter, waitInt8(d.ResetAfter))
			replayed, shadowed = append(replayed, d.Replayed), append(shadowed, d.Shadowed)
		}
		requests, bindings = append(requests, request), append(bindings, int32(whole.Binding))
		allowed, replays, shadows = append(allowed, whole.Allowed), append(replays, whole.Replayed), append(shadows, whole.Shadowed)
	}
	values := []any{
		elements, remaining, retryAfter, resetAfter, capacity, replayed, shadowed,
		refused, codes, messages, details, hints,
	}
	if isJoint {
		values = append(values, requests, allowed, replays, shadows, bindings)
	}
	return values
}

func waitInt8(m model.Micros) pgtype.Int8 {
	return pgtype.Int8{Int64: int64(m), Valid: m != model.Never}
}

func known(text string) pgtype.Text { return pgtype.Text{String: text, Valid: true} }

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
		err = cmp.Or(err, checkRange("cost", cost, 0, math.MaxInt64))
		keyed(3)
		err = cmp.Or(err, checkRange("cost", cost, 0, maxTokens))
		repeat = withCost(cost)
		call = func() (err error) { d, err = db.model.Charge(now, id, cost, key); return err }
	case "ratelimit_settle":
		cost := number(3)
		err = cmp.Or(err, checkRange("cost", cost, 0, math.MaxInt64))
		keyed(2)
		err = cmp.Or(err, checkRange("cost", cost, 0, maxTokens))
		repeat = func(_, settled int64) string {
			return fmt.Sprintf("settled with cost %d and is settled again with cost %d", settled, cost)
		}
		call = func() (err error) { d, err = db.model.Settle(now, id, key, cost); return err }
	case "ratelimit_reserve":
		longest, cost := *micros(args[2]), number(3)
		err = cmp.Or(err, checkRange("cost", cost, 0, math.MaxInt64))
		keyed(4)
		err = cmp.Or(err, checkRange("max_wait", longest, 0, 365*day))
		repeat = withCost(cost)
		call = func() (err error) { d, err = db.model.Reserve(now, id, longest, cost, key); return err }
	case "ratelimit_acquire_up_to":
		atMost, atLeast := number(2), number(3)
		keyed(4)
		err = cmp.Or(err, checkRange("at_most", atMost, 1, math.MaxInt64), checkRange("at_least", atLeast, 1, atMost))
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

// settleAll answers with what the client's statement selects.
func (db *database) settleAll(now time.Time, settlements []model.Charge, idempotencyKey string) ([]any, error) {
	if len(settlements) == 0 || len(settlements) > maxCharges {
		return nil, invalid("policies", fmt.Sprintf("%d elements long", len(settlements)))
	}
	err := checkName("idempotency_key", idempotencyKey)
	sums := map[model.BucketID]int64{}
	for _, s := range settlements {
		sums[s.BucketID] += min(s.Cost, math.MaxInt64-sums[s.BucketID])
	}
	for i, s := range settlements {
		of := cmp.Or(checkBucket(s.BucketID), checkRange("cost", s.Cost, 0, maxTokens), db.checkTokensOf(s.Policy))
		if of == nil && sums[s.BucketID] > maxTokens {
			of = failure("22023", "invalid cost", fmt.Sprintf("cost is %d in sum.", sums[s.BucketID]))
		}
		err = cmp.Or(err, ofElement(settlements, i, of))
	}
	for i, s := range settlements {
		err = cmp.Or(err, ofElement(settlements, i, db.checkPolicy(s.Policy)))
	}
	if err != nil {
		return nil, err
	}
	replayed, decisions, wrong, err := db.model.SettleAll(now, settlements, idempotencyKey)
	if errors.Is(err, model.NoGrant) {
		var elements []string
		for i, s := range settlements {
			if slices.Contains(wrong, s.BucketID) {
				elements = append(elements, strconv.Itoa(i+1))
			}
		}
		return nil, failure(err.Error(), "no live grant under this idempotency key",
			fmt.Sprintf("%s is not remembered for these elements of the request: %s. Nothing was settled.", quoted(idempotencyKey), strings.Join(elements, ", ")))
	}
	for i, s := range settlements {
		if slices.Contains(wrong, s.BucketID) {
			return nil, ofElement(settlements, i, db.refused(now, s.BucketID, idempotencyKey, err, func(_, settled int64) string {
				return fmt.Sprintf("settled with cost %d and is settled again with cost %d", settled, sums[s.BucketID])
			}))
		}
	}
	return []any{replayed, numbersOf(decisions)}, err
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

// lend answers the functions of a holder.
func (db *database) lend(function string, now time.Time, id model.BucketID, args []any) ([]any, error) {
	holder, _ := args[2].(string)
	err := cmp.Or(checkBucket(id), checkName("holder", holder))
	var cost int64
	if function == "ratelimit_hold" {
		cost, _ = args[3].(int64)
		err = cmp.Or(err, checkRange("cost", cost, 1, math.MaxInt64))
	}
	if err = cmp.Or(err, db.checkPolicy(id.Policy), db.checkLends(id.Policy)); err != nil {
		return nil, err
	}
	switch function {
	case "ratelimit_hold":
		d, err := db.model.Hold(now, id, holder, cost)
		if errors.Is(err, model.IdempotencyMismatch) {
			held := db.model.Leases(id)[holder].Cost
			unit := "slots"
			if held == 1 {
				unit = "slot"
			}
			err = failure(err.Error(), "the holder holds with another cost",
				fmt.Sprintf("%s holds %d %s and is asked to hold %d.", quoted(holder), held, unit, cost))
		}
		return []any{d.Allowed, d.Remaining, wait(d.RetryAfter), int64(d.HeldFor), d.Capacity, d.Renewed, d.Shadowed}, err
	case "ratelimit_renew":
		heldFor, holds, err := db.model.Renew(now, id, holder)
		if !holds {
			heldFor = model.Never
		}
		return []any{wait(heldFor)}, err
	}
	held, err := db.model.Release(now, id, holder)
	return []any{held}, err
}

// holders lists as many as maxRows. A policy or a key that is nil is any.
func (db *database) holders(now time.Time, policy, key any, maxRows int64) string {
	rows := []map[string]any{}
	for _, h := range db.model.Holders(now, given[string](policy), given[string](key)) {
		if int64(len(rows)) == maxRows {
			break
		}
		rows = append(rows, map[string]any{"policy": h.Policy, "key": h.Key, "holder": h.Holder, "cost": h.Cost, "held_for": h.HeldFor})
	}
	list, _ := json.Marshal(rows)
	return string(list)
}

// checkLends refuses a policy that has no slots.
func (db *database) checkLends(name string) error {
	if p, ok := db.model.Policy(name); ok && !p.IsSlots() {
		return failure("22023", "invalid policy", fmt.Sprintf("Policy %s has tokens, and lends no slots.", quoted(name)))
	}
	return nil
}

// checkTokensOf refuses a policy that has slots in place of buckets.
func (db *database) checkTokensOf(name string) error {
	if p, ok := db.model.Policy(name); ok && p.IsSlots() {
		return failure("22023", "invalid policy", fmt.Sprintf("Policy %s lends slots: it has a lease, and no tokens.", quoted(name)))
	}
	return nil
}

// checkHasBuckets refuses a policy that is not there, or has slots in place of buckets.
func (db *database) checkHasBuckets(name string) error {
	return cmp.Or(db.checkPolicy(name), db.checkTokensOf(name))
}
