package kit

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/vectors"
	"github.com/stretchr/testify/require"
)

// ReplayVector makes the calls and compares the decisions. A call that takes and gives nothing must leave the bucket's row as it is, or absent.
func ReplayVector(t *testing.T, db Subject, v vectors.Bucket, durability PolicyOption) {
	t.Helper()
	rowOf := func(string, string) *Bucket { return nil } // the fake shows none
	if db, ok := db.(*TestDB); ok {
		rowOf = db.Bucket
	}
	refill := Continuous
	if v.Stepped {
		refill = Stepped
	}
	policy, key := v.Name, "k"
	db.DefinePolicy(policy, v.Capacity, v.Refill, time.Duration(v.Every)*Ms, refill, durability)
	if v.Taken > 0 {
		require.Equal(t, v.Capacity-v.Taken, db.AcquireAt(T0, policy, key, v.Taken).Remaining)
	}
	for i, s := range v.Steps {
		at, before := T0.Add(time.Duration(s.At)*Ms), rowOf(policy, key)
		var got Decision
		switch s.Call {
		case "acquire":
			got = db.AcquireAt(at, policy, key, s.Tokens)
		case "peek":
			got = db.PeekAt(at, policy, key, s.Tokens)
		case "refund":
			got = db.RefundAt(at, policy, key, s.Tokens)
		case "charge":
			db.SetClock(at)
			charged, err := db.Spend(Spending{Function: "charge", BucketID: model.BucketID{Policy: policy, Key: key}, Cost: s.Tokens})
			require.NoError(t, err)
			got = charged.Decision
		case "reset":
			db.Reset(policy, key)
			got = db.PeekAt(at, policy, key, 0)
		}
		call := fmt.Sprintf("step %d at %d ms: %s(%d) answered %+v", i, s.At, s.Call, s.Tokens, got)
		checkStep(t, s, got, call)
		require.Equal(t, v.Capacity, got.Capacity, call)
		if s.Call == "peek" || s.Call == "acquire" && (!got.Allowed || s.Tokens == 0) {
			require.Equal(t, before, rowOf(policy, key), call)
		}
	}
}

func checkStep(t testing.TB, want vectors.Step, got Decision, call string) {
	t.Helper()
	require.Equal(t, want.Allowed, got.Allowed, call)
	require.Equal(t, got.Allowed, got.RetryAfter == 0, call)
	require.False(t, got.Replayed, call)
	if want.Remaining != nil {
		require.Equal(t, *want.Remaining, got.Remaining, call)
	}
	switch text := string(want.RetryAfter); text {
	case "":
	case "null":
		require.Equal(t, model.Never, got.RetryAfter, call)
	default:
		wait, err := strconv.ParseInt(text, 10, 64)
		require.NoError(t, err)
		require.Equal(t, Micros(time.Duration(wait)*Ms), got.RetryAfter, call)
	}
	if want.ResetAfter != nil {
		require.Equal(t, Micros(time.Duration(*want.ResetAfter)*Ms), got.ResetAfter, call)
	}
}
