package torture

import (
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// The key functions of the middleware, by more requests than the fuzzers beside them see: what a client writes before what the trusted
// proxies add changes nothing, two users have two keys, no user has the key of an address, and each key is one that the database takes.
func TestTorture_HTTPKeys(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 5)
	random := rand.New(rand.NewPCG(kit.TestSeed(t), 0))

	users := map[string]string{} // by their keys
	last := ""
	inputs := 0
	for ; run.GoesOn(); run.Progress("%d requests", inputs) {
		for range 10_000 {
			inputs += 2
			checkAddressKey(t, random)
			last = checkUserKey(t, random, users, last)
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
	direct := httplimit.ByIP(0)(&http.Request{RemoteAddr: address})
	if proxies > 0 && direct != "ip:unknown" {
		require.Equal(t, direct, want, "%d proxies, %q", proxies, added)
	}
	lying := request(randomText(random), randomText(random)+","+added)
	if random.IntN(2) == 0 {
		lying = request(randomText(random), randomText(random), added)
	}
	if got := key(lying); got != want {
		t.Fatalf("with %d proxies %q has the key %q, and without what the client wrote %q", proxies, lying.Header, got, want)
	}
}

// checkUserKey returns the key. The last one is what some users would like to have.
func checkUserKey(t *testing.T, random *rand.Rand, users map[string]string, last string) (key string) {
	name := randomText(random)
	switch random.IntN(50) {
	case 0:
		name = strings.Repeat("a", 500+random.IntN(20))
	case 1, 2, 3:
		name = strings.TrimPrefix(last, "user:")
	}
	key = httplimit.ByUser(func(*http.Request) string { return name }, httplimit.ByIP(0))(&http.Request{RemoteAddr: "192.0.2.9:4711"})
	if !isKeyOf("", key) || strings.HasPrefix(key, "ip:") != (name == "") {
		t.Fatalf("%q has the key %q", name, key)
	}
	if other, ok := users[key]; ok && other != name {
		t.Fatalf("%q and %q have the key %q", name, other, key)
	}
	users[key] = name
	return key
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
