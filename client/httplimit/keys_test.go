package httplimit_test

import (
	"encoding/json"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

func from(remote string, forwarded ...string) *http.Request {
	return &http.Request{Method: http.MethodGet, RemoteAddr: remote, Header: http.Header{"X-Forwarded-For": forwarded}}
}

// Each client has the same key for an address: tests/vectors.
func TestByIP(t *testing.T) {
	t.Parallel()
	var vectors []struct {
		Peer      string
		Forwarded []string
		Proxies   int
		Key       string
	}
	require.NoError(t, json.Unmarshal(noError(os.ReadFile("../../tests/vectors/addresses.json"))(t), &vectors))
	for _, v := range vectors {
		remote := "@" // a socket of the machine
		if v.Peer != "" {
			remote = net.JoinHostPort(v.Peer, "4711")
		}
		require.Equal(t, v.Key, httplimit.ByIP(v.Proxies)(from(remote, v.Forwarded...)), "%+v", v)
	}
}

// The network of an IPv6 address has the bits that the program chose, of an IPv4 address none are cut.
func TestByNetwork(t *testing.T) {
	t.Parallel()
	for bits, want := range map[int]string{
		1: "ip:8000::/1", 32: "ip:fe80:db8::/32", 48: "ip:fe80:db8:a::/48", 56: "ip:fe80:db8:a:ff00::/56",
		64: "ip:fe80:db8:a:fffe::/64", 127: "ip:fe80:db8:a:fffe::6/127", 128: "ip:fe80:db8:a:fffe::7/128",
	} {
		key := httplimit.ByNetwork(1, bits)
		require.Equal(t, want, key(from("192.0.2.1:80", "[fe80:db8:a:fffe::7]:80")))
		require.Equal(t, want, key(from("[fe80:db8:a:fffe::7%eth0]:80")))
		require.Equal(t, "ip:192.0.2.1", key(from("[::ffff:192.0.2.1]:80")))
		require.Equal(t, "ip:unknown", key(from("@")))
	}
	same := from("[2001:db8::1]:80")
	require.Equal(t, httplimit.ByIP(0)(same), httplimit.ByNetwork(0, 64)(same))
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
