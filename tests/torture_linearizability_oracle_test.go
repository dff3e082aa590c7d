package tests

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/pgratelimit/pgratelimit/tests/model"
)

// An operation is what one call did to one bucket, as its caller saw it. Each request of a batch is an
// operation of its own.
type operation struct {
	kind string
	request
	undone       bool // its transaction was rolled back
	batch, place int  // among the requests of one batch for this bucket; batches count from 1
	client       int

	called, returned time.Duration
	readings         []time.Time // of the clock, by which it may have decided
	policies         []model.Policy
	answer           *answer // nil for calls that have none
	met              bool    // its idempotency key was granted to somebody else meanwhile, or lives again by a clock that went back
}

// Kinds of operations.
const (
	acquires = "acquire"
	peeks    = "peek"
	refunds  = "refund"
	resets   = "reset"
	cleansUp = "clean up"
)

func (op *operation) granted() bool {
	return op.kind == acquires && op.answer.Decision != nil && op.answer.Decision.Allowed && !op.answer.Decision.Replayed
}

func (op *operation) denied() bool {
	return op.kind == acquires && op.answer.Decision != nil && !op.answer.Decision.Allowed
}

func (op *operation) overlaps(other *operation) bool {
	return op.called <= other.returned && other.called <= op.returned
}

// A standing is a state that a bucket may have between two operations.
type standing struct {
	model.State
	batches map[int]int // requests done, of batches under way
}

// next returns the standings that the operation may lead to. A nil answer stands for any answer.
func (op *operation) next(at standing, answer *answer) (all []any) {
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
	add := func(states ...model.State) {
		if op.undone {
			states = []model.State{at.State}
		}
		for _, s := range states {
			all = append(all, standing{s, at.batches})
		}
	}
	if op.kind == resets {
		add(at.Reset())
		return all
	}
	for _, p := range op.policies {
		for _, now := range op.readings {
			for _, s := range at.Doubts(op.idempotencyKey, now) {
				add(op.leadsTo(p, now, s, answer)...)
			}
		}
	}
	return all
}

// leadsTo returns the states that the operation leads to from one state, by one reading of the clock.
func (op *operation) leadsTo(p model.Policy, now time.Time, s model.State, answer *answer) []model.State {
	var (
		left = []model.State{s}
		d    decision
		err  error
	)
	if op.isFar(p, now, s, answer) {
		return nil
	}
	switch op.kind {
	case acquires:
		left[0], d, err = s.Acquire(p, now, op.cost, op.idempotencyKey)
		if op.met && (d.Replayed || err != nil && op.batch != 0) {
			left = append(left, s.Touch(p, now))
		}
	case peeks:
		d = s.Peek(p, now, op.cost)
	case refunds:
		left[0], d = s.Refund(p, now, op.cost)
	case cleansUp:
		return s.CleanUps(p, now)
	}
	if answer != nil && (err == nil) != (answer.Decision != nil) || answer != nil && err == nil && d != *answer.Decision {
		return nil
	}
	return left
}

// isFar reports cheaply that the answer cannot come from a state, which saves the model most of its work.
func (op *operation) isFar(p model.Policy, now time.Time, s model.State, answer *answer) bool {
	if op.kind != acquires && op.kind != peeks || answer == nil || answer.Decision == nil || answer.Decision.Replayed {
		return false
	}
	before := answer.Decision.Remaining
	if op.granted() {
		before += op.cost
	}
	return p.Capacity != answer.Decision.Capacity || s.Remaining(p, now) != before
}

var bucketModel = porcupine.NondeterministicModel{
	Init: func() []any { return []any{standing{}} },
	Step: func(state, input, output any) []any {
		return input.(*operation).next(state.(standing), output.(*answer))
	},
	// Those that are compared have the same operations behind them, and so the same batches.
	Equal: func(a, b any) bool { return a.(standing).Equal(b.(standing).State) },
	Hash:  func(state any) uint64 { return state.(standing).Hash() },
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
			known.Output, known.Return = (*answer)(nil), math.MaxInt64
		default:
			continue
		}
		ops = append(ops, known)
	}
	return ops
}

// check explains why no order of the operations is possible, or returns "". It is undecided when there are too
// many orders to try.
func (h history) check() (violation string, decided bool) {
	const atMost = 200 * time.Millisecond
	rules := bucketModel.ToModel()
	verdict := porcupine.CheckOperationsTimeout(rules, h.upTo(len(h)), atMost)
	if verdict == porcupine.Ok {
		return "", true
	}
	illegal := verdict == porcupine.Illegal
	for n := 1; n <= len(h); n++ { // the first answers that have none
		if verdict = porcupine.CheckOperationsTimeout(rules, h.upTo(n), atMost); verdict != porcupine.Ok {
			if illegal || verdict == porcupine.Illegal {
				return h.explain(rules, n), true
			}
			return "", false
		}
	}
	return "", true
}

// explain shows how far the operations up to the first n answers can be put in order.
func (h history) explain(rules porcupine.Model, n int) string {
	ops := h.upTo(n)
	_, info := porcupine.CheckOperationsVerbose(rules, ops, time.Second)
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
			fmt.Fprintf(&text, "        %s\n", s.(standing).State)
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
	fmt.Fprintf(&text, "%8d to %8d us: client %d, %s %d", op.called.Microseconds(), op.returned.Microseconds(), op.client, op.kind, op.cost)
	if op.idempotencyKey != "" {
		fmt.Fprintf(&text, " under %q", op.idempotencyKey)
	}
	if op.batch != 0 {
		fmt.Fprintf(&text, ", place %d of batch %d", op.place, op.batch)
	}
	if op.undone {
		text.WriteString(", rolled back")
	}
	if op.answer != nil {
		fmt.Fprintf(&text, ": %s", op.answer.Error)
		if op.answer.Decision != nil {
			fmt.Fprintf(&text, "%+v", *op.answer.Decision)
		}
	}
	for i, now := range op.readings {
		text.WriteString([]string{", at ", " or "}[min(i, 1)] + now.Format("05.000000"))
	}
	for _, p := range op.policies {
		fmt.Fprintf(&text, ", %+v", p)
	}
	return text.String()
}
