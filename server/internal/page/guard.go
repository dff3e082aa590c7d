package page

import (
	"net/http"

	"github.com/pgratelimit/pgratelimit/server/internal/auth"
)

// Guard lets only those requests through that have one of the tokens.
//
// Where none is needed, it lets those through that name the server by an address, or localhost. The page of another site can
// have its name lead to an address of ours, and would then be let read this one as its own.
func Guard(tokens auth.Tokens, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !tokens.AdmitBrowser(r):
			w.Header().Add("WWW-Authenticate", `Basic realm="pgratelimit", charset="UTF-8"`)
			w.Header().Add("WWW-Authenticate", "Bearer")
			http.Error(w, "This page needs a token: give one as the password, with any user name.", http.StatusUnauthorized)
		case tokens.IsOpen() && !auth.IsAddress(r.Host):
			http.Error(w, "Without TOKENS this page is shown at localhost or at an address, and not under a name.", http.StatusForbidden)
		default:
			next.ServeHTTP(w, r)
		}
	})
}
