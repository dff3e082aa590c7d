package torture

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// An operation is what one call did to one bucket, as its caller saw it. Each request of a batch is an
// operation of its own, and so is what a request of several charges asks of each bucket.
type operation struct {
	kit.Spending
	then         *operation // on the same bucket in the same transaction, with the bucket locked in between
	undone       bool       // its transaction was rolled back
	inDoubt      bool       // its commit had no answer
	batch, place int        // among the requests of one batch for this bucket; batches count from 1
	client       int

	called, returned time.Duration
	readings         []time.Time // of the clock, by which it may have decided
	rules            []rules     // by which it may have decided
	answer           *kit.Answer // nil for calls that have none
	contested        bool        // its idempotency key was granted to somebody else meanwhile, or lives again by a clock that went back
	whole            *wholePart  // of an acquire all
	own              *rules      // the numbers that its transaction gave the bucket before
	sets             int         // number of the override that came with this change of the bucket
	reread           bool        // it read the numbers together with the bucket, or after it had locked it
	gone             bool        // the policy was dropped meanwhile
	enforced         bool        // it was ratelimit_enforce: a denial is an error, which tells neither reset_after nor replayed
}

// A wholePart is what an acquire all says about all its buckets.
type wholePart struct {
	granted  bool
	policies []string // of all its buckets
}

// spends reports whether the operation is a spending.
func (op *operation) spends() bool {
	return slices.Contains([]string{"charge", "settle", "reserve", "acquire_up_to"}, op.Function)
}

// answerOf is what the model says to the call, of a bucket or of slots.
func (op *operation) answerOf(p model.Policy, s model.State, slots model.Slots, now time.Time) (told kit.Answer, next *model.Model) {
	next = model.Of(op.BucketID, p, s, slots)
	told, err := op.Foretold(next, now)
	if err != nil {
		code, _ := kit.Refusal(err)
		told = kit.Answer{Error: code}
	}
	return told, next
}

// remembers reports whether the answer may say that a grant was stored.
func (op *operation) remembers() bool {
	return op.takes() || op.spends() && op.Function != "settle" && op.answer.Decision != nil && op.answer.Decision.Allowed && !op.answer.Decision.Replayed
}

// Rules are a policy and the override of a bucket, as they were in force at the same time.
type rules struct {
	policy   model.Policy
	override *model.Override // nil for none
	number   int             // of the override, or of its end, among those of the bucket
}

// at returns the policy with the numbers that apply.
func (r rules) at(now time.Time) model.Policy {
	if r.override != nil {
		return r.policy.With(*r.override, now)
	}
	return r.policy
}

// takes reports whether the answer says that tokens were taken.
func (op *operation) takes() bool {
	return (op.Function == "acquire" || op.Function == "acquire_all" && op.whole.granted) && op.answer.Decision != nil &&
		op.answer.Decision.Allowed && !op.answer.Decision.Replayed && !op.answer.Decision.Shadowed && op.Cost > 0
}

// denied reports whether an acquire was, or would have been if its policy did more than watch.
func (op *operation) denied() bool {
	return op.Function == "acquire" && op.answer.Decision != nil && (!op.answer.Decision.Allowed || op.answer.Decision.Shadowed)
}

func (op *operation) overlaps(other *operation) bool {
	return op.called <= other.returned && other.called <= op.returned
}

// A standing is a state that a bucket may have between two operations.
type standing struct {
	model.State
	slots   model.Slots
	batches map[int]int // requests done, of batches under way
	numbers int         // of the newest override that a transaction gave the bucket together with a change of it
}

// next returns the standings that the operation may lead to. A nil answer stands for any answer.
func (op *operation) next(at standing, answer *kit.Answer) (all []any) {
	if isSlots(op.Policy) {
		for _, s := range op.lends(at.slots, answer) {
			if !op.undone {
				all = append(all, standing{slots: s})
			}
			if op.undone || op.inDoubt {
				all = append(all, at)
			}
		}
		return all
	}
	if op.batch != 0 {
		if at.batches[op.batch] != op.place {
			return nil
		}
		batches := maps.Clone(at.batches)
		if batches == nil {
			batches = map[int]int{}
		}
		batches[op.batch]++
		at.batches = batches
	}
	if op.gone { // and perhaps it went by the policy, or by buckets, that nobody sees any more
		all = append(all, at)
	}
	sets := op.sets
	if op.Function == "reset" && at.HasNoRow() { // a row that another session is creating just then stays, too
		sets = 0
	}
	left := op.leads(at, answer)
	if op.gone && op.then != nil { // only the first call of the transaction went by the policy that nobody sees
		left = append(left, op.thenLeads(at, answer)...)
	}
	for _, s := range left {
		if op.undone || op.inDoubt {
			all = append(all, at)
		}
		if op.undone {
			continue
		}
		all = append(all, standing{State: s, batches: at.batches, numbers: max(at.numbers, sets)})
	}
	return all
}

