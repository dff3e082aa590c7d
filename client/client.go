package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Querier is the one method a [Limiter] needs; *pgxpool.Pool, *pgx.Conn and pgx.Tx have it.
// With a Tx the tokens roll back too, and a granted bucket stays locked until it ends.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// An Acquirer has the methods that *[Limiter], *[Combiner], *[Prefetcher], *[Sharded], *[Citus] and the fake of package clienttest
// share. They are enough for a program that asks for tokens and defines no policies.
type Acquirer interface {
	// Acquire takes tokens from the bucket of key if it holds enough: see [Limiter.Acquire].
	Acquire(ctx context.Context, policy, key string, opts ...CallOption) (Decision, error)

	// AcquireAll takes tokens from several buckets if each holds enough: see [Limiter.AcquireAll].
	AcquireAll(ctx context.Context, charges []Charge, opts ...CallOption) (JointDecision, error)
}

// A Limiter answers requests for tokens. It is safe for concurrent use when its database handle is: a
// pool is, a connection and a transaction are not. It is cheap to make, also one per transaction.
type Limiter struct{ limiter }

// limiter makes calls, one by one. A Limiter and a Combiner embed it.
type limiter struct {
	db          Querier
	schema      string // quoted, with the dot, or empty
	noFlush     bool
	inTx        bool         // by WithTx
	denialCache *denialCache // nil without DenialCache
	place       *place       // nil for any database
	hooks       Hooks        // of Observe
	prefetcher  *Prefetcher  // nil but in its own limiter
}

// New returns a Limiter that calls the functions installed in db. Whether db is a transaction is guessed
// from its type; [Limiter.WithTx] knows.
// Panics at a db that is nil, and at [CallsInFlight], [MaxWaiting] and a [Prefetch].
func New(db Querier, opts ...Option) *Limiter {
	return &Limiter{newLimiter(db, newConfig("New", aLimiter, opts))}
}

func newLimiter(db Querier, c config) limiter {
	if v := reflect.ValueOf(db); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() { // such as a variable that := has hidden
		panic(fmt.Sprintf("client: the database is a nil %T: pass the pool that pgxpool.New has returned", db))
	}
	l := limiter{db: db, noFlush: c.noFlush, place: c.place, hooks: c.hooks}
	if c.schema != "" {
		l.schema = pgx.Identifier{c.schema}.Sanitize() + "."
	}
	if c.cachesDenials {
		l.denialCache = newDenialCache()
	}
	return l
}

// WithTx returns a Limiter on the same functions whose calls are part of tx. It lasts as long as tx, and
// like tx serves one caller at a time. It repeats no call, has no [DenialCache], and ignores [NoFlush]: the commit
// decides whether to wait for the disk.
//
// A tx that is rolled back, or never committed, has taken nothing: a limit on failed attempts belongs
// outside of the transaction that fails. A grant locks its bucket until tx ends, and every other acquire
// on that bucket waits as long. After an error tx does no more work, as after any failed statement: to go on
// all the same, acquire within a savepoint (tx.Begin).
func (l *limiter) WithTx(tx pgx.Tx) *Limiter {
	if tx == nil {
		panic("client: WithTx of a nil transaction: pass what pool.Begin has returned")
	}
	// Only QueryRow of tx is to be seen: else a tx with more methods would be taken for a pool.
	return &Limiter{limiter{db: struct{ Querier }{tx}, schema: l.schema, inTx: true, place: l.place, hooks: l.hooks}}
}

// Acquire takes tokens from the bucket of key if it holds enough, and returns the decision. Options are [Cost] and
// [IdempotencyKey]. A denial is a [Decision] and a nil error; so is a replay.
//
// policy and key have 1 to 512 bytes. A key that was never seen has a full bucket.
//
// A grant writes the bucket, and the idempotency key if there is one, and locks the bucket until the
// transaction ends: at once, except inside a Tx. A denial writes nothing, and locks nothing unless it
// had to wait for the bucket. Other buckets are never waited for.
//
// Errors: [ErrUnknownPolicy], [ErrIdempotencyMismatch], [ErrInvalidArgument], [ErrLocked].
func (l *Limiter) Acquire(ctx context.Context, policy, key string, opts ...CallOption) (Decision, error) {
	return l.acquire(ctx, newRequest("Acquire", policy, key, opts), l.ask)
}

