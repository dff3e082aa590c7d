package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Errors to branch on, with [errors.Is]. The server's own error, with DETAIL and HINT, is within reach
// of [errors.As] as a *[pgconn.PgError]. Any other error (no connection, no privilege, a
// read-only transaction, ctx ended) is passed on as it came, and wrapped. For a missing
// privilege the text has the GRANT statement.
var (
	// ErrUnknownPolicy: no policy of that name is defined (SQLSTATE RL001).
	ErrUnknownPolicy = errors.New("unknown policy")

	// ErrIdempotencyMismatch: the idempotency key was used before with another cost
	// (SQLSTATE RL002). Nothing was taken.
	ErrIdempotencyMismatch = errors.New("idempotency key used before with another cost")

	// ErrNoGrant: no grant is remembered under the idempotency key, or it is not committed yet (SQLSTATE RL003).
	// Nothing was charged.
	ErrNoGrant = errors.New("no live grant under this idempotency key")

	// ErrSettled: the grant under the idempotency key was settled, so the operation is over (SQLSTATE RL004). Nothing was
	// taken. An operation that was cancelled, and begins again, needs a new key.
	ErrSettled = errors.New("the grant under this idempotency key was settled")

	// ErrTooLate: the tokens or slots would come after the deadline of ctx, or never. Nothing was taken.
	ErrTooLate = errors.New("the tokens would come too late")

	// ErrLeaseLost is the [context.Cause] of a [Hold.Context] that ended because its lease has: it was not renewed in time, or
	// the slots were reset or their policy dropped. If the last renewal failed, the cause wraps its error, too.
	ErrLeaseLost = errors.New("the lease was lost")

	// ErrInvalidArgument: an argument is outside its range (SQLSTATE 22023, 22008), no value of its
	// type (22P02, 22007), or text that the database cannot hold (22021, 22P05); or it cannot be sent (a zero
	// byte, a fraction of a microsecond, an option of another method), which is found without the server and has no PgError.
	ErrInvalidArgument = errors.New("invalid argument")

	// ErrLocked: another transaction has held the bucket, or the policy being changed, for
	// longer than the session's lock_timeout (SQLSTATE 55P03). Nothing was taken.
	ErrLocked = errors.New("locked by another transaction")

	// ErrOverloaded: a [Combiner] has more requests than the database answers, and has refused this one. Nothing was sent.
	// The error is an *[OverloadedError].
	ErrOverloaded = errors.New("too many requests wait")

	// ErrClosed: the [Combiner] was closed. Nothing was sent.
	ErrClosed = errors.New("limiter is closed")

	// ErrWrongShard: a database is another shard than it is listed as, or no shard, or a shard where [CheckAlone] expects none. Nothing
	// was taken. The error names the database and the remedy.
	ErrWrongShard = errors.New("wrong shard")

	// ErrSeveralShards: the charges of a request belong to several shards of a [Sharded]. Nothing was taken. It is an
	// ErrInvalidArgument.
	ErrSeveralShards = fmt.Errorf("%w: the charges belong to several shards", ErrInvalidArgument)
)

// An OverloadedError is the reason why a [Combiner] has refused a request, which was not sent: too many requests wait, or its
// deadline cannot be met. To [errors.Is] it is [ErrOverloaded].
type OverloadedError struct {
	Waiting  int           // how many requests wait
	Expected time.Duration // how long the answer would have taken at least; 0 when the deadline played no part
}

// Error returns a text with the number of requests that wait, after the reason.
func (e *OverloadedError) Error() string {
	if e.Expected > 0 {
		return fmt.Sprintf("the answer would come after the deadline, in %v or later; requests that wait: %d", e.Expected.Round(time.Millisecond), e.Waiting)
	}
	return fmt.Sprintf("%v: %d", ErrOverloaded, e.Waiting)
}

// Is makes the error [ErrOverloaded].
func (e *OverloadedError) Is(target error) bool { return target == ErrOverloaded }

