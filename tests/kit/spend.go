package kit

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/stretchr/testify/require"
)

// MustSpend sends a spending that must not fail.
func (db *TestDB) MustSpend(s Spending) Spent {
	got, err := s.By(db.Pool)
	require.NoError(db.T, err, s)
	return got
}

// MaxWaitOfReserve is the longest that ratelimit_reserve accepts.
const MaxWaitOfReserve model.Micros = 365 * Day

// A Spending is a call on one bucket that takes without looking first, or otherwise than ratelimit_acquire does.
type Spending struct {
	Function string // charge, settle, reserve or acquire_up_to
	model.BucketID
	Cost           int64        // at_most of acquire_up_to
	AtLeast        int64        // of acquire_up_to
	MaxWait        model.Micros // of reserve
	IdempotencyKey string       // empty for none
}

// A Spent is the answer to a spending. RetryAfter of a reservation is its wait.
type Spent struct {
	Decision
	Taken int64 // by acquire_up_to
}

// By sends the spending in SQL.
func (s Spending) By(q Querier) (Spent, error) {
	key := nullable(s.IdempotencyKey)
	var d Decision
	var err error
	switch s.Function {
	case "charge":
		d, err = Decide(q, "ratelimit_charge($1, $2, $3, $4)", s.Policy, s.Key, s.Cost, key)
	case "settle":
		d, err = Decide(q, "ratelimit_settle($1, $2, $3, $4)", s.Policy, s.Key, key, s.Cost)
	case "reserve":
		d, err = Decide(q, "(select r.*, r.wait as retry_after from ratelimit_reserve($1, $2, $3, $4, $5) as r)",
			s.Policy, s.Key, IntervalOfDays(s.MaxWait), s.Cost, key)
	case "acquire_up_to":
		return AcquireUpTo(q, s.Policy, s.Key, s.Cost, s.AtLeast, key)
	default:
		panic(s.Function)
	}
	return Spent{Decision: d}, err
}

func (s *Session) StartSpending(call Spending) *Pending {
	return s.Start(func(q Querier) (Decision, error) {
		got, err := call.By(q)
		return got.Decision, err
	})
}

// AcquireUpTo sends the five arguments.
func AcquireUpTo(q Querier, args ...any) (Spent, error) {
	var row decisionRow
	var taken *int64
	err := q.QueryRow(context.Background(), "select "+decisionColumns+", d.taken from ratelimit_acquire_up_to($1, $2, $3, $4, $5) as d", args...).Scan(append(row.fields(), &taken)...)
	if err != nil {
		return Spent{}, err
	}
	return Spent{*row.Decision(), *taken}, nil
}

// A spender is a *client.Limiter, or what has its methods.
type spender interface {
	Charge(ctx context.Context, policy, key string, cost int64, opts ...client.CallOption) (client.Decision, error)
	Settle(ctx context.Context, policy, key, idempotencyKey string, cost int64) (client.Decision, error)
	Reserve(ctx context.Context, policy, key string, maxWait time.Duration, opts ...client.CallOption) (client.Reservation, error)
	AcquireUpTo(ctx context.Context, policy, key string, atMost int64, opts ...client.CallOption) (client.PartialDecision, error)
}

// With sends the spending through a limiter of the client.
func (s Spending) With(ctx context.Context, limiter spender) (Spent, error) {
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

// Of is what the model answers.
func (s Spending) Of(m *model.Model, now time.Time) (Spent, error) {
	var answer Spent
	var err error
	switch s.Function {
	case "charge":
		answer.Decision, err = m.Charge(now, s.BucketID, s.Cost, s.IdempotencyKey)
	case "settle":
		answer.Decision, err = m.Settle(now, s.BucketID, s.IdempotencyKey, s.Cost)
	case "reserve":
		answer.Decision, err = m.Reserve(now, s.BucketID, s.MaxWait, s.Cost, s.IdempotencyKey)
	case "acquire_up_to":
		answer.Decision, answer.Taken, err = m.AcquireUpTo(now, s.BucketID, s.Cost, s.AtLeast, s.IdempotencyKey)
	default:
		panic(s.Function)
	}
	return answer, err
}

func (s Spending) String() string {
	return fmt.Sprintf("%s of %d (at least %d) from %v within %v under %q", s.Function, s.Cost, s.AtLeast, s.BucketID, s.MaxWait, s.IdempotencyKey)
}

// IntervalOfDays counts whole days as such: here a day is 24 hours, whatever the time zone has.
func IntervalOfDays(m model.Micros) pgtype.Interval {
	return pgtype.Interval{Days: int32(m / Day), Microseconds: int64(m % Day), Valid: true}
}

// Is reports whether the answer is this error.
func (a *Answer) Is(code model.Error) bool {
	return a != nil && strings.Contains(a.Error, string(code))
}
