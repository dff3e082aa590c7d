package client_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
)

// An error says what failed, why, and what to do. Its kind is that of its SQLSTATE, and the server's error is within reach. An address
// that is tried with TLS and without is reported once.
func TestErrors_SayWhatFailedAndWhatHelps(t *testing.T) {
	t.Parallel()
	for code, test := range map[string]struct {
		kind  error
		helps string
	}{
		"RL001": {client.ErrUnknownPolicy, "Detail. Hint."}, "RL002": {client.ErrIdempotencyMismatch, "Hint."}, "RL003": {client.ErrNoGrant, "Hint."},
		"RL004": {client.ErrSettled, "Hint."}, "22023": {client.ErrInvalidArgument, "Hint."}, "22007": {client.ErrInvalidArgument, "Hint."},
		"22008": {client.ErrInvalidArgument, "Hint."}, "22P02": {client.ErrInvalidArgument, "Hint."},
		"22021": {client.ErrInvalidArgument, "pass text in UTF-8, or a hash"}, "22P05": {client.ErrInvalidArgument, "pass text in UTF-8"},
		"55P03": {client.ErrLocked, "Hint."}, "28P01": {nil, "Check the user and the password"}, "28000": {nil, "pg_hba.conf"},
		"3D000": {nil, "Check the name of the database"}, "08P01": {nil, "ignore_startup_parameters"}, "3F000": {nil, "Install pgratelimit"},
		"42P01": {nil, "Install pgratelimit"}, "42703": {nil, "another version"}, "42883": {nil, "Install pgratelimit"}, "25006": {nil, "Hint."},
	} {
		cause := &pgconn.PgError{Severity: "ERROR", Code: code, Message: "made up", Detail: "Detail.", Hint: "Hint."}
		_, err := client.New(&fakeDB{answers: []any{cause}}).Peek(t.Context(), "p", "k")
		require.ErrorContains(t, err, "pgratelimit: peek: ERROR: made up (SQLSTATE "+code+"). Detail. ")
		require.ErrorContains(t, err, test.helps)
		require.ErrorIs(t, err, cause)
		for _, kind := range []error{
			client.ErrUnknownPolicy, client.ErrIdempotencyMismatch, client.ErrNoGrant, client.ErrSettled, client.ErrInvalidArgument, client.ErrLocked,
		} {
			require.Equal(t, kind == test.kind, errors.Is(err, kind), "%s is %v", code, kind) //nolint:errorlint // which of them it is
		}
	}
	_, err := client.New(&fakeDB{answers: []any{refused(t)}}).Acquire(t.Context(), "p", "k")
	require.Equal(t, 1, strings.Count(err.Error(), "connection refused"), err)
}

// A privilege that is missing is named by the statement that grants it.
func TestErrors_SayWhichGrantIsMissing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	fail := func(message string) *client.Limiter {
		cause := &pgconn.PgError{Severity: "ERROR", Code: "42501", Message: message}
		return client.New(&fakeDB{answers: []any{cause}}, client.Schema("ratelimit_app"))
	}
	_, err := fail("permission denied for function ratelimit_peek").Peek(ctx, "p", "k")
	require.EqualError(t, err, `pgratelimit: peek: ERROR: permission denied for function ratelimit_peek (SQLSTATE 42501). `+
		`Its owner can run: grant execute on function "ratelimit_app".ratelimit_peek(text, text, bigint) to <role>;`)
	err = fail("keine Berechtigung für Funktion ratelimit_define_policy").DefinePolicy(ctx, client.Policy{Name: "p"})
	require.ErrorContains(t, err, `"ratelimit_app".ratelimit_define_policy(text, bigint, bigint, interval, boolean, boolean, interval, boolean, interval, text, timestamp, interval, interval) to <role>;`)
	_, err = fail("permission denied for function ratelimit_acquire_all").AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}})
	require.ErrorContains(t, err, `"ratelimit_app".ratelimit_acquire_all(text[], text[], bigint[], text) to <role>;`)
	err = fail("permission denied for function ratelimit_override").Override(ctx, client.Override{})
	require.ErrorContains(t, err, `"ratelimit_app".ratelimit_override(text, text, bigint, bigint, interval, timestamptz, text, timestamp, interval) to <role>;`)
	_, err = fail("permission denied for schema ratelimit_app").Acquire(ctx, "p", "k")
	require.ErrorContains(t, err, `Its owner can run: grant usage on schema "ratelimit_app" to <role>;`)
	_, err = fail("permission denied for table policies").Acquire(ctx, "p", "k")
	require.EqualError(t, err, "pgratelimit: acquire: ERROR: permission denied for table policies (SQLSTATE 42501)", "no grant of ours would help")
}

