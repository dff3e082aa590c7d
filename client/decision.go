package client

import (
	"math"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

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
