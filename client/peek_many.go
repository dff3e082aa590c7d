package client

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// PeekMany is [Limiter.Peek] about many buckets in one call, as of one instant. The answers are in the order of the charges. Each is
// asked alone: two charges of one bucket get the same answer. An error of one charge leaves the others alone; one of the whole call,
// such as a lost connection, stands in each answer.
func (l *limiter) PeekMany(ctx context.Context, charges []Charge) []Answer {
	return answersOf(l.askMany(ctx, call{verb: verbPeek, columns: manyColumns(""), function: "ratelimit_peek_many"}, charges))
}

// A PartialAnswer is the answer to a charge of [Limiter.AcquireUpToMany].
type PartialAnswer struct {
	Answer

	// Taken is as in [PartialDecision].
	Taken int64
}

// AcquireUpToMany is [Limiter.AcquireUpTo] about many buckets in one call: the cost of a charge is the most that is taken. The answers
// are in the order of the charges. Of two charges of one bucket, the second takes from what the first left. Errors are as in
// [Limiter.PeekMany]. Calls of it, and of AcquireMany and AcquireAll, do not deadlock with each other.
func (l *limiter) AcquireUpToMany(ctx context.Context, charges []Charge) []PartialAnswer {
	columns := manyColumns("'taken', taken, ")
	return l.askMany(ctx, call{verb: verbAcquireUpTo, columns: columns, function: "ratelimit_acquire_up_to_many", tokens: true}, charges)
}

// askMany makes a call about many charges, which becomes its arguments, and tells the hooks of each answer.
func (l *limiter) askMany(ctx context.Context, c call, charges []Charge) []PartialAnswer {
	begin := time.Now()
	c.function += "($1::text[], $2::text[], $3::bigint[])"
	answers := make([]PartialAnswer, len(charges))
	var sent []int // the numbers of the charges that are sent
	for i, charge := range charges {
		answers[i].Answer = Answer{Operation: c.verb, Policy: charge.Policy}
		if n := slices.IndexFunc([]string{charge.Policy, charge.Key}, hasZeroByte); n >= 0 {
			answers[i].Err = failed(c.verb, zeroByteIn(c.verb, n))
			continue
		}
		sent = append(sent, i)
	}
	if len(sent) > 0 {
		l.askSome(ctx, c, charges, sent, answers)
	}
	for i := range answers {
		answers[i].Duration = time.Since(begin)
		if l.hooks.Answered != nil {
			l.hooks.Answered(ctx, answers[i].Answer)
		}
	}
	return answers
}

// askSome sends the charges of some numbers, and puts their answers in their places.
func (l *limiter) askSome(ctx context.Context, c call, charges []Charge, numbers []int, answers []PartialAnswer) {
	policies, keys, costs := make([]string, len(numbers)), make([]string, len(numbers)), make([]int64, len(numbers))
	for n, i := range numbers {
		policies[n], keys[n], costs[n] = charges[i].Policy, charges[i].Key, charges[i].Cost.Tokens()
	}
	c.args = []any{policies, keys, costs}
	rows, err := list[manyRow](ctx, l, c)
	if err == nil && len(rows) != len(numbers) {
		err = failed(c.verb, errMisshapen)
	}
	isOneText := len(numbers) > 1 && isText(err) && isAutocommit(l.db) // only the charge with that text is to fail
	for n, i := range numbers {
		switch {
		case isOneText:
			l.askSome(ctx, c, charges, numbers[n:n+1], answers)
		case err != nil:
			answers[i].Err = err
		default:
			answers[i].Decision, answers[i].Err = rows[n].answer(c.verb)
			answers[i].Taken = rows[n].Taken
		}
	}
}

func manyColumns(more string) string {
	return `
	coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
		'decision', ` + numbersOf("") + `, ` + more + `
		'code', error_code, 'message', error_message, 'detail', error_detail, 'hint', error_hint
		) order by request), '[]')::text`
}

func answersOf(partial []PartialAnswer) []Answer {
	answers := make([]Answer, len(partial))
	for i, a := range partial {
		answers[i] = a.Answer
	}
	return answers
}

// A manyRow is an answer as manyColumns has it.
type manyRow struct {
	Decision                    []*int64 // to read it as []pgtype.Int8 takes nearly twice as long
	Taken                       int64
	Code, Message, Detail, Hint string
}

func (r manyRow) answer(verb string) (Decision, error) {
	if r.Code != "" {
		return Decision{}, refused(verb, r.Code, r.Message, r.Detail, r.Hint)
	}
	if len(r.Decision) != fieldsOfDecision {
		return Decision{}, failed(verb, errMisshapen)
	}
	numbers := make([]pgtype.Int8, fieldsOfDecision)
	for i, n := range r.Decision {
		if n != nil {
			numbers[i] = pgtype.Int8{Int64: *n, Valid: true}
		}
	}
	return decisionOf(numbers), nil
}
