package clienttest

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

// An exact is a database whose bucket has as many tokens as a lease asks for, once.
type exact struct {
	*distant
	fake  *Fake
	asked atomic.Int64
}

func (p *exact) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if p.asked.Load() == 0 && functionName.FindString(sql) == "ratelimit_acquire_up_to" {
		p.asked.Store(args[2].(int64))
		_ = p.fake.SetLevel("p", "hot", float64(p.asked.Load()))
	}
	return p.distant.QueryRow(ctx, sql, args...)
}

// A lease that took all that the bucket had, as many as it asked for, gives back what is not spent.
func TestLeaser_GivesBackTheLastTokensOfABucket(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := lease(t, client.Lease{Policy: "p"})
		l.Close()
		require.NoError(t, l.fake.DefinePolicy(t.Context(), client.Policy{Name: "p", Refill: 1, Every: 24 * time.Hour}))
		pool := &exact{distant: l.pool, fake: l.fake}
		l.Leaser = client.NewLeaser(pool, client.Lease{Policy: "p"})
		defer l.Close()
		for pool.asked.Load() == 0 {
			l.ask("p", "hot", 1, time.Millisecond)
		}
		time.Sleep(5 * time.Millisecond) // until it is answered
		require.Zero(t, l.remaining("p", "hot"))
		_, leased := l.ask("p", "hot", 10, 0)
		require.Equal(t, 10, leased)
		time.Sleep(2 * time.Second)
		require.Equal(t, pool.asked.Load()-10, l.remaining("p", "hot"))
	})
}

// An option of another method is refused also where a lease would grant.
func TestLeaser_RefusesAWrongOptionOfALeasedRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := lease(t, client.Lease{Policy: "p"})
		defer l.Close()
		_, leased := l.ask("p", "hot", 100, time.Millisecond)
		require.Positive(t, leased)
		_, err := l.Acquire(t.Context(), "p", "hot", client.AtLeast(1))
		require.ErrorIs(t, err, client.ErrInvalidArgument)
	})
}
