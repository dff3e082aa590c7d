package httplimit

import (
	"fmt"
	"net/http"

	"github.com/pgratelimit/pgratelimit/client"
)

// An Option changes the middleware: [Policies], [IdempotencyKey], [Observe] and [RefuseWith] return one.
type Option func(*middleware)

// Policies are the definitions, as [client.Limiter.DefinePolicy] is given them or [client.Limiter.Policies]
// returns them. With them RateLimit-Policy has w, the seconds in which an empty bucket fills, for each bucket
// that has the policy's capacity. Policies that only watch are not reported. Later changes
// are not seen. Defaults to none.
func Policies(policies ...client.Policy) Option {
	quotas := make(map[string]quota, len(policies))
	for _, p := range policies {
		quotas[p.Name] = newQuota(p)
	}
	return func(m *middleware) { m.quotas = quotas }
}

// IdempotencyKey is the function that returns the idempotency key under which a request is charged, so that the same
// request sent again is not charged again: see [client.IdempotencyKey]. An empty string is no key. Defaults to
// none.
//
// The program chooses the key. A function that returns a header of the HTTP client, such as Idempotency-Key,
// lets that client pass as often as it likes for one charge: it repeats the header, and changes everything else.
// Such a function is safe only behind a proxy or middleware that answers a repeated header without running the handler.
func IdempotencyKey(of func(*http.Request) string) Option {
	return func(m *middleware) { m.idempotencyKey = of }
}

// Observe is called for every request that has charges, before the handler runs or the refusal is written. Defaults
// to a warning through log/slog's default logger when there was no answer, at most once a second.
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
