// Package httplimit is middleware for net/http: requests are charged to buckets of pgratelimit, and refused
// with 429 when a bucket does not cover its charge.
//
//	limit := httplimit.New(limiter, httplimit.Per("api", httplimit.ByIP(0)), httplimit.Open(100*time.Millisecond))
//	err := http.ListenAndServe(":8080", limit(mux))
//
// Behind a proxy it is ByIP(1): see [ByIP].
//
// The program must choose three things, which have no default: the buckets that a request is charged to, the
// limiter ([client.Limiter], [client.Combiner], or any other [client.Acquirer]), and the fate of requests
// while the database does not answer: [Closed], [Open] or [Local].
//
// # The answer to a client
//
// An answer has the fields of draft-ietf-httpapi-ratelimit-headers-11, for each policy that was charged:
//
//	RateLimit-Policy: "api";q=100;w=10
//	RateLimit: "api";r=37;t=1
//
// The bucket holds 100 tokens (q), an empty one is full in 10 seconds (w, only with [Policies]), 37 are
// left (r), and there will be more in about a second (t). A client that takes no more than r within t is not
// refused, if no other client takes from the same bucket.
//
// A request that a bucket does not cover is answered with 429 and problem+json, which names the policies that
// refused. Retry-After is the time until the same request is allowed, in seconds, rounded up. It is left out when
// no wait would help.
//
// The answer never has the key of a bucket.
//
// # At most so many at a time
//
// [Slots] is middleware of its own, which holds slots while a request is served:
//
//	slots := httplimit.Slots(limiter, httplimit.Per("reports", httplimit.ByIP(0)), httplimit.Closed(time.Second))
//	mux.Handle("GET /reports", slots(reports))
//
// # Streaming
//
// The handler gets the ResponseWriter that the server made: streaming, hijacking and everything else that an
// [http.ResponseController] does works as without the middleware.
package httplimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/internal/failure"
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
	m := newMiddleware(failure, opts)
	m.limiter, m.charges = limiter, charges
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
	}
}

// Per charges one token of one policy to the bucket that key names.
func Per(policy string, key Key) func(*http.Request) []client.Charge {
	if key == nil {
		panic("httplimit: Per: no key")
	}
	return func(r *http.Request) []client.Charge {
		return []client.Charge{{Policy: policy, Key: key(r)}}
	}
}

type middleware struct {
	limiter        client.Acquirer
	charges        func(*http.Request) []client.Charge
	failure        Failure
	guard          *failure.Guard
	idempotencyKey func(*http.Request) string // nil without IdempotencyKey
	observe        func(*http.Request, Event)
	refuse         func(http.ResponseWriter, *http.Request, Event)
	quotas         map[string]quota // of Policies, by name
}

func newMiddleware(chosen Failure, opts []Option) *middleware {
	m := &middleware{failure: chosen, guard: failure.NewGuard(), observe: func(*http.Request, Event) {}, refuse: Refuse}
	for _, opt := range opts {
		opt(m)
	}
	if m.observe == nil || m.refuse == nil {
		panic("httplimit: Observe or RefuseWith without a function")
	}
	return m
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
	m.see(r, e)
	if e.Status == 0 {
		next.ServeHTTP(w, r)
		return
	}
	m.refuse(w, r, e)
}

// see logs requests without an answer, and shows all to the program.
func (m *middleware) see(r *http.Request, e Event) {
	if e.Err != nil && e.Outcome != Abandoned {
		m.guard.Report(r.Context(), e.Charges, e.Err, e.Outcome == FailedOpen, "outcome", e.Outcome.String(), "local", e.Local)
	}
	m.observe(r, e)
}

