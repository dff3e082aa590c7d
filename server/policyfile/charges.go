package policyfile

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

// Charges returns the function with which [httplimit.New] charges requests as the routes say. User tells who is asking, as for
// [httplimit.ByUser]; it may be nil if no route has the key user.
//
// A request is charged by the route that [http.ServeMux] would choose, and by none if there is none. /a//b and /a/../a/b are
// charged by the route of /a/b, and /a by that of /a/ if it has none of its own: a mux redirects them, and another router may
// serve them.
//
// Where a request has no user, header or wildcard of the name, its key is the client's address.
func (h HTTP) Charges(user func(*http.Request) string) (func(*http.Request) []client.Charge, error) {
	c := &charger{mux: http.NewServeMux(), routes: make(map[string][]charge, len(h.Routes)), user: user, ip: httplimit.ByIP(h.TrustedProxies)}
	for _, route := range h.Routes {
		if complaint := handle(c.mux, route.Pattern); complaint != "" {
			return nil, errors.New(complaint)
		}
		for _, of := range route.Charges {
			if of.Key.From == User && user == nil {
				return nil, fmt.Errorf("%v: the key is user, and nothing tells who that is", of.At)
			}
			c.routes[route.Pattern] = append(c.routes[route.Pattern], charge{of.Policy, client.Cost(of.Cost), of.Key})
		}
	}
	return c.charges, nil
}

// A charger charges requests by the patterns of a mux whose handlers do nothing.
type charger struct {
	mux    *http.ServeMux
	routes map[string][]charge // by pattern
	user   func(*http.Request) string
	ip     httplimit.Key
}

type charge struct {
	policy string
	cost   client.CostOption
	key    Key
}

func (c *charger) charges(r *http.Request) []client.Charge {
	matched := c.match(r)
	list := make([]client.Charge, len(c.routes[matched.Pattern]))
	for i, charge := range c.routes[matched.Pattern] {
		list[i] = client.Charge{Policy: charge.policy, Key: c.key(charge.key, r, matched), Cost: charge.cost}
	}
	return list
}

// match returns a request with the pattern and the wildcards of the route of r, which keeps its own of another mux.
func (c *charger) match(r *http.Request) *http.Request {
	escaped := clean(r.URL.EscapedPath())
	matched, isRedirected := c.route(r, escaped)
	if isRedirected {
		matched, _ = c.route(r, escaped+"/")
	}
	return matched
}

func (c *charger) route(r *http.Request, escaped string) (matched *http.Request, isRedirected bool) {
	unescaped, err := url.PathUnescape(escaped)
	if err != nil {
		unescaped = escaped // which no server would have read
	}
	matched = &http.Request{Method: r.Method, Host: r.Host, URL: &url.URL{Host: r.URL.Host, Path: unescaped, RawPath: escaped}}
	w := &statusOnly{header: make(http.Header)}
	c.mux.ServeHTTP(w, matched)
	return matched, 300 <= w.status && w.status < 400
}

// clean returns a path as a mux redirects to it.
func clean(escaped string) string {
	cleaned := path.Clean("/" + escaped)
	if strings.HasSuffix(escaped, "/") && cleaned != "/" {
		cleaned += "/"
	}
	return cleaned
}

// A statusOnly is an answer that nobody reads.
type statusOnly struct {
	header http.Header
	status int
}

func (w *statusOnly) Header() http.Header         { return w.header }
func (w *statusOnly) Write(p []byte) (int, error) { return len(p), nil }
func (w *statusOnly) WriteHeader(status int)      { w.status = status }

// key names the bucket. No two sources have a key in common, whatever a client sends.
func (c *charger) key(k Key, r, matched *http.Request) string {
	value := ""
	switch k.From {
	case All:
		return "all"
	case User:
		return httplimit.ByUser(c.user, c.ip)(r)
	case Header:
		value = header(r, k.Name)
	case Path:
		value = matched.PathValue(k.Name)
	}
	if value == "" {
		return c.ip(r)
	}
	return httplimit.Named(string(k.From), k.Name+"="+value)
}

// header returns the last line of a header: what a proxy adds comes after what the client has sent.
func header(r *http.Request, name string) string {
	if strings.EqualFold(name, "Host") { // which is no header any more
		return r.Host
	}
	lines := r.Header.Values(name)
	if len(lines) == 0 {
		return ""
	}
	return lines[len(lines)-1]
}
