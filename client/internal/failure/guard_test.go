package failure_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/internal/failure"
	"github.com/pgratelimit/pgratelimit/client/internal/failure/failuretest"
)

// Policies that clients make up fill neither the memory nor the log, and a request counts once for a policy that it names twice.
func TestGuard_IsBounded(t *testing.T) {
	log := failuretest.Log(t)
	synctest.Test(t, func(t *testing.T) {
		guard, away := failure.NewGuard(), errors.New("no connection")
		report := func(policy string) {
			guard.Report(t.Context(), []client.Charge{{Policy: policy, Key: "a"}, {Policy: policy, Key: "b"}}, away, true)
		}
		for n := range 2000 {
			report(fmt.Sprint("p", n))
		}
		require.Equal(t, 1000, strings.Count(log.String(), "\n"))
		require.Len(t, guard.Passed(), 1001)
		require.EqualValues(t, 1, guard.Passed()["p0"])
		require.EqualValues(t, 1000, guard.Passed()["_other"])
		time.Sleep(time.Minute)
		report("p0")
		report("new")
		require.Equal(t, 1002, strings.Count(log.String(), "\n"), "there is room again")
	})
}