// decide asks the limiter, and if there is no answer follows the program's [Failure].
func (m *middleware) decide(r *http.Request, charges []client.Charge) Event {
	e := Event{Charges: charges}
	var opts []client.CallOption
	if m.idempotencyKey != nil {
		if idempotencyKey := m.idempotencyKey(r); idempotencyKey != "" {
			opts = append(opts, client.IdempotencyKey(idempotencyKey))
			if !fits(idempotencyKey) {
				e.Err = errIdempotencyKey
				return e.ended(Invalid, http.StatusBadRequest)
			}
		}
	}
	e.Decision, e.Err = m.guard.Ask(r.Context(), m.failure.timeout, m.limiter, charges, opts...)
	if e.Err == nil {
		return e.decided()
	}
	err := e.Err
	if m.failure.local != nil && !m.guard.Fails(err) && r.Context().Err() == nil {
		e.Local = true
		if e.Decision, err = failure.Ask(r.Context(), m.failure.local, charges, opts...); err == nil {
			return e.decided()
		}
		e.Err = errors.Join(e.Err, err)
	}
	return m.undecided(r, e, err, len(opts) > 0)
}

// undecided is the fate of a request whose last limiter failed with err.
func (m *middleware) undecided(r *http.Request, e Event, err error, keyed bool) Event {
	switch {
	case r.Context().Err() != nil:
		// To go on would let a client pass that asks and leaves, if Open is chosen.
		return e.ended(Abandoned, http.StatusServiceUnavailable)
	case keyed && (errors.Is(err, client.ErrIdempotencyMismatch) || errors.Is(err, client.ErrSettled)):
		return e.ended(Invalid, http.StatusConflict)
	case m.guard.Fails(err):
		return e.ended(Invalid, http.StatusInternalServerError)
	case m.failure.outcome == FailedOpen:
		return e.ended(FailedOpen, 0)
	}
	return e.ended(FailedClosed, http.StatusServiceUnavailable)
}

// An Option changes the middleware: [Policies], [IdempotencyKey], [Observe] and [RefuseWith] return one.
type Option func(*middleware)

// Policies are the definitions, as [client.Limiter.DefinePolicy] is given them or [client.Limiter.Policies]
// returns them. With them RateLimit-Policy has w, the seconds in which an empty bucket fills, for each bucket
// that has the policy's capacity. A quota has no w, and t is the time to its next turn. Policies that only watch are not
// reported. Later changes are not seen. Defaults to none.
func Policies(policies ...client.Policy) Option {
	quotas := make(map[string]quota, len(policies))
	for _, p := range policies {
		quotas[p.Name] = newQuota(p)
	}
	return func(m *middleware) { m.quotas = quotas }
}

// IdempotencyKey is the function that returns the idempotency key under which a request is charged, so that the same
// request sent again is not charged again: see [client.IdempotencyKey]. An empty string is no key. Defaults to none.
//
// The program chooses the key. A function that returns a header of the HTTP client, such as Idempotency-Key,
// lets that client pass as often as it likes for one charge: it repeats the header, and changes everything else.
// Such a function is safe only behind a proxy or middleware that answers a repeated header without running the handler.
func IdempotencyKey(of func(*http.Request) string) Option {
	return func(m *middleware) { m.idempotencyKey = of }
}

// Observe is called for every request that has charges, before the handler runs or the refusal is written. Defaults
// to nothing. Requests without an answer are logged in any case: see [Failure].
func Observe(see func(*http.Request, Event)) Option {
	return func(m *middleware) { m.observe = see }
}

// RefuseWith answers requests that are refused, with e.Status or as it likes. RateLimit, RateLimit-Policy and
// Retry-After are in the header already. The client gets all that it writes, so it should not write e.Charges or
// e.Err. Defaults to [Refuse].
func RefuseWith(refuse func(w http.ResponseWriter, r *http.Request, e Event)) Option {
	return func(m *middleware) { m.refuse = refuse }
}

var errIdempotencyKey = fmt.Errorf("httplimit: %w: the idempotency key is no text of 1 to 512 bytes", client.ErrInvalidArgument)