// kinds are the errors to branch on, by SQLSTATE.
var kinds = map[string]error{
	"RL001": ErrUnknownPolicy,
	"RL002": ErrIdempotencyMismatch,
	"RL003": ErrNoGrant,
	"RL004": ErrSettled,
	"22023": ErrInvalidArgument, // invalid_parameter_value
	"22007": ErrInvalidArgument, // invalid_datetime_format
	"22008": ErrInvalidArgument, // datetime_field_overflow
	"22P02": ErrInvalidArgument, // invalid_text_representation
	"22021": ErrInvalidArgument, // character_not_in_repertoire
	"22P05": ErrInvalidArgument, // untranslatable_character
	"55P03": ErrLocked,          // lock_not_available
}

// An ErrorKind is what middleware does with an error of a limiter: see [KindOf].
type ErrorKind int

// The kinds of errors. testdata/failures.json lists them by SQLSTATE.
const (
	// Fault: the request or the program is to blame, and would be again: an unknown policy, an invalid argument, an idempotency
	// key that means another request, a wrong shard. Middleware fails the request.
	Fault ErrorKind = 1 + iota

	// Setup: the package or a privilege is missing. Middleware that has never had a decision fails the request.
	Setup

	// Away: no decision was to be had: no connection, no time, a standby, or a server in trouble. Middleware does what the program
	// has chosen for this.
	Away
)

// KindOf returns the kind of an error of a limiter, 0 of nil. Of unknown errors it is Away, of unknown codes Fault.
func KindOf(err error) ErrorKind {
	if err == nil {
		return 0
	}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code != "" {
		switch {
		case needsSetup[pgErr.Code]:
			return Setup
		case isAway.MatchString(pgErr.Code), pgErr.Code == "55000" && errors.As(err, new(*pgconn.ConnectError)): // it accepts no connections
			return Away
		}
		return Fault
	}
	for _, fault := range []error{ErrUnknownPolicy, ErrIdempotencyMismatch, ErrNoGrant, ErrSettled, ErrInvalidArgument, ErrWrongShard} {
		if errors.Is(err, fault) {
			return Fault
		}
	}
	return Away
}

// isAway matches the codes of connections, a standby, authorization, the database's name, conflicts after the retries, resources,
// locks, operators, the system and corruption.
var isAway = regexp.MustCompile(`^(08|0A000|25006|28|3D|40|53|55P03|57|58|XX)`)

var needsSetup = map[string]bool{
	"42501": true, // insufficient_privilege
	"42883": true, // undefined_function
	"42P01": true, // undefined_table
	"42703": true, // undefined_column
	"3F000": true, // invalid_schema_name
}

// isUnfitText reports whether the cause is text that this database cannot hold.
func isUnfitText(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) &&
		(pgErr.Code == "22021" || // character_not_in_repertoire
			pgErr.Code == "22P05") // untranslatable_character
}

// A callError is an error wrapped once, with the verb that failed.
type callError struct {
	verb     string
	function string // the function called, with its arguments; empty when no call was made
	err      error
	lost     string // the statement, if a try was lost after it was sent: the server may have carried it out, or may yet
}

func failed(verb string, err error) error {
	if err == nil {
		return nil
	}
	return &callError{verb: verb, err: err}
}

// refused is the error of one of many requests, which the server tells beside the answers to the others.
func refused(verb, code, message, detail, hint string) error {
	return failed(verb, &pgconn.PgError{
		Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: message, Detail: detail, Hint: hint,
	})
}

func (e *callError) Error() string {
	message := "pgratelimit: " + e.verb + ": " + withoutRepeats(e.err.Error())
	if pgErr, ok := errors.AsType[*pgconn.PgError](e.err); ok {
		for _, more := range []string{pgErr.Detail, e.hint(pgErr)} {
			if more != "" {
				message = strings.TrimSuffix(message, ".") + ". " + more
			}
		}
	}
	return message
}

// withoutRepeats leaves out lines that repeat the line before: pgx tries an address with TLS and without, and reports both.
func withoutRepeats(text string) string {
	return strings.Join(slices.Compact(strings.Split(text, "\n")), "\n")
}

