package client

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Whatever is answered, late, or not at all, and however the time passes between, the client never believes that it holds slots for
// longer than the server does.
func TestTenure_KeepsItsInvariants(t *testing.T) {
	t.Parallel()
	saw := map[string]int{}
	random(t, 500, func(t *testing.T, r *rand.Rand) {
		lease := pick(r, time.Millisecond, 3*time.Second, 10*time.Minute)
		now, isOver := time.Duration(0), false
		onServer := lease + time.Duration(r.Int64N(int64(lease))) // when the lease ends there: the call took a while
		tenure := newTenure(lease)
		isRenewing, sent, renewals := false, time.Duration(0), 0
		for range 100 {
			now += time.Duration(r.Int64N(int64(lease) / pick[int64](r, 3, 30, 300)))
			switch {
			case isRenewing && r.IntN(3) == 0:
				isRenewing = false
				switch executed := sent + time.Duration(r.Int64N(int64(now-sent)+1)); {
				case executed >= onServer || r.IntN(50) == 0: // the latter was reset
					tenure.end()
					isOver, onServer = true, 0
					saw["null"]++
				case r.IntN(2) == 0:
					onServer = max(onServer, pick(r, 0, executed+lease)) // the answer was lost, or the call
					tenure.failed(now)
					require.Greater(t, tenure.due, now-1)
					require.LessOrEqual(t, tenure.due, now+time.Second)
					saw["failed"]++
				default:
					onServer = executed + lease
					tenure.renewed(sent, lease)
					saw["renewed"]++
				}
			case r.IntN(2) == 0:
				until, due := tenure.until, tenure.due
				begins := tenure.begin(now)
				require.Equal(t, !isOver && !isRenewing && now >= due && now < until, begins)
				if begins {
					isRenewing, sent = true, now
					renewals++
					patience := tenure.patience(now)
					require.Positive(t, patience)
					require.LessOrEqual(t, now+patience, until)
				}
				isOver = isOver || now >= until
			default:
				isOver = isOver || now >= tenure.until
				require.Equal(t, isOver, tenure.over(now))
			}
			require.Equal(t, isRenewing, tenure.isRenewing)
			if !tenure.over(now) {
				require.Less(t, now, onServer, "it holds")
				require.LessOrEqual(t, tenure.until, onServer)
			} else {
				isOver = true
				saw["over"]++
			}
		}
		saw["renewals"] += renewals
	})
	for _, what := range []string{"null", "failed", "renewed", "over", "renewals"} {
		require.Greater(t, saw[what], 50, "%s: %v", what, saw)
	}
}

// Many holders of a database that was away do not ask at one instant.
func TestTenure_PausesAfterAFailureAreRandom(t *testing.T) {
	t.Parallel()
	due := map[time.Duration]bool{}
	for range 100 {
		tenure := newTenure(time.Hour)
		tenure.failed(0)
		require.GreaterOrEqual(t, tenure.due, maxAskPause/2)
		require.LessOrEqual(t, tenure.due, maxAskPause)
		due[tenure.due] = true
	}
	require.Greater(t, len(due), 50)
}
