package client

import "log/slog"

// An Option changes one call.
type Option func(*request)

type request struct {
	cost           int64
	idempotencyKey any // a string, or nil for none
}

func newRequest(opts []Option) request {
	r := request{cost: 1}
	for _, opt := range opts {
		opt(&r)
	}
	return r
}

// Cost is how many whole tokens the call is about. A cost of 0 is always allowed and takes nothing;
// a negative one is [ErrInvalidArgument]. Defaults to 1.
func Cost(tokens int64) Option {
	return func(r *request) { r.cost = tokens }
}

// IdempotencyKey names the request (1 to 512 bytes), so that it can be sent again without being
// charged twice: for as long as the policy remembers, an Acquire with the same policy, key and
// idempotency key returns the first grant, marked Replayed, and takes nothing. With another cost it is
// [ErrIdempotencyMismatch]. A denial is not remembered: the next try is a fresh one. Defaults to none.
func IdempotencyKey(key string) Option {
	return func(r *request) { r.idempotencyKey = key }
}

// A LimiterOption changes a [Limiter] at [New].
type LimiterOption func(*config)

type config struct {
	schema string
}

// Schema names the schema that has the ratelimit_* functions, for sessions whose search_path does not
// lead there. It is quoted as one identifier. Defaults to whatever search_path finds.
func Schema(name string) LimiterOption {
	return func(c *config) { c.schema = name }
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
