package policyfile

import (
	"fmt"
	"net/http"
	"strings"
)

// HTTP says what requests are charged.
type HTTP struct {
	// TrustedProxies is how many proxies every request passes, for keys from [IP].
	TrustedProxies int

	Routes []Route
}

// A Route is what requests of one pattern are charged: all of it, or they are refused.
type Route struct {
	// Pattern is one of [http.ServeMux]. Patterns of a file do not conflict.
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

// A Key says where the key of the bucket comes from.
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

// checkPattern adds a route to the mux, which knows what a pattern is and which of them conflict.
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

// handle returns what the mux has against a pattern.
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
	r.checkPolicy(f.at, f.name)
	isObject := r.object(f, "a charge",
		known{"cost", func(f field) { c.Cost = r.whole(f, maxTokens) }},
		known{"key", func(f field) { c.Key = r.key(f, pattern) }},
	)
	if isObject {
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
		if !isToken(name) {
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

// isToken tells whether a text can be the name of a header.
func isToken(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(c rune) bool {
		return c <= ' ' || c >= 0x7f || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, c)
	})
}
