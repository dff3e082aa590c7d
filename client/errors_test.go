package client_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
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
	limiter := client.New(&fakeDB{answers: []any{cause}})
	_, err := limiter.Peek(t.Context(), "p", "k")
	require.EqualError(t, err, "pgratelimit: peek: ERROR: unknown policy (SQLSTATE RL001). It is not there. Define it.")

	broken := errors.New("connection lost")
	_, err = client.New(&fakeDB{answers: []any{broken}}).Acquire(t.Context(), "p", "k")
	require.EqualError(t, err, "pgratelimit: acquire: connection lost")
	require.ErrorIs(t, err, broken)
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
	require.ErrorContains(t, err, `"ratelimit_app".ratelimit_define_policy(text, bigint, bigint, interval, boolean, boolean, interval, boolean) to <role>;`)
	_, err = fail("permission denied for function ratelimit_acquire_all").AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}})
	require.ErrorContains(t, err, `"ratelimit_app".ratelimit_acquire_all(text[], text[], bigint[], text) to <role>;`)
	err = fail("permission denied for function ratelimit_override").Override(ctx, client.Override{})
	require.ErrorContains(t, err, `"ratelimit_app".ratelimit_override(text, text, bigint, bigint, interval, timestamptz) to <role>;`)
	for _, other := range []string{"permission denied for schema ratelimit_app", "permission denied for table policies"} {
		_, err = fail(other).Acquire(ctx, "p", "k")
		require.EqualError(t, err, "pgratelimit: acquire: ERROR: "+other+" (SQLSTATE 42501)", "no other grant would help")
	}
}

func TestErrors_OfTheClientNeverReachTheDatabase(t *testing.T) {
	t.Parallel()
	db := &fakeDB{answers: []any{granted(1)}}
	limiter := client.New(db)
	for name, call := range map[string]func(context.Context) error{
		"zero byte in the policy": func(ctx context.Context) error {
			_, err := limiter.Acquire(ctx, "a\x00b", "k")
			return err
		},
		"zero byte in the key": func(ctx context.Context) error {
			return limiter.Reset(ctx, "p", "\x00")
		},
		"zero byte in the idempotency key": func(ctx context.Context) error {
			_, err := limiter.Acquire(ctx, "p", "k", client.IdempotencyKey("x\x00"))
			return err
		},
		"every with a fraction": func(ctx context.Context) error {
			return limiter.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 1, Refill: 1, Every: 1500})
		},
		"remember with a fraction": func(ctx context.Context) error {
			return limiter.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 1, Refill: 1, Every: 1000, Remember: 1})
		},
		"zero byte in the policy of a charge": func(ctx context.Context) error {
			_, err := limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}, {Policy: "\x00", Key: "k"}})
			return err
		},
		"zero byte in the key of a charge": func(ctx context.Context) error {
			_, err := limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k\x00"}})
			return err
		},
		"zero byte in the idempotency key of charges": func(ctx context.Context) error {
			_, err := limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}}, client.IdempotencyKey("\x00"))
			return err
		},
		"override every with a fraction": func(ctx context.Context) error {
			return limiter.Override(ctx, client.Override{Policy: "p", Key: "k", Every: 1500})
		},
	} {
		require.ErrorIs(t, call(t.Context()), client.ErrInvalidArgument, name)
	}
	require.Empty(t, db.sent())
}

// An error about text that cannot be sent says which argument it is.
func TestErrors_NameTheArgumentOfAZeroByte(t *testing.T) {
	t.Parallel()
	ctx, limiter := t.Context(), client.New(&fakeDB{})
	for name, call := range map[string]func(policy, key, idempotencyKey string) error{
		"acquire": func(policy, key, idempotencyKey string) error {
			_, err := limiter.Acquire(ctx, policy, key, client.IdempotencyKey(idempotencyKey))
			return err
		},
		"acquire all": func(policy, key, idempotencyKey string) error {
			_, err := limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}, {Policy: policy, Key: key}}, client.IdempotencyKey(idempotencyKey))
			return err
		},
		"settle": func(policy, key, idempotencyKey string) error {
			_, err := limiter.Settle(ctx, policy, key, idempotencyKey, 1)
			return err
		},
		"reserve": func(policy, key, idempotencyKey string) error {
			_, err := limiter.Reserve(ctx, policy, key, time.Second, client.IdempotencyKey(idempotencyKey))
			return err
		},
	} {
		require.ErrorContains(t, call("\x00", "k", "i"), ": policy has a zero byte", name)
		require.ErrorContains(t, call("p", "\x00", "i"), ": key has a zero byte", name)
		require.ErrorContains(t, call("p", "k", "\x00"), ": idempotency_key has a zero byte", name)
	}
}

