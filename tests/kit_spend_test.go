package tests

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// maxWaitOfReserve is the longest that ratelimit_reserve accepts.
const maxWaitOfReserve model.Micros = 365 * day

// A spending is a call on one bucket that takes without looking first, or otherwise than ratelimit_acquire does.
type spending struct {
	function string // charge, settle, reserve or acquire_up_to
	model.BucketID
	cost           int64        // at_most of acquire_up_to
	atLeast        int64        // of acquire_up_to
	maxWait        model.Micros // of reserve
	idempotencyKey string       // empty for none
}

// A spent is the answer to a spending. RetryAfter of a reservation is its wait.
type spent struct {
	decision
	Taken int64 // by acquire_up_to
}

// by sends the spending in SQL.
func (s spending) by(q querier) (spent, error) {
	var key *string
	if s.idempotencyKey != "" {
		key = &s.idempotencyKey
	}
	var d decision
	var err error
	switch s.function {
	case "charge":
		d, err = decide(q, "ratelimit_charge($1, $2, $3, $4)", s.Policy, s.Key, s.cost, key)
	case "settle":
		d, err = decide(q, "ratelimit_settle($1, $2, $3, $4)", s.Policy, s.Key, key, s.cost)
	case "reserve":
		d, err = decide(q, "(select r.*, r.wait as retry_after from ratelimit_reserve($1, $2, $3, $4, $5) as r)",
			s.Policy, s.Key, intervalOfDays(s.maxWait), s.cost, key)
	case "acquire_up_to":
		return acquireUpTo(q, s.BucketID, s.cost, s.atLeast, key)
	default:
		panic(s.function)
	}
	return spent{decision: d}, err
}

func (s *session) startSpending(call spending) *pending {
	return s.start(func(q querier) (decision, error) {
		got, err := call.by(q)
		return got.decision, err
	})
}

func acquireUpTo(q querier, id model.BucketID, atMost, atLeast int64, idempotencyKey *string) (spent, error) {
	var row decisionRow
	var taken *int64
	err := q.QueryRow(context.Background(), "select "+decisionColumns+", d.taken from ratelimit_acquire_up_to($1, $2, $3, $4, $5) as d",
		id.Policy, id.Key, atMost, atLeast, idempotencyKey).Scan(append(row.fields(), &taken)...)
	if err != nil {
		return spent{}, err
	}
	return spent{*row.decision(), *taken}, nil
}

// A spender is a *client.Limiter, or what has its methods.
type spender interface {
	Charge(ctx context.Context, policy, key string, cost int64, opts ...client.CallOption) (client.Decision, error)
	Settle(ctx context.Context, policy, key, idempotencyKey string, cost int64) (client.Decision, error)
	Reserve(ctx context.Context, policy, key string, maxWait time.Duration, opts ...client.CallOption) (client.Reservation, error)
	AcquireUpTo(ctx context.Context, policy, key string, atMost int64, opts ...client.CallOption) (client.PartialDecision, error)
}

// with sends the spending through a limiter of the client.
func (s spending) with(ctx context.Context, limiter spender) (spent, error) {
	var opts []client.CallOption
	if s.idempotencyKey != "" {
		opts = append(opts, client.IdempotencyKey(s.idempotencyKey))
	}
	var d client.Decision
	var taken int64
	var err error
	switch s.function {
	case "charge":
		d, err = limiter.Charge(ctx, s.Policy, s.Key, s.cost, opts...)
	case "settle":
		d, err = limiter.Settle(ctx, s.Policy, s.Key, s.idempotencyKey, s.cost)
	case "reserve":
		var r client.Reservation
		r, err = limiter.Reserve(ctx, s.Policy, s.Key, time.Duration(s.maxWait)*us, append(opts, client.Cost(s.cost))...)
		d = client.Decision{
			Allowed: r.Allowed, Remaining: r.Remaining, RetryAfter: r.Wait, ResetAfter: r.ResetAfter,
			Capacity: r.Capacity, Replayed: r.Replayed, Shadowed: r.Shadowed,
		}
	case "acquire_up_to":
		var p client.PartialDecision
		p, err = limiter.AcquireUpTo(ctx, s.Policy, s.Key, s.cost, append(opts, client.AtLeast(s.atLeast))...)
		d, taken = p.Decision, p.Taken
	default:
		panic(s.function)
	}
	if err != nil {
		return spent{}, err
	}
	return spent{decisionOf(d), taken}, nil
}

// of is what the model answers.
func (s spending) of(m *model.Model, now time.Time) (spent, error) {
	var answer spent
	var err error
	switch s.function {
	case "charge":
		answer.decision, err = m.Charge(now, s.BucketID, s.cost, s.idempotencyKey)
	case "settle":
		answer.decision, err = m.Settle(now, s.BucketID, s.idempotencyKey, s.cost)
	case "reserve":
		answer.decision, err = m.Reserve(now, s.BucketID, s.maxWait, s.cost, s.idempotencyKey)
	case "acquire_up_to":
		answer.decision, answer.Taken, err = m.AcquireUpTo(now, s.BucketID, s.cost, s.atLeast, s.idempotencyKey)
	default:
		panic(s.function)
	}
	return answer, err
}

func (s spending) String() string {
	return fmt.Sprintf("%s of %d (at least %d) from %v within %v under %q", s.function, s.cost, s.atLeast, s.BucketID, s.maxWait, s.idempotencyKey)
}
