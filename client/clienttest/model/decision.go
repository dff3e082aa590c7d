package model

import (
	"fmt"
	"time"
)

// A Decision is the answer about one bucket, field by field what ratelimit.decision is.
type Decision struct {
	Allowed    bool
	Remaining  int64
	RetryAfter Micros // zero when allowed
	ResetAfter Micros
	Capacity   int64
	Replayed   bool
	Shadowed   bool // a policy that is no shadow would have denied
}

// Micros are whole microseconds, PostgreSQL's unit of time. A bucket may take 10,000 years to fill,
// which a time.Duration cannot hold.
type Micros int64

// Never is null in SQL: the RetryAfter of a cost above the capacity, and the RetryAfter and ResetAfter of
// a bucket that refills nothing.
const Never Micros = -1

// Longest is 100,000 years: where times saturate.
const Longest Micros = 36_525_000 * day

const day = 24 * 60 * 60 * 1_000_000

// After returns the instant this long after t.
func (m Micros) After(t time.Time) time.Time {
	return time.UnixMicro(t.UnixMicro() + int64(m)).UTC()
}

// String writes days as such: 3650 days and an hour is "3650d1h0m0s".
func (m Micros) String() string {
	if m == Never {
		return "never"
	}
	rest := (time.Duration(m%day) * time.Microsecond).String()
	if m/day == 0 {
		return rest
	}
	return fmt.Sprintf("%dd%s", m/day, rest)
}
