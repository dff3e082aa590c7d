package client_test

import (
	"errors"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// What makes a call work through any pooler and in any mode, whatever functions a database adds.
func TestStatements_HaveTypedParametersAndNamedColumns(t *testing.T) {
	t.Parallel()
	db := &fakeDB{answers: []any{errors.New("not asked for an answer")}}
	limiter, ctx := client.New(db), t.Context()
	_, _ = limiter.Acquire(ctx, "p", "k")
	_, _ = limiter.Acquire(ctx, "p", "k", client.Cost(2), client.IdempotencyKey("i"))
	_, _ = limiter.Peek(ctx, "p", "k")
	_, _ = limiter.Refund(ctx, "p", "k", 1)
	_ = limiter.Reset(ctx, "p", "k")
	_ = limiter.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 1, Refill: 1, Every: time.Second})
	_ = limiter.DefinePolicy(ctx, client.Policy{Stepped: client.Yes, Durable: client.No, Remember: time.Second})
	_ = limiter.DropPolicy(ctx, "p")
	_, _ = limiter.Policies(ctx)
	_, _ = limiter.Cleanup(ctx)
	_, _ = limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}}, client.IdempotencyKey("i"))
	_ = limiter.Override(ctx, client.Override{})
	_ = limiter.Override(ctx, client.Override{Policy: "p", Key: "k", Capacity: 1, Refill: client.Zero, Every: time.Second, ExpiresAt: time.Now()})
	_, _ = limiter.RemoveOverride(ctx, "p", "k")
	_, _ = limiter.Overrides(ctx)
	_, _ = limiter.Overrides(ctx, client.OfPolicy("p"), client.OfKey("k"), client.MaxRows(1))

	require.Len(t, db.sent(), 16)
	parameter := regexp.MustCompile(`\$\d+(::\w+(?:\[\])?)?`)
	for _, query := range db.sent() {
		require.NotRegexp(t, `;|select \*|\.\*`, query.sql)
		parameters := parameter.FindAllStringSubmatch(query.sql, -1)
		require.Len(t, parameters, len(query.args), query.sql)
		for i, arg := range query.args {
			switch arg.(type) {
			case int64:
				require.Equal(t, "::bigint", parameters[i][1], query.sql)
			case string:
				require.Equal(t, "::text", parameters[i][1], query.sql)
			case []int64:
				require.Equal(t, "::bigint[]", parameters[i][1], query.sql)
			case []string:
				require.Equal(t, "::text[]", parameters[i][1], query.sql)
			case nil:
				require.NotEmpty(t, parameters[i][1], query.sql)
			default:
				t.Errorf("%s is passed a %T", query.sql, arg)
			}
		}
	}
}