func TestErrors_OfTheClientNeverReachTheDatabase(t *testing.T) {
	t.Parallel()
	db := &fakeDB{answers: []any{granted(1)}}
	ctx, limiter := t.Context(), client.New(db)
	for name, err := range map[string]error{
		"every with a fraction":          limiter.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 1, Refill: 1, Every: 1500}),
		"remember with a fraction":       limiter.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 1, Refill: 1, Every: 1000, Remember: 1}),
		"override every with a fraction": limiter.Override(ctx, client.Override{Policy: "p", Key: "k", Every: 1500}),
	} {
		require.ErrorIs(t, err, client.ErrInvalidArgument, name)
	}
	for verb, err := range map[string]error{
		"acquire":       errOf(limiter.Acquire(ctx, "p", "\x00")),
		"acquire all":   errOf(limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}, {Policy: "p\x00", Key: "k"}})),
		"settle":        errOf(limiter.Settle(ctx, "p", "k", "i\x00", 1)),
		"hold":          errOf(limiter.HoldAs(ctx, "p", "k", "\x00")),
		"define policy": limiter.DefinePolicy(ctx, client.Policy{Name: "p", TimeZone: "\x00"}),
		"override":      limiter.Override(ctx, client.Override{Policy: "p", Key: "\x00"}),
	} {
		require.ErrorIs(t, err, client.ErrInvalidArgument)
		require.EqualError(t, err, "pgratelimit: "+verb+": invalid argument: a text has a zero byte, which no text in PostgreSQL can hold; pass a hash of it")
	}
	require.Empty(t, db.sent())
}

