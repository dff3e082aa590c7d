package torture

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// A refusal is the message of a 22023. The empty one stands for any.
type refusal string

func (r refusal) Error() string { return string(r) }

// limitExceeded is what ratelimit_enforce raises in place of a denial.
const limitExceeded model.Error = "RL429"

// errHeldOtherwise has the SQLSTATE of another error.
var errHeldOtherwise = errors.New("the holder holds with another cost")

// severalKeys is what Citus answers to a request whose buckets have several keys.
const severalKeys model.Error = "0A000"

// refused returns the SQLSTATE and the message of an error.
func refused(err error) (code, message string) {
	if argument, ok := errors.AsType[refusal](err); ok {
		return "22023", string(argument)
	}
	if errors.Is(err, errHeldOtherwise) {
		return "RL002", errHeldOtherwise.Error()
	}
	var other model.Error
	errors.As(err, &other)
	return string(other), map[model.Error]string{
		model.UnknownPolicy:       "unknown policy",
		model.IdempotencyMismatch: "idempotency key used before with another cost",
		model.Settled:             "the grant under this idempotency key was settled",
		model.NoGrant:             "no live grant under this idempotency key",
		limitExceeded:             "rate limit exceeded",
		severalKeys:               "the buckets of a request must have one key",
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
		err := cmp.Or(badName("policy", value(0)), badAmount("capacity", capacity), badAmount("refill", refill), badSpan("every", every, 1, kit.MaxSpan))
		if err == nil {
			err = badRate(capacity.(int64), refill.(int64), every.(span))
		}
		return cmp.Or(err, given(value(6), badSpan("remember", value(6), 1, kit.MaxSpan)))
	case "ratelimit_drop_policy", "ratelimit_reset_all":
		return cmp.Or(badName("policy", value(0)), r.unknown(value(0)))
	case "ratelimit_acquire", "ratelimit_enforce":
		return r.checkSpending(value(0), value(1), value(3), badTokens("cost", value(2)))
	case "ratelimit_acquire_all":
		n := length(value(0))
		if n < 1 || length(value(1)) != n || value(2) != nil && length(value(2)) != n {
			return refusal("")
		}
		return r.checkWhole(fuzzedWhole{chargesOf(args), value(3)})
	case "ratelimit_acquire_many", "ratelimit_acquire_packed":
		args = inOrderOfPacked(function, args)
		n := length(value(0))
		sizes, given := value(3).([]*int64)
		requests := n
		if given {
			requests = len(sizes)
		}
		switch {
		case n < 0 || length(value(1)) != n || value(2) != nil && length(value(2)) != n,
			value(4) != nil && length(value(4)) != requests,
			given && !addUp(sizes, n):
			return refusal("")
		}
	case "ratelimit_override":
		err := cmp.Or(badName("", value(0)), badName("", value(1)), given(value(2), badAmount("", value(2))),
			given(value(3), badAmount("", value(3))), given(value(4), badSpan("", value(4), 1, kit.MaxSpan)))
		if err == nil && value(2) != nil && value(3) != nil && value(4) != nil {
			err = badRate(value(2).(int64), value(3).(int64), value(4).(span))
		}
		if expires, ok := value(5).(instant); ok && int64(expires) <= r.now.UnixMicro() {
			err = refusal("")
		}
		if err != nil {
			return refusal("")
		}
		if err := r.unknown(value(0)); err != nil {
			return err
		}
		p, _ := r.model.Policy(value(0).(string))
		return unsaid(badRate(cmp.Or(value(2), any(p.Capacity)).(int64), cmp.Or(value(3), any(p.Refill)).(int64),
			cmp.Or(value(4), any(span{micros: int64(p.Every)})).(span)))
	case "ratelimit_remove_override":
		return unsaid(r.checkSpending(value(0), value(1), nil, nil))
	case "ratelimit_status":
		return r.checkList(value(0), value(2), value(1))
	case "ratelimit_overrides":
		return r.checkList(value(0), value(1), value(2))
	case "ratelimit_peek":
		return r.checkSpending(value(0), value(1), nil, badTokens("cost", value(2)))
	case "ratelimit_refund":
		return r.checkSpending(value(0), value(1), nil, badTokens("amount", value(2)))
	case "ratelimit_pause":
		return r.checkSpending(value(0), value(1), nil, badSpan("pause_for", value(2), 1000, int64(kit.MaxWaitOfReserve)))
	case "ratelimit_charge":
		return r.checkSpending(value(0), value(1), value(3), badTokens("cost", value(2)), badAmount("cost", value(2)))
	case "ratelimit_settle":
		return r.checkSpending(value(0), value(1), value(2), badTokens("cost", value(3)),
			badAmount("cost", value(3)), badName("idempotency_key", value(2)))
	case "ratelimit_reserve":
		return r.checkSpending(value(0), value(1), value(4), badTokens("cost", value(3)), badSpan("max_wait", value(2), 0, int64(kit.MaxWaitOfReserve)))
	case "ratelimit_acquire_up_to":
		err := badCount("at_most", value(2))
		if err == nil {
			err = unless("at_least", value(3), func(least int64) bool { return 1 <= least && least <= value(2).(int64) })
		}
		return r.checkSpending(value(0), value(1), value(4), nil, err)
	case "ratelimit_reset":
		return r.checkSpending(value(0), value(1), nil, nil)
	case "ratelimit_hold":
		return r.checkHold(value(0), value(1), value(2), badCount("cost", value(3)))
	case "ratelimit_renew", "ratelimit_release":
		return r.checkHold(value(0), value(1), value(2), nil)
	case "ratelimit_holders":
		return r.checkList(value(0), value(1), value(2))
	case "ratelimit_cleanup":
		return badCount("max_rows", value(0))
	case "ratelimit_cleanup_all":
		return unless("budget", value(0), func(budget span) bool { return budget.inMonthsOf30Days().Sign() > 0 })
	}
	return nil
}

