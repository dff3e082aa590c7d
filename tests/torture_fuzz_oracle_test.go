package tests

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"

	"github.com/pgratelimit/pgratelimit/tests/model"
)

// The oracle predicts the result of a call: a refusal that README documents, in the order in which the
// functions check, or else the model's decision.

// A refusal is the message of a 22023.
type refusal string

func (r refusal) Error() string { return string(r) }

// refused returns the SQLSTATE and the message of an error.
func refused(err error) (code, message string) {
	var argument refusal
	if errors.As(err, &argument) {
		return "22023", string(argument)
	}
	var other model.Error
	errors.As(err, &other)
	return string(other), map[model.Error]string{
		model.UnknownPolicy:       "unknown policy",
		model.IdempotencyMismatch: "idempotency key used before with another cost",
		model.InvalidArgument:     "invalid durable", // the only one that is left to the model
	}[other]
}

// check returns the refusal of a call for its arguments alone.
func (r *round) check(function string, args []argument) error {
	value := func(i int) any { return args[i].value }
	switch function {
	case "ratelimit_define_policy":
		capacity, refill, every := value(1), value(2), value(3)
		name, _ := value(0).(string)
		if p, known := r.model.Policy(name); known { // null keeps what is there
			capacity, refill, every = cmp.Or(capacity, any(p.Capacity)), cmp.Or(refill, any(p.Refill)), cmp.Or(every, any(span{micros: int64(p.Every)}))
		}
		err := cmp.Or(badName("policy", value(0)), badAmount("capacity", capacity), badAmount("refill", refill), badSpan("every", every))
		if err == nil {
			err = badRate(capacity.(int64), refill.(int64), every.(span))
		}
		if err == nil && value(6) != nil {
			err = badSpan("remember", value(6))
		}
		return err
	case "ratelimit_drop_policy":
		return cmp.Or(badName("policy", value(0)), r.unknown(value(0)))
	case "ratelimit_acquire":
		return r.checkRequest(value(0), value(1), value(2), value(3))
	case "ratelimit_acquire_many":
		n := length(value(0))
		switch {
		case value(0) == nil:
			return refusal("invalid policies")
		case value(1) == nil || length(value(1)) != n:
			return refusal("invalid keys")
		case value(2) != nil && length(value(2)) != n:
			return refusal("invalid costs")
		case value(3) != nil && length(value(3)) != n:
			return refusal("invalid idempotency_keys")
		}
	case "ratelimit_peek":
		return cmp.Or(badName("policy", value(0)), badName("key", value(1)), badTokens("cost", value(2)), r.unknown(value(0)))
	case "ratelimit_refund":
		return cmp.Or(badName("policy", value(0)), badName("key", value(1)), badTokens("amount", value(2)), r.unknown(value(0)))
	case "ratelimit_reset":
		return cmp.Or(badName("policy", value(0)), badName("key", value(1)), r.unknown(value(0)))
	case "ratelimit_cleanup":
		if rows, ok := value(0).(int64); !ok || rows <= 0 {
			return refusal("invalid max_rows")
		}
	case "ratelimit_cleanup_all":
		if budget, ok := value(0).(span); !ok || budget.inMonthsOf30Days().Sign() <= 0 {
			return refusal("invalid budget")
		}
	}
	return nil
}

func (r *round) checkRequest(policy, key, cost, idempotencyKey any) error {
	err := cmp.Or(badName("policy", policy), badName("key", key), badTokens("cost", cost))
	if err == nil && idempotencyKey != nil {
		err = badName("idempotency_key", idempotencyKey)
	}
	return cmp.Or(err, r.unknown(policy))
}

func (r *round) unknown(policy any) error {
	if name, _ := policy.(string); !r.known[name] {
		return model.UnknownPolicy
	}
	return nil
}

func badName(argument string, value any) error {
	if name, _ := value.(string); len(name) < 1 || len(name) > 512 {
		return refusal("invalid " + argument)
	}
	return nil
}

func badTokens(argument string, value any) error {
	if tokens, ok := value.(int64); !ok || tokens < 0 {
		return refusal("invalid " + argument)
	}
	return nil
}

func badAmount(argument string, value any) error {
	if tokens, ok := value.(int64); !ok || tokens < 1 || tokens > maxTokens {
		return refusal("invalid " + argument)
	}
	return nil
}

func badSpan(argument string, value any) error {
	s, ok := value.(span)
	if !ok || s.months != 0 || s.inMonthsOf30Days().Sign() <= 0 || s.inMonthsOf30Days().Cmp(big.NewInt(maxSpan)) > 0 {
		return refusal("invalid " + argument)
	}
	return nil
}

