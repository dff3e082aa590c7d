package service

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"google.golang.org/grpc/codes"

	"github.com/pgratelimit/pgratelimit/client"
)

// An Error is why a call has no decision.
type Error struct {
	Kind Kind

	// Message is constant, Detail has the facts and Hint the remedy: the database's own where it refused the request. Of other
	// errors callers learn no more than the kind.
	Message, Detail, Hint string

	// SQLState is the database's, or what it would have said. It is empty where it had no say.
	SQLState string

	cause error
}

func (e *Error) Error() string {
	text := e.Message
	for _, more := range []string{e.Detail, e.Hint} {
		if more != "" {
			text = strings.TrimSuffix(text, ".") + ". " + more
		}
	}
	return text
}

// Unwrap returns what the client said, which is for the log and not for callers.
func (e *Error) Unwrap() error { return e.cause }

// A Kind of error has one code in each protocol.
type Kind int

// The kinds of errors.
const (
	UnknownPolicy Kind = iota
	IdempotencyMismatch
	NoGrant
	Settled
	InvalidArgument
	Contended
	DeadlineExceeded
	Canceled
	Overloaded
	Unavailable
	Internal
)

var kinds = [...]struct {
	reason  string
	message string
	code    codes.Code
	status  int
}{
	UnknownPolicy:       {"UNKNOWN_POLICY", "unknown policy", codes.NotFound, http.StatusNotFound},
	IdempotencyMismatch: {"IDEMPOTENCY_MISMATCH", "idempotency key used before with another cost", codes.AlreadyExists, http.StatusConflict},
	NoGrant:             {"NO_GRANT", "no live grant under this idempotency key", codes.FailedPrecondition, http.StatusNotFound},
	Settled:             {"SETTLED", "the grant under this idempotency key was settled", codes.FailedPrecondition, http.StatusConflict},
	InvalidArgument:     {"INVALID_ARGUMENT", "invalid argument", codes.InvalidArgument, http.StatusUnprocessableEntity},
	Contended:           {"CONTENDED", "the bucket is locked by others; nothing was taken", codes.Aborted, http.StatusServiceUnavailable},
	DeadlineExceeded:    {"DEADLINE_EXCEEDED", "no answer in time", codes.DeadlineExceeded, http.StatusGatewayTimeout},
	Canceled:            {"CANCELED", "the caller has left", codes.Canceled, 499},
	Overloaded:          {"OVERLOADED", "too many calls under way; nothing was taken", codes.ResourceExhausted, http.StatusServiceUnavailable},
	Unavailable:         {"UNAVAILABLE", "no answer from the database", codes.Unavailable, http.StatusServiceUnavailable},
	Internal:            {"INTERNAL", "the database failed", codes.Internal, http.StatusInternalServerError},
}

// Reason names the kind for programs.
func (k Kind) Reason() string { return kinds[k].reason }

// Code is what gRPC calls it.
func (k Kind) Code() codes.Code { return kinds[k].code }

// Status is what HTTP calls it.
func (k Kind) Status() int { return kinds[k].status }

// IsRefusal reports whether the request is to blame, and not the server or its database.
func (k Kind) IsRefusal() bool { return k <= InvalidArgument }

func newError(kind Kind) *Error { return &Error{Kind: kind, Message: kinds[kind].message} }

// Invalid is the error of a request that cannot be meant.
func Invalid(message, detail, hint string) *Error {
	return &Error{Kind: InvalidArgument, Message: message, Detail: detail, Hint: hint, SQLState: sqlStates[InvalidArgument]}
}

// missing is what the database would say to a null, which the client cannot send.
func missing(argument string) *Error {
	return Invalid("invalid "+argument, argument+" is missing.", "")
}

// sqlStates are those of the errors that the client can find by itself.
var sqlStates = map[Kind]string{
	UnknownPolicy:       "RL001",
	IdempotencyMismatch: "RL002",
	NoGrant:             "RL003",
	Settled:             "RL004",
	InvalidArgument:     "22023",
}

// classify makes an Error of what the client said to a call that was made under ctx.
func classify(ctx context.Context, err error) *Error {
	var pgErr *pgconn.PgError
	isPg := errors.As(err, &pgErr)
	e := newError(kindOf(ctx, err, pgErr))
	e.cause = err
	if isPg {
		e.SQLState = pgErr.Code
	}
	if !e.Kind.IsRefusal() {
		return e
	}
	if isPg {
		e.Message, e.Detail, e.Hint = pgErr.Message, pgErr.Detail, pgErr.Hint
	} else {
		e.SQLState = sqlStates[e.Kind]
		e.Detail = strings.TrimPrefix(err.Error(), "pgratelimit: ")
	}
	return e
}

func kindOf(ctx context.Context, err error, pgErr *pgconn.PgError) Kind {
	for kind, known := range map[Kind]error{
		UnknownPolicy:       client.ErrUnknownPolicy,
		IdempotencyMismatch: client.ErrIdempotencyMismatch,
		NoGrant:             client.ErrNoGrant,
		Settled:             client.ErrSettled,
		InvalidArgument:     client.ErrInvalidArgument,
		Contended:           client.ErrLocked,
		Overloaded:          client.ErrOverloaded,
	} {
		if errors.Is(err, known) {
			return kind
		}
	}
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return Canceled
	case ctx.Err() != nil:
		return DeadlineExceeded
	case pgErr == nil:
		return Unavailable
	}
	switch pgErr.Code {
	case "40001", "40P01": // serialization_failure, deadlock_detected
		return Contended
	case "57014": // query_canceled, by a statement_timeout
		return DeadlineExceeded
	case "25006": // read_only_sql_transaction: this is not the primary
		return Unavailable
	}
	switch pgErr.Code[:min(2, len(pgErr.Code))] {
	case "08", "28", "3D", "53", "57": // connection, authorization, no such database, resources, shutdown
		return Unavailable
	}
	return Internal
}
