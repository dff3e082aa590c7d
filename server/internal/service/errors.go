package service

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/pgratelimit/client"
)

// An Error is the reason why a call has no decision.
type Error struct {
	Kind *Kind

	// Message is constant, Detail has the facts and Hint the remedy. Where the database refused the request, they are the
	// database's. Of other errors callers learn the kind and the SQLSTATE.
	Message, Detail, Hint string

	// SQLState is the database's, or the one that it would have raised. It is empty for errors of the server.
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

// Unwrap returns the error of the client, for the log and not for callers.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus returns the error as gRPC sends it.
func (e *Error) GRPCStatus() *status.Status {
	info := &errdetails.ErrorInfo{Reason: e.Kind.Reason}
	if e.SQLState != "" {
		info.Metadata = map[string]string{"sqlstate": e.SQLState}
	}
	return StatusWith(e.Kind.Code, e.Error(), info)
}

// StatusWith returns a status of gRPC with details for programs.
func StatusWith(code codes.Code, message string, info *errdetails.ErrorInfo) *status.Status {
	info.Domain = "pgratelimit"
	plain := status.New(code, message)
	detailed, err := plain.WithDetails(info)
	if err != nil {
		return plain
	}
	return detailed
}

// A Kind of error has one code in each protocol.
type Kind struct {
	Reason   string     // for programs
	Code     codes.Code // of gRPC
	Status   int        // of HTTP
	message  string
	sqlState string // this and the error of the client mean the kind, if there are any
	err      error
}

// Kinds has all kinds of errors.
var Kinds = []*Kind{
	UnknownPolicy, IdempotencyMismatch, NoGrant, Settled, InvalidArgument, Contended, DeadlineExceeded, Canceled, Overloaded, Unavailable, Internal,
	Unreadable, Unauthenticated, Forbidden,
}

// The kinds. The request is to blame for those with a SQLSTATE. The last three are of requests that the service does not get.
var (
	UnknownPolicy       = &Kind{"UNKNOWN_POLICY", codes.NotFound, 404, "unknown policy", "RL001", client.ErrUnknownPolicy}
	IdempotencyMismatch = &Kind{"IDEMPOTENCY_MISMATCH", codes.AlreadyExists, 409, "idempotency key used before with another cost", "RL002", client.ErrIdempotencyMismatch}
	NoGrant             = &Kind{"NO_GRANT", codes.FailedPrecondition, 404, "no live grant under this idempotency key", "RL003", client.ErrNoGrant}
	Settled             = &Kind{"SETTLED", codes.FailedPrecondition, 409, "the grant under this idempotency key was settled", "RL004", client.ErrSettled}
	InvalidArgument     = &Kind{"INVALID_ARGUMENT", codes.InvalidArgument, 422, "invalid argument", "22023", client.ErrInvalidArgument}
	Contended           = &Kind{"CONTENDED", codes.Aborted, 503, "the bucket is locked by others; nothing was taken", "", client.ErrLocked}
	DeadlineExceeded    = &Kind{"DEADLINE_EXCEEDED", codes.DeadlineExceeded, 504, "no answer in time", "", nil}
	Canceled            = &Kind{"CANCELED", codes.Canceled, 499, "the caller has left", "", nil}
	Overloaded          = &Kind{"OVERLOADED", codes.ResourceExhausted, 503, "too many calls under way; nothing was taken", "", client.ErrOverloaded}
	Unavailable         = &Kind{"UNAVAILABLE", codes.Unavailable, 503, "no answer from the database", "", nil}
	Internal            = &Kind{"INTERNAL", codes.Internal, 500, "the database failed", "", nil}
	Unreadable          = &Kind{"UNREADABLE", codes.Internal, 400, "the request cannot be read", "", nil}
	Unauthenticated     = &Kind{"UNAUTHENTICATED", codes.Unauthenticated, 401, "no token that the server knows", "", nil}
	Forbidden           = &Kind{"FORBIDDEN", codes.PermissionDenied, 403, "a browser may have sent this for another site", "", nil}
)

// IsRefusal reports whether the request is to blame, and not the server or its database.
func (k *Kind) IsRefusal() bool { return k.sqlState != "" }

func newError(kind *Kind) *Error { return &Error{Kind: kind, Message: kind.message} }

// Invalid returns the error of an invalid request.
func Invalid(message, detail, hint string) *Error {
	return &Error{Kind: InvalidArgument, Message: message, Detail: detail, Hint: hint, SQLState: InvalidArgument.sqlState}
}

// missing returns the error that the database raises for null, which the client cannot send.
func missing(argument string) *Error {
	return Invalid("invalid "+argument, argument+" is missing.", "")
}

// errorOf returns the Error of a call to the shard under ctx, or nil.
func (s *shard) errorOf(ctx context.Context, err error) *Error {
	known, isKnown := errors.AsType[*Error](err)
	if err == nil || isKnown {
		return known
	}
	if _, isNumbered := errors.AsType[*client.ShardError](err); s.of > 1 && !isNumbered {
		err = &client.ShardError{Shard: s.number, Of: s.of, Err: err}
	}
	pgErr, isPg := errors.AsType[*pgconn.PgError](err)
	if !isPg {
		pgErr = &pgconn.PgError{}
	}
	e := newError(kindOf(ctx, err, pgErr.Code))
	e.cause, e.SQLState = err, pgErr.Code
	switch {
	case !e.Kind.IsRefusal():
	case isPg:
		e.Message, e.Detail, e.Hint = pgErr.Message, pgErr.Detail, pgErr.Hint
	default:
		e.SQLState = e.Kind.sqlState
		e.Detail = strings.TrimPrefix(err.Error(), "pgratelimit: ")
	}
	return e
}

// inRequest adds to an error about an argument the number of its request in the list.
func (e *Error) inRequest(request int) *Error {
	if e == nil || e.Kind != InvalidArgument {
		return e
	}
	joint := ": "
	if strings.HasPrefix(e.Detail, strings.TrimPrefix(e.Message, "invalid ")+" ") {
		joint = "." // it begins with the argument
	}
	e.Detail = fmt.Sprintf("requests[%d]%s%s", request, joint, e.Detail)
	return e
}

func kindOf(ctx context.Context, err error, sqlState string) *Kind {
	for _, kind := range Kinds {
		if kind.err != nil && errors.Is(err, kind.err) {
			return kind
		}
	}
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return Canceled
	case ctx.Err() != nil, sqlState == "57014": // query_canceled, by a statement_timeout
		return DeadlineExceeded
	case sqlState == "40001", sqlState == "40P01": // serialization_failure, deadlock_detected
		return Contended
	case strings.HasPrefix(sqlState, "22"): // data
		return InvalidArgument
	case client.KindOf(err) == client.Away:
		return Unavailable
	}
	return Internal
}

// Remedy returns what whoever runs the server can do, if the cause does not have it.
func (e *Error) Remedy() string {
	switch e.SQLState {
	case "42883", "42P01", "42703", "3F000":
		return "run pgratelimit install in this database, or put its schema on search_path"
	case "28000", "28P01", "3D000":
		return "correct user, password or database in the URL"
	case "08P01":
		return PoolerRemedy
	}
	return ""
}

// PoolerRemedy is for a pooler that refuses a setting at the start of a session.
const PoolerRemedy = "behind a pooler that refuses lock_timeout set LOCK_TIMEOUT=0"