func (op *operation) leads(at standing, answer *kit.Answer) (left []model.State) {
	switch {
	case answer.Is(model.UnknownPolicy):
		return nil
	case op.Function == "reset":
		return []model.State{at.Reset()}
	case op.Function == "drop_policy" || op.Function == "crash":
		return []model.State{{}}
	}
	for _, r := range op.rules {
		if op.reread && r.number < at.numbers {
			continue
		}
		for _, now := range op.readings {
			for _, s := range at.Doubts(op.IdempotencyKey, now) {
				left = append(left, op.leadsTo(r, now, s, answer)...)
			}
		}
	}
	if op.then == nil {
		return left
	}
	var next []model.State
	for _, s := range left {
		next = append(next, op.thenLeads(standing{State: s}, answer)...)
	}
	return next
}

// thenLeads returns the states that the second call of a transaction leads to. answer is that of the first, which is nil if
// neither has one yet.
func (op *operation) thenLeads(at standing, answer *kit.Answer) []model.State {
	if answer == nil {
		return op.then.leads(at, nil)
	}
	return op.then.leads(at, op.then.answer)
}

// leadsTo returns the states that the operation leads to from one state, by one reading of the clock.
func (op *operation) leadsTo(r rules, now time.Time, s model.State, answer *kit.Answer) []model.State {
	p := r.at(now)
	if op.isFar(p, now, s, answer) {
		return nil
	}
	var d kit.Decision
	switch op.Function {
	case "cleanup":
		return s.CleanUps(r.policy, p, now)
	case "acquire_all":
		return op.leadsShare(p, now, s, answer)
	}
	var told kit.Answer
	left := []model.State{s}
	if op.Function == "acquire" { // most are, and need no tables of a model
		var err error
		told.Decision = new(kit.Decision)
		if left[0], *told.Decision, err = s.Acquire(p, now, op.Cost, op.IdempotencyKey); err != nil {
			told = kit.Answer{Error: err.Error()}
		}
	} else {
		var next *model.Model
		told, next = op.answerOf(p, s, model.Slots{}, now)
		left[0], _ = next.Left(op.BucketID)
	}
	if told.Decision != nil {
		d = *told.Decision
	}
	// It may have made the row before it saw the key, or that the grant which it had read has expired.
	if op.Function == "acquire" && op.contested && (d.Replayed || told.Error != "" && op.batch != 0) ||
		op.spends() && d.Replayed && (op.contested || op.Function == "settle" && s.HasNoRow()) || op.Function == "settle" && d.Shadowed && s.HasNoRow() {
		left = append(left, s.Touch(p, now))
	}
	if !op.isTold(told, now, answer) {
		return nil
	}
	return left
}

// isTold reports whether the answer is what was decided by a reading of the clock. A nil answer stands for any.
func (op *operation) isTold(told kit.Answer, now time.Time, answer *kit.Answer) bool {
	switch {
	case answer == nil:
		return true
	case told.Error != "" || answer.Error != "":
		return told.Error != "" && strings.HasPrefix(answer.Error, told.Error)
	case told.Decision == nil || answer.Decision == nil:
		return slices.Equal(told.Rows, answer.Rows)
	}
	d := *told.Decision
	if op.enforced && !d.Allowed {
		d.ResetAfter, d.Replayed = model.Never, false
	}
	return op.tells(d, now, *answer.Decision) && told.Taken == answer.Taken
}

