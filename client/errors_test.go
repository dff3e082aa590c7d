package client_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/stretchr/testify/require"
)

var kinds = []error{client.ErrUnknownPolicy, client.ErrIdempotencyMismatch, client.ErrInvalidArgument, client.ErrLocked, client.ErrSettled}

func TestErrors_BySQLSTATE(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]error{
		"RL001": client.ErrUnknownPolicy,
		"RL002": client.ErrIdempotencyMismatch,
		"22023": client.ErrInvalidArgument,
		"22007": client.ErrInvalidArgument,
		"22008": client.ErrInvalidArgument,
		"22P02": client.ErrInvalidArgument,
		"22021": client.ErrInvalidArgument,
		"22P05": client.ErrInvalidArgument,
		"55P03": client.ErrLocked,
		"25006": nil,
		"RL003": nil,
		"RL004": client.ErrSettled,
	} {
		cause := pgError(code)
		_, err := client.New(&fakePool{fakeDB{answers: []any{cause}}}).Acquire(t.Context(), "p", "k")
		for _, kind := range kinds {
			isWanted := kind == want //nolint:errorlint // which of them it is, not what wraps it
			require.Equal(t, isWanted, errors.Is(err, kind), "%s is %v", code, kind)
		}
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Same(t, cause, pgErr)
	}
}

func TestErrors_SayWhatFailedAndWhatHelps(t *testing.T) {
	t.Parallel()
	cause := &pgconn.PgError{Severity: "ERROR", Code: "RL001", Message: "unknown policy", Detail: "It is not there.", Hint: "Define it."}
	_, err := client.New(&fakeDB{answers: []any{cause}}).Peek(t.Context(), "p", "k")
	require.EqualError(t, err, "pgratelimit: peek: ERROR: unknown policy (SQLSTATE RL001). It is not there. Define it.")

	_, err = client.New(&fakeDB{answers: []any{pgError("22021")}}).Acquire(t.Context(), "p", "\xff")
	require.ErrorContains(t, err, "pass text in UTF-8, or a hash")

	broken := errors.New("connection lost")
	_, err = client.New(&fakeDB{answers: []any{broken}}).Acquire(t.Context(), "p", "k")
	require.EqualError(t, err, "pgratelimit: acquire: connection lost")
	require.ErrorIs(t, err, broken)
}

// What to do about a connection, or an installation, stands in the error. An address that is tried with TLS and without is reported once.
func TestErrors_SayWhatHelpsToConnectAndInstall(t *testing.T) {
	t.Parallel()
	for code, help := range map[string]string{
		"28P01": "Check the user and the password", "28000": "pg_hba.conf", "3D000": "Check the name of the database",
		"08P01": "ignore_startup_parameters", "3F000": "Install pgratelimit", "42P01": "Install pgratelimit", "42703": "another version",
	} {
		_, err := client.New(&fakeDB{answers: []any{pgError(code)}}).Acquire(t.Context(), "p", "k")
		require.ErrorContains(t, err, help, code)
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
	require.ErrorContains(t, err, `"ratelimit_app".ratelimit_define_policy(text, bigint, bigint, interval, boolean, boolean, interval, boolean, interval, text, timestamp, interval) to <role>;`)
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
	for argument, texts := range map[string][3]string{
		"policy": {"\x00", "k", "i"}, "key": {"p", "\x00", "i"}, "idempotency_key": {"p", "k", "x\x00"},
	} {
		policy, key, once := texts[0], texts[1], client.IdempotencyKey(texts[2])
		for name, err := range map[string]error{
			"acquire":     errOf(limiter.Acquire(ctx, policy, key, once)),
			"acquire all": errOf(limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}, {Policy: policy, Key: key}}, once)),
			"settle":      errOf(limiter.Settle(ctx, policy, key, texts[2], 1)),
			"reserve":     errOf(limiter.Reserve(ctx, policy, key, time.Second, once)),
		} {
			require.ErrorIs(t, err, client.ErrInvalidArgument)
			require.ErrorContains(t, err, ": "+argument+" has a zero byte", name)
		}
	}
	for argument, err := range map[string]error{
		"hold: holder":             errOf(limiter.HoldAs(ctx, "p", "k", "\x00")),
		"renew: holder":            errOf(limiter.Renew(ctx, "p", "k", "\x00")),
		"release: holder":          errOf(limiter.Release(ctx, "p", "k", "\x00")),
		"define policy: time_zone": limiter.DefinePolicy(ctx, client.Policy{Name: "p", TimeZone: "\x00"}),
		"override: time_zone":      limiter.Override(ctx, client.Override{Policy: "p", Key: "k", TimeZone: "\x00"}),
		"override: key":            limiter.Override(ctx, client.Override{Policy: "p", Key: "\x00"}),
	} {
		verb, argument, _ := strings.Cut(argument, ": ")
		require.EqualError(t, err, fmt.Sprintf("pgratelimit: %s: invalid argument: %s has a zero byte, which no text in PostgreSQL can hold; pass a hash of it", verb, argument))
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
		"nil":             nil,
		"another error":   errors.New("RL429"),
		"another code":    &pgconn.PgError{Code: "RL001", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": 1, "capacity": 5}`},
		"no detail":       &pgconn.PgError{Code: "RL429"},
		"another detail":  &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p"}`},
		"no policy":       &pgconn.PgError{Code: "RL429", Detail: `{"cost": 1, "remaining": 0, "retry_after": 1, "capacity": 5}`},
		"no cost":         &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "remaining": 0, "retry_after": 1, "capacity": 5}`},
		"no remaining":    &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "retry_after": 1, "capacity": 5}`},
		"no capacity":     &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": 1}`},
		"another number":  &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p", "cost": 1, "remaining": 0, "retry_after": "soon", "capacity": 5}`},
		"a broken detail": &pgconn.PgError{Code: "RL429", Detail: `{"policy": "p"`},
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