// hint is the server's hint, unless it would mislead or is missing: a missing function is a missing
// installation, and a privilege is granted by a statement.
func (e *callError) hint(err *pgconn.PgError) string {
	switch {
	case err.Code == "42703": // undefined_column
		return "The functions in this database are of another version: install the version of this client."
	case needsSetup[err.Code] && err.Code != "42501":
		return "Install pgratelimit in this database, put its schema on search_path, or name it with client.Schema."
	case strings.HasPrefix(err.Code, "28"): // invalid_authorization_specification
		return "Check the user and the password in the connection string, and pg_hba.conf of the server."
	case err.Code == "3D000": // invalid_catalog_name
		return "Check the name of the database in the connection string, or create the database."
	case err.Code == "08P01": // protocol_violation
		return "If a pooler refuses a setting, leave it out of the connection string, or add it to the pooler's ignore_startup_parameters."
	case err.Code == "55P03" && err.Hint == "": // lock_not_available
		return "Another transaction has held the bucket or policy for longer than lock_timeout. Nothing was taken: try again later."
	case isUnfitText(err):
		return "This database cannot hold text with these bytes: pass text in UTF-8, or a hash."
	case err.Code == "42501": // insufficient_privilege
		name, signature := strings.TrimSuffix(nameOf.FindString(e.function), "("), parameter.ReplaceAllString(e.function, "")
		schema, _, isNamed := strings.Cut(signature, "."+name)
		batch := map[string]string{"ratelimit_cleanup_all": "cleanup_batch", "ratelimit_reset_all": "reset_batch"}[name]
		switch {
		case batch != "": // which needs all three, whichever is missing
			return "Its owner can run: grant execute on procedure " + signature + " to <role>; " +
				"grant usage on schema ratelimit to <role>; " +
				"grant execute on function ratelimit." + batch + " to <role>;"
		case name != "" && strings.Contains(err.Message, name):
			return "Its owner can run: grant execute on function " + signature + " to <role>;"
		case isNamed && strings.Contains(err.Message, strings.Trim(schema, `"`)):
			return "Its owner can run: grant usage on schema " + schema + " to <role>;"
		}
	}
	return err.Hint
}

var (
	nameOf    = regexp.MustCompile(`ratelimit_\w+\(`) // a schema may begin like a function
	parameter = regexp.MustCompile(`\$\d+::(\S+::)?`) // up to its type, which is the last of the casts
)

// lostStatement returns the statement of a call that failed, if the server may have carried it out.
func lostStatement(err error) string {
	if failed, ok := errors.AsType[*callError](err); ok {
		return failed.lost
	}
	return ""
}

func (e *callError) Unwrap() error { return e.err }

func (e *callError) Is(target error) bool {
	var pgErr *pgconn.PgError
	return errors.As(e.err, &pgErr) && target == kinds[pgErr.Code]
}

// A Denial is the refusal of a guard inside the database: ratelimit_enforce, or a trigger that calls
// ratelimit_guard. The statement failed with it, and tokens that the statement had taken are given back.
//
// Of the Decision, Remaining, RetryAfter and Capacity are set. RetryAfter is the same promise as in
// [Limiter.Acquire].
type Denial struct {
	Decision

	// Policy is the policy of the bucket that denied. The error does not have its key.
	Policy string

	// Cost is the number of tokens asked of that bucket.
	Cost int64
}

// AsDenial recognises the error of a guard inside the database (SQLSTATE RL429) and returns its numbers. The
// error may come from any statement, and may be wrapped:
//
//	_, err := pool.Exec(ctx, "insert into orders (customer) values ($1)", customer)
//	if d, ok := client.AsDenial(err); ok {
//		return tryAgainIn(d.RetryAfter)
//	}
func AsDenial(err error) (d Denial, ok bool) {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "RL429" {
		return Denial{}, false
	}
	var told struct {
		Policy     *string
		Cost       *int64
		Remaining  *int64
		RetryAfter *json.Number `json:"retry_after"`
		Capacity   *int64
	}
	if json.Unmarshal([]byte(pgErr.Detail), &told) != nil ||
		told.Policy == nil || told.Cost == nil || told.Remaining == nil || told.Capacity == nil {
		return Denial{}, false // raised by other code
	}
	d = Denial{Policy: *told.Policy, Cost: *told.Cost}
	d.Remaining, d.Capacity, d.RetryAfter = *told.Remaining, *told.Capacity, never
	if told.RetryAfter != nil {
		seconds, ok := new(big.Rat).SetString(told.RetryAfter.String())
		if !ok || strings.ContainsAny(told.RetryAfter.String(), "eE") {
			return Denial{}, false
		}
		micros := seconds.Mul(seconds, big.NewRat(1_000_000, 1))
		if n := new(big.Int).Quo(micros.Num(), micros.Denom()); n.IsInt64() {
			d.RetryAfter = duration(n.Int64())
		} else {
			d.RetryAfter = duration(math.MaxInt64)
		}
	}
	return d, true
}

