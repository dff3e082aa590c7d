package httplimit

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Holder lends slots: *[client.Limiter], *[client.Combiner], *[client.Prefetcher] and the fake of package clienttest.
type Holder interface {
	// Hold takes slots of key if enough are free: see [client.Limiter.Hold].
	Hold(ctx context.Context, policy, key string, opts ...client.CallOption) (*client.Hold, client.HoldDecision, error)
}

// Slots returns middleware that holds slots while a request is served, of policies with a [client.Policy.Lease]: at most so many
// requests at a time. They are released when the handler returns or panics, and before the server completes the answer. A process
// that dies frees them when the lease ends. The context of the request that the handler gets ends when the lease is lost, as
// [client.Hold.Context] does.
//
// The function charges returns the keys, and how many slots of each: [Per] is one. Several are held one after another, in that order,
// each with an [Event] of its own. If one is denied, those before it are released. A request without charges passes without a call.
//
// A denial is answered as by [New], with Retry-After, and without the fields of the rate limit. Slots are usually free earlier.
// Options are [Observe] and [RefuseWith]. Panics at another option and at [Local]: a [Memory] has no slots.
func Slots(limiter Holder, charges func(*http.Request) []client.Charge, failure Failure, opts ...Option) func(http.Handler) http.Handler {
	if limiter == nil || charges == nil {
		panic("httplimit: Slots: no limiter, or no charges")
	}
	if failure.timeout == 0 || failure.local != nil {
		panic("httplimit: Slots: choose Closed or Open")
	}
	m := newMiddleware(failure, opts)
	if m.idempotencyKey != nil || m.quotas != nil {
		panic("httplimit: Slots: IdempotencyKey and Policies are for New")
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			m.serveHolding(w, r, next, limiter, charges(r))
		})
	}
}

// serveHolding holds the first charge, and the others in it.
func (m *middleware) serveHolding(w http.ResponseWriter, r *http.Request, next http.Handler, limiter Holder, charges []client.Charge) {
	if len(charges) == 0 {
		next.ServeHTTP(w, r)
		return
	}
	started := time.Now()
	h, e := m.hold(r, limiter, charges[:1])
	e.Duration = time.Since(started)
	defer func() {
		ctx, cancel := context.WithTimeout(r.Context(), m.failure.timeout)
		defer cancel()
		_ = h.Release(ctx) // else the lease ends by itself
	}()
	setRetryAfter(w.Header(), e)
	m.see(r, e)
	if e.Status != 0 {
		m.refuse(w, r, e)
		return
	}
	inner := r
	if h != nil {
		inner = r.WithContext(h.Context())
	}
	m.serveHolding(w, inner, next, limiter, charges[1:])
}

// hold asks for the slots of one charge.
func (m *middleware) hold(r *http.Request, limiter Holder, charge []client.Charge) (h *client.Hold, e Event) {
	e.Charges = charge
	var d client.HoldDecision
	e.Err = m.guard.Try(r.Context(), func() (err error) {
		h, d, err = m.holdOnce(r.Context(), limiter, charge[0])
		return err
	})
	if e.Err != nil {
		return nil, m.undecided(r, e, e.Err, false)
	}
	decision := client.Decision{Allowed: d.Allowed, Remaining: d.Remaining, RetryAfter: d.RetryAfter, Capacity: d.Capacity, Shadowed: d.Shadowed}
	e.Decision = client.JointDecision{Decision: decision, Decisions: []client.Decision{decision}}
	return h, e.decided()
}

// holdOnce makes one call. The timeout is for the call, and not for what is held.
func (m *middleware) holdOnce(ctx context.Context, limiter Holder, c client.Charge) (*client.Hold, client.HoldDecision, error) {
	ctx, cancel := context.WithCancel(ctx)
	timer := time.AfterFunc(m.failure.timeout, cancel)
	h, d, err := limiter.Hold(ctx, c.Policy, c.Key, c.Cost)
	if !timer.Stop() && (err != nil || h != nil) { // a Hold has ended with ctx
		_ = h.Release(ctx)
		h, err = nil, fmt.Errorf("httplimit: hold: %w", context.DeadlineExceeded)
	}
	if h == nil {
		cancel()
	}
	return h, d, err
}
