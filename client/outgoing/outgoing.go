// Package outgoing limits the requests that programs send to an upstream, such as the API of a vendor. All processes share buckets in
// PostgreSQL. A request is sent when its buckets hold enough tokens, and one answer that names a pause stops all processes.
//
//	upstream := &http.Client{Transport: outgoing.New(limiter, func(r *http.Request) []client.Charge {
//		return []client.Charge{
//			{Policy: "upstream-requests", Key: "account:7"},
//			{Policy: "upstream-tokens", Key: "account:7", Cost: client.Cost(estimate(r))},
//		}
//	})}
//
// # Waiting
//
// A request takes all its charges in one AcquireAll, or waits until they are there. In a process, requests with the same buckets wait in
// line, and only the first of them asks again. Processes have no order among them: a request that costs much more than others can wait
// for as long as the others keep its bucket low.
//
// A request fails unsent, and its body is closed unread, with [client.ErrTooLate] if the tokens come after the deadline of its context or
// never, with the error of the context, or with that of the limiter. It has then taken nothing: tokens that are granted after its
// context has ended are refunded. A request that was sent keeps its tokens, whatever its answer is.
//
// # Pausing
//
// An answer pauses the bucket of the first charge for as long as [RetryAfter] returns: see [client.Limiter.Pause]. So name first the
// bucket that all requests to the upstream are charged to. Its policy must refill, and is no quota. What was granted before the pause is
// sent: requests, reservations, and for up to a second the requests of a program that has prefetched tokens by [client.Prefetcher.Acquire].
//
// There are no retries. The caller gets each answer, a 429 too, when its pause is committed. To send the request again, it waits
// for its tokens again.
package outgoing

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// callTimeout bounds a pause, and a call whose request has ended.
const callTimeout = 5 * time.Second

// A Limiter takes tokens and pauses buckets: *[client.Limiter], *[client.Combiner], *[client.Prefetcher] and the fake of package clienttest.
type Limiter interface {
	AcquireAll(ctx context.Context, charges []client.Charge, opts ...client.CallOption) (client.JointDecision, error)
	Refund(ctx context.Context, policy, key string, amount int64) (client.Decision, error)
	Pause(ctx context.Context, policy, key string, pauseFor time.Duration) (client.Decision, error)
}

// New returns a RoundTripper that takes the charges of a request before it sends the request. A request without charges is sent without
// a call, and its answer pauses nothing. An http.Client that follows a redirect charges each of its requests.
func New(limiter Limiter, charges func(*http.Request) []client.Charge, opts ...Option) http.RoundTripper {
	t := &transport{limiter: limiter, charges: charges, base: http.DefaultTransport, maxPause: time.Hour, pauseFor: RetryAfter, last: map[string]chan struct{}{}}
	t.onError = func(r *http.Request, err error) { slog.WarnContext(r.Context(), "bucket not paused", "error", err) }
	for _, opt := range opts {
		opt(t)
	}
	if t.limiter == nil || t.charges == nil || t.base == nil || t.pauseFor == nil || t.onError == nil {
		panic("outgoing: New: no limiter, no charges, or an option of nil")
	}
	return t
}

// An Option changes the RoundTripper: [Base], [MaxPause], [PauseFor] and [OnError] return one.
type Option func(*transport)

// Base sends the requests. Defaults to [http.DefaultTransport].
func Base(base http.RoundTripper) Option { return func(t *transport) { t.base = base } }

// MaxPause bounds each pause, whatever the upstream asks for. It must be above 0, and no pause is longer than 365 days. Defaults to an
// hour.
func MaxPause(most time.Duration) Option {
	if most <= 0 {
		panic(fmt.Sprintf("outgoing: MaxPause(%v): pass a duration above 0; without pauses, give PauseFor a function that returns 0", most))
	}
	return func(t *transport) { t.maxPause = min(most, longest) }
}

// PauseFor is how long an answer pauses the bucket, 0 or less for not at all, such as for the fields of one vendor. It must not read
// the body. Defaults to [RetryAfter].
func PauseFor(of func(*http.Response) time.Duration) Option {
	return func(t *transport) { t.pauseFor = of }
}

