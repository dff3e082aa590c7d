package service

import (
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Call is one that was answered.
type Call struct {
	Operation Operation
	// Policy that was asked for, which may not be there; of several that of the charge which decided, and empty if there is none.
	Policy   string
	Result   Result
	Err      *Error // nil if there was a decision
	Duration time.Duration
}

// An Operation is what was asked for.
type Operation string

// The operations.
const (
	Acquire    Operation = "acquire"
	AcquireAll Operation = "acquire_all"
	Charge     Operation = "charge"
	Settle     Operation = "settle"
	Peek       Operation = "peek"
	Refund     Operation = "refund"
	Gate       Operation = "gate" // Envoy's ShouldRateLimit
)

// Takes reports whether it asks for tokens.
func (o Operation) Takes() bool { return o == Acquire || o == AcquireAll || o == Charge || o == Gate }

// A Result is what came of a call, in one word.
type Result string

// The results.
const (
	Allowed  Result = "allowed"
	Denied   Result = "denied"
	Replayed Result = "replayed" // a grant, given again
	Shadowed Result = "shadowed" // allowed, because the policy only watches
	Failed   Result = "error"
)

func resultOf(d client.Decision, err *Error) Result {
	switch {
	case err != nil:
		return Failed
	case !d.Allowed:
		return Denied
	case d.Shadowed:
		return Shadowed
	case d.Replayed:
		return Replayed
	}
	return Allowed
}
