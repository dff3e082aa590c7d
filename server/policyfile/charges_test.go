package policyfile_test

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

const routes = `
policies:
  api: {capacity: 100, refill: 10, every: 1s}
  exports: {capacity: 10, refill: 10, every: 1h}
http:
  trusted_proxies: 1
  routes:
    /: {api: {key: all}}
    GET /items/{id}: {api: {key: user}, exports: {key: "path:id", cost: 0}}
    POST /exports: {api: {key: user, cost: 50}, exports: {key: "header:x-tenant"}}
    /files/{path...}: {api: {key: "path:path", cost: 2}}
    /tree/: {api: {key: ip, cost: 3}}
    tenant.example/: {api: {key: "header:Host", cost: 4}}
`

// chargesOf are those that a file says, for users in the header User.
func chargesOf(t testing.TB, text string) func(*http.Request) []client.Charge {
	rules := kit.NoError(parse(t, text).Rules(""))(t)
	return kit.NoError(rules.HTTP.Charges(func(r *http.Request) string { return r.Header.Get("User") }))(t)
}

// read reads a request as a server does, or returns nil.
func read(text string) *http.Request {
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text + "\r\n\r\n")))
	if err != nil {
		return nil
	}
	r.RemoteAddr = "192.0.2.9:4711"
	return r
}

func TestCharges(t *testing.T) {
	t.Parallel()
	charges := chargesOf(t, routes)
	one := func(policy, key string, cost int64) []client.Charge {
		return []client.Charge{{Policy: policy, Key: key, Cost: client.Cost(cost)}}
	}
	item := func(user, id string) []client.Charge { return append(one("api", user, 1), one("exports", id, 0)...) }
	export := func(tenant string) []client.Charge {
		return append(one("api", "user:ann", 50), one("exports", tenant, 1)...)
	}
	long := strings.Repeat("a", 600)
	const host = " HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 198.51.100.7, 203.0.113.1\r\nUser: ann"
	for request, want := range map[string][]client.Charge{
		"GET /" + host:                                      one("api", "all", 1),
		"GET /items/5" + host:                               item("user:ann", "path:id=5"),
		"HEAD /items/5?id=6" + host:                         item("user:ann", "path:id=5"),
		"GET //items/./x/../5" + host:                       item("user:ann", "path:id=5"),
		"GET /items/a%2Fb" + host:                           item("user:ann", "path:id=a/b"),
		"GET /it%65ms/5" + host:                             item("user:ann", "path:id=5"),
		"GET http://x/items/5" + host:                       item("user:ann", "path:id=5"),
		"GET /items/5 HTTP/1.1\r\nHost: x":                  item("ip:192.0.2.9", "path:id=5"),
		"POST /items/5" + host:                              one("api", "all", 1),
		"GET /items/" + host:                                one("api", "all", 1),
		"POST /exports" + host:                              export("ip:203.0.113.1"),
		"POST /exports" + host + "\r\nX-Tenant: a":          export("header:x-tenant=a"),
		"POST /exports" + host + "\r\nX-TENANT: ip:1.2.3.4": export("header:x-tenant=ip:1.2.3.4"),
		"POST /exports" + host + "\r\nX-Tenant: mine\r\nX-Tenant: the proxy's": export("header:x-tenant=the proxy's"),
		"POST /exports" + host + "\r\nX-Tenant: " + long:                       export(fmt.Sprintf("header-sha256:%x", sha256.Sum256([]byte("x-tenant="+long)))),
		"GET /files/a/b" + host:                      one("api", "path:path=a/b", 2),
		"GET /files/" + host:                         one("api", "ip:203.0.113.1", 2),
		"GET /tree" + host:                           one("api", "ip:203.0.113.1", 3),
		"GET /tree/x" + host:                         one("api", "ip:203.0.113.1", 3),
		"GET /x HTTP/1.1\r\nHost: tenant.example:80": one("api", "header:Host=tenant.example:80", 4),
		"OPTIONS *" + host:                           one("api", "all", 1),
	} {
		r := read(request)
		require.NotNil(t, r, "%q", request)
		r.Pattern = "GET /items/{id}" // of a mux that is around
		r.SetPathValue("id", "of a mux that is around")
		require.ElementsMatch(t, want, charges(r), "%q", request)
		require.Equal(t, "of a mux that is around", r.PathValue("id"))
	}
	require.Empty(t, chargesOf(t, `{policies: {api: {capacity: 1, refill: 1, every: 1s}}, http: {routes: {POST /: {api: {key: ip}}}}}`)(read("GET /"+host)))
}

func TestCharges_WithoutUsers(t *testing.T) {
	t.Parallel()
	key := func(from policyfile.KeySource) policyfile.HTTP {
		return policyfile.HTTP{Routes: []policyfile.Route{{Pattern: "/", Charges: []policyfile.Charge{
			{Policy: "api", Key: policyfile.Key{From: from}, At: policyfile.Position{File: "f", Line: 3, Column: 5}},
		}}}}
	}
	require.NoError(t, kit.ErrorOf(key(policyfile.IP).Charges(nil)))
	_, err := key(policyfile.User).Charges(nil)
	require.EqualError(t, err, "f:3:5: the key is user, and nothing tells who that is")
	wrong := policyfile.HTTP{Routes: []policyfile.Route{{Pattern: "/{"}}}
	_, err = wrong.Charges(nil)
	require.Error(t, err)
}

// FuzzCharges sends requests to a mux with the patterns of the routes. The handler that answers, perhaps after redirects, is that
// of the route by which they are charged, and each key is one.
func FuzzCharges(f *testing.F) {
	for _, target := range []string{"/items/5", "//items/5/", "/items/%2e%2e/exports", "/files/a//b/", "/tree", "http://tenant.example/x", "/files/../tree", "*", "/items/%00", "/%69tems/\xff"} {
		f.Add("GET", target, "x", "a")
	}
	f.Add("POST", "/exports", "tenant.example", "\x00")
	f.Add("CONNECT", "/tree", "x", "")
	charges := chargesOf(f, routes)
	first := map[string]int64{"/": 1, "GET /items/{id}": 1, "POST /exports": 50, "/files/{path...}": 2, "/tree/": 3, "tenant.example/": 4}
	served := ""
	mux := http.NewServeMux()
	for pattern := range first {
		mux.HandleFunc(pattern, func(_ http.ResponseWriter, r *http.Request) { served = r.Pattern })
	}
	f.Fuzz(func(t *testing.T, method, target, host, tenant string) {
		r := read(method + " " + target + " HTTP/1.1\r\nHost: " + host + "\r\nX-Tenant: " + tenant)
		if r == nil {
			return
		}
		got := charges(r)
		for _, c := range got {
			if len(c.Key) == 0 || len(c.Key) > 512 || !utf8.ValidString(c.Key) || strings.Contains(c.Key, "\x00") {
				t.Fatalf("%q", c.Key)
			}
		}
		if method == http.MethodConnect || strings.Contains(target, "%") {
			return // whose paths a mux does not clean, or redirects to what is escaped twice
		}
		served = ""
		for redirects := 0; redirects < 3; redirects++ {
			w := httptest.NewRecorder()
			mux.ServeHTTP(w, r)
			location := w.Header().Get("Location")
			if location == "" {
				break
			}
			url, err := r.URL.Parse(location)
			if err != nil {
				return
			}
			r.URL = url
		}
		if served == "" {
			return
		}
		for _, c := range got {
			if c.Cost == client.Cost(first[served]) && c.Policy == "api" {
				return
			}
		}
		t.Fatalf("%s %q of host %q is served by %s, and charged %v", method, target, host, served, got)
	})
}