// OnError is called when a pause failed. The caller gets the answer all the same. Defaults to a warning by log/slog's default logger.
func OnError(see func(*http.Request, error)) Option { return func(t *transport) { t.onError = see } }

type transport struct {
	limiter  Limiter
	charges  func(*http.Request) []client.Charge
	base     http.RoundTripper
	maxPause time.Duration
	pauseFor func(*http.Response) time.Duration
	onError  func(*http.Request, error)

	mu   sync.Mutex
	last map[string]chan struct{} // of each line, by the names of its buckets; closed when the request has left
}

// RoundTrip implements [http.RoundTripper].
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	charges := t.charges(r)
	if len(charges) == 0 {
		return t.base.RoundTrip(r)
	}
	if err := t.take(r.Context(), charges); err != nil {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, err
	}
	response, err := t.base.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if d := min(t.pauseFor(response), t.maxPause); d > 0 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), callTimeout)
		defer cancel()
		if _, err := t.limiter.Pause(ctx, charges[0].Policy, charges[0].Key, max(d, time.Millisecond)); err != nil {
			t.onError(r, err)
		}
	}
	return response, nil
}

// take returns when the tokens are taken. If it fails, none are.
func (t *transport) take(ctx context.Context, charges []client.Charge) error {
	leave, err := t.line(ctx, charges)
	if err != nil {
		return err
	}
	defer leave()
	for {
		d, err := t.ask(ctx, charges)
		if err != nil || d.Allowed {
			return err
		}
		if deadline, ok := ctx.Deadline(); d.Never() || ok && time.Until(deadline) < d.RetryAfter {
			of := charges[d.Binding]
			return fmt.Errorf("outgoing: %w: a request of %d tokens of the policy %q, whose capacity is %d", client.ErrTooLate, of.Cost.Tokens(), of.Policy, d.Capacity)
		}
		select {
		case <-time.After(d.RetryAfter):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// line returns when all earlier requests with the same buckets have left.
func (t *transport) line(ctx context.Context, charges []client.Charge) (func(), error) {
	name, left := "", make(chan struct{})
	for _, c := range charges {
		name += strconv.Quote(c.Policy) + strconv.Quote(c.Key)
	}
	t.mu.Lock()
	before := t.last[name]
	t.last[name] = left
	t.mu.Unlock()
	leave := func() {
		close(left)
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.last[name] == left {
			delete(t.last, name)
		}
	}
	if before == nil {
		return leave, nil
	}
	select {
	case <-before:
		return leave, nil
	case <-ctx.Done():
		go func() { <-before; leave() }()
		return nil, ctx.Err()
	}
}

// ask makes one call. A call that ctx cut off could have taken tokens. So it goes on without its caller, and refunds them.
func (t *transport) ask(ctx context.Context, charges []client.Charge) (d client.JointDecision, err error) {
	if ctx.Err() != nil {
		return d, ctx.Err()
	}
	detached, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(callTimeout, cancel) })
	answered := make(chan func()) // which sets the results
	go func() {
		defer cancel()
		defer stop()
		granted, failure := t.limiter.AcquireAll(detached, charges)
		select {
		case answered <- func() { d, err = granted, failure }:
			return
		case <-ctx.Done():
		}
		for i, c := range charges {
			if granted.Allowed && !granted.Decisions[i].Shadowed {
				_, _ = t.limiter.Refund(detached, c.Policy, c.Key, c.Cost.Tokens())
			}
		}
	}()
	select {
	case set := <-answered:
		set()
	case <-ctx.Done():
		err = ctx.Err()
	}
	return d, err
}

// longest is the longest pause that the database takes. What is further from now is no wait.
const longest = 365 * 24 * time.Hour

// RetryAfter returns how long an answer asks its client to wait, or 0. Retry-After of a status of 400 or more wins if it can be read,
// then Retry-After-Ms or X-Ms-Retry-After-Ms, of such a status, too. Otherwise it is the longest wait of these, of any status, which
// count if they say that nothing is left:
//
//   - RateLimit: "default";r=0;t=30 of draft-ietf-httpapi-ratelimit-headers-11, or limit=50, remaining=0, reset=30 of its draft 7
//   - RateLimit-Remaining: 0 with RateLimit-Reset: 30 of earlier drafts, also as X-RateLimit- or X-Rate-Limit-
//
// A value is a number of decimal digits with or without a fraction, an HTTP date, or a date of RFC 3339. A number up to 365 days, behind
// X- up to a day, is seconds; a number within 365 days of now is Unix time in seconds or milliseconds. Now is the answer's Date, or the
// local clock if there is no Date within 365 days of the instant. Any other value, a list, or a field that is sent twice is no wait: what
// is unclear pauses nothing.
func RetryAfter(response *http.Response) time.Duration {
	a := answer{response.Header, []time.Time{time.Now()}}
	if at, ok := date(a.field("Date")); ok {
		a.clocks = []time.Time{at, a.clocks[0]}
	}
	if response.StatusCode >= http.StatusBadRequest {
		if wait, ok := a.wait("Retry-After", a.field("Retry-After")); ok {
			return wait
		}
		for _, name := range []string{"Retry-After-Ms", "X-Ms-Retry-After-Ms"} {
			if ms, ok := number(a.field(name)); ok && ms <= longest.Seconds()*1000 {
				return seconds(ms / 1000)
			}
		}
	}
	var wait time.Duration
	untilReset := func(name, remaining, reset string) {
		if left, ok := number(remaining); ok && left == 0 {
			d, _ := a.wait(name, reset)
			wait = max(wait, d)
		}
	}
	for _, prefix := range []string{"RateLimit-", "X-RateLimit-", "X-Rate-Limit-"} {
		untilReset(prefix, a.field(prefix+"Remaining"), a.field(prefix+"Reset"))
	}
	list := quoted.ReplaceAllString(a.field("RateLimit"), "")
	if strings.Contains(list, "remaining=") {
		list = strings.ReplaceAll(list, ",", ";") // its members are of one policy
	}
	for item := range strings.SplitSeq(list, ",") {
		of := map[string]string{}
		for parameter := range strings.SplitSeq(item, ";") {
			name, value, _ := strings.Cut(strings.Trim(parameter, " \t"), "=")
			of[name] = value
		}
		untilReset("RateLimit", of["r"], of["t"])
		untilReset("RateLimit", of["remaining"], of["reset"])
	}
	return wait
}

// An answer has clocks, the first of which that is near an instant measures it.
type answer struct {
	header http.Header
	clocks []time.Time
}

// field is what HTTP makes of several lines.
func (a answer) field(name string) string { return strings.Join(a.header.Values(name), ", ") }

// wait reads seconds, or an instant.
func (a answer) wait(name, text string) (time.Duration, bool) {
	var instants []float64
	if n, ok := number(text); ok {
		most := longest
		if strings.HasPrefix(name, "X-") {
			most = 24 * time.Hour // no standard says seconds: 600000 has been seen for milliseconds
		}
		if n <= most.Seconds() {
			return seconds(n), true
		}
		instants = []float64{n, n / 1000}
	} else if at, ok := date(text); ok {
		instants = []float64{float64(at.UnixMilli()) / 1000}
	}
	for _, now := range a.clocks {
		for _, at := range instants {
			if wait := at - float64(now.UnixMilli())/1000; math.Abs(wait) <= longest.Seconds() {
				return seconds(max(0, wait)), true
			}
		}
	}
	return 0, false
}

var (
	digits = regexp.MustCompile(`^[ \t]*(\d+(?:\.\d+)?)[ \t]*$`)
	quoted = regexp.MustCompile(`"(?:[^"\\]|\\.?)*"?`)
)

func number(text string) (float64, bool) {
	match := digits.FindStringSubmatch(text)
	if match == nil {
		return 0, false
	}
	n, err := strconv.ParseFloat(match[1], 64)
	return n, err == nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// date reads the three forms of an HTTP date, and RFC 3339 with or without seconds.
func date(text string) (time.Time, bool) {
	for _, layout := range []string{http.TimeFormat, "Monday, 02-Jan-06 15:04:05 GMT", time.ANSIC, time.RFC3339, "2006-01-02T15:04Z07:00"} {
		if at, err := time.Parse(layout, strings.Trim(text, " \t")); err == nil {
			return at, true
		}
	}
	return time.Time{}, false
}
