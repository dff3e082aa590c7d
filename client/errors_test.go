package client_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
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
