package httplimit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

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
	said := make(map[string]bool, 1)
	for i, c := range e.Charges {
		if !e.Decision.Decisions[i].Allowed && !said[c.Policy] {
			said[c.Policy] = true
			policies = append(policies, public(c.Policy))
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
