package torture

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime/pprof"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

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

// The key functions of the middleware: what a client writes before what the trusted
// proxies add changes nothing, two users have two keys, no user has the key of an address, and each key is one that the database takes.
func TestTorture_HTTPKeysAreNotTheClientsChoice(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 5)
	random := rand.New(rand.NewPCG(kit.TestSeed(t), 0))

	users := map[string]string{} // by their keys
	last, inputs := "", 0
	for ; run.GoesOn(); run.Progress("%d requests", inputs) {
		for range 10_000 {
			inputs += 2
			checkAddressKey(t, random)

			name := randomText(random)
			switch random.IntN(50) {
			case 0:
				name = strings.Repeat("a", 500+random.IntN(20))
			case 1, 2, 3: // what some users would like to have
				name = strings.TrimPrefix(last, "user:")
			}
			last = httplimit.ByUser(func(*http.Request) string { return name }, httplimit.ByIP(0))(&http.Request{RemoteAddr: "192.0.2.9:4711"})
			other, taken := users[last]
			if !isKeyOf("", last) || strings.HasPrefix(last, "ip:") != (name == "") || taken && other != name {
				t.Fatalf("%q has the key %q, as has %q", name, last, other)
			}
			users[last] = name
		}
		if len(users) > 100_000 {
			clear(users)
		}
	}
	run.Figure("requests, each with one key", inputs, "")
}

func checkAddressKey(t *testing.T, random *rand.Rand) {
	proxies := random.IntN(5)
	key := httplimit.ByIP(proxies)
	request := func(lines ...string) *http.Request {
		return &http.Request{RemoteAddr: "192.0.2.9:4711", Header: http.Header{"X-Forwarded-For": lines}}
	}
	address := strings.Trim(strings.ReplaceAll(randomText(random), ",", ""), " \t")
	added := address + strings.Repeat(", 10.0.0.1", max(0, proxies-1))
	want := key(request(added))
	require.True(t, isKeyOf("ip:", want), "%q", want)
	if direct := httplimit.ByIP(0)(&http.Request{RemoteAddr: address}); proxies > 0 && direct != "ip:unknown" {
		require.Equal(t, direct, want, "%d proxies, %q", proxies, added)
	}
	for _, lying := range []*http.Request{request(randomText(random), randomText(random)+","+added), request(randomText(random), randomText(random), added)} {
		if got := key(lying); got != want {
			t.Fatalf("with %d proxies %q has the key %q, and without what the client wrote %q", proxies, lying.Header, got, want)
		}
	}
}

func isKeyOf(prefix, key string) bool {
	return strings.HasPrefix(key, prefix) && 1 <= len(key) && len(key) <= 512 && utf8.ValidString(key) && !strings.Contains(key, "\x00")
}

// randomText is pieces of what addresses, lists and keys are made of.
func randomText(random *rand.Rand) string {
	pieces := []string{
		"192.0.2.1", "203.0.113.7", "2001:db8::1", "::ffff:192.0.2.1", "fe80::1%eth0", ":", "[", "]", ",", ", ", " ", "\t", ".", "/64", "80",
		"unknown", "for=", "ip:", "user:", "user-sha256:", "sha256:", "\x00", "\xff", "é", "\"", "a", "42", "0", "::", "%",
	}
	var text strings.Builder
	for range random.IntN(7) {
		text.WriteString(pieces[random.IntN(len(pieces))])
	}
	return text.String()
}
