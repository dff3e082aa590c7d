package client_test

import (
	"context"
	"math/big"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Whatever is passed to the client, in whatever way pgx sends it: the error is the one that is documented
// for it, and no other caller of a Combiner notices. make test runs the seeds;
// go test ./tests/client -fuzz FuzzClient looks for more.
func FuzzClient(f *testing.F) {
	db := pgtest.New(f)
	limiters := map[pgx.QueryExecMode]*client.Limiter{}
	for mode := pgx.QueryExecModeCacheStatement; mode <= pgx.QueryExecModeSimpleProtocol; mode++ {
		limiters[mode] = client.New(connect(f, db, nil, func(config *pgx.ConnConfig) { config.DefaultQueryExecMode = mode }))
	}
	combiner := client.NewCombiner(db.Pool, client.CallsInFlight(1))
	const bystanders = "bystanders"
	require.NoError(f, combiner.DefinePolicy(context.Background(), client.Policy{Name: bystanders, Capacity: maxTokens, Refill: maxTokens, Every: time.Second}))

	const second = int64(time.Second)
	f.Add("api", "user:42", "", int64(1), int64(10), int64(1), second, int64(0), int8(0), int8(0), uint8(0))
	f.Add("api", "user:42", "once", int64(10), int64(10), int64(1), second, second, int8(1), int8(2), uint8(1))
	f.Add("", "k", "", int64(1), int64(10), int64(1), second, int64(0), int8(0), int8(0), uint8(2))
	f.Add("p", "", "i", int64(-1), int64(0), int64(1), second, int64(0), int8(3), int8(0), uint8(3))
	f.Add("p\x00", "k\xff", "\x00", int64(1), int64(10), int64(1), second, int64(0), int8(0), int8(0), uint8(4))
	f.Add(`\'; --`, "$1::text", "null", int64(1)<<62, int64(maxTokens), int64(maxTokens), int64(1000), int64(1), int8(2), int8(1), uint8(4))
	f.Add("p", strings.Repeat("é", 257), "i", int64(0), int64(maxTokens+1), int64(-1), int64(1500), int64(-1), int8(-1), int8(0), uint8(3))
	f.Add("p", strings.Repeat("é", 256), strings.Repeat("🚦", 129), int64(0), int64(maxTokens), int64(1), int64(1)<<62, int64(1)<<62, int8(0), int8(-1), uint8(0))

	f.Fuzz(func(t *testing.T, name, key, idempotencyKey string, cost, capacity, refill, every, remember int64, stepped, durable int8, mode uint8) {
		ctx := t.Context()
		policy := client.Policy{
			Name: name, Capacity: capacity, Refill: refill, Every: time.Duration(every),
			Stepped: client.Choice(stepped), Durable: client.Choice(durable), Remember: time.Duration(remember),
		}
		if name == bystanders {
			t.Skip("that policy is taken")
		}
		limiter := limiters[pgx.QueryExecMode(1+mode%uint8(len(limiters)))]

		isDefined := isPolicy(policy)
		requireKind(t, limiter.DefinePolicy(ctx, policy), isDefined, nil)
		options := []client.CallOption{client.Cost(cost)}
		isRequest := isName(name) && isName(key) && cost >= 0
		check := func(d client.Decision, err error, isValid bool) {
			t.Helper()
			if isValid && !isDefined {
				require.ErrorIs(t, err, client.ErrUnknownPolicy)
				return
			}
			requireKind(t, err, isValid, d)
			if err == nil {
				require.Equal(t, capacity, d.Capacity)
				require.True(t, 0 <= d.Remaining && d.Remaining <= capacity, "%+v", d)
				require.True(t, d.ResetAfter >= 0 && d.RetryAfter >= 0 && d.Allowed == (d.RetryAfter == 0), "%+v", d)
				if refill != client.Zero {
					require.Equal(t, cost > capacity, d.Never(), "%+v", d)
				}
			}
		}
		d, err := limiter.Peek(ctx, name, key, client.Cost(cost))
		if isName(name) && !isDefined { // looked for before the key
			require.Error(t, err)
		} else {
			check(d, err, isRequest)
		}
		if idempotencyKey != "" || cost%2 == 0 {
			options = append(options, client.IdempotencyKey(idempotencyKey))
			isRequest = isRequest && isName(idempotencyKey)
		}

		var others sync.WaitGroup
		for range 4 {
			others.Go(func() {
				d, err := combiner.Acquire(ctx, bystanders, key+".", client.IdempotencyKey("."))
				if isName(key + ".") {
					require.NoError(t, err)
					require.True(t, d.Allowed)
				}
			})
		}
		d, err = combiner.Acquire(ctx, name, key, options...)
		check(d, err, isRequest)
		others.Wait()
		again, err := limiter.Acquire(ctx, name, key, options...)
		check(again, err, isRequest)
		if err == nil && isName(idempotencyKey) && cost > 0 && remember == 0 && len(options) > 1 {
			require.Equal(t, d.Allowed, again.Replayed)
		}
		if isDefined {
			require.NoError(t, limiter.DropPolicy(ctx, name))
		}
	})
}

const maxTokens = 9_000_000_000_000

// requireKind expects no error, or ErrInvalidArgument and no answer.
func requireKind(t *testing.T, err error, isValid bool, answer any) {
	t.Helper()
	if isValid {
		require.NoError(t, err)
		return
	}
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	if answer != nil {
		require.Zero(t, answer)
	}
	require.NotErrorIs(t, err, client.ErrUnknownPolicy)
}

func isName(s string) bool {
	return 1 <= len(s) && len(s) <= 512 && utf8.ValidString(s) && !strings.Contains(s, "\x00")
}

func isPolicy(p client.Policy) bool {
	isChoice := func(c client.Choice) bool { return client.Keep <= c && c <= client.No }
	longest := new(big.Int).Mul(big.NewInt(p.Refill), big.NewInt(3_652_500*24*3600*1_000_000))
	return isName(p.Name) && isChoice(p.Stepped) && isChoice(p.Durable) &&
		1 <= p.Capacity && p.Capacity <= maxTokens && (1 <= p.Refill && p.Refill <= maxTokens || p.Refill == client.Zero) &&
		p.Every > 0 && p.Every%time.Microsecond == 0 && p.Remember >= 0 && p.Remember%time.Microsecond == 0 &&
		(p.Refill == client.Zero || new(big.Int).Mul(big.NewInt(p.Capacity), big.NewInt(p.Every.Microseconds())).Cmp(longest) <= 0)
}
