package acquire

import (
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

func TestVectors(t *testing.T) {
	kit.OnEachDurability(t, func(t *testing.T, db kit.Subject, durability kit.PolicyOption) {
		for _, v := range kit.Vectors {
			t.Run(v.Origin, func(t *testing.T) { v.Replay(t, db.Of(t), durability) })
		}
	})
}

func TestVectors_29_LongRunningRate(t *testing.T) {
	kit.OnEachDurability(t, func(t *testing.T, db kit.Subject, durability kit.PolicyOption) {
		db.DefinePolicy("29 golang/time", 100, 100, kit.Second, durability)
		granted := 0
		for at := time.Duration(0); at < 5*kit.Second; at += 2 * kit.Ms {
			if db.AcquireAt(kit.T0.Add(at), "29 golang/time", "k", 1).Allowed {
				granted++
			}
		}
		require.InDelta(t, 600, granted, 1)
	})
}

// A bucket that every call drains grants tokens at its rate, whatever the time between the calls, unless it fills up between them.
func TestVectors_64_DeliveredRate(t *testing.T) {
	kit.OnEachDurability(t, func(t *testing.T, db kit.Subject, durability kit.PolicyOption) {
		const p = "64 envoy 16407, svix 115"
		db.DefinePolicy(p, 10, 2, kit.Second, durability)
		for _, spacing := range []time.Duration{333 * kit.Ms, 700 * kit.Ms, 777_777 * time.Microsecond, 1100 * kit.Ms, 4400 * kit.Ms} {
			key := spacing.String()
			db.AcquireAt(kit.T0, p, key, 10)
			delivered, last := 0, time.Duration(0)
			for at := spacing; at <= 300*kit.Second; at += spacing {
				for db.AcquireAt(kit.T0.Add(at), p, key, 1).Allowed {
					delivered++
				}
				last = at
			}
			require.Equal(t, int(2*last.Seconds()), delivered, "whole tokens in %v, each %v", last, spacing)
		}
	})
}
