package client

import (
	"math"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// A Decision is the answer to one request for tokens. Times count from the moment the server
// decided, in whole microseconds; one that a [time.Duration] cannot hold is cut to the longest that
// it can (292 years).
type Decision struct {
	// Allowed tells whether the tokens were taken; from [Limiter.Peek], whether they would be. See
	// Shadowed for what is allowed and takes nothing.
	Allowed bool

	// Remaining is what the bucket holds after the call, in whole tokens, rounded down.
	Remaining int64

	// RetryAfter is how long until the same request is allowed if nobody else takes tokens
	// meanwhile; a microsecond earlier it is not. Zero when allowed, [math.MaxInt64] when it
	// never will be: see [Decision.Never].
	RetryAfter time.Duration

	// ResetAfter is how long until the bucket is full if nobody takes tokens meanwhile.
	// [math.MaxInt64] when it is not full and gains nothing by itself: see [Decision.NeverFull].
	ResetAfter time.Duration

	// Capacity is what a full bucket holds, in tokens: the policy's number, or the override's.
	Capacity int64

	// Replayed tells that this is the answer first given under the same idempotency key, and
	// that nothing was taken this time.
	Replayed bool

	// Shadowed tells that the policy only watches ([Policy.Shadow]), and that enforcing it would
	// have denied: the request is allowed, and nothing was taken.
	Shadowed bool

	// Estimated tells that a [Leaser] has granted tokens that it had taken before. Remaining and ResetAfter are then what the
	// server said last, with what the lease has left.
	Estimated bool
}

// Never reports whether no wait would help: the cost is above the capacity, or above what a bucket holds
// whose policy refills nothing.
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

// never is longer than any wait: those are whole microseconds, and this is not.
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