func TestAsDenial_TellsWhatTheErrorTells(t *testing.T) {
	t.Parallel()
	never := client.Denial{Policy: "p", Cost: 9, Decision: client.Decision{Remaining: -2, Capacity: 5, RetryAfter: 1<<63 - 1}}
	for _, d := range []client.Denial{
		{Policy: "p", Cost: 3, Decision: client.Decision{Remaining: 2, Capacity: 5, RetryAfter: time.Microsecond}},
		{Policy: "ü\n\"", Cost: 1 << 62, Decision: client.Decision{Capacity: 9_000_000_000_000, RetryAfter: 290 * 365 * 24 * time.Hour}},
		never,
	} {
		got, ok := client.AsDenial(clienttest.DenialError(d))
		require.True(t, ok)
		require.Equal(t, d, got)
	}
	require.True(t, never.Never())

	saturated, ok := client.AsDenial(&pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": 3155760000000, "capacity": 5}`})
	require.True(t, ok)
	require.Positive(t, saturated.RetryAfter)
	require.False(t, saturated.Never())

	for name, err := range map[string]error{
		"nil":            nil,
		"another error":  errors.New("RL429"),
		"another code":   &pgconn.PgError{Code: "RL001", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": 1, "capacity": 5}`},
		"no detail":      &pgconn.PgError{Code: "RL429"},
		"no policy":      &pgconn.PgError{Code: "RL429", Detail: `{"cost": 1, "remaining": 0, "retry_after": 1, "capacity": 5}`},
		"an exponent":    &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": 1e9, "capacity": 5}`},
		"another number": &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": "soon", "capacity": 5}`},
	} {
		d, ok := client.AsDenial(err)
		require.False(t, ok, name)
		require.Zero(t, d, name)
	}
}

const longest = math.MaxInt64 / 1000 * time.Microsecond

// Nothing is never, and no time that a Duration cannot hold is. Package clienttest compares the other fields.
func TestDecision_Decodes(t *testing.T) {
	t.Parallel()
	const most = math.MaxInt64 / 1000
	for name, test := range map[string]struct {
		answer row
		want   client.Decision // of capacity 10
	}{
		"never":                  {never, client.Decision{Remaining: 10, RetryAfter: math.MaxInt64}},
		"a grant without refill": {row{true, int64(3), int64(0), nil, int64(10), false, false}, client.Decision{Allowed: true, Remaining: 3, ResetAfter: math.MaxInt64}},
		"the longest durations": {
			row{false, int64(-3), int64(most), int64(most - 1), int64(10), false, false},
			client.Decision{Remaining: -3, RetryAfter: longest, ResetAfter: longest - time.Microsecond},
		},
		"durations beyond that": {
			row{false, int64(0), int64(most + 1), int64(math.MaxInt64), int64(10), false, false}, client.Decision{RetryAfter: longest, ResetAfter: longest},
		},
	} {
		test.want.Capacity = 10
		got := noError(client.New(&fakeDB{answers: []any{test.answer}}).Acquire(t.Context(), "p", "k"))(t)
		require.Equal(t, test.want, got, name)
		require.Equal(t, test.answer[2] == nil, got.Never(), name)
		require.Equal(t, test.answer[3] == nil, got.NeverFull(), name)
	}
}

func TestDecision_RetryAfterSeconds(t *testing.T) {
	t.Parallel()
	for retryAfter, want := range map[time.Duration]int64{
		0:                              0,
		time.Microsecond:               1,
		time.Second - time.Microsecond: 1,
		time.Second:                    1,
		time.Second + time.Microsecond: 2,
		90 * time.Second:               90,
		longest:                        9_223_372_037,
		math.MaxInt64:                  9_223_372_037, // never
	} {
		require.Equal(t, want, client.Decision{RetryAfter: retryAfter}.RetryAfterSeconds(), retryAfter)
	}
}

// A request of any kind is sent again where that can do no harm. The answer to the last try is that of the request.
func TestRetry_WhereItDoesNoHarm(t *testing.T) {
	t.Parallel()
	conflict, deadlock, refused, broken := pgError("40001"), pgError("40P01"), pgError("57014"), errors.New("connection reset")
	closed := errors.New("closed pool")
	fatal, panicked, internal, replaced, moved := pgError("57P01"), pgError("XX000"), pgError("XX000"), pgError("XX000"), pgError("XX000")
	fatal.SeverityUnlocalized, panicked.SeverityUnlocalized = "FATAL", "PANIC"
	replaced.Message, moved.Message = "cache lookup failed for function 16999", "the shard has moved"
	sends := map[string]func(*testing.T, *gatedPool, *client.Combiner, ...client.CallOption) []<-chan answer{
		"acquire": func(t *testing.T, db *gatedPool, _ *client.Combiner, opts ...client.CallOption) []<-chan answer {
			return []<-chan answer{ask(t.Context(), client.New(db), "k1", opts...)}
		},
		"acquire all": func(t *testing.T, db *gatedPool, _ *client.Combiner, opts ...client.CallOption) []<-chan answer {
			return []<-chan answer{askAll(t.Context(), client.New(db), []string{"k1"}, opts...)}
		},
		"acquire, alone in a Combiner": func(t *testing.T, _ *gatedPool, limiter *client.Combiner, opts ...client.CallOption) []<-chan answer {
			return []<-chan answer{ask(t.Context(), limiter, "k1", opts...)}
		},
		"acquire, in a shared call": func(t *testing.T, db *gatedPool, limiter *client.Combiner, opts ...client.CallOption) []<-chan answer {
			_ = ask(t.Context(), limiter, "k1")
			answers := []<-chan answer{ask(t.Context(), limiter, "k2", opts...), ask(t.Context(), limiter, "k3", opts...)}
			db.only(t).grant()
			return answers
		},
	}
	for name, test := range map[string]struct {
		opts     []client.CallOption
		failures []error // of the tries; a request that succeeds is granted after them
		err      error
	}{
		"a grant":                           {nil, nil, nil},
		"a conflict":                        {nil, []error{conflict}, nil},
		"a conflict, with idempotency key":  {once, []error{conflict}, nil},
		"both":                              {nil, []error{deadlock, conflict}, nil},
		"three are enough":                  {nil, []error{conflict, conflict, deadlock}, deadlock},
		"a function that was replaced":      {nil, []error{replaced}, nil},
		"a shard that has moved":            {nil, []error{moved}, nil},
		"another error":                     {nil, []error{refused}, refused},
		"an internal error":                 {nil, []error{internal}, internal},
		"that again, with idempotency key":  {once, []error{refused}, refused},
		"another error, later":              {nil, []error{conflict, refused}, refused},
		"a conflict, then an unknown end":   {nil, []error{conflict, broken}, broken},
		"an unknown outcome":                {nil, []error{broken}, broken},
		"the end of the session":            {nil, []error{fatal}, fatal},
		"an unknown outcome, settled":       {once, []error{broken}, nil},
		"the end of the session, settled":   {once, []error{fatal}, nil},
		"the end of the server, settled":    {once, []error{panicked}, nil},
		"a closed pool":                     {once, []error{closed}, closed},
		"an unknown outcome, and two again": {once, []error{broken, fatal, broken}, broken},
	} {
		for way, send := range sends {
			t.Run(name+"/"+way, func(t *testing.T) {
				atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
					answers := send(t, db, limiter, test.opts...)
					first := db.only(t)
					require.Len(t, first.keys, len(answers))
					for _, failure := range test.failures {
						call := db.only(t)
						require.Equal(t, []any{first.sql, first.keys, first.once}, []any{call.sql, call.keys, call.once})
						call.answer <- failure
						time.Sleep(100 * time.Millisecond) // the longest pause before another try
					}
					if test.err == nil {
						db.only(t).grant()
					}
					require.Empty(t, db.underWay())
					verb, _, _ := strings.Cut(way, ",")
					for _, got := range answers {
						got := <-got
						require.ErrorIs(t, got.err, test.err)
						if test.err != nil {
							require.EqualError(t, got.err, "pgratelimit: "+verb+": "+test.err.Error())
							require.Zero(t, got.JointDecision)
						}
					}
				})
			})
		}
	}
}

