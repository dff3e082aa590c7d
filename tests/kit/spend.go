package kit

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/stretchr/testify/require"
)

func (db *TestDB) MustSpend(s Spending) Spent {
	got, err := s.By(db.Pool)
	require.NoError(db.T, err, s)
	return got
}

// MaxWaitOfReserve is the longest that ratelimit_reserve accepts.
const MaxWaitOfReserve model.Micros = 365 * Day

// A Spending is a call of the call table about one bucket or key.
type Spending struct {
	Function string
	model.BucketID
	Cost           int64        // also the amount of a refund, and at_most of acquire_up_to
	AtLeast        int64        // of acquire_up_to
	MaxWait        model.Micros // of reserve, and how long a pause is
	IdempotencyKey string       // empty for none
	Holder         string       // of slots
}

// A Spent is the answer to a spending. RetryAfter of a reservation is its wait.
type Spent struct {
	Decision
	Taken int64 // by acquire_up_to
}

func (s Spending) Args() (args []any) {
	values := map[string]any{
		"policy": s.Policy, "key": s.Key, "cost": s.Cost, "amount": s.Cost, "at_most": s.Cost, "at_least": s.AtLeast, "holder": s.Holder,
		"max_wait": SpanOf(s.MaxWait), "pause_for": SpanOf(s.MaxWait), "max_rows": int64(1000),
	}
	if s.IdempotencyKey != "" {
		values["idempotency_key"] = s.IdempotencyKey
	}
	return ArgsOf(s.Function, values)
}

func (s Spending) Answer(q Querier) (Answer, error) {
	return Ask(q, s.Function, "ratelimit_"+s.Function, s.Args())
}

func (s Spending) By(q Querier) (Spent, error) { return spentOf(s.Answer(q)) }

func spentOf(a Answer, err error) (Spent, error) {
	if err != nil || a.Decision == nil {
		return Spent{}, err
	}
	return Spent{*a.Decision, a.Taken}, nil
}

func (s *Session) StartSpending(call Spending) *Pending {
	return s.Start(func(q Querier) (Decision, error) {
		got, err := call.By(q)
		return got.Decision, err
	})
}

func (s Spending) With(ctx context.Context, limiter *client.Limiter) (Spent, error) {
	var opts []client.CallOption
	if s.IdempotencyKey != "" {
		opts = append(opts, client.IdempotencyKey(s.IdempotencyKey))
	}
	var d client.Decision
	var taken int64
	var err error
	switch s.Function {
	case "charge":
		d, err = limiter.Charge(ctx, s.Policy, s.Key, s.Cost, opts...)
	case "settle":
		d, err = limiter.Settle(ctx, s.Policy, s.Key, s.IdempotencyKey, s.Cost)
	case "reserve":
		var r client.Reservation
		r, err = limiter.Reserve(ctx, s.Policy, s.Key, time.Duration(s.MaxWait)*Us, append(opts, client.Cost(s.Cost))...)
		d = client.Decision{
			Allowed: r.Allowed, Remaining: r.Remaining, RetryAfter: r.Wait, ResetAfter: r.ResetAfter,
			Capacity: r.Capacity, Replayed: r.Replayed, Shadowed: r.Shadowed,
		}
	case "acquire_up_to":
		var p client.PartialDecision
		p, err = limiter.AcquireUpTo(ctx, s.Policy, s.Key, s.Cost, append(opts, client.AtLeast(s.AtLeast))...)
		d, taken = p.Decision, p.Taken
	default:
		panic(s.Function)
	}
	if err != nil {
		return Spent{}, err
	}
	return Spent{DecisionOf(d), taken}, nil
}

func (s Spending) Of(m *model.Model, now time.Time) (Spent, error) {
	return spentOf(s.Foretold(m, now))
}

func (s Spending) Foretold(m *model.Model, now time.Time) (Answer, error) {
	c := Call{Function: s.Function, Args: s.Args(), Model: m, Now: now}
	rows, err := c.Answer()
	return AnswerOf(rows), err
}

func (s Spending) String() string {
	return fmt.Sprintf("%s of %d (at least %d) from %v within %v under %q by %q", s.Function, s.Cost, s.AtLeast, s.BucketID, s.MaxWait, s.IdempotencyKey, s.Holder)
}