// checkSpending checks a call on a bucket, with the refusals of its cost, and of what comes after it.
func (r *round) checkSpending(policy, key, idempotencyKey any, cost error, others ...error) error {
	return cmp.Or(badName("policy", policy), badName("key", key), cost, given(idempotencyKey, badName("idempotency_key", idempotencyKey)),
		cmp.Or(others...), r.unknown(policy))
}

// checkList checks a list of the buckets of a policy and a key, where null is any.
func (r *round) checkList(policy, key, rows any) error {
	return unsaid(cmp.Or(given(policy, badName("", policy)), given(key, badName("", key)), badCount("", rows), given(policy, r.unknown(policy))))
}

// checkHold checks a call about a holder. A policy that refills lends nothing.
func (r *round) checkHold(policy, key, holder any, cost error) error {
	err := cmp.Or(badName("policy", policy), badName("key", key), badName("holder", holder), cost, r.unknown(policy))
	if err == nil && policy != r.lends {
		return refusal("")
	}
	return err
}

// given is the refusal of an argument that may be null.
func given(value any, refusal error) error {
	if value == nil {
		return nil
	}
	return refusal
}

// checkWhole checks a request of several charges.
func (r *round) checkWhole(q fuzzedWhole) error {
	if len(q.charges) < 1 || len(q.charges) > 1000 || q.idempotencyKey != nil && badName("", q.idempotencyKey) != nil {
		return refusal("")
	}
	var err error
	for _, c := range q.charges {
		if cmp.Or(badName("", c.policy), badName("", c.key), badTokens("", c.cost)) != nil {
			return refusal("")
		}
		err = cmp.Or(err, r.unknown(c.policy))
	}
	for _, c := range q.charges {
		if r.fuzzer.citus && c.key != q.charges[0].key {
			return severalKeys
		}
	}
	return err
}

// unsaid is an error whose message is not foretold.
func unsaid(err error) error {
	if _, ok := errors.AsType[refusal](err); ok {
		return refusal("")
	}
	return err
}

