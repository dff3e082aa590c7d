package jsonapi

import (
	"net/http"

	"github.com/pgratelimit/pgratelimit/server/internal/auth"
)

// Guard lets only those requests through that have one of the tokens.
func Guard(tokens auth.Tokens, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !tokens.Admit(r.Header.Get("Authorization")) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			Problem{Title: "no token that the server knows", Status: http.StatusUnauthorized, Detail: "Send the header Authorization: Bearer …"}.Write(w)
			return
		}
		next.ServeHTTP(w, r)
	})
}