// A Failure decides how a request ends when the limiter has not answered within a timeout, or failed.
// There is no default: [Closed], [Open] and [Local] make one, and panic unless the timeout is positive.
//
// It decides about errors that are [client.Away]. With a [client.Fault] the request is refused in each mode: a client could
// provoke it to get past the limit. So it is with a [client.Setup] until the middleware has had its first decision, because a limit
// that was never there would be off. After that it decides about these, too. A request with a client.Setup is tried once more, 0.1
// seconds later: an upgrade may have replaced the functions.
//
// Requests without an answer are logged through log/slog's default logger, with the error and its remedy, once a minute for each
// error and policy. The line has, by policy, how many requests have passed so far.
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

// An Outcome is the fate of a request.
type Outcome int

const (
	// Allowed means that the tokens were taken, and the handler runs.
	Allowed Outcome = 1 + iota

	// Denied means that a bucket does not cover its charge. The client is answered with 429.
	Denied

	// FailedOpen means that there was no answer, and the handler runs all the same: [Open].
	FailedOpen

	// FailedClosed means that there was no answer, and the client is answered with 503: [Closed].
	FailedClosed

	// Invalid means that no answer is to be had, and the client is answered with an error whatever was chosen: with 409 if the
	// request's idempotency key was used with another cost, or its grant is settled; with 400 if an idempotency key is no text of 1
	// to 512 bytes; and else with 500. The request or the program is to blame, or the limiter has never decided because the
	// package or a privilege is missing: see [Failure].
	Invalid

	// Abandoned means that the client had gone, or the time of its request was over, before there was an answer.
	// The handler does not run.
	Abandoned
)

var outcomes = [...]string{"none", "allowed", "denied", "failed open", "failed closed", "invalid", "abandoned"}

// String is the name in lower case, such as "failed open".
func (o Outcome) String() string {
	if o < 0 || int(o) >= len(outcomes) {
		return fmt.Sprintf("Outcome(%d)", int(o))
	}
	return outcomes[o]
}

// An Event reports how the middleware handled a request.
type Event struct {
	Outcome Outcome

	// Status is the status of the answer to the client, or 0 if the handler runs.
	Status int

	// Charges are the charges of the request. They have the keys, which are not for clients.
	Charges []client.Charge

	// Decision is the answer, of which Decisions has one for each charge. It is zero unless the outcome is Allowed
	// or Denied.
	Decision client.JointDecision

	// Local means that the limiter of [Local] was asked, since there was no other answer.
	Local bool

	// Err is why the limiter gave no answer. Its text may have the key.
	Err error

	// Duration is how long all this took.
	Duration time.Duration
}

func (e Event) ended(outcome Outcome, status int) Event {
	e.Outcome, e.Status = outcome, status
	return e
}

func (e Event) decided() Event {
	if e.Decision.Allowed {
		return e.ended(Allowed, 0)
	}
	return e.ended(Denied, http.StatusTooManyRequests)
}

// Violated names the policies that refused, each once and as RateLimit names them.
func (e Event) Violated() (policies []string) {
	if e.Outcome != Denied {
		return nil
	}
	for i, c := range e.Charges {
		if name := public(c.Policy); !e.Decision.Decisions[i].Allowed && !slices.Contains(policies, name) {
			policies = append(policies, name)
		}
	}
	return policies
}

// A problem is the body of a refusal: RFC 9457.
type problem struct {
	Type     string   `json:"type"`
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Violated []string `json:"violated-policies,omitempty"`
}

const quotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"

// Refuse answers a request with e.Status and problem+json, which names the policies that refused, and nothing else of
// e. The middleware calls it unless [RefuseWith] is given.
func Refuse(w http.ResponseWriter, _ *http.Request, e Event) {
	p := problem{Type: "about:blank", Title: http.StatusText(e.Status), Status: e.Status}
	if e.Outcome == Denied {
		p = problem{quotaExceeded, "Request cannot be satisfied as assigned quota has been exceeded", e.Status, e.Violated()}
	}
	body, _ := json.Marshal(p) // strings and a number
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(e.Status)
	_, _ = w.Write(append(body, '\n')) // a client that has gone is no news
}
