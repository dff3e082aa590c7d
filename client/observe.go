package client

import (
	"context"
	"time"
)

// Hooks are functions by which a program watches its limiter: see [Observe]. A nil hook is not called.
//
// The goroutine that did the work calls them, and goes on when they return; many goroutines call them at a time. No hook
// gets a key. Package otellimit, a module of its own, has hooks for OpenTelemetry.
type Hooks struct {
	// Answered gets each answer of Acquire, AcquireAll, AcquireUpTo, Charge, Settle, Reserve, Peek, Refund, Pause and Hold, and each of
	// many, before the caller has it, and each renewal and release of a [Hold]. In a transaction it is unknown by then whether the
	// transaction will be committed. A Wait appears as its Reserves, a HoldWait as its Holds. A grant from the stock of a [Prefetcher] is an
	// answer of Acquire. The Prefetcher's own refills and refunds are not reported.
	Answered func(context.Context, Answer)

	// Waited gets the time that a Wait or HoldWait has slept, 0 if the tokens or slots were there, and the error of ctx if ctx
	// ended first. A Wait that was refused is not reported.
	Waited func(ctx context.Context, policy string, slept time.Duration, err error)

	// Combined gets the number of requests in a call that a [Combiner] is about to make for Acquire or AcquireAll.
	Combined func(requests int)
}

// An Answer is the result of one call of a limiter.
type Answer struct {
	// Operation is the operation's name, as in the text of errors: "acquire", "acquire all", "acquire up to", "charge", "settle",
	// "reserve", "peek", "refund", "pause", "hold", "renew" or "release".
	Operation string

	// Policy is the policy of the request, which may not exist. Of several charges it is the policy of the binding charge, and
	// empty if there was an error.
	Policy string

	// Decision is zero if Err is not nil. Of a [Reservation], RetryAfter is the wait. Of a [HoldDecision] it has no ResetAfter,
	// and Replayed is Renewed. Of a renewal and a release it has only Allowed: whether the slots were held until then.
	Decision Decision
	Err      error

	// Duration is how long the caller waited for the answer.
	Duration time.Duration
}

// Takes reports whether tokens or slots were asked for.
func (a Answer) Takes() bool {
	switch a.Operation {
	case verbAcquire, verbAcquireAll, verbAcquireUpTo, verbCharge, verbReserve, verbHold:
		return true
	}
	return false
}

// Result is the answer in one word.
func (a Answer) Result() Result {
	switch {
	case a.Err != nil:
		return ResultError
	case !a.Decision.Allowed:
		return ResultDenied
	case a.Decision.Shadowed:
		return ResultShadowed
	case a.Decision.Replayed:
		return ResultReplayed
	}
	return ResultAllowed
}

// A Result is the outcome of a request, in one word. Metrics are kept by it.
type Result string

// The results.
const (
	ResultAllowed  Result = "allowed"
	ResultDenied   Result = "denied"
	ResultReplayed Result = "replayed"  // a grant, given again
	ResultShadowed Result = "shadowed"  // allowed, because the policy only watches
	ResultError    Result = "error"     // no decision
	ResultFailOpen Result = "fail_open" // no decision, and middleware let the request pass: no Answer has it
)

// The operations of an Answer.
const (
	verbAcquire     = "acquire"
	verbAcquireAll  = "acquire all"
	verbAcquireUpTo = "acquire up to"
	verbCharge      = "charge"
	verbSettle      = "settle"
	verbReserve     = "reserve"
	verbPeek        = "peek"
	verbRefund      = "refund"
	verbPause       = "pause"
	verbHold        = "hold"
	verbRenew       = "renew"
	verbRelease     = "release"
	verbDefine      = "define policy"
	verbOverride    = "override"
)

// begin is the time, if a hook is to get the duration of a request.
func (h *Hooks) begin() (now time.Time) {
	if h.Answered != nil {
		now = time.Now()
	}
	return now
}

// answered passes the answer to a request to its hook.
func (h *Hooks) answered(ctx context.Context, operation, policy string, begin time.Time, d Decision, err error) {
	if h.Answered != nil {
		h.Answered(ctx, Answer{Operation: operation, Policy: policy, Decision: d, Err: err, Duration: time.Since(begin)})
	}
}

// answeredAll passes the answer to a joint request to its hook.
func (h *Hooks) answeredAll(ctx context.Context, charges []Charge, begin time.Time, d JointDecision, err error) {
	if h.Answered == nil {
		return
	}
	var policy string
	if err == nil {
		policy = charges[d.Binding].Policy
	}
	h.answered(ctx, verbAcquireAll, policy, begin, d.Decision, err)
}

// slept passes the time that a caller has slept to its hook.
func (h *Hooks) slept(ctx context.Context, policy string, d time.Duration, err error) {
	if h.Waited != nil {
		h.Waited(ctx, policy, d, err)
	}
}

// combined passes the size of a call to its hook.
func (h *Hooks) combined(requests int) {
	if h.Combined != nil {
		h.Combined(requests)
	}
}