func addUp(sizes []*int64, sum int) bool {
	var total int64
	for _, size := range sizes {
		if size == nil || *size < 0 {
			return false
		}
		total += *size
	}
	return total == int64(sum)
}

func (r *round) unknown(policy any) error {
	if name, _ := policy.(string); !r.known[name] {
		return model.UnknownPolicy
	}
	return nil
}

// unless refuses a value that is null, or does not fit.
func unless[T any](argument string, value any, fits func(T) bool) error {
	if v, ok := value.(T); !ok || !fits(v) {
		return refusal("invalid " + argument)
	}
	return nil
}

func badName(argument string, value any) error {
	return unless(argument, value, func(name string) bool { return 1 <= len(name) && len(name) <= 512 })
}

func badTokens(argument string, value any) error {
	return unless(argument, value, func(tokens int64) bool { return tokens >= 0 })
}

func badCount(argument string, value any) error {
	return unless(argument, value, func(count int64) bool { return count >= 1 })
}

func badAmount(argument string, value any) error {
	return unless(argument, value, func(tokens int64) bool { return 0 <= tokens && tokens <= kit.MaxTokens })
}

func badSpan(argument string, value any, least, most int64) error {
	return unless(argument, value, func(s span) bool {
		length := s.inMonthsOf30Days()
		return s.months == 0 && length.Cmp(big.NewInt(least)) >= 0 && length.Cmp(big.NewInt(most)) <= 0
	})
}

// badRate refuses what takes more than 10,000 years to fill, unless it is not meant to.
func badRate(capacity, refill int64, every span) error {
	if refill == 0 {
		return nil
	}
	longest := new(big.Int).Mul(big.NewInt(refill), big.NewInt(10*kit.MaxSpan))
	if new(big.Int).Mul(big.NewInt(capacity), every.inMonthsOf30Days()).Cmp(longest) > 0 {
		return refusal("invalid refill")
	}
	return nil
}

