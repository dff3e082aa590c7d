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
	Kind Kind

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
	info := &errdetails.ErrorInfo{Reason: e.Kind.Reason()}
	if e.SQLState != "" {
		info.Metadata = map[string]string{"sqlstate": e.SQLState}
	}
	return StatusWith(e.Kind.Code(), e.Error(), info)
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
type Kind int

// The kinds of errors. The request is to blame for those up to InvalidArgument.
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

// kinds has for each kind the codes of the protocols, and the error of the client and the SQLSTATE that mean it, if any do.
var kinds = [...]struct {
	reason, message string
	code            codes.Code
	status          int
	sqlState        string
	err             error
}{
	UnknownPolicy:       {"UNKNOWN_POLICY", "unknown policy", codes.NotFound, 404, "RL001", client.ErrUnknownPolicy},
	IdempotencyMismatch: {"IDEMPOTENCY_MISMATCH", "idempotency key used before with another cost", codes.AlreadyExists, 409, "RL002", client.ErrIdempotencyMismatch},
	NoGrant:             {"NO_GRANT", "no live grant under this idempotency key", codes.FailedPrecondition, 404, "RL003", client.ErrNoGrant},
	Settled:             {"SETTLED", "the grant under this idempotency key was settled", codes.FailedPrecondition, 409, "RL004", client.ErrSettled},
	InvalidArgument:     {"INVALID_ARGUMENT", "invalid argument", codes.InvalidArgument, 422, "22023", client.ErrInvalidArgument},
	Contended:           {"CONTENDED", "the bucket is locked by others; nothing was taken", codes.Aborted, 503, "", client.ErrLocked},
	DeadlineExceeded:    {"DEADLINE_EXCEEDED", "no answer in time", codes.DeadlineExceeded, 504, "", nil},
	Canceled:            {"CANCELED", "the caller has left", codes.Canceled, 499, "", nil},
	Overloaded:          {"OVERLOADED", "too many calls under way; nothing was taken", codes.ResourceExhausted, 503, "", client.ErrOverloaded},
	Unavailable:         {"UNAVAILABLE", "no answer from the database", codes.Unavailable, 503, "", nil},
	Internal:            {"INTERNAL", "the database failed", codes.Internal, 500, "", nil},
}

// Reason names the kind for programs.
func (k Kind) Reason() string { return kinds[k].reason }

// Code is the code of gRPC.
func (k Kind) Code() codes.Code { return kinds[k].code }

// Status is the status of HTTP.
func (k Kind) Status() int { return kinds[k].status }

// IsRefusal reports whether the request is to blame, and not the server or its database.
func (k Kind) IsRefusal() bool { return k <= InvalidArgument }

func newError(kind Kind) *Error { return &Error{Kind: kind, Message: kinds[kind].message} }

// Invalid returns the error of an invalid request.
func Invalid(message, detail, hint string) *Error {
	return &Error{Kind: InvalidArgument, Message: message, Detail: detail, Hint: hint, SQLState: kinds[InvalidArgument].sqlState}
}

// missing returns the error that the database raises for null, which the client cannot send.
func missing(argument string) *Error {
	return Invalid("invalid "+argument, argument+" is missing.", "")
}

// errorOf returns the Error of a call to the shard under ctx, or nil.
func (s *shard) errorOf(ctx context.Context, err error) *Error {
	if err == nil {
		return nil
	}
	if known, ok := errors.AsType[*Error](err); ok {
		return known
	}
	if _, isNumbered := errors.AsType[*client.ShardError](err); s.of > 1 && !isNumbered {
		err = &client.ShardError{Shard: s.number, Of: s.of, Err: err}
	}
	pgErr, isPg := errors.AsType[*pgconn.PgError](err)
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
		e.SQLState = kinds[e.Kind].sqlState
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

func kindOf(ctx context.Context, err error, pgErr *pgconn.PgError) Kind {
	for kind, known := range kinds {
		if known.err != nil && errors.Is(err, known.err) {
			return Kind(kind)
		}
	}
	switch {
	case errors.Is(err, client.ErrWrongShard):
		return Internal
	case errors.Is(ctx.Err(), context.Canceled):
		return Canceled
	case ctx.Err() != nil:
		return DeadlineExceeded
	case pgErr == nil:
		return Unavailable
	}
	switch {
	case pgErr.Code == "40001", pgErr.Code == "40P01": // serialization_failure, deadlock_detected
		return Contended
	case pgErr.Code == "57014": // query_canceled, by a statement_timeout
		return DeadlineExceeded
	case strings.HasPrefix(pgErr.Code, "22"): // data
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
