package jsonapi

import (
	"net/http"

	"github.com/pgratelimit/pgratelimit/server/internal/auth"
)

// Guard lets only those requests through that have one of the tokens.
func Guard(tokens auth.Tokens, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !tokens.Admit(r.Header.Values("Authorization")) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			Problem{Title: "no token that the server knows", Status: http.StatusUnauthorized, Detail: "Send the header Authorization: Bearer …"}.Write(w)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// UnderNoName lets only those requests through that name the server by an address, or localhost. A page of another site can have
// the site's name lead to this machine: to the browser its requests are then of one site, and they could block every bucket.
func UnderNoName(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host != "" && !auth.IsAddress(r.Host) { // a browser's has one
			Problem{Title: "the server is asked under a name", Status: http.StatusForbidden,
				Detail: "Without TOKENS a server of this machine answers at localhost or at an address only."}.Write(w)
			return
		}
		next.ServeHTTP(w, r)
	})
}
