package client

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// An Option changes a limiter when it is made. [New], [CheckShard] and [CheckAlone] take [Schema], [NoFlush], [DenialCache]
// and [Observe]. [NewCombiner] takes [CallsInFlight] and [MaxWaiting], too. [NewPrefetcher] and [NewSharded] take all of these,
// and each [Prefetch]. Any other Option makes the constructor panic.
type Option interface{ option() option }

// A CallOption changes one call. The comment of a method names the options that it takes. Any other option is [ErrInvalidArgument],
// and nothing is sent.
type CallOption interface{ callOption() }

// A request is plain or joint. A plain request asks for tokens of one bucket. A joint request has charges, and
// its key names them.
type request struct {
	policy, key    string
	cost           int64
	idempotencyKey any      // a string, or nil for none
	charges        []Charge // nil for a plain one
	err            error    // why it is not to be sent
}

func newRequest(method, policy, key string, opts []CallOption) request {
	var s settings
	s.read(method, opts, "Cost", "IdempotencyKey")
	return request{policy: policy, key: key, cost: s.cost.Tokens(), idempotencyKey: s.idempotencyKey, err: s.err}
}

func (r request) keyed() bool { return r.idempotencyKey != nil }

func (r request) isJoint() bool { return r.charges != nil }

// bucket is the bucket of the request. That of a joint request has no policy, so no valid plain request has it.
func (r request) bucket() bucket { return bucket{r.policy, r.key} }

// verb names the request in errors.
func (r request) verb() string {
	if r.isJoint() {
		return verbAcquireAll
	}
	return verbAcquire
}

// settings are the values that the options of one call set. Each method that takes maxRows or atLeast begins with its default.
type settings struct {
	cost           CostOption
	idempotencyKey any // a string, or nil for none
	atLeast        int64
	maxRows        int32
	policy, key    any // of a list: a string, or nil for all
	err            error
}

// read tells options apart by their type: if it called a method of each option, each option would be allocated.
func (s *settings) read(method string, opts []CallOption, takes ...string) {
	for _, opt := range opts {
		name := "a CallOption that is nil, or of another package,"
		switch opt := opt.(type) {
		case CostOption:
			name, s.cost = "Cost", opt
		case idempotencyKey:
			name, s.idempotencyKey = "IdempotencyKey", string(opt)
		case atLeast:
			name, s.atLeast = "AtLeast", int64(opt)
		case maxRows:
			name, s.maxRows = "MaxRows", int32(opt)
		case ofPolicy:
			name, s.policy = "OfPolicy", string(opt)
		case ofKey:
			name, s.key = "OfKey", string(opt)
		case onError: // kept by RunCleanup: a function that is kept here would have every option allocated, too
			name = "OnError"
		}
		if !slices.Contains(takes, name) {
			s.err = failed(method, fmt.Errorf("%w: %s is no option of %s, which takes %s", ErrInvalidArgument, name, method, strings.Join(takes, ", ")))
		}
	}
}

type (
	idempotencyKey string
	atLeast        int64
	maxRows        int32
	ofPolicy       string
	ofKey          string
	onError        func(error)
)

func (CostOption) callOption()     {}
func (idempotencyKey) callOption() {}
func (atLeast) callOption()        {}
func (maxRows) callOption()        {}
func (ofPolicy) callOption()       {}
func (ofKey) callOption()          {}
func (onError) callOption()        {}

// A CostOption is a [CallOption], and the cost of a [Charge]. The zero CostOption is a cost of 1.
type CostOption struct{ above1 int64 }

// Tokens is the number that [Cost] was given.
func (c CostOption) Tokens() int64 { return c.above1 + 1 }

// Cost is how many whole tokens the call is about. A cost of 0 is always allowed and takes nothing;
// a negative one is [ErrInvalidArgument]. Defaults to 1.
func Cost(tokens int64) CostOption { return CostOption{tokens - 1} } // at the ends of the range both wrap around

// AtLeast is how few tokens are still worth taking: with fewer, AcquireUpTo takes none. Defaults to 1.
func AtLeast(tokens int64) CallOption { return atLeast(tokens) }

// IdempotencyKey names the request (1 to 512 bytes), so that it can be sent again without being
// charged twice: for as long as the policy remembers, an Acquire with the same policy, key and
// idempotency key returns the first grant, marked Replayed, and takes nothing. With another cost it is
// [ErrIdempotencyMismatch]. A denial is not remembered: the next try is a fresh request. Defaults to none.
//
// The program chooses the idempotency key, one for each operation and the same for each attempt: an
// order number, or the id of a job with the name of the step. A replay answers the same request once
// more; it is no second request for free. An idempotency key that the program's own callers choose, such
// as an X-Request-ID header, switches the limit off: a caller that repeats its key is allowed every time.
func IdempotencyKey(key string) CallOption { return idempotencyKey(key) }

type config struct {
	schema        string
	noFlush       bool
	cachesDenials bool
	place         *place
	hooks         Hooks
	calls         int // of a Combiner
	waiting       int // of a Combiner
	prefetches    []Prefetch
}

// A kind of limiter takes the options of the kinds before it, too.
type kind int

const (
	aLimiter kind = iota
	aCombiner
	aPrefetcher
)