func (l *limiter) acquire(ctx context.Context, r request, ask func(context.Context, request) (Decision, error)) (Decision, error) {
	begin := l.hooks.begin()
	d, err := l.recall(ctx, r, ask)
	l.hooks.answered(ctx, verbAcquire, r.policy, begin, d, err)
	return d, err
}

// recall answers from memory, or asks and remembers.
func (l *limiter) recall(ctx context.Context, r request, ask func(context.Context, request) (Decision, error)) (Decision, error) {
	if l.denialCache == nil || r.keyed() || r.err != nil || !isAutocommit(l.db) {
		return ask(ctx, r)
	}
	asked := time.Now()
	d, known, changes := l.denialCache.find(r, asked)
	if known {
		return d, nil
	}
	d, err := ask(ctx, r)
	l.denialCache.learn(r, d, err, asked, changes)
	return d, err
}

// ask sends one request.
func (l *limiter) ask(ctx context.Context, r request) (Decision, error) {
	return l.decide(ctx, call{
		verb:       r.verb(),
		function:   "ratelimit_acquire($1::text, $2::text, $3::bigint, $4::text)",
		args:       []any{r.policy, r.key, r.cost, r.idempotencyKey},
		tokens:     true,
		repeatable: r.keyed(),
		err:        r.err,
	})
}

// Peek returns the decision that Acquire would return now, and takes nothing. The option is [Cost]: Peek does
// not see which idempotency keys are remembered.
//
// It writes and locks nothing, works in a read-only transaction, and for durable policies on a
// standby.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument].
func (l *limiter) Peek(ctx context.Context, policy, key string, opts ...CallOption) (Decision, error) {
	var s settings
	s.read("Peek", opts, "Cost")
	c := newCall("peek", "ratelimit_peek($1::text, $2::text, $3::bigint)", policy, key, s.cost.Tokens())
	c.err = s.err
	return l.answer(ctx, policy, c)
}

// Refund gives tokens back to the bucket of key, never above its capacity, and returns its new state.
// The amount is whole tokens, 0 or more. An idempotency key of the acquire stays: it replays the
// grant, refunded or not.
//
// A bucket that is not full is written, and locked until the transaction ends. A Refund that is sent twice gives
// back twice.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Refund(ctx context.Context, policy, key string, amount int64) (Decision, error) {
	defer l.denialCache.forget(policy, key)
	return l.answer(ctx, policy, tokenCall("refund", "ratelimit_refund($1::text, $2::text, $3::bigint)", policy, key, amount))
}

// Pause stops the bucket of key until pauseFor is over, such as the Retry-After of an upstream, and returns what Peek returns
// from then on. Nothing is granted before the end of the pause. After it the bucket refills from 0, so waiting callers do not start
// together. Debt is paid during the pause, too. A pause can be made longer. A shorter one changes nothing, and Reset ends it.
// pauseFor is 1 ms to 365 days, and is rounded up to microseconds.
//
// Tokens that are given back during a pause pay debt, and are lost beyond it. Replays, Charge, and reservations made before the
// pause are not stopped. A quota, slots and a policy that refills nothing cannot be paused: set an Override of capacity 0.
//
// It writes the bucket, and locks it until the transaction ends.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Pause(ctx context.Context, policy, key string, pauseFor time.Duration) (Decision, error) {
	defer l.prefetcher.withoutStocks(ctx, policy, key)()
	defer l.denialCache.forget(policy, key)
	if rest := pauseFor % time.Microsecond; rest > 0 {
		pauseFor += time.Microsecond - rest
	}
	return l.answer(ctx, policy, tokenCall("pause", "ratelimit_pause($1::text, $2::text, $3::text::interval)", policy, key, interval(pauseFor)))
}

// Reset makes the bucket of key full again. Idempotency keys stay.
//
// A bucket that is not full is removed, and locked until the transaction ends.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Reset(ctx context.Context, policy, key string) error {
	defer l.prefetcher.withoutStocks(ctx, policy, key)()
	defer l.denialCache.forget(policy, key)
	return l.run(ctx, tokenCall("reset", "ratelimit_reset($1::text, $2::text)", policy, key))
}

