package client

import "log/slog"

// An Option changes one call.
type Option func(request) request

type request struct {
	policy, key    string
	cost           int64
	idempotencyKey any // a string, or nil for none
}

func newRequest(policy, key string, opts []Option) request {
	r := request{policy: policy, key: key, cost: 1}
	for _, opt := range opts {
		r = opt(r)
	}
	return r
}

func (r request) keyed() bool { return r.idempotencyKey != nil }

// Cost is how many whole tokens the call is about. A cost of 0 is always allowed and takes nothing;
// a negative one is [ErrInvalidArgument]. Defaults to 1.
func Cost(tokens int64) Option {
	return func(r request) request {
		r.cost = tokens
		return r
	}
}

// IdempotencyKey names the request (1 to 512 bytes), so that it can be sent again without being
// charged twice: for as long as the policy remembers, an Acquire with the same policy, key and
// idempotency key returns the first grant, marked Replayed, and takes nothing. With another cost it is
// [ErrIdempotencyMismatch]. A denial is not remembered: the next try is a fresh one. Defaults to none.
func IdempotencyKey(key string) Option {
	return func(r request) request {
		r.idempotencyKey = key
		return r
	}
}

// A LimiterOption changes a [Limiter] at [New].
type LimiterOption func(*config)

type config struct {
	schema  string
	noFlush bool
	denials bool
}

// Schema names the schema that has the ratelimit_* functions, for sessions whose search_path does not
// lead there. It is quoted as one identifier. Defaults to whatever search_path finds.
func Schema(name string) LimiterOption {
	return func(c *config) { c.schema = name }
}

// NoFlush makes Acquire, Refund and Reset return without waiting until what they wrote is flushed to
// disk, as synchronous_commit = off does, for these calls alone. A crash of the server may then undo
// what was done in its last moments, up to three times wal_writer_delay (0.6 seconds unless set): those
// grants and idempotency keys are forgotten as if they had rolled back. Nothing else is at risk.
//
// It is for calls that are a transaction of their own: the commit of a caller's transaction is the
// caller's to choose. So in a transaction, and on a handle that might be one, these calls fail with
// [ErrInvalidArgument]. Defaults to what the session says, which is to wait.
func NoFlush() LimiterOption {
	return func(c *config) { c.noFlush = true }
}

// DenialCache makes Acquire answer from memory what the server has promised: after a denial, requests
// on that bucket for the same cost or more are denied here until the denial's RetryAfter has passed. A
// client that hammers an empty bucket then costs next to nothing.
//
// Such an answer repeats the denial with its times counted down: for a larger cost RetryAfter is only
// the earliest time to ask again. Never more than 10,000 buckets are remembered, and none for a smaller
// cost than was denied, for longer than was promised, or for a cost above the capacity. Requests with an
// idempotency key are always sent. In a transaction the cache is not used.
//
// Refund, Reset, DefinePolicy and DropPolicy through this Limiter are seen at once. The same done by
// others is seen when the promised time has passed: leave the cache out where tokens are given back by
// other programs, in transactions, or with SQL, and callers must not wait for them.
func DenialCache() LimiterOption {
	return func(c *config) { c.denials = true }
}

// A CombinerOption changes a [Combiner] at [NewCombiner]. Each LimiterOption is one too.
type CombinerOption interface{ combiner(*combinerConfig) }

type combinerConfig struct {
	config
	calls int
}

func (o LimiterOption) combiner(c *combinerConfig) { o(&c.config) }

type combinerOption func(*combinerConfig)

func (o combinerOption) combiner(c *combinerConfig) { o(c) }

// CallsInFlight bounds how many calls a [Combiner] has under way at a time, 1 or more, and with it the
// connections it uses. Fewer calls carry more requests each, which costs the server less; more are
// faster when it has cores to spare, or is far away. Defaults to 2, which was fastest on a server with 2
// cores.
func CallsInFlight(n int) CombinerOption {
	return combinerOption(func(c *combinerConfig) { c.calls = n })
}

// A CleanupOption changes [Limiter.Cleanup] or [Limiter.RunCleanup].
type CleanupOption func(*cleanup)

type cleanup struct {
	maxRows int32
	onError func(error)
}

func newCleanup(opts []CleanupOption) cleanup {
	c := cleanup{
		maxRows: 10_000,
		onError: func(err error) { slog.Warn("rate limit clean-up failed", "error", err) },
	}
	for _, opt := range opts {
		opt(&c)
	}
	return c
}

// MaxRows bounds the rows that one batch takes from each table, 1 or more. An acquire on a bucket that
// is being removed waits for the batch, so keep batches short. Defaults to 10,000.
func MaxRows(n int32) CleanupOption {
	return func(c *cleanup) { c.maxRows = n }
}

// OnError is what [Limiter.RunCleanup] does with an error before it goes on. Defaults to a warning
// through log/slog's default logger.
func OnError(handle func(error)) CleanupOption {
	return func(c *cleanup) { c.onError = handle }
}