// After the loss of a connection nobody knows: a request that can be sent twice is, but only where there are other connections, and a
// caller that waits.
func TestRetry_AnUnknownOutcomeIsOfNoUse(t *testing.T) {
	t.Parallel()
	lost := errors.New("connection reset")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	db, pool := &fakeDB{answers: []any{lost}}, &fakePool{fakeDB{answers: []any{lost}}}
	for n, err := range []error{
		errOf(client.New(db).Acquire(t.Context(), "p", "k", once...)), // it may be a connection
		errOf(client.New(pool).Acquire(ended, "p", "k", once...)),
		errOf(client.New(pool).Refund(t.Context(), "p", "k", 1)),
	} {
		require.EqualError(t, err, []string{"pgratelimit: acquire: ", "pgratelimit: acquire: ", "pgratelimit: refund: "}[n]+lost.Error())
	}
	require.Len(t, db.sent(), 1)
	require.Len(t, pool.sent(), 2)
}

func TestRetry_EndsWithItsContext(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		db := &fakePool{fakeDB{answers: []any{pgError("40001")}}}
		cancel()
		start := time.Now()
		_, err := client.New(db).Acquire(ctx, "p", "k")
		require.Len(t, db.sent(), 1)
		require.Zero(t, time.Since(start))
		require.ErrorIs(t, err, context.Canceled)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr, "the reason for a retry is not lost")
	})
}