// ResetAll makes all buckets of a policy full again, as [Limiter.Reset] does with one, in batches that are committed one by one.
// After an error some buckets are full; it can be sent again.
//
// The role needs more than for other calls, as it does for [Limiter.RunCleanup]:
//
//	grant execute on procedure ratelimit_reset_all(text) to admin;
//	grant usage on schema ratelimit to admin;
//	grant execute on function ratelimit.reset_batch to admin;
//
// The Limiter must be on a pool, or on a connection that is in no transaction.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) ResetAll(ctx context.Context, policy string) error {
	defer l.prefetcher.withoutStocks(ctx, policy, "")()
	defer l.denialCache.forgetAll()
	err := l.query(ctx, newCall("reset all", "ratelimit_reset_all($1::text)", policy))
	if errors.Is(err, pgx.ErrNoRows) { // a procedure returns no row
		return nil
	}
	return err
}

// Cleaned counts the rows that clean-up removed.
type Cleaned struct {
	Buckets         int64 // full again, or of a dropped policy
	IdempotencyKeys int64 // past their time, or of a dropped policy
}

// Cleanup removes one batch of buckets and one of idempotency keys. No caller can tell these rows from absent ones.
// The option is [MaxRows].
//
// It skips rows that other sessions have locked, and removes nothing if it would have to wait 100 ms for a
// lock. The rows that it removes are locked until the transaction ends.
//
// Errors: [ErrInvalidArgument].
func (l *limiter) Cleanup(ctx context.Context, opts ...CallOption) (c Cleaned, err error) {
	s := settings{maxRows: 10_000}
	s.read("Cleanup", opts, "MaxRows")
	err = l.query(ctx, call{
		verb:     "clean up",
		columns:  "buckets_deleted, idempotency_keys_deleted",
		function: "ratelimit_cleanup($1::bigint::integer)",
		args:     []any{int64(s.maxRows)},
		err:      s.err,
	}, &c.Buckets, &c.IdempotencyKeys)
	return c, err
}

// RunCleanup cleans up until ctx ends: it calls ratelimit_cleanup_all, which repeats short batches until
// nothing is due, pauses for every, and begins again. It is for databases without pg_cron. One program
// is enough, but several do no harm. The option is [OnError].
//
// A call ends after every at the latest, and the pause is as long: clean-up works for half of the time
// at most, however much there is to remove. It holds one connection meanwhile. Each batch is committed
// by itself, so a call that fails, or meets a statement_timeout, has lost only the batch it was at.
//
// The role needs more than for other calls, since a procedure that commits cannot run with its owner's rights:
//
//	grant execute on procedure ratelimit_cleanup_all(interval) to janitor;
//	grant usage on schema ratelimit to janitor;
//	grant execute on function ratelimit.cleanup_batch to janitor;
//
// The Limiter must be on a pool, or on a connection of its own that is in no transaction.
// Panics if every is not positive, as [time.NewTicker] does, and at another option.
func (l *limiter) RunCleanup(ctx context.Context, every time.Duration, opts ...CallOption) {
	if every <= 0 {
		panic("client: RunCleanup: every must be positive")
	}
	var s settings
	if s.read("RunCleanup", opts, "OnError"); s.err != nil {
		panic(s.err)
	}
	report := func(err error) { slog.Warn("rate limit clean-up failed", "error", err) }
	for _, opt := range opts {
		report = opt.(onError)
	}
	for ctx.Err() == nil {
		err := l.query(ctx, newCall("clean up", "ratelimit_cleanup_all($1::text::interval)", interval(max(every, time.Microsecond))))
		if err != nil && !errors.Is(err, pgx.ErrNoRows) && ctx.Err() == nil { // a procedure returns no row
			report(err)
		}
		_ = sleep(ctx, every)
	}
}

// A call selects columns from a function. Without columns, decide adds a decision's, and query calls a procedure. Arguments are text,
// bigint, arrays of these, or null. The SQL casts each, so every way of sending means the same.
type call struct {
	verb       string
	columns    string
	function   string
	args       []any
	tokens     bool  // takes tokens or gives them back: NoFlush is about these
	repeatable bool  // does the same however often it is sent
	isQuery    bool  // function is a query, which has no schema
	err        error // why it is not to be sent
}

