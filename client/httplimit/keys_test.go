package httplimit_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
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
