package client_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// A grant from a lease allocates nothing.
func TestLeaser_AllocatesNothing(t *testing.T) {
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10000000, 10000, '1 day')")
	leaser := client.NewLeaser(db.Pool, client.Lease{Policy: "api"})
	defer leaser.Close()
	leased := func() bool {
		d, err := leaser.Acquire(t.Context(), "api", "hot")
		require.NoError(t, err)
		return d.Estimated
	}
	for begin := time.Now(); !leased(); {
		require.Less(t, time.Since(begin), 10*time.Second)
	}
	ctx := t.Context()
	var failed error
	allocated := testing.AllocsPerRun(1000, func() {
		if _, err := leaser.Acquire(ctx, "api", "hot"); err != nil {
			failed = errors.Join(failed, err)
		}
	})
	require.NoError(t, failed)
	require.Less(t, allocated, 1.0, "but for refills")
}