func newCall(verb, function string, args ...any) call {
	return call{verb: verb, function: function, args: args}
}

// tokenCall is a call that takes tokens or gives them back.
func tokenCall(verb, function string, args ...any) call {
	return call{verb: verb, function: function, args: args, tokens: true}
}

// microseconds selects an interval, or a time, as a bigint. The factor is numeric, as extract is: for an integer,
// an operator that an attacker planted on search_path would be the closer match.
func microseconds(column string) string {
	return "(extract(epoch from " + column + ") * 1000000.0)::bigint"
}

// The columns of a decision, and in the same order the columns of a reservation.
var (
	decisionColumns    = columnsOf("", "retry_after", "")
	reservationColumns = columnsOf("", "wait", "")
)

// columnsOf lists what decisionRow.columns reads. row is a prefix such as "d.", or empty; flag follows each boolean.
func columnsOf(row, wait, flag string) string {
	return row + "allowed" + flag + ", " + row + "remaining, " + microseconds(row+wait) + ", " + microseconds(row+"reset_after") + ", " +
		row + "capacity, " + row + "replayed" + flag + ", " + row + "shadowed" + flag
}

// numbersOf selects a decision as one array: nothing but numbers means the same in every way of sending it.
func numbersOf(row string) string { return "array[" + columnsOf(row, "retry_after", "::integer") + "]" }

// A decisionRow is the row that the columns are read to.
type decisionRow struct {
	Decision
	retryAfter, resetAfter pgtype.Int8
}

func (r *decisionRow) columns() []any {
	return []any{&r.Allowed, &r.Remaining, &r.retryAfter, &r.resetAfter, &r.Capacity, &r.Replayed, &r.Shadowed}
}

var fieldsOfDecision = len(new(decisionRow).columns())

// decisionOf reads what numbersOf selects.
func decisionOf(numbers []pgtype.Int8) Decision {
	var r decisionRow
	for i, column := range r.columns() {
		switch column := column.(type) {
		case *bool:
			*column = numbers[i].Int64 != 0
		case *int64:
			*column = numbers[i].Int64
		case *pgtype.Int8:
			*column = numbers[i]
		}
	}
	return r.decision()
}

func (r *decisionRow) decision() Decision {
	d := r.Decision
	d.RetryAfter, d.ResetAfter = wait(r.retryAfter), wait(r.resetAfter)
	return d
}

// answer makes a call that returns one decision, and passes it to the hooks.
func (l *limiter) answer(ctx context.Context, policy string, c call) (Decision, error) {
	begin := l.hooks.begin()
	d, err := l.decide(ctx, c)
	l.hooks.answered(ctx, c.verb, policy, begin, d, err)
	return d, err
}

// decide makes a call that returns one decision, and perhaps more columns, which c names then.
func (l *limiter) decide(ctx context.Context, c call, more ...any) (Decision, error) {
	var row decisionRow
	if c.columns == "" {
		c.columns = decisionColumns
	}
	if err := l.query(ctx, c, append(row.columns(), more...)...); err != nil {
		return Decision{}, err
	}
	return row.decision(), nil
}

// run makes a call that returns nothing.
func (l *limiter) run(ctx context.Context, c call) error {
	var one int
	c.columns = "1"
	return l.query(ctx, c, &one)
}

// list makes a call whose rows are one JSON array, because a Querier returns one row.
func list[Row any](ctx context.Context, l *limiter, c call) (rows []Row, err error) {
	var text string
	if err = l.query(ctx, c, &text); err == nil {
		err = failed(c.verb, json.Unmarshal([]byte(text), &rows))
	}
	return rows, err
}

