package client

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// An uncalledPool is one for a Leaser that makes no calls.
type uncalledPool struct{ Pool }

func (uncalledPool) QueryRow(context.Context, string, ...any) pgx.Row { panic("a call") }

// However many buckets are hot, no more than 10,000 of a policy have a lease. Another policy has its own.
func TestLeaser_HasTenThousandLeasesOfAPolicyAtMost(t *testing.T) {
	t.Parallel()
	l := NewLeaser(uncalledPool{}, Lease{Policy: "p"}, Lease{Policy: "q"})
	l.Close() // so that nothing is taken for the leases, nor looked at
	p := l.policies["p"]
	d := Decision{Allowed: true, Remaining: 9_000, Capacity: 10_000, ResetAfter: time.Second}
	for key := range uint64(10_100) {
		for range hotRequests {
			l.learn(p, nil, key, request{policy: "p", key: fmt.Sprint(key), cost: 1}, d)
		}
	}
	held := 0
	p.each(func(*lease) { held++ })
	require.Equal(t, 10_000, held)
	require.EqualValues(t, 10_000, p.held.Load())
	for range hotRequests {
		l.learn(l.policies["q"], nil, 0, request{policy: "q", key: "k", cost: 1}, d)
	}
	require.EqualValues(t, 1, l.policies["q"].held.Load())
}
