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
	Result   client.Result
	Leased   bool   // granted from tokens that were taken before
	Err      *Error // nil if there was a decision
	Duration time.Duration

	// Unmatched says what was asked by a request of Envoy's that no rule is about, as the log has it. It is nil for others.
	Unmatched func() (domain, keys string)
}

// NoRule is the Result of a request of Envoy's that no rule is about: it passes, and nothing limits it.
const NoRule client.Result = "no_rule"

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

// resultOf is what came of a call, in one word.
func resultOf(d client.Decision, err *Error) client.Result {
	answer := client.Answer{Decision: d}
	if err != nil { // else it would be an error that is a nil pointer
		answer.Err = err
	}
	return answer.Result()
}