// query makes a call that returns one row.
func (l *limiter) query(ctx context.Context, c call, dest ...any) error {
	if c.err != nil {
		return c.err
	}
	for _, arg := range c.args {
		text, _ := arg.(string)
		texts, _ := arg.([]string)
		if hasZeroByte(text) || slices.ContainsFunc(texts, hasZeroByte) {
			return failed(c.verb, errZeroByte)
		}
	}
	if c.tokens && l.noFlush && !isAutocommit(l.db) {
		return failed(c.verb, fmt.Errorf("%w: NoFlush is for calls outside a transaction", ErrInvalidArgument))
	}
	if err := l.checkPlace(ctx); err != nil {
		return err
	}
	sql, lost := l.statement(c), ""
	err := retry(ctx, l.db, c.repeatable, func() error {
		err := l.db.QueryRow(ctx, sql, c.args...).Scan(dest...)
		if err != nil && isUnknown(err) && !isUnsent(err) {
			lost = sql
		}
		return err
	})
	if err == nil {
		return nil
	}
	return &callError{c.verb, l.schema + c.function, err, lost}
}

var errZeroByte = fmt.Errorf("%w: a text has a zero byte, which no text in PostgreSQL can hold; pass a hash of it", ErrInvalidArgument)

// hasZeroByte reports whether the simple protocol would cut the statement short.
func hasZeroByte(text string) bool { return strings.Contains(text, "\x00") }

// statement is the SQL of a call. Its synchronous_commit lasts until the end of its own transaction.
func (l *limiter) statement(c call) string {
	from := l.schema + c.function
	if c.isQuery {
		from = c.function
	}
	if c.columns == "" {
		return "call " + from
	}
	if c.tokens && l.noFlush {
		from = "pg_catalog.set_config('synchronous_commit', 'off', true), " + from
	}
	return "select " + c.columns + " from " + from
}

// A Decision is the answer to one request for tokens. Times count from the moment the server
// decided, in whole microseconds. A time that a [time.Duration] cannot hold is cut to the longest
// Duration (292 years).
type Decision struct {
	// Allowed reports whether the tokens were taken; from [Limiter.Peek], whether they would be. A
	// Shadowed request is allowed and takes nothing.
	Allowed bool

	// Remaining is the number of whole tokens in the bucket after the call, rounded down.
	Remaining int64

	// RetryAfter is how long until the same request is allowed if no other caller takes tokens
	// meanwhile; a microsecond earlier it is not. Zero when allowed, [math.MaxInt64] when it
	// never will be: see [Decision.Never].
	RetryAfter time.Duration

	// ResetAfter is how long until the bucket is full if no caller takes tokens meanwhile.
	// [math.MaxInt64] when it is not full and gains nothing by itself: see [Decision.NeverFull].
	ResetAfter time.Duration

	// Capacity is the number of tokens in a full bucket: the policy's number, or the override's.
	Capacity int64

	// Replayed means that this is the answer first given under the same idempotency key, and
	// that nothing was taken this time.
	Replayed bool

	// Shadowed means that the policy only watches ([Policy.Shadow]), and that enforcing it would
	// have denied: the request is allowed, and nothing was taken.
	Shadowed bool

	// Estimated means that a [Prefetcher] has granted tokens that it had taken before. Remaining and ResetAfter are then computed
	// from the server's last answer and the tokens that its stock has left.
	Estimated bool
}

// Never reports whether no wait would help: the cost is above the capacity, or the policy refills nothing
// and the bucket holds less than the cost. A block that ends is no such denial.
func (d Decision) Never() bool {
	return d.RetryAfter == never
}

// NeverFull reports whether the bucket will not be full by itself: it is not full, and its policy refills
// nothing.
func (d Decision) NeverFull() bool {
	return d.ResetAfter == never
}

// RetryAfterSeconds is RetryAfter in whole seconds, rounded up, as the Retry-After header of HTTP counts.
// Zero when allowed. A request that will never be allowed should have no such header, so ask
// [Decision.Never] first: here it gets the most seconds there are, 292 years.
func (d Decision) RetryAfterSeconds() int64 {
	seconds := int64(d.RetryAfter / time.Second)
	if d.RetryAfter%time.Second > 0 {
		seconds++
	}
	return seconds
}

// never is longer than any wait. Waits are whole microseconds, and never is not.
const never time.Duration = math.MaxInt64

// wait converts microseconds, of which null is never.
func wait(microseconds pgtype.Int8) time.Duration {
	if !microseconds.Valid {
		return never
	}
	return duration(microseconds.Int64)
}

// duration converts microseconds, and saturates.
func duration(microseconds int64) time.Duration {
	return time.Duration(min(microseconds, never.Microseconds())) * time.Microsecond
}