// badRate refuses what takes more than 10,000 years to fill.
func badRate(capacity, refill int64, every span) error {
	longest := new(big.Int).Mul(big.NewInt(refill), big.NewInt(10*maxSpan))
	if new(big.Int).Mul(big.NewInt(capacity), every.inMonthsOf30Days()).Cmp(longest) > 0 {
		return refusal("invalid refill")
	}
	return nil
}

// inMonthsOf30Days is the length in microseconds by which PostgreSQL orders intervals.
func (s span) inMonthsOf30Days() *big.Int {
	length := new(big.Int).Mul(big.NewInt(int64(s.months)*30+int64(s.days)), big.NewInt(day))
	return length.Add(length, big.NewInt(s.micros))
}

func (s span) length() model.Micros { return model.Micros(s.inMonthsOf30Days().Int64()) }

func length(array any) int {
	switch array := array.(type) {
	case []*string:
		return len(array)
	case []*int64:
		return len(array)
	}
	return -1
}

// answer makes the call on the model and returns the rows it gives, or the refusal that depends on what
// was there before.
func (r *round) answer(function string, args []argument) ([]string, error) {
	value := func(i int) any { return args[i].value }
	text := func(i int) string { s, _ := value(i).(string); return s }
	bucket := func() model.BucketID { return model.BucketID{Policy: text(0), Key: text(1)} }
	nothing := []string{""}
	switch function {
	case "ratelimit_define_policy":
		var definition model.Definition
		definition.Capacity, _ = value(1).(int64)
		definition.Refill, _ = value(2).(int64)
		if every, ok := value(3).(span); ok {
			definition.Every = every.length()
		}
		if stepped, ok := value(4).(bool); ok {
			definition.Stepped = &stepped
		}
		if durable, ok := value(5).(bool); ok {
			definition.Durable = &durable
		}
		if remember, ok := value(6).(span); ok {
			length := remember.length()
			definition.Remember = &length
		}
		if err := r.model.Define(text(0), definition); err != nil {
			return nil, err
		}
		r.known[text(0)] = true
		return nothing, nil
	case "ratelimit_drop_policy":
		delete(r.known, text(0))
		return nothing, r.model.Drop(text(0))
	case "ratelimit_policies":
		return slices.Sorted(maps.Keys(r.known)), nil
	case "ratelimit_acquire":
		d, err := r.model.Acquire(r.now, bucket(), value(2).(int64), text(3))
		return []string{inColumns(d)}, err
	case "ratelimit_acquire_many":
		return r.answerMany(args), nil
	case "ratelimit_peek":
		d, err := r.model.Peek(r.now, bucket(), value(2).(int64))
		return []string{inColumns(d)}, err
	case "ratelimit_refund":
		d, err := r.model.Refund(r.now, bucket(), value(2).(int64))
		return []string{inColumns(d)}, err
	case "ratelimit_reset":
		return nothing, r.model.Reset(bucket())
	case "ratelimit_cleanup":
		return []string{"t|t"}, nil
	case "ratelimit_version":
		return []string{r.version}, nil
	}
	return nil, nil
}

func (r *round) answerMany(args []argument) (rows []string) {
	policies, keys := args[0].value.([]*string), args[1].value.([]*string)
	costs, haveCosts := args[2].value.([]*int64)
	idempotencyKeys, haveKeys := args[3].value.([]*string)
	for i := range policies {
		request := []argument{ofPointer(policies[i]), ofPointer(keys[i]), {value: int64(1)}, {}}
		if haveCosts {
			request[2] = ofPointer(costs[i])
		}
		if haveKeys {
			request[3] = ofPointer(idempotencyKeys[i])
		}
		err := r.check("ratelimit_acquire", request)
		var answer []string
		if err == nil {
			answer, err = r.answer("ratelimit_acquire", request)
		}
		if err != nil {
			code, message := refused(err)
			rows = append(rows, fmt.Sprintf("%d|%s|%s||||||", i+1, code, message))
		} else {
			rows = append(rows, fmt.Sprintf("%d|||%s", i+1, answer[0]))
		}
	}
	return rows
}

func ofPointer[T any](p *T) argument {
	if p == nil {
		return null
	}
	return argument{value: *p}
}

// inColumns is a decision as fuzzStatements select it.
func inColumns(d decision) string {
	retryAfter := ""
	if d.RetryAfter != model.Never {
		retryAfter = fmt.Sprint(int64(d.RetryAfter))
	}
	letter := map[bool]string{true: "t", false: "f"}
	return fmt.Sprintf("%s|%d|%s|%d|%d|%s", letter[d.Allowed], d.Remaining, retryAfter, int64(d.ResetAfter), d.Capacity, letter[d.Replayed])
}