const (
	maxTries    = 3
	baseBackoff = 50 * time.Millisecond
	maxBackoff  = 500 * time.Millisecond
)

// retry runs try, and again where a repeat can do no harm. It repeats after an error which means that nothing happened,
// if each call on db is a transaction of its own. It repeats after the loss of a connection, too, if db has other
// connections and the call does the same however often it is sent.
func retry(ctx context.Context, db Querier, repeatable bool, try func() error) error {
	_, hasOthers := db.(Pool)
	autocommit := isAutocommit(db) // asked first: a failed transaction looks different afterwards
	for n := 1; ; n++ {
		err := try()
		if err == nil || n == maxTries || !(autocommit && isTransient(err) || repeatable && hasOthers && ctx.Err() == nil && isUnknown(err) && !isClosed(err)) {
			return err
		}
		if ended := sleep(ctx, backoff(n)); ended != nil {
			return fmt.Errorf("%w (before another try: %w)", err, ended)
		}
	}
}

// backoff is the pause after the nth try. It is random, so that calls that collided do not meet again.
func backoff(n int) time.Duration {
	return rand.N(min(maxBackoff, baseBackoff<<(n-1)))
}

// isTransient reports whether nothing happened, and a repeat may succeed.
func isTransient(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok &&
		(pgErr.Code == "40001" || // serialization_failure
			pgErr.Code == "40P01" || // deadlock_detected
			pgErr.Code == "XX000" && strings.HasPrefix(pgErr.Message, "cache lookup failed for function") || // an upgrade replaced it
			isMoved(err))
}

// isMoved reports whether the key's shard has moved to another node of Citus, and nothing happened.
func isMoved(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "XX000" && pgErr.Message == "the shard has moved"
}

// isUnknown reports whether the call may have happened or not: the server gave no answer, or ended the
// session with it.
func isUnknown(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return !ok || pgErr.SeverityUnlocalized == "FATAL" || pgErr.SeverityUnlocalized == "PANIC"
}

// isUnsent reports whether the server never got the call.
func isUnsent(err error) bool {
	_, refused := errors.AsType[*pgconn.ConnectError](err)
	return refused || pgconn.SafeToRetry(err) || isClosed(err)
}

// isClosed reports whether the pool was closed. Its error is puddle's, which this module does not import.
func isClosed(err error) bool { return strings.HasSuffix(err.Error(), "closed pool") }

// isAutocommit reports whether each call on db is a transaction of its own. A db of an unknown type might
// be a transaction.
func isAutocommit(db Querier) bool {
	_, isPool := db.(Pool)
	conn := connOf(db)
	return isPool || conn != nil && isIdle(conn)
}

// isInTransaction reports whether db is known to be in a transaction. Other calls on db would be part of it.
func isInTransaction(db Querier) bool {
	conn := connOf(db)
	return isTx(db) || conn != nil && !isIdle(conn)
}

// isTx reports whether db is a transaction. A pool is none, whatever other methods it has.
func isTx(db Querier) bool {
	_, isPool := db.(Pool)
	_, isTx := db.(pgx.Tx)
	return isTx && !isPool
}

// connOf is the connection that db is, or nil.
func connOf(db Querier) *pgx.Conn {
	switch db := db.(type) {
	case Pool:
	case *pgx.Conn:
		return db
	case poolConn:
		return db.Conn()
	}
	return nil
}

// poolConn is *pgxpool.Conn. A transaction has Conn, too, but no BeginTx: it nests with Begin, without options.
type poolConn interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	Conn() *pgx.Conn
}

func isIdle(conn *pgx.Conn) bool {
	return conn.PgConn().TxStatus() == 'I'
}
