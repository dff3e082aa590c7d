package client_test

import (
	"maps"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/pgratelimit/pgratelimit/tests/vectors"
)

var kinds = map[string]error{
	"UnknownPolicy": client.ErrUnknownPolicy, "IdempotencyMismatch": client.ErrIdempotencyMismatch, "NoGrant": client.ErrNoGrant,
	"Settled": client.ErrSettled, "InvalidArgument": client.ErrInvalidArgument, "Locked": client.ErrLocked,
}

// Each client runs this table.
func TestErrors_AsInEveryLanguage(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	limiter := client.New(db.Pool)
	ctx := t.Context()
	kit.NoError(limiter.Acquire(ctx, "api", "user:42", client.Cost(2), client.IdempotencyKey("once")))(t)
	kit.NoError(limiter.Acquire(ctx, "api", "user:42", client.Cost(2), client.IdempotencyKey("over")))(t)
	kit.NoError(limiter.Settle(ctx, "api", "user:42", "over", 1))(t)
	for _, test := range vectors.Errors {
		var opts []client.CallOption
		cost := int64(1)
		if test.Cost != nil {
			cost = *test.Cost
			opts = append(opts, client.Cost(cost))
		}
		key := ""
		if test.IdempotencyKey != nil {
			key = *test.IdempotencyKey
			opts = append(opts, client.IdempotencyKey(key))
		}
		var err error
		switch test.Call {
		case "acquire":
			_, err = limiter.Acquire(ctx, test.Policy, test.Key, opts...)
		case "settle":
			_, err = limiter.Settle(ctx, test.Policy, test.Key, key, cost)
		case "charge":
			_, err = limiter.Charge(ctx, test.Policy, test.Key, cost)
		case "refund":
			_, err = limiter.Refund(ctx, test.Policy, test.Key, cost)
		}
		require.ErrorIs(t, err, kinds[test.Error], test.Name)
		kit.RequireState(t, test.SQLState, err)
	}
}

func TestErrors_ALockTimeoutIsErrLocked(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	ctx := t.Context()

	holder := begin(t, db.Pool)
	// The row has to be there first: only then does the holder lock it.
	kit.NoError(client.New(db.Pool).Acquire(ctx, "api", "k"))(t)
	kit.NoError(client.New(holder).Acquire(ctx, "api", "k"))(t)

	hasty := client.New(connect(t, db, map[string]string{"lock_timeout": "1ms"}))
	_, acquire := hasty.Acquire(ctx, "api", "k")
	_, refund := hasty.Refund(ctx, "api", "k", 1)
	for verb, err := range map[string]error{"acquire": acquire, "refund": refund, "reset": hasty.Reset(ctx, "api", "k")} {
		require.ErrorIs(t, err, client.ErrLocked)
		require.ErrorContains(t, err, "pgratelimit: "+verb+": ")
		kit.RequireState(t, "55P03", err)
	}

	require.NoError(t, holder.Rollback(ctx))
	require.EqualValues(t, 8, kit.NoError(hasty.Acquire(ctx, "api", "k"))(t).Remaining, "only the two grants that stayed")
}

func TestErrors_SayThatThePackageIsMissing(t *testing.T) {
	t.Parallel()
	require.ErrorContains(t, kit.ErrorOf(client.New(pgtest.Empty(t).Pool).Acquire(t.Context(), "api", "k")), "Install pgratelimit")
}

// connect opens a pool whose sessions have these settings.
func connect(t testing.TB, db *pgtest.DB, settings map[string]string, change ...func(*pgx.ConnConfig)) *pgxpool.Pool {
	return kit.Pool(t, db.URL, func(config *pgxpool.Config) {
		maps.Copy(config.ConnConfig.RuntimeParams, settings)
		for _, change := range change {
			change(config.ConnConfig)
		}
	})
}
