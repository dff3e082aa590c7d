package client

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Querier is the one method a [Limiter] needs; *pgxpool.Pool, *pgx.Conn and pgx.Tx have it.
// With a Tx the tokens roll back too, and a granted bucket stays locked until it ends.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// A Limiter answers requests for tokens. It is safe for concurrent use when its database handle is: a
// pool is, a connection and a transaction are not. It is cheap to make, also one per transaction.
type Limiter struct {
	db     Querier
	schema string // quoted, with the dot, or empty
}

// New returns a Limiter that calls the functions installed in db.
func New(db Querier, opts ...LimiterOption) *Limiter {
	var c config
	for _, opt := range opts {
		opt(&c)
	}
	l := &Limiter{db: db}
	if c.schema != "" {
		l.schema = pgx.Identifier{c.schema}.Sanitize() + "."
	}
	return l
}

// Acquire takes tokens from the bucket of key if it holds enough, and answers. Options are [Cost] and
// [IdempotencyKey]. A denial is a [Decision] and a nil error; so is a replay.
//
// policy and key have 1 to 512 bytes. A key that was never seen has a full bucket.
//
// A grant writes the bucket, and the idempotency key if there is one, and locks the bucket until the
// transaction ends: at once, except inside a Tx. A denial writes nothing, and locks nothing unless it
// had to wait for the bucket. Other buckets are never waited for.
//
// Errors: [ErrUnknownPolicy], [ErrIdempotencyMismatch], [ErrInvalidArgument], [ErrLocked].
func (l *Limiter) Acquire(ctx context.Context, policy, key string, opts ...Option) (Decision, error) {
	r := newRequest(opts)
	return l.decide(ctx, "acquire", "ratelimit_acquire($1::text, $2::text, $3::bigint, $4::text)",
		policy, key, r.cost, r.idempotencyKey)
}

// Peek reports what Acquire would answer now, and takes nothing. The only option is [Cost]: which
// idempotency keys are remembered it does not see.
//
// It writes and locks nothing, works in a read-only transaction, and for durable policies on a
// standby.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument].
func (l *Limiter) Peek(ctx context.Context, policy, key string, opts ...Option) (Decision, error) {
	r := newRequest(opts)
	if r.idempotencyKey != nil {
		return Decision{}, failed("peek", fmt.Errorf("%w: an idempotency key is for Acquire", ErrInvalidArgument))
	}
	return l.decide(ctx, "peek", "ratelimit_peek($1::text, $2::text, $3::bigint)", policy, key, r.cost)
}

// Refund gives tokens back to the bucket of key, never above its capacity, and reports what it holds.
// The amount is whole tokens, 0 or more. An idempotency key of the acquire stays: it replays the
// grant, refunded or not.
//
// A bucket that is not full is written, and locked until the transaction ends. Sent twice it gives
// back twice.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *Limiter) Refund(ctx context.Context, policy, key string, amount int64) (Decision, error) {
	return l.decide(ctx, "refund", "ratelimit_refund($1::text, $2::text, $3::bigint)", policy, key, amount)
}

// Reset makes the bucket of key full again. Idempotency keys stay.
//
// A bucket that is not full is removed, and locked until the transaction ends.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *Limiter) Reset(ctx context.Context, policy, key string) error {
	return l.run(ctx, "reset", "ratelimit_reset($1::text, $2::text)", policy, key)
}

// Cleaned counts what clean-up removed.
type Cleaned struct {
	Buckets         int64 // full again, or of a dropped policy
	IdempotencyKeys int64 // past their time, or of a dropped policy
}

// Cleanup removes one batch of buckets and one of idempotency keys that nobody can tell from absent.
// The option is [MaxRows].
//
// It skips what others hold and so never waits; what it removes is locked until the transaction ends.
//
// Errors: [ErrInvalidArgument].
func (l *Limiter) Cleanup(ctx context.Context, opts ...CleanupOption) (Cleaned, error) {
	return l.cleanup(ctx, newCleanup(opts).maxRows)
}

// RunCleanup cleans up until ctx ends: batch after batch until one removes nothing, then again every
// so often. It is for databases without pg_cron. One program is enough, but several do no harm.
// Options are [MaxRows] and [OnError]; an error ends the round and not the loop.
//
// The Limiter must be on a pool, or on a connection that nobody else uses: each batch has to be a
// transaction of its own. Panics if every is not positive, as [time.NewTicker] does.
func (l *Limiter) RunCleanup(ctx context.Context, every time.Duration, opts ...CleanupOption) {
	if every <= 0 {
		panic("client: RunCleanup: every must be positive")
	}
	c := newCleanup(opts)
	for ctx.Err() == nil {
		cleaned, err := l.cleanup(ctx, c.maxRows)
		if err == nil && cleaned != (Cleaned{}) {
			continue
		}
		if err != nil && ctx.Err() == nil {
			c.onError(err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(every):
		}
	}
}

func (l *Limiter) cleanup(ctx context.Context, maxRows int32) (c Cleaned, err error) {
	err = l.query(ctx, "clean up", "buckets_deleted, idempotency_keys_deleted", "ratelimit_cleanup($1::bigint::integer)",
		[]any{int64(maxRows)}, &c.Buckets, &c.IdempotencyKeys)
	return c, err
}

// decide calls a function that returns one decision.
func (l *Limiter) decide(ctx context.Context, verb, function string, args ...any) (Decision, error) {
	const columns = "allowed, remaining, " +
		"(extract(epoch from retry_after) * 1000000)::bigint, " +
		"(extract(epoch from reset_after) * 1000000)::bigint, " +
		"capacity, replayed"
	var (
		d          Decision
		retryAfter *int64
		resetAfter int64
	)
	err := l.query(ctx, verb, columns, function, args,
		&d.Allowed, &d.Remaining, &retryAfter, &resetAfter, &d.Capacity, &d.Replayed)
	if err != nil {
		return Decision{}, err
	}
	d.RetryAfter = never
	if retryAfter != nil {
		d.RetryAfter = duration(*retryAfter)
	}
	d.ResetAfter = duration(resetAfter)
	return d, nil
}

// run calls a function that returns nothing.
func (l *Limiter) run(ctx context.Context, verb, function string, args ...any) error {
	var one int
	return l.query(ctx, verb, "1", function, args, &one)
}

// query selects one row from a function. Arguments are text, bigint or null, cast where they are used:
// so every way of sending them means the same.
func (l *Limiter) query(ctx context.Context, verb, columns, function string, args []any, dest ...any) error {
	for _, arg := range args {
		// The simple protocol would cut the statement short here.
		if text, ok := arg.(string); ok && strings.Contains(text, "\x00") {
			return failed(verb, fmt.Errorf("%w: text contains a zero byte", ErrInvalidArgument))
		}
	}
	sql := "select " + columns + " from " + l.schema + function
	return failed(verb, retry(ctx, l.db, func() error {
		return l.db.QueryRow(ctx, sql, args...).Scan(dest...)
	}))
}