func TestErrors_OfTheServer(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	limiter := client.New(db.Pool)
	ctx := t.Context()
	_, err := limiter.Acquire(ctx, "api", "user:42", client.Cost(2), client.IdempotencyKey("once"))
	require.NoError(t, err)

	acquire := func(policy, key string, opts ...client.AcquireOption) error {
		d, err := limiter.Acquire(ctx, policy, key, opts...)
		require.Zero(t, d, "an error comes with a denial")
		return err
	}
	long := strings.Repeat("x", 513)
	for name, test := range map[string]struct {
		err  error
		kind error
		code string
	}{
		"unknown policy":              {acquire("none", "k"), client.ErrUnknownPolicy, "RL001"},
		"another cost":                {acquire("api", "user:42", client.IdempotencyKey("once")), client.ErrIdempotencyMismatch, "RL002"},
		"negative cost":               {acquire("api", "k", client.Cost(-1)), client.ErrInvalidArgument, "22023"},
		"empty policy":                {acquire("", "k"), client.ErrInvalidArgument, "22023"},
		"empty key":                   {acquire("api", ""), client.ErrInvalidArgument, "22023"},
		"long key":                    {acquire("api", long), client.ErrInvalidArgument, "22023"},
		"empty idempotency key":       {acquire("api", "k", client.IdempotencyKey("")), client.ErrInvalidArgument, "22023"},
		"long idempotency key":        {acquire("api", "k", client.IdempotencyKey(long)), client.ErrInvalidArgument, "22023"},
		"no such text":                {acquire("api", "\xff"), client.ErrInvalidArgument, "22021"},
		"dropping what is not there":  {limiter.DropPolicy(ctx, "none"), client.ErrUnknownPolicy, "RL001"},
		"resetting what is not there": {limiter.Reset(ctx, "none", "k"), client.ErrUnknownPolicy, "RL001"},
		"a policy without numbers":    {limiter.DefinePolicy(ctx, client.Policy{Name: "new"}), client.ErrInvalidArgument, "22023"},
		"changing durable": {
			limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 1, Refill: 1, Every: 1000, Durable: client.No}),
			client.ErrInvalidArgument, "22023",
		},
	} {
		require.ErrorIs(t, test.err, test.kind, name)
		requireCode(t, test.code, test.err)
		if test.code == "22021" {
			require.ErrorContains(t, test.err, "pass text in UTF-8, or a hash")
		}
	}
}

func TestErrors_LockTimeout(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	ctx := t.Context()

	holder, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer holder.Rollback(context.Background())
	// The row has to be there first: only then does the holder lock it.
	_, err = client.New(db.Pool).Acquire(ctx, "api", "k")
	require.NoError(t, err)
	_, err = client.New(holder).Acquire(ctx, "api", "k")
	require.NoError(t, err)

	hasty := client.New(connect(t, db, map[string]string{"lock_timeout": "1ms"}))
	_, acquire := hasty.Acquire(ctx, "api", "k")
	_, refund := hasty.Refund(ctx, "api", "k", 1)
	for verb, err := range map[string]error{"acquire": acquire, "refund": refund, "reset": hasty.Reset(ctx, "api", "k")} {
		require.ErrorIs(t, err, client.ErrLocked)
		require.ErrorContains(t, err, "pgratelimit: "+verb+": ")
		requireCode(t, "55P03", err)
	}

	require.NoError(t, holder.Rollback(ctx))
	d, err := hasty.Acquire(ctx, "api", "k")
	require.NoError(t, err)
	require.EqualValues(t, 8, d.Remaining, "only the two grants that stayed")
}

func TestErrors_EndOfContext(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := client.New(db.Pool).Acquire(ctx, "api", "k")
	require.ErrorIs(t, err, context.Canceled)
}

func TestErrors_NotInstalled(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	_, err := client.New(db.Pool).Acquire(t.Context(), "api", "k")
	require.ErrorContains(t, err, "Install pgratelimit")
}

// connect opens a pool whose sessions have these settings.
func connect(t *testing.T, db *pgtest.DB, settings map[string]string, change ...func(*pgx.ConnConfig)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(db.URL)
	require.NoError(t, err)
	for name, value := range settings {
		config.ConnConfig.RuntimeParams[name] = value
	}
	for _, change := range change {
		change(config.ConnConfig)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}
