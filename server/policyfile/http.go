package policyfile

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

// HTTP has the charges of HTTP requests.
type HTTP struct {
	// TrustedProxies is the number of proxies that every request passes, for keys from [IP].
	TrustedProxies int

	Routes []Route
}

// A Route has the charges for requests of one pattern. A request is granted all of them, or denied.
type Route struct {
	// Pattern is a pattern of [http.ServeMux]. Patterns of a file do not conflict.
	Pattern string
	Charges []Charge
	At      Position
}

// A Charge is what a request asks of one bucket.
type Charge struct {
	Policy string
	Cost   int64
	Key    Key
	At     Position
}

// A Key is the source of the bucket's key.
type Key struct {
	From KeySource
	Name string // of a header or a wildcard
}

// A KeySource is the kind of a [Key].
type KeySource string

// The sources of a key.
const (
	All    KeySource = "all"    // one bucket for all requests
	IP     KeySource = "ip"     // the client's address
	User   KeySource = "user"   // who the program says is asking
	Header KeySource = "header" // a header of the request, written header:NAME
	Path   KeySource = "path"   // a wildcard of the pattern, written path:NAME
)

// String writes the key as a file does.
func (k Key) String() string {
	if k.Name == "" {
		return string(k.From)
	}
	return string(k.From) + ":" + k.Name
}

const (
	maxProxies = 100
	maxRoutes  = 1000
)

func (r *reader) http(f field) (h HTTP) {
	r.object(f, "http",
		known{"trusted_proxies", func(f field) { h.TrustedProxies = int(r.whole(f, maxProxies)) }},
		known{"routes", func(f field) { h.Routes = r.routes(f) }},
	)
	return h
}

func (r *reader) routes(f field) (routes []Route) {
	mux := http.NewServeMux()
	r.each(f, `patterns such as "POST /orders", and below each the policies that it is charged to`, func(f field) {
		if len(routes) == maxRoutes {
			r.add(f.at, "there are more than %d routes: write fewer, with wildcards", maxRoutes)
		}
		if len(routes) >= maxRoutes {
			return
		}
		route := Route{Pattern: f.name, At: f.at}
		r.checkPattern(mux, route, routes)
		remedy := "the name of a policy, and below it key and cost"
		r.each(f, remedy, func(f field) {
			route.Charges = append(route.Charges, r.charge(f, route.Pattern))
		})
		if f.value.kind == mapping && len(f.value.fields) == 0 {
			r.add(f.at, "route %s charges nothing: write %s, or remove it", quote(f.name), remedy)
		}
		routes = append(routes, route)
	})
	return routes
}

// checkPattern adds a route to the mux, which rejects wrong and conflicting patterns.
func (r *reader) checkPattern(mux *http.ServeMux, route Route, before []Route) {
	complaint := handle(mux, route.Pattern)
	if complaint == "" {
		return
	}
	for _, other := range before {
		if strings.Contains(complaint, fmt.Sprintf("conflicts with pattern %q", other.Pattern)) {
			r.add(route.At, "%s conflicts with %s at %d:%d: some requests match both, and neither pattern is the more specific: change one",
				quote(route.Pattern), quote(other.Pattern), other.At.Line, other.At.Column)
			return
		}
	}
	complaint = strings.TrimPrefix(complaint, fmt.Sprintf("parsing %q: ", route.Pattern))
	r.add(route.At, "%s is no pattern of net/http (%s): write one such as POST /orders/{id}", quote(route.Pattern), shorten(complaint))
}

// handle returns the mux's panic about a pattern, or nothing.
func handle(mux *http.ServeMux, pattern string) (complaint string) {
	defer func() {
		if problem := recover(); problem != nil {
			complaint = fmt.Sprint(problem)
		}
	}()
	mux.Handle(pattern, http.NotFoundHandler())
	return ""
}

