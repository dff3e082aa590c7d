package httplimit_test

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"
	"testing"

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

// A hash is of its kind, too: one text of two kinds has two keys.
func TestNamed_KeepsTheKindOfAHash(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a", 600)
	require.Equal(t, fmt.Sprintf("org-sha256:%x", sha256.Sum256([]byte(long))), httplimit.Named("org", long))
	require.Equal(t, fmt.Sprintf("team-sha256:%x", sha256.Sum256([]byte("\xff"))), httplimit.Named("team", "\xff"))
}
