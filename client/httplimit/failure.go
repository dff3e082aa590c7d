package httplimit

import (
	"errors"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Failure decides how a request ends when the limiter has not answered within a timeout, or failed.
// There is no default: [Closed], [Open] and [Local] make one.
//
// Some errors are about the request, and a client could provoke them to get past the limit:
// [client.ErrUnknownPolicy], [client.ErrInvalidArgument] and [client.ErrIdempotencyMismatch]. With these the
// request is refused in each mode: see [Invalid].
type Failure struct {
	timeout time.Duration
	local   client.Acquirer
	outcome Outcome
}

// Closed refuses the request with 503. It is for handlers that must not run without a limit, such as a login.
func Closed(timeout time.Duration) Failure {
	return newFailure(Failure{timeout: timeout, outcome: FailedClosed})
}

// Open lets the request pass, without the fields of the header.
func Open(timeout time.Duration) Failure {
	return newFailure(Failure{timeout: timeout, outcome: FailedOpen})
}

// Local asks another limiter, usually a [Memory]. Its denials are answered like other denials, but RateLimit and
// RateLimit-Policy are left out: the numbers hold for one process only. When it fails too, the request is refused
// with 503.
func Local(timeout time.Duration, limiter client.Acquirer) Failure {
	if limiter == nil {
		panic("httplimit: Local: no limiter")
	}
	return newFailure(Failure{timeout: timeout, outcome: FailedClosed, local: limiter})
}

func newFailure(f Failure) Failure {
	if f.timeout <= 0 {
		panic("httplimit: the timeout must be positive")
	}
	return f
}

// isInvalid reports whether err is about the request, and not about the database.
func isInvalid(err error) bool {
	return errors.Is(err, client.ErrInvalidArgument) || errors.Is(err, client.ErrUnknownPolicy) ||
		errors.Is(err, client.ErrIdempotencyMismatch)
}
