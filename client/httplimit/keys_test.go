package httplimit_test

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

func from(remote string, forwarded ...string) *http.Request {
	return &http.Request{Method: http.MethodGet, RemoteAddr: remote, Header: http.Header{"X-Forwarded-For": forwarded}}
}

func TestByIP(t *testing.T) {
	t.Parallel()
	const peer = "192.0.2.9:4711"
	for name, test := range map[string]struct {
		proxies int
		request *http.Request
		want    string
	}{
		"no proxy":                      {0, from(peer), "ip:192.0.2.9"},
		"no proxy, and a liar":          {0, from(peer, "203.0.113.1"), "ip:192.0.2.9"},
		"IPv6 by its /64":               {0, from("[2001:db8:1:2:3:4:5:6]:80"), "ip:2001:db8:1:2::/64"},
		"IPv6 with a zone":              {0, from("[fe80::1%eth0]:80"), "ip:fe80::/64"},
		"IPv4 as IPv6":                  {0, from("[::ffff:192.0.2.9]:80"), "ip:192.0.2.9"},
		"a socket of the machine":       {0, from("@"), "ip:unknown"},
		"one proxy":                     {1, from(peer, "203.0.113.1"), "ip:203.0.113.1"},
		"one proxy, and a liar":         {1, from(peer, "198.51.100.1, 203.0.113.1"), "ip:203.0.113.1"},
		"one proxy, a line of its own":  {1, from(peer, "198.51.100.1", "203.0.113.1"), "ip:203.0.113.1"},
		"two proxies":                   {2, from(peer, "198.51.100.1, 203.0.113.1,192.0.2.1"), "ip:203.0.113.1"},
		"two proxies, in two lines":     {2, from(peer, "198.51.100.1,\t203.0.113.1 ", "192.0.2.1"), "ip:203.0.113.1"},
		"two proxies, one of them past": {2, from(peer, "203.0.113.1"), "ip:192.0.2.9"},
		"past all proxies":              {1, from(peer), "ip:192.0.2.9"},
		"an empty line":                 {1, from(peer, ""), "ip:192.0.2.9"},
		"no address":                    {1, from(peer, "203.0.113.1, unknown"), "ip:192.0.2.9"},
		"with a port":                   {1, from(peer, "203.0.113.1:1234"), "ip:203.0.113.1"},
		"IPv6 with a port":              {1, from(peer, "[2001:db8::1]:1234"), "ip:2001:db8::/64"},
		"IPv6 in brackets":              {1, from(peer, "[2001:db8::1]"), "ip:2001:db8::/64"},
		"IPv6 bare":                     {1, from(peer, "2001:db8::1"), "ip:2001:db8::/64"},
	} {
		require.Equal(t, test.want, httplimit.ByIP(test.proxies)(test.request), name)
	}
}

func TestByUser(t *testing.T) {
	t.Parallel()
	key := httplimit.ByUser(func(r *http.Request) string { return r.Header.Get("Who") }, httplimit.ByIP(0))
	for name, want := range map[string]string{
		"":                       "ip:192.0.2.1",
		"42":                     "user:42",
		"ip:192.0.2.1":           "user:ip:192.0.2.1",
		"sha256:ab":              "user:sha256:ab",
		strings.Repeat("a", 507): "user:" + strings.Repeat("a", 507),
		strings.Repeat("a", 508): "user-sha256:f93f35cc413fbd7a7bc53ce4e81776e9bdc5e9cfbb509b3fbfb6aa59687a1124",
		"\xff":                   "user-sha256:a8100ae6aa1940d0b663bb31cd466142ebbdbd5187131b92d93818987832eb89",
	} {
		r := from("192.0.2.1:80")
		r.Header.Set("Who", name)
		require.Equal(t, want, key(r))
	}
}

// isKey is what the functions in PostgreSQL take for a key.
func isKey(key string) bool {
	return 1 <= len(key) && len(key) <= 512 && utf8.ValidString(key) && !strings.Contains(key, "\x00")
}

// A hash is of its kind, too: one text of two kinds has two keys.
func TestNamed_KeepsTheKindOfAHash(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a", 600)
	require.Equal(t, fmt.Sprintf("org-sha256:%x", sha256.Sum256([]byte(long))), httplimit.Named("org", long))
	require.Equal(t, fmt.Sprintf("team-sha256:%x", sha256.Sum256([]byte("\xff"))), httplimit.Named("team", "\xff"))
}

// Whatever a client writes before what the trusted proxies add changes nothing, and each key is one. go test
// ./client/httplimit -fuzz FuzzByIP looks for more.
func FuzzByIP(f *testing.F) {
	f.Add(uint8(1), "198.51.100.1", "", "203.0.113.1", "192.0.2.9:80", false)
	f.Add(uint8(2), "", ",,", "2001:db8::1", "[::1]:80", true)
	f.Add(uint8(0), "a, b\x00", "\xff", "[2001:db8::1%zone]:1", "@", true)
	f.Add(uint8(3), `"for=_hidden"`, "10.0.0.1:", "1.2.3.4:5:6", "", false)
	f.Fuzz(func(t *testing.T, proxies uint8, line, beginning, address, remote string, ownLine bool) {
		n := int(proxies % 5)
		key := httplimit.ByIP(n)
		if strings.Contains(address, ",") {
			t.Skip("it is two")
		}
		address = strings.Trim(address, " \t")
		// What the proxies add: the client's address, and those of all proxies but the last.
		added := address + strings.Repeat(", 10.0.0.1", max(0, n-1))
		honest := from(remote, added)
		want := key(honest)
		if !isKey(want) || !strings.HasPrefix(want, "ip:") {
			t.Fatalf("%q", want)
		}
		if direct := httplimit.ByIP(0)(from(address)); n > 0 && direct != "ip:unknown" && want != direct {
			t.Fatalf("%q for the address %q", want, address)
		}
		lying := from(remote, line, beginning+","+added)
		if ownLine {
			lying = from(remote, line, beginning, added)
		}
		if got := key(lying); n > 0 && got != want {
			t.Fatalf("%q, and without what the client wrote it is %q", got, want)
		}
		if got := key(from(remote)); n == 0 && got != want {
			t.Fatalf("%q, and without any header it is %q", want, got)
		}
	})
}

// Two users have two keys, no user has the key of an address, and each key is one.
func FuzzByUser(f *testing.F) {
	long := strings.Repeat("a", 600)
	f.Add("42", "43")
	f.Add(long, long+"a")
	f.Add(long, fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(long))))
	f.Add("\xff", "\xfe")
	f.Add("a\x00", "a")
	f.Add("ip:192.0.2.1", "sha256:")
	f.Fuzz(func(t *testing.T, a, b string) {
		keyOf := func(name string) string {
			return httplimit.ByUser(func(*http.Request) string { return name }, httplimit.ByIP(0))(from("192.0.2.1:1"))
		}
		keyA, keyB := keyOf(a), keyOf(b)
		if !isKey(keyA) || !isKey(keyB) {
			t.Fatalf("%q %q", keyA, keyB)
		}
		if (a == b) != (keyA == keyB) {
			t.Fatalf("%q and %q have the keys %q and %q", a, b, keyA, keyB)
		}
		if (a == "") != strings.HasPrefix(keyA, "ip:") {
			t.Fatalf("%q has the key %q", a, keyA)
		}
	})
}
