package torture

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"runtime/pprof"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Handlers with each way to go without a database answer users, while the database is stopped, started, frozen and thawed. With a
// database all of them limit. Without, each comes to answer as it says, and limits again when there is one. In the end no goroutine is
// left.
func TestTorture_HTTPLimitsWhileThereIsADatabase(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 1)
	db, server := kit.NewPrivateDB(t)
	db.DefinePolicy("api", 4, 1, kit.ADay) // a user asks six times
	db.Pool.Close()                        // it is not to be disturbed
	const timeout = 500 * time.Millisecond
	share := client.Policy{Name: "api", Capacity: 2, Refill: 1, Every: kit.ADay} // of each server, meanwhile
	failures := map[string]func() httplimit.Failure{
		"closed": func() httplimit.Failure { return httplimit.Closed(timeout) },
		"open":   func() httplimit.Failure { return httplimit.Open(timeout) },
		"local":  func() httplimit.Failure { return httplimit.Local(timeout, httplimit.NewMemory(share)) },
	}
	limits := map[string][]int{"closed": {200, 429}, "open": {200, 429}, "local": {200, 429}}
	without := map[string][]int{"closed": {503}, "open": {200}, "local": {200, 429}}

	label := t.Name() // on every goroutine that starts in here
	rounds := 0
	pprof.Do(t.Context(), pprof.Labels("client", label), func(ctx context.Context) {
		var at kit.Address
		at.MoveTo(server.URL(kit.PrivateName))
		type limited struct {
			mode string
			http.Handler
		}
		var all []limited
		for mode, failure := range failures {
			for _, combined := range []bool{false, true} {
				config := at.Config(t)
				config.ConnConfig.ConnectTimeout = time.Second
				pool := kit.NoError(pgxpool.NewWithConfig(context.Background(), config))(t)
				defer pool.Close()
				var limiter client.Acquirer = client.New(pool)
				if combined {
					combiner := client.NewCombiner(pool)
					defer combiner.Close()
					limiter = combiner
				}
				user := httplimit.ByUser(func(r *http.Request) string { return r.Header.Get("User") }, httplimit.ByIP(0))
				limit := httplimit.New(limiter, httplimit.Per("api", user), failure(), httplimit.Observe(func(*http.Request, httplimit.Event) {}))
				all = append(all, limited{mode, limit(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))})
			}
		}
		var users atomic.Int64
		comeToAnswer := func(phase string, want map[string][]int) {
			kit.Crowd(t, len(all), func(n int) error {
				for began := time.Now(); ; {
					user, statuses := fmt.Sprint(users.Add(1)), map[int]bool{}
					for range 6 {
						answer := httptest.NewRecorder()
						request := httptest.NewRequest(http.MethodGet, "/", nil)
						request.Header.Set("User", user)
						all[n].ServeHTTP(answer, request)
						statuses[answer.Code] = true
					}
					got := slices.Sorted(maps.Keys(statuses))
					if slices.Equal(got, want[all[n].mode]) {
						return nil
					}
					if time.Since(began) > kit.Patience {
						return fmt.Errorf("%s, %s: %v", phase, all[n].mode, got)
					}
				}
			})
		}
		comeToAnswer("before", limits)
		for ; run.GoesOn(); rounds++ {
			require.NoError(t, server.Stop(ctx, true))
			comeToAnswer("stopped", without)
			require.NoError(t, server.Start(ctx))
			at.MoveTo(server.URL(kit.PrivateName))
			comeToAnswer("started", limits)
			pgtest.OrSkip(t, server.Freeze(ctx))
			comeToAnswer("frozen", without)
			require.NoError(t, server.Thaw(ctx))
			comeToAnswer("thawed", limits)
			run.Progress("%d rounds", rounds+1)
		}
	})
	awaitNoGoroutines(t, label)
	run.Figure("rounds", rounds, "")
}
