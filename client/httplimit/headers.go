package httplimit

import (
	"fmt"
	"math/big"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A quota has the numbers of one of the [Policies].
type quota struct {
	capacity int64
	window   int64 // seconds to fill an empty bucket, rounded up; 0 if it never is
	shadow   bool
	turns    bool // it is full at the turns of a calendar, and so has no window of fixed length
}

func newQuota(p client.Policy) quota {
	q := quota{capacity: p.Capacity, shadow: p.Shadow == client.Yes, turns: p.Period != (client.Period{})}
	if p.Capacity < 1 || p.Refill < 1 || p.Every <= 0 {
		return q
	}
	refill := big.NewInt(p.Refill)
	fill := new(big.Int) // Refill times its duration
	if p.Stepped == client.Yes {
		fill.Mul(ceil(big.NewInt(p.Capacity), refill), refill)
	} else {
		fill.SetInt64(p.Capacity)
	}
	fill.Mul(fill, big.NewInt(int64(p.Every)))
	if window := ceil(fill, refill.Mul(refill, big.NewInt(int64(time.Second)))); window.IsInt64() {
		q.window = window.Int64()
	}
	return q
}

// ceil is a / b rounded up, of positive numbers.
func ceil(a, b *big.Int) *big.Int {
	sum := new(big.Int).Add(a, b)
	return sum.Div(sum.Sub(sum, big.NewInt(1)), b)
}

// setRetryAfter says when a request that is denied may be sent again.
func setRetryAfter(h http.Header, e Event) {
	if d := e.Decision; e.Outcome == Denied && !d.Never() {
		h.Set("Retry-After", strconv.FormatInt(d.RetryAfterSeconds(), 10))
	}
}

// report sets the fields of draft-ietf-httpapi-ratelimit-headers-11, which [http.Header] spells so. They are added to the fields of other
// middleware.
func (m *middleware) report(h http.Header, e Event) {
	d := e.Decision
	setRetryAfter(h, e)
	if e.Local || len(d.Decisions) == 0 {
		return
	}
	policies, limits := make([]byte, 0, 64), make([]byte, 0, 64) // enough for most
	for i := range e.Charges {
		tightest, known := tightest(e, i)
		quota := m.quotas[e.Charges[i].Policy]
		if tightest < 0 || quota.shadow || d.Decisions[tightest].Shadowed {
			continue
		}
		policies = appendPolicy(policies, e.Charges[i].Policy, d.Decisions[tightest], quota)
		if known {
			limits = appendLimit(limits, e.Charges[i].Policy, d.Decisions[tightest], d.Decision, quota)
		}
	}
	if len(policies) > 0 {
		h.Add("Ratelimit-Policy", string(policies))
	}
	if len(limits) > 0 {
		h.Add("Ratelimit", string(limits))
	}
}

// tightest is the charge that stands for all charges of the policy of charge i: its bucket holds the least, and
// of several such buckets is full last. It is -1 if an earlier charge than i stands for the policy. The remaining tokens are
// not known when a bucket answered with an earlier grant, which has the level of that time.
func tightest(e Event, i int) (tightest int, known bool) {
	policy, decisions := e.Charges[i].Policy, e.Decision.Decisions
	for j := range i {
		if e.Charges[j].Policy == policy {
			return -1, false
		}
	}
	tightest, known = i, true
	for j := i; j < len(decisions); j++ {
		if e.Charges[j].Policy != policy {
			continue
		}
		known = known && !decisions[j].Replayed
		if a, b := decisions[j], decisions[tightest]; a.Remaining < b.Remaining || a.Remaining == b.Remaining && a.ResetAfter > b.ResetAfter {
			tightest = j
		}
	}
	return tightest, known
}

func appendPolicy(field []byte, policy string, d client.Decision, quota quota) []byte {
	field = appendName(field, policy)
	field = strconv.AppendInt(append(field, ";q="...), d.Capacity, 10)
	if quota.window > 0 && quota.capacity == d.Capacity {
		field = strconv.AppendInt(append(field, ";w="...), quota.window, 10)
	}
	return field
}

// appendLimit leaves t out where no time brings more.
func appendLimit(field []byte, policy string, d, whole client.Decision, quota quota) []byte {
	field = appendName(field, policy)
	field = strconv.AppendInt(append(field, ";r="...), max(0, d.Remaining), 10)
	if !d.NeverFull() {
		field = strconv.AppendInt(append(field, ";t="...), untilMore(d, whole, quota), 10)
	}
	return field
}

// untilMore is the time that a token takes to come, on average until the bucket is full, or the time to the turn: in
// seconds, rounded up, at least 1, and at most Retry-After.
func untilMore(d, whole client.Decision, quota quota) int64 {
	missing := time.Duration(max(1, d.Capacity-d.Remaining))
	if quota.turns {
		missing = 1 // all come together
	}
	t := max(1, ceilDiv(ceilDiv(d.ResetAfter, missing), time.Second))
	if !whole.Allowed && !whole.Never() {
		t = min(t, time.Duration(whole.RetryAfterSeconds()))
	}
	return int64(t)
}

// ceilDiv is a / b rounded up, of numbers that are not negative.
func ceilDiv(a, b time.Duration) time.Duration {
	quotient := a / b
	if a%b > 0 {
		quotient++
	}
	return quotient
}

// appendName begins an item of a list: a string of RFC 9651.
func appendName(field []byte, policy string) []byte {
	if len(field) > 0 {
		field = append(field, ", "...)
	}
	field = append(field, '"')
	for _, c := range []byte(public(policy)) {
		if c == '"' || c == '\\' {
			field = append(field, '\\')
		}
		field = append(field, c)
	}
	return append(field, '"')
}

// public is the name of a policy as clients see it. It is printable ASCII: any other byte, and the
// percent sign, is written as in a URL.
func public(policy string) string {
	isPlain := func(c byte) bool { return ' ' <= c && c <= '~' && c != '%' }
	if !slices.ContainsFunc([]byte(policy), func(c byte) bool { return !isPlain(c) }) {
		return policy
	}
	name := make([]byte, 0, 64) // enough for most
	for _, c := range []byte(policy) {
		if isPlain(c) {
			name = append(name, c)
		} else {
			name = fmt.Appendf(name, "%%%02X", c)
		}
	}
	return string(name)
}
