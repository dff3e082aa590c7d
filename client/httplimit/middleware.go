package httplimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// New returns middleware: a function that puts limits before a handler. A request is charged before the handler
// runs, and the handler of a request that is refused does not run.
//
// The function charges returns the buckets that a request is charged to, and how much. One charge is an
// Acquire, several are one AcquireAll: all of them, or nothing. A request without charges passes without a
// call. [Per] is such a function, [ByIP] and [ByUser] name buckets.
//
// An option that is given twice counts as it was given last.
func New(limiter client.Acquirer, charges func(*http.Request) []client.Charge, failure Failure, opts ...Option) func(http.Handler) http.Handler {
	if limiter == nil || charges == nil {
		panic("httplimit: New: no limiter, or no charges")
	}
	if failure.timeout == 0 {
		panic("httplimit: New: choose Closed, Open or Local")
	}
	m := &middleware{
		limiter: limiter,
		charges: charges,
		failure: failure,
		observe: warnOfFailures(),
		refuse:  Refuse,
	}
	for _, opt := range opts {
		opt(m)
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
	}
}

// Per charges one token of one policy to the bucket that key names.
func Per(policy string, key Key) func(*http.Request) []client.Charge {
	return func(r *http.Request) []client.Charge {
		return []client.Charge{{Policy: policy, Key: key(r)}}
	}
}

type middleware struct {
	limiter        client.Acquirer
	charges        func(*http.Request) []client.Charge
	failure        Failure
	idempotencyKey func(*http.Request) string // nil without IdempotencyKey
	observe        func(*http.Request, Event)
	refuse         func(http.ResponseWriter, *http.Request, Event)
	quotas         map[string]quota // of Policies, by name
}

// serve passes w and r on as they are.
func (m *middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	charges := m.charges(r)
	if len(charges) == 0 {
		next.ServeHTTP(w, r)
		return
	}
	started := time.Now()
	e := m.decide(r, charges)
	e.Duration = time.Since(started)
	m.report(w.Header(), e)
	m.observe(r, e)
	if e.Status == 0 {
		next.ServeHTTP(w, r)
		return
	}
	m.refuse(w, r, e)
}

// decide asks the limiter, and if there is no answer follows the program's [Failure].
func (m *middleware) decide(r *http.Request, charges []client.Charge) Event {
	e := Event{Charges: charges}
	var idempotencyKey string
	if m.idempotencyKey != nil {
		if idempotencyKey = m.idempotencyKey(r); idempotencyKey != "" && !fits(idempotencyKey) {
			e.Err = errIdempotencyKey
			return e.ended(Invalid, http.StatusBadRequest)
		}
	}
	ctx, cancel := context.WithTimeout(r.Context(), m.failure.timeout)
	defer cancel()
	if e.Decision, e.Err = ask(ctx, m.limiter, charges, idempotencyKey); e.Err == nil {
		return e.decided()
	}
	if r.Context().Err() != nil {
		// To go on would let a client pass that asks and leaves, if Open is chosen.
		return e.ended(Abandoned, http.StatusServiceUnavailable)
	}
	err := e.Err
	if m.failure.local != nil && !isInvalid(err) {
		e.Local = true
		if e.Decision, err = ask(r.Context(), m.failure.local, charges, idempotencyKey); err == nil {
			return e.decided()
		}
		e.Err = errors.Join(e.Err, err)
	}
	switch {
	case errors.Is(err, client.ErrIdempotencyMismatch):
		return e.ended(Invalid, http.StatusUnprocessableEntity)
	case isInvalid(err):
		return e.ended(Invalid, http.StatusInternalServerError)
	case m.failure.outcome == FailedOpen:
		return e.ended(FailedOpen, 0)
	}
	return e.ended(FailedClosed, http.StatusServiceUnavailable)
}

// ask makes one call for all charges. The answer about one charge is made joint.
func ask(ctx context.Context, limiter client.Acquirer, charges []client.Charge, idempotencyKey string) (client.JointDecision, error) {
	if len(charges) == 1 {
		c := charges[0]
		opts := []client.CallOption{c.Cost}
		if idempotencyKey != "" {
			opts = append(opts, client.IdempotencyKey(idempotencyKey))
		}
		d, err := limiter.Acquire(ctx, c.Policy, c.Key, opts...)
		if err != nil {
			return client.JointDecision{}, err
		}
		return client.JointDecision{Decision: d, Decisions: []client.Decision{d}}, nil
	}
	var opts []client.CallOption
	if idempotencyKey != "" {
		opts = append(opts, client.IdempotencyKey(idempotencyKey))
	}
	d, err := limiter.AcquireAll(ctx, charges, opts...)
	if err == nil && len(d.Decisions) != len(charges) { // a foreign Acquirer
		return client.JointDecision{}, fmt.Errorf("httplimit: an answer with %d decisions about %d charges", len(d.Decisions), len(charges))
	}
	return d, err
}