func (r *reader) charge(f field, pattern string) Charge {
	c := Charge{Policy: f.name, Cost: 1, At: f.at}
	r.checkTokens(f.at, f.name)
	if r.object(f, "a charge",
		known{"cost", func(f field) { c.Cost = r.whole(f, maxTokens) }},
		known{"key", func(f field) { c.Key = r.key(f, pattern) }}) {
		r.need(f, "the charge to "+quote(f.name), "key: ip")
	}
	return c
}

func (r *reader) key(f field, pattern string) Key {
	const remedy = "ip, user, all, header:NAME or path:NAME"
	written := r.text(f, remedy)
	if written == "" {
		if f.value.kind == text {
			r.wrong(f, remedy)
		}
		return Key{}
	}
	source, name, named := strings.Cut(written, ":")
	key := Key{From: KeySource(source), Name: name}
	switch key.From {
	case All, IP, User:
		if named {
			r.wrong(f, source)
		}
	case Header:
		if !httpguts.ValidHeaderFieldName(name) {
			r.wrong(f, "header: and the name of one, such as header:X-Tenant")
		}
	case Path:
		if !strings.Contains(pattern, "{"+name+"}") && !strings.Contains(pattern, "{"+name+"...}") || name == "" || name == "$" {
			r.add(f.value.at, "the pattern %s has no wildcard {%s}: write path: and the name of one that it has", quote(pattern), shorten(name))
		}
	default:
		r.wrong(f, remedy)
	}
	return key
}

// Charges returns the function with which [httplimit.New] charges requests by the routes. User returns the user of a request, as
// for [httplimit.ByUser]; it may be nil if no route has the key user.
//
// A request is charged by the route that [http.ServeMux] chooses, if any. /a//b and /a/../a/b are charged by the route of /a/b, and
// /a by the route of /a/ if it has none of its own: a mux redirects them, and another router may serve them.
//
// Without a user, header or wildcard of the name, the key of a request is the client's address.
func (h HTTP) Charges(user func(*http.Request) string) (func(*http.Request) []client.Charge, error) {
	c := &charger{mux: http.NewServeMux(), routes: make(map[string][]Charge, len(h.Routes)), user: user, ip: httplimit.ByIP(h.TrustedProxies)}
	for _, route := range h.Routes {
		if complaint := handle(c.mux, route.Pattern); complaint != "" {
			return nil, errors.New(complaint)
		}
		for _, of := range route.Charges {
			if of.Key.From == User && user == nil {
				return nil, fmt.Errorf("%v: the key is user, and nothing tells who that is", of.At)
			}
		}
		c.routes[route.Pattern] = route.Charges
	}
	return c.charges, nil
}

// A charger finds the routes of requests with a mux whose handlers do nothing.
type charger struct {
	mux    *http.ServeMux
	routes map[string][]Charge // by pattern
	user   func(*http.Request) string
	ip     httplimit.Key
}

func (c *charger) charges(r *http.Request) []client.Charge {
	matched := c.match(r)
	list := make([]client.Charge, len(c.routes[matched.Pattern]))
	for i, charge := range c.routes[matched.Pattern] {
		list[i] = client.Charge{Policy: charge.Policy, Key: c.key(charge.Key, r, matched), Cost: client.Cost(charge.Cost)}
	}
	return list
}

// match returns a copy of r with the pattern and the wildcards of its route. r may have those of another mux.
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

// A statusOnly is a ResponseWriter that keeps the status.
type statusOnly struct {
	header http.Header
	status int
}

func (w *statusOnly) Header() http.Header         { return w.header }
func (w *statusOnly) Write(p []byte) (int, error) { return len(p), nil }
func (w *statusOnly) WriteHeader(status int)      { w.status = status }

// key returns the key of the bucket. Keys of different sources differ, whatever a client sends.
func (c *charger) key(k Key, r, matched *http.Request) string {
	var value string
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

// header returns the last line of a header, because proxies append theirs.
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
