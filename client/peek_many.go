package client

import (
	"context"
	"slices"
	"time"
)

// PeekMany is [Limiter.Peek] about many buckets in one call, as of one instant. The answers are in the order of the charges. Each is
// asked alone: two charges of one bucket get the same answer. An error of one charge leaves the others alone; one of the whole call,
// such as a lost connection, stands in each answer.
func (l *limiter) PeekMany(ctx context.Context, charges []Charge) []Answer {
	begin := time.Now()
	answers := make([]Answer, len(charges))
	var policies, keys []string
	var costs []int64
	var asked []int // the numbers of the charges that are sent
	for i, c := range charges {
		answers[i] = Answer{Operation: verbPeek, Policy: c.Policy}
		if n := slices.IndexFunc([]string{c.Policy, c.Key}, hasZeroByte); n >= 0 {
			answers[i].Err = failed(verbPeek, zeroByteIn(n))
			continue
		}
		policies, keys, costs, asked = append(policies, c.Policy), append(keys, c.Key), append(costs, c.Cost.Tokens()), append(asked, i)
	}
	if len(asked) > 0 {
		rows, err := list[peekedRow](ctx, l, call{
			verb:     verbPeek,
			columns:  peekedColumns,
			function: "ratelimit_peek_many($1::text[], $2::text[], $3::bigint[])",
			args:     []any{policies, keys, costs},
		})
		if err == nil && len(rows) != len(asked) {
			err = failed(verbPeek, errMisshapen)
		}
		isOneText := isText(err) && isAutocommit(l.db) // only the request with that text is to fail
		for n, i := range asked {
			switch {
			case isOneText:
				answers[i].Decision, answers[i].Err = l.decide(ctx, peekCall(policies[n], keys[n], costs[n]))
			case err != nil:
				answers[i].Err = err
			default:
				answers[i].Decision, answers[i].Err = rows[n].answer()
			}
		}
	}
	for i := range answers {
		answers[i].Duration = time.Since(begin)
		if l.hooks.Answered != nil {
			l.hooks.Answered(ctx, answers[i])
		}
	}
	return answers
}

var peekedColumns = `
	coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
		'allowed', allowed, 'remaining', remaining, 'retry_after', ` + microseconds("retry_after") + `,
		'reset_after', ` + microseconds("reset_after") + `, 'capacity', capacity,
		'code', error_code, 'message', error_message, 'detail', error_detail, 'hint', error_hint
		) order by request), '[]')::text`

// A peekedRow is an answer as peekedColumns has it.
type peekedRow struct {
	Allowed                     bool
	Remaining, Capacity         int64
	RetryAfter                  *int64 `json:"retry_after"`
	ResetAfter                  *int64 `json:"reset_after"`
	Code, Message, Detail, Hint string
}

func (r peekedRow) answer() (Decision, error) {
	if r.Code != "" {
		return Decision{}, refused(verbPeek, r.Code, r.Message, r.Detail, r.Hint)
	}
	return Decision{
		Allowed: r.Allowed, Remaining: r.Remaining, RetryAfter: orNever(r.RetryAfter), ResetAfter: orNever(r.ResetAfter), Capacity: r.Capacity,
	}, nil
}

// orNever converts microseconds; nil is never.
func orNever(microseconds *int64) time.Duration {
	if microseconds == nil {
		return never
	}
	return duration(*microseconds)
}

// PeekMany is [Limiter.PeekMany] on the shards of the keys, at the same time.
//
// Errors: as [Sharded.Acquire].
func (s *Sharded) PeekMany(ctx context.Context, charges []Charge) []Answer {
	bucketOf := func(c Charge) bucket { return bucket{c.Policy, c.Key} }
	return askShards(ctx, s, verbPeek, charges, bucketOf, func(on *shard, own []Charge) []Answer { return on.PeekMany(ctx, own) })
}
