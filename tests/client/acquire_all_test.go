package client_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Callers of a hot bucket and buckets of their own, in both orders and by both limiters: each token is granted
// once, nothing is taken for who is denied, and nobody deadlocks.
func TestAcquireAll_GrantsExactlyWhatIsThere(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('everybody', 1000, 1, '1 day'), ratelimit_define_policy('user', 100, 1, '1 day')")
	combiner := client.NewCombiner(db.Pool)
	defer combiner.Close()
	limiters := []client.Acquirer{combiner, combiner, combiner, client.New(db.Pool)}

	const callers, each, users = 200, 10, 20
	grants := make([][users]int64, callers)
	var wg sync.WaitGroup
	for caller := range callers {
		wg.Go(func() {
			for n := range each {
				user := (caller + n) % users
				charges := []client.Charge{{Policy: "everybody", Key: "all"}, {Policy: "user", Key: fmt.Sprint(user), Cost: client.Cost(2)}}
				if n%2 == 0 {
					charges[0], charges[1] = charges[1], charges[0]
				}
				var opts []client.CallOption
				if n%5 == 0 {
					opts = append(opts, client.IdempotencyKey(fmt.Sprint(caller, "/", n)))
				}
				d, err := limiters[caller%len(limiters)].AcquireAll(t.Context(), charges, opts...)
				if err != nil {
					t.Error(err)
					return
				}
				if d.Allowed {
					grants[caller][user]++
				}
			}
		})
	}
	wg.Wait()
	var all int64
	for user := range users {
		granted := int64(0)
		for caller := range callers {
			granted += grants[caller][user]
		}
		require.EqualValues(t, 50, granted, user)
		all += granted
		require.Zero(t, noError(combiner.Peek(t.Context(), "user", fmt.Sprint(user)))(t).Remaining)
	}
	require.EqualValues(t, 1000, all)
	require.Zero(t, noError(combiner.Peek(t.Context(), "everybody", "all"))(t).Remaining)
}

func TestAcquireAll_IsPartOfATransaction(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 day')")
	tx := begin(t, db.Pool)
	limiter := client.New(db.Pool)
	d := noError(limiter.WithTx(tx).AcquireAll(t.Context(), []client.Charge{{Policy: "api", Key: "a"}, {Policy: "api", Key: "b"}}))(t)
	require.True(t, d.Allowed)
	require.NoError(t, tx.Rollback(context.Background()))
	for _, key := range []string{"a", "b"} {
		require.EqualValues(t, 10, noError(limiter.Peek(t.Context(), "api", key))(t).Remaining)
	}
}