// leadsShare is leadsTo of a part of a request of several charges.
func (op *operation) leadsShare(p model.Policy, now time.Time, s model.State, answer *kit.Answer) []model.State {
	if (answer.Is(model.IdempotencyMismatch) || answer.Is(model.Settled)) && len(op.whole.policies) > 1 { // with another bucket, perhaps
		return []model.State{s}
	}
	left := []model.State{s}
	d, err := s.Ask(p, now, op.Cost, op.IdempotencyKey)
	if after := s.AskAfterEnd(p, now, op.Cost, d); answer != nil && answer.Decision != nil && !op.whole.granted && after == *answer.Decision {
		d = after
	}
	if d.Allowed && (answer == nil || op.whole.granted) {
		left[0], d, err = s.Acquire(p, now, op.Cost, op.IdempotencyKey)
		if answer == nil {
			left = append(left, s)
		}
	}
	told := kit.Answer{Decision: &d}
	if err != nil {
		told = kit.Answer{Error: err.Error()}
	}
	if !op.isTold(told, now, answer) || answer != nil && op.whole.granted && !d.Allowed {
		return nil
	}
	return left
}

// tells reports whether the answer is what was decided by a reading of the clock. The wait of a reservation counts from a later
// one, after the bucket was locked.
func (op *operation) tells(d kit.Decision, now time.Time, answer kit.Decision) bool {
	if op.Function != "reserve" || !d.Allowed || d.Replayed || d.RetryAfter == 0 {
		return d == answer
	}
	return slices.ContainsFunc(op.readings, func(told time.Time) bool {
		left := d
		left.RetryAfter = max(0, d.RetryAfter-model.Micros(told.Sub(now).Microseconds()))
		return left == answer
	})
}

// mayBeReplayed tells whether the answer is, or may be, the first one under an idempotency key. ratelimit_enforce does not tell.
func (op *operation) mayBeReplayed(answer *kit.Answer) bool {
	return answer.Decision.Replayed || op.enforced && !answer.Decision.Allowed && op.IdempotencyKey != ""
}

// isFar reports cheaply that the answer cannot come from a state, which saves the model most of its work.
func (op *operation) isFar(p model.Policy, now time.Time, s model.State, answer *kit.Answer) bool {
	if op.Function != "acquire" && op.Function != "acquire_all" && op.Function != "peek" || answer == nil || answer.Decision == nil || op.mayBeReplayed(answer) {
		return false
	}
	before := answer.Decision.Remaining
	if op.takes() {
		before += op.Cost
	}
	return p.Capacity != answer.Decision.Capacity || s.Remaining(p, now) != before
}

var bucketModel = porcupine.NondeterministicModel{
	Init: func() []any { return []any{standing{}} },
	Step: func(state, input, output any) []any {
		return input.(*operation).next(state.(standing), output.(*kit.Answer))
	},
	// Those that are compared have the same operations behind them, and so the same batches.
	Equal: func(a, b any) bool {
		return a.(standing).numbers == b.(standing).numbers && a.(standing).Equal(b.(standing).State) && a.(standing).slots.Equal(b.(standing).slots)
	},
	Hash: func(state any) uint64 { return state.(standing).Hash() + state.(standing).slots.Hash() },
}

// A history is all operations on one bucket, which began full.
type history []*operation

// upTo returns the operations known after the first n answers. Calls under way then have no answer yet.
func (h history) upTo(n int) (ops []porcupine.Operation) {
	byReturn := slices.SortedFunc(slices.Values(h), func(a, b *operation) int { return cmp.Compare(a.returned, b.returned) })
	for i, op := range byReturn {
		known := porcupine.Operation{ClientId: op.client, Input: op, Call: int64(op.called), Output: op.answer, Return: int64(op.returned)}
		switch {
		case i < n:
		case op.called <= byReturn[n-1].returned:
			known.Output, known.Return = (*kit.Answer)(nil), math.MaxInt64
		default:
			continue
		}
		ops = append(ops, known)
	}
	return ops
}

// mostSteps of the model are tried to find an order, and as many states. No clock decides whether a history is decided.
const mostSteps = 6_000

// bounded is the model for as many steps: nothing is possible after them.
func bounded() (rules porcupine.Model, exhausted func() bool) {
	steps := 0
	limited := bucketModel
	limited.Step = func(state, input, output any) []any {
		if steps > mostSteps {
			return nil
		}
		next := bucketModel.Step(state, input, output)
		steps += 1 + len(next)
		return next
	}
	return limited.ToModel(), func() bool { return steps > mostSteps }
}

func linearize(ops []porcupine.Operation) porcupine.CheckResult {
	rules, exhausted := bounded()
	switch {
	case porcupine.CheckOperations(rules, ops):
		return porcupine.Ok
	case exhausted():
		return porcupine.Unknown
	}
	return porcupine.Illegal
}