func newConfig(constructor string, kind kind, opts []Option) config {
	c := config{calls: defaultCalls, waiting: defaultWaiting}
	for _, opt := range opts {
		o := opt.option()
		if kind < o.least {
			panic("client: " + constructor + " has no use for " + o.name)
		}
		o.set(&c)
	}
	return c
}

type option struct {
	set   func(*config)
	least kind // the first kind that takes it
	name  string
}

func (o option) option() option { return o }

// Schema names the schema that has the ratelimit_* functions, for sessions whose search_path does not
// lead there. It is quoted as one identifier. Defaults to the functions that search_path finds.
func Schema(name string) Option { return option{set: func(c *config) { c.schema = name }} }

// NoFlush makes the calls that take tokens or give them back return before their writes are flushed to disk, as synchronous_commit = off
// does, for these calls alone. A crash of the server may then undo the writes of its last moments, up to three times wal_writer_delay
// (0.6 seconds unless set): their grants and idempotency keys are forgotten as if they had rolled back. Nothing else is at risk.
//
// It is for calls that are a transaction of their own: the caller chooses how its own transaction commits.
// So [Limiter.WithTx] leaves it out, and with [New] these calls fail with
// [ErrInvalidArgument] in a transaction, and on a handle that might be one. Defaults to the
// synchronous_commit of the session, which waits unless set.
func NoFlush() Option { return option{set: func(c *config) { c.noFlush = true }} }

// DenialCache makes Acquire repeat denials from memory: after a denial, requests
// on that bucket for the same cost or more are denied here until the denial's RetryAfter has passed, for a minute at most. A
// client that hammers an empty bucket then costs next to nothing.
//
// Such an answer repeats the denial with its times counted down: for a larger cost RetryAfter is only
// the earliest time to ask again. At most 131,072 buckets are remembered, in some 40 MB. The cache never answers for a smaller
// cost than was denied, for longer than RetryAfter, or for a cost that no wait helps. Requests with an
// idempotency key are always sent, and so are AcquireAll, AcquireUpTo and Reserve. In a transaction the cache is not used.
//
// The cache sees at once what calls through this Limiter do that change a bucket or a policy. It sees such calls of other programs, and
// the end of an override, when RetryAfter or a minute has passed. Leave the cache out where tokens are given back by other programs, in
// transactions, or with SQL, and callers must not wait for them.
func DenialCache() Option { return option{set: func(c *config) { c.cachesDenials = true }} }

// Observe makes the limiter call functions of the program, for metrics and logs. Limiters that WithTx makes of it call them, too.
// Defaults to none, which costs nothing.
func Observe(hooks Hooks) Option { return option{set: func(c *config) { c.hooks = hooks }} }

// CallsInFlight bounds how many calls a [Combiner] has under way at a time, 1 or more, and with it the
// connections it uses. A call keeps one core of the server busy. Two calls keep the server busy while the
// client reads and writes. More calls share the same requests, so each carries fewer, at a higher cost for
// each. Defaults to 2: on a server with 2 cores, 2 calls were faster than 1, 4 and 8 near the server, and
// within a tenth of the fastest 1 ms away, with 64 and with 256 callers. Allow one for each core that the
// server has to spare, if there are at least 32 callers for each. A [Prefetcher] uses more connections: see there.
func CallsInFlight(n int) Option {
	return option{func(c *config) { c.calls = n }, aCombiner, "CallsInFlight"}
}

// MaxWaiting bounds how many requests of a [Combiner] wait for a call at a time, 1 or more. Any further request is refused with
// [ErrOverloaded]. Each waiting request is a caller that waits. Defaults to 10,000, which is some 40 calls, or less than a second
// on a server that has the time.
func MaxWaiting(n int) Option {
	return option{func(c *config) { c.waiting = n }, aCombiner, "MaxWaiting"}
}

// MaxRows bounds the rows that one batch of clean-up takes from each table, or the rows of one list, 1 or more. An
// acquire on a bucket that is being removed waits for the batch, so keep batches short. Defaults to 10,000
// for clean-up.
func MaxRows(n int32) CallOption { return maxRows(n) }

// OfPolicy lists overrides or holders of one policy only.
func OfPolicy(name string) CallOption { return ofPolicy(name) }

// OfKey lists overrides or holders of one key only, under any policy.
func OfKey(key string) CallOption { return ofKey(key) }

// OnError is the function that [Limiter.RunCleanup] calls with an error before it goes on. Defaults to a warning
// through log/slog's default logger.
func OnError(handle func(error)) CallOption { return onError(handle) }

// Hooks are functions by which a program watches its limiter: see [Observe]. A nil hook is not called.
//
// The goroutine that did the work calls them, and goes on when they return; many goroutines call them at a time. No hook
// gets a key. Package otellimit, a module of its own, has hooks for OpenTelemetry.
type Hooks struct {
	// Answered gets each answer about a bucket but that of Reset, and each of many, before the caller has it, and each renewal and
	// release of a [Hold]. In a transaction it is unknown by then whether the
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
	// Operation is the name of the method in words, as in the text of errors, such as "acquire" or "acquire up to".
	Operation string

	// Policy is the policy of the request, which may not exist. Of several charges it is the policy of the binding charge, of
	// several settlements that of the first, and empty if there was an error.
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
	verbReserve     = "reserve"
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
