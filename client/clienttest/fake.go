// Package clienttest has a fake of pgratelimit, for the tests of programs that use it: buckets in memory,
// a clock of the test's choosing, and errors on demand.
//
// A program that asks for tokens takes a [client.Acquirer]; its test passes a [Fake]:
//
//	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
//	fake := clienttest.New(func() time.Time { return now })
//	err := fake.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 1, Refill: 1, Every: time.Minute})
//
//	d, err := fake.Acquire(ctx, "api", "user:42") // allowed
//	d, err = fake.Acquire(ctx, "api", "user:42")  // denied, with a RetryAfter of a minute
//	now = now.Add(d.RetryAfter)
//	d, err = fake.Acquire(ctx, "api", "user:42")  // allowed
//
//	fake.FailNext(io.ErrUnexpectedEOF)
//	_, err = fake.Acquire(ctx, "api", "user:42")  // io.ErrUnexpectedEOF, wrapped
//
// Its answers are the server's, in every field: the tables of calls and answers that the
// functions in PostgreSQL are tested with are replayed against the fake too. It knows nothing of
// transactions, locks, privileges and other ways in which a database can fail: let it fail with
// [Fake.FailNext].
package clienttest

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// A Fake is a Limiter whose database is in memory. It is safe for concurrent use.
//
// Its calls are the Limiter's own down to the SQL, which the fake answers: arguments are checked and errors are a server's without their
// HINT, of definitions also without the name of the argument. Cleanup and RunCleanup find nothing to remove. WithTx leaves the fake,
// for the database of that transaction.
type Fake struct {
	*client.Limiter
	db *database
}

// New returns a Fake without policies. It calls now for the time of each decision. A nil now is
// [time.Now]. Time may go back, as on a server. Of the options of [client.New], a fake has a use for
// [client.Observe].
func New(now func() time.Time, opts ...client.Option) *Fake {
	if now == nil {
		now = time.Now
	}
	db := &database{now: now, model: model.New()}
	return &Fake{client.New(db, opts...), db}
}

// Check is [client.Limiter.Check]. A fake has the package and every grant, and lacks policies that were not defined. Check reads no clock,
// and takes no error of FailNext: middleware calls it in the background, beside what a test does.
func (f *Fake) Check(_ context.Context, needs client.Needs) error {
	f.db.mu.Lock()
	defer f.db.mu.Unlock()
	var lacks []string
	for _, policy := range needs.Policies {
		if _, ok := f.db.model.Policy(policy); !ok {
			lacks = append(lacks, fmt.Sprintf("policy %q is not defined", policy))
		}
	}
	if len(lacks) > 0 {
		return &client.NotReadyError{Lacks: lacks}
	}
	return nil
}

// AcquireMany is [client.Combiner.AcquireMany]. The requests are answered one after another, each as a call.
func (f *Fake) AcquireMany(ctx context.Context, requests []client.Request) []client.Answer {
	answers := make([]client.Answer, len(requests))
	for i, r := range requests {
		opts := []client.CallOption{r.Cost}
		if r.IdempotencyKey != nil {
			opts = append(opts, client.IdempotencyKey(*r.IdempotencyKey))
		}
		answers[i] = client.Answer{Operation: "acquire", Policy: r.Policy}
		answers[i].Decision, answers[i].Err = f.Acquire(ctx, r.Policy, r.Key, opts...)
	}
	return answers
}

// FailNext makes the next calls fail with these errors, one each, after the errors that earlier FailNexts
// left. A nil error lets its call through. A call that fails so does nothing else, and its error is
// wrapped like an error of the database.
func (f *Fake) FailNext(errs ...error) {
	f.db.mu.Lock()
	defer f.db.mu.Unlock()
	f.db.script = append(f.db.script, errs...)
}

// FailAll makes all calls fail with err, but for the calls that FailNext has errors for, until FailAll(nil).
func (f *Fake) FailAll(err error) {
	f.db.mu.Lock()
	defer f.db.mu.Unlock()
	f.db.outage = err
}

// SetLevel makes the bucket of key hold so many tokens now, to the microtoken, regardless of earlier calls:
// 0 for a test of denials, less for a bucket in debt.
//
// Errors: [client.ErrUnknownPolicy]; [client.ErrInvalidArgument] for a policy with slots: hold them.
func (f *Fake) SetLevel(policy, key string, tokens float64) error {
	f.db.mu.Lock()
	defer f.db.mu.Unlock()
	switch p, ok := f.db.model.Policy(policy); {
	case !ok:
		return fmt.Errorf("clienttest: set level: %w", client.ErrUnknownPolicy)
	case p.IsSlots():
		return fmt.Errorf("clienttest: set level: %w: %q has slots", client.ErrInvalidArgument, policy)
	}
	level := big.NewInt(int64(math.Round(tokens * 1e6)))
	f.db.model.Put(model.BucketID{Policy: policy, Key: key}, model.Bucket{Level: level, RefilledAt: f.db.instant()})
	return nil
}

// A database answers the calls of a Limiter.
type database struct {
	now func() time.Time

	mu     sync.Mutex
	model  *model.Model
	script []error
	outage error
}

func (db *database) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	values, err := db.call(ctx, sql, args)
	return row{values, err}
}

func (db *database) call(ctx context.Context, sql string, args []any) ([]any, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	err := db.outage
	if len(db.script) > 0 {
		err, db.script = db.script[0], db.script[1:]
	}
	if err != nil {
		return nil, err
	}
	return db.answer(sql, args)
}

// instant is now as the server has it.
func (db *database) instant() time.Time {
	return time.UnixMicro(db.now().UnixMicro()).UTC()
}

// DenialError returns the error of a guard inside the database that refused, for tests of how a program handles it:
// [client.AsDenial] finds d in it, but for ResetAfter, which the error does not have. RetryAfter is cut to the microsecond.
func DenialError(d client.Denial) error {
	policy, err := json.Marshal(d.Policy)
	if err != nil {
		return err
	}
	retryAfter, hint := "null", fmt.Sprintf("A cost of %d never fits a bucket of %d.", d.Cost, d.Capacity)
	if !d.Never() {
		retryAfter = strings.TrimRight(strings.TrimRight(big.NewRat(d.RetryAfter.Microseconds(), 1_000_000).FloatString(6), "0"), ".")
		hint = fmt.Sprintf("Try again in %s seconds.", retryAfter)
		if retryAfter == "1" {
			hint = "Try again in 1 second."
		}
	}
	return &pgconn.PgError{
		Severity: "ERROR",
		Code:     "RL429",
		Message:  "rate limit exceeded",
		Detail: fmt.Sprintf(`{"policy": %s, "cost": %d, "remaining": %d, "retry_after": %s, "capacity": %d}`,
			policy, d.Cost, d.Remaining, retryAfter, d.Capacity),
		Hint: hint,
	}
}
