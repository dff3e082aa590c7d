package client_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestWait_IsNotForTransactions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	tx := begin(t, db.Pool)
	limiter := client.New(db.Pool)
	for name, in := range map[string]*client.Limiter{"Tx": client.New(tx), "WithTx": limiter.WithTx(tx), "Conn": client.New(tx.Conn())} {
		_, err := in.Wait(t.Context(), "line", "k")
		require.ErrorIs(t, err, client.ErrInvalidArgument, name)
		require.True(t, strings.HasSuffix(err.Error(), "outside a transaction"), err)
	}
}
