package client_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

func TestChoice_String(t *testing.T) {
	t.Parallel()
	require.Equal(t, "keep yes no Choice(3)", fmt.Sprint(client.Keep, client.Yes, client.No, client.Choice(3)))
}

func TestDefinePolicy_SendsNullForWhatIsLeftOpen(t *testing.T) {
	t.Parallel()
	db := &fakeDB{answers: []any{row{1}}}
	limiter := client.New(db)
	require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: "p"}))
	require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{
		Name: "p", Capacity: -2, Refill: client.Zero, Every: time.Second,
		Stepped: client.Yes, Durable: client.No, Remember: -time.Second, Shadow: client.Yes,
	}))
	require.Equal(t, []any{"p", nil, nil, nil, nil, nil, nil, nil}, db.sent()[0].args)
	require.Equal(t, []any{"p", int64(-2), int64(0), "1000000 microseconds", "yes", "no", "-1000000 microseconds", "yes"}, db.sent()[1].args)
}