// check explains why no order of the operations is possible, or returns "". It is undecided when there are too many orders to try.
func (h history) check() (violation string, decided bool) {
	verdict := linearize(h.upTo(len(h)))
	if verdict == porcupine.Ok {
		return "", true
	}
	// Answers that have no order have none with more answers either.
	fewest := len(h) + 1
	if verdict == porcupine.Illegal {
		fewest = len(h)
	}
	sort.Search(len(h)-1, func(i int) bool { // of answers before the last: the first i+1
		verdict := linearize(h.upTo(i + 1))
		if verdict == porcupine.Illegal {
			fewest = min(fewest, i+1)
		}
		return verdict != porcupine.Ok
	})
	if fewest > len(h) {
		return "", false
	}
	return h.explain(fewest), true
}

// explain shows how far the operations up to the first n answers can be put in order.
func (h history) explain(n int) string {
	ops := h.upTo(n)
	rules, _ := bounded()
	_, info := porcupine.CheckOperationsVerbose(rules, ops, 0)
	var longest []porcupine.Operation
	for _, order := range info.PartialLinearizationsOperations()[0] {
		if len(order) > len(longest) {
			longest = order
		}
	}

	var text strings.Builder
	fmt.Fprintf(&text, "the operations on %v have no order; one of the longest:\n", h[0].BucketID)
	state, placed := rules.Init(), map[any]bool{}
	for _, op := range longest {
		_, state = rules.Step(state, op.Input, op.Output)
		placed[op.Input] = true
		fmt.Fprintf(&text, "%s\n", op.Input)
		for _, s := range state.([]any) {
			fmt.Fprintf(&text, "        %s %v\n", s.(standing).State, s.(standing).slots)
		}
	}
	fmt.Fprintf(&text, "These have no place after it, or had no answer yet when the last of the others came:\n")
	for _, op := range ops {
		if !placed[op.Input] {
			fmt.Fprintf(&text, "%s\n", op.Input)
		}
	}
	return text.String()
}

func (op *operation) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%8d to %8d us: client %d, %s", op.called.Microseconds(), op.returned.Microseconds(), op.client, op.Spending)
	if op.batch != 0 {
		fmt.Fprintf(&text, ", place %d of batch %d", op.place, op.batch)
	}
	if op.undone || op.inDoubt {
		text.WriteString(map[bool]string{true: ", rolled back", false: ", whose commit had no answer"}[op.undone])
	}
	if op.whole != nil {
		fmt.Fprintf(&text, " among %d buckets, granted: %v", len(op.whole.policies), op.whole.granted)
	}
	if op.sets != 0 {
		fmt.Fprintf(&text, ", with override %d", op.sets)
	}
	if op.answer != nil {
		fmt.Fprintf(&text, ": %s%q", op.answer.Error, op.answer.Rows)
		if op.answer.Decision != nil {
			fmt.Fprintf(&text, " %+v", *op.answer.Decision)
		}
	}
	for i, now := range op.readings {
		text.WriteString([]string{", at ", " or "}[min(i, 1)] + now.Format("05.000000"))
	}
	for _, r := range op.rules {
		fmt.Fprintf(&text, ", %+v", r.policy)
		if r.override != nil {
			fmt.Fprintf(&text, " with override %d: %+v", r.number, *r.override)
		}
	}
	if op.then != nil {
		fmt.Fprintf(&text, "\n    then %s", op.then)
	}
	return text.String()
}

// lends returns the slots that the operation may lead to. It decides by the last reading of the clock, and its numbers may be of an
// earlier one.
func (op *operation) lends(s model.Slots, answer *kit.Answer) (left []model.Slots) {
	switch op.Function {
	case "reset", "crash":
		return []model.Slots{{}}
	case "cleanup": // which leaves keys alone that are locked or not due
		left = append(left, s)
		for _, now := range op.readings {
			left = append(left, s.Without(now))
		}
		return left
	}
	now := op.readings[len(op.readings)-1]
	for _, r := range op.rules {
		for _, read := range op.readings {
			told, next := op.answerOf(r.at(read), model.State{}, s, now)
			if _, after := next.Left(op.BucketID); op.isTold(told, now, answer) && !slices.ContainsFunc(left, after.Equal) {
				left = append(left, after)
			}
		}
	}
	return left
}