// inMonthsOf30Days is the length in microseconds by which PostgreSQL orders intervals.
func (s span) inMonthsOf30Days() *big.Int {
	length := new(big.Int).Mul(big.NewInt(int64(s.months)*30+int64(s.days)), big.NewInt(kit.Day))
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

// answer makes the call on the model and returns the rows it gives, or the refusal that depends on what was there before.
func (r *round) answer(function string, args []argument) ([]string, error) {
	value := func(i int) any { return args[i].value }
	text := func(i int) string { s, _ := value(i).(string); return s }
	bucket := func() model.BucketID { return model.BucketID{Policy: text(0), Key: text(1)} }
	nothing := []string{""}
	switch function {
	case "ratelimit_define_policy":
		definition := model.Definition{
			Numbers: numbersOf(args[1:4]), Stepped: pointerTo[bool](value(4)), Durable: pointerTo[bool](value(5)), Remember: lengthOf(value(6)),
			Shadow: pointerTo[bool](value(7)),
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
		return r.policies(), nil
	case "ratelimit_acquire":
		return rowOf(r.model.Acquire(r.now, bucket(), value(2).(int64), text(3)))
	case "ratelimit_enforce":
		d, err := r.model.Acquire(r.now, bucket(), value(2).(int64), text(3))
		if err == nil && !d.Allowed {
			err = limitExceeded
		}
		return []string{inColumns(d)}, err
	case "ratelimit_doctor":
		return []string{"t"}, nil
	case "ratelimit_status":
		return r.status(value(0), value(2), value(1).(int64)), nil
	case "ratelimit_acquire_many":
		return r.answerMany(inOrderOfPacked(function, args)), nil
	case "ratelimit_acquire_all":
		w, err := r.acquireAll(fuzzedWhole{chargesOf(args), value(3)})
		if err != nil {
			return nil, err
		}
		return []string{wholeInColumns(w)}, nil
	case "ratelimit_acquire_packed":
		return r.answerPacked(args), nil
	case "ratelimit_override":
		var expires time.Time
		if at, ok := value(5).(instant); ok && at != infinity {
			expires = time.UnixMicro(int64(at)).UTC()
		}
		return nothing, r.model.Override(r.now, bucket(), numbersOf(args[2:5]), expires)
	case "ratelimit_remove_override":
		had, err := r.model.RemoveOverride(r.now, bucket())
		return []string{letter[had]}, err
	case "ratelimit_overrides":
		return r.overrides(value(0), value(1), value(2).(int64)), nil
	case "ratelimit_peek":
		return rowOf(r.model.Peek(r.now, bucket(), value(2).(int64)))
	case "ratelimit_refund":
		return rowOf(r.model.Refund(r.now, bucket(), value(2).(int64)))
	case "ratelimit_pause":
		rows, err := rowOf(r.model.Pause(r.now, bucket(), value(2).(span).length()))
		if errors.Is(err, model.InvalidArgument) {
			err = refusal("invalid policy")
		}
		return rows, err
	case "ratelimit_charge":
		return rowOf(r.model.Charge(r.now, bucket(), value(2).(int64), text(3)))
	case "ratelimit_settle":
		return rowOf(r.model.Settle(r.now, bucket(), text(2), value(3).(int64)))
	case "ratelimit_reserve":
		return rowOf(r.model.Reserve(r.now, bucket(), value(2).(span).length(), value(3).(int64), text(4)))
	case "ratelimit_acquire_up_to":
		d, taken, err := r.model.AcquireUpTo(r.now, bucket(), value(2).(int64), value(3).(int64), text(4))
		return []string{fmt.Sprintf("%s|%d", inColumns(d), taken)}, err
	case "ratelimit_hold":
		d, err := r.model.Hold(r.now, bucket(), text(2), value(3).(int64))
		if errors.Is(err, model.IdempotencyMismatch) {
			err = errHeldOtherwise
		}
		return []string{fmt.Sprintf("%s|%d|%s|%d|%d|%s|%s", letter[d.Allowed], d.Remaining, orNothing(d.RetryAfter), d.HeldFor, d.Capacity,
			letter[d.Renewed], letter[d.Shadowed])}, err
	case "ratelimit_renew":
		heldFor, holds, err := r.model.Renew(r.now, bucket(), text(2))
		if !holds {
			heldFor = model.Never
		}
		return []string{orNothing(heldFor)}, err
	case "ratelimit_release":
		held, err := r.model.Release(r.now, bucket(), text(2))
		return []string{letter[held]}, err
	case "ratelimit_holders":
		var rows []string
		for _, h := range r.model.Holders(r.now, pointerTo[string](value(0)), pointerTo[string](value(1))) {
			rows = append(rows, fmt.Sprintf("%s|%s|%s|%d|%d", h.Policy, h.Key, h.Holder, h.Cost, h.HeldFor))
		}
		return rows[:min(int64(len(rows)), value(2).(int64))], nil
	case "ratelimit_reset_all":
		return nil, r.model.ResetAll(text(0))
	case "ratelimit_reset":
		return nothing, r.model.Reset(bucket())
	case "ratelimit_cleanup":
		return []string{"t|t"}, nil
	case "ratelimit_shard":
		return nil, nil
	case "ratelimit_version":
		return []string{r.version}, nil
	}
	return nil, nil
}

func rowOf(d kit.Decision, err error) ([]string, error) { return []string{inColumns(d)}, err }

// numbersOf are three arguments: capacity, refill and every.
func numbersOf(args []argument) model.Numbers {
	return model.Numbers{Capacity: pointerTo[int64](args[0].value), Refill: pointerTo[int64](args[1].value), Every: lengthOf(args[2].value)}
}

// pointerTo is nil for null.
func pointerTo[T any](value any) *T {
	if v, ok := value.(T); ok {
		return &v
	}
	return nil
}

func lengthOf(value any) *model.Micros {
	s, ok := value.(span)
	if !ok {
		return nil
	}
	return new(s.length())
}

// A fuzzedWhole is a request of several charges; anything of it may be null or bad.
type fuzzedWhole struct {
	charges        []fuzzedCharge
	idempotencyKey any
}

type fuzzedCharge struct{ policy, key, cost any }

// chargesOf joins arrays of policies, keys and costs.
func chargesOf(args []argument) (charges []fuzzedCharge) {
	policies, keys := args[0].value.([]*string), args[1].value.([]*string)
	costs, haveCosts := args[2].value.([]*int64)
	for i := range policies {
		c := fuzzedCharge{valueOf(policies[i]), valueOf(keys[i]), int64(1)}
		if haveCosts {
			c.cost = valueOf(costs[i])
		}
		charges = append(charges, c)
	}
	return charges
}

// requestsOf cuts the charges into requests of the sizes that follow, or of one each. Idempotency keys come last.
func requestsOf(args []argument) (requests []fuzzedWhole) {
	charges, single := chargesOf(args), int64(1)
	sizes, haveSizes := args[3].value.([]*int64)
	if !haveSizes {
		sizes = slices.Repeat([]*int64{&single}, len(charges))
	}
	idempotencyKeys, haveKeys := args[4].value.([]*string)
	for i, size := range sizes {
		q := fuzzedWhole{charges: charges[:*size]}
		charges = charges[*size:]
		if haveKeys {
			q.idempotencyKey = valueOf(idempotencyKeys[i])
		}
		requests = append(requests, q)
	}
	return requests
}

func (r *round) acquireAll(q fuzzedWhole) (kit.Whole, error) {
	if err := r.checkWhole(q); err != nil {
		return kit.Whole{}, err
	}
	var charges []model.Charge
	for _, c := range q.charges {
		charges = append(charges, model.Charge{BucketID: model.BucketID{Policy: c.policy.(string), Key: c.key.(string)}, Cost: c.cost.(int64)})
	}
	idempotencyKey, _ := q.idempotencyKey.(string)
	return r.model.AcquireAll(r.now, charges, idempotencyKey)
}

// inOrderOfPacked has the sizes before the idempotency keys.
func inOrderOfPacked(function string, args []argument) []argument {
	if function == "ratelimit_acquire_many" {
		args = slices.Concat(args[:3], []argument{args[4], args[3]})
	}
	return args
}

func (r *round) answerMany(args []argument) (rows []string) {
	for i, q := range requestsOf(args) {
		w, err := r.acquireAll(q)
		code, message := refused(err)
		r.batch = append(r.batch, code)
		columns := "||||||||" // none
		switch {
		case err == nil && args[3].value == nil:
			columns = inColumns(w.Decisions[0]) + "||"
		case err == nil:
			columns = wholeInColumns(w)
		}
		rows = append(rows, fmt.Sprintf("%d|%s|%s|%s", i+1, code, message, columns))
	}
	return rows
}

// answerPacked has the rows of fuzzPacked.
func (r *round) answerPacked(args []argument) []string {
	var elements, refusals, requests []string
	var element int
	var replayed, shadowed bool
	for i, q := range requestsOf(args) {
		w, err := r.acquireAll(q)
		code, message := refused(err)
		r.batch = append(r.batch, code)
		if err != nil {
			element += len(q.charges)
			refusals = append(refusals, fmt.Sprintf("refused|%d|%s|%s", i+1, code, message))
			continue
		}
		for _, d := range w.Decisions {
			element++
			elements = append(elements, fmt.Sprintf("element|%d|%s", element, inColumns(d)))
			replayed = replayed || d.Replayed
			shadowed = shadowed || d.Shadowed
		}
		if args[3].value != nil {
			requests = append(requests, fmt.Sprintf("request|%d|%s|%s|%s|%d", i+1,
				letter[w.Allowed], letter[w.Replayed], letter[w.Shadowed], w.Binding))
		}
	}
	return slices.Concat([]string{fmt.Sprintf("arrays|0|%s|%s", letter[!replayed], letter[!shadowed])}, elements, refusals, requests)
}

func (r *round) policies() (rows []string) {
	policies := r.model.Policies()
	for _, name := range slices.Sorted(maps.Keys(policies)) {
		p := policies[name]
		if p.IsSlots() {
			rows = append(rows, fmt.Sprintf("%s|%d||||%s||%s", name, p.Capacity, letter[p.Durable], letter[p.Shadow]))
			continue
		}
		rows = append(rows, fmt.Sprintf("%s|%d|%d|%d|%s|%s|%d|%s", name, p.Capacity, p.Refill, int64(p.Every),
			letter[p.Stepped], letter[p.Durable], int64(p.Remember), letter[p.Shadow]))
	}
	return rows
}

// overrides are those of a policy and a key, or of any, in the order of both.
func (r *round) overrides(policy, key any, atMost int64) (rows []string) {
	all := r.model.Overrides()
	for _, id := range inOrder(slices.Collect(maps.Keys(all))) {
		o := all[id]
		if !o.Live(r.now) || policy != nil && policy != id.Policy || key != nil && key != id.Key {
			continue
		}
		expires := ""
		if !o.Expires.IsZero() {
			expires = strconv.FormatInt(o.Expires.UnixMicro(), 10)
		}
		rows = append(rows, fmt.Sprintf("%s|%s|%d|%d|%d|%s", id.Policy, id.Key, o.Capacity, o.Refill, int64(o.Every), expires))
	}
	return rows[:min(int64(len(rows)), atMost)]
}

// status is that of a policy, or of all, the emptiest bucket first.
func (r *round) status(policy, key any, atMost int64) (rows []string) {
	type line struct {
		share *big.Rat
		row   string
	}
	var lines []line
	ids := r.model.Buckets()
	for _, h := range r.model.Holders(r.now, nil, nil) {
		if !slices.Contains(ids, h.BucketID) {
			ids = append(ids, h.BucketID)
		}
	}
	for _, id := range inOrder(ids) {
		if policy != nil && policy != id.Policy || key != nil && key != id.Key {
			continue
		}
		level, p := r.model.Level(r.now, id)
		o, ok := r.model.Overrides()[id]
		reset, _ := r.model.Peek(r.now, id, 0)
		token, _ := r.model.Peek(r.now, id, 1)
		if id.Policy == r.lends {
			p, _ = r.model.Policy(id.Policy)
			level = big.NewInt(reset.Remaining * 1_000_000)
		}
		lines = append(lines, line{
			new(big.Rat).SetFrac(level, big.NewInt(max(1, p.Capacity*1_000_000))),
			fmt.Sprintf("%s|%s|%d|%s|%s|%d|%s", id.Policy, id.Key, reset.Remaining, orNothing(token.RetryAfter), orNothing(reset.ResetAfter),
				p.Capacity, letter[ok && o.Live(r.now)]),
		})
	}
	slices.SortStableFunc(lines, func(a, b line) int { return a.share.Cmp(b.share) })
	for _, l := range lines[:min(int64(len(lines)), atMost)] {
		rows = append(rows, l.row)
	}
	return rows
}

// valueOf is nil for null.
func valueOf[T any](p *T) any {
	if p == nil {
		return nil
	}
	return *p
}

// inColumns is a decision as fuzzFunctions select it.
func inColumns(d kit.Decision) string {
	return fmt.Sprintf("%s|%d|%s|%s|%d|%s|%s", letter[d.Allowed], d.Remaining, orNothing(d.RetryAfter), orNothing(d.ResetAfter), d.Capacity,
		letter[d.Replayed], letter[d.Shadowed])
}

var letter = map[bool]string{true: "t", false: "f"}

// orNothing is empty for never, as null is.
func orNothing(m model.Micros) string {
	if m == model.Never {
		return ""
	}
	return strconv.FormatInt(int64(m), 10)
}

func wholeInColumns(w kit.Whole) string {
	decisions := make([]string, len(w.Decisions))
	for i, d := range w.Decisions {
		decisions[i] = inColumns(d)
	}
	return fmt.Sprintf("%s|%d|%s", inColumns(w.Decision), w.Binding, strings.Join(decisions, "; "))
}
