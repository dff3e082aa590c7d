package kit_test

import (
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func ExampleNewDB() {
	var t *testing.T // is the argument of a test
	db := kit.NewDB(t)
	db.DefinePolicy("p", 3, 10, time.Second) // capacity, refill, every
	require.Equal(t, kit.Allowed(1, 200*time.Millisecond, 3), db.AcquireAt(kit.T0, "p", "k", 2))
}
