package service

import (
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Call has been answered.
type Call struct {
	Operation Operation
	// Policy may be unknown. Of several charges it is the policy of the one that decided. It is empty without a charge.
	Policy     string
	Result     client.Result
	Prefetched bool   // granted from tokens that were taken before
	Err        *Error // nil if there was a decision
	Duration   time.Duration

	// Domain and Keys are those of a request of Envoy's that no rule matches.
	Domain, Keys string
}

// NoRule is the Result of a request of Envoy's that no rule matches: it is allowed, without a limit.
const NoRule client.Result = "no_rule"

// An Operation is the kind of a call.
type Operation string

// The operations.
const (
	Acquire     Operation = "acquire"
	AcquireAll  Operation = "acquire_all"
	AcquireMany Operation = "acquire_many" // each of its requests is a Call
	AcquireUpTo Operation = "acquire_up_to"
	Reserve     Operation = "reserve"
	Charge      Operation = "charge"
	Settle      Operation = "settle"
	Peek        Operation = "peek"
	Refund      Operation = "refund"
	Pause       Operation = "pause"
	Hold        Operation = "hold"
	Renew       Operation = "renew"
	Release     Operation = "release"
	Gate        Operation = "gate" // Envoy's ShouldRateLimit
)

// Takes reports whether the call asks for tokens or slots.
func (o Operation) Takes() bool {
	switch o {
	case Settle, Peek, Refund, Pause, Renew, Release:
		return false
	}
	return true
}

// observeCall observes a call that has an answer, and returns its error.
func (s *Service) observeCall(call Call, begin time.Time, d client.Decision) error {
	call.Duration = time.Since(begin)
	call.Prefetched = d.Estimated
	answer := client.Answer{Decision: d}
	if call.Err != nil { // else it would be an error that is a nil pointer
		answer.Err = call.Err
	}
	call.Result = answer.Result()
	s.observe(call)
	return answer.Err
}
